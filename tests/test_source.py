"""Sources that contradict themselves or their checksums, and numbers that are none."""

import json
import os
import re
import struct
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from convert_sources import run, target_tensors, write_shards, write_source
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models

from poss_jax.checkpoint import sums, torch_io
from poss_jax.checkpoint.folder import copy_tokenizer
from poss_jax.checkpoint.record import read_record
from poss_jax.checkpoint.sums import write_sums
from poss_jax.config import json_reading
from poss_jax.config.json_reading import read_json
from poss_jax.config.reading import UserError
from poss_jax.convert.plan import is_finite
from poss_jax.convert.source import open_tensors
from poss_jax.data.tokenizer import load_tokenizer

KEY = "model.layers.1.mlp.up_proj.weight"


def refused(tmp_path, match):
    with pytest.raises(UserError, match=match) as error:
        run("target", source=tmp_path / "source", output=tmp_path / "out")
    assert "\n" not in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


Change = Callable[[Path], object]


def written(name: str, content: str | bytes) -> Change:
    content = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / name).write_bytes(content)


def removed(name: str) -> Change:
    return lambda folder: (folder / name).unlink()


def setting(key: str, text: str, name: str = "config.json") -> Change:
    """A file's value of a key, as JSON text."""

    def change(folder: Path) -> None:
        path = folder / name
        values = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(values | {key: "HERE"}).replace('"HERE"', text))

    return change


def doubled(name: str, key: str) -> Change:
    """A JSON file, or a header, that has a key and its value twice."""

    def change(folder: Path) -> None:
        content = (folder / name).read_bytes()
        is_weights = name.endswith(".safetensors")
        end = 8 + int.from_bytes(content[:8], "little") if is_weights else len(content)
        text = content[8:end].decode() if is_weights else content.decode()
        entry = re.search(rf'"{re.escape(key)}":\s*(\{{[^}}]*\}}|[^,}}]*)', text)
        assert entry is not None
        twice = text.replace(entry[0], f"{entry[0]},{entry[0]}", 1).encode()
        header = struct.pack("<Q", len(twice)) if is_weights else b""
        (folder / name).write_bytes(header + twice + content[end:])

    return change


# A few types read every number: one key shows what its type refuses, the others that they have one.
_NO_SIZES = ["-1", "0", "0.5", "1e999", "NaN", '"many"', "[8]", "{}", "1" * 30, "1" * 5000]
_NO_STOPS = ["1e999", "4294967296", '"end"', "[1, -2]", "[[1]]"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (removed("config.json"), r"config\.json: No such file"),
        (removed("model.safetensors"), "holds no weights"),
        (written("config.json", "{"), r"config\.json: not valid JSON"),
        (written("config.json", '{"a": ' + "[" * 100_000), r"config\.json: not valid JSON"),
        (written("model.safetensors", b"\xff" * 100), r"model\.safetensors"),
        (doubled("config.json", "hidden_size"), r"config\.json: hidden_size is given twice"),
        (doubled("model.safetensors", KEY), rf"header: {re.escape(KEY)} is given twice"),
        *((setting("hidden_size", text), r"config\.json") for text in _NO_SIZES),
        *(
            (setting(key, "1" * 30), r"config\.json")
            for key in ("vocab_size", "num_hidden_layers", "num_key_value_heads", "head_dim")
        ),
        *(
            (setting("rms_norm_eps", text), r"config\.json: rms")
            for text in ("-1", "1e999", "NaN", '"small"', "[]")
        ),
        (setting("rope_theta", "1e999"), r"config\.json: rope"),
        (setting("max_position_embeddings", "-1"), r"config\.json: max"),
        *((setting("eos_token_id", text), r"/config\.json: eos_token_id: ") for text in _NO_STOPS),
        *(
            (
                setting("eos_token_id", text, "generation_config.json"),
                r"/generation_config\.json: eos_token_id: ",
            )
            for text in _NO_STOPS
        ),
    ],
)
def test_broken_source(tmp_path, change, message):
    change(write_source(tmp_path / "source", target_tensors()))
    refused(tmp_path, message)


INDEX = "model.safetensors.index.json"
SHARDS = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]


