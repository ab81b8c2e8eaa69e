"""Lets a target, loaded here or behind a server, answer the questions of a data set."""

import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from poss_jax.checkpoint.record import read_record
from poss_jax.checkpoint.whole import sole_writer
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

from .answers import (
    AnswerFiles,
    Line,
    Lines,
    Question,
    answer_files,
    answer_line,
    open_dialogue,
    refuse_answer,
)
from .self_prompt import SeenQuestions, TurnWriter, plan_questions
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
        load = _load_target if config.server is None else _find_server
        return _answer_remaining(config, output, load(config), overwrite=overwrite)


def _answer_remaining(
    config: RegenerateConfig, output: Path, answerer: Answerer, *, overwrite: bool
) -> dict[str, Any]:
    questions = plan_questions(config, answerer.tokenizer)
    asked = "".join(json.dumps([question.where, str(question.messages)]) for question in questions)
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
    engine.check_stop(config.stop, config.max_new_tokens)
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
