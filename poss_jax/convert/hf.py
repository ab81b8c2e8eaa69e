"""Reads config.json of Hugging Face and of the original code into our configs.

It uses our own tables of names and defaults, so that nothing is dropped unnoticed: the classes of
`transformers` keep keys they do not know, and take seconds to import.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from poss_jax.config.json_reading import read_json
from poss_jax.config.models import DraftConfig, LlamaConfig
from poss_jax.config.reading import UserError, build_config, shorten
from poss_jax.convert.reading import NAMED_EAGLE3, Reading, check_keys, read_metadata, read_weights
from poss_jax.convert.rope import read_rope
from poss_jax.convert.source import Source
from poss_jax.convert.tensors import (
    DRAFT_EMBEDDING,
    DRAFT_HEAD,
    FC,
    FC_BIAS,
    HEAD,
    QUERY,
    slots_by_key,
    source_key,
)

# Field of LlamaConfig -> key of config.json; the first five are required.
CONFIG_KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "max_position_embeddings": "max_position_embeddings",
}
_REQUIRED = list(CONFIG_KEYS.values())[:5]

# Keys that must have one value, which is also what Hugging Face takes where they are absent.
_FIXED = {"hidden_act": "silu", "pretraining_tp": 1, "partial_rotary_factor": 1.0}

# What Hugging Face takes where a family's config.json has no such key.
_QWEN = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_LLAMA = {"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2}
_MISTRAL = {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096}
_PHI3 = {
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
    "sliding_window": None,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 32000,
}
_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "mistral": _LLAMA | _MISTRAL,
    "qwen2": _QWEN,
    "qwen3": _QWEN | {"head_dim": 128},
    "phi3": _PHI3,
}


# --------------------------------------------------------------------------------------------------
# Reading: targets, and the layer of a draft


def read_target(source: Source) -> Reading:
    """Reads a target of the Llama family in Hugging Face's layout.

    Raises:
      UserError: a missing or malformed file, or a model that cannot be converted.
    """
    path = source.folder / "generation_config.json"
    generation = read_json(path) if path.is_file() else {}
    config = parse_llama_config(source.values, generation, origin=source.config_name)
    slots = slots_by_key(config)
    buffers = [key for key in source.tensors if key.endswith("self_attn.rotary_emb.inv_freq")]
    dropped = dict.fromkeys(buffers, "follows from the config")  # old checkpoints hold them
    optional: dict[str, tuple[int, ...]] = dict.fromkeys(buffers, (config.head_dim // 2,))
    if config.tie_embeddings and HEAD in source.tensors:
        dropped[HEAD] = "tied to the embedding"
        optional[HEAD] = (config.vocab_size, config.hidden_size)
    check_keys(str(source.folder), source.tensors, slots, optional)
    return Reading(source, config, slots, dropped)


def parse_llama_config(
    values: Mapping[str, Any], generation: Mapping[str, Any], *, origin: str
) -> LlamaConfig:
    """Translates the contents of config.json.

    Args:
      values: contents of config.json, written by transformers 4 or 5.
      generation: contents of generation_config.json; its stop tokens win.

    Raises:
      UserError: a missing key, or an unsupported value.
    """
    family = str(values.get("model_type"))
    if family not in _FAMILIES:
        families = ", ".join(_FAMILIES)
        raise UserError(
            f"{origin}: model_type: want one of {families}, got {shorten(family)}; models of other "
            "types cannot be converted"
        )
    values = _FAMILIES[family] | dict(values)
    for key, want in _FIXED.items():
        got = _get(values, key, want)
        if got != want:
            raise UserError(
                f"{origin}: {key}: want {want!r}, got {shorten(got)}; models with another value "
                "cannot be converted"
            )
    _refuse_sliding_window(values, origin)
    for key in _REQUIRED:
        if values.get(key) is None:
            raise UserError(f"{origin}: {key} is missing; want the model's own config.json")
    hidden_size, num_heads = values["hidden_size"], values["num_attention_heads"]
    are_counts = all(isinstance(size, int) and size > 0 for size in (hidden_size, num_heads))
    head_dim = hidden_size // num_heads if are_counts else None  # refused with the other numbers
    longest = _count(values, "max_position_embeddings", origin)
    return build_config(
        LlamaConfig,
        {
            **{field: values[key] for field, key in CONFIG_KEYS.items() if key in _REQUIRED},
            "num_kv_heads": _get(values, "num_key_value_heads", num_heads),
            "head_dim": _get(values, "head_dim", head_dim),
            "max_position_embeddings": longest,
            "rms_norm_eps": _get(values, "rms_norm_eps", 1e-6),
            "rope": read_rope(values, longest, origin),
            "tie_embeddings": _get(values, "tie_word_embeddings", False),
            **_differences(values),
            "bos_token_id": values.get("bos_token_id"),
            "eos_token_ids": _stop_ids(generation) or _stop_ids(values),
        },
        origin=origin,
        given_as=_names_of_keys(origin, has_generation=bool(_stop_ids(generation))),
    )


def _names_of_keys(origin: str, *, has_generation: bool) -> dict[str, str]:
    """Names the fields of a target as its files do."""
    names = CONFIG_KEYS | {"eos_token_ids": "eos_token_id", "rope.theta": "rope_theta"}
    names |= {"tie_embeddings": "tie_word_embeddings"}
    given_as = {field: f"{origin}: {key}" for field, key in names.items()}
    if has_generation:
        file = f"{origin.removesuffix('config.json')}generation_config.json"
        given_as["eos_token_ids"] = f"{file}: eos_token_id"
    return given_as


def _differences(values: Mapping[str, Any]) -> dict[str, Any]:
    """Tells the families apart; keys that a family's own code does not read do not count."""
    family = values["model_type"]
    bias = family in ("llama", "qwen3") and _get(values, "attention_bias", False)
    return {
        "qkv_bias": family == "qwen2" or bias,
        "o_bias": bias,
        "qk_norm": family == "qwen3",
        "mlp_bias": family == "llama" and _get(values, "mlp_bias", False),
        "fused_projections": family == "phi3",
    }