def without_head(folder: Path) -> None:
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    del weight_map["lm_head.weight"]
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def mapped(shard: object) -> Change:
    return written(INDEX, json.dumps({"weight_map": {KEY: shard}}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (removed(SHARDS[1]), "which is missing"),
        (without_head, r"disagree about lm_head\.weight"),
        (
            lambda folder: save_file(target_tensors(), folder / SHARDS[1]),
            rf"disagree .* {SHARDS[1]}",
        ),
        (written(INDEX, '{"weight_map": {}}'), "want a weight_map"),
        (doubled(INDEX, KEY), rf"{re.escape(INDEX)}: {re.escape(KEY)} is given twice"),
        *(
            (
                mapped(shard),
                rf"index\.json names the shard .* of {re.escape(KEY)}, which is missing",
            )
            for shard in (
                *(3, None, "", ".", "..", "x" * 300, "a\0b", "a\nb", "config.json/x", "../a"),
                *("/dev/zero", f"../source/{SHARDS[0]}"),
            )
        ),
    ],
)
def test_broken_shards(tmp_path, change, message):
    tensors = target_tensors()
    folder = write_source(tmp_path / "source", tensors)
    write_shards(folder, tensors)
    change(folder)
    refused(tmp_path, message)


# --------------------------------------------------------------------------------------------------
# Links and special files


@pytest.fixture
def secret(tmp_path_factory):
    path = tmp_path_factory.mktemp("elsewhere") / "secret"
    path.write_text("{}")
    return path


SMALL_FILES = ["config.json", "generation_config.json", "tokenizer.json", "merges.txt"]


@pytest.mark.parametrize("name", [*SMALL_FILES, "SHA256SUMS"])
@pytest.mark.parametrize("hops", [1, 2])
def test_link_that_leads_out_of_the_source(tmp_path, secret, name, hops):
    folder = write_source(tmp_path / "source", target_tensors())
    if hops == 2:
        (folder / "inside").symlink_to(secret)
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(secret if hops == 1 else "inside")
    refused(tmp_path, rf"{re.escape(name)}: a link that leads out of its folder")


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json", "shard"])
def test_weights_behind_a_link_that_leads_out(tmp_path, secret, name):
    folder = write_source(tmp_path / "source", target_tensors())
    if name != "model.safetensors":
        write_shards(folder, target_tensors())
    if name == "shard":
        name = next(path.name for path in folder.glob("model-*.safetensors"))
    (folder / name).rename(secret)
    (folder / name).symlink_to(secret)
    message = rf"{re.escape(name)}: a link that leads out of its folder"
    refused(tmp_path, message)
    with pytest.raises(UserError, match=message):  # `inspect` does not compare checksums
        open_tensors(folder, verify=False)


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "shard"])
def test_file_that_would_be_waited_for(tmp_path, name):
    folder = write_source(tmp_path / "source", target_tensors())
    if name == "shard":
        write_shards(folder, target_tensors())
        name = next(path.name for path in folder.glob("model-*.safetensors"))
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    refused(tmp_path, rf"{re.escape(name)}: want a regular file")
    with pytest.raises(UserError, match="want a regular file"):
        read_json(folder / name)


def test_json_file_that_is_too_large(tmp_path, monkeypatch):
    monkeypatch.setattr(json_reading, "MAX_BYTES", 100)
    write_source(tmp_path / "source", target_tensors())
    refused(tmp_path, r"config\.json: want at most 100 bytes of JSON, got \d+")


@pytest.mark.parametrize("home", ["blobs", "other"])
def test_links_of_the_hubs_cache(tmp_path, home):
    cache = tmp_path / "models--owner--tiny"
    source = write_source(tmp_path / "files", target_tensors())
    (source / "tokenizer.json").write_text("{}")
    snapshot = cache / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (cache / home).mkdir()
    for path in source.iterdir():
        path.rename(cache / home / path.name)
        (snapshot / path.name).symlink_to(f"../../{home}/{path.name}")
    if home == "blobs":
        run("target", source=snapshot, output=tmp_path / "out")
        assert not (tmp_path / "out/tokenizer.json").is_symlink()
        assert (tmp_path / "out/tokenizer.json").read_text() == "{}"
        made_of = read_record(tmp_path / "out").target
        assert (made_of.name, made_of.revision) == ("owner/tiny", snapshot.name)
    else:
        with pytest.raises(UserError, match="a link that leads out of its folder"):
            run("target", source=snapshot, output=tmp_path / "out")


def test_tokenizer_of_a_model_folder_is_not_copied_through_a_link(tmp_path, secret):
    (tmp_path / "source").mkdir()
    (tmp_path / "source/tokenizer.json").symlink_to(secret)
    with pytest.raises(UserError, match=r"tokenizer\.json: a link that leads out of its folder"):
        copy_tokenizer(tmp_path / "source", tmp_path)


