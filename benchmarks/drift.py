r"""Measures drafts by depth: how features drift, and what is accepted where.

Needs a target and drafts (model folders). The target answers every prompt greedily. Each draft then
drafts a chain from every position of these answers, teacher-forced as in training's validation, and
also decodes the prompts with chains. Prints tables with 95 % intervals over prompts, and as its
last line everything as one JSON object; --output keeps report.json, report.md and a plot.

    python -m benchmarks.drift --config configs/demo/drift.yaml
    python -m benchmarks.drift --target T --draft EAGLE-2=E --draft PosS-3=P \
        --prompts questions.jsonl --output runs/drift
    python -m benchmarks.drift --target T --draft EAGLE-2=E --spans 3
"""

from collections.abc import Sequence

from poss_jax.config.bench import DriftConfig
from poss_jax.program.arguments import read_arguments
from poss_jax.program.output import waiting
from poss_jax.program.running import run_program

_ACTIONS = {
    "--overwrite": {"action": "store_true", "help": "Replace a report that is there already."}
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses arguments, measures, prints, writes."""
    config, args = read_arguments(
        DriftConfig, arguments, prog="benchmarks.drift", doc=__doc__, actions=_ACTIONS
    )
    with waiting("importing JAX ..."):
        from benchmarks.spans import advise
        from infer.bench.by_depth import study
        from infer.bench.by_depth_report import format_brief, format_report, plot_report
        from infer.bench.report import open_output, show_report
    with open_output(config.output, overwrite=args.overwrite) as folder:
        report = study(config)
        if config.spans is not None:
            for draft in report["drafts"].values():
                draft["positions_per_specialist"] = advise(draft["by_depth"], config.spans)
        show_report(
            report,
            format_report(report),
            folder,
            brief=format_brief(report),
            plot=lambda folder: plot_report(report, folder / "drift.svg"),
        )


if __name__ == "__main__":
    run_program(main)
