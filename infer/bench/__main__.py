r"""Compares drafts with decoding without a draft, over the same questions.

Takes a target and drafts (model folders), without --target the model that `make chat` fetches.
Answers every question of every set, at every temperature and with every seed, autoregressively and
with each draft. Prints the main numbers on a terminal; elsewhere all tables (acceptance length,
acceptance by position, tokens per second and speed-up with 95 % intervals) and, as the last line,
what was found; with --json everything. --output keeps every answer as it comes, so that the same
command resumes after an interruption, and the report (report.html, .md, .json).

    poss bench --config configs/demo/bench.yaml
    poss bench --target T --draft EAGLE-2=E --draft PosS-3=P \
        --prompts questions.jsonl --output runs/bench
    poss bench --config configs/demo/bench.yaml --phases
"""

from collections.abc import Sequence
from functools import partial

from poss_jax.config.bench import BenchConfig
from poss_jax.program.arguments import read_arguments
from poss_jax.program.output import waiting
from poss_jax.program.running import run_program

_ACTIONS = {
    "--overwrite": {"action": "store_true", "help": "Start from scratch where a report is already."}
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses arguments, measures, prints, writes."""
    config, args = read_arguments(
        BenchConfig, arguments, prog="infer.bench", doc=__doc__, actions=_ACTIONS
    )
    with waiting("importing JAX ..."):
        from .compare import run
    run(config, from_scratch=args.overwrite)


cli = partial(run_program, main)

if __name__ == "__main__":
    cli()
