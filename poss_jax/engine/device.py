"""Defaults and limits of the device: its dtype, the sizes of its arrays, its memory."""

import math
import os
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from poss_jax.checkpoint.record import ModelRecord
from poss_jax.config.models import LlamaConfig, Quantisation
from poss_jax.config.processor import has_unsigned_products, int8_products
from poss_jax.config.reading import UserError
from poss_jax.decode.state import StaticShape, Weights
from poss_jax.model.parameters import flatten_item, item_shapes, place_weights
from poss_jax.model.quantise import weight_path
from poss_jax.model.sharding import bytes_per_device, dividing_axes
from poss_jax.model.target import compute_dtype

_LEAST_ROWS = 128

CPU_CHUNKS, ACCELERATOR_CHUNKS = (64, 32), (512, 64)
"""Prompt tokens per forward of the target, and per smaller one that reads the end of a prompt.

Many where reading the weights costs as much as using them; on CPU a short prompt would pay for rows
that it does not have. The second number divides the first.
"""


def default_dtype() -> Any:
    """Returns float32 on CPU, where bfloat16 is many times slower, and bfloat16 elsewhere."""
    return jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16


def prefill_chunks() -> tuple[int, int]:
    """Returns the two sizes of a prompt's forwards on this kind of device."""
    return CPU_CHUNKS if jax.default_backend() == "cpu" else ACCELERATOR_CHUNKS


def wants_sums() -> bool:
    """True if int8 weights want their sums: on CPUs that multiply uint8 by int8."""
    on_cpu = jax.default_backend() == "cpu"
    return on_cpu and int8_products() != "float" and has_unsigned_products()


def with_rows(config: StaticShape, length: int, *, max_length: int) -> StaticShape:
    """Sets the number of rows: `length` plus margin, rounded up to a power of two, capped.

    Rounding lets a handful of programs serve all lengths; no sequence exceeds `max_length`.
    """
    rows = max(_LEAST_ROWS, config.chunk, 1 << (length - 1).bit_length())
    rows = min(rows, _round_up(max_length, config.chunk)) + _round_up(config.margin, 128)
    return config._replace(rows=rows)


def _round_up(number: int, step: int) -> int:
    return -(-number // step) * step


def device_memory() -> int | None:
    """Bytes that this process may use on its device; None if that is unknown."""
    stats = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" in stats:
        return stats["bytes_limit"]
    if jax.default_backend() != "cpu" or not hasattr(os, "sysconf"):
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def check_weights(
    record: ModelRecord, dtype: Any, *, quantise: Quantisation | None, mesh: Mesh | None
) -> None:
    """Refuses a target whose weights alone exceed the memory, before they are read.

    Args:
      dtype: dtype of all that is not quantised.
      quantise: type to round its matrices to.
    """
    kind = quantise or record.quantised
    per_output = 8 if kind == "int8" and wants_sums() else 4  # the scale, and the sum
    needed = 0
    for name, item in item_shapes(record.config, is_quantised=kind is not None).items():
        for inner, shape in flatten_item(item).items():
            path = "/".join((name, *inner))
            shard = place_weights(mesh)(path, shape).shard_shape(shape) if mesh else shape
            sizes = {"values": 1, "scale": per_output} if weight_path(path) != path else {}
            needed += math.prod(shard) * sizes.get(inner[-1], jnp.dtype(dtype).itemsize)
    available = device_memory()
    if available is not None and needed > available:
        raise UserError(
            f"target {record.target.name} takes at least {_gib(needed)} of each device, which has "
            f"{_gib(available)}; {'' if kind else 'quantise it (int8), '}spread it over "
            "more devices (mesh.tensor), or take a smaller one"
        )


def check_memory(weights: Weights, config: StaticShape, *, batch_size: int) -> None:
    """Refuses a batch whose weights, caches and logits of a round alone exceed the memory."""
    needed = least_bytes(weights, config, batch_size=batch_size)
    available = device_memory()
    if available is not None and needed > available:
        raise UserError(
            f"batch_size {batch_size} and room for {config.rows} tokens of prompt and answer need "
            f"at least {_gib(needed)}, the device has {_gib(available)}; lower batch_size, "
            "max_new_tokens or the tree, or shorten the prompts"
        )


def least_bytes(weights: Weights, config: StaticShape, *, batch_size: int) -> int:
    """Counts the bytes a device holds: weights, caches, the output, the logits of a round."""
    arrays = {id(leaf): bytes_per_device(leaf) for leaf in jax.tree.leaves(weights)}  # once each
    each = 20 * config.rows + cache_bytes(weights, config)
    each += 4 * config.num_nodes * _part(config.target.vocab_size, config.mesh)
    if config.draft is not None:
        each += 8 * config.tree.num_candidates
    batch_size //= config.mesh.shape["data"] if config.mesh else 1
    return sum(arrays.values()) + batch_size * each


def cache_bytes(weights: Weights, config: StaticShape) -> int:
    """Counts the bytes of keys and values per sequence on one device."""
    per_row = config.target.num_layers * _pair(config.target, config.mesh)
    if config.draft is not None:
        per_row += config.num_streams * _pair(config.draft.layer, config.mesh)
    return compute_dtype(weights.target).itemsize * config.rows * per_row


def _pair(config: LlamaConfig, mesh: Mesh | None) -> int:
    """Elements in the key and value of one position in one layer, per device."""
    return 2 * _part(config.num_kv_heads, mesh) * config.head_dim


def _part(size: int, mesh: Mesh | None) -> int:
    """Share of a dimension that one device holds: cut by `tensor` if it divides, else all."""
    is_cut = mesh is not None and dividing_axes("tensor", size, mesh) is not None
    return size // mesh.shape["tensor"] if mesh is not None and is_cut else size


def _gib(number: int) -> str:
    return f"{number / 2**30:,.1f} GiB"
