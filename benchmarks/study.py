"""Does the method hold? Trains variants of a draft alike, with several seeds, and compares them.

All variants continue one draft, for the same number of optimizer steps or their own `num_tokens`,
and answer the same questions. The paired test of `infer.bench.summary` compares their acceptance
lengths, question by question and averaged over training seeds. Complete runs are skipped, so the
same command resumes after an interruption. Prints tables, and as its last line one JSON object;
writes report.json, report.md and plots to DIR.

    python -m benchmarks.study --config configs/study/python.yaml --output docs/results/study_python

With --jobs N, N runs train side by side. Small ones share a GPU well once NVIDIA's MPS daemon runs
(nvidia-cuda-mps-control -d); without it they take turns, and nothing is gained.
"""

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from benchmarks.options import report_folder
from benchmarks.study_report import format_study, plot
from infer.bench.compare import bench
from infer.bench.journal import Answer, Cell
from infer.bench.report import show_report
from infer.bench.summary import compare, compare_seeds, estimate_mean, make_grid
from poss_jax.checkpoint.folder import load_draft
from poss_jax.checkpoint.record import new_record, provenance, read_record
from poss_jax.checkpoint.writing import write_model
from poss_jax.config.bench import BenchConfig
from poss_jax.config.models import STRICT, TreeConfig
from poss_jax.config.numbers import Seed
from poss_jax.config.paths import child_python
from poss_jax.config.reading import UserError, load_config
from poss_jax.config.training import TrainConfig
from poss_jax.data.progress import progress_bar
from poss_jax.model.parameters import split_items
from poss_jax.program.arguments import at_least
from poss_jax.program.running import Parser, run_program
from train.loop import validation_batches
from train.run_folder import changed_settings, claim_folder, saved_config
from train.training import open_stage

SIMULATED = "simulated_acceptance_length"


@dataclass(frozen=True, kw_only=True, config=STRICT)
class StudyConfig:
    """One study."""

    start: str  # config of the run that the variants change; it names the draft they continue
    # keys of that config that a variant changes; the first variant is the baseline. The key `widen`
    # continues a draft whose MLP is that wide (see `widen`); `num_seeds` is how many of the seeds a
    # variant is trained with, and it is compared with the same seeds of the baseline.
    variants: dict[str, dict[str, Any]] = Field(min_length=1)
    bench: str | None = None  # config of the benchmark, without drafts; null where no tree is given
    # trees that all drafts are benchmarked with, by name; without any, drafts are compared on the
    # held-out texts of training alone
    trees: dict[str, TreeConfig] = Field(default_factory=dict)
    pairs: tuple[tuple[str, str], ...] = ()  # compared, too: the first less the second
    seeds: tuple[Seed, ...] = Field((0, 1, 2), min_length=1)  # of training
    phases: bool = True  # also time a round of every variant
    output: str = "runs/study"  # folder of runs and benchmarks

    def __post_init__(self) -> None:
        if self.trees and self.bench is None:
            raise ValueError("trees: want a bench, too, with the questions")
        limit = len(self.seeds)
        baseline, *counts = (variant.get("num_seeds", limit) for variant in self.variants.values())
        if baseline != limit or not all(number in range(1, limit + 1) for number in counts):
            raise ValueError(f"num_seeds: want 1 to {limit}, and none for the baseline")
        if unknown := {name for pair in self.pairs for name in pair} - set(self.variants):
            raise ValueError(f"pairs: want names of variants, got {', '.join(sorted(unknown))}")

    def runs(self) -> list["Run"]:
        """All runs, first those with the first seed."""
        return [
            Run(name, seed)
            for index, seed in enumerate(self.seeds)
            for name, changes in self.variants.items()
            if index < changes.get("num_seeds", len(self.seeds))
        ]


class Run(NamedTuple):
    """One training run: its variant and its seed."""

    variant: str
    seed: int

    @property
    def name(self) -> str:
        """Name of its draft in benchmarks."""
        return f"{self.variant} seed {self.seed}"


