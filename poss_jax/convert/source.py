"""A PyTorch checkpoint, in a folder or on the Hub, as a table of tensors read on demand."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from poss_jax.checkpoint import (
    SUMS_FILE,
    TOKENIZER_FILES,
    check_file,
    read_sums,
    torch_io,
)
from poss_jax.config import UserError, check_own_file, parse_object, read_json
from poss_jax.convert.hub import check_blob, fetch_headers, fetch_snapshot

# What is fetched from the Hub: configs, tokenizer, and weights (.bin only without safetensors).
# Weights by their usual names: some repositories hold a second copy under another.
_SMALL_PATTERNS = ("*.json", "*.model", "*.txt", "*.jinja", SUMS_FILE)
_PATTERNS = (*_SMALL_PATTERNS, "model*.safetensors")
_BIN_PATTERN = "pytorch_model*.bin"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")

# In the order of preference.
_WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")

_SMALL_FILES = ("config.json", *TOKENIZER_FILES)

_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True)
class Source:
    """Where a checkpoint came from.

    Attributes:
      name: Hub id, or the name of the folder.
      revision: commit on the Hub; None for a folder.
      folder: where its files are.
    """

    name: str
    revision: str | None
    folder: Path


@dataclass(frozen=True)
class LazyTensor:
    """A tensor of a checkpoint that has not been read yet.

    Attributes:
      file: that holds it.
      shape: as the file says.
      dtype: NumPy's name, or the file's own for types outside of float32, float16 and bfloat16.
      read: gives the array.
    """

    file: Path
    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], np.ndarray]


def open_source(source: str, revision: str | None = None, *, weights: bool = True) -> Source:
    """Finds a checkpoint's folder, downloading it if it is a Hub id.

    Config and tokenizer are compared with SHA256SUMS or the Hub's checksums, where there are any;
    they must not be links that lead out of the folder.

    Args:
      source: an existing folder, or a Hub id such as `owner/name`.
      revision: branch, tag or commit on the Hub.
      weights: download them too.

    Raises:
      UserError: neither a folder nor a Hub id, a folder with a revision, a model folder, the Hub
        does not give it, or a damaged file.
    """
    folder = Path(source)
    if folder.is_dir():
        _refuse_folder(folder, revision)
        _verify(folder, _SMALL_FILES)
        return Source(folder.resolve().name, None, folder)
    if folder.is_file():
        raise UserError(f"source {source} is a file; give the folder it is in, with config.json")
    if not _HUB_ID.fullmatch(source) or source.startswith("."):
        raise UserError(f"source {source} does not exist; give a folder or a Hub id (owner/name)")
    if not weights:
        snapshot = fetch_snapshot(source, revision, _SMALL_PATTERNS)
        return Source(source, snapshot.name, snapshot)
    snapshot = fetch_snapshot(source, revision, _PATTERNS)
    found = _find_weights(snapshot)
    if found is None or found.name.startswith(_WEIGHT_FILES[1]):  # its index may be there
        snapshot = fetch_snapshot(source, revision, (*_PATTERNS, _BIN_PATTERN))
    _verify(snapshot, _SMALL_FILES)
    return Source(source, snapshot.name, snapshot)


def _refuse_folder(folder: Path, revision: str | None) -> None:
    if revision is not None:
        raise UserError(
            f"source {folder} is a folder, which has no revision {revision}; leave it out, or give "
            "a Hub id that is no folder here"
        )
    if (folder / "model.json").is_file():
        raise UserError(
            f"source {folder} is a model folder of poss_jax already; use it as it is, or give a "
            "PyTorch checkpoint"
        )


def list_tensors(source: Source) -> dict[str, LazyTensor]:
    """Lists the tensors of a source that was opened without its weights.

    On the Hub only the headers of safetensors files are fetched; .bin files have none, so they are
    downloaded.

    Raises:
      UserError: as `open_tensors` and `fetch_headers`.
    """
    if source.revision is None:
        return open_tensors(source.folder, verify=False)
    headers = fetch_headers(source.name, source.revision)
    if headers is None:
        whole = open_source(source.name, source.revision)
        return open_tensors(whole.folder, verify=False)
    return {
        key: LazyTensor(source.folder / file, shape, _DTYPES.get(dtype, dtype), _not_fetched)
        for key, (file, shape, dtype) in headers.items()
    }


def open_tensors(folder: Path, *, verify: bool = True) -> dict[str, LazyTensor]:
    """Lists the tensors of a folder: safetensors or else .bin, a single file or shards.

    Args:
      folder: of the checkpoint.
      verify: compare them with SHA256SUMS or the Hub's checksums first, where there are any.

    Raises:
      UserError: no weights, a missing or damaged file, a link that leads out of the folder, or an
        index that does not match its shards.
    """
    weights = _find_weights(folder)
    if weights is None:
        wanted = " or ".join(_WEIGHT_FILES)
        raise UserError(f"{folder} holds no weights; want {wanted}, or their .index.json")
    check_own_file(weights)
    shards = _read_index(weights) if weights.suffix == ".json" else {}
    files = sorted(set(shards.values())) or [weights.name]
    for name in files:
        check_own_file(folder / name)
    if verify:
        _verify(folder, dict.fromkeys([weights.name, *files]))
    tensors = _read_files(folder / name for name in files)
    if shards:
        _check_index(weights, shards, tensors)
    return tensors


def _check_index(index: Path, shards: Mapping[str, str], tensors: Mapping[str, LazyTensor]) -> None:
    found = {key: tensor.file.name for key, tensor in tensors.items()}
    wrong = sorted(k for k in found.keys() | shards.keys() if found.get(k) != shards.get(k))
    if wrong:
        listed = ", ".join(f"{k} ({shards.get(k)}, got {found.get(k)})" for k in wrong[:20])
        raise UserError(f"{index} and its shards disagree about {listed}; fetch the files again")


def _verify(folder: Path, names: Iterable[str]) -> None:
    """Compares those files that exist with what is known about them."""
    check_own_file(folder / SUMS_FILE)
    sums = read_sums(folder)
    for name in names:
        check_own_file(folder / name)
        if (folder / name).is_file():
            if name in sums:
                check_file(folder / name, sums[name])
            check_blob(folder / name)


def _find_weights(folder: Path) -> Path | None:
    for name in _WEIGHT_FILES:
        for path in (folder / name, folder / f"{name}.index.json"):
            if path.is_file():
                return path
    return None


def _read_index(index: Path) -> dict[str, str]:
    """File of every tensor, as an index says."""
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


def _read_files(paths: Iterable[Path]) -> dict[str, LazyTensor]:
    tensors: dict[str, LazyTensor] = {}
    for path in paths:
        for key, tensor in _read_file(path):
            if key in tensors:
                raise UserError(
                    f"{path}: {key} is in {tensors[key].file.name} too; fetch the files again"
                )
            tensors[key] = tensor
    return tensors


def _read_file(path: Path) -> Iterator[tuple[str, LazyTensor]]:
    if path.suffix == ".safetensors":
        yield from _read_safetensors(path)
        return
    for key, array in torch_io.read_bin(path).items():
        yield key, LazyTensor(path, array.shape, array.dtype.name, partial(_same, array))


def _read_safetensors(path: Path) -> Iterator[tuple[str, LazyTensor]]:
    try:
        file = safe_open(path, framework="np")
        with path.open("rb") as raw:  # safe_open takes the last of a key's entries
            size = int.from_bytes(raw.read(8), "little")
            header = parse_object(raw.read(size), f"{path}: header")
        for key in file.keys():  # noqa: SIM118 (not a mapping)
            stored = file.get_slice(key)
            shape, dtype = tuple(stored.get_shape()), str(stored.get_dtype())
            dtype = _DTYPES.get(dtype, dtype)
            start = 8 + size + header[key]["data_offsets"][0]
            yield key, LazyTensor(path, shape, dtype, partial(_map, path, start, shape, dtype))
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: cannot be read ({error}); fetch the file again") from error


def _map(path: Path, start: int, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Maps a tensor into memory, where it costs none of its own: `get_tensor` makes a copy."""
    array = np.memmap(path, ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype, "r", start, shape)
    return np.require(array, requirements="A")  # no file has to align its tensors


def _not_fetched() -> np.ndarray:
    raise AssertionError("only the header was fetched")


def _same(array: np.ndarray) -> np.ndarray:
    return array
