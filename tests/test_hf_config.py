"""Hugging Face's config.json in both spellings, and what is refused."""

import pytest
from convert_sources import (
    TINY,
)

from poss_jax.config import RopeConfig, UserError
from poss_jax.convert.hf_config import parse_llama_config

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LLAMA3_ROPE = RopeConfig(type="llama3", theta=5e5, **LLAMA3)


@pytest.mark.parametrize(
    ("values", "want"),
    [
        ({}, RopeConfig(theta=1e4)),
        ({"rope_theta": 5e5, "rope_scaling": None}, RopeConfig(theta=5e5)),
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, RopeConfig(theta=5e5)),
        ({"rope_scaling": {"type": "linear", "factor": 4}}, RopeConfig(type="linear", factor=4)),
        (
            {"rope_scaling": {"type": "linear", "rope_type": "linear", "factor": 4.0}},
            RopeConfig(type="linear", factor=4),
        ),
        (
            {"max_position_embeddings": 64, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
            RopeConfig(type="dynamic", factor=2, original_max_position_embeddings=64),
        ),
        ({"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3"} | LLAMA3}, LLAMA3_ROPE),
        ({"rope_theta": 5e5, "rope_scaling": {"type": "llama3"} | LLAMA3}, LLAMA3_ROPE),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5} | LLAMA3}, LLAMA3_ROPE),
        (
            {
                "rope_theta": 5e5,
                "rope_scaling": {"type": "llama3"} | LLAMA3,
                "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5} | LLAMA3,
            },
            LLAMA3_ROPE,
        ),
    ],
)
def test_rope_spellings(values, want):
    assert parse_llama_config(TINY | values, {}, origin="config").rope == want


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rope_scaling": {"type": "yarn", "factor": 2, "beta_fast": 1}}, "got 'yarn'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "no low_freq_factor"),
        ({"rope_scaling": {"type": "linear"}}, "no factor"),
        ({"rope_scaling": {"type": "linear", "factor": 2, "mscale": 1}}, "unknown mscale"),
        ({"rope_scaling": {"type": "linear", "rope_type": "dynamic", "factor": 2}}, "rope_type"),
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}}, "10000.0 and as 500000.0"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_scaling": "linear"}, "want an object"),
        ({"hidden_act": "gelu"}, "hidden_act: want 'silu', got 'gelu'"),
        ({"pretraining_tp": 2}, "pretraining_tp: want 1, got 2"),
        ({"model_type": "mistral"}, "model_type: want 'llama', got 'mistral'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"hidden_size": 9}, "no multiple of 2 heads"),
        ({"num_attention_heads": 0}, "want counts"),
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "not a multiple"),
    ],
)
def test_config_refusals(values, message):
    with pytest.raises(UserError, match=message):
        parse_llama_config(TINY | values, {}, origin="config")


def test_config_defaults():
    values = {key: value for key, value in TINY.items() if key != "num_key_value_heads"}
    config = parse_llama_config(values, {}, origin="config")
    assert (config.num_kv_heads, config.head_dim) == (2, 4)
    assert (config.rms_norm_eps, config.max_position_embeddings) == (1e-6, 2048)
    assert not (config.tie_embeddings or config.attention_bias or config.mlp_bias)
    assert config.eos_token_ids == ()


@pytest.mark.parametrize(
    ("config_ids", "generation_ids", "want"),
    [(7, None, (7,)), (7, [7, 9], (7, 9)), ([7, 8], 9, (7, 8, 9)), (None, 9, (9,))],
)
def test_stop_tokens_are_the_union(config_ids, generation_ids, want):
    values = TINY | {"eos_token_id": config_ids}
    config = parse_llama_config(values, {"eos_token_id": generation_ids}, origin="config")
    assert config.eos_token_ids == want
