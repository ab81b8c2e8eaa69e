"""Coupled, argmax and sampled drafts side by side, over temperatures, drafts and trees.

Needs a target and drafts (model folders; by default bundled ones). Prompts and seeds are decoded in
all three ways. Coupled and argmax drafts must give the same texts; those of sampled drafts are
others, except greedy ones. A prompt and seed for which any text loops is left out. Prints
acceptance lengths with intervals and tokens per second, and as its last line one JSON
object; --output keeps report.json, report.md and a plot.

    python -m benchmarks.coupling --output docs/results/coupling
    python -m benchmarks.coupling --target T --draft PosS-3=P --prompts prompts.jsonl
"""

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np
from tqdm import tqdm

from benchmarks.options import add_questions, add_trees, bench_config, make_parser
from infer.bench.measure import count_memory, load_decoders, time_batches
from infer.bench.questions import first_prompts, read_questions
from infer.bench.report import show_report
from infer.bench.statistics import estimate_mean
from infer.bench.summary import LOOPING_BELOW
from poss_jax.checkpoint.record import provenance
from poss_jax.config.decoding import BenchConfig, SamplingConfig
from poss_jax.config.models import Drafting, TreeConfig
from poss_jax.config.reading import UserError
from poss_jax.decode.metrics import distinct_ngram_share
from poss_jax.engine.answers import Generation
from poss_jax.engine.engine import Engine
from poss_jax.engine.prompts import PreparedPrompt
from poss_jax.program.options import at_least
from poss_jax.program.running import run_program
from poss_jax.program.tables import format_rows

SETTINGS = {
    "T = 0": {"temperature": 0.0},
    "T = 0.3": {"temperature": 0.3},
    "T = 0.7": {"temperature": 0.7},
    "T = 1": {"temperature": 1.0},
    "T = 1.3": {"temperature": 1.3},
    "T = 0.7, top-p 0.9": {"temperature": 0.7, "top_p": 0.9},
    "T = 1, top-k 20, top-p 0.9": {"temperature": 1.0, "top_k": 20, "top_p": 0.9},
}
WAYS: tuple[Drafting, ...] = get_args(Drafting)


class Answered(NamedTuple):
    """The answers to some prompts and seeds, and the speed of decoding them."""

    answers: list[Generation]
    tokens_per_second: float


def measure(
    config: BenchConfig, trees: Sequence[TreeConfig], num_seeds: int, batch_size: int
) -> dict[str, Any]:
    """Decodes everything in all ways."""
    baseline, *decoders = load_decoders(config)
    prompts = first_prompts(read_questions(config, baseline.engine))
    cases = list(product(decoders, trees, SETTINGS))
    rows = []
    with tqdm(total=len(cases) * len(WAYS), desc="coupling", unit="setting") as progress:
        for decoder, tree, setting in cases:
            jobs = [
                prompt._replace(sampling=SamplingConfig(seed=seed, **SETTINGS[setting]))
                for seed, prompt in product(range(num_seeds), prompts)
            ]
            answered = {}
            for way in WAYS:
                engine = decoder.engine.with_tree(tree, drafting=way)
                answered[way] = _answer(engine, jobs, batch_size)
                progress.update()
            rows.append(
                {"draft": decoder.name, "tree": tree.name, "setting": setting}
                | _summarise(len(prompts), answered)
            )
    return {
        "target_parameters": count_memory(baseline.engine)["target_parameters"],
        "prompts": len(prompts),
        "seeds": num_seeds,
        "max_new_tokens": config.max_new_tokens,
        "batch_size": batch_size,
        "rows": rows,
        "provenance": provenance(),
    }


def _answer(engine: Engine, jobs: Sequence[PreparedPrompt], batch_size: int) -> Answered:
    """Decodes all jobs, after a batch that compiles the program."""
    time_batches(engine, jobs[:batch_size], batch_size)
    answers, seconds = time_batches(engine, jobs, batch_size)
    return Answered(answers, sum(len(answer.output_ids) for answer in answers) / seconds)


def _summarise(num_prompts: int, answered: dict[Drafting, Answered]) -> dict[str, Any]:
    """Acceptance lengths, averaged over seeds, then over prompts with texts that do not loop."""
    lengths: dict[int, list[list[float]]] = {}
    together = list(zip(*(answered[way].answers for way in WAYS), strict=True))
    for index, answers in enumerate(together):
        if min(distinct_ngram_share(one.output_ids) for one in answers) >= LOOPING_BELOW:
            of_ways = [one.mean_acceptance_length for one in answers]
            lengths.setdefault(index % num_prompts, []).append(of_ways)
    per_prompt = np.array([np.mean(seeds, axis=0) for seeds in lengths.values()])
    summary = _with_intervals(per_prompt.reshape(-1, len(WAYS)))
    for way in WAYS:
        summary[way]["tokens_per_second"] = answered[way].tokens_per_second
    coupled, argmax = (answered[way].answers for way in ("coupled", "argmax"))
    return summary | {
        "looping": len(together) - sum(map(len, lengths.values())),
        "different_outputs": sum(
            one.output_ids != other.output_ids for one, other in zip(coupled, argmax, strict=True)
        ),
    }


