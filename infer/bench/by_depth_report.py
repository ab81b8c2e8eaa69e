"""The tables and the plot of an analysis of drafts by depth."""

from pathlib import Path
from typing import Any

import numpy as np

from poss_jax.program.output import align, fold, format_rows

from .statistics import format_estimate

_MOST_POSITIONS = 8  # of the brief form
_COLUMNS = {
    "feature_cosine": "cosine",
    "feature_distance": "distance",
    "agreement": "agreement",
    "conditional_acceptance": "accepted",
    "decoded_conditional_acceptance": "decoded",
    "gap": "gap",
}
_SO_FAR = {"cumulative_acceptance": "accepted", "decoded_cumulative_acceptance": "decoded"}


def format_report(report: dict[str, Any]) -> str:
    """The report as Markdown tables."""
    looping = report["looping_prompts"]
    lines = [
        f"{report['prompts']} prompts x {report['max_new_tokens']} new tokens, greedy, chains of "
        f"depth {report['depth']}; left out since their answers loop: {looping}; [95 % interval "
        "over prompts]",
        "",
        *_summary(report["drafts"]),
        *_pairs(report["pairs"]),
    ]
    for name, draft in report["drafts"].items():
        lines += ["", f"{name}, by position:", "", *_by_depth(draft)]
    return "\n".join(lines)


def describe(report: dict[str, Any]) -> str:
    """The acceptance lengths of all drafts, in a sentence."""
    lengths = (
        f"{name} {draft['decoded_acceptance_length']['value']:.2f}"
        for name, draft in report["drafts"].items()
    )
    return f"Acceptance lengths of greedy chains: {', '.join(lengths)}."


def format_brief(report: dict[str, Any]) -> str:
    """The main numbers within 80 columns: acceptance lengths, and what is accepted by position."""
    positions = range(1, min(report["depth"], _MOST_POSITIONS) + 1)
    head, rows = ["", "acceptance length", *(f"at {position}" for position in positions)], []
    for name, draft in report["drafts"].items():
        accepted = draft["by_depth"]["decoded_conditional_acceptance"]["value"]
        cells = ["" if np.isnan(share) else f"{share:.0%}" for share in np.array(accepted, float)]
        length = draft["decoded_acceptance_length"]["value"]
        rows.append([name, f"{length:.2f}", *cells[: len(positions)]])
    lines = [
        f"{report['prompts']} prompts, greedy chains of depth {report['depth']}; share of drafted "
        "tokens accepted at",
        "each position, where all before were:",
        *align(head, rows),
    ]
    for pair in report["pairs"]:
        first, second = pair["drafts"]
        difference = pair["difference"]["value"]
        lines.append(f"{second} less {first}: {difference:+.2f} tokens, p {pair['p_value']:.2g}")
    return "\n".join(lines)


def plot_report(report: dict[str, Any], path: Path) -> None:
    """Draws acceptance over positions and, for drafts that predict features, cosine."""
    from matplotlib import pyplot, rc_context

    drafts = report["drafts"]
    colours = {name: f"C{index}" for index, name in enumerate(drafts)}
    with rc_context({"svg.hashsalt": "drift"}):  # the same file for the same numbers
        figure, panels = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
        for draw, axes in zip((draw_gap, draw_drift), panels, strict=True):
            draw(axes, drafts, colours)
            axes.set(xticks=range(1, report["depth"] + 1))
            axes.grid(alpha=0.3)
        panels[0].legend()
        figure.savefig(path, metadata={"Date": None})
        pyplot.close(figure)


def draw_gap(axes: Any, drafts: dict[str, Any], colours: dict[str, str]) -> None:
    """Draws acceptance by position, dashed in decoding."""
    for name, draft in drafts.items():
        numbers, colour = draft["by_depth"], colours[name]
        draw_interval(axes, numbers["conditional_acceptance"], label=name, color=colour)
        style = {"label": f"{name}, decoding", "linestyle": "--", "marker": ""}
        draw_interval(axes, numbers["decoded_conditional_acceptance"], color=colour, **style)
    axes.set(xlabel="draft position", ylabel="accepted, given all before", ylim=(0, 1))


def draw_drift(axes: Any, drafts: dict[str, Any], colours: dict[str, str]) -> None:
    """Draws cosines by position, of drafts that predict features."""
    for name, draft in drafts.items():
        if "feature_cosine" in draft["by_depth"]:
            number = draft["by_depth"]["feature_cosine"]
            draw_interval(axes, number, label=name, color=colours[name])
    axes.set(xlabel="draft position", ylabel="cosine with the target's feature")


def draw_interval(axes: Any, number: dict[str, Any], **style: Any) -> None:
    """Draws a number by position, with its interval where one is known."""
    value, low, high = (np.array(number[key], float) for key in ("value", "low", "high"))
    position = np.arange(1, len(value) + 1)
    axes.plot(position, value, **({"marker": "o"} | style))
    axes.fill_between(position, low, high, color=style["color"], alpha=0.12, linewidth=0)


def _summary(drafts: dict[str, Any]) -> list[str]:
    head = ["acceptance length, simulated", "decoded", "rounds as predicted"]
    has_spans = any("positions_per_specialist" in draft for draft in drafts.values())
    table = []
    for name, draft in drafts.items():
        lengths = (draft[f"{kind}_acceptance_length"] for kind in ("simulated", "decoded"))
        cells = [name, *map(format_estimate, lengths)]
        predicted = draft["rounds_as_predicted"]
        cells.append("" if predicted is None else f"{predicted:.1%}")
        if has_spans:
            cells.append(draft["positions_per_specialist"])
        table.append(cells)
    return format_rows(["draft", *head, *["positions_per_specialist"] * has_spans], table)


def _pairs(pairs: list[dict[str, Any]]) -> list[str]:
    if not pairs:
        return []
    table = []
    for pair in pairs:
        first, second = pair["drafts"]
        difference = format_estimate(pair["difference"], digits=3)
        table.append([f"{second} less {first}", difference, f"{pair['p_value']:.4f}"])
    return ["", *format_rows(["pair", "difference of decoded acceptance length", "p"], table)]


def _by_depth(draft: dict[str, Any]) -> list[str]:
    lines = [*_table_by_depth(draft, _COLUMNS), ""]
    lines += fold("accepted so far", _table_by_depth(draft, _SO_FAR))
    if "feature_cosine" not in draft["by_depth"]:
        lines += ["", "(no cosine: it predicts its own state, not the target's feature)"]
    return lines


def _table_by_depth(draft: dict[str, Any], columns: dict[str, str]) -> list[str]:
    present = {key: name for key, name in columns.items() if key in draft["by_depth"]}
    table = []
    for depth, specialist in enumerate(draft["specialists"]):
        numbers = (draft["by_depth"][key] for key in present)
        here = ({key: values[depth] for key, values in number.items()} for number in numbers)
        table.append([depth + 1, specialist + 1, *map(format_estimate, here)])
    return format_rows(["position", "specialist", *present.values()], table)
