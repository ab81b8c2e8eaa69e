"""Copies of prompt and answer in the draft tree: tokens per round and per second, by kind of task.

Answers the tasks of `lookup_tasks.py` with the default model, greedily and at temperature 1:
with the bundled PosS-1, with PosS-1 and lookup, and with lookup alone, all with as many nodes as
the tree tuned for PosS-1. Methods take turns on every task, and each answer is compared with the
one without drafts, which is decoded in a batch. Prints a table, and as its last line one JSON
object; --output keeps report.json and report.md. Times are of rounds alone; CPU time is of all
threads. --lookup is the most tokens that a round copies, if the tree has as many nodes. What the
folder's report already has, of the same settings, is not measured again.

    python -m benchmarks.lookup --output docs/results/lookup
"""

import json
import time
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import geometric_mean, mean
from typing import Any, NamedTuple

from benchmarks.lookup_tasks import NUM_TASKS, make_tasks
from benchmarks.options import add_numbers, make_parser
from infer.bench.report import show_report
from poss_jax.bundled.default import default_drafts, default_target
from poss_jax.checkpoint.record import provenance
from poss_jax.config.decoding import SamplingConfig
from poss_jax.data.progress import progress_bar
from poss_jax.decode.state import StaticShape
from poss_jax.engine.answers import Generation
from poss_jax.engine.engine import Engine
from poss_jax.engine.prompts import PreparedPrompt
from poss_jax.engine.trees import tree_for
from poss_jax.program.output import format_rows
from poss_jax.program.running import run_program

DRAFT = "PosS-1"
BOTH, LOOKUP = f"{DRAFT} + lookup", "lookup"
TEMPERATURES = (0.0, 1.0)


class Timed(NamedTuple):
    """An answer, and the seconds that its rounds took."""

    answer: Generation
    seconds: float
    cpu_seconds: float

    @property
    def num_tokens(self) -> int:
        """Tokens of the rounds."""
        return len(self.answer.output_ids) - 1

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.num_tokens / self.seconds


def load_engines(target: str | None, draft: str | None, num_copied: int) -> dict[str, Engine]:
    """The methods by name; None takes the bundled models."""
    alone = Engine.load(target or default_target())
    drafted = alone.load_draft(draft or default_drafts()[DRAFT])
    trees = drafted.trees
    return {
        DRAFT: drafted,
        BOTH: drafted.with_tree(trees, lookup=num_copied),
        LOOKUP: alone.with_tree(trees, lookup=num_copied),
    }


def answer(engine: Engine, prompt: PreparedPrompt) -> Timed:
    """Answers a prompt, and times the rounds after the first token."""
    final, clocks = None, list[tuple[float, float]]()
    for chunk in engine.decode_rounds(prompt):
        final = chunk.answer
        clocks.append((time.perf_counter(), time.process_time()))
    assert final is not None
    seconds, cpu_seconds = (end - begin for begin, end in zip(clocks[0], clocks[-1], strict=True))
    return Timed(final, seconds, cpu_seconds)


def measure(
    engines: Mapping[str, Engine], questions: Sequence[str], temperature: float, max_tokens: int
) -> dict[str, dict[str, float]]:
    """Answers questions, each by one method after the other; sums up the methods by name."""
    alone = engines[LOOKUP].with_tree(engines[LOOKUP].trees, lookup=0)
    prompts = [
        alone.prepare(
            [{"role": "user", "content": question}],
            max_tokens,
            SamplingConfig(temperature=temperature, seed=seed),
        )
        for seed, question in enumerate(questions)
    ]
    names, timed, compiled = list(engines), list[dict[str, Timed]](), set[StaticShape]()
    for index, prompt in enumerate(prompts):
        answers = {}
        for name in names[index % len(names) :] + names[: index % len(names)]:
            length = len(prompt.ids) + prompt.max_new_tokens
            config = engines[name].decode_config(length)
            if config not in compiled:
                answer(engines[name], prompt)
                compiled.add(config)
            answers[name] = answer(engines[name], prompt)
        timed.append(answers)
    expected = alone.decode(prompts, batch_size=len(prompts))
    return {name: summarise(timed, expected, name) for name in names}


