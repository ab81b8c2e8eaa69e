"""Command lines of programs: `--config FILE`, `section.key=value`, and options that name keys.

A program's settings are one config dataclass. Its keys are declared there, with their help; here
they become options: `max_new_tokens` is `--max-new-tokens`, `sampling.top_k` is `--top-k`,
`tree.depth` is `--tree-depth`. An option wins over `section.key=value`, which wins over the file.
"""

import argparse
import re
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from poss_jax.config.decoding import AnswerConfig
from poss_jax.config.reading import (
    Key,
    UserError,
    build_config,
    list_keys,
    name_overrides,
    read_values,
    shorten,
)
from poss_jax.program.output import add_json
from poss_jax.program.running import Parser, add_version

ConfigT = TypeVar("ConfigT")
Actions = Mapping[str, Mapping[str, Any]]

_MOST_EXAMPLES, _LONGEST_TEXT = 3, 100  # of the short help
_NAMES = {"drafts": "draft", "datasets": "dataset", "allowed_hosts": "allowed_host"}
_NAMES |= {"keeps_unfinished": "keep_unfinished", "allowed_origins": "allow_origin"}
_METAVARS = {
    "DIR": "target draft init_target init_draft",
    "FILE": "prompts trees draft_vocabulary",
    "TEXT": "stop question prompt data.system_prompt system",
    "NAME": "allowed_hosts",
    "[NAME=]DIR": "drafts",
    "NAME=VALUE": "chat_template_kwargs",
    "ID=VALUE": "sampling.logit_bias",
    "URL": "server allowed_origins",
    "PATH": "output",
    "DATA": "data.source",
}
_SHOWN = {
    "models": "target draft drafts init_draft server",
    "input and output": "question prompt prompts datasets num_prompts data.source self_prompt "
    "system max_new_tokens stream show_drafts output",
    "run": "stage num_epochs host port depth spans repeats",
    "sampling": "sampling.temperature sampling.top_p sampling.seed temperatures",
    "speed": "batch_size context quantise max_length concurrency",
}
"""Keys whose options `--help` shows, by heading and in this order; `--help-all` has the others."""


def read_arguments(
    kind: type[ConfigT],
    arguments: Sequence[str] | None,
    *,
    prog: str,
    doc: str | None,
    also: Sequence[str] = (),
    actions: Actions = MappingProxyType({}),
) -> tuple[ConfigT, argparse.Namespace]:
    """Reads a program's command line.

    Args:
      arguments: words of the command line; None: the process's.
      also: keys that get an option besides those of the first level, of `sampling` and of `tree`.
      actions: options that are not settings, such as --overwrite, as argparse takes them.

    Returns:
      The settings, and what the actions were given.

    Raises:
      UserError: an unknown option (with the nearest one), a missing key, or a wrong value.
    """
    words, keys = sys.argv[1:] if arguments is None else arguments, list_keys(kind)
    flags: dict[str, str] = {}  # of keys
    for key, declaration in keys.items():
        section, _, name = key.rpartition(".")
        if not declaration.is_section and (section in ("", "sampling", "tree") or key in also):
            name = f"tree_{name}" if section == "tree" else _NAMES.get(key, name)
            flags[key] = f"--{name.replace('_', '-')}"
    takes_model, shows_all = issubclass(kind, AnswerConfig), "--help-all" in words
    usage = f"%(prog)s {'[MODEL] ' * takes_model}[options] [section.key=value ...]"
    parser = Parser(
        module=prog,
        usage=usage,
        description=describe(doc, shows_all=shows_all),
        epilog=_describe_other_keys(keys, flags, shows_all=shows_all),
        add_help=False,
    )
    _add_arguments(parser, keys, flags, actions, shows_all=shows_all)
    args = parser.parse_intermixed_args(words)
    model, overrides = {}, args.overrides
    if overrides and "=" not in overrides[0] and takes_model:
        if args.target is not None:
            got = shorten(overrides[0])
            raise UserError(f"{got} and --target: both name the target; leave out one")
        model, overrides = {"target": overrides[0]}, overrides[1:]
    values = read_values(args.config, overrides) | model
    given_as = name_overrides(overrides) | dict.fromkeys(model, "MODEL")
    if getattr(args, "tree", None) is not None:
        _set_tree(values, args.tree, keys)
        given_as["tree"] = "--tree"
    for key, flag in flags.items():
        if (value := getattr(args, key)) is not None:
            _set(values, key, value, keys, flag)
            given_as[key] = flag
        if keys[key].is_required and key not in values:
            raise UserError(f"want {flag}, or {key} in the file that --config names; see --help")
    return build_config(kind, values, origin=args.config or "options", given_as=given_as), args


