"""Shapes of models and of the draft tree: what jitted functions take as static arguments."""

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, PositiveInt
from pydantic.dataclasses import dataclass

STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)
TokenId = Annotated[int, Field(ge=-1, lt=2**31)]  # -1 stands for none in some config.json
Spans = Annotated[tuple[PositiveInt, ...], Field(min_length=1)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
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
    theta: float = Field(default=10000.0, gt=0)
    factor: float = Field(default=1.0, gt=0)
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = Field(default=8192, gt=0)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class LlamaConfig:
    """Shape of a Llama-family transformer.

    Attributes:
      qkv_bias: whether the query, key and value projections have a bias (Qwen2).
      o_bias: whether the attention's output projection has one.
      qk_norm: whether each head of queries and keys is normed before it is rotated (Qwen3).
      eos_token_ids: tokens that end a text.
    """

    vocab_size: int = Field(gt=0)
    hidden_size: int = Field(gt=0)
    intermediate_size: int = Field(gt=0)
    num_layers: int = Field(gt=0, le=10_000)
    num_heads: int = Field(gt=0)
    num_kv_heads: int = Field(gt=0)
    head_dim: int = Field(gt=0, multiple_of=2)
    max_position_embeddings: int = Field(default=2048, gt=0)
    rms_norm_eps: float = Field(default=1e-5, ge=0)
    rope: RopeConfig = Field(default_factory=RopeConfig)
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    mlp_bias: bool = False
    bos_token_id: TokenId | None = None
    eos_token_ids: tuple[TokenId, ...] = ()

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}"
            )


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DraftConfig:
    """A draft model: shared fc and one decoder layer per specialist.

    EAGLE-2 and HASS are `positions_per_specialist=(1,)`, PosS-n is `(n, n, ...)`.

    Attributes:
      layer: shape of one specialist and of the embedding; its `num_layers` is 1 in new drafts, and
        not looked at.
      positions_per_specialist: how many draft positions each specialist serves; beyond the last
        span the last specialist continues.
      trained_depth: number of draft positions the rollout was trained on.
      fc_bias: whether the fusion layer has a bias.
    """

    layer: LlamaConfig
    positions_per_specialist: Spans = (1,)
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


@dataclass(frozen=True, kw_only=True, config=STRICT)
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
