r"""Makes draft vocabularies: the tokens of a target that a draft may propose.

A smaller head makes drafting faster; tokens outside it are never proposed, and texts stay the same.
`count` reads the data of a draft's training run as training does, counts the trained tokens, prints
the coverage of several sizes, and writes the most frequent tokens as a JSON file. Ties go to the
lowest ids. `apply` writes a copy of a draft with such a vocabulary. The last line printed is one
JSON object.

    poss draft-vocab count --config run.yaml --size 32000 \
        --output vocabulary.json
    poss draft-vocab apply --draft models/poss3 \
        --vocabulary vocabulary.json --output models/poss3-32000
"""

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from poss_jax.config.paths import as_path
from poss_jax.program.arguments import at_least, describe
from poss_jax.program.output import add_json, print_summary, waiting
from poss_jax.program.running import Parser, run_program


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses arguments, counts or writes, prints a summary."""
    parser = _parser(__doc__, "COMMAND ...")
    parser.add_argument(
        "command", choices=list(_PARSERS), metavar="COMMAND",
        help="count or apply; continue with COMMAND --help.",
    )  # fmt: skip
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parsed = parser.parse_args(arguments)
    args = _PARSERS[parsed.command]().parse_intermixed_args(parsed.arguments)
    with waiting("importing JAX ..."):
        from .vocabulary import apply, count
    print_summary(count(args) if parsed.command == "count" else apply(args))


def _count_parser() -> argparse.ArgumentParser:
    text = "Count the tokens that a draft's run trains on, and choose the most frequent."
    parser = _parser(text, "count --config FILE [options] [section.key=value ...]")
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="Set a key of the config."
    )
    parser.add_argument(
        "--config",
        required=True,
        metavar="FILE",
        help="Config of a draft's training run; only `target` and `data` are used.",
    )
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument(
        "--size", type=at_least(2), metavar="N", help="Choose this number of tokens."
    )
    choice.add_argument(
        "--coverage",
        type=_parse_share,
        metavar="X",
        help="Choose as many tokens as cover this share of the trained ones, such as 0.98.",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="JSON file to write the vocabulary to; it must not exist yet.",
    )
    return parser


def _parse_share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise argparse.ArgumentTypeError(f"want a share above 0 and up to 1, got {text[:40]!r}")
    return share


def _apply_parser() -> argparse.ArgumentParser:
    text = "Write a copy of a draft that proposes the tokens of a vocabulary only."
    parser = _parser(text, "apply --draft DIR --vocabulary FILE --output DIR")
    for flag, metavar, text in (
        ("--draft", "DIR", "Model folder of a draft that uses the target's head."),
        ("--vocabulary", "FILE", "JSON file that `count` wrote."),
        ("--output", "DIR", "Folder to write. It is created; if it exists, it must be empty."),
    ):
        parser.add_argument(flag, type=as_path, required=True, metavar=metavar, help=text)
    return parser


def _parser(description: str | None, usage: str) -> Parser:
    parser = Parser(
        module="train.draft_vocab",
        description=describe(description, shows_all=False),
        usage=f"%(prog)s {usage}",
    )
    if not usage.startswith("COMMAND"):
        add_json(parser)
    return parser


_PARSERS = {"count": _count_parser, "apply": _apply_parser}


cli = partial(run_program, main)

if __name__ == "__main__":
    cli()
