"""Targets of every family, rope, spelling, type and file form, and GGUF, as in transformers."""

import copy
import hashlib
import itertools
import json
import os
import re
from pathlib import Path

import gguf_files
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from convert_sources import draft_tensors, refusal_of, run, target_tensors, write_source
from gguf import GGMLQuantizationType as Type
from gguf_files import HEAD_DIM, VOCABULARY, draw_tensors, write_gguf
from models import random_tokens, stacked

from poss_jax.checkpoint.folder import load_target
from poss_jax.checkpoint.record import TOKENIZER_FILES, read_record
from poss_jax.model.documents import encode
from poss_jax.model.linear import linear

# Model type, and what differs from the tiny shape below.
FAMILIES = {
    "llama": ("llama", {}),
    "llama_biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama_tied": ("llama", {"tie_word_embeddings": True}),
    "llama_head_dim": ("llama", {"head_dim": 12}),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 8}),
    "phi3": ("phi3", {"original_max_position_embeddings": 4, "pad_token_id": None}),
}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
ROPES = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},  # max_position_embeddings is 8, and texts are longer
    "llama3": {"factor": 8.0, **LLAMA3},
    "longrope": {  # texts are longer than the trained context, and 8 is twice of it
        "short_factor": [1.0, 1.2, 1.5, 2.0, 3.0, 4.0],  # as many as a head has pairs
        "long_factor": [1.5, 3.0, 6.0, 12.0, 16.0, 20.0],
        "original_max_position_embeddings": 4,
    },
}
NOT_IN_TRANSFORMERS = {("phi3", rope) for rope in ("linear", "dynamic", "llama3")}
THETA = 1e3
SPELLINGS = ("type", "rope_type", "rope_parameters")
DTYPES = ("float32", "float16", "bfloat16")
FORMS = ("safetensors", "safetensors shards", "bin", "bin shards", "both")
FACTORS = (FAMILIES, ROPES, SPELLINGS, DTYPES, FORMS)
BATCH, LENGTH = 2, 20


def pairs(case):
    return set(itertools.combinations(case, 2))


def choose_cases():
    """Every family in every form; rope, spelling and type by how many pairs are new."""
    cases, seen = [], set()
    for family, form in itertools.product(FAMILIES, FORMS):
        candidates = [
            (family, *rest, form)
            for rest in itertools.product(ROPES, SPELLINGS, DTYPES)
            if (family, rest[0]) not in NOT_IN_TRANSFORMERS
        ]
        # The ropes of a family first: there are no more forms than ropes.
        newness = {case: (case[:2] not in seen, len(pairs(case) - seen)) for case in candidates}
        cases.append(max(candidates, key=newness.__getitem__))
        seen |= pairs(cases[-1])
    return cases


CASES = choose_cases()


def test_every_pair_of_values_is_among_the_cases():
    seen = set().union(*map(pairs, CASES))
    for one, other in itertools.combinations(FACTORS, 2):
        assert set(itertools.product(one, other)) - NOT_IN_TRANSFORMERS <= seen


