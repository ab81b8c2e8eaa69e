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

from .phases import PARTS
from .report import add_up, describe

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#785ef0", "#999999")
"""Colours of drafts in figures, distinct without red and green, on white and on black."""

_SHARE = {"ylabel": "accepted, given all before", "ylim": (0, 1)}
_COSINE = {"ylabel": "cosine with the target's feature"}
_TEMPLATE = Path(__file__).with_name("page.html")


def write_page(report: dict[str, Any], path: Path) -> None:
    """Writes the page; where matplotlib is not installed, the first figure is the only one."""
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    colours = dict(zip(report["methods"], cycle(COLOURS), strict=False))
    total, figures, reach, depths = add_up(report), [], [], [0]
    del total[report["baseline"]]
    for group in report["groups"]:
        methods = group["methods"]
        drafts = {name: methods[name].get("not_looping", methods[name]["all"]) for name in total}
        accepted = {name: rows["positionwise_acceptance"] for name, rows in drafts.items()}
        figures.append(
            [
                _draw("Acceptance by position", _positions, accepted, colours, _SHARE),
                _draw("Accepted drafted tokens per round", _rounds, drafts, colours),
            ]
        )
        speed_ups = [entry["all"]["speed_up"] for entry in methods.values()]
        reach += [number["high"] or number["value"] or 1 for number in speed_ups]
        answers = group["example"].get("answers", {})
        depths += [depth for pieces in answers.values() for _, depth in pieces]
    drift = gap = None
    if "drift" in report:
        by_depth = {name: of["by_depth"] for name, of in report["drift"]["drafts"].items()}
        cosine, trained, decoded = (
            {name: numbers[key] for name, numbers in by_depth.items() if key in numbers}
            for key in (
                "feature_cosine",
                "conditional_acceptance",
                "decoded_conditional_acceptance",
            )
        )
        drift = _draw("Drift of features", _positions, cosine, colours, _COSINE)
        title = "Acceptance in training and in decoding"
        gap = _draw(title, _positions, trained, colours, _SHARE, decoded)
    ranked = sorted(total, key=lambda name: -total[name]["speed_up"])
    page = template.render(
        report=report,
        said=describe(report),
        drafts=[total[name] | {"name": name} for name in ranked],
        reach=max(reach),
        colours=colours,
        number=_number,
        figures=figures,
        drift=drift,
        gap=gap,
        phases="roofline" in report and _draw("Phases of a round", _phases, report),
        deepest=max(depths),
    )
    path.write_text(page, encoding="utf-8")


def _number(value: float, *neighbours: float | None) -> str:
    """Formats a number with about three digits, and as many decimals as others next to it need."""
    largest = max(abs(number) for number in (value, *neighbours) if number is not None)
    decimals = sum(largest < bound for bound in (1, 10, 100))
    return f"{round(value, decimals) + 0.0:,.{decimals}f}"  # no -0.00


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
        words = _describe_axes(axes)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None}, transparent=True)
        pyplot.close(figure)
    _, _, svg = text.getvalue().replace("#000000", "currentColor").partition("<svg")
    opening = Markup('<svg role="img" aria-label="{}"').format(title)
    named = Markup("><title>{}</title><desc>{}</desc>").format(title, words)
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


def _positions(
    axes: Any,
    numbers: dict[str, Any],
    colours: dict[str, str],
    labels: dict[str, Any],
    decoded: dict[str, Any] | None = None,
) -> None:
    """Draws numbers by position, with their intervals; those of decoding are dashed."""
    for name in numbers:
        lines = [(numbers[name], {"label": name, "marker": "o"})]
        if decoded is not None:
            lines.append((decoded[name], {"label": f"{name}, decoding", "linestyle": "--"}))
        for number, style in lines:
            value, low, high = (np.array(number[key], float) for key in ("value", "low", "high"))
            position, colour = np.arange(1, len(value) + 1), colours[name]
            axes.plot(position, value, color=colour, **style)
            axes.fill_between(position, low, high, color=colour, alpha=0.12, linewidth=0)
    axes.set(xlabel="draft position", **labels)


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
