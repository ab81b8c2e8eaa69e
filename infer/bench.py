"""Compares drafts with autoregressive decoding of this same engine, over the same prompts.

Needs a target and drafts (model folders). Prints a table of acceptance length, acceptance by
position, tokens per second and speed-up, the phases of a round, and as its last line everything
as one JSON object; --output keeps report.json, report.md and a plot.

    python -m infer.bench --config configs/demo/bench.yaml
    python -m infer.bench --target T --draft EAGLE-2=E --draft PosS-3=P --prompts questions.jsonl
    python -m infer.bench --config configs/demo/bench.yaml --check-lossless
    python -m infer.bench --config configs/demo/bench.yaml --roofline
    python -m infer.bench --target T --draft PosS-3=P --autotune --batch-sizes 1,4,16
"""

import argparse
import itertools
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from poss_jax.checkpoint.record import provenance, read_record
from poss_jax.checkpoint.whole import refuse_non_empty
from poss_jax.config.decoding import BenchConfig
from poss_jax.config.models import TreeConfig
from poss_jax.config.reading import UserError, config_to_dict
from poss_jax.config.training import DataConfig
from poss_jax.data.conversations import plain_texts
from poss_jax.data.records import read_records
from poss_jax.data.sources import load_documents
from poss_jax.data.tokenizer import encode_plain, special_ids
from poss_jax.engine.dialogue import (
    PROMPT_KEYS,
    Dialogue,
    check_dialogues,
    read_dialogues,
    read_prompts,
)
from poss_jax.engine.engine import Engine
from poss_jax.engine.prompts import PreparedPrompt
from poss_jax.engine.trees import tuned_file, write_tuned
from poss_jax.program.options import at_least, check_writable, read_arguments
from poss_jax.program.running import run_program

from .autotune import format_tuning, tree_name, tune
from .lossless import check_lossless, format_check
from .measure import Decoder, Run, measure_steps, time_questions
from .phases import describe_phases, measure_phases, phases_to_round
from .report import build_report, format_card, format_report, write_report
from .roofline import Roofline, find_roofline, measure_roofline

if TYPE_CHECKING:
    import transformers

AUTOREGRESSIVE = "autoregressive"

# Of prompts cut out of documents.
_PROMPT_CHARACTERS_PER_TOKEN = 100  # enough text that a prompt's last token is never cut short
_DEFINITION, _LINE = r"^(?:def|class) ", r"^\S"


def bench(config: BenchConfig) -> dict[str, Any]:
    """Runs the whole comparison.

    Returns:
      The report, JSON-compatible (see docs/bench.md).

    Raises:
      UserError: bad input.
    """
    decoders = load_decoders(config)
    questions = read_questions(config, decoders[0].engine)
    first = first_prompts(questions)[0]
    runs: dict[str, list[Run]] = {decoder.name: [] for decoder in decoders}
    for decoder in decoders:
        decoder.compile(questions)
    total = config.repeats * len(decoders) * len(questions)
    with tqdm(total=total, desc="bench", unit="prompt") as progress:
        for _ in range(config.repeats):
            for decoder in decoders:
                runs[decoder.name].append(time_questions(decoder, questions, progress))
    report = build_report(config.max_new_tokens, AUTOREGRESSIVE, runs)
    roofline = find_roofline()
    for decoder in decoders:
        entry = report["methods"][decoder.name]
        entry["compile_seconds"] = decoder.compile_seconds
        entry["first_token_seconds"] = decoder.first_token_seconds
        entry |= measure_card(decoder, first, roofline)
    device = roofline.device
    report["autoregressive_step_milliseconds"] = measure_steps(decoders[0].engine, first, device)
    report["roofline"] = asdict(roofline)
    return report | {"config": config_to_dict(config), "provenance": provenance()}


def measure_card(decoder: Decoder, prompt: PreparedPrompt, roofline: Roofline) -> dict[str, Any]:
    """Times the phases of a decoder, and puts their floors beside them."""
    phases = measure_phases(decoder.engine, prompt)
    return {
        "phase_milliseconds": phases,
        "phases_to_round": phases_to_round(phases),
        "costs": describe_phases(decoder.engine, prompt, phases, roofline.device),
    }


def load_decoders(config: BenchConfig) -> list[Decoder]:
    """Loads the target once, and one engine per draft beside the autoregressive one."""
    if AUTOREGRESSIVE in config.drafts:
        raise UserError(f"drafts: {AUTOREGRESSIVE} is the baseline's name; choose another")
    baseline = Engine.load(
        config.target,
        tree=config.tree,
        drafting=config.drafting,
        quantise=config.quantise,
        mesh=config.mesh,
    )
    given = {
        "allow_target_mismatch": config.allow_target_mismatch,
        "vocabulary": config.draft_vocabulary,
    }
    return [
        Decoder(AUTOREGRESSIVE, baseline),
        *(
            Decoder(name, baseline.load_draft(folder, **given))
            for name, folder in config.drafts.items()
        ),
    ]


