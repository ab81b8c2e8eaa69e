"""Copies of prompt and answer in the draft tree: tokens per round and per second, by kind of task.

Answers tasks of which much, something or nothing stands in the prompt already, 20 of each of five
kinds, with the default model, greedily and at temperature 1: with the bundled PosS-1, with PosS-1
and lookup, and with lookup alone, all with as many nodes as the tree tuned for PosS-1. Methods take
turns on every task, and each answer is compared with the one without drafts, which is decoded in a
batch. Prints a table, and as its last line one JSON object; --output keeps report.json and
report.md as they grow, and does not measure again what they have of the same settings. Times are of
rounds alone; CPU time is of all threads. --lookup is the most tokens that a round copies, if the
tree has as many nodes.

    python -m benchmarks.lookup --output docs/results/lookup
"""

import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import geometric_mean, mean
from typing import Any, NamedTuple

from benchmarks.options import add_numbers, make_parser
from infer.bench.report import show_report, write_report
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
NUM_TASKS = 20


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


def answer_timed(engine: Engine, prompt: PreparedPrompt) -> Timed:
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
                answer_timed(engines[name], prompt)
                compiled.add(config)
            answers[name] = answer_timed(engines[name], prompt)
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
    report = settings | {"groups": groups, "provenance": provenance()}
    measured = {(group["kind"], group["temperature"]) for group in groups}
    pairs = [pair for pair in product(tasks, TEMPERATURES) if pair not in measured]
    for kind, temperature in progress_bar(pairs):
        methods = measure(engines, tasks[kind], temperature, args.tokens)
        groups.append({"kind": kind, "temperature": temperature, "methods": methods})
        if args.output is not None:
            write_report(report, format_table(report), args.output)
    show_report(report, format_table(report), args.output)


# --------------------------------------------------------------------------------------------------
# Tasks, made of a few sentences and lists; the same number gives the same task

_FIRST = "Ada Boris Clara Dmitri Elena Farid Greta Hugo Ines Jonas Kaya Liam Mira Nils Olga".split()
_LAST = "Almeida Brandt Castillo Dahl Eriksen Fontaine Gruber Haddad Ivanova Jansen Keller".split()
_TOWNS = "Arlesund Brackwater Corvale Dunmere Eastholm Fernhill Glenrock Harrowgate Isleton".split()
_GOODS = "lamp kettle bicycle saddle notebook telescope rope lantern compass blanket hammer".split()
_THINGS = "account booking cart invoice letter order parcel player recipe sensor ticket".split()
_VERBS = "archive cancel confirm export inspect load merge print refresh rename schedule".split()

