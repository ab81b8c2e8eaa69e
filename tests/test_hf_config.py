"""Hugging Face's config.json: both spellings are read, ours reads back, the rest is refused."""

import json
from dataclasses import replace

import pytest
from convert_sources import TINY
from models import IDENTITY, tiny_llama

from poss_jax.checkpoint.record import new_record
from poss_jax.config.models import DraftConfig, RopeConfig
from poss_jax.config.reading import UserError
from poss_jax.convert.hf import parse_llama_config
from poss_jax.convert.layouts import LAYOUTS, Outgoing, target_config_json


def parse(values, generation=None):
    return parse_llama_config(TINY | values, generation or {}, origin="config")


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64}
LLAMA3_ROPE = RopeConfig(type="llama3", theta=5e5, **LLAMA3)
DYNAMIC_ROPE = RopeConfig(type="dynamic", factor=2.0, original_max_position_embeddings=64)
YARN = {"type": "yarn", "factor": 4.0}
YARN_ROPE = RopeConfig(type="yarn", factor=4.0, original_max_position_embeddings=64)
LONGROPE = {"type": "longrope", "short_factor": [1.0, 1.5], "long_factor": [2, 40.5]}
LONG = {"original_max_position_embeddings": 32, "max_position_embeddings": 64}
TRAINED = "original_max_position_embeddings"
FACTORS = {"short_factor": (1.0, 1.5), "long_factor": (2.0, 40.5)}
LONGROPE_ROPE = RopeConfig(type="longrope", factor=2.0, **{TRAINED: 32}, **FACTORS)


MISTRAL = {"model_type": "mistral", "max_position_embeddings": 64}
PHI3 = {"model_type": "phi3"}
SLIDING = {"layer_types": ["sliding_attention"] * 2}
MIXED = {"layer_types": ["full_attention", "sliding_attention"]}
QWEN = {"model_type": "qwen2", "max_position_embeddings": 64, "sliding_window": 16}
QWEN_SLIDES = QWEN | {"use_sliding_window": True}
WINDOW = "a sliding window of .* is active"

LLAMA3_TYPED = {"rope_type": "llama3", "rope_theta": 5e5} | LLAMA3
LLAMA3_OLD = {"rope_theta": 5e5, "rope_scaling": {"type": "llama3"} | LLAMA3}
LINEAR_ROPE = RopeConfig(type="linear", factor=4)
LENGTHENED = replace(LONGROPE_ROPE, attention_factor=1.5)
YARN_OF_32 = replace(YARN_ROPE, original_max_position_embeddings=32)


def scaled(*settings, **values):
    """A config with a rope's settings, as transformers 4 writes them."""
    joined = {}
    for setting in settings:
        joined |= setting
    return {"max_position_embeddings": 64} | values | {"rope_scaling": joined}


