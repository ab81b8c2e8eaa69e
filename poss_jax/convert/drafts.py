"""The readers of drafts, whose weights show some of what config.json leaves out; EAGLE-3's signs.

EAGLE-3's layers are called `midlayer.`, `midlayers.N.` or `layers.N.`; `plain_name` makes them one.
Keys of config.json that producers disagree about are read as the producer of the file means them:
speculators is known by its `speculators_model_type`, all others follow SpecForge.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from poss_jax.config.models import DraftConfig, LlamaConfig
from poss_jax.config.reading import UserError, build_config, shorten
from poss_jax.convert.hf import parse_llama_config
from poss_jax.convert.reading import (
    DRAFT_EMBEDDING,
    DRAFT_HEAD,
    FC,
    FC_BIAS,
    NAMED_EAGLE3,
    QUERY,
    Reading,
    read_metadata,
    read_weights,
    source_key,
)
from poss_jax.convert.source import Source
from poss_jax.model.families.eagle3 import default_aux_layers

# --------------------------------------------------------------------------------------------------
# EAGLE, EAGLE-2, HASS and PosS; the layers of any draft

_LAYER = re.compile(r"(?:mid)?layers\.(\d+)\.")
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

# Copies of the target's weights that some layouts of drafts hold: key -> item of the target.
_COPIES = {DRAFT_EMBEDDING: "embed", DRAFT_HEAD: "head"}


def read_draft(source: Source) -> Reading:
    """Reads an EAGLE, EAGLE-2, HASS or PosS draft, with or without a wrapper and prefixes."""
    if (name := NAMED_EAGLE3(source)) is not None:
        layout = f"have EAGLE-2's layout ({QUERY} {list(source.shapes[QUERY])})"
        raise _contradiction(source, f"EAGLE-3 ({name})", layout)
    layer, assumed = _read_layer(source)
    has_bias, stated = FC_BIAS in source.names, source.settings.get("bias")
    if has_bias != (stated in (None, True)):
        says = f"says bias {shorten(stated)}"
        says = "has no key bias, which means true" if stated is None else says
        what = ("with", "a") if has_bias else ("without", "no")
        line = "fc {} bias, because the weights hold {} {}, although config.json {}"
        assumed.append(line.format(*what, FC_BIAS, says))
    metadata = read_metadata(source)
    kv = (metadata and metadata.kv) or "per_specialist"
    values = {"layer": layer, "fc_bias": has_bias, "kv": kv}
    values |= {"positions_per_specialist": (1,) * _count_layers(source)}
    config = build_config(DraftConfig, values, origin=str(source.folder))
    return read_weights(source, config, copies=_COPIES, assumed=tuple(assumed), metadata=metadata)


def _contradiction(source: Source, config_value: str, weights: str) -> UserError:
    """Makes the error for a draft whose config.json contradicts its weights; it names both."""
    return UserError(
        f"{source.folder}: config.json says {config_value}, the weights {weights}; give the "
        "config.json that belongs to these weights"
    )


def _count_layers(source: Source) -> int:
    """Counts a draft's layers, at least 1, so that the keys of a missing layer are listed."""
    return max(1, len({match[1] for match in map(_LAYER.match, source.names) if match}))


def _read_window(source: Source) -> int | None:
    """Reads how many of the newest rows a draft's layers attend; None: all.

    As in speculators and vLLM, only `layer_types` makes a draft's layers slide.
    """
    values, num_layers = source.settings, _count_layers(source)
    kinds, origin = values.get("layer_types"), f"{source.folder}/config.json"
    if not isinstance(kinds, list) or "sliding_attention" not in (kinds := kinds[:num_layers]):
        return None
    window, longest = (values.get(key) for key in ("sliding_window", "max_position_embeddings"))
    if type(window) is not int or (type(longest) is int and window >= longest):
        return None  # the config of the layers is checked by `_read_layer`
    if kinds != ["sliding_attention"] * num_layers:
        raise UserError(
            f"{origin}: layer_types: want one kind for all {num_layers} layers of a draft, got "
            f"{shorten(kinds)}; such drafts cannot be converted"
        )
    return window


