"""Validation on held-out text; all results are sums, so that batches add up.

A mean of batch means would give three trained rows the weight of three thousand.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from poss_jax.config.models import LlamaConfig
from poss_jax.config.training import StepConfig
from poss_jax.learn.chains import has_prediction, place_predictions, unroll_chains
from poss_jax.learn.losses import draft_losses, language_model_loss, most_likely_tokens
from poss_jax.learn.recursion import Depth, first_version, predict, take_specialist, unroll
from poss_jax.learn.step import cast_inner, encode_for_head, labels_of
from poss_jax.learn.task import DraftData, DraftTask, cast, own_head, prepare_draft_data
from poss_jax.model.documents import TrainBatch, count
from poss_jax.model.families import family_of
from poss_jax.model.sharding import gather_head
from poss_jax.model.target import compute_dtype
from poss_jax.shapes import Array, Bool, Float, Params


class Predictions(NamedTuple):
    """Predictions at every row, for display."""

    tokens: Any  # [R B T] int32, most likely token at every depth
    labels: Any  # [B T] int32, the token it should have been
    is_trained: Any  # [B T] bool, rows that count


class DraftSums(NamedTuple):
    """Sums over the trained rows of a batch, and over the chains that start in it."""

    num_trained: Any  # [R], trained rows that have a prediction
    losses: dict[str, Any]  # each [R], loss terms by name
    agreement: Any  # [R], rows whose most likely token is the target's
    # similarity of predicted and target's feature; None if the draft predicts none of the target
    cosine: Any  # [R]
    distance: Any  # [R], length of their difference, in lengths of the target's; None likewise
    num_chains: Any  # [], see `count_accepted`
    accepted: Any  # [R], chains that accept more than 0, 1, ..., R - 1 tokens


class TargetSums(NamedTuple):
    """Sums over the tokens of a batch that are trained."""

    num_trained: Any  # []
    loss: Any  # []


def make_draft_validation(task: DraftTask, depth: int) -> Callable:
    """Returns `(draft, target, batch) -> (DraftSums, Predictions)`.

    R is `depth`, the number of draft positions to measure.
    """
    roll_out = _roll_out_chains if family_of(task.draft).is_trained_in_chains else _roll_out

    def validate(draft: Params, target: Params, batch: TrainBatch):
        dtype = compute_dtype(target)
        data = prepare_draft_data(target, task, batch, own_head=own_head(draft))
        ids, head = task.vocabulary_ids, gather_head(target["head"]["weight"])
        head, ids = (head, jnp.arange(len(head))) if ids is None else (head[ids], ids)
        sums, tokens, hits = roll_out(cast(draft, dtype), head, task, data, depth)
        accepted, num_chains = count_accepted(hits, data.loss_mask)
        sums = DraftSums(**sums, num_chains=num_chains, accepted=accepted)
        return sums, Predictions(ids[tokens], ids[data.targets.tokens], data.loss_mask)

    return validate


Measured = tuple[dict[str, Any], Array, Array]
"""(sums of one depth, or of all; most likely tokens [(R) B T], in the draft's numbering; whether
these are the target's [(R) B T])"""


def _roll_out(draft: Params, head: Array, task: DraftTask, data: DraftData, depth: int) -> Measured:
    """Measures every depth of a draft that predicts all rows of a depth."""

    def visit(at: Depth, carry: None):
        parts, block = take_specialist(draft, at.specialist), task.step.attention_block
        prediction = predict(*parts, task.draft, data.inputs, at, block=block)
        rows = family_of(task.draft).read(parts[0], task.draft, prediction)
        sums, tokens, hits = _measure_depth(rows, head, data, data.loss_mask, task)
        a, b = rows.astype(jnp.float32), data.targets.features.astype(jnp.float32)
        length = jnp.linalg.norm(b, axis=-1)
        lengths = jnp.linalg.norm(a, axis=-1) * length
        cosine = (a * b).sum(axis=-1) / jnp.maximum(lengths, 1e-30)
        distance = jnp.linalg.norm(a - b, axis=-1) / jnp.maximum(length, 1e-30)
        sums["cosine"] = jnp.where(data.loss_mask, cosine, 0.0).sum()
        sums["distance"] = jnp.where(data.loss_mask, distance, 0.0).sum()
        return prediction, carry, (sums, tokens, hits)

    versions = first_version(data.inputs.features, depth)
    _, _, measured = unroll(task.draft, data.inputs, versions, None, visit, range(depth))
    return measured


def _roll_out_chains(
    draft: Params, head: Array, task: DraftTask, data: DraftData, depth: int
) -> Measured:
    """Measures every step of a draft that follows chains."""
    head = gather_head(draft["head"]["weight"])  # the draft's own head

    def visit(index: Array, prediction: Array) -> Measured:
        rows = place_predictions(draft, task.draft, prediction, index)
        measured = _measure_depth(rows, head, data, has_prediction(data, index), task)
        del measured[0]["losses"]["feature"]
        return measured

    block = task.step.attention_block
    *_, measured = unroll_chains(draft, task.draft, data.inputs, depth, visit, block=block)
    return measured


def make_target_validation(config: LlamaConfig, step: StepConfig, dtype: Any) -> Callable:
    """Returns `(params, batch) -> (TargetSums, Predictions)`."""

    def validate(params: Params, batch: TrainBatch):
        params, chunk = cast_inner(params, dtype), step.vocabulary_chunk
        head, features = encode_for_head(params, batch, config, step)
        labels, is_trained = labels_of(batch)
        loss = language_model_loss(head, features, labels, is_trained, chunk=chunk)
        tokens = most_likely_tokens(head, features, chunk)
        return TargetSums(count(is_trained), loss), Predictions(tokens[None], labels, is_trained)

    return validate


def add_up(results: Sequence[tuple[Any, Predictions]]) -> tuple[Any, Predictions]:
    """Sums over batches, and keeps the first batch's predictions; as NumPy arrays."""
    sums = jax.device_get([sums for sums, _ in results])
    total = jax.tree.map(lambda *parts: np.sum(parts, axis=0, dtype=np.float64), *sums)
    return total, jax.device_get(results[0][1])


def draft_metrics(total: DraftSums) -> dict[str, Any]:
    """Turns sums into means; lists are by depth.

    The simulated acceptance length is what a chain would accept, bonus token included.
    """
    num_trained, num_chains = np.maximum(total.num_trained, 1), max(total.num_chains, 1)
    terms = total.losses
    of_rows = {
        "validation_loss": terms["total"],
        "feature_loss": terms.get("feature"),
        "probability_loss": terms["probability"],
        "top_k_loss": terms["top_k"],
        "lk_loss": terms.get("lk"),
        "agreement": total.agreement,
        "feature_cosine": total.cosine,
        "feature_distance": total.distance,
    }
    of_rows = {name: sums for name, sums in of_rows.items() if sums is not None}
    cumulative = total.accepted / num_chains
    return {
        **{name: (value / num_trained).tolist() for name, value in of_rows.items()},
        "cumulative_acceptance": cumulative.tolist(),
        "simulated_acceptance_length": 1 + float(cumulative.sum()),
    }


def count_accepted(
    hits: Bool[Array, "R B T"], loss_mask: Bool[Array, "B T"]
) -> tuple[Float[Array, " R"], Float[Array, ""]]:
    """Drafts a teacher-forced chain from every row of known text, and counts accepted tokens.

    The chain that starts at row s makes its depth-d prediction at row s + d; it accepts as many
    tokens as hit in sequence. A chain counts if all its R rows are trained, so it ends within its
    document. A hit is a depth's most likely token that is the target's.

    Returns:
      Chains that accept more than 0, 1, ..., R - 1 tokens, and the number of chains.
    """
    R, _, T = hits.shape
    starts = T - R + 1
    rows = [slice(depth, depth + starts) for depth in range(R)]
    is_chain = jnp.stack([loss_mask[:, row] for row in rows]).all(axis=0)
    chain = jnp.stack([hits[depth, :, row] for depth, row in enumerate(rows)])
    accepted = jnp.cumprod(chain.astype(jnp.float32), axis=0)
    return jnp.where(is_chain, accepted, 0.0).sum(axis=(1, 2)), count(is_chain)


def _measure_depth(
    rows: Float[Array, "B T D"],
    head: Float[Array, "Vd D"],
    data: DraftData,
    is_predicted: Bool[Array, "B T"],
    task: DraftTask,
) -> Measured:
    """Measures the predictions of one depth, as the head reads them."""
    chunk, num_trained = task.step.vocabulary_chunk, data.num_trained
    means = draft_losses(
        head,
        rows,
        data.targets,
        is_predicted,
        num_trained,
        task.objective,
        chunk=chunk,
        deviations=task.feature_deviations,
    )
    tokens = most_likely_tokens(head, rows, chunk)
    hits = (tokens == data.targets.tokens) & data.targets.is_known & is_predicted
    sums = {
        "num_trained": count(is_predicted),
        "losses": {
            name: mean * num_trained for name, mean in vars(means).items() if mean is not None
        },
        "agreement": count(hits),
        "cosine": None,
        "distance": None,
    }
    return sums, tokens, hits
