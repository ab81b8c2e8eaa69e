"""Drafts in every layout in use: each arrives bit for bit and drafts what was recorded."""

import dataclasses
import itertools
import json
from functools import partial
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from convert_sources import (
    WEIGHTS,
    assert_stored,
    draft_keys,
    draft_tensors,
    run,
    save_bin,
    write_shards,
    write_source,
)
from golden import ROOT, SPANS, load_golden, read_config, read_tensors
from safetensors.numpy import save_file
from test_golden import check_rounds

from poss_jax.checkpoint.folder import load_draft
from poss_jax.checkpoint.record import DraftVocabulary, read_record, write_draft_vocabulary
from poss_jax.config.reading import UserError
from poss_jax.convert.reading import PUBLISHED


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


FORMS = {
    "safetensors": lambda folder, tensors: save_file(tensors, folder / WEIGHTS),
    "shards": write_shards,
    "bin": lambda folder, tensors: save_bin(tensors, folder / "pytorch_model.bin"),
    "bin_shards": partial(write_shards, save=save_bin, name="pytorch_model.bin"),
}
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
DTYPES = (np.float32, np.float16, jnp.bfloat16)
CASES = [("poss3", layout, np.float32, "safetensors") for layout in LAYOUTS]
CASES += [("eagle", prefixed, *case) for case in itertools.product(DTYPES, FORMS)]


@pytest.mark.parametrize(
    ("method", "layout", "dtype", "form"),
    [
        pytest.param(
            *case,
            id=f"{case[1].__name__}-{jnp.dtype(case[2]).name}-{case[3]}",
            marks=[pytest.mark.torch] if "bin" in case[3] else [],
        )
        for case in CASES
    ],
)
def test_layouts(tmp_path, tmp_path_factory, method, layout, dtype, form):
    base = load_golden(tmp_path_factory.getbasetemp() / "golden", method)
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
    if layout is of_qwen2:  # zero biases change the config, and not what is drafted
        check_rounds(dataclasses.replace(base, draft_record=record, draft=params), "_small")
    elif layout is not with_fc_bias:
        assert record.draft == base.draft_config


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
        ("draft", None, {"positions_per_specialist": "1,4", "trained_depth": 7}, (1, 4), 7, []),
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


def test_keys_that_a_dense_draft_kept_of_its_target(tmp_path, tiny, capsys):
    """SpecForge's configs for targets of experts keep the number of them."""
    config = {"num_local_experts": 8, "num_experts": 8}
    convert(tmp_path, tiny, draft_tensors(), capsys, config=config)
    assert read_record(tmp_path / "out").draft.num_specialists == 1
