"""Coupled drafting on the recorded models: another tree, the same text, more of it accepted."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden import METHODS, load_golden, read_json
from models import decode_all
from test_golden import pad_prompts
from test_sampling import settings, text_of
from watch import Watch

from poss_jax.config.models import DraftConfig, Drafting, TreeConfig
from poss_jax.decode.drafting import Level, coupled_children, top_children
from poss_jax.decode.sampling import draw_noise
from poss_jax.decode.state import DecodeState, Request, StaticShape, Weights
from poss_jax.model.ranking import _top_k_of_blocks, choose

LENGTH, V = 48, 30
TREE = TreeConfig(depth=3, top_k=3, total_tokens=10)
WATCH = Watch()


def test_children_are_ranked_by_scores_and_noise():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(1, 2, V)), jnp.float32)
    given = settings(1, temperature=0.5)
    noise = draw_noise(given, jnp.asarray([7], jnp.int32), num_positions=3, vocab_size=V)
    level = Level(2, jnp.asarray([9]), jnp.zeros((1, 0), jnp.int32), jnp.zeros((1, 2, 0), bool))
    ids, log_probs = coupled_children(
        logits, level, 4, sampling=given, history=text_of([]), noise=noise, vocabulary=jnp.arange(V)
    )
    noisy = np.array(logits[0]) / 0.5 + np.array(noise[0, 2])
    np.testing.assert_array_equal(ids[0], np.argsort(-noisy)[:, :4])
    assert (np.diff(log_probs) < 0).all() and np.exp(log_probs).sum(axis=-1).max() <= 1


@pytest.mark.parametrize(("width", "k"), [(20_000, 10), (3000, 4), (600, 10), (20_000, 100)])
def test_the_best_of_blocks_are_the_best(width, k):
    """Also among equal scores, of which the first ones count."""
    rng = np.random.default_rng(0)
    for scores in (rng.normal(size=(2, 3, width)), rng.integers(0, 9, (2, 3, width))):
        scores = jnp.asarray(scores, jnp.float32).at[0, 0].set(-jnp.inf).at[0, 0, -3:].set(1.0)
        found = jax.jit(_top_k_of_blocks, static_argnums=1)(scores, k)
        for got, want in zip(found, jax.lax.top_k(scores, k), strict=True):
            np.testing.assert_array_equal(got, want)
        np.testing.assert_array_equal(choose(scores), scores.argmax(axis=-1))


def test_greedy_sequences_are_drafted_as_by_eagle():
    logits = jnp.asarray(np.random.default_rng(1).normal(size=(1, 2, V)), jnp.float32)
    given = settings(1, temperature=0.0)
    noise = draw_noise(given, jnp.zeros(1, jnp.int32), num_positions=1, vocab_size=V)
    level = Level(0, jnp.asarray([0]), jnp.zeros((1, 0), jnp.int32), jnp.zeros((1, 2, 0), bool))
    options = {"history": text_of([]), "noise": noise, "vocabulary": jnp.arange(V)}
    coupled = coupled_children(logits, level, 5, sampling=given, **options)
    for ours, theirs in zip(coupled, top_children(logits, level, 5), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@partial(jax.jit, static_argnums=1)
def generate(weights: Weights, config: StaticShape, request: Request) -> DecodeState:
    with WATCH.tracing():
        return decode_all(weights, config, request)


@pytest.mark.slow
@pytest.mark.parametrize("given", [{}, {"top_p": 0.9, "repetition_penalty": 1.1}], ids=str)
def test_more_is_accepted_and_nothing_changes(given, tmp_path):
    golden = load_golden(tmp_path, METHODS[-1])
    prompts = [case["prompt"] for case in read_json(f"generate_{golden.method}")["cases"]]
    request = pad_prompts(prompts, limit=LENGTH).replace(
        sampling=settings(len(prompts), seed=range(len(prompts)), temperature=1.0, **given)
    )

    def run(draft: DraftConfig | None, drafting: Drafting = "coupled"):
        config = StaticShape(golden.llama, draft, TREE, rows=256, drafting=drafting)
        return generate(golden.weights, config, request).output

    alone, coupled = run(None), run(golden.draft_config)
    plain = run(golden.draft_config, "argmax")
    WATCH.check()
    for output in (plain, coupled):
        np.testing.assert_array_equal(output.tokens[:, :LENGTH], alone.tokens[:, :LENGTH])
    # Tokens per round; 2.9 and 4.1 were measured over more text.
    rates = [float(LENGTH * len(prompts) / output.num_rounds.sum()) for output in (plain, coupled)]
    assert rates[1] > rates[0] + 0.5, rates
