r"""Measures drafts by depth: how features drift, and what is accepted where.

Needs a target and drafts (model folders). The target answers every prompt greedily. Each draft then
drafts a chain from every position of these answers, teacher-forced as in training's validation, and
also decodes the prompts with chains. Prints tables with 95 % intervals over prompts, and as its
last line what was found, with --json everything; --output keeps report.json, report.md and a plot.

    python -m benchmarks.drift --config configs/demo/drift.yaml
    python -m benchmarks.drift --target T --draft EAGLE-2=E --draft PosS-3=P \
        --prompts questions.jsonl --output runs/drift
    python -m benchmarks.drift --target T --draft EAGLE-2=E --spans 3
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

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
        from infer.bench.by_depth import study
        from infer.bench.by_depth_report import (
            describe,
            format_brief,
            format_report,
            plot_report,
        )
        from infer.bench.report import open_output, show_report
        from poss_jax.bundled.default import with_bundled
    with open_output(config.output, overwrite=args.overwrite) as folder:
        report = study(with_bundled(config))
        if config.spans is not None:
            for draft in report["drafts"].values():
                draft["positions_per_specialist"] = advise(draft["by_depth"], config.spans)
        show_report(
            report,
            format_report(report),
            folder,
            finding=describe(report),
            brief=format_brief(report),
            plot=lambda folder: plot_report(report, folder / "drift.svg"),
        )


# --------------------------------------------------------------------------------------------------
# Advice on spans: how many positions each specialist should serve
#
# A specialist serves its positions with one set of weights, so their inputs should be alike. Let
# e_d be how far the input of depth d has drifted, and w_d the share of chains that come to depth d.
# The advice is the spans with the least variation within them:
#
#     sum over spans, sum over d in a span:  w_d (e_d - mean e of the span)^2
#
# Means are weighted by w. If several choices leave the same variation, the most equal spans win,
# and then longer spans first.

Numbers = Sequence[float] | np.ndarray
"""Numbers by depth."""

_UNIT = 1e-12  # variation is counted in it, so that rounding breaks no tie

Cost = tuple[int, int, tuple[int, ...]]
"""(variation, squared lengths, negated lengths) of spans; the least is the best."""


def advise(by_depth: dict[str, Any], num_spans: int) -> list[int]:
    """Cuts the measured depths of a draft (`infer.bench.by_depth`) into spans.

    The drift of a depth's input is the distance of the feature before it; without features to
    compare, the share of tokens missed.

    Returns:
      `positions_per_specialist`.
    """
    weight = [1.0, *by_depth["cumulative_acceptance"]["value"][:-1]]
    if "feature_distance" in by_depth:
        drift = [0.0, *by_depth["feature_distance"]["value"][:-1]]  # the first reads the target's
    else:
        drift = [1 - share for share in by_depth["agreement"]["value"]]
    return advise_spans(drift, weight, num_spans)


def advise_spans(drift: Sequence[float], weight: Sequence[float], num_spans: int) -> list[int]:
    """Cuts depths into that many best spans, at most one each, by dynamic programming (exact).

    Args:
      drift: e, by depth.
      weight: w, by depth.

    Returns:
      `positions_per_specialist`.
    """

    @cache
    def best_from(first: int, num_left: int) -> Cost:
        """Cost of the best spans of all depths from `first` on."""
        latest = len(drift) - num_left + 1  # every later span serves a depth, too
        ends = range(first + 1, latest + 1) if num_left > 1 else [len(drift)]
        return min(
            add_costs(
                cost_of(drift[first:end], weight[first:end]),
                best_from(end, num_left - 1) if num_left > 1 else (0, 0, ()),
            )
            for end in ends
        )

    return [-length for length in best_from(0, num_spans)[2]]


def cost_of(drift: Numbers, weight: Numbers) -> Cost:
    """Cost of one span of these depths."""
    values, weights = np.asarray(drift, float), np.asarray(weight, float)
    mean = (weights * values).sum() / max(weights.sum(), 1e-300)
    variation = (weights * (values - mean) ** 2).sum()
    return round(variation / _UNIT), len(drift) ** 2, (-len(drift),)


def add_costs(span: Cost, later: Cost) -> Cost:
    """Cost of a span and all spans after it."""
    return span[0] + later[0], span[1] + later[1], span[2] + later[2]


if __name__ == "__main__":
    run_program(main)
