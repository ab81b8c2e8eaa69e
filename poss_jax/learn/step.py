"""The jitted training step of a draft, recursive over depths.

The versions a depth reads are detached, so its gradient reaches its own specialist and what all
specialists share: `jax.grad` sits inside the scan over depths, takes one specialist out of the
stack, and the gradients are summed on the way.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax import lax

from poss_jax.config.models import DraftConfig, LlamaConfig
from poss_jax.config.training import ObjectiveConfig, StepConfig
from poss_jax.learn.losses import (
    DraftLosses,
    TargetRows,
    describe_targets,
    draft_losses,
)
from poss_jax.learn.recursion import (
    Depth,
    DraftInputs,
    first_version,
    predict,
    take_specialist,
    unroll,
)
from poss_jax.learn.state import TrainState, cast, update_state
from poss_jax.model.documents import TrainBatch, count, cut_batch, is_last_in, lengths_in
from poss_jax.model.families import family_of
from poss_jax.model.sharding import gather_head, split_batch
from poss_jax.model.specialists import share_keys_values
from poss_jax.model.target import compute_dtype, embed, encode
from poss_jax.shapes import Array, Bool, Float, Params


class DraftTask(NamedTuple):
    """Everything static about training a draft for a frozen target.

    Attributes:
      num_frozen: specialists, from the first, that stay as they are, and with them all they share.
    """

    target: LlamaConfig
    draft: DraftConfig
    objective: ObjectiveConfig
    step: StepConfig = StepConfig()
    num_frozen: int = 0


class DraftData(struct.PyTreeNode):
    """A batch of text as the frozen target sees it: input of the draft, and what to predict.

    Attributes:
      inputs: pairs of the target.
      targets: what every row is to predict.
      loss_mask: rows that are trained.
      num_trained: number of such rows in the whole batch, of which this may be a part.
    """

    inputs: DraftInputs
    targets: TargetRows
    loss_mask: Array  # [B T] bool
    num_trained: Array  # [] float32


def prepare_draft_data(
    target: Params,
    task: DraftTask,
    batch: TrainBatch,
    noise_keys: Array | None = None,
    num_trained: Float[Array, ""] | None = None,
) -> DraftData:
    """Runs the frozen target over rows of text and pairs features with the tokens after them.

    Args:
      target: the frozen target, layers stacked; its dtype is the one computed in.
      task: configs.
      batch: rows of text. The last token of a document is never trained.
      noise_keys: one for every row, draws the uniform noise on input features; None: no noise.
      num_trained: see `DraftData`; None: the rows trained here.
    """
    features = batch.features
    if features is None:
        block = task.step.attention_block
        features = encode(target, task.target, batch.tokens, batch.documents, block=block)
    features = lax.stop_gradient(features.astype(compute_dtype(target)))
    noisy = features
    if noise_keys is not None:
        lengths = lengths_in(batch.documents)[..., None].astype(jnp.float32)
        width = task.objective.feature_noise * 512 / lengths
        draw = partial(jax.random.uniform, shape=features.shape[1:], minval=-1.0, maxval=1.0)
        noisy = features + (width * jax.vmap(draw)(noise_keys)).astype(features.dtype)
    is_last = is_last_in(batch.documents)
    loss_mask = batch.loss_mask & ~is_last & (batch.documents > 0)
    return DraftData(
        inputs=DraftInputs(
            features=noisy,
            embedded=split_batch(embed(target["embed"]["weight"], _next(batch.tokens, is_last))),
            documents=batch.documents,
        ),
        targets=describe_targets(
            target["head"]["weight"],
            _next(features, is_last),
            task.objective,
            chunk=task.step.vocabulary_chunk,
        ),
        loss_mask=loss_mask,
        num_trained=count(loss_mask) if num_trained is None else num_trained,
    )


def draft_gradients(
    draft: Params, head: Float[Array, "V D"], task: DraftTask, data: DraftData
) -> tuple[Params, DraftLosses]:
    """Losses of every depth, and the gradient of their weighted sum.

    Args:
      draft: parameters, specialists stacked.
      head: the target's.
      task: configs; `task.draft.trained_depth` is R.
      data: a batch.

    Returns:
      Gradients like `draft`, zero for what is frozen; loss terms, each [R].
    """
    R, first = task.draft.trained_depth, _first_trained_depth(task)
    weights = jnp.asarray(task.objective.depth_weights or (1.0,) * R, jnp.float32)

    def loss(shared: Params, specialist: Params, depth: Depth):
        return _depth_loss(shared, specialist, weights[depth.index], head, task, data, depth)

    def visit(depth: Depth, gradients: Params):
        _, (prediction, losses) = loss(*take_specialist(draft, depth.specialist), depth)
        return prediction, gradients, losses

    def train(depth: Depth, gradients: Params):
        parts = take_specialist(draft, depth.specialist)
        grads, (prediction, losses) = jax.grad(loss, argnums=(0, 1), has_aux=True)(*parts, depth)
        return prediction, _add_gradients(gradients, depth.specialist, *grads), losses

    run = partial(unroll, task.draft, data.inputs)
    versions, gradients = (
        first_version(data.inputs.features, R),
        jax.tree.map(jnp.zeros_like, draft),
    )
    versions, gradients, before = run(versions, gradients, visit, range(first))
    _, gradients, losses = run(versions, gradients, train, range(first, R))
    if task.num_frozen:
        specialists = gradients.pop("specialists")
        gradients = jax.tree.map(jnp.zeros_like, gradients) | {"specialists": specialists}
    if task.draft.kv == "shared":
        gradients = share_keys_values(gradients, lambda leaf: leaf.sum(axis=0, keepdims=True))
    return gradients, jax.tree.map(lambda a, b: jnp.concatenate([a, b]), before, losses)


def _depth_loss(
    shared: Params,
    specialist: Params,
    weight: Array,
    head: Array,
    task: DraftTask,
    data: DraftData,
    depth: Depth,
) -> tuple[Array, tuple[Array, DraftLosses]]:
    """(weighted loss of one depth, (its prediction, its loss terms)), in the head's dtype."""
    shared, specialist = cast(shared, head.dtype), cast(specialist, head.dtype)
    block, chunk = task.step.attention_block, task.step.vocabulary_chunk
    prediction = predict(shared, specialist, task.draft, data.inputs, depth, block=block)
    losses = draft_losses(
        head,
        family_of(task.draft).read(shared, task.draft, prediction),
        data.targets,
        data.loss_mask,
        data.num_trained,
        task.objective,
        chunk=chunk,
    )
    return weight * losses.total, (prediction, losses)


