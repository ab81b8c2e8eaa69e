"""Products of int8 weights on a CPU: exact sums, bits that do not depend on neighbours."""

import os
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import make_engine, random_target, tiny_llama

from poss_jax import UserError
from poss_jax.config.processor import SETTING, int8_products
from poss_jax.model.linear import linear, multiply_integers, split_limbs
from poss_jax.model.quantise import Quantised, quantise, quantise_target, sum_values


@pytest.fixture(autouse=True)
def integers(monkeypatch):
    """These tests want the same products on every processor."""
    monkeypatch.setenv(SETTING, "integer")
    int8_products.cache_clear()
    yield
    int8_products.cache_clear()


def draw(num_rows: int, width: int = 96, num_outputs: int = 40) -> tuple[jax.Array, Quantised]:
    """Rows with outliers of 300 sigma, as hidden states have, and a weight."""
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(num_rows, width)).astype(np.float32)
    rows[:, 3] *= 300
    weight = quantise(jnp.asarray(rng.normal(size=(num_outputs, width)), jnp.float32), "int8")
    return jnp.asarray(rows), weight


def with_sums(weight: Quantised) -> Quantised:
    return sum_values({"weight": weight})["weight"]


def exact(rows: Any, weight: Quantised) -> np.ndarray:
    values = np.asarray(weight.values, np.float64) * np.asarray(weight.scale, np.float64)[:, None]
    return np.asarray(rows, np.float64) @ values.T


def test_zero_rows_stay_zero():
    _, weight = draw(1)
    np.testing.assert_array_equal(linear(jnp.zeros((2, 96)), weight), 0)


@pytest.mark.parametrize(("num_limbs", "bound"), [(1, 2**-8), (2, 2**-16), (3, 2**-24)])
def test_limbs_hold_rows_to_a_part_of_their_largest_element(num_limbs, bound):
    rows, _ = draw(9)
    scale, limbs = split_limbs(rows, num_limbs)
    factors = np.asarray(scale, np.float64) * 256.0 ** -np.arange(num_limbs)[:, None, None]
    error = np.abs(((np.asarray(limbs, np.float64) - 128) * factors).sum(0) - rows)
    largest = np.abs(rows).max(-1, keepdims=True)
    assert (error <= 1.05 * bound * largest).all()


def test_three_limbs_err_as_float32_does():
    rows, weight = draw(9)
    got = np.abs(linear(rows, weight) - exact(rows, weight)).max()
    plain = jnp.asarray(exact(np.eye(96), weight), jnp.float32)
    assert got <= 4 * np.abs(rows @ plain - exact(rows, weight)).max()


@pytest.mark.parametrize("has_sums", [True, False])
def test_a_row_has_the_same_bits_alone_and_among_others(has_sums):
    """In trees, batches and prompts of any size; a row alone and two, three, ... 128 of them."""
    rows, weight = draw(128)
    product = jax.jit(linear)
    weight = with_sums(weight) if has_sums else weight
    together = np.asarray(product(rows, weight))
    for count in (1, 2, 3, 5, 8, 9, 17, 33, 64):
        np.testing.assert_array_equal(product(rows[:count], weight), together[:count])
        np.testing.assert_array_equal(product(rows[-count:], weight), together[-count:])


_CHILD = """
import hashlib, sys
sys.path.insert(0, "tests")
import jax, numpy as np
from test_products_on_cpu import draw, with_sums
from poss_jax.model.linear import linear
rows, weight = draw(7)
product = jax.jit(linear)(rows, with_sums(weight))
print(hashlib.sha256(np.asarray(product).tobytes()).hexdigest())
"""


def test_other_instruction_sets_give_the_same_bits():
    def digest(flags: str) -> str:
        env = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
        command = [sys.executable, "-c", _CHILD]
        return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout

    assert digest("") == digest("--xla_cpu_max_isa=SSE4_2") != ""


def test_sums_do_not_change_bits():
    """With them limbs are uint8; a row alone, too, and the lowest value of int8."""
    rows, weight = draw(7)
    weight = weight.replace(values=weight.values.at[3, 5].set(-128))
    for count in (1, 7):
        signed, unsigned = linear(rows[:count], weight), linear(rows[:count], with_sums(weight))
        np.testing.assert_array_equal(signed, unsigned)


def test_operands_of_two_types_are_not_converted():
    """As int32 their product would take ten times as long."""
    rows, weight = draw(2)
    lowered = jax.jit(linear).lower(rows, with_sums(weight)).as_text()
    assert "(tensor<6x96xui8>, tensor<40x96xi8>) -> tensor<6x40xi32>" in lowered


@pytest.mark.parametrize("has_unsigned", [True, False])
def test_engine_sums_values_for_processors_that_want_it(monkeypatch, has_unsigned):
    monkeypatch.setattr("poss_jax.engine.device.has_unsigned_products", lambda: has_unsigned)
    config = tiny_llama()
    params = quantise_target(random_target(config), "int8")
    engine = make_engine(config, params)
    leaves = jax.tree.leaves(engine.weights.target, is_leaf=lambda x: isinstance(x, Quantised))
    weights = [leaf for leaf in leaves if isinstance(leaf, Quantised)]
    assert len(weights) == 4 * config.num_layers + 1
    for weight in weights:
        want = np.asarray(weight.values, np.int32).sum(-1) if has_unsigned else None
        np.testing.assert_array_equal(weight.sums, want)


def test_weight_says_how_many_limbs():
    rows, weight = draw(5)
    one = linear(rows, weight.replace(num_limbs=1))
    factors = jnp.asarray(weight.scale)[None]
    want = multiply_integers(rows, weight.replace(num_limbs=1)) * factors
    np.testing.assert_array_equal(one, want)
    assert np.abs(one - linear(rows, weight)).max() > 0.1


@pytest.mark.parametrize("num_rows", [1, 4, 40])
def test_float_products_agree(monkeypatch, num_rows):
    rows, weight = draw(num_rows)
    integers = linear(rows, weight)
    monkeypatch.setenv(SETTING, "float")
    int8_products.cache_clear()
    np.testing.assert_allclose(linear(rows, weight), integers, rtol=1e-4, atol=2e-3)


def test_setting_is_one_of_three(monkeypatch):
    monkeypatch.setenv(SETTING, "double")
    int8_products.cache_clear()
    with pytest.raises(UserError, match=f"{SETTING}: want kernel, integer or float, got 'double'"):
        int8_products()
