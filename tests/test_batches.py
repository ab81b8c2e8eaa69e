"""The benchmark of batch sizes."""

import importlib.util
import json
from pathlib import Path

import pytest
from programs import Runs, refusal, write_lines

from benchmarks import batches
from poss_jax import TreeConfig
from poss_jax.engine.trees import read_trees


@pytest.mark.slow
def test_the_fastest_trees_can_be_used(
    runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = write_lines(tmp_path / "prompts", {"prompt": "def area_7"}, {"prompt": "def"})
    models = ["--target", runs.model("target"), "--draft", f"P={runs.model('poss2')}"]
    numbers = "--num-prompts 2 --max-new-tokens 6 --repeats 1 --batch-sizes 1 2 --trees 3/2/6"
    output = tmp_path / "report"
    options = ["--prompts", prompts, "--output", str(output)]
    batches.main([*models, *options, *numbers.split()])
    *lines, where, last = capsys.readouterr().out.splitlines()
    table = "\n".join(lines)
    assert where == f"report: {output}"
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
