"""Compares drafts with autoregressive decoding of this same engine, over the same questions.

Takes a target and drafts (model folders), without --target the model that `make chat` fetches.
Answers every question of every set, at every temperature and with every seed, autoregressively and
with each draft. A terminal is shown the main numbers; anything else all tables (acceptance length,
acceptance by position, tokens per second and speed-up with 95 % intervals) and, as the last line,
everything as one JSON object. --output keeps every answer as it comes, so that the same command
goes on after an interruption, and the report (report.html, .md, .json).

    python -m infer.bench --config configs/demo/bench.yaml
    python -m infer.bench --target T --draft EAGLE-2=E --draft PosS-3=P --prompts questions.jsonl
    python -m infer.bench --config configs/demo/bench.yaml --check-lossless
    python -m infer.bench --config configs/demo/bench.yaml --phases
    python -m infer.bench --config configs/demo/bench.yaml --roofline
    python -m infer.bench --target T --draft PosS-3=P --autotune --batch-sizes 1,4,16
"""

import argparse
import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from poss_jax.checkpoint.locks import sole_writer
from poss_jax.checkpoint.record import provenance, read_record
from poss_jax.config.decoding import BenchConfig
from poss_jax.config.paths import local_path
from poss_jax.config.reading import UserError, config_to_dict
from poss_jax.engine.dialogue import Dialogue
from poss_jax.engine.prompts import PreparedPrompt
from poss_jax.program.arguments import read_arguments
from poss_jax.program.options import at_least, with_default_models
from poss_jax.program.output import print_summary, wants_json
from poss_jax.program.running import run_program

from .answer_files import write_answer_files
from .brief import format_brief
from .drift import study
from .drift_report import format_report as format_drift
from .journal import SETTINGS, Answer, Cell, Journal, Key, make_turn
from .lossless import check_lossless, format_check
from .measure import (
    AUTOREGRESSIVE,
    Decoder,
    count_memory,
    load_decoders,
    measure_steps,
    play,
)
from .page import write_page
from .phases import measure_card
from .questions import Question, first_prompts, make_dialogues, read_questions, read_sets
from .report import check_output, format_card, format_report, with_provenance, write_report
from .roofline import device_name, find_roofline, measure_roofline
from .summary import make_grid, show_example, summarise_group
from .tuning import autotune, places_of_trees

_LOG = logging.getLogger(__name__)
_ACTIONS = "check_lossless", "roofline", "autotune"  # instead of a comparison


def bench(
    config: BenchConfig, *, from_scratch: bool = False
) -> tuple[dict[str, Any], list[Answer]]:
    """Runs the whole comparison, or what is missing of it in the folder `config.output`.

    Args:
      config: what is compared.
      from_scratch: whether answers that the folder holds are dropped.

    Returns:
      The report, JSON-compatible (see docs/bench.md), and all answers.

    Raises:
      UserError: bad input.
    """
    decoders = load_decoders(config)
    sets = read_sets(config, decoders[0].engine)
    dialogues = {
        cell: make_dialogues(sets[cell.set], config, sampling, decoders[0].engine)
        for cell, sampling in _cells(config, sets)
    }
    folder = local_path(config.output, "output") if config.output else None
    journal = Journal(folder, settings_of(config, decoders, sets), from_scratch=from_scratch)
    keys = [
        Key(cell, repeat, decoder.name, index)
        for cell, few in dialogues.items()
        for repeat in range(config.repeats)
        for number, batch in enumerate(_batches(range(len(few)), config.batch_size))
        for decoder in (*decoders[number % len(decoders) :], *decoders[: number % len(decoders)])
        for index in batch
    ]
    at_work = {key.method for key in journal.missing(keys)} | {
        decoder.name for decoder in decoders if decoder.name not in journal.methods
    }
    every = [one for few in dialogues.values() for one in few]
    for decoder in tqdm([one for one in decoders if one.name in at_work], desc="compile"):
        decoder.compile(every, batch_size=config.batch_size)
    by_depth = {"drift": study(config.by_depth)} if config.drift else {}
    _answer_missing(config, keys, decoders, sets, dialogues, journal)
    prompt = first_prompts(next(iter(dialogues.values())))[0]
    report = {
        "baseline": AUTOREGRESSIVE,
        "max_new_tokens": config.max_new_tokens,
        "repeats": config.repeats,
        "groups": list(_summarise(config, decoders, dialogues, journal)),
        **_describe_methods(decoders, prompt, journal, has_phases=config.phases),
    }
    report = with_provenance(report | by_depth, config)
    return report, [journal.answers[key] for key in keys]