def _refuse_sliding_window(values: Mapping[str, Any], origin: str) -> None:
    """Refuses a sliding window that cuts the context of any layer."""
    layer_types, kinds = values.get("layer_types") or [], ("full_attention", "sliding_attention")
    if not isinstance(layer_types, list) or any(kind not in kinds for kind in layer_types):
        raise UserError(
            f"{origin}: layer_types: want {' or '.join(kinds)}, got {shorten(layer_types)}; models "
            "with other layers cannot be converted"
        )
    is_said = "sliding_attention" in layer_types
    slides = is_said or values["model_type"] in ("mistral", "phi3")
    if values["model_type"] in ("qwen2", "qwen3") and not layer_types:
        first_layer = _count(values, "max_window_layers", origin)
        num_layers = _count(values, "num_hidden_layers", origin)
        slides = bool(values.get("use_sliding_window")) and first_layer < num_layers
    if not slides or (values.get("sliding_window") is None and not is_said):
        return
    window = _count(values, "sliding_window", origin)
    if window < _count(values, "max_position_embeddings", origin):
        raise UserError(
            f"{origin}: a sliding window of {window} tokens is active, which is not supported; if "
            f"your texts have at most {window} tokens, "
            f"{'write full_attention alone' if is_said else 'set sliding_window to null'}, which "
            "changes nothing for them"
        )


def _count(values: Mapping[str, Any], key: str, origin: str) -> int:
    """Reads a whole number that is given, or has a default in `_FAMILIES`."""
    count = _get(values, key, _FAMILIES[values["model_type"]].get(key))
    if not isinstance(count, int) or isinstance(count, bool):
        raise UserError(f"{origin}: {key}: want a count, got {shorten(count)}")
    return count


def _stop_ids(values: Mapping[str, Any]) -> tuple[Any, ...]:
    ids = values.get("eos_token_id")
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, list) else (ids,)


def _get(values: Mapping[str, Any], key: str, default: Any) -> Any:
    """Like `get`, but an explicit null means the default too, as in Hugging Face's files."""
    value = values.get(key)
    return default if value is None else value


# --------------------------------------------------------------------------------------------------
# Reading: drafts, whose weights show some of what config.json leaves out

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
        raise contradiction(source, f"EAGLE-3 ({name})", layout)
    layer, assumed = read_layer(source)
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
    values |= {"positions_per_specialist": (1,) * count_layers(source)}
    config = build_config(DraftConfig, values, origin=str(source.folder))
    return read_weights(source, config, copies=_COPIES, assumed=tuple(assumed), metadata=metadata)


def contradiction(source: Source, config_value: str, weights: str) -> UserError:
    """Makes the error for a draft whose config.json contradicts its weights; it names both."""
    return UserError(
        f"{source.folder}: config.json says {config_value}, the weights {weights}; give the "
        "config.json that belongs to these weights"
    )


def count_layers(source: Source) -> int:
    """Counts a draft's layers, at least 1, so that the keys of a missing layer are listed."""
    return max(1, len({match[1] for match in map(_LAYER.match, source.names) if match}))


def read_window(source: Source) -> int | None:
    """Reads how many of the newest rows a draft's layers attend; None: all.

    As in speculators and vLLM, only `layer_types` makes a draft's layers slide.

    Raises:
      UserError: only some of the layers do.
    """
    values, num_layers = source.settings, count_layers(source)
    kinds, origin = values.get("layer_types"), f"{source.folder}/config.json"
    if not isinstance(kinds, list) or "sliding_attention" not in (kinds := kinds[:num_layers]):
        return None
    window, longest = (values.get(key) for key in ("sliding_window", "max_position_embeddings"))
    if type(window) is not int or (type(longest) is int and window >= longest):
        return None  # the config of the layers is checked by `read_layer`
    if kinds != ["sliding_attention"] * num_layers:
        raise UserError(
            f"{origin}: layer_types: want one kind for all {num_layers} layers of a draft, got "
            f"{shorten(kinds)}; such drafts cannot be converted"
        )
    return window


def read_layer(source: Source, *, window: int | None = None) -> tuple[LlamaConfig, list[str]]:
    """Reads the config of a draft's layers; `window` is what `read_window` found.

    Returns:
      The config, and one line for each thing that had to be assumed.

    Raises:
      UserError: an unsupported config.json, or one that contradicts the tensors.
    """
    stated, num_layers = source.settings.get("num_hidden_layers"), count_layers(source)
    # The original always writes 1, other programs the number of specialists.
    if stated not in (None, 1, num_layers):
        weights = f"hold {num_layers} (or 1 may stand there)"
        raise contradiction(source, f"num_hidden_layers {shorten(stated)}", weights)
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
            raise contradiction(source, f"{field} {width}", weights)
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
            raise contradiction(source, f"{name} {shorten(stated)}", weights)
        assumed.append(f"{field} {shown[field]}, because the weights {weights}")
    return shown, assumed
