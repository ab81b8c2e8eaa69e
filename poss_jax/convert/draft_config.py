"""What a draft is: read from its tensors, checked against config.json, every assumption said."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from poss_jax.config import DraftConfig, LlamaConfig, UserError, build_config, shorten
from poss_jax.config.models import Spans
from poss_jax.config.numbers import CountOrZero, Depth
from poss_jax.convert.draft_source import DraftSource
from poss_jax.convert.hf_config import parse_llama_config
from poss_jax.convert.names import DRAFT_EMBEDDING, FC, FC_BIAS, QUERY, source_key
from poss_jax.convert.published import PUBLISHED, find_published

METADATA = "poss_jax"
"""Where a config.json that we export holds what its layout has no key for."""

_FIRST = "specialists/0"
_KEY = source_key(_FIRST, ("attention", "k", "weight"))
_GATE = source_key(_FIRST, ("mlp", "gate", "weight"))

# Field of LlamaConfig -> the tensor whose presence shows it, and where config.json speaks of it.
_SHOWN_BY = {
    "qkv_bias": (source_key(_FIRST, ("attention", "q", "bias")), ("qkv_bias", "attention_bias")),
    "o_bias": (source_key(_FIRST, ("attention", "o", "bias")), ("attention_bias",)),
    "qk_norm": (source_key(_FIRST, ("attention", "q_norm", "scale")), ()),
    "mlp_bias": (source_key(_FIRST, ("mlp", "gate", "bias")), ("mlp_bias",)),
}


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class DraftMetadata:
    """What our exported config.json says under `METADATA`.

    Attributes:
      positions_per_specialist: see `DraftConfig`.
      trained_depth: see `DraftConfig`.
      draft_vocabulary: see `ModelRecord`.
    """

    positions_per_specialist: Spans
    trained_depth: Depth
    draft_vocabulary: tuple[CountOrZero, ...] | None = None


@dataclass(frozen=True)
class DraftReading:
    """What a draft's files amount to.

    Attributes:
      config: of the draft.
      draft_vocabulary: see `ModelRecord`.
      assumed: one line for each thing that the files do not say.
    """

    config: DraftConfig
    draft_vocabulary: tuple[int, ...] | None
    assumed: tuple[str, ...]


def read_draft_config(
    draft: DraftSource,
    *,
    positions_per_specialist: tuple[int, ...] | None = None,
    trained_depth: int | None = None,
) -> DraftReading:
    """Works out a draft's config.

    Args:
      draft: its files.
      positions_per_specialist: what the user says; None leaves it to the files.
      trained_depth: likewise.

    Raises:
      UserError: tensors and config.json contradict each other, or the positions per specialist are
        nowhere to be found.
    """
    layer, assumed = read_layer(draft)
    metadata = _read_metadata(draft)
    spans, depth, assumed_spans = _read_spans(
        draft, metadata, positions_per_specialist, trained_depth
    )
    values = {"layer": layer, "positions_per_specialist": spans, "trained_depth": depth}
    values |= {"fc_bias": FC_BIAS in draft.tensors}
    config = build_config(DraftConfig, values, origin=draft.origin)
    vocabulary = metadata.draft_vocabulary if metadata else None
    return DraftReading(config, vocabulary, (*assumed, *assumed_spans))


def read_layer(draft: DraftSource) -> tuple[LlamaConfig, list[str]]:
    """Reads the config of a draft's layers.

    Returns:
      The config, and what had to be assumed.

    Raises:
      UserError: a config.json we cannot run, or one that contradicts the tensors.
    """
    assumed: list[str] = []
    _check_num_layers(draft)
    if draft.values.get("model_type") is None:
        assumed.append("model_type llama, because config.json has none")
    # One layer each, whatever it says: specialists are counted by the spans.
    values: dict[str, Any] = {**draft.values, "num_hidden_layers": 1}
    values["model_type"] = values.get("model_type") or "llama"
    layer = parse_llama_config(values, {}, origin=f"{draft.origin}/config.json")
    _check_widths(draft, layer)
    shown, assumed_biases = _read_biases(draft, layer)
    rope = [values, values.get("rope_parameters") or {}]
    if all(part.get("rope_theta") is None for part in rope):
        assumed.append(f"rope theta {layer.rope.theta:g}, because config.json has none")
    if values.get("rms_norm_eps") is None:
        assumed.append(f"rms_norm_eps {layer.rms_norm_eps:g}, because config.json has none")
    return replace(layer, **shown), [*assumed, *assumed_biases]


def _check_num_layers(draft: DraftSource) -> None:
    """The original writes 1 whatever the number of specialists, other programs the number."""
    said = draft.values.get("num_hidden_layers")
    if said not in (None, 1, draft.num_layers):
        raise UserError(
            f"{draft.origin}: config.json says num_hidden_layers {shorten(said)}, the weights hold "
            f"{draft.num_layers} (or 1 may stand there); give the config.json that belongs to "
            "these weights"
        )


def _check_widths(draft: DraftSource, layer: LlamaConfig) -> None:
    """Compares the widths config.json gives with those of the tensors, by config.json's names."""
    heads = "num_attention_heads times head_dim"
    kv_heads = "num_key_value_heads times head_dim"
    for field, said, key in (
        ("hidden_size", layer.hidden_size, FC),
        (heads, layer.num_heads * layer.head_dim, QUERY),
        (kv_heads, layer.num_kv_heads * layer.head_dim, _KEY),
        ("intermediate_size", layer.intermediate_size, _GATE),
        ("vocab_size", layer.vocab_size, DRAFT_EMBEDDING),
    ):
        if key in draft.tensors and draft.tensors[key].shape[:1] != (said,):
            raise UserError(
                f"{draft.origin}: config.json says {field} {said}, the weights have "
                f"{draft.keys[key]} {list(draft.tensors[key].shape)}; give the config.json that "
                "belongs to these weights"
            )


