"""A benchmark that is interrupted, or given more, ends with the same numbers."""

import contextlib
import io
import json
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from made_up import TREE, N, made_up_answers, write_prompts
from programs import Runs, write_lines

from infer.bench import compare
from infer.bench.__main__ import main
from infer.bench.journal import Journal
from infer.bench.measure import Decoder, Timed, load_decoders, play
from poss_jax.checkpoint.record import DraftVocabulary, write_draft_vocabulary
from poss_jax.config.bench import BenchConfig
from poss_jax.config.reading import UserError

pytestmark = pytest.mark.usefixtures("asks_json")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_prompts(tmp_path_factory.mktemp("prompts"))


def test_a_journal_goes_on_where_it_stopped(tmp_path):
    first, second, *_ = made_up_answers()
    Journal(tmp_path, {"a": 1}).add(first)
    path = tmp_path / "answers.jsonl"
    path.write_bytes(path.read_bytes() + b'{"key": [["made up", 0.0')
    journal = Journal(tmp_path, {"a": 1})
    assert list(journal.answers.values()) == [first]
    assert list(journal.missing([first.key, second.key])) == [second.key]
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


@pytest.mark.parametrize("content", ["", "{", "[1]", '"text"'])
def test_damaged_files_of_a_journal_are_named(tmp_path, content):
    Journal(tmp_path, {"a": 1})
    (tmp_path / "methods.json").write_text(content)
    with pytest.raises(UserError, match=r"methods.json: want a JSON object, got .*; remove it"):
        Journal(tmp_path, {"a": 1})
    (tmp_path / "bench.json").write_text(content)
    with pytest.raises(UserError, match=r"bench.json: want a JSON object, got .*--overwrite"):
        Journal(tmp_path, {"a": 1})
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
    models = ["--target", runs.model("target"), "--draft", f"PosS-2={runs.model('poss2')}"]
    cells = "--temperatures 0 --temperatures 1 --seeds 3 --seeds 4 --repeats 1".split()
    return [*models, "--prompts", prompts, *cells, *TREE, "--max-new-tokens", str(N)]


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
    timed = {"tokens_per_second", "speed_up", "first_token_milliseconds", "token_milliseconds"}
    timed |= {"seconds"}
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

    monkeypatch.setattr(Decoder, "compile", again)
    monkeypatch.setattr(compare, "measure_card", again)
    main([*first, *output])
    known = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (known["methods"], known["groups"]) == (report["methods"], report["groups"])


def test_a_benchmark_with_another_vocabulary_does_not_go_on(runs, tmp_path):
    config = BenchConfig(target=runs.model("target"), drafts={"A": runs.model("eagle")})
    path, settings = tmp_path / "v.json", []
    for tokens in ((4, 5, 6), (4, 5, 7)):
        write_draft_vocabulary(path, DraftVocabulary(vocab_size=300, tokens=tokens))
        limited = replace(config, draft_vocabulary=str(path))
        settings.append(compare.settings_of(limited, load_decoders(limited), {}))
        path.unlink()
    Journal(tmp_path / "report", settings[0]).describe("A", {})
    with pytest.raises(UserError, match=r"of other settings \(draft_vocabularies\)"):
        Journal(tmp_path / "report", settings[1])


@pytest.mark.slow
def test_a_benchmark_can_be_given_another_set(runs, prompts, tmp_path):
    output = tmp_path / "report"
    arguments = [*matrix(runs, prompts), "--output", str(output)]
    other = write_lines(tmp_path / "other.jsonl", {"prompt": "de"})
    main(arguments)
    kept = (output / "answers.jsonl").read_text()
    main([*arguments, "--dataset", other])
    answers = (output / "answers.jsonl").read_text()
    assert answers.startswith(kept) and len(answers.splitlines()) == 18 + 6
    groups = json.loads((output / "report.json").read_text())["groups"]
    assert [group["questions"] for group in groups] == [3, 3, 1, 1]


def test_temperatures_and_seeds_make_a_matrix(uninterrupted):
    groups = uninterrupted["groups"]
    found = [(group["temperature"], group["seeds"]) for group in groups]
    assert found == [(0, [3]), (1, [3, 4])]
    assert [group["methods"]["PosS-2"]["all"]["answers"] for group in groups] == [3, 6]
    assert all(
        rows["all"]["equal_outputs"] == rows["all"]["answers"]
        for group in groups
        for rows in group["methods"].values()
    )


def test_methods_take_turns(complete):
    """A machine that slows down slows all of them; each question begins with another one."""
    lines = map(json.loads, (complete / "answers.jsonl").read_text().splitlines())
    order = [(line["key"][3], line["key"][2]) for line in lines][:6]
    draft, plain = "PosS-2", "autoregressive"
    assert order == [(0, plain), (0, draft), (1, draft), (1, plain), (2, plain), (2, draft)]


@pytest.mark.slow
def test_batches_give_the_numbers_of_single_questions(runs, prompts, uninterrupted, capsys):
    main([*matrix(runs, prompts), "batch_size=2"])
    assert table(json.loads(capsys.readouterr().out.splitlines()[-1])) == table(uninterrupted)
