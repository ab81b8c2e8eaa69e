"""The two parts of the target's choice: processed scores, and the request's noise.

A token is chosen as `argmax(scores + noise)`. The scores are the logits after the processors of
`transformers`, in its order: logit bias, repetition penalty, temperature, top-k, top-p, min-p;
servers' frequency and presence penalties, which count only the output, follow the repetition
penalty, then stop tokens are barred from short outputs. The noise is Gumbel noise, so the argmax is
a draw from softmax(scores); it depends only on the request's seed and the position of the chosen
token. So a request gets the same text from any drafter, tree and batch, and the drafter may look at
the noise in advance. Sequences of temperature 0 get no noise: they are greedy.

Scores and noise are always float32.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from poss_jax.model import kernel
from poss_jax.model.ranking import choose, top_k
from poss_jax.model.sharding import highest_of_groups
from poss_jax.shapes import Array, Bool, Float, Int, UInt

OF_OUTPUT = ("frequency_penalty", "presence_penalty", "min_tokens")
"""Settings that depend on the output so far."""

_REALS = ("temperature", "top_p", "min_p", "repetition_penalty", *OF_OUTPUT[:2])
SETTINGS: dict[str, Any] = {"seed": np.uint32, "top_k": np.int32, "min_tokens": np.int32}
SETTINGS |= dict.fromkeys(_REALS, np.float32)
"""Settings of `SamplingConfig`, which has their bounds and defaults -> their type on the device."""


class Sampling(struct.PyTreeNode):
    """Settings per sequence, one for each of `SETTINGS`; `SamplingConfig` explains them."""

    seed: Array  # [B] uint32
    temperature: Array  # [B] float32
    top_k: Array  # [B] int32
    top_p: Array  # [B] float32
    min_p: Array  # [B] float32
    repetition_penalty: Array  # [B] float32
    bias_ids: Array  # [B num_biased] int32, tokens whose logits are shifted; -1 is none
    bias: Array  # [B num_biased] float32, number added to each of them
    # Those of `OF_OUTPUT`: None if no sequence sets one.
    frequency_penalty: Array | None = None  # [B] float32
    presence_penalty: Array | None = None  # [B] float32
    min_tokens: Array | None = None  # [B] int32


class History(NamedTuple):
    """Tokens that precede a choice: the sequence, and a node's path."""

    tokens: Array  # [B S], tokens of the sequence
    is_token: Array  # [B S] bool, False for padding
    path: Array  # [B nodes], tokens of all nodes
    on_path: Array  # [B rows nodes] bool, nodes that precede each choice
    # True for tokens that the target chose; None if it chose none
    is_output: Array | None = None  # [B S] bool
    # tokens that end each sequence, -1 is none; one row serves all sequences
    stop_ids: Array | None = None  # [B num_stop]


def draw_noise(
    sampling: Sampling, first: Int[Array, " B"], *, num_positions: int, vocab_size: int
) -> Float[Array, "B positions V"]:
    """Gumbel noise for positions from `first` on (the prompt begins at 0), zero in greedy rows."""

    def key_of(seed: Array, position: Array) -> Array:
        return jax.random.key_data(jax.random.fold_in(jax.random.key(seed), position))

    def draw(keys: Array) -> Array:
        # The default mode never exceeds 17: tokens rarer than 1e-7 are almost never chosen.
        draw_row = partial(jax.random.gumbel, shape=(vocab_size,), dtype=jnp.float32, mode="high")
        return jax.vmap(draw_row)(jax.random.wrap_key_data(keys))

    positions = first[:, None] + jnp.arange(num_positions)[None]
    keys = jax.vmap(jax.vmap(key_of, (None, 0)))(sampling.seed, positions)
    noise = kernel.call_on_cpu(partial(kernel.gumbel, size=vocab_size), draw, keys.reshape(-1, 2))
    noise = noise.reshape(*positions.shape, vocab_size)
    return jnp.where(_is_sampled(sampling)[:, None, None], noise, 0.0)


def forbid(
    logits: Float[Array, "*rows V"], allowed: UInt[Array, "*rows words"] | None
) -> Float[Array, "*rows V"]:
    """Logits with -inf for tokens that a grammar does not allow (see `unpack`; None: all are)."""
    if allowed is None:
        return logits
    return jnp.where(unpack(allowed, logits.shape[-1]), logits, -jnp.inf)


