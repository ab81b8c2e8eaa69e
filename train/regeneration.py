"""Lets a target, loaded here or behind a server, answer the questions of a data set.

Chats are answered in windows, always the same ones together, and a window is written at once. So an
interrupted run resumes as if it had never stopped.
"""

import hashlib
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from poss_jax.checkpoint.record import read_record
from poss_jax.checkpoint.whole import naming, sole_writer, write_file
from poss_jax.config.json_reading import json_lines
from poss_jax.config.paths import as_path, is_uri, local_path
from poss_jax.config.reading import UserError, config_to_dict
from poss_jax.config.regenerate import RegenerateConfig
from poss_jax.data.progress import progress_bar
from poss_jax.data.records import matching_files
from poss_jax.data.templates import ChatTemplate
from poss_jax.data.tokenizer import load_tokenizer
from poss_jax.engine.dialogue import answer_all
from poss_jax.engine.engine import Engine
from poss_jax.engine.prompts import check_bias
from poss_jax.program.options import load_engine
from poss_jax.program.output import check_writable, waiting

from .questions import (
    Line,
    Lines,
    Question,
    SeenQuestions,
    TurnWriter,
    answer_line,
    open_dialogue,
    plan_questions,
    refuse_answer,
)
from .server import ChatClient, answer_questions, hold_refusals

_BATCHES_PER_WINDOW = 4


class Answerer(NamedTuple):
    """A target that answers: loaded here, or behind a server."""

    made_from: dict[str, Any]  # all of it that decides the answers
    tokenizer: Any  # its tokenizer; None if a server has it
    window: int  # number of questions answered together
    answer: Callable[[Sequence[Question]], Lines]  # yields lines of the output, some at a time


def regenerate(config: RegenerateConfig, *, overwrite: bool) -> dict[str, Any]:
    """Answers the questions that the output lacks, or with `overwrite` all; returns the summary."""
    output = local_path(config.output, "output")
    check_writable(output)
    _check_apart(config.data.source, output)
    with sole_writer(output):
        answerer = _load_target(config) if config.server is None else _find_server(config)
        questions = plan_questions(config, answerer.tokenizer)
        asked = "".join(json.dumps([each.where, str(each.messages)]) for each in questions)
        values = config_to_dict(config)
        names = ["sampling", "max_new_tokens", "stop", "keeps_unfinished"]
        if config.self_prompt is not None:
            names += [name for name in values if name.startswith("self_prompt_")]
        made_from = {
            **answerer.made_from,
            "data": values["data"],
            "questions": len(questions),
            "questions_sha256": hashlib.sha256(asked.encode()).hexdigest(),
            "temperatures": values["temperatures"] or None,
            **{name: values[name] for name in names},
        }
        files = AnswerFiles(output, made_from, answerer.window, overwrite=overwrite)
        started, num_done = time.monotonic(), files.num_done
        lines_to_come = answerer.answer(questions[num_done:])
        if config.server is not None and not files.num_done:
            lines_to_come = hold_refusals(lines_to_come)
        if config.self_prompt is not None:
            written = (line for _, line in json_lines(output)) if num_done else ()
            lines_to_come = SeenQuestions(written).drop_repeated(lines_to_come)
        with (
            progress_bar(
                total=len(questions), initial=num_done, desc="answer", unit="chat"
            ) as progress,
            closing(lines_to_come) as answers,
        ):
            for lines in answers:
                files.add(lines)
                progress.update(len(lines))
        answered = files.counts.pop("answered", 0)
        return {
            "output": str(files.output),
            "failed": str(files.failed),
            "questions": len(questions),
            "answered": answered,
            "not_answered": files.counts,
            "answered_before": num_done,
            "seconds_with_compilation": round(time.monotonic() - started, 3),
        }