def _read_layer(source: Source, *, window: int | None = None) -> tuple[LlamaConfig, list[str]]:
    """Reads the config of a draft's layers, and what had to be assumed.

    `window` is what `_read_window` found. A config.json that contradicts the tensors is refused.
    """
    stated, num_layers = source.settings.get("num_hidden_layers"), _count_layers(source)
    # The original always writes 1, other programs the number of specialists.
    if stated not in (None, 1, num_layers):
        weights = f"hold {num_layers} (or 1 may stand there)"
        raise _contradiction(source, f"num_hidden_layers {shorten(stated)}", weights)
    # `layer` is one layer; the spans count the specialists.
    values: dict[str, Any] = {**source.settings, "num_hidden_layers": 1}
    values["model_type"] = values.get("model_type") or "llama"
    if window is not None:
        values |= {"layer_types": None, "sliding_window": None, "use_sliding_window": False}
    layer = parse_llama_config(values, {}, origin=f"{source.folder}/config.json")
    for field, width, key in (
        ("hidden_size", layer.hidden_size, FC),
        ("num_attention_heads times head_dim", layer.num_heads * layer.head_dim, QUERY),
        ("num_key_value_heads times head_dim", layer.num_kv_heads * layer.head_dim, _KEY),
        ("intermediate_size", layer.intermediate_size, _GATE),
        ("vocab_size", layer.vocab_size, DRAFT_EMBEDDING),
    ):
        if source.shapes.get(key, (width,))[:1] != (width,):
            weights = f"have {source.names[key]} {list(source.shapes[key])}"
            raise _contradiction(source, f"{field} {width}", weights)
    assumed: list[str] = []
    if source.settings.get("model_type") is None:
        assumed.append("model_type llama, because config.json has none")
    shown, assumed_biases = _read_biases(source, layer)
    rope = [values, values.get("rope_parameters") or {}]
    if all(section.get("rope_theta") is None for section in rope):
        assumed.append(f"rope theta {layer.rope.theta:g}, because config.json has none")
    if values.get("rms_norm_eps") is None:
        assumed.append(f"rms_norm_eps {layer.rms_norm_eps:g}, because config.json has none")
    layer = replace(layer, fused_projections=False, **shown)  # no layout of drafts has them
    return layer, [*assumed, *assumed_biases]


def _read_biases(source: Source, layer: LlamaConfig) -> tuple[dict[str, bool], list[str]]:
    """Reads from the tensors which biases and norms there are, and what had to be assumed."""
    shown, assumed = {}, []
    for field, (key, spoken_of) in _SHOWN_BY.items():
        shown[field] = key in source.names
        name = next((k for k in spoken_of if source.settings.get(k) is not None), None)
        stated = source.settings[name] if name else getattr(layer, field)
        weights = f"hold {'a' if shown[field] else 'no'} {key}"
        if stated == shown[field]:
            continue
        if name:
            raise _contradiction(source, f"{name} {shorten(stated)}", weights)
        assumed.append(f"{field} {shown[field]}, because the weights {weights}")
    return shown, assumed


# --------------------------------------------------------------------------------------------------
# EAGLE-3 and PosS on it: the signs

AUX_KEY = "eagle_aux_hidden_state_layer_ids"
"""Key of the layers of the target that a draft reads."""

# Inner states of the target, in the config of a draft that leaves them to the target's depth.
_UNPLACED = (0, 0, 0)

# Keys that are read by themselves -> the reason why they are not stored.
_MAPS = {"d2t": "becomes the draft vocabulary", "t2d": "follows from d2t"}

# Keys of the token at positions that P-EAGLE does not know yet.
_MASKS = ("mask_token_id", "pard_token", "ptd_token_id")

# Norms before fc: `DraftConfig.fc_norm` -> the key of config.json and the weight that show it.
_FC_NORMS = {
    "whole": ("norm_before_fc", "input_norm.weight"),
    "each": ("fc_norm", "fc_norm.0.weight"),
}


def has_eagle3_weights(source: Source) -> str | None:
    """Tells EAGLE-3 by its names, or by twice or three times the width."""
    shapes = source.shapes
    fc_shape = shapes.get(FC, ())
    wide = (
        f"{key} {list(shapes[key])}"
        for key, times in ((FC, 3), (QUERY, 2))
        if len(fc_shape) == 2 and shapes.get(key, ())[1:] == (times * fc_shape[0],)
    )
    names = re.compile(r"(^|\.)(midlayers?\.|d2t$|t2d$|layers\.\d+\.hidden_norm\.)")
    return next(filter(names.search, source.names.values()), None) or next(wide, None)


