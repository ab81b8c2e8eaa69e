"""Strict reading of config dataclasses: unknown keys are refused, one line says what is wrong."""

import difflib
import json
import reprlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pydantic
import yaml

ConfigT = TypeVar("ConfigT")


class UserError(Exception):
    """Bad input: programs print its one line (wanted, got, what to do) and exit with code 2."""


def build_config(kind: type[ConfigT], values: Mapping[str, Any], *, origin: str) -> ConfigT:
    """Builds a config dataclass from plain values, refusing anything it does not know.

    Args:
      kind: the dataclass.
      values: nested mapping, as YAML gives it.
      origin: what the values came from, for messages.

    Raises:
      UserError: unknown key (with the nearest known name), missing key, or wrong value.
    """
    try:
        return pydantic.TypeAdapter(kind).validate_python(dict(values))
    except pydantic.ValidationError as error:
        raise UserError(f"{origin}: {_explain(kind, error.errors())}") from error


def load_config(kind: type[ConfigT], path: str | Path, overrides: Sequence[str] = ()) -> ConfigT:
    """Reads one YAML file into a config dataclass.

    A file may name another as `base:` (relative to itself); its own keys win. Overrides such as
    `optimizer.learning_rate=1e-3` win over both.

    Raises:
      UserError: missing or malformed file, malformed override, or what `build_config` refuses.
    """
    values = read_yaml(Path(path))
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key:
            raise UserError(f"override {override!r}: want section.key=value")
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise UserError(f"override {override!r}: want a YAML value after the =") from error
        _merge(values, _nest(key.split("."), value))
    return build_config(kind, values, origin=str(path))


def read_yaml(path: Path, derived: tuple[Path, ...] = ()) -> dict[Any, Any]:
    """Reads a YAML file of keys; it may name another as `base:`, and its own keys win.

    Args:
      path: of the file.
      derived: files that are being read, and name this one.

    Raises:
      UserError: missing or malformed file, or another `base` than a file's path.
    """
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"config {path}: {error.strerror}; give the path of a YAML file") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        line = " ".join(str(error).split())
        raise UserError(f"config {path}: not valid YAML: {line}") from error
    if not isinstance(values, dict):
        raise UserError(f"config {path}: want a mapping of keys, got {type(values).__name__}")
    if "base" not in values:
        return values
    base = values.pop("base")
    derived = (*derived, path.resolve())
    if not isinstance(base, str) or (path.parent / base).resolve() in derived:
        raise UserError(f"config {path}: base: want the path of another YAML file, got {base!r}")
    return _merge(read_yaml(path.parent / base, derived), values)


def config_to_dict(config: Any) -> dict[str, Any]:
    """Turns a config dataclass into JSON-compatible nested dicts and lists."""
    return json.loads(pydantic.TypeAdapter(type(config)).dump_json(config))


def _merge(into: dict[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    for key, value in other.items():
        if isinstance(value, Mapping) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value
    return into


def _nest(keys: Sequence[str], value: Any) -> dict[str, Any]:
    return {keys[0]: _nest(keys[1:], value) if len(keys) > 1 else value}


def _explain(kind: Any, errors: Sequence[Any]) -> str:
    # A misspelt key is often a missing key as well; the misspelt one says more.
    error = min(errors, key=lambda error: error["type"] != "unexpected_keyword_argument")
    where = ".".join(str(part) for part in error["loc"])
    match error["type"]:
        case "unexpected_keyword_argument":
            near = difflib.get_close_matches(where, _known_keys(kind), n=1, cutoff=0.0)
            return f"unknown key {where!r}; did you mean {near[0]!r}?"
        case "missing":
            return f"missing key {where!r}"
        case "value_error":
            message = str(error["ctx"]["error"])
            return f"{where}: {message}" if where else message
        case "dataclass_type":
            return f"{where}: want a mapping of keys, got {reprlib.repr(error['input'])}"
    return f"{where}: {error['msg']}, got {reprlib.repr(error['input'])}"


def _known_keys(kind: Any, prefix: str = "") -> list[str]:
    keys = []
    for name, field in kind.__pydantic_fields__.items():
        keys.append(prefix + name)
        for part in getattr(field.annotation, "__args__", (field.annotation,)):
            if hasattr(part, "__pydantic_fields__"):
                keys += _known_keys(part, f"{prefix}{name}.")
    return keys
