"""Features that other programs stored: one `.ckpt` file per document (EAGLE's `ge_data`).

`torch.save` of input_ids [S], hidden_state [S D] (after the target's last norm) and loss_mask [S],
each with or without a leading axis of one. SpecForge's files for EAGLE-3 also have
aux_hidden_state [S nD], the outputs of n layers.
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

_NEEDED = ("input_ids", "hidden_state", "loss_mask")
_DIMENSIONS = {"input_ids": 1, "hidden_state": 2, "loss_mask": 1, "aux_hidden_state": 2}


@dataclass(frozen=True)
class FeatureFiles:
    """Features of rows that hold one document each, from a file each.

    Attributes:
      paths: file of every row.
      shape: rows, tokens of a row, width: inner states first, if it is more than the final one's.
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

    def check_states(self) -> None:
        """Raises UserError if the first file has no states of this width."""
        path = Path(self.paths[0])
        states = _join_states(_unbatched(read_bin(path, check=False)), self.shape[2])
        if isinstance(states, Broken):
            raise UserError(
                f"data.source: {path}: {states}; the draft reads inner states of the target "
                "(aux_hidden_state) and final ones: give such files, or texts or chats"
            )

    def read(self, rows: np.ndarray) -> np.ndarray:
        """Features [n T D] of some rows, cut to T or padded with zeros.

        Raises:
          UserError: a file can no longer be read, or its tokens have changed.
        """
        T, width = self.shape[1:]
        features = np.zeros((len(rows), T, width), self.dtype)
        for place, row in zip(features, rows, strict=True):
            path = Path(self.paths[row])
            found = _check(_unbatched(read_bin(path)), None)
            states = found if isinstance(found, Broken) else _join_states(found, width)
            if isinstance(found, Broken) or isinstance(states, Broken):
                raise UserError(f"{path}: {states}; put the file back as it was")
            stored, ids = states[:T], found["input_ids"][:T]
            if not np.array_equal(np.pad(ids, (0, T - len(ids))), self.tokens[row]):
                raise UserError(f"{path}: its tokens are others now; put the file back as it was")
            place[: len(stored)] = stored
        return features


def read_feature_files(config: DataConfig, width: int | None) -> Iterator[tuple[str, Record]]:
    """Yields the name of every file with its tokens and loss mask.

    Features are not read (except that PyTorch's older format is always read whole).

    Args:
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


def _join_states(arrays: Mapping[str, np.ndarray], width: int) -> np.ndarray | Broken:
    """Joins inner and final states to features of a width, or takes the final ones alone."""
    final, inner = arrays["hidden_state"], arrays.get("aux_hidden_state")
    if final.shape[1] == width:
        return final
    widths = [0 if inner is None else inner.shape[-1], final.shape[1]]
    if inner is None or inner.shape[:-1] != final.shape[:-1] or sum(widths) != width:
        return Broken("features of another draft", f"want width {width}, got {widths}")
    return np.concatenate([inner, final.astype(inner.dtype)], axis=1)


def _check(arrays: dict[str, np.ndarray], width: int | None) -> dict[str, np.ndarray] | Broken:
    missing = [name for name in _NEEDED if name not in arrays]
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
