"""Settings of training runs."""

import math
from typing import Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from poss_jax.config.data import DataConfig
from poss_jax.config.models import (
    STRICT,
    LayerCounts,
    LlamaConfig,
    MeshConfig,
    Spans,
    check_specialists,
)
from poss_jax.config.numbers import (
    Count,
    CountOrZero,
    Decay,
    Depth,
    Fraction,
    NumTokens,
    Positive,
    PositiveOrZero,
    Seed,
)
from poss_jax.config.reading import change_config, refuse_given, shorten


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ObjectiveConfig:
    """Weights of the draft's loss, and noise on its input; the defaults are the reference's.

    Attributes:
      feature_weight: Weight of the SmoothL1 loss between predicted and true feature.
      normalised_features: Divide this difference by the standard deviation of each dimension over
        the target's features, so that no dimension outweighs the others.
      probability_weight: Weight of the cross-entropy against the target's distribution.
      top_k_weight: Weight of the cross-entropy over the top_k most likely tokens; 0 leaves it out.
      top_k: Number of tokens in that cross-entropy.
      lk_weight: Weight of the LK loss, which raises the rate at which draft tokens are accepted at
        temperature 1 (arXiv 2602.23881); 0 leaves it out.
      lk: Kind of LK loss: `lambda`, a blend of cross-entropy and total variation, or `alpha`, the
        negative log of the rate.
      lk_eta: How fast `lambda` leaves the cross-entropy as the rate grows.
      depth_weights: Weight of each depth's loss, one per depth; empty gives all 1.
      depth_weighting: `fixed`, or `reach`: a row's weight at a depth is multiplied by the
        probability that verification gets there, the product of the draft's acceptance rates at
        the depths before; then all are divided by their mean, so the learning rate keeps its
        meaning.
      trained_rows: Rows to train: `label`, rows whose predicted token and whose read token belong
        to an answer; or `token`, as in the reference, rows whose own token does. That token stands
        before the read one, so the first drafted token of an answer is never trained and the one
        after the answer is.
      average_over: Rows that a loss is averaged over: `trained` ones, or `all` including padding,
        as in the reference of EAGLE-3.
      feature_noise: Half-width of the uniform noise on input features for a document of 512 tokens
        (it is divided by length / 512).
    """

    feature_weight: PositiveOrZero = 1.0
    normalised_features: bool = False
    probability_weight: PositiveOrZero = 0.1
    top_k_weight: PositiveOrZero = 1.0
    top_k: Count = 10
    lk_weight: PositiveOrZero = 0.0
    lk: Literal["lambda", "alpha"] = "lambda"
    lk_eta: PositiveOrZero = 3.0
    depth_weights: tuple[PositiveOrZero, ...] = ()
    depth_weighting: Literal["fixed", "reach"] = "fixed"
    trained_rows: Literal["label", "token"] = "label"
    average_over: Literal["trained", "all"] = "trained"
    feature_noise: PositiveOrZero = 0.1

    def __post_init__(self) -> None:
        of_tokens = self.probability_weight + self.top_k_weight + self.lk_weight
        if not self.feature_weight + of_tokens:
            raise ValueError("want a weight above 0, got none")
        if not self.feature_weight:
            refuse_given(self, "normalised_features", "wants a feature_weight above 0")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class StepConfig:
    """Sizes of the parts of a step, to fit in memory; results are equal up to rounding.

    Attributes:
      vocabulary_chunk: Number of positions per sequence whose logits are in memory at once.
      attention_block: Number of positions whose attention scores are in memory at once (squared).
      accumulation_steps: Number of parts of a batch, computed one after the other.
    """

    vocabulary_chunk: Count = 128
    attention_block: Count = 256
    accumulation_steps: Count = 1


