"""Command lines of programs: `--config FILE`, `section.key=value`, and options that name keys.

A program's settings are one config dataclass. Its keys are declared there, with their help; here
they become options: `max_new_tokens` is `--max-new-tokens`, `sampling.top_k` is `--top-k`,
`tree.depth` is `--tree-depth`. An option wins over `section.key=value`, which wins over the file.
"""

import argparse
import logging
import os
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from poss_jax.bundled.default import default_drafts, default_target
from poss_jax.config.decoding import SMOLLM2, AnswerConfig, BenchConfig
from poss_jax.config.models import TreeConfig
from poss_jax.config.numbers import INT32_MAX
from poss_jax.config.paths import as_path, local_path
from poss_jax.config.reading import (
    Key,
    UserError,
    build_config,
    list_keys,
    name_overrides,
    read_values,
    shorten,
)
from poss_jax.engine.device import default_tree
from poss_jax.engine.engine import Engine
from poss_jax.engine.trees import read_trees
from poss_jax.program.running import Parser

_LOG = logging.getLogger(__name__)

ConfigT = TypeVar("ConfigT")

_INDENT = 6 * " "
_NAMES = {
    **{"drafts": "draft", "datasets": "dataset", "keeps_unfinished": "keep-unfinished"},
    **{"allowed_hosts": "allowed-host"},
}
_METAVARS = {
    **dict.fromkeys(["target", "draft", "init_target", "init_draft"], "DIR"),
    **dict.fromkeys(["prompts", "trees", "draft_vocabulary"], "FILE"),
    **{"drafts": "NAME=DIR", "sampling.logit_bias": "ID=VALUE", "stop": "TEXT", "prompt": "TEXT"},
    **{"server": "URL", "output": "PATH", "data.source": "DATA", "data.system_prompt": "TEXT"},
    **{"chat_template_kwargs": "NAME=VALUE", "allowed_hosts": "NAME"},
}


class Option(NamedTuple):
    """An option that names a key.

    Attributes:
      flag: such as `--tree-depth`.
      key: such as `tree.depth`.
      about: the key's declaration.
    """

    flag: str
    key: str
    about: Key


def list_options(kind: Any, also: Sequence[str] = ()) -> list[Option]:
    """Lists the options of a config dataclass: of its own keys, of `sampling`, `tree` and `also`.

    Args:
      kind: the dataclass.
      also: keys of other sections that get an option.
    """
    options = []
    for key, about in list_keys(kind).items():
        section, _, name = key.rpartition(".")
        if not about.is_section and (section in ("", "sampling", "tree") or key in also):
            name = f"tree_{name}" if section == "tree" else name
            options.append(Option(f"--{_NAMES.get(key, name).replace('_', '-')}", key, about))
    return options


def read_arguments(
    kind: type[ConfigT],
    arguments: Sequence[str] | None,
    *,
    prog: str,
    doc: str | None,
    also: Sequence[str] = (),
    add_actions: Callable[[argparse.ArgumentParser], None] = lambda parser: None,
) -> tuple[ConfigT, argparse.Namespace]:
    """Reads a program's command line.

    Args:
      kind: the dataclass of its settings.
      arguments: words of the command line; None: those of the process.
      prog: name of the program's module.
      doc: description, for --help.
      also: see `list_options`.
      add_actions: adds options that are not settings, such as --overwrite.

    Returns:
      The settings, and what the actions were given.

    Raises:
      UserError: an unknown option (with the nearest one), a missing key, or a wrong value.
    """
    options = list_options(kind, also)
    parser = make_parser(kind, options, prog=prog, doc=doc)
    add_actions(parser)
    args = parser.parse_intermixed_args(arguments)
    values = read_values(args.config, args.overrides)
    given = {one: getattr(args, one.key) for one in options if getattr(args, one.key) is not None}
    for option, value in given.items():
        _set(values, option, value, _own_tree(kind))
    for option in options:
        if option.about.is_required and option.key not in values:
            raise UserError(
                f"want {option.flag} {_metavar(option)}, or the key {option.key} in the file that "
                "--config names; see --help"
            )
    config = build_config(
        kind,
        values,
        origin=args.config or "options",
        given_as=name_overrides(args.overrides) | {option.key: option.flag for option in given},
    )
    _warn_of_idle(config, given)
    return config, args


