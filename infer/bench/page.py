"""The page of a benchmark: one HTML file with tables, figures and coloured text, no network."""

import io
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup

from .phases import PARTS

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999")
"""Colours of drafts in figures; they can be told apart without red and green."""

_TEMPLATE = Path(__file__).with_name("page.html")


def write_page(report: dict[str, Any], path: Path) -> None:
    """Writes the page, without figures if matplotlib is not installed."""
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    names: list[str] = list(report["methods"])
    colours = {name: COLOURS[place % len(COLOURS)] for place, name in enumerate(names)}
    has_figures = find_spec("matplotlib") is not None
    figures = [
        _draw_group(group, report["baseline"], colours) for group in report["groups"] if has_figures
    ]
    by_depth = report["drift"]["drafts"] if has_figures and "drift" in report else None
    page = template.render(
        report=report,
        figures=figures,
        drift=by_depth and _draw(_drift, by_depth, colours),
        gap=by_depth and _draw(_gap, by_depth, colours),
        phases=_draw(_phases, report) if has_figures and "roofline" in report else "",
        deepest=max(map(_deepest, report["groups"]), default=0),
    )
    path.write_text(page, encoding="utf-8")


def _draw_group(group: dict[str, Any], baseline: str, colours: dict[str, str]) -> dict[str, str]:
    part = {name: rows.get("not_looping", rows["all"]) for name, rows in group["methods"].items()}
    drafts = {name: rows for name, rows in part.items() if name != baseline}
    return {
        "positions": _draw(_positions, drafts, colours),
        "speed": _draw(_speeds, drafts, colours),
        "rounds": _draw(_rounds, drafts, colours),
    }


def _draw(draw: Callable[..., None], *args: Any) -> Markup:
    """Draws a figure as SVG text."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    settings: dict[Any, Any] = {
        "svg.hashsalt": "poss_jax",
        "svg.fonttype": "none",
        "font.family": "sans-serif",
    }
    with pyplot.rc_context(settings):
        figure, axes = pyplot.subplots(figsize=(5.4, 3.4), layout="constrained")
        draw(axes, *args)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None}, transparent=True)
        pyplot.close(figure)
    svg = text.getvalue()
    return Markup(svg[svg.index("<svg") :])


def _positions(axes: Any, drafts: dict[str, Any], colours: dict[str, str]) -> None:
    for name, rows in drafts.items():
        shares = rows["positionwise_acceptance"]
        places = range(1, len(shares["value"]) + 1)
        axes.plot(places, shares["value"], marker="o", label=name, color=colours[name])
        known = [i for i, low in enumerate(shares["low"] or []) if low is not None]
        axes.fill_between(
            [places[i] for i in known],
            [shares["low"][i] for i in known],
            [shares["high"][i] for i in known],
            color=colours[name],
            alpha=0.15,
            linewidth=0,
        )
    axes.set(xlabel="draft position", ylabel="accepted, given all before", ylim=(0, 1))
    _finish(axes)


def _speeds(axes: Any, drafts: dict[str, Any], colours: dict[str, str]) -> None:
    for name, rows in drafts.items():
        ratio = rows["speed_up"]
        axes.bar(name, ratio["value"], color=colours[name])
        if ratio["low"] is not None:
            ends = [[ratio["value"] - ratio["low"]], [ratio["high"] - ratio["value"]]]
            axes.errorbar(name, ratio["value"], ends, color="black", capsize=4)
    axes.axhline(1, color="grey", linewidth=1)
    axes.set(ylabel="tokens per second, relative to no draft")
    axes.grid(axis="y", alpha=0.3)


def _rounds(axes: Any, drafts: dict[str, Any], colours: dict[str, str]) -> None:
    width = 0.8 / max(len(drafts), 1)
    for place, (name, rows) in enumerate(drafts.items()):
        counts = rows["rounds_by_accepted"] or [0]
        at = [accepted - 0.4 + (place + 0.5) * width for accepted in range(len(counts))]
        shares = [count / max(sum(counts), 1) for count in counts]
        axes.bar(at, shares, width, label=name, color=colours[name])
    axes.set(xlabel="accepted drafted tokens", ylabel="share of rounds")
    _finish(axes)


def _drift(axes: Any, drafts: dict[str, Any], colours: dict[str, str]) -> None:
    for name, draft in drafts.items():
        if "feature_cosine" in draft["by_depth"]:
            cosine = draft["by_depth"]["feature_cosine"]
            value, low, high = (np.array(cosine[key], float) for key in ("value", "low", "high"))
            places = range(1, len(value) + 1)
            axes.plot(places, value, marker="o", label=name, color=colours[name])
            axes.fill_between(places, low, high, color=colours[name], alpha=0.15, linewidth=0)
    axes.set(xlabel="draft position", ylabel="cosine with the target's feature")
    _finish(axes)


def _gap(axes: Any, drafts: dict[str, Any], colours: dict[str, str]) -> None:
    for name, draft in drafts.items():
        for way, style in (("", "-"), ("decoded_", "--")):
            value = draft["by_depth"][f"{way}conditional_acceptance"]["value"]
            label = None if way else name
            places = range(1, len(value) + 1)
            axes.plot(places, np.array(value, float), style, label=label, color=colours[name])
    axes.set(xlabel="draft position", ylabel="accepted, given all before", ylim=(0, 1))
    _finish(axes)


def _phases(axes: Any, report: dict[str, Any]) -> None:
    methods = report["methods"]
    left = [0.0] * len(methods)
    for part, colour in zip(PARTS, COLOURS, strict=False):
        times = [entry["phase_milliseconds"].get(part, 0.0) for entry in methods.values()]
        axes.barh(list(methods), times, left=left, label=part, color=colour)
        left = [a + b for a, b in zip(left, times, strict=True)]
    axes.invert_yaxis()
    axes.set(xlabel="milliseconds per round")
    axes.legend(fontsize="small")
    axes.grid(axis="x", alpha=0.3)


def _finish(axes: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="small")


def _deepest(group: dict[str, Any]) -> int:
    """Deepest position that an example has an accepted token of."""
    answers: dict[str, Sequence[Any]] = group["example"].get("answers", {})
    return max((depth for pieces in answers.values() for _, depth in pieces), default=0)