def has_eagle3_config(source: Source) -> str | None:
    """Tells EAGLE-3 by its config.json, unless the weights have EAGLE-2's layout."""
    is_eagle2 = {FC, QUERY} <= source.names.keys()
    return None if is_eagle2 else NAMED_EAGLE3(source)


def _is_of_speculators(source: Source) -> bool:
    return source.values.get("speculators_model_type") is not None


# --------------------------------------------------------------------------------------------------
# Their reader


def read_eagle3(source: Source) -> Reading:
    """Reads an EAGLE-3 draft, or PosS on EAGLE-3, of any producer."""
    origin = str(source.folder)
    window = _read_window(source)
    layer, assumed = _read_layer(source, window=window)
    layer = replace(layer, tie_embeddings=False)  # its head is its own
    settings, more = _read_settings(source, layer.hidden_size)
    values = {"layer": layer, "family": "eagle3", "kv": "shared", **settings}
    values |= {} if window is None else {"window": window, "num_sinks": 0}
    num_layers = _count_layers(source)
    # In a stack later layers read hidden states alone, unlike PosS's specialists.
    normed = [name for name in source.names if name.endswith(".hidden_norm.weight")]
    is_stack = num_layers > 1 and normed == ["layers.0.hidden_norm.weight"]
    values |= {"positions_per_specialist": (1,) * (1 if is_stack else num_layers)}
    values |= {"layers_per_specialist": (num_layers,)} if is_stack else {}
    given_as = {"target_size": f"{origin}/config.json: target_hidden_size"}
    config = build_config(DraftConfig, values, origin=origin, given_as=given_as)
    return read_weights(
        source,
        config,
        copies={} if config.has_embedding else {DRAFT_EMBEDDING: "embed"},
        dropped=_MAPS,
        kind=": read as an EAGLE-3 draft",
        assumed=(*assumed, *more, *_assume_sound_training(source)),
        metadata=read_metadata(source),
        read_vocabulary=partial(_read_vocabulary, source, config),
        usual_aux_layers=default_aux_layers if config.aux_layers == _UNPLACED else None,
    )


def _read_settings(source: Source, hidden_size: int) -> tuple[dict[str, Any], list[str]]:
    """Reads the fields of `DraftConfig` beyond the layer, and what had to be assumed."""
    fc_norm, assumed = _read_fc_norm(source)
    head_size, target_size = _find(source, "draft_vocab_size"), _find(source, "target_hidden_size")
    settings: dict[str, Any] = {
        "head_size": source.settings.get("vocab_size") if head_size is None else head_size,
        "norm_before_residual": _read_flag(source, "norm_before_residual") or False,
        "fc_norm": fc_norm,
        "output_norm": "head",
        "aux_layers": _read_aux_layers(source),
    }
    # `norm_output`, which parts use normed features, means different things to two producers.
    norm_output = _read_flag(source, "norm_output")
    if _is_of_speculators(source):
        settings["output_norm"] = "fed_back" if norm_output else "head"
        if _find(source, "norm_before_residual") is None:
            assumed.append("norm_before_residual False, because config.json has none")
    elif norm_output is not None:
        settings["output_norm"] = "head" if norm_output else None
        meaning = "the head reads normed features, specialists raw ones"
        meaning = meaning if norm_output else "no norm at all"
        why = "SpecForge means that (speculators does not)"
        assumed.append(f"norm_output {norm_output}: {meaning}, because {why}")
    # P-EAGLE drafts all positions in one pass.
    kind = source.values.get("speculators_model_type")
    is_parallel = kind == "peagle" or "mask_hidden" in source.names
    if target_size not in (None, hidden_size):
        settings |= {"target_size": target_size, "has_embedding": True}
    else:  # an embedding of its own only if it was trained: other files hold a copy
        flag = _read_flag(source, "embed_requires_grad")
        is_trained = is_parallel if flag is None else flag
        settings["has_embedding"] = is_trained and DRAFT_EMBEDDING in source.names
    if is_parallel:
        tokens = [token for key in _MASKS if (token := _find(source, key)) is not None]
        if not tokens:
            raise UserError(
                f"{source.folder}/config.json: want {' or '.join(_MASKS)}, the token that drafted "
                "positions read in training, got none; add it"
            )
        settings["mask_token"] = tokens[0]
    return settings, assumed


