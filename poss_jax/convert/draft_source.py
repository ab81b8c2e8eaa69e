"""Opening a draft in any of the layouts in use."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from poss_jax.config import UserError, read_json
from poss_jax.convert.names import QUERY, plain_name
from poss_jax.convert.refusals import (
    eagle3_name,
    refuse_adapter,
    refuse_config,
    refuse_other_drafts,
    refuse_speculators,
)
from poss_jax.convert.source import LazyTensor, Source, open_tensors

_LAYER = re.compile(r"layers\.(\d+)\.")


@dataclass(frozen=True)
class DraftSource:
    """A draft's files, with the layouts' different spellings taken away.

    Attributes:
      source: where it came from.
      values: of config.json, without the wrapper some programs put around it.
      tensors: by their plain EAGLE name (`fc.weight`, `layers.0.mlp.up_proj.weight`).
      keys: name in the files, by plain name.
    """

    source: Source
    values: Mapping[str, Any]
    tensors: Mapping[str, LazyTensor]
    keys: Mapping[str, str]

    @property
    def origin(self) -> str:
        """The folder, for messages."""
        return str(self.source.folder)

    @property
    def num_layers(self) -> int:
        """Number of specialists; at least 1, so that one without any is told what is missing."""
        matches = map(_LAYER.match, self.tensors)
        return max(1, len({match[1] for match in matches if match}))


def open_draft(source: Source) -> DraftSource:
    """Reads what a draft's files say.

    Raises:
      UserError: damaged or missing files, or something else than an EAGLE-2, HASS or PosS draft;
        what we recognise is named.
    """
    refuse_adapter(source.folder)
    return recognise_draft(source, open_tensors(source.folder))


def recognise_draft(source: Source, tensors: Mapping[str, LazyTensor]) -> DraftSource:
    """Tells a draft of one of the layouts from everything else; no tensor is read.

    Args:
      source: where its config.json is.
      tensors: by their name in the files.

    Raises:
      UserError: as `open_draft`.
    """
    path = source.folder / "config.json"
    values = read_json(path)
    refuse_speculators(values, str(path))
    values = unwrap_config(values)
    keys = plain_keys(tensors, str(source.folder))
    draft = DraftSource(source, values, {name: tensors[key] for name, key in keys.items()}, keys)
    refuse_other_drafts(tensors, draft.origin)
    _check_architecture(draft)
    refuse_config(values, str(path))
    return draft


def unwrap_config(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Takes the draft's own config out of the wrapper that vLLM or speculators put around it."""
    if values.get("model_type") == "eagle" and isinstance(values.get("model"), dict):
        return values["model"] | {"bias": bool(values.get("eagle_fc_bias", False))}
    if isinstance(values.get("transformer_layer_config"), dict):
        return values["transformer_layer_config"] | {"bias": bool(values.get("fusion_bias", False))}
    return values


def plain_keys(keys: Iterable[str], origin: str) -> dict[str, str]:
    """Name without the prefix `model.` -> name in the file.

    Raises:
      UserError: two keys are one without it.
    """
    plain: dict[str, str] = {}
    for key in keys:
        name = plain_name(key)
        if plain.setdefault(name, key) != key:
            raise UserError(f"{origin}: holds both {plain[name]} and {key}; remove the wrong one")
    return plain


def _check_architecture(draft: DraftSource) -> None:
    """Tensors of EAGLE-2's layout under a config.json that says EAGLE-3 belong to no one model."""
    name = eagle3_name(draft.values)
    if name is not None and QUERY in draft.tensors:
        raise UserError(
            f"{draft.origin}: config.json says EAGLE-3 ({name}), the weights have EAGLE-2's layout "
            f"({QUERY} {list(draft.tensors[QUERY].shape)}); give the config.json that belongs to "
            "these weights"
        )
