"""The kernel on a CPU: what XLA computes, bits that no neighbour changes, a compiler that fails."""

import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import make_engine, random_target, tiny_llama
from oracle import greedy_request

from poss_jax import UserError
from poss_jax.config import processor
from poss_jax.config.models import TreeConfig
from poss_jax.config.paths import child_python
from poss_jax.config.processor import SETTING, int8_products
from poss_jax.decode import speculate
from poss_jax.decode.state import StaticShape, Weights
from poss_jax.model import kernel, target
from poss_jax.model.cache import attend_cached, init_cache
from poss_jax.model.layers import rms_norm, rotate
from poss_jax.model.linear import linear
from poss_jax.model.quantise import (
    Quantised,
    quantise,
    quantise_target,
    sum_values,
    tile_values,
    untile_values,
)
from poss_jax.model.specialists import borrow_from_target

needs_kernel = pytest.mark.skipif(
    not kernel.has_kernel(), reason="no AVX-512 VNNI, or no C compiler"
)


@pytest.fixture(autouse=True)
def chosen_again():
    """Whatever a test sets reaches no other."""
    yield
    int8_products.cache_clear()
    kernel._register.cache_clear()


def draw(num_outputs: int, width: int) -> Quantised:
    rng = np.random.default_rng(num_outputs)
    weight = quantise(rng.normal(size=(num_outputs, width)).astype(np.float32), "int8")
    weight = weight.replace(values=weight.values.at[3, 1].set(-128))
    return sum_values({"weight": weight})["weight"]


def tile(weight: Quantised) -> Quantised:
    return tile_values({"weight": weight})["weight"]


def rows_of(num_rows: int, width: int) -> jax.Array:
    rows = np.random.default_rng(1).normal(size=(num_rows, width)).astype(np.float32)
    rows[:, 1] *= 300
    return jnp.asarray(rows)


@needs_kernel
@pytest.mark.parametrize(("num_outputs", "width"), [(32, 4), (64, 96), (1056, 36)])
def test_tiles_do_not_change_bits(num_outputs, width):
    """With one to three limbs, so with 1 to 39 rows of 8 bits: any remainder of 12."""
    weight = draw(num_outputs, width)
    tiled = tile(weight)
    assert tiled.is_tiled
    product = jax.jit(linear)
    for num_rows in (*range(1, 8), 13):
        rows = rows_of(num_rows, width)
        for limbs in (1, 2, 3):
            got = product(rows, tiled.replace(num_limbs=limbs))
            np.testing.assert_array_equal(got, product(rows, weight.replace(num_limbs=limbs)))


@needs_kernel
def test_threads_multiply_at_once():
    """As a server does whose batches of several sizes compile while others decode."""
    weight, rows = draw(1056, 36), rows_of(5, 36)
    tiled, product = tile(weight).replace(num_limbs=weight.num_limbs), jax.jit(linear)
    want = np.asarray(product(rows, weight))
    with ThreadPoolExecutor(8) as pool:
        for got in pool.map(lambda _: np.asarray(product(rows, tiled)), range(400)):
            np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("shape", [(40, 96), (64, 94)])
def test_other_shapes_stay_as_they_are(shape):
    weight = draw(*shape)
    assert tile(weight) is weight


def test_draft_takes_rows_of_a_tiled_head():
    head = draw(96, 8)
    vocabulary = jnp.asarray([95, 0, 33, 64])
    draft = borrow_from_target({}, {"head": tile_values({"weight": head}), "embed": {}}, vocabulary)
    want = jax.tree.map(lambda leaf: np.asarray(leaf)[np.asarray(vocabulary)], head)
    jax.tree.map(np.testing.assert_array_equal, draft["head"]["weight"], want)
    untiled = untile_values({"weight": tile(head)})["weight"]
    np.testing.assert_array_equal(untiled.values, head.values)


