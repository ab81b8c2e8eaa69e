"""Hugging Face's config.json in both spellings, and what is refused."""

from dataclasses import replace

import pytest
from convert_sources import TINY, target_tensors, write_source

from poss_jax.config.models import RopeConfig
from poss_jax.config.reading import UserError
from poss_jax.convert.formats import read_checkpoint
from poss_jax.convert.hf import parse_llama_config
from poss_jax.convert.source import open_source

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LLAMA3_ROPE = RopeConfig(type="llama3", theta=5e5, **LLAMA3)
YARN = {"type": "yarn", "factor": 4.0}
YARN_ROPE = RopeConfig(type="yarn", factor=4.0, original_max_position_embeddings=64)
LONGROPE = {"type": "longrope", "short_factor": [1.0, 1.5], "long_factor": [2, 40.5]}
LONG = {"original_max_position_embeddings": 32, "max_position_embeddings": 64}
LONGROPE_ROPE = RopeConfig(
    type="longrope",
    factor=2.0,
    original_max_position_embeddings=32,
    short_factor=(1.0, 1.5),
    long_factor=(2.0, 40.5),
)


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
        ({"max_position_embeddings": 64, "rope_scaling": YARN}, YARN_ROPE),
        (LONG | {"rope_scaling": YARN}, replace(YARN_ROPE, original_max_position_embeddings=32)),
        (
            LONG | {"rope_scaling": YARN | {"beta_slow": 2, "truncate": False, "mscale": 0.5}},
            replace(YARN_ROPE, original_max_position_embeddings=32, beta_slow=2.0, truncate=False),
        ),
        (
            {"max_position_embeddings": 64, "rope_scaling": YARN | {"attention_factor": 1.5}},
            replace(YARN_ROPE, attention_factor=1.5),
        ),
        (LONG | {"rope_scaling": LONGROPE}, LONGROPE_ROPE),
        (LONG | {"rope_scaling": LONGROPE | {"type": "su"}}, LONGROPE_ROPE),
        (LONG | {"rope_scaling": LONGROPE | {"factor": 2}}, LONGROPE_ROPE),
        (
            LONG | {"rope_scaling": LONGROPE | {"attention_factor": 1.5}},
            replace(LONGROPE_ROPE, attention_factor=1.5),
        ),
        (
            {
                "max_position_embeddings": 64,
                "rope_parameters": LONGROPE | {"original_max_position_embeddings": 32},
            },
            LONGROPE_ROPE,
        ),
    ],
)
def test_rope_spellings(values, want):
    assert parse_llama_config(TINY | values, {}, origin="config").rope == want


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rope_scaling": YARN | {"beta_fast": 1}}, "yarn wants theta above 1 and beta_slow"),
        ({"rope_scaling": YARN | {"mscale": "x"}}, "want numbers, got factor, mscale, mscale_all"),
        ({"rope_scaling": YARN | {"mscales": 1}}, "rope type yarn with unknown mscales"),
        ({"rope_scaling": {"type": "su-scaled", "factor": 2}}, "got 'su-scaled'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "no low_freq_factor"),
        ({"rope_scaling": {"type": "linear"}}, "no factor"),
        ({"rope_scaling": {"type": "linear", "factor": 2, "mscale": 1}}, "unknown mscale"),
        ({"rope_scaling": {"type": "linear", "rope_type": "dynamic", "factor": 2}}, "rope_type"),
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}}, "10000.0 and as 500000.0"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"partial_rotary_factor": 0.75}, "partial_rotary_factor: want 1.0, got 0.75"),
        ({"rope_scaling": "linear"}, "want an object"),
        (
            {"rope_scaling": {"type": ["linear"]}},
            r"rope type: want one of .*, got \['linear'\]; other",
        ),
        ({"rope_scaling": {"type": {"a": 1}}}, r"rope type: want one of .*, got {'a': 1}; other"),
        ({"rope_scaling": {"type": "linear", "factor": [2]}}, r"rope.factor: Input .*, got \[2\]"),
        ({"rope_theta": True}, "rope.theta: want a number, got True"),
        ({"rope_theta": 1e39}, "rope_theta: Input should be less than or equal to"),
        (
            {"rope_scaling": {"type": "llama3"} | LLAMA3 | {"high_freq_factor": 1}},
            "want low_freq_factor below high_freq_factor",
        ),
        (
            {"head_dim": 2, "rope_scaling": {"type": "dynamic", "factor": 2}},
            "rope type dynamic wants a head_dim above 2",
        ),
        ({"rope_scaling": LONGROPE}, "no original_max_position_embeddings"),
        ({"rope_scaling": LONGROPE} | LONG | {"head_dim": 6}, "wants 3 numbers in short_factor"),
        (LONG | {"rope_scaling": LONGROPE | {"factor": 4.0}}, "longrope with factor 4.0: want"),
        (LONG | {"rope_scaling": LONGROPE | {"short_mscale": 1}}, "unknown short_mscale"),
        (
            LONG | {"rope_scaling": LONGROPE | {"original_max_position_embeddings": 16}},
            "is given as 32 and as 16",
        ),
        (
            {"rope_scaling": LONGROPE, "original_max_position_embeddings": "32"},
            "original_max_position_embeddings: want a count, got '32'",
        ),
        (
            {"rope_scaling": LONGROPE, "original_max_position_embeddings": 1},
            "wants original_max_position_embeddings above 1",
        ),
        (LONG | {"rope_scaling": LONGROPE | {"short_factor": [0, 1]}}, "short_factor.0: Input"),
        ({"max_position_embeddings": True}, "max_position_embeddings: want a count, got True"),
        ({"num_hidden_layers": True}, "num_hidden_layers: want a number, got True"),
        ({"vocab_size": 2**31}, "vocab_size: Input should be less than 2147483648"),
        ({"hidden_act": "x" * 9000}, "hidden_act: want 'silu', got 'xxxxxxxxxxxx...xxxx"),
        ({"model_type": "x" * 9000}, "model_type: want one of .*, got 'xxxxxxxxxxxx...xxxx"),
        ({"eos_token_id": {"a": 1}}, "eos_token_id: 0: Input should be a valid integer"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            "unknown full_attention",
        ),
        ({"hidden_act": "gelu"}, "hidden_act: want 'silu', got 'gelu'"),
        ({"pretraining_tp": 2}, "pretraining_tp: want 1, got 2"),
        ({"model_type": "gemma"}, "want one of llama, mistral, qwen2, qwen3, phi3, got 'gemma'"),
        ({"model_type": ["llama"]}, "model_type"),
        ({"max_position_embeddings": "long"}, "max_position_embeddings: want a count"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"vocab_size": "many"}, "vocab_size"),
        ({"hidden_size": 9}, "is not a multiple of 2 heads"),
        ({"hidden_size": 10**12 + 1}, "hidden_size 1000000000001 is not a multiple of 2 heads"),
        ({"num_attention_heads": 10**12}, "hidden_size 8 is not a multiple of 1000000000000 heads"),
        ({"eos_token_id": [1] * 65}, "eos_token_id: want at most 64, got 65"),
        ({"num_attention_heads": 0}, "num_attention_heads: Input should be greater than 0, got 0"),
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "not a multiple"),
    ],
)
def test_config_refusals(values, message):
    with pytest.raises(UserError, match=message) as caught:
        parse_llama_config(TINY | values, {}, origin="config")
    assert len(str(caught.value)) < 600


