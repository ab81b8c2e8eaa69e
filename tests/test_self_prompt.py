"""Chats whose user's turns the target writes itself: openings, what is dropped, the program."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_server import ChatServer, said, serve
from chat_templates import KINDS
from programs import Runs, interrupted_after, refusal, summary, write_lines

from poss_jax.config.data import DataConfig
from poss_jax.config.paths import as_path
from poss_jax.config.reading import UserError
from poss_jax.config.regenerate import RegenerateConfig
from poss_jax.data.sources import load_documents
from poss_jax.data.templates import BUILT_IN
from poss_jax.data.tokenizer import load_tokenizer
from poss_jax.engine.answers import Generation
from poss_jax.engine.dialogue import Dialogue
from poss_jax.engine.prompts import prompt_seed
from train.regenerate import main
from train.self_prompt import (
    SeenQuestions,
    TurnWriter,
    find_opening,
    plan_questions,
    repeats_itself,
)

IM_SYSTEM = "<|im_start|>system\nYou help.<|im_end|>\n<|im_start|>user\n"
HEADER = "<|start_header_id|>{}<|end_header_id|>\n\n"
ANSWER = HEADER.format("assistant")
IM_NEXT = "<|im_end|>\n<|im_start|>assistant\n"
PLAIN = (
    "{% for m in messages %}{{ '### ' + m.role + '\n' + m.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### assistant\n' }}{% endif %}"
)


@pytest.fixture
def tokenizer(runs: Runs) -> Any:
    return load_tokenizer(as_path(runs.model("target")))


def turns(*texts: str) -> list[dict[str, str]]:
    roles = ["user", "assistant"] * len(texts)
    return [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]


# --------------------------------------------------------------------------------------------------
# Openings


@pytest.mark.parametrize(
    ("template", "before", "after"),
    [
        (KINDS["chatml, default system message"].text, IM_SYSTEM, IM_NEXT),
        (PLAIN, "### user\n", "\n### assistant\n"),
        (BUILT_IN["llama2"], "<s>[INST] ", " [/INST]"),
        (BUILT_IN["llama3"], "<s>" + HEADER.format("user"), "<|eot_id|>" + ANSWER),
    ],
)
def test_openings_of_all_kinds_of_templates(tokenizer, template, before, after):
    tokenizer.chat_template = template
    assert find_opening(tokenizer, []) == (before, after)
    later, same = find_opening(tokenizer, turns("Hello", "Hi"))
    assert same == after and later.endswith(before.removeprefix("<s>")[-8:])
    assert "Hello" in later and "Hi" in later


@pytest.mark.parametrize(
    ("template", "error"),
    [
        ("{{ messages[0].content }}", "opening cannot be found; give questions instead"),
        ("{{ 'a' * messages[0].content | length + messages[0].content }}", "cannot be found"),
        ("{{ messages[0].content + ' or ' + messages[0].content }}", "cannot be found"),
        ("{{ raise_exception('no user') }}", "the chat template refuses a user's turn: no user"),
    ],
)
def test_templates_without_an_opening_are_refused(tokenizer, template, error):
    tokenizer.chat_template = template
    with pytest.raises(UserError, match=error):
        find_opening(tokenizer, [])


def make_writer(tokenizer: Any, **changes: Any) -> TurnWriter:
    config = RegenerateConfig(target="t", output="o", self_prompt=1, **changes)
    return TurnWriter(config, tokenizer)


def test_a_turn_ends_as_the_template_ends_it(tokenizer):
    tokenizer.chat_template = "{{ bos_token + ' [INST] ' + messages[0].content + ' [/INST] ' }}"
    writer = make_writer(tokenizer)
    assert (writer.stop, writer.stop_ids) == (("[/INST]",), [])
    assert tokenizer.decode(writer.prompt(Dialogue([], 5))) == "<s> [INST]"
    tokenizer.chat_template = "{{ 'user: ' + messages[0].content + eos_token + 'x' }}"
    writer = make_writer(tokenizer)
    assert (writer.stop, writer.stop_ids) == ((), [tokenizer.eos_token_id])
    tokenizer.chat_template = None
    with pytest.raises(UserError, match="whose tokenizer has a chat template, got none"):
        make_writer(tokenizer)


# --------------------------------------------------------------------------------------------------
# What is dropped


@pytest.mark.parametrize(
    ("text", "stop_reason", "ended"),
    [
        ("  What is a noun?\n", "stop", ""),
        ("What is a noun?", "length", "a user's turn not finished after 192 tokens"),
        ("What is </s>?", "stop", "a special token is spelled out"),
        ("Hi there.", "stop", "a user's turn that is too short"),
        ("What is a \ufffd?", "stop", "a user's turn that is not UTF-8"),
        ("Tell me more. " * 20, "stop", "a user's turn that repeats itself"),
    ],
)
def test_turns_that_are_used(tokenizer, text, stop_reason, ended):
    tokenizer.chat_template = PLAIN
    dialogue = Dialogue([], 5)
    make_writer(tokenizer).take(dialogue, Generation([], [], text, [], [], stop_reason))
    assert dialogue.ended == ended
    assert dialogue.remaining == [{"role": "user", "content": text.strip()}]


def test_ordinary_texts_do_not_repeat_themselves():
    code = Path(__file__).read_text()
    assert not any(repeats_itself(code[n : n + 600]) for n in range(0, 6000, 600))
    assert repeats_itself(code[:40] * 20)


def test_repeated_questions_are_found():
    rng = np.random.default_rng(0)
    words = [f"w{n}" for n in rng.permutation(5000)]
    texts = [" ".join(words[n : n + 40]) for n in range(0, 4000, 40)]
    asked = SeenQuestions({"messages": turns(text)} for text in texts)
    for text in texts:
        assert asked.add(text.upper().replace(" ", "\n")) == "a question that was asked before"
        parts = text.split()
        nearly = " ".join([*parts[:20], "other", *parts[21:]])  # 3 of 38 shingles differ
        assert asked.add(nearly) == "a question that was nearly asked before"
    assert asked.add(" ".join(words[4500:4540])) == ""
    assert asked.add("Why?") == "" and asked.add("How?") == ""
    half = " ".join([*texts[0].split()[:20], *words[-20:]])
    assert asked.add(half) == ""


# --------------------------------------------------------------------------------------------------
# The program


def run(runs: Runs, folder: Path, *arguments: str, template: str = PLAIN) -> list[dict[str, Any]]:
    folder.mkdir(exist_ok=True)
    (folder / "template.jinja").write_text(template)
    options = {"--target": runs.model("target"), "--max-new-tokens": "5", "--batch-size": "2"}
    options |= {"--template": str(folder / "template.jinja"), "--output": str(folder / "out.jsonl")}
    given = [text for pair in options.items() for text in pair]
    main([*given, "--keep-unfinished", *arguments])
    return [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]


def failures(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "out.failed.jsonl").read_text().splitlines()]


@pytest.fixture
def finished(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turns that reach their limit are used: a tiny target almost never ends one."""
    refuse = TurnWriter._refuse
    monkeypatch.setattr(TurnWriter, "_refuse", lambda self, text, _: refuse(self, text, "stop"))


