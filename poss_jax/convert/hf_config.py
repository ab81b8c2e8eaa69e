"""Hugging Face's config.json -> LlamaConfig, read by our own code so that nothing is dropped."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from poss_jax.config import LlamaConfig, UserError, build_config, read_json, shorten
from poss_jax.convert.refusals import refuse_config

# Keys that must have one value, which is also what Hugging Face takes where they are absent.
_FIXED = {"hidden_act": "silu", "pretraining_tp": 1, "partial_rotary_factor": 1.0}

# What Hugging Face takes where a family's config.json has no such key.
_QWEN = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2},
    "mistral": {
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "qwen2": _QWEN,
    "qwen3": _QWEN | {"head_dim": 128},
}

# Required keys of each type of rope settings, by Hugging Face's names.
_ROPE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
}


def read_llama_config(folder: Path) -> LlamaConfig:
    """Reads config.json, and the stop tokens of generation_config.json.

    Raises:
      UserError: a missing or malformed file, or a model that we do not run.
    """
    path = folder / "config.json"
    generation = folder / "generation_config.json"
    return parse_llama_config(
        read_json(path), read_json(generation) if generation.is_file() else {}, origin=str(path)
    )


def parse_llama_config(
    values: Mapping[str, Any], generation: Mapping[str, Any], *, origin: str
) -> LlamaConfig:
    """Translates the contents of config.json.

    Args:
      values: of config.json, written by transformers 4 or 5.
      generation: of generation_config.json; its stop tokens replace those of `values`.
      origin: what the values came from, for messages.

    Raises:
      UserError: a missing key, or a value we do not support.
    """
    refuse_config(values, origin)
    family = str(values.get("model_type"))
    if family not in _FAMILIES:
        known = ", ".join(_FAMILIES)
        raise UserError(
            f"{origin}: model_type: want one of {known}, got {shorten(family)}; no other runs"
        )
    values = _FAMILIES[family] | dict(values)
    for key, want in _FIXED.items():
        got = _get(values, key, want)
        if got != want:
            raise UserError(f"{origin}: {key}: want {want!r}, got {shorten(got)}; no other runs")
    _refuse_sliding_window(values, origin)
    num_heads = _require(values, "num_attention_heads", origin)
    return build_config(
        LlamaConfig,
        {
            "vocab_size": _require(values, "vocab_size", origin),
            "hidden_size": _require(values, "hidden_size", origin),
            "intermediate_size": _require(values, "intermediate_size", origin),
            "num_layers": _require(values, "num_hidden_layers", origin),
            "num_heads": num_heads,
            "num_kv_heads": _get(values, "num_key_value_heads", num_heads),
            "head_dim": _head_dim(values, origin),
            "max_position_embeddings": _count(values, "max_position_embeddings", origin),
            "rms_norm_eps": _get(values, "rms_norm_eps", 1e-6),
            "rope": _parse_rope(values, origin),
            "tie_embeddings": _get(values, "tie_word_embeddings", False),
            **_biases_and_norms(values),
            "bos_token_id": values.get("bos_token_id"),
            "eos_token_ids": _stop_ids(generation) or _stop_ids(values),
        },
        origin=origin,
    )


def _biases_and_norms(values: Mapping[str, Any]) -> dict[str, Any]:
    """What tells the families apart; keys that a family's own code does not read do not count."""
    family = values["model_type"]
    bias = family in ("llama", "qwen3") and _get(values, "attention_bias", False)
    return {
        "qkv_bias": family == "qwen2" or bias,
        "o_bias": bias,
        "qk_norm": family == "qwen3",
        "mlp_bias": family == "llama" and _get(values, "mlp_bias", False),
    }


def _refuse_sliding_window(values: Mapping[str, Any], origin: str) -> None:
    """Refuses a window that any layer applies to texts as long as the model takes.

    Raises:
      UserError: names the window.
    """
    layer_types = values.get("layer_types") or []
    if not isinstance(layer_types, list) or any(kind != "full_attention" for kind in layer_types):
        raise UserError(
            f"{origin}: layer_types: want full_attention alone, got {shorten(layer_types)}; no "
            "other runs"
        )
    slides = values["model_type"] == "mistral"
    if values["model_type"] in ("qwen2", "qwen3") and not layer_types:
        first_layer = _count(values, "max_window_layers", origin)
        num_layers = _count(values, "num_hidden_layers", origin)
        slides = bool(values.get("use_sliding_window")) and first_layer < num_layers
    if not slides or values["sliding_window"] is None:
        return
    window = _count(values, "sliding_window", origin)
    if window < _count(values, "max_position_embeddings", origin):
        raise UserError(
            f"{origin}: a sliding window of {window} tokens is active, which cannot be run; for "
            f"texts of at most {window} tokens set sliding_window to null: they are read alike"
        )