@needs_kernel
@pytest.mark.parametrize("num_rows", [1, 7, 64])
@pytest.mark.parametrize("width", [4, 36, 576])
def test_rows_are_normalised(num_rows, width):
    rows, scale = rows_of(num_rows, width), rows_of(1, width)[0]
    got = kernel.normalise(rows, scale, eps=1e-3)
    wide = np.asarray(rows, np.float64)
    want = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-3) * np.asarray(scale)
    np.testing.assert_allclose(got, want, rtol=1e-6)


@needs_kernel
@pytest.mark.parametrize("size", [1, 19, 5000, 49152])
def test_noise_is_that_of_jax(size):
    """Whatever the number of keys, mapped or not; only the logarithms round otherwise."""
    keys = jax.random.split(jax.random.key(size), 6)
    want = jax.vmap(partial(jax.random.gumbel, shape=(size,), mode="high"))(keys)
    draw = partial(kernel.gumbel, size=size)
    data = jax.random.key_data(keys)
    got = draw(data)
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(jax.vmap(draw)(data.reshape(3, 2, 2)).reshape(6, size), got)


def normalise_queries(q, k, v, frequencies):
    return rms_norm(q, frequencies[0, 0], eps=1e-3)


def rotate_queries(q, k, v, frequencies):
    return rotate(q, jnp.arange(3)[None] + 7, frequencies)


def attend_own(q, k, v, frequencies):
    return attend_cached(q, (k, v), jnp.full(len(q), 2), (k, v), None)


@needs_kernel
@pytest.mark.parametrize("function", [normalise_queries, rotate_queries, attend_own])
def test_functions_map_and_have_gradients(monkeypatch, function):
    rng = np.random.default_rng(2)
    q, k, v = (jnp.asarray(rng.normal(size=(2, 1, 2, 3, 8)), jnp.float32) for _ in range(3))
    args = q, k, v, jnp.asarray(rng.uniform(size=(2, 1, 3, 8)), jnp.float32)
    if function is rotate_queries:
        args = *args[:3], args[3][..., :4]

    def loss(*args):
        return (jax.vmap(function)(*args) ** 3).sum()

    def differentiate(*args):
        return jax.vmap(function)(*args), jax.grad(loss, argnums=(0, 1, 2, 3))(*args)

    got = jax.jit(differentiate)(*args)
    one_by_one = [function(*(x[i] for x in args)) for i in range(2)]
    np.testing.assert_array_equal(got[0], jnp.stack(one_by_one))
    monkeypatch.setattr(kernel, "has_kernel", lambda: False)
    want = jax.jit(lambda *args: differentiate(*args))(*args)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), got, want)


@pytest.mark.usefixtures("without_kernel")
def test_without_the_kernel_programs_have_no_choice():
    """A choice of one branch would have training keep what it can compute again."""
    rows, angles = jnp.ones((3, 8)), jnp.ones((1, 1))
    traced = jax.make_jaxpr(lambda x: rms_norm(x, x[0], eps=1e-3))(rows)
    assert "platform_index" not in str(traced)
    turned = jax.make_jaxpr(lambda a: kernel.call_on_cpu(kernel.cosines, jnp.cos, a))(angles)
    assert "platform_index" not in str(turned)


