r"""The questions of a run: from its source, or written by the target itself.

A chat model needs only the text that its template puts before a user's turn: what it writes next is
a question of the kind it was trained on (Magpie, arXiv 2406.08464).

    <|im_start|>user\n   ->   What is the capital of France?   ->   answered like any question
"""

import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from poss_jax.config.data import DataConfig
from poss_jax.config.decoding import SamplingConfig
from poss_jax.config.reading import UserError
from poss_jax.config.regenerate import RegenerateConfig
from poss_jax.data.conversations import Broken, read_questions
from poss_jax.data.progress import progress_bar
from poss_jax.data.records import read_records
from poss_jax.data.rendering import RenderError, render_chat
from poss_jax.data.tokenizer import call_tokenizer, special_pattern
from poss_jax.engine.answers import Generation
from poss_jax.engine.dialogue import Dialogue
from poss_jax.engine.engine import Engine
from poss_jax.engine.prompts import PreparedPrompt, with_seed

_ID_KEYS = ("id", "prompt_id", "question_id", "conversation_id")
_PROBES = "a first question", "something else"
_LEAST_CHARACTERS = 10
_MOST_REPETITION = 0.3  # a text that zlib shrinks below this share repeats itself
_SHINGLE = 3  # words
_MOST_ALIKE = 0.6  # share of the shingles of two texts

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
    """Reads the questions of all records of a data set; refuses one without any.

    Args:
      tokenizer: its special tokens may not be spelled out; None allows all text.
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


def plan_questions(config: RegenerateConfig, tokenizer: Any) -> list[Question]:
    """Lists the questions: the source's, the target's own, or both by their shares.

    Questions the target is to write have no user turn yet. Refuses a source with too few.
    """
    if config.self_prompt is None:
        return list_questions(config.data, tokenizer)
    number = config.self_prompt
    num_given = np.floor(np.arange(number + 1) * config.source_share + 1e-9).astype(int)
    listed = list_questions(config.data, tokenizer) if num_given[-1] else []
    usable = [question for question in listed if not isinstance(question.messages, Broken)]
    if len(usable) < num_given[-1]:
        raise UserError(
            f"source {config.data.source!r}: want {num_given[-1]} questions, which is its share, "
            f"got {len(usable)}; lower source_share or self_prompt"
        )
    named = {"source": Path(config.data.source).stem}
    usable = [replace(question, ids=question.ids | named) for question in usable]
    system = config.data.system_prompt
    opening = [] if system is None else [{"role": "system", "content": system}]
    empty = Question(0, "self-prompted", {"source": "self"}, opening)
    planned = (usable[start] if start < end else empty for start, end in pairwise(num_given))
    return [replace(question, index=index) for index, question in enumerate(planned)]


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


# --------------------------------------------------------------------------------------------------
# Writing a turn


def find_opening(tokenizer: Any, messages: Sequence[dict[str, str]]) -> tuple[str, str]:
    """Text that the tokenizer's template writes before and after a user's next turn.

    Raises:
      UserError: the template does not write turns as they are, or refuses these messages.
    """
    openings = []
    for probe in _PROBES:
        try:
            chat = [*messages, {"role": "user", "content": probe}]
            text = render_chat(tokenizer, chat, is_asking=True)
        except RenderError as error:
            raise UserError(f"the chat template refuses a user's turn: {error}") from error
        prefix, is_there, suffix = text.rpartition(probe)
        openings.append((prefix if is_there else "", suffix))
    if openings[0] != openings[1] or not openings[0][0].strip():
        raise UserError(
            "self_prompt: want a chat template that opens a user's turn and then writes it as it "
            "is, got one whose opening cannot be found; give questions instead (--source DATA)"
        )
    return openings[0]


class TurnWriter:
    """Lets a target write the user's turns of conversations."""

    def __init__(self, config: RegenerateConfig, tokenizer: Any) -> None:
        """Finds how the tokenizer's template opens and ends a user's turn."""
        if tokenizer is None or not tokenizer.chat_template:
            raise UserError(
                "self_prompt: want a target whose tokenizer has a chat template, got none; give "
                "--template, or questions (--source DATA)"
            )
        self._tokenizer, self._special = tokenizer, special_pattern(tokenizer)
        self._sampling = SamplingConfig(
            temperature=config.self_prompt_temperature, top_p=config.self_prompt_top_p
        )
        self.num_turns, self.max_new_tokens = config.self_prompt_turns, config.self_prompt_tokens
        ending = find_opening(tokenizer, [])[1].strip()
        special = self._special.match(ending)
        token = special and tokenizer.convert_tokens_to_ids(special.group())
        # What ends a turn: tokens besides the answers' stop tokens; else strings.
        self.stop_ids = [] if token is None else [token]
        self.stop = () if special or not ending else (ending.splitlines()[0],)

    def is_due(self, question: Question, dialogue: Dialogue) -> bool:
        """True if the target has to write the next turn of a conversation."""
        asked = [] if isinstance(question.messages, Broken) else question.messages
        is_own = not any(message["role"] == "user" for message in asked)
        is_open = not dialogue.remaining and not dialogue.ended
        return is_own and is_open and dialogue.num_answered < self.num_turns

    def prompt(self, dialogue: Dialogue) -> list[int]:
        """Token ids of a conversation up to where the next turn begins (see `find_opening`)."""
        text, _ = find_opening(self._tokenizer, dialogue.messages)
        # A trailing space belongs to the first word's token.
        ids = call_tokenizer(self._tokenizer, text.rstrip(" "), add_special_tokens=False)
        return list(ids["input_ids"])

    def sampling(self, dialogue: Dialogue) -> SamplingConfig:
        """Sampling settings of a conversation's turns."""
        return replace(self._sampling, seed=dialogue.sampling.seed)

    def write(self, engine: Engine, dialogues: Sequence[Dialogue], batch_size: int) -> None:
        """Writes the next turn of some conversations, or ends them."""
        stop_ids = [*engine.stop_ids, *self.stop_ids]
        due: list[tuple[Dialogue, PreparedPrompt]] = []
        for dialogue in dialogues:
            settings = self.max_new_tokens, self.sampling(dialogue)
            try:
                prompt = engine.prepare(self.prompt(dialogue), *settings, stop_ids=stop_ids)
            except UserError as error:
                dialogue.end(str(error))
            else:
                due.append((dialogue, prompt))
        prompts = [prompt for _, prompt in due]
        turns = engine.decode(prompts, batch_size=batch_size, stop=self.stop)
        for (dialogue, _), turn in zip(due, turns, strict=True):
            self.take(dialogue, turn)

    def take(self, dialogue: Dialogue, turn: Generation) -> None:
        """Adds the text as the next turn, or ends the conversation."""
        text = (turn.text or "").strip()
        dialogue.remaining = [{"role": "user", "content": text}]
        if reason := self._refuse(text, turn.stop_reason):
            dialogue.end(reason)

    def _refuse(self, text: str, stop_reason: str) -> str:
        """Reason to refuse a turn; "" accepts it."""
        if stop_reason == "length":
            return f"a user's turn not finished after {self.max_new_tokens} tokens"
        if self._special.search(text):
            return "a special token is spelled out"
        if len(text) < _LEAST_CHARACTERS:
            return "a user's turn that is too short"
        if "\ufffd" in text:
            return "a user's turn that is not UTF-8"
        return "a user's turn that repeats itself" if repeats_itself(text) else ""