def study(config: StudyConfig, *, num_jobs: int = 1) -> dict[str, Any]:
    """Trains what is missing, `num_jobs` runs side by side, benchmarks it, and compares.

    Raises:
      UserError: bad input, or a run that failed.
    """
    runs = config.runs()
    train_all(config, runs, num_jobs)
    validations = {run: read_validations(config, run) for run in runs}
    batches = {} if config.trees else {run: validate(config, run) for run in runs}
    return {
        "baseline": next(iter(config.variants)),
        "seeds": list(config.seeds),
        "held_out": compare_held_out(
            config, {run: lines[-1] for run, lines in validations.items()}, batches
        ),
        "rows": [row for tree in config.trees for row in measure(config, runs, tree)],
        "curves": {
            run.name: [(line["step"], line[SIMULATED]) for line in lines]
            for run, lines in validations.items()
        },
        "provenance": provenance(),
    }


def folder_of(config: StudyConfig, run: Run) -> Path:
    """Folder of a run."""
    return Path(config.output) / "runs" / run.variant.replace(" ", "_") / str(run.seed)


def train_all(config: StudyConfig, runs: Sequence[Run], num_jobs: int) -> None:
    """Trains drafts, some side by side; after an error no further one begins.

    Raises:
      UserError: a run failed.
    """
    if num_jobs == 1:
        for run in runs:
            train(config, run)
        return
    for width in {variant["widen"] for variant in config.variants.values() if "widen" in variant}:
        widen(config, width)  # once, before the runs that continue it
    with ThreadPoolExecutor(num_jobs) as pool:
        futures = [pool.submit(train, config, run, is_alone=False) for run in runs]
        try:
            for future in progress_bar(futures, desc="training", unit="run"):
                future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def train(config: StudyConfig, run: Run, *, is_alone: bool = True) -> None:
    """Trains one draft in a new process, or resumes it.

    Args:
      is_alone: show its progress, and let it take the memory of a GPU from the beginning.

    Raises:
      UserError: it failed, or its folder holds a run of another config.
    """
    folder, words = folder_of(config, run), words_of(config, run)
    if (folder / "model").exists():
        settings = load_config(TrainConfig, config.start, words)
        free = ["output", "init_draft"]  # of its folder, and a widened start
        if settings.num_tokens is None:
            free += ["num_tokens", "num_epochs"]  # as there were rows
        changed = changed_settings(saved_config(folder) or {}, settings)
        if different := [line for line in changed if line.partition(":")[0] not in free]:
            raise UserError(
                f"{folder} holds a run with another config ({different[0]}); move it away"
            )
        return
    if width := config.variants[run.variant].get("widen"):
        words.append(f"init_draft={widen(config, width)}")
    share_rows(config, load_config(TrainConfig, config.start, words))
    command, environment = child_python("-m", "train.main", "--config", config.start, *words)
    if not is_alone:
        environment.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    done = subprocess.run(
        command,
        stdout=subprocess.DEVNULL,
        stderr=None if is_alone else subprocess.PIPE,
        env=environment,
        text=True,
        check=False,
    )
    if done.returncode:
        if not (folder / "checkpoints").exists():
            shutil.rmtree(folder, ignore_errors=True)
        where = "see above" if is_alone else done.stderr.strip().rpartition("\n")[-1]
        raise UserError(f"training of {run.name} failed; {where}")


def words_of(config: StudyConfig, run: Run) -> list[str]:
    """Overrides of `start` by which the training program makes a run."""
    values = {"output": str(folder_of(config, run)), "seed": run.seed}
    values |= config.variants[run.variant]
    study_keys = "num_seeds", "widen"
    return [f"{key}={json.dumps(value)}" for key, value in values.items() if key not in study_keys]


