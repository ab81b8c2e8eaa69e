"""The frozen target's features on disk, for runs that do not compute them every step.

A cache is written once and read by many epochs and runs:

    manifest.json    what the features were made from
    000000.npy ...   shards of rows [n T D], the bits of bfloat16 as uint16

A shard is written under another name first, so an existing one is complete.
"""

import hashlib
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import Mesh
from tqdm import tqdm

from poss_jax.checkpoint.folder import load_item
from poss_jax.checkpoint.record import ModelRecord
from poss_jax.checkpoint.whole import hold_lock, replaced, write_file
from poss_jax.config.models import DraftConfig
from poss_jax.config.paths import local_path
from poss_jax.config.reading import UserError, config_to_dict, one_line
from poss_jax.config.training import TrainConfig
from poss_jax.data.prepared import Prepared
from poss_jax.data.progress import progress_bar
from poss_jax.data.rows import Rows
from poss_jax.model.documents import TrainBatch, encode
from poss_jax.model.parameters import place_weights
from poss_jax.shapes import Array, Params

from .devices import (
    barrier,
    broadcast_from_first,
    compile_on,
    is_first_process,
    put_batch,
    stack_on,
)

EncodeFunction = Callable[[TrainBatch], Array]

_MEASURED_ROWS = 64
_SMALLEST_DEVIATION = 0.01  # times the mean one; avoids dividing by 0 for a constant dimension
_LOCK, _MANIFEST = ".lock", "manifest.json"
_DTYPE = np.dtype(ml_dtypes.bfloat16)
_BITS = np.dtype("<u2")
_HEADER_BYTES = 128  # of an .npy file

# A network's file system may show a new file to other hosts only after a minute.
_SEEN_SECONDS = 90.0
_LOOK_SECONDS = 1.0


@dataclass(frozen=True)
class LazyFeatures:
    """Features [n T D] of some rows of a cache; slices are read when taken."""

    cache: "FeatureCache"  # features of all rows
    rows: np.ndarray  # [n] indices of its rows

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape, as of an array."""
        return len(self.rows), *self.cache.shape[1:]

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        first, *inner = index
        return self.cache.read(self.rows[first])[:, *inner]


@dataclass(frozen=True)
class RowsWithFeatures(Rows):
    """Rows with the target's features."""

    features: LazyFeatures  # features of every token; any finite number at padding

    def __getitem__(self, index: slice | np.ndarray) -> "RowsWithFeatures":
        features = LazyFeatures(self.features.cache, self.features.rows[index])
        return RowsWithFeatures(**vars(super().__getitem__(index)), features=features)


def join_features(prepared: Prepared, cache: "FeatureCache") -> Prepared:
    """Joins rows with a cache that holds training rows first, then held-out rows."""
    train, validation = prepared.train, prepared.validation
    every = np.arange(len(train) + len(validation))
    of_train = LazyFeatures(cache, every[: len(train)])
    of_validation = LazyFeatures(cache, every[len(train) :])
    return replace(
        prepared,
        train=RowsWithFeatures(**vars(train), features=of_train),
        validation=RowsWithFeatures(**vars(validation), features=of_validation),
        report=prepared.report | {"features": cache.describe()},
    )


# --------------------------------------------------------------------------------------------------
# The cache