def _cells(config: BenchConfig, sets: dict[str, list[Question]]) -> Iterator[tuple[Cell, Any]]:
    """Yields every set with every way to choose tokens; greedy answers have no use for seeds."""
    for name in sets:
        for temperature in config.temperatures or (config.sampling.temperature,):
            seeds = config.seeds or (config.sampling.seed,)
            for seed in seeds[: None if temperature else 1]:
                sampling = replace(config.sampling, temperature=temperature, seed=seed)
                yield Cell(name, temperature, seed), sampling


def settings_of(
    config: BenchConfig, decoders: Sequence[Decoder], sets: dict[str, list[Question]]
) -> dict[str, Any]:
    """Collects what decides answers and times: the config, the weights, the trees, the device.

    Answers name their set, temperature, seed and draft, so there may be more of them later.
    """
    settings = config_to_dict(config)
    answers_say = "prompts", "datasets", "data_dir", "temperatures", "seeds", "drafts"
    for key in ("output", "repeats", "drift", "draft_vocabulary", *answers_say):
        del settings[key]
    folders = {AUTOREGRESSIVE: config.target, **config.drafts}
    of_process = provenance()
    return settings | {
        "sets": {name: _digest(list(map(asdict, few))) for name, few in sets.items()},
        "weights": {name: read_record(folder).weights_sha256 for name, folder in folders.items()},
        "trees": {decoder.name: str(decoder.engine.trees) for decoder in decoders},
        "draft_vocabularies": {decoder.name: _digest(_vocabulary(decoder)) for decoder in decoders},
        "device": device_name(),
        "versions": {name: of_process["versions"][name] for name in ("jax", "poss_jax")},
    }


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, default=str).encode()).hexdigest()


def _vocabulary(decoder: Decoder) -> list[int] | None:
    """Tokens that a draft may propose; None: all."""
    tokens = decoder.engine.weights.draft.get("vocabulary")
    return None if tokens is None else np.asarray(tokens).tolist()


