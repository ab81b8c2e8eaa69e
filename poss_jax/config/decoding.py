"""Settings of the programs that decode."""

from dataclasses import asdict, fields
from typing import Annotated, Any

from pydantic import Field
from pydantic.dataclasses import dataclass

from poss_jax.config.models import (
    NO_SAMPLED_COPIES,
    STRICT,
    Drafting,
    MeshConfig,
    Quantisation,
    ToolFormat,
    TreeConfig,
    Trees,
)
from poss_jax.config.numbers import (
    Bias,
    Count,
    CountOrZero,
    Lookup,
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
from poss_jax.config.reading import refuse_given

Host = Annotated[str, Field(pattern=r"^(\*|[A-Za-z0-9_.-]+)$")]
Origin = Annotated[str, Field(pattern=r"^(\*|[a-z][a-z0-9+.-]*://[a-z0-9_.\[\]:-]+)$")]

SMOLLM2 = "smollm2"
"""The target if none is given: SmolLM2-135M-Instruct, see `poss_jax/bundled/default.py`."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SamplingOptions:
    """Sampling settings that a user may leave to the model, with the names of `transformers`.

    Null takes what the model's authors recommend (`bundled/default.py`). Meaning and order
    are `transformers`' too; frequency and presence penalties work as in the OpenAI API.

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

    temperature: Temperature | None = None
    top_k: CountOrZero | None = None
    top_p: TopP | None = None
    min_p: Probability | None = None
    repetition_penalty: Penalty | None = None
    frequency_penalty: OutputPenalty = 0.0
    presence_penalty: OutputPenalty = 0.0
    min_tokens: CountOrZero = 0
    logit_bias: dict[TokenId, Bias] = Field(default_factory=dict)
    seed: Seed = 0

    def over(self, recommended: "SamplingConfig") -> "SamplingConfig":
        """Returns these settings, and the recommended ones where these are null."""
        settings = {name: value for name, value in asdict(self).items() if value is not None}
        return SamplingConfig(**asdict(recommended) | settings)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SamplingConfig(SamplingOptions):
    """How tokens are chosen; every setting has a value, by default the greedy one."""

    temperature: Temperature = 0.0
    top_k: CountOrZero = 0
    top_p: TopP = 1.0
    min_p: Probability = 0.0
    repetition_penalty: Penalty = 1.0

    @property
    def changed(self) -> list[str]:
        """Names of the settings that differ from the greedy ones."""
        greedy = asdict(SamplingConfig())
        return [name for name, value in asdict(self).items() if value != greedy[name]]

    @property
    def is_plain(self) -> bool:
        """True if tokens are the argmax of the unchanged logits."""
        is_changed = self.repetition_penalty != 1 or self.reads_output or self.logit_bias
        return self.temperature == 0 and not is_changed

    @property
    def reads_output(self) -> bool:
        """True if scores depend on the output so far: its tokens or their number."""
        return bool(self.frequency_penalty or self.presence_penalty or self.min_tokens)

    def __str__(self) -> str:
        """The temperature, and what else was changed."""
        names = dict.fromkeys(["temperature", *self.changed])
        return ", ".join(f"{name} {getattr(self, name)}" for name in names)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class EngineConfig:
    """How an engine loads its models and decodes with them.

    Attributes:
      tree: Size of the draft tree; null takes the one tuned for the draft on this kind of device
        (`poss tune`), else the device's default (depth 4, top_k 4 and total_tokens 16 on CPU;
        6, 10 and 60 on accelerators, less from four requests on). In Python also trees by batch
        size, where None decodes without the draft.
      drafting: How drafts propose tokens when sampling (docs/generate.md, "Drafting methods"):
        coupled uses the noise that the target samples with, argmax takes the most likely tokens;
        both leave every text unchanged. sampled draws tokens and keeps them by a ratio test: texts
        have the same distribution, but not the same tokens as without a draft.
      lookup: Most tokens that a round copies from the prompt and the answer so far
        (docs/faster.md, "Copies"), with or without a draft; 0 copies none. Texts stay as they are.
      max_length: Most tokens of prompt and answer together; null takes the target's own limit.
      allow_target_mismatch: Use a draft made for other weights of the same shape.
      draft_vocabulary: JSON file of the tokens that drafts may propose (docs/faster.md, "Draft
        vocabularies"), for drafts that share the target's head; null takes the one tuned with the
        trees, else the draft's own, usually all.
      draft_window: How many of the newest tokens drafts attend, besides the first four
        (docs/faster.md, "Long contexts"); null takes the draft's own, usually all tokens.
      quantise: Round the target's matrices to 8 bits on loading (docs/faster.md, "Quantised
        targets"); null keeps the stored type. The draft's layers are rounded like the target's.
    """

    tree: TreeConfig | Trees | None = None
    drafting: Drafting = "coupled"
    lookup: Lookup = 0
    max_length: Count | None = None
    allow_target_mismatch: bool = False
    draft_vocabulary: str | None = None
    draft_window: Count | None = None
    quantise: Quantisation | None = None

    def __post_init__(self) -> None:
        if self.lookup and self.drafting == "sampled":
            raise ValueError(NO_SAMPLED_COPIES)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DecodingConfig(EngineConfig):
    """Settings shared by all decoding programs.

    Attributes:
      target: Model folder of the target.
      max_new_tokens: Most new tokens of an answer.
      sampling: How tokens are chosen.
      mesh: Grid of devices (docs/faster.md, "Several devices"); null takes one.
    """

    target: str
    max_new_tokens: Count = 256
    sampling: SamplingConfig = Field(default_factory=SamplingConfig)
    tree: TreeConfig | None = None
    mesh: MeshConfig | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tree is not None and self.tree.depth >= self.tree.total_tokens:
            got = f"got depth/top_k/total_tokens {self.tree.name}"
            raise ValueError(f"tree: want total_tokens above depth, for a node per level, {got}")

    def for_engine(self, **changes: Any) -> EngineConfig:
        """Returns the settings that an engine takes, some changed."""
        values = {field.name: getattr(self, field.name) for field in fields(EngineConfig)}
        return EngineConfig(**values | changes)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class AnswerConfig(DecodingConfig):
    """Settings of programs that answer prompts with one engine.

    Attributes:
      draft: Model folder of a draft made for the target; EAGLE-2, HASS and PosS-1 name the default
        target's. Without one, decoding is autoregressive.
      lookup: Most tokens that a round copies from the prompt and the answer so far
        (docs/faster.md, "Copies"), with or without a draft; null takes 8 beside a draft on CPU,
        else 0, which copies none. Texts stay as they are.
      trees: YAML file of draft trees by batch size (docs/faster.md, "Trees by batch size"), or
        none: decode without the draft.
      stop: Text that ends an answer and is left out of it.
    """

    sampling: SamplingOptions = Field(default_factory=SamplingOptions)
    draft: str | None = None
    lookup: Lookup | None = None
    trees: str | None = None
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.trees is not None and self.tree is not None:
            raise ValueError("trees: want it alone, got a tree, too; leave out one of them")
        if self.draft is None and self.target != SMOLLM2:
            refuse_given(self, "draft_vocabulary draft_window", "limits a draft; give draft, too")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class GenerateConfig(AnswerConfig):
    """One run of `poss generate`.

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
        num_given = sum(source is not None for source in (self.question, self.prompt, self.prompts))
        if num_given != 1 and not (num_given == 0 and self.precompile):
            raise ValueError("want a question, a text (prompt) or a file of prompts (prompts)")
        if self.show_drafts and not self.stream:
            raise ValueError("show_drafts marks text as it is streamed; set stream, too")
        if self.stream and self.batch_size > 1:
            raise ValueError("stream shows one answer after the other; leave out batch_size")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ChatConfig(AnswerConfig):
    """One conversation of `poss chat`.

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
      tool_format: How the model writes calls of tools (docs/requests.md); null finds it in the chat
        template.
    """

    target: str = SMOLLM2
    host: str = "127.0.0.1"
    port: Port = 8000
    batch_size: Count = 16
    slots: tuple[Count, ...] | None = None
    cache_gib: Positive | None = None
    prefix_cache: PositiveOrZero = 0.1
    max_queue: Count = 256
    max_logprobs: CountOrZero = 20
    timeout_seconds: Positive = 600.0
    stream_interval_seconds: PositiveOrZero = 0.04
    drain_seconds: PositiveOrZero = 30.0
    max_body_mib: Positive | None = None
    allowed_hosts: tuple[Host, ...] = ()
    allowed_origins: tuple[Origin, ...] = ()
    model_name: str | None = None
    tool_format: ToolFormat | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sampling.seed:
            got = self.sampling.seed
            raise ValueError(f"sampling.seed: want none, got {got}; every request has its own")
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
