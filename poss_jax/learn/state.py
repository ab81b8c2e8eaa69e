"""The training state, and the optimizer that updates it."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct

from poss_jax.config.training import OptimizerConfig
from poss_jax.shapes import Params


class TrainState(struct.PyTreeNode):
    """State of a training run; layers and specialists are stacked."""

    step: Any  # [] int32; or a shape or sharding in its place, as in the others
    params: Params
    opt_state: optax.OptState


def make_optimizer(config: OptimizerConfig, num_steps: int) -> optax.GradientTransformation:
    """AdamW, linear warm-up then linear decay to zero, gradients clipped by norm and by value."""
    min_steps = config.warmup_steps
    if min_steps is None:
        min_steps = min(round(2 / (1 - config.b2)), num_steps // 5)
    warmup = min(max(round(config.warmup_fraction * num_steps), min_steps), num_steps - 1)
    schedule = optax.linear_schedule(config.learning_rate, 0.0, num_steps - warmup)
    if warmup:
        rising = optax.linear_schedule(0.0, config.learning_rate, warmup)
        schedule = optax.join_schedules([rising, schedule], [warmup])
    adamw = optax.adamw(
        schedule, b1=config.b1, b2=config.b2, eps=config.eps, weight_decay=config.weight_decay
    )
    limits = (optax.clip_by_global_norm, config.clip_norm), (optax.clip, config.clip_value)
    clips = [clip(limit) for clip, limit in limits if limit is not None]
    return optax.chain(*clips, adamw) if clips else adamw


def init_state(params: Params, optimizer: optax.GradientTransformation) -> TrainState:
    """State before the first step."""
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))


def update_state(
    state: TrainState,
    gradients: Params,
    optimizer: optax.GradientTransformation,
    is_trained: Params | None = None,
) -> TrainState:
    """Takes an optimizer step; frozen parameters are not decayed either."""
    # optax mixes dtypes that strict promotion refuses.
    with jax.numpy_dtype_promotion("standard"):
        updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
        if is_trained is not None:
            updates = jax.tree.map(jnp.multiply, updates, is_trained)
        params: Any = optax.apply_updates(state.params, updates)
    return TrainState(state.step + 1, params, opt_state)


def cast(params: Params, dtype: Any) -> Params:
    """Casts parameters to the compute dtype."""
    return jax.tree.map(lambda leaf: leaf.astype(dtype), params)
