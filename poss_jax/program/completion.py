"""Completion of `poss` in a shell: a script that knows all commands and their options."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from poss_jax.config.reading import UserError, shorten
from poss_jax.program.commands import COMMANDS
from poss_jax.program.running import PARSER_ONLY, ParserOnly

_SHELLS = ("bash", "zsh")
_PATHS = {"DIR", "DIR_OR_HUB_ID", "FILE", "FOLDER", "PATH", "RUN", "SOURCE", "source"}

Main = Callable[[Sequence[str]], None]


def make_script(words: Sequence[str], programs: Mapping[str, Main]) -> str:
    """Writes the script that a shell completes `poss` with.

    Args:
      programs: name of a command -> `main` of its program.

    Raises:
      UserError: another shell, or shtab is missing.
    """
    if len(words) != 1 or words[0] not in _SHELLS:
        got = shorten(" ".join(words)) or "nothing"
        raise UserError(f"--print-completion: want bash or zsh, got {got}")
    try:
        import shtab
    except ImportError as error:
        raise UserError("shtab is missing; pip install 'poss-jax[completion]'") from error
    root = argparse.ArgumentParser(prog="poss")
    commands = root.add_subparsers()
    for name, main in programs.items():
        command = COMMANDS[name]
        try:
            main([*command.words, PARSER_ONLY, "--help-all"])
        except ParserOnly as stop:
            commands.add_parser(name, help=command.summary, parents=[stop.parser], add_help=False)
    _complete_paths(root, shtab.FILE)
    return shtab.complete(root, words[0])


def _complete_paths(parser: argparse.ArgumentParser, files: Any) -> None:
    """Marks the arguments that shells complete with names of files."""
    for action in parser._actions:
        if (action.metavar or action.dest) in _PATHS:
            action.complete = files  # type: ignore[attr-defined]
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                _complete_paths(command, files)
