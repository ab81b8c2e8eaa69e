"""Does the method hold? Trains variants of a draft alike, with several seeds, and compares them.

All variants continue one draft, first for the same number of optimizer steps, then for as long as
the slowest took. All answer the same questions. The paired test of `infer.bench.statistics`
compares their acceptance lengths, question by question and averaged over training seeds. Complete
runs are skipped, so the same command resumes after an interruption. Prints tables, and as its last
line one JSON object; writes report.json, report.md and plots to DIR.

    python -m benchmarks.study --config configs/study/python.yaml --output docs/results/study_python

With --jobs N, N runs train side by side. Small ones share a GPU well once NVIDIA's MPS daemon runs
(nvidia-cuda-mps-control -d); without it they take turns, and nothing is gained.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass
from tqdm import tqdm

from benchmarks.options import report_folder
from infer.bench.compare import bench
from infer.bench.journal import Answer, Cell
from infer.bench.report import show_report
from infer.bench.statistics import compare, compare_seeds, estimate_mean, format_estimate
from infer.bench.summary import make_grid
from poss_jax.checkpoint.folder import load_draft, write_model
from poss_jax.checkpoint.record import new_record, provenance, read_record
from poss_jax.config.decoding import BenchConfig
from poss_jax.config.models import STRICT, TreeConfig
from poss_jax.config.numbers import Seed
from poss_jax.config.reading import UserError, load_config
from poss_jax.config.training import TrainConfig
from poss_jax.model.parameters import split_items
from poss_jax.program.arguments import at_least
from poss_jax.program.running import Parser, run_program
from poss_jax.program.tables import format_rows
from train.claims import changed_settings, claim_folder, saved_config

TESTS = "p", "p over seeds"
SIMULATED = "simulated_acceptance_length"
BUDGETS = {
    "steps": "equal optimizer steps",
    "time": "equal training time",
}


@dataclass(frozen=True, kw_only=True, config=STRICT)
class StudyConfig:
    """One study.

    Attributes:
      start: config of the run that the variants change; it names the draft they continue.
      variants: keys of that config that a variant changes; the first variant is the baseline. The
        key `widen` continues a draft whose MLP is that wide (see `widen`); `num_seeds` is how many
        of the seeds a variant is trained with, and it is compared with the same seeds of the
        baseline.
      bench: config of the benchmark, without drafts; null where no tree is given.
      pairs: further pairs of variants to compare: the first less the second.
      trees: trees that all drafts are benchmarked with, by name; without any, drafts are compared
        on the held-out texts of training alone.
      seeds: seeds of training.
      phases: also time a round of every variant.
      budgets: `steps`, or `steps` and `time`, whose runs take as long as the slowest `steps` run.
      output: folder of runs and benchmarks.
    """

    start: str
    variants: dict[str, dict[str, Any]]
    bench: str | None = None
    trees: dict[str, TreeConfig] = Field(default_factory=dict)
    pairs: tuple[tuple[str, str], ...] = ()
    seeds: tuple[Seed, ...] = (0, 1, 2)
    phases: bool = True
    budgets: tuple[str, ...] = ("steps", "time")
    output: str = Field(default="runs/study")

    def __post_init__(self) -> None:
        known = ("steps",), ("steps", "time")
        if self.budgets not in known or not self.variants or not self.seeds:
            raise ValueError("want variants, seeds, and budgets: steps, or steps and time")
        if self.trees and self.bench is None:
            raise ValueError("trees: want a bench, too, with the questions")
        most = len(self.seeds)
        baseline, *others = (one.get("num_seeds", most) for one in self.variants.values())
        if baseline != most or not all(number in range(1, most + 1) for number in others):
            raise ValueError(f"num_seeds: want 1 to {most}, and none for the baseline")
        if unknown := {name for pair in self.pairs for name in pair} - set(self.variants):
            raise ValueError(f"pairs: want names of variants, got {', '.join(sorted(unknown))}")

    def seeds_of(self, variant: str) -> tuple[int, ...]:
        """Seeds that a variant is trained with."""
        return self.seeds[: self.variants[variant].get("num_seeds")]

    def runs(self, budget: str) -> list["Run"]:
        """All runs of a budget, first those with the first seed."""
        pairs = product(self.seeds, self.variants)
        return [Run(budget, name, seed) for seed, name in pairs if seed in self.seeds_of(name)]


class Run(NamedTuple):
    """One training run: its variant, its seed, and the budget (steps or time) it shares."""

    budget: str
    variant: str
    seed: int

    @property
    def name(self) -> str:
        """Name of its draft in benchmarks."""
        return f"{self.variant} seed {self.seed}"


def study(config: StudyConfig, *, num_jobs: int = 1) -> dict[str, Any]:
    """Trains and benchmarks what is missing, and compares.

    Args:
      config: what is compared.
      num_jobs: number of runs that train side by side.

    Raises:
      UserError: bad input, or a run that failed.
    """
    rows, curves, held_out = [], {}, {}
    for budget in config.budgets:
        runs = config.runs(budget)
        train_all(config, runs, num_jobs)
        curves[budget] = {run.name: read_curve(config, run) for run in runs}
        held_out[budget] = {
            variant: sum_up(
                [read_validations(config, run)[-1] for run in runs if run.variant == variant]
            )
            for variant in config.variants
        }
        for tree in config.trees:
            rows += [{"budget": budget, "tree": tree} | row for row in measure(config, runs, tree)]
    return {
        "baseline": next(iter(config.variants)),
        "seeds": list(config.seeds),
        "pairs": [list(pair) for pair in config.pairs],
        "rows": rows,
        "held_out": held_out,
        "curves": curves,
        "provenance": provenance(),
    }


def folder_of(config: StudyConfig, run: Run) -> Path:
    """Folder of a run."""
    return Path(config.output) / run.budget / run.variant.replace(" ", "_") / str(run.seed)


def train_all(config: StudyConfig, runs: Sequence[Run], num_jobs: int) -> None:
    """Trains drafts, some side by side; after an error no further one begins.

    Raises:
      UserError: a run failed.
    """
    if num_jobs == 1:
        for run in runs:
            train(config, run)
        return
    for width in {one["widen"] for one in config.variants.values() if "widen" in one}:
        widen(config, width)  # once, before the runs that continue it
    with ThreadPoolExecutor(num_jobs) as pool:
        futures = [pool.submit(train, config, run, is_alone=False) for run in runs]
        try:
            for future in tqdm(futures, desc="training", unit="run"):
                future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def train(config: StudyConfig, run: Run, *, is_alone: bool = True) -> None:
    """Trains one draft in a new process, or resumes it.

    Args:
      config: the study.
      run: the draft.
      is_alone: show its progress, and let it take the memory of a GPU from the beginning.

    Raises:
      UserError: it failed, or its folder holds a run of another config.
    """
    folder, words = folder_of(config, run), words_of(config, run)
    if (folder / "model").exists():
        _refuse_other_config(run, folder, load_config(TrainConfig, config.start, words))
        return
    if width := config.variants[run.variant].get("widen"):
        words.append(f"init_draft={widen(config, width)}")
    if run.budget == "time":
        words.append(f"num_tokens={tokens_in_equal_time(config, run)}")
    share_rows(config, load_config(TrainConfig, config.start, words))
    command = [sys.executable, "-m", "train.main", "--config", config.start, *words]
    done = subprocess.run(
        command,
        stdout=subprocess.DEVNULL,
        stderr=None if is_alone else subprocess.PIPE,
        env=None if is_alone else {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", **os.environ},
        text=True,
        check=False,
    )
    if done.returncode:
        if not (folder / "checkpoints").exists():
            shutil.rmtree(folder, ignore_errors=True)
        where = "see above" if is_alone else done.stderr.strip().rpartition("\n")[-1]
        raise UserError(f"training of {run.name} failed; {where}")


def _refuse_other_config(run: Run, folder: Path, wanted: TrainConfig) -> None:
    """Refuses a complete run of another config; its folder and a widened start may differ."""
    free = ["output", "init_draft"]
    if run.budget == "time" or wanted.num_tokens is None:
        free += ["num_tokens", "num_epochs"]  # as was measured, or as there were rows
    changed = changed_settings(saved_config(folder) or {}, wanted)
    if different := [line for line in changed if line.partition(":")[0] not in free]:
        raise UserError(f"{folder} holds a run with another config ({different[0]}); move it away")


def words_of(config: StudyConfig, run: Run) -> list[str]:
    """Overrides of `start` by which the training program makes a run."""
    values = {"output": str(folder_of(config, run)), "seed": run.seed}
    values |= config.variants[run.variant]
    own = "num_seeds", "widen"
    return [f"{key}={json.dumps(value)}" for key, value in values.items() if key not in own]


def share_rows(config: StudyConfig, new: TrainConfig) -> None:
    """Gives a new run the rows of a run with the same data, which saves a minute."""
    for made in Path(config.output).glob("*/*/*/data.npz"):
        if load_config(TrainConfig, made.parent / "config.yaml").data == new.data:
            with claim_folder(new) as folder, suppress(OSError):  # it has rows, or no links exist
                os.link(made, folder / made.name)
            return


def widen(config: StudyConfig, width: int) -> Path:
    """Copies the draft that variants continue, its MLP widened by neurons that add nothing yet.

    A control: one layer with as many weights as several specialists have. The new rows of gate and
    up are drawn, the new columns of down are zero, so that both drafts predict the same.

    Returns:
      The model folder of the copy.
    """
    run = load_config(TrainConfig, config.start)
    start, target = run.init_draft, run.target
    if start is None or target is None:
        raise UserError(f"{config.start}: want target and init_draft, which is what is widened")
    record, draft = load_draft(start, jnp.float32, target=read_record(target))
    folder = Path(config.output) / f"start-{width}-{record.fingerprint[:8]}"
    if folder.exists():
        return folder
    key = jax.random.key(0)
    for layer in draft["specialists"]:
        mlp = layer["mlp"]
        more = width - mlp["down"]["weight"].shape[1]
        for name in ("gate", "up"):
            weight, key = mlp[name]["weight"], jax.random.fold_in(key, 1)
            drawn = weight.std() * jax.random.normal(key, (more, weight.shape[1]), weight.dtype)
            mlp[name]["weight"] = jnp.concatenate([weight, drawn])
        mlp["down"]["weight"] = jnp.pad(mlp["down"]["weight"], ((0, 0), (0, more)))
    wide = replace(record.draft, layer=replace(record.draft.layer, intermediate_size=width))
    new = new_record(wide, record.target, tokenizer_from=Path(start))
    write_model(folder, new, split_items(wide, draft), tokenizer_from=Path(start))
    return folder


def tokens_in_equal_time(config: StudyConfig, run: Run) -> int:
    """Tokens that a variant sees in the time the slowest takes for the start config's budget."""
    rates = {
        variant: np.median(
            [
                line["tokens_per_second"]
                for seed in config.seeds_of(variant)
                for line in read_metrics(config, Run("steps", variant, seed))
                if "tokens_per_second" in line
            ]
        )
        for variant in config.variants
    }
    budget = load_config(TrainConfig, config.start).num_tokens
    if budget is None:
        raise UserError(f"{config.start}: want num_tokens")
    return int(budget * rates[run.variant] / min(rates.values()))


