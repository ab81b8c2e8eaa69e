"""Checks that texts with a draft equal those without, seed by seed.

Covers every draft, several trees and batch sizes, greedy and sampled. Prints a table and, as the
last line, everything as one JSON object; the exit code is 1 if a difference is more than rounding.

    poss lossless --num-prompts 2
    poss lossless --config configs/demo/bench.yaml
"""

from collections.abc import Sequence
from functools import partial

from poss_jax.program.output import waiting
from poss_jax.program.running import run_program

from .bench.settings import need_equal_texts, read_settings


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses arguments, compares, prints; exit code 1 if there are failures."""
    config, _ = read_settings(arguments, prog="infer.lossless", doc=__doc__)
    need_equal_texts(config)
    with waiting("importing JAX ..."):
        from .lossless_run import check
    check(config)


cli = partial(run_program, main)

if __name__ == "__main__":
    cli()
