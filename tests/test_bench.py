"""The benchmark program on the tiny models, whole and in parts."""

import contextlib
import importlib.util
import io
import json
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from made_up import TREE, N, Page, made_up_answers, value, write_prompts
from programs import Runs, copy_model, generate, refusal, write_lines

from infer.bench import compare, measure
from infer.bench.__main__ import main
from infer.bench.compare import settings_of
from infer.bench.journal import Journal, Kept, describe
from infer.bench.measure import AUTOREGRESSIVE, Timed, load_engines, play
from infer.bench.report import format_report
from infer.lossless import main as lossless
from infer.tune.__main__ import main as tune
from poss_jax.config.bench import BenchConfig, MethodConfig
from poss_jax.config.decoding import SamplingConfig
from poss_jax.config.models import CPU_TREE, TreeConfig
from poss_jax.config.reading import UserError, build_config
from poss_jax.engine.dialogue import read_dialogues
from poss_jax.engine.engine import Engine
from poss_jax.model.quantise import Quantised

pytestmark = pytest.mark.usefixtures("asks_json")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_prompts(tmp_path_factory.mktemp("prompts"))


def models(runs: Runs, prompts: str) -> list[str]:
    words = ["--target", runs.model("target"), "--draft", f"PosS-2={runs.model('poss2')}"]
    return [*words, "--prompts", prompts, "--max-new-tokens", str(N)]


@pytest.fixture(scope="module")
def flags(runs: Runs, prompts: str) -> list[str]:
    return [*models(runs, prompts), "--num-prompts", "2", "--repeats", "3"]


def test_bench_by_flags(flags, tmp_path, capsys) -> None:
    output = tmp_path / "new" / "report"
    main([*flags, *TREE, "--phases", "--output", str(output)])
    lines = capsys.readouterr().out.splitlines()
    report = json.loads(lines[-1])
    assert lines[-2] == f"report: {output}"
    assert "\n".join(lines[:-2]) == (output / "report.md").read_text().removesuffix("\n")
    assert "\n".join(lines[:-2]) == format_report(report)
    assert json.loads((output / "report.json").read_text()) == report
    page = Page((output / "report.html").read_text())
    assert page.tags["svg"] == (1 if importlib.util.find_spec("matplotlib") is None else 4)
    assert page.coloured
    names = {path.name for path in output.glob("eagle/prompts/model_answer/*")}
    assert names == {f"{name}-temperature-0-seed-0.jsonl" for name in report["methods"]}

    assert list(report["methods"]) == ["autoregressive", "PosS-2"]
    (group,) = report["groups"]
    assert (group["set"], group["questions"], report["repeats"]) == ("prompts", 2, 3)
    for name, method in report["methods"].items():
        drafts = name != "autoregressive"
        rows = group["methods"][name]["all"]
        assert rows["equal_outputs"] == rows["answers"] == 2
        levels = ["draft", *(f"draft/level{depth}" for depth in range(3))] * drafts
        names = {"prefill", *levels, "verify", "accept", "commit", "round"}
        times = method["phase_milliseconds"]
        assert set(times) == set(method["costs"]) == names
        of_levels = [times[f"draft/level{depth}"] for depth in range(3) if drafts]
        assert sum(of_levels) == pytest.approx(times.get("draft", 0.0))
        assert method["first_token_seconds"]["cold"] > 0 < method["first_token_seconds"]["warm"]
        assert (len(value(rows["positionwise_acceptance"])) in range(1, 4)) == drafts
        assert (value(rows["acceptance_length"]) > 1.2) == drafts
        assert (method["memory"]["draft_parameters"] > 0) == drafts
    assert value(group["methods"]["autoregressive"]["all"]["speed_up"]) == 1
    lines = map(json.loads, (output / "answers.jsonl").read_text().splitlines())
    text = next(line["turns"][0]["text"] for line in lines if "PosS-2" in line["key"])
    pieces = group["example"]["answers"].pop("PosS-2")
    assert "".join(piece for piece, _ in pieces) == text and not group["example"]["answers"]
    assert any(depth > 1 for _, depth in pieces)
    assert min(report["autoregressive_step_milliseconds"].values()) > 0
    assert set(report["roofline"]) == {"device", "flops_by_rows"}


