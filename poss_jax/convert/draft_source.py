"""Opening a draft in any of the layouts in use, and naming those that we do not convert."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from poss_jax.checkpoint import read_json
from poss_jax.config import UserError
from poss_jax.convert.names import source_key
from poss_jax.convert.refusals import refuse_adapter, refuse_config, refuse_tensors
from poss_jax.convert.source import LazyTensor, Source, open_tensors

FC = source_key("fc", ("weight",))
QUERY = source_key("specialists/0", ("attention", "q", "weight"))

_PREFIX = re.compile(r"(model\.)+")
_LAYER = re.compile(r"layers\.(\d+)\.")
_EAGLE3_NAME = re.compile(r"eagle3", re.IGNORECASE)

# Norms and names that speculators gives EAGLE-1 drafts.
_SPECULATORS = re.compile(
    r"(embed_layernorm|embedding_layernorm|post_embedding_layernorm|pre_lm_head_layernorm"
    r"|fusion_fc|transformer)\."
)


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
    refuse_other_drafts(draft.tensors, draft.origin)
    refuse_tensors(draft.tensors, draft.origin)
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
        name = _PREFIX.sub("", key, count=1) if key.startswith("model.") else key
        if plain.setdefault(name, key) != key:
            raise UserError(f"{origin}: holds both {plain[name]} and {key}; remove the wrong one")
    return plain


def refuse_speculators(values: Mapping[str, Any], origin: str) -> None:
    """Refuses the classes of vLLM's speculators other than EAGLE-1, by their name.

    Raises:
      UserError: names the class.
    """
    kind = values.get("speculators_model_type")
    if kind is None or kind == "eagle":
        return
    architectures = values.get("architectures")
    name = architectures[0] if isinstance(architectures, list) and architectures else kind
    what = "an EAGLE-3 draft" if _EAGLE3_NAME.search(f"{kind}{name}") else f"a {kind} draft"
    raise UserError(
        f"{origin}: holds {what} of speculators ({name}): not supported yet; EAGLE-2, HASS and "
        "PosS drafts are supported so far"
    )


def refuse_other_drafts(tensors: Mapping[str, LazyTensor], origin: str) -> None:
    """Refuses what is no EAGLE-2, HASS or PosS draft, by the names and shapes of its tensors.

    Args:
      tensors: by plain name.
      origin: the source, for the message.

    Raises:
      UserError: names what it is and what told it.
    """
    for refusal in (_whole_target, _eagle3, _speculators, _input_norm):
        found = refusal(tensors)
        if found:
            raise UserError(f"{origin}: {found}")


def _check_architecture(draft: DraftSource) -> None:
    """Tensors of EAGLE-2's layout under a config.json that says EAGLE-3 belong to no one model."""
    names = draft.values.get("architectures")
    name = next((n for n in names or () if _EAGLE3_NAME.search(str(n))), None)
    if name is not None and QUERY in draft.tensors:
        raise UserError(
            f"{draft.origin}: config.json says EAGLE-3 ({name}), the weights have EAGLE-2's layout "
            f"({QUERY} {list(draft.tensors[QUERY].shape)}); give the config.json that belongs to "
            "these weights"
        )


def _whole_target(tensors: Mapping[str, LazyTensor]) -> str | None:
    if FC in tensors or not {"embed_tokens.weight", "norm.weight"} <= tensors.keys():
        return None
    return (
        "holds a whole target (norm.weight, and no fc.weight), not a draft; convert it with the "
        "target command, and give the draft's own files here"
    )


def _eagle3(tensors: Mapping[str, LazyTensor]) -> str | None:
    """EAGLE-3, and PosS on EAGLE-3: other names, or twice or three times the width."""
    sign = next((key for key in tensors if re.match(r"midlayers?\.|d2t$|t2d$", key)), None)
    sign = sign or next((key for key in tensors if ".hidden_norm." in key), None)
    width = tensors[FC].shape[0] if FC in tensors else 0
    for key, times in ((FC, 3), (QUERY, 2)):
        if sign is None and key in tensors and tensors[key].shape[1:] == (times * width,):
            sign = f"{key} {list(tensors[key].shape)}"
    if sign is None:
        return None
    layers = {match[1] for key in tensors if (match := re.match(r"(?:mid)?layers\.(\d+)\.", key))}
    what = "a PosS draft on EAGLE-3" if len(layers) > 1 else "an EAGLE-3 draft"
    return (
        f"holds {what} ({sign}): not supported yet; EAGLE-2, HASS and PosS drafts are supported "
        "so far"
    )


def _speculators(tensors: Mapping[str, LazyTensor]) -> str | None:
    sign = next((key for key in tensors if _SPECULATORS.match(key)), None)
    if sign is None:
        return None
    return (
        f"holds an EAGLE-1 draft of speculators with layers of its own ({sign}), which cannot be "
        "converted; give a draft of the original layout"
    )


def _input_norm(tensors: Mapping[str, LazyTensor]) -> str | None:
    sign = next((key for key in tensors if ".input_layernorm." in key), None)
    if sign is None:
        return None
    return (
        f"{sign} belongs to no EAGLE-2, HASS or PosS draft, whose layers have no input norm; "
        "give the draft's own files"
    )