def unpack(allowed: UInt[Array, "*rows words"], vocab_size: int) -> Bool[Array, "*rows V"]:
    """Unpacks a bit per token, 32 in a word, the lowest bit first."""
    bits = allowed[..., None] >> lax.broadcasted_iota(
        allowed.dtype, (*allowed.shape, 32), allowed.ndim
    )
    return (bits & 1 > 0).reshape(*allowed.shape[:-1], -1)[..., :vocab_size]


def shift_logits(
    logits: Float[Array, "B rows Vd"],
    sampling: Sampling,
    history: History,
    *,
    vocab_size: int,
    vocabulary: Int[Array, " Vd"] | None = None,
) -> Float[Array, "B rows Vd"]:
    """Scores before the filters: logits after bias, penalties and temperature.

    Settings that no sequence uses are skipped at run time.

    Args:
      history: tokens that the penalties count.
      vocab_size: V of the target.
      vocabulary: target id of every logit, for a draft that has its own; None: all, in order.
    """

    def of_vocabulary(values: Array) -> Array:
        return values if vocabulary is None else values[..., vocabulary]

    def biased(scores: Array) -> Array:
        batch, ids = len(sampling.bias_ids), sampling.bias_ids
        ids = jnp.where(ids < 0, vocab_size, ids)  # out of range: dropped
        bias = jnp.zeros((batch, vocab_size))
        bias = bias.at[jnp.arange(batch)[:, None], ids].add(sampling.bias, mode="drop")
        return scores + of_vocabulary(bias)[:, None]

    def penalised(scores: Array) -> Array:
        penalty = sampling.repetition_penalty[:, None, None]
        lower = jnp.where(scores > 0, scores / penalty, scores * penalty)
        return jnp.where(of_vocabulary(_seen(history, vocab_size)), lower, scores)

    scores = logits.astype(jnp.float32)
    scores = _where_any(sampling.bias_ids >= 0, biased, scores)
    scores = _where_any(sampling.repetition_penalty != 1, penalised, scores)
    frequency, presence = sampling.frequency_penalty, sampling.presence_penalty
    if frequency is not None and presence is not None:

        def lowered(scores: Array) -> Array:
            counts = of_vocabulary(_count_output(history, vocab_size))
            scores = scores - frequency[:, None, None] * counts
            return jnp.where(counts > 0, scores - presence[:, None, None], scores)

        scores = _where_any((frequency != 0) | (presence != 0), lowered, scores)
    if sampling.min_tokens is not None and history.stop_ids is not None:
        is_short = _num_output(history) < sampling.min_tokens[:, None]
        ids = jnp.broadcast_to(history.stop_ids, (len(scores), history.stop_ids.shape[1]))

        def barred(scores: Array) -> Array:
            is_end = of_vocabulary(_mark(ids, vocab_size))
            lowered = jnp.minimum(scores, _BARRED)  # what a grammar forbids stays so
            return jnp.where(is_short[:, :, None] & is_end[:, None], lowered, scores)

        scores = _where_any(is_short, barred, scores)
    return scores / jnp.where(_is_sampled(sampling), sampling.temperature, 1.0)[:, None, None]


def process_logits(
    logits: Float[Array, "B rows Vd"],
    sampling: Sampling,
    history: History,
    *,
    vocab_size: int | None = None,
    vocabulary: Int[Array, " Vd"] | None = None,
) -> Float[Array, "B rows Vd"]:
    """Scores of the tokens that may be chosen, -inf for the others: what `draw` draws from.

    `vocabulary` as in `shift_logits`.
    """
    vocab_size = vocab_size or logits.shape[-1]
    scores = shift_logits(logits, sampling, history, vocab_size=vocab_size, vocabulary=vocabulary)
    return _where_any(
        _has_filter(sampling),
        lambda scores: jnp.where(_is_kept(scores, sampling), scores, -jnp.inf),
        scores,
    )


def draw(
    scores: Float[Array, "B rows V"], noise: Float[Array, "B rows V"], sampling: Sampling
) -> Int[Array, "B rows"]:
    """Chooses the token with the highest score plus noise among those that the filters keep.

    The filters keep all scores above a threshold, so candidates are checked one by one: a refused
    one rules out all with lower scores. This takes few checks, while the filters themselves would
    take dozens of passes over the vocabulary. Scores are those of `shift_logits`.
    """
    noisy = scores + noise

    def replace_refused(state: tuple[Array, Array]) -> tuple[Array, Array]:
        chosen, _ = state
        is_kept = _is_drawable(scores, chosen, sampling)
        bound = jnp.take_along_axis(scores, chosen[..., None], axis=-1)
        next_best = choose(jnp.where(scores > bound, noisy, -jnp.inf))
        return jnp.where(is_kept, chosen, next_best), is_kept

    def is_any_refused(state: tuple[Array, Array]) -> Array:
        return highest_of_groups((~state[1]).any())

    def filtered(chosen: Array) -> Array:
        is_kept = jnp.broadcast_to(~_has_filter(sampling)[:, None], chosen.shape)
        return lax.while_loop(is_any_refused, replace_refused, (chosen, is_kept))[0]

    # XLA computes outside of a loop what stays the same in it; the condition keeps it inside.
    return _where_any(_has_filter(sampling), filtered, choose(noisy))


