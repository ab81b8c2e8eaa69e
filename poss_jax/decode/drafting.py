"""Drafting: committing pairs to the specialists' caches, and the search for one tree.

A one-layer draft has keys and values that depend on a row's own pair alone, so that

  - committing tokens takes only `x` and the K/V projections of every specialist, or of the first
    one, where all specialists read one stream of keys and values;
  - a specialist with a stream of its own that takes over at some depth projects the rows drafted
    before it again; in one stream a row stays as the specialist that drafted it projected it.

While drafting, the scratch rows of the cache hold the beam of every level after the first:

    [ committed pairs | level 1: W rows | level 2: W rows | ... ]
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from poss_jax.config.models import DraftConfig, TreeConfig
from poss_jax.decode.sampling import Sampling, Text, process_logits
from poss_jax.decode.tree import Beam, Candidates, expand, join_levels, next_beam, root_beam
from poss_jax.model.cache import KVCache, scratch_mask, write_layer
from poss_jax.model.families import family_of
from poss_jax.model.layers import DecoderLayer, attend, linear
from poss_jax.shapes import Array, Bool, Float, Int, Params


class Level(NamedTuple):
    """The place of a beam's children.

    Attributes:
      depth: draft position of the children, static.
      position: their position in the text.
      path: tokens of all beam nodes so far.
      on_path: True where a child follows the token.
    """

    depth: int
    position: Array  # [B] int32
    path: Array  # [B depth*W] int32
    on_path: Array  # [B rows depth*W] bool


ChildrenFn = Callable[[Array, Level, int], tuple[Array, Array]]
"""(logits [B rows Vd], their level, W) -> (draft ids, log-probabilities), both [B rows W]."""

# Calibrated on trained drafts (benchmarks/coupling.py); from 1 to 2 the tree hardly changes.
_SHARPNESS = 1.5
_FILTER_MARGIN = 1.5


class Drafted(struct.PyTreeNode):
    """Result of drafting: all candidates, and the cache whose scratch rows were used."""

    candidates: Candidates
    cache: KVCache


def join_pairs(
    params: Params, config: DraftConfig, tokens: Int[Array, "B T"], features: Float[Array, "B T F"]
) -> Float[Array, "B T width"]:
    """Makes draft inputs of (feature, token) pairs."""
    embedded = jnp.take(params["embed"]["weight"], tokens, axis=0)
    return family_of(config).join(params, config, embedded, features)


def commit_pairs(
    params: Params,
    config: DraftConfig,
    cache: KVCache,
    x: Float[Array, "B T width"],
    num_pairs: Int[Array, " B"],
) -> KVCache:
    """Appends pairs to the context of every specialist.

    Args:
      params: the draft.
      config: its shape.
      cache: T rows must be free above `length`.
      x: draft inputs made of true target features.
      num_pairs: how many of the T pairs count.
    """
    positions = cache.length[:, None] + jnp.arange(x.shape[1])[None]
    for index in range(config.num_streams):
        layer = _specialist(params, config, index)
        cache = _write_keys_values(layer, cache, index, x, positions, cache.length)
    return cache.replace(length=cache.length + num_pairs)


def draft(
    params: Params,
    config: DraftConfig,
    tree: TreeConfig,
    cache: KVCache,
    root_input: Float[Array, "B 1 width"],
    children: ChildrenFn,
) -> Drafted:
    """Drafts `tree.depth` levels after the last committed pair.

    Args:
      params: the draft, with the target's embedding and head (`attach`).
      config: its shape.
      tree: how deep and how wide.
      cache: all pairs committed; (depth - 1) * W rows free above `length`.
      root_input: x of the last committed pair.
      children: proposes the children of each node.
    """
    beam, x = root_beam(len(root_input)), root_input
    rows = x[:, :0]  # draft inputs of the levels after the first, as they come
    path = jnp.zeros((len(x), 0), jnp.int32)  # their tokens
    levels: list[Candidates] = []
    for depth in range(tree.depth):
        if depth:
            rows = jnp.concatenate([rows, x], axis=1)
            cache = _enter_level(params, config, cache, rows, depth)
        features = _run_level(params, config, cache, beam, x, depth)
        read = family_of(config).read(params, config, features)
        logits = linear(read, params["head"]["weight"])
        level = Level(depth, cache.length + depth + 1, path, beam.ancestors)
        ids, log_probs = children(logits, level, tree.top_k)
        levels.append(expand(beam, params["vocabulary"][ids], log_probs))
        if depth + 1 < tree.depth:
            first_index = sum(level.tokens.shape[1] for level in levels[:-1])
            beam, picks = next_beam(beam, levels[-1], first_index=first_index, top_k=tree.top_k)
            tokens = jnp.take_along_axis(levels[-1].tokens, picks, axis=1)
            path = jnp.concatenate([path, tokens], axis=1)
            parent = (picks // tree.top_k)[:, :, None]
            x = join_pairs(params, config, tokens, jnp.take_along_axis(features, parent, axis=1))
    return Drafted(candidates=join_levels(levels), cache=cache)


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
    text: Text,
    noise: Float[Array, "B positions V"],
    vocabulary: Int[Array, " Vd"],
) -> tuple[Int[Array, "B rows W"], Float[Array, "B rows W"]]:
    """The tokens the target is likely to draw with the noise it is going to use.

    The target draws `argmax(its scores + noise)`, and the noise is known. With the draft's own
    scores in place of the target's, `scores + noise` ranks the candidates by how near they are to
    being drawn; its softmax, sharpened, estimates how likely each one is. Greedy sequences have no
    noise and are ranked as by `top_children`.

    Args:
      logits: logits of the draft.
      level: where the children stand.
      top_k: W.
      sampling: the request's settings.
      text: tokens so far; the path in it is not looked at.
      noise: noise for the children of every depth.
      vocabulary: target id of every logit.
    """
    text = text._replace(path=level.path, on_path=level.on_path)
    scores = process_logits(
        logits,
        sampling,
        text,
        vocab_size=noise.shape[-1],
        vocabulary=vocabulary,
        filter_margin=_FILTER_MARGIN,
    )
    noisy = scores + noise[:, level.depth, vocabulary][:, None]
    noisy *= jnp.where(sampling.temperature > 0, _SHARPNESS, 1.0)[:, None, None]
    return _most_likely(noisy, top_k)


def _most_likely(
    scores: Float[Array, "B rows Vd"], top_k: int
) -> tuple[Int[Array, "B rows W"], Float[Array, "B rows W"]]:
    """The best tokens and the logarithm of their softmax, none above 0."""
    best, ids = lax.top_k(scores, top_k)
    log_probs = best - jax.nn.logsumexp(scores, axis=-1, keepdims=True)
    # XLA may compute `scores` twice and round them apart: a certain token would exceed 0.
    return ids, jnp.minimum(log_probs, 0.0)


def _enter_level(
    params: Params, config: DraftConfig, cache: KVCache, rows: Array, depth: int
) -> KVCache:
    """Writes this level's keys and values; a new specialist with its own stream writes all."""
    # Differs from PosS: the first round of a generation is like every other; there, levels that do
    # not begin a span run specialist 0 in it.
    stream, num_rows, width = config.stream_at(depth), rows.shape[1], rows.shape[1] // depth
    first = 0 if stream != config.stream_at(depth - 1) else num_rows - width
    level = jnp.arange(first, num_rows)[None] // width
    positions = cache.length[:, None] + level
    layer = _specialist(params, config, config.specialist_at(depth))
    return _write_keys_values(
        layer, cache, stream, rows[:, first:], positions, cache.length + first
    )


