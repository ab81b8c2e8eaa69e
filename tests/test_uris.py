"""Models, data and runs at URIs: the same as local ones, and never taken for whole in part.

The store is `tests/object_store.py`; no test has seen the real one.
"""

import json
import os
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import object_store
import pytest
from etils import epath
from programs import (
    POSS2,
    TARGET,
    Runs,
    config_file,
    generate,
    metrics,
    refusal,
    summary,
    weights,
    write_config,
    write_lines,
)
from self_killing import ROOT

from infer.generate import main as generate_main
from poss_jax.checkpoint.record import read_record
from poss_jax.checkpoint.whole import sole_writer, whole_folder
from poss_jax.checkpoint.writing import verify_model
from poss_jax.config import paths
from poss_jax.config.data import DataConfig
from poss_jax.config.paths import absolute, as_path, copy_files, is_uri, local_path, real_path
from poss_jax.config.reading import UserError, load_config
from poss_jax.config.training import TrainConfig
from poss_jax.convert.__main__ import main as convert_main
from poss_jax.data.records import matching_files
from poss_jax.data.sources import load_documents
from train.claims import claim_folder
from train.main import main


@cache
def installed(folder: Path) -> object_store.Objects:
    return object_store.install(folder)


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> object_store.Objects:
    return installed(tmp_path_factory.mktemp("objects"))


@pytest.fixture(scope="module")
def uploaded(runs: Runs, objects: object_store.Objects) -> str:
    """URI of copies of the tiny models and their text."""
    for name in ("target/model", "poss2/model", "text"):
        copy_files(runs.root / name, epath.Path("gs://tiny") / name)
    return "gs://tiny"


def uri_config(uploaded: str, output: str, folder: Path, values: Any, **changes: Any) -> str:
    """Config of a run whose models, data and output are at URIs."""
    data = {"source": f"{uploaded}/text/*.txt", "sequence_length": 32, "validation_fraction": 0.2}
    models = {"target": f"{uploaded}/target/model"} if values["stage"] == "draft" else {}
    return write_config(folder, values | models | {"data": data, "output": output} | changes)


def assert_same_run(uri: str, local: Path, runs: Runs) -> None:
    assert metrics(epath.Path(uri)) == metrics(local)
    target = runs.model("target")
    for got, want in zip(weights(epath.Path(uri), target), weights(local, target), strict=True):
        np.testing.assert_array_equal(got, want)


def test_path_or_uri():
    assert as_path("models/a") == Path("models/a") and isinstance(as_path("models/a"), Path)
    assert is_uri("gs://a/b") and is_uri(epath.Path("gs://a/b"))
    assert not any(map(is_uri, ("a/b", "stdlib", "packages:a,b", "owner/name")))
    with pytest.raises(UserError, match=r"output gs:/a/b: want a path of this machine"):
        local_path(Path("gs://a/b"), "output")
    with pytest.raises(UserError, match=r"ftp://a/b: want a local path, or a URI of gs://"):
        as_path("ftp://a/b")


