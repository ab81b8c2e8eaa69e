"""Fields that a template leaves out: the chat is cut before the first turn that has one."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from poss_jax.data.conversations import CALLS, Chat, end_with_answer, plain_text
from poss_jax.data.records import Broken
from poss_jax.data.rendering import Part, RenderError
from poss_jax.data.templates import ChatTemplate

_FIELDS = {  # of an assistant turn
    "tool calls": CALLS,
    "reasoning": ("reasoning_content", "reasoning", "thinking"),
}


def fit_chat(chat: Chat, template: ChatTemplate) -> tuple[Chat | Broken, str]:
    """Cuts a chat before the first turn that the template does not write in full.

    Found by rendering the chat without a field: if the text is the same, the field was left out.

    Returns:
      The chat, and why a part of it was left out ("" if it is whole); or why none can be used.
    """
    bare = list(_bare_chats(chat))
    whole = _write(chat, template) if bare else None
    if whole is None:  # `render` will say why
        return chat, ""
    cuts = [(_first_same(chat, held, whole, _write(one, template)), w) for w, held, one in bare]
    end, what = min(cuts)
    if end == len(chat.messages):
        return chat, ""
    why, messages = f"{what} that the chat template leaves out", chat.messages[:end]
    if messages := end_with_answer(messages):
        return replace(chat, messages=messages), why
    return Broken(why), ""


def _bare_chats(chat: Chat) -> Iterator[tuple[str, set[int], Chat]]:
    """Yields a field that may be left out, the turns that have it, and the chat without it."""
    turns = list(enumerate(chat.messages))
    if chat.tools:
        yield "tools", {0}, replace(chat, tools=None)
    for what, keys in _FIELDS.items():
        held = {i for i, turn in turns if turn["role"] == "assistant" and any(map(turn.get, keys))}
        bare = [{"content": ""} | {k: turn[k] for k in turn if k not in keys} for _, turn in turns]
        if held:
            yield what, held, replace(chat, messages=bare)
    held = {i for i, turn in turns if turn["role"] == "tool" and plain_text(turn).strip()}
    bare = [turn | ({"content": ""} if i in held else {}) for i, turn in turns]
    if held:
        yield "results of tools", held, replace(chat, messages=bare)


def _write(chat: Chat, template: ChatTemplate) -> list[Part] | None:
    try:
        return template.write_answers(chat)
    except RenderError:
        return None


def _first_same(
    chat: Chat, held: set[int], whole: Sequence[Part], bare: Sequence[Part] | None
) -> int:
    """Index of the first turn that is written the same without its field; else their number.

    An answer is written in its own part, other turns in the prompt of the next answer. If a
    template refuses the bare chat, it needs the field.
    """
    if bare is None:
        return len(chat.messages)
    num_answered = 0
    for index, turn in enumerate(chat.messages):
        is_answer = turn["role"] == "assistant"
        place = 2 * num_answered + is_answer
        if index in held and whole[place].text == bare[place].text:
            return index
        num_answered += is_answer
    return len(chat.messages)
