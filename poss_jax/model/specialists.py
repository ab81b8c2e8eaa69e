"""The interface between a draft family and its users, and code all families share."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from poss_jax.config.models import DraftConfig, LlamaConfig
from poss_jax.model.layers import DecoderLayer, Parameter, fuse_layer, init_layer, zero_outputs
from poss_jax.model.quantise import untile_values
from poss_jax.shapes import Array, Float, Int, Params

KEY_VALUE = ("k", "v", "k_norm")
"""Parameters of attention that keys and values depend on."""

_AFTER_ATTENTION = ("mlp_norm", "mlp", "output_norm")

# A specialist is initialised like one of this many layers: its output starts small.
_DRAWN_AMONG = 16


def side_by_side(
    params: Params, embedded: Float[Array, "*rows D"], features: Float[Array, "*rows D"]
) -> Float[Array, "*rows both"]:
    """Concatenates embeddings and features, which no parameters project."""
    del params
    return jnp.concatenate([embedded, features], axis=-1)


@dataclass(frozen=True)
class Family:
    """All that decoding, training, checkpoints and the converter know about a kind of draft.

    Parameters are `{"specialists": [...]}`, `{"further": [...]}` (the layers of a deep first
    specialist after its first one) and the shared ones. Features are a specialist's predictions,
    and the inputs of the next one.
    """

    # path -> parameter; `embed`, `mask` and `further` in it allow a draft an own embedding, a mask
    # token and further layers
    parameters: Mapping[str, Parameter]
    init: Callable[[DraftConfig, Array], Params]  # (config, key) -> random parameters
    layer: Callable[[DraftConfig], DecoderLayer]  # config -> the layer of one specialist
    # (params, config, embeddings, features) -> input x of a specialist, in one product
    join: Callable[[Params, DraftConfig, Array, Array], Array]
    # (params, embeddings) -> the part of x that depends on tokens alone
    join_tokens: Callable[[Params, Array], Array] = lambda params, embedded: embedded
    join_features: Callable[[Params, Array, Array], Array] = side_by_side  # it and features -> x
    # the rows that the head multiplies
    read: Callable[[Params, DraftConfig, Array], Array] = lambda params, config, features: features
    # (target's config, number of tokens a draft can propose) -> config fields of a new draft that
    # the family decides
    default_fields: Callable[[LlamaConfig, int], dict[str, Any]] = lambda target, num_tokens: {}
    # the target's features -> the state that the first specialist reads
    fuse: Callable[[Params, DraftConfig, Array], Array] = lambda params, config, features: features
    # predicted features -> the state that the next specialist reads
    feed_back: Callable[[Params, DraftConfig, Array], Array] = lambda params, config, h: h
    # config of a draft of one specialist -> name of its method, without further layers
    method: Callable[[DraftConfig], str] = lambda config: config.family
    # random parameters -> a draft that predicts the feature it reads; None: there is no such start
    pass_through: Callable[[Params], Params] | None = None
    may_share_kv: bool = False  # specialists may have the same key and value projections, one cache
    # training follows a chain after every row, with gradients through all of it, rather than all
    # rows of one depth after the other; only then may a single specialist have further layers
    is_trained_in_chains: bool = False


def draw_specialists(
    layer: Callable[[DraftConfig], DecoderLayer],
    config: DraftConfig,
    keys: Sequence[Array],
    *,
    width: int,
) -> list[Params]:
    """Draws the specialists of a random draft, for input of a width."""
    drawn = layer(replace(config, layer=replace(config.layer, num_layers=_DRAWN_AMONG)))
    return [init_layer(drawn, key, width=width) for key in keys]


def add_layers(draft: Params, config: DraftConfig, key: Array) -> Params:
    """Adds the layers that a draft lacks for `config`; they add nothing until they are trained."""
    layers = draft.get("further", [])
    if len(layers) >= config.num_further:
        return draft
    keys = jax.random.split(jax.random.fold_in(key, 1), config.num_further)[len(layers) :]
    drawn = [zero_outputs(init_layer(DecoderLayer(config.layer), layer_key)) for layer_key in keys]
    return draft | {"further": layers + drawn}


def extend_specialists(draft: Params, num_specialists: int) -> Params:
    """Extends a list of specialists with copies of the last one: how PosS starts from EAGLE."""
    have = draft["specialists"]
    return draft | {"specialists": have + [have[-1]] * (num_specialists - len(have))}


def key_value_params(specialist: Params) -> Params:
    """The parameters of a specialist that its keys and values depend on."""
    attention = {n: p for n, p in specialist["attention"].items() if n in KEY_VALUE}
    kept = {n: p for n, p in specialist.items() if n not in _AFTER_ATTENTION}
    return kept | {"attention": attention}


def share_keys_values(draft: Params, reduce: Callable[[Array], Array]) -> Params:
    """Gives all specialists the same key and value parameters (or gradients of them).

    They are stacked; `reduce`, [E ...] -> [1 ...], merges them into one.
    """

    def share(path: tuple[Any, ...], leaf: Array) -> Array:
        is_shared = path[0].key == "attention" and path[1].key in KEY_VALUE
        return jnp.broadcast_to(reduce(leaf), leaf.shape) if is_shared else leaf

    return draft | {"specialists": jax.tree.map_with_path(share, draft["specialists"])}


def has_shared_keys_values(draft: Params) -> bool:
    """True if all specialists have the same key and value projections."""
    layers = [specialist["attention"] for specialist in draft["specialists"]]
    first, *further = [{name: x[name] for name in KEY_VALUE if name in x} for x in layers]
    return all(jax.tree.all(jax.tree.map(jnp.array_equal, first, layer)) for layer in further)


def borrow_from_target(
    draft: Params, target: Params, vocabulary: Int[Array, " Vd"] | None = None
) -> Params:
    """Adds the target's embedding and head to a draft, unless the draft has its own.

    The draft may propose the target ids of `vocabulary`; None: all of them.
    """
    head = draft.get("head", target["head"])
    if vocabulary is not None and "head" not in draft:
        head = _take(head, vocabulary)
    embed = draft.get("embed", target["embed"])
    return {**draft, "embed": embed, "head": head, "vocabulary": vocabulary}


@jax.jit
def _take(head: Params, vocabulary: Int[Array, " Vd"]) -> Params:
    return jax.tree.map(lambda leaf: leaf[vocabulary], untile_values(head))


def split_embedding(draft: Params) -> tuple[Params, Params]:
    """Splits a draft into what is trained and its own embedding, which is frozen; {} is none."""
    embedding = {name: draft[name] for name in ("embed",) if name in draft}
    return {name: params for name, params in draft.items() if name not in embedding}, embedding


def fuse_draft(draft: Params, config: DraftConfig) -> Params:
    """Fuses the projections of every layer that read the same rows (`fuse_layer`)."""
    fuse = partial(fuse_layer, config=config.layer, parts="kv")
    lists = {name: value for name, value in draft.items() if isinstance(value, list)}
    return draft | {name: list(map(fuse, layers)) for name, layers in lists.items()}
