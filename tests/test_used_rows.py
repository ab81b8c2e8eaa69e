"""Attention by JAX's GPU kernels: interpreted here it equals the other ways, and drafts alike."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden import METHODS, METHODS_E3, load_golden
from models import tiny_llama
from oracle import Shape
from test_golden import check_rounds

from poss_jax.config.models import DraftConfig, MeshConfig, TreeConfig
from poss_jax.decode import drafting
from poss_jax.model import target, used_rows
from poss_jax.model.cache import attend_cached, by_kernels
from poss_jax.model.sharding import make_mesh
from poss_jax.model.used_rows import agrees, kernels

pytestmark = pytest.mark.skipif(kernels() is None, reason="this version of JAX has no such kernels")

LLAMA = tiny_llama()
EAGLE = DraftConfig(layer=LLAMA, positions_per_specialist=(1, 2))
EAGLE3 = DraftConfig(
    layer=LLAMA, positions_per_specialist=(1, 2), family="eagle3", kv="shared", aux_layers=(0, 1)
)
interpreted = partial(by_kernels, interpret=True)


@pytest.fixture
def switched_on(monkeypatch, fresh_programs):
    monkeypatch.setenv(used_rows.SWITCH, "1")


@pytest.fixture
def by_kernel(monkeypatch, fresh_programs):
    """Puts the kernels in the place of every attention over a cache."""
    for module in (target, drafting):
        monkeypatch.setattr(module, "attend_cached", interpreted)


def arrays(heads, size, queries, num_own, lengths, *, width=8, dtype=jnp.float32):
    """Arguments of `attend_cached`: N and K heads, a cache, and own rows in a random tree."""
    rng = np.random.default_rng(0)
    (N, K), B = heads, len(lengths)

    def normal(number, rows):
        return jnp.asarray(rng.standard_normal((B, number, rows, width)), dtype)

    among = rng.random((B, queries, num_own)) < 0.5
    among |= np.eye(queries, num_own, dtype=bool)
    stored, own = ((normal(K, rows), normal(K, rows)) for rows in (size, num_own))
    length = jnp.asarray(lengths, jnp.int32)
    return normal(N, queries), stored, length, own, jnp.asarray(among)


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(((4, 2), 320, 40, 40, [0, 65, 320]), id="tree"),
        pytest.param(((2, 2), 192, 1, 0, [1]), id="step"),
    ],
)
def test_the_kernel_equals_the_blocks(shape):
    args = arrays(*shape)
    want, got = (jax.jit(attend)(*args) for attend in (attend_cached, interpreted))
    np.testing.assert_allclose(got, want, atol=2e-6, rtol=0)


def test_a_chunk_attends_itself_in_order():
    *args, _ = arrays((4, 2), 320, 128, 128, [0, 65, 320])
    in_order = jnp.tril(jnp.ones((3, 128, 128), bool))
    got = jax.jit(interpreted)(*args, None)
    assert "mha_forward" in str(jax.make_jaxpr(interpreted)(*args, None))
    for can_attend in (None, in_order):
        want = jax.jit(attend_cached)(*args, can_attend)
        np.testing.assert_allclose(got, want, atol=2e-6, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("draft", [EAGLE, EAGLE3], ids=["eagle", "eagle3"])
def test_speculative_equals_autoregressive(by_kernel, draft):
    tree = TreeConfig(depth=2, top_k=3, total_tokens=8)
    Shape(LLAMA, draft, tree, 3, is_sampled=True).check_pairs(5)


@pytest.mark.slow
@pytest.mark.parametrize("method", [METHODS[-1], METHODS_E3[-1]])
def test_rounds_equal_recorded_ones(by_kernel, method, tmp_path):
    check_rounds(load_golden(tmp_path, method), "_small")


@pytest.mark.parametrize(
    ("platform", "dtype", "width", "is_used"),
    [
        ("cuda", jnp.bfloat16, 128, True),
        ("cuda", jnp.bfloat16, 96, False),
        ("cuda", jnp.float32, 128, False),
        ("rocm", jnp.bfloat16, 128, False),
        ("tpu", jnp.bfloat16, 128, False),
    ],
)
def test_cuda_uses_the_kernel_where_it_fits(switched_on, platform, dtype, width, is_used):
    args = arrays((8, 2), 576, 60, 60, [300], width=width, dtype=dtype)
    program = jax.jit(attend_cached).trace(*args).lower(lowering_platforms=(platform,)).as_text()
    assert ("triton" in program) == is_used


@pytest.mark.usefixtures("fresh_programs")
@pytest.mark.parametrize("num_devices", [1, 2])
def test_the_kernel_is_off_by_default_and_where_devices_share_a_cache(monkeypatch, num_devices):
    monkeypatch.delenv(used_rows.SWITCH, raising=False)
    if num_devices == 2:
        monkeypatch.setenv(used_rows.SWITCH, "1")
    args = arrays((8, 2), 576, 60, 60, [300], width=128, dtype=jnp.bfloat16)
    mesh = make_mesh(MeshConfig(data=1, tensor=num_devices), jax.devices()[:num_devices])
    with jax.set_mesh(mesh):
        program = jax.jit(attend_cached).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert "triton" not in program


def test_a_kernel_that_fails_or_differs_is_not_used(monkeypatch, caplog):
    assert agrees(interpret=True) and not caplog.text
    attend = used_rows._attend_splits
    monkeypatch.setattr(used_rows, "_attend_splits", lambda q, *a, **b: attend(2 * q, *a, **b))
    assert not agrees(interpret=True) and "it is off by" in caplog.text
    assert not agrees() and "ValueError: Only interpret mode" in caplog.text  # on a CPU


@pytest.mark.device
@pytest.mark.parametrize("is_on", ["0", "1"])
@pytest.mark.parametrize("queries", [1, 10, 60])
def test_a_gpu_computes_what_a_cpu_does(monkeypatch, fresh_programs, queries, is_on):
    monkeypatch.setenv(used_rows.SWITCH, is_on)
    args = arrays((32, 8), 8320, queries, queries, [512], width=128, dtype=jnp.bfloat16)
    got = jax.jit(attend_cached)(*args)
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        want = jax.jit(attend_cached)(*jax.device_get(args))
    got, want = (np.asarray(x, np.float32) for x in (got, want))
    np.testing.assert_allclose(got, want, atol=0.02)
