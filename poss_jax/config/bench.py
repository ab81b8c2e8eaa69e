"""Settings of the programs that compare drafts, and of `benchmarks.aot`."""

from typing import Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from poss_jax.config.decoding import SMOLLM2, DecodingConfig, SamplingConfig
from poss_jax.config.models import (
    NO_SAMPLED_COPIES,
    STRICT,
    Drafting,
    LlamaConfig,
    MeshConfig,
    Quantisation,
    TreeConfig,
)
from poss_jax.config.numbers import AtLeastTwo, Count, Lookup, Seed, Temperature
from poss_jax.config.reading import refuse_given
from poss_jax.config.training import SpecialistsConfig

ProgramName = Literal["prefill", "step", "round", "rounds"]

DRIFT_DEPTH = 8
"""Drafted positions of the analysis by depth."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class MethodConfig:
    """One method of decoding in a benchmark; what is null is the benchmark's own.

    Attributes:
      draft: Model folder of a draft; null decodes autoregressively.
      tree: Size of the draft tree.
      drafting: How the draft proposes tokens to sampled texts.
      lookup: Most tokens that a round copies from prompt and answer, with or without a draft.
      draft_vocabulary: JSON file of the tokens that the draft may propose.
      draft_window: How many of the newest tokens the draft attends.
      quantise: Type that the target's matrices are rounded to.
    """

    draft: str | None = None
    tree: TreeConfig | None = None
    drafting: Drafting | None = None
    lookup: Lookup | None = None
    draft_vocabulary: str | None = None
    draft_window: Count | None = None
    quantise: Quantisation | None = None

    def __post_init__(self) -> None:
        if self.draft is None:
            names = "drafting draft_vocabulary draft_window" + " tree" * (not self.lookup)
            refuse_given(self, names, "is a draft's; give draft, too")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class BenchConfig(DecodingConfig):
    """One benchmark: every method against autoregressive decoding over the same prompts.

    Attributes:
      target: Model folder of the target; smollm2 is the one `make chat` fetches.
      drafts: Model folder of a draft, and its name in tables; EAGLE-2, HASS and PosS-1 name the
        default target's.
      prompts: JSONL file of prompts or questions; or `stdlib`, the modules of Python's standard
        library that training on `stdlib` holds out; or `packages:NAME,NAME`, all modules of these
        installed packages. null takes stdlib if no datasets are given.
      datasets: More sets of questions: folders of data_dir that hold a question.jsonl, any value
        of `prompts`, mt_bench, gsm8k, humaneval, alpaca or another id on the Hub.
      data_dir: Folder of sets of questions.
      num_prompts: Number of prompts to use per set; at most, for a file.
      prompt_tokens: Length of a prompt cut from modules, in tokens.
      methods: Further methods by name, such as a draft with another tree, or the target
        quantised. Every draft of `drafts` is a method, too.
      temperatures: Temperatures to compare at; empty takes sampling.temperature alone.
      seeds: Seeds to sample with; empty takes sampling.seed alone. At temperature 0 only the first
        is used.
      batch_size: Number of questions answered together. A batch's seconds are shared equally
        among its answers; phases are timed with one prompt.
      repeats: Number of timed passes over all prompts; drafts take turns.
      phases: Also time the phases of a round and compare each with its floor; each is compiled
        by itself, which takes minutes with a large target (docs/bench.md).
      drift: Also measure the drafts by depth, with chains on the first set, greedily
        (docs/experiments.md).
      output: Folder to write the report to. It must be new or empty; an interrupted run with
        the same settings is resumed.
    """

    target: str = SMOLLM2
    max_new_tokens: Count = 128
    drafts: dict[str, str] = Field(default_factory=dict)
    prompts: str | None = None
    datasets: tuple[str, ...] = ()
    data_dir: str | None = None
    num_prompts: Count = 16
    prompt_tokens: Count = 64
    output: str | None = None
    methods: dict[str, MethodConfig] = Field(default_factory=dict)
    temperatures: tuple[Temperature, ...] = ()
    seeds: tuple[Seed, ...] = ()
    batch_size: Count = 1
    repeats: Count = 3
    phases: bool = False
    drift: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, method in self.all_methods.items():
            lookup = self.lookup if method.lookup is None else method.lookup
            if lookup and (method.drafting or self.drafting) == "sampled":
                raise ValueError(f"methods.{name}: {NO_SAMPLED_COPIES}")
        if twice := self.drafts.keys() & self.methods.keys():
            raise ValueError(f"methods: {min(twice)} is a draft's name, too; choose another")
        for name in ("datasets", "temperatures", "seeds"):
            if len(set(values := getattr(self, name))) < len(values):
                raise ValueError(f"{name}: want each once, got {list(values)}")
        if not self.all_methods and self.target != SMOLLM2:
            names = "draft_vocabulary draft_window lookup"
            refuse_given(self, names, "changes drafts alone; give drafts or methods, too")
        if not self.drift:
            return
        for name in ("quantise", "draft_vocabulary", "draft_window", "mesh", "methods"):
            if getattr(self, name):
                raise ValueError(f"drift: is measured on models as they are; leave out {name}")
        if not self.drafts:
            raise ValueError("drift: want at least one draft; give --draft NAME=DIR")
        if self.max_new_tokens <= DRIFT_DEPTH:
            got = self.max_new_tokens
            raise ValueError(f"drift: want max_new_tokens of more than {DRIFT_DEPTH}, got {got}")

    @property
    def sets(self) -> tuple[str, ...]:
        """Sources of questions: prompts first, then the data sets."""
        prompts = self.prompts or ("" if self.datasets else "stdlib")
        return (*([prompts] if prompts else []), *self.datasets)

    @property
    def all_methods(self) -> dict[str, MethodConfig]:
        """All methods by name, drafts first."""
        plain = {name: MethodConfig(draft=folder) for name, folder in self.drafts.items()}
        return plain | self.methods


@dataclass(frozen=True, kw_only=True, config=STRICT)
class LosslessConfig(BenchConfig):
    """One check by `poss lossless`, short unless more is asked for."""

    max_new_tokens: Count = 64
    num_prompts: Count = 2


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TuneConfig(BenchConfig):
    """One search by `poss tune`, short unless more is asked for."""

    max_new_tokens: Count = 64
    num_prompts: Count = 4
    repeats: Count = 2


@dataclass(frozen=True, kw_only=True, config=STRICT)
class AheadConfig:
    """The models, the request and the devices that `benchmarks.aot` compiles for.

    Attributes:
      target: Model folder of the target; only its record is read.
      model: Shape of the target, instead of its folder.
      draft: Model folder of a draft; only its record is read.
      specialists: Draft to describe as `train.main` would make it, instead of its folder; without
        either, only autoregressive programs are compiled.
      draft_tokens: Number of tokens that the draft can propose; null takes the folder's, usually
        all.
      tree: Size of the draft tree.
      lookup: Most tokens that a round copies from prompt and answer.
      sampling: How tokens are chosen.
      batch_size: Number of prompts decoded together.
      context: Tokens in the cache, used for prefill and for the bytes that a round reads.
      max_new_tokens: Most new tokens, for which the caches have room.
      dtype: Dtype of weights and caches.
      quantise: Type that the target's matrices are rounded to; null keeps their dtype.
      mesh: Grid of devices; by default all of them split the width of every layer.
      programs: Programs to compile: prefill, step (one token, autoregressively), round (one, called
        from the host), rounds (all of them, in a loop on the device); null takes all, or without a
        draft the first two.
    """

    target: str | None = None
    model: LlamaConfig | None = None
    draft: str | None = None
    specialists: SpecialistsConfig | None = None
    draft_tokens: AtLeastTwo | None = None
    tree: TreeConfig = TreeConfig()
    lookup: Lookup = 0
    sampling: SamplingConfig = Field(default_factory=SamplingConfig)
    batch_size: Count = 1
    context: Count = 512
    max_new_tokens: Count = 512
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    quantise: Quantisation | None = None
    mesh: MeshConfig = Field(default_factory=lambda: MeshConfig(data=1, tensor=-1))
    programs: tuple[ProgramName, ...] | None = None

    def __post_init__(self) -> None:
        if (self.target is None) == (self.model is None):
            raise ValueError("want either a model folder (target) or a shape (model)")
        if self.draft is not None and self.specialists is not None:
            raise ValueError("want either a model folder (draft) or a description (specialists)")
        if self.draft is None and self.specialists is None:
            if {"round", "rounds"} & {*(self.programs or ())}:
                raise ValueError("programs: round and rounds want draft, or specialists")
            if self.draft_tokens is not None:
                raise ValueError("draft_tokens: wants draft, or specialists")