def _batches(indices: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    """Cuts questions into batches."""
    return (indices[first : first + size] for first in range(0, len(indices), size))


def _answer_missing(
    config: BenchConfig,
    keys: Sequence[Key],
    decoders: Sequence[Decoder],
    sets: dict[str, list[Question]],
    dialogues: dict[Cell, list[Dialogue]],
    journal: Journal,
) -> None:
    """Answers what the journal does not hold; methods take turns, batch by batch."""
    engines = {decoder.name: decoder.engine for decoder in decoders}

    def batch_of(key: Key) -> Key:
        return key._replace(question=key.question // config.batch_size)

    missing = list(journal.missing(keys))
    with tqdm(
        total=len(keys), initial=len(keys) - len(missing), desc="bench", unit="question"
    ) as progress:
        for (cell, _, method, _), group in groupby(missing, batch_of):
            batch = list(group)
            asked = [dialogues[cell][key.question] for key in batch]
            timed = play(engines[method], asked, batch_size=config.batch_size)
            for key, few in zip(batch, timed, strict=True):
                question = sets[cell.set][key.question]
                turns = [make_turn(*one) for one in few]
                journal.add(Answer(key, question.id, question.category, turns))
            progress.update(len(batch))


def _summarise(
    config: BenchConfig,
    decoders: Sequence[Decoder],
    dialogues: dict[Cell, list[Dialogue]],
    journal: Journal,
) -> Iterator[dict[str, Any]]:
    """Yields the numbers of every set and temperature, over all its seeds."""
    engine = decoders[0].engine
    for (name, temperature), group in groupby(dialogues, lambda cell: cell[:2]):
        cells = list(group)
        grids = {
            decoder.name: make_grid(
                journal.answers,
                cells,
                decoder.name,
                repeats=config.repeats,
                num_questions=len(dialogues[cells[0]]),
            )
            for decoder in decoders
        }
        shown = {
            decoder.name: journal.answers[Key(cells[0], 0, decoder.name, 0)]
            for decoder in decoders[1:]
        }
        about = {
            "set": name,
            "temperature": temperature,
            "seeds": [cell.seed for cell in cells],
            "example": show_example(engine, dialogues[cells[0]][0].prompt, shown),
        }
        yield about | summarise_group(grids, AUTOREGRESSIVE)


def _describe_methods(
    decoders: Sequence[Decoder],
    prompt: PreparedPrompt,
    journal: Journal,
    *,
    has_phases: bool,
) -> dict[str, Any]:
    """Measures what does not depend on the questions: memory, and phases if they are wanted."""
    roofline = find_roofline() if has_phases else None
    for decoder in decoders:
        if decoder.name not in journal.methods:
            numbers = {
                "compile_seconds": decoder.compile_seconds,
                "first_token_seconds": decoder.first_token_seconds,
                "memory": count_memory(decoder.engine),
            }
            if roofline is not None:
                numbers |= measure_card(decoder.engine, prompt, roofline.device)
            journal.describe(decoder.name, numbers)
    about: dict[str, Any] = {
        "device": device_name(),
        "methods": {
            decoder.name: {"tree": _tree_of(decoder)} | journal.methods[decoder.name]
            for decoder in decoders
        },
    }
    if roofline is None:
        return about
    steps = measure_steps(decoders[0].engine, prompt, roofline.device)
    return about | {"autoregressive_step_milliseconds": steps, "roofline": asdict(roofline)}


def _tree_of(decoder: Decoder) -> str | None:
    """The tree that a question alone is drafted with; None decodes without a draft."""
    config = decoder.engine.decode_config(1)
    return config.tree.name if config.draft else None


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses arguments, measures, prints, writes."""
    config, args = read_arguments(
        BenchConfig, arguments, prog="infer.bench", doc=__doc__, add_actions=_add_actions
    )
    if not args.autotune and (args.batch_sizes or args.trees_file or args.try_vocabulary):
        raise UserError(
            "--batch-sizes, --try-vocabulary and --trees-file are of --autotune; give it, too"
        )
    if config.drafting == "sampled" and (args.check_lossless or args.autotune):
        raise UserError(
            "--check-lossless and --autotune want texts that no draft changes; those of "
            "drafting=sampled are the target's in distribution only; choose coupled or argmax"
        )
    action = next((one for one in _ACTIONS if getattr(args, one)), None)
    if action is not None and args.output is not None:
        flag = action.replace("_", "-")
        _LOG.warning("--%s prints its report; nothing is written to --output", flag)
    config = with_default_models(config)
    if args.check_lossless:
        _check_lossless(config)
        return
    if args.autotune and len(config.temperatures) > 1:
        raise UserError(
            f"--autotune: want one temperature, got {list(config.temperatures)}; give "
            "temperatures=[1], or the one that texts will be drawn with"
        )
    if action is not None:
        _, sampling = next(_cells(config, {"": []}))
        config = replace(config, sampling=sampling)
    if args.roofline:
        _show_roofline(config)
        return
    if args.autotune:
        places = places_of_trees(config, args.trees_file, overwrite=args.overwrite)
        autotune(config, args.batch_sizes or [1], args.try_vocabulary, places)
        return
    if config.output is not None:
        folder = local_path(config.output, "output")
        goes_on = (folder / SETTINGS).is_file()
        check_output(folder, overwrite=args.overwrite or goes_on)
    with nullcontext() if config.output is None else sole_writer(config.output):
        _compare(config, from_scratch=args.overwrite)


def _compare(config: BenchConfig, *, from_scratch: bool) -> None:
    """Benchmarks all drafts, prints, writes."""
    report, answers = bench(config, from_scratch=from_scratch)
    table = format_report(report)
    if "drift" in report:
        table += f"\n\n## By position\n\n{format_drift(report['drift'])}"
    print(table if wants_json() else format_brief(report))
    if config.output is not None:
        folder = local_path(config.output, "output")
        write_report(report, table, folder)
        write_page(report, folder / "report.html")
        write_answer_files(answers, folder)
        print(f"report: {config.output}")
    print_summary(report, "")


def _check_lossless(config: BenchConfig) -> None:
    """Prints the comparison; exit code 1 if it found failures."""
    if not config.drafts:
        raise UserError("--check-lossless: want at least one draft; give --draft NAME=DIR")
    decoders = load_decoders(config)
    prompts = first_prompts(read_questions(config, decoders[0].engine))
    report = check_lossless(decoders, prompts)
    print(format_check(report))
    print_summary(with_provenance(report, config), "")
    if report["failures"]:
        raise SystemExit(1)


def _show_roofline(config: BenchConfig) -> None:
    """Measures the device, and prints the cost card of every method on the first prompt."""
    roofline = measure_roofline()
    decoders = load_decoders(config)
    prompt = first_prompts(read_questions(config, decoders[0].engine))[0]
    methods = {one.name: measure_card(one.engine, prompt, roofline.device) for one in decoders}
    report = {"prompt_tokens": len(prompt.ids), "roofline": asdict(roofline), "methods": methods}
    print(format_card(report))
    print_summary(with_provenance(report, config), "")


def _batch_sizes(text: str) -> list[int]:
    """Reads batch sizes separated by commas."""
    return sorted({at_least(1)(size) for size in text.split(",")})


def _add_actions(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_mutually_exclusive_group()
    actions.add_argument(
        "--check-lossless",
        action="store_true",
        help="Compare outputs instead of speed: every draft, several trees and batch sizes, greedy "
        "and sampled; the exit code is 1 if a difference is more than rounding.",
    )
    actions.add_argument(
        "--roofline",
        action="store_true",
        help="Measure the bandwidth and the matrix products of this device again, and print bytes, "
        "FLOPs, least and measured time of every phase (at the first of several temperatures) "
        "instead of comparing methods.",
    )
    actions.add_argument(
        "--autotune",
        action="store_true",
        help="Find the fastest tree of every draft and batch size, and write them where every "
        "program finds them that decodes with the draft on this kind of device.",
    )
    parser.add_argument(
        "--batch-sizes",
        type=_batch_sizes,
        metavar="N,N",
        help="With --autotune: numbers of prompts decoded together, such as 1,4,16; 1 alone if "
        "left out.",
    )
    parser.add_argument(
        "--try-vocabulary",
        action="append",
        default=[],
        metavar="FILE",
        help="With --autotune: draft vocabulary to try beside the whole head, see python -m "
        "poss_jax.draft_vocab. The option may be repeated.",
    )
    parser.add_argument(
        "--trees-file",
        type=Path,
        metavar="FILE",
        help="With --autotune: write the trees here instead of beside the draft; other programs "
        "take it as --trees, and a vocabulary that won, FILE with the ending .vocabulary.json, as "
        "--draft-vocabulary.",
    )
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="Start from scratch where a report is already; with --autotune, replace --trees-file.",
    )


def cli() -> None:
    """Entry point of `poss-bench`."""
    run_program(main)


if __name__ == "__main__":
    cli()
