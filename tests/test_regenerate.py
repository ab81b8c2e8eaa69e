"""Targets that answer the questions of a data set, or their own: what is asked, going on."""

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
from poss_jax.data.conversations import Broken, read_questions
from poss_jax.data.records import load_documents
from poss_jax.data.templates import BUILT_IN
from poss_jax.data.tokenizer import load_tokenizer
from poss_jax.engine.answers import Generation
from poss_jax.engine.dialogue import Dialogue
from poss_jax.engine.engine import Engine
from poss_jax.engine.prompts import prompt_seed
from train import regeneration
from train.questions import (
    SeenQuestions,
    TurnWriter,
    find_opening,
    list_questions,
    plan_questions,
    repeats_itself,
)
from train.regenerate import main
from train.regeneration import AnswerFiles


def users(*turns: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": turn} for turn in turns]


# --------------------------------------------------------------------------------------------------
# Questions


@pytest.mark.parametrize(
    ("record", "asked"),
    [
        ({"messages": [*users("a"), {"role": "assistant", "content": "x"}, *users("b")]}, "ab"),
        ({"conversations": [{"from": "human", "value": "a"}]}, "a"),
        ({"question": "a", "answer": "x"}, "a"),
        ({"prompt": "a"}, "a"),
        ({"turns": ["a", "b"]}, "ab"),
        ({"messages": []}, Broken("empty conversation")),
        ({"messages": [{"role": "narrator", "content": "a"}]}, Broken("unknown role", "narrator")),
        ({"turns": [3]}, Broken("a turn without text")),
        ({"prompt": " "}, Broken("an empty turn")),
        ({"text": "a"}, Broken("no question")),
    ],
)
def test_questions_of_every_format(record, asked):
    if isinstance(asked, Broken):
        assert read_questions(record) == asked
        return
    assert read_questions(record) == users(*asked)
    system = {"role": "system", "content": "Be brief."}
    assert read_questions(record | {"system": "Be brief."}) == [system, *users(*asked)]


# --------------------------------------------------------------------------------------------------
# Files

MADE_FROM = {"target": "t", "questions": 10}
LINES = [
    {"index": n} | ({"reason": "bad"} if n % 3 == 1 else {"messages": users(f"ü{n}")})
    for n in range(10)
]


def write(path: Path, num_lines: int = 10, **settings: Any) -> AnswerFiles:
    """Opens the files and adds what is missing, in windows of 4, up to a line."""
    files = AnswerFiles(path, MADE_FROM, 4, **settings)
    for first in range(files.num_done, num_lines, 4):
        files.add(LINES[first : first + 4])
    return files


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("num_bytes", range(0, 400, 7))
def test_a_run_goes_on_from_its_last_whole_window(tmp_path, num_bytes):
    write(tmp_path / "whole.jsonl")
    wanted = contents(tmp_path)
    for name in ("whole.jsonl", "whole.failed.jsonl"):
        (tmp_path / name).write_bytes(wanted[name][:num_bytes])
    assert AnswerFiles(tmp_path / "whole.jsonl", MADE_FROM, 4).num_done in (0, 4, 8, 10)
    files = write(tmp_path / "whole.jsonl")
    assert contents(tmp_path) == wanted
    assert files.counts == {"answered": 7, "bad": 3} and files.num_done == 10


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("out.jsonl", b"mine"),
        ("out.failed.jsonl", b"mine"),
        *(("out.made_from.json", content) for content in (b"{", b"[1]", b"\xff")),
    ],
)
def test_files_of_something_else_are_left_alone(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match="exists and was not made here; name another file"):
        write(tmp_path / "out.jsonl")
    assert contents(tmp_path) == {name: content}


def test_answers_made_otherwise_are_left_alone(tmp_path):
    path = tmp_path / "out.jsonl"
    write(path, 4)
    with pytest.raises(UserError, match=r"made otherwise \(target: 't', asked 'u'\); name another"):
        AnswerFiles(path, MADE_FROM | {"target": "u"}, 4)
    assert write(path, 0).num_done == 4
    before, again = contents(tmp_path), write(path, 0, overwrite=True)
    assert again.num_done == 0 and contents(tmp_path) == before  # until there are answers
    again.add(LINES[:4])
    assert write(path, 0).num_done == 4


@pytest.mark.parametrize(
    "line",
    [
        *("x", "[]"),
        '{"index": "6", "messages": []}',
        '{"index": 6}',
        *(f'{{"index": {index}, "messages": []}}' for index in (3, 5, 7, 10)),
    ],
)
def test_answers_from_a_damaged_line_on_are_made_again(tmp_path, line):
    write(tmp_path / "out.jsonl")
    wanted = contents(tmp_path)
    lines = wanted["out.jsonl"].splitlines(keepends=True)
    assert json.loads(lines[4])["index"] == 6
    lines[4] = line.encode() + b"\n"
    (tmp_path / "out.jsonl").write_bytes(b"".join(lines))
    assert AnswerFiles(tmp_path / "out.jsonl", MADE_FROM, 4).num_done == 4
    write(tmp_path / "out.jsonl")
    assert contents(tmp_path) == wanted


