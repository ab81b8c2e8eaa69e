"""Tables and plots of finished and running training runs."""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from programs import refusal, summary

from train.plot import main, read_run

has_matplotlib = importlib.util.find_spec("matplotlib") is not None


def validation(step: int, length: float) -> dict[str, Any]:
    by_depth = {
        "validation_loss": [0.5, 0.7],
        "feature_loss": [0.1, 0.2],
        "probability_loss": [1.0, 1.5],
        "top_k_loss": [0.3, 0.4],
        "agreement": [0.8, 0.6],
        "feature_cosine": [0.95, 0.9],
        "cumulative_acceptance": [0.8, length - 1.8],
    }
    return {"step": step, **by_depth, "simulated_acceptance_length": length}


def write_run(folder: Path, stage: str, *lines: dict[str, Any]) -> str:
    folder.mkdir()
    specialists = {"positions_per_specialist": [1, 2], "depth": 2}
    values = {"stage": stage, "specialists": specialists}
    (folder / "config.yaml").write_text(yaml.safe_dump(values))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(folder)


@pytest.fixture
def draft(tmp_path: Path) -> str:
    lines = [{"step": step, "loss": 1 / step} for step in range(1, 5)]
    lines += [validation(2, 2.0), validation(3, 2.2), validation(4, 2.2), validation(5, 2.1)]
    return write_run(tmp_path / "poss", "draft", *lines)


@pytest.fixture
def target(tmp_path: Path) -> str:
    lines = [{"step": 1, "loss": 5.0}, {"step": 1, "validation_loss": 5.5}]
    return write_run(tmp_path / "llama", "target", *lines)


def test_table(draft, target, capsys):
    main([draft, target, "--table"])
    assert capsys.readouterr().out.splitlines() == [
        "| run | step | validation loss | simulated acceptance length |",
        "|---|---|---|---|",
        "| poss | 4 | 0.600 | 2.200 |",
        "| llama | 1 | 5.500 |  |",
        "",
        "| run | depth | specialist | loss | feature | probability | top-k | agreement | cosine "
        "| accepted so far |",
        "|---|---|---|---|---|---|---|---|---|---|",
        "| poss | 0 | 0 | 0.500 | 0.100 | 1.000 | 0.300 | 0.800 | 0.950 | 0.800 |",
        "| poss | 1 | 1 | 0.700 | 0.200 | 1.500 | 0.400 | 0.600 | 0.900 | 0.400 |",
        '{"runs": 2, "plot": null}',
    ]


@pytest.mark.parametrize("specialists", [[0], [0, 1, 1, 1, 1]])
def test_specialists_of_a_run_that_goes_on(tmp_path, specialists):
    depth = len(specialists)
    line = {"step": 1, "validation_loss": [1.0] * depth, "agreement": [0.5] * depth}
    folder = write_run(tmp_path / "run", "draft", line | {"simulated_acceptance_length": 2.0})
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')
    assert read_run(folder).specialists == specialists


@pytest.mark.skipif(not has_matplotlib, reason="needs matplotlib")
@pytest.mark.parametrize("names", [["poss", "llama"], ["llama"]])
def test_plot_lies_in_the_first_run(draft, target, names, capsys):
    folders = [{"poss": draft, "llama": target}[name] for name in names]
    main(folders)
    image = Path(folders[0]) / "training.png"
    assert summary(capsys) == {"runs": len(names), "plot": str(image)}
    assert image.read_bytes().startswith(b"\x89PNG")
    unknown = str(image.with_suffix(".xyz"))
    assert unknown in refusal(main, *folders, "--output", unknown)


def test_without_matplotlib_the_table_is_left(draft, monkeypatch, capsys):
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.delitem(sys.modules, "matplotlib", raising=False)
    message = refusal(main, draft)
    assert "needs matplotlib" in message and "'poss-jax[plots]'" in message
    main([draft, "--table"])
    assert "| poss | 4 |" in capsys.readouterr().out


def test_eagle3_has_no_feature_to_compare(tmp_path, draft, capsys):
    line = {key: v for key, v in validation(2, 2.0).items() if not key.startswith("feature")}
    folder = write_run(tmp_path / "eagle3", "draft", {"step": 1, "loss": 1.0}, line)
    main([folder, draft, "--table"])
    table = capsys.readouterr().out
    assert "| eagle3 | 0 | 0 | 0.500 |  | 1.000 | 0.300 | 0.800 |  | 0.800 |" in table
    if has_matplotlib:
        main([folder, draft, "--output", str(tmp_path / "plot.png")])
        assert (tmp_path / "plot.png").is_file()


@pytest.mark.parametrize(
    ("config", "line"),
    [
        *((None, line) for line in ("1", "[", '{"validation_loss": 1}')),
        *((config, "") for config in ("", "- 1", "{")),
    ],
    ids=lambda text: str(text)[:20],
)
def test_folder_without_metrics_of_a_run_is_refused(tmp_path, config, line):
    folder, lines = tmp_path / "run", [validation(2, 2.0)] if config is None else []
    write_run(folder, "draft", *lines)
    if config is not None:
        (folder / "config.yaml").write_text(config)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(f"{line}\n")
    for place in (folder, tmp_path):
        message = refusal(main, str(place), "--table")
        assert "holds no metrics of a training run" in message
