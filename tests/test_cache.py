"""Writing, committing and masking rows of a cache whose sequences have their own lengths."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from poss_jax.model.cache import KVCache, commit_rows, scratch_mask, write_rows


def make_cache(k, v, length) -> KVCache:
    return KVCache(
        k=[jnp.asarray(layer) for layer in k],
        v=[jnp.asarray(layer) for layer in v],
        length=jnp.asarray(length, jnp.int32),
        frequencies=jnp.zeros((len(length), 1)),
    )


@pytest.mark.parametrize("start", [[4], [6], [0, 6, 3]])
@pytest.mark.parametrize(("shape", "axis"), [((8,), 1), ((2, 8, 3), 2)])
def test_rows_are_written_at_each_start(start, shape, axis):
    rng = np.random.default_rng(0)
    stored = rng.standard_normal((len(start), *shape)).astype(np.float32)
    new = np.take(stored, [0, 1], axis=axis) + 10
    write = jax.jit(write_rows, static_argnames="axis")
    out = write(jnp.asarray(stored), jnp.asarray(new), jnp.array(start, jnp.int32), axis=axis)
    rows, new_rows = np.moveaxis(stored, axis, 1), np.moveaxis(new, axis, 1)  # views
    for row, at in enumerate(start):
        rows[row, at : at + 2] = new_rows[row]
    np.testing.assert_array_equal(out, stored)


def test_commit_drawn():
    # Nodes 0 1 2 3 lie in scratch rows 3 4 5 6; nodes 0 and 2 are kept.
    #   row    0  1  2 | 3  4  5  6 | 7
    rows = [1, 2, 3, 10, 11, 12, 13, 0]
    array = np.array(rows, np.float32).reshape(1, 1, 8, 1)
    cache = make_cache([array], [10 * array], [3])
    out = commit_rows(cache, jnp.array([[0, 2, 3]], jnp.int32), jnp.array([2], jnp.int32))
    assert out.length.tolist() == [5]
    assert out.k[0].ravel()[:5].tolist() == [1, 2, 3, 10, 12]
    assert out.v[0].ravel()[:5].tolist() == [10, 20, 30, 100, 120]


def test_commit_of_any_path():
    rng = np.random.default_rng(0)
    batch, size, num_nodes, longest = 64, 24, 9, 5
    k, v = rng.standard_normal((2, 3, batch, 2, size, 4)).astype(np.float32)
    length = rng.integers(0, size - num_nodes + 1, batch)
    num_kept = rng.integers(0, longest + 1, batch)
    paths = np.array([np.sort(rng.permutation(num_nodes)[:longest]) for _ in range(batch)])
    out = jax.jit(commit_rows)(
        make_cache(k, v, length), jnp.asarray(paths, jnp.int32), jnp.asarray(num_kept, jnp.int32)
    )
    np.testing.assert_array_equal(out.length, length + num_kept)
    for row in range(batch):
        kept = [*range(length[row]), *(length[row] + paths[row, : num_kept[row]])]
        for before, after in zip((*k, *v), (*out.k, *out.v), strict=True):
            np.testing.assert_array_equal(after[row, :, : len(kept)], before[row][:, kept])


def test_mask_drawn():
    among_scratch = jnp.array([[[1, 0], [1, 1]], [[1, 0], [0, 1]]], bool)
    want = [
        [[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 0]],  # three rows committed
        [[1, 0, 0, 0, 0, 0], [0, 1, 0, 0, 0, 0]],  # none
    ]
    out = scratch_mask(jnp.array([3, 0], jnp.int32), among_scratch, size=6)
    assert out.astype(int).tolist() == want
