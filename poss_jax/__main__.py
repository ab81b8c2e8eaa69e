"""The command `poss`: all programs under one name, such as `poss generate`.

Imports nothing but the table of commands until it knows which program is wanted.
"""

import argparse
import difflib
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import poss_jax
from poss_jax.program.commands import COMMANDS, PACKAGE, installed_name, umbrella_name

_PATHS = {"DIR", "DIR_OR_HUB_ID", "FILE", "FOLDER", "PATH", "RUN", "SOURCE", "source"}


def main(arguments: Sequence[str]) -> None:
    """Runs one command, or shows the list of them."""
    name, *words = arguments or ["--help"]
    if name in ("-h", "--help", "help"):
        print(format_help(umbrella_name()))
    elif name in ("-V", "--version"):
        print(f"poss_jax {poss_jax.__version__}")
    elif name == "--print-completion":
        from poss_jax.program.running import run_program  # imports take time, as in the programs

        run_program(lambda: print(make_completion(words)))
    elif name in COMMANDS:
        command = COMMANDS[name]  # a parser of several commands adds `inspect` itself
        typed = umbrella_name() if command.words else f"{umbrella_name()} {name}"
        sys.argv = [typed, *command.words, *words]
        find_program(command.module).cli()
    else:
        choices = [*COMMANDS, "--help", "--version", "--print-completion"]
        near = difflib.get_close_matches(name, choices, n=1)
        hint = f"did you mean {near[0]}?" if near else f"see {umbrella_name()} --help"
        sys.stderr.write(f"error: unknown command {name[:100]!a}; {hint}\n")
        raise SystemExit(2)


def find_program(module: str) -> Any:
    """Imports a program; the wheel has `train` and `infer` inside poss_jax, a checkout outside."""
    module = installed_name(module)
    if not module.startswith("poss_jax."):
        sys.path.insert(0, str(PACKAGE.parent))
    program = import_module(module)
    return import_module(f"{module}.__main__") if hasattr(program, "__path__") else program


def format_help(name: str) -> str:
    """The list of commands."""
    width = max(map(len, COMMANDS)) + 2
    return "\n".join(
        [
            f"usage: {name} COMMAND ...",
            "",
            "Speculative decoding with position-specialist drafts, in JAX.",
            "",
            "commands:",
            *(f"  {command:{width}}{row.summary}" for command, row in COMMANDS.items()),
            "",
            f'Try: {name} generate --question "How do I poach an egg?" --stream',
            f"More: {name} COMMAND --help",
            "Completion in the shell: poss --print-completion bash|zsh",
        ]
    )


def make_completion(words: Sequence[str]) -> str:
    """Writes the script that a shell completes `poss` with: all commands and their options.

    Raises:
      UserError: another shell, or shtab is missing.
    """
    from poss_jax.config.reading import UserError, shorten
    from poss_jax.program.running import PARSER_ONLY, ParserOnly

    if words not in (["bash"], ["zsh"]):
        raise UserError(f"--print-completion: want bash or zsh, got {shorten(words)}")
    try:
        import shtab
    except ImportError as error:
        raise UserError("shtab is missing; pip install 'poss-jax[completion]'") from error
    root = argparse.ArgumentParser(prog="poss")
    commands = root.add_subparsers()
    for name, command in COMMANDS.items():
        try:
            find_program(command.module).main([*command.words, PARSER_ONLY, "--help-all"])
        except ParserOnly as stop:
            commands.add_parser(name, help=command.summary, parents=[stop.args[0]], add_help=False)
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


def cli() -> None:
    """Entry point of `poss`."""
    main(sys.argv[1:])


if __name__ == "__main__":
    cli()
