"""The parameters of a model: items, shapes, PyTorch names and shardings, all from one table.

A model's table (`TARGET`, or `Family.parameters`) has a row for every parameter it may have; the
Flax leaves say which of them a config has, and their shapes. Weights are kept in items:

    embed           {"weight": [V, D]}
    layers/0 ...    {"input_norm": {"scale"}, "attention": {"q", "k", "v", "o"},
                     "mlp_norm": {"scale"}, "mlp": {"gate", "up", "down"}};
                    with qk_norm, "q_norm" and "k_norm" {"scale": [H]} in the attention
    norm            {"scale": [D]}
    head            {"weight": [V, D]}, absent when the embeddings are tied; always there in a
                    quantised target, whose matrices are {"values": [out, in], "scale": [out]}
    fc              {"weight": [D, 2D], "bias": [D] with fc_bias}, of a draft; of EAGLE-3, [D, nD]
                    where it reads n layers of the target
    specialists/0   a layer without input_norm; of EAGLE-3, with input_norm and feature_norm, and
                    "q", "k" and "v" of inputs [2D]; of MTP, with input_norm, token_norm,
                    feature_norm, output_norm and "project" {"weight": [D, 2D]}
    further/0 ...   further layers of the first specialist, as the target's, if it has several
    fc_norm         of EAGLE-3 with fc_norm: {"scale": [nD]}, or {"low", "middle", "high"}, each
                    {"scale": [D]}
    mask            of P-EAGLE: {"weight": [1, 1, nD]}, the feature of positions not known yet

An EAGLE-3 draft also has its own norm, a head with a row per token it can propose, and maybe an
embedding; if its width differs from the target's, what it reads of the target has the target's.

Linear layers are {"weight": [out, in]} and, if the config says so, "bias": [out]. The paths are
public: other programs may read them. In memory the numbered items of a model are one list.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from poss_jax.config.models import DraftConfig, LlamaConfig
from poss_jax.config.reading import UserError
from poss_jax.model.families import FAMILIES, family_of
from poss_jax.model.layers import Parameter
from poss_jax.model.quantise import quantise_target, weight_path
from poss_jax.model.sharding import dividing_axes
from poss_jax.model.target import TARGET, init_target
from poss_jax.shapes import Array, Params

_NUMBER = re.compile(r"(?<=/)\d+(?=/)")
_FUSED = {"qkv": "q", "kv": "k", "gate_up": "gate"}  # used by decoding, sharded like their parts


def table_of(config: LlamaConfig | DraftConfig) -> Mapping[str, Parameter]:
    """Returns the table of a model, path -> row; `*` stands for the number of an item."""
    return family_of(config).parameters if isinstance(config, DraftConfig) else TARGET


def item_shapes(
    config: LlamaConfig | DraftConfig, *, is_quantised: bool = False
) -> dict[str, Params]:
    """Lists the items of a model in the order of its table: name -> nested dict of shapes.

    Those of a quantised target include the head even if it is tied.
    """
    rows, shapes = list(table_of(config)), _shapes_of_one(config, is_quantised)
    if isinstance(config, LlamaConfig):
        numbers = {"layers": config.num_layers}
    else:
        numbers = {"specialists": config.num_specialists, "further": config.num_further}
    items: dict[str, dict[tuple[str, ...], tuple[int, ...]]] = {}
    for path in sorted(shapes, key=lambda path: rows.index(weight_path(path))):
        group, *inner = path.split("/")
        if inner[0] != "*":
            items.setdefault(group, {})[tuple(inner)] = shapes[path]
            continue
        for number in range(numbers[group]):
            items.setdefault(f"{group}/{number}", {})[tuple(inner[1:])] = shapes[path]
    return {name: unflatten_dict(item) for name, item in items.items()}


def torch_name(table: Mapping[str, Parameter], item: str, path: Sequence[str]) -> str:
    """Names a parameter as PyTorch checkpoints do."""
    full = "/".join((item, *path))
    number = _NUMBER.search(full)
    row = table[_NUMBER.sub("*", full, count=1)]
    return row.torch.replace("*", number.group()) if number else row.torch


def count_parameters(config: LlamaConfig | DraftConfig) -> int:
    """Counts the parameters in a model's items (a tied head is not counted twice)."""
    return sum(
        int(np.prod(shape))
        for shapes in item_shapes(config).values()
        for shape in flatten_item(shapes).values()
    )


def flatten_item(item: Params) -> dict[tuple[str, ...], Any]:
    """Lists the leaves of an item (arrays or shapes) by path."""
    leaves: Any = flatten_dict(item)
    return leaves


def split_items(config: LlamaConfig | DraftConfig, params: Params) -> Iterator[tuple[str, Params]]:
    """Splits a model in memory into its items, in the order of the table."""
    for name in item_shapes(config):
        group, _, index = name.partition("/")
        yield name, params[group][int(index)] if index else params[group]