@pytest.mark.slow
def test_drift_is_part_of_the_report(flags, tmp_path, capsys) -> None:
    main([*flags, *"--tree-depth 1 --drift --output".split(), str(tmp_path / "report")])
    table, _, report = capsys.readouterr().out.rstrip().rsplit("\n", 2)
    drift = json.loads(report)["drift"]
    assert "## By position" in table and drift["prompts"] + len(drift["looping_prompts"]) == 2
    assert len(drift["drafts"]["PosS-2"]["by_depth"]["feature_cosine"]["value"]) == 8
    page = (tmp_path / "report" / "report.html").read_text()
    for figure in ("cosine with the target", "where decoding begins one (dashed)"):
        assert (figure in page) == (importlib.util.find_spec("matplotlib") is not None)


def test_all_turns_of_a_question_are_played_and_added_up(runs, tmp_path, capsys) -> None:
    question = {"question_id": 81, "category": "writing", "turns": ["def area_7", "heig"]}
    prompts = write_lines(tmp_path / "questions.jsonl", question, {"prompt": "def area_7"})
    main([*models(runs, prompts), *TREE, "--repeats", "1"])
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    (group,) = report["groups"]
    assert [rows["all"]["equal_outputs"] for rows in group["methods"].values()] == [2, 2]
    # The same conversation as the generation program holds, whose statistics are per turn.
    words = ["--prompts", prompts, *TREE, "--max-new-tokens", str(N), "--lookup", "0"]
    lines = generate(runs.model("target"), runs.model("poss2"), tmp_path, *words)
    assert [line["turn"] for line in lines] == [0, 1, 0]
    first, second, other = (line["accepted_per_round"] for line in lines)
    lengths = [1 + sum(rounds) / len(rounds) for rounds in ([*first, *second], other)]
    found = value(group["methods"]["PosS-2"]["all"]["acceptance_length"])
    assert found == pytest.approx(sum(lengths) / 2)


def test_methods_decode_as_they_say(runs: Runs) -> None:
    draft, small = runs.model("poss2"), TreeConfig(depth=1, top_k=2, total_tokens=3)
    config = BenchConfig(
        target=runs.model("target"),
        drafts={"plain": draft},
        methods={
            "small": MethodConfig(draft=draft, tree=small),
            "sampled": MethodConfig(draft=draft, drafting="sampled", lookup=0),
            "int8": MethodConfig(quantise="int8", lookup=0),
            "copies": MethodConfig(tree=small, lookup=5),
        },
        lookup=3,
    )
    engines = load_engines(config)
    assert {name: engine.settings.lookup for name, engine in engines.items()} == {
        "autoregressive": 0,
        "plain": 3,
        "small": 3,
        "sampled": 0,
        "int8": 0,
        "copies": 5,
    }
    assert engines["copies"].decode_config(1).num_copied == 2
    assert {name: one.trees for name, one in engines.items() if one.draft_config} == {
        "plain": {1: CPU_TREE},
        "small": {1: small},
        "sampled": {1: CPU_TREE},
    }
    drafting = {name: engine.settings.drafting for name, engine in engines.items()}
    assert [name for name in drafting if drafting[name] == "sampled"] == ["sampled"]
    heads = {name: one.weights.target["head"]["weight"] for name, one in engines.items()}
    assert {name for name, head in heads.items() if isinstance(head, Quantised)} == {"int8"}
    assert all(heads[name] is heads["autoregressive"] for name in ("plain", "small", "sampled"))


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"drafts": {"a": "d"}, "methods": {"a": {"quantise": "int8"}}}, "is a draft's name, too"),
        ({"lookup": 3}, "lookup: changes drafts alone; give drafts or"),
        ({"methods": {"a": {"drafft": "d"}}}, "unknown key 'methods.a.drafft'; did you mean"),
        ({"methods": {"a": {"drafting": "argmax"}}}, "methods.a: drafting: is a draft's; give "),
    ],
)
def test_methods_that_cannot_be_compared_are_refused(settings, error) -> None:
    with pytest.raises(UserError) as caught:
        build_config(BenchConfig, {"target": "t"} | settings, origin="x")
    assert error in str(caught.value)


def test_other_methods_than_coupled_drafts_are_neither_checked_nor_tuned(flags) -> None:
    for main_of in (lossless, tune):
        with pytest.raises(UserError, match="sampled drafts change texts; choose"):
            main_of([*flags, *"--temperature 1 --drafting sampled".split()])
    with pytest.raises(UserError, match="want drafts alone, got methods"):
        lossless(["--target=t", "--draft=d=d", "methods.a.quantise=int8"])


