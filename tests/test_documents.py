"""What the document numbers of packed rows say about every token."""

import jax
import jax.numpy as jnp
import numpy as np

from poss_jax.model.documents import is_last_in, lengths_in, positions_in


def test_rows_of_several_documents_drawn():
    documents = jnp.array([[1, 1, 1, 2, 2, 0, 0], [1, 2, 3, 3, 3, 3, 3], [1, 1, 1, 1, 1, 1, 1]])
    positions = [[0, 1, 2, 0, 1, 0, 1], [0, 0, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 6]]
    lengths = [[3, 3, 3, 2, 2, 2, 2], [1, 1, 5, 5, 5, 5, 5], [7] * 7]
    last = [[0, 0, 1, 0, 1, 0, 1], [1, 1, 0, 0, 0, 0, 1], [0, 0, 0, 0, 0, 0, 1]]
    assert jax.jit(positions_in)(documents).tolist() == positions
    assert jax.jit(lengths_in)(documents).tolist() == lengths
    np.testing.assert_array_equal(jax.jit(is_last_in)(documents), np.array(last, bool))
