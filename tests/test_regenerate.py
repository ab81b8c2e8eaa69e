"""Targets that answer the questions of a data set: what is asked, going on, the program."""

import json
from pathlib import Path
from typing import Any

import pytest
from programs import Runs, interrupted_after, refusal, summary, write_lines

from poss_jax.config.data import DataConfig
from poss_jax.config.reading import UserError
from poss_jax.data.conversations import read_questions
from poss_jax.data.records import Broken
from poss_jax.data.sources import load_documents
from poss_jax.engine.engine import Engine
from train import regeneration
from train.answers import AnswerFiles, list_questions
from train.regenerate import main


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
        *(("out.made_from.json", content) for content in (b"{", b"[1]", b"\xff", b"[" * 10**5)),
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
        '{"index": 6, "messages": [], "reason": "bad"}',
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


def run(runs: Runs, folder: Path, *arguments: str) -> None:
    folder.mkdir(exist_ok=True)
    source = write_lines(folder / "asked.jsonl", *RECORDS)
    options = {"--target": runs.model("target"), "--max-new-tokens": "5", "--batch-size": "2"}
    given = [text for pair in options.items() for text in pair]
    main([*given, "--source", source, "--output", str(folder / "out.jsonl"), *arguments])


def test_the_target_answers_a_data_set(runs, tmp_path, capsys, monkeypatch):
    decode, lengths = Engine.decode, []

    def remember(engine: Engine, prompts: Any, **settings: Any) -> Any:
        lengths.append([len(prompt.ids) for prompt in prompts])
        return decode(engine, prompts, **settings)

    monkeypatch.setattr(Engine, "decode", remember)
    options = ["--keep-unfinished", "--temperature", "0.8", "--seed", "3"]
    run(runs, tmp_path / "whole", *options)
    printed, too_long = summary(capsys), "prompt and answer longer than 256 tokens"
    assert (printed["questions"], printed["answered"]) == (13, 10)
    refused = dict.fromkeys(["bad JSON", "a special token is spelled out", too_long], 1)
    assert printed["not_answered"] == refused
    first_turns = [length for batch in lengths[:3] for length in batch]
    assert first_turns == sorted(first_turns)  # of a window; batched by length
    out = tmp_path / "whole" / "out.jsonl"
    lines = [json.loads(line) for line in out.read_text().splitlines()]
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
        (f"{LOCAL} --source-share 0.5", "--source-share: applies only to turns that"),
        (f"{LOCAL} --self-prompt 3", "source_share: want it above 0 with a data.source"),
        ("--target {target} --source missing.jsonl", "no such file"),
        ("--target {target} --source {nothing}", "want chats or questions, got none in 1 records"),
        ("--target {target}", "or self_prompt, to let the target write questions"),
        ("--source s.jsonl", "want a target (--target DIR), or a server (--server URL)"),
        (f"{SERVER} --draft d", "--draft: applies only to a local target; leave it or server out"),
        (f"{SERVER} --tree-depth 3", "tree: applies only to a local target"),
        (f"{SERVER} --batch-size 4", "--batch-size: applies only to a local target"),
        (f"{SERVER} --template llama3", "--template: the server has its own"),
        (f"{SERVER} --target nowhere", "nowhere"),
        ("--server localhost:8000 --source x", "want such as http://localhost:8000/v1, got '"),
        ("--server http://a:b/v1 --source x", "Port could not be cast"),
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
