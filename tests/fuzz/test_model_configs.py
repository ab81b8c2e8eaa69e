"""config.json files with wrong values: a config that can be used, or one line."""

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from convert_sources import LAYER_SHAPES, TINY, draft_tensors, draw, write_source
from hypothesis import given
from hypothesis import strategies as st

from poss_jax.config.reading import UserError, build_config, config_to_dict
from poss_jax.convert.formats import read_checkpoint
from poss_jax.convert.hf import parse_llama_config
from poss_jax.convert.reading import METADATA, place_specialists
from poss_jax.convert.source import open_source

ROPE = {
    "type": "llama3",
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 2.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "short_factor": [1.0, 2.0],
    "long_factor": [1.0, 2.0],
    "attention_factor": 1.5,
}
LISTED = """
    llama mistral qwen2 qwen3 phi3 eagle linear dynamic default longrope su yarn
""".split()
OTHERS = """
    rope_scaling rope_parameters rope_theta layer_types sliding_window use_sliding_window head_dim
    max_window_layers max_position_embeddings eos_token_id bos_token_id attention_bias mlp_bias bias
    qkv_bias hidden_act pretraining_tp partial_rotary_factor rms_norm_eps tie_word_embeddings
    architectures quantization_config compression_config speculators_model_type draft_vocab_size
    num_experts num_local_experts model transformer_layer_config eagle_fc_bias eagle_config fc_norm
    norm_before_fc norm_before_residual norm_output eagle_aux_hidden_state_layer_ids
    original_max_position_embeddings
""".split()
KEYS = [*TINY, "model_type", METADATA, *OTHERS]
DRAFT = draft_tensors(2)
SPANS = {METADATA: {"positions_per_specialist": [1, 2], "trained_depth": 3}}
DRAFT_E3 = draw(
    {"fc.weight": (8, 24), "norm.weight": (8,), "lm_head.weight": (16, 8)}
    | {f"midlayer.{key}.weight": (8,) for key in ("hidden_norm", "input_layernorm")}
    | {f"midlayer.{key}": shape for key, shape in LAYER_SHAPES.items()}
    | {
        f"midlayer.self_attn.{name}_proj.weight": (n, 16)
        for name, n in (("q", 8), ("k", 4), ("v", 4))
    }
)

numbers = st.one_of(
    st.integers(-2, 9), st.sampled_from([2**31 - 1, 2**31, 2**63, 10**400, -(10**400)]), st.floats()
)
long = st.just("x").map(lambda letter: 9000 * letter)
texts = st.one_of(st.sampled_from([*LISTED, "8", "1e-4", "a\nb"]), long, st.text(max_size=5))
leaves = st.one_of(st.none(), st.booleans(), numbers, texts)
wrong = leaves | st.lists(leaves, max_size=1) | st.just({})
ropes = st.fixed_dictionaries({}, optional={key: st.just(ROPE[key]) | wrong for key in ROPE})
metadata = st.fixed_dictionaries(
    {},
    optional={
        "positions_per_specialist": st.lists(numbers, max_size=3) | leaves,
        "trained_depth": numbers | leaves,
        "draft_vocabulary": st.lists(numbers, max_size=3) | leaves,
    },
)
values = st.recursive(
    leaves | ropes | metadata,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner),
    max_leaves=6,
)
configs = st.dictionaries(st.sampled_from(KEYS), values, max_size=4)


def refused(error: UserError) -> None:
    message = str(error)
    assert "\n" not in message and len(message) < 700, message


@given(changes=configs, generation=st.dictionaries(st.just("eos_token_id"), values))
def test_targets(changes: dict[str, Any], generation: dict[str, Any]) -> None:
    try:
        config = parse_llama_config(TINY | changes, generation, origin="config.json")
    except UserError as error:
        refused(error)
    else:
        assert build_config(type(config), config_to_dict(config), origin="twin") == config


@given(st.sampled_from([(DRAFT, SPANS), (DRAFT_E3, {"num_hidden_layers": 1})]), configs)
def test_drafts(draft: tuple[Any, dict[str, Any]], changes: dict[str, Any]) -> None:
    tensors, fields = draft
    with tempfile.TemporaryDirectory() as folder:
        source = write_source(Path(folder), tensors)
        (source / "config.json").write_text(json.dumps(TINY | fields | changes))
        try:
            reading = place_specialists(read_checkpoint(open_source(folder), "draft"))
        except UserError as error:
            refused(error)
            return
    twin = build_config(type(reading.config), config_to_dict(reading.config), origin="twin")
    kv = getattr(reading.config, "kv", None)  # which a model's record keeps
    assert (replace(twin, kv=kv) if kv else twin) == reading.config
