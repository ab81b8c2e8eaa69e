"""Round time and its floor by used context, batch size, and depth and nodes of the tree.

A small random pair decodes in caches of one size. How much of them is used is set without a prompt,
and only one of the four numbers changes at a time. If a round's time grew with the cache's size
instead of the used context, its line would be flat, far above the floor. Prints a table, and as its
last line one JSON object; --output keeps report.json, report.md and a plot.

    python -m benchmarks.growth --output docs/results/growth
    python -m benchmarks.growth --size 1024 --contexts 128 512 --batch-sizes 1 4 --depths 2 4
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.options import add_numbers, make_parser, read_shape
from benchmarks.random_pair import interleaved, random_engines, timed_rounds
from infer.bench.costs import Device, cost_card, describe_workload, floors
from infer.bench.phases import mark_done, start
from infer.bench.rates import find_roofline
from infer.bench.report import show_report
from poss_jax.checkpoint.record import provenance
from poss_jax.config.models import LlamaConfig, TreeConfig
from poss_jax.config.reading import UserError
from poss_jax.engine.engine import Engine
from poss_jax.engine.prompts import PreparedPrompt
from poss_jax.program.arguments import at_least
from poss_jax.program.running import run_program
from poss_jax.program.tables import format_rows

_PROMPT = 8


@dataclass(frozen=True)
class Point:
    """Settings that a round is timed with.

    Attributes:
      context: committed tokens of every sequence.
      batch: number of sequences.
      tree: size of the tree; None decodes autoregressively.
    """

    context: int
    batch: int
    tree: TreeConfig | None

    @property
    def name(self) -> str:
        """Name of the point in reports."""
        tree = "autoregressive" if self.tree is None else self.tree.name
        return f"context {self.context}, batch {self.batch}, {tree}"


def plan_sweeps(args: argparse.Namespace) -> dict[str, list[tuple[int, Point]]]:
    """Points of every sweep by its name: the number that changes, and what is timed."""
    middle = Point(args.contexts[0], 1, TreeConfig(depth=6, top_k=10, total_tokens=60))
    alone = replace(middle, tree=None)
    tree = middle.tree
    assert tree is not None
    return {
        "context": [(n, replace(middle, context=n)) for n in args.contexts],
        "context, autoregressive": [(n, replace(alone, context=n)) for n in args.contexts],
        "batch": [(n, replace(middle, batch=n)) for n in args.batch_sizes],
        "batch, autoregressive": [(n, replace(alone, batch=n)) for n in args.batch_sizes],
        "depth": [(n, replace(middle, tree=replace(tree, depth=n))) for n in args.depths],
        "total_tokens": [
            (n, replace(middle, tree=replace(tree, total_tokens=n))) for n in args.total_tokens
        ],
    }


def time_point(
    baseline: Engine, drafted: Engine, point: Point, *, size: int, num_rounds: int
) -> Callable[[], float]:
    """Returns a function that gives milliseconds per round."""
    engine = baseline if point.tree is None else drafted.with_tree(point.tree)
    config, request = _request(engine, point.batch, size)
    state = start(engine.weights, config, request)
    length = state.target_cache.length * 0 + point.context
    state = mark_done(state).replace(target_cache=state.target_cache.replace(length=length))
    if state.draft is not None:
        cache = state.draft.cache.replace(length=length + 0)  # a separate array
        state = state.replace(draft=state.draft.replace(cache=cache))

    return timed_rounds(engine, config, request, state, num_rounds)


def floor_of(baseline: Engine, drafted: Engine, point: Point, device: Device, size: int) -> float:
    """Least milliseconds of a round."""
    engine = baseline if point.tree is None else drafted.with_tree(point.tree)
    config, _ = _request(engine, point.batch, size)
    work = describe_workload(engine.weights, config, batch=point.batch, context=point.context)
    return floors(cost_card(work, prompt_tokens=1), device)["round"]


def _request(engine: Engine, batch: int, size: int) -> tuple[Any, Any]:
    prompt = PreparedPrompt([1] * _PROMPT, 1)
    margin = engine.request([prompt], batch_size=batch)[0].margin
    prompt = PreparedPrompt(prompt.ids, size - _PROMPT - margin)
    return engine.request([prompt] * batch, batch_size=batch)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Times all points; a point that several sweeps share is timed once.

    Raises:
      UserError: a context that leaves no room for a round.
    """
    llama, sweeps, device = _shape(args), plan_sweeps(args), find_roofline().device
    longest = max(args.contexts)
    if longest > args.size:
        raise UserError(f"contexts: want at most the size of the cache, {args.size}, got {longest}")
    baseline, drafted, _ = random_engines(llama, llama.vocab_size)
    points = {point.name: point for sweep in sweeps.values() for _, point in sweep}
    make = partial(time_point, baseline, drafted, size=args.size, num_rounds=args.rounds)
    runs = {name: make(point) for name, point in points.items()}
    times = interleaved(runs, args.repeats, "growth")
    rows = [
        {
            "sweep": sweep,
            "value": value,
            "milliseconds": float(np.median(times[point.name])),
            "floor_milliseconds": floor_of(baseline, drafted, point, device, args.size),
        }
        for sweep, sweep_points in sweeps.items()
        for value, point in sweep_points
    ]
    options = {key: str(value) for key, value in vars(args).items()}
    return {
        "rows": rows,
        "device": asdict(device),
        "options": options,
        "provenance": provenance(),
    }


