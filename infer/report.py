"""Turns timed runs into a report: numbers, a table to read, files and a plot to keep."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from poss_jax.config.decoding import SamplingConfig
from poss_jax.config.reading import config_to_dict
from poss_jax.decode.metrics import (
    distinct_ngram_share,
    mean_acceptance_length,
    pooled_acceptance_length,
    positionwise_acceptance,
)

from .measure import Run
from .phases import PARTS

LOOPING_BELOW = 0.5


def build_report(max_new_tokens: int, baseline: str, runs: dict[str, list[Run]]) -> dict[str, Any]:
    """Summarises runs, prompts whose output loops apart from the others.

    Args:
      max_new_tokens: limit of every answer.
      baseline: name of the autoregressive runs, which speed-ups are relative to.
      runs: per method, its interleaved passes over the same prompts.
    """
    reference = runs[baseline][0].answers
    shares = [distinct_ngram_share(answer.output_ids) for answer in reference]
    groups = {
        "all": list(range(len(shares))),
        "not_looping": [i for i, share in enumerate(shares) if share >= LOOPING_BELOW],
        "looping": [i for i, share in enumerate(shares) if share < LOOPING_BELOW],
    }
    methods = {
        name: {
            group: _summarise(passes, runs[baseline], prompts)
            for group, prompts in groups.items()
            if prompts
        }
        for name, passes in runs.items()
    }
    return {
        "prompts": len(shares),
        "max_new_tokens": max_new_tokens,
        "repeats": len(runs[baseline]),
        "distinct_4gram_share": shares,
        "looping_prompts": groups["looping"],
        "methods": methods,
    }


def _summarise(passes: list[Run], baseline: list[Run], prompts: list[int]) -> dict[str, Any]:
    answers = [passes[0].answers[i] for i in prompts]
    accepted = [answer.accepted_per_round for answer in answers]
    speeds = [_speed(run, prompts) for run in passes]
    ratios = [speed / _speed(other, prompts) for speed, other in zip(speeds, baseline, strict=True)]
    return {
        "acceptance_length": mean_acceptance_length(accepted),
        "pooled_acceptance_length": pooled_acceptance_length(accepted),
        "positionwise_acceptance": positionwise_acceptance(
            accepted, [answer.offered_per_round for answer in answers]
        ),
        "tokens_per_second": float(np.median(speeds)),
        "tokens_per_second_per_repeat": speeds,
        "speed_up": float(np.median(ratios)),
        "speed_up_per_repeat": ratios,
        "equal_outputs": _count_equal(passes, baseline, prompts),
    }


def _speed(run: Run, prompts: list[int]) -> float:
    tokens = sum(len(run.answers[i].output_ids) for i in prompts)
    return tokens / sum(run.seconds[i] for i in prompts)


def _count_equal(passes: list[Run], baseline: list[Run], prompts: list[int]) -> int:
    """Number of outputs that equal the baseline's, token for token, in every pass."""
    expected = baseline[0].answers
    return sum(
        all(run.answers[i].output_ids == expected[i].output_ids for run in passes) for i in prompts
    )


def format_report(report: dict[str, Any]) -> str:
    """The report as Markdown tables."""
    looping = report["looping_prompts"]
    lines = [
        f"{report['prompts']} prompts x {report['max_new_tokens']} new tokens, "
        f"{report['repeats']} repeats; {len(looping)} prompts loop (distinct 4-grams below "
        f"{LOOPING_BELOW}): {looping}",
        *_describe_sampling(report.get("config")),
    ]
    is_compared = report.get("config", {}).get("drafting") != "sampled"
    if not is_compared:
        lines.append(
            "outputs are not compared: with sampled drafts they equal autoregressive ones in "
            "distribution only"
        )
    for group in ("not_looping", "looping", "all"):
        lines += _group_table(report["methods"], group, is_compared=is_compared)
    lines += _phase_table(report)
    return "\n".join(lines)


def _describe_sampling(config: dict[str, Any] | None) -> list[str]:
    """Line about sampling; empty if tokens are the argmax of the logits."""
    defaults = config_to_dict(SamplingConfig())
    given = {} if config is None else config["sampling"]
    changed = [f"{key} {value}" for key, value in given.items() if value != defaults[key]]
    if config is None or not changed:
        return []
    return [f"sampling: {', '.join(changed)}; {config['drafting']} drafts"]