TEMPERATURES = ["temperatures=[0, 1]"]
OWN = ["--self-prompt", "12", "--self-prompt-tokens", "12", "--self-prompt-top-p", "0.6"]


@pytest.mark.usefixtures("finished")
def test_a_run_that_is_stopped_ends_with_the_same_chats(runs, tmp_path, capsys):
    options = [*OWN, "--self-prompt-turns", "2", *TEMPERATURES]
    lines = run(runs, tmp_path / "whole", *options)
    printed = summary(capsys)
    assert printed["questions"] == 12 == printed["answered"] + sum(printed["not_answered"].values())
    assert printed["answered"] == len(lines) > 3
    assert {line["source"] for line in lines} == {"self"}
    assert {len(line["messages"]) for line in lines} >= {4}
    roles = [turn["role"] for turn in lines[0]["messages"]]
    assert roles == ["user", "assistant"] * (len(roles) // 2)
    questions = [line["messages"][0]["content"] for line in lines]
    assert len(set(questions)) == len(questions)
    data = DataConfig(source=str(tmp_path / "whole/out.jsonl"), validation_fraction=0.5)
    assert load_documents(data).tally.dropped == {}
    with interrupted_after(8):
        run(runs, tmp_path / "stopped", *options)
    assert run(runs, tmp_path / "stopped", *options) == lines
    assert summary(capsys)["answered_before"] == 8
    assert failures(tmp_path / "stopped") == failures(tmp_path / "whole")
    assert "self_prompt_turns" in refusal(
        lambda given: run(runs, tmp_path / "stopped", *given), *OWN, *TEMPERATURES
    )


@pytest.mark.usefixtures("finished")
def test_a_question_that_was_asked_before_a_stop_is_not_asked_again(runs, tmp_path, monkeypatch):
    greedy = ["--self-prompt-temperature", "0", "--self-prompt", "9", "--self-prompt-tokens", "12"]
    [line] = run(runs, tmp_path, *greedy)
    assert line["index"] == 0
    reasons = {failed["reason"] for failed in failures(tmp_path)}
    assert reasons == {"a question that was asked before"}
    whole = (tmp_path / "out.failed.jsonl").read_bytes()
    (tmp_path / "out.failed.jsonl").write_bytes(b"".join(whole.splitlines(keepends=True)[:7]))
    assert run(runs, tmp_path, *greedy) == [line]  # its second window, 8 and on, is made again
    assert (tmp_path / "out.failed.jsonl").read_bytes() == whole


def test_questions_of_a_source_are_mixed_in(tmp_path, tokenizer):
    records = [{"prompt": f"question {n}"} for n in range(4)]
    source = write_lines(tmp_path / "asked.jsonl", {"text": "no question"}, *records)
    data = DataConfig(source=source, system_prompt="Be brief.")
    config = RegenerateConfig(target="t", output="o", self_prompt=10, source_share=0.3, data=data)
    planned = plan_questions(config, tokenizer)
    assert [question.index for question in planned] == list(range(10))
    given = {3: "question 0", 6: "question 1", 9: "question 2"}
    system = [{"role": "system", "content": "Be brief."}]
    for index, question in enumerate(planned):
        asked = turns(given[index]) if index in given else []
        assert question.messages == [*system, *asked]
        assert question.ids["source"] == ("asked" if asked else "self")
    with pytest.raises(UserError, match="want 5 questions, which is its share, got 4; lower"):
        plan_questions(replace(config, source_share=0.5), tokenizer)


# --------------------------------------------------------------------------------------------------
# A server


def reply(body: dict[str, Any]) -> Any:
    """Writes a turn for token ids, and answers messages."""
    if "prompt" in body:
        text = f"question of seed {body['seed']}?"
        return 200, {"choices": [{"index": 0, "text": text, "finish_reason": "stop"}]}
    return said(f"<{body['messages'][-1]['content']}>")


def test_a_server_writes_turns_and_answers_them(runs, tmp_path):
    target, tokenizer = runs.model("target"), load_tokenizer(as_path(runs.model("target")))
    given = ["--target", target, "--output", str(tmp_path / "out.jsonl")]
    given += ["--self-prompt", "6", "--self-prompt-turns", "2", "--max-new-tokens", "7"]
    with serve(ChatServer(reply=reply)) as chat:
        main([*given, "--server", chat.url, *TEMPERATURES])
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [line["index"] for line in lines] == list(range(6))
    seeds = [prompt_seed(0, index) for index in range(6)]
    for line, seed in zip(lines, seeds, strict=True):
        question = f"question of seed {seed}?"
        assert line["messages"] == turns(question, f"<{question}>") * 2
    written = {body["seed"]: body for body in chat.bodies if "prompt" in body}
    body = written[seeds[1]]
    said_before = f"question of seed {seeds[1]}?"
    assert tokenizer.decode(body.pop("prompt")) == (
        f"<s>### user\n{said_before}\n### assistant\n<{said_before}></s>\n### user\n"
    )
    assert body == {
        "model": "tiny",
        "max_tokens": 192,
        "stop": ["### assistant"],
        "temperature": 1.0,
        "top_p": 0.95,
        "seed": seeds[1],
    }
    answered = {(body["seed"], body["temperature"]) for body in chat.bodies if "messages" in body}
    assert {(seed, float(n % 2)) for n, seed in enumerate(seeds)} == answered
    without = ["--server", "http://localhost:1/v1", *given[2:]]
    assert "--self-prompt: want --target DIR, whose" in refusal(main, *without)