@pytest.mark.parametrize(
    ("values", "want"),
    [
        ({}, RopeConfig(theta=1e4)),
        ({"rope_theta": 5e5, "rope_scaling": None}, RopeConfig(theta=5e5)),
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, RopeConfig(theta=5e5)),
        (scaled({"type": "linear", "rope_type": "linear", "factor": 4}), LINEAR_ROPE),
        (scaled({"type": "dynamic", "factor": 2.0}), DYNAMIC_ROPE),
        (LLAMA3_OLD, LLAMA3_ROPE),
        ({"rope_parameters": LLAMA3_TYPED}, LLAMA3_ROPE),
        (LLAMA3_OLD | {"rope_parameters": LLAMA3_TYPED}, LLAMA3_ROPE),
        (scaled(YARN), YARN_ROPE),
        (scaled(YARN, **LONG), YARN_OF_32),
        (
            scaled(YARN, {"beta_slow": 2, "truncate": False, "mscale": 0.5}, **LONG),
            replace(YARN_OF_32, beta_slow=2.0, truncate=False),
        ),
        (scaled(YARN, {"attention_factor": 1.5}), replace(YARN_ROPE, attention_factor=1.5)),
        (scaled(LONGROPE, **LONG), LONGROPE_ROPE),
        (scaled(LONGROPE, {"type": "su"}, **LONG), LONGROPE_ROPE),
        (scaled(LONGROPE, {"factor": 2}, **LONG), LONGROPE_ROPE),
        (scaled(LONGROPE, {"attention_factor": 1.5}, **LONG), LENGTHENED),
        (LONG | {"rope_parameters": LONGROPE}, LONGROPE_ROPE),
    ],
)
def test_rope_spellings(values, want):
    assert parse(values).rope == want


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (scaled(YARN, {"beta_fast": 1}), "yarn wants theta above 1 and beta_slow"),
        (scaled(YARN, {"mscale": "x"}), "want numbers, got factor, mscale, mscale_all"),
        (scaled({"type": "su-scaled", "factor": 2}), "got 'su-scaled'"),
        (scaled({"rope_type": "llama3", "factor": 8.0}), "no low_freq_factor"),
        (scaled({"type": "linear", "factor": 2, "mscale": 1}), "unknown mscale"),
        (scaled({"type": "linear", "rope_type": "dynamic", "factor": 2}), "rope_type"),
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}}, "10000.0 and as 500000.0"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"partial_rotary_factor": 0.75}, "partial_rotary_factor: want 1.0, got 0.75"),
        ({"rope_scaling": "linear"}, "want an object"),
        (scaled({"type": ["linear"]}), r"rope type: want one of .*, got \['linear'\]; other"),
        (scaled({"type": "linear", "factor": [2]}), r"rope.factor: Input .*, got \[2\]"),
        ({"rope_theta": 1e39}, "rope_theta: Input should be less than or equal to"),
        (scaled(LLAMA3_TYPED, {"high_freq_factor": 1}), "want low_freq_factor below high_freq"),
        (scaled({"type": "dynamic", "factor": 2}, head_dim=2), "dynamic wants a head_dim above 2"),
        (scaled(LONGROPE), "no original_max_position_embeddings"),
        (scaled(LONGROPE, **LONG, head_dim=6), "wants 3 numbers in short_factor"),
        (scaled(LONGROPE, {"factor": 4.0}, **LONG), "longrope with factor 4.0: want"),
        (scaled(LONGROPE, {"original_max_position_embeddings": 16}, **LONG), "as 32 and as"),
        (scaled(LONGROPE, **{TRAINED: "32"}), f"{TRAINED}: want a count, got '32'"),
        (scaled(LONGROPE, **{TRAINED: 1}), f"wants {TRAINED} above 1"),
        (scaled(LONGROPE, {"short_factor": [0, 1]}, **LONG), "short_factor.0: Input"),
        ({"max_position_embeddings": True}, "max_position_embeddings: want a count, got True"),
        ({"hidden_act": "x" * 9000}, "hidden_act: want 'silu', got 'xxxxxxxxxxxx...xxxx"),
        ({"model_type": "gemma"}, "want one of llama, mistral, qwen2, qwen3, phi3, got 'gemma'"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"eos_token_id": [1] * 65}, "eos_token_id: Tuple should have at most 64 items"),
        ({"num_attention_heads": 0}, "num_attention_heads: Input should be greater than 0, got 0"),
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "not a multiple"),
        (MISTRAL | {"sliding_window": 63}, WINDOW),
        ({"model_type": "mistral"}, WINDOW),  # 4096 of 131072, as transformers
        (PHI3 | {"sliding_window": 2047}, WINDOW),  # of Phi-3-mini-4k
        (QWEN_SLIDES | {"max_window_layers": 1}, WINDOW),
        (QWEN_SLIDES | {"model_type": "qwen3", "max_window_layers": 0}, WINDOW),
        (QWEN | MIXED, WINDOW),
        (SLIDING | {"sliding_window": 2047}, WINDOW),
        (SLIDING, "sliding_window: want a count"),
        ({"layer_types": ["chunked_attention"] * 2}, "layer_types: want full"),
    ],
)
def test_config_refusals(values, message):
    with pytest.raises(UserError, match=message) as caught:
        parse(values)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    ("config_ids", "generation_ids", "want"),
    [
        (7, None, (7,)),
        (7, [7, 9], (7, 9)),
        ([7, 8], 9, (9,)),
        (None, 9, (9,)),
        (None, None, ()),
    ],
)
def test_stop_tokens_of_the_generation_config_win(config_ids, generation_ids, want):
    config = parse({"eos_token_id": config_ids}, {"eos_token_id": generation_ids})
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
    config = parse(values)
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


