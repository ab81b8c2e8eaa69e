r"""Chat templates: which one, and which characters of a rendered chat are trained on.

    messages[:1] + prompt of the answer   <s>[INST] Hi [/INST]
    messages[:2]                          <s>[INST] Hi [/INST] Hello. </s>
                                                              ^^^^^^^^^^^^ trained

So a draft is trained on what a target has to write when it is asked with the same template, the
token that ends its turn included.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from poss_jax.config.paths import as_path, read_text
from poss_jax.config.reading import UserError, one_line
from poss_jax.data.conversations import Message
from poss_jax.data.records import Broken
from poss_jax.data.rendering import Part, RenderEnded, RenderError, Step, render_steps
from poss_jax.data.tokenizer import special_pattern

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
_NEEDED = {  # special tokens; a name of an attribute or the token itself
    "llama2": ("bos_token", "eos_token"),
    "llama3": ("bos_token", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
}
_PROBE = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": "an answer"}]


@dataclass(frozen=True)
class RenderedChat:
    """A chat as text.

    Attributes:
      text: rendered chat, special tokens spelled out.
      spans: characters [begin, end) that are trained on, in order.
    """

    text: str
    spans: list[tuple[int, int]]


class ChatTemplate:
    """Writes chats as a target of this tokenizer is asked.

    Attributes:
      name: name of the template, for reports.
      text: source of the template; None is the tokenizer's own.
      ends_turns: whether an answer ends with a special token; without one a target never learns
        to stop.
    """

    def __init__(self, tokenizer: Any, name: str | None, system_prompt: str | None = None) -> None:
        """Opens a template.

        Args:
          tokenizer: tokenizer of the target.
          name: None (the tokenizer's own), a key of `BUILT_IN`, or the path of a Jinja file.
          system_prompt: system message of chats that have none.

        Raises:
          UserError: no such template, or one that does not fit the tokenizer or cannot be used.
        """
        self._tokenizer, self._system_prompt = tokenizer, system_prompt
        self.text = _read_template(tokenizer, name)
        self.name = name or "the tokenizer's own"
        self._special = special_pattern(tokenizer)
        self._special_end = re.compile(f"(?:{self._special.pattern})$")
        probe = self.render(_PROBE)
        if isinstance(probe, Broken):
            raise UserError(f"chat template ({self.name}): {probe}; set data.template to another")
        text, ((begin, end),) = probe[0].text, probe[0].spans
        question, answer = (message["content"] for message in _PROBE)
        asked_at, answered_at = text.rfind(question, 0, begin), text.find(answer, begin)
        if min(asked_at, answered_at) < 0:
            raise UserError(
                f"chat template ({self.name}): want questions and answers written as they are, "
                "got a text without them; set data.template to another"
            )
        self.ends_turns = bool(self._special_end.search(text[begin:end]))
        self._before = text[asked_at + len(question) : begin]
        self._after = text[answered_at + len(answer) : end].strip()

    def render(self, messages: Sequence[Message]) -> list[RenderedChat] | Broken:
        """Writes a chat whose last turn is an assistant's.

        A template may change earlier turns when later ones come (drop what was thought, move the
        system message). Then the chat becomes one text per answer, each as the target was asked.

        Returns:
          The texts; or why the chat cannot be written.
        """
        for message in messages:
            if found := self._special.search(message["content"]):
                return Broken("a special token is spelled out", found.group())
        if self._system_prompt is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self._system_prompt}, *messages]
        ends = [i + 1 for i, message in enumerate(messages) if message["role"] == "assistant"]
        steps = [step for end in ends for step in (Step(end - 1, True), Step(end, False))]
        try:
            parts = render_steps(self._tokenizer, messages, steps, template=self.text)
        except RenderEnded as error:
            return Broken("the process of the chat template ended", str(error))
        except RenderError as error:
            return Broken("the chat template refuses it", str(error))
        asked, answered = parts[::2], parts[1::2]
        if not all(part.continues for part in answered):
            return Broken(
                "the chat template begins a finished answer otherwise than it asks for it"
            )
        return self._join(asked, answered)

    def find_answers(self, text: str) -> RenderedChat:
        """Finds the answers in a chat that this template has written already.

        Raises:
          UserError: the template ends answers with nothing that could be found.
        """
        if not self._after:
            raise UserError(
                "data.format rendered: the chat template writes nothing at the end of an answer, "
                "so that answers cannot be found; give chats, or another data.template"
            )
        spans: list[tuple[int, int]] = []
        end = 0
        while self._before and (found := text.find(self._before, end)) >= 0:
            begin = found + len(self._before)
            last = text.find(self._after, begin)
            end = last + len(self._after) if last >= 0 else len(text)
            spans.append((begin, end))
        return RenderedChat(text, spans)

    def _join(self, asked: Sequence[Part], answered: Sequence[Part]) -> list[RenderedChat]:
        """Joins parts to one text, or to one per answer where any begins otherwise."""
        is_one = all(part.continues for part in asked)
        text, spans, chats = "", [], []
        for before, answer in zip(asked, answered, strict=True):
            text = text + before.text if before.continues else before.text
            spans.append((len(text), len(text) + self._length_trained(answer.text)))
            text += answer.text
            if not is_one:
                chats.append(RenderedChat(text, spans[-1:]))
        return chats or [RenderedChat(text, spans)]

    def _length_trained(self, answer: str) -> int:
        """Leaves out blanks after the special token that ends a turn: nobody generates them."""
        stripped = answer.rstrip()
        return len(stripped) if self._special_end.search(stripped) else len(answer)


def _read_template(tokenizer: Any, name: str | None) -> str | None:
    """The template's text; None is the tokenizer's own."""
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
    known = {token.content for token in tokenizer.added_tokens_decoder.values()}
    missing = [
        token
        for token in _NEEDED[name]
        if token not in known and getattr(tokenizer, token, None) is None
    ]
    if missing:
        raise UserError(
            f"data.template {name!r}: this tokenizer has no {missing[0]}; take the template that "
            "the target was made with"
        )
    return BUILT_IN[name]