def lower_unlikely(
    scores: Float[Array, "B rows Vd"], sampling: Sampling, margin: float
) -> Float[Array, "B rows Vd"]:
    """Lowers by `margin` the scores that the filters would probably drop, judging by the best few.

    For a draft, which knows only roughly what the target's filters keep.
    """

    def lowered(scores: Array) -> Array:
        best = top_k(scores, min(_NUM_BEST, scores.shape[-1]))[0]
        ks, ps, min_p = _filters(sampling)
        weights = jnp.exp(best - jax.nn.logsumexp(scores, axis=-1, keepdims=True))
        is_counted = (jnp.arange(best.shape[-1])[None, None] < ks) | (ks <= 0)
        weights = jnp.where(is_counted, weights, 0.0)
        share = jnp.where(ks > 0, weights.sum(axis=-1, keepdims=True), 1.0)
        above = jnp.cumsum(weights, axis=-1) - weights
        is_kept = is_counted & ((above < ps * share) | (ps >= 1))
        is_kept &= best >= best[..., :1] + jnp.log(min_p)
        lowest_kept = jnp.where(is_kept, best, jnp.inf).min(axis=-1, keepdims=True)
        lowest_kept = jnp.where(is_kept.all(axis=-1, keepdims=True), -jnp.inf, lowest_kept)
        return jnp.where(scores < lowest_kept, scores - margin, scores)

    return _where_any(_has_filter(sampling), lowered, scores)


_NUM_BEST = 64
_BARRED = -1e9  # finite: it is chosen if a grammar leaves nothing else


def _is_sampled(sampling: Sampling) -> Bool[Array, " B"]:
    return sampling.temperature > 0


def _where_any(is_used: Array, change: Callable[[Array], Array], scores: Array) -> Array:
    return lax.cond(highest_of_groups(is_used.any()), change, lambda scores: scores, scores)


def _num_output(history: History) -> Int[Array, "B rows"]:
    """Counts the tokens of output before each choice."""
    output = history.is_output
    count = 0 if output is None else output.sum(axis=1, dtype=jnp.int32)[:, None]
    return count + history.on_path.sum(axis=2, dtype=jnp.int32)


def _mark(ids: Int[Array, "B num"], vocab_size: int) -> Bool[Array, "B V"]:
    """Marks tokens of the vocabulary; -1 is none."""
    ids = jnp.where(ids < 0, vocab_size, ids)  # out of range: dropped
    nothing = jnp.zeros((len(ids), vocab_size), bool)
    return nothing.at[jnp.arange(len(ids))[:, None], ids].set(True, mode="drop")


def _seen(history: History, vocab_size: int) -> Bool[Array, "B rows V"]:
    """Marks the tokens that occur before each choice."""
    B, rows = history.on_path.shape[:2]
    sequence = jnp.arange(B)[:, None]
    committed = _mark(jnp.where(history.is_token, history.tokens, -1), vocab_size)
    seen = jnp.broadcast_to(committed[:, None], (B, rows, vocab_size))
    path = jnp.where(history.on_path, history.path[:, None], vocab_size)
    return seen.at[sequence[:, None], jnp.arange(rows)[None, :, None], path].set(True, mode="drop")


def _count_output(history: History, vocab_size: int) -> Float[Array, "B rows V"]:
    """Counts how often the output before each choice holds every token."""
    B, rows = history.on_path.shape[:2]
    sequence = jnp.arange(B)[:, None]
    is_output = jnp.zeros_like(history.is_token) if history.is_output is None else history.is_output
    tokens = jnp.where(is_output, history.tokens, vocab_size)
    committed = jnp.zeros((B, vocab_size)).at[sequence, tokens].add(1, mode="drop")
    counts = jnp.broadcast_to(committed[:, None], (B, rows, vocab_size))
    path = jnp.where(history.on_path, history.path[:, None], vocab_size)
    return counts.at[sequence[:, None], jnp.arange(rows)[None, :, None], path].add(1, mode="drop")


