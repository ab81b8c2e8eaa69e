"""Sampled drafts with rejection: children are drawn from the draft, and kept by a ratio test.

The third drafting method, after argmax and coupled drafts, used by SpecInfer (arXiv 2305.09781) and
EAGLE (2401.15077). Outputs have the target's distribution, but differ from what the target alone
writes with the same seed.

  - Drafting: a node's children are drawn without replacement from the draft's distribution q, and
    keep their order: best first by log q plus separate Gumbel noise.
  - Verification: with p the target's distribution, child x is accepted with probability
    min(1, p(x) / q(x)). If it is not, p becomes norm(max(p - q, 0)), x is removed from q, and the
    next child is tested. If none is left, the token is drawn from p.

The test decides on a token at every node separately, so the path is found as for other trees
(`verify.accept`). If the filters leave fewer tokens than a node has children, the other children
are not tested; a token drawn from p may still equal one of them.

The test is exact only if the children it sees do not depend on their drawn values. So neither
tokens nor probabilities decide where the tree grows, only the order in which children are drawn:
the child of rank 0 is accepted most often. With the score of a rank instead of a
log-probability, EAGLE-2's search gives a tree of the same shape in every round (`groups_of`).
"""

from functools import cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from poss_jax.config.models import TreeConfig
from poss_jax.decode.drafting import Level, allow, draft
from poss_jax.decode.sampling import History, Sampling, process_logits
from poss_jax.decode.state import DecodeState, StaticShape, Weights
from poss_jax.decode.tree import Tree, select
from poss_jax.model.ranking import choose
from poss_jax.model.ranking import top_k as best_of
from poss_jax.shapes import Array, Float, Int, UInt

# The next rank counts as three levels more: right if each tested child passes with probability
# a = 0.68, for which 1 - a = a^3. Whole numbers are added without rounding.
_LEVELS_PER_RANK = 3
_DRAFTS = 2**32 - 1  # folded into a seed in place of a position, which is always smaller

Path = tuple[int, ...]
"""Ranks, among their siblings, of the nodes from the root to a node."""


class Groups(NamedTuple):
    """Siblings of a drawn tree.

    ranks   root ─┬─ 0 ─┬─ 0 ─── 0        nodes  0 ─┬─ 1 ─┬─ 3 ─── 6
                  │     └─ 1                        │     └─ 4
                  └─ 1 ─── 0                        └─ 2 ─── 5

    parents (0, 1, 2, 3)   children ((1, 2), (3, 4), (5, -1), (6, -1))   rows (0, 1, 2, 3)
    """

    parents: tuple[int, ...]  # node that each group continues
    # its children in the order of their ranks; padded with -1
    children: tuple[tuple[int, ...], ...]
    rows: tuple[int, ...]  # index of each parent in the list of nodes with drawn children


@cache
def groups_of(tree: TreeConfig) -> Groups:
    """Siblings of all drawn trees of a size."""
    beam: list[Path] = [()]
    expanded: list[Path] = []  # `draft` runs these nodes, in this order
    listed: list[Path] = []  # and lists these children
    for _ in range(tree.depth):
        level = [(*path, rank) for path in beam for rank in range(tree.top_k)]
        expanded, listed = expanded + beam, listed + level
        beam = sorted(level, key=_cost)[: tree.top_k]
    kept = set(sorted(listed, key=_cost)[: tree.num_nodes - 1])
    nodes = {path: node for node, path in enumerate([(), *filter(kept.__contains__, listed)])}
    children: dict[Path, list[int]] = {}
    for path, node in nodes.items():
        if path:
            children.setdefault(path[:-1], []).append(node)
    size = max(map(len, children.values()))
    return Groups(
        parents=tuple(nodes[path] for path in children),
        children=tuple((*group, *[-1] * (size - len(group))) for group in children.values()),
        rows=tuple(expanded.index(path) for path in children),
    )


def _cost(path: Path) -> int:
    return len(path) + _LEVELS_PER_RANK * sum(path)


class DrawnTree(Tree):
    """A tree with drawn children, and the inputs of their test."""

    # distribution that the children of each group were drawn from, over the target's vocabulary
    probs: Array  # [B groups V] float32
    thresholds: Array  # [B M] float32, uniform number that each node is tested with
    groups: Groups = struct.field(pytree_node=False)  # its siblings


