"""The converter: every layout comes through bit for bit; inspect describes and converts nothing."""

import hashlib
import json
import os
import pickle
import re
import sys
from functools import partial

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from convert_sources import (
    TINY,
    assert_stored,
    draft_tensors,
    draw,
    refusal_of,
    run,
    target_keys,
    target_tensors,
    write_source,
)

from poss_jax.checkpoint.folder import load_target
from poss_jax.checkpoint.record import TOKENIZER_FILES, read_record
from poss_jax.checkpoint.torch_io import read_bin, write_bin
from poss_jax.config.reading import UserError
from poss_jax.convert.__main__ import main
from poss_jax.convert.hf import parse_llama_config
from poss_jax.convert.reading import slots_by_key


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dtype_flag(tmp_path, tiny, dtype, capsys):
    run("target", source=tiny / "source", output=tmp_path / "out", dtype=dtype)
    want = {key: value.astype(jnp.dtype(dtype)) for key, value in target_tensors().items()}
    assert_stored(load_target(tmp_path / "out")[1], target_keys(2), want)
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["dtype"] == dtype


@pytest.mark.parametrize("head", ["absent", "equal", "rounded", "other"])
def test_tied_head(tmp_path, head):
    tensors = target_tensors()
    if head == "absent":
        del tensors["lm_head.weight"]
    elif head == "equal":
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    elif head == "rounded":
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].astype(jnp.bfloat16)
    folder = write_source(tmp_path / "source", tensors, tie_word_embeddings=True)
    if head == "other":
        with pytest.raises(UserError, match="ties the embeddings"):
            run("target", source=folder, output=tmp_path / "out")
        return
    run("target", source=folder, output=tmp_path / "out")
    record, params = load_target(tmp_path / "out")
    assert record.target.head_sha256 == record.target.embedding_sha256
    assert params["head"]["weight"] is params["embed"]["weight"]
    assert not (tmp_path / "out/weights/head").exists()


def test_biases_and_explicit_head_dim(tmp_path):
    values = {"attention_bias": True, "mlp_bias": True, "head_dim": 6}
    config = parse_llama_config(TINY | values, {}, origin="config")
    tensors = draw({k: slot.shape for k, slot in slots_by_key(config).items()})
    assert tensors["model.layers.0.self_attn.q_proj.bias"].shape == (12,)
    assert tensors["model.layers.1.mlp.down_proj.bias"].shape == (8,)
    run("target", source=write_source(tmp_path / "s", tensors, **values), output=tmp_path / "out")
    record, params = load_target(tmp_path / "out")
    assert record.config == config
    table = {
        f"model.layers.1.{module}.{projection}_proj.bias": ["layers", "1", *path, "bias"]
        for module, projection, *path in (
            ("self_attn", "k", "attention", "k"),
            ("self_attn", "o", "attention", "o"),
            ("mlp", "gate", "mlp", "gate"),
        )
    }
    assert_stored(params, table, tensors)


def test_table_and_summary(tmp_path, tiny, capsys):
    run("target", source=tiny / "source", output=tmp_path / "out")
    *table, last = capsys.readouterr().out.splitlines()
    assert len(table) == 3 + 9
    assert table[0].split() == "model.embed_tokens.weight -> embed/weight 16x8 float32".split()
    layers = "model.layers.{0..1}.mlp.gate_proj.weight -> layers/{0..1}/mlp/gate/weight"
    assert table[7].split() == [*layers.split(), "12x8", "float32"]
    assert json.loads(last) == {
        "output": str(tmp_path / "out"),
        "family": "target",
        "method": None,
        "parameters": sum(value.size for value in target_tensors().values()),
        "dtype": "float32",
        "quantised": None,
        "assumed": [],
    }