def format_table(report: dict[str, Any]) -> str:
    """The report as a Markdown table."""
    rows = []
    for row in report["rows"]:
        took, floor = row["milliseconds"], row["floor_milliseconds"]
        numbers = f"{took:.2f}", f"{floor:.2f}", f"{floor / took:.0%}"
        rows.append([row["sweep"], row["value"], *numbers])
    head = ["sweep", "value", "ms per round", "floor ms", "floor / ms"]
    return "\n".join(format_rows(head, rows))


def draw(report: dict[str, Any], folder: Path) -> None:
    """Plots every sweep, and its floor dashed."""
    from matplotlib import pyplot

    sweeps = dict.fromkeys(row["sweep"] for row in report["rows"])
    figure, panels = pyplot.subplots(2, 3, figsize=(12, 7), layout="constrained")
    for axes, sweep in zip(panels.flat, sweeps, strict=True):
        rows = [row for row in report["rows"] if row["sweep"] == sweep]
        values = [row["value"] for row in rows]
        axes.plot(values, [row["milliseconds"] for row in rows], marker="o", label="measured")
        least = [row["floor_milliseconds"] for row in rows]
        axes.plot(values, least, linestyle="--", color="grey", label="floor")
        axes.set(xlabel=sweep, ylabel="ms per round", ylim=(0, None))
        axes.grid(alpha=0.3)
    panels.flat[0].legend()
    figure.savefig(folder / "growth.png", dpi=120)
    pyplot.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses arguments, measures, prints, writes."""
    parser = make_parser(__doc__)
    lists = {
        "contexts": (128, 256, 512, 1024, 2048, 4096, 8000),
        "batch-sizes": (1, 2, 4, 8, 16),
        "depths": (1, 2, 3, 4, 6, 8),
        "total-tokens": (8, 16, 32, 64, 96, 128),
    }
    for name, default in lists.items():
        parser.add_argument(f"--{name}", nargs="+", type=at_least(1), default=default, metavar="N")
    sizes = {"size": 8192, "rounds": 4, "repeats": 5, "hidden-size": 512, "layers": 4, "heads": 8}
    add_numbers(parser, sizes | {"kv-heads": 4, "vocab-size": 4096})
    args = parser.parse_args(arguments)
    report = measure(args)
    show_report(report, format_table(report), args.output, plot=partial(draw, report))


def _shape(args: argparse.Namespace) -> LlamaConfig:
    width = args.hidden_size * 11 // 4
    return read_shape(args, intermediate_size=width, max_position_embeddings=args.size)


if __name__ == "__main__":
    run_program(main)
