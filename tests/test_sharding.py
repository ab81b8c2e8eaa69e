"""The grid of devices, and the table that says how every array is cut."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from models import random_draft, stacked, tiny_llama

from poss_jax.config.models import DraftConfig, MeshConfig
from poss_jax.config.reading import UserError, build_config
from poss_jax.config.training import OptimizerConfig, TrainConfig
from poss_jax.learn.step import init_state, make_optimizer
from poss_jax.model.parameters import (
    flatten_item,
    item_shapes,
    partition,
    place_tree,
    place_weights,
)
from poss_jax.model.sharding import (
    check_processes,
    make_mesh,
    place_batch,
    split_batch,
)

EVERY_BIAS = tiny_llama(qkv_bias=True, o_bias=True, mlp_bias=True, qk_norm=True)
MASKED = DraftConfig(
    layer=EVERY_BIAS,
    layers_per_specialist=(2,),
    family="eagle3",
    kv="shared",
    aux_layers=(0, 1, 1),
    fc_norm="whole",
    has_embedding=True,
    mask_token=7,
)
MESH = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))


@pytest.mark.parametrize(
    ("sizes", "num_devices", "want"),
    [
        ({}, 8, (8, 1, 1)),
        ({}, 1, (1, 1, 1)),
        ({"fsdp": 4}, 8, (2, 4, 1)),
        ({"data": 1, "fsdp": -1, "tensor": 4}, 32, (1, 8, 4)),
        ({"data": 2, "tensor": -1}, 8, (2, 1, 4)),
        ({"data": 1}, 8, (1, 1, 1)),
    ],
)
def test_minus_one_takes_the_devices_that_are_left(sizes, num_devices, want):
    assert MeshConfig(**sizes).sizes(num_devices) == want


@pytest.mark.parametrize(
    ("sizes", "error"),
    [
        ({"fsdp": -1}, "mesh: want counts of devices, at most one of them -1"),
        ({"data": 0}, "mesh: want counts of devices, at most one of them -1"),
        ({"tensor": -2}, r"mesh\.tensor: Input should be greater than or equal to -1, got -2"),
    ],
)
def test_axes_are_counts_with_one_minus_one_at_most(sizes, error):
    values = {"stage": "draft", "output": "x", "target": "y", "mesh": sizes}
    with pytest.raises(UserError, match=error):
        build_config(TrainConfig, values, origin="test")


@pytest.mark.parametrize(
    ("path", "shape", "want"),
    [
        ("embed/weight", (64, 32), P("tensor", "fsdp")),
        ("head/weight", (61, 32), P(None, "fsdp")),  # 61 rows cannot be halved
        ("fc/weight", (32, 64), P(("tensor", "fsdp"), None)),
        ("fc/weight", (2, 4), P("tensor", None)),
        ("layers/attention/k/weight", (5, 16, 32), P(None, "tensor", "fsdp")),
        ("layers/7/attention/k/weight", (16, 32), P("tensor", "fsdp")),
        ("specialists/attention/o/weight", (3, 32, 32), P(None, "fsdp", "tensor")),
        ("specialists/mlp/down/weight", (3, 32, 48), P(None, "fsdp", "tensor")),
        ("specialists/mlp/down/bias", (3, 32), P(None, None)),
        ("layers/attention/q_norm/scale", (5, 8), P(None, None)),
        ("opt_state/1/0/nu/specialists/mlp/up/weight", (3, 48, 32), P(None, "tensor", "fsdp")),
        ("opt_state/1/0/count", (), P()),
    ],
)
def test_drawn_partitions(path, shape, want):
    assert partition(path, shape, MESH) == want


@pytest.mark.parametrize(
    "config",
    [
        EVERY_BIAS,
        DraftConfig(layer=EVERY_BIAS, fc_bias=True),
        DraftConfig(layer=EVERY_BIAS, family="mtp"),
        MASKED,
        replace(MASKED, mask_token=None, fc_norm="each"),
    ],
)
def test_every_item_of_a_model_has_one_row(config):
    for name, shapes in item_shapes(config).items():
        for path, shape in flatten_item(shapes).items():
            *_, parent, kind = full = (name, *path)
            spec = place_weights(MESH)("/".join(full), shape).spec
            is_wide = kind == "bias" and parent in ("q", "k", "v", "gate", "up")
            is_matrix = kind == "weight" and name != "mask"  # a mask is one row
            assert any(spec) == (is_matrix or is_wide), full


@pytest.mark.parametrize("path", ["adapter/weight", "attention/w/weight", "embed/bias", "weight"])
def test_an_unknown_path_is_an_error(path):
    with pytest.raises(ValueError, match="want one row in the table"):
        partition(path, (4, 4), MESH)


def test_a_training_state_lies_like_its_parameters():
    draft = DraftConfig(layer=EVERY_BIAS, positions_per_specialist=(1, 2), fc_bias=True)
    optimizer = make_optimizer(OptimizerConfig(), 10)
    state = jax.eval_shape(lambda: init_state(stacked(random_draft(draft)), optimizer))
    placed = place_tree(state, MESH)
    moments = placed.opt_state[1][0]
    assert placed.params == moments.mu == moments.nu
    assert placed.step.spec == moments.count.spec == P()


def test_batch_is_split_in_a_mesh_only():
    double = jax.jit(lambda x: split_batch(2 * x, axis=1))
    x = jnp.ones((3, 4, 5))
    assert double(x).sharding == jnp.ones(1).sharding
    with jax.set_mesh(MESH):
        out = double(x)
    assert out.sharding.spec == P(None, ("data", "fsdp"))
    assert place_batch(MESH).shard_shape((4, 5)) == (1, 5)


def test_every_process_takes_part(monkeypatch: pytest.MonkeyPatch) -> None:
    check_processes(MESH)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(UserError, match=r"devices of all 2 processes, got .* of 1; set one of its"):
        check_processes(MESH)
