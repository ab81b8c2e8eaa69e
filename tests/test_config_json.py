"""config.json as we write it: our own reader takes it back, and others find their spelling."""

import json
from dataclasses import replace

import pytest

from poss_jax.checkpoint.record import TargetIdentity, new_record
from poss_jax.config.models import DraftConfig, LlamaConfig, RopeConfig
from poss_jax.config.reading import UserError
from poss_jax.convert.hf import parse_llama_config
from poss_jax.convert.layouts import LAYOUTS, Outgoing, target_config_json

LLAMA = LlamaConfig(
    vocab_size=16,
    hidden_size=8,
    intermediate_size=12,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
)
LLAMA3_ROPE = RopeConfig(
    type="llama3", theta=5e5, factor=8.0, low_freq_factor=1.5, original_max_position_embeddings=64
)
YARN = RopeConfig(type="yarn", factor=4.0, original_max_position_embeddings=64)
LONGROPE = RopeConfig(
    type="longrope",
    factor=32.0,
    original_max_position_embeddings=64,
    short_factor=(1.0, 1.25),
    long_factor=(2.5, 40.0),
)
TARGETS = {
    "llama": LLAMA,
    "tied": replace(LLAMA, tie_embeddings=True, eos_token_ids=(3,), bos_token_id=2),
    "biases": replace(LLAMA, qkv_bias=True, o_bias=True, mlp_bias=True, eos_token_ids=(3, 5)),
    "wide heads": replace(LLAMA, head_dim=6, rms_norm_eps=1e-6, max_position_embeddings=99),
    "llama3 rope": replace(LLAMA, rope=LLAMA3_ROPE),
    "linear rope": replace(LLAMA, rope=RopeConfig(type="linear", theta=2e4, factor=2.0)),
    "dynamic rope": replace(
        LLAMA,
        rope=RopeConfig(type="dynamic", factor=2.0, original_max_position_embeddings=2048),
    ),
    "yarn": replace(LLAMA, rope=YARN),
    "yarn with its factor": replace(LLAMA, rope=replace(YARN, attention_factor=1.5, beta_slow=0.5)),
    "longrope": replace(LLAMA, rope=LONGROPE),
    "longrope with its factor": replace(LLAMA, rope=replace(LONGROPE, attention_factor=1.5)),
    "phi3": replace(LLAMA, fused_projections=True, eos_token_ids=(3, 5), bos_token_id=1),
    "phi3 with longrope": replace(LLAMA, fused_projections=True, rope=LONGROPE),
    "phi3 with its factor": replace(
        LLAMA, fused_projections=True, rope=replace(LONGROPE, attention_factor=1.5)
    ),
    "qwen2": replace(LLAMA, qkv_bias=True, tie_embeddings=True),
    "qwen3": replace(LLAMA, qk_norm=True, head_dim=6),
    "qwen3 with biases": replace(LLAMA, qk_norm=True, qkv_bias=True, o_bias=True),
}


@pytest.mark.parametrize("name", TARGETS)
def test_config_json_reads_back(name):
    config = TARGETS[name]
    values = json.loads(json.dumps(target_config_json(config, "float32")))
    assert parse_llama_config(values, {}, origin="config.json") == config


@pytest.mark.parametrize(
    "layer",
    [{"qk_norm": True}, {"o_bias": True}, {"mlp_bias": True}, {"head_dim": 6}],
)
def test_layers_the_original_does_not_have(layer):
    config = DraftConfig(layer=replace(LLAMA, **layer))
    identity = TargetIdentity(name="tiny", embedding_sha256="e", head_sha256="h")
    target = new_record(LLAMA, identity, tokenizer_from=None)
    draft = Outgoing("folder", config, None, target, "float32")
    with pytest.raises(UserError, match="the original code has no draft layers with"):
        LAYOUTS[0].describe(draft)


@pytest.mark.parametrize(
    "fields",
    [
        {"o_bias": True},
        {"qk_norm": True, "mlp_bias": True},
        {"qkv_bias": True, "mlp_bias": True},
        {"rope": RopeConfig(type="dynamic", factor=2.0, original_max_position_embeddings=64)},
        {"rope": replace(LONGROPE, factor=2.0)},
        {"fused_projections": True, "qk_norm": True},
        {"fused_projections": True, "rope": RopeConfig(type="linear", factor=2.0)},
    ],
)
def test_targets_transformers_does_not_have(fields):
    with pytest.raises(UserError, match="stays with poss_jax"):
        target_config_json(replace(LLAMA, **fields), "float32")


def test_longrope_as_phi3_reads_it():
    """In transformers 4 it takes only these three keys, plus the trained context."""
    values = target_config_json(TARGETS["phi3 with longrope"], "float32")
    assert values["rope_scaling"].keys() == {"type", "short_factor", "long_factor"}
    assert values["original_max_position_embeddings"] == 64


def test_rope_as_the_original_reads_it():
    config = replace(LLAMA, rope=RopeConfig(type="linear", theta=2e4, factor=2.0))
    values = target_config_json(config, "float32")
    assert values["rope_theta"] == 2e4
    assert (values["rope_scaling"]["type"], values["rope_scaling"]["factor"]) == ("linear", 2.0)
    assert target_config_json(LLAMA, "float32")["rope_scaling"] is None
