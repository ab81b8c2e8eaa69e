"""Hostile bodies of requests: work within bounds, or one line, for little time and memory."""

import json
import time
import tracemalloc
from typing import Any

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import BaseModel
from serving import Tokenising
from test_asking import make_tokenizer

from poss_jax.config.decoding import ServeConfig
from poss_jax.engine.prompts import MOST_BIASED, MOST_STOP_IDS, lay_out
from poss_jax.serving.bodies import (
    MOST_STOPS,
    ApiError,
    ChatRequest,
    CompletionRequest,
    TokenizeRequest,
    parse_body,
)
from poss_jax.serving.requests import Job, read_chat, read_completion, read_text
from poss_jax.serving.responses import ResponseRequest, read_response

ENGINE = Tokenising(make_tokenizer("byte level"))
CONFIG = ServeConfig(target="none")
MOST_CHOICES = 128
LONGEST_MESSAGE = 400
LARGE = 2**17  # bytes of a value that is large, at most
BYTES_PER_BYTE, ROOM = 40, 2**20  # a short text takes many times its JSON
CPU_SECONDS = 2.0

READ = {
    CompletionRequest: read_completion,
    ChatRequest: read_chat,
    ResponseRequest: read_response,
    TokenizeRequest: read_text,
}
GOOD = {
    CompletionRequest: {"prompt": '"Once"'},
    ChatRequest: {"messages": '[{"role": "user", "content": "Hi"}]'},
    ResponseRequest: {"input": '"Hi"'},
    TokenizeRequest: {"prompt": '"Once"'},
}
IN_MESSAGES = ["role", "content", "type", "text", "name", "tool_calls", "reasoning_content"]
NAMES = sorted({name for kind in READ for name in kind.model_fields} | {*IN_MESSAGES, "", "zz"})
NAMES += ["a.b", "__class__", "\\ud83d", "\\n", "n" * LARGE, "0", "-1", "419", "9" * 10]
WORDS = ["", "a", "user", "system", "text", "</s>", "3", "\\ud83d", "\\ud83d\\ude00", "\\u0000"]
NUMBERS = ["0", "1", "-1", "1.0", "0.5", "1e-320", "1e400", "NaN", "-Infinity", "419", "10000"]
NUMBERS += ["2147483648", "-9223372036854775809", "9" * 4000, "1" + "0" * 5000]
SCALARS = ["null", "true", "false", *NUMBERS, *(f'"{word}"' for word in WORDS)]
LEFT_RIGHT = [("[", "]"), ('{"a":', "}"), ('[{"role":', "}]"), ("[", "")]
UNITS = ["a", " ", "\N{GRINNING FACE}", "\\u00e9", "</s>", "[", '\\"', "\\\\"]
JUNK = [b""] * 20 + [b"\xff", b"\xed\xa0\xbd", b'"', b"[" * 5000]


def write_object(fields: list[tuple[str, str]]) -> str:
    """JSON of an object, whose names may occur twice."""
    return "{" + ", ".join(f'"{name}": {value}' for name, value in fields) + "}"


def write_list(values: list[str]) -> str:
    return f"[{', '.join(values)}]"


