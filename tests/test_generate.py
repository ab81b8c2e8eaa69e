"""The generation program: prompt files, output files, equal answers by every way, refusals."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from programs import NUM_NEW, Runs, copy_model, generate, refusal, summary, write_lines

from infer.generate import main
from poss_jax.checkpoint.record import read_record
from poss_jax.config.decoding import SamplingConfig
from poss_jax.config.reading import config_to_dict
from poss_jax.data.tokenizer import load_tokenizer
from poss_jax.engine.answers import Generation
from poss_jax.engine.dialogue import Dialogue, read_dialogues
from poss_jax.engine.engine import Engine
from poss_jax.engine.prompts import PreparedPrompt

WATCHED = True  # see conftest.py
RECORDS = [
    {"prompt": "def area_7", "question_id": 81},
    {"turns": ["a", "b", "c"], "category": "math", "text": "is overwritten"},
    {"prompt_ids": [0, 70, 71, 72]},
    {"messages": [{"role": "system", "content": "x"}, {"role": "user", "content": "def"}]},
]
ORDER = [(0, 0), (1, 0), (1, 1), (1, 2), (2, 0), (3, 0)]  # (record, turn) of the output's lines
KEYS = (
    "turn prompt_ids output_ids text accepted_per_round copied_per_round mean_acceptance_length "
    "stop_reason sampling".split()
)
# Short, so that all conversations share the shapes of one compiled program.
CHAT_TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.role[0] }} {{ m.content }};{% endfor %}"


@pytest.fixture(scope="module")
def target(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("chat") / "model"
    copy_model(runs.model("target"), folder)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return str(folder)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_lines(tmp_path_factory.mktemp("prompts") / "prompts.jsonl", *RECORDS)


@pytest.fixture(scope="module")
def lines(runs, target, prompts, tmp_path_factory) -> list[Any]:
    folder = tmp_path_factory.mktemp("answers")
    return generate(target, runs.model("poss2"), folder, "--prompts", prompts)


# --------------------------------------------------------------------------------------------------
# Answers


def test_lines_hold_answers_and_what_is_passed_on(lines: list[Any]) -> None:
    assert max(len(line["prompt_ids"]) for line in lines) <= 32  # one compiled shape
    passed_on = [{"question_id"}, *[{"category"}] * 3, set(), set()]
    assert [line["turn"] for line in lines] == [turn for _, turn in ORDER]
    for line, kept in zip(lines, passed_on, strict=True):
        assert line.keys() == set(KEYS) | kept
        assert len(line["output_ids"]) == NUM_NEW and line["stop_reason"] == "length"
        accepted = line["accepted_per_round"]
        assert line["mean_acceptance_length"] == pytest.approx(1 + sum(accepted) / len(accepted))
    assert lines[0]["question_id"] == 81 and lines[1]["category"] == "math"
    assert lines[2]["text"] != "is overwritten"


def test_prompts_are_encoded_by_kind_and_answers_join_the_chat(target, lines) -> None:
    decode = load_tokenizer(Path(target)).decode
    first, second = lines[1]["text"], lines[2]["text"]
    assert [decode(line["prompt_ids"]) for line in lines] == [
        "<s>def area_7",
        "<s>u a;",
        f"<s>u a;a {first};u b;",
        f"<s>u a;a {first};u b;a {second};u c;",
        decode([0, 70, 71, 72]),
        "<s>s x;u def;",
    ]


def test_a_question_is_asked_with_the_chat_template(runs, target, lines, tmp_path) -> None:
    (line,) = generate(target, runs.model("poss2"), tmp_path, "--question", "a")
    for key in KEYS[:-1]:  # seeds are derived from the index of a prompt
        assert line[key] == lines[1][key]


def test_draft_and_batch_size_change_no_token(runs, target, prompts, lines, tmp_path) -> None:
    plain = generate(target, None, tmp_path, "--prompts", prompts)
    batched = generate(
        target, runs.model("poss2"), tmp_path, "--prompts", prompts, "--batch-size", "3"
    )
    assert batched == lines
    for key in ("prompt_ids", "output_ids", "text", "stop_reason"):
        assert [line[key] for line in plain] == [line[key] for line in lines]
    assert all(set(line["accepted_per_round"]) == {0} for line in plain)
    assert any(line["mean_acceptance_length"] > 1 for line in lines)


def test_stops_at_the_first_stop_token_of_the_config(runs, lines, tmp_path, capsys) -> None:
    output = lines[0]["output_ids"]
    stop = output[NUM_NEW // 2]
    target = copy_model(runs.model("target"), tmp_path / "model", config={"eos_token_ids": [stop]})
    main(["--target", target, "--prompt", "def area_7", "--max-new-tokens", str(NUM_NEW)])
    out = capsys.readouterr().out
    until = output[: output.index(stop)]
    assert 0 < len(until) <= NUM_NEW // 2
    assert out.startswith(load_tokenizer(Path(target)).decode(until) + "\n{")
    assert json.loads(out.splitlines()[-1])["new_tokens"] == len(until) + 1


def test_one_prompt_is_printed_before_the_summary(runs, lines, capsys) -> None:
    models = ["--target", runs.model("target"), "--draft", runs.model("poss2")]
    main([*models, "--prompt", "def area_7", "--max-new-tokens", str(NUM_NEW)])
    captured = capsys.readouterr()
    text, _, last = captured.out.removesuffix("\n").rpartition("\n")
    result = json.loads(last)
    assert text == lines[0]["text"]
    assert result.pop("seconds_with_compilation") > 0
    assert result == {
        "answers": 1,
        "new_tokens": NUM_NEW,
        "mean_acceptance_length": lines[0]["mean_acceptance_length"],
        "output": None,
        "interrupted": False,
    }
    assert captured.err == ""


def test_programs_are_compiled_before_a_prompt_comes(target, capsys, monkeypatch) -> None:
    asked = []
    monkeypatch.setattr(Engine, "precompile", lambda _, *given, **options: asked.append(given))
    main(["--target", target, "--precompile", "60", "--precompile", "90"])
    assert asked == [([60],), ([90],)]
    assert summary(capsys)["answers"] == 0


def test_a_conversation_its_answers_make_too_long_ends_early(target, tmp_path, caplog) -> None:
    engine = Engine.load(target)
    messages = [*users("a"), {"role": "assistant", "content": ""}, *users("b")]
    room = len(engine.encode(messages)) + NUM_NEW
    records = write_lines(tmp_path / "prompts", {"turns": ["a", "b"]}, {"prompt": "def"})
    lines = generate(target, None, tmp_path, "--prompts", records, "--max-length", str(room))
    assert [line["turn"] for line in lines] == [0, 0]
    assert "prompt 1 ends before turn 2" in caplog.text
    assert f"do not fit a length of {room}" in caplog.text


def test_output_goes_into_a_new_folder_and_is_named(runs, tmp_path, capsys) -> None:
    path = tmp_path / "new" / "folder" / "answers.jsonl"
    arguments = ["--prompt", "def area_7", "--max-new-tokens", str(NUM_NEW), "--output", str(path)]
    main(["--target", runs.model("target"), *arguments])
    assert summary(capsys)["output"] == str(path)
    assert len(path.read_text().splitlines()) == 1
    assert list(path.parent.iterdir()) == [path]


def users(*turns: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": turn} for turn in turns]


def dialogue(record: dict[str, Any]) -> Dialogue:
    (found,) = read_dialogues([record], SamplingConfig(), 5)
    return found


class Echo(Engine):
    """An engine that prepares prompts by doing nothing to them."""

    def __init__(self) -> None:
        pass

    def prepare(self, prompt: Any, max_new_tokens: int, sampling: SamplingConfig) -> Any:
        return PreparedPrompt(prompt, max_new_tokens, sampling)


@pytest.mark.parametrize(
    ("record", "answers", "expected"),
    [
        ({"prompt": "a", "id": 1}, [], "a"),
        ({"prompt_ids": [1, 2]}, [], [1, 2]),
        ({"messages": [{"role": "user", "content": "a"}]}, [], [("user", "a")]),
        ({"turns": ["a", "b"]}, [], [("user", "a")]),
        ({"turns": ["a", "b"]}, ["x"], [("user", "a"), ("assistant", "x"), ("user", "b")]),
    ],
)
def test_next_prompt(record: dict[str, Any], answers: list[str], expected: Any) -> None:
    found = dialogue(record)
    for text in answers:
        assert found.ask(Echo())
        found.take(Generation([], [], text, [], [], "stop"))
    assert found.ask(Echo()) and found.prompt is not None
    prompt: Any = found.prompt.ids
    if isinstance(prompt, list) and isinstance(prompt[0], dict):
        prompt = [(message["role"], message["content"]) for message in prompt]
    assert prompt == expected


def test_number_of_turns() -> None:
    assert [len(dialogue(record).remaining) for record in RECORDS] == [1, 3, 1, 1]


def test_a_prompt_is_tokenised_once_for_every_answer(target, prompts, tmp_path, monkeypatch):
    encode, encoded = Engine.encode, []

    def remember(self: Engine, prompt: Any) -> list[int]:
        encoded.append(prompt)
        return encode(self, prompt)

    monkeypatch.setattr(Engine, "encode", remember)
    lines = generate(target, None, tmp_path, "--prompts", prompts)
    probe = 1  # whether the conversation's last turn can fit is asked before all answers
    assert len(encoded) == len(lines) + probe


# --------------------------------------------------------------------------------------------------
# Bad input


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ("--target nowhere --prompt x", "model folder nowhere does not exist"),
        ("--target {target} --draft nowhere --prompt x", "model folder nowhere does not exist"),
        ("--target {target} --draft {target} --prompt x", "want a draft, got a target"),
        ("--target {target} --draft {wide} --prompt x", "want hidden_size 32, got 64"),
        ("--target {target} --prompts nowhere.jsonl", "nowhere.jsonl: want a readable file"),
        ("--target {target} --prompt <s>", "prompt 1 of 1: prompt: want at least one token"),
        ("--target {target}", "want a question, a text (prompt) or a file of prompts (prompts)"),
        ("--target {target} --prompt x --prompts y", "want a question, a text (prompt) or a file"),
        ("--target {target} --prompt x --max-length 9", "do not fit a length of 9"),
        ("--target {target} --prompt x --max-new-tokens 400", "do not fit a length of 256"),
        ("--target {target} --prompt x --show-drafts", "marks text as it is streamed; set stream"),
        ("--target {target} --prompt x --stream --batch-size 2", "leave out batch_size"),
        ("--target {target} --prompt x --batch-size 10000000 --max-new-tokens 9", "need at least "),
        ("--target {target} --prompt x --max-new-tokens 9 --stop " + "x" * 999, "its 999 charact"),
        ("--target {target} --prompt x --trees nowhere", "config nowhere: No such file"),
        ("--target {target} --prompt x --max-new-tokens 9 --stop=", "want strings, got an empty"),
        (
            "--target {target} --prompt x --max-new-tokens 9 --logit-bias 300=1",
            "prompt 1 of 1: logit_bias: want token ids of 0 to 299, got 300",
        ),
    ],
)
def test_bad_arguments_write_nothing(runs, tmp_path, arguments, error) -> None:
    layer = read_record(runs.model("poss2")).draft.layer
    wide = {"layer": config_to_dict(layer) | {"hidden_size": 64}}
    names = {"target": runs.model("target"), "wide": tmp_path / "wide"}
    copy_model(runs.model("poss2"), tmp_path / "wide", config=wide)
    words = [word.format(**names) for word in arguments.split()]
    output = tmp_path / "out" / "answers.jsonl"
    assert error in refusal(main, *words, "--output", str(output))
    assert not output.parent.exists()


def test_empty_prompt_is_refused_but_blanks_are_tokens(runs, capsys) -> None:
    target = ["--target", runs.model("target"), "--max-new-tokens", "2"]
    assert "prompt 1 of 1: prompt: want at least one" in refusal(main, *target, "--prompt", "")
    main([*target, "--prompt", "  "])
    assert summary(capsys)["new_tokens"] == 2


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        ("{not json", "prompts.jsonl:3: want a JSON object, got bad JSON"),
        ({"question": "?"}, "prompts.jsonl:3: want exactly one of prompt (a string), "),
        ({"prompt": "a", "turns": ["b"]}, "prompts.jsonl:3: want exactly one of"),
        ({"prompt": ""}, "prompts.jsonl:3: want exactly one of"),
        ({"prompt_ids": [1, 300]}, "prompt 3 of 4: prompt: want token ids of 0 to 299, got 300"),
        ({"prompt": "x" * 300}, "prompt 3 of 4: prompt of "),
        ({"turns": ["a", "b" * 300]}, "prompt 3 of 4: prompt of "),
        ({"turns": ["a"] * 20}, "prompt 3 of 4: prompt of "),
        ({"prompt": "a", "sampling": 1}, "prompt 3 of 4: sampling: want settings such as {"),
        (
            {"prompt": "a", "sampling": {"temprature": 1}},
            "3 of 4: sampling: unknown key 'temprature'; did you mean 'temperature'?",
        ),
        ({"prompt": "a", "sampling": {"top_p": 2}}, "3 of 4: sampling: top_p: Input should be"),
        ({"prompt": "a", "sampling": ["x" * 9000]}, "sampling: want settings such as {"),
        (
            {"prompt": "a", "sampling": {"logit_bias": {"300": 1}}},
            "prompt 3 of 4: logit_bias: want token ids of 0 to 299, got 300",
        ),
    ],
)
def test_bad_line_is_found_before_anything_is_decoded(runs, tmp_path, bad, error, monkeypatch):
    monkeypatch.setattr(Engine, "decode", None)
    good = {"prompt": "def"}
    prompts = write_lines(tmp_path / "prompts.jsonl", good, good, bad, good)
    output = str(tmp_path / "answers.jsonl")
    arguments = ["--target", runs.model("target"), "--prompts", prompts, "--output", output]
    assert error in refusal(main, *arguments, "--max-new-tokens", "8")
    assert [path.name for path in tmp_path.iterdir()] == ["prompts.jsonl"]


@pytest.mark.parametrize(
    ("output", "error"),
    [
        ("answers.jsonl", "exists; name another file"),
        ("answers.jsonl/a", "is not a writable folder"),
    ],
)
def test_output_that_cannot_be_is_refused_before_anything_is_loaded(tmp_path, output, error):
    (tmp_path / "answers.jsonl").write_text("earlier answers")
    arguments = ["--target", "nowhere", "--prompt", "x", "--output", str(tmp_path / output)]
    assert error in refusal(main, *arguments)
    assert (tmp_path / "answers.jsonl").read_text() == "earlier answers"


def interrupt(monkeypatch: pytest.MonkeyPatch, method: str, call: int) -> None:
    """Lets Ctrl-C be pressed when an engine's method is called for the n-th time."""
    calls: list[int] = []
    original = getattr(Engine, method)

    def interrupted(self: Engine, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == call:
            raise KeyboardInterrupt
        return original(self, *args, **kwargs)

    monkeypatch.setattr(Engine, method, interrupted)


def test_interrupted_run_keeps_the_answers_that_are_finished(
    target, prompts, lines, tmp_path, monkeypatch, capsys
):
    interrupt(monkeypatch, "decode", 3)
    output = tmp_path / "answers.jsonl"
    arguments = ["--target", target, "--prompts", prompts, "--output", str(output)]
    with pytest.raises(KeyboardInterrupt):
        main([*arguments, "--max-new-tokens", str(NUM_NEW)])
    kept = [json.loads(line) for line in output.read_text().splitlines()]
    assert [line["output_ids"] for line in kept] == [line["output_ids"] for line in lines[:2]]
    result = summary(capsys)
    assert (result["interrupted"], result["answers"], result["output"]) == (True, 2, str(output))


def test_interrupted_before_the_first_answer_leaves_no_file(
    target, prompts, tmp_path, monkeypatch, capsys
):
    interrupt(monkeypatch, "decode", 1)
    with pytest.raises(KeyboardInterrupt):
        generate(target, None, tmp_path, "--prompts", prompts)
    assert list(tmp_path.iterdir()) == []
    result = summary(capsys)
    assert (result["interrupted"], result["answers"], result["output"]) == (True, 0, None)


def test_sigterm_ends_a_run_as_ctrl_c_does() -> None:
    code = """
import os, signal, time
from infer import generate

def main():
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)

generate.main = main
generate.cli()
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (130, "error: interrupted\n")