_METHOD = '''
    def {verb}_{thing}(self, {thing}, reason=""):
        """Handles one {thing}: {verb} it and write it to the log."""
        if {thing} is None:
            raise ValueError("no {thing} to {verb}")
        self.{thing}s[{thing}.number] = {thing}
        self.log.append(("{verb}", {thing}.number, reason))
        return {thing}.number
'''
_CLASS = '''class {Thing}Store:
    """Keeps every {thing} of a shop by its number."""

    def __init__(self, name, limit={limit}):
        self.name = name
        self.limit = limit
        self.{thing}s = {{}}
        self.log = []
'''
_EDITS = (
    "Rename the method {verb}_{thing} to {verb}_one_{thing}.",
    "Rename the attribute log to history.",
    "Change the default limit to {other}.",
    "Rename the class {Thing}Store to {Thing}Shelf.",
)
_ARTICLE = (
    "The town of {town} has decided to close the old bridge over the river from {month} on. "
    "{name}, who has led the council for {years} years, said that the bridge was built for "
    "carts and not for lorries. Engineers found {count} cracks in the northern arch last "
    "winter, and they expect the repair to take {weeks} weeks. Until then, buses will go "
    "round by the mill, which adds about {minutes} minutes to the way to the station. "
    "Shopkeepers in the lower town fear that they will lose customers, and they have asked "
    "the council for a ferry. {baker}, who owns the bakery next to the bridge, said that half"
    " of her customers come from the other side. The council will decide about the ferry in "
    "its next meeting. The repair will cost {cost} thousand crowns, of which the province "
    "pays one third."
)
_ORDER = (
    "Order number: {number}\nCustomer: {name}\nStreet: {street} Mill Road\nTown: {town}\n"
    "Ordered on: {day} {month}\nItem: {good}\nQuantity: {count}\nPrice per item: {cost} crowns\n"
    "Delivery: by boat, within {weeks} weeks\nRemark: please ring the bell twice"
)
_FIELDS = (
    "order_number, customer, street, town, ordered_on, item, quantity, price, delivery, remark"
)
_QUOTED = (
    ("Why is the bridge closed, in the words of {name}?"),
    ("What will happen to the buses?"),
    ("What do the shopkeepers fear?"),
    ("What will the repair cost, and who pays?"),
)
_CHAT: tuple[str, ...] = (
    "What is the difference between a lake and a pond?",
    "Give me three ideas for a rainy afternoon with children.",
    "How do I keep bread fresh for longer?",
    "Explain in simple words why the sky is blue.",
    "Write a short poem about a lighthouse.",
    "What should I pack for a weekend in the mountains?",
    "How does a bicycle stay upright?",
    "Tell me a short story about a fox who learns to swim.",
    "What are good habits for learning a language?",
    "How can I ask my neighbour to be quieter, politely?",
    "Why do leaves change their colour in autumn?",
    "What does an archivist do all day?",
    "Name some vegetables that grow well in the shade.",
    "How do I write a good letter of thanks?",
    "What is a prime number? Give examples.",
    "Which is better for a small flat, a cat or a dog?",
    "How do tides work?",
    "Suggest a name for a small bakery, and say why it fits.",
    "What can I cook with rice, eggs and spinach?",
    "How do I start running without hurting myself?",
)


def edit(rng: random.Random) -> str:
    """Asks for a class with a small change."""
    thing, verbs = rng.choice(_THINGS), rng.sample(_VERBS, 3)
    names = {"thing": thing, "Thing": thing.capitalize(), "verb": verbs[0]}
    code = _CLASS.format(**names, limit=rng.randrange(10, 99))
    code += "".join(_METHOD.format(verb=verb, thing=thing) for verb in verbs)
    change = rng.choice(_EDITS).format(**names, other=rng.randrange(100, 999))
    return f"{change} Write the whole class again.\n\n```python\n{code}```"


def summary(rng: random.Random) -> str:
    """Asks for a summary of a text."""
    return f"Summarise this text in three sentences.\n\n{_ARTICLE.format(**_draw(rng))}"


def json_of_document(rng: random.Random) -> str:
    """Asks for the fields of a document as JSON."""
    document = _ORDER.format(**_draw(rng))
    return f"Write this order as a JSON object with the fields {_FIELDS}.\n\n{document}"


def quote(rng: random.Random) -> str:
    """Asks a question whose answer is a sentence of the text."""
    facts = _draw(rng)
    question = rng.choice(_QUOTED).format(**facts)
    text = _ARTICLE.format(**facts)
    return f"{text}\n\n{question} Quote the sentences of the text that say it, word for word."


def _draw(rng: random.Random) -> dict[str, str | int]:
    months = "January March May June August September October December".split()
    name, baker = (f"{rng.choice(_FIRST)} {rng.choice(_LAST)}" for _ in range(2))
    texts: dict[str, str | int] = {"name": name, "baker": baker, "town": rng.choice(_TOWNS)}
    texts |= {"month": rng.choice(months), "good": rng.choice(_GOODS)}
    limits = {"years": 20, "count": 30, "weeks": 40, "minutes": 25, "cost": 900, "day": 28}
    limits |= {"number": 99999, "street": 80}
    return texts | {key: rng.randrange(2, limit) for key, limit in limits.items()}


KINDS: dict[str, Callable[[random.Random], str]] = {
    "edit": edit,
    "summary": summary,
    "JSON": json_of_document,
    "quote": quote,
}


def make_tasks() -> dict[str, list[str]]:
    """Questions by kind, the same in every run."""
    made = {
        kind: [make(random.Random(f"{kind} {number}")) for number in range(NUM_TASKS)]
        for kind, make in KINDS.items()
    }
    return made | {"chat": list(_CHAT)}


if __name__ == "__main__":
    run_program(main)
