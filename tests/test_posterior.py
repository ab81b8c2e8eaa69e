"""The original's stochastic verification, case by case: the same law of acceptance.

There, the children of a node are tried one after the other: child x is accepted with probability
p[x], else p[x] is set to 0 and p renormalised. Here the target draws one token at every node.
"""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden import read_json, read_npz
from scipy import stats
from test_sampling import settings, text_of

from poss_jax.decode.sampling import draw_noise, process_logits
from poss_jax.decode.tree import Tree, make_tree
from poss_jax.decode.verify import accept
from poss_jax.model.ranking import choose

pytestmark = pytest.mark.optimised  # most of the time is drawing

CASES = {record["case"]: record for record in read_json("posterior_sampling")}
ARRAYS = read_npz("posterior_sampling")
DEPTH, NUM_DRAWS = 6, 1000

process = jax.jit(process_logits)


def tree_of(case: int) -> Tree:
    tokens = jnp.asarray(ARRAYS[f"{case}/draft_tokens"][None], jnp.int32)
    parents = np.maximum(ARRAYS[f"{case}/parent"], 0)[None]
    return make_tree(tokens, jnp.asarray(parents, jnp.int32), depth=DEPTH)


@cache
def scores_of(case: int) -> jax.Array:
    record, logits = CASES[case], ARRAYS[f"{case}/tree_logits"]
    top_p = record["top_p"] or 1.0  # 0 is off there
    given = settings(1, temperature=record["temperature"], top_k=record["top_k"], top_p=top_p)
    text = text_of([], np.zeros((len(logits), 0)))
    return process(jnp.asarray(logits[None]), given, text)


def probabilities_of(case: int) -> np.ndarray:
    return np.array(jax.nn.softmax(scores_of(case)[0]), np.float64)


def children_of(case: int, node: int) -> list[int]:
    return np.flatnonzero(ARRAYS[f"{case}/parent"] == node).tolist()


def walk(case: int) -> tuple[list[int], np.ndarray | None]:
    """The sequential scheme with the recorded random numbers.

    Returns:
      Accepted tokens with the root, and the distribution of the next one if a child was rejected
      last; None at a leaf, where the original draws from the raw logits.
    """
    probabilities, tokens = probabilities_of(case), ARRAYS[f"{case}/draft_tokens"]
    numbers, node, path = iter(ARRAYS[f"{case}/r"]), 0, [0]
    while children := children_of(case, node):
        p = probabilities[node].copy()
        for child in children:
            if next(numbers) <= p[tokens[child]]:
                node = child
                path.append(child)
                break
            p[tokens[child]] = 0
            p /= p.sum()
        else:
            return tokens[path].tolist(), p
    return tokens[path].tolist(), None


@pytest.mark.parametrize("case", CASES)
def test_recorded_walks(case):
    tokens, next_token = walk(case)
    assert tokens == CASES[case]["accepted_tokens"]
    if next_token is not None and not CASES[case]["bonus_from_raw_softmax"]:
        np.testing.assert_allclose(next_token, ARRAYS[f"{case}/sample_p"], atol=2e-6)


def law_of_the_walk(case: int) -> np.ndarray:
    """Probability that the sequential scheme ends at each node."""
    probabilities, tokens = probabilities_of(case), ARRAYS[f"{case}/draft_tokens"]
    reached = np.zeros(len(tokens))
    reached[0], ends = 1, np.zeros(len(tokens))
    for node in range(len(tokens)):  # parents come first
        p, left = probabilities[node].copy(), reached[node]
        for child in children_of(case, node):
            accepted = min(1.0, p[tokens[child]])
            reached[child] = left * accepted
            left *= 1 - accepted
            p[tokens[child]] = 0
            p /= max(p.sum(), 1e-300)
        ends[node] = left
    return ends


@jax.jit
def draw_ends(scores: jax.Array, tree: Tree) -> jax.Array:
    """The node at which each of many rounds ends."""

    def end(seed: jax.Array) -> jax.Array:
        noise = draw_noise(
            settings(1).replace(seed=seed[None]),
            jnp.zeros(1, jnp.int32),
            num_positions=DEPTH + 1,
            vocab_size=scores.shape[-1],
        )
        out = accept(tree, choose(scores + noise[:, tree.depths[0]]), max_accepted=DEPTH)
        return out.path[0, out.num_accepted[0]]

    return jax.lax.map(end, jnp.arange(NUM_DRAWS, dtype=jnp.uint32), batch_size=250)


@pytest.mark.parametrize("case", CASES)
def test_acceptance_has_the_law_of_the_sequential_scheme(case):
    tree = tree_of(case)
    counts = np.bincount(draw_ends(scores_of(case), tree), minlength=tree.tokens.shape[1])
    expected = law_of_the_walk(case) * NUM_DRAWS
    assert not counts[expected < 1e-9].any()
    is_common = expected >= 5
    merged = [np.append(x[is_common], x[~is_common].sum()) for x in (counts, expected)]
    counts, expected = (x[merged[1] > 1e-9] for x in merged)
    if len(counts) > 1:
        p_value = stats.chisquare(counts, expected * counts.sum() / expected.sum()).pvalue
        assert p_value > 1e-3 / len(CASES)
