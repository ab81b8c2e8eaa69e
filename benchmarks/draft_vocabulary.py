"""Acceptance length and time of a round over the size of a draft's vocabulary.

Needs the config of a training run, whose data is counted, a target, and drafts that share its head
(by default bundled ones). Every size and the full vocabulary
decode each prompt in turn, and the fastest of several repeats counts, since other work on the
machine only slows. Prints a table, and as its last line one JSON object; --output keeps
report.json, report.md and a plot.

    python -m benchmarks.draft_vocabulary --output runs/draft_vocabulary
    python -m benchmarks.draft_vocabulary --config run.yaml --target T --draft PosS-3=P --sizes 8000
"""

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from benchmarks.options import TREE, add_questions, bench_config, make_parser, read_tree
from infer.bench.measure import Decoder, load_decoders, time_batches
from infer.bench.phases import measure_phases
from infer.bench.questions import first_prompts, read_questions
from infer.bench.report import show_report
from poss_jax.checkpoint.draft_vocabulary import DraftVocabulary, write_draft_vocabulary
from poss_jax.checkpoint.record import provenance
from poss_jax.config.decoding import BenchConfig
from poss_jax.config.models import TreeConfig
from poss_jax.config.reading import UserError, change_config, config_to_dict, load_config
from poss_jax.config.training import TrainConfig
from poss_jax.decode.metrics import mean_acceptance_length
from poss_jax.engine.answers import Generation
from poss_jax.engine.dialogue import Dialogue
from poss_jax.engine.engine import Engine
from poss_jax.engine.prompts import PreparedPrompt
from poss_jax.program.options import at_least
from poss_jax.program.running import run_program
from poss_jax.program.tables import format_rows
from train.draft_vocab import choose_tokens, count_tokens, coverage_of

SIZES = (64, 128, 256, 512)
PHASE_REPEATS = 5


@dataclass
class Run:
    """Answers to prompts, and the seconds of each.

    Attributes:
      answers: one per prompt.
      seconds: seconds of each, likewise one per prompt.
    """

    seconds: list[float]
    answers: list[Generation] = field(default_factory=list)


def measure(config: BenchConfig, counts: np.ndarray, sizes: Sequence[int]) -> dict[str, Any]:
    """Decodes everything with every draft and size; the full vocabulary is the last size."""
    baseline, *full = load_decoders(config)
    questions = read_questions(config, baseline.engine)
    chosen = [choose_tokens(counts, size) for size in (*sizes, len(counts))]
    drafts = {
        (draft.name, len(tokens)): _limit(config, baseline.engine, draft, tokens)
        for draft in full
        for tokens in chosen
    }
    alone, *drafted = time_in_turn([baseline, *drafts.values()], questions, config.repeats)
    phases = _time_drafting(list(drafts.values()), first_prompts(questions)[0])
    written = [token for answer in alone.answers for token in answer.output_ids]
    in_answers = np.bincount(written, minlength=len(counts))
    rows = []
    for (name, size), run, milliseconds in zip(drafts, drafted, phases, strict=True):
        tokens = choose_tokens(counts, size)
        rows.append(
            {
                "draft": name,
                "size": size,
                "coverage": coverage_of(counts, tokens),
                "coverage_of_answers": coverage_of(in_answers, tokens),
                "draft_milliseconds": milliseconds,
                **summarise(run, alone),
            }
        )
    return {
        "prompts": len(questions),
        "config": config_to_dict(config),
        "rows": rows,
        "provenance": provenance(),
    }


def time_in_turn(
    decoders: Sequence[Decoder], questions: Sequence[Dialogue], repeats: int
) -> list[Run]:
    """Decodes every first turn with all decoders in turn; keeps the fastest repeat of each."""
    prompts = first_prompts(questions)
    for decoder in tqdm(decoders, desc="compile"):
        decoder.compile(questions)
    fastest = [Run(seconds=[np.inf] * len(questions)) for _ in decoders]
    total = repeats * len(decoders) * len(questions)
    with tqdm(total=total, desc="decode", unit="prompt") as progress:
        for repeat in range(repeats):
            for index, prompt in enumerate(prompts):
                for decoder, run in zip(decoders, fastest, strict=True):
                    answers, seconds = time_batches(decoder.engine, [prompt], 1)
                    run.seconds[index] = min(run.seconds[index], seconds)
                    run.answers += answers if repeat == 0 else []
                    progress.update()
    return fastest


def _time_drafting(decoders: Sequence[Decoder], prompt: PreparedPrompt) -> list[float]:
    """Milliseconds of drafting one tree: the fastest of several medians, decoders in turn."""
    medians = [
        [measure_phases(decoder.engine, prompt)["draft"] for decoder in decoders]
        for _ in range(PHASE_REPEATS)
    ]
    return np.min(medians, axis=0).tolist()


