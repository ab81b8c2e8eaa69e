"""Sampled drafts with rejection: the shape of the tree, the test of its children, whole texts.

`test_distribution.py` compares the joint distribution of whole texts.
"""

from functools import cache, partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import decode_all, random_draft, random_target, tiny_llama
from scipy import stats
from test_sampling import settings
from watch import tree_faults

from poss_jax.config.models import DraftConfig, TreeConfig
from poss_jax.decode import rejection, speculate
from poss_jax.decode.rejection import DrawnTree, accept_child, groups_of
from poss_jax.decode.state import DecodeState, Request, StaticShape, Weights
from poss_jax.decode.tree import Candidates
from poss_jax.model.specialists import borrow_from_target


def test_the_drawn_example():
    groups = groups_of(TreeConfig(depth=3, top_k=2, total_tokens=7))
    assert groups.parents == groups.rows == (0, 1, 2, 3)
    assert groups.children == ((1, 2), (3, 4), (5, -1), (6, -1))


def test_groups_hold_every_node_once():
    for depth, top_k, total_tokens in [(6, 10, 60), (4, 4, 16), (4, 2, 8), (6, 1, 5), (1, 3, 9)]:
        tree = TreeConfig(depth=depth, top_k=top_k, total_tokens=total_tokens)
        groups = groups_of(tree)
        nodes = [node for own in groups.children for node in own if node >= 0]
        assert sorted(nodes) == list(range(1, tree.num_nodes))
        for node, own in zip(groups.parents, groups.children, strict=True):
            assert own[0] > node
        assert len(groups.children[0]) <= top_k
        assert max(groups.rows) <= (depth - 1) * top_k


NUM_DRAWS, V = 200_000, 6
UNLIKE = np.float32([0.02, 0.4, 0.08, 0.3, 0.15, 0.05])
TARGET = np.float32([0.3, 0.05, 0.25, 0.1, 0.1, 0.2])
FEW = np.float32([0.5, 0, 0, 0.5, 0, 0])
DRAFTS = {"unlike": UNLIKE, "equal": TARGET, "filtered": FEW}


def choose_often(
    target: np.ndarray, drafted: np.ndarray, num_children: int, *, mistake: str = ""
) -> np.ndarray:
    """Frequency of each token as a child or as a draw from the rest."""
    rng = np.random.default_rng(0)
    of_children, of_rest = rng.gumbel(size=(2, 1, NUM_DRAWS, V)).astype(np.float32)
    with np.errstate(divide="ignore"):
        tokens = np.argsort(-np.log(drafted) - of_children)[..., :num_children].astype(np.int32)
    thresholds = rng.random(tokens.shape, np.float32)
    p, q = (np.broadcast_to(probs, of_rest.shape) for probs in (target, drafted))
    accepted, left = map(np.array, _accept(mistake, p, q, tokens, thresholds))
    with np.errstate(divide="ignore"):
        drawn = np.argmax(np.log(left) + of_rest, axis=-1)
    return np.bincount(np.where(accepted < 0, drawn, accepted)[0], minlength=V)


