"""Tokens per second by batch size, with several draft trees and without a draft; the best of each.

Needs a target and a draft (model folders; by default bundled ones). All prompts are decoded with
every batch size and tree, interleaved, and must give the same texts. Prints a table of tokens per
second and of the ratio to decoding the same batches without a draft, and as its last line one JSON
object; --output keeps report.json, report.md, trees.yaml (for `infer.generate --trees`) and a plot.

    python -m benchmarks.batches --output docs/results/batches
    python -m benchmarks.batches --target T --draft D=P --trees 6/10/60 4/4/16 --batch-sizes 1 8
"""

import argparse
import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from benchmarks.options import add_questions, bench_config, read_tree
from infer import report as reports
from infer.measure import load_decoders, time_batches
from infer.questions import first_prompts, read_questions
from poss_jax.checkpoint.record import provenance
from poss_jax.config.decoding import BenchConfig
from poss_jax.config.models import TreeConfig
from poss_jax.config.reading import UserError, config_to_dict
from poss_jax.decode.metrics import mean_acceptance_length
from poss_jax.engine.answers import Generation
from poss_jax.program.options import at_least
from poss_jax.program.running import Parser, run_program

NO_DRAFT = "no draft"
TREES = ("2/1/3", "4/1/5", "3/2/6", "4/2/8", "4/4/16", "6/10/60")
BATCH_SIZES = (1, 2, 4, 8, 16)
Pass = tuple[list[Generation], float]
"""Answers to all prompts, and the seconds they took."""


def measure(
    config: BenchConfig, trees: dict[str, TreeConfig | None], batch_sizes: Sequence[int]
) -> dict[str, Any]:
    """Times every batch size with every tree (None: without a draft)."""
    _, decoder = load_decoders(config)
    prompts = first_prompts(read_questions(config, decoder.engine))
    cells = list(product(batch_sizes, trees))
    engines = {name: decoder.engine.with_tree({1: tree}) for name, tree in trees.items()}
    passes: dict[tuple[int, str], list[Pass]] = {cell: [] for cell in cells}
    # The first pass compiles, and is not counted.
    for _ in tqdm(range(1 + config.repeats), desc="batches", unit="pass"):
        for size, name in cells:
            done = time_batches(engines[name], prompts, size)
            passes[size, name].append(done)
    return {
        "trees": {name: tree and config_to_dict(tree) for name, tree in trees.items()},
        "batch_sizes": {
            size: summarise({name: passes[size, name] for name in trees}) for size in batch_sizes
        },
        "different_outputs": count_different(passes),
        "config": config_to_dict(config),
        "provenance": provenance(),
    }


def summarise(passes: dict[str, list[Pass]]) -> dict[str, Any]:
    """One batch size: speed of every tree, its ratio to no draft, and the fastest."""
    speeds = {
        name: [
            sum(len(answer.output_ids) for answer in answers) / seconds for answers, seconds in run
        ]
        for name, (_, *run) in passes.items()
    }
    rows = {
        name: {
            "tokens_per_second": float(np.median(speeds[name])),
            "tokens_per_second_per_repeat": speeds[name],
            "ratio": float(np.median(np.divide(speeds[name], speeds[NO_DRAFT]))),
            "acceptance_length": mean_acceptance_length(
                [answer.accepted_per_round for answer in run[0][0]]
            ),
        }
        for name, run in passes.items()
    }
    return {"best": max(rows, key=lambda name: rows[name]["ratio"]), "methods": rows}


def count_different(passes: dict[tuple[int, str], list[Pass]]) -> int:
    """Counts outputs that are not the first pass's, over all batch sizes, trees and repeats."""
    texts = [
        [answer.output_ids for answer in answers] for run in passes.values() for answers, _ in run
    ]
    return sum(one != other for text in texts for one, other in zip(text, texts[0], strict=True))


def format_table(report: dict[str, Any]) -> str:
    """Trees by batch sizes, the best of each size in bold."""
    sizes = report["batch_sizes"]
    config = report["config"]
    lines = [
        f"Tokens per second (ratio to no draft), by batch size; {config['num_prompts']} prompts x "
        f"{config['max_new_tokens']} new tokens, {config['repeats']} repeats; "
        f"{report['different_outputs']} outputs differ",
        "",
        f"| tree | acceptance length | {' | '.join(map(str, sizes))} |",
        "|---" * (len(sizes) + 2) + "|",
    ]
    for name in report["trees"]:
        rows = [entry["methods"][name] for entry in sizes.values()]
        cells = [f"{row['tokens_per_second']:.0f} ({row['ratio']:.2f})" for row in rows]
        best = [entry["best"] == name for entry in sizes.values()]
        cells = [
            f"**{cell}**" if is_best else cell for cell, is_best in zip(cells, best, strict=True)
        ]
        lines.append(f"| {name} | {rows[0]['acceptance_length']:.2f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def write_report(report: dict[str, Any], folder: Path) -> None:
    """Writes report.json, report.md, trees.yaml and, where matplotlib is installed, a plot."""
    best = {size: report["trees"][entry["best"]] for size, entry in report["batch_sizes"].items()}
    device = report["provenance"]["device_kind"]
    header = (
        f"# Batch size -> fastest tree on {device} (python -m benchmarks.batches); null: no draft\n"
    )
    table, picture = format_table(report), folder / "batches.png"
    reports.write_report(report, table, folder, plot=lambda: _plot(report, picture))
    lines = [f"{size}: {json.dumps(tree)}\n" for size, tree in best.items()]  # JSON is YAML, too
    (folder / "trees.yaml").write_text(header + "".join(lines))


def _plot(report: dict[str, Any], path: Path) -> None:
    """Tokens per second over batch size, a line per tree."""
    from matplotlib import pyplot

    sizes = report["batch_sizes"]
    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    for name in report["trees"]:
        speeds = [entry["methods"][name]["tokens_per_second"] for entry in sizes.values()]
        style = "--" if name == NO_DRAFT else "-"
        axes.plot(list(sizes), speeds, style, marker="o", label=name)
    axes.set(xlabel="batch size", ylabel="tokens per second", xscale="log", yscale="log")
    axes.set_xticks(list(sizes), [str(size) for size in sizes])
    axes.grid(alpha=0.3)
    axes.legend(title="tree (depth/top_k/total_tokens)")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add_questions(parser, num_prompts=32, max_new_tokens=64)
    parser.add_argument("--repeats", type=at_least(1), default=3, metavar="N")
    parser.add_argument("--trees", nargs="+", default=TREES, metavar="DEPTH/TOP_K/TOTAL")
    parser.add_argument(
        "--batch-sizes", nargs="+", type=at_least(1), default=BATCH_SIZES, metavar="N"
    )
    args = parser.parse_args(arguments)
    if any(args.num_prompts % size for size in args.batch_sizes):
        raise UserError("--num-prompts: want a multiple of every batch size, so that all are full")
    return args


def main(arguments: Sequence[str] | None = None) -> None:
    args = _parse(arguments)
    config = bench_config(args, {"PosS-3": "poss3"}, repeats=args.repeats)
    if len(config.drafts) > 1:
        raise UserError(f"--draft: want one, got {len(config.drafts)}")
    trees = {NO_DRAFT: None} | {text: read_tree(text) for text in args.trees}
    report = measure(config, trees, args.batch_sizes)
    print(format_table(report))
    if args.output is not None:
        write_report(report, args.output)
    print(json.dumps(report))
    if report["different_outputs"]:
        raise UserError(
            f"{report['different_outputs']} outputs differ between trees; see the report"
        )


if __name__ == "__main__":
    run_program(main)
