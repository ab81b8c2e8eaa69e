"""Every setting of the project as a frozen dataclass, and strict YAML loading with overrides.

The dataclasses are hashable, so that they can be static arguments of jitted functions (but for
`BenchConfig`, which names its drafts in a dict and meets no jitted function).
"""

import difflib
import json
import math
import reprlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import pydantic
import yaml
from pydantic import ConfigDict, Field, PositiveInt
from pydantic.dataclasses import dataclass

_STRICT = ConfigDict(extra="forbid")
_Spans = Annotated[tuple[PositiveInt, ...], Field(min_length=1)]


class UserError(Exception):
    """Bad input: programs print its one line (wanted, got, what to do) and exit with code 2."""


# --------------------------------------------------------------------------------------------------
# Models


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class RopeConfig:
    """Rotary position embedding; `type` is the name Hugging Face configs use.

    Attributes:
      type: default, linear (positions divided by `factor`), dynamic (base grows with the length of
        the sequence), or llama3 (low frequencies divided by `factor`, smoothly).
      theta: base of the geometric series of frequencies.
      factor: by how much the trained context is stretched.
      low_freq_factor: llama3 only.
      high_freq_factor: llama3 only.
      original_max_position_embeddings: trained context, in tokens (dynamic and llama3).
    """

    type: Literal["default", "linear", "dynamic", "llama3"] = "default"
    theta: float = 10000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class LlamaConfig:
    """Shape of a Llama-family transformer."""

    vocab_size: int = Field(gt=0)
    hidden_size: int = Field(gt=0)
    intermediate_size: int = Field(gt=0)
    num_layers: int = Field(gt=0)
    num_heads: int = Field(gt=0)
    num_kv_heads: int = Field(gt=0)
    head_dim: int = Field(gt=0, multiple_of=2)
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-5
    rope: RopeConfig = Field(default_factory=RopeConfig)
    tie_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}"
            )


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class DraftConfig:
    """A draft model: shared fc and one decoder layer per specialist.

    EAGLE-2 and HASS are `positions_per_specialist=(1,)`, PosS-n is `(n, n, ...)`.

    Attributes:
      layer: shape of one specialist (its `num_layers` is not looked at) and of the embedding.
      positions_per_specialist: how many draft positions each specialist serves; beyond the last
        span the last specialist continues.
      trained_depth: number of draft positions the rollout was trained on.
      fc_bias: whether the fusion layer has a bias.
    """

    layer: LlamaConfig
    positions_per_specialist: _Spans = (1,)
    trained_depth: int = Field(default=1, gt=0)
    fc_bias: bool = False

    @property
    def num_specialists(self) -> int:
        """E, the number of spans."""
        return len(self.positions_per_specialist)

    @property
    def method(self) -> str:
        """Name of the method these spans and this trained depth amount to."""
        spans = self.positions_per_specialist
        if len(spans) == 1:
            return "eagle2" if self.trained_depth == 1 else "hass"
        digits = {str(n) for n in spans}
        return "poss" + (digits.pop() if len(digits) == 1 else "".join(str(n) for n in spans))

    def specialist_at(self, depth: int) -> int:
        """Index of the specialist that drafts position `depth` (0-based)."""
        end = 0
        for index, span in enumerate(self.positions_per_specialist):
            end += span
            if depth < end:
                return index
        return self.num_specialists - 1


# --------------------------------------------------------------------------------------------------
# Decoding


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class TreeConfig:
    """Size of the draft tree; every count is plain (`total_tokens` includes the root).

    Attributes:
      depth: number of drafted positions.
      top_k: children per node, and nodes of a level that go on (the beam).
      total_tokens: nodes verified in one target pass, root included.
    """

    depth: int = Field(default=6, gt=0)
    top_k: int = Field(default=10, gt=0)
    total_tokens: int = Field(default=60, gt=1)

    @property
    def num_candidates(self) -> int:
        """How many nodes are drafted before selection."""
        return self.top_k + (self.depth - 1) * self.top_k**2

    @property
    def num_nodes(self) -> int:
        """Nodes really verified: `total_tokens`, or all that can be drafted where that is less."""
        return min(self.total_tokens, self.num_candidates + 1)

    @property
    def max_accepted(self) -> int:
        """Longest acceptance a round can have."""
        return min(self.depth, self.num_nodes - 1)


