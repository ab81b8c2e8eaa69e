"""Drafts in every layout in use: each arrives bit for bit and drafts what was recorded."""

import dataclasses
import itertools
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from convert_sources import (
    assert_stored,
    draft_keys,
    draft_tensors,
    draw,
    run,
    target_tensors,
    write_shards,
    write_source,
)
from golden import ROOT, Golden, load_golden, read_config, read_tensors
from safetensors.numpy import save_file
from test_golden import check_rounds

from poss_jax.checkpoint.folder import load_draft
from poss_jax.checkpoint.record import DraftVocabulary, read_record, write_draft_vocabulary
from poss_jax.config.reading import UserError
from poss_jax.convert.reading import PUBLISHED

SPANS = {"eagle": "1", "poss3": "3,3"}


# Each layout changes tensors and config.json of a recorded draft, and nothing that it computes.
def plain(tensors, config):
    return tensors, config


def prefixed(tensors, config):
    return {f"model.{key}": value for key, value in tensors.items()}, config


def without_embedding(tensors, config):
    return {k: v for k, v in tensors.items() if k != "embed_tokens.weight"}, config


def of_vllm(tensors, config):
    """A wrapper around config.json, a prefix on all but fc, and the target's head."""
    tensors = {k if k.startswith("fc.") else f"model.{k}": v for k, v in tensors.items()}
    head = read_tensors(ROOT / "target")["lm_head.weight"]
    tensors["lm_head.weight"] = head.astype(tensors["fc.weight"].dtype)
    inner = {key: value for key, value in config.items() if key != "bias"}
    return tensors, {"model_type": "eagle", "model": inner, "eagle_fc_bias": False}


def of_speculators(tensors, config):
    inner = {key: value for key, value in config.items() if key != "bias"}
    wrapper = {"speculators_model_type": "eagle", "architectures": ["EagleSpeculator"]}
    return tensors, wrapper | {"transformer_layer_config": inner, "fusion_bias": False}


def with_fc_bias(tensors, config):
    """As the drafts of Llama 2 and Vicuna, whose config.json has no key `bias`."""
    bias = {"fc.bias": np.zeros(128, tensors["fc.weight"].dtype)}
    return tensors | bias, {key: value for key, value in config.items() if key != "bias"}


def of_qwen2(tensors, config):
    """Biases on queries, keys and values too."""
    tensors, config = with_fc_bias(tensors, config)
    biases = {
        key.replace("weight", "bias"): np.zeros(value.shape[0], value.dtype)
        for key, value in tensors.items()
        if any(f"{name}_proj" in key for name in "qkv")
    }
    return tensors | biases, config | {"qkv_bias": True}


def of_transformers_5(tensors, config):
    theta = config["rope_theta"]
    config = {k: v for k, v in config.items() if k not in ("rope_theta", "torch_dtype")}
    return tensors, config | {
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "dtype": "float32",
    }


def with_all_layers_counted(tensors, config):
    layers = {key.split(".")[1] for key in tensors if key.startswith("layers.")}
    return tensors, config | {"num_hidden_layers": len(layers)}


def write_safetensors(folder, tensors):
    save_file(tensors, folder / "model.safetensors")


def write_bin(folder, tensors):
    import torch

    state = {
        k: torch.from_numpy(v.astype(np.float32)).to(getattr(torch, v.dtype.name))
        for k, v in tensors.items()
    }
    torch.save(state, folder / "pytorch_model.bin")


FORMS = {"safetensors": write_safetensors, "shards": write_shards, "bin": write_bin}
LAYOUTS = [
    plain,
    prefixed,
    without_embedding,
    of_vllm,
    of_speculators,
    with_fc_bias,
    of_qwen2,
    of_transformers_5,
    with_all_layers_counted,
]
MATRIX = list(itertools.product(LAYOUTS, (np.float32, np.float16, jnp.bfloat16), FORMS))


