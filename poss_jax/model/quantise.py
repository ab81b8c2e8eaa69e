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
    """A weight [out, in] as small numbers times a scale per output."""

    # int8, or float8_e4m3fn; all of them are exact in bfloat16
    values: Any  # [out in]; an array, or a stand-in such as its sharding
    scale: Any  # [out] float32, factor of every output
    # sum of each output's values; None unless `sum_values` added it
    sums: Any = None  # [out] int32
    # whether `tile_values` ordered the values for our kernel
    is_tiled: bool = struct.field(pytree_node=False, default=False)
    # int8 numbers that a CPU writes an element of a row in (`linear`)
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
    return _map_quantised(lambda weight: weight.replace(num_limbs=2), params)


def sum_values(params: Params) -> Params:
    """Adds the sums of int8 values, so that `linear` on a CPU multiplies uint8 by int8."""

    def with_sums(weight: Quantised) -> Quantised:
        if weight.sums is not None or weight.values.dtype != jnp.int8:
            return weight
        return weight.replace(sums=weight.values.sum(axis=-1, dtype=jnp.int32))

    return _map_quantised(with_sums, params)


def tile_values(params: Params) -> Params:
    """Orders int8 values that have sums for our kernel, where their shapes fit.

    Rows become two limbs there: no bit of a row depends on others, so texts need no third.
    """

    def tiled(weight: Quantised) -> Quantised:
        if weight.sums is None or weight.is_tiled or not fits_tiles(weight.shape):
            return weight
        return weight.replace(values=to_tiles(weight.values), is_tiled=True, num_limbs=2)

    return _map_quantised(tiled, params)


def untile_values(params: Params) -> Params:
    """Reverses `tile_values`."""

    def untiled(weight: Quantised) -> Quantised:
        if not weight.is_tiled:
            return weight
        values, num_limbs = from_tiles(weight.values), Quantised.num_limbs
        return weight.replace(values=values, is_tiled=False, num_limbs=num_limbs)

    return _map_quantised(untiled, params)


def quantise_items(
    items: Iterable[tuple[str, Params]], kind: Quantisation, *, dtype: Any = None, is_tied: bool
) -> Iterator[tuple[str, Params]]:
    """Quantises a target item by item.

    Args:
      items: (name, item) of the target, in the stored type.
      dtype: dtype of all that is not quantised; None keeps it.
      is_tied: True if the embedding is the head, too; a quantised head is a separate item.
    """

    def cast(leaf: Any) -> Any:
        return leaf if _is_quantised(leaf) else leaf.astype(dtype)

    for name, item in items:
        if name == "embed" and is_tied:
            yield "head", quantise_target({"head": item}, kind)["head"]
        item = quantise_target({name: item}, kind)[name]
        yield name, item if dtype is None else jax.tree.map(cast, item, is_leaf=_is_quantised)


def pack(item: Params) -> Any:
    """Turns every dict of values and scale, the stored form, into a `Quantised`."""
    if item.keys() == {"values", "scale"}:
        return Quantised(**item)
    return {name: pack(value) if isinstance(value, dict) else value for name, value in item.items()}


def unpack(item: Params) -> Params:
    """Reverses `pack`."""
    return _map_quantised(lambda weight: {"values": weight.values, "scale": weight.scale}, item)


def _map_quantised(change: Callable[[Quantised], Any], params: Params) -> Params:
    """Changes the quantised weights of a tree."""
    return jax.tree.map(
        lambda leaf: change(leaf) if _is_quantised(leaf) else leaf, params, is_leaf=_is_quantised
    )


def _is_quantised(leaf: Any) -> bool:
    return isinstance(leaf, Quantised)