def share_rows(config: StudyConfig, new: TrainConfig) -> None:
    """Gives a new run the rows of a run with the same data, which saves a minute."""
    for made in Path(config.output).glob("runs/*/*/data.npz"):
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


def read_validations(config: StudyConfig, run: Run) -> list[dict[str, Any]]:
    """Reads the metrics of every validation of a run."""
    lines = (folder_of(config, run) / "metrics.jsonl").read_text().splitlines()
    return [metrics for metrics in map(json.loads, lines) if SIMULATED in metrics]


def validate(config: StudyConfig, run: Run) -> list[dict[str, Any]]:
    """Validates the model of a run again; returns the metrics of every batch of held-out rows."""
    folder = folder_of(config, run)
    settings = load_config(TrainConfig, folder / "config.yaml")
    settings = replace(settings, init_draft=str(folder / "model"))
    with tempfile.TemporaryDirectory() as scratch:
        shutil.copy(folder / "data.npz", scratch)
        stage = open_stage(settings, Path(scratch))
        stage.load_weights()
    params, batches = stage.init_params(), validation_batches(settings, stage)
    return [stage.validate(params, [batch])[0] for batch in batches]


def compare_held_out(
    config: StudyConfig, last: dict[Run, dict[str, Any]], batches: dict[Run, list[dict[str, Any]]]
) -> dict[str, Any]:
    """Compares variants on the held-out texts of training.

    Args:
      last: metrics of every run's last validation.
      batches: the same of every batch of its rows, or nothing: then nothing is tested.

    Returns:
      A row as `compare_variants` gives, with batches instead of questions. It also has the cosine
      of drafted and true features (EAGLE-3 predicts none), and compares acceptance at position 1.
    """
    variants, lengths, first_positions = {}, {}, {}
    for variant in config.variants:
        runs = [run for run in last if run.variant == variant]
        of_seeds = [last[run][SIMULATED] for run in runs]
        cumulative = np.mean([last[run]["cumulative_acceptance"] for run in runs], axis=0)
        cosines = [last[run]["feature_cosine"] for run in runs if "feature_cosine" in last[run]]
        variants[variant] = {
            "acceptance_length": _without_interval(float(np.mean(of_seeds))),
            "of_seeds": of_seeds,
            "positionwise_acceptance": (cumulative / np.array([1, *cumulative[:-1]])).tolist(),
            "feature_cosine": np.mean(cosines, axis=0).tolist() if cosines else [],
        }
        tested = [batches[run] for run in runs if batches]
        lengths[variant] = np.array([[batch[SIMULATED] for batch in run] for run in tested]).T
        first_positions[variant] = np.array(
            [[batch["cumulative_acceptance"][0] for batch in run] for run in tested]
        ).T
    return compare_pairs(config, variants, lengths if batches else {}, first_positions)


def _without_interval(value: float) -> dict[str, float | None]:
    return {"value": value, "low": None, "high": None}


def compare_pairs(
    config: StudyConfig,
    variants: dict[str, dict[str, Any]],
    lengths: dict[str, np.ndarray],
    first_positions: dict[str, np.ndarray] | None = None,
) -> dict[str, Any]:
    """Compares every variant with the baseline, and the pairs of the config.

    Args:
      lengths: acceptance lengths [questions seeds] by variant; empty: nothing is tested.
      first_positions: the same of acceptance at position 1.
    """

    def test(samples: dict[str, np.ndarray], pair: Sequence[str]) -> dict[str, Any]:
        num_seeds = min(samples[name].shape[1] for name in pair)
        second, first = (samples[name][:, :num_seeds] for name in pair)
        return compare(first, second)

    def compared(*pair: str) -> dict[str, Any]:
        second, first = (variants[name] for name in pair)
        if lengths:
            row = test(lengths, pair)
            if first_positions:
                row["first_position"] = test(first_positions, pair)
        else:
            less = second["acceptance_length"]["value"] - first["acceptance_length"]["value"]
            row = {"difference": _without_interval(less), "p_value": None}
        return row | {"p_over_seeds": compare_seeds(second["of_seeds"], first["of_seeds"])}

    baseline = next(iter(variants))
    return {
        "variants": {name: entry | compared(name, baseline) for name, entry in variants.items()},
        "pairs": [{"pair": list(pair), **compared(*pair)} for pair in config.pairs],
    }


