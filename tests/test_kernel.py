"""The kernel for int8 weights on a CPU: the bits of XLA's products, and a compiler that fails."""

from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import make_engine, random_target, tiny_llama

from poss_jax import UserError
from poss_jax.config import processor
from poss_jax.config.processor import SETTING, int8_products
from poss_jax.model import kernel
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
    weight = quantise(jnp.asarray(rng.normal(size=(num_outputs, width)), jnp.float32), "int8")
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
    tiled, product = tile(weight), jax.jit(linear)
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
def test_engine_with_the_kernel_writes_the_same(monkeypatch):
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
    assert "int8 products by XLA, slower: kernel.c cannot be compiled: " in caplog.text
    assert not list(tmp_path.iterdir())


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
