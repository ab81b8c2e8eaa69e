"""Signs of a checkpoint's format: functions of a source that return what shows it, in words."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from poss_jax.config.reading import shorten
from poss_jax.convert.source import Source

Sign = Callable[[Source], str | None]
"""Returns what shows a format in a checkpoint, in words; None where nothing does."""


def model_names(values: Mapping[str, Any]) -> list[str]:
    """Lists what config.json calls the model: its classes, then its type."""
    classes = values.get("architectures")
    names = [*classes] if isinstance(classes, list) else []
    return [str(name) for name in (*names, values.get("model_type")) if name is not None]


def named(pattern: str) -> Sign:
    """Finds a name of the model that holds the pattern."""
    find = re.compile(pattern, re.IGNORECASE).search
    return lambda source: next(filter(find, model_names(source.settings)), None)


def has_setting(*keys: str) -> Sign:
    """Finds a key of config.json with a value other than null, false and 0."""

    def sign(source: Source) -> str | None:
        values = source.settings
        return next((f"{key} {shorten(values[key])}" for key in keys if values.get(key)), None)

    return sign


def has_key(pattern: str, *, in_drafts: bool = False) -> Sign:
    """Finds a weight whose plain name holds the pattern, in drafts alone or in any model."""
    find, is_fusion = re.compile(pattern).search, re.compile(r"(fusion_)?fc\.").match

    def sign(source: Source) -> str | None:
        if in_drafts and not any(map(is_fusion, source.names)):
            return None
        return next((key for name, key in source.names.items() if find(name)), None)

    return sign


def has_type(pattern: str) -> Sign:
    """Finds a weight of a type that fits the pattern."""
    fits = re.compile(pattern).fullmatch
    return lambda source: next(
        (f"{key} of type {t.dtype}" for key, t in source.tensors.items() if fits(t.dtype)), None
    )


def is_adapter(source: Source) -> str | None:
    """Tells a LoRA adapter by its file."""
    name = "adapter_config.json"
    is_alone = not (source.folder / "config.json").is_file()
    return name if is_alone and (source.folder / name).is_file() else None


def is_of_speculators(pattern: str) -> Sign:
    """Finds a kind and class of vLLM's speculators, other than those of EAGLE-1."""
    find = re.compile(pattern, re.IGNORECASE).search

    def sign(source: Source) -> str | None:
        for values in (source.values, source.settings):
            kind = values.get("speculators_model_type")
            shown = ": ".join([str(kind), *model_names(values)[:1]])
            if kind not in (None, "eagle") and find(shown):
                return shown
        return None

    return sign


def is_quantised(source: Source) -> str | None:
    """Tells quantised weights by config.json."""
    values = source.settings
    settings = values.get("quantization_config") or values.get("compression_config")
    method = settings.get("quant_method") if isinstance(settings, dict) else None
    return f"quantization_config with quant_method {shorten(method)}" if settings else None