def read_questions(config: BenchConfig, engine: Engine) -> list[Dialogue]:
    """Reads prompts and conversations from a file, or cuts prompts from modules of Python.

    Every question has a seed of its own, derived from the run's seed and its index.

    Raises:
      UserError: too few prompts, or one that the engine refuses.
    """
    source = DataConfig(source=config.prompts)
    if source.is_code:
        records = [{"prompt_ids": ids} for ids in _cut_code_prompts(config, source, engine)]
    else:
        records = read_prompts(Path(config.prompts))[: config.num_prompts]
    records = [{key: record[key] for key in PROMPT_KEYS if key in record} for record in records]
    questions = read_dialogues(records, config.sampling, config.max_new_tokens)
    check_dialogues(engine, questions)
    return questions


def first_prompts(questions: Sequence[Dialogue]) -> list[PreparedPrompt]:
    """Prompts of the first turns of questions that are checked."""
    return [question.prompt for question in questions if question.prompt is not None]


def _cut_code_prompts(config: BenchConfig, source: DataConfig, engine: Engine) -> list[list[int]]:
    if engine.tokenizer is None:
        raise UserError(
            f"prompts {config.prompts}: this target has no tokenizer; give a file of prompt_ids"
        )
    if source.packages:  # held out as a whole
        texts = [record["text"] for _, record in read_records(source) if isinstance(record, dict)]
    else:
        texts = plain_texts(load_documents(source).validation)
    return prompts_from_documents(
        texts,
        engine.tokenizer,
        num_prompts=config.num_prompts,
        prompt_tokens=config.prompt_tokens,
    )


def prompts_from_documents(
    texts: Sequence[str],
    tokenizer: "transformers.PreTrainedTokenizerBase",
    *,
    num_prompts: int,
    prompt_tokens: int,
) -> list[list[int]]:
    """Cuts distinct prompts of `prompt_tokens` tokens, bos included, that begin at a line's start.

    Lines beginning a function or class are used up first; documents take turns.

    Raises:
      UserError: the texts do not hold so many prompts.
    """
    bos, prompts = special_ids(tokenizer, "bos"), {}
    for text in _passages(texts, prompt_tokens * _PROMPT_CHARACTERS_PER_TOKEN):
        ids = (*bos, *encode_plain(tokenizer, [text])[0])[:prompt_tokens]
        if len(ids) == prompt_tokens:
            prompts[ids] = None
        if len(prompts) == num_prompts:
            return [list(ids) for ids in prompts]
    raise UserError(
        f"want {num_prompts} prompts of {prompt_tokens} tokens, got {len(prompts)} from "
        f"{len(texts)} documents; ask for fewer or shorter ones"
    )