def make_parser(
    kind: Any, options: Sequence[Option], *, prog: str, doc: str | None
) -> argparse.ArgumentParser:
    """Makes the parser of a program; its help lists the keys without an option, too."""
    others = {option.key for option in options}
    lines = [
        f"  {key}\n{textwrap.indent(textwrap.fill(_help_of(about), 72), _INDENT)}"
        for key, about in list_keys(kind).items()
        if not about.is_section and key not in others
    ]
    parser = Parser(
        module=prog,
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="\n".join(["further keys:", *lines]) if lines else None,
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="Set a key of the config."
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file with keys of the config.")
    for option in options:
        _add(parser, option, _own_tree(kind))
    return parser


def _own_tree(kind: Any) -> TreeConfig | None:
    """The draft tree that settings have where none is given; None: the device's."""
    defaults: dict[str, Any] = {one.name: one.default for one in fields(kind)}
    return defaults.get("tree")


def load_engine(config: AnswerConfig) -> Engine:
    """Loads the models of a config; the default target comes with a draft.

    Raises:
      UserError: what `Engine.load` or `read_trees` refuses.
    """
    target, draft = config.target, config.draft
    if target == SMOLLM2:
        target, draft = default_target(), draft or next(iter(default_drafts().values()), None)
    return Engine.load(
        target,
        draft,
        tree=config.tree if config.trees is None else read_trees(as_path(config.trees)),
        max_length=config.max_length,
        drafting=config.drafting,
        allow_target_mismatch=config.allow_target_mismatch,
        draft_vocabulary=config.draft_vocabulary,
        quantise=config.quantise,
        mesh=config.mesh,
    )


def with_default_models(config: BenchConfig) -> BenchConfig:
    """Names the folders of the default target, and of its drafts if no others are given.

    Raises:
      UserError: what `default_target` refuses.
    """
    if config.target != SMOLLM2:
        return config
    drafts = config.drafts or {name: str(folder) for name, folder in default_drafts().items()}
    return replace(config, target=str(default_target()), drafts=drafts)


def read_pairs(flag: str, texts: Sequence[str], wanted: str) -> dict[str, str]:
    """Reads NAME=VALUE arguments.

    Raises:
      UserError: one is something else, or names a name again.
    """
    pairs: dict[str, str] = {}
    for text in texts:
        name, _, value = text.partition("=")
        if not (name and value):
            raise UserError(f"{flag} {shorten(text)}: want {wanted}")
        if name in pairs:
            raise UserError(f"{flag} {shorten(text)}: {name} is named already; name another")
        pairs[name] = value
    return pairs


def at_least(least: int) -> Callable[[str], int]:
    """Makes the type of an option that is a whole number with a lower bound."""

    def parse(text: str) -> int:
        if not re.fullmatch("[0-9]{1,10}", text) or not least <= int(text) <= INT32_MAX:
            got = shorten(text)
            raise argparse.ArgumentTypeError(f"want a number, at least {least}, got {got}")
        return int(text)

    return parse


def check_writable(path: Path, *, is_folder: bool = False) -> None:
    """Raises UserError if no output can be made at a path, before any work is spent on it."""
    local_path(path, "output")
    if path.exists() and path.is_dir() != is_folder:
        is_what = "a file" if is_folder else "a folder"
        raise UserError(f"output {path} is {is_what}; choose another place")
    places = [path.absolute()] * is_folder + [*path.absolute().parents]
    place = next(place for place in places if place.exists())
    if not (place.is_dir() and os.access(place, os.W_OK)):
        raise UserError(f"output {path}: {place} is not a writable folder; choose another place")


def check_new_file(path: Path) -> None:
    """Raises UserError if an output file exists already, or cannot be made."""
    if path.exists():
        raise UserError(f"output {path} exists; name another file or remove it")
    check_writable(path)


def _add(parser: argparse.ArgumentParser, option: Option, tree: TreeConfig | None) -> None:
    """Adds one option, of settings with a tree of their own or the device's.

    Its text is checked when the config is built.
    """
    default, kind = option.about.default, _kind(option)
    text = option.about.help
    if kind is bool:
        if default:
            text = f"Do not {text[0].lower()}{text[1:]}"
        action: dict[str, Any] = {"action": "store_const", "const": not default}
    else:
        action = {"metavar": _metavar(option)}
        if kind in (dict, tuple):
            action["action"] = "append"
            text += " The option may be repeated."
        elif option.key.startswith("tree.") and tree is None:
            text += " (default: the device's)"
        else:
            text = _help_of(option.about)
    parser.add_argument(option.flag, dest=option.key, help=text.replace("%", "%%"), **action)


def _help_of(about: Key) -> str:
    """The help of a key, with its default as a config says it."""
    default = list(about.default) if isinstance(about.default, tuple) else about.default
    return about.help + ("" if default in (None, []) else f" (default: {default})")


def _kind(option: Option) -> type:
    """Type of an option's values: bool, dict, tuple, or str for all that is one text."""
    parts = str(option.about.annotation)
    if option.about.annotation is bool:
        return bool
    return dict if parts.startswith("dict") else tuple if parts.startswith("tuple") else str


def _metavar(option: Option) -> str:
    found = _METAVARS.get(option.key)
    if found is None:
        text = str(option.about.annotation)
        choices = re.findall(r"'([^']+)'", text) if "Literal" in text else []
        is_name = option.about.annotation is str or "str" in text
        found = "|".join(choices) or ("NAME" if is_name else "X" if "float" in text else "N")
    return found


def _set(values: dict[str, Any], option: Option, value: Any, tree: TreeConfig | None) -> None:
    """Sets the key of an option in nested values; a tree begins as `tree`, None: the device's."""
    if _kind(option) is dict:
        value = read_pairs(option.flag, value, _metavar(option))
    *sections, name = option.key.split(".")
    for section in sections:
        if values.get(section) is None:
            values[section] = asdict(tree or default_tree()) if section == "tree" else {}
        values = values[section]
        if not isinstance(values, dict):
            return  # `build_config` refuses it
    values[name] = value


def _warn_of_idle(config: Any, given: dict[Option, Any]) -> None:
    """Says that options change nothing at temperature 0."""
    sampling = getattr(config, "sampling", None)
    idle = [one.key.rpartition(".")[2] for one in given if one.key.startswith("sampling.")]
    idle = [name for name in ("top_k", "top_p", "min_p") if name in idle]
    if idle and sampling is not None and sampling.temperature == 0:
        _LOG.warning("at temperature 0, %s changes nothing; give --temperature", idle[0])
