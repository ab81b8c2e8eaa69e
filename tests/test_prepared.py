"""The rows of a run: what becomes of a data set, what is refused, and how they are kept."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from poss_jax.config.data import DataConfig
from poss_jax.config.reading import UserError
from poss_jax.data import prepared as preparing
from poss_jax.data.prepared import Prepared
from poss_jax.data.rows import Rows
from poss_jax.data.tokenizer import load_tokenizer, train_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tokenizer")
    texts = [f"### user\nWhat is {n}?\n### assistant\nIt is {n}.\n" for n in range(99)]
    train_tokenizer(texts, 320, folder)
    return load_tokenizer(folder)


CHATS = [{"question": f"What is {n}?", "answer": f"It is {n}."} for n in range(40)]
LONG = {"question": "What?", "answer": "It is 7. " * 50}
UNANSWERED = {"question": "What is it? " * 50, "answer": "It is 7."}
TOKENS = [{"input_ids": [0, 5 + n, 7, 9, 1], "loss_mask": [0, 0, 1, 1, 1]} for n in range(40)]


def source(folder: Path, records: list[Any]) -> str:
    path = folder / "records.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def prepare(folder: Path, tokenizer: Any, records: list[Any], **settings: Any) -> Prepared:
    values = {"validation_fraction": 0.3, "sequence_length": 64}
    config = DataConfig(source=source(folder, records), **(values | settings))
    return preparing.prepare(folder, config, tokenizer, 320)


def texts_of(rows: Rows, tokenizer: Any, *, learnt: bool) -> list[str]:
    """Documents of all rows, or their trained parts."""
    return [
        tokenizer.decode(tokens[(documents == number) & (mask | (not learnt))])
        for tokens, mask, documents in zip(rows.tokens, rows.loss_mask, rows.documents, strict=True)
        for number in range(1, documents.max() + 1)
    ]


def test_chats_are_packed_whole_and_their_answers_learnt(tokenizer: Any, tmp_path: Path) -> None:
    prepared = prepare(tmp_path, tokenizer, [*CHATS, LONG, UNANSWERED, {"question": ""}])
    rows, report = prepared.train, prepared.report
    both = [
        (texts_of(part, tokenizer, learnt=False), texts_of(part, tokenizer, learnt=True))
        for part in (prepared.train, prepared.validation)
    ]
    found = sorted(pair for whole, learnt in both for pair in zip(whole, learnt, strict=True))
    short = [pair for pair in found if "7. It" not in pair[0]]
    assert short == sorted(
        (f"<s>### user\nWhat is {n}?\n### assistant\nIt is {n}.</s>\n", f"It is {n}.</s>")
        for n in range(40)
    )
    [(_, learnt)] = set(found) - set(short)
    assert LONG["answer"].startswith(learnt)
    assert rows.documents.max() > 1 and (rows.tokens[rows.documents == 0] == 0).all()
    assert (report["records"], report["packing"], report["kind"]) == (43, "documents", "chat")
    reasons = ["no question and answer", "nothing to learn in the first 64 tokens"]
    assert report["dropped"] == dict.fromkeys(reasons, 1)
    parts = [report["train"], report["validation"]]
    assert sum(part["documents"] for part in parts) == 41
    assert sum(part["truncated"] for part in parts) == 1
    assert report["train"]["rows"] == len(rows) and report["train"]["filled"] > 0.8
    learnt_share = rows.loss_mask.sum() / (rows.documents > 0).sum()
    assert report["train"]["learnt"] == pytest.approx(learnt_share, abs=1e-4)


def test_texts_of_no_token_are_dropped(tmp_path: Path) -> None:
    lettered = Tokenizer(models.BPE({"a": 0, "b": 1}, []))  # knows no other letter, no bos or eos
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=lettered)
    records = [{"text": f"{n:06b}".translate({48: "a", 49: "b"}) * 22} for n in range(64)]
    prepared = prepare(tmp_path, tokenizer, [*records, {"text": "xyz"}])
    assert prepared.report["dropped"] == {"nothing to learn in it": 1}
    assert prepared.report["train"]["documents"] + prepared.report["validation"]["documents"] == 64


def test_another_template_at_home_is_noticed(tokenizer, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    template = tmp_path / "chat.jinja"
    template.write_text(tokenizer.chat_template)
    prepare(tmp_path, tokenizer, CHATS, template="~/chat.jinja")
    template.write_text(tokenizer.chat_template + "{# new #}")
    with pytest.raises(UserError, match="made with another tokenizer, template or data section"):
        prepare(tmp_path, tokenizer, CHATS, template="~/chat.jinja")


def test_rows_are_made_once(tokenizer, tmp_path, monkeypatch) -> None:
    first = prepare(tmp_path, tokenizer, CHATS)
    monkeypatch.setattr("poss_jax.data.prepared.load_documents", None)
    again = prepare(tmp_path, tokenizer, CHATS[:1])  # another content of the same source
    assert again.report == first.report
    for part in ("train", "validation"):
        for name, array in vars(getattr(first, part)).items():
            other = getattr(getattr(again, part), name)
            assert other.dtype == array.dtype and (other == array).all()
    assert [path.name for path in tmp_path.glob("*data*")] == ["data.npz"]
    with pytest.raises(UserError, match="made with another tokenizer, template or data section"):
        prepare(tmp_path, tokenizer, CHATS, sequence_length=32)
    content = (tmp_path / "data.npz").read_bytes()
    for damaged in (content[:-100], content[:2000] + b"?" + content[2001:], b""):
        (tmp_path / "data.npz").write_bytes(damaged)
        with pytest.raises(UserError, match="got a damaged file"):
            prepare(tmp_path, tokenizer, CHATS)


@pytest.mark.parametrize(
    ("records", "settings", "shape"),
    [
        ([{"text": record["answer"] * 4} for record in CHATS], {}, "stream"),
        (CHATS, {"packing": "stream"}, "stream"),
        (CHATS, {"packing": "none"}, "none"),
        (TOKENS, {}, "documents"),
        (TOKENS, {"packing": "none", "train_on": "all"}, "none"),
    ],
)
def test_packings(tokenizer, tmp_path, records, settings, shape) -> None:
    prepared = prepare(tmp_path, tokenizer, records, **settings)
    rows, most = prepared.train, prepared.train.documents.max()
    assert rows.tokens.shape[1] == 64 and prepared.report["packing"] == shape
    assert (most > 1) == (shape == "documents")
    assert bool((rows.documents == 0).any()) == (shape != "stream")
    is_all = settings.get("train_on") == "all" or "text" in records[0]
    assert (rows.loss_mask == (rows.documents > 0)).all() == is_all
    if "input_ids" in records[0]:
        ids = np.concatenate([part.tokens.ravel() for part in (rows, prepared.validation)])
        assert {5 + n for n in range(40)} <= set(ids.tolist())


ONES = [record | {"loss_mask": [1] * 5} for record in TOKENS]
ZEROS = [record | {"loss_mask": [0] * 5} for record in TOKENS]
WRITTEN = [{"text": f"<s>### user\nHi {n}\n### assistant\nHello.</s>\n"} for n in range(40)]


@pytest.mark.parametrize(
    ("records", "settings", "error"),
    [
        ([*TOKENS, {"input_ids": [320], "loss_mask": [1]}], {}, "token ids of 0 to 319, got 320"),
        ([*TOKENS, {"input_ids": [-1], "loss_mask": [1]}], {}, "of 0 to 319, got -1; tokenise wit"),
        ([*TOKENS, {"input_ids": [2**40], "loss_mask": [1]}], {}, "got 1099511627776"),
        (ONES, {}, "want to train on some of the tokens, not all; got 100%"),
        (ZEROS, {}, "40 of 40 records cannot be used .*nothing to learn in the first 64 tokens"),
        ([UNANSWERED] * 9 + CHATS[:8], {}, "nothing to learn in the first 64 tokens 9; first "),
        (CHATS, {"template": "vicuna"}, "data.template 'vicuna': want null"),
        (CHATS, {"template": "llama3"}, "this tokenizer has no <|start_header_id|>"),
        (WRITTEN, {}, "texts spell out '<s>', like chats .* set data.format to rendered"),
        ([{"title": "x"}] * 3, {}, "3 of 3 records cannot be used .no known format 3; .*keys"),
        (CHATS, {"format": "chat"}, "40 of 40 records cannot be used .no list of messages 40"),
    ],
)  # fmt: skip
def test_what_is_refused(tokenizer, tmp_path, records, settings, error) -> None:
    with pytest.raises(UserError, match=error.replace("|", r"\|")) as caught:
        prepare(tmp_path, tokenizer, records, **settings)
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["records.jsonl"]


def test_chats_that_are_written_already(tokenizer: Any, tmp_path: Path) -> None:
    prepared = prepare(tmp_path, tokenizer, WRITTEN, format="rendered")
    assert set(texts_of(prepared.train, tokenizer, learnt=True)) == {"Hello.</s>"}
    assert prepared.report["kind"] == "rendered"
    plain = tmp_path / "plain"
    plain.mkdir()
    assert prepare(plain, tokenizer, WRITTEN, format="text").train.loss_mask.all()