@dataclass(frozen=True)
class FeatureCache:
    """A folder of features, of which some shards may not be written yet."""

    folder: Path
    made_from: Mapping[str, str]  # name -> value of all that the features depend on
    shape: tuple[int, int, int]  # rows, tokens of a row, width
    rows_per_shard: int  # number of rows in all shards but the last

    @property
    def num_shards(self) -> int:
        """Number of shards of a complete cache."""
        return math.ceil(self.shape[0] / self.rows_per_shard)

    @property
    def missing(self) -> list[int]:
        """Shards that are not written yet."""
        return [shard for shard in range(self.num_shards) if not self.has(shard)]

    def has(self, shard: int) -> bool:
        """Tells whether a shard is written."""
        return self._path(shard).is_file()

    def num_bytes(self, shards: Iterable[int]) -> int:
        """Size of some shards."""
        row_bytes = math.prod(self.shape[1:]) * _BITS.itemsize
        return sum(len(self.rows_of(n)) * row_bytes + _HEADER_BYTES for n in shards)

    def rows_of(self, shard: int) -> range:
        """Rows that a shard holds."""
        first = shard * self.rows_per_shard
        return range(first, min(first + self.rows_per_shard, self.shape[0]))

    def describe(self) -> str:
        """Size and folder, for people."""
        written = self.num_shards - len(self.missing)
        size = _gib(self.num_bytes(range(self.num_shards)))
        shape = " x ".join(f"{length:,}" for length in self.shape)
        return (
            f"{shape} bfloat16, {size} in {self.num_shards:,} shards in {self.folder}; "
            f"{'all' if written == self.num_shards else f'{written:,}'} of them written"
        )

    def check_space(self) -> None:
        """Raises UserError if the disk has no room for what is missing."""
        existing = next(path for path in (self.folder, *self.folder.parents) if path.is_dir())
        required, free = self.num_bytes(self.missing), shutil.disk_usage(existing).free
        if required > free:
            raise UserError(
                f"features.cache {self.folder} wants {_gib(required)} more, its disk has "
                f"{_gib(free)} free; make room, name a folder on another disk, or leave out "
                "features.cache"
            )

    def start(self) -> None:
        """Says in the folder what it is to hold; refuses one that says something else by now."""
        path = self.folder / _MANIFEST
        manifest = {
            "made_from": dict(self.made_from),
            "shape": list(self.shape),
            "dtype": _DTYPE.name,
            "rows_per_shard": self.rows_per_shard,
        }
        if not path.is_file():
            write_file(path, json.dumps(manifest, indent=2) + "\n")
        elif json.loads(path.read_text(encoding="utf-8")) != manifest:
            raise UserError(
                f"features.cache {self.folder} was begun by another run meanwhile; run the same "
                "command again"
            )

    def check_seen(self) -> None:
        """Waits until this process sees the cache begun; raises UserError if it never does."""
        end = time.monotonic() + _SEEN_SECONDS
        while not (self.folder / _MANIFEST).is_file():
            if time.monotonic() >= end:
                raise UserError(
                    f"features.cache {self.folder}: this process does not see the folder that the "
                    "first one writes; name one on a file system that all hosts share"
                )
            time.sleep(_LOOK_SECONDS)

    def write(self, shard: int, features: Iterable[np.ndarray]) -> None:
        """Writes a shard from its rows in order, each [some T D] bfloat16; whole or not at all."""
        shape = len(self.rows_of(shard)), *self.shape[1:]
        header = {"descr": _BITS.str, "fortran_order": False, "shape": shape}
        with replaced(self._path(shard)) as partial, partial.open("wb") as file:
            np.lib.format.write_array_header_1_0(file, header)
            for piece in features:
                assert piece.dtype == _DTYPE
                file.write(np.ascontiguousarray(piece).view(_BITS).data)
            file.flush()
            os.fsync(file.fileno())

    def read(self, rows: np.ndarray) -> np.ndarray:
        """Features [n T D] bfloat16 of some rows; reads only these."""
        features = np.empty((len(rows), *self.shape[1:]), _BITS)
        shards, indices = np.divmod(rows, self.rows_per_shard)
        for shard in np.unique(shards):
            chosen, path = shards == shard, self._path(int(shard))
            try:
                array = np.lib.format.open_memmap(path, mode="r")
                features[chosen] = array[indices[chosen]]
            except Exception as error:  # NumPy raises many kinds on a damaged header
                raise UserError(
                    f"{path}: want a shard of features, got a damaged file ({one_line(error)}); "
                    "remove it, the next run writes it again"
                ) from error
        return features.view(_DTYPE)

    def _path(self, shard: int) -> Path:
        return self.folder / f"{shard:06}.npy"


