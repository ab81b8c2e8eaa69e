"""Answers under JSON schemas: are all valid, how long are drafts accepted, what do rounds cost?

Asks the default model for an example of every schema of `schemas.jsonl`, greedily: with its bundled
draft under the schema as grammar and without grammar, and some without the draft under the grammar.
Prints a table, and as its last line one JSON object; --output keeps report.json and report.md.
Times are of rounds alone, from the first token on; CPU time is of all threads.

    python -m benchmarks.structured --output docs/results/structured
"""

import json
import time
from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple

import jsonschema_rs

from benchmarks.options import Schema, add_numbers, make_parser, read_schemas
from infer.bench.report import show_report
from poss_jax.bundled.default import default_drafts, default_target
from poss_jax.checkpoint.record import provenance
from poss_jax.data.progress import progress_bar
from poss_jax.engine.answers import Generation
from poss_jax.engine.engine import Engine
from poss_jax.engine.grammar import Grammar
from poss_jax.program.output import format_rows
from poss_jax.program.running import run_program

DRAFT = "PosS-1"
_QUESTION = "Write an example of JSON that matches this schema, and nothing else: "
_MAX_LENGTH = 2048


class Asked(NamedTuple):
    """An answer, and the seconds that its rounds took."""

    schema: Schema
    answer: Generation
    seconds: float
    cpu_seconds: float


def ask(engine: Engine, schema: Schema, max_tokens: int, *, is_guided: bool) -> Asked:
    """Asks for an example of a schema."""
    messages = [{"role": "user", "content": _QUESTION + json.dumps(schema)}]
    prompt = engine.prepare(messages, max_tokens, max_length=_MAX_LENGTH)
    if is_guided:
        prompt = Grammar.json_schema(schema).constrain(prompt, engine)
    final, clocks = None, list[tuple[float, float]]()
    for chunk in engine.decode_rounds(prompt):
        final = chunk.answer
        clocks.append((time.perf_counter(), time.process_time()))
    assert final is not None
    seconds, cpu_seconds = (end - begin for begin, end in zip(clocks[0], clocks[-1], strict=True))
    return Asked(schema, final, seconds, cpu_seconds)


def is_valid(text: str, schema: Schema) -> bool:
    """True for JSON that matches a schema."""
    try:
        jsonschema_rs.validate(schema, json.loads(text), validate_formats=True)
    except ValueError:
        return False
    return True


def summarise(asked: Sequence[Asked]) -> dict[str, Any]:
    """Counts answers, and averages rounds; the first answers compile, so times are medians."""
    finished = [answer for answer in asked if answer.answer.stop_reason == "stop"]
    counted = [(answer, len(answer.answer.accepted_per_round)) for answer in asked]
    counted = [(answer, num_rounds) for answer, num_rounds in counted if num_rounds]
    num_later = sum(len(answer.answer.output_ids) - 1 for answer in asked)
    return {
        "answers": len(asked),
        "finished": len(finished),
        "valid": sum(is_valid(str(answer.answer.text), answer.schema) for answer in finished),
        "tokens": sum(len(answer.answer.output_ids) for answer in asked),
        "tokens_per_round": num_later / max(sum(count for _, count in counted), 1),
        "milliseconds": 1000 * median(answer.seconds / count for answer, count in counted),
        "cpu_milliseconds": 1000 * median(answer.cpu_seconds / count for answer, count in counted),
    }


def format_table(report: dict[str, Any]) -> str:
    """Writes the report in Markdown."""
    columns = ("answers", "finished", "valid", "tokens")
    rows = [
        (name, *(str(run[column]) for column in columns), f"{run['tokens_per_round']:.2f}",
         f"{run['milliseconds']:.1f}", f"{run['cpu_milliseconds']:.1f}")
        for name, run in report["runs"].items()
    ]  # fmt: skip
    heads = "", *columns, "tokens per round", "ms per round", "CPU ms per round"
    table = format_rows(heads, rows)
    equal, of = report["equal"], report["runs"]["grammar, no draft"]["answers"]
    return "\n".join([*table, "", f"With the draft {equal} of {of} texts are those without."])


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses arguments, measures, prints."""
    parser = make_parser(__doc__)
    add_numbers(parser, {"schemas": 200, "alone": 25, "tokens": 128})
    args = parser.parse_args(arguments)
    alone = Engine.load(default_target())
    engine = alone.load_draft(default_drafts()[DRAFT])
    runs: dict[str, list[Asked]] = {"grammar": [], "no grammar": [], "grammar, no draft": []}
    num_equal = 0
    for index, (_, schema) in enumerate(progress_bar(read_schemas()[: args.schemas])):
        guided = ask(engine, schema, args.tokens, is_guided=True)
        runs["grammar"].append(guided)
        runs["no grammar"].append(ask(engine, schema, args.tokens, is_guided=False))
        if index < args.alone:
            unassisted = ask(alone, schema, args.tokens, is_guided=True)
            runs["grammar, no draft"].append(unassisted)
            num_equal += unassisted.answer.output_ids == guided.answer.output_ids
    report = {
        "runs": {name: summarise(answers) for name, answers in runs.items()},
        "equal": num_equal,
        "provenance": provenance(),
    }
    show_report(report, format_table(report), args.output)


if __name__ == "__main__":
    run_program(main)