def test_the_home_folder_is_found_wherever_a_path_is_given(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    place = tmp_path / "a"
    assert as_path("~/a") == absolute("~/a") == real_path("~/a") == place
    assert local_path("~/a", "output") == place
    assert as_path("~no such user/a") == Path("~no such user/a")
    monkeypatch.chdir(tmp_path)
    in_use = pytest.raises(UserError, match="in use by process")
    with sole_writer("~/runs/a"), in_use, sole_writer(tmp_path / "runs" / "a"):
        pass
    with whole_folder("~/a") as partial:
        (partial / "text.txt").write_text("x")
    assert matching_files("~/a/*.txt") == [place / "text.txt"]
    assert not (tmp_path / "~").exists()


def test_missing_client_is_one_line(monkeypatch):
    def fail(self: Any, path: Any) -> bool:
        raise ImportError("Please install\ngcsfs")

    monkeypatch.setattr(paths.epath.backend.fsspec_backend.__class__, "exists", fail)
    with pytest.raises(UserError, match=r"cannot be reached \(Please install gcsfs\); .*poss-jax"):
        as_path("gs://never-asked/a")


# --------------------------------------------------------------------------------------------------
# Models


def test_same_tokens_as_from_local_folders(runs, uploaded, tmp_path):
    lines = [
        generate(f"{root}/target/model", f"{root}/poss2/model", tmp_path, "--prompt", "def area")
        for root in (str(runs.root), uploaded)
    ]
    assert lines[0][0]["output_ids"] and lines[0] == lines[1]


def test_model_is_verified(uploaded, capsys):
    assert verify_model(f"{uploaded}/target/model").family == "target"
    convert_main(["inspect", f"{uploaded}/poss2/model", "--verify"])
    assert summary(capsys)


def test_model_is_written(runs, uploaded, objects, tmp_path):
    models = ["--model", runs.model("poss2"), "--target", runs.model("target")]
    convert_main(["export", *models, "--output", str(tmp_path / "exported")])
    command = ["draft", "--source", str(tmp_path / "exported"), "--output", "gs://tiny/converted"]
    command += ["--target", f"{uploaded}/target/model"]
    convert_main(command)
    assert verify_model("gs://tiny/converted").draft.num_specialists == 2
    assert "is not empty" in refusal(convert_main, *command)


def test_export_and_vocabulary(runs, uploaded, objects, tmp_path):
    for root, output in ((str(runs.root), str(tmp_path / "out")), (uploaded, "gs://tiny/out")):
        models = ["--model", f"{root}/poss2/model", "--target", f"{root}/target/model"]
        convert_main(["export", *models, "--output", output])
    exported = {path.name: path.read_bytes() for path in (tmp_path / "out").glob("*.safetensors")}
    assert exported == {name: objects.get(f"tiny/out/{name}") for name in exported} and objects.get(
        "tiny/out/config.json"
    )
    vocabulary = {"vocab_size": 300, "tokens": [*range(200)]}
    objects.put("tiny/vocabulary.json", json.dumps(vocabulary).encode())
    command = ["draft", "--source", str(tmp_path / "out"), "--target", f"{uploaded}/target/model"]
    command += ["--draft-vocabulary", "gs://tiny/vocabulary.json", "--output", "gs://tiny/limited"]
    convert_main(command)
    limited, whole = verify_model("gs://tiny/limited"), read_record(f"{uploaded}/poss2/model")
    assert limited.draft_vocabulary == tuple(range(200))
    assert (limited.weights_sha256, limited.draft) == (whole.weights_sha256, whole.draft)


def test_folder_is_not_whole_before_its_last_file(runs, objects, monkeypatch):
    copied = []
    copy_file = paths._copy_file

    def copy(source: Any, to: Any) -> None:
        copied.append(to.name)
        if to.name == "model.json":
            with pytest.raises(UserError, match="holds no model"):
                read_record("gs://tiny/partial")
        copy_file(source, to)

    list_files = paths._list_files
    monkeypatch.setattr(paths, "_list_files", lambda folder: sorted(list_files(folder)))
    monkeypatch.setattr(paths, "_copy_file", copy)
    with whole_folder("gs://tiny/partial") as folder:
        for name in ("model.json", "SHA256SUMS", "weights", "tokenizer.json"):
            (folder / name).write_bytes((runs.root / "target/model/model.json").read_bytes())
    assert copied[-2:] == ["tokenizer.json", "model.json"] and len(copied) == 4
    assert read_record("gs://tiny/partial").family == "target"


def test_damaged_item_is_named(uploaded, objects):
    copy_files(epath.Path(f"{uploaded}/target/model"), epath.Path("gs://tiny/damaged"))
    for name in objects.names("tiny/damaged/weights/embed/"):
        objects.file(name).unlink()
    message = refusal(generate_main, "--target", "gs://tiny/damaged", "--prompt", "a")
    assert "has no weights item embed" in message


# --------------------------------------------------------------------------------------------------
# Data


def test_data_by_uri(objects, tmp_path):
    texts = [{"text": f"Ünique text number {n}. " * 5} for n in range(40)]
    write_lines(tmp_path / "a.jsonl", *texts[:20])
    write_lines(tmp_path / "b.jsonl", *texts[20:])
    (tmp_path / "c.txt").write_bytes("\ufefflines\r\nof\rtext".encode())
    copy_files(tmp_path, epath.Path("gs://data/set"))
    for pattern in ("*.jsonl", "a.jsonl", "*"):
        local, remote = (
            load_documents(DataConfig(source=f"{root}/{pattern}", validation_fraction=0.3))
            for root in (tmp_path, "gs://data/set")
        )
        assert (local.train, local.validation) == (remote.train, remote.validation)


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("gs://data/none.jsonl", "no such file"),
        ("gs://data/**/a.jsonl", r"URIs take \* but not \*\*"),
    ],
)
def test_data_that_cannot_be_read(objects, source, why):
    with pytest.raises(UserError, match=why):
        load_documents(DataConfig(source=source))


