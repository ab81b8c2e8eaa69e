"""Tensors of checkpoints, read when they are wanted."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import ml_dtypes
import numpy as np

from poss_jax.convert.names import split_rows


@dataclass(frozen=True)
class LazyTensor:
    """A tensor of a checkpoint that has not been read yet.

    Attributes:
      file: file that holds it.
      shape: shape that the file states.
      dtype: NumPy's name, or the file's own for types we do not read.
      read: returns the array.
    """

    file: Path
    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], np.ndarray]


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
