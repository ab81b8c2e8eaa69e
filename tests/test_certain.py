"""Lossless where the draft is certain: sharp logits, low temperatures, all settings, small trees.

Log-probabilities of certain tokens come out a rounding above 0, and scores of a tree tie or cross.
Four layers each keep that from changing a text: clamped log-probabilities, scores that never rise
along a path, a selection closed under parents, and an acceptance that walks the tree.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from models import certain_pair, decode_all, tiny_llama
from toy import check_round, draw_world
from watch import Watch

from poss_jax.config.models import DraftConfig, TreeConfig
from poss_jax.decode import drafting, speculate, tree
from poss_jax.decode.sampling import Sampling
from poss_jax.decode.state import Output, Request, StaticShape, Weights
from poss_jax.decode.tree import make_tree
from poss_jax.decode.verify import Acceptance
from poss_jax.model.specialists import borrow_from_target

TEMPERATURES = (0.0, 1e-6, 0.01, 0.02, 0.1, 0.3, 0.7, 1.0, 2.0)
SETTINGS = (
    {},
    {"top_k": 3, "top_p": 0.9, "min_p": 0.02},
    {"repetition_penalty": 1.3},
    {"bias": 4.0, "top_p": 0.5},
)
TREES = ((4, 2, 8), (6, 1, 5), (3, 2, 6), (4, 4, 16))  # depth, top_k, total_tokens
PROMPT_SIZE, NUM_NEW, ROWS = 8, 24, 64
LLAMA = tiny_llama(rms_norm_eps=0.0)  # as `exact_pair` wants it
DRAFT = DraftConfig(layer=LLAMA, positions_per_specialist=(2, 2))

NOWHERE = drafting.Level(0, jnp.zeros(1, jnp.int32), jnp.zeros((1, 0), jnp.int32), None)

Generate = Callable[[Weights, Request], Output]


@cache
def weights(disorder: float) -> Weights:
    target, drafted = certain_pair(LLAMA, DRAFT, sharpness=10.0, disorder=disorder)
    return Weights(target, borrow_from_target(drafted, target))


@cache
def request() -> Request:
    """A row for every temperature with every setting."""
    rows = [{"temperature": t} | given for t, given in product(TEMPERATURES, SETTINGS)]
    rng, B = np.random.default_rng(0), len(rows)

    def column(name: str, default: float, dtype: type = jnp.float32) -> jax.Array:
        return jnp.asarray([row.get(name, default) for row in rows], dtype)

    biased = rng.integers(0, LLAMA.vocab_size, (B, 2))
    sampling = Sampling(
        seed=jnp.arange(B, dtype=jnp.uint32),
        temperature=column("temperature", 0),
        top_k=column("top_k", 0, jnp.int32),
        top_p=column("top_p", 1),
        min_p=column("min_p", 0),
        repetition_penalty=column("repetition_penalty", 1),
        bias_ids=jnp.asarray(biased, jnp.int32),
        bias=jnp.tile(column("bias", 0)[:, None], (1, 2)),
    )
    return Request(
        tokens=jnp.asarray(rng.integers(0, LLAMA.vocab_size, (B, PROMPT_SIZE)), jnp.int32),
        lengths=jnp.asarray(rng.integers(1, PROMPT_SIZE + 1, B), jnp.int32),
        max_new_tokens=jnp.full(B, NUM_NEW, jnp.int32),
        stop_ids=jnp.asarray([[-1]], jnp.int32),
        sampling=sampling,
    )


def program(shape: tuple[int, int, int] | None, watch: Watch | None = None) -> Generate:
    depth, top_k, total_tokens = shape or TREES[0]
    size = TreeConfig(depth=depth, top_k=top_k, total_tokens=total_tokens)
    config = StaticShape(LLAMA, DRAFT if shape else None, size, ROWS)

    def generate(weights: Weights, request: Request) -> Output:
        if watch is None:
            return decode_all(weights, config, request).output
        with watch.tracing():
            return decode_all(weights, config, request).output

    return jax.jit(generate)


alone = program(None)


@cache
def expected(disorder: float) -> np.ndarray:
    return np.array(alone(weights(disorder), request()).tokens[:, :NUM_NEW])


def check(generate: Generate, disorder: float, *, depth: int) -> float:
    """Compares with autoregressive decoding; returns the tokens per round."""
    output = generate(weights(disorder), request())
    np.testing.assert_array_equal(output.tokens[:, :NUM_NEW], expected(disorder))
    assert int(output.num_accepted.max()) <= depth
    return float(output.tokens.shape[0] * (NUM_NEW - 1) / output.num_rounds.sum())


def check_all(shape: tuple[int, int, int], watch: Watch | None = None) -> None:
    generate, longest = program(shape, watch), min(shape[0], shape[2] - 1) + 1
    for disorder in (0.02, 0.2):
        rate = check(generate, disorder, depth=shape[0])
        assert rate > (0.6 * longest if disorder == 0.02 else 1.5)  # otherwise nothing is tried
    if watch is not None:
        watch.check()


def test_speculative_equals_autoregressive():
    check_all(TREES[0])


def test_trees_hold_what_they_promise():
    # What watches a round may change its rounding.
    check_all((3, 2, 6), Watch())


# --------------------------------------------------------------------------------------------------
# Each layer by itself is sufficient


def unclamped(scores, top_k):
    best, ids = jax.lax.top_k(scores, top_k)
    return ids, best - jax.nn.logsumexp(scores, axis=-1, keepdims=True)


def rising(beam, tokens, log_probs):
    candidates = tree.expand(beam, tokens, log_probs)
    scores = beam.scores[:, :, None] + log_probs
    return candidates.replace(scores=scores.reshape(candidates.scores.shape))


def by_mask(nodes, chosen, *, max_accepted):
    """Accepts every node whose path agrees, which is one path only if no siblings are alike."""
    agrees = nodes.tokens == jnp.take_along_axis(chosen, nodes.parents, axis=1)
    agrees = agrees.at[:, 0].set(True)
    is_accepted = (agrees[:, None] | ~nodes.ancestors).all(axis=2)
    num_accepted = is_accepted.sum(axis=1, dtype=jnp.int32) - 1
    path = jnp.argsort(~is_accepted, axis=1, stable=True)[:, : max_accepted + 1].astype(jnp.int32)
    emitted = jnp.take_along_axis(chosen, path, axis=1)
    none = jnp.zeros_like(num_accepted)
    return Acceptance(path, num_accepted, num_accepted, none, none, emitted)


MISTAKES = {
    "log-probabilities": (drafting, "_most_likely", unclamped),
    "scores": (drafting, "expand", rising),
    "selection": (tree, "_lowest_on_path", lambda candidates, depth: candidates.scores),
    "acceptance": (speculate, "accept", by_mask),
}


@contextmanager
def planted(*names: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setattr(*MISTAKES[name])
        yield


def check_toy() -> None:
    """Certain drafts whose log-probabilities come out a rounding too high."""
    world = draw_world(np.random.default_rng(0), 256, sharpness=10.0, disagreement=0.1)
    config = TreeConfig(depth=4, top_k=2, total_tokens=8)
    check_round(toy.program(config), *world, rounding=1e-5)


@pytest.mark.parametrize("layer", MISTAKES)
def test_each_layer_alone_keeps_the_text(layer):
    with planted(*(name for name in MISTAKES if name != layer)):
        check_toy()


def test_without_the_four_layers_the_text_is_wrong():
    with planted(*MISTAKES), pytest.raises(AssertionError):
        check_toy()


# --------------------------------------------------------------------------------------------------
# What each layer promises, and that the promise is missed where the layer is left out


def check_log_probabilities() -> None:
    exact, logits = jax.nn.logsumexp, jnp.asarray([[[0.0, 40.0, -jnp.inf, 1.0]]])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.nn, "logsumexp", lambda *args, **kw: exact(*args, **kw) - 1e-5)
        _, log_probs = drafting.top_children(logits, NOWHERE, 2)
    assert (log_probs <= 0).all()


def check_scores() -> None:
    above = np.float32([2e-7, 0.0, -0.0, -1e-9])
    beam = tree.Beam(jnp.asarray([[-0.25]]), jnp.asarray([[3]]), jnp.zeros((1, 1, 0), bool))
    level = drafting.expand(beam, jnp.arange(4)[None, None], jnp.asarray(above)[None, None])
    assert (level.scores <= -0.25).all()


def check_selection() -> None:
    parents = jnp.asarray([[-1, -1, 0, 0, 2, 2]])
    nan = float("nan")
    for scores in ([-3, -1, -0.5, -4, 0, nan], [-0.0, -1, 0, nan, nan, 1], [nan, 0, nan, 9, 9, 9]):
        candidates = tree.Candidates(jnp.arange(10, 16)[None], jnp.float32([scores]), parents)
        for total_tokens in (3, 5):
            config = TreeConfig(depth=3, top_k=2, total_tokens=total_tokens)
            select = jax.jit(partial(tree.select, config=config))
            selected = select(jnp.zeros(1, jnp.int32), candidates)
            kept = set(selected.tokens[0, 1:].tolist())
            missing = [t for t in kept if t > 11 and 10 + int(parents[0, t - 10]) not in kept]
            assert not missing


def check_acceptance() -> None:
    tokens, parents = jnp.asarray([[9, 5, 5, 7, 7]]), jnp.asarray([[0, 0, 0, 1, 1]])
    chosen = jnp.asarray([[5, 7, 7, 7, 7]])
    accepted = speculate.accept(make_tree(tokens, parents, depth=2), chosen, max_accepted=2)
    assert accepted.num_accepted.tolist() == [2]
    assert accepted.path.tolist() == [[0, 1, 3]]


CHECKS = dict(
    zip(
        MISTAKES,
        (check_log_probabilities, check_scores, check_selection, check_acceptance),
        strict=True,
    )
)


@pytest.mark.parametrize("layer", CHECKS)
def test_a_layer_keeps_its_promise_and_its_planted_mistake_is_noticed(layer):
    CHECKS[layer]()
    with planted(layer), pytest.raises(AssertionError):
        CHECKS[layer]()