# --------------------------------------------------------------------------------------------------
# Runs


@pytest.mark.slow
def test_killed_run_ends_like_an_uninterrupted_local_one(runs, uploaded, objects, tmp_path):
    config = uri_config(uploaded, "gs://runs/poss2", tmp_path, POSS2)
    script = [str(ROOT / "tests" / name) for name in ("object_store.py", "dying_run.py")]
    command = [sys.executable, script[0], str(objects.folder), script[1], "step", "13"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_NUMPY_DTYPE_PROMOTION": "strict"}
    result = subprocess.run(
        [*command, "--config", config], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert result.returncode == -signal.SIGKILL, result.stderr
    assert objects.names("runs/poss2/checkpoints/10/")
    assert metrics(epath.Path("gs://runs/poss2"))[-1]["step"] == 10
    objects.put("runs/poss2/checkpoints/20/default/manifest.ocdbt", b"of a save that was killed")
    objects.put("runs/poss2/model/weights/part", b"of an upload that was killed")
    main(["--config", config])
    assert_same_run("gs://runs/poss2", runs.root / "poss2", runs)
    assert not [name for name in objects.names("runs/") if "partial" in name or "/part" in name]
    steps = {name.split("/")[3] for name in objects.names("runs/poss2/checkpoints/")}
    assert steps == {path.name for path in (runs.root / "poss2" / "checkpoints").iterdir()}


def test_target_trained_at_a_uri(runs, uploaded, tmp_path, capsys):
    config = uri_config(uploaded, "gs://runs/target", tmp_path, TARGET)
    main(["--config", config])
    assert_same_run("gs://runs/target", runs.root / "target", runs)
    first = summary(capsys)
    assert first["model"] == "gs://runs/target/model"
    main(["--config", config])  # complete already
    assert summary(capsys) == first
    with pytest.raises(UserError, match="holds a run with another config"):
        main(["--config", config, "seed=1"])
    message = refusal(main, "--config", config, "output=gs://runs", "seed=1")
    assert "not a training run" in message


def test_overwritten_run_starts_anew(uploaded, objects, tmp_path):
    config = uri_config(uploaded, "gs://runs/again", tmp_path, TARGET)
    claimed = []
    for seed, overwrite in ((1, False), (2, True)):
        run = load_config(TrainConfig, config, [f"seed={seed}"])
        with claim_folder(run, overwrite=overwrite) as place:
            (place / f"{seed}.txt").write_text("prepared")
            before = objects.names("runs/again/")
        claimed.append((before, objects.names("runs/again/")))
    names = ["config.yaml", "provenance.json"]
    first, second = ([f"runs/again/{name}" for name in (f"{n}.txt", *names)] for n in (1, 2))
    assert claimed == [([], first), (first, second)]


def test_run_that_cannot_start_leaves_nothing(uploaded, objects, tmp_path):
    config = uri_config(uploaded, "gs://runs/none", tmp_path, TARGET)
    assert "held-out documents fill" in refusal(main, "--config", config, "batch_size=1000")
    assert objects.names("runs/none") == objects.names("runs/.none") == []


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (["output=s3://runs/a"], "output s3://runs/a: "),
        (["loggers=[wandb]"], "loggers: "),
        (["profile={start: 2}"], "profile: its files are written to this machine alone"),
        (["features.cache=gs://runs/cache"], "features.cache gs://runs/cache: want a path of this"),
    ],
)
def test_what_a_run_cannot_have_at_a_uri(uploaded, tmp_path, changes, why):
    config = uri_config(uploaded, "gs://runs/refused", tmp_path, POSS2)
    assert why in refusal(main, "--config", config, *changes)


@pytest.mark.usefixtures("objects")
def test_outputs_that_stay_local(runs, tmp_path):
    options = ["--target", runs.model("target"), "--prompt", "a", "--output", "gs://tiny/out.jsonl"]
    assert "want a path of this machine" in refusal(generate_main, *options)
    config = config_file(runs, tmp_path, POSS2, output="gs://tiny/poss2/model")
    message = refusal(main, "--config", config, "init_draft=gs://tiny/poss2/model/in")
    assert "holds gs://tiny/poss2/model/in, which is needed" in message
