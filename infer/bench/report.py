"""The report of a benchmark: tables to read, a web page, and the files of a report folder."""

import io
import json
from collections.abc import Callable
from importlib.util import find_spec
from itertools import cycle
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup

from poss_jax.checkpoint.record import provenance
from poss_jax.checkpoint.whole import refuse_non_empty, write_file
from poss_jax.config.decoding import SamplingConfig
from poss_jax.config.reading import config_to_dict, cut
from poss_jax.program.output import (
    align,
    check_writable,
    fold,
    format_rows,
    print_summary,
    wants_json,
)

from .costs import FEW_TOKENS
from .phases import PARTS
from .summary import FEWEST, LOOPING_BELOW, format_estimate

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#785ef0", "#999999")
"""Colours of drafts in figures, distinct without red and green, on white and on black."""

_SHARE = {"ylabel": "accepted, given all before", "ylim": (0, 1)}
_COSINE = {"ylabel": "cosine with the target's feature"}
_TEMPLATE = Path(__file__).with_name("page.html")


def format_report(report: dict[str, Any]) -> str:
    """Formats the report as Markdown tables."""
    config, defaults = report["config"], config_to_dict(SamplingConfig())
    changed = [
        f"{key} {value}"
        for key, value in config["sampling"].items()
        if value != defaults[key] and key not in ("temperature", "seed")
    ]
    if config["drafting"] != "coupled":
        changed.append(f"{config['drafting']} drafts")
    lines = [
        f"{report['max_new_tokens']} new tokens, {report['repeats']} repeats; in brackets 95 % "
        f"intervals over questions, where there are {FEWEST} or more",
        *[f"sampling: {', '.join(changed)}"] * bool(changed),
    ]
    sampled = _sampled(report)
    if sampled:
        lines.append(
            "outputs are not compared: with sampled drafts they equal autoregressive ones in "
            "distribution only"
        )
    for group in report["groups"]:
        seeds = f", seeds {group['seeds']}" if group["temperature"] else ""
        num_looping = len(group["looping_questions"])
        lines += [
            f"\n## {group['set']}, temperature {group['temperature']:g}\n",
            f"{group['questions']} questions{seeds}; {num_looping} of them loop (distinct 4-grams "
            f"below {LOOPING_BELOW})\n",
            *_group_tables(group["methods"], "all", group["comparisons"], sampled),
        ]
        if 0 < num_looping < group["questions"]:
            pairs = group["comparisons_not_looping"]
            lines.append("\nwithout those whose answers loop\n")
            lines += _group_tables(group["methods"], "not_looping", pairs, sampled)
    phases = _phase_tables(report) if "roofline" in report else []
    return "\n".join([*lines, "", *_memory_table(report["methods"]), *phases])


def _group_tables(
    methods: dict[str, Any], subset: str, comparisons: list[dict[str, Any]], sampled: set[str]
) -> list[str]:
    """Tables of all methods, and of the drafts in pairs."""
    rows = {name: entry[subset] for name, entry in methods.items() if subset in entry}
    head = ["method", "acceptance length", "pooled", "tokens/s", "speed-up", "equal"]
    table = [
        [
            name,
            format_estimate(row["acceptance_length"]),
            format_estimate(row["pooled_acceptance_length"] | {"low": None}),
            f"{row['tokens_per_second']['value']:.0f}",
            format_estimate(row["speed_up"]),
            "" if name in sampled else f"{row['equal_outputs']} of {row['answers']}",
        ]
        for name, row in rows.items()
    ]
    times_head = ["method", "accepted at positions 1, 2, ...", "copied"]
    times_head += ["first token ms", "p90", "ms per token", "p90"]
    times = [
        [
            name,
            ", ".join(f"{share:.0%}" for share in row["positionwise_acceptance"]["value"]),
            format_estimate(row["copied_per_round"]) if row["copied_per_round"]["value"] else "",
            *(f"{row['first_token_milliseconds'][key]:.1f}" for key in ("p50", "p90")),
            *(f"{row['token_milliseconds'][key]:.2f}" for key in ("p50", "p90")),
        ]
        for name, row in rows.items()
    ]
    lines = [*format_rows(head, table), ""]
    lines += fold("positions and times", format_rows(times_head, times))
    if comparisons:
        pairs = []
        for pair in comparisons:
            cells = [f"{pair['second']} - {pair['first']}"]
            for key, digits in (("acceptance_length", 3), ("tokens_per_second", 1)):
                cells.append(format_estimate(pair[key]["difference"], digits=digits))
                cells.append(f"{pair[key]['p_value']:.4f}")
            pairs.append(cells)
        pairs_head = ["second - first", "acceptance length", "p", "tokens/s", "p"]
        lines += ["", *format_rows(pairs_head, pairs)]
    return lines


