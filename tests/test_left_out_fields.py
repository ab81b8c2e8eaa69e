"""Fields of chats: what is read, what a template leaves out, and answers in written chats."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from chat_oracle import TOOL, call, tokenizer_of
from models import tiny_llama

from poss_jax.config.data import DataConfig
from poss_jax.config.reading import UserError
from poss_jax.config.training import TrainConfig
from poss_jax.data.conversations import (
    Broken,
    Chat,
    content_key,
    plain_texts,
    read_document,
    read_questions,
)
from poss_jax.data.prepared import Prepared, prepare
from poss_jax.data.templates import ChatTemplate
from train.stages import prepare_rows

USER = {"role": "user", "content": "Hi"}
ANSWER = {"role": "assistant", "content": "Hello."}
CALLING = {"role": "assistant", "content": None, "tool_calls": [call("Rome")]}
RESULT = {"role": "tool", "tool_call_id": "call00001", "content": "sunny"}


@pytest.mark.parametrize(
    ("beside", "read"),
    [
        ({"tools": [TOOL]}, [TOOL]),
        ({"tools": json.dumps([TOOL])}, [TOOL]),
        *(({"tools": tools}, None) for tools in (None, [], " ", "[]", "null")),
        ({"tools": "[1"}, "tools that are not a list"),
        ({"tools": 7}, "tools that are not a list"),
        ({"functions": [TOOL]}, "functions with a chat, which no template takes; give tools"),
    ],
)
def test_tools_stand_beside_a_chat(beside, read):
    for record in ({"messages": [USER, ANSWER]}, {"question": "Hi", "answer": "Hello."}):
        kind = "chat" if "messages" in record else "pairs"
        document, _ = read_document(record | beside, kind)
        if isinstance(read, str):
            assert isinstance(document, Broken) and document.reason == read
        else:
            assert document == Chat([USER, ANSWER], read)
    assert content_key(Chat([USER, ANSWER], [TOOL])) != content_key(Chat([USER, ANSWER]))


def test_fields_of_turns_are_kept():
    turns = [
        {"from": "human", "value": "Hi", "name": "ann", "id": None},
        {**CALLING, "reasoning_content": "hm"},
        RESULT,
        ANSWER,
    ]
    document, _ = read_document({"conversations": turns}, "chat")
    calling = {"role": "assistant", "tool_calls": [call("Rome")], "reasoning_content": "hm"}
    assert document == Chat([{**USER, "name": "ann"}, calling, RESULT, ANSWER])
    assert plain_texts([document]) == [
        "### user\nHi\n### assistant\n\n### tool\nsunny\n### assistant\nHello.\n"
    ]


@pytest.mark.parametrize(
    ("turns", "kept", "why"),
    [
        ([USER, {**ANSWER, "weight": 0}, USER, ANSWER], 4, ""),
        ([USER, ANSWER, USER, {**ANSWER, "weight": 0}], 2, ""),
        ([USER, {**ANSWER, "weight": 1.0, "train": True}], 2, ""),
        ([{**USER, "weight": 0.5}, ANSWER], 2, ""),
        ([USER, ANSWER, USER, {**ANSWER, "weight": 0.5}], 2, "a weight that is not 0 or 1"),
        ([USER, ANSWER, USER, {**ANSWER, "train": "no"}], 2, "a weight that is not 0 or 1"),
        ([USER, {**ANSWER, "weight": 0}], 0, "no answer to train on"),
        ([USER, {**ANSWER, "content": "", "reasoning_content": "hm"}], 0, "an empty turn"),
        ([USER, {"role": "user", "content": None, "tool_calls": [1]}], 0, "a turn without text"),
        ([USER, ANSWER, {**USER, "content": [{"type": "x"}]}, ANSWER], 2, "a turn without text"),
    ],
)  # fmt: skip
def test_turns_that_are_left_out(turns, kept, why):
    document, left_out = read_document({"messages": turns}, "chat")
    if kept:
        assert (document, left_out) == (Chat(turns[:kept]), why)
    else:
        assert isinstance(document, Broken) and document.reason == why


def test_parts_of_text():
    parts = [{"text": "Hi", "type": "text"}, {"text": "Hi", "type": "input_text"}, {"text": "Hi"}]
    document, _ = read_document({"messages": [{**USER, "content": parts}, ANSWER]}, "chat")
    assert isinstance(document, Chat)
    assert document.messages[0]["content"] == [{"type": "text", "text": "Hi"}] * 3
    assert plain_texts([document]) == ["### user\nHiHiHi\n### assistant\nHello.\n"]


def test_questions_end_before_tools():
    parts = [{"type": "text", "text": "Hi"}]
    turns = [{**USER, "content": parts}, ANSWER, USER, CALLING, RESULT, ANSWER, USER, ANSWER]
    assert read_questions({"messages": turns}) == [USER, USER]
    refused = read_questions({"messages": turns, "tools": [TOOL]})
    assert refused == Broken("tools with a question")


def written(*turns: str) -> str:
    """A chat as the template `phi-3` writes it."""
    roles = ["user", "assistant"] * len(turns)
    return "".join(f"<|{r}|>\n{t}<|end|>\n" for r, t in zip(roles, turns, strict=False))


@pytest.mark.parametrize(("end", "turn"), [("", "user"), ("<|endoftext", "assistant")])
def test_an_answer_that_runs_into_the_next_turn(end, turn):
    opened = ChatTemplate(tokenizer_of("phi-3"), None)
    refused = opened.find_answers(f"{written('one')}<|assistant|>\nhello{end}<|{turn}|>\ntwo")
    assert isinstance(refused, Broken)
    assert str(refused).startswith("an answer runs into the next turn: ")
    assert f"hello{end}<|{turn}|>\ntwo".encode("unicode_escape").decode() in str(refused)


@pytest.mark.parametrize(
    ("question", "answer", "tools"),
    [
        ({"content": "<|end|>"}, {}, None),
        ({"name": "<|end|>"}, {}, None),
        ({}, {"tool_calls": [call("<|end|>")]}, None),
        ({}, {"tool_calls": [{"<|end|>": 1}]}, None),
        ({}, {}, [{"a": ["<|end|>"]}]),
    ],
)
def test_special_tokens_in_any_field(question, answer, tools):
    opened = ChatTemplate(tokenizer_of("phi-3"), None)
    spelled = Broken("a special token is spelled out", "<|end|>")
    assert opened.render(Chat([USER | question, ANSWER | answer], tools)) == spelled


def test_a_stop_token_that_is_not_special():
    tokenizer = tokenizer_of("no end, headings")
    tokenizer.add_tokens(["<stop>"])
    [stop] = tokenizer.convert_tokens_to_ids(["<stop>"])
    chat = Chat([USER, {**ANSWER, "content": "a<stop>"}])
    assert isinstance(ChatTemplate(tokenizer, None).render(chat), list)
    refused = ChatTemplate(tokenizer, None, stop_ids=[stop, 10**6]).render(chat)
    assert refused == Broken("a special token is spelled out", "<stop>")


def rows_of(folder: Path, name: str, records: list[Any], **settings: Any) -> Prepared:
    path = folder / "records.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    config = DataConfig(source=str(path), validation_fraction=0.3, sequence_length=256, **settings)
    return prepare(folder, config, tokenizer_of(name), 400)


def learnt(prepared: Prepared, name: str) -> set[str]:
    """Every answer that is trained on, of rows with one document."""
    rows, texts = prepared.train, set()
    for tokens, mask in zip(rows.tokens, rows.loss_mask, strict=True):
        texts.add(tokenizer_of(name).decode(tokens[mask.astype(bool)]))
    return texts


def asked(number: int) -> dict[str, str]:
    return {"role": "user", "content": f"number {number}"}


def test_what_a_template_leaves_out_is_counted(tmp_path):
    thinks = {**ANSWER, "reasoning_content": "hm"}
    records = [{"messages": [asked(n), ANSWER]} for n in range(40)]
    records += [{"messages": [asked(n), ANSWER, USER, thinks]} for n in range(40, 50)]
    records += [{"messages": [asked(n), ANSWER, USER, CALLING]} for n in range(50, 60)]
    records += [{"messages": [asked(n), thinks]} for n in range(60, 70)]
    records += [{"messages": [asked(n), ANSWER], "tools": [TOOL]} for n in range(70, 80)]
    prepared = rows_of(tmp_path, "chatml", records, packing="none")
    report, left_out = prepared.report, "{} that the chat template leaves out".format
    assert report["used_in_part"] == {left_out("reasoning"): 10, left_out("tool calls"): 10}
    assert report["dropped"] == {left_out("reasoning"): 10, left_out("tools"): 10}
    assert report["train"]["documents"] + report["validation"]["documents"] == 60
    assert learnt(prepared, "chatml") == {"Hello.<|im_end|>"}


def test_written_chats_that_cannot_be_read_are_counted(tmp_path):
    chats = [written(f"q {n}", "hello", "more", "world") for n in range(40)]
    records = [{"text": f"{chat}<|endoftext|>"} for chat in chats]
    records += [{"text": f"<|user|>\nq {n}<|end|>\n<|assistant|>\na<|user|>b"} for n in range(9)]
    prepared = rows_of(tmp_path, "phi-3", records, format="rendered", packing="none")
    assert prepared.report["dropped"] == {"an answer runs into the next turn": 9}
    first = prepared.report["first_dropped"][0]
    assert first.startswith("'<|user|>\\nq ") and "an answer runs into the next turn: " in first
    assert learnt(prepared, "phi-3") == {"hello<|end|>world<|end|>"}


def test_a_run_knows_where_its_target_stops(tmp_path):
    tokenizer = tokenizer_of("harmony")
    thinks = {**ANSWER, "reasoning_content": "hm"}
    path = tmp_path / "records.jsonl"
    lines = [json.dumps({"messages": [asked(n), thinks]}) for n in range(40)]
    path.write_text("\n".join(lines))
    data = DataConfig(source=str(path), validation_fraction=0.3, packing="none")
    config = TrainConfig(stage="draft", output="", target="", num_tokens=1, data=data, batch_size=1)
    [stop] = tokenizer.convert_tokens_to_ids(["<|end|>"])
    llama = tiny_llama(vocab_size=400)
    prepared = prepare_rows(tmp_path, config, tokenizer, replace(llama, eos_token_ids=(stop,)))
    assert learnt(prepared, "harmony") == {"<|channel|>analysis<|message|>hm<|end|>"}
    with pytest.raises(UserError, match="made with another tokenizer, template or data section"):
        prepare_rows(tmp_path, config, tokenizer, llama)
