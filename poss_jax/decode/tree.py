"""The draft tree as arrays of static shape: expansion level by level, then selection.

All drafted candidates form one list: the W children of the root, then W*W of every later level
(W beam nodes times W children each). The best M-1 of them and the root make the tree:

    list   0 1 2 | 3 4 5  6 7 8  9 10 11 | ...      W = 3: level 0, then 3 beam nodes x 3 children
    kept   *   *   *      *                         M = 5
    node   1   2   3      4                         node 0 is the root
"""

import jax.numpy as jnp
from flax import struct
from jax import lax

from poss_jax.config.models import TreeConfig
from poss_jax.shapes import Array, Bool, Float, Int


class Candidates(struct.PyTreeNode):
    """Every drafted node, level by level; parents come before children.

    Attributes:
      tokens: ids of the target's vocabulary.
      scores: path log-probability, natural log.
      parents: index in this list of the node each one continues; -1 is the root.
      num_copied: how many, the last ones, are a chain copied by `lookup`.
    """

    tokens: Array  # [B C] int32
    scores: Array  # [B C] float32
    parents: Array  # [B C] int32
    num_copied: int = struct.field(pytree_node=False, default=0)


class Beam(struct.PyTreeNode):
    """The nodes of one level that get children.

    Attributes:
      scores: path log-probability of each node.
      index: each node's index in the list of candidates (-1: the root).
      ancestors: beam nodes of all levels so far on each node's path, itself included.
    """

    scores: Array  # [B W] float32
    index: Array  # [B W] int32
    ancestors: Array  # [B W levels*W] bool


class Tree(struct.PyTreeNode):
    """The root and the kept nodes; parents come before children, node 0 is the root.

    Attributes:
      tokens: token of each node.
      parents: node each one continues; the root is its own.
      depths: distance from the root.
      ancestors: True where the second node is the first or lies on its path to the root.
      is_copied: nodes that only `lookup` proposed, and all below them.
      is_certain: nodes that nobody proposed, as a grammar allows nothing else, and all below them.
    """

    tokens: Array  # [B M] int32
    parents: Array  # [B M] int32
    depths: Array  # [B M] int32
    ancestors: Array  # [B M M] bool
    is_copied: Array  # [B M] bool
    is_certain: Array  # [B M] bool


def root_beam(batch: int) -> Beam:
    """The beam before anything is drafted: the root alone."""
    return Beam(
        scores=jnp.zeros((batch, 1)),
        index=jnp.full((batch, 1), -1),
        ancestors=jnp.zeros((batch, 1, 0), bool),
    )


def expand(
    beam: Beam, tokens: Int[Array, "B rows W"], log_probs: Float[Array, "B rows W"]
) -> Candidates:
    """Lists the children of a beam, row by row; no child scores above its parent."""
    batch, _, W = tokens.shape
    parent = beam.scores[:, :, None]
    scores = _at_most(parent + log_probs, parent)
    return Candidates(
        tokens=tokens.reshape(batch, -1),
        scores=scores.reshape(batch, -1),
        parents=jnp.repeat(beam.index, W, axis=1),
    )


def next_beam(
    beam: Beam, level: Candidates, *, first_index: int, top_k: int
) -> tuple[Beam, Int[Array, "B W"]]:
    """Chooses the best `top_k` candidates of a level.

    Args:
      beam: the nodes whose children `level` lists.
      level: those children.
      first_index: index of the level's first candidate in the whole list.

    Returns:
      The new beam, and the index within the level of each of its nodes.
    """
    scores, picks = lax.top_k(level.scores, top_k)
    parent_row = picks // (level.scores.shape[1] // beam.scores.shape[1])
    inherited = jnp.take_along_axis(beam.ancestors, parent_row[:, :, None], axis=1)
    itself = jnp.broadcast_to(jnp.eye(top_k, dtype=bool), (len(picks), top_k, top_k))
    ancestors = jnp.concatenate([inherited, itself], axis=2)
    return Beam(scores=scores, index=picks + first_index, ancestors=ancestors), picks


def join_levels(levels: list[Candidates]) -> Candidates:
    """Appends the candidates of all levels into one list."""
    return Candidates(
        tokens=jnp.concatenate([level.tokens for level in levels], axis=1),
        scores=jnp.concatenate([level.scores for level in levels], axis=1),
        parents=jnp.concatenate([level.parents for level in levels], axis=1),
    )