def _run_level(
    params: Params, config: DraftConfig, cache: KVCache, beam: Beam, x: Array, depth: int
) -> Array:
    """Features of one level's rows; all of them share a position."""
    stream = config.stream_at(depth)
    layer = _specialist(params, config, config.specialist_at(depth))
    positions = jnp.broadcast_to((cache.length + depth - 1)[:, None], x.shape[:2])
    can_attend = _level_mask(cache, beam, depth)
    q = layer.queries(layer.normed(x), positions, cache.frequencies)
    return layer.finish(x, attend(q, cache.k[stream], cache.v[stream], can_attend))


def _level_mask(cache: KVCache, beam: Beam, depth: int) -> Bool[Array, "B rows S"]:
    if depth == 0:
        committed = jnp.arange(cache.size)[None] < cache.length[:, None]
        return committed[:, None]
    return scratch_mask(cache.length, beam.ancestors, size=cache.size)


def _write_keys_values(
    layer: DecoderLayer, cache: KVCache, stream: int, x: Array, positions: Array, start: Array
) -> KVCache:
    k, v = layer.keys_values(layer.normed(x), positions, cache.frequencies)
    return write_layer(cache, stream, k, v, start)


def _specialist(params: Params, config: DraftConfig, index: int) -> DecoderLayer:
    return family_of(config).layer(config).bind({"params": params["specialists"][index]})
