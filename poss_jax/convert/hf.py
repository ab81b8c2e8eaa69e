"""Reads config.json of Hugging Face and of the original code; writes its rope.

It uses our own tables of names and defaults, so that nothing is dropped unnoticed: the classes of
`transformers` keep keys they do not know, and take seconds to import.
"""

import math
from collections.abc import Mapping
from typing import Any

from poss_jax.config.json_reading import read_json
from poss_jax.config.models import LlamaConfig
from poss_jax.config.reading import UserError, build_config, shorten
from poss_jax.convert.reading import HEAD, Reading, check_keys, slots_by_key
from poss_jax.convert.source import Source

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
# Targets, and the layer of a draft


def read_target(source: Source) -> Reading:
    """Reads a target of the Llama family in Hugging Face's layout; refuses any other."""
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
            "rope": _read_rope(values, longest, origin),
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
# The rope, in the spellings of transformers 4 and 5

_TRAINED = "original_max_position_embeddings"

# Keys that each type of rope has, and must have, by Hugging Face's names.
_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", _TRAINED)
_LONGROPE = ("short_factor", "long_factor", _TRAINED)
_ROPE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": _LLAMA3,
    "longrope": _LONGROPE,
    "yarn": ("factor", _TRAINED),
}

# Keys that change nothing for the types that do not have them, and keys that a type may have.
_ROPE_ALWAYS = {"rope_theta", *_LLAMA3}
_YARN = ("attention_factor", "beta_fast", "beta_slow", "truncate")
_ROPE_OPTIONAL = {
    "longrope": {*_LONGROPE, "attention_factor"},
    "yarn": {*_YARN, "mscale", "mscale_all_dim"},
}


def _read_rope(values: Mapping[str, Any], longest: int, origin: str) -> dict[str, Any]:
    """Reads the fields of `RopeConfig`; `longest` is the model's max_position_embeddings."""
    settings = _join_spellings(values, origin)
    kind = settings.pop("type")
    if kind == "yarn":
        settings = {_TRAINED: longest} | settings  # as transformers
    if not isinstance(kind, str) or kind not in _ROPE_KEYS:
        kinds = ", ".join(_ROPE_KEYS)
        raise UserError(
            f"{origin}: rope type: want one of {kinds}, got {shorten(kind)}; other types are not "
            "supported"
        )
    unknown = settings.keys() - _ROPE_ALWAYS - _ROPE_OPTIONAL.get(kind, set())
    missing = [key for key in _ROPE_KEYS[kind] if key not in settings]
    if unknown or missing:
        listed = [f"unknown {key}" for key in sorted(unknown)] + [f"no {key}" for key in missing]
        raise UserError(
            f"{origin}: rope type {kind} with {', '.join(listed)[:200]}; give the model's own "
            "config.json (other settings are not supported)"
        )
    rope = {"type": kind, "theta": settings.get("rope_theta", 10000.0)}
    rope |= {key: settings[key] for key in _ROPE_KEYS[kind]}
    if kind == "dynamic":  # as transformers: the base grows beyond the model's own context
        rope[_TRAINED] = longest
    if kind == "longrope":
        rope["factor"] = _read_stretch(settings, longest, origin)
        rope["attention_factor"] = settings.get("attention_factor")
    if kind == "yarn":
        rope |= {key: settings[key] for key in _YARN if key in settings}
        rope.setdefault("attention_factor", _read_scales(settings, origin))
    return rope


def _read_scales(settings: Mapping[str, Any], origin: str) -> float | None:
    """Joins DeepSeek's two scales of a yarn rope to an attention factor, if there are both."""
    names = ("factor", "mscale", "mscale_all_dim")
    numbers = [settings.get(name) or 0 for name in names]
    if not all(isinstance(number, int | float) and number >= 0 for number in numbers):
        raise UserError(
            f"{origin}: rope type yarn: want numbers, got {', '.join(names)} "
            f"{', '.join(map(shorten, numbers))}"
        )
    factor, *scales = numbers
    if not all(scales):
        return None
    above, below = (1 + 0.1 * scale * math.log(max(factor, 1)) for scale in scales)
    return above / below


def _read_stretch(settings: Mapping[str, Any], longest: int, origin: str) -> float:
    """Divides the longest context by the trained one, which a longrope's factor must equal."""
    trained = settings[_TRAINED]
    if type(trained) is not int or trained < 1:
        raise UserError(f"{origin}: {_TRAINED}: want a count, got {shorten(trained)}")
    stretch = min(longest, 2**31) / trained  # so large a context is refused with the other numbers
    if (factor := settings.get("factor", stretch)) != stretch:
        raise UserError(
            f"{origin}: rope type longrope with factor {shorten(factor)}: want "
            f"max_position_embeddings over {_TRAINED} ({stretch:g}); "
            "versions of transformers disagree about any other"
        )
    return stretch


def _join_spellings(values: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """Joins rope_theta and rope_scaling (transformers 4) with rope_parameters (5)."""
    joined: dict[str, Any] = {}
    top = {key: values.get(key) for key in ("rope_theta", _TRAINED)}
    for section in (top, values.get("rope_scaling") or {}, values.get("rope_parameters") or {}):
        if not isinstance(section, dict):
            raise UserError(f"{origin}: rope settings: want an object, got {shorten(section)}")
        for key, value in section.items():
            name = "type" if key == "rope_type" else key
            if (name, value) == ("type", "su"):  # of the first Phi-3 checkpoints
                value = "longrope"
            if value is not None and joined.setdefault(name, value) != value:
                raise UserError(
                    f"{origin}: rope setting {key[:100]} is given as {shorten(joined[name])} and "
                    f"as {shorten(value)}; keep the one the model was trained with"
                )
    if joined.get("partial_rotary_factor") == 1.0:
        del joined["partial_rotary_factor"]
    return {"type": "default"} | joined


def write_rope(config: LlamaConfig) -> dict[str, Any]:
    """Writes rope_theta and rope_scaling (transformers 4), and rope_parameters (5).

    Raises:
      UserError: transformers has no such rope.
    """
    rope, trained = config.rope, config.rope.original_max_position_embeddings
    longest = config.max_position_embeddings
    if rope.type == "dynamic" and trained != longest:  # Hugging Face has one number for both
        raise UserError(
            f"rope type dynamic: transformers takes max_position_embeddings ({longest}) for the "
            f"trained context ({trained}); such a target stays with poss_jax"
        )
    if rope.type == "longrope" and rope.factor != longest / trained:
        raise UserError(
            f"rope type longrope: transformers takes max_position_embeddings ({longest}) over the "
            f"trained context ({trained}) for the factor ({rope.factor:g}); such a target stays "
            "with poss_jax"
        )
    scaling = {key: getattr(rope, key) for key in _ROPE_KEYS[rope.type]}
    scaling |= {key: getattr(rope, key) for key in (_YARN if rope.type == "yarn" else ())}
    if rope.type == "longrope":
        scaling["attention_factor"] = rope.attention_factor
    scaling = {key: value for key, value in scaling.items() if value is not None}
    old = {"type": rope.type, "rope_type": rope.type} | scaling
    if config.fused_projections:  # in transformers 4, Phi-3 refuses these two keys there
        old = {key: old[key] for key in old if key not in ("rope_type", _TRAINED)}
    return {
        "rope_theta": rope.theta,
        "rope_scaling": old if scaling else None,
        "rope_parameters": {"rope_type": rope.type, "rope_theta": rope.theta} | scaling,
        **({_TRAINED: trained} if rope.type == "longrope" else {}),
    }
