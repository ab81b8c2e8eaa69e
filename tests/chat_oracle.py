"""The trained parts of a chat, by transformers' `apply_chat_template`."""

import functools
import itertools
import json
from typing import Any, NamedTuple

import numpy as np
import pytest
from chat_templates import KINDS
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from poss_jax.config.reading import UserError
from poss_jax.data.conversations import Broken, Chat, read_document
from poss_jax.data.prepared import fit_chat
from poss_jax.data.rows import encode_documents
from poss_jax.data.templates import ChatTemplate, RenderedChat

Record = dict[str, Any]


class Answer(NamedTuple):
    """An answer as its target writes it."""

    prompt: str
    written: str  # what the template writes behind the prompt
    learnt: str  # its trained start, up to the token at which the target stops
    is_trained: bool  # the chat wants it to be trained on


@functools.cache
def _base() -> str:
    """A byte-level tokenizer without special tokens, as JSON."""
    model = Tokenizer(models.BPE(unk_token=None))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    model.train_from_iterator(["the answer is that this is the question\n\n"] * 9, trainer)
    return model.to_str()


@functools.cache
def tokenizer_of(name: str) -> Any:
    """The tokenizer of a template, which carries it."""
    kind = KINDS[name]
    model = Tokenizer.from_str(_base())
    eos = kind.eos or kind.ends[0]
    model.add_special_tokens(list(dict.fromkeys([kind.bos, eos, *kind.ends, *kind.specials])))
    made = PreTrainedTokenizerFast(
        tokenizer_object=model,
        bos_token=kind.bos,
        eos_token=eos,
        clean_up_tokenization_spaces=False,
    )
    made.chat_template = kind.text
    return made


TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "tells the weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def call(city: str, *, as_text: bool = False) -> dict[str, Any]:
    """A call of the tool."""
    arguments: Any = {"city": city}
    arguments = json.dumps(arguments) if as_text else arguments
    function = {"name": "weather", "arguments": arguments}
    return {"id": "call00001", "type": "function", "function": function}


@functools.cache
def opened(name: str, *, knows_ends: bool) -> ChatTemplate:
    """A template, with or without the model's own stop tokens."""
    tokenizer = tokenizer_of(name)
    ends = KINDS[name].ends if knows_ends or KINDS[name].needs_ends else ()
    return ChatTemplate(tokenizer, None, stop_ids=tokenizer.convert_tokens_to_ids(list(ends)))


def ask_transformers(name: str, messages: list[Any], tools: Any) -> list[Answer] | None:
    """All answers of a chat; None where the template refuses it, or does not write what it asks."""
    kind, answers = KINDS[name], []
    messages = [message if kind.takes_parts else _joined(message) for message in messages]

    def write(count: int, *, asks: bool) -> str:
        return tokenizer_of(name).apply_chat_template(
            messages[:count], tools=tools, tokenize=False, add_generation_prompt=asks
        )

    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            try:
                prompt, whole = write(index, asks=True), write(index + 1, asks=False)
            except Exception:  # of Jinja's, or what Python raises in it
                return None
            if not whole.startswith(prompt):
                return None
            written = whole[len(prompt) :]
            found = [written.index(end) + len(end) for end in kind.ends if end in written]
            learnt = written[: min(found, default=len(written))]
            is_trained = bool(message.get("weight", 1) and message.get("train", True))
            answers.append(Answer(prompt, written, learnt, is_trained))
    return answers


def is_one_text(answers: list[Answer]) -> bool:
    """Tells whether every prompt holds the answers before it."""
    pairs = itertools.pairwise(answers)
    return all(after.prompt.startswith(one.prompt + one.learnt) for one, after in pairs)


def expected_texts(answers: list[Answer]) -> list[RenderedChat]:
    """One text if every prompt holds the answers before it, else one per answer."""
    spans = [(len(one.prompt), len(one.prompt + one.learnt)) for one in answers]
    texts = [one.prompt + one.written for one in answers]
    used = [index for index, one in enumerate(answers) if one.is_trained]
    if is_one_text(answers):
        return [RenderedChat(texts[-1], [spans[index] for index in used])]
    return [RenderedChat(texts[index], [spans[index]]) for index in used]


