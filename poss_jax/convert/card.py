"""The model card of an exported draft."""

import json

from poss_jax.config.models import DraftConfig
from poss_jax.convert.layouts import Layout, Outgoing
from poss_jax.convert.source import HUB_ID
from poss_jax.version import __version__


def model_card(draft: Outgoing, layout: Layout, specialist: int | None) -> str:
    """Writes README.md of an exported draft.

    Args:
      draft: what is exported.
      layout: layout of the files.
      specialist: number of the one specialist that is exported; None: all of them.
    """
    name, config = draft.target.target.name, draft.config
    facts = [f"| {what} | {said} |" for what, said in _facts(draft).items()]
    chosen = [] if specialist is None else ["", f"It is specialist {specialist} of a PosS draft."]
    lines = [
        "---",
        *([f"base_model: {json.dumps(name)}"] if HUB_ID.fullmatch(name) else []),
        "tags: [speculative-decoding]",
        "---",
        "",
        f"# Draft model for {name}",
        "",
        f"A draft ({config.method}) for speculative decoding with {name}, and with no other model. "
        f"poss_jax {__version__} exported it in the layout `{layout.name}`, which is read "
        f"by {layout.readers}.",
        *chosen,
        *(["", layout.note] if layout.note else []),
        "",
        "| | |",
        "|---|---|",
        *facts,
        "",
        "poss_jax converts it back with",
        "",
        "    python -m poss_jax.convert draft --source THIS_FOLDER --target TARGET --output DIR",
    ]
    return "\n".join(lines) + "\n"


def _facts(draft: Outgoing) -> dict[str, str]:
    config, rope = draft.config, draft.config.layer.rope
    size = config.layer.vocab_size
    known = f"{len(draft.vocabulary)} of {size}" if draft.vocabulary else f"all {size}"
    features = "its last hidden state, normed"
    if config.aux_layers:
        features = f"the inputs of its layers {', '.join(map(str, config.aux_layers))} (from 0)"
    return {
        "specialists": _show_specialists(config),
        "trained depth": str(config.trained_depth),
        "tokens it can propose": known,
        "reads of the target": features,
        "rope": f"{rope.type}, theta {rope.theta:g}",
        "weights": draft.dtype,
    }


def _show_specialists(config: DraftConfig) -> str:
    """Says which positions each specialist drafts, such as "3: positions 1-3, 4-6, 7 on"."""
    if config.num_specialists == 1:
        return "1, for all positions"
    shown, first = [], 1
    for count in config.positions_per_specialist[:-1]:
        last = first + count - 1
        shown.append(str(first) if count == 1 else f"{first}-{last}")
        first = last + 1
    return f"{config.num_specialists}: positions {', '.join(shown)}, {first} on"