def summarise(
    answers: Sequence[Mapping[str, Timed]], expected: Sequence[Generation], name: str
) -> dict[str, float]:
    """Sums up one method's answers to some tasks.

    `speed_up` is the mean ratio of its tokens per second to the draft's, task by task.
    """
    timed = [task[name] for task in answers]
    rounds = [count for task in timed for count in task.answer.accepted_per_round]
    ratios = [task[name].rate / task[DRAFT].rate for task in answers if task[name].num_tokens]
    num_tokens = sum(task.num_tokens for task in timed)
    pairs = zip(timed, expected, strict=True)
    return {
        "answers": len(timed),
        "equal": sum(task.answer.output_ids == alone.output_ids for task, alone in pairs),
        "acceptance_length": 1 + mean(rounds),
        "copied_per_round": sum(sum(t.answer.copied_per_round) for t in timed) / len(rounds),
        "tokens_per_second": num_tokens / sum(task.seconds for task in timed),
        "speed_up": geometric_mean(ratios),
        "cpu_milliseconds_per_token": 1000 * sum(task.cpu_seconds for task in timed) / num_tokens,
    }


def read_groups(folder: Path | None, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Groups of the report in a folder, if it has these settings."""
    if folder is None or not (path := folder / "report.json").is_file():
        return []
    report = json.loads(path.read_text())
    return report["groups"] if settings.items() <= report.items() else []


def format_table(report: Mapping[str, Any]) -> str:
    """Writes the report in Markdown."""
    heads = "task", "T", "method", "tokens per round", "copied", "tokens/s", f"x {DRAFT}"
    rows = [
        (group["kind"], f"{group['temperature']:g}", name, f"{row['acceptance_length']:.2f}",
         f"{row['copied_per_round']:.2f}", f"{row['tokens_per_second']:.1f}",
         f"{row['speed_up']:.2f}", f"{row['cpu_milliseconds_per_token']:.1f}",
         f"{row['equal']} of {row['answers']}")
        for group in report["groups"]
        for name, row in group["methods"].items()
    ]  # fmt: skip
    return "\n".join(format_rows((*heads, "CPU ms per token", "equal"), rows))


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses arguments, measures, prints."""
    parser = make_parser(__doc__)
    for name in ("target", "draft"):
        parser.add_argument(f"--{name}", metavar="DIR", help="model folder (default: the bundled)")
    parser.add_argument("--kinds", nargs="+", choices=(kinds := [*make_tasks()]), default=kinds)
    add_numbers(parser, {"tasks": NUM_TASKS, "tokens": 64, "lookup": 8})
    args = parser.parse_args(arguments)
    engines = load_engines(args.target, args.draft, args.lookup)
    tasks = {kind: make_tasks()[kind][: args.tasks] for kind in args.kinds}
    tree = tree_for(engines[DRAFT].trees, 1)
    settings = {
        "tree": tree and tree.name,
        "lookup": args.lookup,
        "max_new_tokens": args.tokens,
        "tasks": args.tasks,
    }
    groups = read_groups(args.output, settings)
    measured = {(group["kind"], group["temperature"]) for group in groups}
    pairs = [pair for pair in product(tasks, TEMPERATURES) if pair not in measured]
    for kind, temperature in progress_bar(pairs):
        methods = measure(engines, tasks[kind], temperature, args.tokens)
        groups.append({"kind": kind, "temperature": temperature, "methods": methods})
        print(format_table({"groups": groups[-1:]}), flush=True)
    report = settings | {"groups": groups, "provenance": provenance()}
    show_report(report, format_table(report), args.output)


if __name__ == "__main__":
    run_program(main)
