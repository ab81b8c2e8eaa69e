"""The layouts that drafts are exported in: `Layout`, and the rows of EAGLE-2, HASS and PosS."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from poss_jax.checkpoint.record import ModelRecord
from poss_jax.config.models import DraftConfig, LlamaConfig
from poss_jax.config.reading import UserError, config_to_dict
from poss_jax.convert.config_json import layer_json
from poss_jax.convert.hf import METADATA, DraftMetadata

_LAYER = re.compile(r"^layers\.(\d+)\.")


@dataclass(frozen=True)
class Outgoing:
    """A draft that is about to be exported.

    Attributes:
      origin: its folder and the layout, for messages.
      config: its shape; where one specialist was chosen, that of this specialist alone.
      vocabulary: target id of every token it can propose; None: all of them.
      target: record of its target.
      dtype: type that `fc` is written in.
    """

    origin: str
    config: DraftConfig
    vocabulary: tuple[int, ...] | None
    target: ModelRecord
    dtype: str

    def metadata(self, *, vocabulary: tuple[int, ...] | None = None) -> dict[str, Any]:
        """Contents of config.json about a draft under `METADATA`, for our own converter."""
        is_told = self.config.family == "eagle" and self.config.kv == "shared"
        metadata = DraftMetadata(
            positions_per_specialist=self.config.positions_per_specialist,
            trained_depth=self.config.trained_depth,
            draft_vocabulary=vocabulary,
            kv="shared" if is_told else None,
        )
        return {METADATA: {k: v for k, v in config_to_dict(metadata).items() if v is not None}}


@dataclass(frozen=True)
class Layout:
    """A layout that the drafts of one family are written in.

    Attributes:
      name: name to choose it by.
      family: family of its drafts, see `DraftConfig`.
      readers: programs that read it, for the model card.
      describe: draft -> config.json; refuses a draft that the layout cannot hold.
      is_single: whether it holds one specialist.
      layer: key of a layer; `{}` stands for its number.
      has_embedding: whether it holds a copy of the target's embedding.
      maps: when it holds `d2t` and `t2d`; `subset`: where the draft's vocabulary is a part.
      note: what users of the files should know, for the model card.
    """

    name: str
    family: str
    readers: str
    describe: Callable[[Outgoing], dict[str, Any]]
    is_single: bool = False
    layer: str = "layers.{}"
    has_embedding: bool = False
    maps: Literal["never", "subset", "always"] = "never"
    note: str = ""

    def key(self, name: str) -> str:
        """Renames a layer's PyTorch key as the layout calls layers."""
        return _LAYER.sub(lambda match: f"{self.layer.format(match[1])}.", name)


def other_widths(layer: LlamaConfig) -> list[str]:
    """Names the width of all heads together, if it is not that of the layer."""
    if layer.num_heads * layer.head_dim == layer.hidden_size:
        return []
    return [f"{layer.num_heads} heads of {layer.head_dim} for a width of {layer.hidden_size}"]


def _describe_eagle(draft: Outgoing) -> dict[str, Any]:
    """Describes a draft to the original code, and to our own converter.

    Raises:
      UserError: the original code has no such layers.
    """
    config, layer = draft.config, draft.config.layer
    wrong = [field for field in layer.extras if field != "qkv_bias"] + other_widths(layer)
    if wrong:
        raise UserError(
            f"{draft.origin}: the original code has no draft layers with {', '.join(wrong)}; such "
            "a draft stays with poss_jax"
        )
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **layer_json(layer, draft.dtype),
        "num_hidden_layers": 1,  # whatever the number of specialists: so do the published ones
        "tie_word_embeddings": layer.tie_embeddings,
        "pad_token_id": 0,
        "qkv_bias": layer.qkv_bias,
        "bias": config.fc_bias,
        **draft.metadata(vocabulary=draft.vocabulary),
    }


EAGLE_LAYOUTS = (
    Layout(
        "eagle",
        family="eagle",
        readers="the original EAGLE and HASS code",
        describe=_describe_eagle,
        is_single=True,
        has_embedding=True,
    ),
    Layout(
        "poss",
        family="eagle",
        readers="the original PosS code",
        describe=_describe_eagle,
        has_embedding=True,
    ),
)
"""The layouts of EAGLE's family; a draft takes the first that holds as many specialists."""
