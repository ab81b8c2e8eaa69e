r"""Chat templates: which one applies, and which characters of a rendered chat are trained.

    messages[:1] + prompt of the answer   <s>[INST] Hi [/INST]
    messages[:2]                          <s>[INST] Hi [/INST] Hello. </s>
                                                              ^^^^^^^^^^^^ trained

So a draft is trained on what the target writes when it is asked with the same template, including
the token that ends its turn.
"""

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import compress
from typing import Any, NamedTuple

from poss_jax.config.paths import as_path, read_text
from poss_jax.config.reading import UserError, one_line
from poss_jax.data.conversations import Broken, Chat, Message, is_trained, plain_text
from poss_jax.data.rendering import RenderError, Step, render_steps
from poss_jax.data.tokenizer import match_any, special_ids

BUILT_IN = {
    "llama2": (
        "{% set system = '' %}{% set turns = messages %}"
        "{% if messages and messages[0].role == 'system' %}"
        "{% set system = '<<SYS>>\n' + messages[0].content.strip() + '\n<</SYS>>\n\n' %}"
        "{% set turns = messages[1:] %}{% endif %}"
        "{% for turn in turns %}{% if turn.role == 'user' %}"
        "{{ bos_token + '[INST] ' + (system if loop.first else '') + turn.content.strip() }}"
        "{{ ' [/INST]' }}"
        "{% else %}{{ ' ' + turn.content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
    ),
    "llama3": (
        "{{ bos_token }}{% for turn in messages %}"
        "{{ '<|start_header_id|>' + turn.role + '<|end_header_id|>\n\n' }}"
        "{{ turn.content.strip() + '<|eot_id|>' }}{% endfor %}"
        "{% if add_generation_prompt %}"
        "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
    ),
}
_NEEDED = {  # special tokens: the attribute's name or the token itself
    "llama2": ("bos_token", "eos_token"),
    "llama3": ("bos_token", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
}
_REFUSES = "the chat template refuses it"
_BEGINS_OTHERWISE = "the chat template begins a finished answer otherwise than it asks for it"


@dataclass(frozen=True)
class RenderedChat:
    """A chat as text."""

    text: str  # rendered chat, special tokens spelled out
    spans: list[tuple[int, int]]  # characters [begin, end) that are trained, in order


class ChatTemplate:
    """Renders chats as this tokenizer's target reads them."""

    def __init__(
        self,
        tokenizer: Any,
        name: str | None,
        system_prompt: str | None = None,
        stop_ids: Sequence[int] = (),
    ) -> None:
        """Opens a template.

        Args:
          name: None (the tokenizer's own), a key of `BUILT_IN`, or the path of a Jinja file.
          stop_ids: tokens that end a text of the target, besides the tokenizer's eos.

        Raises:
          UserError: no such template, or one that does not fit the tokenizer or cannot be used.
        """
        self._tokenizer, self._system_prompt = tokenizer, system_prompt
        self.text = _read_template(tokenizer, name)  # None: the tokenizer's
        self.name = name or "the tokenizer's own"  # for reports
        added = tokenizer.added_tokens_decoder
        stop_tokens = [*stop_ids, *special_ids(tokenizer, "eos")]
        stops = {added[token].content for token in stop_tokens if token in added}
        self._special = match_any({mark.content for mark in added.values() if mark.special} | stops)
        self._special_end = re.compile(f"(?:{self._special.pattern})$")
        try:
            turns = _learn_turns(self._write, self._special, sorted(stops))
        except RenderError as error:
            turns = Broken(_REFUSES, str(error))
        if isinstance(turns, Broken):
            raise UserError(f"chat template ({self.name}): {turns}; set data.template to another")
        self._turns = turns
        trained = turns.example[: self._length_trained(turns.example)]
        # Whether an answer ends with a special token: without one a target never learns to stop.
        self.ends_turns = bool(self._special_end.search(trained))

    def render(self, chat: Chat) -> list[RenderedChat] | Broken:
        """Renders a chat whose last turn is an assistant's.

        A template may change earlier turns when later ones come (drop reasoning, move the system
        message). Then the chat becomes one text per answer, each as the target was asked.

        Returns:
          The texts; or why the chat cannot be rendered.
        """
        for text in _strings([chat.messages, chat.tools]):
            if match := self._special.search(text):
                return Broken("a special token is spelled out", match.group())
        try:
            texts = self.write_answers(chat)
        except RenderError as error:
            return Broken(_REFUSES, str(error))
        is_one, end, previous, spans = True, 0, "", []
        for prompt, answered in zip(texts[::2], texts[1::2], strict=True):
            # A template may drop what it writes after an answer's end once another turn follows.
            is_one &= prompt.startswith(previous[:end])
            if not answered.startswith(prompt):
                return Broken(_BEGINS_OTHERWISE)
            end = len(prompt) + self._length_trained(answered[len(prompt) :])
            spans.append((len(prompt), end))
            previous = answered
        trained = [is_trained(turn) for turn in chat.messages if turn["role"] == "assistant"]
        if is_one:
            return [RenderedChat(previous, list(compress(spans, trained)))]
        chats = (RenderedChat(text, [span]) for text, span in zip(texts[1::2], spans, strict=True))
        return list(compress(chats, trained))

    def write_answers(self, chat: Chat) -> list[str]:
        """Renders, per answer, the chat up to its prompt and up to its end; raises RenderError."""
        messages, tools = chat.messages, chat.tools
        if self._system_prompt is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self._system_prompt}, *messages]
        settled, steps = list[Message](), list[Step]()
        for index, message in enumerate(messages):
            is_in_parts = isinstance(message.get("content"), list)
            if is_in_parts and message["role"] not in self._roles_of_parts:
                message = message | {"content": plain_text(message)}
            settled.append(message)
            if message["role"] == "assistant":
                steps += [Step(index, True), Step(index + 1, False)]
        return self._write(settled, steps, tools)

    def find_answers(self, text: str) -> list[RenderedChat] | Broken:
        """Finds the answers in a chat already rendered by this template.

        Returns:
          The text; or a refusal if an answer has no end and would include the next turn.

        Raises:
          UserError: the template writes no recognisable marks around answers.
        """
        turns = self._turns
        if turns.end is None or turns.header is None:
            where = "at the end of" if turns.end is None else "before"
            raise UserError(
                f"data.format rendered: the chat template writes nothing {where} an answer, "
                "so that answers cannot be found; give chats, or another data.template"
            )
        spans: list[tuple[int, int]] = []
        end = 0
        while header := turns.header.search(text, end):
            last = turns.end.search(text, header.end())
            end = last.end() if last else len(text)
            spans.append((header.end(), end))
            if opening := turns.opening.search(text, header.end() + len(turns.lead), end):
                excerpt = text[max(0, opening.start() - 40) : opening.end() + 20]
                return Broken("an answer runs into the next turn", repr(excerpt))
        return [RenderedChat(text, spans)]

    def _write(
        self, messages: Sequence[Message], steps: Sequence[Step], tools: list[Any] | None = None
    ) -> list[str]:
        return render_steps(self._tokenizer, messages, steps, template=self.text, tools=tools)

    @functools.cached_property
    def _roles_of_parts(self) -> frozenset[str]:
        """Roles whose content may be a list of parts: one part renders like its text."""
        chat = [{"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _ANSWER}]
        steps, roles = [Step(2, False)], set[str]()
        expected = self._write(chat, steps)
        for index, message in enumerate(chat):
            in_parts = {**message, "content": [{"type": "text", "text": message["content"]}]}
            with suppress(RenderError):
                if self._write([*chat[:index], in_parts, *chat[index + 1 :]], steps) == expected:
                    roles.add(message["role"])
        return frozenset(roles | ({"system", "tool"} if "user" in roles else set()))

    def _length_trained(self, answer: str) -> int:
        """Trained length: to the target's stop token, else to a special token before whitespace."""
        if stop := self._turns.stop.search(answer):
            return stop.end()
        stripped = answer.rstrip()
        return len(stripped) if self._special_end.search(stripped) else len(answer)


def _strings(value: Any) -> Iterator[str]:
    """Yields texts of nested lists and objects, including keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from _strings([*value, *value.values()])
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)


def _read_template(tokenizer: Any, name: str | None) -> str | None:
    """The template's text; None: the tokenizer's."""
    if name is None:
        if not tokenizer.chat_template:
            raise UserError(
                "this tokenizer has no chat template; set data.template to "
                f"{', '.join(BUILT_IN)} or the path of a .jinja file"
            )
        return None
    if name not in BUILT_IN:
        try:
            return read_text(as_path(name))
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(
                f"data.template {name!r}: want null (the tokenizer's own), {', '.join(BUILT_IN)} "
                f"or the path of a .jinja file; as a file it fails: {one_line(error)}"
            ) from error
    vocabulary = {token.content for token in tokenizer.added_tokens_decoder.values()}
    for token in _NEEDED[name]:
        if token not in vocabulary and getattr(tokenizer, token, None) is None:
            raise UserError(
                f"data.template {name!r}: this tokenizer has no {token}; take the template that "
                "the target was made with"
            )
    return BUILT_IN[name]


# --------------------------------------------------------------------------------------------------
# The marks that a template writes around answers, found by rendering small chats

_Write = Callable[[Sequence[Message], Sequence[Step], list[Any] | None], list[str]]
"""Renders prefixes of a chat with tools; raises RenderError."""

_QUESTION, _ANSWER, _NEXT = "a question", "an answer", "another question"
_WORD, _RESULT = "some word", "some result"
_CHAT = [
    {"role": "user", "content": _QUESTION},
    {"role": "assistant", "content": _ANSWER},
    {"role": "user", "content": _NEXT},
]
_CALL = {"name": "look_up", "arguments": {"word": _WORD}}
_CALLING = [
    {"role": "user", "content": _QUESTION},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call00001", "type": "function", "function": _CALL}],
    },
    {"role": "tool", "name": "look_up", "tool_call_id": "call00001", "content": _RESULT},
]
_WORDS = {"type": "object", "properties": {"word": {"type": "string", "description": "a word"}}}
_TOOL = {"name": "look_up", "description": "looks a word up", "parameters": _WORDS}
_TOOLS = [{"type": "function", "function": _TOOL}]


@dataclass(frozen=True)
class _Turns:
    """Marks that a template writes around answers."""

    stop: re.Pattern[str]  # matches a token that ends an answer when it is generated
    example: str  # text after the prompt of a small answered chat
    header: re.Pattern[str] | None  # matches the text before an answer; None: not recognisable
    lead: str  # text that every answer begins with if no prompt asks for it
    end: re.Pattern[str] | None  # matches the text after an answer; None: not recognisable
    opening: re.Pattern[str]  # matches the start of a turn, so that no answer includes it


class _Sight(NamedTuple):
    """A small rendered chat, in pieces."""

    between: str  # text between the question and the prompt's end
    asks: str  # the part of it that asks for an answer (the generation prompt)
    answer: str  # text after the prompt
    lead: str  # the part of it before the answer's words
    behind: str  # text after the answer's words
    followed: str | None  # the same if another turn follows; None: the answer is then another
    last: str  # the whole chat with another turn


def _learn_turns(write: _Write, special: re.Pattern[str], stops: Sequence[str]) -> _Turns | Broken:
    """Finds the marks, or why the template cannot be used; `stops` end a text of the model.

    Raises:
      RenderError: the template cannot render a small chat.
    """
    seen = _look(write, special, _CHAT, _ANSWER)
    if isinstance(seen, Broken):
        return seen
    call = None
    with suppress(RenderError):  # a template may have no tools
        call = _look(write, special, _CALLING, _WORD, _TOOLS)
    call = None if isinstance(call, Broken) else call
    marks, followed_ends = set(stops), set[str]()
    for sight in filter(None, (seen, call)):
        same, different = _end_marks(sight, special, match_any(stops))
        marks, followed_ends = marks | same, followed_ends | different
    textual = _common_start(seen.behind, seen.followed or seen.behind)
    ends = marks | followed_ends
    has_end = bool(match_any(ends).search(seen.answer))
    if not has_end and textual.strip():
        ends, has_end = ends | {textual}, True
    end = match_any(ends) if has_end else None
    # A turn opens with its first special token, or else with all that the template writes there.
    turn = (seen.followed or "").partition(_NEXT)[0]
    mark = end.search(turn) if end else None
    openings = set[str]()
    for text in (turn[mark.end() :] if mark else turn, seen.asks or seen.between):
        if text.strip():
            opening = special.search(text)
            openings.add(opening.group() if opening else text)
    return _Turns(
        stop=match_any(marks),
        example=seen.answer,
        header=_header(seen, call, special, end),
        lead=_lead(seen),
        end=end,
        opening=match_any(openings - ends),
    )


def _look(
    write: _Write,
    special: re.Pattern[str],
    chat: Sequence[Message],
    answer_text: str,
    tools: list[Any] | None = None,
) -> _Sight | Broken:
    """Renders a question, an answer, and a following turn."""
    question, prompt, full = write(chat, [Step(1, False), Step(1, True), Step(2, False)], tools)
    last = ""
    with suppress(RenderError):  # a template may support single-turn chats only
        [last] = write(chat, [Step(3, True)], tools)
    if not full.startswith(prompt):
        return Broken(_BEGINS_OTHERWISE)
    answer = full[len(prompt) :]
    lead, is_found, behind = answer.partition(answer_text)
    if _QUESTION not in prompt or not is_found:
        return Broken("want questions and answers written as they are, got a text without them")
    between, unasked = (text.rpartition(_QUESTION)[2] for text in (prompt, question))
    followed = None
    if last.startswith(prompt):
        _, is_found, suffix = last[len(prompt) :].partition(answer_text)
        followed = suffix if is_found else None
    return _Sight(
        between=between,
        asks=between[len("".join(_common_pieces(between, unasked, special))) :],
        answer=answer,
        lead=lead,
        behind=behind,
        followed=followed,
        last=last,
    )


def _end_marks(
    seen: _Sight, special: re.Pattern[str], stop: re.Pattern[str]
) -> tuple[set[str], set[str]]:
    """Special tokens that end the answer: in any turn, and those that differ by turn.

    A template may write more after the last answer, so only what it writes in both places counts.
    """
    followed = seen.behind if seen.followed is None else seen.followed
    common = _common_pieces(seen.behind, followed, special)
    if any(map(stop.fullmatch, common)):
        return set(), set()
    if marks := common[1::2]:
        return {marks[-1]}, set()
    firsts = [special.search(text) for text in (seen.behind, followed)]
    return set(), {mark.group() for mark in firsts if mark and firsts[0]}


def _common_pieces(first: str, second: str, special: re.Pattern[str]) -> list[str]:
    """Common prefix of two texts, split into special tokens (every second) and other text."""
    return _common_start(*(re.split(f"({special.pattern})", text) for text in (first, second)))


def _header(
    seen: _Sight, call: _Sight | None, special: re.Pattern[str], end: re.Pattern[str] | None
) -> re.Pattern[str] | None:
    """Pattern of the generation prompt if it has a special token, else of all between turns."""
    if special.search(seen.asks):
        return re.compile(re.escape(seen.asks))
    lead = re.escape(_lead(seen))
    is_end = end is not None and end.fullmatch(seen.between.strip())
    if not seen.between.strip() or (is_end and not lead):
        return None
    headers = [f"{re.escape(seen.between)}(?={lead})"]
    result = call.last.rpartition(_RESULT)[2] if call else ""
    if marks := list(special.finditer(result)):
        headers.append(re.escape(result[marks[-1].start() :]))
    return re.compile("|".join(headers))


def _lead(seen: _Sight) -> str:
    return seen.lead if not seen.asks and seen.lead.strip() else ""


def _common_start(first: Any, second: Any) -> Any:
    """The start that two texts or two lists share."""
    differ = (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    return first[: next(differ, min(len(first), len(second)))]
