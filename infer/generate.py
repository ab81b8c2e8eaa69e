r"""Continues prompts with a target, speculatively if a draft is given.

Needs model folders (see `python -m poss_jax.convert`). Prints the texts, or writes one JSON line
per answer to --output; the last line printed is one JSON summary. Interrupted, it keeps the answers
that are finished.

    python -m infer.generate --target runs/demo/target/model --draft runs/demo/poss3/model \
        --prompt "def read_lines(path):" --max-new-tokens 64
    python -m infer.generate --target DIR --draft DIR --prompt "Once" --temperature 0.8 --stream
    python -m infer.generate --target DIR --prompts questions.jsonl --output answers.jsonl

A line of --prompts holds one of `prompt` (text), `prompt_ids`, `messages` (chat), or `turns` (user
messages, each answered in turn: one line per answer, numbered by `turn`). Its `sampling` (such as
{"temperature": 1, "seed": 7}) wins over the options. Its other keys are passed on.
"""

import argparse
import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tqdm import tqdm

from poss_jax.config import SamplingConfig, UserError, config_to_dict
from poss_jax.data import PROMPT_KEYS, read_prompts
from poss_jax.decode.metrics import mean_acceptance_length
from poss_jax.engine import Engine, Generation, check_bias
from poss_jax.program import Parser, run_program
from poss_jax.program.options import (
    add_decoding_options,
    check_writable,
    load_engine,
    read_sampling,
)

from .prompts import next_prompt, num_turns, read_settings
from .screen import Screen

_LOG = logging.getLogger(__name__)

Decode = Callable[[Sequence[list[int]], Sequence[SamplingConfig]], list[Generation]]
"""(token ids of prompts, their settings) -> their answers."""


def answer_records(
    engine: Engine,
    records: Sequence[dict[str, Any]],
    settings: Sequence[SamplingConfig],
    decode: Decode,
    *,
    max_new_tokens: int,
    batch_size: int,
) -> Iterator[tuple[int, int, Generation]]:
    """Answers every turn of every record, once all records are checked.

    A conversation that its own answers make too long ends early, and the log says so.

    Args:
      engine: prepares prompts.
      records: lines of a prompt file.
      settings: how the tokens of each record are chosen.
      decode: answers a batch.
      max_new_tokens: most new tokens of each answer.
      batch_size: prompts decoded together.

    Yields:
      Index of the record, index of the turn, and the answer; all first turns come first.
    """
    _check_records(engine, records, settings, max_new_tokens)
    texts: list[list[str]] = [[] for _ in records]
    for turn in range(max(map(num_turns, records))):
        waiting = list(_prepare_turn(engine, records, texts, turn, max_new_tokens))
        for first in range(0, len(waiting), batch_size):
            batch, prompts = zip(*waiting[first : first + batch_size], strict=True)
            answers = decode(prompts, [settings[i] for i in batch])
            for i, answer in zip(batch, answers, strict=True):
                texts[i].append(answer.text or "")
                yield i, turn, answer


def decode_batch(engine: Engine, args: argparse.Namespace) -> Decode:
    """Decodes without showing anything until all prompts of a batch are answered."""

    def decode(
        prompts: Sequence[list[int]], settings: Sequence[SamplingConfig]
    ) -> list[Generation]:
        return engine.generate(
            prompts,
            max_new_tokens=args.max_new_tokens,
            batch_size=args.batch_size,
            sampling=settings,
            stop=args.stop,
        )

    return decode


def decode_on_screen(engine: Engine, args: argparse.Namespace, screen: Screen) -> Decode:
    """Decodes one prompt after the other, and shows every round as it lands."""

    def decode(
        prompts: Sequence[list[int]], settings: Sequence[SamplingConfig]
    ) -> list[Generation]:
        answers = []
        for prompt, sampling in zip(prompts, settings, strict=True):
            for chunk in engine.stream(
                prompt, max_new_tokens=args.max_new_tokens, sampling=sampling, stop=args.stop
            ):
                screen.show(chunk)
                answers += [chunk.answer] if chunk.answer else []
            screen.end_line()
        return answers

    return decode


def _prepare_turn(
    engine: Engine,
    records: Sequence[dict[str, Any]],
    texts: Sequence[Sequence[str]],
    turn: int,
    max_new_tokens: int,
) -> Iterator[tuple[int, list[int]]]:
    """Prompts of the conversations that have this turn and room for it."""
    for i, record in enumerate(records):
        if turn < num_turns(record) and len(texts[i]) == turn:
            try:
                yield i, engine.prepare(next_prompt(record, texts[i]), max_new_tokens)
            except UserError as error:
                _LOG.warning("prompt %d ends before turn %d: %s", i + 1, turn + 1, error)


