"""Quantised targets: matrices of 8 bits with a scale per output, through one seam in `linear`.

The matrices of attention and MLP and the LM head are quantised; embedding, norms and biases are
not. In memory such a weight is a `Quantised`, in a model folder `weight/values` and `weight/scale`.
The outputs are the first axis of both leaves, so code that concatenates, takes or shards a weight's
outputs treats each leaf alike.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from poss_jax.config.models import Quantisation
from poss_jax.model.kernel import fits_tiles, from_tiles, to_tiles
from poss_jax.shapes import Array, Float, Params

_TYPES = {"int8": (jnp.int8, 127.0), "fp8": (jnp.float8_e4m3fn, 448.0)}
"""Type of the values, and the largest value (for int8, of both signs)."""


KINDS = tuple(_TYPES)


class Quantised(struct.PyTreeNode):
    """A weight [out, in] as small numbers times a scale per output.

    Attributes:
      values: int8, or float8_e4m3fn; all of them are exact in bfloat16.
      scale: factor of every output.
      sums: sum of each output's values; None unless `sum_values` added it.
      is_tiled: whether `tile_values` ordered the values for our kernel.
      num_limbs: int8 numbers that a CPU writes an element of a row in (`linear`).
    """

    values: Any  # [out in]; an array, or a stand-in such as its sharding
    scale: Any  # [out] float32
    sums: Any = None  # [out] int32
    is_tiled: bool = struct.field(pytree_node=False, default=False)
    num_limbs: int = struct.field(pytree_node=False, default=3)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape


@partial(jax.jit, static_argnames="kind")
def quantise(weight: Float[Array, "out_dim in_dim"], kind: Quantisation) -> Quantised:
    """Rounds a weight; the largest number of each output keeps its value.

    Errors: int8 at most half a scale, fp8 1/16 of the value or 2**-10 scales.
    """
    dtype, max_value = _TYPES[kind]
    wide = weight.astype(jnp.float32)
    scale = jnp.abs(wide).max(axis=-1) / max_value
    scale = jnp.where(scale == 0, 1.0, scale)
    values = jnp.clip(wide / scale[:, None], -max_value, max_value)
    values = jnp.round(values) if kind == "int8" else values
    return Quantised(values.astype(dtype), scale)


def is_quantisable(path: str) -> bool:
    """True if quantising includes the target's parameter at a path such as `head/weight`."""
    return path.endswith("/weight") and not path.startswith("embed/")


def weight_path(path: str) -> str:
    """Returns the weight's path for a path of its values, scale or sums; other paths unchanged."""
    weight, _, leaf = path.rpartition("/")
    is_part = weight.endswith("/weight") and leaf in ("values", "scale", "sums")
    return weight if is_part else path


def quantise_target(params: Params, kind: Quantisation) -> Params:
    """Quantises the matrices of a target, or of some of its items by their names."""

    def visit(path: tuple[Any, ...], leaf: Any) -> Any:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return quantise(leaf, kind) if is_quantisable(name) else leaf

    return jax.tree_util.tree_map_with_path(visit, params)


def quantise_specialists(draft: Params, kind: Quantisation) -> Params:
    """Quantises the layers of a draft and its `fc`, as it is done for its target."""
    items = {name: item for name, item in draft.items() if isinstance(item, list) or name == "fc"}
    return draft | quantise_target(items, kind)


def round_rows(params: Params) -> Params:
    """Lets CPUs write rows in two limbs instead of three: a draft's numbers change no text."""

    def visit(leaf: Any) -> Any:
        return leaf.replace(num_limbs=2) if isinstance(leaf, Quantised) else leaf

    return _map_weights(visit, params)


def sum_values(params: Params) -> Params:
    """Adds the sums of int8 values, so that `linear` on a CPU multiplies uint8 by int8."""

    def visit(leaf: Any) -> Any:
        is_missing = isinstance(leaf, Quantised) and leaf.sums is None
        if not is_missing or leaf.values.dtype != jnp.int8:
            return leaf
        return leaf.replace(sums=leaf.values.sum(axis=-1, dtype=jnp.int32))

    return _map_weights(visit, params)


def tile_values(params: Params) -> Params:
    """Orders int8 values that have sums for our kernel, where their shapes fit.

    Rows become two limbs there: no bit of a row depends on others, so texts need no third.
    """

    def visit(leaf: Any) -> Any:
        is_summed = isinstance(leaf, Quantised) and leaf.sums is not None and not leaf.is_tiled
        if not is_summed or not fits_tiles(leaf.shape):
            return leaf
        return leaf.replace(values=to_tiles(leaf.values), is_tiled=True, num_limbs=2)

    return _map_weights(visit, params)


def untile_values(params: Params) -> Params:
    """Reverses `tile_values`."""

    def visit(leaf: Any) -> Any:
        is_tiled = isinstance(leaf, Quantised) and leaf.is_tiled
        if not is_tiled:
            return leaf
        num_limbs = Quantised.num_limbs
        return leaf.replace(values=from_tiles(leaf.values), is_tiled=False, num_limbs=num_limbs)

    return _map_weights(visit, params)


def quantise_items(
    items: Iterable[tuple[str, Params]], kind: Quantisation, *, dtype: Any = None, is_tied: bool
) -> Iterator[tuple[str, Params]]:
    """Quantises a target item by item.

    Args:
      items: (name, item) of the target, in the stored type.
      kind: type of the values.
      dtype: dtype of all that is not quantised; None keeps it.
      is_tied: True if the embedding is the head, too; a quantised head is a separate item.
    """
    for name, item in items:
        if name == "embed" and is_tied:
            yield "head", quantise_target({"head": item}, kind)["head"]
        item = quantise_target({name: item}, kind)[name]
        yield name, item if dtype is None else _cast(item, dtype)


def pack(item: Params) -> Any:
    """Turns every dict of values and scale, the stored form, into a `Quantised`."""
    if item.keys() == {"values", "scale"}:
        return Quantised(**item)
    return {name: pack(value) if isinstance(value, dict) else value for name, value in item.items()}


def unpack(item: Params) -> Params:
    """Reverses `pack`."""

    def visit(value: Any) -> Any:
        is_quantised = isinstance(value, Quantised)
        return {"values": value.values, "scale": value.scale} if is_quantised else value

    return _map_weights(visit, item)


def _cast(item: Params, dtype: Any) -> Params:
    def visit(leaf: Any) -> Any:
        return leaf if isinstance(leaf, Quantised) else leaf.astype(dtype)

    return _map_weights(visit, item)


def _map_weights(visit: Callable[[Any], Any], params: Params) -> Params:
    """Maps all leaves, where a quantised weight is one."""
    return jax.tree.map(visit, params, is_leaf=lambda leaf: isinstance(leaf, Quantised))