# --------------------------------------------------------------------------------------------------
# Help: what most people need on one screen, or all


def _add_arguments(
    parser: argparse.ArgumentParser,
    keys: Mapping[str, Key],
    flags: Mapping[str, str],
    actions: Actions,
    *,
    shows_all: bool,
) -> None:
    """Adds the arguments of a program; the help begins with what most people need."""
    text = "Set a key of the config." if shows_all else argparse.SUPPRESS
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help=text)
    remaining = dict(flags)
    for title, names in _SHOWN.items():
        group = parser.add_argument_group(title)
        for flag, settings in actions.items() if title == "run" else ():
            group.add_argument(flag, **settings)
        if title == "speed" and "tree" in keys:
            text = _TREE_HELP if "trees" in keys else _TREE_HELP.replace(", none", "")
            group.add_argument("--tree", metavar="D/K/N", help=text)
        for key in [key for key in names.split() if key in remaining]:
            _add(group, remaining.pop(key), key, keys)
    group = parser.add_argument_group("more" if shows_all else "required")
    for key, flag in remaining.items():
        action = _add(group, flag, key, keys)
        if not (shows_all or keys[key].is_required):
            action.help = argparse.SUPPRESS
    group = parser.add_argument_group("help and config")
    group.add_argument("--config", metavar="FILE", help="YAML file with keys of the config.")
    if "output" in keys or "--output" in actions:
        add_json(group)
    group.add_argument("-h", "--help", action="help", help="Show the main options.")
    group.add_argument("--help-all", action="help", help="Show all options and keys.")
    add_version(group)
    for action in () if shows_all else parser._actions:  # the beginning of a text, and the default
        text, *default = re.split(r" (?=\(default: [^()]*\)$)", action.help or "")
        text = re.split(r"[.;](?: |$)| \(docs/", text)[0]
        text = text if len(text) <= _LONGEST_TEXT else re.split(r": | \(", text)[0]
        action.help = " ".join([text, *default])


def describe(doc: str | None, *, shows_all: bool) -> str:
    """A program's docstring as its help; in short its first sentence, and some examples."""
    text = (doc or "").strip()
    if shows_all:
        return text
    examples = re.findall(r"^ {4}\S.*(?:(?<=\\)\n.*)*", text, re.M)[:_MOST_EXAMPLES]
    return "\n\n".join([text.split("\n\n")[0], "\n".join(examples)]).strip()


def _describe_other_keys(
    keys: Mapping[str, Key], flags: Mapping[str, str], *, shows_all: bool
) -> str:
    """Describes the keys that have no option; in short names their sections, and --help-all."""
    further = {key: row for key, row in keys.items() if not (row.is_section or key in flags)}
    if not shows_all:
        sections = ", ".join(dict.fromkeys(key.split(".")[0] for key in further))
        more = f", and the keys of {sections}" if sections else ""
        return textwrap.fill(f"--help-all shows all options{more}.", 79)
    lines = [
        f"  {key}\n{textwrap.indent(textwrap.fill(_help_of(row), 72), 6 * ' ')}"
        for key, row in further.items()
    ]
    return "\n".join(["further keys:", *lines]) if lines else ""


def _add(group: Any, flag: str, key: str, keys: Mapping[str, Key]) -> argparse.Action:
    """Adds the option of a key, whose text is checked when the config is built."""
    default, kind, text = keys[key].default, _kind(keys[key]), keys[key].help
    action: dict[str, Any] = {"metavar": _metavar(key, keys)}
    if kind is bool:
        text = f"Do not {text[0].lower()}{text[1:]}" if default else text
        action = {"action": "store_const", "const": not default}
    elif kind in (dict, tuple):
        action["action"] = "append"
        text += " The option may be repeated."
    elif key.startswith("tree.") and keys["tree"].default is None:
        text += " (default: the device's)"
    elif key.startswith("sampling.") and default is None:
        text += " (default: the model's)"
    else:
        text = _help_of(keys[key])
    return group.add_argument(flag, dest=key, help=text.replace("%", "%%"), **action)