def _limit(config: BenchConfig, baseline: Engine, draft: Decoder, tokens: np.ndarray) -> Decoder:
    """Gives a draft a vocabulary; the full one is the draft as it was loaded."""
    if len(tokens) == baseline.target_config.vocab_size:
        return draft
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "vocabulary.json"
        ids = tuple(tokens.tolist())
        vocab_size = baseline.target_config.vocab_size
        write_draft_vocabulary(path, DraftVocabulary(vocab_size=vocab_size, tokens=ids))
        engine = baseline.load_draft(config.drafts[draft.name], vocabulary=path)
    return Decoder(draft.name, engine)


def summarise(run: Run, alone: Run) -> dict[str, Any]:
    """Acceptance length, times, and speed-up over decoding alone."""
    num_tokens = sum(len(answer.output_ids) for answer in run.answers)
    num_rounds = sum(len(answer.accepted_per_round) for answer in run.answers)
    pairs = zip(run.answers, alone.answers, strict=True)
    return {
        "acceptance_length": mean_acceptance_length(
            [answer.accepted_per_round for answer in run.answers]
        ),
        "round_milliseconds": 1000 * sum(run.seconds) / num_rounds,
        "tokens_per_second": num_tokens / sum(run.seconds),
        "speed_up": sum(alone.seconds) / sum(run.seconds),
        "equal_outputs": sum(one.output_ids == other.output_ids for one, other in pairs),
    }


def format_table(report: dict[str, Any]) -> str:
    """The report as a Markdown table."""
    lines = format_cells(report, _CELLS)
    return "\n".join([*lines, "", f"Outputs that differ: {num_different(report)}"])


def format_cells(report: dict[str, Any], cells: dict[str, tuple[str, str]]) -> list[str]:
    """Formats the rows of a report.

    Args:
      report: it.
      cells: name of a column -> its key in the rows, and how it is written.
    """
    config = report["config"]
    return [
        f"{report['prompts']} prompts x {config['max_new_tokens']} tokens, greedy, the fastest of "
        f"{config['repeats']} repeats, tree {TreeConfig(**config['tree']).name}, "
        f"{report['provenance']['device_kind']}",
        "",
        *format_rows(
            list(cells),
            [[text.format(row[key]) for key, text in cells.values()] for row in report["rows"]],
        ),
    ]


_CELLS = {
    "draft": ("draft", "{}"),
    "size": ("size", "{}"),
    "coverage, trained on": ("coverage", "{:.1%}"),
    "coverage, answers": ("coverage_of_answers", "{:.1%}"),
    "acceptance length": ("acceptance_length", "{:.2f}"),
    "draft ms": ("draft_milliseconds", "{:.2f}"),
    "round ms": ("round_milliseconds", "{:.2f}"),
    "tokens/s": ("tokens_per_second", "{:.0f}"),
    "speed-up": ("speed_up", "{:.2f}"),
}


def num_different(report: dict[str, Any]) -> int:
    """Counts outputs that are not the autoregressive ones."""
    return sum(report["prompts"] - row["equal_outputs"] for row in report["rows"])


def check_equal(report: dict[str, Any]) -> None:
    """Raises UserError where outputs differ."""
    if number := num_different(report):
        raise UserError(f"{number} outputs differ from autoregressive ones; see the report")


def _plot(rows: list[dict[str, Any]], folder: Path) -> None:
    """Acceptance length and milliseconds of a round over the size."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(8, 4), layout="constrained")
    for axis, key in zip(axes, ("acceptance_length", "round_milliseconds"), strict=True):
        for name in dict.fromkeys(row["draft"] for row in rows):
            own = [row for row in rows if row["draft"] == name]
            axis.plot([row["size"] for row in own], [row[key] for row in own], "o-", label=name)
        axis.set(xlabel="tokens of the draft", ylabel=key.replace("_", " "), xscale="log")
        sizes = sorted({row["size"] for row in rows})
        axis.set_xticks(sizes, [str(size) for size in sizes])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0].legend()
    figure.savefig(folder / "draft_vocabulary.png", dpi=150)
    pyplot.close(figure)


def add_timing(parser: argparse.ArgumentParser) -> None:
    """Adds the tree that is timed, and how often."""
    parser.add_argument("--tree", type=read_tree, default=read_tree("4/2/8"), metavar=TREE)
    parser.add_argument("--repeats", type=at_least(1), default=3, metavar="N")


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses arguments, counts, measures, prints, writes."""
    parser = make_parser(__doc__)
    parser.add_argument("--config", default="configs/bundled/poss3.yaml", metavar="FILE")
    add_questions(parser, num_prompts=32, max_new_tokens=64)
    parser.add_argument("--sizes", nargs="+", type=at_least(2), default=SIZES, metavar="N")
    add_timing(parser)
    args = parser.parse_args(arguments)
    config = bench_config(args, tree=args.tree, repeats=args.repeats)
    run = load_config(TrainConfig, args.config)
    counts = count_tokens(change_config(run, origin=args.config, target=args.target))[0]
    report = measure(config, counts, args.sizes)
    show_report(
        report, format_table(report), args.output, plot=lambda folder: _plot(report["rows"], folder)
    )
    check_equal(report)


if __name__ == "__main__":
    run_program(main)
