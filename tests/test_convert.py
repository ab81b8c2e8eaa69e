"""The converter: every layout comes through bit for bit."""

import json
import sys
from pathlib import Path

import huggingface_hub
import jax.numpy as jnp
import numpy as np
import pytest
from convert_sources import (
    TINY,
    assert_stored,
    convert_tiny,
    draft_keys,
    draft_tensors,
    draw,
    run,
    target_keys,
    target_tensors,
    write_shards,
    write_source,
)
from safetensors.numpy import load_file

from poss_jax.checkpoint.folder import load_draft, load_target
from poss_jax.checkpoint.record import read_record
from poss_jax.config.models import DraftConfig, LlamaConfig, RopeConfig
from poss_jax.config.reading import UserError
from poss_jax.convert.hf import parse_llama_config
from poss_jax.convert.names import slots_by_key
from poss_jax.convert.reading import PUBLISHED


@pytest.fixture(scope="module")
def fixture_target(fixtures, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("converted") / "target"
    run("target", source=fixtures / "target", output=output)
    return output


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return convert_tiny(tmp_path_factory.mktemp("tiny"))


# --------------------------------------------------------------------------------------------------
# Targets


def test_fixture_target(fixtures, fixture_target):
    record, params = load_target(fixture_target)
    assert record.config == LlamaConfig(
        vocab_size=260,
        hidden_size=128,
        intermediate_size=352,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=5e5),
        bos_token_id=257,
        eos_token_ids=(258,),
    )
    tensors = load_file(fixtures / "target/model.safetensors")
    assert target_keys(4).keys() == tensors.keys()
    assert_stored(params, target_keys(4), tensors)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, jnp.bfloat16])
def test_every_dtype_is_kept(tmp_path, dtype):
    tensors = target_tensors(dtype)
    write_source(tmp_path / "source", tensors)
    run("target", source=tmp_path / "source", output=tmp_path / "out")
    assert_stored(load_target(tmp_path / "out")[1], target_keys(2), tensors)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtype_flag(tmp_path, tiny, dtype, capsys):
    run("target", source=tiny / "source", output=tmp_path / "out", dtype=dtype)
    want = {key: value.astype(jnp.dtype(dtype)) for key, value in target_tensors().items()}
    assert_stored(load_target(tmp_path / "out")[1], target_keys(2), want)
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["dtype"] == dtype


def test_sharded_safetensors(tmp_path):
    tensors = target_tensors()
    write_shards(write_source(tmp_path / "source", tensors), tensors)
    run("target", source=tmp_path / "source", output=tmp_path / "out")
    assert_stored(load_target(tmp_path / "out")[1], target_keys(2), tensors)


@pytest.mark.torch
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("sharded", [False, True])
def test_bin(tmp_path, dtype, sharded):
    import torch

    folder = write_source(tmp_path / "source", {})
    (folder / "model.safetensors").unlink()
    tensors = target_tensors(np.float32)
    state = {k: torch.from_numpy(v).to(getattr(torch, dtype)) for k, v in tensors.items()}
    if sharded:
        first, second = dict(list(state.items())[:9]), dict(list(state.items())[9:])
        torch.save(first, folder / "a.bin")
        torch.save(second, folder / "b.bin")
        weight_map = dict.fromkeys(first, "a.bin") | dict.fromkeys(second, "b.bin")
        index = folder / "pytorch_model.bin.index.json"
        index.write_text(json.dumps({"weight_map": weight_map}))
    else:
        torch.save(state, folder / "pytorch_model.bin")
    run("target", source=folder, output=tmp_path / "out")
    want = {key: value.astype(jnp.dtype(dtype)) for key, value in tensors.items()}
    assert_stored(load_target(tmp_path / "out")[1], target_keys(2), want)


