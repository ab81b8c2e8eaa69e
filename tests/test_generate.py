"""The generation program: prompt files, output files, equal answers by every way, refusals."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from programs import NUM_NEW, Runs, copy_model, generate, refusal, summary, write_lines

from infer.generate import cli, main
from poss_jax.data.tokenizer import load_tokenizer
from poss_jax.engine.engine import Engine

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
SMALL = "--tree-depth 3 --tree-top-k 2 --tree-total-tokens 6".split()
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
    return generate(target, runs.model("poss2"), folder, "--prompts", prompts, *SMALL)


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
    (line,) = generate(target, runs.model("poss2"), tmp_path, "--question", "a", *SMALL)
    for key in KEYS[:-1]:  # seeds are derived from the index of a prompt
        assert line[key] == lines[1][key]


def test_draft_and_batch_size_change_no_token(target, prompts, lines, tmp_path) -> None:
    plain = generate(target, None, tmp_path, "--prompts", prompts, "--batch-size", "3")
    assert [line["output_ids"] for line in plain] == [line["output_ids"] for line in lines]
    assert any(line["mean_acceptance_length"] > 1 for line in lines)


def test_one_prompt_is_printed_before_the_summary(runs, lines, capsys) -> None:
    models = ["--target", runs.model("target"), "--draft", runs.model("poss2")]
    main([*models, *SMALL, "--prompt", "def area_7", "--max-new-tokens", str(NUM_NEW)])
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
    turns = [("user", "a"), ("assistant", ""), ("user", "b")]
    messages = [{"role": role, "content": content} for role, content in turns]
    room = len(engine.encode(messages)) + NUM_NEW
    records = write_lines(tmp_path / "prompts", {"turns": ["a", "b"]}, {"prompt": "def"})
    lines = generate(target, None, tmp_path, "--prompts", records, "--max-length", str(room))
    assert [line["turn"] for line in lines] == [0, 0]
    assert "prompt 1 ends before turn 2" in caplog.text
    assert f"do not fit a length of {room}" in caplog.text


def test_a_prompt_is_tokenised_once_for_every_answer(target, prompts, tmp_path, monkeypatch):
    encode, encoded = Engine.encode, []

    def remember(self: Engine, prompt: Any) -> list[int]:
        encoded.append(prompt)
        return encode(self, prompt)

    monkeypatch.setattr(Engine, "encode", remember)
    lines = generate(target, None, tmp_path, "--prompts", prompts)
    probe = 1  # whether the conversation's last turn can fit is asked before all answers
    assert len(encoded) == len(lines) + probe


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ("--target nowhere --prompt x", "model folder nowhere does not exist"),
        ("--target {target} --prompts nowhere.jsonl", "nowhere.jsonl: want a readable file"),
        ("--target {target} --prompt <s>", "prompt 1 of 1: prompt: want at least one token"),
        ("--target {target}", "want a question, a text (prompt) or a file of prompts (prompts)"),
        ("--target {target} --prompt x --max-new-tokens 400", "do not fit a length of 256"),
        ("--target {target} --prompt x --show-drafts", "marks text as it is streamed; set stream"),
        ("--target {target} --prompt x --stream --batch-size 2", "leave out batch_size"),
        ("--target {target} --prompt x --batch-size 10000000 --max-new-tokens 9", "need at least "),
        ("--target {target} --prompt x --draft-window 64", "limits a draft; give draft, too"),
        ("--target {target} --prompt x --trees nowhere", "config nowhere: No such file"),
        ("--target {target} --prompt x --max-new-tokens 9 --stop=", "want strings, got an empty"),
        ("--target {target} --prompt x --max-new-tokens 9 --logit-bias 300=1", "1: logit_bias"),
    ],
)
def test_bad_arguments_write_nothing(runs, tmp_path, arguments, error) -> None:
    words = [word.format(target=runs.model("target")) for word in arguments.split()]
    output = tmp_path / "out" / "answers.jsonl"
    assert error in refusal(main, *words, "--output", str(output))
    assert not output.parent.exists()


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        ({"question": "?"}, "prompts.jsonl:3: want exactly one of prompt (a string), "),
        ({"prompt_ids": [1, 300]}, "prompt 3 of 4: prompt: want token ids of 0 to 299, got 300"),
        ({"prompt": "x" * 300}, "prompt 3 of 4: prompt of "),
        ({"turns": ["a"] * 20}, "prompt 3 of 4: prompt of "),
        ({"prompt": "a", "sampling": 1}, "prompt 3 of 4: sampling: want settings such as {"),
        ({"prompt": "a", "sampling": {"temprature": 1}}, "unknown key 'temprature'; did"),
        ({"prompt": "a", "sampling": {"logit_bias": {"300": 1}}}, "logit_bias: want token ids"),
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


@pytest.mark.parametrize("num_finished", [2, 0])
def test_interrupted_run_keeps_the_answers_that_are_finished(
    target, prompts, lines, tmp_path, monkeypatch, capsys, num_finished
):
    decode, calls = Engine.decode, []

    def interrupted(self: Engine, *args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if len(calls) > num_finished:
            raise KeyboardInterrupt
        return decode(self, *args, **kwargs)

    monkeypatch.setattr(Engine, "decode", interrupted)
    output = tmp_path / "new" / "folder" / "answers.jsonl"
    arguments = ["--target", target, "--prompts", prompts, "--output", str(output)]
    with pytest.raises(KeyboardInterrupt):
        main([*arguments, "--max-new-tokens", str(NUM_NEW)])
    kept = [json.loads(line) for line in output.read_text().splitlines()] if num_finished else []
    assert [line["output_ids"] for line in kept] == [
        line["output_ids"] for line in lines[:num_finished]
    ]
    result = summary(capsys)
    assert (result["interrupted"], result["answers"]) == (True, num_finished)
    assert result["output"] == (str(output) if num_finished else None)
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert written == [output] * bool(num_finished)


def test_sigterm_ends_a_run_as_ctrl_c_does(monkeypatch: pytest.MonkeyPatch) -> None:
    handlers: dict[int, Any] = {}
    monkeypatch.setattr(signal, "signal", handlers.__setitem__)
    monkeypatch.setattr("infer.generate.run_program", lambda main: None)
    cli()
    assert handlers == {signal.SIGTERM: signal.default_int_handler}


# One program for all lines: a bias, if only of others, makes their shapes the same.
SAMPLED = ["--temperature", "1.2", "--top-p", "0.95", "--seed", "5", "--logit-bias", "299=1"]
OWN = [
    {"prompt": "def area_7"},
    {"prompt": "def area_7", "sampling": {"seed": 5}},
    {"prompt": "def area_7"},
    {"prompt": "def", "sampling": {"temperature": 0}},
    {"prompt": "def", "sampling": {"logit_bias": {"70": 1000}, "top_k": 3}},
]


@pytest.fixture(scope="module")
def sampled(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp("sampled")
    prompts = write_lines(folder / "prompts", *OWN)
    models = runs.model("target"), runs.model("poss2")
    return generate(*models, folder, "--prompts", prompts, *SMALL, *SAMPLED)


def test_settings_of_a_line_win_and_are_written_down(sampled: list[Any]) -> None:
    first, same_seed, other_seed, greedy, biased = (line["sampling"] for line in sampled)
    assert first == same_seed
    assert (first["temperature"], first["top_p"], first["seed"]) == (1.2, 0.95, 5)
    assert first == other_seed | {"seed": 5} and other_seed["seed"] != 5
    assert (greedy["temperature"], greedy["top_p"]) == (0, 0.95)
    assert (biased["logit_bias"], biased["top_k"]) == ({"70": 1000}, 3)
    texts = [line["output_ids"] for line in sampled]
    assert texts[0] == texts[1] != texts[2]
    assert texts[4] == [70] * NUM_NEW
    assert any(line["mean_acceptance_length"] > 1 for line in sampled[:4])


def test_a_written_line_is_a_prompt_that_brings_back_its_answer(runs, sampled, tmp_path) -> None:
    record = {key: sampled[2][key] for key in ("prompt_ids", "sampling")}
    prompts = write_lines(tmp_path / "records", record)
    models = runs.model("target"), runs.model("poss2")
    (again,) = generate(*models, tmp_path, "--prompts", prompts, *SMALL)
    assert again["output_ids"] == sampled[2]["output_ids"]
