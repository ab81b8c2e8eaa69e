"""Chats whose answers the target writes, and the files they are kept in.

Chats are answered in windows, always the same ones together, and a window is written at once. So an
interrupted run resumes as if it had never stopped.
"""

import json
import os
import re
import sys
from collections import Counter
from collections.abc import Generator, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from poss_jax.checkpoint.whole import naming, write_file
from poss_jax.config.data import DataConfig
from poss_jax.config.reading import UserError
from poss_jax.config.regenerate import RegenerateConfig
from poss_jax.data.conversations import Broken, read_questions
from poss_jax.data.progress import progress_bar
from poss_jax.data.records import read_records
from poss_jax.data.tokenizer import special_pattern
from poss_jax.engine.answers import Generation
from poss_jax.engine.dialogue import Dialogue
from poss_jax.engine.prompts import with_seed

_ID_KEYS = ("id", "prompt_id", "question_id", "conversation_id")

Line = dict[str, Any]
Lines = Generator[list[Line], None, None]


@dataclass(frozen=True)
class Question:
    """The questions of one record."""

    index: int  # of the record in the source
    where: str  # file and line of the record
    ids: dict[str, Any]  # names of the record
    messages: list[dict[str, str]] | Broken  # system message if any, then the user's turns


def list_questions(config: DataConfig, tokenizer: Any) -> list[Question]:
    """Reads the questions of all records of a data set.

    Args:
      tokenizer: its special tokens may not be spelled out; None allows all text.

    Raises:
      UserError: nothing to read.
    """
    special = re.compile("(?!)") if tokenizer is None else special_pattern(tokenizer)
    questions: list[Question] = []
    num_usable = 0
    records = progress_bar(read_records(config), desc="read", delay=2)
    for index, (where, record) in enumerate(records):
        if num_usable == config.max_documents:
            break
        messages = record if isinstance(record, Broken) else read_questions(record)
        if isinstance(messages, list):
            if any(special.search(message["content"]) for message in messages):
                messages = Broken("a special token is spelled out")
            elif config.system_prompt is not None and messages[0]["role"] != "system":
                messages = [{"role": "system", "content": config.system_prompt}, *messages]
        ids = record if isinstance(record, dict) else {}
        ids = {key: ids[key] for key in _ID_KEYS if key in ids}
        questions.append(Question(index, where, ids, messages))
        num_usable += isinstance(messages, list)
    if all(isinstance(question.messages, Broken) for question in questions):
        got = "empty files"
        if questions:
            first = f"first {questions[0].where}: {questions[0].messages}"
            got = f"none in {len(questions)} records; {first}"
        raise UserError(f"source {config.source!r}: want chats or questions, got {got}")
    return questions


def refuse_answer(answer: Generation, config: RegenerateConfig) -> str:
    """Reason to drop an answer and end its chat; "" keeps it."""
    if answer.stop_reason == "length" and not config.keeps_unfinished:
        return f"an answer not finished after {config.max_new_tokens} tokens"
    return "" if (answer.text or "").strip() else "an empty answer"


def open_dialogue(question: Question, config: RegenerateConfig) -> Dialogue:
    """Makes the conversation of a question; it has ended if there is nothing to ask."""
    sampling = with_seed(config.sampling, question.index)
    if temperatures := config.temperatures:
        sampling = replace(sampling, temperature=temperatures[question.index % len(temperatures)])
    if isinstance(question.messages, Broken):
        return Dialogue([], config.max_new_tokens, sampling, ended=question.messages.reason)
    count = sum(message["role"] == "system" for message in question.messages)
    system, turns = question.messages[:count], question.messages[count:]
    return Dialogue(turns, config.max_new_tokens, sampling, messages=system)


def answer_line(question: Question, dialogue: Dialogue, max_length: int = 0) -> Line:
    """Makes the line of the output, or of the failures, once a conversation is over.

    Args:
      max_length: most tokens of prompt and answer, if an engine refused longer ones.
    """
    ended = dialogue.ended
    if dialogue.is_too_long:
        ended = f"prompt and answer longer than {max_length} tokens"
    line = {"index": question.index, **question.ids}
    if dialogue.num_answered:
        early = {"ended_early": ended} if ended else {}
        return line | early | {"messages": dialogue.messages}
    asked = {"messages": [*dialogue.messages, *dialogue.remaining]}
    asked = {} if isinstance(question.messages, Broken) else asked
    return line | {"where": question.where, "reason": ended, **asked}