@pytest.mark.parametrize("name", ["model.json", "weights", "weights/embed", "weights/embed/d"])
def test_link_that_leads_out_of_a_model_folder(tmp_path, name):
    run("target", source=write_source(tmp_path / "a", target_tensors()), output=tmp_path / "out")
    path = tmp_path / "out" / name
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=rf"{name}: a link that leads out of its folder"):
        read_record(tmp_path / "out")


def test_tokenizer_behind_a_link_that_leads_out(tmp_path, secret):
    (tmp_path / "tokenizer_config.json").symlink_to(secret)
    with pytest.raises(UserError, match=r"tokenizer_config\.json: a link that leads out"):
        load_tokenizer(tmp_path)


def test_gguf_file_behind_a_link_that_leads_out(tmp_path, secret):
    (tmp_path / "source").mkdir()
    (tmp_path / "source/model.gguf").symlink_to(secret)
    refused(tmp_path, r"model\.gguf: a link that leads out of its folder")


# --------------------------------------------------------------------------------------------------
# A tokenizer of another size


@pytest.mark.parametrize("num_tokens", [16, 17])
def test_tokenizer_with_more_tokens_than_the_embedding(tmp_path, capsys, num_tokens):
    folder = write_source(tmp_path / "source", target_tensors())
    vocabulary = {f"token{index}": index for index in range(num_tokens)}
    Tokenizer(models.WordLevel(vocabulary, "token0")).save(str(folder / "tokenizer.json"))
    run("target", source=folder, output=tmp_path / "out")
    run("inspect", str(folder))
    line = "assumed: texts hold no token above 15, the embedding's last, although the tokenizer"
    assert capsys.readouterr().out.count(line) == 2 * (num_tokens == 17)


# --------------------------------------------------------------------------------------------------
# Checksums


@pytest.mark.parametrize(
    "name", ["config.json", "model-00002-of-00003.safetensors", "tokenizer.json"]
)
def test_sums_beside_the_source_are_compared(tmp_path, name):
    tensors = target_tensors()
    folder = write_source(tmp_path / "source", tensors)
    write_shards(folder, tensors)
    (folder / "tokenizer.json").write_text("{ }")
    write_sums(folder, [path.name for path in folder.iterdir()])
    run("target", source=folder, output=tmp_path / "intact")
    (tmp_path / "intact").rename(tmp_path / "source/intact")
    content = bytearray((folder / name).read_bytes())
    content[-1] ^= 1
    (folder / name).write_bytes(content)
    refused(tmp_path, rf"{re.escape(name)}: (SHA256SUMS says SHA-256|not valid JSON)")


def test_sums_of_files_that_are_not_used(tmp_path):
    folder = write_source(tmp_path / "source", target_tensors())
    names = ["README.md", "pytorch_model.bin"]
    (folder / "SHA256SUMS").write_text("".join(f"{'0' * 64}  {name}\n" for name in names))
    (folder / "pytorch_model.bin").write_bytes(b"not looked at")
    run("target", source=folder, output=tmp_path / "out")


def test_looking_needs_no_hashing(tmp_path):
    folder = write_source(tmp_path / "source", target_tensors())
    (folder / "SHA256SUMS").write_text(f"{'0' * 64}  model.safetensors\n")
    assert KEY in open_tensors(folder, verify=False)
    with pytest.raises(UserError, match="SHA256SUMS says"):
        open_tensors(folder)


@pytest.mark.parametrize(
    ("verify", "listed", "check"), [(False, False, False), (True, True, False), (True, False, True)]
)
def test_checksums_inside_a_bin_file_are_for_files_without_others(
    tmp_path, monkeypatch, verify, listed, check
):
    checked = []
    monkeypatch.setattr(torch_io, "read_bin", lambda _, check: checked.append(check) or {})
    (tmp_path / "pytorch_model.bin").write_bytes(b"not looked at")
    if listed:
        write_sums(tmp_path, ["pytorch_model.bin"])
    open_tensors(tmp_path, verify=verify)
    assert checked == [check]


# --------------------------------------------------------------------------------------------------
# Not a number


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, jnp.bfloat16])
def test_numbers_that_are_none_are_refused(tmp_path, dtype, value):
    tensors = target_tensors(dtype)
    tensors[KEY][3, 2] = value
    folder = write_source(tmp_path / "source", tensors)
    line = f"{folder / 'model.safetensors'}: {KEY} holds NaN or infinity"
    with pytest.raises(UserError, match=re.escape(line)):
        run("target", source=folder, output=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_every_chunk_is_looked_at(monkeypatch):
    monkeypatch.setattr(sums, "_CHUNK", 4)
    for index in range(10):
        values = np.zeros(10, np.float32)
        assert is_finite(values)
        values[index] = np.nan
        assert not is_finite(values.reshape(5, 2))
