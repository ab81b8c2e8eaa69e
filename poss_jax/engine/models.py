"""The models of an engine on their devices: fused for decoding, placed, joined, replaced.

A draft borrows the embedding and the head of its target (`join_weights`).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from poss_jax.checkpoint.folder import load_target, read_target
from poss_jax.checkpoint.record import ModelRecord
from poss_jax.config.models import LlamaConfig, Quantisation
from poss_jax.config.paths import AnyPath
from poss_jax.config.reading import UserError
from poss_jax.decode.state import Weights
from poss_jax.engine.device import check_weights
from poss_jax.model.parameters import check_params, place_params, place_weights
from poss_jax.model.quantise import Quantised, quantise_specialists, round_rows
from poss_jax.model.specialists import borrow_from_target, fuse_draft
from poss_jax.model.target import compute_dtype, fuse_target
from poss_jax.shapes import Params


def load_fused(
    folder: str | AnyPath, dtype: Any, *, quantise: Quantisation | None, mesh: Mesh | None
) -> tuple[ModelRecord, Params]:
    """Loads a target, fused as it arrives, if the devices can hold it (see `check_weights`)."""
    check_weights(read_target(folder), dtype, quantise=quantise, mesh=mesh)
    sharding = mesh and place_weights(mesh)
    record, params = load_target(folder, dtype, quantise=quantise, sharding=sharding)
    return record, fuse_target(params, record.llama, partial(_place_on, mesh))


def fuse(
    params: Params,
    config: LlamaConfig,
    mesh: Mesh | None,
    convert: Callable[[Params], Params] = lambda item: item,
) -> Params:
    """Fuses a target and places it, each part as `convert` returns it; the caller's list stays."""
    params = params | {"layers": list(params["layers"])}
    fused = fuse_target(params, config, lambda item: _place_on(mesh, convert(item)))
    return jax.tree.map(_commit, fused)


def fuse_own(
    params: Params, record: ModelRecord, kind: Quantisation | None, mesh: Mesh | None
) -> Params:
    """Fuses a draft and places it, with its `vocabulary`; `kind` rounds it like its target."""
    vocabulary = record.draft_vocabulary
    ids = None if vocabulary is None else jnp.asarray(vocabulary, jnp.int32)
    rounded = quantise_specialists(params, kind) if kind else params
    return _place_on(mesh, fuse_draft(rounded, record.draft) | {"vocabulary": ids})


def join_weights(target: Params, params: Params, mesh: Mesh | None) -> Weights:
    """Joins a target and a draft, which uses its embedding and head; {}: without a draft."""
    if not params:
        return Weights(target, {})
    draft = round_rows(borrow_from_target(params, target, params["vocabulary"]))
    return Weights(target, _place_on(mesh, draft))


def replace_target(old: Params, params: Params, config: LlamaConfig, mesh: Mesh | None) -> Params:
    """Fuses new parameters of a target and places them like the old ones; keeps no given array.

    Raises:
      UserError: other names, shapes or dtypes, or the old target is quantised.
    """
    leaves = jax.tree.leaves(old, is_leaf=lambda leaf: isinstance(leaf, Quantised))
    if any(isinstance(leaf, Quantised) for leaf in leaves):
        raise UserError(
            "update_weights: want a target that is not quantised; load it without `quantise`"
        )
    check_params(config, params, compute_dtype(old))
    if config.tie_embeddings:
        params = params | {"head": params["embed"]}
    fused = fuse(params, config, mesh, _copy_arrays_of(params))
    # Compiled programs are bound to the arrays' placement.
    return jax.tree.map(lambda leaf, old: jax.device_put(leaf, old.sharding), fused, old)


def _place_on(mesh: Mesh | None, params: Params) -> Params:
    return params if mesh is None else place_params(params, mesh)


def _commit(leaf: Any) -> jax.Array:
    """Commits an array to its device, so that equal calls share a compiled program."""
    leaf = jnp.asarray(leaf)
    return leaf if leaf.committed else jax.device_put(leaf, leaf.sharding)


def _copy_arrays_of(params: Params) -> Callable[[Params], Params]:
    """Returns a function that copies the arrays of a tree that also occur in `params`."""
    ids = {id(leaf) for leaf in jax.tree.leaves(params)}
    copies: dict[int, jax.Array] = {}  # a tied head stays one array

    def copy_given(leaf: Any) -> Any:
        if id(leaf) not in ids:
            return leaf
        if id(leaf) not in copies:
            sharding = getattr(leaf, "sharding", None)
            copies[id(leaf)] = jax.device_put(leaf, sharding, may_alias=False)
        return copies[id(leaf)]

    return partial(jax.tree.map, copy_given)
