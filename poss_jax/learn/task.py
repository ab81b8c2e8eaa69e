"""Training a draft: its static settings, and a batch of text run through the frozen target."""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from poss_jax.config.models import FIRST_FAMILY, DraftConfig, LlamaConfig
from poss_jax.config.reading import UserError
from poss_jax.config.training import ObjectiveConfig, SpecialistsConfig, StepConfig
from poss_jax.learn.losses import TargetRows, describe_targets
from poss_jax.learn.recursion import DraftInputs
from poss_jax.model.documents import TrainBatch, count, encode, is_last_in, lengths_in, trained_rows
from poss_jax.model.families import find_family
from poss_jax.model.sharding import gather_head, split_batch
from poss_jax.model.target import compute_dtype, embed
from poss_jax.shapes import Array, Bool, Float, Int, Params


class DraftTask(NamedTuple):
    """Static settings of training a draft for a frozen target."""

    target: LlamaConfig
    draft: DraftConfig
    objective: ObjectiveConfig
    step: StepConfig = StepConfig()
    # specialists, from the first, that are frozen, and with them all shared parameters
    num_frozen: int = 0
    # target ids of the tokens that the draft can propose; None: all
    vocabulary: tuple[int, ...] | None = None
    # standard deviations of the target's features, [D]; None: the feature loss is not normalised
    deviations: tuple[float, ...] | None = None

    @property
    def feature_deviations(self) -> Float[Array, " D"] | None:
        """The deviations as an array."""
        return None if self.deviations is None else jnp.asarray(self.deviations, jnp.float32)

    @property
    def vocabulary_ids(self) -> Int[Array, " Vd"] | None:
        """The vocabulary as an array."""
        return None if self.vocabulary is None else jnp.asarray(self.vocabulary, jnp.int32)

    @property
    def first_trained_depth(self) -> int:
        """Number of depths served by frozen specialists."""
        depths = range(self.draft.trained_depth)
        return sum(self.draft.specialist_at(depth) < self.num_frozen for depth in depths)

    def first_reach(self, data: "DraftData") -> Float[Array, "B T"] | None:
        """Reach of every row at depth 0; None if rows are not weighted by it."""
        is_weighted = self.objective.depth_weighting == "reach"
        return jnp.ones(data.loss_mask.shape) if is_weighted else None

    def depth_weights(self) -> Float[Array, " R"]:
        """Weight of the loss of every depth."""
        weights = self.objective.depth_weights or (1.0,) * self.draft.trained_depth
        return jnp.asarray(weights, jnp.float32)


def describe_draft(config: SpecialistsConfig, target: LlamaConfig, num_tokens: int) -> DraftConfig:
    """Describes a draft that starts from scratch; `num_tokens` is how many it can propose."""
    name = config.family or FIRST_FAMILY
    fields: dict[str, Any] = {"kv": config.kv} | find_family(name).default_fields(
        target, num_tokens
    )
    if (layers := config.aux_layers) is not None:
        if "aux_layers" not in fields:
            raise UserError(
                f"specialists.aux_layers: a draft of the family {name} reads none of the target's "
                "layers; leave it out"
            )
        if max(layers) >= target.num_layers:
            raise UserError(
                f"specialists.aux_layers: want layers below {target.num_layers}, which the target "
                f"has, got {max(layers)}"
            )
        fields["aux_layers"] = layers
    return DraftConfig(
        layer=replace(target, num_layers=1, fused_projections=False),
        positions_per_specialist=config.positions_per_specialist,
        layers_per_specialist=config.layers_per_specialist,
        trained_depth=config.depth,
        fc_bias=config.fc_bias,
        family=name,
        **fields,
    )


class DraftData(struct.PyTreeNode):
    """A batch of text run through the frozen target: the draft's input and targets."""

    inputs: DraftInputs  # pairs of the target
    targets: TargetRows  # targets of every row
    loss_mask: Array  # [B T] bool, trained rows
    # trained rows in the whole batch, of which this may be a part: the loss's denominator
    num_trained: Array  # [] float32


def prepare_draft_data(
    target: Params,
    task: DraftTask,
    batch: TrainBatch,
    noise_keys: Array | None = None,
    num_trained: Float[Array, ""] | None = None,
    *,
    own_head: Float[Array, "Vd D"] | None = None,
) -> DraftData:
    """Runs the frozen target over rows of text and pairs features with the tokens after them.

    Args:
      target: the frozen target, layers stacked, in the compute dtype; `draft` in it may hold the
        draft's own embedding.
      batch: rows of text; `ObjectiveConfig.trained_rows` says which rows are trained.
      noise_keys: a key per row for the uniform noise on input features; None: no noise.
      num_trained: see `DraftData`; None: the trained rows of this batch.
      own_head: LM head of a draft that has one; None: the target's is used.
    """
    features = batch.features
    if features is None:
        block, aux_layers = task.step.attention_block, task.draft.aux_layers
        text = batch.tokens, batch.documents
        features = encode(target, task.target, *text, block=block, aux_layers=aux_layers)
    features = lax.stop_gradient(features.astype(compute_dtype(target)))
    aux, final = jnp.split(features, [features.shape[-1] - task.target.hidden_size], axis=-1)
    features = noisy = aux if task.draft.aux_layers else final
    if noise_keys is not None and task.objective.feature_noise:
        lengths = lengths_in(batch.documents)[..., None].astype(jnp.float32)
        width = task.objective.feature_noise * 512 / lengths
        draw = partial(jax.random.uniform, shape=features.shape[1:], minval=-1.0, maxval=1.0)
        noisy = features + (width * jax.vmap(draw)(noise_keys)).astype(features.dtype)
    head, is_last = gather_head(target["head"]["weight"]), is_last_in(batch.documents)
    embedding = (target | target.get("draft", {}))["embed"]["weight"]
    embedded = embed(embedding, _next(batch.tokens, is_last))
    loss_mask = trained_rows(batch, task.objective.trained_rows)
    return DraftData(
        inputs=DraftInputs(noisy, split_batch(embedded.astype(features.dtype)), batch.documents),
        targets=describe_targets(
            head,
            _next(final, is_last),
            task.objective,
            chunk=task.step.vocabulary_chunk,
            vocabulary=task.vocabulary_ids,
            draft_head=own_head,
        ),
        loss_mask=loss_mask,
        num_trained=count(loss_mask) if num_trained is None else num_trained,
    )


def _next(x: Array, is_last: Bool[Array, "B T"]) -> Array:
    """Shifts rows left: row j gets row j + 1; the last row of a document gets zeros."""
    is_last = is_last.reshape(*is_last.shape, *[1] * (x.ndim - 2))
    return jnp.where(is_last, jnp.zeros_like(x), jnp.roll(x, -1, axis=1))


def own_head(draft: Params) -> Float[Array, "Vd D"] | None:
    """The LM head of a draft that has one, whole along `fsdp`."""
    return gather_head(draft["head"]["weight"]) if "head" in draft else None


def cast(params: Params, dtype: Any) -> Params:
    """Casts parameters to the compute dtype."""
    return jax.tree.map(lambda leaf: leaf.astype(dtype), params)