def _memory_table(methods: dict[str, Any]) -> list[str]:
    table = []
    for name, entry in methods.items():
        memory, first = entry["memory"], entry["first_token_seconds"]
        sizes = (f"{memory[f'{of}_cache_bytes_per_token']:,}" for of in ("target", "draft"))
        table.append(
            [
                name,
                entry["tree"] or "no draft",
                f"{memory['draft_parameters']:,}",
                f"{memory['draft_bytes'] / 1e6:.2f}",
                " + ".join(sizes),
                f"{entry['compile_seconds']:.1f}",
                f"{first['cold']:.2f}",
                f"{first['warm']:.4f}",
            ]
        )
    head = ["method", "tree: depth/top_k/nodes", "parameters of the draft", "MB held"]
    head += ["cache bytes per token: target + draft", "compile s", "first token, cold s", "warm s"]
    return ["## Trees, memory and compilation", "", *format_rows(head, table)]


def _phase_tables(report: dict[str, Any]) -> list[str]:
    """Times of all phases, and their bytes, FLOPs and floors."""
    table, card = [], []
    for method, entry in report["methods"].items():
        phases = entry["phase_milliseconds"]
        cells = [f"{phases[key]:.2f}" if key in phases else "" for key in (*PARTS, "round")]
        table.append([method, *cells, f"{entry['phases_to_round']:.2f}"])
        for phase, cost in entry["costs"].items():
            cells = [method, phase, f"{cost['bytes'] / 1e6:.2f}", f"{cost['flops'] / 1e9:.3f}"]
            cells += [f"{cost['floor_milliseconds']:.3f}", f"{max(phases[phase], 0.0):.3f}"]
            share = cost["floor_to_measured"]
            card.append([*cells, "" if share is None else f"{share:.0%}"])
    steps, device = report["autoregressive_step_milliseconds"], report["roofline"]["device"]
    int8 = report["roofline"]["flops_by_rows"].get("int8")
    head = ["method", *(f"{name} ms" for name in (*PARTS, "round")), "sum / round"]
    card_head = ["method", "phase", "MB", "GFLOP", "floor ms", "ms", "floor / ms"]
    return [
        "\n## Phases\n",
        *format_rows(head, table),
        f"\nautoregressive loop {steps['loop']:.2f} ms per token, plain decode step "
        f"{steps['plain']:.2f} ms: ratio {steps['loop_to_plain']:.2f}; floor {steps['floor']:.2f} "
        f"ms: {steps['floor_to_loop']:.0%} of the loop\n",
        f"{device['name']}: {device['bytes_per_second'] / 1e9:.1f} GB/s, "
        f"{device['flops_per_second'] / 1e9:.0f} GFLOP/s"
        + (f", {int8 / 1e9:.0f} with int8 weights\n" if int8 else "\n"),
        *format_rows(card_head, card),
    ]


def with_provenance(report: dict[str, Any], config: Any) -> dict[str, Any]:
    """Adds a program's settings and the process that ran it."""
    return report | {"config": config_to_dict(config), "provenance": provenance()}


def check_output(folder: Path, *, overwrite: bool) -> None:
    """Refuses a folder that no report can be written to; only a report is overwritten."""
    holds_report = any(
        (folder / name).is_file() for name in ("report.json", "report.md", "bench.json")
    )
    if not (overwrite and holds_report):
        refuse_non_empty(folder)
    check_writable(folder, is_folder=True)


def write_report(report: dict[str, Any], table: str, folder: Path) -> None:
    """Writes report.json and report.md, which is the same as Markdown."""
    folder.mkdir(parents=True, exist_ok=True)
    write_file(folder / "report.json", json.dumps(report, indent=2) + "\n")
    write_file(folder / "report.md", table + "\n")


def show_report(
    report: dict[str, Any],
    table: str,
    folder: Path | None,
    *,
    finding: str | None = None,
    brief: str | None = None,
    write: Callable[[Path], None] | None = None,
) -> None:
    """Prints a report as a table, or for people its brief form, and for programs a line of JSON.

    The line has all of the report only if --json asks for it; else it says what was found and
    where the report lies.

    Args:
      table: the report as Markdown.
      folder: folder to write both to; None writes nothing.
      finding: what was found, in a sentence; None: the line always has all.
      brief: text for a terminal; None: the table.
      write: writes more files to the folder.
    """
    print(table if brief is None or wants_json() else brief)
    if folder is not None:
        write_report(report, table, folder)
        if write is not None:
            write(folder)
        print(f"report: {folder}")
    path = None if folder is None else str(folder / "report.json")
    closing = None if finding is None else {"found": cut(finding, 300), "report": path}
    print_summary(report, "", brief=closing)


# --------------------------------------------------------------------------------------------------
# The short report for a terminal: small tables, and three sentences about them


