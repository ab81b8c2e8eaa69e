"""Checksums of model folders: what they cover, and that damage anywhere is found."""

import errno
import hashlib
import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from convert_sources import convert_tiny
from etils import epath
from models import random_target, tiny_llama

from poss_jax.checkpoint import folder as folder_module
from poss_jax.checkpoint.folder import load_item, load_target
from poss_jax.checkpoint.record import new_record, read_record
from poss_jax.checkpoint.sums import hash_item, hash_values
from poss_jax.checkpoint.writing import target_identity, verify_model, write_model
from poss_jax.config.reading import UserError
from poss_jax.model.parameters import split_items


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("integrity")
    (folder / "source").mkdir()
    (folder / "source/tokenizer.json").write_text('{"version": "1.0"}')
    (folder / "source/generation_config.json").write_text("{}")
    return convert_tiny(folder) / "target"


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


def test_intact_folder(model):
    record = verify_model(model)
    assert record == read_record(model)
    embed = load_item(model, record, "embed")
    assert record.weights_sha256 is not None
    assert record.weights_sha256["embed"] == hash_item(embed)
    assert list(record.weights_sha256) == ["embed", "layers/0", "layers/1", "norm", "head"]


def test_too_little_memory_is_not_damage(model, monkeypatch):
    def fail(*_):
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 16 bytes")

    monkeypatch.setattr(jax, "make_array_from_callback", fail)
    with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED"):
        load_item(model, read_record(model), "embed")


DENIED = "PERMISSION_DENIED: Failed to open: Permission denied [os_error_code='13']"


@pytest.mark.parametrize(
    ("error", "number"),
    [
        (PermissionError(errno.EACCES, "Permission denied", "/models/embed/_METADATA"), 13),
        (ValueError(DENIED), 13),
        (OSError(errno.ESTALE, "Stale file handle"), errno.ESTALE),
    ],
)
def test_what_may_not_be_read_is_not_damage(model, monkeypatch, error, number):
    def fail(_):
        raise error

    monkeypatch.setattr(folder_module, "_open_arrays", fail)
    with pytest.raises(OSError, match="embed") as caught:
        load_item(model, read_record(model), "embed")
    assert caught.value.errno == number


def test_unreadable_uri_names_network_and_credentials():
    with (
        pytest.raises(UserError, match=r"b/embed cannot be read \(gone\); check network and cred"),
        folder_module._explained(epath.Path("gs://b/embed")),
    ):
        raise ValueError("gone")


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="needs sha256sum")
def test_sha256sum_reads_them(model):
    subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=model, check=True)


def lengthen(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text((folder / name).read_text() + "\n")


def write_line_of_sums(line: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "SHA256SUMS").write_text(line + "\n")


def exchange_layers(folder: Path) -> None:
    shutil.rmtree(folder / "weights/layers/0")
    shutil.copytree(folder / "weights/layers/1", folder / "weights/layers/0")


def drop_hashes_of_weights(folder: Path) -> None:
    values = json.loads((folder / "model.json").read_text())
    del values["weights_sha256"]
    (folder / "model.json").write_text(json.dumps(values))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lengthen("model.json"), r"model\.json: SHA256SUMS says"),
        (lengthen("tokenizer.json"), r"tokenizer\.json: SHA256SUMS says"),
        (lengthen("generation_config.json"), r"generation_config\.json: SHA256SUMS says"),
        (exchange_layers, "weights of item layers/0 are not those"),
        (lambda folder: (folder / "SHA256SUMS").unlink(), "has no complete checksums"),
        (drop_hashes_of_weights, "has no complete checksums"),
        (write_line_of_sums("abc  model.json"), "SHA256SUMS: line 1: want"),
        (write_line_of_sums("0" * 64), "SHA256SUMS: line 1: want"),
    ],
)
def test_change_that_only_verifying_finds(model, tmp_path, change, message):
    copy = shutil.copytree(model, tmp_path / "copy")
    change(copy)
    load_target(copy)
    with pytest.raises(UserError, match=message):
        verify_model(copy)


@pytest.mark.parametrize("damage", ["cut", "flip"])
def test_damage_to_a_large_array(tmp_path, damage, capfd):
    """Beyond 1 KiB, Orbax keeps arrays in files without checksums; ours cover them."""
    config = tiny_llama(tie_embeddings=True)
    params = random_target(config)
    identity = target_identity("tiny", None, *(params["embed"]["weight"],) * 2)
    record = new_record(config, identity, tokenizer_from=None)
    write_model(tmp_path / "m", record, split_items(config, params), tokenizer_from=None)
    files = [path for path in (tmp_path / "m/weights/embed").rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    half = len(content) // 2
    content[half] ^= 1
    largest.write_bytes(content[:half] if damage == "cut" else content)
    if damage == "flip":
        load_target(tmp_path / "m")
    message = "embed is damaged" if damage == "cut" else "weights of item embed are not those"
    with pytest.raises(UserError, match=message) as error:
        verify_model(tmp_path / "m")
    assert len(str(error.value)) < 400
    assert capfd.readouterr().err == ""