ACCELERATOR_TREE = TreeConfig()
CPU_TREE = TreeConfig(depth=4, top_k=4, total_tokens=16)


# --------------------------------------------------------------------------------------------------
# Training


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class DataConfig:
    """Where text comes from and how it is cut into rows.

    Attributes:
      source: `stdlib` (the Python standard library's own sources), a .txt file or glob, a .jsonl
        file with a `text` field, or a Hub data set id with a `text` column.
      sequence_length: tokens per training row.
      validation_fraction: share of documents held out.
      max_documents: read at most so many documents (None: all).
    """

    source: str = "stdlib"
    sequence_length: int = Field(default=256, gt=1)
    validation_fraction: float = Field(default=0.05, gt=0, lt=1)
    max_documents: int | None = None


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class ObjectiveConfig:
    """Weights of the draft loss, and what perturbs its input (the reference's defaults).

    Attributes:
      feature_weight: of SmoothL1 between predicted and true feature.
      probability_weight: of the soft cross-entropy against the target's distribution.
      top_k_weight: of the soft cross-entropy over the `top_k` most likely tokens.
      feature_noise: half-width of the uniform noise on input features, for a row of 512 tokens
        (divided by length / 512).
      rows_per_chunk: rows whose logits are held at a time.
    """

    feature_weight: float = 1.0
    probability_weight: float = 0.1
    top_k_weight: float = 1.0
    top_k: int = Field(default=10, gt=0)
    feature_noise: float = Field(default=0.1, ge=0)
    rows_per_chunk: int = Field(default=1024, gt=0)


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class OptimizerConfig:
    """AdamW with linear warm-up and linear decay to zero (the reference's defaults).

    Attributes:
      clip_value: gradients are clipped element by element to +- this (None: not clipped).
    """

    learning_rate: float = Field(default=3e-5, gt=0)
    warmup_fraction: float = Field(default=0.01, ge=0, lt=1)
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.01
    clip_value: float | None = 0.5


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class SpecialistsConfig:
    """The draft to train: a method is these two numbers (see `DraftConfig`)."""

    positions_per_specialist: _Spans = (1,)
    depth: int = Field(default=1, gt=0)
    fc_bias: bool = False


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class TrainConfig:
    """One training run.

    Attributes:
      stage: `target` pre-trains a language model; `draft` trains specialists for a frozen target.
      output: folder of the run; the trained model is its subfolder `model`.
      model: shape of the language model (stage target).
      target: model folder of the frozen target (stage draft).
      init_draft: model folder of a draft to start from (stage draft; None: from scratch).
      num_tokens: budget in tokens.
      checkpoint_every: steps between saves of the training state.
      validate_every: steps between validations; both also happen at the end.
      validation_batches: batches of held-out text per validation.
    """

    stage: Literal["target", "draft"]
    output: str
    model: LlamaConfig | None = None
    target: str | None = None
    init_draft: str | None = None
    specialists: SpecialistsConfig = Field(default_factory=SpecialistsConfig)
    data: DataConfig = Field(default_factory=DataConfig)
    objective: ObjectiveConfig = Field(default_factory=ObjectiveConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    num_tokens: int = Field(default=1_000_000, gt=0)
    batch_size: int = Field(default=8, gt=0)
    seed: int = 0
    checkpoint_every: int = Field(default=500, gt=0)
    validate_every: int = Field(default=500, gt=0)
    validation_batches: int = Field(default=4, gt=0)
    log_every: int = Field(default=10, gt=0)

    def __post_init__(self) -> None:
        needed = {"target": "model", "draft": "target"}[self.stage]
        if getattr(self, needed) is None:
            raise ValueError(f"stage {self.stage} needs the key {needed!r}")

    @property
    def num_steps(self) -> int:
        """Optimizer steps that spend `num_tokens`."""
        return math.ceil(self.num_tokens / (self.batch_size * self.data.sequence_length))


# --------------------------------------------------------------------------------------------------
# Benchmark


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class BenchConfig:
    """One benchmark: every draft against autoregressive decoding over the same prompts.

    Attributes:
      drafts: name in the table -> model folder.
      prompts: a .jsonl file of prompts, or `stdlib` (held-out modules of the standard library).
      num_prompts: how many prompts are used.
      prompt_tokens: length of a `stdlib` prompt, in tokens.
      tree: None takes the default of the device.
      repeats: interleaved timed passes.
    """

    target: str
    drafts: dict[str, str] = Field(default_factory=dict)
    prompts: str = "stdlib"
    num_prompts: int = Field(default=16, gt=0)
    prompt_tokens: int = Field(default=64, gt=0)
    max_new_tokens: int = Field(default=128, gt=0)
    tree: TreeConfig | None = None
    repeats: int = Field(default=3, gt=0)
    output: str | None = None


# --------------------------------------------------------------------------------------------------
# Reading

ConfigT = TypeVar("ConfigT")


def build_config(kind: type[ConfigT], values: Mapping[str, Any], *, origin: str) -> ConfigT:
    """Builds a config dataclass from plain values, refusing anything it does not know.

    Args:
      kind: the dataclass.
      values: nested mapping, as YAML gives it.
      origin: what the values came from, for messages.

    Raises:
      UserError: unknown key (with the nearest known name), missing key, or wrong value.
    """
    try:
        return pydantic.TypeAdapter(kind).validate_python(dict(values))
    except pydantic.ValidationError as error:
        raise UserError(f"{origin}: {_explain(kind, error.errors())}") from error


def load_config(kind: type[ConfigT], path: str | Path, overrides: Sequence[str] = ()) -> ConfigT:
    """Reads one YAML file into a config dataclass.

    A file may name another as `base:` (relative to itself); its own keys win. Overrides such as
    `optimizer.learning_rate=1e-3` win over both.

    Raises:
      UserError: missing or malformed file, malformed override, or what `build_config` refuses.
    """
    values = _read_yaml(Path(path))
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key:
            raise UserError(f"override {override!r}: want section.key=value")
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise UserError(f"override {override!r}: want a YAML value after the =") from error
        _merge(values, _nest(key.split("."), value))
    return build_config(kind, values, origin=str(path))


def config_to_dict(config: Any) -> dict[str, Any]:
    """Turns a config dataclass into JSON-compatible nested dicts and lists."""
    return json.loads(pydantic.TypeAdapter(type(config)).dump_json(config))


def _read_yaml(path: Path, derived: tuple[Path, ...] = ()) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"config {path}: {error.strerror}; give the path of a YAML file") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        line = " ".join(str(error).split())
        raise UserError(f"config {path}: not valid YAML: {line}") from error
    if not isinstance(values, dict):
        raise UserError(f"config {path}: want a mapping of keys, got {type(values).__name__}")
    if "base" not in values:
        return values
    base = values.pop("base")
    derived = (*derived, path.resolve())
    if not isinstance(base, str) or (path.parent / base).resolve() in derived:
        raise UserError(f"config {path}: base: want the path of another YAML file, got {base!r}")
    return _merge(_read_yaml(path.parent / base, derived), values)


