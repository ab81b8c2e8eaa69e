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
from dataclasses import asdict, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from poss_jax.config.decoding import AnswerConfig
from poss_jax.config.models import TreeConfig
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

_INDENT = 6 * " "
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


class Option(NamedTuple):
    """An option that names a key."""

    flag: str  # such as --tree-depth
    key: str  # such as tree.depth
    declaration: Key


def list_options(kind: Any, also: Sequence[str] = ()) -> list[Option]:
    """Lists the options of a config dataclass: its keys, the keys of `sampling` and `tree`, `also`.

    Args:
      also: keys of other sections that get an option.
    """
    options = []
    for key, declaration in list_keys(kind).items():
        section, _, name = key.rpartition(".")
        if not declaration.is_section and (section in ("", "sampling", "tree") or key in also):
            name = f"tree_{name}" if section == "tree" else name
            options.append(Option(f"--{_NAMES.get(key, name).replace('_', '-')}", key, declaration))
    return options


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
      also: see `list_options`.
      actions: options that are not settings, such as --overwrite, as argparse takes them.

    Returns:
      The settings, and what the actions were given.

    Raises:
      UserError: an unknown option (with the nearest one), a missing key, or a wrong value.
    """
    words = sys.argv[1:] if arguments is None else arguments
    options = list_options(kind, also)
    parser = _make_parser(
        kind, options, actions, prog=prog, doc=doc, shows_all="--help-all" in words
    )
    args = parser.parse_intermixed_args(words)
    model, overrides = {}, args.overrides
    if overrides and "=" not in overrides[0] and issubclass(kind, AnswerConfig):
        if args.target is not None:
            got = shorten(overrides[0])
            raise UserError(f"{got} and --target: both name the target; leave out one")
        model, overrides = {"target": overrides[0]}, overrides[1:]
    values = read_values(args.config, overrides) | model
    given_as = name_overrides(overrides) | dict.fromkeys(model, "MODEL")
    if getattr(args, "tree", None) is not None:
        _set_tree(values, args.tree, kind)
        given_as["tree"] = "--tree"
    chosen = {o: getattr(args, o.key) for o in options if getattr(args, o.key) is not None}
    for option, value in chosen.items():
        _set(values, option, value, _defaults(kind).get("tree"))
    given_as |= {option.key: option.flag for option in chosen}
    return build_config(kind, values, origin=args.config or "options", given_as=given_as), args


# --------------------------------------------------------------------------------------------------
# Help: what most people need on one screen, or all


def _make_parser(
    kind: Any,
    options: Sequence[Option],
    actions: Actions,
    *,
    prog: str,
    doc: str | None,
    shows_all: bool,
) -> argparse.ArgumentParser:
    """Makes the parser of a program; its help begins with what most people need."""
    keys, defaults = list_keys(kind), _defaults(kind)
    parser = Parser(
        module=prog,
        usage=f"%(prog)s {'[MODEL] ' * issubclass(kind, AnswerConfig)}[options] "
        "[section.key=value ...]",
        description=describe(doc, shows_all=shows_all),
        epilog=_describe_other_keys(keys, options, shows_all=shows_all),
        add_help=False,
    )
    text = "Set a key of the config." if shows_all else argparse.SUPPRESS
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help=text)
    remaining = {option.key: option for option in options}
    for title, names in _SHOWN.items():
        group = parser.add_argument_group(title)
        for flag, settings in actions.items() if title == "run" else ():
            group.add_argument(flag, **settings)
        if title == "speed" and "tree" in defaults:
            text = _TREE_HELP if "trees" in defaults else _TREE_HELP.replace(", none", "")
            group.add_argument("--tree", metavar="D/K/N", help=text)
        for option in [remaining.pop(key) for key in names.split() if key in remaining]:
            _add(group, option, defaults.get("tree"))
    group = parser.add_argument_group("more" if shows_all else "required")
    for option in remaining.values():
        action = _add(group, option, defaults.get("tree"))
        if not (shows_all or option.declaration.is_required):
            action.help = argparse.SUPPRESS
    group = parser.add_argument_group("help and config")
    group.add_argument("--config", metavar="FILE", help="YAML file with keys of the config.")
    if "output" in keys or "--output" in actions:
        add_json(group)
    group.add_argument("-h", "--help", action="help", help="Show the main options.")
    group.add_argument("--help-all", action="help", help="Show all options and keys.")
    add_version(group)
    for action in () if shows_all else parser._actions:
        action.help = _shorten_help(action.help or "")
    return parser


def describe(doc: str | None, *, shows_all: bool) -> str:
    """A program's docstring as its help; in short its first sentence, and some examples."""
    text = (doc or "").strip()
    if shows_all:
        return text
    examples = re.findall(r"^ {4}\S.*(?:(?<=\\)\n.*)*", text, re.M)[:_MOST_EXAMPLES]
    return "\n\n".join([text.split("\n\n")[0], "\n".join(examples)]).strip()


