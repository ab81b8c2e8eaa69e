"""Tuned trees: predictions against runs, files next to a draft, and the whole program."""

import json
import logging
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from programs import Runs, copy_model, generate, refusal, write_lines

from infer.bench.journal import Kept
from infer.bench.measure import Timed
from infer.tune import run as tuning
from infer.tune import search
from infer.tune.__main__ import main
from infer.tune.search import (
    Costs,
    Recording,
    Tuning,
    choose_few,
    predict,
    predict_all,
    rank_paths,
    record_all,
)
from poss_jax import Engine, Generation, SamplingConfig, TreeConfig
from poss_jax.checkpoint.record import DraftVocabulary, read_record, write_draft_vocabulary
from poss_jax.config.bench import BenchConfig
from poss_jax.config.decoding import EngineConfig
from poss_jax.config.models import CPU_TREE, MeshConfig
from poss_jax.config.reading import UserError
from poss_jax.engine import trees as tree_files
from poss_jax.engine.trees import Trees, find_tuned, read_trees, tuned_file, write_tuned
from poss_jax.model.sharding import decoding_mesh

pytestmark = pytest.mark.usefixtures("asks_json")

PROMPTS = ["def area_7", "class", "return x"]
SMALL = TreeConfig(depth=2, top_k=2, total_tokens=4)


def tree(depth: int, top_k: int, total_tokens: int) -> TreeConfig:
    return TreeConfig(depth=depth, top_k=top_k, total_tokens=total_tokens)


def test_the_path_of_a_text_is_ranked_among_the_candidates() -> None:
    # level 0: tokens 5, 6; level 1: children of 5: 7, 8, of 6: 7, 9
    step = {
        "tokens": np.array([5, 6, 7, 8, 7, 9]),
        "scores": np.array([-1.0, -2.0, -1.5, -4.0, -2.0, -3.0]),
        "parents": np.array([-1, -1, 0, 0, 1, 1]),
    }
    none = np.iinfo(np.int32).max
    shape = TreeConfig(depth=2, top_k=2, total_tokens=2)

    def ranked(*text: int) -> list[list[int]]:
        return rank_paths([step], [0, *text], shape)[0].tolist()

    assert ranked(5, 7) == [[1, none], [1, 2]]
    assert ranked(6, 7) == [[2, none], [3, 4]]  # 5 and its 7 come before 6, which ties its own 7
    assert ranked(6, 8) == [[2, none], [3, none]]  # 8 follows 5 alone
    assert ranked(6) == [[2, none], [3, none]]
    assert ranked(7, 7) == [[none, none], [none, none]]


def test_predicted_rounds_are_those_that_run(runs, tmp_path, monkeypatch) -> None:
    """Also by a recording that an interrupted run kept."""
    monkeypatch.setenv("POSS_JAX_CACHE", str(tmp_path))
    monkeypatch.setattr(search, "_TOP_KS", {"cpu": (3,)})
    engine = Engine.load(runs.model("target"), runs.model("poss2"))
    prompts = [
        engine.prepare(text, 24, SamplingConfig(temperature=temperature, seed=3))
        for text, temperature in zip(PROMPTS, (0, 1, 0.5), strict=True)
    ]
    record_all(Tuning("P", engine, prompts, [1], Kept("tune", {})), 2)
    monkeypatch.setattr(search, "record", lambda *_: pytest.fail("recorded again"))
    recording = record_all(Tuning("P", engine, prompts, [1], Kept("tune", {})), 2)[3]
    chosen = tree(2, 3, 6)  # fewer nodes than were recorded
    answers = engine.with_tree(chosen).decode(prompts)
    accepted = [answer.accepted_per_round for answer in answers]
    assert recording.accepted(chosen) == accepted
    assert recording.lengths == [len(answer.output_ids) for answer in answers]
    assert sum(map(sum, accepted)) > 10  # otherwise nothing was predicted


COSTS = Costs(
    first_level=1.0,
    level={1: 0.5, 3: 1.5},
    rest={2: 2.0, 8: 5.0},
    plain=2.5,
    start=10.0,
    plain_start=8.0,
)


def test_a_round_costs_its_parts() -> None:
    assert COSTS.round(None) == 2.5
    assert COSTS.round(tree(1, 1, 2)) == 1 + 2
    assert COSTS.round(tree(3, 2, 5)) == 1 + 2 * 1 + 3.5  # between the measured ones


def test_a_batch_runs_as_many_rounds_as_its_longest_answer() -> None:
    accepted, lengths = [[1, 1], [0, 0, 0], [3]], [5, 4, 5]
    alone = predict(lengths, accepted, COSTS, tree(1, 1, 2), 1)
    assert alone == (14 / (3 * 10 + 6 * 3), pytest.approx((2 + 1 + 4) / 3))
    together = predict(lengths, accepted, COSTS, tree(1, 1, 2), 2)
    assert together.tokens_per_second == 14 / (2 * 10 + (3 + 1) * 3)
    assert predict([5], [[0] * 4], COSTS, None, 1).tokens_per_second == 5 / (8 + 4 * 2.5)


