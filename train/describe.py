"""Report of the data a run trains on, and a sample of it in words."""

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from poss_jax.data.rows import Rows
from poss_jax.program.running import text_marks

_SAMPLE_TOKENS = 300


def describe_data(report: dict[str, Any]) -> list[str]:
    """Says what became of a data set.

    Args:
      report: report of `Prepared`.

    Returns:
      Lines for people.
    """
    dropped = sum(report["dropped"].values())
    lines = [
        f"data      {report['source']}: {report['records']:,} records of {report['kind']}, "
        f"{dropped:,} of them dropped"
    ]
    if dropped:
        lines.append(f"dropped   {_counts(report['dropped'])}; first {report['first_dropped'][0]}")
    if report["used_in_part"]:
        lines.append(f"in part   {_counts(report['used_in_part'])}")
    if report["template"]:
        lines.append(f"template  {report['template']}")
    if not report["ends_turns"]:
        lines.append(
            "          no special token ends its answers: the model cannot learn where to stop"
        )
    if "features" in report:
        lines.append(f"features  {report['features']}")
    for name, key in (("training", "train"), ("held out", "validation")):
        lines += _describe_part(name, report[key], report["packing"])
    return lines


def describe_sample(rows: Rows, tokenizer: Any) -> list[str]:
    """Shows the first document of the first row, marking what is trained on."""
    before, after = text_marks()
    document = (rows.documents[0] == 1).nonzero()[0]
    begin = max(0, int(rows.loss_mask[0].argmax()) - _SAMPLE_TOKENS // 2)
    shown = document[begin : begin + _SAMPLE_TOKENS]
    parts = []
    for is_trained, group in groupby(shown, lambda index: rows.loss_mask[0, index]):
        text = tokenizer.decode(rows.tokens[0, list(group)])
        parts.append(f"{before}{text}{after}" if is_trained else text)
    return [f"sample    {before}this{after} is trained on", "".join(parts).rstrip("\n")]


def _describe_part(name: str, part: dict[str, Any], packing: str) -> Iterator[str]:
    lengths = ", ".join(f"{key} {value:,}" for key, value in part["lengths"].items())
    yield (
        f"{name}  {part['documents']:,} documents, {part['tokens']:,} tokens, "
        f"{part['learnt']:.1%} of them trained on"
    )
    yield f"          lengths {lengths}; {part['truncated']:,} cut to a row"
    if part["split_by_answer"]:
        yield (
            f"          {part['split_by_answer']:,} chats have a document per answer, because the "
            "template rewrites earlier turns"
        )
    yield f"          {part['rows']:,} rows, packing {packing}, {part['filled']:.1%} filled"


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{reason} {count:,}" for reason, count in counts.items())
