"""Settings of training runs and benchmarks: what a YAML file holds."""

import math
from typing import Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from poss_jax.config.models import STRICT, LlamaConfig, Spans, TreeConfig
from poss_jax.config.numbers import (
    Bias,
    Count,
    CountOrZero,
    Decay,
    Depth,
    Devices,
    Fraction,
    NumEpochs,
    NumTokens,
    Penalty,
    Positive,
    PositiveOrZero,
    Probability,
    Seed,
    Temperature,
    TokenId,
    Weight,
)
from poss_jax.config.reading import UserError, change_config


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DataConfig:
    """Where text or chats come from, what is learnt of them, and how they are laid into rows.

    Attributes:
      source: `stdlib` (the Python standard library's own sources), a .txt, .json or .jsonl file or
        glob, .ckpt files of tokens and features (stage draft), or a Hub data set id.
      subset: configuration of the Hub data set.
      split: split of the Hub data set.
      format: of its records; auto looks at the first one. `chat` (messages, conversations), `pairs`
        (question and answer, instruction and output), `text`, `rendered` (chats that a template has
        written into `text`) or `tokens` (input_ids, loss_mask).
      template: how chats are written: null is the tokenizer's own; or llama2, llama3, or the path
        of a .jinja file.
      system_prompt: for chats that have none.
      train_on: what is learnt of a chat: the assistant's turns, or everything.
      packing: `stream` (text, one after the other, chopped into rows), `documents` (several whole
        chats per row, none sees another) or `none` (one per row); null is stream for texts,
        documents for all else.
      sequence_length: tokens per row; a document that is longer is cut, but for packing stream.
      validation_fraction: share of documents held out.
      max_documents: use at most so many documents (None: all).
      max_dropped: share of records that may be unusable; above it the run is refused.
    """

    source: str = "stdlib"
    subset: str | None = None
    split: str = "train"
    format: Literal["auto", "chat", "pairs", "text", "rendered", "tokens"] = "auto"
    template: str | None = None
    system_prompt: str | None = None
    train_on: Literal["assistant", "all"] = "assistant"
    packing: Literal["stream", "documents", "none"] | None = None
    sequence_length: Count = Field(default=256, gt=1)
    validation_fraction: Fraction = Field(default=0.05, gt=0)
    max_documents: Count | None = None
    max_dropped: Fraction = 0.5


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ObjectiveConfig:
    """Weights of the draft loss, and what perturbs its input (the reference's defaults).

    Attributes:
      feature_weight: of SmoothL1 between predicted and true feature.
      probability_weight: of the soft cross-entropy against the target's distribution.
      top_k_weight: of the soft cross-entropy over the `top_k` most likely tokens; 0: not computed.
      depth_weights: weight of each depth's loss, as many as depths; empty: all 1.
      feature_noise: half-width of the uniform noise on input features, for a document of 512
        tokens (divided by length / 512).
    """

    feature_weight: Weight = 1.0
    probability_weight: Weight = 0.1
    top_k_weight: Weight = 1.0
    top_k: Count = 10
    depth_weights: tuple[Weight, ...] = ()
    feature_noise: PositiveOrZero = 0.1


@dataclass(frozen=True, kw_only=True, config=STRICT)
class StepConfig:
    """How a step is cut to fit the memory; the numbers it yields are the same up to rounding.

    Attributes:
      vocabulary_chunk: positions of every sequence whose logits are held at a time.
      attention_block: positions whose attention scores are held at a time (its square).
      accumulation_steps: parts a batch is cut into, one after the other.
    """

    vocabulary_chunk: Count = 128
    attention_block: Count = 256
    accumulation_steps: Count = 1


