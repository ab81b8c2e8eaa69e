"""Answers under JSON schemas: whether all are valid, and how long drafts are accepted.

Asks the default model for an example of every schema of `schemas.py`, greedily: with its bundled
draft under the schema as grammar and without grammar, and some without the draft under the grammar.
Prints a table, and as its last line one JSON object; --output keeps report.json and report.md.

    python -m benchmarks.structured --output docs/results/structured
"""

import json
import time
from collections.abc import Sequence
from typing import Any

import jsonschema_rs
from tqdm import tqdm

from benchmarks.options import add_numbers, make_parser
from benchmarks.schemas import Schema, draw_schemas
from infer.bench.report import show_report
from poss_jax.bundled.default import default_drafts, default_target
from poss_jax.checkpoint.record import provenance
from poss_jax.engine.answers import Generation
from poss_jax.engine.engine import Engine
from poss_jax.engine.grammar import Grammar
from poss_jax.program.running import run_program
from poss_jax.program.tables import format_rows

DRAFT = "PosS-1"
_QUESTION = "Write an example of JSON that matches this schema, and nothing else: "
_MAX_LENGTH = 1024


def ask(engine: Engine, schema: Schema, most: int, *, is_guided: bool) -> tuple[Generation, float]:
    """The answer, and the seconds that it took."""
    messages = [{"role": "user", "content": _QUESTION + json.dumps(schema)}]
    grammar = Grammar.json_schema(schema) if is_guided else None
    prompt = engine.prepare(messages, most, max_length=_MAX_LENGTH, grammar=grammar)
    begun = time.perf_counter()
    (answer,) = engine.decode([prompt])
    return answer, time.perf_counter() - begun


def is_valid(text: str, schema: Schema) -> bool:
    """True for JSON that matches a schema."""
    try:
        jsonschema_rs.validate(schema, json.loads(text), validate_formats=True)
    except ValueError:
        return False
    return True


def summarise(answers: Sequence[tuple[Schema, Generation, float]]) -> dict[str, Any]:
    """Counts answers, and averages rounds; the first answers compile, so times are medians."""
    accepted = [count for _, one, _ in answers for count in one.accepted_per_round]
    finished = [(schema, one) for schema, one, _ in answers if one.stop_reason == "stop"]
    per_round = sorted(seconds / max(len(one.accepted_per_round), 1) for _, one, seconds in answers)
    return {
        "answers": len(answers),
        "finished": len(finished),
        "valid": sum(is_valid(str(one.text), schema) for schema, one in finished),
        "tokens": sum(len(one.output_ids) for _, one, _ in answers),
        "acceptance_length": 1 + sum(accepted) / max(len(accepted), 1),
        "milliseconds_per_round": 1000 * per_round[len(per_round) // 2],
    }


def format_table(report: dict[str, Any]) -> str:
    """Writes the report in Markdown."""
    columns = ("answers", "finished", "valid", "tokens")
    rows = [
        (name, *(str(one[column]) for column in columns), f"{one['acceptance_length']:.2f}",
         f"{one['milliseconds_per_round']:.0f}")
        for name, one in report["runs"].items()
    ]  # fmt: skip
    table = format_rows(["", *columns, "tokens per round", "ms per round and prompt"], rows)
    equal, of = report["equal"], report["runs"]["grammar, no draft"]["answers"]
    return "\n".join([*table, "", f"With the draft {equal} of {of} texts are those without."])


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses arguments, measures, prints."""
    parser = make_parser(__doc__)
    add_numbers(parser, {"schemas": 8, "alone": 25, "tokens": 128})
    args = parser.parse_args(arguments)
    alone = Engine.load(default_target())
    engine = alone.load_draft(default_drafts()[DRAFT])
    runs: dict[str, list[Any]] = {"grammar": [], "no grammar": [], "grammar, no draft": []}
    num_equal = 0
    for index, (_, schema) in enumerate(tqdm(list(draw_schemas(args.schemas)))):
        guided, seconds = ask(engine, schema, args.tokens, is_guided=True)
        runs["grammar"].append((schema, guided, seconds))
        runs["no grammar"].append((schema, *ask(engine, schema, args.tokens, is_guided=False)))
        if index < args.alone:
            other, seconds = ask(alone, schema, args.tokens, is_guided=True)
            runs["grammar, no draft"].append((schema, other, seconds))
            num_equal += other.output_ids == guided.output_ids
    report = {
        "runs": {name: summarise(answers) for name, answers in runs.items()},
        "equal": num_equal,
        "provenance": provenance(),
    }
    show_report(report, format_table(report), args.output)


if __name__ == "__main__":
    run_program(main)