def random_model(family: str, rope: str, dtype: str):
    """A random model of `transformers` in float32, every weight a value of `dtype`."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, changes = FAMILIES[family]
    num_pairs = changes.get("head_dim", 8) // 2
    settings = {k: v[:num_pairs] if isinstance(v, list) else v for k, v in ROPES[rope].items()}
    shape = {
        "vocab_size": 53,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 8,
        "rope_parameters": {"rope_type": rope, "rope_theta": THETA, **settings},
    }
    config = AutoConfig.for_model(model_type, **shape, **changes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        width = parameter.shape[-1] if parameter.ndim == 2 else 25
        is_scale = name.endswith("norm.weight")
        torch.nn.init.normal_(parameter, mean=float(is_scale), std=width**-0.5)
        parameter.data = parameter.data.to(getattr(torch, dtype)).float()
    return model


def save_model(model, folder: Path, rope: str, spelling: str, dtype: str, form: str) -> None:
    """Writes a checkpoint as some version of `transformers` does."""
    import torch

    stored = copy.deepcopy(model).to(getattr(torch, dtype))
    shard_size = "20KB" if form == "safetensors shards" else "1GB"
    stored.save_pretrained(folder, max_shard_size=shard_size)
    assert len(list(folder.glob("*.safetensors"))) > 1 or shard_size == "1GB"
    if "bin" in form:
        (folder / "model.safetensors").unlink()
        save_bin(stored.state_dict(), folder, sharded=form == "bin shards")
    if form == "both":
        (folder / "pytorch_model.bin").write_bytes(b"not looked at")
    values = json.loads((folder / "config.json").read_text())
    assert values["dtype"] == dtype
    if spelling != "rope_parameters":
        settings = values.pop("rope_parameters")
        scaling = {spelling: rope} | {key: settings[key] for key in ROPES[rope]}
        scaling = scaling if rope != "default" else None
        values |= {"rope_theta": THETA, "rope_scaling": scaling, "torch_dtype": values.pop("dtype")}
    (folder / "config.json").write_text(json.dumps(values))


def save_bin(state, folder: Path, *, sharded: bool) -> None:
    import torch

    if not sharded:
        torch.save(state, folder / "pytorch_model.bin")
        return
    names = sorted(state)
    weight_map = {name: f"pytorch_model-{i % 3}.bin" for i, name in enumerate(names)}
    for shard in set(weight_map.values()):
        part = {name: state[name].clone() for name in names if weight_map[name] == shard}
        torch.save(part, folder / shard)
    index = folder / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.torch
@pytest.mark.parametrize(
    ("family", "rope", "spelling", "dtype", "form"),
    CASES,
    ids=lambda value: value.replace(" ", "_"),
)
def test_logits_are_those_of_transformers(tmp_path, family, rope, spelling, dtype, form):
    import torch

    model = random_model(family, rope, dtype)
    save_model(model, tmp_path / "source", rope, spelling, dtype, form)
    run("target", source=tmp_path / "source", output=tmp_path / "target")
    record, stored = load_target(tmp_path / "target")
    assert {leaf.dtype for leaf in jax.tree.leaves(stored)} == {jnp.dtype(dtype)}
    config = record.config
    assert config.rope.type == rope

    _, params = load_target(tmp_path / "target", jnp.float32)
    tokens = random_tokens(config, BATCH, LENGTH)
    logits = linear(encode(stacked(params), config, tokens), params["head"]["weight"])
    with torch.no_grad():
        want = model(torch.tensor(np.asarray(tokens), dtype=torch.long)).logits
    np.testing.assert_allclose(logits, want, rtol=0, atol=2e-5)


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


@pytest.mark.torch
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_quantised_bin(tmp_path, dtype):
    import torch

    folder = write_source(tmp_path / "source", target_tensors())
    (folder / "model.safetensors").unlink()
    state = {"model.norm.weight": torch.ones(8).to(getattr(torch, dtype))}
    torch.save(state, folder / "pytorch_model.bin")
    assert re.search(f"model.norm.weight.*{dtype}.*quantised", refusal_of(folder))


# What transformers does not take from the file, or takes for a vocabulary of the usual size.
NOT_READ = {"qwen3": {"head_dim": HEAD_DIM}, "phi3": {"pad_token_id": 0}}


@pytest.mark.torch
@pytest.mark.parametrize("type", [Type.F32, Type.Q8_0], ids=lambda type: type.name)
@pytest.mark.parametrize("family", [name for name in gguf_files.FAMILIES if name != "llama_biases"])
def test_logits_of_gguf_files(tmp_path, family, type):
    import torch
    from transformers import AutoModelForCausalLM

    pytest.importorskip("accelerate", reason="make test-torch installs it")
    file = write_gguf(tmp_path / "model.gguf", family, draw_tensors(family), type=type)
    run("target", source=file, output=tmp_path / "out")
    record, params = load_target(tmp_path / "out", jnp.float32)
    tokens = random_tokens(record.llama, 2, 24)
    got = linear(encode(stacked(params), record.llama, tokens), params["head"]["weight"])
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=file.name, dtype=torch.float32, **NOT_READ.get(family, {})
    ).eval()
    with torch.no_grad():
        want = model(torch.tensor(np.asarray(tokens), dtype=torch.long)).logits
    assert want.shape == (2, 24, VOCABULARY)
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-5)
