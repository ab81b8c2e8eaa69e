"""The page of a benchmark: one HTML file that opens with the answer; no network, no script."""

import io
from collections.abc import Callable
from importlib.util import find_spec
from itertools import cycle
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup

from .by_depth import draw_drift, draw_gap, draw_interval
from .phases import PARTS
from .report import add_up, describe

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#785ef0", "#999999")
"""Colours of drafts in figures, distinct without red and green, on white and on black."""

_TEMPLATE = Path(__file__).with_name("page.html")


def write_page(report: dict[str, Any], path: Path) -> None:
    """Writes the page; where matplotlib is not installed, the first figure is the only one."""
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    colours = dict(zip(report["methods"], cycle(COLOURS), strict=False))
    drift = report.get("drift", {}).get("drafts")
    answers = [group["example"].get("answers", {}) for group in report["groups"]]
    depths = [
        depth for by_method in answers for pieces in by_method.values() for _, depth in pieces
    ]
    page = template.render(
        report=report,
        said=describe(report),
        drafts=_rank(report),
        reach=_reach(report),
        colours=colours,
        number=_number,
        figures=[_draw_group(group, report["baseline"], colours) for group in report["groups"]],
        drift=drift and _draw("Drift of features", draw_drift, drift, colours),
        gap=drift and _draw("Acceptance in training and in decoding", draw_gap, drift, colours),
        phases="roofline" in report and _draw("Phases of a round", _phases, report),
        deepest=max(depths, default=0),
    )
    path.write_text(page, encoding="utf-8")


def _rank(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Numbers of the drafts over all groups, the fastest first."""
    total = {name: add_up(report, name) for name in report["methods"]}
    plain = total.pop(report["baseline"])["speed"]
    drafts = [of | {"name": name, "speed_up": of["speed"] / plain} for name, of in total.items()]
    return sorted(drafts, key=lambda draft: -draft["speed_up"])


def _reach(report: dict[str, Any]) -> float:
    """The largest speed-up of a group, or the end of its interval."""
    methods = [method for group in report["groups"] for method in group["methods"].values()]
    numbers = [method["all"]["speed_up"] for method in methods]
    return max(speed_up["high"] or speed_up["value"] or 1 for speed_up in numbers)


def _number(value: float, *neighbours: float | None) -> str:
    """Formats a number with about three digits, and as many decimals as others next to it need."""
    largest = max(abs(number) for number in (value, *neighbours) if number is not None)
    decimals = sum(largest < bound for bound in (1, 10, 100))
    return f"{round(value, decimals) + 0.0:,.{decimals}f}"  # no -0.00


def _draw_group(group: dict[str, Any], baseline: str, colours: dict[str, str]) -> list[Markup]:
    shown = {name: rows.get("not_looping", rows["all"]) for name, rows in group["methods"].items()}
    drafts = {name: rows for name, rows in shown.items() if name != baseline}
    return [
        _draw("Acceptance by position", _positions, drafts, colours),
        _draw("Accepted drafted tokens per round", _rounds, drafts, colours),
    ]


def _draw(title: str, draw: Callable[..., None], *args: Any) -> Markup:
    """Draws a figure as SVG text in the page's colours; nothing without matplotlib."""
    if find_spec("matplotlib") is None:
        return Markup()
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    settings: dict[Any, Any] = {
        "svg.hashsalt": "poss_jax",
        "svg.fonttype": "none",
        "font.family": "sans-serif",
        "legend.frameon": False,
    }
    with pyplot.rc_context(settings):
        figure, axes = pyplot.subplots(figsize=(5.4, 3.4), layout="constrained")
        draw(axes, *args)
        if draw is not _phases:
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize="small")
        numbers = _describe_axes(axes)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None}, transparent=True)
        pyplot.close(figure)
    _, _, svg = text.getvalue().replace("#000000", "currentColor").partition("<svg")
    opening = Markup('<svg role="img" aria-label="{}"').format(title)
    named = Markup("><title>{}</title><desc>{}</desc>").format(title, numbers)
    return opening + Markup(svg.replace(">", named, 1))


def _describe_axes(axes: Any) -> str:
    """Says in words what a figure shows: its axes, and the numbers of every line and bar."""
    series = [(line.get_label(), line.get_ydata()) for line in axes.get_lines()]
    series += [(bars.get_label(), bars.datavalues) for bars in axes.containers]
    numbers = (
        f"{name}: {', '.join(_number(value) for value in values if np.isfinite(value))}"
        for name, values in series
    )
    labels = " by ".join(filter(None, (axes.get_ylabel(), axes.get_xlabel())))
    return f"{labels}. {'; '.join(numbers)}"


def _positions(axes: Any, drafts: dict[str, Any], colours: dict[str, str]) -> None:
    for name, rows in drafts.items():
        draw_interval(axes, rows["positionwise_acceptance"], label=name, color=colours[name])
    axes.set(xlabel="draft position", ylabel="accepted, given all before", ylim=(0, 1))


def _rounds(axes: Any, drafts: dict[str, Any], colours: dict[str, str]) -> None:
    width = 0.8 / max(len(drafts), 1)
    for index, (name, rows) in enumerate(drafts.items()):
        counts = rows["rounds_by_accepted"] or [0]
        at = [accepted - 0.4 + (index + 0.5) * width for accepted in range(len(counts))]
        shares = [count / max(sum(counts), 1) for count in counts]
        axes.bar(at, shares, width, label=name, color=colours[name])
    axes.set(xlabel="accepted drafted tokens", ylabel="share of rounds")


def _phases(axes: Any, report: dict[str, Any]) -> None:
    methods = report["methods"]
    starts = [0.0] * len(methods)
    for phase, colour in zip(PARTS, COLOURS, strict=False):
        times = [entry["phase_milliseconds"].get(phase, 0.0) for entry in methods.values()]
        axes.barh(list(methods), times, left=starts, label=phase, color=colour)
        starts = [a + b for a, b in zip(starts, times, strict=True)]
    axes.invert_yaxis()
    axes.set(xlabel="milliseconds per round")