def expected_end(name: str, messages: list[Any], tools: Any) -> int:
    """Number of turns a template writes whole, by the words found in its text.

    Tools, calls, results and reasoning hold words that occur nowhere else.
    """
    answers = iter(ask_transformers(name, messages, tools) or [])
    prompt = None
    results: list[tuple[int, str]] = []
    for index, message in enumerate(messages):
        if message["role"] == "tool":
            results.append((index, message["content"]))
        if message["role"] != "assistant":
            continue
        if (answer := next(answers, None)) is None:
            return len(messages)
        if prompt is None and tools and tools[0]["function"]["description"] not in answer.prompt:
            return 0
        prompt = answer.prompt
        for place, result in results:
            if result not in prompt:
                return place
        words = [message.get("reasoning_content") or ""]
        words += [str(call["function"]["arguments"]) for call in message.get("tool_calls") or []]
        results = []
        if not all(_word(word) in answer.written for word in words):
            return index
    return len(messages)


def check_chat(name: str, record: Record, *, knows_ends: bool) -> str:
    """Compares texts, spans and masks of a chat with the oracle's; returns what became of it."""
    template, tools = opened(name, knows_ends=knows_ends), record.get("tools") or None
    document, _ = read_document(record, "chat")
    assert isinstance(document, Chat) and document.tools == tools
    if ask_transformers(name, document.messages, tools) is None:
        refused = template.render(document)
        assert isinstance(refused, Broken) and refused.reason.startswith("the chat template ")
        return "refused"
    fitted, why = fit_chat(document, template)
    end = expected_end(name, document.messages, tools)
    trained = [i for i, one in enumerate(document.messages[:end], 1) if _is_trained(one)]
    if not trained:
        assert isinstance(fitted, Broken) and fitted.reason.endswith("the chat template leaves out")
        return "left out"
    assert isinstance(fitted, Chat) and fitted.messages == document.messages[: trained[-1]]
    assert bool(why) == (trained[-1] < len(document.messages))
    answers = ask_transformers(name, fitted.messages, tools)
    assert answers
    expected = expected_texts(answers)
    assert template.render(fitted) == expected
    _check_masks(name, fitted, template, expected)
    _check_found(name, template, answers)
    return "cut" if why else "whole" if len(expected) == 1 else "a text per answer"


def _check_masks(
    name: str, chat: Chat, template: ChatTemplate, expected: list[RenderedChat]
) -> None:
    tokenizer = tokenizer_of(name)
    [sequences] = encode_documents([chat], tokenizer, template)
    assert not isinstance(sequences, Broken)
    learnt = []
    for one in sequences:  # more than texts where a border of prompt and answer merges
        text = tokenizer.decode(one.ids)
        assert any(wanted.text.startswith(text) for wanted in expected)
        bounds = np.flatnonzero(np.diff(one.trained, prepend=False, append=False)).reshape(-1, 2)
        learnt += [tokenizer.decode(one.ids[begin:end]) for begin, end in bounds]
    assert learnt == [one.text[begin:end] for one in expected for begin, end in one.spans]


def _check_found(name: str, template: ChatTemplate, answers: list[Answer]) -> None:
    """Spans found in the written chat are the oracle's, of trained answers and others.

    Some headers inside an answer are left out.
    """
    text = answers[-1].prompt + answers[-1].written
    if KINDS[name].cannot_find:
        with pytest.raises(UserError, match="answers cannot be found"):
            template.find_answers(text)
        return
    found = template.find_answers(text)
    assert isinstance(found, list)
    [(same, spans)] = [(one.text, one.spans) for one in found]
    wanted = [(len(one.prompt), len(one.prompt + one.learnt)) for one in answers]
    assert same == text and spans[-1][1] == wanted[-1][1]
    assert spans[-1][0] == wanted[-1][0] or KINDS[name].needs_ends
    if is_one_text(answers) and not KINDS[name].needs_ends:
        assert spans == wanted


def _joined(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    return message | ({"content": "".join(part["text"] for part in parts)} if parts else {})


def _is_trained(message: dict[str, Any]) -> bool:
    is_wanted = bool(message.get("weight", 1) and message.get("train", True))
    return message["role"] == "assistant" and is_wanted


def _word(text: str) -> str:
    """The word of a call's arguments that occurs nowhere else, or the text itself."""
    return text.split("'")[-2] if "'" in text else text.split('"')[-2] if '"' in text else text