def format_brief(report: dict[str, Any]) -> str:
    """Formats the main numbers of a report within 80 columns."""
    sampled, parts = _sampled(report), []
    head = ["", "acceptance length", "tokens/s", "speed-up (95 %)", "equal texts"]
    for group in report["groups"]:
        table = []
        for name, row in ((name, entry["all"]) for name, entry in group["methods"].items()):
            number = row["speed_up"]
            speed_up = format_estimate(number | {"low": None})
            if number["low"] is not None:
                speed_up += f" ({number['low']:.2f} to {number['high']:.2f})"
            length = format_estimate(row["acceptance_length"] | {"low": None})
            equal = "" if name in sampled else f"{row['equal_outputs']} of {row['answers']}"
            table.append(
                [name, length, f"{row['tokens_per_second']['value']:.1f}", speed_up, equal]
            )
        title = f"{group['set']}, temperature {group['temperature']:g}"
        parts.append([f"{title}, {group['questions']} questions", *align(head, table)])
    return "\n\n".join("\n".join(lines) for lines in (*parts, describe(report)))


def describe(report: dict[str, Any]) -> list[str]:
    """Says which draft is fastest over all groups, what the drafts accept, and what is equal."""
    total = add_up(report)
    if len(total) == 1:
        return [f"Without a draft: {total[report['baseline']]['speed']:.1f} tokens/s."]
    del total[report["baseline"]]
    best = max(total, key=lambda name: total[name]["speed"])
    compared = total.keys() - _sampled(report)
    is_same = best in compared and total[best]["equal"] == total[best]["answers"]
    lengths = (f"{name} {row['tokens'] / row['passes']:.2f}" for name, row in total.items())
    lines = [
        f"{best} wrote {'the same ' if is_same else ''}{total[best]['answers']} texts "
        f"{total[best]['speed_up']:.2f} x as fast as decoding without a draft.",
        f"Tokens per pass of the target, all texts pooled: {', '.join(lengths)}; without a draft "
        "1.",
    ]
    methods = report["methods"]
    saved = [f"{name} {row['saves']:.0%}" for name, row in methods.items() if "saves" in row]
    if saved:
        lead = f"With {FEW_TOKENS:,} tokens (poss draft-vocab) rounds would read less"
        lines.append(f"{lead}: {', '.join(saved)}.")
    if compared:
        equal, answers = (
            sum(total[name][key] for name in compared) for key in ("equal", "answers")
        )
        lines.append(
            f"{equal} of {answers} texts with drafts equal those without, token for token."
        )
    return lines


def add_up(report: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Adds up the answers of every method over all groups."""
    total = {}
    for name in report["methods"]:
        rows = [group["methods"][name]["all"] for group in report["groups"]]
        passes = sum(sum(row["rounds_by_accepted"]) for row in rows)
        accepted = sum(
            count * rounds for row in rows for count, rounds in enumerate(row["rounds_by_accepted"])
        )
        total[name] = {
            "speed": sum(row["new_tokens"] for row in rows) / sum(row["seconds"] for row in rows),
            "passes": max(passes, 1),
            "tokens": passes + accepted,
            "equal": sum(row["equal_outputs"] for row in rows),
            "answers": sum(row["answers"] for row in rows),
        }
    plain = total[report["baseline"]]["speed"]
    return {name: row | {"speed_up": row["speed"] / plain} for name, row in total.items()}


def _sampled(report: dict[str, Any]) -> set[str]:
    """Methods with sampled drafts, whose texts match in distribution only: none are compared."""
    return {name for name, method in report["methods"].items() if method["drafting"] == "sampled"}


# --------------------------------------------------------------------------------------------------
# The page: one HTML file that opens with the answer; no network, no script


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
    ranked = sorted(total, key=lambda name: -total[name]["speed_up"])
    page = template.render(
        report=report,
        said=describe(report),
        drafts=[total[name] | {"name": name} for name in ranked],
        reach=max(reach),
        colours=colours,
        number=_number,
        figures=figures,
        by_depth=_draw_drift(report["drift"]["drafts"], colours) if "drift" in report else ("", ""),
        phases="roofline" in report and _draw("Phases of a round", _phases, report),
        deepest=max(depths),
    )
    path.write_text(page, encoding="utf-8")


def _draw_drift(drafts: dict[str, Any], colours: dict[str, str]) -> list[Markup]:
    cosine, trained, decoded = (
        {name: of["by_depth"][key] for name, of in drafts.items() if key in of["by_depth"]}
        for key in ("feature_cosine", "conditional_acceptance", "decoded_conditional_acceptance")
    )
    title = "Acceptance in training and in decoding"
    return [
        _draw("Drift of features", _positions, cosine, colours, _COSINE),
        _draw(title, _positions, trained, colours, _SHARE, decoded),
    ]


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
    """Draws numbers by position, with their intervals; decoded ones are dashed."""
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
