"""Acceptance length of coupled against plain drafting, over temperatures, drafts and trees.

Needs a target and drafts (model folders; by default the demo's). Prompts and seeds are decoded with
both kinds of drafting, which must give the same texts; texts that loop are left out. Prints a table
with bootstrap intervals, and as its last line one JSON object; --output keeps report.json,
report.md and a plot.

    python -m benchmarks.coupling --output docs/results/coupling
    python -m benchmarks.coupling --target T --draft PosS-3=P --prompts prompts.jsonl
"""

import argparse
import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from benchmarks.reports import tree_name
from infer.bench import load_decoders
from infer.questions import first_prompts, read_questions
from infer.report import write_report
from infer.summary import LOOPING_BELOW
from poss_jax.checkpoint.record import provenance
from poss_jax.config.decoding import BenchConfig, SamplingConfig
from poss_jax.config.models import TreeConfig
from poss_jax.config.reading import UserError
from poss_jax.decode.metrics import distinct_ngram_share
from poss_jax.engine.answers import Generation
from poss_jax.engine.engine import Engine
from poss_jax.engine.prompts import PreparedPrompt
from poss_jax.program.options import at_least, read_pairs
from poss_jax.program.running import Parser, run_program

DEMO = Path("runs/demo")
DEMO_DRAFTS = {"EAGLE-2": "eagle_continued", "HASS": "hass", "PosS-3": "poss3"}
SETTINGS = {
    "T = 0": {"temperature": 0.0},
    "T = 0.3": {"temperature": 0.3},
    "T = 0.7": {"temperature": 0.7},
    "T = 1": {"temperature": 1.0},
    "T = 1.3": {"temperature": 1.3},
    "T = 0.7, top-p 0.9": {"temperature": 0.7, "top_p": 0.9},
    "T = 1, top-k 20, top-p 0.9": {"temperature": 1.0, "top_k": 20, "top_p": 0.9},
}
TREES = (
    TreeConfig(depth=6, top_k=10, total_tokens=60),
    TreeConfig(depth=4, top_k=4, total_tokens=16),
    TreeConfig(depth=6, top_k=1, total_tokens=7),
)
NUM_RESAMPLES = 2000


def measure(config: BenchConfig, num_seeds: int, batch_size: int) -> dict[str, Any]:
    """Decodes everything with both kinds of drafting."""
    baseline, *decoders = load_decoders(config)
    prompts = first_prompts(read_questions(config, baseline.engine))
    jobs = list(product(SETTINGS, range(num_seeds), range(len(prompts))))
    total = len(jobs) * len(decoders) * len(TREES) * 2
    rows = []
    with tqdm(total=total, desc="coupling", unit="answer") as progress:
        for decoder, tree in product(decoders, TREES):
            answers = [
                _decode(
                    decoder.engine.with_tree(tree, is_coupled=is_coupled),
                    [
                        prompts[prompt]._replace(
                            sampling=SamplingConfig(seed=seed, **SETTINGS[name])
                        )
                        for name, seed, prompt in jobs
                    ],
                    batch_size,
                    progress,
                )
                for is_coupled in (False, True)
            ]
            rows.append(
                {"draft": decoder.name, "tree": tree_name(tree)} | _summarise(jobs, *answers)
            )
    return {
        "prompts": len(prompts),
        "seeds": num_seeds,
        "max_new_tokens": config.max_new_tokens,
        "rows": rows,
        "provenance": provenance(),
    }


def _decode(
    engine: Engine, jobs: Sequence[PreparedPrompt], batch_size: int, progress: tqdm
) -> list[Generation]:
    answers: list[Generation] = []
    for first in range(0, len(jobs), batch_size):
        batch = jobs[first : first + batch_size]
        answers += engine.decode(batch, batch_size=batch_size)
        progress.update(len(batch))
    return answers


def _summarise(
    jobs: Sequence[tuple[str, int, int]], plain: list[Generation], coupled: list[Generation]
) -> dict[str, Any]:
    """Per setting: acceptance lengths, averaged over seeds, then over prompts that do not loop."""
    summary: dict[str, Any] = {}
    for setting in SETTINGS:
        lengths: dict[int, list[tuple[float, float]]] = {}
        num_different = num_looping = 0
        for (name, _, prompt), one, other in zip(jobs, plain, coupled, strict=True):
            if name != setting:
                continue
            num_different += one.output_ids != other.output_ids
            if distinct_ngram_share(one.output_ids) < LOOPING_BELOW:
                num_looping += 1
                continue
            pair = (one.mean_acceptance_length, other.mean_acceptance_length)
            lengths.setdefault(prompt, []).append(pair)
        per_prompt = np.array([np.mean(pairs, axis=0) for pairs in lengths.values()])
        summary[setting] = _with_intervals(per_prompt.reshape(-1, 2))
        summary[setting] |= {"looping": num_looping, "different_outputs": num_different}
    return {"settings": summary}


