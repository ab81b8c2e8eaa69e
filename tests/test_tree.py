"""The draft tree: one drawn in full, and many against plain Python."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from poss_jax.config.models import TreeConfig
from poss_jax.decode.tree import (
    expand,
    is_child,
    join_levels,
    next_beam,
    root_beam,
    select,
)

BATCH = 32


def tree_config(depth: int, top_k: int, total_tokens: int) -> TreeConfig:
    return TreeConfig(depth=depth, top_k=top_k, total_tokens=total_tokens)


def test_drawn_tree():
    #                       log p  score
    #   root 9 ─┬─ 7 (0)    -0.5   -0.5   kept    two levels of two: six candidates, the best
    #           │  ├─ 3 (2) -0.25  -0.75  kept    four of them and the root make the tree
    #           │  └─ 4 (3) -4     -4.5
    #           └─ 5 (1)    -1     -1     kept
    #              ├─ 3 (4) -0.25  -1.25  kept
    #              └─ 8 (5) -1     -2
    root = jnp.array([9], jnp.int32)
    beam = root_beam(1)
    first = expand(beam, jnp.array([[[7, 5]]], jnp.int32), jnp.array([[[-0.5, -1.0]]]))
    assert first.tokens.tolist() == [[7, 5]]
    assert first.scores.tolist() == [[-0.5, -1.0]]
    assert first.parents.tolist() == [[-1, -1]]

    beam, picks = next_beam(beam, first, first_index=0, top_k=2)
    assert picks.tolist() == [[0, 1]]
    assert beam.scores.tolist() == [[-0.5, -1.0]]
    assert beam.index.tolist() == [[0, 1]]
    assert beam.ancestors.astype(int).tolist() == [[[1, 0], [0, 1]]]

    second = expand(
        beam, jnp.array([[[3, 4], [3, 8]]], jnp.int32), jnp.array([[[-0.25, -4.0], [-0.25, -1.0]]])
    )
    candidates = join_levels([first, second])
    assert candidates.tokens.tolist() == [[7, 5, 3, 4, 3, 8]]
    assert candidates.scores.tolist() == [[-0.5, -1.0, -0.75, -4.5, -1.25, -2.0]]
    assert candidates.parents.tolist() == [[-1, -1, 0, 0, 1, 1]]

    tree = select(root, candidates, tree_config(2, 2, 5))
    assert tree.tokens.tolist() == [[9, 7, 5, 3, 3]]
    assert tree.parents.tolist() == [[0, 0, 0, 1, 2]]
    assert tree.depths.tolist() == [[0, 1, 1, 2, 2]]
    assert tree.ancestors.astype(int).tolist() == [
        [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 1, 0, 1, 0], [1, 0, 1, 0, 1]]
    ]
    for node, children in enumerate([[1, 2], [3], [4], [], []]):
        assert np.flatnonzero(is_child(tree, jnp.array([node]))[0]).tolist() == children


class Grown(NamedTuple):
    """A tree grown by plain Python, with the list it was selected from."""

    tokens: list[int]
    scores: list[np.float32]
    parents: list[int]
    kept: list[int]


def draw_levels(rng, config: TreeConfig) -> list[tuple[np.ndarray, np.ndarray]]:
    """Tokens and log-probabilities of every level; many are equal, many a zero of either sign."""
    levels = []
    for depth in range(config.depth):
        shape = (BATCH, config.top_k if depth else 1, config.top_k)
        log_probs = rng.choice(np.array([0.0, -0.0, -0.25, -0.5, -2.0], np.float32), shape)
        untied = -rng.exponential(size=shape).astype(np.float32)
        log_probs = np.where(rng.random(shape) < 0.5, log_probs, untied)
        log_probs[: BATCH // 4] = rng.choice([0.0, -0.0], log_probs[: BATCH // 4].shape)
        levels.append((rng.integers(0, 50, shape).astype(np.int32), log_probs))
    return levels


def grow_in_jax(root, levels, config: TreeConfig):
    beam, lists = root_beam(BATCH), []
    for depth, (tokens, log_probs) in enumerate(levels):
        first_index = sum(candidates.tokens.shape[1] for candidates in lists)
        lists.append(expand(beam, tokens, log_probs))
        if depth + 1 < config.depth:
            beam, _ = next_beam(beam, lists[-1], first_index=first_index, top_k=config.top_k)
    candidates = join_levels(lists)
    tree = select(root, candidates, config)
    nodes = jnp.broadcast_to(jnp.arange(config.num_nodes), (BATCH, config.num_nodes))
    children = jax.vmap(is_child, (None, 1), 1)(tree, nodes)
    return candidates, tree, children


def grow_in_python(levels, row: int, config: TreeConfig) -> Grown:
    tokens, scores, parents = [], [], []
    beam = [(-1, np.float32(0))]
    for level_tokens, log_probs in levels:
        level = []
        for place, (index, score) in enumerate(beam):
            children = zip(level_tokens[row, place], log_probs[row, place], strict=True)
            for token, log_prob in children:
                level.append((len(tokens), score + log_prob))
                tokens.append(int(token))
                scores.append(score + log_prob)
                parents.append(index)
        beam = sorted(level, key=lambda node: (-node[1], node[0]))[: config.top_k]
    best = sorted(range(len(tokens)), key=lambda index: (-scores[index], index))
    return Grown(tokens, scores, parents, sorted(best[: config.total_tokens - 1]))


def path_to_root(parents: list[int], node: int) -> list[int]:
    path = [node]
    while path[-1]:
        path.append(parents[path[-1]])
    return path


# depth, top_k, total_tokens
SHAPES = [(1, 1, 2), (1, 5, 4), (4, 1, 4), (3, 3, 12), (2, 2, 60), (6, 4, 24)]


@pytest.mark.quick
@pytest.mark.parametrize("shape", SHAPES)
def test_any_tree(shape):
    config = tree_config(*shape)
    levels = draw_levels(np.random.default_rng(shape), config)
    roots = np.arange(BATCH, dtype=np.int32)
    candidates, tree, children = jax.jit(grow_in_jax, static_argnums=2)(
        jnp.asarray(roots), jax.tree.map(jnp.asarray, levels), config
    )
    arrays = candidates.tokens, candidates.scores, candidates.parents
    tokens, scores, parents = map(np.asarray, arrays)
    depths, ancestors = np.asarray(tree.depths), np.asarray(tree.ancestors)
    for row in range(BATCH):
        grown = grow_in_python(levels, row, config)
        assert tokens[row].tolist() == grown.tokens
        assert scores[row].tolist() == grown.scores
        assert parents[row].tolist() == grown.parents
        assert {grown.parents[index] for index in grown.kept} <= {-1, *grown.kept}
        node_of = {index: node for node, index in enumerate([-1, *grown.kept])}
        want = [0] + [node_of[grown.parents[index]] for index in grown.kept]
        assert tree.tokens[row].tolist() == [roots[row]] + [grown.tokens[i] for i in grown.kept]
        assert tree.parents[row].tolist() == want
        for node in range(config.num_nodes):
            path = path_to_root(want, node)
            assert path == sorted(path, reverse=True)  # parents come before children
            assert depths[row, node] == len(path) - 1
            continuing = [child for child in range(1, len(want)) if want[child] == node]
            assert np.flatnonzero(children[row, node]).tolist() == continuing
            assert np.flatnonzero(ancestors[row, node]).tolist() == path[::-1]


@pytest.mark.parametrize(
    ("shape", "num_candidates", "num_nodes", "max_accepted"),
    [
        ((6, 10, 60), 510, 60, 6),
        ((6, 1, 7), 6, 7, 6),
        ((6, 1, 8), 6, 7, 6),
        ((8, 3, 4), 66, 4, 3),
        ((1, 2, 9), 2, 3, 1),
    ],
)
def test_counts_of_a_config(shape, num_candidates, num_nodes, max_accepted):
    config = tree_config(*shape)
    assert config.num_candidates == num_candidates
    assert (config.num_nodes, config.max_accepted) == (num_nodes, max_accepted)