def test_the_fastest_predictions_are_tried() -> None:
    ranks = np.ones((9, 2, 2), np.int32)  # a draft that is always right
    predicted = predict_all({1: Recording([10], [ranks])}, COSTS, 1, 2)
    assert list(predicted) == [tree(2, 1, 3), tree(1, 1, 2), None]
    few = [tree(2, 1, 3), None, tree(2, 2, 4), tree(2, 2, 5), tree(3, 2, 4), tree(4, 2, 5)]
    assert choose_few(few) == [tree(2, 1, 3), tree(2, 2, 4), tree(3, 2, 4)]


def test_what_was_timed_is_compared_with_the_first_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {None: iter([100.0, 1.0, 2.0, 3.0]), SMALL: iter([100.0, 0.5, 0.5, 6.0])}
    texts = {None: [[1, 2, 3, 4], [5, 6]], SMALL: [[1, 2, 3, 4], [5, 7]]}
    lookups = []

    def with_tree(trees: Trees, *, lookup: int) -> TreeConfig | None:
        lookups.append(lookup)
        return trees[1]

    engine = SimpleNamespace(with_tree=with_tree)

    def time_batches(tree: TreeConfig | None, *_: Any) -> list[Timed]:
        accepted, share = [0] if tree is None else [1], next(seconds[tree]) / 2
        answers = [Generation([0], ids, None, accepted, accepted, "length") for ids in texts[tree]]
        return [Timed(answer, share, 0.0) for answer in answers]

    monkeypatch.setattr(search, "time_batches", time_batches)
    plain, small = search.confirm(engine, [], 1, [None, SMALL], 3, lookup=5).values()
    assert (plain["tokens_per_second"], plain["ratio"]) == (3, 1)
    assert (small["tokens_per_second"], small["ratio"]) == (12, 2)  # ratios 2, 4 and 1/2
    assert (plain["acceptance_length"], small["acceptance_length"]) == (1, 2)
    assert (plain["different_outputs"], small["different_outputs"]) == (0, 1)
    assert lookups == [5, 5]


def test_tuned_trees_are_those_of_an_engine_without_a_tree(runs, tmp_path, caplog) -> None:
    draft = copy_model(runs.model("poss2"), tmp_path / "draft")
    record, path = read_record(draft), tuned_file(draft)
    trees = {1: SMALL, 4: None}
    comments = {1: "10 tokens/s", 4: "9 tokens/s"}
    write_tuned(path, trees, record, header={"prompts": "x"}, comments=comments)
    assert path.name == "trees.cpu.yaml"
    assert (find_tuned(draft, record), read_trees(path)) == ((trees, None), trees)
    with caplog.at_level(logging.INFO):
        engine = Engine.load(runs.model("target"), draft)
    assert engine.trees == trees
    assert f"{path}, tuned for this draft and device" in caplog.text
    copying = Engine.load(runs.model("target"), draft, EngineConfig(lookup=9))
    assert copying.trees == trees
    chains = [copying.decode_config(9, batch_size).num_copied for batch_size in (1, 4)]
    assert chains == [SMALL.num_nodes - 1, 0]
    chosen = Engine.load(runs.model("target"), draft, EngineConfig(tree=CPU_TREE))
    assert chosen.trees == {1: CPU_TREE}
    assert engine.load_draft(runs.model("poss2")).trees == {1: CPU_TREE}
    assert engine.with_tree(CPU_TREE).load_draft(draft).trees == {1: CPU_TREE}


def test_trees_tuned_for_others_are_left_alone(runs, tmp_path, caplog, monkeypatch) -> None:
    draft = copy_model(runs.model("poss2"), tmp_path / "draft")
    record, path = read_record(draft), tuned_file(draft)
    write_tuned(path, {1: SMALL}, read_record(runs.model("eagle")), header={}, comments={1: ""})
    assert find_tuned(draft, record) is None
    assert "was tuned for another draft" in caplog.text
    write_tuned(path, {1: SMALL}, record, header={}, comments={1: ""})
    monkeypatch.setattr(tree_files, "_devices", lambda mesh: "NVIDIA H100 80GB HBM3")
    assert find_tuned(draft, record) is None
    assert f"{path} was tuned on another kind of device than this one, NVIDIA H100" in caplog.text
    path.rename(tuned_file(draft))
    assert find_tuned(draft, record) is None
    assert "was tuned for another device ('cpu', here NVIDIA H100 80GB HBM3)" in caplog.text
    tuned_file(draft).write_text("1: null\n")
    with pytest.raises(UserError, match="want the section tuned"):
        find_tuned(draft, record)


