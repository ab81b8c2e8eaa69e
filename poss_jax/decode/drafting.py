"""Drafting: committing pairs to the specialists' caches, and the search for one tree.

Keys and values of a one-layer draft depend only on a row's own pair, so

  - committing tokens needs only `x` and the K/V projections of every specialist, or of the first
    one if all specialists read one stream of keys and values;
  - a specialist with its own stream that takes over at some depth projects the earlier drafted rows
    again; in one shared stream a row keeps the projection of the specialist that drafted it.

A first specialist of several layers drafts the root's children only. So drafted rows never enter
it; a committed row runs through all but its last layer once, and drafting begins with that one. The
cache has the streams of the specialists first, then a stream for each of its further layers. If
there is no other specialist, drafted rows pass all of these layers, too.

P-EAGLE drafts all positions after the first in one pass, from mask tokens, so all nodes of a level
have the same children.

While drafting, the keys and values of the beams after the first level are kept next to the cache of
the stream that reads them:

    [ committed pairs ]   [ level 1: W rows | level 2: W rows | ... ]
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from poss_jax.config.models import DraftConfig, TreeConfig
from poss_jax.decode.sampling import History, Sampling, lower_unlikely, shift_logits, unpack
from poss_jax.decode.tree import Beam, Candidates, expand, join_levels, next_beam, root_beam
from poss_jax.model.cache import KeysValues, KVCache, attend_cached, commit_rows, newest_rows
from poss_jax.model.families import family_of
from poss_jax.model.layers import DecoderLayer
from poss_jax.model.ranking import top_k as best_of
from poss_jax.model.sharding import whole_rows
from poss_jax.model.target import read_logits
from poss_jax.shapes import Array, Float, Int, Params, UInt


class Level(NamedTuple):
    """Coordinates of a beam's children."""

    depth: int  # draft position of the children, static
    position: Array  # [B] int32, their position in the sequence
    path: Array  # [B depth*W] int32, tokens of all beam nodes so far
    on_path: Array  # [B rows depth*W] bool, True for tokens on a child's path


ChildrenFn = Callable[[Array, Level, int], tuple[Array, Array]]
"""(logits [B rows Vd], their level, W) -> (draft ids, log-probabilities), both [B rows W]."""

# Calibrated on trained drafts (configs/demo/drafting.yaml); from 1 to 2 the tree changes little.
_SHARPNESS = 1.5
_FILTER_MARGIN = 1.5
_FORBIDDEN = -1e9  # finite: a draft may know no token that is allowed


def join_pairs(
    params: Params, config: DraftConfig, tokens: Int[Array, "B T"], features: Float[Array, "B T F"]
) -> Float[Array, "B T width"]:
    """Makes draft inputs from (feature, token) pairs."""
    embedded = jnp.take(params["embed"]["weight"], tokens, axis=0)
    return whole_rows(family_of(config).join(params, config, embedded, features))


def commit_pairs(
    params: Params,
    config: DraftConfig,
    cache: KVCache,
    x: Float[Array, "B T width"],
    num_pairs: Int[Array, " B"],
) -> tuple[KVCache, Float[Array, "B T read"]]:
    """Appends pairs to the context of every specialist that the cache has a stream of.

    Args:
      cache: T rows must be free above `length`.
      x: draft inputs from true target features; the first `num_pairs` are valid.

    Returns:
      The cache, and the rows as the last layer of the first specialist reads them.
    """
    positions = cache.length[:, None] + jnp.arange(x.shape[1])[None]
    num_streams = len(cache.k) - config.num_further
    rows = [
        _keys_values(_specialist(params, config, index), cache, x, positions)
        for index in range(num_streams)
    ]
    layer, stream = _specialist(params, config, 0), 0
    for following in _further_layers(params, config):
        q = layer.attention.queries(layer.normed(x), positions, cache.frequencies)
        attended = _attend_in_order(config, cache, stream, q, rows[stream])
        x = layer.finish(x, attended)
        # Adds 0. Without this dependency XLA copies the caches: see `speculate.commit`.
        is_positive = (x[:, 0, 0] > 0).astype(jnp.int32)
        cache = cache.replace(length=cache.length + jnp.minimum(is_positive, 0))
        layer, stream = following, len(rows)
        rows.append(_keys_values(layer, cache, x, positions))
    k, v = map(list, zip(*rows, strict=True))
    return commit_rows(cache, KeysValues(k, v), num_pairs), x