def _help_of(key: Key) -> str:
    """The help of a key, with its default as a config says it."""
    default = [*key.default] if isinstance(key.default, tuple) else key.default
    shown = f"{default:g}" if isinstance(default, float) else default
    return key.help + ("" if default in (None, []) else f" (default: {shown})")


# --------------------------------------------------------------------------------------------------
# Values


_TREE_HELP = (
    "Draft tree, such as 6/10/60, chain:N, none or auto; the numbers are depth, top_k and nodes, a "
    "chain has N tokens one after the other, and auto is the tuned tree, else the device's."
)
_CHAIN, _SIZES = re.compile(r"chain:(\d{1,9})"), re.compile(r"(\d{1,9})/(\d{1,9})/(\d{1,9})")


def _set_tree(values: dict[str, Any], text: str, keys: Mapping[str, Key]) -> None:
    """Sets the keys that `--tree` stands for; a file of trees that the config names is dropped."""
    has_trees, default = "trees" in keys, keys["tree"].default
    if has_trees:
        values["trees"] = None
    if text == "auto":
        values["tree"] = default and asdict(default)
    elif text == "none" and has_trees:
        values |= {"tree": None, "trees": text}
    elif chain := _CHAIN.fullmatch(text):
        depth = int(chain[1])
        values["tree"] = {"depth": depth, "top_k": 1, "total_tokens": depth + 1}
    elif sizes := _SIZES.fullmatch(text):
        names = "depth", "top_k", "total_tokens"
        values["tree"] = dict(zip(names, map(int, sizes.groups()), strict=True))
    else:
        spellings = "chain:N, none or auto" if has_trees else "chain:N or auto"
        raise UserError(
            f"--tree {shorten(text)}: want DEPTH/TOP_K/TOTAL_TOKENS such as 6/10/60, {spellings}"
        )


def at_least(minimum: int) -> Callable[[str], int]:
    """Makes the type of an option that is a whole number with a lower bound."""

    def number(text: str) -> int:
        if (value := int(text)) < minimum:
            raise argparse.ArgumentTypeError(f"want a number, at least {minimum}, got {value}")
        return value

    return number


def _kind(key: Key) -> type:
    """Type of an option's values: bool, dict, tuple, or str for all that is one text."""
    text = str(key.annotation)
    if key.annotation is bool:
        return bool
    return dict if text.startswith("dict") else tuple if text.startswith("tuple") else str


def _metavar(key: str, keys: Mapping[str, Key]) -> str:
    text = str(keys[key].annotation)
    choices = re.findall(r"'([^']+)'", text) if "Literal" in text else []
    by_type = "NAME" if "str" in text else "X" if "float" in text else "N"
    named = (name for name, listed in _METAVARS.items() if key in listed.split())
    return next(named, "|".join(choices) or by_type)


def read_pairs(flag: str, texts: Sequence[str], syntax: str) -> dict[str, str]:
    """Reads NAME=VALUE texts of a repeated option; UserError: one is malformed or named twice."""
    pairs = [text.partition("=") for text in texts]
    if len({name for name, _, _ in pairs}) < len(pairs) or not all(map(all, pairs)):
        raise UserError(f"{flag}: want {syntax}, each name once, got {shorten(texts)}")
    return {name: value for name, _, value in pairs}


def _set(values: dict[str, Any], key: str, value: Any, keys: Mapping[str, Key], flag: str) -> None:
    """Sets a key in nested values to what its option was given; a tree begins as the default."""
    if key == "drafts":  # a folder's own name is its name in reports
        value = [text if "=" in text else f"{Path(text).name}={text}" for text in value]
    if _kind(keys[key]) is dict:
        value = read_pairs(flag, value, _metavar(key, keys))
    *sections, name = key.split(".")
    for section in sections:
        if section == "tree" and values.get(section) is None:
            from poss_jax.engine.trees import default_tree  # imports JAX, which asks for devices

            values[section] = asdict(keys["tree"].default or default_tree())
        values = values.setdefault(section, {})
        if not isinstance(values, dict):
            return  # `build_config` refuses it
    values[name] = value