@pytest.mark.parametrize(
    "values",
    [
        MISTRAL | {"sliding_window": 64},
        MISTRAL | {"sliding_window": None},
        PHI3 | {"sliding_window": 4096},
        PHI3 | {"sliding_window": 2047, "max_position_embeddings": 2047},
        PHI3,
        QWEN,
        QWEN_SLIDES,  # from layer 28 on; there are 2
        QWEN_SLIDES | {"max_window_layers": 2},
        QWEN_SLIDES | {"max_window_layers": 0, "layer_types": ["full_attention"] * 2},
        QWEN | MIXED | {"sliding_window": 64},
        SLIDING | {"sliding_window": 2048},  # as long as the context
        {"sliding_window": 16},  # no Llama looks at it
    ],
)
def test_sliding_window_that_cuts_nothing_is_read(values):
    parse(values)


# --------------------------------------------------------------------------------------------------
# config.json as we write it

SIZES = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 12, "head_dim": 4}
LLAMA = tiny_llama(**SIZES, num_heads=2, num_kv_heads=1)
LONGROPE_OF_2048 = replace(LONGROPE_ROPE, factor=64.0)
_CHANGES = {
    "llama": {},
    "tied": {"tie_embeddings": True, "eos_token_ids": (3,), "bos_token_id": 2},
    "biases": {"qkv_bias": True, "o_bias": True, "mlp_bias": True, "eos_token_ids": (3, 5)},
    "wide heads": {"head_dim": 6, "rms_norm_eps": 1e-6, "max_position_embeddings": 99},
    "llama3 rope": {"rope": LLAMA3_ROPE},
    "linear rope": {"rope": RopeConfig(type="linear", theta=2e4, factor=2.0)},
    "dynamic rope": {"rope": replace(DYNAMIC_ROPE, original_max_position_embeddings=2048)},
    "yarn with its factor": {"rope": replace(YARN_ROPE, attention_factor=1.5, beta_slow=0.5)},
    "yarn": {"rope": YARN_ROPE},
    "longrope": {"rope": LONGROPE_OF_2048},
    "phi3": {"fused_projections": True, "eos_token_ids": (3, 5), "bos_token_id": 1},
    "phi3 with longrope": {
        "fused_projections": True,
        "rope": replace(LONGROPE_OF_2048, attention_factor=1.5),
    },
    "qwen2": {"qkv_bias": True, "tie_embeddings": True},
    "qwen3": {"qk_norm": True, "head_dim": 6},
    "qwen3 with biases": {"qk_norm": True, "qkv_bias": True, "o_bias": True},
}
TARGETS = {name: replace(LLAMA, **changes) for name, changes in _CHANGES.items()}


@pytest.mark.parametrize("name", TARGETS)
def test_config_json_reads_back(name):
    config = TARGETS[name]
    values = json.loads(json.dumps(target_config_json(config, "float32")))
    assert parse_llama_config(values, {}, origin="config.json") == config


@pytest.mark.parametrize(
    "layer", [{"qk_norm": True}, {"o_bias": True}, {"mlp_bias": True}, {"head_dim": 6}]
)
def test_layers_the_original_does_not_have(layer):
    config = DraftConfig(layer=replace(LLAMA, **layer))
    target = new_record(LLAMA, IDENTITY, tokenizer_from=None)
    draft = Outgoing("folder", config, None, target, "float32")
    with pytest.raises(UserError, match="the layout has no place for"):
        LAYOUTS[0].describe(draft)


@pytest.mark.parametrize(
    "fields",
    [
        {"o_bias": True},
        {"qk_norm": True, "mlp_bias": True},
        {"qkv_bias": True, "mlp_bias": True},
        {"rope": DYNAMIC_ROPE},
        {"rope": replace(LONGROPE_OF_2048, factor=2.0)},
        {"fused_projections": True, "qk_norm": True},
        {"fused_projections": True, "rope": RopeConfig(type="linear", factor=2.0)},
    ],
)
def test_targets_transformers_does_not_have(fields):
    with pytest.raises(UserError, match="stays with poss_jax"):
        target_config_json(replace(LLAMA, **fields), "float32")


def test_rope_as_older_programs_read_it():
    """Phi-3 in transformers 4 takes only these three keys; the original takes theta apart."""
    config = replace(LLAMA, fused_projections=True, rope=LONGROPE_OF_2048)
    values = target_config_json(config, "float32")
    assert values["rope_scaling"].keys() == {"type", "short_factor", "long_factor"}
    assert values["original_max_position_embeddings"] == 32
    values = target_config_json(TARGETS["linear rope"], "float32")
    assert values["rope_theta"] == 2e4
    assert (values["rope_scaling"]["type"], values["rope_scaling"]["factor"]) == ("linear", 2.0)
    assert target_config_json(LLAMA, "float32")["rope_scaling"] is None