def test_questions_answered_together_have_the_same_answers(runs: Runs) -> None:
    engine = Engine.load(runs.model("target"))
    records = [{"turns": ["a", "def"]}, {"prompt": "heig"}, {"turns": ["de"]}]
    questions = read_dialogues(records, SamplingConfig(temperature=1.0), N)
    for question in questions:
        question.check(engine)
    alone = [play(engine, [question])[0] for question in questions]
    together = play(engine, questions, batch_size=2)

    def outputs(timed: list[list[Timed]]) -> list[list[list[int]]]:
        return [[turn.answer.output_ids for turn in turns] for turns in timed]

    assert list(map(len, together)) == [2, 1, 1]
    assert outputs(together) == outputs(alone)
    (first, _), (second,), _ = together
    assert first.seconds == second.seconds > 0
    assert first.first_token_seconds == second.first_token_seconds


def test_draft_of_another_target_needs_permission(runs: Runs, tmp_path: Path) -> None:
    other = {"name": "another", "head_sha256": "0" * 64}
    target = copy_model(runs.model("target"), tmp_path / "model", target=other)
    config = BenchConfig(target=target, drafts={"EAGLE-2": runs.model("eagle")})
    with pytest.raises(UserError, match=r"set allow_target_mismatch \(--allow-target-mismatch\)"):
        load_engines(config)
    assert len(load_engines(replace(config, allow_target_mismatch=True))) == 2


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ("--target nowhere", "model folder nowhere does not exist"),
        ("", "want --target DIR, or the default model, whose weights are not here; fetch them"),
        ("--target {target} --draft ={eagle}", "want [NAME=]DIR"),
        ("--target {target} --draft A={eagle} --draft A={poss2}", "each name once, got"),
        ("--target {target} --draft autoregressive={eagle}", "is the baseline's name"),
        ("--target {target} --draft A={target}", "want a draft, got a target"),
        ("--target {target} --prompts nowhere.jsonl", "nowhere.jsonl: want a readable file"),
        ("--target {target} --num-prompts 1 --max-new-tokens 200", "do not fit a length of 256"),
        ("--target {target} --dataset nothing", "questions 'nothing': want a .jsonl file, a"),
        ("--target {target} --seeds 1 --seeds 1", "seeds: want each once, got [1, 1]"),
        (
            "--target {target} --draft A={eagle} --draft-vocabulary v.json --drift",
            "drift: is measured on models as they are; leave out draft_vocabulary",
        ),
        (
            "--target {target} --draft A={eagle} --drift --max-new-tokens 8",
            "drift: want max_new_tokens of more than 8, got 8",
        ),
        ("--target {target} --drift", "want at least one draft"),
        ("--target nowhere --output {file}", "is a file; name a folder that does not exist yet"),
        ("--target nowhere --output {file}/x", "is not a writable folder; choose another place"),
    ],
)
def test_bad_input_writes_nothing(runs, prompts, tmp_path, monkeypatch, arguments, error) -> None:
    names = {name: runs.model(name) for name in ("target", "eagle", "poss2")}
    names |= {"prompts": prompts, "file": write_lines(tmp_path / "file", "{}")}
    words = [word.format(**names) for word in arguments.split()]
    monkeypatch.setattr("poss_jax.bundled.default._PACKAGE", "no_such_package")
    monkeypatch.setenv("POSS_JAX_CACHE", str(tmp_path / "cache"))
    assert error in refusal(main, "--output", str(tmp_path / "out" / "report"), *words)
    assert not (tmp_path / "out").exists()


def test_only_a_report_is_replaced_and_only_by_overwrite(tmp_path: Path) -> None:
    arguments = ["--target", "nowhere", "--output", str(tmp_path)]
    refused = "is not empty; name another folder or empty this one"
    (tmp_path / "notes.txt").write_text("no part of a report")
    assert refused in refusal(main, *arguments, "--overwrite")
    (tmp_path / "report.md").write_text("earlier")
    assert refused in refusal(main, *arguments)
    assert refusal(main, *arguments, "--overwrite").startswith("model folder nowhere does not")
    assert (tmp_path / "report.md").read_text() == "earlier"


# --------------------------------------------------------------------------------------------------
# A benchmark that is interrupted, or given more, ends with the same numbers


def test_a_journal_goes_on_where_it_stopped(tmp_path):
    first, second, *_ = made_up_answers()
    Journal(tmp_path, {"a": 1}).add(first)
    path = tmp_path / "answers.jsonl"
    path.write_bytes(path.read_bytes() + b'{"key": [["made up", 0.0')
    journal = Journal(tmp_path, {"a": 1})
    assert list(journal.answers.values()) == [first]
    journal.add(second)
    assert list(Journal(tmp_path, {"a": 1}).answers.values()) == [first, second]
    assert not Journal(tmp_path, {"a": 2}, from_scratch=True).answers


def test_a_journal_of_something_else_is_refused(tmp_path):
    Journal(tmp_path, {"a": 1, "b": 2})
    with pytest.raises(UserError, match=r"benchmark of other settings \(b\); name another folder"):
        Journal(tmp_path, {"a": 1, "b": 3})
    (tmp_path / "answers.jsonl").write_text('{"key": 1}\n')
    with pytest.raises(UserError, match=r"answers.jsonl:1: want an answer of infer.bench"):
        Journal(tmp_path, {"a": 1, "b": 2})
    (tmp_path / "answers.jsonl").unlink()
    for name, advice in (("methods.json", "remove it"), ("bench.json", ".*--overwrite")):
        for content in ("{", "[1]"):
            (tmp_path / name).write_text(content)
            with pytest.raises(UserError, match=rf"{name}: want a JSON object, got .*{advice}"):
                Journal(tmp_path, {"a": 1, "b": 2})
    Journal(tmp_path, {"a": 1}, from_scratch=True)


def test_drafts_may_be_added_to_a_journal(tmp_path):
    for names in ({"x": 1}, {"y": 2}, {"x": 1, "y": 2, "z": 3}):
        journal = Journal(tmp_path, {"a": 1, "weights": names})
        journal.describe("y", {})
    Journal(tmp_path, {"a": 1, "weights": {"x": 2}})  # of which nothing was measured yet
    with pytest.raises(UserError, match=r"other settings \(weights\)"):
        Journal(tmp_path, {"a": 1, "weights": {"y": 1}})
    Journal(tmp_path, {"a": 1, "weights": {"x": 2}, "methods": {"z": {}}})  # older ones have none
    Journal(tmp_path, {"a": 1, "weights": {"x": 2}, "methods": {}})


def matrix(runs: Runs, prompts: str) -> list[str]:
    """Two methods, one pass, three questions: greedy, and sampled with two seeds; 18 answers."""
    cells = "--temperatures 0 --temperatures 1 --seeds 3 --seeds 4 --repeats 1".split()
    return [*models(runs, prompts), *cells, *TREE]


@pytest.fixture(scope="module")
def complete(runs: Runs, prompts: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("whole") / "report"
    with contextlib.redirect_stdout(io.StringIO()):
        main([*matrix(runs, prompts), "--output", str(output)])
    return output


@pytest.fixture(scope="module")
def uninterrupted(complete: Path) -> dict[str, Any]:
    return json.loads((complete / "report.json").read_text())


def table(report: dict[str, Any]) -> Any:
    """The numbers of a report that are not times."""
    timed = "tokens_per_second speed_up first_token_milliseconds token_milliseconds seconds".split()
    return [
        [group["set"], group["temperature"], group["seeds"], group["looping_questions"]]
        + [
            {key: rows[key] for key in rows if key not in timed}
            for parts in group["methods"].values()
            for rows in parts.values()
        ]
        for group in report["groups"]
    ]


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3, 4))]
)
def test_a_killed_benchmark_goes_on_and_ends_with_the_same_numbers(
    runs, prompts, uninterrupted, tmp_path, monkeypatch, capsys, seed
):
    rng, played = random.Random(seed), Counter[str]()
    original, alive = play, rng.randrange(1, 18)

    def mortal(*args: Any, **settings: Any) -> list[list[Timed]]:
        played["all"] += 1
        if played["all"] > alive:
            raise KeyboardInterrupt
        return original(*args, **settings)

    monkeypatch.setattr(compare, "play", mortal)
    arguments = [*matrix(runs, prompts), "--output", str(tmp_path / "report")]
    with pytest.raises(KeyboardInterrupt):
        main(arguments)
    alive = 10**6
    main(arguments)
    assert played["all"] == 18 + 1  # one was under way, and nothing is answered twice
    assert table(json.loads(capsys.readouterr().out.splitlines()[-1])) == table(uninterrupted)


def test_a_benchmark_can_be_given_more(runs, prompts, uninterrupted, tmp_path, monkeypatch, capsys):
    output = ["--output", str(tmp_path / "report")]
    first = matrix(runs, prompts)
    few = [*first[:2], *first[4:6], *"--temperatures 1 --seeds 4 --repeats 1".split(), *TREE]
    for arguments in ([*few, "--max-new-tokens", str(N)], first):
        main([*arguments, *output])
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert table(report) == table(uninterrupted)
    lines = (tmp_path / "report" / "answers.jsonl").read_text().splitlines()
    assert len(lines) == 18  # the first run's lines were kept

    def again(*args: Any) -> None:
        pytest.fail("what is complete is neither compiled nor measured again")

    monkeypatch.setattr(compare, "compile_programs", again)
    monkeypatch.setattr(compare, "measure_card", again)
    main([*first, *output])
    known = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (known["methods"], known["groups"]) == (report["methods"], report["groups"])


def test_temperatures_and_seeds_make_a_matrix(complete, uninterrupted):
    """A machine that slows down slows all methods; each question begins with another one."""
    groups = uninterrupted["groups"]
    assert [(group["temperature"], group["seeds"]) for group in groups] == [(0, [3]), (1, [3, 4])]
    for group, count in zip(groups, (3, 6), strict=True):
        rows = [parts["all"] for parts in group["methods"].values()]
        assert [(row["answers"], row["equal_outputs"]) for row in rows] == [(count, count)] * 2
    lines = map(json.loads, (complete / "answers.jsonl").read_text().splitlines())
    order = [(line["key"][3], line["key"][2]) for line in lines][:6]
    draft, plain = "PosS-2", "autoregressive"
    assert order == [(0, plain), (0, draft), (1, draft), (1, plain), (2, plain), (2, draft)]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("POSS_JAX_CACHE", str(tmp_path))
    return tmp_path


def never() -> None:
    pytest.fail("what was kept is not measured again")


def test_kept_results_are_not_measured_again(cache: Path) -> None:
    first = Kept("tune", {"prompts": [1]})
    assert first.get("a", lambda: {"sizes": {1: 2.5}}) == {"sizes": {"1": 2.5}}
    again = Kept("tune", {"prompts": [1]})
    assert again.get("a", never) == {"sizes": {"1": 2.5}}
    assert again.get("b", lambda: None) is None
    again.finish()
    assert not list(cache.rglob("*.jsonl"))


@pytest.mark.usefixtures("cache")
def test_other_settings_and_half_a_line_are_measured_anew() -> None:
    kept = Kept("tune", {"prompts": [1]})
    kept.get("a", lambda: 1)
    assert Kept("tune", {"prompts": [2]}).get("a", lambda: 2) == 2
    assert Kept("lossless", {"prompts": [1]}).get("a", lambda: 3) == 3
    with kept.path.open("a") as file:
        file.write(json.dumps({"b": 2}))  # without its end
    assert Kept("tune", {"prompts": [1]}).get("b", lambda: 4) == 4
    assert Kept("tune", {"prompts": [1]}).get("b", never) == 4


@pytest.mark.parametrize("changed", ["vocabulary", "trees", "weights", "device", "int8_products"])
def test_what_decides_results_is_known_by_its_content(changed, monkeypatch) -> None:
    of_run = {"vocabulary": (1, 2), "trees": {1: None}, "weights": "a"}
    of_run |= {"device": "cpu", "int8_products": "integer"}

    def identify(**fields: Any) -> list[Any]:
        draft = {"vocabulary": np.array(fields["vocabulary"])}
        weights = SimpleNamespace(draft=draft)
        engine: Any = SimpleNamespace(trees=fields["trees"], weights=weights)
        record = SimpleNamespace(fingerprint=fields["weights"])
        process = {"int8_products": fields["int8_products"], "versions": versions}
        monkeypatch.setattr(measure, "read_record", lambda folder: record)
        monkeypatch.setattr(measure, "provenance", lambda: process)
        monkeypatch.setattr(measure, "device_name", lambda: fields["device"])
        engines = {AUTOREGRESSIVE: engine, "P": engine}
        return [describe(config, engines, []), settings_of(config, engines, {})]

    versions = {"jax": "1", "poss_jax": "2", "python": "3"}
    config = BenchConfig(target="t", drafts={"P": "d"}, draft_vocabulary="v.json")
    before = identify(**of_run)
    assert identify(**of_run) == before
    for old, new in zip(before, identify(**of_run | {changed: (3,)}), strict=True):
        assert old != new