def test_old_rotary_buffers_are_dropped(tmp_path, capsys):
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": (2,)}
    folder = write_source(tmp_path / "source", target_tensors(**buffer))
    run("target", source=folder, output=tmp_path / "out")
    assert "not stored: follows from the config" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "spans"), [("s", None), ("s", "3"), ("s", "1,1,1"), ("PosS1-Llama2-13B-Chat", None)]
)
def test_spans_must_cover_the_layers(tmp_path, tiny, name, spans):
    source = write_source(tmp_path / name, draft_tensors(2))
    flags = {"positions_per_specialist": spans} if spans else {}
    message = refusal_of(source, "draft", target=tiny / "target", **flags)
    assert re.search(r"2 specialists.*--positions-per-specialist 3,3", message)


def test_target_of_a_draft_must_be_a_target(tmp_path, tiny):
    source = write_source(tmp_path / "source", draft_tensors())
    with pytest.raises(UserError, match="does not exist"):
        run("draft", source=source, target=tmp_path / "no", output=tmp_path / "out")
    run("draft", source=source, target=tiny / "target", output=tmp_path / "out")
    with pytest.raises(UserError, match="got a draft"):
        run("draft", source=source, target=tmp_path / "out", output=tmp_path / "again")


def test_tokenizer_template_and_generation_config_travel_byte_for_byte(tmp_path):
    folder = write_source(tmp_path / "source", target_tensors())
    contents = {name: os.urandom(99) for name in TOKENIZER_FILES if not name.endswith(".json")}
    contents |= {
        name: b'{"note": "%s",\r\n\t"other" : [1 ,2]}' % name.encode()
        for name in TOKENIZER_FILES
        if name.endswith(".json")
    }
    contents["chat_template.jinja"] = "{{ 'é' }}\n".encode()
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    run("target", source=folder, output=tmp_path / "out")
    assert {name: (tmp_path / "out" / name).read_bytes() for name in contents} == contents
    record = read_record(tmp_path / "out")
    for got, name in (
        (record.tokenizer_sha256, "tokenizer.json"),
        (record.chat_template_sha256, "chat_template.jinja"),
    ):
        assert got == hashlib.sha256(contents[name]).hexdigest()
    write_source(tmp_path / "drafted", draft_tensors())
    run("draft", source=tmp_path / "drafted", target=tmp_path / "out", output=tmp_path / "draft")
    draft = read_record(tmp_path / "draft")
    assert draft.tokenizer_sha256 == record.tokenizer_sha256
    assert draft.chat_template_sha256 == record.chat_template_sha256
    assert (tmp_path / "draft/chat_template.jinja").read_text() == "{{ 'é' }}\n"


# --------------------------------------------------------------------------------------------------
# .bin files: bit for bit, without running what they hold


@pytest.mark.parametrize("function", [read_bin, partial(write_bin, arrays={})])
def test_without_torch_the_file_and_the_extra_are_named(tmp_path, monkeypatch, function):
    monkeypatch.setitem(sys.modules, "torch", None)  # importing it fails
    with pytest.raises(UserError, match=r"pytorch_model\.bin needs torch.* the `torch` extra"):
        function(tmp_path / "pytorch_model.bin")


@pytest.mark.torch
@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int64", "bool"])
def test_every_type_bit_for_bit(tmp_path, dtype, zipped):
    import torch

    values = torch.arange(12).reshape(3, 4).to(getattr(torch, dtype)) / 7
    values = values.to(getattr(torch, dtype))
    path = tmp_path / "model.bin"
    torch.save({"a": values, "b": values.T}, path, _use_new_zipfile_serialization=zipped)
    arrays = read_bin(path)
    assert arrays["a"].dtype == np.dtype(getattr(ml_dtypes, dtype, dtype))
    want = values.float().numpy()
    np.testing.assert_array_equal(arrays["a"].astype(np.float32), want)
    np.testing.assert_array_equal(arrays["b"].astype(np.float32), want.T)
    assert not (zipped and arrays["a"].flags.owndata)  # mapped, not read


class Malicious:
    def __init__(self, function, argument):
        self.function, self.argument = function, argument

    def __reduce__(self):
        return self.function, (self.argument,)


