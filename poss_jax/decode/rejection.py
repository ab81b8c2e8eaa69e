"""Sampled drafts with rejection: children are drawn from the draft, and kept by a ratio test.

The third way to draft, beside argmax and coupled drafts, and the one of SpecInfer (arXiv
2305.09781) and EAGLE (2401.15077). Texts have the target's distribution, but are not those that
the target alone writes with the same seed.

  - Drafting: the children of a node are drawn without replacement from the draft's distribution q,
    in an order that counts: the best of log q plus Gumbel noise of their own.
  - Verification: with p the target's distribution, child x is accepted with probability
    min(1, p(x) / q(x)). If it is not, p becomes norm(max(p - q, 0)), x is removed from q, and the
    next child is tested. Where none is left, the token is drawn from p.

The test decides on a token at every node by itself, so that the path is found as for other trees
(`verify.accept`). Where the filters leave fewer tokens than a node has children, the other children
are not tested; a token that is drawn from p may still equal one of them.

The test is exact only if the children it sees do not depend on what was drawn for them. So all are
kept, and the tree has the same shape in every round (`Widths`). The nodes that get children are the
best of their level: that depends on tokens above those children alone.
"""

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from poss_jax.config.models import TreeConfig
from poss_jax.decode.drafting import Level, draft
from poss_jax.decode.ranking import choose
from poss_jax.decode.ranking import top_k as best_of
from poss_jax.decode.sampling import Sampling, Text, process_logits
from poss_jax.decode.state import DecodeConfig, DecodeState, Weights
from poss_jax.decode.tree import Tree, make_tree
from poss_jax.shapes import Array, Float, Int

_DRAFTS = 2**32 - 1  # folded into a seed where the target's noise has a position, which is smaller


class Widths(NamedTuple):
    """Shape of a tree that keeps all children it draws.

        depth 3, of_root 3, inner 2         root ─┬─ 1 ─┬─ 4 ─┬─ 8
                                                  │     │     └─ 9
                                                  │     └─ 5
                                                  ├─ 2 ─┬─ 6
                                                  │     └─ 7 ─┬─ 10
                                                  └─ 3        └─ 11

    Attributes:
      depth: levels.
      of_root: children of the root.
      inner: nodes of every level between root and leaves that get children, and how many each gets.
    """

    depth: int
    of_root: int
    inner: int


def widths_of(tree: TreeConfig) -> Widths:
    """Widest tree of that depth that is within `total_tokens` and no wider than `top_k`.

    The root gets the nodes that are left when the levels below it are as wide as they can be.
    """
    budget, depth = tree.num_nodes - 1, tree.max_accepted
    fitting = [k for k in range(1, tree.top_k + 1) if k + (depth - 1) * k**2 <= budget]
    inner = fitting[-1]
    return Widths(depth, min(tree.top_k, budget - (depth - 1) * inner**2), inner)


class DrawnTree(Tree):
    """A tree whose children were drawn, and what the test of them needs.

    Attributes:
      probs: draft's distribution at each node that has children, over the target's vocabulary.
      thresholds: uniform number that each node is tested with.
      widths: shape of the tree.
    """

    probs: Array  # [B groups V] float32
    thresholds: Array  # [B M] float32
    widths: Widths = struct.field(pytree_node=False)

    @property
    def parents_of_groups(self) -> Int[Array, "B groups"]:
        """The nodes that have children, in the order of their children."""
        first = 1 + self.widths.of_root
        return jnp.pad(self.parents[:, first :: self.widths.inner], ((0, 0), (1, 0)))

    def by_group(self, of_nodes: Array) -> tuple[Array, Array]:
        """Children of the root and those of the others, [B groups W] each; the root's are more."""
        first = 1 + self.widths.of_root
        inner = of_nodes[:, first:].reshape(len(of_nodes), -1, self.widths.inner)
        return of_nodes[:, None, 1:first], inner


def draw_tree(
    weights: Weights, config: DecodeConfig, state: DecodeState, sampling: Sampling, text: Text
) -> DrawnTree:
    """Drafts a tree; greedy sequences get the most likely children.

    Args:
      weights: target and draft.
      config: static settings.
      state: state before the round.
      sampling: the request's settings.
      text: tokens so far; the path in it is not looked at.
    """
    assert config.draft is not None and state.draft is not None, "want a draft"
    widths, vocabulary = widths_of(config.tree), weights.draft["vocabulary"]
    V = config.target.vocab_size
    noise, thresholds = _draw_numbers(
        sampling,
        state.target_cache.length,
        noise_shape=(widths.depth, V if vocabulary is None else len(vocabulary)),
        num_nodes=1 + widths.of_root + (widths.depth - 1) * widths.inner**2,
    )
    probs = []  # of every level, as `draft` asks for its children

    def children(logits: Array, level: Level, top_k: int) -> tuple[Array, Array]:
        before = text._replace(path=level.path, on_path=level.on_path)
        scores = process_logits(logits, sampling, before, vocab_size=V, vocabulary=vocabulary)
        log_probs = jax.nn.log_softmax(scores)
        probs.append(_over_target(jnp.exp(log_probs), vocabulary, V))
        noisy = scores + noise[:, level.depth, None]
        _, ids = best_of(noisy, top_k if level.depth else widths.of_root)
        return ids, jnp.minimum(jnp.take_along_axis(log_probs, ids, axis=-1), 0.0)

    drafted = draft(
        weights.draft,
        config.draft,
        replace(config.tree, depth=widths.depth, top_k=widths.inner),
        state.draft.cache,
        state.draft.root_input,
        children,
    )
    tree = make_tree(
        jnp.concatenate([state.root[:, None], drafted.tokens], axis=1),
        jnp.pad(drafted.parents + 1, ((0, 0), (1, 0))),
        depth=widths.depth,
    )
    return DrawnTree(
        **vars(tree), probs=jnp.concatenate(probs, axis=1), thresholds=thresholds, widths=widths
    )