def _merge(into: dict[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    for key, value in other.items():
        if isinstance(value, Mapping) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value
    return into


def _nest(keys: Sequence[str], value: Any) -> dict[str, Any]:
    return {keys[0]: _nest(keys[1:], value) if len(keys) > 1 else value}


def _explain(kind: Any, errors: Sequence[Any]) -> str:
    # A misspelt key is often a missing key as well; the misspelt one says more.
    error = min(errors, key=lambda error: error["type"] != "unexpected_keyword_argument")
    where = ".".join(str(part) for part in error["loc"])
    match error["type"]:
        case "unexpected_keyword_argument":
            near = difflib.get_close_matches(where, _known_keys(kind), n=1, cutoff=0.0)
            return f"unknown key {where!r}; did you mean {near[0]!r}?"
        case "missing":
            return f"missing key {where!r}"
        case "value_error":
            message = str(error["ctx"]["error"])
            return f"{where}: {message}" if where else message
        case "dataclass_type":
            return f"{where}: want a mapping of keys, got {reprlib.repr(error['input'])}"
    return f"{where}: {error['msg']}, got {reprlib.repr(error['input'])}"


def _known_keys(kind: Any, prefix: str = "") -> list[str]:
    keys = []
    for name, field in kind.__pydantic_fields__.items():
        keys.append(prefix + name)
        for part in getattr(field.annotation, "__args__", (field.annotation,)):
            if hasattr(part, "__pydantic_fields__"):
                keys += _known_keys(part, f"{prefix}{name}.")
    return keys
