"""Settings of `benchmarks.aot`, which compiles decoding for other devices."""

from typing import Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from poss_jax.config.decoding import SamplingConfig
from poss_jax.config.models import STRICT, LlamaConfig, MeshConfig, Quantisation, TreeConfig
from poss_jax.config.numbers import AtLeastTwo, Count, Lookup
from poss_jax.config.training import SpecialistsConfig

ProgramName = Literal["prefill", "step", "round", "rounds"]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class AheadConfig:
    """The models, the request and the devices to compile for.

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