@st.composite
def large(draw: st.DrawFn, inner: st.SearchStrategy[str]) -> str:
    """JSON of something long or deep."""
    value = draw(inner)
    count = draw(st.sampled_from([10, 129, 300, 4001, LARGE]))
    count = min(count, LARGE // (len(value) + 8))
    left, right = draw(st.sampled_from(LEFT_RIGHT))
    kinds = {
        "list": lambda: write_list([value] * count),
        "object": lambda: write_object([(str(index), value) for index in range(count)]),
        "deep": lambda: left * count + value + right * count,
        "text": lambda: f'"{draw(st.sampled_from(UNITS)) * count}"',
    }
    return kinds[draw(st.sampled_from(sorted(kinds)))]()


def grow(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    objects = st.lists(st.tuples(st.sampled_from(NAMES), inner), max_size=4).map(write_object)
    return objects | st.lists(inner, max_size=4).map(write_list) | large(inner)


VALUES = st.recursive(
    st.sampled_from(SCALARS) | st.text(max_size=5).map(json.dumps), grow, max_leaves=6
)
ANYTHING = st.tuples(st.sampled_from(NAMES), VALUES)
IDS = st.lists(st.sampled_from(["0", "5", "419", *SCALARS]), max_size=5).map(write_list)
MESSAGES = st.lists(
    st.lists(ANYTHING, max_size=3).map(
        lambda fields: write_object([("role", '"user"'), ("content", '"a"'), *fields])
    ),
    max_size=3,
).map(write_list)
BIASES = st.lists(
    st.tuples(st.sampled_from(["0", "419", "10000", "9" * 10, "-1", "+5", "\u0665"]), VALUES),
    max_size=3,
).map(write_object)
FIELDS = st.one_of(
    ANYTHING,
    st.tuples(st.just("logit_bias"), BIASES),
    st.tuples(st.just("stop"), st.lists(VALUES, max_size=5).map(write_list)),
    st.tuples(st.sampled_from(["prompt", "stop_token_ids"]), IDS),
    st.tuples(st.just("prompt"), st.lists(IDS, max_size=3).map(write_list)),
    st.tuples(st.just("messages"), MESSAGES),
)


@st.composite
def bodies(draw: st.DrawFn, kind: type[BaseModel]) -> bytes:
    """A good body to which fields are added, also twice, and which may be damaged."""
    own = st.tuples(st.sampled_from(sorted(kind.model_fields)), st.sampled_from(SCALARS))
    fields = [*GOOD[kind].items(), *draw(st.lists(own | FIELDS, max_size=4))]
    content = write_object(draw(st.permutations(fields))).encode("utf-8", "surrogatepass")
    at = draw(st.integers(0, len(content)))
    return content[:at] + draw(st.sampled_from(JUNK)) + content[at:]


def check_error(error: ApiError) -> None:
    """A refusal names a field and says in one line what is wrong."""
    assert error.status == 400
    assert error.message and error.message.isprintable()
    assert len(error.message) <= LONGEST_MESSAGE
    assert error.param is None or error.param in NAMES
    json.dumps(error.body(), allow_nan=False).encode()


def check_ids(ids: list[int]) -> None:
    assert ids
    assert all(type(token) is int for token in ids)
    assert min(ids) >= 0 and max(ids) < ENGINE.target_config.vocab_size


def check_job(job: Job) -> None:
    """Everything that the scheduler trusts, up to the arrays of the device."""
    assert 0 < len(job.prompts) <= MOST_CHOICES and len(job.echo) == len(job.prompts)
    assert len(job.stop) <= MOST_STOPS and all(0 < len(text) <= 1000 for text in job.stop)
    assert job.num_logprobs is None or 0 <= job.num_logprobs <= CONFIG.max_logprobs
    for prompt in job.prompts:
        check_ids(prompt.ids)
        assert 0 < prompt.max_new_tokens <= ENGINE.max_length - len(prompt.ids)
        assert 0 <= prompt.num_continued < len(prompt.ids)
    arrays = lay_out(job.prompts, num_tokens=ENGINE.max_length)
    sampling = arrays.pop("sampling")
    assert arrays["stop_ids"].shape[1] == MOST_STOP_IDS
    assert sampling["bias"].shape[1] == MOST_BIASED
    for array in (*arrays.values(), *sampling.values()):
        assert np.isfinite(array).all()
    assert (sampling["top_p"] > 0).all() and (sampling["repetition_penalty"] > 0).all()
    for array in (arrays["stop_ids"], sampling["bias_ids"]):
        assert array.max() < ENGINE.target_config.vocab_size


def read_or_refuse(kind: type[BaseModel], content: bytes) -> Any:
    """What the server makes of a body; its refusal."""
    try:
        return READ[kind](ENGINE, CONFIG, parse_body(kind, content))
    except ApiError as error:
        return error


def chat(field: str) -> tuple[type[BaseModel], bytes]:
    """A good chat with one more field."""
    return ChatRequest, f'{{"messages": [{{"role": "user", "content": "Hi"}}], {field}}}'.encode()


@example(chat('"continued_tokens": "0"'))
@example(chat('"continued_tokens": -5'))
@example(chat('"max_tokens": ' + "9" * 4000))
@example(
    (ChatRequest, b'{"messages": [{"role": "user", "content": "", "%s": 1}]}' % (b"n" * LARGE))
)
@given(st.sampled_from(list(READ)).flatmap(lambda kind: st.tuples(st.just(kind), bodies(kind))))
def test_bodies(drawn: tuple[type[BaseModel], bytes]) -> None:
    begun = time.process_time()
    tracemalloc.start()
    try:
        found = read_or_refuse(*drawn)
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most_bytes <= ROOM + BYTES_PER_BYTE * len(drawn[1])
    assert time.process_time() - begun < CPU_SECONDS
    if isinstance(found, ApiError):
        check_error(found)
    elif isinstance(found, Job):
        check_job(found)
    else:
        check_ids(found)