@needs_kernel
@pytest.mark.parametrize(
    ("batch", "heads", "queries", "width", "lengths", "num_own"),
    [
        (1, (2, 1), 3, 4, [0], 3),  # nothing is committed
        (2, (9, 3), 5, 64, [100, 1], 5),
        (3, (4, 2), 1, 8, [16, 17, 40], 1),
        (1, (4, 4), 33, 80, [40], 50),
        (2, (2, 1), 4, 20, [7, 33], 0),
    ],
)
def test_attention_is_a_softmax(batch, heads, queries, width, lengths, num_own):
    rng = np.random.default_rng(queries)

    def rows(num_heads, count):
        return jnp.asarray(rng.normal(size=(batch, num_heads, count, width)), jnp.float32)

    (N, K), S = heads, 128
    q, stored, own = rows(N, queries), (rows(K, S), rows(K, S)), (rows(K, num_own),) * 2
    among = jnp.asarray(rng.random((batch, queries, num_own)) < 0.5)
    got = jax.jit(kernel.attend)(q, stored, jnp.asarray(lengths), own, among)
    is_committed = np.arange(S) < np.reshape(lengths, (-1, 1, 1))
    is_attended = np.concatenate(
        [np.broadcast_to(is_committed, (batch, queries, S)), among], axis=-1
    )
    k, v = (
        np.concatenate(pair, 2).repeat(N // K, 1).astype(np.float64)
        for pair in zip(stored, own, strict=True)
    )
    scores = np.einsum("bnth,bnsh->bnts", q, k) * width**-0.5
    weights = np.exp(np.where(is_attended[:, None], scores, -np.inf))
    total = np.maximum(weights.sum(-1, keepdims=True), 1e-30)
    want = np.einsum("bnts,bnsh->btnh", weights / total, v).reshape(batch, queries, -1)
    np.testing.assert_allclose(got, want, atol=2e-6)


@needs_kernel
@pytest.mark.parametrize("keys", [[-1e30, 1, 0], [-3e38, 1, 0], [0, 1e30, -1e20]])
def test_attention_takes_large_scores(keys):
    """The query attends one key of three; the other scores are far below it, or -inf."""
    k = jnp.broadcast_to(jnp.asarray(keys, jnp.float32)[None, None, :, None], (1, 1, 3, 8))
    v = jnp.arange(24, dtype=jnp.float32).reshape(1, 1, 3, 8)
    own = k[:, :, :0], v[:, :, :0]
    q = jnp.full((1, 1, 1, 8), 1e3, jnp.float32)
    got = kernel.attend(q, (k, v), jnp.asarray([3]), own, jnp.ones((1, 1, 0), bool))
    np.testing.assert_array_equal(got, v[:, 0, 1:2])


@needs_kernel
@pytest.mark.parametrize("length", [-70000, 200])
def test_attention_stays_inside_its_cache(length):
    rng = np.random.default_rng(3)
    k, own = (jnp.asarray(rng.normal(size=(1, 2, n, 8)), jnp.float32) for n in (5, 1))

    def attend(length):
        return kernel.attend(
            k, (k, k), jnp.asarray([length]), (own, own), jnp.ones((1, 5, 1), bool)
        )

    np.testing.assert_array_equal(attend(length), attend(min(max(length, 0), 5)))


@needs_kernel
@pytest.mark.parametrize("chunk", [3, 8, 30])
def test_no_neighbour_changes_the_bits_of_a_row(chunk):
    """Logits and keys of decoding one by one, of prompts in chunks, of a tree: equal to the bit."""
    config = tiny_llama(vocab_size=64, hidden_size=64, head_dim=16, num_heads=4, num_kv_heads=2)
    params = tile_values(sum_values(quantise_target(random_target(config), "int8")))
    tokens = np.random.default_rng(0).integers(0, 64, (1, 30))
    cache = init_cache(config, num_layers=2, size=64, rope_length=jnp.array([64]), dtype="float32")
    one_by_one, logits = cache, []
    step = jax.jit(target.decode, static_argnums=1)
    for token in tokens[0]:
        newest, one_by_one = step(params, config, one_by_one, jnp.asarray([token]))
        logits.append(np.asarray(newest[0]))

    request = greedy_request(tokens[0].tolist(), limit=34)
    shape = StaticShape(config, None, TreeConfig(), rows=64, chunk=chunk)
    prefilled = jax.jit(speculate.prefill, static_argnums=1)(Weights(params, {}), shape, request)
    np.testing.assert_array_equal(prefilled.logits[0], logits[-1])
    caches = (cache.k + cache.v for cache in (prefilled.cache, one_by_one))
    for got, want in zip(*caches, strict=True):
        np.testing.assert_array_equal(got[:, :, :30], want[:, :, :30])

    first, num_nodes = 30 - chunk, 2 * chunk
    is_path = np.arange(num_nodes) % 2 == 0  # every other node is on the path
    ancestors = (is_path[None] & np.tri(num_nodes, dtype=bool)) | np.eye(num_nodes, dtype=bool)
    verified = target.verify(
        params,
        config,
        one_by_one.replace(length=jnp.asarray([first])),
        jnp.asarray(np.repeat(tokens[:, first:], 2, axis=1)),
        jnp.arange(num_nodes)[None] // 2,
        jnp.asarray(ancestors)[None],
    )
    np.testing.assert_array_equal(verified.logits[0][is_path], logits[first:])


@needs_kernel
def test_engine_chooses_the_kernel(monkeypatch):
    config = tiny_llama(hidden_size=32, intermediate_size=64, vocab_size=64)
    params = quantise_target(random_target(config), "int8")
    answers, tiled = [], []
    for kind in ("kernel", "integer"):
        monkeypatch.setenv(SETTING, kind)
        int8_products.cache_clear()
        engine = make_engine(config, params)
        leaves = jax.tree.leaves(engine.weights, is_leaf=lambda x: isinstance(x, Quantised))
        tiled.append({leaf.is_tiled for leaf in leaves if isinstance(leaf, Quantised)})
        answers.append(engine.generate([[3, 4, 5]], max_new_tokens=12)[0].output_ids)
    assert tiled == [{True}, {False}] and answers[0] == answers[1]


@pytest.mark.parametrize("compiler", ["false", "false --flag", "no-such-compiler"])
def test_compiler_that_fails_is_told(monkeypatch, tmp_path, caplog, compiler):
    monkeypatch.setattr(processor, "has_unsigned_products", lambda: True)
    monkeypatch.setenv(SETTING, "kernel")
    monkeypatch.setenv("POSS_JAX_CACHE", str(tmp_path))
    monkeypatch.setenv("CC", compiler)
    int8_products.cache_clear()
    kernel._register.cache_clear()
    assert not kernel.has_kernel() and kernel.products_in_use() == "integer"
    assert "int8 products by XLA, slower: kernel.c cannot be used: " in caplog.text
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not shutil.which("cc"), reason="no C compiler")
def test_damaged_library_is_compiled_again(monkeypatch, tmp_path):
    monkeypatch.setenv("POSS_JAX_CACHE", str(tmp_path / "cache"))
    header, source = tmp_path / "xla/ffi/api/c_api.h", tmp_path / "number.c"
    header.parent.mkdir(parents=True)
    source.write_text('#include "xla/ffi/api/c_api.h"\nint number(void) { return NUMBER; }')
    for number in (3, 4):  # another JAX in the same environment
        header.write_text(f"#define NUMBER {number}")
        assert processor.load_library(source, tmp_path).number() == number
    code = "import sys; from pathlib import Path; from poss_jax.config import processor; "
    code += "print(processor.load_library(Path(sys.argv[1]), Path(sys.argv[2])).number())"
    for library in (tmp_path / "cache").iterdir():
        library.unlink()  # this process has loaded it
        library.write_bytes(b"")
    command, environment = child_python("-c", code, str(source), str(tmp_path))
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "4\n"


def test_kernel_wants_its_processor(monkeypatch):
    monkeypatch.setattr(processor, "has_unsigned_products", lambda: False)
    monkeypatch.setenv(SETTING, "kernel")
    int8_products.cache_clear()
    with pytest.raises(UserError, match="POSS_JAX_INT8_PRODUCTS: kernel wants a processor with"):
        int8_products()


def test_without_a_compiler_xla_multiplies(monkeypatch):
    monkeypatch.setattr(processor, "has_unsigned_products", lambda: True)
    monkeypatch.setenv("CC", "no-such-compiler")
    int8_products.cache_clear()
    assert int8_products() != "kernel"
