"""The short report for a terminal: small tables, and three sentences about them."""

from typing import Any

from poss_jax.program.tables import align


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
        f"Tokens per pass of the target: {', '.join(lengths)}; without a draft 1.",
    ]
    if not compared:
        return lines
    equal, answers = (sum(total[name][key] for name in compared) for key in ("equal", "answers"))
    return [*lines, f"{equal} of {answers} texts with drafts equal those without, token for token."]


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
    head = ["", "tokens per pass", "tokens/s", "speed-up (95 %)", "equal texts"]
    rows = []
    for name, entry in group["methods"].items():
        row = entry["all"]
        equal = f"{row['equal_outputs']} of {row['answers']}" if name in compared else ""
        speed = f"{row['tokens_per_second']['value']:.1f}"
        rows.append([name, _number(row["acceptance_length"]), speed, _ranged(row), equal])
    about = f"{group['set']}, temperature {group['temperature']:g}, {group['questions']} questions"
    return [about, *align(head, rows)]


def _number(estimate: dict[str, Any]) -> str:
    return "" if estimate["value"] is None else f"{estimate['value']:.2f}"


def _ranged(row: dict[str, Any]) -> str:
    """Speed-up with its interval."""
    ratio = row["speed_up"]
    ends = "" if ratio["low"] is None else f" ({ratio['low']:.2f} to {ratio['high']:.2f})"
    return f"{_number(ratio)}{ends}"
