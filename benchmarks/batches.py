"""Tokens per second by batch size, with several draft trees and without a draft; the best of each.

Needs a target and a draft (model folders; by default bundled ones). All prompts are decoded with
every tree, interleaved, and must give the same texts as without a draft. Prints a table of tokens
per second and of the ratio to decoding the same batches without a draft, and as its last line one
JSON object; --output keeps report.json, report.md, trees.yaml (for `infer.generate --trees`) and a
plot.

    python -m benchmarks.batches --output docs/results/batches
    python -m benchmarks.batches --target T --draft D=P --trees 6/10/60 4/4/16 --batch-sizes 1 8
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.options import add_questions, add_trees, bench_config, make_parser
from infer.bench.measure import load_decoders
from infer.bench.questions import first_prompts, read_questions
from infer.bench.report import show_report
from infer.tune.search import confirm, tree_name
from poss_jax.checkpoint.record import provenance
from poss_jax.config.decoding import BenchConfig
from poss_jax.config.models import TreeConfig
from poss_jax.config.reading import UserError, config_to_dict
from poss_jax.program.options import at_least
from poss_jax.program.running import run_program
from poss_jax.program.tables import format_rows

TREES = ("2/1/3", "4/1/5", "3/2/6", "4/2/8", "4/4/16", "6/10/60")
BATCH_SIZES = (1, 2, 4, 8, 16)


def measure(
    config: BenchConfig, trees: Sequence[TreeConfig], batch_sizes: Sequence[int]
) -> dict[str, Any]:
    """Times every batch size without a draft and with every tree."""
    _, decoder = load_decoders(config)
    prompts = first_prompts(read_questions(config, decoder.engine))
    if any(len(prompts) % size for size in batch_sizes):
        raise UserError(
            f"--num-prompts: want a multiple of every batch size, so that all are full; got "
            f"{len(prompts)} prompts"
        )
    named = {tree_name(tree): tree for tree in (None, *trees)}
    sizes = {}
    for size in batch_sizes:
        found = confirm(decoder.engine, prompts, size, list(named.values()), config.repeats)
        rows = {tree_name(tree): row for tree, row in found.items()}
        best = max(rows, key=lambda name: rows[name]["ratio"])
        sizes[size] = {"best": best, "methods": rows}
    return {
        "trees": {name: tree and config_to_dict(tree) for name, tree in named.items()},
        "num_prompts": len(prompts),
        "batch_sizes": sizes,
        "different_outputs": sum(
            row["different_outputs"] for one in sizes.values() for row in one["methods"].values()
        ),
        "config": config_to_dict(config),
        "provenance": provenance(),
    }


def format_table(report: dict[str, Any]) -> str:
    """Trees by batch sizes, the best of each size in bold."""
    sizes = report["batch_sizes"]
    config = report["config"]
    lines = [
        f"Tokens per second (ratio to no draft), by batch size; {report['num_prompts']} prompts x "
        f"{config['max_new_tokens']} new tokens, {config['repeats']} repeats; "
        f"{report['different_outputs']} outputs differ",
        "",
    ]
    table = []
    for name in report["trees"]:
        rows = [entry["methods"][name] for entry in sizes.values()]
        cells = [f"{row['tokens_per_second']:.0f} ({row['ratio']:.2f})" for row in rows]
        best = [entry["best"] == name for entry in sizes.values()]
        cells = [
            f"**{cell}**" if is_best else cell for cell, is_best in zip(cells, best, strict=True)
        ]
        table.append([name, f"{rows[0]['acceptance_length']:.2f}", *cells])
    return "\n".join([*lines, *format_rows(["tree", "acceptance length", *sizes], table)])


def write_trees(report: dict[str, Any], folder: Path) -> None:
    """Writes trees.yaml, the fastest tree of every batch size."""
    best = {size: report["trees"][entry["best"]] for size, entry in report["batch_sizes"].items()}
    device = report["provenance"]["device_kind"]
    header = (
        f"# Batch size -> fastest tree on {device} (python -m benchmarks.batches); null: no draft\n"
    )
    lines = [f"{size}: {json.dumps(tree)}\n" for size, tree in best.items()]  # JSON is YAML, too
    (folder / "trees.yaml").write_text(header + "".join(lines))


def _plot(report: dict[str, Any], folder: Path) -> None:
    """Tokens per second over batch size, a line per tree."""
    from matplotlib import pyplot

    sizes = report["batch_sizes"]
    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    for name in report["trees"]:
        speeds = [entry["methods"][name]["tokens_per_second"] for entry in sizes.values()]
        style = "--" if report["trees"][name] is None else "-"
        axes.plot(list(sizes), speeds, style, marker="o", label=name)
    axes.set(xlabel="batch size", ylabel="tokens per second", xscale="log", yscale="log")
    axes.set_xticks(list(sizes), [str(size) for size in sizes])
    axes.grid(alpha=0.3)
    axes.legend(title="tree (depth/top_k/total_tokens)")
    figure.savefig(folder / "batches.png", dpi=150)
    pyplot.close(figure)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__)
    add_questions(parser, num_prompts=32, max_new_tokens=64)
    parser.add_argument("--repeats", type=at_least(1), default=3, metavar="N")
    add_trees(parser, *TREES)
    parser.add_argument(
        "--batch-sizes", nargs="+", type=at_least(1), default=BATCH_SIZES, metavar="N"
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    args = _parse(arguments)
    config = bench_config(args, {"PosS-3": "poss3"}, repeats=args.repeats)
    if len(config.drafts) > 1:
        raise UserError(f"--draft: want one, got {len(config.drafts)}")
    report = measure(config, args.trees, args.batch_sizes)
    show_report(
        report, format_table(report), args.output, plot=lambda folder: _plot(report, folder)
    )
    if args.output is not None:
        write_trees(report, args.output)
    if report["different_outputs"]:
        raise UserError(
            f"{report['different_outputs']} outputs differ between trees; see the report"
        )


if __name__ == "__main__":
    run_program(main)
