"""Acceptance: one tree drawn, and many against a walk in plain Python."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from poss_jax.decode.tree import make_tree
from poss_jax.decode.verify import accept


def test_drawn_acceptance():
    #   node 0 (1) ─┬─ node 1 (2) ─── node 3 (4) ─── node 4 (7)
    #               └─ node 2 (3)                              token in brackets
    tokens = jnp.array([[1, 2, 3, 4, 7]] * 4, jnp.int32)
    parents = jnp.array([[0, 0, 0, 1, 3]] * 4, jnp.int32)
    chosen = jnp.array(
        [
            [2, 4, 9, 5, 8],  # 2, 4, then 5 where the tree offers 7
            [3, 4, 9, 7, 8],  # 3, a leaf; what agrees below node 1 does not count
            [9, 4, 9, 7, 8],  # nothing
            [2, 4, 9, 7, 8],  # the whole path
        ],
        jnp.int32,
    )
    out = accept(make_tree(tokens, parents, depth=3), chosen, max_accepted=3)
    assert out.num_accepted.tolist() == [2, 1, 0, 3]
    assert out.num_offered.tolist() == [3, 1, 1, 3]
    assert out.path.shape == out.emitted.shape == (4, 4)
    paths = [path[: n + 1] for path, n in zip(out.path.tolist(), [2, 1, 0, 3], strict=True)]
    assert paths == [[0, 1, 3], [0, 2], [0], [0, 1, 3, 4]]
    emitted = [row[: n + 1] for row, n in zip(out.emitted.tolist(), [2, 1, 0, 3], strict=True)]
    assert emitted == [[2, 4, 5], [3, 9], [9], [2, 4, 7, 8]]


def draw_tree(rng, num_nodes: int, depth: int, vocabulary: int) -> tuple[list[int], list[int]]:
    tokens, parents, depths = [int(rng.integers(vocabulary))], [0], [0]
    taken = set()
    while len(tokens) < num_nodes:
        parent, token = int(rng.integers(len(tokens))), int(rng.integers(vocabulary))
        if depths[parent] < depth and (parent, token) not in taken:
            taken.add((parent, token))
            tokens.append(token)
            parents.append(parent)
            depths.append(depths[parent] + 1)
    return tokens, parents


def walk(tokens: list[int], parents: list[int], chosen: list[int]) -> tuple[list[int], int]:
    """Path from the root, and the deepest position at which a token was offered."""
    path = [0]
    while True:
        children = [node for node in range(1, len(tokens)) if parents[node] == path[-1]]
        agreeing = [node for node in children if tokens[node] == chosen[path[-1]]]
        if not agreeing:
            return path, len(path) - 1 + bool(children)
        path += agreeing


@pytest.mark.parametrize(("num_nodes", "depth", "vocabulary"), [(8, 3, 4), (24, 6, 5), (5, 4, 2)])
def test_any_acceptance(num_nodes, depth, vocabulary):
    rng = np.random.default_rng(num_nodes)
    trees = [draw_tree(rng, num_nodes, depth, vocabulary) for _ in range(200)]
    tokens, parents = (np.array(part, np.int32) for part in zip(*trees, strict=True))
    chosen = rng.integers(0, vocabulary, tokens.shape).astype(np.int32)
    for row in range(len(trees)):  # the target agrees at least as far as a random node
        node = rng.integers(num_nodes)
        while node:
            chosen[row, parents[row, node]] = tokens[row, node]
            node = parents[row, node]

    @jax.jit
    def run(tokens, parents, chosen):
        return accept(make_tree(tokens, parents, depth=depth), chosen, max_accepted=depth)

    out = run(*map(jnp.asarray, (tokens, parents, chosen)))
    path, emitted = np.asarray(out.path), np.asarray(out.emitted)
    assert path.shape == emitted.shape == (len(trees), depth + 1)
    for row in range(len(trees)):
        want, num_offered = walk(tokens[row], parents[row], chosen[row])
        assert out.num_accepted[row] == len(want) - 1
        assert out.num_offered[row] == num_offered
        assert path[row, : len(want)].tolist() == want
        assert emitted[row, : len(want)].tolist() == chosen[row, want].tolist()
    assert set(out.num_accepted.tolist()) == set(range(depth + 1))
    is_more = out.num_offered > out.num_accepted
    assert is_more.any() and not is_more.all()
