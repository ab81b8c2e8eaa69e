"""Shapes of models, draft tree and device grid: static arguments of jitted functions."""

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from poss_jax.config.numbers import (
    AtLeastTwo,
    Count,
    CountOrZero,
    Depth,
    Devices,
    Fraction,
    HeadDim,
    NumLayers,
    Positive,
    TokenId,
)
from poss_jax.config.reading import UserError

STRICT = ConfigDict(extra="forbid", allow_inf_nan=False, defer_build=True)
Spans = Annotated[tuple[Count, ...], Field(min_length=1, max_length=1000)]
LayerCounts = Annotated[
    tuple[Annotated[Count, Field(le=100)], ...], Field(min_length=1, max_length=1000)
]
_MOST_STOP_IDS = 64  # in files; decoders may allow fewer
Divisors = tuple[Positive, ...]
Quantisation = Literal["int8", "fp8"]
Drafting = Literal["coupled", "argmax", "sampled"]
NO_SAMPLED_COPIES = "lookup: want coupled or argmax drafting, got sampled; leave one out"
ToolFormat = Literal["hermes", "llama3", "mistral"]
FIRST_FAMILY = "eagle"
"""Family of drafts whose files name none."""


def _omitted(default: Any) -> Any:
    """A field that files omit at its default; older files do not have it."""
    return Field(default=default, exclude_if=lambda value: value == default)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RopeConfig:
    """Rotary position embedding; `type` is the name Hugging Face configs use.

    Attributes:
      type: `default`, `linear` (positions divided by the factor), `dynamic` (the base grows with
        the sequence's length), `llama3` and `yarn` (low frequencies divided by the factor,
        smoothly), or `longrope` (a separate divisor per frequency, larger in long texts).
      theta: Base of the geometric series of frequencies.
      factor: Ratio of the stretched context to the trained one.
      low_freq_factor: Ratio of trained context to wavelength below which llama3 divides.
      high_freq_factor: Ratio of trained context to wavelength above which llama3 does not divide.
      original_max_position_embeddings: Trained context in tokens (all but default and linear).
      short_factor: Divisor of each frequency in texts within the trained context (longrope).
      long_factor: Divisor of each frequency in longer texts (longrope).
      attention_factor: Factor of rotated queries and keys (longrope and yarn); None: `factor`
        gives it.
      beta_fast: Turns in the trained context above which yarn does not divide.
      beta_slow: Turns in the trained context below which yarn divides.
      truncate: Widen the range between both to whole frequencies (yarn).
    """

    type: Literal["default", "linear", "dynamic", "llama3", "longrope", "yarn"] = "default"
    theta: Positive = 10000.0
    factor: Positive = 1.0
    low_freq_factor: Positive = 1.0
    high_freq_factor: Positive = 4.0
    original_max_position_embeddings: Count = 8192
    short_factor: Divisors = _omitted(())
    long_factor: Divisors = _omitted(())
    attention_factor: Positive | None = _omitted(None)
    beta_fast: Positive = _omitted(32.0)
    beta_slow: Positive = _omitted(1.0)
    truncate: bool = _omitted(True)

    def __post_init__(self) -> None:
        low, high = self.low_freq_factor, self.high_freq_factor
        if self.type == "llama3" and not low < high:
            raise ValueError(f"want low_freq_factor below high_freq_factor, got {low} and {high}")
        if self.type == "yarn" and not (self.theta > 1 and self.beta_slow < self.beta_fast):
            raise ValueError(
                f"rope type yarn wants theta above 1 and beta_slow below beta_fast, got "
                f"{self.theta:g}, {self.beta_slow:g} and {self.beta_fast:g}"
            )
        if self.type == "longrope" and self.original_max_position_embeddings == 1:
            raise ValueError("rope type longrope wants original_max_position_embeddings above 1")

    @property
    def follows_length(self) -> bool:
        """True if a text's length decides how it is rotated."""
        return self.type in ("dynamic", "longrope")

    def rotation(self, length: int) -> int:
        """Names how texts of a length are rotated; equal ones are rotated alike."""
        original = self.original_max_position_embeddings
        if self.type == "dynamic":
            return max(length, original)
        return int(self.type == "longrope" and length > original)

    @property
    def scale(self) -> float:
        """Factor of rotated queries and keys, which keeps attention sharp in a long context."""
        if self.type not in ("longrope", "yarn"):
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        log_factor = math.log(max(self.factor, 1.0))
        if self.type == "yarn":
            return 1 + 0.1 * log_factor
        return math.sqrt(1 + log_factor / math.log(self.original_max_position_embeddings))