def measure(config: StudyConfig, runs: Sequence[Run], tree: str) -> Iterator[dict[str, Any]]:
    """Benchmarks the drafts of all runs with one tree; yields a row per set and temperature."""
    output = str(Path(config.output) / "bench" / tree.replace("/", "-"))
    settings = load_config(BenchConfig, str(config.bench))
    settings = replace(settings, tree=config.trees[tree], phases=config.phases, output=output)
    reports, answers, round_milliseconds = {}, [], {}
    for variant in config.variants:
        drafts = [run for run in runs if run.variant == variant]
        folders = {run.name: str(folder_of(config, run) / "model") for run in drafts}
        reports[variant], some = bench(replace(settings, drafts=folders))
        answers += some
        jax.clear_caches()  # the programs of many variants are more than a process may map
        if config.phases:
            rows = [reports[variant]["methods"][name] for name in folders]
            rounds = [row["phase_milliseconds"]["round"] for row in rows]
            round_milliseconds[variant] = float(np.median(rounds))
    for groups in zip(*(report["groups"] for report in reports.values()), strict=True):
        joined = groups[0] | {
            "methods": {name: row for group in groups for name, row in group["methods"].items()},
            "looping_questions": {i for group in groups for i in group["looping_questions"]},
        }
        row = compare_variants(config, runs, joined, answers, settings.repeats)
        yield {"tree": tree, "round_milliseconds": round_milliseconds} | row


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
    variants, samples = {}, {}
    for variant in config.variants:
        lengths, positions = [], []
        for run in [run for run in runs if run.variant == variant]:
            sizes = {"repeats": repeats, "num_questions": group["questions"]}
            grid = make_grid(by_key, cells, run.name, **sizes).of(kept)
            lengths.append(np.nan_to_num(grid.acceptance_lengths(), nan=1.0).mean(axis=1))
            numbers = group["methods"][run.name]
            numbers = numbers.get("not_looping", numbers["all"])
            positions.append(numbers["positionwise_acceptance"]["value"])
        samples[variant] = np.stack(lengths, axis=1)  # [questions seeds]
        shortest = min(map(len, positions))
        shares = [np.array(numbers[:shortest], float) for numbers in positions]
        variants[variant] = {
            "acceptance_length": estimate_mean(samples[variant].mean(axis=1)),
            "of_seeds": samples[variant].mean(axis=0).tolist(),
            "positionwise_acceptance": np.mean(shares, axis=0).tolist(),
        }
    heading = {"set": group["set"], "temperature": group["temperature"], "questions": len(kept)}
    return heading | compare_pairs(config, variants, samples)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses arguments, trains, measures, prints."""
    parser = Parser(description=__doc__)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="set a key of the config")
    parser.add_argument("--config", required=True, metavar="FILE")
    parser.add_argument("--output", type=report_folder, required=True, metavar="DIR")
    parser.add_argument("--jobs", type=at_least(1), default=1, metavar="N",
                        help="number of runs that train side by side")  # fmt: skip
    args = parser.parse_intermixed_args(arguments)
    config = load_config(StudyConfig, args.config, args.overrides)
    if config.bench is not None:
        load_config(BenchConfig, config.bench)  # is refused before hours of training, as are these
    for run in config.runs():
        load_config(TrainConfig, config.start, words_of(config, run))
    report = study(config, num_jobs=args.jobs)
    show_report(report, format_study(report), args.output, write=partial(plot, report))


if __name__ == "__main__":
    run_program(main)
