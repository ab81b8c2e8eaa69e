"""One benchmark: answers all questions with every method, keeps, sums up and reports them."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import jax

from poss_jax.config.bench import BenchConfig
from poss_jax.config.paths import local_path
from poss_jax.config.reading import config_to_dict
from poss_jax.data.progress import progress_bar
from poss_jax.engine.dialogue import Dialogue
from poss_jax.engine.engine import Engine
from poss_jax.engine.prompts import PreparedPrompt

from .by_depth import format_report as format_drift
from .by_depth import study
from .costs import FEW_TOKENS, describe_workload, saved_by_vocabulary
from .journal import SETTINGS, Answer, Cell, Journal, Key, make_turn, write_answer_files
from .measure import (
    AUTOREGRESSIVE,
    Decoder,
    count_memory,
    digest,
    identify,
    load_decoders,
    measure_steps,
    play,
    with_default_models,
)
from .page import write_page
from .phases import measure_card
from .questions import Question, first_prompts, make_dialogues, read_sets
from .rates import device_name, find_roofline
from .report import describe, format_brief, format_report, open_output, show_report, with_provenance
from .summary import make_grid, show_example, summarise_group


def run(config: BenchConfig, *, from_scratch: bool) -> None:
    """Measures, prints, and writes the report; `from_scratch` drops an earlier one."""
    output = config.output
    is_resumed = output is not None and (local_path(output, "output") / SETTINGS).is_file()
    with open_output(output, overwrite=from_scratch or is_resumed) as folder:
        report, answers = bench(config, from_scratch=from_scratch)
        table = format_report(report)
        if "drift" in report:
            table += f"\n\n## By position\n\n{format_drift(report['drift'])}"

        def write(folder: Path) -> None:
            write_page(report, folder / "report.html")
            write_answer_files(answers, folder)

        finding, brief = describe(report)[0], format_brief(report)
        show_report(report, table, folder, finding=finding, brief=brief, write=write)


def bench(
    config: BenchConfig, *, from_scratch: bool = False
) -> tuple[dict[str, Any], list[Answer]]:
    """Runs the comparison, or unless from scratch the part that the folder `output` still lacks.

    Returns:
      The report, JSON-compatible (see docs/bench.md), and all answers.
    """
    as_named, config = config, with_default_models(config)
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
        for cell, asked in dialogues.items()
        for repeat in range(config.repeats)
        for number, batch in enumerate(_batches(range(len(asked)), config.batch_size))
        for decoder in (*decoders[number % len(decoders) :], *decoders[: number % len(decoders)])
        for index in batch
    ]
    described = journal.methods.keys() - {key.method for key in journal.missing(keys)}
    every = [dialogue for asked in dialogues.values() for dialogue in asked]
    for decoder in progress_bar([d for d in decoders if d.name not in described], desc="compile"):
        decoder.compile(every, batch_size=config.batch_size)
    by_depth = {"drift": study(config)} if config.drift else {}
    _answer_missing(config, keys, decoders, sets, dialogues, journal)
    prompt = first_prompts(next(iter(dialogues.values())))[0]
    report = {
        "baseline": AUTOREGRESSIVE,
        "target": decoders[0].engine.record.target.name,
        "max_new_tokens": config.max_new_tokens,
        "repeats": config.repeats,
        "groups": list(_summarise(config, decoders, dialogues, journal)),
        **_describe_methods(decoders, prompt, journal, has_phases=config.phases),
    }
    report = with_provenance(report | by_depth, as_named)  # names, not this machine's folders
    return report, [journal.answers[key] for key in keys]


def _cells(config: BenchConfig, sets: dict[str, list[Question]]) -> Iterator[tuple[Cell, Any]]:
    """Yields every set with every temperature and seed; greedy answers need no seeds."""
    for name in sets:
        for temperature in config.temperatures or (config.sampling.temperature,):
            seeds = config.seeds or (config.sampling.seed,)
            for seed in seeds[: None if temperature else 1]:
                sampling = replace(config.sampling, temperature=temperature, seed=seed)
                yield Cell(name, temperature, seed), sampling


def settings_of(
    config: BenchConfig, decoders: Sequence[Decoder], sets: dict[str, list[Question]]
) -> dict[str, Any]:
    """Collects what decides answers and times: the config, the questions, and `identify`.

    Answers name their set, temperature, seed and draft, so more of these can be added later.
    """
    settings = config_to_dict(config)
    answers_say = "prompts", "datasets", "data_dir", "temperatures", "seeds", "drafts"
    for key in ("output", "repeats", "drift", "draft_vocabulary", *answers_say):
        del settings[key]
    digests = {name: digest(list(map(asdict, questions))) for name, questions in sets.items()}
    return settings | identify(config, decoders) | {"sets": digests}


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
    with progress_bar(
        total=len(keys), initial=len(keys) - len(missing), desc="bench", unit="question"
    ) as progress:
        for (cell, _, method, _), group in groupby(missing, batch_of):
            batch = list(group)
            asked = [dialogues[cell][key.question] for key in batch]
            timed = play(engines[method], asked, batch_size=config.batch_size)
            for key, timed_turns in zip(batch, timed, strict=True):
                question = sets[cell.set][key.question]
                turns = [make_turn(*turn) for turn in timed_turns]
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
        sizes = {"repeats": config.repeats, "num_questions": len(dialogues[cells[0]])}
        grids = {d.name: make_grid(journal.answers, cells, d.name, **sizes) for d in decoders}
        shown = {
            decoder.name: journal.answers[Key(cells[0], 0, decoder.name, 0)]
            for decoder in decoders[1:]
        }
        heading = {
            "set": name,
            "temperature": temperature,
            "seeds": [cell.seed for cell in cells],
            "example": show_example(engine, dialogues[cells[0]][0].prompt, shown),
        }
        yield heading | summarise_group(grids, AUTOREGRESSIVE)


def _describe_methods(
    decoders: Sequence[Decoder], prompt: PreparedPrompt, journal: Journal, *, has_phases: bool
) -> dict[str, Any]:
    """Measures what does not depend on the questions: memory, and phases if wanted."""
    roofline = find_roofline() if has_phases else None
    for decoder in decoders:
        engine = decoder.engine
        if decoder.name not in journal.methods:
            numbers = {
                "compile_seconds": decoder.compile_seconds,
                "first_token_seconds": decoder.first_token_seconds,
                "memory": count_memory(engine),
            }
            if roofline is not None:
                numbers |= measure_card(engine, prompt, roofline.device_for(engine.weights))
            journal.describe(decoder.name, numbers)
    report: dict[str, Any] = {
        "device": device_name(),
        "methods": {
            decoder.name: {"tree": _tree_of(decoder), "drafting": decoder.engine.settings.drafting}
            | {"lookup": decoder.engine.settings.lookup}
            | _reduced_head(decoder.engine)
            | journal.methods[decoder.name]
            for decoder in decoders
        },
    }
    if roofline is None:
        return report
    engine = decoders[0].engine
    steps = measure_steps(engine, prompt, roofline.device_for(engine.weights))
    return report | {"autoregressive_step_milliseconds": steps, "roofline": asdict(roofline)}


def _reduced_head(engine: Engine) -> dict[str, float]:
    """Describes what a draft vocabulary would save on an accelerator; {} if the draft has one."""
    draft, V = engine.draft_config, engine.target_config.vocab_size
    is_whole = draft is not None and engine.weights.draft["head"]["weight"].shape[0] == V
    if jax.default_backend() == "cpu" or not is_whole or V <= FEW_TOKENS:
        return {}
    work = describe_workload(engine.weights, engine.decode_config(1), batch=1, context=0)
    return {"saves": saved_by_vocabulary(work)}


def _tree_of(decoder: Decoder) -> str | None:
    """Returns the tree for one question at a time; None decodes without a draft."""
    config = decoder.engine.decode_config(1)
    return config.tree.name if config.draft else None