def open_cache(
    folder: Path, made_from: Mapping[str, str], shape: tuple[int, int, int], shard_bytes: float
) -> FeatureCache:
    """Opens a cache, which may be empty or not exist; nothing is written.

    Args:
      made_from: name -> value of all that the features depend on.
      shape: rows, tokens of a row, width.
      shard_bytes: size of a shard of a new cache; a shard has at least one row.

    Raises:
      UserError: the folder holds something else, or features of something else.
    """
    row_bytes = math.prod(shape[1:]) * _BITS.itemsize
    new = FeatureCache(folder, made_from, shape, max(1, int(shard_bytes / row_bytes)))
    path = folder / _MANIFEST
    if not path.is_file():
        if folder.is_dir() and any(not path.name.startswith(".") for path in folder.iterdir()):
            raise UserError(
                f"features.cache {folder} holds something else (no {_MANIFEST}); name a new folder"
            )
        return new
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        saved = dict(manifest["made_from"], shape=manifest["shape"], dtype=manifest["dtype"])
        rows_per_shard = int(manifest["rows_per_shard"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path}: want the manifest of a cache, got a damaged file ({one_line(error)}); "
            "remove the folder"
        ) from error
    asked = dict(made_from, shape=list(shape), dtype=_DTYPE.name)
    different = [
        f"{name}: saved {_short(saved.get(name))}, asked {_short(asked.get(name))}"
        for name in {**asked, **saved}
        if saved.get(name) != asked.get(name)
    ]
    if different:
        raise UserError(
            f"features.cache {folder} has other features ({'; '.join(different)}); name another "
            "folder, or remove it"
        )
    return FeatureCache(folder, made_from, shape, rows_per_shard)


def _short(value: Any) -> str:
    return value[:12] if isinstance(value, str) else str(value)


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:,.3g} GiB"


# --------------------------------------------------------------------------------------------------
# Finding and writing the features of a run


def find_features(
    config: TrainConfig, record: ModelRecord, prepared: Prepared, dtype: Any, draft: DraftConfig
) -> FeatureCache | None:
    """Finds the cache of a run's features, which may be incomplete; None: there is none.

    Raises:
      UserError: a cache has other features, or its disk has no room for the missing ones.
    """
    if config.features.cache is None:
        return None
    num_rows = len(prepared.train) + len(prepared.validation)
    width = (len(draft.aux_layers) + 1) * record.llama.hidden_size
    shape = num_rows, config.data.sequence_length, width
    values, digest = config_to_dict(record), hashlib.sha256()
    computes = [values["config"], record.weights_sha256 or values["target"]]
    for rows in (prepared.train, prepared.validation):
        digest.update(np.ascontiguousarray(rows.tokens).data)
        digest.update(np.ascontiguousarray(rows.documents).data)
    made_from = {
        "target": hashlib.sha256(json.dumps(computes, sort_keys=True).encode()).hexdigest(),
        "rows": digest.hexdigest(),
        "computed in": jnp.dtype(dtype).name,
    }
    if draft.aux_layers:
        made_from["inputs of layers"] = ",".join(map(str, draft.aux_layers))
    folder = local_path(config.features.cache, "features.cache").absolute()
    cache = open_cache(folder, made_from, shape, config.features.shard_gib * 2**30)
    cache.check_space()
    return cache


def is_complete(features: FeatureCache | None) -> bool:
    """True in every process if all features are known without the target; each must see them."""
    if features is None or not broadcast_from_first(lambda: not features.missing):
        return False
    features.check_seen()
    return True


def load_layers(folder: str, record: ModelRecord, dtype: Any, mesh: Mesh) -> Params:
    """Loads the target's layers, stacked."""
    sharding = place_weights(mesh)
    names = (f"layers/{index}" for index in range(record.llama.num_layers))
    layers = [load_item(folder, record, name, dtype, sharding=sharding) for name in names]
    return stack_on(mesh, layers)