# --------------------------------------------------------------------------------------------------
# The program

RECORDS = [
    {"question": "def area_1(width", "answer": "?"},
    "not json",
    {"turns": ["def area_2", "return"], "question_id": 7},
    {"messages": users("x" * 300)},
    {"prompt": "</s>"},
    {"turns": ["area", "x" * 300]},
    *({"id": n, "conversations": [{"from": "human", "value": f"area {n}"}]} for n in range(7)),
]


def answer(runs: Runs, folder: Path, *arguments: str) -> list[dict[str, Any]]:
    """Runs the program with the tiny target; returns the answered chats."""
    options = {"--target": runs.model("target"), "--max-new-tokens": "5", "--batch-size": "2"}
    options |= {"--output": str(folder / "out.jsonl")}
    main([*(text for pair in options.items() for text in pair), *arguments])
    return read(folder / "out.jsonl")


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def failures(folder: Path) -> list[dict[str, Any]]:
    return read(folder / "out.failed.jsonl")


def run(runs: Runs, folder: Path, *arguments: str) -> list[dict[str, Any]]:
    folder.mkdir(exist_ok=True)
    source = write_lines(folder / "asked.jsonl", *RECORDS)
    return answer(runs, folder, "--source", source, *arguments)


def test_the_target_answers_a_data_set(runs, tmp_path, capsys, monkeypatch):
    decode, lengths = Engine.decode, []

    def remember(engine: Engine, prompts: Any, **settings: Any) -> Any:
        lengths.append([len(prompt.ids) for prompt in prompts])
        return decode(engine, prompts, **settings)

    monkeypatch.setattr(Engine, "decode", remember)
    options = ["--keep-unfinished", "--temperature", "0.8", "--seed", "3"]
    lines = run(runs, tmp_path / "whole", *options)
    printed, too_long = summary(capsys), "prompt and answer longer than 256 tokens"
    assert (printed["questions"], printed["answered"]) == (13, 10)
    refused = dict.fromkeys(["bad JSON", "a special token is spelled out", too_long], 1)
    assert printed["not_answered"] == refused
    first_turns = [length for batch in lengths[:3] for length in batch]
    assert first_turns == sorted(first_turns)  # of a window; batched by length
    out = tmp_path / "whole" / "out.jsonl"
    assert [line["index"] for line in lines] == [0, 2, *range(5, 13)]
    assert lines[1]["question_id"] == 7 and len(lines[1]["messages"]) == 4
    assert lines[2]["ended_early"] == too_long and len(lines[2]["messages"]) == 2
    found = load_documents(DataConfig(source=str(out), validation_fraction=0.5))
    assert found.tally.dropped == {} and found.tally.records == 10
    # Killed in its second window and run again, it writes the same.
    other = tmp_path / "interrupted"
    with interrupted_after(8):
        run(runs, other, *options)
    assert len((other / "out.jsonl").read_text().splitlines()) == 5
    run(runs, other, *options)
    assert summary(capsys)["answered_before"] == 8
    assert (other / "out.jsonl").read_bytes() == out.read_bytes()
    assert "seed" in refusal(lambda given: run(runs, other, *given), *options[:-1], "4")
    drafts = ["--draft", runs.model("poss2")]
    run(runs, other, *options, *drafts)  # a draft changes no text, unless drafts are sampled
    sampled = [*options, *drafts, "--drafting", "sampled"]
    assert "draft" in refusal(lambda given: run(runs, other, *given), *sampled)


def test_unfinished_answers_are_refused_unless_kept(runs, tmp_path, capsys):
    run(runs, tmp_path, "--max-documents", "1")
    assert summary(capsys)["not_answered"] == {"an answer not finished after 5 tokens": 1}


@pytest.mark.parametrize(
    ("output", "source"),
    [
        ("a.jsonl", "a.jsonl"),
        ("link.jsonl", "a.jsonl"),
        ("hard.jsonl", "*.jsonl"),
        ("b.jsonl", "b.failed.jsonl"),
        ("b.jsonl", "**/b.made_from.json"),
        ("new.jsonl", "*.jsonl"),
    ],
)
def test_what_is_read_is_not_overwritten(tmp_path, output, source):
    for name in ("a.jsonl", "b.failed.jsonl", "b.made_from.json"):
        write_lines(tmp_path / name, {"prompt": "mine"})
    (tmp_path / "link.jsonl").symlink_to("a.jsonl")
    (tmp_path / "hard.jsonl").hardlink_to(tmp_path / "a.jsonl")
    before = contents(tmp_path)
    given = ["--source", str(tmp_path / source), "--output", str(tmp_path / output), "--overwrite"]
    message = refusal(main, "--target", "none", *given)
    assert "which is written" in message and message.endswith("name another output")
    assert contents(tmp_path) == before


