"""Strict reading of YAML and of config dataclasses: what is unknown is refused in one line."""

import difflib
import inspect
import json
import os
import re
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_origin

import pydantic
import yaml
from etils import epath
from pydantic_core import PydanticUndefined

ConfigT = TypeVar("ConfigT")


class UserError(Exception):
    """Bad input: programs print its one line (wanted, got, what to do) and exit with code 2.

    Line ends are joined and control characters escaped: the message may quote names of a file.
    """

    def __init__(self, message: str) -> None:
        super().__init__(printable(" ".join(message.splitlines())))


def is_out_of_memory(error: Exception) -> bool:
    """True if an error says that memory of a device or the machine ran out."""
    return isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)


class Key(NamedTuple):
    """One key of a config."""

    annotation: Any
    default: Any  # None if there is none or it is a section
    is_required: bool
    help: str  # its text in the class's docstring
    is_section: bool  # its keys follow it


def list_keys(kind: Any, prefix: str = "") -> dict[str, Key]:
    """Lists the keys of a config dataclass by dotted name, sections before their keys."""
    keys: dict[str, Key] = {}
    help_of: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        section = inspect.cleandoc(base.__doc__ or "").partition("Attributes:\n")[2]
        for name, text in re.findall(r"^  (\w+): (.*(?:\n    .*)*)", section, re.M):
            help_of[name] = " ".join(text.split())
    for name, field in kind.__pydantic_fields__.items():
        parts = (field.annotation, *getattr(field.annotation, "__args__", ()))
        sections = [hint for hint in parts if hasattr(hint, "__pydantic_fields__")]
        default = None if field.default is PydanticUndefined else field.default
        inner = f"{name}.NAME." if get_origin(field.annotation) is dict else f"{name}."
        details = default, field.is_required(), help_of.get(name, ""), bool(sections)
        keys[prefix + name] = Key(field.annotation, *details)
        for section in sections:
            keys |= list_keys(section, prefix + inner)
    return keys


def build_config(
    kind: type[ConfigT],
    values: Mapping[str, Any],
    *,
    origin: str,
    given_as: Mapping[str, str] | None = None,
) -> ConfigT:
    """Builds a config dataclass from plain values, refusing anything it does not know.

    Args:
      values: nested mapping, as YAML gives it.
      origin: source of the values, for messages.
      given_as: dotted key -> the option or override that gave it, for messages; the last one wins.

    Raises:
      UserError: unknown key (with the nearest known name), missing key, or wrong value.
    """
    try:
        return pydantic.TypeAdapter(kind).validate_python(dict(values))
    except pydantic.ValidationError as error:
        where, message = _explain(kind, error.errors())
        for key, option in reversed(dict(given_as or {}).items()):
            if f"{where}.".startswith(f"{key}."):
                message = message.removeprefix(key).lstrip(".: ")
                raise UserError(f"{option}: {message}") from error
        raise UserError(f"{origin}: {message}") from error
    except UserError as error:
        raise UserError(f"{origin}: {error}") from error


def load_config(kind: type[ConfigT], path: str | Path, overrides: Sequence[str] = ()) -> ConfigT:
    """Reads one YAML file into a config dataclass.

    A file may name another as `base:` (relative to itself); its own keys win. Overrides such as
    `optimizer.learning_rate=1e-3` win over both.

    Raises:
      UserError: missing or malformed file, malformed override, or what `build_config` refuses.
    """
    values = read_values(path, overrides)
    return build_config(kind, values, origin=str(path), given_as=name_overrides(overrides))