def make_encode(
    target: Params,
    config: TrainConfig,
    record: ModelRecord,
    mesh: Mesh,
    aux_layers: tuple[int, ...] = (),
) -> EncodeFunction:
    """Returns a function that computes a batch's features in bfloat16, replicated."""

    def features(target: Params, batch: TrainBatch) -> Array:
        encoded = encode(
            target,
            record.llama,
            batch.tokens,
            batch.documents,
            block=config.step.attention_block,
            aux_layers=aux_layers,
        )
        return encoded.astype(jnp.bfloat16)

    run = compile_on(mesh, features)
    return lambda batch: run(target, batch)


def fill_cache(
    cache: FeatureCache,
    parts: Sequence[Rows],
    encode_batch: EncodeFunction,
    batch_size: int,
    mesh: Mesh,
) -> None:
    """Writes the missing shards of training rows and held-out rows, `batch_size` rows at a time.

    All processes compute, the first one writes. Refuses a cache that this process does not see.
    """
    names = [field.name for field in fields(Rows)]
    rows = Rows(*(np.concatenate([getattr(rows, name) for rows in parts]) for name in names))
    progress = progress_bar(
        total=len(rows), desc="features", unit="row", delay=2, disable=not is_first_process()
    )

    def say(holder: str) -> None:
        tqdm.write(f"waiting for {holder}, which writes {cache.folder}", file=sys.stderr)

    with ExitStack() as held, progress:

        def claim() -> None:
            cache.folder.mkdir(parents=True, exist_ok=True)
            held.enter_context(hold_lock(cache.folder / _LOCK, say))
            cache.start()

        broadcast_from_first(claim)
        cache.check_seen()
        for shard in range(cache.num_shards):
            chosen = cache.rows_of(shard)
            if not broadcast_from_first(lambda n=shard: cache.has(n)):
                features = _encode_rows(rows, chosen, encode_batch, batch_size, mesh)
                if is_first_process():
                    cache.write(shard, features)
                for _ in features:  # all processes compute each batch
                    pass
            progress.update(len(chosen))
        barrier("features written")


def measure_deviations(
    target: Params, config: TrainConfig, record: ModelRecord, rows: Rows, mesh: Mesh
) -> tuple[float, ...]:
    """Standard deviation of each dimension of the target's features, over the first rows' text.

    The target's layers are used if the rows bring no features.
    """
    encode_batch = make_encode(target, config, record, mesh) if "layers" in target else None

    def moments(features: Array, documents: Array) -> Array:
        is_text = (documents > 0)[..., None].astype(jnp.float32)
        final = features[..., -record.llama.hidden_size :].astype(jnp.float32) * is_text
        ones = jnp.broadcast_to(is_text, final.shape)
        return jnp.stack([power.sum(axis=(0, 1)) for power in (ones, final, final**2)])

    sum_up, size = compile_on(mesh, moments), config.batch_size // config.step.accumulation_steps
    total = np.zeros((3, record.llama.hidden_size))
    for first in range(0, _MEASURED_ROWS, size):
        batch = put_batch(rows[np.arange(first, first + size) % len(rows)], mesh)
        features = batch.features if encode_batch is None else encode_batch(batch)
        total += np.asarray(sum_up(features, batch.documents))
    mean, mean_square = total[1:] / total[0]
    deviations = np.sqrt(np.maximum(mean_square - mean**2, 0.0))
    return tuple(np.maximum(deviations, _SMALLEST_DEVIATION * deviations.mean()).tolist())


def _encode_rows(
    rows: Rows, chosen: range, encode_batch: EncodeFunction, batch_size: int, mesh: Mesh
) -> Iterator[np.ndarray]:
    for first in range(chosen.start, chosen.stop, batch_size):
        index = np.minimum(np.arange(first, first + batch_size), chosen.stop - 1)
        yield np.asarray(encode_batch(put_batch(rows[index], mesh)))[: chosen.stop - first]
