"""PyTorch key <-> our item and path: one table, read in both directions."""

import re
from dataclasses import dataclass

from poss_jax.checkpoint import flatten_item
from poss_jax.shapes import Params

# The table: first the items (numbered ones continue with their number), then what is inside.
_ITEMS = {
    "embed": "model.embed_tokens",
    "layers": "model.layers",
    "norm": "model.norm",
    "head": "lm_head",
    "fc": "fc",
    "specialists": "layers",
}
_MODULES = {
    "input_norm": "input_layernorm",
    "attention/q": "self_attn.q_proj",
    "attention/k": "self_attn.k_proj",
    "attention/v": "self_attn.v_proj",
    "attention/o": "self_attn.o_proj",
    "attention/q_norm": "self_attn.q_norm",
    "attention/k_norm": "self_attn.k_norm",
    "mlp_norm": "post_attention_layernorm",
    "mlp/gate": "mlp.gate_proj",
    "mlp/up": "mlp.up_proj",
    "mlp/down": "mlp.down_proj",
}
_LEAVES = {"scale": "weight"}

_PREFIX = re.compile(r"^(model\.)+")

DRAFT_EMBEDDING = "embed_tokens.weight"
"""A draft's copy of the target's embedding, which we do not store."""

DRAFT_HEAD = "lm_head.weight"
"""Likewise of the target's head, in the layout of vLLM."""


@dataclass(frozen=True)
class Slot:
    """One array of our format.

    Attributes:
      item: name of its item, for instance `layers/3`.
      path: keys inside the item.
      shape: what it must have.
    """

    item: str
    path: tuple[str, ...]
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return "/".join((self.item, *self.path))


def source_key(item: str, path: tuple[str, ...]) -> str:
    """The PyTorch key of one of our arrays."""
    group, _, index = item.partition("/")
    *module, leaf = path
    inner = _MODULES["/".join(module)] if module else ""
    return ".".join(filter(None, (_ITEMS[group], index, inner, _LEAVES.get(leaf, leaf))))


def slots_by_key(shapes: dict[str, Params]) -> dict[str, Slot]:
    """The other direction: what every PyTorch key of a model becomes.

    Args:
      shapes: items of the model, as `checkpoint.item_shapes` gives them.
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