@pytest.fixture(scope="module")
def golden(tmp_path_factory) -> dict[str, Golden]:
    """The recorded models, converted once for all tests of a worker."""
    folder = tmp_path_factory.getbasetemp() / "golden"
    return {method: load_golden(folder, method) for method in SPANS}


@pytest.mark.parametrize(
    ("number", "layout", "dtype", "form"),
    [
        pytest.param(
            number,
            *case,
            id=f"{case[0].__name__}-{jnp.dtype(case[1]).name}-{case[2]}",
            marks=[pytest.mark.torch] if case[2] == "bin" else [],
        )
        for number, case in enumerate(MATRIX)
    ],
)
def test_layouts(tmp_path, golden, number, layout, dtype, form):
    method = list(SPANS)[number % len(SPANS)]
    base = golden[method]
    original = read_tensors(ROOT / "draft" / method)
    original = {key: value.astype(dtype) for key, value in original.items()}
    tensors, config = layout(original, read_config(ROOT / "draft" / method))
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(config))
    FORMS[form](source, tensors)
    spans = {"positions_per_specialist": SPANS[method]}
    run("draft", source=source, target=base.target_folder, output=tmp_path / "out", **spans)
    record, params = load_draft(tmp_path / "out", target=base.target_record)
    assert_stored(params, draft_keys(base.draft_config.num_specialists), original)
    # The config and the bits decide what comes out, so one type and form of each layout decodes;
    # of_qwen2 has the bias of fc, too.
    if (dtype, form) == (np.float32, "safetensors") and layout is not with_fc_bias:
        changed = dataclasses.replace(base, draft_record=record, draft=params)
        check_rounds(changed, "_small")


def convert(tmp_path, tiny, tensors, capsys, name="source", config=None, **flags):
    """Converts a tiny draft; returns its config and the lines of what was assumed."""
    source = write_source(tmp_path / name, tensors, **{"rope_theta": 1e4, **(config or {})})
    capsys.readouterr()
    run("draft", source=source, target=tiny / "target", output=tmp_path / "out", **flags)
    *lines, last = capsys.readouterr().out.splitlines()
    assumed = [line.removeprefix("assumed: ") for line in lines if line.startswith("assumed: ")]
    assert json.loads(last)["assumed"] == assumed
    return read_record(tmp_path / "out").draft, assumed


FULL = {"bias": False, "rms_norm_eps": 1e-6}


@pytest.mark.parametrize(
    ("config", "line"),
    [
        ({"rope_theta": None}, "rope theta 10000, because config.json has none"),
        ({"rms_norm_eps": None}, "rms_norm_eps 1e-06, because config.json has none"),
        ({"model_type": None}, "model_type llama, because config.json has none"),
        ({"bias": True}, "fc without bias, because the weights hold no fc.bias, although"),
        ({"bias": None}, "has no key bias, which means true"),
        ({"model_type": "qwen2"}, "qkv_bias False, because the weights hold no"),
        ({"rope_theta": 5e5}, "because the draft's config.json says so, although the target has"),
    ],
)
def test_what_config_json_leaves_out(tmp_path, tiny, capsys, config, line):
    flags = {"trained_depth": 3}
    _, assumed = convert(tmp_path, tiny, draft_tensors(), capsys, config=FULL | config, **flags)
    assert [line in said for said in assumed].count(True) == 1, assumed
    assert all(", because " in said for said in assumed)


def test_a_draft_vocabulary_is_kept(tmp_path, tiny, capsys):
    file = tmp_path / "vocabulary.json"
    size = read_record(tiny / "target").llama.vocab_size
    write_draft_vocabulary(file, DraftVocabulary(vocab_size=size + 1, tokens=(1, 4)))
    with pytest.raises(UserError, match=f"want a draft vocabulary of {size} tokens"):
        convert(tmp_path, tiny, draft_tensors(1), capsys, draft_vocabulary=file)
    write_draft_vocabulary(file, DraftVocabulary(vocab_size=size, tokens=(1, 4, 7)))
    convert(tmp_path, tiny, draft_tensors(1), capsys, name="other", draft_vocabulary=file)
    assert read_record(tmp_path / "out").draft_vocabulary == (1, 4, 7)