def _with_intervals(per_prompt: np.ndarray) -> dict[str, Any]:
    """Means of every way and of the gain of coupling over each other one, with 95 % intervals."""
    columns = {way: per_prompt[:, index] for index, way in enumerate(WAYS)}
    for way in WAYS[1:]:
        columns[f"gain_over_{way}"] = columns["coupled"] - columns[way]
    return {name: estimate_mean(values) for name, values in columns.items()}


def format_table(report: dict[str, Any]) -> str:
    """The report as two Markdown tables."""
    settings = list(dict.fromkeys(row["setting"] for row in report["rows"]))
    of_pair: dict[tuple[str, str], dict[str, Any]] = {}
    for row in report["rows"]:
        of_pair.setdefault((row["draft"], row["tree"]), {})[row["setting"]] = row
    lines = [
        f"{report['prompts']} prompts x {report['seeds']} seeds x {report['max_new_tokens']} "
        f"tokens, {report['batch_size']} together; a target of "
        f"{report['target_parameters'] / 1e6:,.1f} million parameters"
    ]
    for title, cell in (
        (
            f"Acceptance length, {' / '.join(WAYS)} [95 % intervals over prompts of the gain of "
            "coupled drafts over the others], without texts that loop",
            _acceptance,
        ),
        (f"Tokens per second, {' / '.join(WAYS)}", _speed),
    ):
        table = [
            [*pair, *(cell(rows[setting]) for setting in settings)]
            for pair, rows in of_pair.items()
        ]
        lines += ["", title, "", *format_rows(["draft", "tree", *settings], table)]
    different = sum(row["different_outputs"] for row in report["rows"])
    return "\n".join([*lines, "", f"Outputs that differ, coupled from argmax: {different}"])


def _acceptance(row: dict[str, Any]) -> str:
    if row["coupled"]["value"] is None:
        return "all loop"
    means = " / ".join(f"{row[way]['value']:.2f}" for way in WAYS)
    gains = [row[f"gain_over_{way}"] for way in WAYS[1:]]
    known = [gain for gain in gains if gain["low"] is not None]
    return " ".join([means, *(f"[{gain['low']:+.2f}, {gain['high']:+.2f}]" for gain in known)])


def _speed(row: dict[str, Any]) -> str:
    return " / ".join(f"{row[way]['tokens_per_second']:.0f}" for way in WAYS)


def _plot(report: dict[str, Any], folder: Path) -> None:
    """Acceptance length over temperature; one panel per tree, one style of line per way."""
    from matplotlib import pyplot

    names = [name for name, given in SETTINGS.items() if set(given) == {"temperature"}]
    temperatures = [SETTINGS[name]["temperature"] for name in names]
    trees, drafts = (
        list(dict.fromkeys(r[key] for r in report["rows"])) for key in ("tree", "draft")
    )
    found = {(row["draft"], row["tree"], row["setting"]): row for row in report["rows"]}
    figure, axes = pyplot.subplots(
        1, len(trees), figsize=(4 * len(trees), 4), sharey=True, layout="constrained", squeeze=False
    )
    for axis, tree in zip(axes[0], trees, strict=True):
        for (number, draft), (way, style) in product(
            enumerate(drafts), zip(WAYS, ("-", "--", ":"), strict=True)
        ):
            means = [found[draft, tree, name][way]["value"] for name in names]
            means = [np.nan if mean is None else mean for mean in means]
            axis.plot(
                temperatures, means, style, marker="o", color=f"C{number}", label=f"{draft}, {way}"
            )
        axis.set(title=f"tree {tree}", xlabel="temperature")
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("acceptance length")
    axes[0][0].legend()
    figure.savefig(folder / "coupling.png", dpi=150)
    pyplot.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__)
    add_questions(parser, num_prompts=16, max_new_tokens=128)
    parser.add_argument("--seeds", type=at_least(1), default=3, metavar="N", help="per prompt")
    parser.add_argument("--batch-size", type=at_least(1), default=16, metavar="N")
    add_trees(parser, "6/10/60", "4/4/16", "6/1/7")
    args = parser.parse_args(arguments)
    report = measure(bench_config(args), args.trees, args.seeds, args.batch_size)
    show_report(
        report, format_table(report), args.output, plot=lambda folder: _plot(report, folder)
    )
    if any(row["different_outputs"] for row in report["rows"]):
        raise UserError("outputs of coupled and argmax drafts differ; see the report")


if __name__ == "__main__":
    run_program(main)
