"""The compiler's memory of a training step: its growth with depth and length."""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import pytest
from models import tiny_llama

from poss_jax.config.models import DraftConfig
from poss_jax.config.training import ObjectiveConfig, OptimizerConfig, StepConfig
from poss_jax.learn.state import init_state, make_optimizer
from poss_jax.learn.step import make_draft_step
from poss_jax.learn.task import DraftTask
from poss_jax.model.documents import TrainBatch
from poss_jax.model.families import init_draft
from poss_jax.model.target import init_target, stack_layers

# Wide heads and a small layer, so that the versions are what there is most of.
LLAMA = tiny_llama(hidden_size=128, intermediate_size=128, head_dim=32, num_layers=2)
B, T = 2, 512


HASS = DraftConfig(layer=LLAMA)
EAGLE3 = DraftConfig(
    layer=LLAMA, family="eagle3", kv="shared", aux_layers=(0, 1), head_size=LLAMA.vocab_size
)


@cache
def temporary_bytes(draft: DraftConfig, depth: int, length: int) -> int:
    """Of a step of a draft whose parameters are the same at every depth."""
    draft = replace(draft, trained_depth=depth)
    step = StepConfig(vocabulary_chunk=64, attention_block=64)
    task, optimizer = (
        DraftTask(LLAMA, draft, ObjectiveConfig(), step),
        make_optimizer(OptimizerConfig(), 10),
    )

    def init():
        target, params = init_target(LLAMA, jax.random.key(0)), init_draft(draft, jax.random.key(1))
        target |= {"layers": stack_layers(target["layers"])}
        params |= {"specialists": stack_layers(params["specialists"])}
        return init_state(params, optimizer), target

    state, target = jax.eval_shape(init)
    shape = partial(jax.ShapeDtypeStruct, (B, length))
    batch = TrainBatch(shape(jnp.int32), shape(bool), shape(jnp.int32))
    key = jax.eval_shape(lambda: jax.random.key(0))
    compiled = make_draft_step(task, optimizer).lower(state, target, batch, key).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def test_depth_costs_one_version_each():
    grown = temporary_bytes(HASS, 6, T) - temporary_bytes(HASS, 2, T)
    assert 0 < grown <= 1.05 * 4 * B * T * LLAMA.hidden_size * 4


@pytest.mark.parametrize(
    ("draft", "depth"), [pytest.param(HASS, 2, marks=pytest.mark.slow), (HASS, 6), (EAGLE3, 6)]
)
def test_memory_is_linear_in_length(draft, depth):
    """Twice the rows, twice the memory; scores of all rows would be four times."""
    assert temporary_bytes(draft, depth, 2 * T) <= 1.05 * 2 * temporary_bytes(draft, depth, T)
