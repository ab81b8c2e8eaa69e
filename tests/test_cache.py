"""Writing and committing rows of a cache whose sequences have their own lengths, and attending."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_used_rows import arrays

from poss_jax.model import cache as caches
from poss_jax.model.cache import (
    KeysValues,
    KVCache,
    attend_cached,
    commit_rows,
    newest_rows,
    take_rows,
    write_rows,
)


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


@pytest.mark.parametrize("batch", [1, 64])
def test_commit_of_any_path(batch):
    rng = np.random.default_rng(0)
    size, num_nodes, longest = 24, 9, 5
    k, v = rng.standard_normal((2, 3, batch, 2, size, 4)).astype(np.float32)
    nodes_k, nodes_v = rng.standard_normal((2, 3, batch, 2, num_nodes, 4)).astype(np.float32)
    length = rng.integers(0, size - longest + 1, batch)
    num_kept = rng.integers(0, longest + 1, batch)
    paths = np.array([np.sort(rng.permutation(num_nodes)[:longest]) for _ in range(batch)])
    nodes = KeysValues([*map(jnp.asarray, nodes_k)], [*map(jnp.asarray, nodes_v)])

    @jax.jit
    def commit(cache, nodes, paths, num_kept):
        return commit_rows(cache, take_rows(nodes, paths), num_kept)

    counts = jnp.asarray(num_kept, jnp.int32)
    out = commit(make_cache(k, v, length), nodes, jnp.asarray(paths, jnp.int32), counts)
    np.testing.assert_array_equal(out.length, length + num_kept)
    befores, afters, news = (*k, *v), (*out.k, *out.v), (*nodes_k, *nodes_v)
    for row in range(batch):
        kept = paths[row, : num_kept[row]]
        for before, after, new in zip(befores, afters, news, strict=True):
            want = np.concatenate([before[row, :, : length[row]], new[row][:, kept]], axis=1)
            np.testing.assert_array_equal(after[row, :, : want.shape[1]], want)


@pytest.mark.usefixtures("without_kernel")
@pytest.mark.parametrize(
    ("platform", "queries", "size", "is_whole"),
    [
        ("cuda", 60, 32_896, True),
        ("cuda", 512, 32_896, False),
        ("cuda", 512, 4096, True),
        ("tpu", 60, 32_896, False),
        ("cpu", 512, 256, True),
    ],
)
def test_scores_of_a_chunk_over_a_long_cache_are_not_held_whole(platform, queries, size, is_whole):
    def rows(number, heads):
        return jax.ShapeDtypeStruct((1, heads, number, 8), jnp.float32)

    args = rows(queries, 4), (rows(size, 2),) * 2, jax.ShapeDtypeStruct((1,), jnp.int32)
    among = jax.ShapeDtypeStruct((1, queries, queries), jnp.bool)
    traced = jax.jit(attend_cached).trace(*args, (rows(queries, 2),) * 2, among)
    program = traced.lower(lowering_platforms=(platform,)).as_text()
    assert (f"x{queries}x{size}xf32" in program) == is_whole
    assert ("stablehlo.while" in program) != is_whole


@pytest.mark.parametrize("block", [16, 20, 48])
@pytest.mark.parametrize(("batch", "num_own"), [(1, 5), (3, 5), (3, 0)])
def test_cached_and_own_rows_are_attended_as_one_text(monkeypatch, block, batch, num_own):
    """Rows beyond the length, and own ones that the mask leaves out, hold garbage."""
    monkeypatch.setattr(caches, "block_rows", lambda size, least=128: block)
    rng = np.random.default_rng(0)
    N, K, S, H, T = 4, 2, 48, 8, max(num_own, 1)

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    q, k, v = normal(batch, N, T, H), normal(batch, K, S, H), normal(batch, K, S, H)
    own_k, own_v = normal(batch, K, num_own, H), normal(batch, K, num_own, H)
    length = jnp.asarray([17, 48, 1][:batch], jnp.int32)
    among = jnp.asarray((rng.random((batch, T, num_own)) < 0.5) | np.eye(T, num_own, dtype=bool))
    is_committed = jnp.broadcast_to(
        jnp.arange(S)[None, None] < length[:, None, None], (batch, T, S)
    )
    can_attend = jnp.concatenate([is_committed, among], axis=2)
    both = [np.concatenate(pair, axis=2, dtype=float) for pair in ((k, own_k), (v, own_v))]
    out = jax.jit(attend_cached)(q, (k, v), length, (own_k, own_v), among)
    for b, n, t in np.ndindex(batch, N, T):
        columns = np.flatnonzero(can_attend[b, t])
        keys, values = (x[b, n // (N // K)][columns] for x in both)
        weights = np.exp(keys @ np.asarray(q[b, n, t], float) / np.sqrt(H))
        want = weights @ values / weights.sum()
        np.testing.assert_allclose(out[b, t, n * H : (n + 1) * H], want, atol=1e-5)
    garbage = jnp.where(jnp.arange(S)[None, None, :, None] < length[:, None, None, None], 0, 1e30)
    again = jax.jit(attend_cached)(q, (k + garbage, v + garbage), length, (own_k, own_v), among)
    np.testing.assert_array_equal(again, out)


@pytest.mark.parametrize("window", [1, 59, 60])
def test_a_window_leaves_out_the_rows_between(window):
    """Rows that the window leaves out become own rows that no query attends."""
    q, (k, v), length, own, among = arrays((4, 2), 64, 6, 6, [3, 40, 64])
    stored, used = newest_rows((k, v), length, window, 4)
    got = jax.jit(attend_cached)(q, stored, used, own, among)
    row = jnp.arange(64)[None]
    is_seen = (row < length[:, None]) & ((row < 4) | (row >= length[:, None] - window))
    is_seen = jnp.broadcast_to(is_seen[:, None], (3, 6, 64))
    joined = tuple(jnp.concatenate(pair, axis=2) for pair in zip((k, v), own, strict=True))
    both = jnp.concatenate([is_seen, among], axis=2)
    want = jax.jit(attend_cached)(q, (k, v), jnp.zeros_like(length), joined, both)
    np.testing.assert_allclose(got, want, atol=2e-6, rtol=0)
