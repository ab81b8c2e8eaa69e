"""Tensors of checkpoints: their PyTorch keys by the tables of the models, and lazy reading."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import ml_dtypes
import numpy as np

from poss_jax.config.models import DraftConfig, LlamaConfig
from poss_jax.model.families.eagle import EAGLE
from poss_jax.model.parameters import flatten_item, item_shapes, table_of, torch_name
from poss_jax.model.target import TARGET

_PREFIX = re.compile(r"^((draft_)?model\.)+")
_FURTHER = re.compile(r"^further_layers\.(\d+)")
_ROWS = re.compile(r"(.+)\[(\d+):(\d+)\]")
_MIDDLE = re.compile(r"^midlayer(s(?=\.\d)|(?=\.))")  # EAGLE-3's names of what others call layers

# Projections that Phi-3's checkpoints keep in one tensor, one below the other as in our tables.
_FUSED = {
    ".self_attn.qkv_proj.": re.compile(r"\.self_attn\.[qkv]_proj\."),
    ".mlp.gate_up_proj.": re.compile(r"\.mlp\.(gate|up)_proj\."),
}

DRAFT_EMBEDDING = "embed_tokens.weight"
"""A draft's copy of the target's embedding, which we do not store."""

DRAFT_HEAD = "lm_head.weight"
"""A draft's copy of the target's head, in the layout of vLLM."""


@dataclass(frozen=True)
class Slot:
    """One array of our format."""

    item: str  # name of its item, for instance `layers/3`
    path: tuple[str, ...]  # keys inside the item
    shape: tuple[int, ...]  # shape it must have

    def __str__(self) -> str:
        return "/".join((self.item, *self.path))


def source_key(item: str, path: tuple[str, ...]) -> str:
    """Names an array of a target, or of a draft of EAGLE's family, as PyTorch checkpoints do."""
    return torch_name({**TARGET, **EAGLE.parameters}, item, path)


def slots_by_key(config: LlamaConfig | DraftConfig) -> dict[str, Slot]:
    """Finds the place of every PyTorch key of a model.

    A part of a fused tensor has the key `NAME[START:STOP]`, by its rows; the parts of a tensor
    follow each other.
    """
    table = table_of(config)
    slots = {
        torch_name(table, item, path): Slot(item, path, shape)
        for item, tree in item_shapes(config).items()
        for path, shape in flatten_item(tree).items()
    }
    if isinstance(config, DraftConfig) and config.is_looped:
        # The further layers follow the first one.
        names = (_FURTHER.sub(lambda match: f"layers.{int(match[1]) + 1}", key) for key in slots)
        return dict(zip(names, slots.values(), strict=True))
    is_fused = isinstance(config, LlamaConfig) and config.fused_projections
    return _name_rows(slots) if is_fused else slots


def _name_rows(slots: Mapping[str, Slot]) -> dict[str, Slot]:
    """Names parts of fused tensors by their rows."""
    named: dict[str, Slot] = {}
    ends: dict[str, int] = {}
    for key, slot in slots.items():
        joined_key = key
        for joined, pattern in _FUSED.items():
            joined_key = pattern.sub(joined, joined_key)
        if joined_key != key:
            start = ends.get(joined_key, 0)
            ends[joined_key] = start + slot.shape[0]
            key = f"{joined_key}[{start}:{ends[joined_key]}]"
        named[key] = slot
    return named


def split_rows(key: str) -> tuple[str, slice | None]:
    """Splits a key into the name of a tensor and the rows of it; None: all of them."""
    match = _ROWS.fullmatch(key)
    return (match[1], slice(int(match[2]), int(match[3]))) if match else (key, None)


def join_rows(slots: Mapping[str, Slot]) -> dict[str, tuple[int, ...]]:
    """Finds the shapes of the tensors in the files, whose parts the slots may be."""
    shapes = {}
    for key, slot in slots.items():
        name, rows = split_rows(key)
        shapes[name] = slot.shape if rows is None else (rows.stop, *slot.shape[1:])
    return shapes


def plain_name(key: str) -> str:
    """A PyTorch key without the prefix `model.`, its layers called `layers.N`."""
    return _MIDDLE.sub(lambda match: "layers" if match[1] else "layers.0", _PREFIX.sub("", key))


FC = source_key("fc", ("weight",))
FC_BIAS = source_key("fc", ("bias",))
QUERY = source_key("specialists/0", ("attention", "q", "weight"))
HEAD = source_key("head", ("weight",))


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


def cut_tensors(tensors: Mapping[str, LazyTensor], keys: Iterable[str]) -> dict[str, LazyTensor]:
    """Replaces tensors by their parts, where keys name rows of them (`split_rows`)."""
    cut = dict(tensors)
    for key in keys:
        name, rows = split_rows(key)
        if rows is not None:
            tensor = tensors[name]
            cut.pop(name, None)
            shape = (rows.stop - rows.start, *tensor.shape[1:])
            read = partial(lambda tensor, rows: tensor.read()[rows], tensor, rows)
            cut[key] = replace(tensor, shape=shape, read=read)
    return cut
