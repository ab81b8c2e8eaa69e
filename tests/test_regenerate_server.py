"""Questions answered by a chat server: dialogues, refusals, tries, going on."""

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
from chat_server import ChatServer, Reply, echo, said, serve
from programs import refusal, summary, write_lines

from poss_jax.engine.prompts import prompt_seed
from train import server as module
from train.regenerate import main


@pytest.fixture
def chat(monkeypatch: pytest.MonkeyPatch) -> Iterator[ChatServer]:
    monkeypatch.setattr("openai._base_client.MAX_RETRY_DELAY", 0.001)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with serve(ChatServer()) as chat:
        yield chat


CALLS = [{"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}]
RECORDS = [{"id": f"q{n}", "prompt": f"question {n}"} for n in range(12)]


def run(chat: ChatServer, folder: Path, *arguments: str, records: Any = RECORDS) -> list[Any]:
    """Runs the program; returns the answered chats."""
    folder.mkdir(exist_ok=True)
    source, output = write_lines(folder / "asked.jsonl", *records), folder / "out.jsonl"
    given = ["--server", chat.url, "--source", source, "--output", str(output)]
    main([*given, "--concurrency", "3", *arguments])
    return read(output)


def read(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def failed(folder: Path) -> list[Any]:
    return read(folder / "out.failed.jsonl")


def last(body: dict[str, Any]) -> str:
    return body["messages"][-1]["content"]


# --------------------------------------------------------------------------------------------------
# Answers


def test_a_server_answers_a_data_set(chat, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-1\n")
    records = [{"turns": ["a", "b"], "question_id": 5}, "not json", *RECORDS]
    lines = run(chat, tmp_path, "--seed", "7", "--system-prompt", "Be kind.", records=records)
    printed = summary(capsys)
    assert (printed["questions"], printed["answered"]) == (14, 13)
    assert printed["not_answered"] == {"bad JSON": 1} and printed["answered_before"] == 0
    assert [line["index"] for line in lines] == [0, *range(2, 14)]
    contents = [turn["content"] for turn in lines[0]["messages"]]
    assert contents == ["Be kind.", "a", "<a:7>", "b", "<b:7>"]
    roles = [turn["role"] for turn in lines[0]["messages"]]
    assert roles == ["system", *["user", "assistant"] * 2]
    assert lines[0]["question_id"] == 5 and lines[1]["id"] == "q0"
    where = f"{tmp_path / 'asked.jsonl'}:2"
    assert failed(tmp_path) == [{"index": 1, "where": where, "reason": "bad JSON"}]
    answers = {line["index"]: line["messages"][-1]["content"] for line in lines[1:]}
    assert answers == {n: f"<question {n - 2}:{prompt_seed(7, n)}>" for n in range(2, 14)}
    second = next(body for body in chat.bodies if last(body) == "b")
    assert second["messages"] == lines[0]["messages"][:-1]
    assert set(chat.keys) == {"Bearer sk-1"}
    assert json.loads((tmp_path / "out.made_from.json").read_text())["model"] == "tiny"


def test_what_a_request_holds(chat, tmp_path):
    settings = ["--temperature", "0.7", "--top-p", "0.9", "--max-new-tokens", "50"]
    run(chat, tmp_path / "plain", *settings, records=RECORDS[:1])
    usual = {"temperature": 0.7, "top_p": 0.9, "seed": 0, "max_tokens": 50}
    usual["messages"] = [{"role": "user", "content": "question 0"}]
    assert chat.bodies.pop() == usual | {"model": "tiny"}
    assert set(chat.keys) == {"Bearer none"}
    more = "--model other --top-k 5 --min-p 0.1 --repetition-penalty 1.1 --frequency-penalty 0.5 "
    more += "--presence-penalty -0.5 --logit-bias 3=-2 --stop END "
    more += "--chat-template-kwargs enable_thinking=false"
    run(chat, tmp_path / "more", *settings, *more.split(), records=RECORDS[:1])
    assert chat.bodies.pop() == usual | {
        "model": "other",
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.5,
        "presence_penalty": -0.5,
        "logit_bias": {"3": -2.0},
        "stop": ["END"],
        "chat_template_kwargs": {"enable_thinking": False},
    }


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_thoughts_that_the_server_splits_off_are_kept(chat, tmp_path, name):
    """The next request has them, too, so that the chat template puts them where they were."""
    chat.reply = lambda body: said(f"<{last(body)}>", **{name: f"hm, {last(body)}"})
    [line] = run(chat, tmp_path, records=[{"turns": ["a", "b"]}])
    thoughts = [turn.get("reasoning_content") for turn in line["messages"]]
    assert thoughts == [None, "hm, a", None, "hm, b"]
    assert [turn["content"] for turn in line["messages"]] == ["a", "<a>", "b", "<b>"]
    assert chat.bodies[1]["messages"] == line["messages"][:-1]


def test_questions_are_asked_together_and_kept_in_order(chat, tmp_path):
    three = Barrier(3)

    def reply(body: dict[str, Any]) -> Reply:
        three.wait(30)
        if last(body) == "question 0":  # is the slowest
            time.sleep(0.05)
        return echo(body)

    chat.reply = reply
    lines = run(chat, tmp_path)
    assert [line["index"] for line in lines] == list(range(12)) and chat.most == 3


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (said("  "), "an empty answer"),
        (said("half", "length"), "an answer not finished after 1024 tokens"),
        (said("half", "content_filter"), "the server's content filter ended an answer"),
        (said("\ud800"), "an answer that is not UTF-8"),
        (said("four", tool_calls=CALLS), "an answer that calls tools"),
        (said("four", "function_call"), "an answer that calls tools"),
        (said(None, reasoning="all of it"), "an empty answer"),
        (said("four", reasoning="\ud800"), "an answer that is not UTF-8"),
    ],
)
def test_chats_that_end_early(chat, tmp_path, reply, reason):
    chat.reply = lambda body: reply if last(body) in ("bad", "question 1") else echo(body)
    lines = run(chat, tmp_path, records=[{"turns": ["a", "bad", "c"]}, *RECORDS[1:3]])
    assert [line["index"] for line in lines] == [0, 2]
    assert lines[0]["ended_early"] == reason and len(lines[0]["messages"]) == 2
    [line] = failed(tmp_path)
    assert line["reason"] == reason
    assert line["messages"] == [{"role": "user", "content": "question 1"}]


def test_a_refused_question_is_kept_with_what_the_server_says(chat, tmp_path, capsys):
    bodies = [{"error": {"message": "too\nlong"}}, {"error": "too long"}, {"message": "too long"}]
    contents = {f"question {n}": content for n, content in enumerate([*bodies, b"too long"], 1)}
    chat.reply = lambda body: (400, contents[last(body)]) if last(body) in contents else echo(body)
    assert len(run(chat, tmp_path)) == 8
    reason = "the server refuses it with status 400"
    assert summary(capsys)["not_answered"] == {reason: 4}
    assert [(line["reason"], line["said"]) for line in failed(tmp_path)] == [
        (reason, "too long")
    ] * 4
    assert len(chat.bodies) == 12  # no second try


def test_a_server_that_refuses_all_first_questions_stops_the_run(chat, tmp_path, monkeypatch):
    def stopped(*arguments: str, records: Any = RECORDS) -> str:
        return refusal(lambda given: run(chat, tmp_path, *given, records=records), *arguments)

    records = ["not json", *RECORDS]
    chat.reply = lambda body: (400, {"error": "Unsupported parameter: 'max_tokens'"})
    assert stopped(records=records) == (
        "the server refuses all of the first 12 questions (the server refuses it with status 400: "
        "Unsupported parameter: 'max_tokens'); mend the settings, or leave these questions out of "
        "the source, then run again"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["asked.jsonl"]
    monkeypatch.setattr(module, "_REFUSALS", 5)
    chat.reply = lambda body: (413, {}) if int(last(body).split()[1]) < 5 else echo(body)
    assert "first 5 questions (the server refuses it with status 413: {})" in stopped()
    monkeypatch.setattr(module, "_REFUSALS", 6)
    answered = run(chat, tmp_path, "--max-new-tokens", "9", records=records)  # other settings
    assert len(answered) == 7
    assert [line["index"] for line in failed(tmp_path)] == list(range(6))

    chat.reply = lambda body: (400, {})  # now that there are answers
    output = tmp_path / "out.jsonl"
    output.write_text(output.read_text().splitlines(keepends=True)[0])
    assert len(run(chat, tmp_path, "--max-new-tokens", "9", records=records)) == 1
    assert len(failed(tmp_path)) == 12


# --------------------------------------------------------------------------------------------------
# Tries


@pytest.mark.parametrize("status", [0, 503])
def test_busy_server_is_asked_again(chat, tmp_path, status):
    chat.reply = lambda body: (status, {}) if chat.bodies.count(body) < 3 else echo(body)
    assert len(run(chat, tmp_path)) == 12 and len(chat.bodies) == 36


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        ((500, {"error": {"message": "broken"}}), "got status 500: broken"),
        ((401, {"error": {"message": "Incorrect API key"}}), "got status 401: Incorrect API key"),
        ((200, b"<html>"), "want JSON (Expecting value: line 1 column 1"),
        ((200, []), "want the chat/completions of OpenAI, got []"),
        ((200, {"choices": []}), "want the chat/completions of OpenAI"),
        (said([{"type": "text"}]), "want the chat/completions of OpenAI"),
    ],
)
def test_a_server_that_stops_answering_stops_the_run(chat, tmp_path, capsys, reply, error):
    wanted = run(chat, tmp_path / "whole")
    chat.reply = lambda body: reply if last(body) == "question 7" else echo(body)
    message = refusal(lambda given: run(chat, tmp_path / "broken", *given))
    assert error in message and message.endswith("then run the same command again")
    capsys.readouterr()
    with serve(ChatServer()) as elsewhere:  # at another address
        assert run(elsewhere, tmp_path / "broken", "--concurrency", "5") == wanted
    assert summary(capsys)["answered_before"] == 7
    asked = {last(body) for body in elsewhere.bodies}
    assert asked == {f"question {n}" for n in range(7, 12)}  # the answers before it were kept
    for other in ("--model other", "--seed 1", "--chat-template-kwargs enable_thinking=false"):
        message = refusal(lambda given: run(chat, tmp_path / "broken", *given), *other.split())
        assert "made otherwise" in message


# --------------------------------------------------------------------------------------------------
# Bad input


@pytest.mark.parametrize(
    ("models", "error"),
    [
        ((401, {"error": {"message": "no key"}}), "got status 401: no key; check --server"),
        ((400, {"error": {"message": "no"}}), "got status 400: no"),
        ((0, {}), "got Server disconnected"),
        ((200, {"data": []}), "want the models of OpenAI, got {'data': []}; check --server"),
        ((200, b"\xff"), "want JSON"),
        ((200, b"[" * 10**5), "want JSON"),
    ],
)
def test_a_server_that_names_no_model(chat, tmp_path, models, error):
    chat.models = models
    assert error in refusal(lambda given: run(chat, tmp_path, *given))
    assert [path.name for path in tmp_path.iterdir()] == ["asked.jsonl"]
    assert len(chat.keys) == 1


def test_no_server_and_no_client(chat, tmp_path, monkeypatch):
    away = ["--server", "http://127.0.0.1:9/v1"]
    assert "refused" in refusal(lambda given: run(chat, tmp_path, *given), *away)
    monkeypatch.setitem(sys.modules, "openai", None)
    message = refusal(lambda given: run(chat, tmp_path, *given))
    assert message == "openai is missing; pip install 'poss-jax[regenerate]'"
    assert [path.name for path in tmp_path.iterdir()] == ["asked.jsonl"]


def test_the_target_s_tokenizer_finds_special_tokens(chat, runs, tmp_path):
    records = [{"prompt": "say </s>"}, {"prompt": "hello"}]
    assert len(run(chat, tmp_path / "any", records=records)) == 2
    target = ["--target", runs.model("target")]
    assert len(run(chat, tmp_path / "checked", *target, records=records)) == 1
    assert failed(tmp_path / "checked")[0]["reason"] == "a special token is spelled out"