@dataclass(frozen=True, kw_only=True, config=STRICT)
class OptimizerConfig:
    """AdamW with linear warm-up and linear decay to zero; the defaults are the reference's.

    Attributes:
      learning_rate: Peak learning rate.
      warmup_fraction: Share of the steps over which the learning rate rises.
      warmup_steps: Least number of such steps; null takes 2 / (1 - b2), the time Adam needs to
        learn how large gradients are (arXiv 1910.04209), but at most a fifth of the run.
      b1: Decay of the mean of gradients.
      b2: Decay of the mean of squared gradients.
      eps: Number added to the denominator of an update.
      weight_decay: Decay of the weights.
      clip_value: Largest absolute value of a gradient's element; null does not clip.
      clip_norm: Largest norm of all gradients together; larger ones are scaled down before
        clipping by value; null does not scale.
    """

    learning_rate: Positive = 3e-5
    warmup_fraction: Fraction = 0.01
    warmup_steps: CountOrZero | None = None
    b1: Decay = 0.9
    b2: Decay = 0.95
    eps: Positive = 1e-8
    weight_decay: PositiveOrZero = 0.01
    clip_value: Positive | None = 0.5
    clip_norm: Positive | None = None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SpecialistsConfig:
    """The draft to train; its spans and depth are the method (see `DraftConfig`).

    Attributes:
      positions_per_specialist: Number of positions that each specialist serves, such as [3, 3].
      layers_per_specialist: Number of layers of each specialist, 1 where none is given. Only the
        first may have more, and then drafts one position: [3, 1, 1] for positions [1, 1, 1]. A
        single one of `family: eagle3` may have more, too, which all positions pass.
      depth: Number of positions that training drafts.
      fc_bias: Give the projection of the draft's input a bias.
      kv: `per_specialist`, or `shared`: all specialists of an eagle draft have the same key and
        value projections, and one cache. Other families always have separate projections, eagle3
        one cache.
      num_frozen: Number of specialists, from the first, that are not trained; the parameters that
        all share are then frozen, too.
      family: Kind of draft: `eagle` (EAGLE-2, HASS, PosS), `eagle3` (EAGLE-3, and PosS on it) or
        `mtp` (multi-token prediction: a whole layer of the target per specialist); null takes
        init_draft's, or eagle.
      aux_layers: Layers of the target whose inputs an eagle3 draft reads; null takes 2, n/2 and
        n - 3 of n layers.
      draft_vocabulary: File of the tokens that the draft can propose, written by
        `poss draft-vocab`; null takes init_draft's, or all.
      start: Parameters of a draft from scratch: `random`, or `pass_through`: an eagle
        draft starts by predicting the feature it reads, plus a little of the token.
    """

    positions_per_specialist: Spans = (1,)
    layers_per_specialist: LayerCounts = (1,)
    depth: Depth = 1
    fc_bias: bool = False
    kv: Literal["per_specialist", "shared"] = "per_specialist"
    num_frozen: CountOrZero = 0
    family: str | None = None
    aux_layers: tuple[CountOrZero, ...] | None = None
    draft_vocabulary: str | None = None
    start: Literal["random", "pass_through"] = "random"

    def __post_init__(self) -> None:
        check_specialists(self)
        num_specialists = len(self.positions_per_specialist)
        if self.num_frozen >= num_specialists:
            raise ValueError(
                f"num_frozen {self.num_frozen} leaves none of {num_specialists} to be trained"
            )
        layers = self.aux_layers
        if layers is not None and (len(layers) < 2 or sorted({*layers}) != list(layers)):
            raise ValueError(f"aux_layers: want two or more, in order, got {list(layers)}")
        if self.num_frozen and self.kv == "shared":
            raise ValueError("num_frozen wants kv per_specialist: shared ones cannot stay and move")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class FeaturesConfig:
    """Source of the target's features.

    Attributes:
      cache: Folder to write the features of all rows to, or to read them from; null runs the
        target in every step.
      shard_gib: Size of the files of a new cache, in GiB.
    """

    cache: str | None = None
    shard_gib: Positive = Field(default=1.0, ge=2**-20, le=2**20)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ProfileConfig:
    """Steps that JAX's profiler records.

    Attributes:
      start: First step to record; a run's first step is 1.
      steps: Number of steps to record.
    """

    start: Count = 10
    steps: Count = 3


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TrainConfig:
    """One training run.

    Attributes:
      stage: `target` trains a language model, `draft` the specialists of a frozen target.
      output: Folder of the run; the trained model is its subfolder `model`.
      model: Shape of the language model (stage target).
      init_target: Model folder of a target to start from, with its tokenizer (stage target); model
        may have more layers than it. null starts from scratch.
      target: Model folder of the frozen target (stage draft).
      init_draft: Model folder of a draft to start from (stage draft); null starts from scratch.
      allow_target_mismatch: Start from a draft made for other weights of the same shape.
      specialists: The draft to train (stage draft).
      data: Source of texts or chats, and the layout of rows.
      objective: Weights of the draft's loss (stage draft).
      step: Sizes of the parts of a step, to fit in memory.
      optimizer: Learning rate and the like.
      mesh: Grid of devices.
      features: Source of the target's features (stage draft).
      dtype: Dtype of all computation; null takes float32 on CPU and bfloat16 elsewhere. Parameters
        and optimizer stay in float32.
      num_tokens: Length of the run in tokens; give this or num_epochs.
      num_epochs: Length of the run in passes over the training rows.
      batch_size: Number of rows per step.
      seed: Seed of initial parameters, order of rows and noise.
      checkpoint_every: Steps between checkpoints; every validation saves one, too.
      validate_every: Steps between validations; the run also ends with one.
      validation_rows: Number of held-out rows per validation, rounded up to whole batches, or down
        if there are no more.
      validation_depth: Depths to validate a draft at; null takes the trained ones. The last
        specialist serves the depths beyond its span.
      log_every: Steps between lines of metrics.
      num_samples: Number of held-out texts shown with the model's predictions at a validation.
      keep_checkpoints: Number of newest checkpoints to keep, besides the best one: the longest
        simulated acceptance length (stage target: the lowest validation loss).
      export: Checkpoint that `model` is made from.
      export_dtype: Dtype that `model` is stored in.
      explosion_factor: Stop the run if the loss is this many times its running mean, and 1 above
        it; null stops only at a loss that is not finite.
      loggers: Programs to send metrics to, besides the file metrics.jsonl.
      profile: Steps to record into the run's subfolder `profile`; null records none.
    """

    stage: Literal["target", "draft"]
    output: str
    model: LlamaConfig | None = None
    init_target: str | None = None
    target: str | None = None
    init_draft: str | None = None
    allow_target_mismatch: bool = False
    specialists: SpecialistsConfig = Field(default_factory=SpecialistsConfig)
    data: DataConfig = Field(default_factory=DataConfig)
    objective: ObjectiveConfig = Field(default_factory=ObjectiveConfig)
    step: StepConfig = Field(default_factory=StepConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    mesh: MeshConfig = Field(default_factory=MeshConfig)
    features: FeaturesConfig = Field(default_factory=FeaturesConfig)
    dtype: Literal["float32", "bfloat16"] | None = None
    num_tokens: NumTokens | None = None
    num_epochs: Positive | None = None
    batch_size: Count = 8
    seed: Seed = 0
    checkpoint_every: Count = 500
    validate_every: Count = 500
    validation_rows: Count = 32
    validation_depth: Depth | None = None
    log_every: Count = 10
    num_samples: CountOrZero = 4
    keep_checkpoints: Count = 2
    export: Literal["best", "last"] = "best"
    export_dtype: Literal["float32", "bfloat16"] = "float32"
    explosion_factor: Positive | None = Field(default=5.0, gt=1)
    loggers: tuple[Literal["tensorboard", "wandb"], ...] = ()
    profile: ProfileConfig | None = None

    def __post_init__(self) -> None:
        needed, *unused = {
            "target": ("model", "target", "init_draft"),
            "draft": ("target", "model", "init_target"),
        }[self.stage]
        if getattr(self, needed) is None:
            raise ValueError(f"stage {self.stage} needs the key {needed!r}")
        for key in unused:
            if getattr(self, key) is not None:
                raise ValueError(f"stage {self.stage} has no use for the key {key!r}; leave it out")
        if self.stage == "target" and self.features.cache is not None:
            raise ValueError("features.cache is for stage draft; a target makes its own")
        if self.batch_size % self.step.accumulation_steps:
            raise ValueError(
                f"batch_size {self.batch_size} does not divide into step.accumulation_steps "
                f"{self.step.accumulation_steps}"
            )
        if (self.num_tokens is None) == (self.num_epochs is None):
            raise ValueError("want either num_tokens or num_epochs; set the other to null")
        draft, weights = self.specialists, self.objective.depth_weights
        if draft.num_frozen and self.init_draft is None:
            raise ValueError("specialists.num_frozen wants init_draft: what stays must be trained")
        spans = list(draft.positions_per_specialist)
        if self.stage == "draft" and draft.depth <= sum(spans[:-1]):
            raise ValueError(
                f"specialists.depth {draft.depth} does not reach the last specialist of "
                f"positions_per_specialist {spans}; want {sum(spans[:-1]) + 1} or more"
            )
        if len(weights) not in (0, draft.depth):
            raise ValueError(
                f"objective.depth_weights wants specialists.depth = {draft.depth} numbers, got "
                f"{len(weights)}"
            )
        if weights and not any(weights[sum(spans[: draft.num_frozen]) :]):
            raise ValueError(
                "objective.depth_weights: want one above 0 at a depth that is trained, got "
                f"{shorten(list(weights))}"
            )

    def with_budget(self, num_rows: int) -> "TrainConfig":
        """Sets the run's length in tokens, given the number of training rows."""
        if self.num_epochs is None:
            return self
        num_tokens = math.ceil(self.num_epochs * num_rows * self.data.sequence_length)
        origin = f"num_epochs {self.num_epochs:g}"
        return change_config(self, origin=origin, num_tokens=num_tokens, num_epochs=None)

    @property
    def num_steps(self) -> int:
        """Number of optimizer steps for `num_tokens`."""
        assert self.num_tokens is not None, "see with_budget"
        return math.ceil(self.num_tokens / (self.batch_size * self.data.sequence_length))
