"""The benchmark of draft vocabularies on tiny models."""

import importlib.util
import json
from pathlib import Path

import pytest
from programs import POSS2, Runs, config_file, write_lines

from benchmarks import draft_vocabulary


@pytest.mark.slow
def test_sizes_are_compared(runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = write_lines(tmp_path / "prompts", {"prompt": "def area_7"}, {"prompt": "def"})
    config, output = config_file(runs, tmp_path, POSS2), tmp_path / "report"
    numbers = "--sizes 8 --num-prompts 2 --max-new-tokens 6 --repeats 1 --tree 3/2/6"
    options = ["--draft", f"P={runs.model('poss2')}", "--prompts", prompts, "--output", str(output)]
    models = ["--target", runs.model("target"), "--config", config]
    draft_vocabulary.main([*models, *options, *numbers.split()])
    *lines, _, last = capsys.readouterr().out.splitlines()
    table = "\n".join(lines)
    report = json.loads(last)
    assert json.loads((output / "report.json").read_text()) == report
    assert (output / "report.md").read_text() == table + "\n"
    small, full = report["rows"]
    assert [(row["draft"], row["size"]) for row in (small, full)] == [("P", 8), ("P", 300)]
    assert small["coverage"] < full["coverage"] == full["coverage_of_answers"] == 1
    assert small["equal_outputs"] == full["equal_outputs"] == 2
    assert table.startswith("2 prompts x 6 tokens, greedy, the fastest of 1 repeats, tree 3/2/6")
    assert table.endswith("Outputs that differ: 0")
    has_plot = importlib.util.find_spec("matplotlib") is not None
    assert (output / "draft_vocabulary.png").exists() == has_plot
