"""Reads and writes the rope of config.json, in the spellings of transformers 4 and 5."""

import math
from collections.abc import Mapping
from typing import Any

from poss_jax.config.models import LlamaConfig
from poss_jax.config.reading import UserError, shorten

_TRAINED = "original_max_position_embeddings"

# Keys that each type of rope has, and must have, by Hugging Face's names.
_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", _TRAINED)
_LONGROPE = ("short_factor", "long_factor", _TRAINED)
_KEYS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": _LLAMA3,
    "longrope": _LONGROPE,
    "yarn": ("factor", _TRAINED),
}

# Keys that change nothing for the types that do not have them, and keys that a type may have.
_ALWAYS = {"rope_theta", *_LLAMA3}
_YARN = ("attention_factor", "beta_fast", "beta_slow", "truncate")
_OPTIONAL = {
    "longrope": {*_LONGROPE, "attention_factor"},
    "yarn": {*_YARN, "mscale", "mscale_all_dim"},
}


def read_rope(values: Mapping[str, Any], longest: int, origin: str) -> dict[str, Any]:
    """Reads the fields of `RopeConfig`.

    Args:
      longest: its max_position_embeddings.

    Raises:
      UserError: another type of rope, or settings that contradict each other.
    """
    settings = _join_spellings(values, origin)
    kind = settings.pop("type")
    if kind == "yarn":
        settings = {_TRAINED: longest} | settings  # as transformers
    if not isinstance(kind, str) or kind not in _KEYS:
        kinds = ", ".join(_KEYS)
        raise UserError(
            f"{origin}: rope type: want one of {kinds}, got {shorten(kind)}; other types are not "
            "supported"
        )
    unknown = settings.keys() - _ALWAYS - _OPTIONAL.get(kind, set())
    missing = [key for key in _KEYS[kind] if key not in settings]
    if unknown or missing:
        listed = [f"unknown {key}" for key in sorted(unknown)] + [f"no {key}" for key in missing]
        raise UserError(
            f"{origin}: rope type {kind} with {', '.join(listed)[:200]}; give the model's own "
            "config.json (other settings are not supported)"
        )
    rope = {"type": kind, "theta": settings.get("rope_theta", 10000.0)}
    rope |= {key: settings[key] for key in _KEYS[kind]}
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
    scaling = {key: getattr(rope, key) for key in _KEYS[rope.type]}
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