def _with_intervals(per_prompt: np.ndarray) -> dict[str, Any]:
    """Means of plain, coupled and their difference, with 95 % intervals over prompts."""
    if not len(per_prompt):
        return {"plain": None, "coupled": None, "gain": None}
    columns = np.column_stack([per_prompt, per_prompt[:, 1] - per_prompt[:, 0]])
    picks = np.random.default_rng(0).integers(0, len(columns), (NUM_RESAMPLES, len(columns)))
    bounds = np.quantile(columns[picks].mean(axis=1), [0.025, 0.975], axis=0)
    return {
        name: {"mean": mean, "low": low, "high": high}
        for name, mean, low, high in zip(
            ("plain", "coupled", "gain"), columns.mean(axis=0), *bounds, strict=True
        )
    }


def format_table(report: dict[str, Any]) -> str:
    """The report as a Markdown table."""
    lines = [
        "Acceptance length, plain -> coupled drafting [95 % interval of the gain over prompts]; "
        f"{report['prompts']} prompts x {report['seeds']} seeds x {report['max_new_tokens']} "
        "tokens, without texts that loop",
        "",
        f"| draft | tree | {' | '.join(SETTINGS)} |",
        "|---" * (2 + len(SETTINGS)) + "|",
    ]
    for row in report["rows"]:
        cells = [_cell(row["settings"][setting]) for setting in SETTINGS]
        lines.append(f"| {row['draft']} | {row['tree']} | {' | '.join(cells)} |")
    counts = [entry for row in report["rows"] for entry in row["settings"].values()]
    different = sum(entry["different_outputs"] for entry in counts)
    return "\n".join([*lines, "", f"Outputs that differ between the two: {different}"])


def _cell(entry: dict[str, Any]) -> str:
    if entry["gain"] is None:
        return "all loop"
    means = f"{entry['plain']['mean']:.2f} -> {entry['coupled']['mean']:.2f}"
    gain = entry["gain"]
    return f"{means} [{gain['low']:+.2f}, {gain['high']:+.2f}]"


def _plot(report: dict[str, Any], path: Path) -> None:
    """Acceptance length over temperature; one panel per tree, dashed lines are plain drafting."""
    from matplotlib import pyplot

    names = [name for name, given in SETTINGS.items() if set(given) == {"temperature"}]
    temperatures = [SETTINGS[name]["temperature"] for name in names]
    trees = list(dict.fromkeys(row["tree"] for row in report["rows"]))
    figure, axes = pyplot.subplots(
        1, len(trees), figsize=(4 * len(trees), 4), sharey=True, layout="constrained", squeeze=False
    )
    for axis, tree in zip(axes[0], trees, strict=True):
        rows = [row for row in report["rows"] if row["tree"] == tree]
        for number, row in enumerate(rows):
            for kind, style in (("coupled", "-"), ("plain", "--")):
                entries = [row["settings"][name][kind] for name in names]
                means = [np.nan if entry is None else entry["mean"] for entry in entries]
                label = row["draft"] if kind == "coupled" else None
                axis.plot(temperatures, means, style, marker="o", color=f"C{number}", label=label)
        axis.set(title=f"tree {tree}", xlabel="temperature (solid: coupled, dashed: plain)")
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("acceptance length")
    axes[0][0].legend()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--target", default=str(DEMO / "target/model"), metavar="DIR")
    parser.add_argument("--draft", action="append", metavar="NAME=DIR", help="may be repeated")
    parser.add_argument("--prompts", default="stdlib", metavar="FILE", help=".jsonl, or stdlib")
    parser.add_argument("--num-prompts", type=at_least(1), default=16, metavar="N")
    parser.add_argument("--max-new-tokens", type=at_least(1), default=128, metavar="N")
    parser.add_argument("--seeds", type=at_least(1), default=3, metavar="N", help="per prompt")
    parser.add_argument("--batch-size", type=at_least(1), default=16, metavar="N")
    parser.add_argument("--output", type=Path, metavar="DIR", help="folder for the report")
    args = parser.parse_args(arguments)
    demo = {name: str(DEMO / folder / "model") for name, folder in DEMO_DRAFTS.items()}
    config = BenchConfig(
        target=args.target,
        drafts=read_pairs("--draft", args.draft, "NAME=DIR") if args.draft else demo,
        prompts=args.prompts,
        num_prompts=args.num_prompts,
        prompt_tokens=48,
        max_new_tokens=args.max_new_tokens,
    )
    report = measure(config, args.seeds, args.batch_size)
    print(format_table(report))
    if args.output is not None:
        picture = args.output / "coupling.png"
        write_report(report, format_table(report), args.output, plot=lambda: _plot(report, picture))
    print(json.dumps(report))
    if any(e["different_outputs"] for row in report["rows"] for e in row["settings"].values()):
        raise UserError("outputs differ between plain and coupled drafting; see the report")


if __name__ == "__main__":
    run_program(main)