@partial(jax.jit, static_argnums=0)
def _accept(mistake: str, *arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
    del mistake  # the planted mistake's name, which makes a separate program
    return accept_child(*arrays)


def has_distribution(counts: np.ndarray, exact: np.ndarray) -> bool:
    possible = exact > 0
    expected = exact[possible] / exact.sum(dtype=np.float64) * counts.sum()
    return not counts[~possible].any() and stats.chisquare(counts[possible], expected).pvalue > 1e-3


@pytest.mark.quick
@pytest.mark.optimised
@pytest.mark.parametrize(("draft", "num_children"), list(product(DRAFTS, (1, 3, 6))))
def test_choices_have_the_targets_distribution(draft, num_children):
    for target in (TARGET, FEW[::-1]):
        assert has_distribution(choose_often(target, DRAFTS[draft], num_children), target)


def unnormalised(weights, *, otherwise):
    del otherwise
    return weights


@pytest.mark.optimised
@pytest.mark.parametrize(
    ("function", "mistake"),
    [("remove", lambda drafted, is_token: drafted), ("_normalise", unnormalised)],
    ids=["a rejected child stays in q", "what is left is not normalised"],
)
def test_a_planted_mistake_is_noticed(function, mistake, monkeypatch):
    monkeypatch.setattr(rejection, function, mistake)
    assert not has_distribution(choose_often(TARGET, UNLIKE, 3, mistake=function), TARGET)


LLAMA = tiny_llama()
DRAFT = DraftConfig(layer=LLAMA, positions_per_specialist=(2, 2))
VOCABULARY = tuple(range(0, LLAMA.vocab_size, 2))
TREE = TreeConfig(depth=3, top_k=3, total_tokens=12)
CONFIG = StaticShape(LLAMA, DRAFT, TREE, rows=64, drafting="sampled")
NUM_NEW = 24
ROWS = (  # temperature, top_k, seed
    (0.0, 0, 1),
    (1.0, 0, 2),
    (0.7, 1, 3),
    (1.3, 10, 4),
)


@cache
def weights(vocabulary: tuple[int, ...] | None = None) -> Weights:
    target = random_target(LLAMA)
    ids = None if vocabulary is None else jnp.asarray(vocabulary, jnp.int32)
    return Weights(target, borrow_from_target(random_draft(DRAFT), target, ids))


def request(*rows: int, seed: int = 0) -> Request:
    """Some of `ROWS`, their seeds raised by `seed`."""
    temperatures, top_ks, seeds = zip(*(ROWS[row] for row in rows), strict=True)
    prompts = np.random.default_rng(0).integers(0, LLAMA.vocab_size, (len(ROWS), 6))
    return Request(
        tokens=jnp.asarray(prompts[list(rows)], jnp.int32),
        lengths=jnp.asarray([3 + row for row in rows], jnp.int32).clip(max=6),
        max_new_tokens=jnp.full(len(rows), NUM_NEW, jnp.int32),
        stop_ids=jnp.asarray([[-1]], jnp.int32),
        sampling=settings(
            len(rows),
            temperature=temperatures,
            top_k=top_ks,
            seed=np.asarray(seeds) + seed,
            repetition_penalty=1.2,
        ),
    )


@partial(jax.jit, static_argnums=1)
def generate(weights: Weights, config: StaticShape, request: Request) -> DecodeState:
    return decode_all(weights, config, request)


def texts(request: Request, config: StaticShape = CONFIG) -> list[list[int]]:
    return generate(weights(), config, request).output.tokens[:, :NUM_NEW].tolist()


@cache
def all_texts() -> list[list[int]]:
    return texts(request(*range(len(ROWS))))


def test_trees_are_well_formed():
    @jax.jit
    def run(weights: Weights, request: Request) -> tuple[DrawnTree, dict[str, jax.Array]]:
        state = speculate.start(weights, CONFIG, request)
        tree = speculate.draft_tree(weights, CONFIG, request, state, None)
        assert isinstance(tree, DrawnTree)
        nodes = Candidates(tree.tokens[:, 1:], tree.thresholds[:, 1:], tree.parents[:, 1:] - 1)
        return tree, tree_faults(tree, nodes, TREE.depth)

    tree, faults = run(weights(VOCABULARY), request(*range(len(ROWS))))
    assert not [name for name, rows in faults.items() if rows.any()]
    for parent, children in zip(tree.groups.parents, tree.groups.children, strict=True):
        for place, node in enumerate(children):
            assert node < 0 or (tree.parents[:, node] == parent).all()
            assert node < 0 or place == 0 or node > children[place - 1]
    assert tree.tokens.shape[1] == TREE.num_nodes
    np.testing.assert_allclose(tree.probs.sum(axis=-1), 1, rtol=1e-5)
    assert set(np.array(tree.tokens[:, 1:]).ravel().tolist()) <= set(VOCABULARY)
    support = np.array(tree.probs > 0).sum(axis=-1)
    assert (support[2] == 1).all() and (support[3] == 10).all()


def test_greedy_rows_are_what_the_target_writes_alone():
    row = request(0)
    (alone,) = texts(row, CONFIG._replace(draft=None))
    assert all_texts()[0] == alone
    assert texts(request(2), CONFIG._replace(draft=None))[0] == all_texts()[2]  # top-k 1


def test_a_text_depends_on_its_seed_and_on_no_other_row():
    assert texts(request(*range(len(ROWS)))) == all_texts()
    others = (3, 0, 0, 1)  # as many, so that it is the same program
    assert texts(request(*others)) == [all_texts()[row] for row in others]
    raised = texts(request(*range(len(ROWS)), seed=1))
    assert all(raised[row] != all_texts()[row] for row in (1, 3))
