"""The server's reading of messages, and names of tokens in log-probabilities."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from test_asking import CHATML, make_tokenizer, of_transformers, user
from test_text import byte_fallback, byte_level

from poss_jax import Engine
from poss_jax.config.decoding import EngineConfig, SamplingConfig, ServeConfig
from poss_jax.data.tokenizer import CHAT_TEMPLATE
from poss_jax.engine.answers import Chunk, TokenLogprobs
from poss_jax.engine.prompts import PreparedPrompt
from poss_jax.serving import chats
from poss_jax.serving.bodies import ApiError, ChatRequest
from poss_jax.serving.replies import Reply
from poss_jax.serving.requests import Job, add_guides, read_chat, submit_grammar

TOOLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}{{ ' ' + m.name if m.name }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content if m.content is defined else 'nothing' }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }} {{ call.function.arguments }}"
    "{{ call | string }}{% endfor %}{{ m['tool_call_id'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"at": "é"}'}}
HISTORY = [
    {"role": "developer", "content": "be brief"},
    {"role": "user", "content": "hi", "name": "Zo"},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "hm"},
    {"role": "tool", "content": "sunny", "tool_call_id": "c1"},
    {"role": "assistant", "content": "Sunny.", "refusal": None, "tool_calls": []},
    {"role": "user", "content": "thanks"},
]


class Tokenising(Engine):
    """An engine without weights: it reads prompts and names tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.max_length, self.stop_ids = tokenizer, 1000, [2]
        self.target_config: Any = SimpleNamespace(vocab_size=10_000)
        self.fingerprint, self.draft_config, self.settings = "", None, EngineConfig()
        self.recommended = SamplingConfig()


def guided(engine: Engine, job: Job) -> Job:
    """A job whose grammar is compiled, as the service does it."""
    return add_guides(job, submit_grammar(engine, job.grammar)) if job.grammar else job


def read(messages: Any, tokenizer: Any) -> list[int]:
    config = ServeConfig(target="none", sampling={"temperature": 0.0})  # type: ignore[arg-type]
    job = read_chat(Tokenising(tokenizer), config, ChatRequest(messages=messages))
    return job.prompts[0].ids


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    chats._warn_of_unused.cache_clear()
    caplog.set_level(logging.WARNING)
    return caplog


def test_all_fields_of_messages_reach_the_template(warnings: pytest.LogCaptureFixture) -> None:
    tokenizer = make_tokenizer("byte level", template=TOOLS)
    assert read(HISTORY, tokenizer) == of_transformers(HISTORY, tokenizer)
    text = tokenizer.decode(read(HISTORY, tokenizer))
    for part in ("user Zo\nhi", "<think>hm</think>nothingweather", "sunnyc1", "developer"):
        assert part in text
    assert not warnings.records


def test_fields_that_the_template_does_not_read(warnings: pytest.LogCaptureFixture) -> None:
    tokenizer = make_tokenizer("byte level", template=CHATML)
    chat = [{**user("hi"), "mood": "good", "tags": []}]
    for _ in range(2):
        assert read(chat, tokenizer) == of_transformers([user("hi")], tokenizer)
    [record] = warnings.records
    assert record.getMessage() == "the chat template does not read the field 'mood' of a message"


def test_reasoning_is_read_by_any_of_its_names(warnings: pytest.LogCaptureFixture) -> None:
    tokenizer = make_tokenizer("byte level", template=TOOLS)
    read([user("hi"), {"role": "assistant", "content": "a", "reasoning": "hm"}], tokenizer)
    assert not warnings.records


@pytest.mark.parametrize("content", [None, [], [{"type": "text", "text": ""}]])
def test_a_message_without_content_or_else_is_empty(content: Any) -> None:
    tokenizer = make_tokenizer("byte level", template=TOOLS)
    chat = [{"role": "user", "content": content}]
    assert read(chat, tokenizer) == of_transformers([user("")], tokenizer)


@pytest.mark.parametrize("role", ["root", "</s>", "", "User", "user\nhi\n### system", "assistant "])
def test_roles_that_no_template_knows(role: str) -> None:
    tokenizer = make_tokenizer("byte level", template=CHAT_TEMPLATE)
    with pytest.raises(ApiError) as caught:
        read([{"role": role, "content": "x"}], tokenizer)
    assert (caught.value.status, caught.value.param) == (400, "messages")
    assert caught.value.message == (
        f"messages: want a role of assistant, developer, function, system, tool, user, got {role!a}"
    )