def _check_records(
    engine: Engine,
    records: Sequence[dict[str, Any]],
    settings: Sequence[SamplingConfig],
    max_new_tokens: int,
) -> None:
    """Refuses what is sure to fail; before a last turn, answers are as short as can be."""
    for number, (record, sampling) in enumerate(zip(records, settings, strict=True), start=1):
        try:
            engine.prepare(next_prompt(record, [""] * (num_turns(record) - 1)), max_new_tokens)
            check_bias([sampling], engine.target_config.vocab_size)
        except UserError as error:
            raise UserError(f"prompt {number} of {len(records)}: {error}") from error


def answer_line(
    record: dict[str, Any], sampling: SamplingConfig, turn: int, answer: Generation
) -> dict[str, Any]:
    """One line of the output file."""
    kept = {key: value for key, value in record.items() if key not in PROMPT_KEYS}
    return kept | {
        "turn": turn,
        "prompt_ids": answer.prompt_ids,
        "output_ids": answer.output_ids,
        "text": answer.text,
        "accepted_per_round": answer.accepted_per_round,
        "mean_acceptance_length": answer.mean_acceptance_length,
        "stop_reason": answer.stop_reason,
        "sampling": config_to_dict(sampling),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses arguments, decodes, prints."""
    args = _read_arguments(arguments)
    records = read_prompts(args.prompts) if args.prompts else [{"prompt": args.prompt}]
    settings = read_settings(records, read_sampling(args))
    engine = _load_engine(args)
    screen = Screen(shows_drafts=args.show_drafts)
    started, interruption = time.monotonic(), None
    answers = answer_records(
        engine,
        records,
        settings,
        decode_on_screen(engine, args, screen) if args.stream else decode_batch(engine, args),
        max_new_tokens=args.max_new_tokens,
        batch_size=args.batch_size,
    )
    total = sum(map(num_turns, records))
    bar = tqdm(answers, total=total, unit="answer", disable=total == 1 or args.stream)
    with _kept_answers(args.output, records, settings) as given:
        try:
            for index, turn, answer in bar:
                given[index, turn] = answer
                if args.output is None and not args.stream:
                    print(answer.output_ids if answer.text is None else answer.text)
        except KeyboardInterrupt as error:
            interruption = error
    screen.end_line()
    bar.close()
    summary = _summarise(list(given.values())) | {
        "seconds_with_compilation": round(time.monotonic() - started, 3),
        "output": str(args.output) if args.output is not None and given else None,
        "interrupted": interruption is not None,
    }
    print(json.dumps(summary))
    if interruption is not None:
        raise interruption


@contextmanager
def _kept_answers(
    path: Path | None, records: Sequence[dict[str, Any]], settings: Sequence[SamplingConfig]
) -> Iterator[dict[tuple[int, int], Generation]]:
    """Answers by record and turn, written to the file whatever ends the block."""
    given: dict[tuple[int, int], Generation] = {}
    try:
        yield given
    finally:
        if path is not None and given:
            keys = sorted(given)
            lines = [answer_line(records[i], settings[i], turn, given[i, turn]) for i, turn in keys]
            _write_lines(path, lines)


def _summarise(answers: Sequence[Generation]) -> dict[str, Any]:
    return {
        "answers": len(answers),
        "new_tokens": sum(len(answer.output_ids) for answer in answers),
        "mean_acceptance_length": mean_acceptance_length(
            [answer.accepted_per_round for answer in answers]
        ),
    }


def _read_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses, and refuses options that do not go together."""
    args = _parser().parse_args(arguments)
    if args.show_drafts and not args.stream:
        raise UserError("--show-drafts marks text as it is streamed; add --stream")
    if args.stream and args.batch_size > 1:
        raise UserError("--stream shows one answer after the other; leave out --batch-size")
    if args.output is not None:
        _check_output(args.output)
    return args


def _load_engine(args: argparse.Namespace) -> Engine:
    engine = load_engine(args)
    if args.stream and engine.tokenizer is None:
        raise UserError("--stream shows text, but this target has no tokenizer; leave it out")
    return engine


def _check_output(path: Path) -> None:
    if path.exists():
        raise UserError(f"output {path} exists; name another file or remove it")
    check_writable(path)


def _write_lines(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    """Writes all lines or nothing."""
    partial = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text("".join(json.dumps(line) + "\n" for line in lines))
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise UserError(f"output {path}: {error.strerror}; choose another place") from error


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="infer.generate", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", metavar="TEXT", help="a text to continue")
    source.add_argument("--prompts", metavar="FILE", type=Path, help="a .jsonl file of prompts")
    add_decoding_options(parser, max_new_tokens=256, batch_size=1)
    parser.add_argument(
        "--stream", action="store_true", help="print text as it comes, one answer after the other"
    )
    parser.add_argument(
        "--show-drafts",
        action="store_true",
        help="mark what the draft proposed: green, or in brackets where there is no colour",
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="answers as .jsonl")
    return parser


def cli() -> None:
    """Entry point of `poss-generate`."""
    run_program(main)


if __name__ == "__main__":
    cli()
