"""A tiny target and drafts, trained once per test run by the training program itself."""

import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import yaml
from filelock import FileLock

from infer.generate import main as generate_main
from poss_jax.checkpoint.folder import load_draft, load_target
from poss_jax.checkpoint.record import new_record, read_record
from poss_jax.checkpoint.writing import write_model
from poss_jax.config.reading import UserError
from poss_jax.model.parameters import split_items
from poss_jax.model.specialists import extend_specialists
from train.main import main as train_main
from train.regeneration import AnswerFiles

NUM_NEW = 6  # tokens of an answer that `generate` asks for
STEPS = 24  # of a training run

TARGET = {
    "stage": "target",
    "model": {
        "vocab_size": 300,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_layers": 2,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 256,
    },
    "optimizer": {"learning_rate": 1e-2},
    "mesh": {"data": 1},
    "num_tokens": STEPS * 64,
    "batch_size": 2,
    "checkpoint_every": 10,
    "validate_every": 10,
    "validation_rows": 4,
    "log_every": 1,
}
DRAFT = {**TARGET, "stage": "draft", "model": None}
POSS2 = {**DRAFT, "specialists": {"positions_per_specialist": [2, 2], "depth": 4}}


@dataclass(frozen=True)
class Runs:
    """Folders of the finished runs, and the text they were trained on."""

    root: Path

    @property
    def data(self) -> dict[str, Any]:
        """The `data` section of a config."""
        source = str(self.root / "text" / "*.txt")
        return {"source": source, "sequence_length": 32, "validation_fraction": 0.2}

    def model(self, name: str) -> str:
        """Model folder of `target`, `eagle` or `poss2`."""
        return str(self.root / name / "model")


def tiny_runs(base: Path) -> Runs:
    """Trains the tiny models, or finds those that another worker trained."""
    runs = Runs(base / "tiny")
    with FileLock(base / "tiny.lock"):
        if not runs.root.exists():
            (runs.root / "text").mkdir(parents=True)
            for n in range(60):
                shapes = [
                    f"def area_{n}_{i}(width, height):\n    return {i} * width * height + {n}\n\n"
                    for i in range(6)
                ]
                (runs.root / "text" / f"{n}.txt").write_text("".join(shapes))
            _train(runs, "target", TARGET)
            _train(runs, "eagle", DRAFT | {"target": runs.model("target")})
            _train(runs, "poss2", POSS2 | {"target": runs.model("target")})
    return runs


def write_config(folder: Path, values: dict[str, Any]) -> str:
    """Writes a YAML config, a new one at each call."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"config-{len(list(folder.glob('config-*')))}.yaml"
    path.write_text(yaml.safe_dump(values))
    return str(path)


def config_file(runs: Runs, folder: Path, values: dict[str, Any], **changes: Any) -> str:
    """Config of a run in `folder / "run"`."""
    models = {"target": runs.model("target")} if values["stage"] == "draft" else {}
    output = {"output": str(folder / "run"), "data": runs.data}
    return write_config(folder / "configs", values | models | output | changes)


def metrics(folder: Path) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl without what differs from run to run."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    costs = {"seconds", "tokens_per_second", "peak_gib"}
    return [{key: line[key] for key in line if key not in costs} for line in lines]


def weights(folder: Path, target: str) -> list[np.ndarray]:
    record = read_record(folder / "model")
    loaded = (
        load_target(folder / "model")
        if record.family == "target"
        else load_draft(folder / "model", target=read_record(target))
    )
    return [np.asarray(leaf) for leaf in jax.tree.leaves(loaded[1])]


def assert_same_run(got: Path, wanted: Path, target: str) -> None:
    """Compares metrics and weights of two runs bit for bit."""
    assert metrics(got) == metrics(wanted)
    for ours, theirs in zip(weights(got, target), weights(wanted, target), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def write_lines(path: Path, *records: Any) -> str:
    """Writes a .jsonl file; strings are written as they are."""
    lines = [item if isinstance(item, str) else json.dumps(item) for item in records]
    path.write_text("".join(line + "\n" for line in lines))
    return str(path)


def generate(target: str, draft: str | None, folder: Path, *arguments: str) -> list[Any]:
    """Runs the generation program and reads its output file."""
    output = folder / f"out-{len(list(folder.iterdir()))}.jsonl"
    models = ["--target", target, *(["--draft", draft] if draft else [])]
    generate_main([*models, "--max-new-tokens", str(NUM_NEW), "--output", str(output), *arguments])
    return [json.loads(line) for line in output.read_text().splitlines()]


def summary(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The JSON of the last line a program printed."""
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def copy_model(source: str, folder: Path, **changes: Any) -> str:
    """Copies a model folder and changes keys of its model.json, one level deep."""
    shutil.copytree(source, folder)
    record = json.loads((folder / "model.json").read_text())
    for key, value in changes.items():
        record[key] = record[key] | value if isinstance(value, dict) else value
    (folder / "model.json").write_text(json.dumps(record))
    return str(folder)


def add_specialists(draft: str, target: str, folder: Path, spans: tuple[int, ...]) -> str:
    """Writes a copy of a draft whose last specialist stands for the missing ones, too."""
    record, params = load_draft(draft, target=read_record(target))
    config = replace(record.draft, positions_per_specialist=spans, trained_depth=sum(spans))
    new = new_record(config, record.target, tokenizer_from=Path(draft))
    items = split_items(config, extend_specialists(params, len(spans)))
    write_model(folder, new, items, tokenizer_from=Path(draft))
    return str(folder)


def refusal(main: Callable[[list[str]], None], *arguments: str) -> str:
    """The one line that a program prints about bad input."""
    with pytest.raises(UserError) as caught:
        main(list(arguments))
    message = str(caught.value)
    assert "\n" not in message
    return message


@contextmanager
def interrupted_after(num_lines: int) -> Iterator[None]:
    """Interrupts a regeneration before it adds a window to `num_lines` lines or more."""
    add = AnswerFiles.add

    def add_few(files: AnswerFiles, lines: Iterable[Any]) -> None:
        if files.num_done >= num_lines:
            raise KeyboardInterrupt
        add(files, lines)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(AnswerFiles, "add", add_few)
        yield


def _train(runs: Runs, name: str, values: dict[str, Any]) -> None:
    values = values | {"data": runs.data, "output": str(runs.root / name)}
    train_main(["--config", write_config(runs.root / "configs", values)])
