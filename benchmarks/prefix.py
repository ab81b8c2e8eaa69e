"""Time to first token in chats of eight turns, with and without the prefix cache.

Two schedulers share the engine; every turn is asked of both, one after the other, and their answers
must be equal. Time of the processor, summed over its cores, is measured too: it depends less on
what else runs. Without --target the default model and its first draft answer.

Prints a table, and as its last line one JSON object; --output keeps report.json and report.md.

    python -m benchmarks.prefix --output docs/results/prefix
"""

import argparse
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from tqdm import tqdm

from benchmarks.options import add_numbers, make_parser
from infer.bench.report import show_report
from poss_jax.bundled.default import default_drafts, default_target
from poss_jax.checkpoint.record import provenance
from poss_jax.engine.answers import Generation
from poss_jax.engine.engine import Engine
from poss_jax.engine.prompts import PreparedPrompt
from poss_jax.engine.scheduler import Scheduler
from poss_jax.engine.slots import Slots
from poss_jax.program.running import run_program
from poss_jax.program.tables import format_rows

SYSTEM = (
    "You are the assistant of a small library in a town at the sea. You help readers to find "
    "books, explain words they do not know, and answer questions about nature, history and "
    "cooking. Be friendly and short. If you do not know something, say so and name a shelf where "
    "the reader may look. Never recommend more than three books at once."
)
TOPICS = ("whales", "bread")
CLOCKS = ("milliseconds", "processor_milliseconds")
TURNS = (
    "What should I know about {}?",
    "Explain the most surprising part in simple words.",
    "Who was the first to write about {}?",
    "Give me three questions that a child might ask about it.",
    "Answer the second of these questions.",
    "How has our knowledge of {} changed in a hundred years?",
    "Which shelf should I go to?",
    "Thank you! Sum up in two sentences what you told me.",
)


def ask(scheduler: Scheduler, prompt: PreparedPrompt) -> tuple[dict[str, float], Generation]:
    """Milliseconds until the first token, by clock and by processor, and the answer."""
    begun, used = time.perf_counter(), time.process_time()
    chunks = iter(scheduler.submit(prompt))
    first = next(chunks)
    spans = time.perf_counter() - begun, time.process_time() - used
    answer = [first, *chunks][-1].answer
    assert answer is not None
    return dict(zip(CLOCKS, (1000 * one for one in spans), strict=True)), answer


def play_chats(
    engine: Engine, schedulers: Sequence[Scheduler], max_new_tokens: int
) -> Iterator[dict[str, Any]]:
    """A row per turn of every chat; `schedulers` are without and with the prefix cache."""
    for topic in tqdm(TOPICS, unit="chat"):
        messages: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}]
        for turn, question in enumerate(TURNS, start=1):
            messages.append({"role": "user", "content": question.format(topic)})
            prompt = engine.prepare(messages, max_new_tokens)
            (without, expected), (cached, answer) = (ask(one, prompt) for one in schedulers)
            assert answer == expected, "the texts differ"
            messages.append({"role": "assistant", "content": answer.text})
            yield {
                "turn": turn,
                "prompt_tokens": len(prompt.ids),
                "cached_tokens": answer.cached_tokens,
                "without": without,
                "with": cached,
            }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Plays all chats on compiled programs, from an empty cache on."""
    target = args.target or default_target()
    draft = args.draft if args.target else next(iter(default_drafts().values()))
    engine = Engine.load(target, draft, max_length=args.max_length)
    slots = [
        Slots(engine, sizes=(1,), max_length=args.max_length, max_prefix_bytes=most)
        for most in (0, args.mib * 2**20)
    ]
    schedulers = [Scheduler(one) for one in slots]
    for one in schedulers:
        one.warm_up()
    slots[1].prefixes.clear()
    rows = list(play_chats(engine, schedulers, args.max_new_tokens))
    kept = len(slots[1].prefixes) * slots[1].chunk
    for one in schedulers:
        one.close()
    bytes_per_token = slots[1].prefixes.most_bytes / slots[1].prefixes.most / slots[1].chunk
    return {
        "rows": rows,
        "chunk": slots[1].chunk,
        "kept_tokens": kept,
        "kept_mib": kept * bytes_per_token / 2**20,
        "provenance": provenance(),
    }


def format_report(report: dict[str, Any]) -> str:
    """Writes the report in Markdown: medians over the chats."""
    counts, rows = ("prompt_tokens", "cached_tokens"), []
    for turn in range(1, len(TURNS) + 1):
        of_turn = [row for row in report["rows"] if row["turn"] == turn]
        cells = [f"{np.median([row[name] for row in of_turn]):.0f}" for name in counts]
        for clock in CLOCKS:
            times = np.array(
                [[row[kind][clock] for kind in ("without", "with")] for row in of_turn]
            )
            cells += [f"{one:.0f}" for one in np.median(times, axis=0)]
            cells.append(f"{np.median(times[:, 0] / times[:, 1]):.1f}")
        rows.append((turn, *cells))
    head = ["turn", "prompt tokens", "of them cached"]
    head += ["first token without, ms", "with", "ratio"]
    head += ["processor without, ms", "with", "ratio"]
    total, cached = (sum(row[name] for row in report["rows"]) for name in counts)
    lines = [
        f"{len(TOPICS)} chats, blocks of {report['chunk']} tokens, medians. All answers were equal."
        f" {100 * cached / total:.0f} % of the prompts' tokens were cached, in "
        f"{report['kept_mib']:.0f} MiB ({report['kept_tokens']} tokens).",
        "",
    ]
    return "\n".join([*lines, *format_rows(head, rows)])


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses arguments, measures, prints."""
    parser = make_parser(__doc__)
    parser.add_argument("--target", metavar="DIR")
    parser.add_argument("--draft", metavar="DIR")
    add_numbers(parser, {"max-new-tokens": 96, "max-length": 2048, "mib": 1024})
    args = parser.parse_args(arguments)
    report = measure(args)
    show_report(report, format_report(report), args.output)


if __name__ == "__main__":
    run_program(main)