def _read_fc_norm(source: Source) -> tuple[str | None, list[str]]:
    """Reads which norms come before fc, from the weights and config.json, which must agree."""
    kinds, assumed = [], []
    for kind, (key, weight) in _FC_NORMS.items():
        flag, is_there = _read_flag(source, key), weight in source.names
        weights = f"hold {'' if is_there else 'no '}{weight}"
        if flag not in (None, is_there):
            raise _contradiction(source, f"{key} {flag}", weights)
        if is_there:
            kinds.append(kind)
            assumed += [f"{key} True, because the weights {weights}"] if flag is None else []
    return next(iter(kinds), None), assumed


def _read_aux_layers(source: Source) -> tuple[int, ...]:
    """Reads the layers of the target whose inputs a draft reads."""
    origin = f"{source.folder}/config.json"
    at_top, inside = source.values.get(AUX_KEY), _eagle_config(source).get(AUX_KEY)
    if _is_of_speculators(source):
        return _check_layers(at_top, origin)
    if at_top is not None and inside is None:
        raise UserError(
            f"{origin}: {AUX_KEY}: want it inside of eagle_config, as SpecForge writes it; "
            "elsewhere the same numbers mean other layers"
        )
    # SpecForge counts the layers whose outputs it takes; an output is the next layer's input.
    layers = _check_layers(inside, origin, shift=1)
    if at_top is not None and _check_layers(at_top, origin) != layers:
        raise UserError(
            f"{origin}: {AUX_KEY}: want {list(layers)} at the top, as vLLM counts eagle_config's "
            f"{shorten(inside)}, got {shorten(at_top)}; keep the list that it was trained with"
        )
    return layers


def _check_layers(layers: Any, origin: str, *, shift: int = 0) -> tuple[int, ...]:
    if layers is None:
        return _UNPLACED
    if not isinstance(layers, list) or not all(type(n) is int and n >= 0 for n in layers):
        raise UserError(f"{origin}: {AUX_KEY}: want a list of layers, got {shorten(layers)}")
    return tuple(layer + shift for layer in layers)


def _assume_sound_training(source: Source) -> list[str]:
    """Names faults of SpecForge's training that the files of a draft do not show."""
    is_inner = any(key.startswith("midlayer.") for key in source.tensors)
    is_modelopt = "use_aux_hidden_state" in _eagle_config(source)
    if read_metadata(source) or not is_inner or is_modelopt or NAMED_EAGLE3(source) is None:
        return []
    return [
        "training outside of the weeks in which SpecForge trained wrongly (docs/checkpoints.md), "
        "because the files do not say when it was"
    ]


def _eagle_config(source: Source) -> Mapping[str, Any]:
    inner = source.settings.get("eagle_config")
    return inner if isinstance(inner, Mapping) else {}


def _find(source: Source, key: str) -> Any:
    """Finds a key of config.json, in any of the places that producers put it; None without it."""
    places = (source.values, source.settings, _eagle_config(source))
    return next((section[key] for section in places if section.get(key) is not None), None)


def _read_flag(source: Source, key: str) -> bool | None:
    flag = _find(source, key)
    if flag is not None and not isinstance(flag, bool):
        raise UserError(
            f"{source.folder}/config.json: {key}: want true or false, got {shorten(flag)}"
        )
    return flag


def _read_vocabulary(source: Source, config: DraftConfig) -> tuple[int, ...] | None:
    """Reads the target id of every token of a draft's head; None: it has them all."""
    V, Vd = config.layer.vocab_size, config.head_size
    if Vd in (None, V):  # the original then ignores the maps
        return None
    offsets = source.tensors.get(source.names.get("d2t", ""))
    if offsets is None or (offsets.dtype, offsets.shape) != ("int64", (Vd,)):
        got = "none" if offsets is None else f"{offsets.dtype} {list(offsets.shape)}"
        raise UserError(
            f"{source.folder}: draft_vocab_size {Vd} of {V} tokens: d2t, which says of which: want "
            f"int64 [{Vd}], got {got}; give the draft's own files"
        )
    ids = offsets.read() + np.arange(Vd)
    if ids.min() < 0 or ids.max() >= V or (np.diff(ids) <= 0).any():
        raise UserError(
            f"{source.folder}: d2t: want the offsets of {Vd} ascending ids below {V}; the file is "
            "damaged, or belongs to another draft"
        )
    return tuple(ids.tolist())