def _count(values: Mapping[str, Any], key: str, origin: str) -> int:
    """A whole number that is given, or has a default in `_FAMILIES`."""
    count = _get(values, key, _FAMILIES[values["model_type"]].get(key))
    if not isinstance(count, int) or isinstance(count, bool):
        raise UserError(f"{origin}: {key}: want a count, got {shorten(count)}")
    return count


def _head_dim(values: Mapping[str, Any], origin: str) -> Any:
    if values.get("head_dim") is not None:
        return values["head_dim"]
    hidden_size, num_heads = values["hidden_size"], values["num_attention_heads"]
    if not (isinstance(hidden_size, int) and isinstance(num_heads, int) and num_heads > 0):
        raise UserError(
            f"{origin}: want counts, got {shorten(hidden_size)} over {shorten(num_heads)} heads"
        )
    if hidden_size % num_heads:
        raise UserError(
            f"{origin}: hidden_size {hidden_size} is no multiple of {num_heads} heads; add head_dim"
        )
    return hidden_size // num_heads


def _parse_rope(values: Mapping[str, Any], origin: str) -> dict[str, Any]:
    settings = _rope_settings(values, origin)
    kind = settings.pop("type")
    if not isinstance(kind, str) or kind not in _ROPE_KEYS:
        known = ", ".join(_ROPE_KEYS)
        raise UserError(
            f"{origin}: rope type: want one of {known}, got {shorten(kind)}; no other runs"
        )
    unknown = settings.keys() - {"rope_theta", *_ROPE_KEYS["llama3"]}
    missing = [key for key in _ROPE_KEYS[kind] if key not in settings]
    if unknown or missing:
        listed = [f"unknown {key}" for key in sorted(unknown)] + [f"no {key}" for key in missing]
        raise UserError(f"{origin}: rope type {kind} with {', '.join(listed)[:200]}; cannot be run")
    rope = {"type": kind, "theta": settings.get("rope_theta", 10000.0)}
    rope |= {key: settings[key] for key in _ROPE_KEYS[kind]}
    if kind == "dynamic":  # as transformers: the base grows beyond the model's own context
        rope["original_max_position_embeddings"] = _count(values, "max_position_embeddings", origin)
    return rope


def _rope_settings(values: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """Joins the spellings of transformers 4 (rope_theta, rope_scaling) and 5 (rope_parameters)."""
    joined: dict[str, Any] = {}
    top = {"rope_theta": values.get("rope_theta")}
    for part in (top, values.get("rope_scaling") or {}, values.get("rope_parameters") or {}):
        if not isinstance(part, dict):
            raise UserError(f"{origin}: rope settings: want an object, got {shorten(part)}")
        for key, value in part.items():
            name = "type" if key == "rope_type" else key
            if value is not None and joined.setdefault(name, value) != value:
                raise UserError(
                    f"{origin}: rope setting {key[:100]} is given as {shorten(joined[name])} and "
                    f"as {shorten(value)}; keep the one the model was trained with"
                )
    if joined.get("partial_rotary_factor") == 1.0:
        del joined["partial_rotary_factor"]
    return {"type": "default"} | joined


def _stop_ids(values: Mapping[str, Any]) -> tuple[Any, ...]:
    ids = values.get("eos_token_id")
    if ids is None:
        return ()
    return tuple(ids) if isinstance(ids, list) else (ids,)


def _require(values: Mapping[str, Any], key: str, origin: str) -> Any:
    if values.get(key) is None:
        raise UserError(f"{origin}: {key} is missing; want the model's own config.json")
    return values[key]


def _get(values: Mapping[str, Any], key: str, default: Any) -> Any:
    """Like `get`, but an explicit null means the default too, as in Hugging Face's files."""
    value = values.get(key)
    return default if value is None else value
