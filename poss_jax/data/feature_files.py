"""Features that other programs stored: one `.ckpt` file per document (EAGLE's `ge_data`).

`torch.save` of input_ids [S], hidden_state [S D] (after the target's last norm) and loss_mask [S],
each with or without a leading axis of one.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from poss_jax.checkpoint.torch_io import read_bin
from poss_jax.config.data import DataConfig
from poss_jax.config.paths import local_path
from poss_jax.config.reading import UserError
from poss_jax.data.files import existing_files
from poss_jax.data.records import Broken, Record

SUFFIX = ".ckpt"

_DIMENSIONS = {"input_ids": 1, "hidden_state": 2, "loss_mask": 1}


@dataclass(frozen=True)
class FeatureFiles:
    """Features of rows that hold one document each, from a file each.

    Attributes:
      paths: file of every row.
      shape: rows, tokens of a row, width.
      dtype: dtype to read them in.
      tokens: [rows T] tokens the rows were made from.
    """

    paths: tuple[str, ...]
    shape: tuple[int, int, int]
    dtype: Any
    tokens: np.ndarray

    @property
    def missing(self) -> list[int]:
        """Nothing is missing: the files are complete."""
        return []

    def describe(self) -> str:
        """Describes the features."""
        return f"in {len(self.paths):,} files, each read when its row is needed"

    def read(self, rows: np.ndarray) -> np.ndarray:
        """Features [n T D] of some rows, cut to T or padded with zeros.

        Raises:
          UserError: a file can no longer be read, or its tokens have changed.
        """
        T, D = self.shape[1:]
        features = np.zeros((len(rows), T, D), self.dtype)
        for place, row in zip(features, rows, strict=True):
            path = Path(self.paths[row])
            found = _check(_unbatched(read_bin(path)), D)
            if isinstance(found, Broken):
                raise UserError(f"{path}: {found}; put the file back as it was")
            stored, ids = found["hidden_state"][:T], found["input_ids"][:T]
            if not np.array_equal(np.pad(ids, (0, T - len(ids))), self.tokens[row]):
                raise UserError(f"{path}: its tokens are others now; put the file back as it was")
            place[: len(stored)] = stored
        return features


def read_feature_files(config: DataConfig, width: int | None) -> Iterator[tuple[str, Record]]:
    """Yields the name of every file with its tokens and loss mask.

    Features are not read (except that PyTorch's older format is always read whole).

    Args:
      config: its source is a path or a glob.
      width: width of the target's features; None: any.

    Raises:
      UserError: no such file.
    """
    local_path(config.source, "data.source")  # PyTorch maps its files into memory
    for path in map(Path, existing_files(config.source)):
        yield str(path.absolute()), _read_tokens(path, width)


def _read_tokens(path: Path, width: int | None) -> Record:
    try:
        arrays = _unbatched(read_bin(path, check=False))
    except UserError as error:
        return Broken("no file of tensors", str(error))
    found = _check(arrays, width)
    if isinstance(found, Broken):
        return found
    return {name: found[name] for name in ("input_ids", "loss_mask")}


def _unbatched(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Removes the leading axis of one that some writers leave."""
    return {
        name: arrays[name].reshape(arrays[name].shape[-dimensions:])
        if arrays[name].shape[:-dimensions] == (1,)
        else arrays[name]
        for name, dimensions in _DIMENSIONS.items()
        if name in arrays
    }


def _check(arrays: dict[str, np.ndarray], width: int | None) -> dict[str, np.ndarray] | Broken:
    missing = [name for name in _DIMENSIONS if name not in arrays]
    if missing:
        return Broken("no file of features", f"{', '.join(missing)} missing")
    ids, features = arrays["input_ids"], arrays["hidden_state"]
    is_matrix = ids.ndim == 1 and features.ndim == 2 and features.dtype.kind in "fV"
    if not is_matrix or len(features) != len(ids):
        return Broken(
            "hidden_state that does not fit",
            f"want a feature per token, got {features.dtype} {features.shape} for {ids.shape}",
        )
    if width not in (None, features.shape[1]):
        return Broken("features of another target", f"want width {width}, got {features.shape[1]}")
    return arrays
