"""The training state, and the jitted steps of a draft, recursive over depths, and of a target.

In the first family the versions a depth reads are detached, so its gradient reaches only its
specialist and the shared parameters: `jax.grad` sits inside the scan over depths, takes one
specialist out of the stack, and gradients are summed along the scan. Chains, whose gradients flow
through all depths, are in `chains.py`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax import lax

from poss_jax.config.models import LlamaConfig
from poss_jax.config.training import OptimizerConfig, StepConfig
from poss_jax.learn.chains import chain_gradients
from poss_jax.learn.losses import DraftLosses, acceptance_rate, draft_losses, language_model_loss
from poss_jax.learn.recursion import (
    Depth,
    add_gradients,
    first_version,
    next_reach,
    predict,
    shared_params,
    take_specialist,
    unroll,
)
from poss_jax.learn.task import DraftData, DraftTask, cast, own_head, prepare_draft_data
from poss_jax.model.documents import TrainBatch, count, cut_batch, encode, trained_rows
from poss_jax.model.families import family_of
from poss_jax.model.sharding import gather_head
from poss_jax.model.specialists import share_keys_values
from poss_jax.shapes import Array, Bool, Float, Int, Params


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


def draft_gradients(
    draft: Params, head: Float[Array, "V D"], task: DraftTask, data: DraftData
) -> tuple[Params, DraftLosses]:
    """Losses of every depth, and the gradient of their weighted sum.

    Args:
      draft: parameters, specialists stacked.
      head: LM head of the target, in the compute dtype.
      task: configs; `task.draft.trained_depth` is R.

    Returns:
      Gradients like `draft`, zero for frozen parameters; loss terms, each [R].
    """
    if family_of(task.draft).is_trained_in_chains:
        gradients, losses = chain_gradients(draft, head, task, data)
    else:
        head = head if task.vocabulary is None else head[task.vocabulary_ids]
        gradients, losses = _gradients(draft, head, task, data)
    if task.num_frozen:
        specialists = gradients.pop("specialists")
        gradients = jax.tree.map(jnp.zeros_like, gradients) | {"specialists": specialists}
    return gradients, losses


def _gradients(
    draft: Params, head: Array, task: DraftTask, data: DraftData
) -> tuple[Params, DraftLosses]:
    R, first, weights = task.draft.trained_depth, task.first_trained_depth, task.depth_weights()
    block, chunk = task.step.attention_block, task.step.vocabulary_chunk

    def loss(shared: Params, specialist: Params, depth: Depth, reach: Array | None):
        weight = weights[depth.index]
        shared, specialist = cast(shared, head.dtype), cast(specialist, head.dtype)
        prediction = predict(shared, specialist, task.draft, data.inputs, depth, block=block)
        rows = family_of(task.draft).read(shared, task.draft, prediction)
        losses = draft_losses(
            head,
            rows,
            data.targets,
            data.loss_mask,
            data.num_trained,
            task.objective,
            chunk=chunk,
            deviations=task.feature_deviations,
            reach=reach,
        )
        if reach is not None:
            accepted = acceptance_rate(head, rows, data.targets, chunk=chunk)
            reach = next_reach(reach, accepted, data.inputs.documents)
        return weight * losses.total, (prediction, losses, reach)

    def visit(depth: Depth, carry: tuple[Params, Array | None], *, is_trained: bool):
        gradients, reach = carry
        parts = take_specialist(draft, depth.specialist)
        if is_trained:
            differentiate = jax.grad(loss, argnums=(0, 1), has_aux=True)
            grads, (prediction, losses, reach) = differentiate(*parts, depth, reach)
            gradients = add_gradients(gradients, depth.specialist, *grads)
        else:
            _, (prediction, losses, reach) = loss(*parts, depth, reach)
        return prediction, (gradients, reach), losses

    run = partial(unroll, task.draft, data.inputs)
    versions = first_version(data.inputs.features, R)
    carry = jax.tree.map(jnp.zeros_like, draft), task.first_reach(data)
    look, train = (partial(visit, is_trained=is_trained) for is_trained in (False, True))
    versions, carry, untrained = run(versions, carry, look, range(first))
    _, (gradients, _), losses = run(versions, carry, train, range(first, R))
    if task.draft.kv == "shared":
        gradients = share_keys_values(gradients, lambda leaf: leaf.sum(axis=0, keepdims=True))
    return gradients, jax.tree.map(lambda a, b: jnp.concatenate([a, b]), untrained, losses)


def make_draft_step(task: DraftTask, optimizer: optax.GradientTransformation) -> Callable:
    """Returns the jitted `(state, target, batch, key) -> (state, metrics)`.

    The metrics: `loss`, the mean over depths; `loss_per_depth` [R]; `gradient_norm`, of all
    gradients together, so NaN if any is NaN. The state is donated; the target runs
    frozen inside the same program. A batch is cut into `task.step.accumulation_steps` parts, one
    after the other.
    """

    @partial(jax.jit, donate_argnums=0)
    def step(state: TrainState, target: Params, batch: TrainBatch, key: Array):
        head = gather_head(target["head"]["weight"])
        target = target | {"head": {"weight": head}}
        key = jax.random.fold_in(key, state.step)
        keys = jax.vmap(partial(jax.random.fold_in, key))(jnp.arange(len(batch.tokens)))
        is_trained = trained_rows(batch, task.objective.trained_rows)
        averages_all = task.objective.average_over == "all"
        num_trained = count(jnp.ones_like(is_trained) if averages_all else is_trained)

        def of_part(total: Params, chunk: tuple[TrainBatch, Array]):
            draft_head = own_head(state.params)
            data = prepare_draft_data(target, task, *chunk, num_trained, own_head=draft_head)
            gradients, losses = draft_gradients(state.params, head, task, data)
            return jax.tree.map(jnp.add, total, gradients), losses

        parts = cut_batch((batch, keys), task.step.accumulation_steps)
        zeros = jax.tree.map(jnp.zeros_like, state.params)
        gradients, losses = lax.scan(of_part, zeros, parts)
        of_depth = losses.total.sum(axis=0)
        if losses.reach is not None:
            reach = losses.reach.sum(axis=0) * num_trained / jnp.maximum(count(is_trained), 1.0)
            of_depth /= jnp.maximum(reach, 1e-30)
            # Divided by their mean, the weights add up to what `depth_weights` alone do, and
            # clipping and learning rate mean the same. The mean of all depths keeps their
            # proportions, those of the accepted length.
            first = task.first_trained_depth
            weights = task.depth_weights()[first:]
            mean = (weights * reach[first:]).sum() / weights.sum()
            gradients = jax.tree.map(lambda leaf: leaf / jnp.maximum(mean, 1e-30), gradients)
        metrics = {
            "loss": of_depth.mean(),
            "loss_per_depth": of_depth,
            "gradient_norm": optax.tree.norm(gradients),
        }
        return update_state(state, gradients, optimizer, _is_trained(task, state.params)), metrics

    return step


def _is_trained(task: DraftTask, draft: Params) -> Params:
    """1 for trained parameters, 0 for frozen ones and for specialists no depth reaches."""
    R, config = task.draft.trained_depth, task.draft
    reached = {config.specialist_at(depth) for depth in range(task.first_trained_depth, R)}
    of_specialist = jnp.array([float(e in reached) for e in range(config.num_specialists)])

    def mask(leaf: Array) -> Array:
        return of_specialist.reshape(-1, *[1] * (leaf.ndim - 1))

    is_trained = jax.tree.map(lambda _: float(not task.num_frozen), shared_params(draft))
    return is_trained | {"specialists": jax.tree.map(mask, draft["specialists"])}


def make_target_step(
    config: LlamaConfig, optimizer: optax.GradientTransformation, step: StepConfig, dtype: Any
) -> Callable:
    """Returns the jitted `(state, batch) -> (state, metrics)` of next-token pre-training.

    The metrics: `loss` and `gradient_norm`.
    """

    @partial(jax.jit, donate_argnums=0)
    def run(state: TrainState, batch: TrainBatch):
        num_trained = jnp.maximum(count(labels_of(batch)[1]), 1.0)

        def of_part(total: tuple[Params, Array], chunk: TrainBatch):
            def loss_of(params: Params) -> Array:
                return target_loss(cast_inner(params, dtype), chunk, config, step) / num_trained

            loss, gradients = jax.value_and_grad(loss_of)(state.params)
            return jax.tree.map(jnp.add, total, (gradients, loss)), None

        zeros = jax.tree.map(jnp.zeros_like, state.params), jnp.zeros(())
        (gradients, loss), _ = lax.scan(of_part, zeros, cut_batch(batch, step.accumulation_steps))
        metrics = {"loss": loss, "gradient_norm": optax.tree.norm(gradients)}
        return update_state(state, gradients, optimizer), metrics

    return run


def target_loss(
    params: Params, batch: TrainBatch, config: LlamaConfig, step: StepConfig
) -> Float[Array, ""]:
    """Sum of next-token cross-entropies in nats, over trained tokens."""
    head, features = encode_for_head(params, batch, config, step)
    return language_model_loss(head, features, *labels_of(batch), chunk=step.vocabulary_chunk)


def encode_for_head(
    params: Params, batch: TrainBatch, config: LlamaConfig, step: StepConfig
) -> tuple[Float[Array, "V D"], Float[Array, "B T D"]]:
    """Returns the head, which may be the embedding, and the features it reads."""
    features = encode(params, config, batch.tokens, batch.documents, block=step.attention_block)
    return gather_head(params["embed" if config.tie_embeddings else "head"]["weight"]), features


def cast_inner(params: Params, dtype: Any) -> Params:
    """Casts all but embedding and head, so their gradients are summed in float32."""
    wide = {name: params[name] for name in ("embed", "head") if name in params}
    return cast(params, dtype) | wide


def labels_of(batch: TrainBatch) -> tuple[Int[Array, "B T"], Bool[Array, "B T"]]:
    """Next token of every row, and whether it is trained and in the same document."""
    following = batch.replace(loss_mask=jnp.roll(batch.loss_mask, -1, axis=1))
    return jnp.roll(batch.tokens, -1, axis=1), trained_rows(following, by="token")