@pytest.mark.torch
@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize(
    ("function", "argument", "shown"),
    [(os.system, "touch it_ran", "posix.system"), (eval, "open('it_ran', 'w').close()", "eval")],
)
def test_code_is_refused(tmp_path, monkeypatch, zipped, function, argument, shown):
    import torch

    monkeypatch.chdir(tmp_path)
    state = {"a": torch.ones(2), "b": Malicious(function, argument)}
    torch.save(state, "model.bin", _use_new_zipfile_serialization=zipped)
    with pytest.raises(UserError, match=f"got one that wants to use {shown}") as error:
        read_bin("model.bin")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "it_ran").exists()
    torch.load("model.bin", weights_only=False)  # the file is one that runs code
    assert (tmp_path / "it_ran").exists()


@pytest.mark.torch
def test_code_in_a_pickle_that_torch_did_not_write(tmp_path):
    state = {"a": Malicious(os.system, f"touch {tmp_path}/it_ran")}
    (tmp_path / "model.bin").write_bytes(pickle.dumps(state, protocol=4))
    with pytest.raises(UserError, match="got one that holds or runs other things"):
        read_bin(tmp_path / "model.bin")
    assert not (tmp_path / "it_ran").exists()


@pytest.mark.torch
def test_checksums_are_compared_before_use(tmp_path):
    import torch

    path = tmp_path / "model.bin"
    torch.save({"a": torch.arange(64.0)}, path)
    content = bytearray(path.read_bytes())
    content[content.index(np.float32(33).tobytes())] ^= 1
    path.write_bytes(content)
    assert torch.load(path)["a"].shape == (64,)  # torch does not compare them
    with pytest.raises(UserError, match=r"model\.bin: .*the checksum of model/data/0 does not"):
        read_bin(path)


@pytest.mark.torch
@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"x" * 100, None])
def test_damaged_file(tmp_path, content):
    """None: one that torch wrote, cut off."""
    import torch

    path = tmp_path / "model.bin"
    torch.save({"a": torch.zeros(1000)}, path)
    path.write_bytes(path.read_bytes()[:2000] if content is None else content)
    with pytest.raises(UserError, match=r"model\.bin: ") as error:
        read_bin(path)
    assert "\n" not in str(error.value)
    with pytest.raises(UserError, match="No such file"):
        read_bin(tmp_path / "missing.bin")


@pytest.mark.torch
@pytest.mark.parametrize("kind", ["list", "nested", "number"])
def test_only_a_flat_state_dict(tmp_path, kind):
    import torch

    tensor = torch.ones(2, 2)
    state = {
        "list": [tensor],
        "nested": {"model": {"a": tensor}},
        "number": {"a": tensor, "step": 3},
    }[kind]
    torch.save(state, tmp_path / "model.bin")
    with pytest.raises(UserError, match=r"model\.bin"):
        read_bin(tmp_path / "model.bin")


@pytest.mark.torch
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_quantised_file(tmp_path, dtype):
    import torch

    folder = write_source(tmp_path / "source", target_tensors())
    (folder / "model.safetensors").unlink()
    state = {"model.norm.weight": torch.ones(8).to(getattr(torch, dtype))}
    torch.save(state, folder / "pytorch_model.bin")
    assert re.search(f"model.norm.weight.*{dtype}.*quantised", refusal_of(folder))


# --------------------------------------------------------------------------------------------------
# inspect


def show(source, *flags):
    """Everything that is printed about a source: text, and the JSON of the last line."""
    main(["inspect", str(source), *flags])


def read(capsys):
    *lines, last = capsys.readouterr().out.splitlines()
    return "\n".join(lines), json.loads(last)


