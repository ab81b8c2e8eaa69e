"""Models, data and runs at URIs: the same as local ones, and never taken for whole in part.

The store is `tests/object_store.py`; no test has seen the real one.
"""

import json
from pathlib import Path
from typing import Any

import object_store
import pytest
from etils import epath
from programs import (
    POSS2,
    TARGET,
    Runs,
    assert_same_run,
    generate,
    metrics,
    refusal,
    summary,
    write_config,
    write_lines,
)
from self_killing import run_until

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
from poss_jax.data.records import load_documents, matching_files
from train.main import main
from train.run_folder import claim_folder


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> object_store.Objects:
    return object_store.install(tmp_path_factory.mktemp("objects"))


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
    output = ["--target", f"{uploaded}/target/model", "--prompt", "a", "--output", "gs://tiny/out"]
    assert "want a path of this machine" in refusal(generate_main, *output)


def test_models_are_exported_converted_and_verified(runs, uploaded, objects, tmp_path, capsys):
    for root, output in ((str(runs.root), str(tmp_path / "out")), (uploaded, "gs://tiny/out")):
        models = ["--model", f"{root}/poss2/model", "--target", f"{root}/target/model"]
        convert_main(["export", *models, "--output", output])
    exported = {path.name: path.read_bytes() for path in (tmp_path / "out").glob("*.safetensors")}
    assert exported == {name: objects.get(f"tiny/out/{name}") for name in exported}
    assert objects.get("tiny/out/config.json")
    vocabulary = {"vocab_size": 300, "tokens": [*range(200)]}
    objects.put("tiny/vocabulary.json", json.dumps(vocabulary).encode())
    command = ["draft", "--source", str(tmp_path / "out"), "--target", f"{uploaded}/target/model"]
    command += ["--draft-vocabulary", "gs://tiny/vocabulary.json", "--output", "gs://tiny/limited"]
    convert_main(command)
    limited, whole = verify_model("gs://tiny/limited"), read_record(f"{uploaded}/poss2/model")
    assert limited.draft_vocabulary == tuple(range(200))
    assert (limited.weights_sha256, limited.draft) == (whole.weights_sha256, whole.draft)
    assert "is not empty" in refusal(convert_main, *command)
    convert_main(["inspect", f"{uploaded}/target/model", "--verify"])
    assert summary(capsys)


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
    for source, why in (
        ("gs://data/none.jsonl", "no such file"),
        ("gs://data/**/a.jsonl", r"URIs take \* but not \*\*"),
    ):
        with pytest.raises(UserError, match=why):
            load_documents(DataConfig(source=source))


# --------------------------------------------------------------------------------------------------
# Runs


@pytest.mark.slow
def test_killed_run_ends_like_an_uninterrupted_local_one(runs, uploaded, objects, tmp_path):
    """Killed while it saves; an upload of its model was killed, too."""
    config = uri_config(uploaded, "gs://runs/poss2", tmp_path, POSS2)
    program = "object_store", str(objects.folder), "train.main", "--config", config
    run_until("os.rename", "runs%2Fposs2%2Fcheckpoints%2F20%2F", *program)
    assert objects.names("runs/poss2/checkpoints/10/")
    assert metrics(epath.Path("gs://runs/poss2"))[-1]["step"] == 20
    objects.put("runs/poss2/model/weights/part", b"of an upload that was killed")
    main(["--config", config])
    assert_same_run(epath.Path("gs://runs/poss2"), runs.root / "poss2", runs.model("target"))
    assert not [name for name in objects.names("runs/") if "partial" in name or "/part" in name]
    steps = {name.split("/")[3] for name in objects.names("runs/poss2/checkpoints/")}
    assert steps == {path.name for path in (runs.root / "poss2" / "checkpoints").iterdir()}


def test_target_trained_at_a_uri(runs, uploaded, objects, tmp_path, capsys):
    config = uri_config(uploaded, "gs://runs/target", tmp_path, TARGET)
    refused = ["output=gs://runs/none", "batch_size=1000"]
    assert "held-out documents fill" in refusal(main, "--config", config, *refused)
    assert objects.names("runs/none") == objects.names("runs/.none") == []
    main(["--config", config])
    assert_same_run(epath.Path("gs://runs/target"), runs.root / "target", runs.model("target"))
    first = summary(capsys)
    assert first["model"] == "gs://runs/target/model"
    main(["--config", config])  # complete already
    assert summary(capsys) == first
    with pytest.raises(UserError, match="holds a run with another config"):
        main(["--config", config, "seed=1"])
    message = refusal(main, "--config", config, "output=gs://runs", "seed=1")
    assert "no training run by its config.yaml" in message


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


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ("output=s3://runs/a", "output s3://runs/a: "),
        ("loggers=[wandb]", "loggers: "),
        ("profile.start=2", "profile: its files are written to this machine alone"),
        ("features.cache=gs://runs/cache", "features.cache gs://runs/cache: want a path of this"),
        ("output=gs://a init_draft=gs://a/b", "output gs://a holds gs://a/b, which is needed"),
    ],
)
def test_what_a_run_cannot_have_at_a_uri(uploaded, tmp_path, changes, why):
    config = uri_config(uploaded, "gs://runs/refused", tmp_path, POSS2)
    assert why in refusal(main, "--config", config, *changes.split())