@dataclass(frozen=True, kw_only=True, config=STRICT)
class LlamaConfig:
    """Shape of a Llama-family transformer.

    Attributes:
      vocab_size: Number of tokens in the vocabulary.
      hidden_size: Width of the residual stream.
      intermediate_size: Width of the MLP.
      num_layers: Number of decoder layers.
      num_heads: Number of query heads.
      num_kv_heads: Number of key and value heads.
      head_dim: Width of a head.
      max_position_embeddings: Most tokens of a sequence.
      rms_norm_eps: Number added under the root of a norm.
      rope: Rotary position embedding.
      tie_embeddings: Use the embedding as head, too.
      qkv_bias: Give the query, key and value projections a bias (Qwen2).
      o_bias: Give the attention's output projection a bias.
      qk_norm: Norm each head of queries and keys before it is rotated (Qwen3).
      mlp_bias: Give the projections of the MLP a bias.
      fused_projections: PyTorch checkpoints store q, k and v in one tensor, gate and up in
        another (Phi-3).
      bos_token_id: Token that begins a text.
      eos_token_ids: Tokens that end a text.
    """

    vocab_size: Count
    hidden_size: Count
    intermediate_size: Count
    num_layers: NumLayers
    num_heads: Count
    num_kv_heads: Count
    head_dim: HeadDim
    max_position_embeddings: Count = 2048
    rms_norm_eps: Fraction = 1e-5
    rope: RopeConfig = Field(default_factory=RopeConfig)
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    mlp_bias: bool = False
    fused_projections: bool = _omitted(False)
    bos_token_id: TokenId | None = None
    eos_token_ids: Annotated[tuple[TokenId, ...], Field(max_length=_MOST_STOP_IDS)] = ()

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}"
            )
        if self.rope.type == "dynamic" and self.head_dim == 2:
            raise ValueError("rope type dynamic wants a head_dim above 2")
        counts = [len(self.rope.short_factor), len(self.rope.long_factor)]
        if self.rope.type == "longrope" and counts != [self.head_dim // 2] * 2:
            raise ValueError(
                f"rope type longrope wants {self.head_dim // 2} numbers in short_factor and in "
                f"long_factor, got {counts[0]} and {counts[1]}"
            )

    @property
    def extras(self) -> list[str]:
        """Fields of biases and norms that differ from plain Llama."""
        fields = ("qkv_bias", "o_bias", "qk_norm", "mlp_bias")
        return [field for field in fields if getattr(self, field)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DraftConfig:
    """A draft model: shared fc and, per specialist, one decoder layer (the first may have more).

    EAGLE-2 and HASS are `positions_per_specialist=(1,)`, PosS-n is `(n, n, ...)`.
    """

    layer: LlamaConfig  # one specialist and the embedding; its `num_layers` is ignored
    positions_per_specialist: Spans = (1,)  # beyond the last span the last one continues
    # 1 where none is given; see `check_specialists`.
    layers_per_specialist: LayerCounts = Field(
        default=(1,), exclude_if=lambda layers: max(layers) == 1
    )
    trained_depth: Depth = 1  # draft positions that the rollout was trained on
    fc_bias: bool = False  # the fusion layer has a bias
    family: str = _omitted(FIRST_FAMILY)  # see `poss_jax.model.families`
    # `shared`: all specialists read one stream of keys and values; stored in the model's record.
    kv: Literal["per_specialist", "shared"] = Field(default="per_specialist", exclude=True)
    # Layers of the target whose inputs together are a feature; empty: a feature is the hidden state
    # after the target's final norm.
    aux_layers: tuple[CountOrZero, ...] = _omitted(())
    head_size: AtLeastTwo | None = _omitted(
        None
    )  # tokens of the draft's head; None: uses the target's
    norm_before_residual: bool = _omitted(False)  # a layer adds to its normed feature
    # `whole`: the target's feature is normed before `fc`; `each`: each layer's part by itself.
    fc_norm: Literal["whole", "each"] | None = _omitted(None)
    # `head`: only the head reads normed features; `fed_back`: the next specialist does, too.
    output_norm: Literal["head", "fed_back"] | None = _omitted("head")
    target_size: Count | None = _omitted(None)  # hidden size of the target; None: the layer's
    has_embedding: bool = _omitted(False)  # embeds tokens with its own weights, not the target's
    # Token that drafted positions after the first read, all in one pass (P-EAGLE); None: each reads
    # the token before it.
    mask_token: TokenId | None = _omitted(None)
    window: Count | None = _omitted(None)  # newest context rows that are attended; None: all
    # First context rows that are attended besides; 0 in a draft trained with its window.
    num_sinks: CountOrZero = _omitted(4)

    def __post_init__(self) -> None:
        if self.target_size is not None and not self.has_embedding:
            raise ValueError("target_size: a draft of another width than its target has_embedding")
        if (token := self.mask_token) is not None:
            if self.num_specialists > 1:
                raise ValueError("mask_token: only a draft of one specialist has one")
            if token >= (size := self.layer.vocab_size):
                raise ValueError(f"mask_token: want one of {size} tokens, got {token}")
        check_specialists(self)

    @property
    def feature_size(self) -> int:
        """Width of one hidden state of the target."""
        return self.target_size or self.layer.hidden_size

    @property
    def trained_window(self) -> int | None:
        """The window, if the draft is trained with it; sinks are for drafts that are not."""
        return None if self.num_sinks else self.window

    @property
    def num_specialists(self) -> int:
        """E, the number of spans."""
        return len(self.positions_per_specialist)

    @property
    def num_further(self) -> int:
        """Number of layers of the first specialist after its first one."""
        return self.layers_per_specialist[0] - 1

    @property
    def is_looped(self) -> bool:
        """True if the only specialist has several layers, which all positions pass."""
        return self.num_specialists == 1 and self.num_further > 0

    @property
    def other_norms(self) -> dict[str, Any]:
        """Norm settings that differ from EAGLE-3's."""
        usual = {"norm_before_residual": False, "fc_norm": None, "output_norm": "head"}
        norms = {field: getattr(self, field) for field in usual}
        return {field: value for field, value in norms.items() if value != usual[field]}

    def specialist_at(self, depth: int) -> int:
        """Index of the specialist that drafts position `depth` (0-based)."""
        end = 0
        for index, span in enumerate(self.positions_per_specialist):
            end += span
            if depth < end:
                return index
        return self.num_specialists - 1

    def stream_at(self, depth: int) -> int:
        """Index of the stream of keys and values that drafting position `depth` reads."""
        return 0 if self.kv == "shared" else self.specialist_at(depth)

    def num_streams(self, depth: int) -> int:
        """Number of streams that drafting `depth` positions reads, further layers' included."""
        return max(map(self.stream_at, range(depth))) + 1 + self.num_further


def check_specialists(draft: Any) -> None:
    """Refuses layers that specialists of a draft's spans cannot have.

    Drafted rows pass specialists of one layer only, so that training can follow all of them; but
    some families let a single specialist loop all of its layers (`family_of`).

    Args:
      draft: a `DraftConfig` or a `SpecialistsConfig`.

    Raises:
      ValueError: a specialist that is not the first has several layers, or one of several layers
        also drafts after itself.
    """
    spans, layers = draft.positions_per_specialist, draft.layers_per_specialist
    if len(layers) > len(spans) or max(layers[1:], default=1) > 1:
        problem = "only the first specialist may have several layers"
    elif layers[0] > 1 and spans[0] > 1 and len(spans) > 1:
        problem = "a specialist of several layers drafts one position, and another one the next"
    else:
        return
    raise ValueError(
        f"layers_per_specialist: {problem}, got {list(layers)} for positions_per_specialist "
        f"{list(spans)}; want such as [3, 1, 1] for [1, 1, 1]"
    )


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TreeConfig:
    """Size of the draft tree; every count is plain (`total_tokens` includes the root).

    Attributes:
      depth: Number of drafted positions.
      top_k: Number of children per node, and of nodes per level that get children (the beam).
      total_tokens: Number of nodes verified in one target pass, root included.
    """

    depth: Depth = 6
    top_k: Count = 10
    total_tokens: AtLeastTwo = 60

    @property
    def name(self) -> str:
        """Name in options and reports: depth/top_k/total_tokens."""
        return f"{self.depth}/{self.top_k}/{self.total_tokens}"

    @property
    def num_candidates(self) -> int:
        """Number of nodes drafted before selection."""
        return self.top_k + (self.depth - 1) * self.top_k**2

    @property
    def num_nodes(self) -> int:
        """Number of nodes verified: `total_tokens`, or all that can be drafted if that is less."""
        return min(self.total_tokens, self.num_candidates + 1)

    @property
    def max_accepted(self) -> int:
        """Most drafted tokens a round can accept."""
        return min(self.depth, self.num_nodes - 1)


ACCELERATOR_TREE = TreeConfig()
CPU_TREE = TreeConfig(depth=4, top_k=4, total_tokens=16)

Trees = Mapping[int, TreeConfig | None]
"""Batch size -> tree for that many prompts and more; None decodes them without a draft."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class MeshConfig:
    """Grid of devices; at most one axis is -1 and takes the remaining devices.

    Attributes:
      data: Number of groups of devices that split the batch; each holds a full copy of the models.
      fsdp: Number of devices of a group that split the batch, the weights and the optimizer state.
      tensor: Number of devices that split the width of every layer.
    """

    data: Devices = -1
    fsdp: Devices = 1
    tensor: Devices = 1

    def __post_init__(self) -> None:
        sizes = (self.data, self.fsdp, self.tensor)
        if any(size < 1 and size != -1 for size in sizes) or sizes.count(-1) > 1:
            raise ValueError(f"want counts of devices, at most one of them -1, got {self.name}")

    @property
    def name(self) -> str:
        """Sizes of the axes as text."""
        return f"data={self.data} fsdp={self.fsdp} tensor={self.tensor}"

    def sizes(self, num_devices: int) -> tuple[int, int, int]:
        """Sizes of data, fsdp and tensor on this number of devices; 1, 1, 1 is always one device.

        Raises:
          UserError: their product is not the number of devices.
        """
        sizes = (self.data, self.fsdp, self.tensor)
        fixed = math.prod(size for size in sizes if size != -1)
        data, fsdp, tensor = (num_devices // fixed if size == -1 else size for size in sizes)
        if data * fsdp * tensor not in (num_devices, 1):
            raise UserError(
                f"mesh {self.name} does not fit {num_devices} devices; want sizes whose product "
                f"is {num_devices}, or one of them -1 to take what the others leave"
            )
        return data, fsdp, tensor