def _group_table(methods: dict[str, Any], group: str, *, is_compared: bool) -> list[str]:
    rows = {name: entry[group] for name, entry in methods.items() if group in entry}
    if not rows:
        return []
    depth = max(len(row["positionwise_acceptance"]) for row in rows.values())
    head = ["acceptance length", "pooled", "tokens/s", "speed-up"]
    head += [f"pos {i + 1}" for i in range(depth)] + ["equal"]
    lines = ["", f"prompts: {group.replace('_', ' ')}", "", f"| method | {' | '.join(head)} |"]
    lines.append("|---" * (len(head) + 1) + "|")
    for name, row in rows.items():
        numbers = [row["acceptance_length"], row["pooled_acceptance_length"]]
        cells = [f"{number:.2f}" for number in numbers]
        cells += [f"{row['tokens_per_second']:.0f}", f"{row['speed_up']:.2f}"]
        positions = row["positionwise_acceptance"]
        cells += [f"{100 * share:.0f} %" for share in positions] + [""] * (depth - len(positions))
        cells.append(str(row["equal_outputs"]) if is_compared else "")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def _phase_table(report: dict[str, Any]) -> list[str]:
    head = [*(f"{name} ms" for name in (*PARTS, "round")), "sum / round", "compile s"]
    head += ["first token, cold s", "warm s"]
    lines = ["", f"| method | {' | '.join(head)} |", "|---" * (len(head) + 1) + "|"]
    for name, entry in report["methods"].items():
        phases, first = entry["phase_milliseconds"], entry["first_token_seconds"]
        cells = [f"{phases[key]:.2f}" if key in phases else "" for key in (*PARTS, "round")]
        cells += [f"{entry['phases_to_round']:.2f}", f"{entry['compile_seconds']:.1f}"]
        cells += [f"{first['cold']:.2f}", f"{first['warm']:.4f}"]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    steps = report["autoregressive_step_milliseconds"]
    return [
        *lines,
        "",
        f"autoregressive loop {steps['loop']:.2f} ms per token, plain decode step "
        f"{steps['plain']:.2f} ms: ratio {steps['loop_to_plain']:.2f}; floor {steps['floor']:.2f} "
        f"ms: {steps['floor_to_loop']:.0%} of the loop",
        "",
        format_card(report),
    ]


def format_card(report: dict[str, Any]) -> str:
    """Bytes, FLOPs and floors of all phases beside the measured times, as a Markdown table."""
    device = report["roofline"]["device"]
    lines = [
        f"{device['name']}: {device['bytes_per_second'] / 1e9:.1f} GB/s, "
        f"{device['flops_per_second'] / 1e9:.0f} GFLOP/s",
        "",
        "| method | phase | MB | GFLOP | floor ms | ms | floor / ms |",
        "|---" * 7 + "|",
    ]
    for method, entry in report["methods"].items():
        for phase, cost in entry["costs"].items():
            cells = [f"{cost['bytes'] / 1e6:.2f}", f"{cost['flops'] / 1e9:.3f}"]
            cells += [f"{cost['floor_milliseconds']:.3f}"]
            cells += [f"{entry['phase_milliseconds'][phase]:.3f}"]
            cells += [f"{cost['floor_to_measured']:.0%}"]
            lines.append(f"| {method} | {phase} | {' | '.join(cells)} |")
    return "\n".join(lines)


def write_report(report: dict[str, Any], folder: Path) -> None:
    """Writes report.json, report.md and, where matplotlib is installed, acceptance.png."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    (folder / "report.md").write_text(format_report(report) + "\n")
    try:
        import matplotlib
    except ImportError:
        return
    matplotlib.use("Agg")
    _plot_positions(report, folder / "acceptance.png")


def _plot_positions(report: dict[str, Any], path: Path) -> None:
    """Position-wise acceptance of every draft, on prompts that do not loop if there are any."""
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    for name, entry in report["methods"].items():
        shares = entry.get("not_looping", entry["all"])["positionwise_acceptance"]
        if shares:
            axes.plot(range(1, len(shares) + 1), shares, marker="o", label=name)
    axes.set(xlabel="draft position", ylabel="accepted, given all before", ylim=(0, 1))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
