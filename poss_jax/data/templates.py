r"""Chat templates: which one applies, and which characters of a rendered chat are trained.

    messages[:1] + prompt of the answer   <s>[INST] Hi [/INST]
    messages[:2]                          <s>[INST] Hi [/INST] Hello. </s>
                                                              ^^^^^^^^^^^^ trained

So a draft is trained on what the target writes when it is asked with the same template, including
the token that ends its turn.
"""

import contextlib
import functools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any

from poss_jax.config.paths import as_path, read_text
from poss_jax.config.reading import UserError, one_line
from poss_jax.data.conversations import (
    CALLS,
    Broken,
    Chat,
    Message,
    end_with_answer,
    is_trained,
    plain_text,
)
from poss_jax.data.rendering import (
    RenderError,
    Step,
    label_names,
    make_label,
    render_steps,
)
from poss_jax.data.tokenizer import match_any, special_ids
from poss_jax.data.turns import ANSWER, QUESTION, learn_turns

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
            turns = learn_turns(self._write, self._special, sorted(stops))
        except RenderError as error:
            turns = _explain(error)
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
            return _explain(error)
        is_one, end, previous, spans = True, 0, "", []
        for prompt, answered in zip(texts[::2], texts[1::2], strict=True):
            # A template may drop what it writes after an answer's end once another turn follows.
            is_one &= prompt.startswith(previous[:end])
            if not answered.startswith(prompt):
                return Broken(
                    "the chat template begins a finished answer otherwise than it asks for it"
                )
            end = len(prompt) + self._length_trained(answered[len(prompt) :])
            spans.append((len(prompt), end))
            previous = answered
        trained = [is_trained(turn) for turn in chat.messages if turn["role"] == "assistant"]
        if is_one:
            return [RenderedChat(previous, list(compress(spans, trained)))]
        chats = (RenderedChat(text, [span]) for text, span in zip(texts[1::2], spans, strict=True))
        return list(compress(chats, trained))

    def write_answers(self, chat: Chat) -> list[str]:
        """Renders, for every answer, the chat up to its prompt and up to its end.

        Raises:
          RenderError: the template cannot render it.
        """
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
        chat = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]
        steps, roles = [Step(2, False)], set[str]()
        expected = self._write(chat, steps)
        for index, message in enumerate(chat):
            in_parts = {**message, "content": [{"type": "text", "text": message["content"]}]}
            with contextlib.suppress(RenderError):
                if self._write([*chat[:index], in_parts, *chat[index + 1 :]], steps) == expected:
                    roles.add(message["role"])
        return frozenset(roles | ({"system", "tool"} if "user" in roles else set()))

    def _length_trained(self, answer: str) -> int:
        """Trained length: to the target's stop token, else to a special token before whitespace."""
        if stop := self._turns.stop.search(answer):
            return stop.end()
        stripped = answer.rstrip()
        return len(stripped) if self._special_end.search(stripped) else len(answer)


def _explain(error: RenderError) -> Broken:
    """Turns a rendering error into the reason for a dropped chat."""
    return Broken("the chat template refuses it", str(error))


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
    missing = [
        token
        for token in _NEEDED[name]
        if token not in vocabulary and getattr(tokenizer, token, None) is None
    ]
    if missing:
        raise UserError(
            f"data.template {name!r}: this tokenizer has no {missing[0]}; take the template that "
            "the target was made with"
        )
    return BUILT_IN[name]


# --------------------------------------------------------------------------------------------------
# Fields that a template leaves out: the chat is cut before the first turn that has one

_FIELDS = {  # of an assistant turn
    "tool calls": CALLS,
    "reasoning": ("reasoning_content", "reasoning", "thinking"),
}


def fit_chat(chat: Chat, template: ChatTemplate) -> tuple[Chat | Broken, str]:
    """Cuts a chat before the first turn that the template does not write in full.

    The template writes the chat once more, with a label behind each text that it may leave out.

    Returns:
      The chat, and why a part of it was left out ("" if it is whole); or why none can be used.
    """
    fields: list[tuple[int, int, str]] = []  # turn, its text among `write_answers`, kind of field
    tools = label_names(chat.tools, make_label(0))
    if chat.tools:
        fields.append((0, 0, "tools"))
    messages, num_answered = list[Message](), 0
    for index, turn in enumerate(chat.messages):
        if turn["role"] == "tool" and plain_text(turn).strip():
            turn = turn | {"content": plain_text(turn) + make_label(len(fields))}
            fields.append((index, 2 * num_answered, "results of tools"))
        elif turn["role"] == "assistant":
            for what, keys in _FIELDS.items():
                if held := {key: turn[key] for key in keys if turn.get(key)}:
                    label = make_label(len(fields))
                    turn = turn | {key: _add_label(value, label) for key, value in held.items()}
                    fields.append((index, 2 * num_answered + 1, what))
            num_answered += 1
        messages.append(turn)
    try:
        labelled = replace(chat, messages=messages, tools=tools)
        texts = template.write_answers(labelled) if fields else []
    except RenderError:  # `render` will say why
        return chat, ""
    missing = [
        (index, what)
        for number, (index, text_index, what) in enumerate(fields)
        if make_label(number) not in texts[text_index]
    ]
    if not missing:
        return chat, ""
    end, what = min(missing)
    why, messages = f"{what} that the chat template leaves out", chat.messages[:end]
    if messages := end_with_answer(messages):
        return replace(chat, messages=messages), why
    return Broken(why), ""


def _add_label(value: Any, label: str) -> Any:
    return value + label if isinstance(value, str) else label_names(value, label)