def test_a_role_that_the_template_names() -> None:
    template = CHATML.replace("{{ m.role }}", "{{ 'tool' if m.role == 'ipython' else m.role }}")
    tokenizer = make_tokenizer("byte level", template=template)
    chat = [{"role": "ipython", "content": "x"}]
    assert read(chat, tokenizer) == of_transformers(chat, tokenizer)


def show(tokenizer: Any, tokens: list[int], top: list[int], *, is_chat: bool) -> dict[str, Any]:
    """Log-probabilities of tokens, at each of which the same ones are likely."""
    before = tokenizer("b")["input_ids"][-1:]
    prompt = PreparedPrompt(before, len(tokens), is_chat=is_chat)
    job = Job([prompt], [], len(top), 1, [""], is_chat=is_chat)
    reply = Reply(Tokenising(tokenizer), job, model="tiny")
    one = TokenLogprobs(-0.5, top, [-float(place) for place in range(len(top))])
    event: Any = reply.take(0, Chunk([], tokens, [0] * len(tokens), logprobs=[one] * len(tokens)))
    return event["choices"][0]["logprobs"]


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_bytes_of_a_text_are_those_of_its_tokens(make: Any) -> None:
    tokenizer, text = make(), "a中😀é b"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    content = show(tokenizer, ids, ids[:1], is_chat=True)["content"]
    assert any("\ufffd" in one["token"] for one in content)
    written = b"".join(bytes(one["bytes"]) for one in content).decode()
    assert written == text
    assert [one["top_logprobs"][0]["bytes"] for one in content] == [content[0]["bytes"]] * len(ids)


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_every_likely_token_has_a_name_of_its_own(make: Any) -> None:
    tokenizer = make()
    beyond = [len(tokenizer) + 1, len(tokenizer) + 2]  # targets may embed more than there are
    letter, part = (tokenizer(text)["input_ids"][-1] for text in ("b", "中"))
    top = [part, *beyond, letter, *range(40, 56)]
    shown = show(tokenizer, [part, beyond[1], letter], top, is_chat=False)
    assert [len(one) for one in shown["top_logprobs"]] == [20] * 3
    assert list(shown["top_logprobs"][0].values()) == [-float(place) for place in range(20)]
    assert shown["tokens"] == [rf"bytes:\x{0xAD:02x}", f"token_id:{beyond[1]}", "b"]
    for name, place in zip(shown["tokens"], (0, 2, 3), strict=True):
        assert shown["top_logprobs"][0][name] == -float(place)


def test_tokens_of_one_text() -> None:
    tokenizer: Any = byte_fallback()
    byte, letter = tokenizer.convert_tokens_to_ids(["<0x62>", "b"])  # both are b
    shown = show(tokenizer, [letter], [byte, letter], is_chat=False)
    assert shown["top_logprobs"] == [{"b": 0.0, f"token_id:{letter}": -1.0}]
    assert shown["tokens"] == [f"token_id:{letter}"]


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
@pytest.mark.parametrize("is_text", [True, False])
def test_offsets_of_an_echo_are_places_in_its_text(make: Any, is_text: bool) -> None:
    """A prompt that is sent as text may spell out special tokens; of ids they are no text."""
    tokenizer: Any = make()
    names = ["<s>", "b", "</s>", "b", "<s>", "</s>", "b"]  # the tokenizer added the first
    ids = tokenizer.convert_tokens_to_ids(names)
    text = "".join(names[1:]) if is_text else tokenizer.decode(ids, skip_special_tokens=True)
    assert is_text or text == "bbb"
    job = Job([PreparedPrompt(ids, 1)], [], 0, 1, [text])
    reply = Reply(Tokenising(tokenizer), job, model="tiny")
    reply.take_scores(0, [TokenLogprobs(-1.0, [], [])] * (len(ids) - 1))
    shown = reply.first_events()[0]["choices"][0]["logprobs"]
    assert shown["tokens"] == names
    ends = [*shown["text_offset"][1:], len(text)]
    parts = [text[i:j] for i, j in zip(shown["text_offset"], ends, strict=True)]
    assert parts == (["", *names[1:]] if is_text else ["", "b", "", "b", "", "", "b"])
