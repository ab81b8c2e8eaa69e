r"""Trains a target language model, or the specialists of a draft model.

Takes a YAML config (see `configs/`) or options; prints progress on stderr and one JSON line at the
end, and leaves a folder that holds metrics, checkpoints and the trained model. Run again to resume.

    poss train --stage draft --target DIR --output runs/draft \
        --num-epochs 1 data.source=chats.jsonl
    poss train --config configs/demo/target.yaml
    poss train --config configs/demo/poss3.yaml --dry-run \
        optimizer.learning_rate=1e-4
"""

import logging
from collections.abc import Sequence

from poss_jax.config.reading import UserError
from poss_jax.config.training import TrainConfig
from poss_jax.program.arguments import read_arguments
from poss_jax.program.output import print_summary, waiting
from poss_jax.program.running import run_program, start_processes

_ACTIONS = {
    "--dry-run": {"action": "store_true", "help": "Show what would be trained, and write nothing."},
    "--compile-for": {
        "metavar": "DEVICES",
        "help": "With --dry-run: compile the step and show its memory, for this machine (here) or "
        "a TPU slice such as v5p:2x2x1 (needs libtpu, but no TPU).",
    },
    "--overwrite": {
        "action": "store_true",
        "help": "Start from the beginning if the output folder holds a run.",
    },
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses arguments, trains (or describes), prints a summary."""
    config, args = read_arguments(
        TrainConfig, arguments, prog="train.main", doc=__doc__, actions=_ACTIONS
    )
    if args.compile_for and not args.dry_run:
        raise UserError("--compile-for describes a run; add --dry-run")
    start_processes()
    with waiting("importing JAX ..."):
        from poss_jax.bundled.default import with_bundled

        from .devices import is_first_process
        from .training import describe, train
    config = with_bundled(config)
    if args.dry_run:
        results = describe(config, args.compile_for)
    else:
        results = train(config, overwrite=args.overwrite)
    if is_first_process():
        print_summary(results)


def cli() -> None:
    """Entry point of `poss-train`."""
    for name in ("absl", "asyncio"):  # Orbax logs a failed save and raises it, too
        logging.getLogger(name).setLevel(logging.CRITICAL)
    run_program(main)


if __name__ == "__main__":
    cli()
