"""The frozen checkpoint of format version 1: it stays readable, number for number."""

import json
from pathlib import Path

import pytest
from make_format_v1 import DRAFT, PROMPT, TARGET, TREE, params_of
from models import assert_same

from poss_jax.checkpoint.folder import load_draft, load_target
from poss_jax.checkpoint.record import read_record
from poss_jax.checkpoint.writing import verify_model
from poss_jax.config.decoding import EngineConfig
from poss_jax.data.tokenizer import load_tokenizer
from poss_jax.engine.engine import Engine


@pytest.fixture(scope="module")
def folder(fixtures) -> Path:
    return fixtures / "format_v1"


def test_records(folder):
    target, draft = verify_model(folder / "target"), verify_model(folder / "draft")
    assert (target.format_version, target.config) == (1, TARGET)
    assert (draft.format_version, draft.config) == (1, DRAFT)
    assert draft.target == target.target
    assert (draft.method, draft.kv, target.target.name) == ("poss12", "per_specialist", "format-v1")


def test_arrays(folder):
    record, target = load_target(folder / "target")
    _, draft = load_draft(folder / "draft", target=record)
    assert_same(target, params_of(TARGET))
    assert_same(draft, params_of(DRAFT))


def test_tokenizer(folder):
    tokenizer = load_tokenizer(folder / "target")
    text = "a small tokenizer, and bytes: \u00e9"
    assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text


def test_decoding(folder):
    engine = Engine.load(folder / "target", folder / "draft", EngineConfig(tree=TREE))
    (answer,) = engine.generate([PROMPT], max_new_tokens=24)
    expected = json.loads((folder / "decoded.json").read_text())
    assert answer.output_ids == expected["output_ids"]
    assert answer.accepted_per_round == expected["accepted_per_round"]


def test_nothing_of_the_machine_that_made_it(folder):
    record = read_record(folder / "draft")
    assert record.provenance["command"] == ["tests/make_format_v1.py"]
    for path in folder.rglob("*"):
        if path.is_file():
            assert not any(
                word in path.read_bytes() for word in (b"/tmp", b"/work", b"/home", b"/root")
            )