def test_config_defaults():
    values = {key: value for key, value in TINY.items() if key != "num_key_value_heads"}
    config = parse_llama_config(values, {}, origin="config")
    assert (config.num_kv_heads, config.head_dim) == (2, 4)
    assert (config.rms_norm_eps, config.max_position_embeddings) == (1e-6, 2048)
    assert not (config.tie_embeddings or config.qkv_bias or config.o_bias or config.mlp_bias)
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2,))  # as transformers


@pytest.mark.parametrize(
    ("config_ids", "generation_ids", "want"),
    [
        (7, None, (7,)),
        (7, [7, 9], (7, 9)),
        ([7, 8], 9, (9,)),
        (None, 9, (9,)),
        (None, None, ()),
        ([7, 8], None, (7, 8)),
    ],
)
def test_stop_tokens_of_the_generation_config_win(config_ids, generation_ids, want):
    values = TINY | {"eos_token_id": config_ids}
    config = parse_llama_config(values, {"eos_token_id": generation_ids}, origin="config")
    assert config.eos_token_ids == want


# --------------------------------------------------------------------------------------------------
# Families


@pytest.mark.parametrize(
    ("values", "want"),
    [
        ({}, {}),
        ({"attention_bias": True}, {"qkv_bias", "o_bias"}),
        ({"mlp_bias": True}, {"mlp_bias"}),
        ({"model_type": "mistral", "sliding_window": None, "attention_bias": True}, set()),
        ({"model_type": "phi3", "attention_bias": True}, {"fused_projections"}),
        ({"model_type": "qwen2"}, {"qkv_bias"}),
        ({"model_type": "qwen2", "attention_bias": True, "mlp_bias": True}, {"qkv_bias"}),
        ({"model_type": "qwen3"}, {"qk_norm"}),
        ({"model_type": "qwen3", "attention_bias": True}, {"qk_norm", "qkv_bias", "o_bias"}),
    ],
)
def test_differences_of_the_families(values, want):
    config = parse_llama_config(TINY | values, {}, origin="config")
    names = ("qkv_bias", "o_bias", "qk_norm", "mlp_bias", "fused_projections")
    assert {name for name in names if getattr(config, name)} == set(want)


