"""Prompt files, and conversations whose every turn the target answers.

A record of a prompt file becomes a `Dialogue`; `answer_all` plays many of them, in batches:

    turns [a, b]  ->  user a, assistant x  ->  user a, assistant x, user b, assistant y
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from poss_jax.config.decoding import SamplingConfig
from poss_jax.config.json_reading import json_lines
from poss_jax.config.paths import AnyPath
from poss_jax.config.reading import UserError, build_config, shorten
from poss_jax.engine.answers import Generation
from poss_jax.engine.engine import Engine
from poss_jax.engine.prompts import PreparedPrompt, Prompt, PromptTooLong, is_message, with_seed

PROMPT_KEYS = {
    "prompt": "a string",
    "prompt_ids": "a list of token ids",
    "messages": "a list of {role, content}, and other fields that the chat template reads",
    "turns": "a list of strings",
}

Message = dict[str, Any]
Decode = Callable[[Sequence[PreparedPrompt]], list[Generation]]
"""Answers prepared prompts, at most a batch of them."""


@dataclass
class Dialogue:
    """A conversation under way: the target answers its turns, and each answer joins it."""

    # Turns that are not answered yet: a user's message each; or, outside of conversations, the one
    # prompt of a record.
    remaining: Sequence[Prompt | Message]
    max_new_tokens: int  # of each answer
    # The answers share a seed; they start at different positions of the text, so the draws differ.
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    messages: Sequence[Message] = ()  # answered turns, and answers; a system message may come first
    num_answered: int = 0
    prompt: PreparedPrompt | None = None  # the next one, once it is prepared
    ended: str = ""  # why the conversation ended before its last turn; "" if it did not
    is_too_long: bool = False  # that is because the next prompt does not fit
    most_tokens: int = 0  # of all prompts and answers together; set by `check`

    def check(self, engine: Engine) -> None:
        """Prepares the first prompt, and refuses a dialogue whose last prompt cannot fit.

        Raises:
          UserError: what `Engine.prepare` refuses, even if all answers before it are empty.
        """
        self.prompt = last_prompt = self._prepare(engine, self.messages, self.remaining[0])
        *earlier, last = self.remaining
        if earlier:
            empty = {"role": "assistant", "content": ""}
            asked = [message for turn in earlier for message in (turn, empty)]
            last_prompt = self._prepare(engine, [*self.messages, *asked], last)  # type: ignore[list-item]
        max_new = len(last_prompt.ids) + len(self.remaining) * self.max_new_tokens
        self.most_tokens = min(max_new, engine.max_length)

    def ask(self, engine: Engine) -> bool:
        """Prepares the next prompt; False if all turns are answered or the conversation ended."""
        if self.remaining and self.prompt is None and not self.ended:
            try:
                self.prompt = self._prepare(engine, self.messages, self.remaining[0])
            except UserError as error:
                self.ended, self.is_too_long = str(error), isinstance(error, PromptTooLong)
        return self.prompt is not None

    def take(self, answer: Generation, fields: dict[str, Any] | None = None) -> None:
        """Adds the answer to the conversation, with other fields of its message."""
        turn, self.remaining = self.remaining[0], self.remaining[1:]
        if isinstance(turn, dict):
            answered = {"role": "assistant", "content": answer.text or "", **(fields or {})}
            self.messages = [*self.messages, turn, answered]
        self.num_answered, self.prompt = self.num_answered + 1, None

    def end(self, reason: str) -> None:
        """Ends the conversation before the next turn."""
        self.ended, self.prompt = reason, None

    def _prepare(
        self, engine: Engine, messages: Sequence[Message], turn: Prompt | Message
    ) -> PreparedPrompt:
        prompt = [*messages, turn] if isinstance(turn, dict) else turn
        return engine.prepare(prompt, self.max_new_tokens, self.sampling)


def answer_all(
    engine: Engine,
    dialogues: Sequence[Dialogue],
    decode: Decode,
    *,
    batch_size: int,
    refuse: Callable[[Generation], str] = lambda answer: "",
    by_length: bool = False,
) -> Iterator[tuple[int, Generation]]:
    """Answers every turn of every dialogue, all first turns first.

    A dialogue ends early if its next prompt is refused (see `Dialogue.ended`).

    Args:
      dialogues: conversations; their answers are added to them.
      refuse: returns why to drop an answer and end its dialogue; "" keeps it.
      by_length: batch prompts of similar length, which are padded less.

    Yields:
      Index of the dialogue, and the answer it kept.
    """
    while waiting := [i for i, dialogue in enumerate(dialogues) if dialogue.ask(engine)]:
        prompts = {i: prompt for i in waiting if (prompt := dialogues[i].prompt)}
        if by_length:
            waiting.sort(key=lambda i: len(prompts[i].ids))
        for first in range(0, len(waiting), batch_size):
            batch = waiting[first : first + batch_size]
            for i, answer in zip(batch, decode([prompts[i] for i in batch]), strict=True):
                if reason := refuse(answer):
                    dialogues[i].end(reason)
                    continue
                dialogues[i].take(answer)
                yield i, answer


def read_prompts(path: AnyPath) -> list[dict[str, Any]]:
    """Reads a JSONL prompt file; each line holds exactly one of `PROMPT_KEYS`.

    Other keys (such as question_id) are kept.

    Raises:
      UserError: missing file or no lines, bad JSON, no prompt, an empty one, or a wrong type.
    """
    records = [check_record(record, where) for where, record in json_lines(path)]
    if not records:
        raise UserError(f"{path}: want one JSON object per line, got no lines; add prompts")
    return records


def check_record(record: dict[str, Any], where: str) -> dict[str, Any]:
    """Returns a record; refuses one without exactly one valid prompt, of `PROMPT_KEYS`."""
    keys = [key for key in PROMPT_KEYS if key in record]
    if len(keys) != 1 or not _is_prompt(keys[0], record[keys[0]]):
        kinds = ", ".join(f"{key} ({kind})" for key, kind in PROMPT_KEYS.items())
        got = json.dumps({key: record[key] for key in keys} or list(record), default=str)
        raise UserError(f"{where}: want exactly one of {kinds}, not empty; got {got[:80]}")
    return record


def read_dialogues(
    records: Sequence[dict[str, Any]], sampling: SamplingConfig, max_new_tokens: int
) -> list[Dialogue]:
    """Turns records of a prompt file into dialogues.

    A record's own `sampling` wins over the run's. A record without a seed gets one from the run's
    seed and its place.
    """
    dialogues = []
    for index, record in enumerate(records):
        where = f"prompt {index + 1} of {len(records)}: sampling"
        overrides = record.get("sampling", {})
        if not isinstance(overrides, dict):
            raise UserError(
                f"{where}: want settings such as {{'temperature': 1}}, got {shorten(overrides)}"
            )
        values = asdict(with_seed(sampling, index)) | overrides
        settings = build_config(SamplingConfig, values, origin=where)
        turns = [next(record[key] for key in PROMPT_KEYS if key in record)]
        if "turns" in record:
            turns = [{"role": "user", "content": text} for text in record["turns"]]
        dialogues.append(Dialogue(turns, max_new_tokens, settings))
    return dialogues


def check_dialogues(engine: Engine, dialogues: Sequence[Dialogue]) -> None:
    """Refuses dialogues that must fail, before anything is decoded; names the prompt."""
    for number, dialogue in enumerate(dialogues, start=1):
        try:
            dialogue.check(engine)
        except UserError as error:
            raise UserError(f"prompt {number} of {len(dialogues)}: {error}") from error


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _is_prompt(key: str, value: Any) -> bool:
    if key == "prompt":
        return _is_text(value)
    checks = {"prompt_ids": lambda item: type(item) is int, "messages": is_message}
    return isinstance(value, list) and value != [] and all(map(checks.get(key, _is_text), value))