def _read_biases(draft: DraftSource, layer: LlamaConfig) -> tuple[dict[str, bool], list[str]]:
    """Which biases and norms the tensors show, and what config.json did not say about them."""
    shown, assumed = {}, []
    for field, (key, spoken_of) in _SHOWN_BY.items():
        shown[field] = key in draft.tensors
        name = next((k for k in spoken_of if draft.values.get(k) is not None), None)
        said = draft.values[name] if name else getattr(layer, field)
        found = f"the weights hold {'a' if shown[field] else 'no'} {key}"
        if said == shown[field]:
            continue
        if name:
            raise UserError(
                f"{draft.origin}: config.json says {name} {shorten(said)}, {found}; give the "
                "config.json that belongs to these weights"
            )
        assumed.append(f"{field} {shown[field]}, because {found}")
    has_bias, said = FC_BIAS in draft.tensors, draft.values.get("bias")
    if has_bias != (said in (None, True)):
        says = "has no key bias, which means true" if said is None else f"says bias {shorten(said)}"
        assumed.append(
            f"fc with{'' if has_bias else 'out'} bias, because the weights hold "
            f"{'a' if has_bias else 'no'} {FC_BIAS}, although config.json {says}"
        )
    return shown, assumed


# --------------------------------------------------------------------------------------------------
# Spans


def _read_metadata(draft: DraftSource) -> DraftMetadata | None:
    values = draft.values.get(METADATA)
    if values is None:
        return None
    origin = f"{draft.origin}/config.json: {METADATA}"
    if not isinstance(values, Mapping):
        raise UserError(f"{origin}: want an object, got {shorten(values)}; export the draft again")
    return build_config(DraftMetadata, values, origin=origin)


def _read_spans(
    draft: DraftSource,
    metadata: DraftMetadata | None,
    asked: tuple[int, ...] | None,
    depth: int | None,
) -> tuple[tuple[int, ...], int, list[str]]:
    """Positions per specialist and trained depth, as asked, known or evident; what was assumed."""
    assumed: list[str] = []
    known, because = _known(draft, metadata)
    alone = (1,) if draft.num_layers == 1 else None
    spans = _check_spans(draft, asked or (known.positions_per_specialist if known else alone))
    if known and spans != known.positions_per_specialist:
        assumed.append(f"{_list(spans)} positions per specialist as asked, although {because}")
        known = None
    elif known and not metadata:
        assumed.append(f"{_list(spans)} positions per specialist, because {because}")
    if depth is not None:
        return spans, depth, assumed
    if known and metadata:
        return spans, metadata.trained_depth, assumed
    if known:
        told, why = known.trained_depth, because
    elif len(spans) == 1:
        told, why = 1, "a single layer does not say; for HASS give --trained-depth 3"
    else:
        told, why = sum(spans), "the positions per specialist add up to it"
    return spans, told, [*assumed, f"trained depth {told}, because {why}"]


def _known(draft: DraftSource, metadata: DraftMetadata | None) -> tuple[Any, str]:
    """What is known without asking the user (anything with spans and depth), and why."""
    if metadata is not None:
        said = _list(metadata.positions_per_specialist)
        return metadata, f"config.json says {said}, trained depth {metadata.trained_depth}"
    found = find_published(draft.source)
    if found is None:
        return None, ""
    hub_id, told_by = found
    published = PUBLISHED[hub_id]
    said = _list(published.positions_per_specialist)
    return published, (
        f"{told_by} is that of {hub_id}, published with {said}, trained depth "
        f"{published.trained_depth}"
    )


def _check_spans(draft: DraftSource, spans: tuple[int, ...] | None) -> tuple[int, ...]:
    name, num_layers = draft.origin, draft.num_layers
    if spans is not None and len(spans) == num_layers:
        return spans
    got = " and does not say which positions each drafts"
    if spans is not None:
        got = f", got {len(spans)} positions per specialist"
    raise UserError(
        f"{name} has {num_layers} specialists{got}; give {num_layers} counts, such as "
        f"--positions-per-specialist {_list((3,) * num_layers)}"
    )


def _list(counts: tuple[int, ...]) -> str:
    return ",".join(map(str, counts))