@pytest.mark.torch
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "phi3"])
def test_defaults_are_those_of_transformers(family):
    from transformers import AutoConfig

    # num_attention_heads fits every default number of KV heads.
    needed = {"hidden_size": 512, "num_attention_heads": 64, "model_type": family}
    values = {key: TINY[key] for key in ("vocab_size", "intermediate_size", "num_hidden_layers")}
    # Where the key is absent, Mistral's window is active: only that default is not taken over.
    window = {"sliding_window": None} if family == "mistral" else {}
    ours = parse_llama_config(values | needed | window, {}, origin="config")
    theirs = AutoConfig.for_model(**values, **needed, **window)
    head_dim = getattr(theirs, "head_dim", 8)
    assert (ours.num_kv_heads, ours.head_dim) == (theirs.num_key_value_heads, head_dim)
    for name in ("max_position_embeddings", "rms_norm_eps", "bos_token_id"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.rope.theta == theirs.rope_parameters["rope_theta"]
    assert ours.tie_embeddings == theirs.tie_word_embeddings
    assert ours.eos_token_ids == (() if theirs.eos_token_id is None else (theirs.eos_token_id,))


MISTRAL = {"model_type": "mistral", "max_position_embeddings": 64}
PHI3 = {"model_type": "phi3"}
SLIDING = {"layer_types": ["sliding_attention"] * 2}
QWEN = {"model_type": "qwen2", "max_position_embeddings": 64, "sliding_window": 16}


@pytest.mark.parametrize(
    ("values", "is_active"),
    [
        (MISTRAL | {"sliding_window": 16}, True),
        (MISTRAL | {"sliding_window": 63}, True),
        (MISTRAL | {"sliding_window": 64}, False),
        (MISTRAL | {"sliding_window": None}, False),
        ({"model_type": "mistral"}, True),  # 4096 of 131072, as transformers
        (PHI3 | {"sliding_window": 2047}, True),  # of Phi-3-mini-4k
        (PHI3 | {"sliding_window": 4096}, False),
        (PHI3 | {"sliding_window": 2047, "max_position_embeddings": 2047}, False),
        (PHI3, False),
        (QWEN, False),
        (QWEN | {"use_sliding_window": True}, False),  # from layer 28 on; there are 2
        (QWEN | {"use_sliding_window": True, "max_window_layers": 2}, False),
        (QWEN | {"use_sliding_window": True, "max_window_layers": 1}, True),
        (QWEN | {"model_type": "qwen3", "use_sliding_window": True, "max_window_layers": 0}, True),
        (
            QWEN
            | {"use_sliding_window": True, "max_window_layers": 0}
            | {"layer_types": ["full_attention", "full_attention"]},
            False,
        ),
        (QWEN | {"layer_types": ["full_attention", "sliding_attention"]}, True),
        (
            QWEN | {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 64},
            False,
        ),
        (SLIDING | {"sliding_window": 2047}, True),
        (SLIDING | {"sliding_window": 2048}, False),  # as long as the context
        (SLIDING, True),
        ({"layer_types": ["chunked_attention"] * 2}, True),
        ({"sliding_window": 16}, False),  # no Llama looks at it
    ],
)
def test_active_sliding_windows_are_refused(values, is_active):
    if not is_active:
        parse_llama_config(TINY | values, {}, origin="config")
        return
    wrong = r"sliding window of .* is active|sliding_window: want a count|layer_types: want full"
    with pytest.raises(UserError, match=wrong):
        parse_llama_config(TINY | values, {}, origin="config")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised weights .*'gptq'"),
        ({"compression_config": {"format": "x"}}, "quantised weights"),
        ({"model_type": "mixtral"}, "a mixture of experts .mixtral"),
        ({"model_type": "qwen2_moe"}, "a mixture of experts .qwen2_moe"),
        ({"model_type": "qwen3_moe"}, "a mixture of experts .qwen3_moe"),
        ({"model_type": "llama4_text"}, "a mixture of experts .llama4_text"),
        ({"num_local_experts": 8}, "a mixture of experts .num_local_experts 8"),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "an EAGLE-3 draft"),
        ({"draft_vocab_size": 32000}, "an EAGLE-3 draft"),
        ({"speculators_model_type": "x" * 9000}, r"holds a draft of speculators .x{97}\.\.\.\)"),
    ],
)
def test_other_kinds_of_models_are_refused_by_name(tmp_path, values, message):
    source = write_source(tmp_path / "source", target_tensors(), **values)
    with pytest.raises(UserError, match=message) as caught:
        read_checkpoint(open_source(str(source)), "target")
    assert len(str(caught.value)) < 600
