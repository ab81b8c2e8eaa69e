"""Checksums of model folders: what they cover, and that damage anywhere is found."""

import hashlib
import json
import shutil
import subprocess
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from convert_sources import convert_tiny

from poss_jax.checkpoint import load_item, load_target, read_record, sums, verify_model
from poss_jax.checkpoint.sums import hash_item, hash_values
from poss_jax.config import UserError


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("integrity")
    (folder / "source").mkdir()
    (folder / "source/tokenizer.json").write_text('{"version": "1.0"}')
    (folder / "source/generation_config.json").write_text("{}")
    return convert_tiny(folder) / "target"


# --------------------------------------------------------------------------------------------------
# Hashes of arrays


def test_one_target_in_every_stored_type_has_one_hash():
    values = np.random.default_rng(0).standard_normal((5, 7)).astype(np.float32)
    cast = values.astype(jnp.bfloat16)
    assert (cast.astype(np.float32) != values).any()
    want = hash_values(values)
    assert hash_values(cast) == hash_values(cast.astype(np.float32)) == want
    assert hash_values(values.T) != want
    other = cast.copy()
    other[4, 6] = 9
    assert hash_values(other) != want


def test_hash_is_of_shape_and_bfloat16_bytes():
    values = np.array([[1.0, -2.0, 3.0]], np.float32)
    plain = hashlib.sha256(b"bfloat16 (1, 3)" + values.astype(jnp.bfloat16).tobytes())
    assert hash_values(values) == plain.hexdigest()


def test_chunks_do_not_show_in_the_hash(monkeypatch):
    values = np.random.default_rng(0).standard_normal((5, 7)).astype(np.float32)
    want = hash_values(values)
    monkeypatch.setattr(sums, "_CHUNK", 4)
    assert hash_values(values) == want


def test_values_beyond_bfloat16_are_hashed_as_infinities():
    largest = np.full((2,), np.finfo(np.float32).max)
    assert hash_values(largest) == hash_values(np.full((2,), np.inf, np.float32))


@pytest.mark.parametrize("change", ["path", "dtype", "shape", "bytes"])
def test_item_hash_covers(change):
    item = {"q": {"weight": np.arange(6, dtype=np.float32).reshape(2, 3)}}
    weight = item["q"]["weight"]
    other = {
        "path": {"k": {"weight": weight}},
        "dtype": {"q": {"weight": weight.view(np.int32)}},
        "shape": {"q": {"weight": weight.reshape(3, 2)}},
        "bytes": {"q": {"weight": weight + np.float32(1)}},
    }[change]
    assert hash_item(other) != hash_item(item) == hash_item({"q": {"weight": weight.copy()}})


# --------------------------------------------------------------------------------------------------
# Model folders


def test_intact_folder(model):
    record = verify_model(model)
    assert record == read_record(model)
    embed = load_item(model, record, "embed")
    assert record.weights_sha256 is not None
    assert record.weights_sha256["embed"] == hash_item(embed)
    assert list(record.weights_sha256) == ["embed", "layers/0", "layers/1", "norm", "head"]


def test_files_are_those_sha256sum_would_list(model):
    names = ["generation_config.json", "model.json", "tokenizer.json"]
    lines = (model / "SHA256SUMS").read_text()
    want = [f"{hashlib.sha256((model / n).read_bytes()).hexdigest()}  {n}\n" for n in names]
    assert lines == "".join(want)


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="needs sha256sum")
def test_sha256sum_reads_them(model):
    subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=model, check=True)


@pytest.mark.parametrize("name", ["model.json", "tokenizer.json", "generation_config.json"])
def test_changed_file(model, tmp_path, name):
    copy = shutil.copytree(model, tmp_path / "copy")
    (copy / name).write_text((copy / name).read_text() + "\n")
    load_target(copy)
    with pytest.raises(UserError, match=rf"{name}: SHA256SUMS says"):
        verify_model(copy)


def test_missing_file(model, tmp_path):
    copy = shutil.copytree(model, tmp_path / "copy")
    (copy / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"tokenizer\.json: No such file"):
        verify_model(copy)


def test_other_weights_in_an_item(model, tmp_path):
    copy = shutil.copytree(model, tmp_path / "copy")
    shutil.rmtree(copy / "weights/layers/0")
    shutil.copytree(copy / "weights/layers/1", copy / "weights/layers/0")
    load_target(copy)
    with pytest.raises(UserError, match="weights of item layers/0 are not those"):
        verify_model(copy)


@pytest.mark.parametrize("absent", ["SHA256SUMS", "weights_sha256"])
def test_folder_without_checksums(model, tmp_path, absent):
    copy = shutil.copytree(model, tmp_path / "copy")
    if absent == "SHA256SUMS":
        (copy / absent).unlink()
    else:
        values = json.loads((copy / "model.json").read_text())
        del values[absent]
        (copy / "model.json").write_text(json.dumps(values))
    load_target(copy)
    with pytest.raises(UserError, match="has no complete checksums"):
        verify_model(copy)


@pytest.mark.parametrize("line", ["abc  model.json", "not a line", "0" * 64])
def test_malformed_sums(model, tmp_path, line):
    copy = shutil.copytree(model, tmp_path / "copy")
    (copy / "SHA256SUMS").write_text(line + "\n")
    with pytest.raises(UserError, match="SHA256SUMS: line 1: want"):
        verify_model(copy)
