"""Finds the fastest tree of every draft and batch size, and keeps it for later.

Predicts the speed of hundreds of trees and measures the best (see `search`). Prints a table and, as
the last line, a summary as JSON. The trees are kept in the draft's folder, where every program that
decodes with it on this kind of device finds them. Run again after an interruption, it resumes.

    poss tune --target T --draft PosS-3=P --batch-sizes 1,4,16
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from poss_jax.config.bench import TuneConfig
from poss_jax.config.reading import UserError
from poss_jax.program.arguments import at_least
from poss_jax.program.output import waiting
from poss_jax.program.running import run_program

from ..bench.settings import read_settings


def _batch_sizes(text: str) -> list[int]:
    """Reads batch sizes separated by commas."""
    return sorted({at_least(1)(size) for size in text.split(",")})


_ACTIONS: dict[str, dict[str, Any]] = {
    "--batch-sizes": {
        "type": _batch_sizes,
        "default": [1],
        "metavar": "N,N",
        "help": "Numbers of prompts decoded together, such as 1,4,16. (default: 1)",
    },
    "--try-vocabulary": {
        "action": "append",
        "default": [],
        "metavar": "FILE",
        "help": "Also try this draft vocabulary; see poss draft-vocab. The option may be repeated.",
    },
    "--trees-file": {
        "type": Path,
        "metavar": "FILE",
        "help": "Write the trees here, not to the draft's folder; other programs take it as "
        "--trees. If a draft vocabulary won, pass FILE with the ending .vocabulary.json as "
        "--draft-vocabulary.",
    },
    "--overwrite": {"action": "store_true", "help": "Replace --trees-file."},
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses arguments, measures, prints, writes."""
    config, args = read_settings(
        TuneConfig, arguments, prog="infer.tune", doc=__doc__, actions=_ACTIONS
    )
    if len(config.temperatures) > 1:
        raise UserError(
            f"want one temperature, got {list(config.temperatures)}; give temperatures=[1], or the "
            "one that texts will be drawn with"
        )
    with waiting("importing JAX ..."):
        from .run import autotune, paths_of_trees
    paths = paths_of_trees(config, args.trees_file, overwrite=args.overwrite)
    autotune(config, args.batch_sizes, args.try_vocabulary, paths)


cli = partial(run_program, main)

if __name__ == "__main__":
    cli()