def answer_files(output: Path) -> tuple[Path, Path, Path]:
    """Paths of the output, of the failures, and of how both were made."""
    stem = output.stem if output.suffix == ".jsonl" else output.name
    return (
        output,
        output.with_name(f"{stem}.failed.jsonl"),
        output.with_name(f"{stem}.made_from.json"),
    )


class AnswerFiles:
    """The output file, the failures, and how both were made."""

    def __init__(
        self, output: Path, made_from: dict[str, Any], window: int, *, overwrite: bool = False
    ) -> None:
        """Opens the files of an interrupted run, or makes new ones once there are lines.

        Args:
          made_from: all that decides the chats; existing files must agree.
          window: questions answered together.
          overwrite: start from the beginning; old files stay until there are lines.

        Raises:
          UserError: the files are something else, or were made with other settings.
        """
        self.output, self.failed, self._about = answer_files(output)
        self.num_done = 0  # questions done, counted from the first
        self.counts = Counter[str]()  # lines of the files: `answered`, or the reason
        made_from = json.loads(json.dumps(made_from))
        written = (path for path in (output, self.failed, self._about) if path.exists())
        self._to_start: dict[str, Any] | None = None
        if overwrite or all(path.stat().st_size == 0 for path in written):
            self._to_start = made_from
            return
        try:
            saved = dict(json.loads(self._about.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise UserError(
                f"output {output} exists and was not made here; name another file"
            ) from error
        different = [key for key, value in made_from.items() if saved.get(key) != value]
        if different:
            key = different[0]
            raise UserError(
                f"output {output} was made otherwise ({key}: {saved.get(key)!r}, asked "
                f"{made_from[key]!r}); name another file, or start from scratch with --overwrite"
            )
        self._resume(window, made_from["questions"])

    def add(self, lines: Iterable[Line]) -> None:
        """Writes the lines of a window."""
        lines = list(lines)
        if self._to_start is not None:
            self.output.parent.mkdir(parents=True, exist_ok=True)
            for path in (self.output, self.failed):
                path.write_bytes(b"")
            write_file(self._about, json.dumps(self._to_start, indent=2) + "\n")
            self._to_start = None
        for path, key in ((self.output, "messages"), (self.failed, "reason")):
            mine = [line for line in lines if ("reason" in line) == (key == "reason")]
            with naming(path), path.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in mine)
                file.flush()
                os.fsync(file.fileno())
        self.counts.update(line.get("reason", "answered") for line in lines)
        self.num_done += len(lines)

    def _resume(self, window: int, num_questions: int) -> None:
        """Keeps the complete windows."""
        keys = {self.output: "messages", self.failed: "reason"}
        lines_of = {path: _read_lines(path, key) for path, key in keys.items()}
        times = Counter(line["index"] for lines in lines_of.values() for line, _ in lines)
        wrong = (index for index in range(num_questions) if times[index] != 1)
        missing = next(wrong, num_questions)
        self.num_done = missing if missing == num_questions else missing - missing % window
        for path, lines in lines_of.items():
            kept = [(line, end) for line, end in lines if line["index"] < self.num_done]
            if path.exists():
                os.truncate(path, kept[-1][1] if kept else 0)
            self.counts.update(line.get("reason", "answered") for line, _ in kept)


def _read_lines(path: Path, key: str) -> list[tuple[Line, int]]:
    """Lines with a key, up to the first damaged one, and where each ends."""
    lines: list[tuple[Line, int]] = []
    end, last = 0, -1
    for raw in path.read_bytes().splitlines(keepends=True) if path.exists() else ():
        if not raw.endswith(b"\n"):  # written in part by a killed process
            break
        try:
            line = json.loads(raw)
            _, index = line[key], line["index"]
            is_next = index > last
        except (ValueError, LookupError, TypeError):
            is_next = False
        if not is_next:
            tqdm.write(
                f"{path}: line {len(lines) + 1} is damaged; it and all later lines are asked again",
                file=sys.stderr,
            )
            break
        end, last = end + len(raw), index
        lines.append((line, end))
    return lines
