r"""Lets a target answer the questions of a data set itself.

A draft learns best from the target's own words. Needs a model folder and a data set of chats or
questions; writes chats that `data.source` reads, and beside them what could not be answered
(NAME.failed.jsonl). A draft makes it faster and changes nothing else. Run again to go on where it
stopped.

    python -m train.regenerate --target models/llama --draft models/poss3 --source sharegpt.json \
        --output sharegpt_llama.jsonl --batch-size 16
    python -m train.regenerate --target models/llama --source questions.jsonl \
        --output answers.jsonl --temperature 0.7 --template llama3
"""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from poss_jax.checkpoint import read_record, sole_writer
from poss_jax.config import DataConfig, UserError, build_config, config_to_dict
from poss_jax.data import ChatTemplate
from poss_jax.data.files import matching_files
from poss_jax.engine import Engine, check_bias
from poss_jax.program import Parser, run_program
from poss_jax.program.options import (
    add_decoding_options,
    at_least,
    check_writable,
    load_engine,
    read_sampling,
)

from .answers import (
    AnswerFiles,
    AnswerSettings,
    answer_files,
    answer_window,
    hash_questions,
    list_questions,
)

_BATCHES_PER_WINDOW = 4


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses arguments, answers, prints one JSON line."""
    args = _parser().parse_args(arguments)
    check_writable(args.output)
    settings = _read_settings(args)
    source = _read_source(args)
    _check_apart(source.source, args.output)
    with sole_writer(args.output):
        print(json.dumps(_regenerate(args, source, settings)))


def _regenerate(
    args: argparse.Namespace, source: DataConfig, settings: AnswerSettings
) -> dict[str, Any]:
    """Answers what is not answered yet; returns the summary."""
    engine = load_engine(args)
    check_bias(settings.sampling, engine.target_config.vocab_size)
    _set_template(engine, source)
    engine.check_stop(settings.stop, settings.max_new_tokens)
    questions = list_questions(source, engine.tokenizer)
    window = _BATCHES_PER_WINDOW * settings.batch_size
    made_from = {
        "target": asdict(read_record(Path(args.target)).target),
        "data": config_to_dict(source),
        "questions": len(questions),
        "questions_sha256": hash_questions(questions),
        **asdict(settings),
        "max_length": engine.max_length,
    }
    files = AnswerFiles(args.output, made_from, window, overwrite=args.overwrite)
    started, before = time.monotonic(), files.num_done
    with tqdm(total=len(questions), initial=before, desc="answer", unit="chat") as progress:
        for first in range(before, len(questions), window):
            lines = answer_window(engine, questions[first : first + window], settings)
            files.add(lines)
            progress.update(len(lines))
    answered = files.counts.pop("answered", 0)
    return {
        "output": str(files.output),
        "failed": str(files.failed),
        "questions": len(questions),
        "answered": answered,
        "not_answered": files.counts,
        "answered_before": before,
        "seconds_with_compilation": round(time.monotonic() - started, 3),
    }


def _check_apart(source: str, output: Path) -> None:
    """Raises UserError where the output, or a file beside it, is what is to be read."""
    for path in filter(Path.exists, answer_files(output)):
        for read in matching_files(source):
            if path.samefile(read):
                raise UserError(
                    f"source {source!r} reads {read}, which is written as {path}; name another "
                    "output"
                )


def _read_source(args: argparse.Namespace) -> DataConfig:
    names = ("source", "subset", "split", "template", "system_prompt", "max_documents")
    given = {name: getattr(args, name) for name in names}
    given = {name: value for name, value in given.items() if value is not None}
    return build_config(DataConfig, given, origin="arguments")


def _read_settings(args: argparse.Namespace) -> AnswerSettings:
    return AnswerSettings(
        sampling=read_sampling(args),
        max_new_tokens=args.max_new_tokens,
        batch_size=args.batch_size,
        stop=tuple(args.stop),
        keeps_unfinished=args.keep_unfinished,
    )


def _set_template(engine: Engine, source: DataConfig) -> None:
    """Lets the engine ask with the template that the answers will be learnt with."""
    if engine.tokenizer is None:
        raise UserError("this target has no tokenizer to ask with; copy its files there")
    template = ChatTemplate(engine.tokenizer, source.template)
    if template.text is not None:
        engine.tokenizer.chat_template = template.text


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="train.regenerate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    source = "what is asked: as data.source, or a .jsonl file of prompts"
    parser.add_argument("--source", required=True, metavar="DATA", help=source)
    parser.add_argument("--subset", metavar="NAME", help="configuration of a Hub data set")
    parser.add_argument("--split", metavar="NAME", help="split of a Hub data set (default: train)")
    parser.add_argument(
        "--max-documents", type=at_least(1), metavar="N", help="read at most so many records"
    )
    parser.add_argument(
        "--template", metavar="NAME", help="as data.template (default: the tokenizer's own)"
    )
    parser.add_argument("--system-prompt", metavar="TEXT", help="for chats that have none")
    parser.add_argument(
        "--output", type=Path, required=True, metavar="FILE", help="chats as .jsonl"
    )
    parser.add_argument(
        "--keep-unfinished",
        action="store_true",
        help="keep answers that reach --max-new-tokens (default: the chat ends before)",
    )
    parser.add_argument("--overwrite", action="store_true", help="start anew")
    add_decoding_options(parser, max_new_tokens=1024, batch_size=8)
    return parser


def cli() -> None:
    """Entry point of `poss-regenerate`."""
    run_program(main)


if __name__ == "__main__":
    cli()