def join_items(items: Iterable[tuple[str, Params]]) -> Params:
    """Reverses `split_items`: numbered items, given in order, become one list."""
    params: Params = {}
    for name, item in items:
        group, _, index = name.partition("/")
        if index:
            params.setdefault(group, []).append(item)
        else:
            params[group] = item
    return params


def check_params(config: LlamaConfig, params: Params, dtype: Any) -> None:
    """Compares a target in memory (layers in a list, nothing fused) with its table.

    The head may be left out if the embeddings are tied.

    Raises:
      UserError: a parameter is missing or unknown, or has another shape or dtype.
    """
    got = {
        jax.tree_util.keystr(path, simple=True, separator="/"): f"{list(leaf.shape)} {leaf.dtype}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }
    want = {
        "/".join((name, *path)): f"{list(shape)} {jnp.dtype(dtype)}"
        for name, shapes in item_shapes(config).items()
        for path, shape in flatten_item(shapes).items()
    }
    if config.tie_embeddings:
        got.pop("head/weight", None)
    for name in sorted(got.keys() | want.keys()):
        if got.get(name) != want.get(name):
            raise UserError(
                f"{name}: want {want.get(name, 'none')}, got {got.get(name, 'none')}; "
                "give parameters of a target of the same shape"
            )


def partition(path: str, shape: Sequence[int], mesh: Mesh) -> PartitionSpec:
    """Sharding of an array.

    Args:
      path: path of a parameter, possibly below others (in an optimizer's state).
      shape: shape of the array; leading dimensions not in the table (layers, specialists) are not
        sharded, and neither are scalars.

    Raises:
      ValueError: no table has the path.
    """
    if not shape or path == "vocabulary":  # token ids, read by every device
        return PartitionSpec()
    weight = weight_path(path)
    keys = [_FUSED.get(key, key) for key in weight.split("/") if not key.isdigit()]
    name = "/".join(["", *keys])
    tables = TARGET, *(family.parameters for family in FAMILIES.values())
    rows = (item for table in tables for item in table.items())
    axes = next((row.axes for end, row in rows if name.endswith("/" + end.replace("*/", ""))), None)
    if axes is None:
        raise ValueError(f"{path}: want one row in the table of a model, got none")
    if weight != path and not path.endswith("/values"):  # one number per output
        axes = axes[:1]
    front = (None,) * (len(shape) - len(axes))
    shards = zip(axes, shape[len(front) :], strict=True)
    return PartitionSpec(*front, *(dividing_axes(axes, size, mesh) for axes, size in shards))


def place_weights(mesh: Mesh) -> Callable[[str, tuple[int, ...]], NamedSharding]:
    """Returns (path, shape) -> sharding, for loading a model."""
    return lambda path, shape: NamedSharding(mesh, partition(path, shape, mesh))


def place_tree(tree: Any, mesh: Mesh) -> Any:
    """Shardings of all leaves of parameters or of a training state (arrays or shapes)."""

    def sharding_of(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return NamedSharding(mesh, partition(name, leaf.shape, mesh))

    return jax.tree_util.tree_map_with_path(sharding_of, tree)


def shapes_on(mesh: Mesh, function: Callable[[], Any], dtype: Any = None) -> Any:
    """Shapes of the parameters that a function makes, with shardings from the tables.

    Args:
      mesh: devices, which need not exist.
      function: makes a tree of parameters, or of a training state; it is not run.
      dtype: dtype of all of them; None keeps each one's.
    """
    shapes = jax.eval_shape(function)
    return jax.tree.map(
        lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, dtype or leaf.dtype, sharding=where),
        shapes,
        place_tree(shapes, mesh),
    )


def place_params(params: Params, mesh: Mesh) -> Params:
    """Shards parameters by the tables; an array that occurs twice stays one array."""
    moved: dict[int, Array] = {}

    def move(leaf: Array, where: NamedSharding) -> Array:
        if not leaf.sharding.is_equivalent_to(where, leaf.ndim):
            if id(leaf) not in moved:
                moved[id(leaf)] = jax.device_put(leaf, where)
            return moved[id(leaf)]
        return leaf

    return jax.tree.map(move, params, place_tree(params, mesh))


@cache
def _shapes_of_one(
    config: LlamaConfig | DraftConfig, is_quantised: bool
) -> dict[str, tuple[int, ...]]:
    """Shapes by path in the table, the layers of a kind (or specialists) as one."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    if isinstance(config, DraftConfig):
        params = jax.eval_shape(partial(family_of(config).init, config), key)
    else:
        params = jax.eval_shape(partial(init_target, replace(config, num_layers=1)), key)
        if is_quantised:
            params = jax.eval_shape(partial(quantise_target, kind="int8"), params)
        elif config.tie_embeddings:
            del params["head"]
    return {
        _NUMBER.sub("*", jax.tree_util.keystr(path, simple=True, separator="/")): leaf.shape
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }
