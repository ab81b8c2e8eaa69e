"""The benchmark: its report worked out by hand, and the program on the tiny models."""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from programs import (
    Runs,
    copy_model,
    generate,
    refusal,
    tiny_runs,
    write_config,
    write_lines,
)

from infer import bench as program
from infer.bench import first_prompts, load_decoders, main, read_questions
from infer.costs import Device
from infer.measure import Run, play
from infer.phases import phases_to_round
from infer.report import build_report, format_card, format_report
from infer.roofline import Roofline
from poss_jax.config.decoding import BenchConfig, SamplingConfig
from poss_jax.config.models import CPU_TREE, TreeConfig
from poss_jax.config.reading import UserError
from poss_jax.engine.answers import Generation
from poss_jax.engine.dialogue import read_dialogues
from poss_jax.engine.engine import Engine

N = 12
TREE = "--tree-depth 3 --tree-top-k 2 --tree-total-tokens 6".split()  # compiled by other tests, too


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    with tiny_runs(tmp_path_factory) as runs:
        yield runs


# --------------------------------------------------------------------------------------------------
# The report of two made-up prompts: one whose output is diverse, one whose output loops

DIVERSE, LOOPING = [1, 2, 3, 4, 5, 6, 7, 8], [9] * 8


def answer(output: list[int], accepted: list[int], offered: list[int]) -> Generation:
    return Generation(
        prompt_ids=[0],
        output_ids=output,
        text=None,
        accepted_per_round=accepted,
        offered_per_round=offered,
        stop_reason="length",
    )


def made_up_report() -> dict[str, Any]:
    plain = [answer(DIVERSE, [0] * 7, [0] * 7), answer(LOOPING, [0] * 7, [0] * 7)]
    drafted = [answer(DIVERSE, [3, 1, 1], [4, 2, 1]), answer(LOOPING, [4, 0], [4, 1])]
    another = [drafted[0], replace(drafted[1], output_ids=[9] * 7 + [8])]
    return build_report(
        8,
        "plain",
        {
            "plain": [Run(plain, [1.0, 3.0]), Run(plain, [2.0, 2.0])],
            "draft": [Run(drafted, [0.5, 0.5]), Run(another, [0.5, 1.5])],
        },
    )


def test_report_says_which_prompts_loop_and_which_outputs_are_equal() -> None:
    report = made_up_report()
    assert (report["prompts"], report["repeats"], report["max_new_tokens"]) == (2, 2, 8)
    assert report["distinct_4gram_share"] == [1.0, 1 / 5]
    assert report["looping_prompts"] == [1]
    plain, draft = report["methods"]["plain"], report["methods"]["draft"]
    assert plain["all"]["equal_outputs"] == 2
    assert draft["all"]["equal_outputs"] == 1  # the second pass differs
    assert (draft["not_looping"]["equal_outputs"], draft["looping"]["equal_outputs"]) == (1, 0)


def test_report_of_a_group() -> None:
    groups = made_up_report()["methods"]["draft"]
    assert groups["not_looping"] == {
        "acceptance_length": pytest.approx(1 + 5 / 3),
        "pooled_acceptance_length": pytest.approx(1 + 5 / 3),
        # offered 4 2 1, accepted 3 1 1: three rounds of three, one of two, the only one, not it
        "positionwise_acceptance": [1, 1 / 2, 1, 0],
        "tokens_per_second": 16,
        "tokens_per_second_per_repeat": [16, 16],
        "speed_up": 3,  # median of 16 / 8 and 16 / 4
        "speed_up_per_repeat": [2, 4],
        "equal_outputs": 1,
    }
    assert groups["all"] == {
        "acceptance_length": pytest.approx((1 + 5 / 3 + 3) / 2),
        "pooled_acceptance_length": pytest.approx(1 + 9 / 5),
        "positionwise_acceptance": [4 / 5, pytest.approx(2 / 3), 1, 1 / 2],
        "tokens_per_second": 12,  # median of 16 tokens in 1 s and in 2 s
        "tokens_per_second_per_repeat": [16, 8],
        "speed_up": 3,
        "speed_up_per_repeat": [4, 2],
        "equal_outputs": 1,
    }
    assert groups["looping"]["acceptance_length"] == 3


def made_up_card(milliseconds: dict[str, float]) -> dict[str, Any]:
    """Phases of a method, all with the same costs."""
    floor = {"bytes": 2.5e6, "flops": 1e7, "floor_milliseconds": 0.25, "floor_to_measured": 0.125}
    return {
        "phase_milliseconds": milliseconds,
        "phases_to_round": phases_to_round(milliseconds),
        "costs": {"verify": floor},
        "first_token_seconds": {"cold": 1.5, "warm": 0.0125},
    }


def test_report_is_printed_as_tables() -> None:
    steps = {"plain": 2.5, "loop": 3, "loop_to_plain": 1.2, "floor": 1.5, "floor_to_loop": 0.5}
    device = {"name": "abacus", "bytes_per_second": 1e10, "flops_per_second": 2e11}
    report = made_up_report() | {"autoregressive_step_milliseconds": steps}
    report["roofline"] = {"device": device}
    plain = made_up_card({"verify": 2, "accept": 0.5, "commit": 0.25, "round": 2.5})
    parts = {"draft": 1.5, "draft/level0": 1.5, "verify": 2, "accept": 0, "commit": 0.5}
    draft = made_up_card(parts | {"round": 5})
    report["methods"]["plain"] |= plain | {"compile_seconds": 1}
    report["methods"]["draft"] |= draft | {"compile_seconds": 2.25}
    cells = (
        "acceptance length | pooled | tokens/s | speed-up | pos 1 | pos 2 | pos 3 | pos 4 | equal"
    )
    head = f"| method | {cells} |\n|---|---|---|---|---|---|---|---|---|---|"
    expected = f"""\
2 prompts x 8 new tokens, 2 repeats; 1 prompts loop (distinct 4-grams below 0.5): [1]

prompts: not looping

{head}
| plain | 1.00 | 1.00 | 6 | 1.00 |  |  |  |  | 1 |
| draft | 2.67 | 2.67 | 16 | 3.00 | 100 % | 50 % | 100 % | 0 % | 1 |

prompts: looping

{head}
| plain | 1.00 | 1.00 | 3 | 1.00 |  |  |  |  | 1 |
| draft | 3.00 | 3.00 | 11 | 3.67 | 50 % | 100 % | 100 % | 100 % | 0 |

prompts: all

{head}
| plain | 1.00 | 1.00 | 4 | 1.00 |  |  |  |  | 2 |
| draft | 2.83 | 2.80 | 12 | 3.00 | 80 % | 67 % | 100 % | 50 % | 1 |

| method | draft ms | verify ms | accept ms | commit ms | round ms | sum / round | compile s | \
first token, cold s | warm s |
|---|---|---|---|---|---|---|---|---|---|
| plain |  | 2.00 | 0.50 | 0.25 | 2.50 | 1.10 | 1.0 | 1.50 | 0.0125 |
| draft | 1.50 | 2.00 | 0.00 | 0.50 | 5.00 | 0.80 | 2.2 | 1.50 | 0.0125 |

autoregressive loop 3.00 ms per token, plain decode step 2.50 ms: ratio 1.20; floor 1.50 ms: 50% \
of the loop

abacus: 10.0 GB/s, 200 GFLOP/s

| method | phase | MB | GFLOP | floor ms | ms | floor / ms |
|---|---|---|---|---|---|---|
| plain | verify | 2.50 | 0.010 | 0.250 | 2.000 | 12% |
| draft | verify | 2.50 | 0.010 | 0.250 | 2.000 | 12% |"""
    assert format_report(report) == expected


def test_group_without_prompts_has_no_table() -> None:
    run = Run([answer(DIVERSE, [0], [0])], [1.0])
    report = build_report(8, "plain", {"plain": [run]})
    assert set(report["methods"]["plain"]) == {"all", "not_looping"}


# --------------------------------------------------------------------------------------------------
# The program


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> str:
    lines = [{"prompt": "def area_7"}, {"prompt_ids": [0, 70, 71]}, {"prompt": "heig"}]
    return write_lines(tmp_path_factory.mktemp("prompts") / "prompts.jsonl", *lines)


@pytest.fixture(scope="module")
def flags(runs: Runs, prompts: str) -> list[str]:
    models = ["--target", runs.model("target"), "--draft", f"PosS-2={runs.model('poss2')}"]
    sizes = ["--num-prompts", "2", "--max-new-tokens", str(N), "--repeats", "3"]
    return [*models, "--prompts", prompts, *sizes]


def test_bench_by_flags(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "new" / "report"
    main([*flags, *TREE, "--output", str(output)])
    lines = capsys.readouterr().out.splitlines()
    report = json.loads(lines[-1])
    assert lines[-2] == f"report: {output}"
    assert "\n".join(lines[:-2]) == (output / "report.md").read_text().removesuffix("\n")
    assert "\n".join(lines[:-2]) == format_report(report)
    assert json.loads((output / "report.json").read_text()) == report
    plot = output / "acceptance.png"
    assert plot.exists() == (importlib.util.find_spec("matplotlib") is not None)
    assert not plot.exists() or plot.read_bytes().startswith(b"\x89PNG")

    assert list(report["methods"]) == ["autoregressive", "PosS-2"]
    assert (report["prompts"], report["repeats"]) == (2, 3)
    for name, method in report["methods"].items():
        drafts = name != "autoregressive"
        assert method["all"]["equal_outputs"] == 2
        levels = ["draft", *(f"draft/level{depth}" for depth in range(3))] * drafts
        names = {"prefill", *levels, "verify", "accept", "commit", "round"}
        assert set(method["phase_milliseconds"]) == set(method["costs"]) == names
        assert method["phases_to_round"] > 0
        assert method["first_token_seconds"]["cold"] > 0 < method["first_token_seconds"]["warm"]
        assert (len(method["all"]["positionwise_acceptance"]) in range(1, 4)) == drafts
        assert (method["all"]["acceptance_length"] > 1.2) == drafts
        assert len(method["all"]["speed_up_per_repeat"]) == 3
    assert report["methods"]["autoregressive"]["all"]["speed_up"] == 1
    assert min(report["autoregressive_step_milliseconds"].values()) > 0
    assert set(report["roofline"]) == {"device", "flops_by_rows"}


def test_roofline_is_measured_anew_and_shown(
    flags: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    roofline = Roofline(Device("abacus", 1e3, 1e3, 1e3), {"square": 1e3})
    monkeypatch.setattr(program, "measure_roofline", lambda: roofline)
    main([*flags, *TREE, "--roofline"])
    table, _, last = capsys.readouterr().out.removesuffix("\n").rpartition("\n")
    report = json.loads(last)
    assert table == format_card(report)
    assert table.startswith("abacus: 0.0 GB/s, 0 GFLOP/s")
    assert list(report["methods"]) == ["autoregressive", "PosS-2"]
    verify = report["methods"]["PosS-2"]["costs"]["verify"]
    assert verify["floor_milliseconds"] == max(verify["bytes"], verify["flops"])


def test_sampled_outputs_are_equal_too(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    main([*flags, *TREE, *"--tree-depth 1 --temperature 1 --seed 5 --drafting argmax".split()])
    out = capsys.readouterr().out
    report = json.loads(out.splitlines()[-1])
    assert out.splitlines()[1] == "sampling: temperature 1.0, seed 5; argmax drafts"
    assert [method["all"]["equal_outputs"] for method in report["methods"].values()] == [2, 2]
    assert report["config"]["sampling"]["temperature"] == 1


def test_outputs_of_sampled_drafts_are_not_compared(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    sampled = [*flags, *TREE, *"--tree-depth 1 --temperature 1 --drafting sampled".split()]
    main(sampled)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:3] == [
        "sampling: temperature 1.0; sampled drafts",
        "outputs are not compared: with sampled drafts they equal autoregressive ones in "
        "distribution only",
    ]
    rows = [line for line in lines if line.startswith("| PosS-2 | ")]
    assert rows[0].endswith(" |  |")
    for action in ("--check-lossless", "--autotune"):
        with pytest.raises(UserError, match="are the target's in distribution only"):
            main([*sampled, action])


def test_flags_win_over_the_config(
    runs: Runs, flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[BenchConfig] = []

    def bench(config: BenchConfig) -> None:
        seen.append(config)
        raise KeyboardInterrupt

    monkeypatch.setattr(program, "bench", bench)
    values = {
        "target": runs.model("target"),
        "drafts": {"EAGLE-2": runs.model("eagle")},
        "tree": {"depth": 2, "top_k": 3, "total_tokens": 5},
        "max_new_tokens": 7,
    }
    file = write_config(tmp_path, values)
    for arguments in (
        ["--config", file],
        ["--config", file, "repeats=2", "--tree-depth", "6", "--num-prompts", "9", "tree.top_k=1"],
        ["--config", file, *flags],
        [*flags, "--draft", "B=b=c", "--tree-depth", "3", "--allow-target-mismatch"],
    ):
        with pytest.raises(KeyboardInterrupt):
            main(arguments)
    from_file, changed, overridden, by_flags = seen
    assert from_file == BenchConfig(**values | {"tree": TreeConfig(**values["tree"])})
    tree = TreeConfig(depth=6, top_k=1, total_tokens=5)
    assert changed == replace(from_file, repeats=2, num_prompts=9, tree=tree)
    assert overridden.drafts == {"PosS-2": runs.model("poss2")}
    assert (overridden.tree, overridden.max_new_tokens) == (from_file.tree, N)
    assert by_flags.drafts == {"PosS-2": runs.model("poss2"), "B": "b=c"}
    assert by_flags.tree == replace(CPU_TREE, depth=3)
    assert by_flags.allow_target_mismatch and not overridden.allow_target_mismatch


def test_all_turns_of_a_question_are_played_and_added_up(
    runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    question = {"question_id": 81, "category": "writing", "turns": ["def area_7", "heig"]}
    prompts = write_lines(tmp_path / "questions.jsonl", question, {"prompt": "def area_7"})
    models = runs.model("target"), runs.model("poss2")
    options = ["--prompts", prompts, *TREE, "--max-new-tokens", str(N)]
    main(["--target", models[0], "--draft", f"PosS-2={models[1]}", *options, "--repeats", "1"])
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["prompts"] == 2
    assert [method["all"]["equal_outputs"] for method in report["methods"].values()] == [2, 2]
    # The same conversation as the generation program holds, whose statistics are per turn.
    lines = generate(*models, tmp_path, *options)
    assert [line["turn"] for line in lines] == [0, 1, 0]
    first, second, other = (line["accepted_per_round"] for line in lines)
    lengths = [1 + sum(rounds) / len(rounds) for rounds in ([*first, *second], other)]
    found = report["methods"]["PosS-2"]["all"]["acceptance_length"]
    assert found == pytest.approx(sum(lengths) / 2)


def test_a_conversation_that_grows_too_long_ends_early(
    runs: Runs, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine.load(runs.model("target"))
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}] * 2
    engine.max_length = len(engine.encode(messages[:-1])) + N
    (question,) = read_dialogues([{"turns": ["a", "a"]}], SamplingConfig(), N)
    question.check(engine)
    answers, seconds = play(engine, question)
    assert len(answers) == 1 and seconds > 0
    assert "a question ends before turn 2: prompt of" in caplog.text
    assert len(question.left) == 2 and question.num_answered == 0  # as it was


def test_draft_of_another_target_needs_permission(runs: Runs, tmp_path: Path) -> None:
    other = {"name": "another", "head_sha256": "0" * 64}
    target = copy_model(runs.model("target"), tmp_path / "model", target=other)
    config = BenchConfig(target=target, drafts={"EAGLE-2": runs.model("eagle")})
    with pytest.raises(UserError, match=r"set allow_target_mismatch \(--allow-target-mismatch\)"):
        load_decoders(config)
    assert len(load_decoders(replace(config, allow_target_mismatch=True))) == 2


@pytest.mark.parametrize("source", ["stdlib", "packages:tqdm"])
def test_prompts_of_modules_are_cut_to_length(runs: Runs, source: str) -> None:
    engine = Engine.load(runs.model("target"))
    config = BenchConfig(target="", prompts=source, num_prompts=3, prompt_tokens=10)
    prompts = [one.ids for one in first_prompts(read_questions(config, engine))]
    assert [(len(ids), ids[0]) for ids in prompts] == [(10, 0)] * 3
    assert len({tuple(ids) for ids in prompts}) == 3


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ("--target nowhere", "model folder nowhere does not exist"),
        ("--config nowhere.yaml", "config nowhere.yaml: No such file"),
        ("", "want --target DIR, or the key target in the file that --config names; see --help"),
        ("--target {target} repeat=2", "options: unknown key 'repeat'; did you mean 'repeats'?"),
        ("--target {target} --draft {eagle}", "want NAME=DIR"),
        ("--target {target} --draft A={eagle} --draft A={poss2}", "A is named already"),
        ("--target {target} --draft autoregressive={eagle}", "is the baseline's name"),
        ("--target {target} --draft A={target}", "want a draft, got a target"),
        ("--target {target} --prompts nowhere.jsonl", "nowhere.jsonl: want a readable file"),
        ("--target {target} --repeats 0", "--repeats: Input should be greater than 0, got '0'"),
        ("--target {target} --num-prompts 1 --max-new-tokens 200", "do not fit a length of 256"),
        ("--target {target} --tree-top-k 0", "--tree-top-k: Input should be greater than 0"),
        ("--config {config} prompt_token=3", "unknown key 'prompt_token'; did you mean 'prompt"),
        ("--config {config} drafts.A=nowhere", "model folder nowhere does not exist"),
    ],
)
def test_bad_input_writes_nothing(
    runs: Runs, prompts: str, tmp_path: Path, arguments: str, error: str
) -> None:
    names = {name: runs.model(name) for name in ("target", "eagle", "poss2")}
    names |= {"prompts": prompts, "config": write_config(tmp_path, {"target": names["target"]})}
    words = [word.format(**names) for word in arguments.split()]
    assert error in refusal(main, *words, "--output", str(tmp_path / "out" / "report"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("output", "overwrite", "error"),
    [
        ("folder", False, "is not empty; name another folder or empty this one"),
        ("file", False, "is a file; name a folder that does not exist yet"),
        ("file", True, "is a file; name a folder that does not exist yet"),
        ("file/folder", False, "is not a writable folder; choose another place"),
    ],
)
def test_output_is_checked_before_anything_is_loaded(
    tmp_path: Path, output: str, overwrite: bool, error: str
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "report.md").write_text("earlier")
    (tmp_path / "file").write_text("text")
    arguments = ["--target", "nowhere", "--output", str(tmp_path / output)]
    assert error in refusal(main, *arguments, *["--overwrite"] * overwrite)


def test_overwrite_lets_a_report_be_replaced(tmp_path: Path) -> None:
    (tmp_path / "report.md").write_text("earlier")
    arguments = ["--target", "nowhere", "--output", str(tmp_path), "--overwrite"]
    assert refusal(main, *arguments).startswith("model folder nowhere does not exist")
    assert (tmp_path / "report.md").read_text() == "earlier"


def test_help_shows_the_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["-h"])
    assert caught.value.code == 0
    assert "    python -m infer.bench --config configs/demo/bench.yaml" in capsys.readouterr().out


def test_as_a_command_bad_input_is_one_line_and_code_2() -> None:
    command = [sys.executable, "-m", "infer.bench", "--target", "nowhere"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == (
        "error: model folder nowhere does not exist; give a folder written by poss_jax\n"
    )
