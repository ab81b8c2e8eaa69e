"""PyTorch key <-> our item and path, by the tables of the models."""

import re
from dataclasses import dataclass

from poss_jax.model.families.eagle import EAGLE
from poss_jax.model.parameters import flatten_item, torch_name
from poss_jax.model.target import TARGET
from poss_jax.shapes import Params

_PREFIX = re.compile(r"^(model\.)+")

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
    """Names one of our arrays as PyTorch checkpoints do."""
    return torch_name({**TARGET, **EAGLE.parameters}, item, path)


def slots_by_key(shapes: dict[str, Params]) -> dict[str, Slot]:
    """Finds the place of every PyTorch key of a model.

    Args:
      shapes: items of the model, as `item_shapes` gives them.
    """
    slots = [
        Slot(item, path, shape)
        for item, tree in shapes.items()
        for path, shape in flatten_item(tree).items()
    ]
    return {source_key(slot.item, slot.path): slot for slot in slots}


def plain_name(key: str) -> str:
    """A PyTorch key without the prefix `model.`, which some programs put before every key."""
    return _PREFIX.sub("", key)


FC = source_key("fc", ("weight",))
FC_BIAS = source_key("fc", ("bias",))
QUERY = source_key("specialists/0", ("attention", "q", "weight"))
