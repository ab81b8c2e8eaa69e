"""Finds or writes the frozen target's features, for runs that do not compute them every step."""

import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import fields
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from tqdm import tqdm

from poss_jax.checkpoint.folder import load_item
from poss_jax.checkpoint.record import ModelRecord
from poss_jax.checkpoint.whole import hold_lock
from poss_jax.config.models import DraftConfig
from poss_jax.config.paths import local_path
from poss_jax.config.reading import config_to_dict
from poss_jax.config.training import TrainConfig
from poss_jax.data.features import LOCK, FeatureCache, open_cache
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
    """True in every process if all features are known without the target.

    Raises:
      UserError: they are complete, but this process does not see them.
    """
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
    """Writes a cache's missing shards; all processes compute, the first one writes.

    Args:
      parts: training rows and held-out rows.
      encode_batch: see `make_encode`.
      batch_size: rows encoded at a time.

    Raises:
      UserError: the shards cannot be written, or this process does not see them.
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
            held.enter_context(hold_lock(cache.folder / LOCK, say))
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
    """Standard deviation of each dimension of the target's features, over the first rows.

    Args:
      target: its layers are used if the rows bring no features.
      rows: the rows to train on; padding does not count.
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