def _describe_other_keys(
    keys: Mapping[str, Key], options: Sequence[Option], *, shows_all: bool
) -> str:
    """Describes the keys that have no option; in short names their sections, and --help-all."""
    names = keys.keys() - {option.key for option in options}
    further = {key: row for key, row in keys.items() if key in names and not row.is_section}
    if not shows_all:
        sections = ", ".join(dict.fromkeys(key.split(".")[0] for key in further))
        more = f", and the keys of {sections}" if sections else ""
        return textwrap.fill(f"--help-all shows all options{more}.", 79)
    lines = [
        f"  {key}\n{textwrap.indent(textwrap.fill(_help_of(row), 72), _INDENT)}"
        for key, row in further.items()
    ]
    return "\n".join(["further keys:", *lines]) if lines else ""


def _add(group: Any, option: Option, tree: TreeConfig | None) -> argparse.Action:
    """Adds one option; without a `tree`, the help names the device's tree as the default.

    The option's text is checked when the config is built.
    """
    default, kind = option.declaration.default, _kind(option)
    text = option.declaration.help
    action: dict[str, Any] = {"metavar": _metavar(option)}
    if kind is bool:
        text = f"Do not {text[0].lower()}{text[1:]}" if default else text
        action = {"action": "store_const", "const": not default}
    elif kind in (dict, tuple):
        action["action"] = "append"
        text += " The option may be repeated."
    elif option.key.startswith("tree.") and tree is None:
        text += " (default: the device's)"
    elif option.key.startswith("sampling.") and default is None:
        text += " (default: the model's)"
    else:
        text = _help_of(option.declaration)
    return group.add_argument(option.flag, dest=option.key, help=text.replace("%", "%%"), **action)


def _help_of(key: Key) -> str:
    """The help of a key, with its default as a config says it."""
    default = [*key.default] if isinstance(key.default, tuple) else key.default
    shown = f"{default:g}" if isinstance(default, float) else default
    return key.help + ("" if default in (None, []) else f" (default: {shown})")


def _shorten_help(text: str) -> str:
    """The beginning of a help text, and the default."""
    summary, *default = re.split(r" (?=\(default: [^()]*\)$)", text)
    summary = re.split(r"[.;](?: |$)| \(docs/", summary)[0]
    summary = summary if len(summary) <= _LONGEST_TEXT else re.split(r": | \(", summary)[0]
    return " ".join([summary, *default])


# --------------------------------------------------------------------------------------------------
# Values


_TREE_HELP = (
    "Draft tree, such as 6/10/60, chain:N, none or auto; the numbers are depth, top_k and nodes, a "
    "chain has N tokens one after the other, and auto is the tuned tree, else the device's."
)
_CHAIN, _SIZES = re.compile(r"chain:(\d{1,9})"), re.compile(r"(\d{1,9})/(\d{1,9})/(\d{1,9})")


def _set_tree(values: dict[str, Any], text: str, kind: Any) -> None:
    """Sets the keys that `--tree` stands for; a file of trees that the config names is dropped.

    Raises:
      UserError: it is not one of the four spellings, or none where no draft can be left out.
    """
    has_trees, default = "trees" in _defaults(kind), _defaults(kind).get("tree")
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


def _defaults(kind: Any) -> dict[str, Any]:
    """Default per setting; for `tree` None is the device's."""
    return {field.name: field.default for field in fields(kind)}


def _kind(option: Option) -> type:
    """Type of an option's values: bool, dict, tuple, or str for all that is one text."""
    parts = str(option.declaration.annotation)
    if option.declaration.annotation is bool:
        return bool
    return dict if parts.startswith("dict") else tuple if parts.startswith("tuple") else str


def _metavar(option: Option) -> str:
    text = str(option.declaration.annotation)
    choices = re.findall(r"'([^']+)'", text) if "Literal" in text else []
    by_type = "NAME" if "str" in text else "X" if "float" in text else "N"
    named = (name for name, keys in _METAVARS.items() if option.key in keys.split())
    return next(named, "|".join(choices) or by_type)


def _set(values: dict[str, Any], option: Option, value: Any, tree: TreeConfig | None) -> None:
    """Sets the key of an option in nested values; a tree begins as `tree`, None: the device's."""
    if option.key == "drafts":  # a folder's own name is its name in reports
        value = [text if "=" in text else f"{Path(text).name}={text}" for text in value]
    if _kind(option) is dict:
        pairs = [text.partition("=") for text in value]
        if len({name for name, _, _ in pairs}) < len(pairs) or not all(map(all, pairs)):
            syntax = _metavar(option)
            raise UserError(f"{option.flag}: want {syntax}, each name once, got {shorten(value)}")
        value = {name: text for name, _, text in pairs}
    *sections, name = option.key.split(".")
    for section in sections:
        if section == "tree" and values.get(section) is None:
            from poss_jax.engine.trees import default_tree  # imports JAX, which asks for devices

            values[section] = asdict(tree or default_tree())
        values = values.setdefault(section, {})
        if not isinstance(values, dict):
            return  # `build_config` refuses it
    values[name] = value
