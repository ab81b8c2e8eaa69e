"""Features that other programs stored: what becomes of the files, and training on them."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from models import stacked
from programs import DRAFT, Runs, config_file, metrics, refusal, write_lines
from test_features import SHORT

from poss_jax.checkpoint.folder import load_target
from poss_jax.checkpoint.torch_io import write_bin
from poss_jax.config.data import DataConfig
from poss_jax.config.reading import UserError, load_config
from poss_jax.config.training import TrainConfig
from poss_jax.data.feature_files import FeatureFiles, read_feature_files
from poss_jax.data.features import RowsWithFeatures
from poss_jax.data.sources import load_documents
from poss_jax.model.documents import encode
from train.main import main
from train.training import open_stage

pytestmark = pytest.mark.torch
D = 32


def document(seed: int, *, length: int | None = None) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    length = length or int(rng.integers(8, 50))
    return {
        "input_ids": rng.integers(3, 300, length),
        "hidden_state": rng.standard_normal((length, D)).astype(np.float16),
        "loss_mask": (np.arange(length) >= 4).astype(np.int64),
    }


def write_files(folder: Path, count: int) -> str:
    """Files in folders, as the reference writes them, every third with an axis in front."""
    for index in range(count):
        place = folder / f"sharegpt_0_{count}_mufp16" / str(index % 4)
        place.mkdir(parents=True, exist_ok=True)
        arrays = document(index)
        if index % 3 == 0:
            arrays = {name: array[None] for name, array in arrays.items()}
        write_bin(place / f"data_{index}.ckpt", arrays)
    return str(folder / "**" / "data_*.ckpt")


def of_files(runs: Runs, folder: Path, source: str, **changes: Any) -> str:
    section = {"source": source, "sequence_length": 32, "validation_fraction": 0.2}
    return config_file(runs, folder, DRAFT, data=section | changes)


def test_rows_are_the_files_cut_or_padded(runs: Runs, tmp_path: Path) -> None:
    source = write_files(tmp_path / "ge_data", 40)
    config = load_config(TrainConfig, of_files(runs, tmp_path, source))
    for _ in range(2):  # made, then read from the run's folder
        stage = open_stage(config, tmp_path)
        assert "in 40 files" in stage.report["features"] and stage.report["packing"] == "none"
        found = {}
        for rows in (stage.rows, stage.validation_rows):
            assert isinstance(rows, RowsWithFeatures) and len(rows) > 4
            features = rows.features[:, :, :]
            assert features.dtype == np.float32
            for row in range(len(rows)):
                length = int((rows.documents[row] == 1).sum())
                parts = rows.tokens[row], rows.loss_mask[row], features[row]
                found[tuple(rows.tokens[row, :length].tolist())] = parts
        assert len(found) == 40
        for index in range(40):
            arrays = {name: array[:32] for name, array in document(index).items()}
            tokens, mask, features = found[tuple(arrays["input_ids"].tolist())]
            padded = [(0, 32 - len(arrays["input_ids"]))]
            np.testing.assert_array_equal(tokens, np.pad(arrays["input_ids"], padded))
            np.testing.assert_array_equal(mask, np.pad(arrays["loss_mask"], padded))
            want = np.pad(arrays["hidden_state"], [*padded, (0, 0)]).astype(np.float32)
            np.testing.assert_array_equal(features, want)


def test_a_run_learns_from_the_targets_features_in_files_as_it_learns_online(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = [document(index) for index in range(40)]
    lines = [{name: one[name].tolist() for name in ("input_ids", "loss_mask")} for one in documents]
    source = write_lines(tmp_path / "tokens.jsonl", *lines)
    config = of_files(runs, tmp_path / "online", source, packing="none")
    main(["--config", config, *SHORT])

    record, target = load_target(runs.model("target"))
    tokens = np.zeros((40, 64), np.int32)
    for row, one in zip(tokens, documents, strict=True):
        row[: len(one["input_ids"])] = one["input_ids"]
    features = np.asarray(encode(stacked(target), record.llama, jnp.asarray(tokens)))
    for index, one in enumerate(documents):
        stored = features[index, : len(one["input_ids"])]
        write_bin(tmp_path / f"data_{index:02}.ckpt", one | {"hidden_state": stored})
    monkeypatch.setattr("train.draft_stage.load_layers", None)
    main(["--config", of_files(runs, tmp_path, str(tmp_path / "data_*.ckpt")), *SHORT])
    for got, want in zip(metrics(tmp_path / "run"), metrics(tmp_path / "online/run"), strict=True):
        assert got.keys() == want.keys()
        for key, value in want.items():
            assert got[key] == pytest.approx(value, rel=1e-5)


def test_opening_does_not_read_the_features(tmp_path: Path) -> None:
    """Damage in the features is found by their checksum when they are read, not before."""
    path = tmp_path / "data_0.ckpt"
    arrays = document(0, length=64)
    write_bin(path, arrays)
    content = bytearray(path.read_bytes())
    content[content.index(arrays["hidden_state"].tobytes()) + 99] ^= 1
    path.write_bytes(content)
    ((name, record),) = read_feature_files(DataConfig(source=str(path)), D)
    assert isinstance(record, dict) and name == str(path)
    np.testing.assert_array_equal(record["input_ids"], arrays["input_ids"])
    tokens = arrays["input_ids"][None, :8]
    source = FeatureFiles((str(path),), (1, 8, D), np.dtype(np.float32), tokens)
    with pytest.raises(UserError, match=r"data_0\.ckpt: cannot be read .the checksum of"):
        source.read(np.array([0]))


@pytest.mark.torch
def test_a_file_of_other_tokens_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "data_0.ckpt"
    arrays = document(0, length=6)
    write_bin(path, arrays)
    tokens = np.pad(arrays["input_ids"], (0, 2))[None]
    source = FeatureFiles((str(path),), (1, 8, D), np.dtype(np.float32), tokens)
    np.testing.assert_array_equal(source.read(np.array([0]))[0, :6], arrays["hidden_state"])
    shorter = {name: array[:4] for name, array in arrays.items()}
    for other in (document(1, length=6), shorter):
        write_bin(path, other)
        with pytest.raises(UserError, match=r"data_0\.ckpt: its tokens are others now; put the"):
            source.read(np.array([0]))


def broken(folder: Path, kind: str) -> None:
    arrays: dict[str, np.ndarray] = document(1, length=20)
    path = folder / "data_broken.ckpt"
    match kind:
        case "width":
            arrays["hidden_state"] = arrays["hidden_state"][:, :16]
        case "length":
            arrays["hidden_state"] = arrays["hidden_state"][:9]
        case "key":
            del arrays["loss_mask"]
        case "scalar":
            arrays["input_ids"] = np.array(3)
        case "mask":
            arrays["loss_mask"] = arrays["loss_mask"][:9]
    write_bin(path, arrays)
    if kind == "junk":
        path.write_bytes(b"\x00junk" * 9)
    if kind == "cut":
        path.write_bytes(path.read_bytes()[:700])


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("width", "features of another target: want width 32, got 16"),
        ("length", "hidden_state that does not fit: want a feature per token, got float16 (9, 32)"),
        ("scalar", "hidden_state that does not fit: want a feature per token, got float16 (20,"),
        ("key", "no file of features: loss_mask missing"),
        ("mask", "input_ids and loss_mask of different length"),
        ("junk", "no file of tensors: "),
        ("cut", "no file of tensors: "),
    ],
)
def test_files_that_cannot_be_used_are_counted_and_named(
    tmp_path: Path, kind: str, reason: str
) -> None:
    source = write_files(tmp_path, 12)
    broken(tmp_path, kind)
    config = DataConfig(source=source, validation_fraction=0.3)
    tally = load_documents(config, width=D).tally
    assert tally.records == 13 and tally.dropped.total() == 1
    (first,) = tally.first_dropped
    assert f"data_broken.ckpt: {reason}" in first and "\n" not in first
    with pytest.raises(UserError, match=r"13 of 13 records cannot be used .*first .*data_"):
        load_documents(config, width=D + 1)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"packing": "documents"}, "data.packing documents: a file of features fills a row alone"),
        ({"source": "{folder}/*.pt.ckpt"}, "no such file; give a path or a glob"),
        (
            {"max_dropped": 0.01, "source": "{folder}/**/data_*.ckpt"},
            "1 of 21 records cannot be used",
        ),
    ],
)
def test_refusals(runs: Runs, tmp_path: Path, changes: dict[str, Any], error: str) -> None:
    source = write_files(tmp_path / "ge_data", 20)
    broken(tmp_path / "ge_data", "key")
    if "source" in changes:
        changes = changes | {"source": changes["source"].format(folder=tmp_path / "ge_data")}
    config = of_files(runs, tmp_path, **({"source": source} | changes))
    assert error in refusal(main, "--config", config)
    assert not (tmp_path / "run").exists()


def test_tokens_outside_the_vocabulary_and_a_cache_beside_files_are_refused(
    runs: Runs, tmp_path: Path
) -> None:
    source = write_files(tmp_path / "ge_data", 20)
    config = of_files(runs, tmp_path, source)
    message = refusal(main, "--config", config, f"features.cache={tmp_path}/cache")
    assert "features.cache: data.source brings features" in message
    arrays = document(1, length=20)
    arrays["input_ids"][3] = 300
    write_bin(tmp_path / "ge_data" / "data_outside.ckpt", arrays)
    assert "want token ids of 0 to 299, got 300" in refusal(main, "--config", config)
