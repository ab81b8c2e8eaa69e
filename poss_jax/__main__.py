"""The command `poss`: all programs under one name, such as `poss generate`.

Imports nothing but the table of commands until it knows which program is wanted.
"""

import difflib
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import poss_jax
from poss_jax.program.commands import COMMANDS, PACKAGE, installed_name, umbrella_name


def main(arguments: Sequence[str]) -> None:
    """Runs one command, or shows the list of them."""
    name, *words = arguments or ["--help"]
    if name in ("-h", "--help", "help"):
        print(format_help(umbrella_name()))
    elif name in ("-V", "--version"):
        print(f"poss_jax {poss_jax.__version__}")
    elif name == "--print-completion":
        _print_completion(words)
    elif name in COMMANDS:
        command = COMMANDS[name]
        sys.argv = [f"{umbrella_name()} {name}", *command.words, *words]
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


def _print_completion(words: Sequence[str]) -> None:
    """Prints the script that a shell completes `poss` with."""
    from poss_jax.program.completion import make_script  # takes time, as the programs do
    from poss_jax.program.running import run_program

    def write() -> None:
        mains = {name: find_program(command.module).main for name, command in COMMANDS.items()}
        print(make_script(words, mains))

    run_program(write)


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


def cli() -> None:
    """Entry point of `poss`."""
    main(sys.argv[1:])


if __name__ == "__main__":
    cli()
