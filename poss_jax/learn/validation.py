"""Validation on held-out text; everything is a sum, so that batches add up.

A mean of the batches' means would weigh a batch of three trained rows like one of three thousand.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from poss_jax.config.models import LlamaConfig
from poss_jax.config.training import StepConfig
from poss_jax.learn.losses import draft_losses, language_model_loss, most_likely_tokens
from poss_jax.learn.pretraining import labels_trained
from poss_jax.learn.recursion import Depth, first_version, predict, take_specialist, unroll
from poss_jax.learn.state import cast
from poss_jax.learn.step import DraftData, DraftTask, prepare_draft_data
from poss_jax.model.documents import TrainBatch, count
from poss_jax.model.families import family_of
from poss_jax.model.target import compute_dtype, encode
from poss_jax.shapes import Array, Bool, Float, Params


class Predictions(NamedTuple):
    """Predictions at every row, to be shown.

    Attributes:
      tokens: most likely token at every depth.
      wanted: what it should have been.
      is_trained: rows that count.
    """

    tokens: Any  # [R B T] int32
    wanted: Any  # [B T] int32
    is_trained: Any  # [B T] bool


class DraftSums(NamedTuple):
    """Sums over the trained rows of a batch, and over the chains that start in it.

    Attributes:
      num_trained: trained rows.
      losses: loss terms by name.
      agreement: rows whose most likely token is the target's.
      cosine: similarity of the predicted feature to the target's.
      num_chains: see `count_accepted`.
      accepted: chains that accept more than so many tokens.
    """

    num_trained: Any  # []
    losses: dict[str, Any]  # each [R]
    agreement: Any  # [R]
    cosine: Any  # [R]
    num_chains: Any  # []
    accepted: Any  # [R]


class TargetSums(NamedTuple):
    """Sums over the tokens of a batch that are trained on."""

    num_trained: Any  # []
    loss: Any  # []


def make_draft_validation(task: DraftTask, depth: int) -> Callable:
    """Returns `(draft, target, batch) -> (DraftSums, Predictions)`.

    Args:
      task: configs.
      depth: R, number of draft positions to measure.
    """

    def validate(draft: Params, target: Params, batch: TrainBatch):
        head = target["head"]["weight"]
        data = prepare_draft_data(target, task, batch)
        draft = cast(draft, compute_dtype(target))

        def visit(at: Depth, carry: None):
            parts, block = take_specialist(draft, at.specialist), task.step.attention_block
            prediction = predict(*parts, task.draft, data.inputs, at, block=block)
            rows = family_of(task.draft).read(parts[0], task.draft, prediction)
            return prediction, carry, _measure_depth(rows, head, data, task)

        versions = first_version(data.inputs.features, depth)
        _, _, results = unroll(task.draft, data.inputs, versions, None, visit, range(depth))
        losses, cosine, tokens = results
        hits = (tokens == data.targets.tokens[None]) & data.loss_mask[None]
        accepted, num_chains = count_accepted(hits, data.loss_mask)
        sums = DraftSums(
            num_trained=data.num_trained,
            losses=losses,
            agreement=hits.sum(axis=(1, 2), dtype=jnp.float32),
            cosine=cosine,
            num_chains=num_chains,
            accepted=accepted,
        )
        return sums, Predictions(tokens, data.targets.tokens, data.loss_mask)

    return validate


def make_target_validation(config: LlamaConfig, step: StepConfig, dtype: Any) -> Callable:
    """Returns `(params, batch) -> (TargetSums, Predictions)`."""

    def validate(params: Params, batch: TrainBatch):
        params, chunk = cast(params, dtype), step.vocabulary_chunk
        features = encode(params, config, batch.tokens, batch.documents, block=step.attention_block)
        head = params["embed" if config.tie_embeddings else "head"]["weight"]
        wanted, is_trained = jnp.roll(batch.tokens, -1, axis=1), labels_trained(batch)
        loss = language_model_loss(head, features, wanted, is_trained, chunk=chunk)
        tokens = most_likely_tokens(head, features, chunk)
        return TargetSums(count(is_trained), loss), Predictions(tokens[None], wanted, is_trained)

    return validate


def add_up(results: Sequence[tuple[Any, Predictions]]) -> tuple[Any, Predictions]:
    """Sums over batches, and what was predicted in the first of them; as NumPy arrays."""
    sums = jax.device_get([sums for sums, _ in results])
    total = jax.tree.map(lambda *parts: np.sum(parts, axis=0, dtype=np.float64), *sums)
    return total, jax.device_get(results[0][1])


def draft_metrics(total: DraftSums) -> dict[str, Any]:
    """Means of what was added up; lists go by depth.

    The simulated acceptance length is what a chain would accept, bonus token included.
    """
    num_trained, num_chains = max(total.num_trained, 1), max(total.num_chains, 1)
    terms = total.losses
    of_rows = {
        "validation_loss": terms["total"],
        "feature_loss": terms["feature"],
        "probability_loss": terms["probability"],
        "top_k_loss": terms["top_k"],
        "agreement": total.agreement,
        "feature_cosine": total.cosine,
    }
    cumulative = total.accepted / num_chains
    return {
        **{name: (value / num_trained).tolist() for name, value in of_rows.items()},
        "cumulative_acceptance": cumulative.tolist(),
        "simulated_acceptance_length": 1 + float(cumulative.sum()),
    }


def count_accepted(
    hits: Bool[Array, "R B T"], loss_mask: Bool[Array, "B T"]
) -> tuple[Float[Array, " R"], Float[Array, ""]]:
    """Lets a chain draft from every row of known text, teacher-forced, and counts what is accepted.

    The chain that starts at row s makes its depth-d prediction at row s + d; it accepts as many
    tokens as hit in sequence. A chain counts if all its R rows are trained, so it ends before its
    document does.

    Args:
      hits: the depth's most likely token is the target's.
      loss_mask: trained rows.

    Returns:
      Chains that accept more than 0, 1, ..., R - 1 tokens, and how many chains there are.
    """
    R, _, T = hits.shape
    starts = T - R + 1
    rows = [slice(depth, depth + starts) for depth in range(R)]
    is_chain = jnp.stack([loss_mask[:, row] for row in rows]).all(axis=0)
    chain = jnp.stack([hits[depth, :, row] for depth, row in enumerate(rows)])
    accepted = jnp.cumprod(chain.astype(jnp.float32), axis=0)
    return jnp.where(is_chain, accepted, 0.0).sum(axis=(1, 2)), count(is_chain)


def _measure_depth(
    prediction: Float[Array, "B T D"], head: Float[Array, "V D"], data: DraftData, task: DraftTask
) -> tuple[dict[str, Array], Array, Array]:
    """Sums of the loss terms and of the cosine, and the most likely tokens."""
    chunk, mask, num_trained = task.step.vocabulary_chunk, data.loss_mask, data.num_trained
    means = draft_losses(
        head, prediction, data.targets, mask, num_trained, task.objective, chunk=chunk
    )
    cosine = jnp.where(mask, _cosine(prediction, data.targets.features), 0.0).sum()
    sums = {name: mean * num_trained for name, mean in vars(means).items()}
    return sums, cosine, most_likely_tokens(head, prediction, chunk)


def _cosine(a: Float[Array, "B T D"], b: Float[Array, "B T D"]) -> Float[Array, "B T"]:
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    lengths = jnp.linalg.norm(a, axis=-1) * jnp.linalg.norm(b, axis=-1)
    return (a * b).sum(axis=-1) / jnp.maximum(lengths, 1e-30)