PUBLISHED_NAME = "PosS3-Llama2-13B-Chat"
CACHED = f"models--HINT-lab--{PUBLISHED_NAME}/snapshots/" + 10 * "0a1b"


@pytest.mark.parametrize(
    ("name", "metadata", "flags", "spans", "depth", "lines"),
    [
        ("draft", {"positions_per_specialist": [1, 4], "trained_depth": 7}, {}, (1, 4), 7, []),
        (PUBLISHED_NAME, None, {}, (3, 3), 6, [f"matches HINT-lab/{PUBLISHED_NAME}"] * 2),
        (CACHED, None, {}, (3, 3), 6, [f"matches HINT-lab/{PUBLISHED_NAME}"] * 2),
        (
            PUBLISHED_NAME,
            None,
            {"positions_per_specialist": "1,2"},
            (1, 2),
            3,
            [
                "1,2 positions per specialist as asked, although ",
                "trained depth 3, because the positions per specialist add up to it",
            ],
        ),
    ],
)
def test_spans_are_said_by_files_names_or_flags(
    tmp_path, tiny, capsys, name, metadata, flags, spans, depth, lines
):
    config = FULL | ({"poss_jax": metadata} if metadata else {})
    converted, assumed = convert(
        tmp_path, tiny, draft_tensors(2), capsys, name=name, config=config, **flags
    )
    assert (converted.positions_per_specialist, converted.trained_depth) == (spans, depth)
    assert [line in said for line, said in zip(lines, assumed, strict=True)] == [True] * len(lines)


def test_a_known_name_with_another_number_of_layers(tmp_path, tiny, capsys):
    with pytest.raises(UserError, match="has 4 specialists, got 2"):
        convert(tmp_path, tiny, draft_tensors(4), capsys, name=PUBLISHED_NAME)


def test_published_table():
    docs = (Path(__file__).parents[1] / "docs/checkpoints.md").read_text()
    for hub_id, known in PUBLISHED.items():
        assert hub_id in docs and known.target in docs
        spans, depth = known.positions_per_specialist, known.trained_depth
        if "PosS" in hub_id:
            span = int(hub_id.split("PosS")[1][0])
            assert set(spans[:-1]) <= {span} and spans[-1] <= span and sum(spans) == depth
        else:
            wanted = {"HASS": 3, "EAGLE3-": 7}
            found = [depth for name, depth in wanted.items() if name in hub_id]
            assert spans == (1,) and [depth] == (found or [1])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"hidden_size": 16}, r"hidden_size 16, the weights have fc\.weight \[8, 16\]"),
        ({"intermediate_size": 20}, r"intermediate_size 20, .* \[12, 8\]"),
        ({"head_dim": 6}, r"num_attention_heads times head_dim 12, .*q_proj\.weight \[8, 8\]"),
        ({"num_key_value_heads": 2}, r"num_key_value_heads times head_dim 8, .* \[4, 8\]"),
        ({"vocab_size": 32}, r"vocab_size 32, .* \[16, 8\]"),
        ({"num_hidden_layers": 3}, r"num_hidden_layers 3, the weights hold 1"),
        ({"qkv_bias": True}, r"qkv_bias True, the weights hold no layers\.0\.self_attn\.q_proj"),
        ({"attention_bias": True}, r"attention_bias True, the weights hold no"),
        ({"mlp_bias": True}, r"mlp_bias True, the weights hold no"),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, r"says EAGLE-3 .* EAGLE-2's layout"),
        ({"poss_jax": [3]}, r"poss_jax: want an object"),
        ({"poss_jax": {"trained_depth": 3}}, r"poss_jax: missing key 'positions_per_specialist'"),
    ],
)
def test_contradictions_name_both_sides(tmp_path, tiny, capsys, config, message):
    tensors = draft_tensors(**{"embed_tokens.weight": (16, 8)})
    with pytest.raises(UserError, match=message):
        convert(tmp_path, tiny, tensors, capsys, config=config)
    assert not (tmp_path / "out").exists()