def test_trees_tuned_on_a_mesh_are_those_of_the_mesh_alone(runs, tmp_path, caplog) -> None:
    draft = copy_model(runs.model("poss2"), tmp_path / "draft")
    record, mesh = read_record(draft), decoding_mesh(MeshConfig(data=2, tensor=4))
    write_tuned(tuned_file(draft), {1: CPU_TREE}, record, header={}, comments={1: ""})
    path = tuned_file(draft, mesh)
    assert path.name == "trees.cpu-data-2-tensor-4.yaml"
    write_tuned(path, {1: SMALL}, record, header={}, comments={1: ""}, mesh=mesh)
    config = BenchConfig(target="t", drafts={"P": str(draft)}, mesh=MeshConfig(data=2, tensor=4))
    assert tuning.paths_of_trees(config, None, overwrite=False) == {"P": path}
    assert find_tuned(draft, record) == ({1: CPU_TREE}, None)
    assert find_tuned(draft, record, mesh) == ({1: SMALL}, None)
    path.replace(tuned_file(draft))
    assert find_tuned(draft, record) is None
    assert "was tuned for another device ('cpu data=2 tensor=4', here cpu)" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("lookup", ["0", "8"])
def test_trees_are_tuned_and_used(runs, tmp_path, capsys, monkeypatch, lookup) -> None:
    monkeypatch.setenv("POSS_JAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(search, "_CALLS", 1)
    monkeypatch.setattr(search, "_TOP_KS", {"cpu": (1, 2)})
    monkeypatch.setattr(search, "_MEASURED_NODES", (2, 4))
    monkeypatch.setattr(search, "_DEPTH", 2)
    draft = copy_model(runs.model("poss2"), tmp_path / "draft")
    prompts = write_lines(tmp_path / "prompts", *({"prompt": text} for text in PROMPTS[:2]))
    models = ["--target", runs.model("target"), "--draft", f"P={draft}", "--prompts", prompts]
    numbers = "--num-prompts 2 --max-new-tokens 6 --repeats 1 --batch-sizes 2".split()
    main([*models, *numbers, "--lookup", lookup])
    table, _, last = capsys.readouterr().out.removesuffix("\n").rpartition("\n")
    report = json.loads(last)
    entry = report["drafts"]["P"]["2"]
    assert report["files"] == {"P": str(tuned_file(draft))}
    assert "| P | 2 | " in table
    assert all(row["different_outputs"] == 0 for row in entry["methods"].values())
    best = entry["best"] and TreeConfig(**entry["best"])
    assert Engine.load(runs.model("target"), draft).trees == {2: best}
    plain = generate(runs.model("target"), None, tmp_path, "--prompts", prompts)
    tuned = generate(runs.model("target"), draft, tmp_path, "--prompts", prompts)
    assert [one["output_ids"] for one in tuned] == [one["output_ids"] for one in plain]


@pytest.mark.parametrize("wins", [True, False])
def test_the_fastest_vocabulary_is_kept_beside_the_trees(runs, tmp_path, monkeypatch, wins) -> None:
    def tune(tuning: Tuning, **settings: object) -> dict:
        is_small = len(tuning.engine.weights.draft["head"]["weight"]) == 3
        names.append(tuning.name)
        row = {"ratio": 2.0 if is_small == wins else 1.0, "tokens_per_second": 9.0}
        row |= {"predicted": None, "acceptance_length": 1.0}
        return {1: {"best": asdict(SMALL), "methods": {search.tree_name(SMALL): row}}}

    monkeypatch.setenv("POSS_JAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tuning, "tune", tune)
    draft = copy_model(runs.model("poss2"), tmp_path / "draft")
    file = tmp_path / "few.json"
    arguments = ["--target", runs.model("target"), "--draft", f"P={draft}"]
    names = list[str]()
    for tokens in ((4, 5, 7), (4, 5, 6)):  # what was tuned before is not looked at
        write_draft_vocabulary(file, DraftVocabulary(vocab_size=300, tokens=tokens))
        words = "--num-prompts 1 --temperatures 1 --try-vocabulary"
        main([*arguments, *words.split(), str(file)])
    assert names[0] == names[2] and len({*names}) == 3  # the file is known by its tokens
    assert '"temperature": 1' in tuned_file(draft).read_text()
    tuned = Engine.load(runs.model("target"), draft)
    assert tuned.trees == {1: SMALL}
    assert len(tuned.weights.draft["head"]["weight"]) == (3 if wins else 300)
    chosen = Engine.load(runs.model("target"), draft, EngineConfig(tree=SMALL))
    assert len(chosen.weights.draft["head"]["weight"]) == 300


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ("", "want at least one draft; give --draft NAME=DIR"),
        ("--draft a={poss2} --draft b={poss2} --trees-file x", "--trees-file: want one draft"),
        ("--draft a={poss2} --trees-file {there}", "exists; name another file or give --overwrite"),
        ("--draft a={poss2} --temperatures 0 --temperatures 1", "want one temperature, got [0.0, "),
        ("--draft a={poss2} --trees-file x --batch-sizes 1,99", "number of prompts, 2, got 99"),
    ],
)
def test_refusals(runs: Runs, tmp_path: Path, options: str, error: str) -> None:
    there = write_lines(tmp_path / "prompts", {"prompt": "def"}, {"prompt": "class"})
    filled = options.format(poss2=runs.model("poss2"), there=there).replace(" x", f" {tmp_path}/x")
    arguments = ["--target", runs.model("target"), "--prompts", there]
    assert error in refusal(main, *arguments, *filled.split())
    assert not (tmp_path / "x").exists()
