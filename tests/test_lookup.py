"""Lookup: what is copied, against plain Python, and how it enters the tree."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import tiny_llama
from oracle import Shape
from test_speculate import LONGROPE

from poss_jax.config.models import DraftConfig, TreeConfig
from poss_jax.decode.lookup import (
    LONGEST,
    SHORTEST,
    draft_unless_copied,
    look_up,
    merge,
    score,
)
from poss_jax.decode.tree import Candidates, expand, join_levels, next_beam, root_beam, select

BATCH, ROWS, SIZE = 64, 40, 6


def plain_look_up(ids: list[int], size: int) -> tuple[list[int], int]:
    """The longest earlier run that ends like the ids, the last one of these, and `size` copies."""
    best, following = 0, []
    for end in range(1, len(ids)):
        run = 0
        while run < min(end, LONGEST) and ids[end - 1 - run] == ids[-1 - run]:
            run += 1
        if run >= max(best, 1):
            best, following = run, ids[end:]
    copies = [following[index % len(following)] for index in range(size)] if best else []
    return copies, best


jit_look_up = jax.jit(look_up, static_argnums=2)


def check_look_up(search=jit_look_up) -> None:
    """Compares sequences of few different ids, followed by other ids of the same vocabulary."""
    rng = np.random.default_rng(0)
    runs = set()
    for vocab_size in (2, 3, 8):
        ids = rng.integers(0, vocab_size, (BATCH, ROWS)).astype(np.int32)
        length = rng.integers(1, ROWS + 1, BATCH).astype(np.int32)
        length[:4] = 1, 2, ROWS - 1, ROWS
        tokens, run = map(np.asarray, search(jnp.asarray(ids), jnp.asarray(length), SIZE))
        for row in range(BATCH):
            copies, longest = plain_look_up(ids[row, : length[row]].tolist(), SIZE)
            assert run[row] == longest
            runs.add(longest)
            if longest:
                assert tokens[row].tolist() == copies
    assert runs == set(range(LONGEST + 1))


@pytest.mark.quick
def test_copies_are_those_of_plain_python():
    check_look_up()


def test_scores_fall_with_depth_and_rise_with_the_run():
    scores = np.asarray(score(jnp.arange(SHORTEST, LONGEST + 1), SIZE))
    assert (np.diff(scores, axis=1) < 0).all() and (np.diff(scores, axis=0) > 0).all()
    assert (scores < 0).all()


def draw_candidates(rng: np.random.Generator, config: TreeConfig, vocab_size: int) -> Candidates:
    beam, lists = root_beam(BATCH), []
    for depth in range(config.depth):
        width, W = beam.scores.shape[1], config.top_k
        order = rng.permuted(np.tile(np.arange(vocab_size), (BATCH, width, 1)), axis=2)
        log_probs = -rng.exponential(size=(BATCH, width, W)).astype(np.float32)
        first_index = sum(candidates.tokens.shape[1] for candidates in lists)
        tokens = jnp.asarray(order[..., :W], jnp.int32)
        lists.append(expand(beam, tokens, jnp.asarray(log_probs)))
        if depth + 1 < config.depth:
            beam, _ = next_beam(beam, lists[-1], first_index=first_index, top_k=W)
    return join_levels(lists)


def draw_chain(rng: np.random.Generator, size: int, vocab_size: int) -> Candidates:
    run = rng.integers(SHORTEST, LONGEST + 1, BATCH)
    scores = np.array(score(jnp.asarray(run, jnp.int32), size))
    scores[::4] = -np.inf  # no run
    tokens = jnp.asarray(rng.integers(0, vocab_size, (BATCH, size)), jnp.int32)
    parents = jnp.broadcast_to(jnp.arange(size)[None] - 1, tokens.shape)
    return Candidates(tokens, jnp.asarray(scores), parents, num_copied=size)


def paths_of(tokens: list[int], parents: list[int]) -> list[tuple[int, ...]]:
    """Tokens on the path to each candidate."""
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tokens, parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


# depth, top_k, total_tokens; length of the chain
SHAPES = [((1, 1, 2), 1), ((3, 3, 12), 6), ((2, 2, 6), 9)]


@pytest.mark.quick
@pytest.mark.parametrize(("shape", "size"), SHAPES)
def test_any_chain_in_any_tree(shape, size):
    """The tree has the best paths of both; those of both once, with the higher score."""
    config = TreeConfig(**dict(zip(("depth", "top_k", "total_tokens"), shape, strict=True)))
    rng = np.random.default_rng([*shape, size])
    drafted, chain = draw_candidates(rng, config, 5), draw_chain(rng, size, 5)
    root = jnp.full(BATCH, 9, jnp.int32)

    @jax.jit
    def grow(drafted, chain):
        merged = merge(drafted, chain, depth=config.depth)
        return select(root, merged, config), select(root, drafted, config)

    tree, alone = jax.device_get([vars(tree) for tree in grow(drafted, chain)])
    num_merged = 0
    for row in range(BATCH):
        tokens, values, parents = (leaf[row].tolist() for leaf in jax.tree.leaves(drafted))
        scores = dict(zip(paths_of(tokens, parents), values, strict=True))
        own = set(scores)
        copies = chain.tokens[row].tolist()
        for index, of_copy in enumerate(np.asarray(chain.scores[row]).tolist()):
            path = tuple(copies[: index + 1])
            num_merged += path in own and of_copy > -np.inf
            scores[path] = max(scores.get(path, -np.inf), of_copy)
        best = sorted(scores, key=lambda path: -scores[path])[: config.num_nodes - 1]
        parents = (tree["parents"][row, 1:] - 1).tolist()
        nodes = paths_of(tree["tokens"][row, 1:].tolist(), parents)
        assert sorted(nodes) == sorted(best)
        assert [path not in own for path in nodes] == tree["is_copied"][row, 1:].tolist()
        assert tree["depths"][row, 1:].tolist() == list(map(len, nodes))
        if not row % 4:  # bit for bit as without lookup
            for name, got in tree.items():
                np.testing.assert_array_equal(got[row], alone[name][row])
    assert num_merged


def test_a_chain_alone_is_the_tree_and_none_leaves_the_root():
    rng = np.random.default_rng(0)
    chain = draw_chain(rng, 3, 5)
    config = TreeConfig(depth=4, top_k=4, total_tokens=16)
    tree = select(jnp.full(BATCH, 9, jnp.int32), chain, config)
    assert tree.parents[0].tolist() == [0, 1, 2, 3]  # no run: their own parents
    assert tree.parents[1].tolist() == [0, 0, 1, 2] and tree.depths[1].tolist() == [0, 1, 2, 3]
    assert tree.tokens[1].tolist() == [9, *chain.tokens[1].tolist()]
    assert tree.is_copied[1].tolist() == [False, True, True, True]


@pytest.mark.parametrize(
    ("runs", "is_done", "is_drafted"),
    [
        ([LONGEST, LONGEST], [False, False], False),
        ([LONGEST, LONGEST - 1], [False, False], True),
        ([LONGEST, LONGEST - 1], [False, True], False),
        ([LONGEST, 0], [False, False], True),
        ([LONGEST, LONGEST], [True, True], True),  # as where phases are timed
    ],
)
def test_the_longest_runs_need_no_draft(runs, is_done, is_drafted):
    config = TreeConfig(depth=2, top_k=2, total_tokens=6)
    drawn = draw_candidates(np.random.default_rng(0), config, 5)
    drafted = jax.tree.map(lambda leaf: leaf[:2], drawn)
    scores = score(jnp.asarray(runs, jnp.int32), 3)
    scores = jnp.where(jnp.asarray(runs)[:, None] >= SHORTEST, scores, -jnp.inf)
    tokens, parents = jnp.full((2, 3), 7), jnp.broadcast_to(jnp.arange(3)[None] - 1, (2, 3))
    chain = Candidates(tokens, scores, parents, num_copied=3)

    @jax.jit
    def grow(chain, is_done):
        candidates = draft_unless_copied(lambda: drafted, chain, is_done)
        merged = merge(candidates, chain, depth=config.depth)
        return candidates, select(jnp.full(2, 9), merged, config)

    candidates, tree = grow(chain, jnp.asarray(is_done))
    if is_drafted:
        np.testing.assert_array_equal(candidates.scores, drafted.scores)
    else:  # the chain, and nodes that no path has
        assert np.isneginf(candidates.scores).all()
        assert sorted(tree.depths[0].tolist()) == [0, 0, 0, 1, 2, 3]
        path = tree.tokens[0][tree.depths[0] > 0]
        assert path.tolist() == [7, 7, 7]


LLAMA = tiny_llama(vocab_size=11, rope=LONGROPE)  # so few tokens that runs come again
DRAFTS = {
    "poss": DraftConfig(layer=LLAMA, positions_per_specialist=(1, 2)),
    "eagle3": DraftConfig(layer=LLAMA, family="eagle3", aux_layers=(0, 1), head_size=11),
}


@pytest.mark.parametrize(
    ("family", "is_sampled"),
    [
        ("poss", True),
        ("eagle3", False),
        pytest.param("poss", False, marks=pytest.mark.slow),
        pytest.param("eagle3", True, marks=pytest.mark.slow),
    ],
)
def test_copies_change_no_token(family, is_sampled):
    check_tokens(family, is_sampled=is_sampled)


def check_tokens(family: str, *, is_sampled: bool) -> None:
    """Compares texts, many of them copied more deeply than they are drafted, with the target's."""
    tree = TreeConfig(depth=2, top_k=3, total_tokens=9)
    shape = Shape(LLAMA, DRAFTS[family], tree, 3, is_sampled=is_sampled, lookup=5)
    shape.check_pairs(10)
    assert shape.num_copied
