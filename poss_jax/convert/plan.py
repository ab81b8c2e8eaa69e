"""A conversion that is checked and ready: what goes where, and the stream of items to write."""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Literal

import ml_dtypes
import numpy as np
from flax.traverse_util import unflatten_dict

from poss_jax.checkpoint import ModelRecord
from poss_jax.config import UserError
from poss_jax.convert.names import Slot
from poss_jax.convert.source import LazyTensor
from poss_jax.shapes import Params

DType = Literal["keep", "float32", "bfloat16"]

_CASTS = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}
_READABLE = ("float32", "bfloat16", "float16")
_MAX_LISTED = 50

# Values looked at a time, so that no mask as long as an embedding is made.
_CHUNK = 1 << 22

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Row:
    """One line of the table a conversion prints.

    Attributes:
      key: name in the source.
      path: ours, or why the tensor is not stored.
      shape: in the source and in our format alike.
      dtype: as stored by us (as in the source for what is not stored).
    """

    key: str
    path: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Conversion:
    """Everything `checkpoint.write_model` wants, and what to tell the user.

    Attributes:
      record: the model to be written.
      rows: the table of what goes where.
      items: streams (name, arrays); can be run through once.
      num_items: how many there are.
      tokenizer_from: folder the tokenizer's files are copied from.
      assumed: what the source does not say and why we take it so, one line each.
    """

    record: ModelRecord
    rows: list[Row]
    items: Iterator[tuple[str, Params]]
    num_items: int
    tokenizer_from: Path
    assumed: tuple[str, ...] = ()

    @property
    def dtype(self) -> str:
        """Type of the stored arrays; several are joined by a plus."""
        return "+".join(sorted({row.dtype for row in self.rows if not row.path.startswith("(")}))


class Reader:
    """Reads the tensors of a source as they are to be stored.

    Attributes:
      tensors: of the source, by key.
      dtype: what to store.
    """

    def __init__(self, tensors: Mapping[str, LazyTensor], dtype: DType) -> None:
        self.tensors = tensors
        self.dtype: DType = dtype

    def items(self, slots: Mapping[str, Slot]) -> Iterator[tuple[str, Params]]:
        """Streams the items whose arrays are given by `slots`, one in memory at a time."""
        for item, group in groupby(slots.items(), key=lambda pair: pair[1].item):
            yield item, unflatten_dict({slot.path: self._read(key) for key, slot in group})

    def _read(self, key: str) -> np.ndarray:
        array, file = self.tensors[key].read(), self.tensors[key].file
        if self.dtype != "keep":
            array = array.astype(_CASTS[self.dtype], copy=False)
        if not is_finite(array):
            _LOG.warning("%s: %s holds NaN or infinity; it is converted as it is", file, key)
        return array

    def rows(self, slots: Mapping[str, Slot], dropped: Mapping[str, str]) -> list[Row]:
        """The table: what is stored, then what is not and why."""
        stored = [
            Row(
                key,
                str(slot),
                slot.shape,
                self.tensors[key].dtype if self.dtype == "keep" else self.dtype,
            )
            for key, slot in slots.items()
        ]
        return stored + [
            Row(key, f"(not stored: {why})", self.tensors[key].shape, self.tensors[key].dtype)
            for key, why in dropped.items()
        ]


def check_keys(
    origin: str,
    tensors: Mapping[str, LazyTensor],
    wanted: Mapping[str, tuple[int, ...]],
    optional: Mapping[str, tuple[int, ...]],
) -> None:
    """Compares the keys of a source with what its config describes.

    Args:
      origin: the source, for the message.
      tensors: what it holds.
      wanted: shapes of the keys that must be there.
      optional: shapes of the keys that may be there.

    Raises:
      UserError: names every unknown, missing or mis-shaped key.
    """
    shapes = {**optional, **wanted}
    problems = [f"missing {key} {list(wanted[key])}" for key in wanted if key not in tensors]
    for key, tensor in tensors.items():
        where = f"in {tensor.file.name}"
        if key not in shapes:
            problems.append(f"unknown {key} {list(tensor.shape)} {where}")
        elif tensor.shape != shapes[key]:
            problems.append(f"{key} want {list(shapes[key])} got {list(tensor.shape)} {where}")
        elif tensor.dtype not in _READABLE:
            problems.append(f"{key} want {' or '.join(_READABLE)} got {tensor.dtype} {where}")
    if problems:
        listed = "; ".join(problems[:_MAX_LISTED])
        more = f"; and {len(problems) - _MAX_LISTED} more" if len(problems) > _MAX_LISTED else ""
        raise UserError(
            f"{origin}: the weights do not fit what config.json describes: {listed}{more}; "
            "give the model's own files"
        )


def is_finite(array: np.ndarray) -> bool:
    """Whether an array holds neither NaN nor infinity."""
    values = array.reshape(-1)
    starts = range(0, values.size, _CHUNK)
    return all(np.isfinite(values[start : start + _CHUNK]).all() for start in starts)


def same_up_to_rounding(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two arrays of one shape hold the same numbers, kept in different types."""
    return _rounds_to(a, b) or _rounds_to(b, a)


def _rounds_to(wide: np.ndarray, narrow: np.ndarray) -> bool:
    wide, narrow = wide.reshape(-1), narrow.reshape(-1)
    starts = range(0, wide.size, _CHUNK)
    parts = ((wide[i : i + _CHUNK], narrow[i : i + _CHUNK]) for i in starts)
    with np.errstate(over="ignore"):
        return all(np.array_equal(a.astype(b.dtype), b) for a, b in parts)