def test_bin_without_torch(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)  # importing it fails
    folder = write_source(tmp_path / "source", target_tensors())
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"source/pytorch_model\.bin needs torch"):
        run("target", source=folder, output=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_safetensors_win_over_bin(tmp_path, tiny):
    folder = write_source(tmp_path / "source", target_tensors())
    (folder / "pytorch_model.bin").write_bytes(b"not looked at")
    run("target", source=folder, output=tmp_path / "out")
    assert read_record(tmp_path / "out").target.same_weights(read_record(tiny / "target").target)


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
    config = parse_llama_config(
        TINY | {"attention_bias": True, "mlp_bias": True, "head_dim": 6}, {}, origin="config"
    )
    tensors = draw({k: slot.shape for k, slot in slots_by_key(config).items()})
    assert tensors["model.layers.0.self_attn.q_proj.bias"].shape == (12,)
    assert tensors["model.layers.1.mlp.down_proj.bias"].shape == (8,)
    folder = write_source(
        tmp_path / "source", tensors, attention_bias=True, mlp_bias=True, head_dim=6
    )
    run("target", source=folder, output=tmp_path / "out")
    record, params = load_target(tmp_path / "out")
    assert record.config == config
    table = {
        "model.layers.1.self_attn.k_proj.bias": ["layers", "1", "attention", "k", "bias"],
        "model.layers.0.self_attn.o_proj.bias": ["layers", "0", "attention", "o", "bias"],
        "model.layers.0.mlp.gate_proj.bias": ["layers", "0", "mlp", "gate", "bias"],
    }
    assert_stored(params, table, tensors)


def test_old_rotary_buffers_are_dropped(tmp_path, capsys):
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": (2,)}
    folder = write_source(tmp_path / "source", target_tensors(**buffer))
    run("target", source=folder, output=tmp_path / "out")
    assert "not stored: follows from the config" in capsys.readouterr().out


def test_tokenizer_travels_to_target_and_draft(tmp_path):
    folder = write_source(tmp_path / "source", target_tensors())
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    run("target", source=folder, output=tmp_path / "target")
    draft = write_source(tmp_path / "draft", draft_tensors())
    run("draft", source=draft, target=tmp_path / "target", output=tmp_path / "out")
    target_record, draft_record = read_record(tmp_path / "target"), read_record(tmp_path / "out")
    assert draft_record.tokenizer_sha256 == target_record.tokenizer_sha256 is not None
    assert draft_record.chat_template_sha256 == target_record.chat_template_sha256 is not None
    assert (tmp_path / "out/chat_template.jinja").read_text() == "{{ messages }}"


# --------------------------------------------------------------------------------------------------
# Drafts


@pytest.mark.parametrize(
    ("name", "flags", "spans", "depth", "method"),
    [
        ("eagle", {}, (1,), 1, "eagle2"),
        ("eagle", {"trained_depth": 3}, (1,), 3, "hass"),
        ("poss3", {"positions_per_specialist": "3,3"}, (3, 3), 6, "poss3"),
        ("poss3", {"positions_per_specialist": "1,4", "trained_depth": 7}, (1, 4), 7, "poss14"),
    ],
)
def test_fixture_drafts(fixtures, fixture_target, tmp_path, name, flags, spans, depth, method):
    source = fixtures / "draft" / name
    run("draft", source=source, target=fixture_target, output=tmp_path / "out", **flags)
    record, params = load_draft(tmp_path / "out", target=read_record(fixture_target))
    assert record.config.positions_per_specialist == spans
    assert (record.config.trained_depth, record.method) == (depth, method)
    assert record.config.layer.rope.theta == 5e5
    tensors = load_file(source / "model.safetensors")
    assert draft_keys(len(spans)).keys() == tensors.keys() - {"embed_tokens.weight"}
    assert_stored(params, draft_keys(len(spans)), tensors)
    assert params.keys() == {"fc", "specialists"}


def test_fc_bias_is_read_from_the_keys(tmp_path, tiny):
    for name, extra in (("with", {"fc.bias": (8,)}), ("without", {})):
        source = write_source(tmp_path / "source" / name, draft_tensors(**extra))
        run("draft", source=source, target=tiny / "target", output=tmp_path / name)
        record, params = load_draft(tmp_path / name, target=read_record(tiny / "target"))
        assert record.config.fc_bias == ("bias" in params["fc"]) == (name == "with")


@pytest.mark.parametrize("dtype", [np.float32, np.float16, jnp.bfloat16])
def test_embedding_may_be_kept_in_another_type(tmp_path, tiny, dtype):
    tensors = draft_tensors(dtype=dtype)
    tensors["embed_tokens.weight"] = target_tensors()["model.embed_tokens.weight"].astype(dtype)
    source = write_source(tmp_path / "source", tensors)
    run("draft", source=source, target=tiny / "target", output=tmp_path / "out")
    assert not (tmp_path / "out/weights/embed").exists()


def test_embedding_of_another_target(tmp_path, tiny):
    tensors = draft_tensors(**{"embed_tokens.weight": (16, 8)})
    source = write_source(tmp_path / "source", tensors)
    with pytest.raises(UserError, match="differs from the embedding of the target source"):
        run("draft", source=source, target=tiny / "target", output=tmp_path / "out")


@pytest.mark.parametrize("config", [{"hidden_size": 16, "head_dim": 4}, {"vocab_size": 32}])
def test_draft_that_does_not_fit_the_target(tmp_path, tiny, config):
    layer = parse_llama_config(TINY | config, {}, origin="config")
    shapes = {k: s.shape for k, s in slots_by_key(DraftConfig(layer=layer)).items()}
    source = write_source(tmp_path / "source", draw(shapes), **config)
    with pytest.raises(UserError, match="does not fit the target source"):
        run("draft", source=source, target=tiny / "target", output=tmp_path / "out")


@pytest.mark.parametrize("spans", [None, "3", "1,1,1"])
def test_spans_must_cover_the_layers(tmp_path, tiny, spans):
    source = write_source(tmp_path / "source", draft_tensors(2))
    flags = {"positions_per_specialist": spans} if spans else {}
    with pytest.raises(UserError, match=r"2 specialists.*--positions-per-specialist 3,3"):
        run("draft", source=source, target=tiny / "target", output=tmp_path / "out", **flags)


def test_target_of_a_draft_must_be_a_target(tmp_path, tiny):
    source = write_source(tmp_path / "source", draft_tensors())
    with pytest.raises(UserError, match="does not exist"):
        run("draft", source=source, target=tmp_path / "no", output=tmp_path / "out")
    run("draft", source=source, target=tiny / "target", output=tmp_path / "out")
    with pytest.raises(UserError, match="got a draft"):
        run("draft", source=source, target=tmp_path / "out", output=tmp_path / "again")


# --------------------------------------------------------------------------------------------------
# The Hub, replaced at its boundary (test_hub.py fetches)


def test_hub_ids(tmp_path, tiny, monkeypatch):
    snapshot = write_source(tmp_path / "hub/snapshots/0123abcd", draft_tensors(7))
    calls = []

    def download(hub_id, *, revision, allow_patterns, ignore_patterns):
        calls.append((hub_id, revision, "*.bin" in allow_patterns))
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    hub_id = "HINT-lab/PosS1-Llama3-8B-Instruct"
    target = tiny / "target"
    run("draft", source=hub_id, target=target, output=tmp_path / "out", revision="main")
    assert calls == [(hub_id, "main", False)]
    config = read_record(tmp_path / "out").config
    known = PUBLISHED[hub_id]
    assert config.positions_per_specialist == known.positions_per_specialist == (1,) * 7
    assert config.trained_depth == known.trained_depth == 7

    write_source(snapshot, target_tensors())
    run("target", source="a/b", output=tmp_path / "t")
    record = read_record(tmp_path / "t")
    assert (record.target.name, record.target.revision) == ("a/b", "0123abcd")


@pytest.mark.parametrize("source", ["missing", "./missing/model", "/missing", "a/b/c"])
def test_missing_source(tmp_path, source):
    with pytest.raises(UserError, match="does not exist; give a folder, a GGUF file or a Hub id"):
        run("target", source=source, output=tmp_path / "out")
