"""The benchmark of batch sizes: made-up passes worked out by hand, and the program as a whole."""

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from programs import Runs, refusal, tiny_runs, write_lines

from benchmarks import batches
from poss_jax import Generation, TreeConfig
from poss_jax.engine.trees import read_trees

OUTPUTS = [[1, 2, 3, 4], [5, 6]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    with tiny_runs(tmp_path_factory) as runs:
        yield runs


def passes(*seconds: float, accepted: int = 0, outputs: Any = OUTPUTS) -> list[batches.Pass]:
    """A pass that compiles, and timed ones."""
    answers = [Generation([0], ids, None, [accepted], [accepted], "length") for ids in outputs]
    return [(answers, one) for one in (100.0, *seconds)]


def test_speeds_are_medians_of_what_was_timed() -> None:
    summary = batches.summarise(
        {batches.NO_DRAFT: passes(1.0, 2.0, 3.0), "1/1/2": passes(0.5, 0.5, 6.0, accepted=1)}
    )
    plain, drafted = summary["methods"].values()
    assert plain["tokens_per_second_per_repeat"] == [6, 3, 2]
    assert (plain["tokens_per_second"], plain["ratio"]) == (3, 1)
    assert (drafted["tokens_per_second"], drafted["ratio"]) == (12, 2)  # ratios 2, 4 and 1/2
    assert (plain["acceptance_length"], drafted["acceptance_length"]) == (1, 2)
    assert summary["best"] == "1/1/2"


def test_outputs_that_differ_in_any_pass_are_counted() -> None:
    same, other = passes(1.0, 1.0), passes(1.0, outputs=[[1, 2, 3, 4], [5, 7]])
    assert batches.count_different({(1, "a"): same, (2, "a"): same}) == 0
    assert batches.count_different({(1, "a"): same, (1, "b"): other}) == 2


def test_the_fastest_trees_can_be_used(
    runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = write_lines(tmp_path / "prompts", {"prompt": "def area_7"}, {"prompt": "def"})
    models = ["--target", runs.model("target"), "--draft", f"P={runs.model('poss2')}"]
    numbers = "--num-prompts 2 --max-new-tokens 6 --repeats 1 --batch-sizes 1 2 --trees 3/2/6"
    output = tmp_path / "report"
    options = ["--prompts", prompts, "--output", str(output)]
    batches.main([*models, *options, *numbers.split()])
    table, _, last = capsys.readouterr().out.removesuffix("\n").rpartition("\n")
    report = json.loads(last)
    assert json.loads((output / "report.json").read_text()) == report
    assert (output / "report.md").read_text() == table + "\n"
    assert report["different_outputs"] == 0
    best = {size: entry["best"] for size, entry in report["batch_sizes"].items()}
    tree = TreeConfig(depth=3, top_k=2, total_tokens=6)
    expected = {int(size): tree if name == "3/2/6" else None for size, name in best.items()}
    assert read_trees(output / "trees.yaml") == expected
    assert table.count("**") == 2 * len(best)
    has_plot = importlib.util.find_spec("matplotlib") is not None
    assert (output / "batches.png").exists() == has_plot


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ("--trees 4/2", "tree '4/2': want depth/top_k/total_tokens, such as 4/2/8"),
        ("--trees 4/2/x", "tree '4/2/x': total_tokens: Input should be a valid integer"),
        ("--num-prompts 3 --batch-sizes 2", "want a multiple of every batch size"),
        ("--draft A=a --draft B=b", "--draft: want one, got 2"),
    ],
)
def test_what_is_refused(arguments: str, error: str) -> None:
    assert error in refusal(batches.main, *arguments.split())
