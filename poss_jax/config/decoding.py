"""Settings of the programs that decode."""

from dataclasses import fields
from typing import Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from poss_jax.config.models import (
    STRICT,
    Drafting,
    MeshConfig,
    Quantisation,
    ToolFormat,
    TreeConfig,
)
from poss_jax.config.numbers import (
    Bias,
    Count,
    CountOrZero,
    Depth,
    Fraction,
    OutputPenalty,
    Penalty,
    Port,
    Positive,
    PositiveOrZero,
    Probability,
    Seed,
    Temperature,
    TokenId,
    TopP,
)

SMOLLM2 = "smollm2"
"""The target if none is given: SmolLM2-135M-Instruct, see `poss_jax/bundled/default.py`."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SamplingConfig:
    """Sampling settings, with the names, meaning and order of `transformers`.

    Frequency and presence penalties work as in the OpenAI API.

    Attributes:
      temperature: Divide scores by this, 0 is greedy; then top_k, top_p and min_p change nothing.
      top_k: Sample from the top_k most likely tokens; 0 allows all.
      top_p: Sample from the most likely tokens that together have this probability; 1 allows all.
      min_p: Sample from tokens at least this likely, relative to the most likely one; 0 allows all.
      repetition_penalty: Divide positive and multiply negative scores of tokens already in the
        text, including the prompt; 1 changes nothing.
      frequency_penalty: Subtract this from a token's logit once per occurrence in the output (not
        the prompt); 0 changes nothing.
      presence_penalty: Subtract this from the logits of tokens that occur in the output; 0 changes
        nothing.
      min_tokens: Choose no stop token before this many tokens of output, unless nothing else is
        possible; stop strings count from then on.
      logit_bias: Add a value to the logit of a token, such as 42=-1.5.
      seed: Seed of all draws; the first prompt uses it, the others seeds derived from it and
        their index.
    """

    temperature: Temperature = 0.0
    top_k: CountOrZero = 0
    top_p: TopP = 1.0
    min_p: Probability = 0.0
    repetition_penalty: Penalty = 1.0
    frequency_penalty: OutputPenalty = 0.0
    presence_penalty: OutputPenalty = 0.0
    min_tokens: CountOrZero = 0
    logit_bias: dict[TokenId, Bias] = Field(default_factory=dict)
    seed: Seed = 0

    @property
    def is_plain(self) -> bool:
        """True if tokens are the argmax of the unchanged logits."""
        is_changed = self.repetition_penalty != 1 or self.reads_output or self.logit_bias
        return self.temperature == 0 and not is_changed

    @property
    def reads_output(self) -> bool:
        """True if scores depend on the output so far: its tokens or their number."""
        return bool(self.frequency_penalty or self.presence_penalty or self.min_tokens)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ServedSampling(SamplingConfig):
    """Sampling settings of a server's requests, if a request does not set them.

    Attributes:
      temperature: Divide scores by this, 0 is greedy; then top_k, top_p and min_p change nothing.
        The default is the OpenAI API's.
      seed: Every request has its own; only 0 is allowed.
    """

    temperature: Temperature = 1.0

    def __post_init__(self) -> None:
        if self.seed:
            raise ValueError(f"seed: want none, got {self.seed}; every request has its own")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DecodingConfig:
    """Settings shared by all decoding programs.

    Attributes:
      target: Model folder of the target.
      max_new_tokens: Most new tokens of an answer.
      sampling: How tokens are chosen.
      tree: Size of the draft tree; null takes the one tuned for the draft on this kind of device
        (`infer.tune`), else the device's default (depth 6, top_k 10 and total_tokens 60 on
        accelerators, 4, 4 and 16 on CPU).
      drafting: How drafts propose tokens in sampled texts (docs/generate.md, "Ways to draft"):
        coupled uses the noise that the target samples with, argmax takes the most likely tokens;
        both leave every text unchanged. sampled draws tokens and keeps them by a ratio test: texts
        have the same distribution, but not the same tokens as without a draft.
      allow_target_mismatch: Use a draft made for other weights of the same shape.
      draft_vocabulary: JSON file of the tokens that drafts may propose (docs/generate.md, "Draft
        vocabularies"); for drafts that share the target's head.
      draft_window: How many of the newest tokens drafts attend, besides the first four
        (docs/generate.md, "Long contexts"); null takes the draft's own, usually all tokens.
      quantise: Round the target's matrices to 8 bits on loading (docs/generate.md, "Quantised
        targets"); null keeps the stored type.
      mesh: Grid of devices (docs/generate.md, "Several devices"); null takes one.
    """

    target: str
    max_new_tokens: Count = 256
    sampling: SamplingConfig = Field(default_factory=SamplingConfig)
    tree: TreeConfig | None = None
    drafting: Drafting = "coupled"
    allow_target_mismatch: bool = False
    draft_vocabulary: str | None = None
    draft_window: Count | None = None
    quantise: Quantisation | None = None
    mesh: MeshConfig | None = None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class AnswerConfig(DecodingConfig):
    """Settings of programs that answer prompts with one engine.

    Attributes:
      draft: Model folder of a draft made for the target; without one, decoding is autoregressive.
      max_length: Most tokens of prompt and answer together; null takes the target's own limit.
      trees: YAML file of draft trees by batch size (docs/generate.md, "Trees by batch size"), or
        none: decode without the draft.
      stop: Text that ends an answer and is left out of it.
    """

    draft: str | None = None
    max_length: Count | None = None
    trees: str | None = None
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.trees is not None and self.tree is not None:
            raise ValueError("trees: want it alone, got a tree, too; leave out one of them")
        has_draft = self.draft is not None or self.target == SMOLLM2
        for name in ("draft_vocabulary", "draft_window"):
            if getattr(self, name) is not None and not has_draft:
                raise ValueError(f"{name} limits a draft; give draft, too")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class GenerateConfig(AnswerConfig):
    """One run of `infer.generate`.

    Attributes:
      target: Model folder of the target; smollm2 is the one `make chat` fetches.
      question: Question to a chat model, asked with its chat template.
      prompt: Text to continue as it is.
      prompts: JSONL file of prompts; each line has one of prompt, prompt_ids, messages or turns.
      batch_size: Number of prompts decoded together.
      stream: Print text as it is decoded, one answer at a time.
      show_drafts: With stream: mark the text that the draft proposed; in green, or in brackets
        without colours.
      output: JSONL file to write the answers to; it must not exist yet.
      precompile: Lengths (most tokens of prompt and answer together) to compile for in advance;
        later runs find the programs compiled. A prompt is then optional.
    """

    target: str = SMOLLM2
    question: str | None = None
    prompt: str | None = None
    prompts: str | None = None
    batch_size: Count = 1
    stream: bool = False
    show_drafts: bool = False
    output: str | None = None
    precompile: tuple[Count, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        num_given = sum(one is not None for one in (self.question, self.prompt, self.prompts))
        if num_given != 1 and not (num_given == 0 and self.precompile):
            raise ValueError("want a question, a text (prompt) or a file of prompts (prompts)")
        if self.show_drafts and not self.stream:
            raise ValueError("show_drafts marks text as it is streamed; set stream, too")
        if self.stream and self.batch_size > 1:
            raise ValueError("stream shows one answer after the other; leave out batch_size")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ChatConfig(AnswerConfig):
    """One conversation of `infer.chat`.

    Attributes:
      target: Model folder of the target; smollm2 is the one `make chat` fetches.
      system: Message that tells the model how to answer; null leaves it to the chat template.
      plain: Do not mark the text that the draft proposed.
    """

    target: str = SMOLLM2
    system: str | None = None
    plain: bool = False


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ServeConfig(AnswerConfig):
    """One server. Its sampling settings are the defaults of requests.

    Attributes:
      target: Model folder of the target; smollm2 is the one `make chat` fetches.
      host: Address to listen at; 0.0.0.0 listens on all.
      port: Port to listen at; 0 takes a free one.
      batch_size: Most answers decoded together.
      slots: Batch sizes; null takes 1, 4, 16, ... up to batch_size on CPU, where an empty slot
        costs as much as a text, and batch_size alone elsewhere.
      max_length: Most tokens of prompt and answer together; null takes the target's own limit, at
        most 8192.
      cache_gib: Most memory for keys and values of running answers, in GiB; null takes what
        batch_size and max_length need.
      prefix_cache: Most memory per device for the beginnings of prompts, which later prompts that
        begin alike do not read again: in GiB, or below 1 as a share of the memory; 0: none.
      max_queue: Most waiting requests; further ones get 429.
      max_logprobs: Most log-probabilities per token that a request may want.
      timeout_seconds: Longest time for an answer, from its arrival.
      stream_interval_seconds: Shortest time between two events of a stream; text in between is
        joined. The first token and the end do not wait.
      drain_seconds: Longest time to finish answers after SIGTERM.
      max_body_mib: Largest body of a request, in MiB; null takes 1, or 16 bytes per token of
        max_length if that is more.
      allowed_hosts: Names allowed in a request's Host header, besides localhost and addresses; `*`
        allows all. With an API key any name is allowed.
      allowed_origins: Other sites whose pages may ask this server (CORS), such as
        https://chat.example; `*` allows all.
      model_name: Name of the model in the API; null takes the name of the target's folder.
      tool_format: How the model writes calls of tools (docs/serving.md); null finds it in the chat
        template.
    """

    target: str = SMOLLM2
    host: str = "127.0.0.1"
    port: Port = 8000
    batch_size: Count = 16
    slots: tuple[Count, ...] | None = None
    sampling: ServedSampling = Field(default_factory=ServedSampling)
    cache_gib: Positive | None = None
    prefix_cache: PositiveOrZero = 0.1
    max_queue: Count = 256
    max_logprobs: CountOrZero = 20
    timeout_seconds: Positive = 600.0
    stream_interval_seconds: PositiveOrZero = 0.04
    drain_seconds: PositiveOrZero = 30.0
    max_body_mib: Positive | None = None
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    model_name: str | None = None
    tool_format: ToolFormat | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.slots is not None and max(self.slots, default=0) != self.batch_size:
            raise ValueError(f"slots: want the largest to be batch_size, {self.batch_size}")

    @property
    def max_body_bytes(self) -> int:
        """Largest body of a request."""
        if self.max_body_mib is not None:
            return int(self.max_body_mib * 2**20)
        return max(2**20, 16 * (self.max_length or 0))

    @property
    def max_requests(self) -> int:
        """Most requests at once: decoding, waiting, and some to refuse."""
        return self.max_queue + 4 * self.batch_size


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ComparisonConfig:
    """Drafts to compare, and the prompts to compare them on.

    Attributes:
      drafts: Model folder of a draft, and its name in tables.
      prompts: JSONL file of prompts or questions; or `stdlib`, the modules of Python's standard
        library that training on `stdlib` holds out; or `packages:NAME,NAME`, all modules of these
        installed packages. null takes stdlib if no datasets are given.
      datasets: More sets of questions: folders of data_dir that hold a question.jsonl, any value
        of `prompts`, mt_bench, gsm8k, humaneval, alpaca or another id on the Hub.
      data_dir: Folder of sets of questions.
      num_prompts: Number of prompts to use per set; at most, for a file.
      prompt_tokens: Length of a prompt cut from modules, in tokens.
      output: Folder to write the report to; it must be new or empty.
    """

    drafts: dict[str, str] = Field(default_factory=dict)
    prompts: str | None = None
    datasets: tuple[str, ...] = ()
    data_dir: str | None = None
    num_prompts: Count = 16
    prompt_tokens: Count = 64
    output: str | None = None

    @property
    def sets(self) -> tuple[str, ...]:
        """Sources of questions: prompts first, then the data sets."""
        prompts = self.prompts or ("" if self.datasets else "stdlib")
        return (*([prompts] if prompts else []), *self.datasets)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class MethodConfig:
    """One way to decode in a benchmark; what is null is the benchmark's own.

    Attributes:
      draft: Model folder of a draft; null decodes autoregressively.
      tree: Size of the draft tree.
      drafting: How the draft proposes tokens to sampled texts.
      draft_vocabulary: JSON file of the tokens that the draft may propose.
      draft_window: How many of the newest tokens the draft attends.
      quantise: Type that the target's matrices are rounded to.
    """

    draft: str | None = None
    tree: TreeConfig | None = None
    drafting: Drafting | None = None
    draft_vocabulary: str | None = None
    draft_window: Count | None = None
    quantise: Quantisation | None = None

    def __post_init__(self) -> None:
        for name in ("tree", "drafting", "draft_vocabulary", "draft_window"):
            if self.draft is None and getattr(self, name) is not None:
                raise ValueError(f"{name}: is a draft's; give draft, too")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class BenchConfig(ComparisonConfig, DecodingConfig):
    """One benchmark: every method against autoregressive decoding over the same prompts.

    Attributes:
      target: Model folder of the target; smollm2 is the one `make chat` fetches.
      methods: Further ways to decode by name, such as a draft with another tree, or the target
        quantised. Every draft of `drafts` is a method, too.
      temperatures: Temperatures to compare at; empty takes sampling.temperature alone.
      seeds: Seeds to sample with; empty takes sampling.seed alone. At temperature 0 only the first
        is used.
      batch_size: Number of questions answered together. A batch's seconds are shared equally
        among its answers; phases are timed with one prompt.
      repeats: Number of timed passes over all prompts; drafts take turns.
      phases: Also time the phases of a round and compare each with its floor; each is compiled
        by itself, which takes minutes with a large target (docs/bench.md).
      drift: Also measure the drafts by depth, on the first set (docs/experiments.md).
      output: Folder to write the report to. It must be new or empty; an interrupted run with
        the same settings is resumed.
    """

    target: str = SMOLLM2
    max_new_tokens: Count = 128
    methods: dict[str, MethodConfig] = Field(default_factory=dict)
    temperatures: tuple[Temperature, ...] = ()
    seeds: tuple[Seed, ...] = ()
    batch_size: Count = 1
    repeats: Count = 3
    phases: bool = False
    drift: bool = False

    def __post_init__(self) -> None:
        for name in ("draft_vocabulary", "draft_window"):
            given = getattr(self, name) is not None
            if given and not (self.ways or self.target == SMOLLM2):
                raise ValueError(f"{name} limits drafts; give drafts, too")
        if twice := self.drafts.keys() & self.methods.keys():
            raise ValueError(f"methods: {min(twice)} is a draft's name, too; choose another")
        for name in ("datasets", "temperatures", "seeds"):
            if len(set(values := getattr(self, name))) < len(values):
                raise ValueError(f"{name}: want each once, got {list(values)}")
        if self.drift:
            for name in ("quantise", "draft_vocabulary", "draft_window", "mesh", "methods"):
                if getattr(self, name):
                    raise ValueError(f"drift: is measured on models as they are; leave out {name}")
            _ = self.by_depth  # checked before any work

    @property
    def ways(self) -> dict[str, MethodConfig]:
        """All methods by name, drafts first."""
        plain = {name: MethodConfig(draft=folder) for name, folder in self.drafts.items()}
        return plain | self.methods

    @property
    def by_depth(self) -> "DriftConfig":
        """The analysis by depth of the same drafts, on the first set."""
        return DriftConfig(**_shared(self) | {"prompts": self.sets[0], "datasets": ()})


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DesignConfig:
    """What designs of a draft may cost and do gain (docs/experiments.md).

    Attributes:
      layers: Most layers of all specialists together.
      device: Device whose cost card gives the time of a round.
      batch_size: Number of sequences of that round.
      variation: Acceptance that a position loses per squared distance of its input's drift from the
        mean of its span. The default is measured: PosS-1 and HASS for SmolLM2.
      misses_left: Share of the misses at position 1 that is left where the first specialist's
        layers double. The default is measured, after short training: for SmolLM2.
    """

    layers: Count
    device: Literal["v5e", "v5p", "v6e", "h100", "h200"] = "h100"
    batch_size: Count = 1
    variation: PositiveOrZero = 0.07
    misses_left: Fraction = 0.998


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DriftConfig(ComparisonConfig):
    """One analysis of drafts by depth, along the target's own greedy answers.

    Attributes:
      target: Model folder of the target.
      max_new_tokens: Most new tokens of an answer; more than depth.
      depth: Number of drafted positions to measure.
      spans: Number of specialists to propose positions_per_specialist for (docs/experiments.md).
      design: Budget to propose spans and layers for.
      allow_target_mismatch: Use a draft made for other weights of the same shape.
    """

    target: str
    max_new_tokens: Count = 128
    depth: Depth = 8
    spans: Count | None = None
    design: DesignConfig | None = None
    allow_target_mismatch: bool = False

    def __post_init__(self) -> None:
        if not self.drafts:
            raise ValueError("want at least one draft; give --draft NAME=DIR")
        if self.max_new_tokens <= self.depth:
            raise ValueError(
                f"max_new_tokens: want more than depth, {self.depth}, got {self.max_new_tokens}; "
                "raise it or lower depth"
            )
        if (self.spans or 0) > self.depth:
            raise ValueError(
                f"spans: want at most one per position, {self.depth}, got {self.spans}; lower it "
                "or raise depth"
            )

    @property
    def chains(self) -> BenchConfig:
        """The same models and prompts, decoding with chains."""
        chain = TreeConfig(depth=self.depth, top_k=1, total_tokens=self.depth + 1)
        return BenchConfig(**_shared(self), tree=chain)


def _shared(config: BenchConfig | DriftConfig) -> dict[str, Any]:
    """Settings that a benchmark and an analysis by depth share, without the output."""
    names = {field.name for field in fields(BenchConfig)} & {
        one.name for one in fields(DriftConfig)
    }
    return {name: getattr(config, name) for name in names - {"output"}}
