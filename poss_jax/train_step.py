"""The jitted training steps: the recursive one of a draft, and plain pre-training of a target.

The versions a depth reads are detached, so its gradient reaches its own specialist and fc alone:
`value_and_grad` sits inside the scan over depths, takes one specialist out of the stack, and the
gradients are summed on the way.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax import lax

from poss_jax.config import DraftConfig, LlamaConfig, ObjectiveConfig, OptimizerConfig
from poss_jax.losses import (
    DraftLosses,
    TargetRows,
    describe_targets,
    draft_losses,
    language_model_loss,
    most_likely_tokens,
)
from poss_jax.packing import TrainBatch
from poss_jax.rollout import DraftBatch, advance_history, depths, init_history, predict, rollout
from poss_jax.shapes import Array, Bool, Float, Int, Params
from poss_jax.target import encode


class TrainState(struct.PyTreeNode):
    """What a step reads and writes; layers and specialists are stacked."""

    step: Any  # [] int32; or in its place, as in the others, a shape or a sharding
    params: Params
    opt_state: optax.OptState


class DraftTask(NamedTuple):
    """Everything static about training a draft for a frozen target."""

    target: LlamaConfig
    draft: DraftConfig
    objective: ObjectiveConfig


class DraftData(struct.PyTreeNode):
    """A batch of text as the frozen target sees it: input of the draft, and what to predict."""

    inputs: DraftBatch
    targets: TargetRows
    loss_mask: Array  # [B T] bool


class DraftValidation(struct.PyTreeNode):
    """How well each depth drafts held-out text.

    Attributes:
      loss: weighted loss per depth.
      agreement: share of trained rows whose most likely token is the target's.
      acceptance_length: simulated: what a chain would accept, bonus token included.
    """

    loss: Array  # [R]
    agreement: Array  # [R]
    acceptance_length: Array  # []


def make_optimizer(config: OptimizerConfig, num_steps: int) -> optax.GradientTransformation:
    """AdamW, linear warm-up then linear decay to zero, gradients clipped by value."""
    warmup = max(1, round(config.warmup_fraction * num_steps))
    schedule = optax.join_schedules(
        [
            optax.linear_schedule(0.0, config.learning_rate, warmup),
            optax.linear_schedule(config.learning_rate, 0.0, max(1, num_steps - warmup)),
        ],
        [warmup],
    )
    adamw = optax.adamw(
        schedule, b1=config.b1, b2=config.b2, eps=config.eps, weight_decay=config.weight_decay
    )
    return adamw if config.clip_value is None else optax.chain(optax.clip(config.clip_value), adamw)


def init_state(params: Params, optimizer: optax.GradientTransformation) -> TrainState:
    """State before the first step."""
    return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))


def prepare_draft_data(
    target: Params,
    task: DraftTask,
    tokens: Int[Array, "B T"],
    loss_mask: Bool[Array, "B T"],
    noise_key: Array | None = None,
) -> DraftData:
    """Runs the frozen target over rows of text and pairs features with the tokens after them.

    Args:
      target: the frozen target, layers stacked.
      task: configs.
      tokens: rows of text.
      loss_mask: True where the prediction made at a row is trained; a last row never is.
      noise_key: draws the uniform noise on input features; None: no noise.
    """
    features = lax.stop_gradient(encode(target, task.target, tokens))
    noisy = features
    if noise_key is not None:
        width = task.objective.feature_noise * 512 / tokens.shape[1]
        noise = jax.random.uniform(noise_key, features.shape, minval=-width, maxval=width)
        noisy = features + noise.astype(features.dtype)
    embedded = jnp.take(target["embed"]["weight"], _next_rows(tokens), axis=0)
    return DraftData(
        inputs=DraftBatch(features=noisy, embedded=embedded),
        targets=describe_targets(target["head"]["weight"], _next_rows(features), task.objective),
        loss_mask=loss_mask.at[:, -1].set(False),
    )


def draft_gradients(
    draft: Params, head: Float[Array, "V D"], task: DraftTask, data: DraftData
) -> tuple[Params, DraftLosses]:
    """Losses of every depth, and the gradient of their sum.

    Args:
      draft: `{"fc", "specialists"}`, specialists stacked.
      head: the target's.
      task: configs; `task.draft.trained_depth` is R.
      data: a batch.

    Returns:
      Gradients like `draft`; loss terms, each [R].
    """

    def depth_loss(fc: Params, specialist: Params, history: Array, depth: Array):
        prediction = predict(fc, specialist, task.draft, data.inputs, history, depth)
        losses = draft_losses(head, prediction, data.targets, data.loss_mask, task.objective)
        return losses.total, (prediction, losses)

    def body(carry: tuple[Array, Params], step: tuple[Array, Array]):
        (history, gradients), (depth, index) = carry, step
        specialist = jax.tree.map(lambda leaf: leaf[index], draft["specialists"])
        (of_fc, of_specialist), (prediction, losses) = jax.grad(
            depth_loss, argnums=(0, 1), has_aux=True
        )(draft["fc"], specialist, history, depth)
        gradients = {
            "fc": jax.tree.map(jnp.add, gradients["fc"], of_fc),
            "specialists": jax.tree.map(
                lambda total, part: total.at[index].add(part),
                gradients["specialists"],
                of_specialist,
            ),
        }
        return (advance_history(history, prediction, data.inputs.features), gradients), losses

    R = task.draft.trained_depth
    carry = init_history(data.inputs.features, R), jax.tree.map(jnp.zeros_like, draft)
    (_, gradients), losses = lax.scan(body, carry, depths(task.draft, R))
    return gradients, losses


def make_draft_step(task: DraftTask, optimizer: optax.GradientTransformation) -> Callable:
    """Returns the jitted `(state, target, batch, key) -> (state, losses)`.

    The state is donated; the target runs frozen inside the same program.
    """

    @partial(jax.jit, donate_argnums=0)
    def step(state: TrainState, target: Params, batch: TrainBatch, key: Array):
        key = jax.random.fold_in(key, state.step)
        data = prepare_draft_data(target, task, batch.tokens, batch.loss_mask, key)
        gradients, losses = draft_gradients(state.params, target["head"]["weight"], task, data)
        return _updated(state, gradients, optimizer), losses

    return step


def make_target_step(
    config: LlamaConfig, optimizer: optax.GradientTransformation, *, rows_per_chunk: int
) -> Callable:
    """Returns the jitted `(state, batch) -> (state, loss)` of next-token pre-training."""
    loss_fn = partial(target_loss, config=config, rows_per_chunk=rows_per_chunk)

    @partial(jax.jit, donate_argnums=0)
    def step(state: TrainState, batch: TrainBatch):
        loss, gradients = jax.value_and_grad(loss_fn)(state.params, batch.tokens)
        return _updated(state, gradients, optimizer), loss

    return step


def target_loss(
    params: Params, tokens: Int[Array, "B T"], *, config: LlamaConfig, rows_per_chunk: int
) -> Float[Array, ""]:
    """Mean next-token cross-entropy in nats."""
    features = encode(params, config, tokens)
    head = params["embed" if config.tie_embeddings else "head"]["weight"]
    is_trained = jnp.ones(tokens.shape, bool).at[:, -1].set(False)
    labels = _next_rows(tokens)
    return language_model_loss(head, features, labels, is_trained, rows_per_chunk=rows_per_chunk)


def make_draft_validation(task: DraftTask) -> Callable:
    """Returns the jitted `(draft, target, batch) -> DraftValidation`."""

    @jax.jit
    def validate(draft: Params, target: Params, batch: TrainBatch):
        head, chunk = target["head"]["weight"], task.objective.rows_per_chunk
        data = prepare_draft_data(target, task, batch.tokens, batch.loss_mask)
        predictions = rollout(draft, task.draft, data.inputs, task.draft.trained_depth)

        def of_depth(prediction: Array) -> tuple[Array, Array]:
            losses = draft_losses(head, prediction, data.targets, data.loss_mask, task.objective)
            return losses.total, most_likely_tokens(head, prediction, chunk)

        loss, tokens_of_depth = lax.map(of_depth, predictions)
        hits = (tokens_of_depth == data.targets.tokens[None]) & data.loss_mask[None]
        num_trained = jnp.maximum(data.loss_mask.sum(dtype=jnp.float32), 1.0)
        return DraftValidation(
            loss=loss,
            agreement=hits.sum(axis=(1, 2), dtype=jnp.float32) / num_trained,
            acceptance_length=simulated_acceptance_length(hits, data.loss_mask),
        )

    return validate


def simulated_acceptance_length(
    hits: Bool[Array, "R B T"], loss_mask: Bool[Array, "B T"]
) -> Float[Array, ""]:
    """What a chain would accept on this text, teacher-forced, plus one.

    The chain that starts at row s makes its depth-d prediction at row s + d; it accepts as many
    tokens as hit in sequence. Averaged over starts all of whose R rows are trained; 1 without any.

    Args:
      hits: the depth's most likely token is the target's.
      loss_mask: trained rows.
    """
    R, _, T = hits.shape
    starts = T - R + 1
    rows = [slice(depth, depth + starts) for depth in range(R)]
    is_start = jnp.stack([loss_mask[:, row] for row in rows]).all(axis=0)
    chain = jnp.stack([hits[depth, :, row] for depth, row in enumerate(rows)])
    accepted = jnp.cumprod(chain.astype(jnp.float32), axis=0).sum(axis=0)
    num_starts = jnp.maximum(is_start.sum(dtype=jnp.float32), 1.0)
    return 1 + jnp.where(is_start, accepted, 0.0).sum() / num_starts


def _updated(
    state: TrainState, gradients: Params, optimizer: optax.GradientTransformation
) -> TrainState:
    # optax mixes dtypes that strict promotion refuses.
    with jax.numpy_dtype_promotion("standard"):
        updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
        params: Any = optax.apply_updates(state.params, updates)
    return TrainState(state.step + 1, params, opt_state)


def _next_rows(x: Array) -> Array:
    """Row j shows what stood at row j + 1; the last row shows zeros."""
    return jnp.concatenate([x[:, 1:], jnp.zeros_like(x[:, :1])], axis=1)
