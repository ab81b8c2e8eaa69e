"""Rows that come with the target's features, read from disk on demand."""

from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import numpy as np

from poss_jax.data.prepared import Prepared
from poss_jax.data.rows import Rows


@runtime_checkable
class FeatureSource(Protocol):
    """Features of a whole data set, somewhere on disk."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Rows, tokens of a row, width."""
        ...

    @property
    def missing(self) -> list[int]:
        """Parts still to be written before all rows can be read."""
        ...

    def describe(self) -> str:
        """Describes the features."""
        ...

    def read(self, rows: np.ndarray) -> np.ndarray:
        """[n T D] of some rows."""
        ...


@dataclass(frozen=True)
class LazyFeatures:
    """Features [n T D] of some rows of a source; slices are read when taken.

    Attributes:
      source: source of all features.
      rows: [n] indices of its rows.
    """

    source: FeatureSource
    rows: np.ndarray

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape, as of an array."""
        return len(self.rows), *self.source.shape[1:]

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        first, *rest = index
        return self.source.read(self.rows[first])[:, *rest]


@dataclass(frozen=True)
class RowsWithFeatures(Rows):
    """Rows with the target's features.

    Attributes:
      features: features of every token; any finite number at padding.
    """

    features: LazyFeatures

    def __getitem__(self, index: slice | np.ndarray) -> "RowsWithFeatures":
        features = LazyFeatures(self.features.source, self.features.rows[index])
        return RowsWithFeatures(**vars(super().__getitem__(index)), features=features)


def join_features(prepared: Prepared, source: FeatureSource) -> Prepared:
    """Joins rows with a source that holds training rows first, then held-out rows."""
    train, validation = prepared.train, prepared.validation
    every = np.arange(len(train) + len(validation))
    of_train = LazyFeatures(source, every[: len(train)])
    of_validation = LazyFeatures(source, every[len(train) :])
    return replace(
        prepared,
        train=RowsWithFeatures(**vars(train), features=of_train),
        validation=RowsWithFeatures(**vars(validation), features=of_validation),
        report=prepared.report | {"features": source.describe()},
    )
