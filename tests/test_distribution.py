"""Sampled texts have the target's own distribution; planted mistakes do not get through.

A vocabulary of four tokens and texts of four tokens: all 256 texts are enumerated with their exact
probabilities. Of 60,000 that are sampled autoregressively the frequencies are tested; speculative
texts are the same (test_speculate.py). Sampled drafts' texts have frequencies of their own.
"""

import itertools
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import decode_all, exact_pair, random_draft, random_target, stacked, tiny_llama
from scipy import stats
from test_sampling import settings

from poss_jax.config.models import DraftConfig, TreeConfig
from poss_jax.decode import speculate
from poss_jax.decode.sampling import History, process_logits
from poss_jax.decode.state import Request, StaticShape, Weights
from poss_jax.model.documents import encode
from poss_jax.model.linear import linear
from poss_jax.model.specialists import borrow_from_target

V, LENGTH, BATCH, NUM_SAMPLES = 4, 4, 4000, 60_000
LLAMA = tiny_llama(vocab_size=V, hidden_size=16, intermediate_size=16, num_layers=1, num_heads=2)
DRAFT = DraftConfig(layer=LLAMA, positions_per_specialist=(1, 1))
PROMPT = [2, 0, 1]
GIVEN = {
    "sure": {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.3},
    "unsure": {"temperature": 1.5, "top_k": 3, "top_p": 0.95, "repetition_penalty": 1.3},
    "twins": {"temperature": 1.2, "top_k": 3, "top_p": 0.95, "repetition_penalty": 1.3},
}
TREES = {
    "greedy": (TreeConfig(depth=2, top_k=2, total_tokens=6), "argmax"),
    "chain": (TreeConfig(depth=3, top_k=1, total_tokens=4), "coupled"),
    "sampled": (TreeConfig(depth=2, top_k=3, total_tokens=8), "sampled"),
}


@cache
def weights(world: str = "sure") -> Weights:
    """A target and a draft that knows nothing of it; twins agree on every logit."""
    if world == "twins":
        target, draft = exact_pair(LLAMA, DRAFT, sharpness=0.125, num_flipped=0, seed=0)
    else:
        target, draft = random_target(LLAMA, seed=3), random_draft(DRAFT, seed=4)
    return Weights(target, borrow_from_target(draft, target))


@cache
def exact_distribution(world: str = "sure") -> np.ndarray:
    """Probability of every text, from plain forwards over all of them."""
    texts = np.array(list(itertools.product(range(V), repeat=LENGTH)), np.int32)
    tokens = jnp.asarray(np.hstack([np.tile(PROMPT, (len(texts), 1)), texts]), jnp.int32)
    target = weights(world).target
    features = encode(stacked(target), LLAMA, tokens)
    logits = linear(features, target["head"]["weight"])
    probability = np.ones(len(texts))
    for n in range(LENGTH):
        end = len(PROMPT) + n
        nothing = jnp.zeros((len(texts), 1, 0), bool)
        text = History(
            tokens, jnp.zeros_like(tokens, bool).at[:, :end].set(True), tokens[:, :0], nothing
        )
        given = settings(len(texts), **GIVEN[world])
        scores = process_logits(logits[:, end - 1 : end], given, text)
        chosen = np.array(jax.nn.softmax(scores[:, 0]), np.float64)
        probability *= np.take_along_axis(chosen, texts[:, n : n + 1], axis=1)[:, 0]
    np.testing.assert_allclose(probability.sum(), 1, atol=1e-5)
    return probability / probability.sum()


def sample(name: str | None, *, world: str = "sure") -> np.ndarray:
    """Texts as numbers of four digits to the base of four; None decodes autoregressively."""
    tree, drafting = TREES[name or "chain"]
    config = StaticShape(LLAMA, DRAFT if name else None, tree, rows=16, chunk=8, drafting=drafting)

    @jax.jit
    def run(weights: Weights, seeds: jax.Array) -> jax.Array:
        request = Request(
            tokens=jnp.tile(jnp.asarray([PROMPT], jnp.int32), (BATCH, 1)),
            lengths=jnp.full(BATCH, len(PROMPT), jnp.int32),
            max_new_tokens=jnp.full(BATCH, LENGTH, jnp.int32),
            stop_ids=jnp.asarray([[-1]], jnp.int32),
            sampling=settings(BATCH, **GIVEN[world]).replace(seed=seeds),
        )
        tokens = decode_all(weights, config, request).output.tokens[:, :LENGTH]
        return tokens @ jnp.asarray(V ** np.arange(LENGTH)[::-1], jnp.int32)

    seeds = np.arange(NUM_SAMPLES, dtype=np.uint32).reshape(-1, BATCH)
    return np.concatenate([np.array(run(weights(world), jnp.asarray(part))) for part in seeds])


def find_bias(texts: np.ndarray, world: str = "sure") -> list[str]:
    """Names the tests, of two, that tell the texts from the exact distribution, at 0.1 %."""
    exact, counts = exact_distribution(world), np.bincount(texts, minlength=V**LENGTH)
    size, found = len(texts), []
    is_common = exact * size >= 5
    merged = [np.append(x[is_common], x[~is_common].sum()) for x in (counts, exact * size)]
    merged = [x[merged[1] > 0] for x in merged]
    is_impossible = counts[exact == 0].any()
    if is_impossible or stats.chisquare(*merged).pvalue < 1e-3:
        found.append("chi-square")
    draws = np.random.default_rng(0).multinomial(size, exact, 4000)
    bound = np.quantile(np.abs(draws / size - exact).sum(axis=1) / 2, 0.999)
    if np.abs(counts / size - exact).sum() / 2 > bound:
        found.append("total variation")
    return found


@cache
def expected() -> np.ndarray:
    """Texts that the target samples alone."""
    return sample(None)


def test_sampled_texts_have_the_exact_distribution():
    assert find_bias(expected()) == []


@pytest.mark.parametrize("world", [pytest.param("unsure", marks=pytest.mark.slow), "twins"])
def test_texts_of_sampled_drafts_have_the_exact_distribution(world):
    assert find_bias(sample("sampled", world=world), world) == []


def by_round(config, request, state, *, original):
    """Noise keyed by the round instead of the position."""
    cache = state.target_cache
    length = request.lengths + state.output.num_rounds
    return original(config, request, state.replace(target_cache=cache.replace(length=length)))


def raw_bonus(request, state, tree, logits, noise, *, original):
    """The original's mistake: at the end of a path the next token ignores all settings."""
    chosen = original(request, state, tree, logits, noise)
    wide = logits + jnp.take_along_axis(noise, tree.depths[:, :, None], axis=1)
    nodes = jnp.arange(tree.tokens.shape[1])
    is_inner = (tree.parents[:, None, 1:] == nodes[None, :, None]).any(axis=2)
    return jnp.where(is_inner, chosen, jnp.argmax(wide, axis=-1).astype(jnp.int32))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "mistake"),
    [
        pytest.param("round_noise", by_round, id="noise keyed by the round"),
        pytest.param("choose_tokens", raw_bonus, id="bonus from raw logits"),
    ],
)
def test_a_planted_bias_is_found(function, mistake, monkeypatch):
    original = getattr(speculate, function)
    monkeypatch.setattr(speculate, function, partial(mistake, original=original))
    texts = sample("greedy")
    assert (texts[:BATCH] != expected()[:BATCH]).any()
    assert find_bias(texts) == ["chi-square", "total variation"]
