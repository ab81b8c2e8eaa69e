"""PyTorch key <-> our item and path, by the tables of the models."""

import re
from dataclasses import dataclass

from poss_jax.config.models import DraftConfig, LlamaConfig
from poss_jax.model.families.eagle import EAGLE
from poss_jax.model.parameters import flatten_item, item_shapes, table_of, torch_name
from poss_jax.model.target import TARGET

_PREFIX = re.compile(r"^((draft_)?model\.)+")
_MIDDLE = re.compile(r"^midlayer(s(?=\.\d)|(?=\.))")  # EAGLE-3's names of what others call layers

DRAFT_EMBEDDING = "embed_tokens.weight"
"""A draft's copy of the target's embedding, which we do not store."""

DRAFT_HEAD = "lm_head.weight"
"""A draft's copy of the target's head, in the layout of vLLM."""


@dataclass(frozen=True)
class Slot:
    """One array of our format.

    Attributes:
      item: name of its item, for instance `layers/3`.
      path: keys inside the item.
      shape: shape it must have.
    """

    item: str
    path: tuple[str, ...]
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return "/".join((self.item, *self.path))


def source_key(item: str, path: tuple[str, ...]) -> str:
    """Names an array of a target, or of a draft of EAGLE's family, as PyTorch checkpoints do."""
    return torch_name({**TARGET, **EAGLE.parameters}, item, path)


def slots_by_key(config: LlamaConfig | DraftConfig) -> dict[str, Slot]:
    """Finds the place of every PyTorch key of a model."""
    table = table_of(config)
    return {
        torch_name(table, item, path): Slot(item, path, shape)
        for item, tree in item_shapes(config).items()
        for path, shape in flatten_item(tree).items()
    }


def plain_name(key: str) -> str:
    """A PyTorch key without the prefix `model.`, its layers called `layers.N`."""
    return _MIDDLE.sub(lambda match: "layers" if match[1] else "layers.0", _PREFIX.sub("", key))


FC = source_key("fc", ("weight",))
FC_BIAS = source_key("fc", ("bias",))
QUERY = source_key("specialists/0", ("attention", "q", "weight"))
HEAD = source_key("head", ("weight",))