def choose_drawn(
    tree: DrawnTree,
    chosen: Int[Array, "B M"],
    logits: Float[Array, "B M V"],
    noise: Float[Array, "B M V"],
    sampling: Sampling,
    text: Text,
) -> Int[Array, "B M"]:
    """The token after every node: the child that passes the test, or a draw from what is left.

    Args:
      tree: the drawn tree.
      chosen: the target's choices; those of nodes without children and of greedy sequences stay.
      logits: the target's.
      noise: the target's, of every node.
      sampling: the request's settings.
      text: tokens before each choice.
    """
    parents = tree.parents_of_groups
    of_parents = partial(jnp.take_along_axis, indices=parents[:, :, None], axis=1)
    text = text._replace(on_path=of_parents(text.on_path))
    target = jax.nn.softmax(process_logits(of_parents(logits), sampling, text))
    groups = zip(
        (slice(0, 1), slice(1, None)),  # the root, and the others
        tree.by_group(tree.tokens),
        tree.by_group(tree.thresholds),
        strict=True,
    )
    tested = [
        accept_child(target[:, rows], tree.probs[:, rows], tokens, thresholds)
        for rows, tokens, thresholds in groups
    ]
    accepted, left = (jnp.concatenate(parts, axis=1) for parts in zip(*tested, strict=True))
    drawn = choose(jnp.log(left) + of_parents(noise))
    decided = jnp.where(accepted < 0, drawn, accepted)
    rows = jnp.arange(len(chosen))[:, None]
    is_sampled = sampling.temperature[:, None] > 0
    return jnp.where(is_sampled, chosen.at[rows, parents].set(decided), chosen)


def accept_child(
    target: Float[Array, "B groups V"],
    drafted: Float[Array, "B groups V"],
    tokens: Int[Array, "B groups W"],
    thresholds: Float[Array, "B groups W"],
) -> tuple[Int[Array, "B groups"], Float[Array, "B groups V"]]:
    """Tests the children of every group in the order in which they were drawn.

    Args:
      target: distribution p that the accepted or drawn token has.
      drafted: distribution q that the children were drawn from, without replacement.
      tokens: the children.
      thresholds: uniform numbers.

    Returns:
      The accepted child, -1 where none is, and the distribution to draw from in that case.
    """
    ids = jnp.arange(target.shape[-1])[None, None]
    accepted = jnp.full(tokens.shape[:2], -1, jnp.int32)
    for index in range(tokens.shape[2]):
        token = tokens[:, :, index, None]
        p, q = (jnp.take_along_axis(probs, token, axis=2)[..., 0] for probs in (target, drafted))
        passes = (q > 0) & (thresholds[:, :, index] * q < p)
        accepted = jnp.where((accepted < 0) & passes, token[..., 0], accepted)
        target = _normalise(jnp.maximum(target - drafted, 0), otherwise=target)
        drafted = remove(drafted, ids == token)
    return accepted, target


def remove(drafted: Float[Array, "B groups V"], is_token: Array) -> Float[Array, "B groups V"]:
    """The distribution without a token; all 0 after the last."""
    rest = jnp.where(is_token, 0, drafted)
    return _normalise(rest, otherwise=rest)


def _normalise(weights: Array, *, otherwise: Array) -> Array:
    total = weights.sum(axis=-1, keepdims=True)
    return jnp.where(total > 0, weights / jnp.where(total > 0, total, 1), otherwise)


def _over_target(
    probs: Float[Array, "B rows Vd"], vocabulary: Int[Array, " Vd"] | None, vocab_size: int
) -> Float[Array, "B rows V"]:
    if vocabulary is None:
        return probs
    return jnp.zeros((*probs.shape[:2], vocab_size)).at[..., vocabulary].set(probs)


def _draw_numbers(
    sampling: Sampling,
    position: Int[Array, " B"],
    *,
    noise_shape: tuple[int, int],
    num_nodes: int,
) -> tuple[Float[Array, "B depth Vd"], Float[Array, "B M"]]:
    """Noise of the draft, 0 in greedy rows, and thresholds; new ones at each position."""

    def draw(seed: Array, position: Array) -> tuple[Array, Array]:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), _DRAFTS), position)
        of_noise, of_thresholds = jax.random.split(key)
        return (
            jax.random.gumbel(of_noise, noise_shape, jnp.float32, mode="high"),
            jax.random.uniform(of_thresholds, (num_nodes,)),
        )

    noise, thresholds = jax.vmap(draw)(sampling.seed, position)
    return jnp.where(sampling.temperature[:, None, None] > 0, noise, 0.0), thresholds
