"""The leaves against NumPy, written again in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import random_target, tiny_llama

from poss_jax.config.models import RopeConfig
from poss_jax.model import layers
from poss_jax.model.layers import rms_norm, rope_frequencies, rotate
from poss_jax.model.linear import linear

LLAMA3 = RopeConfig(
    type="llama3",
    theta=5e5,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)


def normal(*shape, seed=0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


@pytest.mark.parametrize("few_rows", [64, 0], ids=["few_rows_spelling", "plain_spelling"])
@pytest.mark.usefixtures("fresh_programs")
def test_linear_of_every_number_of_rows(monkeypatch, few_rows):
    monkeypatch.setattr("poss_jax.model.linear._FEW_ROWS", few_rows)
    x, weight, bias = normal(70, 6), normal(5, 6, seed=1), normal(5, seed=2)
    outs = jax.jit(lambda x: [linear(x[:n], weight, bias) for n in range(1, 71)])(x)
    want = np.asarray(x, float) @ np.asarray(weight, float).T + np.asarray(bias, float)
    assert [len(out) for out in outs] == list(range(1, 71))
    for out in outs:
        np.testing.assert_allclose(out, want[: len(out)], atol=2e-6)


@pytest.mark.parametrize(
    ("rows", "platform", "is_few_rows_spelling"),
    [
        (1, "cpu", False),
        (2, "cpu", True),
        (64, "cpu", True),
        (65, "cpu", False),
        (1, "tpu", True),  # padded rows
        (2, "tpu", False),
        (8, "cuda", False),
    ],
)
def test_spelling_of_each_backend(rows, platform, is_few_rows_spelling):
    traced = jax.jit(linear).trace(normal(rows, 6), normal(5, 6))
    program = traced.lower(lowering_platforms=(platform,)).as_text()
    assert ("optimization_barrier" in program) == is_few_rows_spelling


def test_rms_norm_of_bfloat16_is_taken_in_fp32():
    x, scale = normal(4, 256).astype(jnp.bfloat16), normal(256, seed=1).astype(jnp.bfloat16)
    wide = np.asarray(x, float)
    normed = wide / np.sqrt((wide**2).mean(axis=-1, keepdims=True) + 1e-5)
    want = normed.astype(jnp.bfloat16) * np.asarray(scale)
    out = jax.jit(rms_norm, static_argnames="eps")(x, scale, eps=1e-5)
    assert out.dtype == jnp.bfloat16
    # An fp32 rounding seldom tips a bfloat16 one; a mean taken in bfloat16 tips most of them.
    assert (np.asarray(out) != want).mean() < 0.01


def plain_frequencies(theta: float, head_dim: int) -> np.ndarray:
    return np.array([theta ** (-2 * pair / head_dim) for pair in range(head_dim // 2)])


def llama3_frequency(frequency: float) -> float:
    """As Meta writes it, by wavelength."""
    wavelength = 2 * np.pi / frequency
    if wavelength < 8192 / 4:
        return frequency
    if wavelength > 8192 / 1:
        return frequency / 8
    smooth = (8192 / wavelength - 1) / (4 - 1)
    return (1 - smooth) * frequency / 8 + smooth * frequency


def test_default_and_linear_frequencies():
    rope = RopeConfig(type="linear", theta=1e4, factor=4.0)
    length = jnp.array([7], jnp.int32)
    plain = plain_frequencies(1e4, 16)
    np.testing.assert_allclose(rope_frequencies(RopeConfig(), 16, length), plain[None], rtol=1e-6)
    np.testing.assert_allclose(rope_frequencies(rope, 16, length), plain[None] / 4, rtol=1e-6)


def test_dynamic_frequencies_follow_each_sequence():
    rope = RopeConfig(type="dynamic", factor=3.0, original_max_position_embeddings=100)
    want = []
    for length in (1, 100, 101, 1000):
        stretch = 3.0 * max(length, 100) / 100 - 2.0
        want.append(plain_frequencies(1e4 * stretch ** (16 / 14), 16))
    out = rope_frequencies(rope, 16, jnp.array([1, 100, 101, 1000], jnp.int32))
    np.testing.assert_allclose(out, want, rtol=1e-6)
    np.testing.assert_array_equal(out[0], out[1])


def test_llama3_frequencies():
    plain = plain_frequencies(5e5, 128)
    want = np.array([llama3_frequency(frequency) for frequency in plain])
    ratio = want / plain
    assert ((ratio == 1).sum(), (ratio == 1 / 8).sum()) == (29, 29)  # and 6 lie between
    out = rope_frequencies(LLAMA3, 128, jnp.array([5], jnp.int32))
    np.testing.assert_allclose(out, want[None], rtol=2e-6)


def test_longrope_divides_by_other_numbers_in_texts_beyond_the_trained_context():
    rng = np.random.default_rng(0)
    short, long = rng.uniform(1, 2, 8), rng.uniform(5, 60, 8)
    rope = RopeConfig(
        type="longrope",
        original_max_position_embeddings=100,
        short_factor=tuple(short.tolist()),
        long_factor=tuple(long.tolist()),
    )
    plain = plain_frequencies(1e4, 16)
    out = rope_frequencies(rope, 16, jnp.array([1, 100, 101], jnp.int32))
    np.testing.assert_allclose(out, [plain / short, plain / short, plain / long], rtol=1e-6)


@pytest.mark.parametrize(
    ("settings", "want"),
    [
        ({"factor": 32.0, "original_max_position_embeddings": 4096}, 1.190238),
        ({"factor": 100.0, "original_max_position_embeddings": 100}, 2**0.5),
        ({"factor": 0.5, "original_max_position_embeddings": 100}, 1.0),
        ({"factor": 100.0, "attention_factor": 1.25}, 1.25),
        ({"type": "linear", "factor": 100.0}, 1.0),
    ],
)
def test_longrope_lengthens_queries_and_keys(settings, want):
    scale = RopeConfig(**{"type": "longrope"} | settings).scale
    assert abs(scale - want) < 1e-6
    x, frequencies = normal(2, 4, 3, 8), jnp.abs(normal(2, 4, seed=1))
    positions = jnp.array([[0, 1, 5], [9, 2, 2]], jnp.int32)
    turned = rotate(x, positions, frequencies)
    scaled = rotate(x, positions, frequencies, scale=scale)
    np.testing.assert_allclose(scaled, turned * scale, atol=1e-6)


@pytest.mark.torch
@pytest.mark.parametrize(
    "settings",
    [
        {"theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768},  # of Qwen2.5
        {"theta": 15e4, "factor": 32.0, "original_max_position_embeddings": 4096}
        | {"truncate": False},
        {"theta": 1e4, "factor": 8.0, "beta_fast": 4.0, "beta_slow": 2.0},
        {"theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 3},  # ends too early
        {"theta": 1e4, "factor": 2.0, "attention_factor": 1.25},
        {"theta": 1e4, "factor": 0.5},
    ],
)
@pytest.mark.parametrize("head_dim", [8, 64, 128])
def test_yarn_is_that_of_transformers(settings, head_dim):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = RopeConfig(**{"type": "yarn"} | settings)
    parameters = {"rope_type": "yarn", "rope_theta": rope.theta} | settings
    parameters.setdefault("original_max_position_embeddings", 8192)
    del parameters["theta"]
    config = LlamaConfig(head_dim=head_dim, rope_parameters=parameters)
    frequencies, factor = ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")
    out = rope_frequencies(rope, head_dim, jnp.array([5], jnp.int32))
    np.testing.assert_allclose(out, frequencies.numpy()[None], rtol=2e-6)
    assert rope.scale == pytest.approx(factor, rel=1e-12)


def test_rotation_is_a_turn_of_each_pair():
    x, frequencies = normal(2, 4, 3, 8), jnp.abs(normal(2, 4, seed=1))
    positions = jnp.array([[0, 1, 5], [9, 2, 2]], jnp.int32)
    out = np.asarray(jax.jit(rotate)(x, positions, frequencies))
    angles = np.einsum("bt,bh->bth", np.asarray(positions, float), np.asarray(frequencies, float))
    pairs = np.asarray(x[..., :4]) + 1j * np.asarray(x[..., 4:])
    want = pairs * np.exp(1j * angles)[:, None]
    np.testing.assert_allclose(out, np.concatenate([want.real, want.imag], axis=-1), atol=3e-6)
    np.testing.assert_array_equal(out[0, :, 0], x[0, :, 0])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_gpus_rotate_as_others_do(dtype):
    x, angles = normal(2, 3, 5, 16).astype(dtype), normal(2, 1, 5, 8)
    args = x, jnp.cos(angles).astype(dtype), jnp.sin(angles).astype(dtype)
    want, got = (rotated(*args) for rotated in (layers._rotate_halves, layers._rotate_turned))
    np.testing.assert_array_equal(np.float32(got), np.float32(want))


@pytest.mark.parametrize("parts", ["kv", "qkv"])
def test_fused_projections_compute_the_same(parts):
    config = tiny_llama(qkv_bias=True, mlp_bias=True, qk_norm=True)
    params = random_target(config)["layers"][0]
    fused = layers.fuse_layer(params, config, parts=parts)
    assert layers.fuse_layer(fused, config, parts=parts) == fused
    assert not {*parts} & {*fused["attention"]} and {*fused["mlp"]} == {"gate_up", "down"}
    hidden, frequencies = normal(2, 3, config.hidden_size), jnp.ones((2, config.head_dim // 2))
    positions = jnp.broadcast_to(jnp.arange(3)[None], (2, 3))

    @jax.jit
    def run(params):
        layer = layers.DecoderLayer(config).bind({"params": params})
        rows = layer.normed(hidden), positions, frequencies
        projected = layer.attention.queries_keys_values(*rows)
        alone = layer.attention.queries(*rows) if "q" in params["attention"] else projected[0]
        return (
            projected,
            (alone, *layer.attention.keys_values(*rows)) if parts == "kv" else projected,
            (layer.finish(hidden, hidden)),
        )

    for got, want in zip(jax.tree.leaves(run(fused)), jax.tree.leaves(run(params)), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)