def read_values(path: str | Path | None, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Reads the values of a YAML file (None: no file) and of overrides, which win."""
    values = {} if path is None else read_yaml(Path(path))
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key:
            raise UserError(f"override {cut(override)!r}: want section.key=value")
        try:
            value = parse_yaml(text)
        except ValueError as error:
            message = f"override {cut(override)!r}: want a YAML value, got {error}"
            raise UserError(message) from error
        for inner in reversed(key.split(".")):
            value = {inner: value}
        _merge(values, value)
    return values


def name_overrides(overrides: Sequence[str]) -> dict[str, str]:
    """Names overrides by their dotted keys, as `build_config` takes them for messages."""
    return {text.partition("=")[0]: f"override {cut(text)!r}" for text in overrides}


def read_yaml(path: Path | epath.Path, derived: frozenset[str] = frozenset()) -> dict[Any, Any]:
    """Reads a YAML file of keys; it may name another as `base:`, and its own keys win.

    Args:
      derived: files being read that name this one.

    Raises:
      UserError: missing or malformed file, or a `base` that is not a file's path.
    """
    where = f"config {path}"
    try:
        values = parse_yaml(path.read_bytes().decode())
    except OSError as error:
        raise UserError(f"{where}: {error.strerror}; give the path of a YAML file") from error
    except ValueError as error:
        raise UserError(f"{where}: not valid YAML: {error}") from error
    if not isinstance(values, dict):
        raise UserError(f"{where}: want a mapping of keys, got {type(values).__name__}")
    if "base" not in values:
        return values
    base, derived = values.pop("base"), derived | {os.path.realpath(path)}
    if not isinstance(base, str) or os.path.realpath(path.parent / base) in derived:
        raise UserError(f"{where}: base: want the path of another YAML file, got {shorten(base)}")
    return _merge(read_yaml(path.parent / base, derived), values)


def change_config(config: ConfigT, *, origin: str, **changes: Any) -> ConfigT:
    """Copies a config with some fields changed; refuses like `build_config`."""
    return build_config(type(config), vars(config) | changes, origin=origin)


def refuse_given(config: Any, names: str, message: str) -> None:
    """Raises ValueError if one of some keys, here without effect, differs from its default."""
    for name in names.split():
        if getattr(config, name) != type(config).__pydantic_fields__[name].default:
            raise ValueError(f"{name}: {message}")


def suggest(word: str, choices: Iterable[str], *, otherwise: str = "") -> str:
    """Asks for the known word that an unknown one resembles; says otherwise, or lists them."""
    names = list(choices)
    if near := difflib.get_close_matches(word, names, n=1):
        return f"did you mean {near[0]}?"
    return otherwise or cut(f"want one of {', '.join(names)}", 200)


def shorten(value: Any) -> str:
    """Formats a value for messages, cutting long ones."""
    try:
        return reprlib.repr(value)
    except ValueError:  # Python refuses to print more than 4300 digits
        return "a number of too many digits"


def cut(text: str, max_length: int = 100) -> str:
    """Cuts a text for messages."""
    return text if len(text) <= max_length else f"{text[: max_length - 3]}..."


def one_line(error: object) -> str:
    """Formats an error as one line without control characters."""
    return printable(" ".join(str(error).split())[:200])


def printable(text: str) -> str:
    """Escapes control characters, line ends too: text of a file must not steer a terminal."""
    escaped = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return "".join(escaped)


def printable_lines(text: str) -> str:
    """Escapes control characters of a text of several lines."""
    return "\n".join(map(printable, text.split("\n")))


def config_to_dict(config: Any) -> dict[str, Any]:
    """Turns a config dataclass into JSON-compatible nested dicts and lists."""
    return json.loads(pydantic.TypeAdapter(type(config)).dump_json(config))


def _merge(into: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    for key, value in overrides.items():
        if isinstance(value, Mapping) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value
    return into


def _explain(kind: Any, errors: Sequence[Any]) -> tuple[str, str]:
    """Returns the wrong key and a message that begins with it or quotes it."""
    # A misspelt key often also counts as missing; report the misspelling.
    error = min(errors, key=lambda error: error["type"] != "unexpected_keyword_argument")
    where = cut(".".join(str(key) for key in error["loc"]))
    match error["type"]:
        case "unexpected_keyword_argument":
            return where, f"unknown key {where!r}; {suggest(where, list_keys(kind))}"
        case "missing":
            return where, f"missing key {where!r}"
        case "value_error":
            message = str(error["ctx"]["error"])
            message = f"{where}: {message}" if where else message
            return message.partition(": ")[0], message  # may name a key itself
        case "dataclass_type":
            return where, f"{where}: want a mapping of keys, got {shorten(error['input'])}"
    return where, f"{where}: {error['msg']}, got {shorten(error['input'])}"


# --------------------------------------------------------------------------------------------------
# YAML of plain values


def parse_yaml(text: str) -> Any:
    """Reads YAML of plain values, without repeated keys; ValueError, in one line: malformed."""
    try:
        return yaml.load(text, _Loader)
    except Exception as error:  # PyYAML's constructors raise many kinds on malformed values
        problem = " ".join(str(error).replace('in "<unicode string>", line', "at line").split())
        raise ValueError(problem[:300]) from error


def lone_surrogates(text: str) -> set[str]:
    """Halves of characters in a text, which UTF-8 cannot encode."""
    return {letter for letter in text if "\ud800" <= letter <= "\udfff"}


class _Loader(yaml.SafeLoader):
    """The safe loader, which also refuses repeated keys."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if (key.tag, key.value) in seen:
                problem = f"the key {key.value[:100]!r} is given twice"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            seen.add((key.tag, key.value))
        return node