def draw_tree(
    weights: Weights,
    config: StaticShape,
    state: DecodeState,
    sampling: Sampling,
    history: History,
    allowed: UInt[Array, "B words"] | None = None,
) -> DrawnTree:
    """Drafts a tree; greedy sequences get the most likely children.

    The path of `history` is ignored. After the root a grammar allows `allowed`; None: all tokens.
    """
    assert config.draft is not None and state.draft is not None, "want a draft"
    vocabulary, V = weights.draft["vocabulary"], config.target.vocab_size
    noise_shape = config.tree.depth, V if vocabulary is None else len(vocabulary)
    position, num_nodes = state.target_cache.length, config.tree.num_nodes
    noise, thresholds = _draw_numbers(sampling, position, noise_shape, num_nodes)
    probs = []  # one entry per level, as `draft` asks for children

    def children(logits: Array, level: Level, top_k: int) -> tuple[Array, Array]:
        on_level = history._replace(path=level.path, on_path=level.on_path)
        scores = process_logits(logits, sampling, on_level, vocab_size=V, vocabulary=vocabulary)
        q = jax.nn.softmax(scores)
        if vocabulary is not None:
            q = jnp.zeros((*q.shape[:2], V)).at[..., vocabulary].set(q)
        probs.append(q)
        _, ids = best_of(scores + noise[:, level.depth, None], top_k)
        costs = jnp.asarray([_cost((rank,)) for rank in range(top_k)], jnp.float32)
        return ids, jnp.broadcast_to(-costs[None, None], ids.shape)

    pairs = state.draft.cache, state.draft.root_input
    drawn = allow(children, allowed, vocabulary, V)
    candidates = draft(weights.draft, config.draft, config.tree, *pairs, drawn)
    groups = groups_of(config.tree)
    return DrawnTree(
        **vars(select(state.root, candidates, config.tree)),
        probs=jnp.concatenate(probs, axis=1)[:, jnp.asarray(groups.rows)],
        thresholds=thresholds,
        groups=groups,
    )


def choose_drawn(
    tree: DrawnTree,
    chosen: Int[Array, "B M"],
    logits: Float[Array, "B M V"],
    noise: Float[Array, "B M V"],
    sampling: Sampling,
    history: History,
) -> Int[Array, "B M"]:
    """Chooses the token after every node: the child that passes the test, or a draw from the rest.

    Args:
      chosen: the target's choices; kept at nodes without children and in greedy sequences.
      logits: logits of the target, which draws with `noise`.
      history: tokens before each choice.
    """
    parents, children = map(jnp.asarray, (tree.groups.parents, tree.groups.children))
    history = history._replace(on_path=history.on_path[:, parents])
    accepted, residual = accept_child(
        jax.nn.softmax(process_logits(logits[:, parents], sampling, history)),
        tree.probs,
        jnp.where(children[None] < 0, -1, tree.tokens[:, children]),
        tree.thresholds[:, children],
    )
    drawn = choose(jnp.log(residual) + noise[:, parents])
    decided = jnp.where(accepted < 0, drawn, accepted)
    is_sampled = sampling.temperature[:, None] > 0
    return jnp.where(is_sampled, chosen.at[:, parents].set(decided), chosen)


def accept_child(
    target: Float[Array, "B groups V"],
    drafted: Float[Array, "B groups V"],
    tokens: Int[Array, "B groups W"],
    thresholds: Float[Array, "B groups W"],
) -> tuple[Int[Array, "B groups"], Float[Array, "B groups V"]]:
    """Tests the children of every group in drawing order.

    Args:
      target: distribution p of the token.
      drafted: distribution q that the children were drawn from, without replacement.
      tokens: the children; -1 where there are no more.
      thresholds: uniform numbers.

    Returns:
      The accepted child or -1, and the distribution to draw from in that case.
    """
    ids = jnp.arange(target.shape[-1])[None, None]
    accepted = jnp.full(tokens.shape[:2], -1, jnp.int32)
    for index in range(tokens.shape[2]):
        token = tokens[:, :, index, None]
        p, q = (jnp.take_along_axis(probs, token, axis=2)[..., 0] for probs in (target, drafted))
        passes = (token[..., 0] >= 0) & (q > 0) & (thresholds[:, :, index] * q < p)
        accepted = jnp.where((accepted < 0) & passes, token[..., 0], accepted)
        residual = _normalise(jnp.maximum(target - drafted, 0), otherwise=target)
        target = jnp.where(token < 0, target, residual)
        drafted = remove(drafted, ids == token)
    return accepted, target


def remove(drafted: Float[Array, "B groups V"], is_token: Array) -> Float[Array, "B groups V"]:
    """The distribution without a token; all 0 after the last."""
    remaining = jnp.where(is_token, 0, drafted)
    return _normalise(remaining, otherwise=remaining)


def _normalise(weights: Array, *, otherwise: Array) -> Array:
    total = weights.sum(axis=-1, keepdims=True)
    return jnp.where(total > 0, weights / jnp.where(total > 0, total, 1), otherwise)


def _draw_numbers(
    sampling: Sampling, position: Int[Array, " B"], noise_shape: tuple[int, int], num_nodes: int
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