def _passages(texts: Sequence[str], num_characters: int) -> Iterator[str]:
    """Yields passages that begin at a line: definitions first, every document in its turn."""
    rng = np.random.default_rng(0)
    documents = [texts[int(index)] for index in rng.permutation(len(texts))]
    for pattern in (_DEFINITION, _LINE):
        matches = [[m.start() for m in re.finditer(pattern, text, re.M)] for text in documents]
        turns = itertools.zip_longest(*(rng.permutation(starts) for starts in matches))
        for turn in turns:
            for text, start in zip(documents, turn, strict=True):
                if start is not None:
                    yield text[start : start + num_characters]


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses arguments, measures, prints, writes."""
    config, args = read_arguments(
        BenchConfig, arguments, prog="infer.bench", doc=__doc__, add_actions=_add_actions
    )
    if not args.autotune and (args.batch_sizes or args.trees_file):
        raise UserError("--batch-sizes and --trees-file are of --autotune; give it, too")
    if config.drafting == "sampled" and (args.check_lossless or args.autotune):
        raise UserError(
            "--check-lossless and --autotune want texts that no draft changes; those of "
            "drafting=sampled are the target's in distribution only; choose coupled or argmax"
        )
    if args.check_lossless:
        _check_lossless(config)
        return
    if args.roofline:
        _show_roofline(config)
        return
    if args.autotune:
        _autotune(config, args.batch_sizes or [1], args.trees_file, overwrite=args.overwrite)
        return
    if config.output is not None:
        _check_output(Path(config.output), overwrite=args.overwrite)
    report = bench(config)
    print(format_report(report))
    if config.output is not None:
        write_report(report, Path(config.output))
        print(f"report: {config.output}")
    print(json.dumps(report))


def _check_lossless(config: BenchConfig) -> None:
    """Prints the comparison; exit code 1 if it found failures."""
    if not config.drafts:
        raise UserError("--check-lossless: want at least one draft; give --draft NAME=DIR")
    decoders = load_decoders(config)
    prompts = first_prompts(read_questions(config, decoders[0].engine))
    report = check_lossless(decoders, prompts)
    print(format_check(report))
    print(json.dumps(report | {"config": config_to_dict(config), "provenance": provenance()}))
    if report["failures"]:
        raise SystemExit(1)


def _show_roofline(config: BenchConfig) -> None:
    """Measures the device, and prints the cost card of every method on the first prompt."""
    roofline = measure_roofline()
    decoders = load_decoders(config)
    prompt = first_prompts(read_questions(config, decoders[0].engine))[0]
    methods = {one.name: measure_card(one, prompt, roofline) for one in decoders}
    report = {"prompt_tokens": len(prompt.ids), "roofline": asdict(roofline), "methods": methods}
    print(format_card(report))
    print(json.dumps(report | {"config": config_to_dict(config), "provenance": provenance()}))


def _autotune(
    config: BenchConfig, batch_sizes: Sequence[int], file: Path | None, *, overwrite: bool
) -> None:
    """Prints what was predicted and measured, and writes the fastest trees of every draft."""
    places = _places_of_trees(config, file, overwrite=overwrite)
    baseline, *decoders = load_decoders(config)
    prompts = first_prompts(read_questions(config, baseline.engine))
    if max(batch_sizes) > len(prompts):
        raise UserError(
            f"--batch-sizes: want at most the number of prompts, {len(prompts)}, got "
            f"{max(batch_sizes)}; raise num_prompts"
        )
    report: dict[str, Any] = {"drafts": {}, "files": {}}
    for decoder in decoders:
        tuned = tune(decoder.engine, prompts, batch_sizes, repeats=config.repeats)
        path, folder = places[decoder.name], config.drafts[decoder.name]
        _write_tuned(path, folder, tuned, config)
        report["drafts"][decoder.name] = tuned
        report["files"][decoder.name] = str(path)
    print(format_tuning(report))
    print(*(f"trees of {name}: {path}" for name, path in report["files"].items()), sep="\n")
    print(json.dumps(report | {"config": config_to_dict(config), "provenance": provenance()}))


def _places_of_trees(config: BenchConfig, file: Path | None, *, overwrite: bool) -> dict[str, Path]:
    """Files that tuned trees are written to, by draft; refused before any work is spent."""
    if not config.drafts:
        raise UserError("--autotune: want at least one draft; give --draft NAME=DIR")
    if file is not None and len(config.drafts) > 1:
        raise UserError("--trees-file: want one draft, got several; tune them one by one")
    if file is not None and file.exists() and not overwrite:
        raise UserError(f"--trees-file {file} exists; name another file or give --overwrite")
    if file is not None:
        check_writable(file)
        return dict.fromkeys(config.drafts, file)
    for folder in config.drafts.values():
        if Path(folder).is_dir() and not os.access(folder, os.W_OK):
            raise UserError(f"draft {folder} may not be written to; give --trees-file FILE")
    return {name: tuned_file(folder) for name, folder in config.drafts.items()}


def _write_tuned(
    path: Path, draft: str, tuned: dict[int, dict[str, Any]], config: BenchConfig
) -> None:
    record = read_record(draft)
    about = {
        "target": record.target.name,
        "sampling": config_to_dict(config.sampling),
        "draft_vocabulary": config.draft_vocabulary,
        "quantise": config.quantise,
        "prompts": config.prompts,
    }
    trees = {size: entry["best"] and TreeConfig(**entry["best"]) for size, entry in tuned.items()}
    comments = {
        size: "{tokens_per_second:.0f} tokens/s, {ratio:.2f} x no draft".format(
            **entry["methods"][tree_name(trees[size])]
        )
        for size, entry in tuned.items()
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_tuned(path, trees, record, about=about, comments=comments)


def _batch_sizes(text: str) -> list[int]:
    """Reads batch sizes separated by commas."""
    return sorted({at_least(1)(size) for size in text.split(",")})


def _check_output(folder: Path, *, overwrite: bool) -> None:
    if not (overwrite and folder.is_dir()):
        refuse_non_empty(folder)
    check_writable(folder)


def _add_actions(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--check-lossless",
        action="store_true",
        help="Compare outputs instead of speed: every draft, several trees and batch sizes, greedy "
        "and sampled; the exit code is 1 if a difference is more than rounding.",
    )
    parser.add_argument(
        "--roofline",
        action="store_true",
        help="Measure the bandwidth and the matrix products of this device again, and print bytes, "
        "FLOPs, least and measured time of every phase instead of comparing methods.",
    )
    parser.add_argument(
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
        "--trees-file",
        type=Path,
        metavar="FILE",
        help="With --autotune: write the trees here instead of beside the draft; other programs "
        "take it as --trees.",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="Replace a report that is there already."
    )


def cli() -> None:
    """Entry point of `poss-bench`."""
    run_program(main)


if __name__ == "__main__":
    cli()