def _load_target(config: RegenerateConfig) -> Answerer:
    """Loads the target that answers, in windows of several batches."""
    with waiting("loading the models ..."):
        engine = load_engine(config)
    check_bias(config.sampling, engine.target_config.vocab_size)
    if engine.tokenizer is None:
        raise UserError("this target has no tokenizer to ask with; copy its files there")
    template = ChatTemplate(engine.tokenizer, config.data.template)  # as training will use it
    if template.text is not None:
        engine.tokenizer.chat_template = template.text
    engine.check_stop(config.stop)
    window = _BATCHES_PER_WINDOW * config.batch_size
    writer = TurnWriter(config, engine.tokenizer) if config.self_prompt else None

    def answer(questions: Sequence[Question]) -> Lines:
        for first in range(0, len(questions), window):
            yield answer_window(engine, questions[first : first + window], config, writer)

    made_from = {
        "target": asdict(engine.record.target),
        **({"quantised": engine.record.quantised} if engine.record.quantised else {}),
        "max_length": engine.max_length,
        "weights": engine.record.fingerprint,
        "chat_template": engine.tokenizer.chat_template,
        "batch_size": config.batch_size,
    }
    if config.drafting == "sampled":  # then drafts decide the answers, too
        made_from |= {
            "drafting": config.drafting,
            "draft": config.draft and read_record(config.draft).fingerprint,
            "draft_vocabulary": config.draft_vocabulary,
            "trees": {str(size): tree and asdict(tree) for size, tree in engine.trees.items()},
        }
    return Answerer(made_from, engine.tokenizer, window, answer)


def answer_window(
    engine: Engine,
    questions: Sequence[Question],
    config: RegenerateConfig,
    writer: TurnWriter | None = None,
) -> list[Line]:
    """Lets the target answer every turn of some chats, with its earlier answers in context.

    A chat ends early if its next answer does not fit, is empty, or is not finished.

    Args:
      writer: lets the target write its share of the user turns; None: it writes none.

    Returns:
      For every question a line of the output (`messages`) or of the failures (`reason`).
    """
    dialogues = [open_dialogue(question, config) for question in questions]
    pairs = list(zip(questions, dialogues, strict=True))
    decode = partial(engine.decode, batch_size=config.batch_size, stop=config.stop)
    for _ in range(1 if writer is None else writer.num_turns):
        if writer is not None:
            due = [dialogue for question, dialogue in pairs if writer.is_due(question, dialogue)]
            writer.write(engine, due, config.batch_size)
        answers = answer_all(
            engine,
            dialogues,
            decode,
            batch_size=config.batch_size,
            refuse=lambda answer: refuse_answer(answer, config),
            by_length=True,
        )
        for _ in answers:
            pass
    return [answer_line(*pair, engine.max_length) for pair in pairs]


def _find_server(config: RegenerateConfig) -> Answerer:
    """Finds the server that answers; its address may change between runs."""
    assert config.server is not None
    tokenizer = load_tokenizer(as_path(config.target)) if config.target is not None else None
    writer = TurnWriter(config, tokenizer) if config.self_prompt else None
    server = ChatClient(config.server, config.model, config.chat_template_kwargs)

    def answer(questions: Sequence[Question]) -> Lines:
        return answer_questions(server, questions, config, writer)

    made_from = {
        "model": server.model,
        "chat_template_kwargs": config.chat_template_kwargs,
        "batch_size": 1,
    }
    return Answerer(made_from, tokenizer, 1, answer)


def _check_apart(source: str, output: Path) -> None:
    """Raises UserError if a file to write is also one to read."""
    if is_uri(source):
        return
    read = {Path(str(file)).resolve() for file in matching_files(source)}
    for path in answer_files(output):
        if path.resolve() in read or path.absolute().match(os.path.abspath(as_path(source))):
            raise UserError(
                f"source {source!r} reads {path}, which is written; name another output"
            )


# --------------------------------------------------------------------------------------------------
# The files


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
        for key, value in made_from.items():
            if saved.get(key) != value:
                raise UserError(
                    f"output {output} was made otherwise ({key}: {saved.get(key)!r}, asked "
                    f"{value!r}); name another file, or start from scratch with --overwrite"
                )
        # Keep the complete windows.
        keys = {self.output: "messages", self.failed: "reason"}
        lines_of = {path: _read_lines(path, key) for path, key in keys.items()}
        times = Counter(line["index"] for lines in lines_of.values() for line, _ in lines)
        num_questions = made_from["questions"]
        wrong = (index for index in range(num_questions) if times[index] != 1)
        missing = next(wrong, num_questions)
        self.num_done = missing if missing == num_questions else missing - missing % window
        for path, lines in lines_of.items():
            kept = [(line, end) for line, end in lines if line["index"] < self.num_done]
            if path.exists():
                os.truncate(path, kept[-1][1] if kept else 0)
            self.counts.update(line.get("reason", "answered") for line, _ in kept)

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