def _has_filter(sampling: Sampling) -> Bool[Array, " B"]:
    has_filter = (sampling.top_k > 0) | (sampling.top_p < 1) | (sampling.min_p > 0)
    return has_filter & _is_sampled(sampling)


def _filters(sampling: Sampling) -> tuple[Array, Array, Array]:
    """Top-k, top-p and min-p [B 1 1]; greedy sequences have none."""
    is_sampled = _is_sampled(sampling)
    settings = (sampling.top_k, 0), (sampling.top_p, 1.0), (sampling.min_p, 0.0)
    ks, ps, min_p = (jnp.where(is_sampled, value, none)[:, None, None] for value, none in settings)
    return ks, ps, min_p


def _is_drawable(
    scores: Float[Array, "B rows V"], token: Int[Array, "B rows"], sampling: Sampling
) -> Bool[Array, "B rows"]:
    """True if a row's token passes the filters; see `_is_kept`."""
    ks, ps, min_p = _filters(sampling)
    highest = scores.max(axis=-1, keepdims=True)
    score = jnp.take_along_axis(scores, token[..., None], axis=-1)
    is_above = scores > score
    mass = jnp.exp(scores - highest)
    rank = is_above.sum(axis=-1, keepdims=True, dtype=jnp.int32)
    above = jnp.where(is_above, mass, 0.0).sum(axis=-1, keepdims=True)
    limit = ps * _mass_of_top_k(scores, mass, sampling)
    is_kept = ((rank < ks) | (ks <= 0)) & ((above < limit) | (ps >= 1))
    is_kept &= score >= highest + jnp.log(min_p)
    return (is_kept | ~(score < highest))[..., 0]  # also True for NaN


def _mass_of_top_k(scores: Array, mass: Array, sampling: Sampling) -> Float[Array, "B rows 1"]:
    """Sums the mass of the tokens that top-k leaves for top-p."""
    ks, ps, _ = _filters(sampling)

    def of_best(mass: Array) -> Array:
        order = _order(scores)
        threshold = _least_kept(order, jnp.ones_like(mass), ks.astype(jnp.float32))
        return jnp.where((order >= threshold) | (ks <= 0), mass, 0.0).sum(axis=-1, keepdims=True)

    has_both = highest_of_groups(((ks > 0) & (ps < 1)).any())
    return lax.cond(has_both, of_best, lambda mass: mass.sum(axis=-1, keepdims=True), mass)


def _is_kept(scores: Float[Array, "B rows Vd"], sampling: Sampling) -> Bool[Array, "B rows Vd"]:
    """Top-k, then top-p over the rest, then min-p; equal scores stay or go together."""
    # Differs from transformers: among scores equal to the last one kept, top-p there keeps some.
    ks, ps, min_p = _filters(sampling)
    highest = scores.max(axis=-1, keepdims=True)
    order = _order(scores)
    threshold = _least_kept(order, jnp.ones_like(scores), ks.astype(jnp.float32))
    kept = (order >= threshold) | (ks <= 0)
    mass = jnp.where(kept, jnp.exp(scores - highest), 0.0)
    threshold = _least_kept(order, mass, ps * mass.sum(axis=-1, keepdims=True))
    kept &= (order >= threshold) | (ps >= 1)
    return kept & (scores >= highest + jnp.log(min_p))


def _order(scores: Array) -> Array:
    """Integers in the order of the scores; both zeros are equal."""
    bits = lax.bitcast_convert_type(jnp.where(scores == 0, 0.0, scores), jnp.int32)
    return jnp.where(bits < 0, bits ^ jnp.int32(0x7FFFFFFF), bits)


def _least_kept(order: Array, weights: Array, limit: Array) -> Array:
    """The least entry with less than `limit` of weight above it.

    Found by bisection over all integers, in 32 passes and without sorting the row.
    """
    highest = order.max(axis=-1, keepdims=True)

    def halve(_: Array, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds  # the answer is above low, and no more than high
        middle = (low & high) + ((low ^ high) >> 1)
        above = jnp.where(order > middle, weights, 0.0).sum(axis=-1, keepdims=True)
        is_enough = above < limit
        return jnp.where(is_enough, low, middle), jnp.where(is_enough, middle, high)

    low = jnp.full_like(highest, jnp.iinfo(jnp.int32).min)
    return lax.fori_loop(0, 32, halve, (low, highest))[1]