def test_inspect_target(tmp_path, capsys):
    rope = {"rope_type": "linear", "factor": 2.0}
    source = write_source(tmp_path / "t", target_tensors(), rope_scaling=rope, eos_token_id=[3, 5])
    (source / "tokenizer.json").write_text("{}")
    show(source)
    text, summary = read(capsys)
    assert "a target of 2 layers" in text
    assert "width 8, mlp 12, 2 heads of 4, 1 for keys and values" in text
    assert "linear, theta 10000, factor 2; up to 2048 positions" in text
    assert "16 tokens, stop tokens 3, 5" in text
    assert "tokenizer.json" in text
    assert "model.layers.{0..1}.mlp.up_proj.weight" in text
    assert f"convert target --source {source} --output DIR" in text
    assert summary == {
        "source": str(source),
        "family": "target",
        "method": None,
        "parameters": sum(value.size for value in target_tensors().values()),
        "dtypes": ["float32"],
        "assumed": [],
        "needs": None,
        "refused": None,
    }


def test_inspect_draft_that_says_all(tmp_path, capsys):
    source = write_source(tmp_path / "PosS3-Llama2-13B-Chat", draft_tensors(2), bias=True)
    show(source)
    text, summary = read(capsys)
    assert "a poss3 draft of 2 specialists, positions per specialist 3,3, trained depth 6" in text
    assert "meta-llama/Llama-2-13b-chat-hf" in text
    assert summary["method"] == "poss3"
    assert summary["needs"] is summary["refused"] is None
    assert [f"assumed: {line}" in text for line in summary["assumed"]] == [True] * 5
    assert any("fc without bias" in line for line in summary["assumed"])


def test_inspect_draft_whose_spans_nobody_knows(tmp_path, capsys):
    show(write_source(tmp_path / "draft", draft_tensors(2)))
    text, summary = read(capsys)
    assert "a PosS draft of 2 specialists" in text
    assert "--positions-per-specialist N,N,... --output DIR" in text
    assert "--positions-per-specialist 3,3" in summary["needs"]
    assert summary["refused"] is None
    assert f"needs: {summary['needs']}" in text


@pytest.mark.parametrize(
    ("tensors", "config", "message"),
    [
        (target_tensors(extra=(3,)), {"architectures": ["SomeForCausalLM"]}, "unknown extra [3]"),
        (draft_tensors(), {"architectures": ["DFlashDraftModel"]}, "a DFlash draft (DFlashDraft"),
    ],
)
def test_inspect_what_would_be_refused(tmp_path, capsys, tensors, config, message):
    with pytest.raises(SystemExit) as caught:
        show(write_source(tmp_path / "source", tensors, **config))
    assert caught.value.code == 1
    text, summary = read(capsys)
    assert message in summary["refused"] and f"refused: {summary['refused']}" in text
    assert config["architectures"][0] in text and "convert with" not in text
    assert ("a DFlash draft, which fills a block of masked" in text) == ("DFlash" in message)
    assert summary["parameters"] == sum(np.size(value) for value in tensors.values())
    assert next(iter(tensors)).partition("layers.")[0] in text


def test_inspect_model_folders(tmp_path, tiny, capsys):
    source = write_source(tmp_path / "source", draft_tensors(2))
    spans = {"positions_per_specialist": "1,3"}
    run("draft", source=source, target=tiny / "target", output=tmp_path / "draft", **spans)
    capsys.readouterr()
    show(tmp_path / "draft", "--verify")
    text, summary = read(capsys)
    assert "a poss13 draft of 2 specialists, positions per specialist 1,3, trained depth 4" in text
    assert "source, revision unknown" in text
    assert "checksums               all agree" in text
    assert "specialists/{0..1}/attention/q/weight" in text
    assert (summary["family"], summary["method"]) == ("draft", "poss13")
    show(tiny / "target")
    text, summary = read(capsys)
    assert "a model folder: a target of 2 layers" in text and "checksums" not in text
    assert summary["parameters"] == sum(value.size for value in target_tensors().values())
    with pytest.raises(UserError, match="--verify: want a model folder"):
        show(tiny / "source", "--verify")
