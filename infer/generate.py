r"""Continues prompts with a target, speculatively if a draft is given.

Needs model folders (see `python -m poss_jax.convert`). Prints the texts, or writes one JSON line
per answer to --output; the last line printed is one JSON summary.

    python -m infer.generate --target runs/demo/target/model --draft runs/demo/poss3/model \
        --prompt "def read_lines(path):" --max-new-tokens 64
    python -m infer.generate --target DIR --prompts questions.jsonl --output answers.jsonl

A line of --prompts holds one of `prompt` (text), `prompt_ids`, `messages` (chat), or `turns` (user
messages, each answered in turn; one line per answer is written). Its other keys are passed on.
"""

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from infer.options import add_tree_options, read_tree
from poss_jax.config import UserError
from poss_jax.data import read_prompts
from poss_jax.engine import Engine, Generation, Prompt
from poss_jax.metrics import mean_acceptance_length
from poss_jax.program import Parser, run_program


def answer_records(
    engine: Engine,
    records: Sequence[dict[str, Any]],
    *,
    max_new_tokens: int,
    batch_size: int,
) -> Iterator[tuple[int, int, Generation]]:
    """Answers every turn of every record.

    Args:
      engine: decodes.
      records: lines of a prompt file.
      max_new_tokens: most new tokens of each answer.
      batch_size: prompts decoded together.

    Yields:
      Index of the record, index of the turn, and the answer; all first turns come first.
    """
    conversations = [_Conversation(record) for record in records]
    num_turns = max(conversation.num_turns for conversation in conversations)
    for turn in range(num_turns):
        open_ones = [i for i, c in enumerate(conversations) if turn < c.num_turns]
        for first in range(0, len(open_ones), batch_size):
            batch = open_ones[first : first + batch_size]
            prompts = [conversations[i].prompt(turn) for i in batch]
            answers = engine.generate(prompts, max_new_tokens=max_new_tokens, batch_size=batch_size)
            for i, answer in zip(batch, answers, strict=True):
                conversations[i].add_answer(answer)
                yield i, turn, answer


class _Conversation:
    """One record: a prompt answered once, or turns whose answers join the chat."""

    def __init__(self, record: dict[str, Any]) -> None:
        self._turns: list[str] = record.get("turns", [])
        self._single = next(
            (record[key] for key in ("prompt", "prompt_ids", "messages") if key in record), None
        )
        self._messages: list[dict[str, str]] = []
        self.num_turns = len(self._turns) or 1

    def prompt(self, turn: int) -> Prompt:
        if not self._turns:
            return self._single  # type: ignore[return-value]
        self._messages.append({"role": "user", "content": self._turns[turn]})
        return list(self._messages)

    def add_answer(self, answer: Generation) -> None:
        self._messages.append({"role": "assistant", "content": answer.text or ""})


def answer_line(record: dict[str, Any], turn: int, answer: Generation) -> dict[str, Any]:
    """One line of the output file."""
    kept = {
        key: value
        for key, value in record.items()
        if key not in ("prompt", "prompt_ids", "messages", "turns")
    }
    return kept | {
        "turn": turn,
        "prompt_ids": answer.prompt_ids,
        "output_ids": answer.output_ids,
        "text": answer.text,
        "accepted_per_round": answer.accepted_per_round,
        "mean_acceptance_length": answer.mean_acceptance_length,
        "stop_reason": answer.stop_reason,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses arguments, decodes, prints."""
    args = _parser().parse_args(arguments)
    if args.output is not None and args.output.exists():
        raise UserError(f"output {args.output} exists; name another file or remove it")
    records = read_prompts(args.prompts) if args.prompts else [{"prompt": args.prompt}]
    engine = Engine.load(
        args.target,
        args.draft,
        tree=read_tree(args),
        max_length=args.max_length,
        allow_target_mismatch=args.allow_target_mismatch,
    )
    started = time.monotonic()
    answers = answer_records(
        engine, records, max_new_tokens=args.max_new_tokens, batch_size=args.batch_size
    )
    total = sum(len(record.get("turns", [0])) for record in records)
    lines, accepted = [], []
    for index, turn, answer in tqdm(answers, total=total, unit="answer", disable=total == 1):
        lines.append(answer_line(records[index], turn, answer))
        accepted.append(answer.accepted_per_round)
        if args.output is None:
            print(answer.output_ids if answer.text is None else answer.text)
    if args.output is not None:
        _write_lines(args.output, lines)
    summary = {
        "answers": len(lines),
        "new_tokens": sum(len(line["output_ids"]) for line in lines),
        "mean_acceptance_length": mean_acceptance_length(accepted),
        "seconds_with_compilation": round(time.monotonic() - started, 3),
        "output": None if args.output is None else str(args.output),
    }
    print(json.dumps(summary))


def _write_lines(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    """Writes all lines or nothing."""
    partial = path.with_name(path.name + ".tmp")
    try:
        partial.write_text("".join(json.dumps(line) + "\n" for line in lines))
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise UserError(f"output {path}: {error.strerror}; choose another place") from error


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="infer.generate", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--target", required=True, metavar="DIR", help="model folder of the target")
    parser.add_argument(
        "--draft", metavar="DIR", help="model folder of a draft (default: autoregressive)"
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", metavar="TEXT", help="a text to continue")
    source.add_argument("--prompts", metavar="FILE", type=Path, help="a .jsonl file of prompts")
    parser.add_argument(
        "--max-new-tokens", type=int, default=256, metavar="N", help="limit (default: 256)"
    )
    parser.add_argument(
        "--batch-size", type=int, default=1, metavar="N", help="decoded together (default: 1)"
    )
    parser.add_argument(
        "--max-length",
        type=int,
        metavar="N",
        help="most tokens of prompt and answer (default: what the target was made for)",
    )
    add_tree_options(parser)
    parser.add_argument(
        "--allow-target-mismatch",
        action="store_true",
        help="use a draft that was made for other weights of the same shape",
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="answers as .jsonl")
    return parser


def cli() -> None:
    """Entry point of `poss-generate`."""
    run_program(main)


if __name__ == "__main__":
    cli()
