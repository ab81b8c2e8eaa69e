"""Files of prompts and of records, from random bytes and from mutated JSON: values, or one line."""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from poss_jax.config.data import DataConfig
from poss_jax.config.reading import UserError
from poss_jax.data.conversations import (
    Broken,
    content_key,
    detect_format,
    read_document,
    read_questions,
)
from poss_jax.data.records import read_records
from poss_jax.engine.dialogue import PROMPT_KEYS, read_prompts

NUMBERS = [-1, 0, 2**31, 2**63, 2**64, 10**400, 1e308, -0.0, float("nan"), float("inf"), True]
TEXTS = ["", " ", "a", "\ud83d", "\0", "user", "assistant", "gpt", "x" * 500, "\N{GRINNING FACE}"]
KEYS = [
    *PROMPT_KEYS,
    *("conversations", "text", "question", "answer", "instruction", "input", "output"),
    *("input_ids", "loss_mask", "role", "from", "content", "value", "sampling"),
]
VALUES = st.recursive(
    st.none() | st.sampled_from(NUMBERS) | st.sampled_from(TEXTS) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(KEYS), inner),
    max_leaves=12,
)
GOOD = [
    {"prompt": "Once"},
    {"prompt_ids": [0, 5], "sampling": {"temperature": 1}},
    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]},
    {"turns": ["First?", "Second?"]},
    {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]},
    {"question": "Hi", "answer": "Ho"},
    {"input_ids": [1, 2], "loss_mask": [0, 1]},
]


@st.composite
def mutated(draw: st.DrawFn) -> dict[str, Any]:
    """A good record in which something is replaced, at most two levels down, or added."""
    record = json.loads(json.dumps(draw(st.sampled_from(GOOD))))
    place: Any = record
    for _ in range(draw(st.integers(0, 2))):
        values = place.values() if isinstance(place, dict) else place
        inner = [value for value in values if isinstance(value, list | dict)]
        place = draw(st.sampled_from(inner)) if inner else place
    if isinstance(place, list):
        place[draw(st.integers(0, len(place) - 1))] = draw(VALUES)
    else:
        place[draw(st.sampled_from([*place, *KEYS]))] = draw(VALUES)
    return record


@st.composite
def contents(draw: st.DrawFn) -> bytes:
    """Bytes of a file: random ones, or JSON lines or a list of JSON, which may be damaged."""
    if draw(st.integers(0, 3)) == 0:
        return draw(st.binary(max_size=60))
    records = draw(st.lists(st.one_of(mutated(), VALUES), min_size=1, max_size=4))
    is_list, escapes = draw(st.booleans()), draw(st.booleans())
    texts = [json.dumps(record, ensure_ascii=escapes) for record in records]
    text = f"[{', '.join(texts)}]" if is_list else "\n".join(texts)
    content = text.encode("utf-8", "surrogatepass")
    at = draw(st.integers(0, len(content)))
    junk = [b"[" * 5000, b'{"a":' * 5000, b"1" * 5000, b"\xff", b"\xef\xbb\xbf", b"\n", b'"']
    return content[:at] + draw(st.sampled_from([b"", b"", *junk])) + content[at:]


def or_one_line(read: Callable[[], list[Any]]) -> list[Any]:
    """Returns what is read; an empty list if it is refused, which must take one line."""
    try:
        return read()
    except UserError as error:
        assert str(error) and len(str(error).splitlines()) == 1
        assert str(error).encode()
        return []


@given(contents())
def test_prompt_files(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "prompts.jsonl"
        path.write_bytes(content)
        for record in or_one_line(lambda: read_prompts(path)):
            [key] = [key for key in PROMPT_KEYS if key in record]
            assert record[key]
            json.dumps(record, ensure_ascii=False).encode()


@given(contents())
def test_records(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "records.json"
        path.write_bytes(content)
        for _, record in or_one_line(lambda: list(read_records(DataConfig(source=str(path))))):
            if isinstance(record, Broken):
                assert len(str(record).splitlines()) == 1
                continue
            read_questions(record)
            document, _ = read_document(record, detect_format(record))
            if isinstance(document, Broken):
                assert len(str(document).splitlines()) == 1
            else:
                content_key(document).encode()
