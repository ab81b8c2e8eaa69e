"""Quantised targets: matrices of 8 bits with a scale per output, through one seam in `linear`.

The matrices of attention and MLP and the LM head are quantised; embedding, norms and biases stay as
they are. In memory such a weight is a `Quantised`, in a model folder `weight/values` and
`weight/scale`. Both leaves begin with the outputs, so that what concatenates, takes or shards the
outputs of a weight does the same to each leaf.
"""

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from poss_jax.config.models import Quantisation
from poss_jax.shapes import Array, Float, Params

_TYPES = {"int8": (jnp.int8, 127.0), "fp8": (jnp.float8_e4m3fn, 448.0)}
"""Type of the values, and the largest of them; of int8 that of both signs."""


KINDS = tuple(_TYPES)


class Quantised(struct.PyTreeNode):
    """A weight [out, in] as small numbers times a scale per output.

    Attributes:
      values: int8, or float8_e4m3fn; all of them are exact in bfloat16.
      scale: factor of every output.
    """

    values: Any  # [out in]; an array, or what stands for one, such as its sharding
    scale: Any  # [out] float32

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape


@partial(jax.jit, static_argnames="kind")
def quantise(weight: Float[Array, "out_dim in_dim"], kind: Quantisation) -> Quantised:
    """Rounds a weight; the largest number of each output keeps its value.

    An int8 is off by at most half a scale, an fp8 by 1/16 of itself or 2**-10 scales.
    """
    dtype, most = _TYPES[kind]
    wide = weight.astype(jnp.float32)
    scale = jnp.abs(wide).max(axis=-1) / most
    scale = jnp.where(scale == 0, 1.0, scale)
    values = jnp.clip(wide / scale[:, None], -most, most)
    values = jnp.round(values) if kind == "int8" else values
    return Quantised(values.astype(dtype), scale)


def is_quantisable(path: str) -> bool:
    """Tells whether the parameter at a path of a target, such as `head/weight`, is quantised."""
    return path.endswith("/weight") and not path.startswith("embed/")


def weight_path(path: str) -> str:
    """Returns the path of the weight whose values or scale stand at a path; other paths as is."""
    weight, _, part = path.rpartition("/")
    is_part = weight.endswith("/weight") and part in ("values", "scale")
    return weight if is_part else path


def quantise_target(params: Params, kind: Quantisation) -> Params:
    """Quantises the matrices of a target, or of some of its items by their names."""

    def visit(path: tuple[Any, ...], leaf: Any) -> Any:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return quantise(leaf, kind) if is_quantisable(name) else leaf

    return jax.tree_util.tree_map_with_path(visit, params)


def quantise_specialists(draft: Params, kind: Quantisation) -> Params:
    """Quantises the layers of a draft, as it is done for its target."""
    layers = [quantise_target(one, kind) for one in draft["specialists"]]
    return draft | {"specialists": layers}


def quantise_items(
    items: Iterable[tuple[str, Params]], kind: Quantisation, *, dtype: Any = None, is_tied: bool
) -> Iterator[tuple[str, Params]]:
    """Quantises a target item by item.

    Args:
      items: (name, item) of the target, in the type they are stored in.
      kind: type of the values.
      dtype: dtype of all that is not quantised; None keeps what it is.
      is_tied: True if the embedding is the head, too; a quantised head is an item of its own.
    """
    for name, item in items:
        if name == "embed" and is_tied:
            yield "head", quantise_target({"head": item}, kind)["head"]
        item = quantise_target({name: item}, kind)[name]
        yield name, item if dtype is None else _cast(item, dtype)


def pack(item: Params) -> Any:
    """Makes a `Quantised` of every dict of values and scale, as items are stored."""
    if item.keys() == {"values", "scale"}:
        return Quantised(**item)
    return {name: pack(part) if isinstance(part, dict) else part for name, part in item.items()}


def unpack(item: Params) -> Params:
    """Reverses `pack`."""

    def visit(part: Any) -> Any:
        return dict(vars(part)) if isinstance(part, Quantised) else part

    return jax.tree.map(visit, item, is_leaf=lambda part: isinstance(part, Quantised))


def _cast(item: Params, dtype: Any) -> Params:
    def visit(leaf: Any) -> Any:
        return leaf if isinstance(leaf, Quantised) else leaf.astype(dtype)

    return jax.tree.map(visit, item, is_leaf=lambda leaf: isinstance(leaf, Quantised))
