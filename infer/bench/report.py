"""The report of a benchmark: tables to read, and the files of a report folder."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from poss_jax.checkpoint.record import provenance
from poss_jax.checkpoint.whole import refuse_non_empty, sole_writer, write_file
from poss_jax.config.decoding import SamplingConfig
from poss_jax.config.paths import local_path
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
from .statistics import FEWEST, format_estimate
from .summary import LOOPING_BELOW


def format_report(report: dict[str, Any]) -> str:
    """Formats the report as Markdown tables."""
    lines = [
        f"{report['max_new_tokens']} new tokens, {report['repeats']} repeats; in brackets 95 % "
        f"intervals over questions, where there are {FEWEST} or more",
        *_describe_sampling(report["config"]),
    ]
    sampled = {name for name, row in report["methods"].items() if row["drafting"] == "sampled"}
    if sampled:
        lines.append(
            "outputs are not compared: with sampled drafts they equal autoregressive ones in "
            "distribution only"
        )
    for group in report["groups"]:
        table = partial(_group_table, group, sampled=sampled)
        lines += ["", *_describe_group(group), *table("all")]
        lines += _comparison_table(group["comparisons"])
        if 0 < len(group["looping_questions"]) < group["questions"]:
            lines += ["", "without those whose answers loop", "", *table("not_looping")]
            lines += _comparison_table(group["comparisons_not_looping"])
    phases = _phase_table(report) if "roofline" in report else []
    return "\n".join([*lines, "", *_memory_table(report), *phases])


def _describe_sampling(config: dict[str, Any]) -> list[str]:
    """Line about sampling settings besides temperature and seed; empty for the defaults."""
    defaults, ours = config_to_dict(SamplingConfig()), ("temperature", "seed")
    changed = [
        f"{key} {value}"
        for key, value in config["sampling"].items()
        if value != defaults[key] and key not in ours
    ]
    if config["drafting"] != "coupled":
        changed.append(f"{config['drafting']} drafts")
    return [f"sampling: {', '.join(changed)}"] if changed else []


def _describe_group(group: dict[str, Any]) -> list[str]:
    seeds = f", seeds {group['seeds']}" if group["temperature"] else ""
    num_looping = len(group["looping_questions"])
    return [
        f"## {group['set']}, temperature {group['temperature']:g}",
        "",
        f"{group['questions']} questions{seeds}; {num_looping} of them loop (distinct 4-grams "
        f"below {LOOPING_BELOW})",
        "",
    ]


def _group_table(group: dict[str, Any], subset: str, *, sampled: set[str]) -> list[str]:
    rows = {name: entry[subset] for name, entry in group["methods"].items() if subset in entry}
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
    return [*format_rows(head, table), "", *fold("positions and times", _times_table(rows))]


def _times_table(rows: dict[str, Any]) -> list[str]:
    head = ["method", "accepted at positions 1, 2, ...", "copied"]
    head += ["first token ms", "p90", "ms per token", "p90"]
    table = [
        [
            name,
            ", ".join(f"{share:.0%}" for share in row["positionwise_acceptance"]["value"]),
            format_estimate(row["copied_per_round"]) if row["copied_per_round"]["value"] else "",
            *(f"{row['first_token_milliseconds'][key]:.1f}" for key in ("p50", "p90")),
            *(f"{row['token_milliseconds'][key]:.2f}" for key in ("p50", "p90")),
        ]
        for name, row in rows.items()
    ]
    return format_rows(head, table)


def _comparison_table(comparisons: list[dict[str, Any]]) -> list[str]:
    if not comparisons:
        return []
    table = []
    for pair in comparisons:
        cells = [f"{pair['second']} - {pair['first']}"]
        for key, digits in (("acceptance_length", 3), ("tokens_per_second", 1)):
            cells.append(format_estimate(pair[key]["difference"], digits=digits))
            cells.append(f"{pair[key]['p_value']:.4f}")
        table.append(cells)
    head = ["second - first", "acceptance length", "p", "tokens/s", "p"]
    return ["", *format_rows(head, table)]


def _memory_table(report: dict[str, Any]) -> list[str]:
    table = []
    for name, entry in report["methods"].items():
        memory = entry["memory"]
        cells = [name, entry["tree"] or "no draft"]
        cells += [f"{memory['draft_parameters']:,}", f"{memory['draft_bytes'] / 1e6:.2f}"]
        sizes = (f"{memory[f'{of}_cache_bytes_per_token']:,}" for of in ("target", "draft"))
        first = entry["first_token_seconds"]
        cells += [" + ".join(sizes), f"{entry['compile_seconds']:.1f}"]
        cells += [f"{first['cold']:.2f}", f"{first['warm']:.4f}"]
        table.append(cells)
    head = ["method", "tree: depth/top_k/nodes", "parameters of the draft", "MB held"]
    head += ["cache bytes per token: target + draft", "compile s", "first token, cold s", "warm s"]
    return ["## Trees, memory and compilation", "", *format_rows(head, table)]


def _phase_table(report: dict[str, Any]) -> list[str]:
    head = ["method", *(f"{name} ms" for name in (*PARTS, "round")), "sum / round"]
    table = []
    for name, entry in report["methods"].items():
        phases = entry["phase_milliseconds"]
        cells = [f"{phases[key]:.2f}" if key in phases else "" for key in (*PARTS, "round")]
        table.append([name, *cells, f"{entry['phases_to_round']:.2f}"])
    steps = report["autoregressive_step_milliseconds"]
    return [
        "",
        "## Phases",
        "",
        *format_rows(head, table),
        "",
        f"autoregressive loop {steps['loop']:.2f} ms per token, plain decode step "
        f"{steps['plain']:.2f} ms: ratio {steps['loop_to_plain']:.2f}; floor {steps['floor']:.2f} "
        f"ms: {steps['floor_to_loop']:.0%} of the loop",
        "",
        *_format_card(report),
    ]


def _format_card(report: dict[str, Any]) -> list[str]:
    """Bytes, FLOPs, floors and measured times of all phases, as a table."""
    device, table = report["roofline"]["device"], []
    int8 = report["roofline"]["flops_by_rows"].get("int8")
    for method, entry in report["methods"].items():
        for phase, cost in entry["costs"].items():
            cells = [method, phase, f"{cost['bytes'] / 1e6:.2f}", f"{cost['flops'] / 1e9:.3f}"]
            taken, share = entry["phase_milliseconds"][phase], cost["floor_to_measured"]
            cells += [f"{cost['floor_milliseconds']:.3f}", f"{max(taken, 0.0):.3f}"]
            table.append([*cells, "" if share is None else f"{share:.0%}"])
    head = ["method", "phase", "MB", "GFLOP", "floor ms", "ms", "floor / ms"]
    return [
        f"{device['name']}: {device['bytes_per_second'] / 1e9:.1f} GB/s, "
        f"{device['flops_per_second'] / 1e9:.0f} GFLOP/s"
        + (f", {int8 / 1e9:.0f} with int8 weights" if int8 else ""),
        "",
        *format_rows(head, table),
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


@contextmanager
def open_output(output: str | None, *, overwrite: bool) -> Iterator[Path | None]:
    """Yields the folder for a report, which no other process writes meanwhile; None: there is none.

    Raises:
      UserError: no report can be written there, or another process writes one.
    """
    if output is None:
        yield None
        return
    folder = local_path(output, "output")
    check_output(folder, overwrite=overwrite)
    with sole_writer(folder):
        yield folder


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
    compared = _compared(report)
    tables = [_format_group(group, compared) for group in report["groups"]]
    return "\n\n".join(["\n".join(lines) for lines in (*tables, describe(report))])


def describe(report: dict[str, Any]) -> list[str]:
    """Says which draft is fastest over all groups, what the drafts accept, and what is equal."""
    baseline = report["baseline"]
    total = {name: add_up(report, name) for name in report["methods"]}
    drafts = [name for name in total if name != baseline]
    if not drafts:
        return [f"Without a draft: {total[baseline]['speed']:.1f} tokens/s."]
    best = max(drafts, key=lambda name: total[name]["speed"])
    ratio = total[best]["speed"] / total[baseline]["speed"]
    compared = [name for name in drafts if name in _compared(report)]
    is_same = best in compared and total[best]["equal"] == total[best]["answers"]
    lengths = (f"{name} {total[name]['tokens'] / total[name]['passes']:.2f}" for name in drafts)
    lines = [
        f"{best} wrote {'the same ' if is_same else ''}{total[best]['answers']} texts {ratio:.2f} x"
        " as fast as decoding without a draft.",
        f"Tokens per pass of the target, all texts pooled: {', '.join(lengths)}; without a draft "
        "1.",
        *_advise(report["methods"]),
    ]
    if not compared:
        return lines
    equal, answers = (sum(total[name][key] for name in compared) for key in ("equal", "answers"))
    return [*lines, f"{equal} of {answers} texts with drafts equal those without, token for token."]


def _advise(methods: dict[str, Any]) -> list[str]:
    """Says what a draft vocabulary would save (`compare`)."""
    saved = [f"{name} {row['saves']:.0%}" for name, row in methods.items() if "saves" in row]
    lead = f"With {FEW_TOKENS:,} tokens (poss draft-vocab) rounds would read less"
    return [f"{lead}: {', '.join(saved)}."] if saved else []


def add_up(report: dict[str, Any], name: str) -> dict[str, float]:
    """Adds up the answers of a method over all groups."""
    rows = [group["methods"][name]["all"] for group in report["groups"]]
    passes = sum(sum(row["rounds_by_accepted"]) for row in rows)
    accepted = sum(
        count * rounds for row in rows for count, rounds in enumerate(row["rounds_by_accepted"])
    )
    seconds = sum(row["seconds"] for row in rows)
    return {
        "speed": sum(row["new_tokens"] for row in rows) / seconds,
        "passes": max(passes, 1),
        "tokens": passes + accepted,
        "equal": sum(row["equal_outputs"] for row in rows),
        "answers": sum(row["answers"] for row in rows),
    }


def _compared(report: dict[str, Any]) -> set[str]:
    """Names methods whose texts are compared; sampled drafts match in distribution only."""
    methods = report["methods"]
    return {name for name, method in methods.items() if method["drafting"] != "sampled"}


def _format_group(group: dict[str, Any], compared: set[str]) -> list[str]:
    head = ["", "acceptance length", "tokens/s", "speed-up (95 %)", "equal texts"]
    rows = []
    for name, entry in group["methods"].items():
        row = entry["all"]
        equal = f"{row['equal_outputs']} of {row['answers']}" if name in compared else ""
        speed = f"{row['tokens_per_second']['value']:.1f}"
        length = format_estimate(row["acceptance_length"] | {"low": None})
        rows.append([name, length, speed, _ranged(row["speed_up"]), equal])
    title = f"{group['set']}, temperature {group['temperature']:g}, {group['questions']} questions"
    return [title, *align(head, rows)]


def _ranged(number: dict[str, Any]) -> str:
    """A number with its interval."""
    ends = "" if number["low"] is None else f" ({number['low']:.2f} to {number['high']:.2f})"
    return f"{format_estimate(number | {'low': None})}{ends}"
