"""The rollout of EAGLE-3: a chain drafted after every row, differentiated end to end.

At step d row r reads token x_{r+1+d} and the state that step d - 1 predicted in the same row. It
attends the context (the keys of step 0 up to column r) and its own keys of steps 1 to d:

    row r at step 2    (0, 0)  (0, 1)  ...  (0, r)    (1, r)  (2, r)

Gradients flow through states, keys and values. Only the input of each step is kept; the backward
pass computes every step again. So memory grows per step by one state, one key and one value per
row, and their gradients.

The further layers of a looped draft attend alike, each to its own keys of all steps.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from poss_jax.config.models import DraftConfig
from poss_jax.config.reading import UserError
from poss_jax.learn.losses import DraftLosses, acceptance_rate, describe_targets, draft_losses
from poss_jax.learn.recursion import (
    DraftInputs,
    add_gradients,
    next_reach,
    run_further,
    shared_params,
    take_specialist,
)
from poss_jax.learn.task import DraftData, DraftTask, cast, own_head
from poss_jax.model.blockwise import Attended, attend_documents, group_heads, ungroup_heads
from poss_jax.model.documents import frequencies_in, positions_in
from poss_jax.model.families import family_of
from poss_jax.model.layers import NOTHING, DecoderLayer
from poss_jax.model.sharding import gather_head, split_batch
from poss_jax.shapes import Array, Bool, Float, Int, Params


class StepKeys(struct.PyTreeNode):
    """Keys and values of every step in one layer; step 0 is the context."""

    keys: Array  # [R B K T H]
    values: Array  # [R B K T H]


StreamKeys = tuple[StepKeys, ...]
"""The streams of all layers that every step passes."""

VisitStep = Callable[[Array, Array], Any]
"""(step, its predictions [B T D]) -> output of this step."""


def unroll_chains(
    draft: Params,
    config: DraftConfig,
    inputs: DraftInputs,
    num_steps: int,
    visit: VisitStep,
    *,
    block: int,
) -> tuple[Float[Array, "R B T D"], StreamKeys, Any]:
    """Runs all steps forward.

    Args:
      draft: specialists stacked, in the compute dtype.
      inputs: pairs of the target; their features are inner states.
      num_steps: R.
      visit: called once, while tracing.
      block: rows and columns whose scores are in memory at once. Static.

    Returns:
      The states that steps read, their keys and values, and the outputs of `visit` by step.
    """
    if config.mask_token is not None:
        raise UserError(
            "this draft drafts all positions in one pass (P-EAGLE), which is trained and measured "
            "by speculators; give another draft"
        )
    family, state = family_of(config), _first_state(draft, config, inputs)
    B, T, _ = state.shape
    shape = num_steps, B, config.layer.num_kv_heads, T, config.layer.head_dim
    empty = split_batch(jnp.zeros(shape, state.dtype), axis=1)

    def body(carry: tuple[Array, StreamKeys], step: tuple[Array, Array]):
        (state, streams), (index, specialist) = carry, step
        parts = take_specialist(draft, specialist)
        prediction, new = follow(*parts, config, inputs, index, state, streams, block=block)
        output = state, visit(index, prediction)
        state = family.feed_back(draft, config, prediction)
        return (state, _write(streams, new, index)), output

    num_layers = 1 + config.num_further if config.is_looped else 1
    first, steps = (StepKeys(empty, empty),) * num_layers, _steps(config, num_steps)
    (_, streams), (states, outputs) = lax.scan(body, (state, first), steps)
    return states, streams, outputs


def follow(
    shared: Params,
    specialist: Params,
    config: DraftConfig,
    inputs: DraftInputs,
    index: Int[Array, ""],
    state: Float[Array, "B T D"],
    streams: StreamKeys,
    *,
    block: int,
) -> tuple[Float[Array, "B T D"], StreamKeys]:
    """Runs one step of all chains.

    Args:
      specialist: the one that serves this step; `shared` has the parameters of all.
      index: the step; traced.
      state: prediction of the step before, as fed back; at first the fused target feature.
      streams: keys and values of earlier steps; later entries are ignored.
      block: rows and columns whose scores are in memory at once. Static.

    Returns:
      Its predictions (row r predicts position r + 1 + index), and its keys and values [B K T H].
    """
    family = family_of(config)
    layers = [family.layer(config).bind({"params": specialist})]
    if config.is_looped:
        layers += [
            DecoderLayer(config.layer).bind({"params": layer}) for layer in shared["further"]
        ]
    position = positions_in(inputs.documents) + index
    frequencies = frequencies_in(inputs.documents, config.layer.rope, config.layer.head_dim)
    rotary = position, frequencies
    # A chain that has left its document reads another one's tokens and is not trained.
    embedded = jnp.roll(inputs.embedded, -index, axis=1)
    of_tokens = family.join_tokens(shared, embedded)
    hidden, new = split_batch(family.join_features(shared, of_tokens, state)), []
    for layer, stream in zip(layers, streams, strict=True):
        normed = layer.normed(hidden)
        q = group_heads(layer.attention.queries(normed, *rotary), config.layer.num_kv_heads)
        new.append(StepKeys(*layer.attention.keys_values(normed, *rotary)))
        stream = _write(stream, new[-1], index)
        of_context = stream.keys[0], stream.values[0], inputs.documents, jnp.array(0)
        context = attend_documents(q, *of_context, block=block, window=config.trained_window)
        mean = _add_own_rows(q, stream, index, context)
        attended = ungroup_heads(mean).astype(hidden.dtype)
        hidden = split_batch(layer.finish(hidden, attended))
    if not config.is_looped:
        hidden = run_further(shared, config, inputs, hidden, index, block=block)
    return hidden, tuple(new)


def chain_gradients(
    draft: Params, head: Float[Array, "V D"], task: DraftTask, data: DraftData
) -> tuple[Params, DraftLosses]:
    """Losses of every step, and the gradient of their weighted sum.

    Args:
      draft: parameters with their own head, specialists stacked.
      head: LM head of the target, in the compute dtype.
      task: configs; `task.draft.trained_depth` is R.

    Returns:
      Gradients like `draft`, from the first step with a trained specialist on; loss terms,
      each [R].
    """
    dtype, R, first = head.dtype, task.draft.trained_depth, task.first_trained_depth
    block, narrow = task.step.attention_block, cast(draft, dtype)
    reach = task.first_reach(data)
    visit = (lambda *_: None) if reach is None else partial(_accept, narrow, task, data)
    states, streams, accepted = unroll_chains(
        narrow, task.draft, data.inputs, R, visit, block=block
    )
    if reach is not None:
        _, reach = lax.scan(
            lambda reach, rate: (next_reach(reach, rate, data.inputs.documents), reach),
            reach,
            accepted,
        )
    kept = streams, (data.targets.expected_head, data.targets.top_expected_head)
    run = partial(_run_step, task, data, dtype)

    def look(_: None, step: tuple[Any, ...]):
        index, specialist, state, reach = step
        return None, run(index, reach, *take_specialist(draft, specialist), state, *kept)[1]

    def go_back(carry: Backward, step: tuple[Any, ...]):
        index, specialist, state, reach = step
        inputs = *take_specialist(draft, specialist), state, *kept
        (_, new, loss), pull, losses = jax.vjp(partial(run, index, reach), *inputs, has_aux=True)
        grad_new = jax.tree.map(lambda of, leaf: of[index].astype(leaf.dtype), carry.streams, new)
        *parts, state, of_streams, of_expected = pull((carry.state, grad_new, jnp.ones_like(loss)))
        return Backward(
            add_gradients(carry.parameters, specialist, *parts),
            state,
            *jax.tree.map(
                lambda total, gradient: total + gradient.astype(total.dtype),
                (carry.streams, carry.expected),
                (of_streams, of_expected),
            ),
        ), losses

    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), (draft, *kept))
    carry = Backward(zeros[0], jnp.zeros_like(states[0]), *zeros[1:])
    steps = *_steps(task.draft, R), states, reach
    _, untrained = lax.scan(look, None, jax.tree.map(lambda leaf: leaf[:first], steps))
    steps = jax.tree.map(lambda leaf: leaf[first:], steps)
    carry, trained = lax.scan(go_back, carry, steps, reverse=True)
    losses = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), untrained, trained)
    outside = partial(_outside_of_steps, head=head, task=task, data=data)
    _, pull = jax.vjp(outside, shared_params(draft))
    (of_shared,) = pull((carry.state, carry.expected))
    within = {name: carry.parameters[name] for name in of_shared}
    return carry.parameters | jax.tree.map(jnp.add, of_shared, within), losses


class Backward(NamedTuple):
    """Gradients carried backwards through the steps."""

    parameters: Params  # gradients like the draft
    state: Array  # gradient of the prediction of the step before
    streams: StreamKeys  # gradients of all keys and values, float32
    expected: tuple[Array, Array | None]  # gradients of the targets' expected heads


def _run_step(
    task: DraftTask,
    data: DraftData,
    dtype: Any,
    index: Array,
    reach: Array | None,
    shared: Params,
    specialist: Params,
    state: Array,
    streams: StreamKeys,
    expected: tuple[Array, Array | None],
) -> tuple[tuple[Array, StreamKeys, Array], DraftLosses]:
    """Runs one step; returns ((fed-back state, keys and values, weighted loss), loss terms)."""
    head = gather_head(shared["head"]["weight"])
    shared, specialist = cast(shared, dtype), cast(specialist, dtype)
    config, block = task.draft, task.step.attention_block
    prediction, new = follow(
        shared, specialist, config, data.inputs, index, state, streams, block=block
    )
    targets = data.targets.replace(expected_head=expected[0], top_expected_head=expected[1])
    losses = draft_losses(
        head,
        place_predictions(shared, config, prediction, index),
        targets,
        has_prediction(data, index),
        data.num_trained,
        task.objective,
        chunk=task.step.vocabulary_chunk,
        trains_head=True,
        reach=reach,
    )
    state = family_of(config).feed_back(shared, config, prediction)
    return (state, new, task.depth_weights()[index] * losses.total), losses


def _accept(draft: Params, task: DraftTask, data: DraftData, index: Array, prediction: Array):
    """Computes the acceptance rates of one step, at the rows that it predicts."""
    rows = place_predictions(draft, task.draft, prediction, index)
    head, chunk = gather_head(draft["head"]["weight"]), task.step.vocabulary_chunk
    return acceptance_rate(head, rows, data.targets, chunk=chunk)


def place_predictions(
    shared: Params, config: DraftConfig, prediction: Float[Array, "B T D"], index: Int[Array, ""]
) -> Float[Array, "B T D"]:
    """Reads predictions and moves each to the row just before its position."""
    read = family_of(config).read(shared, config, prediction)
    return split_batch(jnp.roll(read, index, axis=1))


def has_prediction(data: DraftData, index: Int[Array, ""]) -> Bool[Array, "B T"]:
    """Marks trained rows predicted by a chain that began in their document."""
    return data.loss_mask & (positions_in(data.inputs.documents) >= index)


def _outside_of_steps(
    shared: Params, head: Array, task: DraftTask, data: DraftData
) -> tuple[Array, tuple[Array, Array | None]]:
    """Computes the first state and the expected heads, once for all steps."""
    targets = describe_targets(
        head,
        data.targets.features,
        task.objective,
        chunk=task.step.vocabulary_chunk,
        vocabulary=task.vocabulary_ids,
        draft_head=own_head(shared),
    )
    state = _first_state(cast(shared, head.dtype), task.draft, data.inputs)
    return state, (targets.expected_head, targets.top_expected_head)


def _first_state(shared: Params, config: DraftConfig, inputs: DraftInputs) -> Array:
    return split_batch(family_of(config).fuse(shared, config, inputs.features))


def _add_own_rows(q: Array, stream: StepKeys, index: Array, context: Attended) -> Array:
    """Adds every row's own keys of steps 1 to `index` to a softmax over the context."""
    keys, values = stream.keys, stream.values
    scores = jnp.einsum("BKGTH,RBKTH->RBKGT", q, keys, preferred_element_type=jnp.float32)
    step = jnp.arange(len(keys))
    can_attend = ((step > 0) & (step <= index))[:, None, None, None, None]
    scores = jnp.where(can_attend, scores * q.shape[-1] ** -0.5, NOTHING)
    shares = jax.nn.softmax(jnp.concatenate([context.log_sum[None], scores]), axis=0)
    added = jnp.einsum("RBKGT,RBKTH->BKGTH", shares[1:], values.astype(jnp.float32))
    return context.mean * shares[0][..., None] + added


def _write(streams: Any, new: Any, index: Array) -> Any:
    """Writes the keys and values of a step into one stream, or several."""
    return jax.tree.map(
        lambda leaf, step: lax.dynamic_update_index_in_dim(leaf, step, index, 0), streams, new
    )


def _steps(config: DraftConfig, num_steps: int) -> tuple[Array, Array]:
    """Number and specialist of every step."""
    served_by = [config.specialist_at(step) for step in range(num_steps)]
    return jnp.arange(num_steps), jnp.array(served_by, jnp.int32)
