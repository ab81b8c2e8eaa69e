"""Processed scores against transformers and by hand; noise that belongs to seed and position."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from poss_jax.decode.sampling import (
    History,
    Sampling,
    draw,
    draw_noise,
    lower_unlikely,
    process_logits,
    shift_logits,
)

V = 40

process = jax.jit(process_logits)


def settings(batch: int, **given) -> Sampling:
    """Settings of a batch; a number stands for every sequence, a list is one each."""
    values = {
        "seed": 0,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
    } | {name: value for name, value in given.items() if not name.startswith("bias")}
    dtypes = {"seed": np.uint32, "top_k": np.int32, "min_tokens": np.int32}
    columns = {
        name: jnp.asarray(np.broadcast_to(value, batch), dtypes.get(name, np.float32))
        for name, value in values.items()
    }
    ids = jnp.asarray(given.get("bias_ids", np.zeros((batch, 0))), jnp.int32)
    bias = jnp.asarray(given.get("bias", np.zeros((batch, 0))), jnp.float32)
    return Sampling(**columns, bias_ids=ids, bias=bias)


def text_of(tokens, on_path=None, path=()) -> History:
    """One sequence; by default nothing is on the path of its one row."""
    path = jnp.asarray([path], jnp.int32)
    on_path = np.zeros((1, 1, path.shape[1])) if on_path is None else [on_path]
    tokens = jnp.asarray([tokens], jnp.int32)
    return History(tokens, tokens >= 0, path, jnp.asarray(on_path, bool))


def scores_of(logits, text=None, **given) -> np.ndarray:
    """Scores of the rows of one sequence."""
    logits = jnp.asarray([logits], jnp.float32)
    out = process(logits, settings(1, **given), text or text_of([]))
    return np.array(out[0])


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({}, [0, 1, 2, 3]),
        ({"top_k": 2}, [1, 3]),
        ({"top_k": 9}, [0, 1, 2, 3]),
        ({"top_p": 0.5}, [1]),  # 0.5 is reached by the first alone
        ({"top_p": 0.51}, [1, 3]),
        ({"top_p": 0.81}, [0, 1, 3]),
        ({"top_p": 1e-6}, [1]),
        ({"min_p": 0.25}, [0, 1, 3]),
        ({"min_p": 1.0}, [1]),
        ({"top_k": 2, "top_p": 0.62}, [1]),  # of the two that top-k leaves, the first has 0.625
        ({"top_k": 2, "top_p": 0.63}, [1, 3]),
        ({"temperature": 0.0, "top_k": 1}, [0, 1, 2, 3]),  # greedy: nothing to choose from
    ],
)
def test_filters(given, kept):
    logits = np.log(np.float32([0.15, 0.5, 0.05, 0.3]))
    scores = scores_of([logits], **given)
    np.testing.assert_array_equal(np.isfinite(scores[0]).nonzero()[0], kept)
    np.testing.assert_array_equal(scores[0][kept], logits[kept])
    # A draft's scores are lowered where the filters leave them out.
    lowered = lower_unlikely(jnp.asarray(logits[None, None]), settings(1, **given), 1.5)
    want = np.where(np.isin(np.arange(4), kept), logits, logits - 1.5)
    np.testing.assert_allclose(lowered[0, 0], want, rtol=1e-6)


@pytest.mark.parametrize("sharpness", [0.0, 1.0, 30.0])
def test_a_draw_is_the_best_of_what_the_filters_keep(sharpness):
    """For any filters, one at a time or together; with equal scores, too."""
    rng = np.random.default_rng(0)
    B, rows = 60, 3
    given = settings(
        B,
        temperature=rng.choice([0.0, 0.7, 1.5], B),
        top_k=rng.choice([0, 1, 3, 30], B),
        top_p=rng.choice([1.0, 0.9, 0.3, 1e-6], B),
        min_p=rng.choice([0.0, 0.1, 1.0], B),
    )
    rounded = np.round(sharpness * rng.normal(size=(B, rows, V)), 1) + 0.0  # no -0.0
    logits = jnp.asarray(rounded, jnp.float32)
    noise = jnp.asarray(4 * rng.gumbel(size=(B, rows, V)), jnp.float32)
    nothing = jnp.zeros((B, 0), jnp.int32)
    text = History(nothing, nothing > 0, nothing, jnp.zeros((B, rows, 0), bool))

    @jax.jit
    def run(logits, given, noise):
        shifted = shift_logits(logits, given, text, vocab_size=V)
        wanted = jnp.argmax(process_logits(logits, given, text) + noise, axis=-1)
        return draw(shifted, noise, given), wanted, jnp.argmax(shifted + noise, axis=-1)

    drawn, wanted, unfiltered = run(logits, given, noise)
    np.testing.assert_array_equal(drawn, wanted)
    assert (wanted != unfiltered).any() == (sharpness > 0)


def test_a_draw_ends_where_scores_are_no_numbers():
    scores = jnp.full((1, 2, V), jnp.nan)
    assert draw(scores, jnp.zeros_like(scores), settings(1, top_p=0.5)).shape == (1, 2)


def test_scores_are_float32_whatever_the_model_computes_in():
    logits = jnp.asarray([[[1.0, 2.0, 3.0, 4.0]]], jnp.bfloat16)
    scores = process_logits(logits, settings(1, temperature=0.3), text_of([]))
    assert scores.dtype == jnp.float32
    np.testing.assert_allclose(scores[0, 0], np.float32([1, 2, 3, 4]) / np.float32(0.3), rtol=1e-7)


@pytest.mark.parametrize("second", [1.0, 0.0, -0.0])
def test_equal_scores_stay_or_go_together(second: float):
    kept = scores_of([[second, 2.0, abs(second), -1.0]], top_k=2)
    assert np.isfinite(kept).tolist() == [[True, True, True, False]]


def test_bias_comes_before_penalty_and_penalty_before_temperature():
    text = text_of([2, 2, -1])
    given = {"bias_ids": [[0, 2, -1]], "bias": [[1.0, -3.0, 9.0]]}
    scores = scores_of([[1.0, 4.0, 1.0, 0.0]], text, repetition_penalty=2.0, **given)
    assert scores.tolist() == [[2.0, 4.0, -4.0, 0.0]]
    scores = scores_of([[1.0, 4.0, 6.0, 0.0]], text, repetition_penalty=2.0, temperature=0.5)
    assert scores.tolist() == [[2.0, 8.0, 6.0, 0.0]]


def test_the_penalty_looks_along_a_nodes_own_path():
    #   root (0) ── node 1 (1) ── node 2 (3)        token in brackets; the text holds no token
    on_path = np.tril(np.ones((3, 3)))
    text = text_of([], on_path, path=(0, 1, 3))
    scores = scores_of(np.ones((3, 4)), text, repetition_penalty=2.0)
    assert scores.tolist() == [[0.5, 1.0, 1.0, 1.0], [0.5, 0.5, 1.0, 1.0], [0.5, 0.5, 1.0, 0.5]]


def test_stop_tokens_of_short_outputs_are_barred():
    """Two texts, of 2 and 4 tokens of output, with a choice at the root and one a token later."""
    text = History(
        tokens=jnp.zeros((2, 4), jnp.int32),
        is_token=jnp.ones((2, 4), bool),
        path=jnp.asarray([[8], [8]]),
        on_path=jnp.asarray([[[0], [1]]] * 2, bool),
        is_output=jnp.asarray([[0, 0, 1, 1], [1, 1, 1, 1]], bool),
        stop_ids=jnp.asarray([[7, -1]]),
    )
    given = settings(2, min_tokens=3, frequency_penalty=0.0, presence_penalty=0.0)
    scores = process(jnp.zeros((2, 2, V)), given, text)
    assert (scores[:, :, 7] == 0).tolist() == [[False, True], [True, True]]
    assert (jnp.delete(scores, 7, axis=2) == 0).all()
    only = jnp.full((2, 2, V), -jnp.inf).at[:, :, 7].set(0)  # a grammar leaves nothing else
    assert (jnp.argmax(process(only, given, text), axis=-1) == 7).all()
    others = jnp.zeros((2, 2, V)).at[:, :, 7].set(-jnp.inf)  # a grammar forbids it
    assert (process(others, given, text)[:, :, 7] == -jnp.inf).all()


def test_a_draft_with_its_own_vocabulary_is_processed_alike():
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(size=(1, 2, V)), jnp.float32)
    text = text_of([3, 7], np.ones((2, 2)), path=(7, 9))
    given = settings(1, repetition_penalty=1.3, temperature=0.7, bias_ids=[[9, 4]], bias=[[2, -2]])
    vocabulary = jnp.asarray([9, 3, 11, 4])
    whole = shift_logits(logits, given, text, vocab_size=V)
    part = shift_logits(logits[..., vocabulary], given, text, vocab_size=V, vocabulary=vocabulary)
    np.testing.assert_array_equal(part, whole[..., vocabulary])


@pytest.mark.torch
def test_processors_are_those_of_transformers():
    import torch
    from transformers.generation import logits_process as hf

    rng = np.random.default_rng(0)
    batch = 200
    logits = rng.normal(scale=3, size=(batch, V)).astype(np.float32)
    tokens = rng.integers(0, V, (batch, 12))
    given = {
        "temperature": rng.choice([0.3, 0.7, 1.0, 1.5], batch),
        "top_k": rng.choice([0, 1, 3, 20, 60], batch),
        "top_p": rng.choice([1.0, 0.95, 0.5, 0.05], batch),
        "min_p": rng.choice([0.0, 0.02, 0.3], batch),
        "repetition_penalty": rng.choice([1.0, 1.2, 0.8], batch),
    }
    bias_ids, bias = rng.integers(0, V, (batch, 2)), rng.normal(scale=4, size=(batch, 2))
    bias_ids[:, 1] = (bias_ids[:, 0] + 1) % V
    text = History(
        jnp.asarray(tokens[:, :8], jnp.int32),
        jnp.ones((batch, 8), bool),
        jnp.asarray(tokens[:, 8:], jnp.int32),
        jnp.ones((batch, 1, 4), bool),
    )
    sampling = settings(batch, **given, bias_ids=bias_ids, bias=bias)
    ours = process(logits[:, None], sampling, text)[:, 0]
    for row in range(batch):
        one = {name: value[row].item() for name, value in given.items()}
        biases = {(int(i),): float(b) for i, b in zip(bias_ids[row], bias[row], strict=True)}
        wanted = hf.LogitsProcessorList(
            [
                hf.SequenceBiasLogitsProcessor(biases),
                hf.RepetitionPenaltyLogitsProcessor(one["repetition_penalty"]),
                hf.TemperatureLogitsWarper(one["temperature"]),
            ]
        )
        if one["top_k"]:
            wanted.append(hf.TopKLogitsWarper(one["top_k"]))
        if one["top_p"] < 1:
            wanted.append(hf.TopPLogitsWarper(one["top_p"]))
        if one["min_p"]:
            wanted.append(hf.MinPLogitsWarper(one["min_p"]))
        theirs = wanted(torch.tensor(tokens[row : row + 1]), torch.tensor(logits[row : row + 1]))
        np.testing.assert_allclose(ours[row], theirs[0].numpy(), rtol=2e-6, err_msg=str(one))


def noise(seeds, first, num_positions, vocab_size=V, **given) -> np.ndarray:
    sampling = settings(len(seeds), seed=seeds, **given)
    draw = jax.jit(partial(draw_noise, num_positions=num_positions, vocab_size=vocab_size))
    return np.array(draw(sampling, jnp.asarray(first, jnp.int32)))


def test_noise_belongs_to_seed_and_position():
    together = noise([5, 9, 5], [3, 3, 5], 4)
    assert together.dtype == np.float32
    np.testing.assert_array_equal(together[:1], noise([5], [3], 4))
    np.testing.assert_array_equal(together[0, 2:], together[2, :2])
    kinds = np.concatenate([together[0], together[1], together[2, 2:]])
    assert len(np.unique(kinds)) == kinds.size


def test_greedy_sequences_have_no_noise():
    drawn = noise([1, 1], [0, 0], 2, temperature=[0.0, 1e-3])
    assert not drawn[0].any() and drawn[1].all()


@pytest.mark.optimised
def test_noise_reaches_beyond_one_in_ten_million():
    """Noise of 24 bits ends at 16.6, and so never chooses a token of probability below 6e-8."""
    drawn = noise([2], [0], 2, vocab_size=2**22)  # a seed whose noise does
    bound = 16.7
    expected = drawn.size * -np.expm1(-np.exp(-bound))
    assert 0 < (drawn > bound).sum() < expected + 4 * np.sqrt(expected)


def test_noise_is_gumbel():
    drawn = np.sort(noise(range(64), [0] * 64, 8, vocab_size=256).ravel())
    rank = (np.arange(drawn.size) + 0.5) / drawn.size
    distance = np.abs(np.exp(-np.exp(-drawn)) - rank).max()
    assert distance < 1.95 / np.sqrt(drawn.size)  # Kolmogorov-Smirnov at 0.1 %
