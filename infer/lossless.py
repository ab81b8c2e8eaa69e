"""Checks that texts with a draft equal those without, seed by seed.

Covers every draft, greedy and sampled, with its own tree alone and a chain in batches; --thorough
takes more temperatures, trees and batch sizes. Prints a table and, as the last line, a summary as
JSON; the exit code is 1 if a difference is more than rounding. Run again after an interruption, it
resumes.

    poss lossless
    poss lossless --thorough
    poss lossless --config configs/demo/bench.yaml
"""

from collections.abc import Sequence
from functools import partial

from poss_jax.config.bench import LosslessConfig
from poss_jax.program.output import waiting
from poss_jax.program.running import run_program

from .bench.settings import read_settings

_ACTIONS = {
    "--thorough": {
        "action": "store_true",
        "help": "Take many temperatures, trees and batch sizes, which takes hours.",
    }
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses arguments, compares, prints; exit code 1 if there are failures."""
    config, args = read_settings(
        LosslessConfig, arguments, prog="infer.lossless", doc=__doc__, actions=_ACTIONS
    )
    with waiting("importing JAX ..."):
        from .lossless_run import check
    check(config, is_thorough=args.thorough)


cli = partial(run_program, main)

if __name__ == "__main__":
    cli()