LOCAL = "--target {target} --source {asked}"
SERVER = "--server http://127.0.0.1:9/v1 --source {asked}"


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (f"{LOCAL} --template vicuna", "want null (the tokenizer's own)"),
        (f"{LOCAL} --model m", "--model: applies only to a server"),
        (f"{LOCAL} --source-share 0.5", "--source-share: concerns turns that"),
        (f"{LOCAL} --self-prompt 3", "source_share: want it above 0 with a data.source"),
        ("--target {target} --source missing.jsonl", "no such file"),
        ("--target {target} --source {nothing}", "want chats or questions, got none in 1 records"),
        ("--target {target} --self-prompt 3 --source-share 0.5", "--source-share: want it above 0"),
        ("--target {target}", "or self_prompt, to let the target write questions"),
        ("--source s.jsonl", "want a target (--target DIR), or a server (--server URL)"),
        (f"{SERVER} --draft d", "--draft: applies only to a local target; leave it or server out"),
        (f"{SERVER} --tree-depth 3", "tree: applies only to a local target"),
        (f"{SERVER} --batch-size 4", "--batch-size: applies only to a local target"),
        (f"{SERVER} --template llama3", "--template: the server has its own"),
        (f"{SERVER} --target nowhere", "nowhere"),
        ("--server localhost:8000 --source x", "want such as http://localhost:8000/v1, got '"),
        ("--server http://a:b/v1 --source x", "Port could not be cast"),
        ("--server http://a..b/v1 --source x", "label"),
        ("--server http://a/v1?key=1 --source x", "server: want such as http://"),
    ],
)
def test_bad_arguments(runs, tmp_path, arguments, error):
    """Of a run with a local target, of its own questions, and with a server, which is not asked."""
    asked = write_lines(tmp_path / "asked.jsonl", {"prompt": "a"})
    nothing = write_lines(tmp_path / "nothing.jsonl", {"text": "a"})
    words = arguments.format(target=runs.model("target"), asked=asked, nothing=nothing).split()
    assert error in refusal(main, *words, "--output", str(tmp_path / "out.jsonl"))
    assert {path.name for path in tmp_path.iterdir()} == {"asked.jsonl", "nothing.jsonl"}


def test_records_that_ask_nothing_do_not_count_as_documents(tmp_path):
    records = {"text": "a"}, {"prompt": "b"}, {"text": "c"}, {"prompt": "d"}, {"prompt": "e"}
    data = DataConfig(source=write_lines(tmp_path / "some.jsonl", *records), max_documents=2)
    assert [question.index for question in list_questions(data, None)] == [0, 1, 2, 3]


def test_a_template_and_a_system_prompt(runs, tmp_path, monkeypatch):
    asked = []

    def remember(engine: Any, questions: Any, *_: Any) -> list[Any]:
        asked.extend(engine.tokenizer.decode(engine.encode(one.messages)) for one in questions)
        return []

    monkeypatch.setattr(regeneration, "answer_window", remember)
    source = write_lines(tmp_path / "one.jsonl", {"prompt": "Hi"})
    options = ["--source", source, "--template", "llama2", "--system-prompt", "Be kind."]
    run(runs, tmp_path, *options)
    assert asked == ["<s>[INST] <<SYS>>\nBe kind.\n<</SYS>>\n\nHi [/INST]"]


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
# Questions that the target writes: openings


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
# Programs that let the target write questions


def write_and_answer(
    runs: Runs, folder: Path, *arguments: str, template: str = PLAIN
) -> list[dict[str, Any]]:
    """The target writes the questions, too; returns the answered chats."""
    folder.mkdir(exist_ok=True)
    (folder / "template.jinja").write_text(template)
    options = ["--template", str(folder / "template.jinja"), "--keep-unfinished"]
    return answer(runs, folder, *options, *arguments)


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
    lines = write_and_answer(runs, tmp_path / "whole", *options)
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
        write_and_answer(runs, tmp_path / "stopped", *options)
    assert write_and_answer(runs, tmp_path / "stopped", *options) == lines
    assert summary(capsys)["answered_before"] == 8
    assert failures(tmp_path / "stopped") == failures(tmp_path / "whole")
    assert "self_prompt_turns" in refusal(
        lambda given: write_and_answer(runs, tmp_path / "stopped", *given), *OWN, *TEMPERATURES
    )


@pytest.mark.usefixtures("finished")
def test_a_question_that_was_asked_before_a_stop_is_not_asked_again(runs, tmp_path, monkeypatch):
    greedy = ["--self-prompt-temperature", "0", "--self-prompt", "9", "--self-prompt-tokens", "12"]
    [line] = write_and_answer(runs, tmp_path, *greedy)
    assert line["index"] == 0
    reasons = {failed["reason"] for failed in failures(tmp_path)}
    assert reasons == {"a question that was asked before"}
    whole = (tmp_path / "out.failed.jsonl").read_bytes()
    (tmp_path / "out.failed.jsonl").write_bytes(b"".join(whole.splitlines(keepends=True)[:7]))
    assert write_and_answer(runs, tmp_path, *greedy) == [
        line
    ]  # its second window, 8 and on, is made again
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
    lines = read(tmp_path / "out.jsonl")
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