NOT_YET = "not supported yet"
AS_EAGLE3 = r"read as an EAGLE-3 draft: .*missing layers\.0\.input_layernorm\.weight \[8\]"
OTHERS = {
    "EAGLE-3 by its names": ({"midlayers.1.hidden_norm.weight": (8,)}, {}, AS_EAGLE3),
    "EAGLE-3 by its map": ({"d2t": (4,), "t2d": (16,)}, {}, AS_EAGLE3),
    "EAGLE-3 by its fc": ({"fc.weight": (8, 24)}, {}, AS_EAGLE3),
    "EAGLE-3 by its width": ({"layers.0.self_attn.q_proj.weight": (8, 16)}, {}, AS_EAGLE3),
    "speculators' EAGLE-3": (
        {},
        {"speculators_model_type": "eagle3", "architectures": ["Eagle3DraftModel"]},
        AS_EAGLE3,
    ),
    "another of speculators": (
        {},
        {"speculators_model_type": "xpress", "architectures": ["XPressDraftModel"]},
        rf"a draft of speculators \(xpress: XPressDraftModel\); {NOT_YET}",
    ),
    "speculators' EAGLE-1": (
        {"embed_layernorm.weight": (8,)},
        {},
        r"an EAGLE-1 draft of speculators .*\(embed_layernorm\.weight\)",
    ),
    "an input norm": (
        {"layers.0.input_layernorm.weight": (8,)},
        {},
        r"layers\.0\.input_layernorm\.weight\); no EAGLE-2, HASS or PosS draft has one",
    ),
    "a bias that config.json denies": (
        {"layers.0.self_attn.q_proj.bias": (8,)},
        {"qkv_bias": False},
        "says qkv_bias False, the weights hold a",
    ),
    "another head": (
        {"model.lm_head.weight": (16, 8)},
        {},
        r"model\.lm_head\.weight differs from the head",
    ),
    "a key twice": ({"model.fc.weight": (8, 16)}, {}, r"both fc\.weight and model\.fc\.weight"),
    "experts": ({"layers.0.mlp.experts.0.up_proj.weight": (2, 8)}, {}, "a mixture of experts"),
    "LoRA": ({"layers.0.self_attn.q_proj.lora_A.weight": (2, 8)}, {}, "a LoRA adapter"),
    "quantised": ({}, {"quantization_config": {"quant_method": "awq"}}, "quantised weights"),
}


@pytest.mark.parametrize("what", OTHERS)
def test_others_are_refused_by_name(tmp_path, tiny, capsys, what):
    extra, config, message = OTHERS[what]
    tensors = draft_tensors() | draw(extra)
    with pytest.raises(UserError, match=message):
        convert(tmp_path, tiny, tensors, capsys, config=config)


def test_keys_that_a_dense_draft_kept_of_its_target(tmp_path, tiny, capsys):
    """SpecForge's configs for targets of experts keep the number of them."""
    config = {"num_local_experts": 8, "num_experts": 8}
    convert(tmp_path, tiny, draft_tensors(), capsys, config=config)
    assert read_record(tmp_path / "out").draft.num_specialists == 1


def test_a_target_given_as_draft(tmp_path, tiny, capsys):
    with pytest.raises(UserError, match=r"holds a whole target .* with the target command"):
        convert(tmp_path, tiny, target_tensors(), capsys)


def test_an_adapter_folder_without_weights_of_its_own(tmp_path, tiny):
    source = tmp_path / "source"
    source.mkdir()
    (source / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match="a LoRA adapter"):
        run("draft", source=source, target=tiny / "target", output=tmp_path / "out")
