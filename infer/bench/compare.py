"""One benchmark: answers all questions with every method, keeps, sums up and reports them."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from itertools import groupby, product
from pathlib import Path
from typing import Any

import jax

from poss_jax.checkpoint.whole import sole_writer
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
from .journal import SETTINGS, Answer, Cell, Journal, Key, Turn, write_answer_files
from .measure import (
    AUTOREGRESSIVE,
    compile_programs,
    count_memory,
    digest,
    identify,
    load_engines,
    measure_steps,
    play,
    with_default_models,
)
from .phases import measure_card
from .questions import Question, first_prompts, make_dialogues, read_sets
from .rates import device_name, find_roofline
from .report import (
    check_output,
    describe,
    format_brief,
    format_report,
    show_report,
    with_provenance,
    write_page,
)
from .summary import make_grid, show_example, summarise_group


def run(config: BenchConfig, *, from_scratch: bool) -> None:
    """Measures, prints, and writes the report; `from_scratch` drops an earlier one."""
    folder = None if config.output is None else local_path(config.output, "output")
    if folder is not None:
        check_output(folder, overwrite=from_scratch or (folder / SETTINGS).is_file())
    with nullcontext() if folder is None else sole_writer(folder):
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
    engines = load_engines(config)
    sets, dialogues = read_sets(config, engines[AUTOREGRESSIVE]), {}
    for name, temperature in product(sets, config.temperatures or (config.sampling.temperature,)):
        seeds = config.seeds or (config.sampling.seed,)
        for seed in seeds[: None if temperature else 1]:  # greedy answers need no seeds
            sampling = replace(config.sampling, temperature=temperature, seed=seed)
            asked = make_dialogues(sets[name], config, sampling, engines[AUTOREGRESSIVE])
            dialogues[Cell(name, temperature, seed)] = asked
    folder = local_path(config.output, "output") if config.output else None
    journal = Journal(folder, settings_of(config, engines, sets), from_scratch=from_scratch)
    keys = list(_list_keys(config, dialogues, list(engines)))
    missing = [key for key in keys if key not in journal.answers]
    described = journal.methods.keys() - {key.method for key in missing}
    every = [dialogue for asked in dialogues.values() for dialogue in asked]
    compiled = {}
    for name in progress_bar([name for name in engines if name not in described], desc="compile"):
        compiled[name] = compile_programs(engines[name], every, batch_size=config.batch_size)
    by_depth = {"drift": study(config)} if config.drift else {}
    sizes = {"total": len(keys), "initial": len(keys) - len(missing)}
    answers = _answer(config, missing, engines, sets, dialogues)
    for answer in progress_bar(answers, **sizes, desc="bench", unit="question"):
        journal.add(answer)
    prompt = first_prompts(next(iter(dialogues.values())))[0]
    report = {
        "baseline": AUTOREGRESSIVE,
        "target": engines[AUTOREGRESSIVE].record.target.name,
        "max_new_tokens": config.max_new_tokens,
        "repeats": config.repeats,
        "groups": list(_summarise(config, engines, dialogues, journal)),
        **_describe_methods(engines, compiled, prompt, journal, has_phases=config.phases),
    }
    report = with_provenance(report | by_depth, as_named)  # names, not this machine's folders
    return report, [journal.answers[key] for key in keys]


def _list_keys(
    config: BenchConfig, dialogues: dict[Cell, list[Dialogue]], names: list[str]
) -> Iterator[Key]:
    """Orders all questions: methods take turns, batch by batch, so slowdowns hit all alike."""
    size = config.batch_size
    for (cell, asked), repeat in product(dialogues.items(), range(config.repeats)):
        for number, first in enumerate(range(0, len(asked), size)):
            begin = number % len(names)
            for name in names[begin:] + names[:begin]:
                for index in range(first, min(first + size, len(asked))):
                    yield Key(cell, repeat, name, index)


def settings_of(
    config: BenchConfig, engines: Mapping[str, Engine], sets: dict[str, list[Question]]
) -> dict[str, Any]:
    """Collects what decides answers and times: the config, the questions, and `identify`.

    Answers name their set, temperature, seed and draft, so more of these can be added later.
    """
    settings = config_to_dict(config)
    answers_say = "prompts", "datasets", "data_dir", "temperatures", "seeds", "drafts"
    for key in ("output", "repeats", "drift", "draft_vocabulary", *answers_say):
        del settings[key]
    digests = {name: digest(list(map(asdict, questions))) for name, questions in sets.items()}
    return settings | identify(config, engines) | {"sets": digests}


def _answer(
    config: BenchConfig,
    keys: Sequence[Key],
    engines: Mapping[str, Engine],
    sets: dict[str, list[Question]],
    dialogues: dict[Cell, list[Dialogue]],
) -> Iterator[Answer]:
    """Answers questions, batch by batch."""
    size = config.batch_size
    batches = groupby(keys, lambda key: key._replace(question=key.question // size))
    for (cell, _, method, _), group in batches:
        batch = list(group)
        asked = [dialogues[cell][key.question] for key in batch]
        for key, timed in zip(batch, play(engines[method], asked, batch_size=size), strict=True):
            question = sets[cell.set][key.question]
            turns = [
                Turn(
                    text=turn.answer.text or "",
                    output_ids=turn.answer.output_ids,
                    accepted=turn.answer.accepted_per_round,
                    offered=turn.answer.offered_per_round,
                    copied=turn.answer.copied_per_round,
                    seconds=turn.seconds,
                    first_token_seconds=turn.first_token_seconds,
                )
                for turn in timed
            ]
            yield Answer(key, question.id, question.category, turns)


def _summarise(
    config: BenchConfig,
    engines: Mapping[str, Engine],
    dialogues: dict[Cell, list[Dialogue]],
    journal: Journal,
) -> Iterator[dict[str, Any]]:
    """Yields the numbers of every set and temperature, over all its seeds."""
    for (name, temperature), group in groupby(dialogues, lambda cell: cell[:2]):
        cells = list(group)
        sizes = {"repeats": config.repeats, "num_questions": len(dialogues[cells[0]])}
        grids = {name: make_grid(journal.answers, cells, name, **sizes) for name in engines}
        shown = {name: journal.answers[Key(cells[0], 0, name, 0)] for name in [*engines][1:]}
        yield {
            "set": name,
            "temperature": temperature,
            "seeds": [cell.seed for cell in cells],
            "example": show_example(engines[AUTOREGRESSIVE], dialogues[cells[0]][0].prompt, shown),
            **summarise_group(grids, AUTOREGRESSIVE),
        }


def _describe_methods(
    engines: Mapping[str, Engine],
    compiled: Mapping[str, dict[str, Any]],
    prompt: PreparedPrompt,
    journal: Journal,
    *,
    has_phases: bool,
) -> dict[str, Any]:
    """Measures what does not depend on the questions: memory, and phases if wanted."""
    roofline, methods = find_roofline() if has_phases else None, {}
    for name, engine in engines.items():
        if name not in journal.methods:
            numbers = compiled[name] | {"memory": count_memory(engine)}
            if roofline is not None:
                numbers |= measure_card(engine, prompt, roofline.device_for(engine.weights))
            journal.describe(name, numbers)
        config, settings = engine.decode_config(1), engine.settings
        methods[name] = {
            "tree": config.tree.name if config.draft else None,  # for one question at a time
            "drafting": settings.drafting,
            "lookup": settings.lookup,
        }
        V = engine.target_config.vocab_size
        is_whole = engine.draft_config and engine.weights.draft["head"]["weight"].shape[0] == V
        if jax.default_backend() != "cpu" and is_whole and V > FEW_TOKENS:
            work = describe_workload(engine.weights, config, batch=1, context=0)
            methods[name]["saves"] = saved_by_vocabulary(work)
        methods[name] |= journal.methods[name]
    report: dict[str, Any] = {"device": device_name(), "methods": methods}
    if roofline is not None:
        engine = engines[AUTOREGRESSIVE]
        steps = measure_steps(engine, prompt, roofline.device_for(engine.weights))
        report |= {"autoregressive_step_milliseconds": steps, "roofline": asdict(roofline)}
    return report
