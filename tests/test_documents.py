"""Document numbers of packed rows: positions, lengths and ends of every token."""

import jax
import jax.numpy as jnp
import numpy as np

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
