"""Targets that answer the questions of a data set: dialogues, what fails, going on, the program."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from programs import Runs, interrupted_after, refusal, summary, write_lines

from poss_jax import Generation, SamplingConfig, UserError
from poss_jax.config.data import DataConfig
from poss_jax.config.regenerate import RegenerateConfig
from poss_jax.data.conversations import read_questions
from poss_jax.data.records import Broken
from poss_jax.data.sources import load_documents
from poss_jax.engine.engine import Engine
from poss_jax.engine.prompts import PreparedPrompt, PromptTooLong
from train import regeneration
from train.answers import AnswerFiles, Question, list_questions
from train.regenerate import main
from train.regeneration import answer_window


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
        ({"instruction": "a", "output": ""}, "a"),
        ({"turns": ["a", "b"]}, "ab"),
    ],
)
def test_questions_of_every_format(record, asked):
    assert read_questions(record) == users(*asked)
    system = {"role": "system", "content": "Be brief."}
    assert read_questions(record | {"system": "Be brief."}) == [system, *users(*asked)]


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"messages": []}, "empty conversation"),
        ({"messages": [{"role": "narrator", "content": "a"}]}, "unknown role"),
        ({"turns": [3]}, "a turn without text"),
        ({"prompt": " "}, "an empty turn"),
        ({"text": "a"}, "no question"),
    ],
)
def test_records_that_ask_nothing(record, reason):
    found = read_questions(record)
    assert isinstance(found, Broken) and found.reason == reason


# --------------------------------------------------------------------------------------------------
# Dialogues


class Scripted(Engine):
    """An engine that says of which messages it is asked; prompts are their texts."""

    max_length = 100

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.seeds: list[int] = []

    def prepare(
        self, messages: list[dict[str, str]], max_new_tokens: int, sampling: SamplingConfig
    ) -> PreparedPrompt:
        text = "|".join(message["content"] for message in messages)
        if "refused" in text:
            raise UserError("messages: refused")
        if len(text) + max_new_tokens > self.max_length:
            raise PromptTooLong(len(text), max_new_tokens, self.max_length)
        return PreparedPrompt(list(text.encode()), max_new_tokens, sampling)

    def decode(self, prompts: list[PreparedPrompt], **settings: Any) -> list[Generation]:
        texts = [bytes(prompt.ids).decode() for prompt in prompts]
        self.batches.append(texts)
        self.seeds += [prompt.sampling.seed for prompt in prompts]
        return [self.answer(text) for text in texts]

    def answer(self, text: str) -> Generation:
        last = text.split("|")[-1]
        said = "" if last == "silent" else f"<{last}>"
        reason = "length" if last == "endless" else "stop"
        return Generation([], [], said, [], [], reason)


CONFIG = RegenerateConfig(
    target="t",
    output="o",
    data=DataConfig(source="s"),
    sampling=SamplingConfig(seed=7),
    max_new_tokens=10,
    batch_size=2,
)


def ask(engine: Any, *chats: Any, **changes: Any) -> list[dict[str, Any]]:
    questions = [
        Question(n, f"file:{n}", {"id": str(n)}, chat if isinstance(chat, Broken) else users(*chat))
        for n, chat in enumerate(chats)
    ]
    return answer_window(engine, questions, replace(CONFIG, **changes))


def test_turns_are_answered_in_turn_and_batched_by_length():
    engine = Scripted()
    lines = ask(engine, ["aaa", "b"], ["c"], ["dd", "e"])
    assert [[turn["content"] for turn in line["messages"]] for line in lines] == [
        ["aaa", "<aaa>", "b", "<b>"],
        ["c", "<c>"],
        ["dd", "<dd>", "e", "<e>"],
    ]
    assert [turn["role"] for turn in lines[0]["messages"]] == ["user", "assistant"] * 2
    assert engine.batches == [["c", "dd"], ["aaa"], ["dd|<dd>|e", "aaa|<aaa>|b"]]
    assert [line["id"] for line in lines] == ["0", "1", "2"]
    assert engine.seeds[2] == engine.seeds[4] == 7  # of the first chat, in any batch
    assert len(set(engine.seeds)) == 3


@pytest.mark.parametrize(
    ("chat", "answered", "ended"),
    [
        (["a", "silent", "b"], 1, "an empty answer"),
        (["a", "endless"], 1, "an answer not finished after 10 tokens"),
        (["a", "b" * 90], 1, "prompt and answer longer than 100 tokens"),
        (["a", "refused"], 1, "messages: refused"),
        (["silent"], 0, "an empty answer"),
        (["endless", "a"], 0, "an answer not finished after 10 tokens"),
        (["b" * 91], 0, "prompt and answer longer than 100 tokens"),
        (Broken("bad JSON", "line 3"), 0, "bad JSON"),
    ],
)
def test_chats_that_end_early(chat, answered, ended):
    [line] = ask(Scripted(), chat)
    if answered:
        assert len(line["messages"]) == 2 * answered and line["ended_early"] == ended
        assert "reason" not in line
    else:
        assert line["reason"] == ended and line["where"] == "file:0"
        assert line.get("messages") == (None if isinstance(chat, Broken) else users(*chat))


def test_unfinished_answers_may_be_kept():
    [line] = ask(Scripted(), ["endless", "a"], keeps_unfinished=True)
    assert [turn["content"] for turn in line["messages"]] == ["endless", "<endless>", "a", "<a>"]


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
    for name, content in wanted.items():
        if not name.endswith("made_from.json"):
            (tmp_path / name).write_bytes(content[:num_bytes])
    files = AnswerFiles(tmp_path / "whole.jsonl", MADE_FROM, 4)
    assert files.num_done in (0, 4, 8, 10)
    files = write(tmp_path / "whole.jsonl")
    assert contents(tmp_path) == wanted
    assert files.counts == {"answered": 7, "bad": 3} and files.num_done == 10


@pytest.mark.parametrize("name", ["out.jsonl", "out.failed.jsonl"])
def test_files_of_something_else_are_left_alone(tmp_path, name):
    (tmp_path / name).write_text("mine")
    with pytest.raises(UserError, match="exists and was not made here; name another file"):
        write(tmp_path / "out.jsonl")
    assert contents(tmp_path) == {name: b"mine"}


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


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"3", b"null", b"\xff", b"[" * 10**5])
def test_damaged_note_of_what_answers_were_made_from(tmp_path, content):
    write(tmp_path / "out.jsonl")
    (tmp_path / "out.made_from.json").write_bytes(content)
    with pytest.raises(UserError, match="was not made here; name another file"):
        write(tmp_path / "out.jsonl")


@pytest.mark.parametrize(
    "line",
    [
        *("x", "[]", "{}"),
        '{"index": "6", "messages": []}',
        '{"index": 6}',
        '{"index": 6, "messages": [], "reason": "bad"}',
        '{"index": 5, "messages": []}',
        '{"index": 3, "messages": []}',
        '{"index": 10, "messages": []}',
        '{"index": 7, "messages": []}',
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
    *({"id": n, "conversations": [{"from": "human", "value": f"area {n}"}]} for n in range(7)),
]


def run(runs: Runs, folder: Path, *arguments: str) -> None:
    folder.mkdir(exist_ok=True)
    source = write_lines(folder / "asked.jsonl", *RECORDS)
    options = {"--target": runs.model("target"), "--max-new-tokens": "5", "--batch-size": "2"}
    given = [text for pair in options.items() for text in pair]
    main([*given, "--source", source, "--output", str(folder / "out.jsonl"), *arguments])


def test_the_target_answers_a_data_set(runs, tmp_path, capsys):
    options = ["--keep-unfinished", "--temperature", "0.8", "--seed", "3"]
    run(runs, tmp_path / "whole", *options)
    printed = summary(capsys)
    assert (printed["questions"], printed["answered"]) == (12, 9)
    assert printed["not_answered"] == {
        "bad JSON": 1,
        "a special token is spelled out": 1,
        "prompt and answer longer than 256 tokens": 1,
    }
    out = tmp_path / "whole" / "out.jsonl"
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["index"] for line in lines] == [0, 2, *range(5, 12)]
    assert lines[1]["question_id"] == 7 and len(lines[1]["messages"]) == 4
    found = load_documents(DataConfig(source=str(out), validation_fraction=0.5))
    assert found.tally.dropped == {} and found.tally.records == 9
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


@pytest.mark.parametrize("overwrite", [[], ["--overwrite"]])
@pytest.mark.parametrize(
    ("output", "source"),
    [
        ("a.jsonl", "a.jsonl"),
        ("link.jsonl", "a.jsonl"),
        ("a.jsonl", "link.jsonl"),
        ("hard.jsonl", "*.jsonl"),
        ("b.jsonl", "b.failed.jsonl"),
        ("b.jsonl", "**/b.made_from.json"),
        ("new.jsonl", "*.jsonl"),
    ],
)
def test_what_is_read_is_not_overwritten(tmp_path, output, source, overwrite):
    for name in ("a.jsonl", "b.failed.jsonl", "b.made_from.json"):
        write_lines(tmp_path / name, {"prompt": "mine"})
    (tmp_path / "link.jsonl").symlink_to("a.jsonl")
    (tmp_path / "hard.jsonl").hardlink_to(tmp_path / "a.jsonl")
    before = contents(tmp_path)
    given = ["--source", str(tmp_path / source), "--output", str(tmp_path / output), *overwrite]
    message = refusal(main, "--target", "none", *given)
    assert "which is written" in message and message.endswith("name another output")
    assert contents(tmp_path) == before


LOCAL = "--target {target} --source {asked}"
SERVER = "--server http://127.0.0.1:9/v1 --source {asked}"


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (f"{LOCAL} --template vicuna", "want null (the tokenizer's own)"),
        (f"{LOCAL} --temperature -1", "temperature"),
        (f"{LOCAL} --model m", "--model: applies only to a server"),
        (f"{LOCAL} --concurrency 4", "--concurrency: applies only to a server"),
        (f"{LOCAL} --self-prompt-turns 2", "--self-prompt-turns: applies only to turns"),
        (f"{LOCAL} --source-share 0.5", "--source-share: applies only to turns that"),
        (f"{LOCAL} --self-prompt 3", "source_share: want it above 0 with a data.source"),
        ("--target {target} --source missing.jsonl", "no such file"),
        ("--target {target} --source {nothing}", "want chats or questions, got none in 1 records"),
        ("--target {target} --self-prompt 3 --source-share 0.5", "--source-share: want it above 0"),
        ("--target {target}", "or self_prompt, to let the target write questions"),
        ("--source s.jsonl", "want a target (--target DIR), or a server (--server URL)"),
        (f"{SERVER} --draft d", "--draft: applies only to a local target; leave it or server out"),
        (f"{SERVER} --tree-depth 3", "tree: applies only to a local target"),
        (f"{SERVER} --lookup 3", "--lookup: applies only to a local target"),
        (f"{SERVER} --batch-size 4", "--batch-size: applies only to a local target"),
        (f"{SERVER} --max-length 99", "--max-length: applies only to a local target"),
        (f"{SERVER} --quantise int8", "--quantise: applies only to a local target"),
        (f"{SERVER} --template llama3", "--template: the server has its own"),
        (f"{SERVER} --target nowhere", "nowhere"),
        ("--server localhost:8000 --source x", "want such as http://localhost:8000/v1, got '"),
        ("--server file:///v1 --source x", "server: want such as http://"),
        ("--server http://a:b/v1 --source x", "Port could not be cast"),
        ("--server http://a..b/v1 --source x", "label"),
        ("--server http://[::1/v1 --source x", "Invalid IPv6 URL"),
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
