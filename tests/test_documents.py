"""Documents of packed rows: positions, lengths and ends of tokens, and attention within them."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from poss_jax.model.blockwise import NOTHING, attend_documents
from poss_jax.model.documents import TrainBatch, is_last_in, lengths_in, positions_in, trained_rows


def test_rows_of_several_documents_drawn():
    documents = jnp.array([[1, 1, 1, 2, 2, 0, 0], [1, 2, 3, 3, 3, 3, 3], [1, 1, 1, 1, 1, 1, 1]])
    positions = [[0, 1, 2, 0, 1, 0, 1], [0, 0, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 6]]
    lengths = [[3, 3, 3, 2, 2, 2, 2], [1, 1, 5, 5, 5, 5, 5], [7] * 7]
    last = [[0, 0, 1, 0, 1, 0, 1], [1, 1, 0, 0, 0, 0, 1], [0, 0, 0, 0, 0, 0, 1]]
    assert jax.jit(positions_in)(documents).tolist() == positions
    assert jax.jit(lengths_in)(documents).tolist() == lengths
    np.testing.assert_array_equal(jax.jit(is_last_in)(documents), np.array(last, bool))


# Two turns, the second of one token and the end mark; a document that is cut within its answer;
# one that is trained on as a whole; padding.
TURNS = {
    "trained": [0, 0, 1, 1, 1, 0, 1, 1, 0, 1, 1, 1, 1, 1, 1, 0, 0],
    "document": [1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 3, 3, 3, 3, 0, 0],
    "by label": [0, 1, 1, 0, 0, 1, 0, 0, 1, 0, 0, 1, 1, 0, 0, 0, 0],
    "by token": [0, 0, 1, 1, 1, 0, 1, 0, 0, 1, 0, 1, 1, 1, 0, 0, 0],
}


def test_rows_are_trained_that_decoding_an_answer_runs():
    trained, documents = np.array([TURNS["trained"]], bool), np.array([TURNS["document"]])
    batch = TrainBatch(jnp.zeros_like(documents), jnp.asarray(trained), jnp.asarray(documents))
    assert trained_rows(batch).astype(int).tolist() == [TURNS["by label"]]
    assert trained_rows(batch, by="token").astype(int).tolist() == [TURNS["by token"]]
    # Decoding an answer at [b, e) begins with the row before it, which drafts its second token.
    answers = [(2, 5), (6, 8), (9, 11), (11, 15)]
    rows = [row for b, e in answers for row in range(max(b - 1, 0), e - 2)]
    wanted = np.isin(np.arange(17), rows)
    wanted[10] = False  # would be of another document
    np.testing.assert_array_equal(trained_rows(batch)[0], wanted)


B, K, G, T, H = 2, 2, 3, 13, 4
DOCUMENTS = {
    "one": np.ones((B, T), np.int32),
    "packed": np.array([[1] * 5 + [2] * 7 + [0], [1] * 2 + [2] + [3] * 7 + [0] * 3], np.int32),
}


def draw(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


Q, KEYS, VALUES = draw(0, B, K, G, T, H), draw(1, B, K, T, H), draw(2, B, K, T, H)
OF_MEAN, OF_LOG_SUM = draw(3, B, K, G, T, H), draw(4, B, K, G, T)


def whole(q, k, v, documents, lag):
    """(mean, log sum, whether anything is attended) from all scores."""
    row = jnp.arange(T)
    can = (row[None] <= row[:, None] - lag)[None] & (documents[:, :, None] == documents[:, None])
    can = can[:, None, None]
    scores = jnp.where(can, jnp.einsum("BKGTH,BKSH->BKGTS", q, k) * H**-0.5, NOTHING)
    weights = jnp.where(can, jax.nn.softmax(scores, axis=-1), 0.0)
    log_sum = jax.nn.logsumexp(scores, axis=-1)
    return (
        jnp.einsum("BKGTS,BKSH->BKGTH", weights, v),
        log_sum,
        jnp.broadcast_to(can.any(axis=-1), log_sum.shape),
    )


@partial(jax.jit, static_argnames="block")
def attend_and_differentiate(arrays, documents, lag, *, block=None):
    """Results, and the gradients of their sum with a weight for each."""
    attends = whole(*arrays, documents, lag)[2]

    def attend(q, k, v):
        if block is None:
            return whole(q, k, v, documents, lag)[:2]
        out = attend_documents(q, k, v, documents, lag, block=block)
        return out.mean, out.log_sum

    def loss(arrays):
        mean, log_sum = attend(*arrays)
        return (mean * OF_MEAN).sum() + jnp.where(attends, log_sum * OF_LOG_SUM, 0.0).sum()

    return *attend(*arrays), attends, jax.grad(loss)(arrays)


@pytest.mark.parametrize("block", [4, 13])
@pytest.mark.parametrize("lag", [0, 1, 4])
@pytest.mark.parametrize("kind", DOCUMENTS)
def test_blocks_equal_whole_scores(kind, lag, block):
    documents, lag = jnp.asarray(DOCUMENTS[kind]), jnp.array(lag)
    arrays = Q, KEYS, VALUES
    want = jax.device_get(attend_and_differentiate(arrays, documents, lag))
    got = jax.device_get(attend_and_differentiate(arrays, documents, lag, block=block))
    (want_mean, want_log_sum, attends, wanted), (mean, log_sum, _, gradients) = want, got
    np.testing.assert_allclose(mean, want_mean, atol=2e-6)
    np.testing.assert_allclose(log_sum[attends], want_log_sum[attends], atol=2e-6)
    assert (log_sum[~attends] == NOTHING).all() and (mean[~attends] == 0).all()
    for got, want in zip(gradients, wanted, strict=True):
        np.testing.assert_allclose(got, want, atol=5e-6)
