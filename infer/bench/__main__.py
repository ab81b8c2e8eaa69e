"""Compares drafts with autoregressive decoding in this engine, over the same questions.

Takes a target and drafts (model folders), without --target the model that `make chat` fetches.
Answers every question of every set, at every temperature and with every seed, autoregressively and
with each draft. Prints the main numbers on a terminal; elsewhere all tables (acceptance length,
acceptance by position, tokens per second and speed-up with 95 % intervals) and, as the last line,
everything as one JSON object. --output keeps every answer as it comes, so that the same command
resumes after an interruption, and the report (report.html, .md, .json).

    python -m infer.bench --config configs/demo/bench.yaml
    python -m infer.bench --target T --draft EAGLE-2=E --draft PosS-3=P --prompts questions.jsonl
    python -m infer.bench --config configs/demo/bench.yaml --phases

With --check-lossless, --roofline or --autotune it is infer.lossless, infer.roofline or infer.tune.
"""

import argparse
import sys
from collections.abc import Sequence
from contextlib import nullcontext

from poss_jax.checkpoint.locks import sole_writer
from poss_jax.config.decoding import BenchConfig
from poss_jax.config.paths import local_path
from poss_jax.program.arguments import read_arguments
from poss_jax.program.options import with_default_models
from poss_jax.program.output import print_summary, wants_json
from poss_jax.program.running import run_program

from .. import lossless, roofline
from ..drift.report import format_report as format_drift
from ..tune.__main__ import main as tune
from .answer_files import write_answer_files
from .brief import format_brief
from .compare import bench
from .journal import SETTINGS
from .page import write_page
from .report import check_output, format_report, write_report

_ALIASES = {
    "--check-lossless": lossless.main,
    "--roofline": roofline.main,
    "--autotune": tune,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses arguments, measures, prints, writes."""
    arguments = sys.argv[1:] if arguments is None else arguments
    for flag, program in _ALIASES.items():
        if flag in arguments:
            program([word for word in arguments if word != flag])
            return
    config, args = read_arguments(
        BenchConfig, arguments, prog="infer.bench", doc=__doc__, add_actions=_add_actions
    )
    config = with_default_models(config)
    if config.output is not None:
        folder = local_path(config.output, "output")
        is_resumed = (folder / SETTINGS).is_file()
        check_output(folder, overwrite=args.overwrite or is_resumed)
    with nullcontext() if config.output is None else sole_writer(config.output):
        _compare(config, from_scratch=args.overwrite)


def _compare(config: BenchConfig, *, from_scratch: bool) -> None:
    """Benchmarks all drafts, prints, writes."""
    report, answers = bench(config, from_scratch=from_scratch)
    table = format_report(report)
    if "drift" in report:
        table += f"\n\n## By position\n\n{format_drift(report['drift'])}"
    print(table if wants_json() else format_brief(report))
    if config.output is not None:
        folder = local_path(config.output, "output")
        write_report(report, table, folder)
        write_page(report, folder / "report.html")
        write_answer_files(answers, folder)
        print(f"report: {config.output}")
    print_summary(report, "")


def _add_actions(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--overwrite", action="store_true", help="Start from scratch where a report is already."
    )


def cli() -> None:
    """Entry point of `poss-bench`."""
    run_program(main)


if __name__ == "__main__":
    cli()
