"""What is read beside a source: links of the Hub's cache, tokenizers, checksums."""

import numpy as np
import pytest
from convert_sources import run, target_tensors, write_source
from tokenizers import Tokenizer, models

from poss_jax.checkpoint import sums, torch_io
from poss_jax.checkpoint.record import read_record
from poss_jax.checkpoint.sums import write_sums
from poss_jax.checkpoint.writing import copy_tokenizer
from poss_jax.config.reading import UserError
from poss_jax.convert.plan import is_finite
from poss_jax.convert.source import open_tensors
from poss_jax.data.tokenizer import load_tokenizer


def test_a_snapshot_may_link_only_into_its_cache(tmp_path):
    """`blobs`, where the Hub's files lie, is tested by test_hub."""
    cache = tmp_path / "models--owner--tiny"
    source = write_source(tmp_path / "files", target_tensors())
    snapshot = cache / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (cache / "other").mkdir()
    for path in source.iterdir():
        path.rename(cache / "other" / path.name)
        (snapshot / path.name).symlink_to(f"../../other/{path.name}")
    with pytest.raises(UserError, match="a link that leads out of its folder"):
        run("target", source=snapshot, output=tmp_path / "out")


@pytest.mark.parametrize("name", ["model.json", "weights", "weights/embed", "weights/embed/d"])
def test_link_that_leads_out_of_a_model_folder(tmp_path, name):
    run("target", source=write_source(tmp_path / "a", target_tensors()), output=tmp_path / "out")
    path = tmp_path / "out" / name
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match=rf"{name}: a link that leads out of its folder"):
        read_record(tmp_path / "out")


def test_tokenizer_behind_a_link_is_neither_read_nor_copied(tmp_path):
    (tmp_path / "secret").write_text("{}")
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "tokenizer_config.json").symlink_to(tmp_path / "secret")
    for read in (load_tokenizer, lambda source: copy_tokenizer(source, tmp_path)):
        with pytest.raises(UserError, match=r"tokenizer_config\.json: a link that leads out"):
            read(folder)


@pytest.mark.parametrize("num_tokens", [16, 17])
def test_tokenizer_with_more_tokens_than_the_embedding(tmp_path, capsys, num_tokens):
    folder = write_source(tmp_path / "source", target_tensors())
    vocabulary = {f"token{index}": index for index in range(num_tokens)}
    Tokenizer(models.WordLevel(vocabulary, "token0")).save(str(folder / "tokenizer.json"))
    run("target", source=folder, output=tmp_path / "out")
    run("inspect", str(folder))
    line = "assumed: texts hold no token above 15, the embedding's last, although the tokenizer"
    assert capsys.readouterr().out.count(line) == 2 * (num_tokens == 17)


def test_sums_of_files_that_are_not_used(tmp_path):
    folder = write_source(tmp_path / "source", target_tensors())
    names = ["README.md", "pytorch_model.bin"]
    (folder / "SHA256SUMS").write_text("".join(f"{'0' * 64}  {name}\n" for name in names))
    (folder / "pytorch_model.bin").write_bytes(b"not looked at")
    run("target", source=folder, output=tmp_path / "out")


def test_weights_are_hashed_only_when_verified(tmp_path):
    folder = write_source(tmp_path / "source", target_tensors())
    (folder / "SHA256SUMS").write_text(f"{'0' * 64}  model.safetensors\n")
    assert "lm_head.weight" in open_tensors(folder, verify=False)
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


def test_every_chunk_is_looked_at(monkeypatch):
    monkeypatch.setattr(sums, "_CHUNK", 4)
    for index in range(10):
        values = np.zeros(10, np.float32)
        assert is_finite(values)
        values[index] = np.nan
        assert not is_finite(values.reshape(5, 2))