def read_metrics(config: StudyConfig, run: Run) -> list[dict[str, Any]]:
    """Reads the metrics of a run."""
    path = folder_of(config, run) / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def read_validations(config: StudyConfig, run: Run) -> list[dict[str, Any]]:
    """Reads the metrics of every validation of a run."""
    return [line for line in read_metrics(config, run) if SIMULATED in line]


def read_curve(config: StudyConfig, run: Run) -> list[tuple[int, float]]:
    """Reads (step, simulated acceptance length) of every validation."""
    return [(line["step"], line[SIMULATED]) for line in read_validations(config, run)]


def sum_up(validations: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Sums up the last validations of a variant's seeds.

    Args:
      validations: a line of metrics per seed.

    Returns:
      Acceptance lengths of the seeds; averages over seeds, by depth: acceptance given all before,
      and cosine of drafted and true features (empty for EAGLE-3, which predicts none).
    """
    cumulative = np.mean([line["cumulative_acceptance"] for line in validations], axis=0)
    cosines = [line["feature_cosine"] for line in validations if "feature_cosine" in line]
    return {
        "of_seeds": [line[SIMULATED] for line in validations],
        "positionwise_acceptance": (cumulative / np.array([1, *cumulative[:-1]])).tolist(),
        "feature_cosine": np.mean(cosines, axis=0).tolist() if cosines else [],
    }


def measure(config: StudyConfig, runs: Sequence[Run], tree: str) -> Iterator[dict[str, Any]]:
    """Benchmarks the drafts of all runs with one tree; yields a row per set and temperature."""
    name = f"{runs[0].budget}-{tree.replace('/', '-')}"
    output = str(Path(config.output) / "bench" / name)
    settings = load_config(BenchConfig, str(config.bench))
    settings = replace(settings, tree=config.trees[tree], phases=config.phases, output=output)
    reports, answers = {}, []
    for variant in config.variants:
        drafts = [run for run in runs if run.variant == variant]
        folders = {run.name: str(folder_of(config, run) / "model") for run in drafts}
        reports[variant], some = bench(replace(settings, drafts=folders))
        answers += some
        jax.clear_caches()  # the programs of many variants are more than a process may map
    methods = {name: one for report in reports.values() for name, one in report["methods"].items()}
    rounds = {name: one["phase_milliseconds"].get("round") for name, one in methods.items()}
    costs = {
        "round_milliseconds": {
            variant: float(np.median([rounds[run.name] for run in runs if run.variant == variant]))
            for variant in (config.variants if config.phases else [])
        },
        "memory": {run.variant: methods[run.name]["memory"] for run in runs},
    }
    for groups in zip(*(report["groups"] for report in reports.values()), strict=True):
        joined = groups[0] | {
            "methods": {name: one for group in groups for name, one in group["methods"].items()},
            "looping_questions": {i for group in groups for i in group["looping_questions"]},
        }
        yield compare_variants(config, runs, joined, answers, settings.repeats) | costs


def compare_variants(
    config: StudyConfig,
    runs: Sequence[Run],
    group: dict[str, Any],
    answers: Sequence[Answer],
    repeats: int,
) -> dict[str, Any]:
    """Compares variants on the questions whose answers do not loop, with the seeds of both."""
    cells = [Cell(group["set"], group["temperature"], seed) for seed in group["seeds"]]
    by_key = {answer.key: answer for answer in answers}
    every = range(group["questions"])
    kept = [i for i in every if i not in group["looping_questions"]] or list(every)
    lengths: dict[str, list[np.ndarray]] = {variant: [] for variant in config.variants}
    positions: dict[str, list[list[float]]] = {variant: [] for variant in config.variants}
    for run in runs:
        sizes = {"repeats": repeats, "num_questions": group["questions"]}
        grid = make_grid(by_key, cells, run.name, **sizes).of(kept)
        lengths[run.variant].append(np.nan_to_num(grid.acceptance_lengths(), nan=1.0).mean(axis=1))
        numbers = group["methods"][run.name].get("not_looping", group["methods"][run.name]["all"])
        positions[run.variant].append(numbers["positionwise_acceptance"]["value"])
    arrays = {variant: np.stack(few, axis=1) for variant, few in lengths.items()}

    def difference(variant: str, other: str) -> dict[str, Any]:
        num_seeds = min(arrays[variant].shape[1], arrays[other].shape[1])
        return compare(arrays[other][:, :num_seeds], arrays[variant][:, :num_seeds])

    baseline, variants = next(iter(config.variants)), {}
    for variant, of_seeds in arrays.items():  # [questions seeds]
        shortest = min(map(len, positions[variant]))
        shares = [np.array(one[:shortest], float) for one in positions[variant]]
        variants[variant] = {
            "acceptance_length": estimate_mean(of_seeds.mean(axis=1)),
            "of_seeds": of_seeds.mean(axis=0).tolist(),
            "positionwise_acceptance": np.mean(shares, axis=0).tolist(),
            **difference(variant, baseline),
        }
    about = {"set": group["set"], "temperature": group["temperature"], "questions": len(kept)}
    pairs = [{"pair": list(pair), **difference(*pair)} for pair in config.pairs]
    return about | {"variants": variants, "pairs": pairs}


def format_study(report: dict[str, Any]) -> str:
    """Writes the report in Markdown."""
    lines = [
        f"Training seeds {report['seeds']}, or the first of them; p is not corrected for "
        "the number of comparisons."
    ]
    if report["rows"]:
        lines += [
            "Acceptance lengths are averaged over seeds, per question; in brackets 95 % intervals "
            f"over questions; difference from {report['baseline']} with the same seeds; p of the "
            "paired permutation test over questions, at least 0.0002, and of Welch's t-test over "
            "training seeds."
        ]
    for row in report["rows"]:
        deepest = max(len(one["positionwise_acceptance"]) for one in row["variants"].values())
        head = ["variant", "seeds", "acceptance length", "seeds apart"]
        head += ["difference", *TESTS, "round ms"]
        head += [f"pos {depth}" for depth in range(1, deepest + 1)]
        lines += [
            "",
            f"## {row['set']}, temperature {row['temperature']:g}, tree {row['tree']}, "
            f"{BUDGETS[row['budget']]}",
            "",
            f"{row['questions']} questions: those whose answers do not loop, or all if each does.",
            "",
        ]
        table = []
        for variant, one in row["variants"].items():
            of_seeds = one["of_seeds"]
            cells = [
                variant,
                str(len(of_seeds)),
                format_estimate(one["acceptance_length"], digits=3),
                f"{max(of_seeds) - min(of_seeds):.3f}" if len(of_seeds) > 1 else "",
                format_estimate(one["difference"], digits=3),
                *format_tests(row, one, variant, report["baseline"]),
                f"{row['round_milliseconds'][variant]:.2f}" if row["round_milliseconds"] else "",
                *(f"{share:.1%}" for share in one["positionwise_acceptance"]),
            ]
            table.append(cells)
        lines += format_rows(head, table)
        pairs = []
        for one in row["pairs"]:
            difference = format_estimate(one["difference"], digits=3)
            tests = format_tests(row, one, *one["pair"])
            pairs.append((" less ".join(one["pair"]), difference, *tests))
        lines += ["", *format_rows(["pair", "difference", *TESTS], pairs)] if pairs else []
    return "\n".join(lines)


def format_tests(
    row: dict[str, Any], compared: dict[str, Any], variant: str, other: str
) -> tuple[str, str]:
    """The p-values of two variants, over questions and over training seeds."""
    seeds = compare_seeds(*(row["variants"][name]["of_seeds"] for name in (variant, other)))
    return f"{compared['p_value']:.4f}", "" if seeds is None else f"{seeds:.2g}"


def format_held_out(report: dict[str, Any]) -> str:
    """Writes in Markdown what validation found on held-out texts, and how features drift there."""
    lines = []
    for budget, variants in report["held_out"].items():
        depths = range(1, 1 + max(len(one["positionwise_acceptance"]) for one in variants.values()))
        lines += [
            "",
            f"## Held-out texts of training, {BUDGETS[budget]}",
            "",
            "Acceptance length of a chain as validation simulates it, averaged over seeds; "
            "position-wise acceptance; cosine of drafted and true features.",
            "",
        ]
        head = ["variant", "seeds", "acceptance length", "seeds apart", "difference", TESTS[1]]
        head += [f"pos {depth}" for depth in depths] + [f"cosine {depth}" for depth in depths]
        table = []
        for variant, one in variants.items():
            of_seeds = one["of_seeds"]
            cells = [
                variant,
                str(len(of_seeds)),
                f"{np.mean(of_seeds):.3f}",
                f"{max(of_seeds) - min(of_seeds):.3f}" if len(of_seeds) > 1 else "",
                *_difference(variants, variant, report["baseline"]),
                *(f"{share:.1%}" for share in one["positionwise_acceptance"]),
                *(f"{cosine:.3f}" for cosine in one["feature_cosine"]),
            ]
            table.append(cells)
        lines += format_rows(head, table)
        pairs = [
            (" less ".join(pair), *_difference(variants, *pair)) for pair in report.get("pairs", [])
        ]
        lines += ["", *format_rows(["pair", "difference", TESTS[1]], pairs)] if pairs else []
    return "\n".join(lines)


def _difference(variants: dict[str, Any], variant: str, other: str) -> tuple[str, str]:
    """Difference of two variants' mean acceptance lengths, and its p-value over seeds."""
    first, second = (variants[name]["of_seeds"] for name in (variant, other))
    p_value = compare_seeds(first, second)
    apart = f"{np.mean(first) - np.mean(second):+.3f}" if variant != other else ""
    return apart, "" if p_value is None or variant == other else f"{p_value:.2g}"


def plot(report: dict[str, Any], folder: Path) -> None:
    """Draws acceptance by position for every row, drift by depth, and the curves of training."""
    from matplotlib import pyplot

    most, palette = len(report["seeds"]), pyplot.get_cmap("tab20")
    styles = {
        name: {"color": palette(index % 20)}
        | ({"ls": ":"} if len(one["of_seeds"]) < most else {"marker": ".", "ms": 9})
        for index, (name, one) in enumerate(report["held_out"]["steps"].items())
    }
    drifts = any(one["feature_cosine"] for one in report["held_out"]["steps"].values())
    with pyplot.rc_context({"svg.hashsalt": "poss_jax"}):
        for name, draw, is_wanted in (
            ("positions", _draw_positions, True),
            ("drift", _draw_drift, drifts),
            ("convergence", _draw_convergence, True),
        ):
            if not is_wanted:
                continue
            figure = draw(pyplot, report, styles)
            figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
            pyplot.close(figure)


Panels = dict[str, list[tuple[str, list[tuple[float, float]]]]]
"""Title -> (variant, points of its curve)."""


def _draw_positions(pyplot: Any, report: dict[str, Any], styles: dict[str, Any]) -> Any:
    panels: Panels = {
        f"held out\n{BUDGETS[budget]}": [
            (variant, list(enumerate(one["positionwise_acceptance"], 1)))
            for variant, one in variants.items()
        ]
        for budget, variants in report["held_out"].items()
    }
    panels |= {
        f"{row['set']}\nT = {row['temperature']:g}, {row['tree']}, {row['budget']}": [
            (variant, list(enumerate(one["positionwise_acceptance"], 1)))
            for variant, one in row["variants"].items()
        ]
        for row in report["rows"]
    }
    return _draw_panels(pyplot, panels, styles, "draft position", "accepted, given all before")


def _draw_drift(pyplot: Any, report: dict[str, Any], styles: dict[str, Any]) -> Any:
    panels: Panels = {
        BUDGETS[budget]: [
            (name, list(enumerate(one["feature_cosine"], 1)))
            for name, one in variants.items()
            if one["feature_cosine"]
        ]
        for budget, variants in report["held_out"].items()
    }
    return _draw_panels(pyplot, panels, styles, "depth", "cosine of drafted and true features")


def _draw_convergence(pyplot: Any, report: dict[str, Any], styles: dict[str, Any]) -> Any:
    panels = {
        BUDGETS[budget]: [(name.rpartition(" seed ")[0], curve) for name, curve in curves.items()]
        for budget, curves in report["curves"].items()
    }
    y = "simulated acceptance length, held out"
    return _draw_panels(pyplot, panels, styles, "optimizer steps", y)


def _draw_panels(
    pyplot: Any,
    panels: Panels,
    styles: dict[str, Any],
    x: str,
    y: str,
) -> Any:
    """Draws curves of variants, a panel for each title."""
    size = 2 + 4.5 * len(panels), 4
    figure, all_axes = pyplot.subplots(
        1, len(panels), figsize=size, squeeze=False, sharey=True, layout="constrained"
    )
    handles = {}
    for axes, (title, curves) in zip(all_axes[0], panels.items(), strict=True):
        for variant, points in curves:
            (handles[variant],) = axes.plot(*zip(*points, strict=True), **styles[variant])
        axes.set_title(title, fontsize="medium")
        axes.set(xlabel=x, ylabel=y)
        axes.grid(alpha=0.3)
    figure.legend(handles.values(), handles.keys(), loc="outside right upper")
    return figure


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses arguments, trains, measures, prints."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="set a key of the config")
    parser.add_argument("--config", required=True, metavar="FILE")
    parser.add_argument("--output", type=report_folder, required=True, metavar="DIR")
    parser.add_argument("--jobs", type=at_least(1), default=1, metavar="N",
                        help="number of runs that train side by side")  # fmt: skip
    args = parser.parse_intermixed_args(arguments)
    config = load_config(StudyConfig, args.config, args.overrides)
    if config.bench is not None:
        load_config(BenchConfig, config.bench)  # is refused before hours of training, as are these
    for run in config.runs("steps"):
        load_config(TrainConfig, config.start, words_of(config, run))
    report = study(config, num_jobs=args.jobs)
    text = f"{format_study(report)}\n{format_held_out(report)}"
    show_report(report, text, args.output, plot=partial(plot, report))


if __name__ == "__main__":
    run_program(main)
