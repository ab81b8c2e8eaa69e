"""Answers the prompts of `poss generate`, on the screen or in a file."""

import json
import logging
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from poss_jax.checkpoint.whole import write_output
from poss_jax.config.decoding import GenerateConfig
from poss_jax.config.paths import as_path, local_path
from poss_jax.config.reading import UserError, config_to_dict
from poss_jax.data.progress import progress_bar
from poss_jax.engine.answers import Chunk, Generation, mean_acceptance_length
from poss_jax.engine.dialogue import (
    PROMPT_KEYS,
    Dialogue,
    answer_all,
    check_dialogues,
    read_dialogues,
    read_prompts,
)
from poss_jax.engine.engine import Engine
from poss_jax.engine.prompts import PreparedPrompt
from poss_jax.program.options import choose_sampling, load_engine
from poss_jax.program.output import announce, check_new_file, model_text, print_summary, waiting
from poss_jax.program.running import text_marks

_LOG = logging.getLogger(__name__)

_FIRST = "getting ready (longer the first time) ..."


class Screen:
    """Writes chunks to standard output, each at once.

    Accepted drafts are green and copies cyan on a terminal (or with FORCE_COLOR), and in brackets
    elsewhere (or with NO_COLOR).
    """

    def __init__(self, *, shows_drafts: bool, shows_copies: bool = False) -> None:
        drafted, copied = text_marks(), text_marks(is_copied=True)
        self._marks = {"drafted": drafted} if shows_drafts else {}
        self._marks |= {"copied": copied} if shows_copies else {}
        self._is_in_line = False
        legend = ["accepted drafts look {}like this{}".format(*drafted)] * shows_drafts
        legend += ["copies from prompt and answer {}like this{}".format(*copied)] * shows_copies
        if legend:
            sys.stderr.write(f"{', '.join(legend)}\n")

    def show(self, chunk: Chunk) -> None:
        """Writes the text that a round added."""
        parts = []
        for origin, pieces in groupby(chunk.pieces, lambda piece: piece.origin):
            mark, end_mark = self._marks.get(origin, ("", ""))
            parts.append(mark + model_text("".join(piece.text for piece in pieces)) + end_mark)
        self._is_in_line = True
        sys.stdout.write("".join(parts))
        sys.stdout.flush()

    def end_line(self) -> None:
        """Begins a new line, if an answer was begun."""
        if self._is_in_line:
            sys.stdout.write("\n")
            self._is_in_line = False


def answer_dialogues(
    engine: Engine, dialogues: Sequence[Dialogue], config: GenerateConfig, screen: Screen
) -> Iterator[tuple[int, int, Generation]]:
    """Answers every turn of every dialogue.

    A conversation that gets too long ends early, and the log says so.

    Yields:
      Index of the dialogue, index of the turn, and the answer.
    """

    def decode(prompts: Sequence[PreparedPrompt]) -> list[Generation]:
        if not config.stream:
            return engine.decode(prompts, batch_size=config.batch_size, stop=config.stop)
        answers = []
        for prompt in prompts:
            for chunk in announce(engine.decode_rounds(prompt, stop=config.stop), _FIRST):
                screen.show(chunk)
            screen.end_line()
            answers.append(chunk.answer)  # the last one holds it
        return answers

    for i, answer in answer_all(engine, dialogues, decode, batch_size=config.batch_size):
        yield i, dialogues[i].num_answered - 1, answer
    for number, dialogue in enumerate(dialogues, start=1):
        if dialogue.ended:
            turn = dialogue.num_answered + 1
            _LOG.warning("prompt %d ends before turn %d: %s", number, turn, dialogue.ended)


def answer_line(
    record: dict[str, Any], dialogue: Dialogue, turn: int, answer: Generation
) -> dict[str, Any]:
    """Makes a line of the output file; the answer's keys replace the record's."""
    kept = {key: value for key, value in record.items() if key not in PROMPT_KEYS}
    return kept | {
        "turn": turn,
        "prompt_ids": answer.prompt_ids,
        "output_ids": answer.output_ids,
        "text": answer.text,
        "accepted_per_round": answer.accepted_per_round,
        "copied_per_round": answer.copied_per_round,
        "mean_acceptance_length": answer.mean_acceptance_length,
        "stop_reason": answer.stop_reason,
        "sampling": config_to_dict(dialogue.sampling),
    }


def answer_prompts(config: GenerateConfig) -> None:
    """Decodes and prints."""
    output = None if config.output is None else local_path(config.output, "output")
    if output is not None:
        check_new_file(output)
    engine, records, dialogues = _prepare(config)
    started, interruption = time.monotonic(), None
    is_one = len(config.precompile) < 2
    for length in progress_bar(config.precompile, desc="compile", disable=is_one):
        engine.precompile([length], batch_size=config.batch_size)
    has_copies = config.show_drafts and engine.settings.lookup > 0
    screen = Screen(shows_drafts=config.show_drafts, shows_copies=has_copies)
    total = sum(len(dialogue.remaining) for dialogue in dialogues)
    answers = answer_dialogues(engine, dialogues, config, screen)
    if total < 2 and not config.stream:  # no bar, and nothing to see meanwhile
        answers = announce(answers, _FIRST)
    bar = progress_bar(answers, total=total, unit="answer", disable=total < 2 or config.stream)
    answered: dict[tuple[int, int], Generation] = {}
    try:
        for index, turn, answer in bar:
            answered[index, turn] = answer
            if output is None and not config.stream:
                print(answer.output_ids if answer.text is None else model_text(answer.text))
    except KeyboardInterrupt as error:
        interruption = error
    finally:  # finished answers are kept
        if output is not None and answered:
            lines = [
                answer_line(records[i], dialogues[i], turn, answered[i, turn])
                for i, turn in sorted(answered)
            ]
            write_output(output, "".join(json.dumps(line) + "\n" for line in lines))
    screen.end_line()
    bar.close()
    summary = {
        "answers": len(answered),
        "new_tokens": sum(len(answer.output_ids) for answer in answered.values()),
        "mean_acceptance_length": mean_acceptance_length(
            [answer.accepted_per_round for answer in answered.values()]
        ),
        "seconds_with_compilation": round(time.monotonic() - started, 3),
        "output": str(output) if output is not None and answered else None,
        "interrupted": interruption is not None,
    }
    text = "{new_tokens} tokens in {seconds_with_compilation:.1f} s, compilation included; "
    text += "{mean_acceptance_length:.2f} tokens per pass"
    text += "; answers: {output}" if summary["output"] else ""
    print_summary(summary, text.format_map(summary))
    if interruption is not None:
        raise interruption


def _prepare(config: GenerateConfig) -> tuple[Engine, list[dict[str, Any]], list[Dialogue]]:
    """Reads prompts, loads the models, and refuses what cannot be answered."""
    if config.prompts is not None:
        records = read_prompts(as_path(config.prompts))
    elif config.question is not None:
        records = [{"turns": [config.question]}]
    else:
        records = [] if config.prompt is None else [{"prompt": config.prompt}]
    with waiting("loading the models ..."):
        engine = load_engine(config)
    if config.stream and engine.tokenizer is None:
        raise UserError("--stream shows text, but this target has no tokenizer; leave it out")
    sampling = choose_sampling(config.sampling, engine)
    dialogues = read_dialogues(records, sampling, config.max_new_tokens)
    check_dialogues(engine, dialogues)
    engine.check_stop(config.stop)
    return engine, records, dialogues