def repeats_itself(text: str) -> bool:
    """True if a text repeats itself."""
    content = text.encode()
    return len(zlib.compress(content)) < _MOST_REPETITION * len(content)


# --------------------------------------------------------------------------------------------------
# Repeated questions


class SeenQuestions:
    """Finds questions that were asked before, or nearly.

    A text is the set of its shingles, three words each. Texts are nearly equal if most of their
    shingles are the same.
    """

    def __init__(self, lines: Iterable[Line] = ()) -> None:
        """Begins with the chats of an output file."""
        self._exact: set[str] = set()
        self._sizes: list[int] = []  # number of shingles of each text
        self._texts_with: dict[str, list[int]] = defaultdict(list)  # by shingle
        for line in lines:
            self.add(_first_question(line))

    def add(self, text: str) -> str:
        """Adds a new question and returns ""; for a repeated one returns why."""
        words = text.casefold().split()
        if " ".join(words) in self._exact:
            return "a question that was asked before"
        ends = range(min(_SHINGLE, len(words)), len(words) + 1)  # a short text is one shingle
        shingles = {" ".join(words[max(0, end - _SHINGLE) : end]) for end in ends}
        shared = Counter(chain.from_iterable(self._texts_with.get(key, ()) for key in shingles))
        for index, number in shared.items():
            if number >= _MOST_ALIKE * (len(shingles) + self._sizes[index] - number):
                return "a question that was nearly asked before"
        for key in shingles:
            self._texts_with[key].append(len(self._sizes))
        self._sizes.append(len(shingles))
        self._exact.add(" ".join(words))
        return ""

    def drop_repeated(self, answers: Lines) -> Lines:
        """Turns chats whose first question is not new into failures; yields all lines in order."""
        for lines in answers:
            for line in lines:
                if "reason" not in line and (reason := self.add(_first_question(line))):
                    line.pop("ended_early", None)
                    line["reason"] = reason
            yield lines


def _first_question(line: Line) -> str:
    return next(turn["content"] for turn in line["messages"] if turn["role"] == "user")