def draft(
    params: Params,
    config: DraftConfig,
    tree: TreeConfig,
    cache: KVCache,
    root_input: Float[Array, "B 1 width"],
    children: ChildrenFn,
) -> Candidates:
    """Drafts `tree.depth` levels after the last committed pair.

    Args:
      params: the draft, with the target's embedding and head (`borrow_from_target`).
      cache: all pairs committed.
      root_input: the last committed pair, as `commit_pairs` returns it.
    """
    beam, x = root_beam(len(root_input)), root_input
    rows = None  # draft inputs of the levels after the first, appended per level
    path = jnp.zeros((len(x), 0), jnp.int32)  # their tokens
    drafted = None  # their keys and values in this level's stream
    own_further: list[tuple[Array, Array]] = []  # and those in the further layers of a looped draft
    masked = _run_masks(params, config, cache, tree.depth - 1)
    levels: list[Candidates] = []
    for depth in range(tree.depth):
        with jax.named_scope(f"draft_level_{depth}"):
            if depth > 0 and masked is not None:
                features = jnp.repeat(masked[:, depth - 1 : depth], x.shape[1], axis=1)
            else:
                if depth > 0:
                    rows = x if rows is None else jnp.concatenate([rows, x], axis=1)
                    drafted = _enter_level(params, config, cache, drafted, rows, depth)
                positions = jnp.broadcast_to((cache.length + depth - 1)[:, None], x.shape[:2])
                layer, stream = _layer_at(params, config, depth)
                features = _run_layer(layer, config, stream, cache, drafted, beam, x, positions)
                if depth > 0 and config.is_looped:
                    features, own_further = _run_further(
                        params, config, cache, own_further, beam, features, positions
                    )
            read = family_of(config).read(params, config, features)
            logits = read_logits(params, read)
            level = Level(depth, cache.length + depth + 1, path, beam.ancestors)
            ids, log_probs = children(logits, level, tree.top_k)
            ids = ids if params["vocabulary"] is None else params["vocabulary"][ids]
            levels.append(expand(beam, ids, log_probs))
            if depth + 1 < tree.depth:
                first_index = sum(level.tokens.shape[1] for level in levels[:-1])
                beam, picks = next_beam(beam, levels[-1], first_index=first_index, top_k=tree.top_k)
                tokens = jnp.take_along_axis(levels[-1].tokens, picks, axis=1)
                path = jnp.concatenate([path, tokens], axis=1)
                parent = (picks // tree.top_k)[:, :, None]
                parents = jnp.take_along_axis(features, parent, axis=1)
                x = join_pairs(params, config, tokens, parents)
    return join_levels(levels)


def _run_masks(
    params: Params, config: DraftConfig, cache: KVCache, num_rows: int
) -> Float[Array, "B T D"] | None:
    """Features of the positions after the first; None for a draft that reads drafted tokens."""
    if config.mask_token is None:
        return None
    shape = len(cache.length), num_rows
    tokens = jnp.full(shape, config.mask_token, jnp.int32)
    feature = params["mask"]["weight"]
    x = join_pairs(params, config, tokens, jnp.broadcast_to(feature, (*shape, feature.shape[-1])))
    positions = cache.length[:, None] + jnp.arange(num_rows)[None]
    layers = [_specialist(params, config, 0), *_further_layers(params, config)]
    for stream, layer in enumerate(layers):
        q = layer.attention.queries(layer.normed(x), positions, cache.frequencies)
        drafted = _keys_values(layer, cache, x, positions)
        x = layer.finish(x, _attend_in_order(config, cache, stream, q, drafted))
    return x


def top_children(
    logits: Float[Array, "B rows Vd"], level: Level, top_k: int
) -> tuple[Int[Array, "B rows W"], Float[Array, "B rows W"]]:
    """The most likely tokens and their log-probabilities (EAGLE-2)."""
    del level
    return _most_likely(logits.astype(jnp.float32), top_k)


def coupled_children(
    logits: Float[Array, "B rows Vd"],
    level: Level,
    top_k: int,
    *,
    sampling: Sampling,
    history: History,
    noise: Float[Array, "B positions V"],
    vocabulary: Int[Array, " Vd"] | None,
) -> tuple[Int[Array, "B rows W"], Float[Array, "B rows W"]]:
    """The tokens the target is likely to draw with the noise it is going to use.

    The target draws `argmax(its scores + noise)`, and the noise is known. With the draft's scores
    in place of the target's, `scores + noise` ranks the candidates by how close they are to being
    drawn; its softmax, sharpened, estimates their probabilities. Greedy sequences have no noise
    and are ranked as by `top_children`.

    Args:
      history: tokens so far; its path is ignored.
      noise: noise for the children of every depth.
      vocabulary: target id of every logit; None: all, in order.
    """
    history = history._replace(path=level.path, on_path=level.on_path)
    scores = shift_logits(
        logits, sampling, history, vocab_size=noise.shape[-1], vocabulary=vocabulary
    )
    scores = lower_unlikely(scores, sampling, _FILTER_MARGIN)
    noise = noise[:, level.depth]
    noisy = scores + (noise if vocabulary is None else noise[:, vocabulary])[:, None]
    noisy *= jnp.where(sampling.temperature > 0, _SHARPNESS, 1.0)[:, None, None]
    return _most_likely(noisy, top_k)


def allow(
    children: ChildrenFn,
    allowed: UInt[Array, "B words"] | None,
    vocabulary: Int[Array, " Vd"] | None,
    vocab_size: int,
) -> ChildrenFn:
    """Limits the root's children to tokens that a grammar allows (see `sampling.unpack`)."""
    if allowed is None:
        return children
    mask = unpack(allowed, vocab_size)
    mask = mask if vocabulary is None else mask[:, vocabulary]

    def limited(logits: Array, level: Level, top_k: int) -> tuple[Array, Array]:
        if level.depth == 0:
            logits = jnp.where(mask[:, None], logits, _FORBIDDEN)
        return children(logits, level, top_k)

    return limited


def _most_likely(
    scores: Float[Array, "B rows Vd"], top_k: int
) -> tuple[Int[Array, "B rows W"], Float[Array, "B rows W"]]:
    """The best tokens and the logarithm of their softmax, none above 0."""
    best, ids = best_of(scores, top_k)
    log_probs = best - jax.nn.logsumexp(scores, axis=-1, keepdims=True)
    # XLA may compute `scores` twice with different rounding: a certain token would exceed 0.
    return ids, jnp.minimum(log_probs, 0.0)


def _enter_level(
    params: Params,
    config: DraftConfig,
    cache: KVCache,
    drafted: tuple[Array, Array] | None,
    rows: Array,
    depth: int,
) -> tuple[Array, Array]:
    """Keys and values of all drafted rows in this level's stream.

    Computes only this level's rows, unless its specialist is the first to read its stream.
    """
    # Differs from PosS: the first round of a generation is like every other; PosS runs specialist 0
    # there at levels that do not begin a span.
    num_rows, width = rows.shape[1], rows.shape[1] // depth
    is_new = drafted is None or config.stream_at(depth) != config.stream_at(depth - 1)
    first = 0 if is_new else num_rows - width
    level = jnp.arange(first, num_rows)[None] // width
    positions = cache.length[:, None] + level
    layer = _specialist(params, config, config.specialist_at(depth))
    new = _keys_values(layer, cache, rows[:, first:], positions)
    return new if is_new or drafted is None else _append(drafted, new)


def _run_further(
    params: Params,
    config: DraftConfig,
    cache: KVCache,
    earlier: list[tuple[Array, Array]],
    beam: Beam,
    x: Array,
    positions: Array,
) -> tuple[Array, list[tuple[Array, Array]]]:
    """Runs one level's rows through the further layers of a looped draft.

    `earlier` has the keys and values of earlier levels' rows in every layer. Returns the features,
    and `earlier` with this level's.
    """
    grown = []
    for index, layer in enumerate(_further_layers(params, config)):
        drafted = _keys_values(layer, cache, x, positions)
        drafted = _append(earlier[index], drafted) if earlier else drafted
        x = _run_layer(layer, config, index + 1, cache, drafted, beam, x, positions)
        grown.append(drafted)
    return x, grown


def _run_layer(
    layer: DecoderLayer,
    config: DraftConfig,
    stream: int,
    cache: KVCache,
    drafted: tuple[Array, Array] | None,
    beam: Beam,
    x: Array,
    positions: Array,
) -> Array:
    """Runs one level's rows, which share a position, through a layer."""
    q = layer.attention.queries(layer.normed(x), positions, cache.frequencies)
    drafted = drafted or (cache.k[stream][:, :, :0], cache.v[stream][:, :, :0])
    attended = _attend(config, cache, stream, q, drafted, beam.ancestors)
    return layer.finish(x, attended)


def _attend(
    config: DraftConfig,
    cache: KVCache,
    stream: int,
    q: Array,
    drafted: tuple[Array, Array],
    can_attend: Array | None,
) -> Array:
    """Attends the committed pairs of a stream that the draft may see, and own rows."""
    stored, length = (cache.k[stream], cache.v[stream]), cache.length
    if config.window is not None:
        stored, length = newest_rows(stored, length, config.window, config.num_sinks)
    return attend_cached(q, stored, length, drafted, can_attend)


def _attend_in_order(
    config: DraftConfig, cache: KVCache, stream: int, q: Array, drafted: tuple[Array, Array]
) -> Array:
    """As `_attend` for rows that follow the committed pairs one by one, each with its window."""
    if config.window is None:
        return _attend(config, cache, stream, q, drafted, None)
    stored = cache.k[stream], cache.v[stream]
    newest, count = newest_rows(stored, cache.length, config.window, config.num_sinks)
    S, T = newest[0].shape[2], q.shape[2]
    column, row = jnp.arange(S + T)[None], jnp.arange(T)[None, :, None]
    # Offsets count from the first of the pairs: the newest rows before it end at -1.
    offset = jnp.where(column < S, column - count[:, None], column - S)
    from_start = jnp.where(column < S, column, column - S + cache.length[:, None])
    exists = ((column >= S) | (offset < 0))[:, None]
    is_sink, offset = (from_start < config.num_sinks)[:, None], offset[:, None]
    can_attend = exists & (offset <= row) & (is_sink | (offset > row - config.window))
    none, nothing = jnp.zeros_like(cache.length), (stored[0][:, :, :1], stored[1][:, :, :1])
    return attend_cached(q, nothing, none, _append(newest, drafted), can_attend)


def _append(stored: tuple[Array, Array], new: tuple[Array, Array]) -> tuple[Array, Array]:
    k, v = (jnp.concatenate(pair, axis=2) for pair in zip(stored, new, strict=True))
    return k, v


def _keys_values(
    layer: DecoderLayer, cache: KVCache, x: Array, positions: Array
) -> tuple[Array, Array]:
    return layer.attention.keys_values(layer.normed(x), positions, cache.frequencies)


def _specialist(params: Params, config: DraftConfig, index: int) -> DecoderLayer:
    return family_of(config).layer(config).bind({"params": params["specialists"][index]})


def _further_layers(params: Params, config: DraftConfig) -> list[DecoderLayer]:
    """Layers of the first specialist after its first one."""
    return [
        DecoderLayer(config.layer).bind({"params": layer}) for layer in params.get("further", [])
    ]


def _layer_at(params: Params, config: DraftConfig, depth: int) -> tuple[DecoderLayer, int]:
    """The last layer of the specialist at a depth, and its stream."""
    if depth == 0 and config.num_further:
        return _further_layers(params, config)[-1], -1
    return _specialist(params, config, config.specialist_at(depth)), config.stream_at(depth)