@dataclass(frozen=True, kw_only=True, config=STRICT)
class OptimizerConfig:
    """AdamW with linear warm-up and linear decay to zero (the reference's defaults).

    Attributes:
      clip_value: gradients are clipped element by element to +- this (None: not clipped).
    """

    learning_rate: Positive = 3e-5
    warmup_fraction: Fraction = 0.01
    b1: Decay = 0.9
    b2: Decay = 0.95
    eps: Positive = 1e-8
    weight_decay: PositiveOrZero = 0.01
    clip_value: Positive | None = 0.5


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SpecialistsConfig:
    """The draft to train: a method is its spans and its depth (see `DraftConfig`).

    Attributes:
      kv: `shared`: one key and one value projection for all specialists.
      num_frozen: specialists, from the first, that stay as they are, and fc with them.
    """

    positions_per_specialist: Spans = (1,)
    depth: Depth = 1
    fc_bias: bool = False
    kv: Literal["per_specialist", "shared"] = "per_specialist"
    num_frozen: CountOrZero = 0

    def __post_init__(self) -> None:
        num_specialists = len(self.positions_per_specialist)
        if self.num_frozen >= num_specialists:
            raise ValueError(
                f"num_frozen {self.num_frozen} leaves none of {num_specialists} to be trained"
            )
        if self.num_frozen and self.kv == "shared":
            raise ValueError("num_frozen wants kv per_specialist: shared ones cannot stay and move")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class MeshConfig:
    """Devices as a grid; at most one axis is -1 and takes the devices that are left.

    Attributes:
      data: groups of devices that split the batch; each group holds a whole copy of the models.
      fsdp: devices of a group that split the batch, and weights and optimizer state as well.
      tensor: devices that split the width of every layer.
    """

    data: Devices = -1
    fsdp: Devices = 1
    tensor: Devices = 1

    def __post_init__(self) -> None:
        sizes = (self.data, self.fsdp, self.tensor)
        if any(size < 1 and size != -1 for size in sizes) or sizes.count(-1) > 1:
            raise ValueError(f"want counts of devices, one of them perhaps -1, got {self.name}")

    @property
    def name(self) -> str:
        """The axes in words."""
        return f"data={self.data} fsdp={self.fsdp} tensor={self.tensor}"

    def sizes(self, num_devices: int) -> tuple[int, int, int]:
        """Sizes of data, fsdp and tensor for so many devices; 1, 1, 1 is always one device.

        Raises:
          UserError: they do not multiply to the number of devices.
        """
        sizes = (self.data, self.fsdp, self.tensor)
        given = math.prod(size for size in sizes if size != -1)
        data, fsdp, tensor = (num_devices // given if size == -1 else size for size in sizes)
        if data * fsdp * tensor not in (num_devices, 1):
            raise UserError(
                f"mesh {self.name} does not fit {num_devices} devices; want sizes whose product "
                f"is {num_devices}, or one of them -1 to take what the others leave"
            )
        return data, fsdp, tensor


@dataclass(frozen=True, kw_only=True, config=STRICT)
class FeaturesConfig:
    """Where the target's features come from; null: the target runs in every step.

    Attributes:
      cache: a folder; features of all rows are written there before the first step, or found there.
      shard_gib: size of a new cache's files.
    """

    cache: str | None = None
    shard_gib: Positive = Field(default=1.0, ge=2**-20, le=2**20)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ProfileConfig:
    """Steps that JAX's profiler records.

    Attributes:
      start: the first of them; a run's first step is 1.
      steps: how many.
    """

    start: Count = 10
    steps: Count = 3


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TrainConfig:
    """One training run.

    Attributes:
      stage: `target` pre-trains a language model; `draft` trains specialists for a frozen target.
      output: folder of the run; the trained model is its subfolder `model`.
      model: shape of the language model (stage target).
      target: model folder of the frozen target (stage draft).
      init_draft: model folder of a draft to start from (stage draft; None: from scratch).
      allow_target_mismatch: start from a draft made for other weights of the same shape.
      features: where those of the target come from (stage draft).
      dtype: of everything computed; parameters and optimizer are kept in float32 (None: float32
        on CPU, bfloat16 elsewhere).
      num_tokens: budget in tokens; either this or `num_epochs`.
      num_epochs: budget in passes over the training rows.
      checkpoint_every: steps between saves of the training state, which every validation saves too.
      validate_every: steps between validations; both also happen at the end.
      validation_batches: batches of held-out text per validation.
      validation_depth: depths a draft is validated at (None: those that are trained); drafts are
        compared at the same depths, and those beyond are served by the last specialist.
      num_samples: held-out texts shown with what the model predicts there, at every validation.
      keep_checkpoints: so many of the newest are kept; beside them the best, which is the one with
        the longest simulated acceptance length (stage target: the lowest validation loss).
      export: which checkpoint `model` is made of.
      explosion_factor: a loss above so many times its running mean, and above it by 1, stops the
        run; None: only one that is not finite does.
      loggers: where metrics go beside metrics.jsonl.
      profile: record these steps into the run's subfolder `profile` (None: none).
    """

    stage: Literal["target", "draft"]
    output: str
    model: LlamaConfig | None = None
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
    num_epochs: NumEpochs | None = None
    batch_size: Count = 8
    seed: Seed = 0
    checkpoint_every: Count = 500
    validate_every: Count = 500
    validation_batches: Count = 4
    validation_depth: Depth | None = None
    log_every: Count = 10
    num_samples: CountOrZero = 4
    keep_checkpoints: Count = 2
    export: Literal["best", "last"] = "best"
    explosion_factor: Positive | None = Field(default=5.0, gt=1)
    loggers: tuple[Literal["tensorboard", "wandb"], ...] = ()
    profile: ProfileConfig | None = None

    def __post_init__(self) -> None:
        needed = {"target": "model", "draft": "target"}[self.stage]
        if getattr(self, needed) is None:
            raise ValueError(f"stage {self.stage} needs the key {needed!r}")
        if self.stage == "target" and self.features.cache is not None:
            raise ValueError("features.cache is for stage draft; a target makes its own")
        if self.batch_size % self.step.accumulation_steps:
            raise ValueError(
                f"batch_size {self.batch_size} does not divide into step.accumulation_steps "
                f"{self.step.accumulation_steps}"
            )
        if self.specialists.num_frozen and self.init_draft is None:
            raise ValueError("specialists.num_frozen wants init_draft: what stays must be trained")
        if len(self.objective.depth_weights) not in (0, self.specialists.depth):
            raise ValueError(
                f"objective.depth_weights wants specialists.depth = {self.specialists.depth} "
                f"numbers, got {len(self.objective.depth_weights)}"
            )
        if (self.num_tokens is None) == (self.num_epochs is None):
            raise ValueError("want either num_tokens or num_epochs; set the other to null")
        if self.num_tokens is not None and self.num_steps >= 2**31:
            raise ValueError(f"num_tokens {self.num_tokens} are {self.num_steps} steps; lower it")

    def with_budget(self, num_rows: int) -> "TrainConfig":
        """The same run with its budget in tokens, for so many training rows."""
        if self.num_epochs is None:
            return self
        num_tokens = math.ceil(self.num_epochs * num_rows * self.data.sequence_length)
        origin = f"num_epochs {self.num_epochs:g}"
        return change_config(self, origin=origin, num_tokens=num_tokens, num_epochs=None)

    @property
    def num_steps(self) -> int:
        """Optimizer steps that spend `num_tokens`."""
        assert self.num_tokens is not None, "see with_budget"
        return math.ceil(self.num_tokens / (self.batch_size * self.data.sequence_length))


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SamplingConfig:
    """How the target chooses tokens; names, meaning and order of application as in `transformers`.

    Attributes:
      temperature: divides the scores; 0 is greedy, and then top_k, top_p and min_p change nothing.
      top_k: only so many of the likeliest tokens may be chosen; 0 is all.
      top_p: only the likeliest tokens that together have this probability; 1 is all.
      min_p: only tokens at least this likely, relative to the likeliest; 0 is all.
      repetition_penalty: divides positive and multiplies negative scores of tokens in the text; 1
        is none.
      logit_bias: token id -> what is added to its logit.
      seed: with the position in the text it decides every draw. Of prompts without a seed of
        their own the first gets the run's, the others ones derived from it and their index.
    """

    temperature: Temperature = 0.0
    top_k: CountOrZero = 0
    top_p: Probability = Field(default=1.0, gt=0)
    min_p: Probability = 0.0
    repetition_penalty: Penalty = 1.0
    logit_bias: dict[TokenId, Bias] = Field(default_factory=dict)
    seed: Seed = 0

    @property
    def is_plain(self) -> bool:
        """Whether tokens are the argmax of the logits as they are."""
        return self.temperature == 0 and self.repetition_penalty == 1 and not self.logit_bias


@dataclass(frozen=True, kw_only=True, config=STRICT)
class BenchConfig:
    """One benchmark: every draft against autoregressive decoding over the same prompts.

    Attributes:
      drafts: name in the table -> model folder.
      prompts: a .jsonl file of prompts, or `stdlib` (held-out modules of the standard library).
      num_prompts: how many prompts are used (of a file: at most).
      prompt_tokens: length of a `stdlib` prompt, in tokens.
      tree: None takes the default of the device.
      sampling: how tokens are chosen; prompts get different seeds.
      is_coupled: whether drafts look at the noise that the target samples with.
      allow_target_mismatch: measure drafts made for other weights of the same shape.
      repeats: interleaved timed passes.
    """

    target: str
    drafts: dict[str, str] = Field(default_factory=dict)
    prompts: str = "stdlib"
    num_prompts: Count = 16
    prompt_tokens: Count = 64
    max_new_tokens: Count = 128
    tree: TreeConfig | None = None
    sampling: SamplingConfig = Field(default_factory=SamplingConfig)
    is_coupled: bool = True
    allow_target_mismatch: bool = False
    repeats: Count = 3
    output: str | None = None
