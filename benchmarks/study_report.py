"""The report of `benchmarks.study`: tables of what was compared, and figures."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from infer.bench.summary import format_estimate
from poss_jax.program.output import format_rows

DEPTHS = {"pos": "positionwise_acceptance", "cosine": "feature_cosine"}
"""Numbers of a variant that are lists by depth, by the head of their columns."""


def format_study(report: dict[str, Any]) -> str:
    """Writes the report in Markdown."""
    unit = "questions" if report["rows"] else "batches of held-out rows"
    lines = [
        f"Training seeds {report['seeds']}, or the first of them. Acceptance lengths are averaged "
        f"over seeds; in brackets 95 % intervals over {unit}; difference from "
        f"{report['baseline']} with the same seeds; p of the paired permutation test over {unit}, "
        "at least 0.0002, and of Welch's t-test over training seeds, not corrected for the number "
        "of comparisons."
    ]
    for row in report["rows"]:
        lines += [
            "",
            f"## {row['set']}, temperature {row['temperature']:g}, tree {row['tree']}",
            "",
            f"{row['questions']} questions: those whose answers do not loop, or all if each does.",
            *format_row(row),
        ]
    lines += [
        "",
        "## Held-out texts of training",
        "",
        "Acceptance length of a chain as validation simulates it; position-wise acceptance; cosine "
        "of drafted and true features.",
        *format_row(report["held_out"]),
    ]
    return "\n".join(lines)


def format_row(row: dict[str, Any]) -> list[str]:
    """Writes the tables of one comparison: its variants, and its pairs."""
    widths = {
        name: max(len(entry.get(key, ())) for entry in row["variants"].values())
        for name, key in DEPTHS.items()
    }
    tests = ["difference", "p", "p over seeds", "at pos 1", "p at pos 1"]
    rounds = row.get("round_milliseconds", {})
    head = ["variant", "seeds", "acceptance length", "seeds apart", *tests, "round ms"]
    head += [f"{name} {depth}" for name, count in widths.items() for depth in range(1, count + 1)]
    table = []
    for variant, entry in row["variants"].items():
        of_seeds = entry["of_seeds"]
        cells = [
            variant,
            str(len(of_seeds)),
            format_estimate(entry["acceptance_length"], digits=3),
            f"{max(of_seeds) - min(of_seeds):.3f}" if len(of_seeds) > 1 else "",
            *format_difference(entry),
            f"{rounds[variant]:.2f}" if rounds else "",
        ]
        for name, key in DEPTHS.items():
            form = ".1%" if name == "pos" else ".3f"
            shown = [f"{number:{form}}" for number in entry.get(key, ())]
            cells += shown + [""] * (widths[name] - len(shown))
        table.append(cells)
    lines = ["", *_format_filled(head, table)]
    pairs = [(" less ".join(entry["pair"]), *format_difference(entry)) for entry in row["pairs"]]
    return lines + (["", *_format_filled(["pair", *tests], pairs)] if pairs else [])


def _format_filled(head: Sequence[str], table: Sequence[Sequence[str]]) -> list[str]:
    """Formats a table without its empty columns."""
    columns = [column for column in zip(head, *table, strict=True) if any(column[1:])]
    head, *table = zip(*columns, strict=True)
    return format_rows(head, table)


def format_difference(compared: dict[str, Any]) -> tuple[str, ...]:
    """A difference, its p-values over questions and over training seeds; the same at position 1."""

    def format_tested(compared: dict[str, Any], digits: int) -> tuple[str, str]:
        p_value = compared["p_value"]
        difference = format_estimate(compared["difference"], digits=digits)
        return difference, "" if p_value is None else f"{p_value:.4f}"

    over_seeds, at_first = compared["p_over_seeds"], compared.get("first_position")
    return (
        *format_tested(compared, 3),
        "" if over_seeds is None else f"{over_seeds:.2g}",
        *(format_tested(at_first, 4) if at_first else ("", "")),
    )


def plot(report: dict[str, Any], folder: Path) -> None:
    """Draws acceptance by position for every row, drift by depth, and the curves of training.

    Nothing is drawn without matplotlib.
    """
    if find_spec("matplotlib") is None:
        return
    import matplotlib

    matplotlib.use("Agg")
    held_out = {"held out": report["held_out"]}
    rows = held_out | {
        f"{row['set']}\nT = {row['temperature']:g}, {row['tree']}": row for row in report["rows"]
    }
    curves = [(name.rpartition(" seed ")[0], curve) for name, curve in report["curves"].items()]
    for name, panels, labels in (
        ("positions", _by_depth(rows, "pos"), ("draft position", "accepted, given all before")),
        ("drift", _by_depth(held_out, "cosine"), ("depth", "cosine of drafted and true features")),
        ("convergence", {"held out": curves}, ("optimizer steps", "simulated acceptance length")),
    ):
        if panels["held out"]:
            _draw(folder / f"{name}.svg", panels, labels, report)


Panels = dict[str, list[tuple[str, list[tuple[float, float]]]]]
"""Title -> variants, and the points of their curves."""


def _by_depth(rows: dict[str, dict[str, Any]], name: str) -> Panels:
    return {
        title: [
            (variant, list(enumerate(entry[DEPTHS[name]], 1)))
            for variant, entry in row["variants"].items()
            if entry.get(DEPTHS[name])
        ]
        for title, row in rows.items()
    }


def _draw(path: Path, panels: Panels, labels: tuple[str, str], report: dict[str, Any]) -> None:
    """Draws a panel for each title, a colour for each variant; those with fewer seeds dotted."""
    from matplotlib import pyplot

    palette, styles = pyplot.get_cmap("tab20"), {}
    for index, (name, entry) in enumerate(report["held_out"]["variants"].items()):
        is_complete = len(entry["of_seeds"]) == len(report["seeds"])
        styles[name] = {"marker": ".", "ms": 9} if is_complete else {"ls": ":"}
        styles[name]["color"] = palette(index % 20)
    size = 2 + 4.5 * len(panels), 4
    with pyplot.rc_context({"svg.hashsalt": "poss_jax"}):
        figure, all_axes = pyplot.subplots(
            1, len(panels), figsize=size, squeeze=False, sharey=True, layout="constrained"
        )
        handles = {}
        for axes, (title, curves) in zip(all_axes[0], panels.items(), strict=True):
            for variant, points in curves:
                (handles[variant],) = axes.plot(*zip(*points, strict=True), **styles[variant])
            axes.set_title(title, fontsize="medium")
            axes.set(xlabel=labels[0], ylabel=labels[1])
            axes.grid(alpha=0.3)
        figure.legend(handles.values(), handles.keys(), loc="outside right upper")
        figure.savefig(path, metadata={"Date": None})
        pyplot.close(figure)