def select(root: Int[Array, " B"], candidates: Candidates, config: TreeConfig) -> Tree:
    """Keeps the best nodes of the list, parents always included (EAGLE-2's reranking).

    Nodes are ranked by the lowest score on their path, which is their own unless rounding raised a
    sum of log-probabilities. So a node ranks below its parent or ties with it, and on ties the
    lower index (the parent) is kept: the kept nodes are closed under parents for any scores.

    Args:
      root: the last chosen token.
      candidates: all drafted nodes, of at most `config.depth` levels, and copies. If there are
        copies, kept nodes of score -inf become their own parents, so that no path has them. Copies
        alone are all kept.
      config: number to keep; `config.num_nodes` counts the root.
    """
    batch, num_candidates = candidates.tokens.shape
    num_copied = candidates.num_copied
    num_drafted = num_candidates - num_copied
    num_nodes = config.num_nodes if num_drafted else 1 + num_copied
    ranks = _lowest_on_path(candidates, depth=config.depth)
    _, kept = lax.top_k(ranks, num_nodes - 1)
    kept = jnp.sort(kept, axis=1)
    node_of = jnp.zeros((batch, num_candidates + 1), jnp.int32)  # the last entry stands for -1
    rows = jnp.arange(batch)[:, None]
    nodes = jnp.arange(1, num_nodes, dtype=jnp.int32)[None]
    node_of = node_of.at[rows, kept].set(nodes)
    parents = node_of[rows, jnp.take_along_axis(candidates.parents, kept, axis=1)]
    tokens = jnp.take_along_axis(candidates.tokens, kept, axis=1)
    if num_copied:
        has_path = jnp.take_along_axis(candidates.scores, kept, axis=1) > -jnp.inf
        tokens, parents = jnp.where(has_path, tokens, 0), jnp.where(has_path, parents, nodes)
    return make_tree(
        jnp.concatenate([root[:, None], tokens], axis=1),
        jnp.pad(parents, ((0, 0), (1, 0))),
        depth=max(config.depth, num_copied),
        is_copied=jnp.pad(kept >= num_drafted, ((0, 0), (1, 0))) if num_copied else None,
    )


def make_tree(
    tokens: Int[Array, "B M"],
    parents: Int[Array, "B M"],
    *,
    depth: int,
    is_copied: Bool[Array, "B M"] | None = None,
    is_certain: Bool[Array, "B M"] | None = None,
) -> Tree:
    """Derives depths and ancestors from parents; `depth` bounds the longest path.

    `is_copied` and `is_certain` (see `Tree`) mark nodes, and thereby all below them; None: no node.
    """
    batch, M = tokens.shape
    ancestors = jnp.broadcast_to(jnp.eye(M, dtype=bool), (batch, M, M))
    for _ in range(depth):
        ancestors |= jnp.take_along_axis(ancestors, parents[:, :, None], axis=1)
    depths = ancestors.sum(axis=2, dtype=jnp.int32) - 1

    def mark(nodes: Bool[Array, "B M"] | None) -> Bool[Array, "B M"]:
        if nodes is None:
            return jnp.zeros((batch, M), bool)
        return (ancestors & nodes[:, None]).any(axis=2)

    return Tree(tokens, parents, depths, ancestors, mark(is_copied), mark(is_certain))


def root_tree(root: Int[Array, " B"]) -> Tree:
    """The tree of autoregressive decoding: nothing drafted."""
    tokens = root[:, None]
    return make_tree(tokens, jnp.zeros_like(tokens), depth=0)


def is_child(tree: Tree, node: Int[Array, " B"]) -> Bool[Array, "B M"]:
    """Marks the nodes that continue the given one."""
    return (tree.parents == node[:, None]).at[:, 0].set(False)  # the root is its own parent


def _lowest_on_path(candidates: Candidates, *, depth: int) -> Float[Array, "B C"]:
    """Lowest score between each candidate and the root."""
    lowest = candidates.scores
    for _ in range(depth):
        with_root = jnp.pad(lowest, ((0, 0), (0, 1)))  # its score is 0, its index -1 the last
        lowest = _at_most(lowest, jnp.take_along_axis(with_root, candidates.parents, axis=1))
    return lowest


def _at_most(scores: Array, bound: Array) -> Array:
    """Clamps scores to a bound.

    Unlike `minimum`, the result sorts below the bound or equals it bit for bit, also where a score
    is -0.0 or NaN.
    """
    return jnp.where(scores < bound, scores, bound)
