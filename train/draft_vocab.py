r"""Makes a draft vocabulary: the tokens of a target that a draft may propose.

A smaller head makes drafting faster; tokens outside it are never proposed, and texts stay the same.
Reads the data of a draft's training run as training does, counts the trained tokens, prints the
coverage of several sizes, and writes the most frequent tokens as a JSON file. Ties go to the lowest
ids. The last line printed is one JSON object.

    poss draft-vocab --config run.yaml --size 32000 \
        --output vocabulary.json
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from poss_jax.config.reading import UserError
from poss_jax.program.arguments import at_least, describe
from poss_jax.program.output import add_json, print_summary, waiting
from poss_jax.program.running import Parser, run_program


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses arguments, counts, writes, prints a summary."""
    parser = Parser(
        module="train.draft_vocab",
        description=describe(__doc__, shows_all=False),
        usage="%(prog)s --config FILE [options] [key=value ...]",
    )
    add_json(parser)
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
        type=float,
        metavar="X",
        help="Choose as many tokens as cover this share of the trained ones, such as 0.98.",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="JSON file to write the vocabulary to; it must not exist yet.",
    )
    args = parser.parse_intermixed_args(arguments)
    if args.coverage is not None and not 0 < args.coverage <= 1:
        raise UserError(f"--coverage: want a share above 0 and up to 1, got {args.coverage}")
    with waiting("importing JAX ..."):
        from .vocabulary import count
    print_summary(count(args))


cli = partial(run_program, main)

if __name__ == "__main__":
    cli()
