"""A PyTorch checkpoint, in a folder or on the Hub, as a table of tensors read on demand."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from poss_jax import torch_io
from poss_jax.checkpoint import read_json
from poss_jax.config import UserError

# What is fetched from the Hub: configs, tokenizer, and weights (.bin only without safetensors).
_PATTERNS = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
_BIN_PATTERNS = ["*.bin"]
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")

# In the order of preference.
_WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")

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
      shape: as the file says.
      dtype: NumPy's name, or the file's own for types outside of float32, float16 and bfloat16.
      read: gives the array.
    """

    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], np.ndarray]


def open_source(source: str, revision: str | None = None) -> Source:
    """Finds a checkpoint's folder, downloading it if it is a Hub id.

    Args:
      source: an existing folder, or a Hub id such as `owner/name`.
      revision: branch, tag or commit on the Hub.

    Raises:
      UserError: neither a folder nor a Hub id, or the Hub does not give it.
    """
    folder = Path(source)
    if folder.is_dir():
        return Source(folder.resolve().name, None, folder)
    if not _HUB_ID.fullmatch(source) or source.startswith("."):
        raise UserError(f"source {source} does not exist; give a folder or a Hub id (owner/name)")
    snapshot = _download(source, revision, _PATTERNS)
    if not _find_weights(snapshot):
        snapshot = _download(source, revision, _PATTERNS + _BIN_PATTERNS)
    return Source(source, snapshot.name, snapshot)


def open_tensors(folder: Path) -> dict[str, LazyTensor]:
    """Lists the tensors of a folder: safetensors or else .bin, a single file or shards.

    Raises:
      UserError: no weights, a missing or damaged file, or an index that does not match its shards.
    """
    weights = _find_weights(folder)
    if weights is None:
        wanted = " or ".join(_WEIGHT_FILES)
        raise UserError(f"{folder} holds no weights; want {wanted}, or their .index.json")
    if weights.suffix != ".json":
        return dict(_read_file(weights))
    return _read_shards(weights)


def _find_weights(folder: Path) -> Path | None:
    for name in _WEIGHT_FILES:
        for path in (folder / name, folder / f"{name}.index.json"):
            if path.is_file():
                return path
    return None


def _download(hub_id: str, revision: str | None, patterns: list[str]) -> Path:
    import huggingface_hub  # here, because it is slow to import and folders do not need it

    try:
        return Path(
            huggingface_hub.snapshot_download(
                hub_id, revision=revision, allow_patterns=patterns, ignore_patterns=["*/*"]
            )
        )
    except (OSError, ValueError) as error:  # what the Hub's client raises derives from these
        reason = " ".join(str(error).split())[:300]
        raise UserError(
            f"no folder {hub_id} here, and the Hub does not give it ({reason}); check the name, "
            "the network and, for a gated model, HF_TOKEN"
        ) from error


def _read_shards(index: Path) -> dict[str, LazyTensor]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{index}: want a weight_map, got {weight_map!r}; fetch the file again")
    tensors: dict[str, LazyTensor] = {}
    found: dict[str, str] = {}
    for name in sorted(set(map(str, weight_map.values()))):
        path = index.parent / name
        if Path(name).name != name or not path.is_file():
            raise UserError(f"{index} names the shard {name}, which is missing; fetch it")
        for key, tensor in _read_file(path):
            if key in tensors:
                raise UserError(f"{path}: {key} is in {found[key]} too; fetch the files again")
            tensors[key], found[key] = tensor, name
    wrong = sorted(k for k in found.keys() | weight_map.keys() if found.get(k) != weight_map.get(k))
    if wrong:
        raise UserError(
            f"{index} and its shards disagree about {', '.join(wrong[:20])}; fetch the files again"
        )
    return tensors


def _read_file(path: Path) -> Iterator[tuple[str, LazyTensor]]:
    if path.suffix == ".safetensors":
        yield from _read_safetensors(path)
        return
    for key, array in torch_io.read_bin(path).items():
        yield key, LazyTensor(array.shape, array.dtype.name, partial(_same, array))


def _read_safetensors(path: Path) -> Iterator[tuple[str, LazyTensor]]:
    try:
        file = safe_open(path, framework="np")
        for key in file.keys():  # noqa: SIM118 (not a mapping)
            stored = file.get_slice(key)
            dtype = str(stored.get_dtype())
            read = partial(file.get_tensor, key)
            yield key, LazyTensor(tuple(stored.get_shape()), _DTYPES.get(dtype, dtype), read)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: cannot be read ({error}); fetch the file again") from error


def _same(array: np.ndarray) -> np.ndarray:
    return array