def _add_gradients(
    total: Params, index: Array, grad_shared: Params, grad_specialist: Params
) -> Params:
    specialists = jax.tree.map(
        lambda stack, part: stack.at[index].add(part), total["specialists"], grad_specialist
    )
    shared = {name: total[name] for name in grad_shared}
    return jax.tree.map(jnp.add, shared, grad_shared) | {"specialists": specialists}


def make_draft_step(task: DraftTask, optimizer: optax.GradientTransformation) -> Callable:
    """Returns the jitted `(state, target, batch, key) -> (state, metrics)`.

    The metrics: `loss`, the mean over depths; `loss_per_depth` [R]; `gradient_norm`, of all
    gradients together, so not a number where any is none. The state is donated; the target runs
    frozen inside the same program. A batch is cut into `task.step.accumulation_steps` parts, one
    after the other.
    """

    @partial(jax.jit, donate_argnums=0)
    def step(state: TrainState, target: Params, batch: TrainBatch, key: Array):
        head = gather_head(target["head"]["weight"])
        target = target | {"head": {"weight": head}}
        key = jax.random.fold_in(key, state.step)
        keys = jax.vmap(partial(jax.random.fold_in, key))(jnp.arange(len(batch.tokens)))
        is_trained = batch.loss_mask & ~is_last_in(batch.documents) & (batch.documents > 0)
        num_trained = count(is_trained)

        def of_part(total: Params | None, part: tuple[TrainBatch, Array]):
            data = prepare_draft_data(target, task, *part, num_trained)
            gradients, losses = draft_gradients(state.params, head, task, data)
            return jax.tree.map(jnp.add, total, gradients), losses

        parts = cut_batch((batch, keys), task.step.accumulation_steps)
        zeros = jax.tree.map(jnp.zeros_like, state.params)
        gradients, losses = lax.scan(of_part, zeros, parts)
        of_depth = losses.total.sum(axis=0)
        metrics = {
            "loss": of_depth.mean(),
            "loss_per_depth": of_depth,
            "gradient_norm": optax.tree.norm(gradients),
        }
        return update_state(state, gradients, optimizer, _is_trained(task, state.params)), metrics

    return step


def _first_trained_depth(task: DraftTask) -> int:
    R, frozen = task.draft.trained_depth, task.num_frozen
    return sum(task.draft.specialist_at(depth) < frozen for depth in range(R))


def _is_trained(task: DraftTask, draft: Params) -> Params:
    """1 where a parameter is trained, 0 where it stays; specialists that no depth reaches stay."""
    R, config = task.draft.trained_depth, task.draft
    reached = {config.specialist_at(depth) for depth in range(_first_trained_depth(task), R)}
    of_specialist = jnp.array([float(e in reached) for e in range(config.num_specialists)])

    def mask(leaf: Array) -> Array:
        return of_specialist.reshape(-1, *[1] * (leaf.ndim - 1))

    shared = {name: leaves for name, leaves in draft.items() if name != "specialists"}
    is_trained = jax.tree.map(lambda _: float(not task.num_frozen), shared)
    return is_trained | {"specialists": jax.tree.map(mask, draft["specialists"])}


def _next(x: Array, is_last: Bool[Array, "B T"]) -> Array:
    """Row j shows what stood at row j + 1; the last row of a document shows zeros."""
    is_last = is_last.reshape(*is_last.shape, *[1] * (x.ndim - 2))
    return jnp.where(is_last, jnp.zeros_like(x), jnp.roll(x, -1, axis=1))
