"""EAGLE-3 drafts: lossless as the first family's, every layout converts, mistakes are noticed."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from convert_sources import run as convert
from golden import (
    METHODS_E3,
    ROOT_E3,
    SPANS_E3,
    Golden,
    load_golden,
    read_config,
    read_tensors,
    widen,
)
from models import tiny_llama
from oracle import Shape
from safetensors.numpy import save_file
from test_golden import check_rounds

from poss_jax.checkpoint.folder import load_draft
from poss_jax.config.models import DraftConfig, TreeConfig
from poss_jax.config.reading import UserError
from poss_jax.convert.plan import plan_draft
from poss_jax.model.families import FAMILIES
from poss_jax.model.families.eagle3 import EAGLE3
from poss_jax.model.layers import rms_norm
from poss_jax.model.parameters import flatten_item

LLAMA = tiny_llama()
CONFIG = DraftConfig(
    layer=dataclasses.replace(LLAMA, num_layers=1),
    positions_per_specialist=(1, 2, 1),
    family="eagle3",
    kv="shared",
    aux_layers=(0, 1),
)
SOURCE = ROOT_E3 / "draft" / METHODS_E3[-1]

# --------------------------------------------------------------------------------------------------
# Decoding


NARROW = dataclasses.replace(
    CONFIG,
    layer=tiny_llama(num_layers=1, hidden_size=24),
    target_size=LLAMA.hidden_size,
    has_embedding=True,
)
LOOPED = dataclasses.replace(CONFIG, positions_per_specialist=(1,), layers_per_specialist=(2,))
MASKED = dataclasses.replace(LOOPED, mask_token=5, window=6, num_sinks=0)


@pytest.mark.quick
@pytest.mark.parametrize(
    "config",
    [
        pytest.param(CONFIG, id="sampled"),
        pytest.param(MASKED, id="masked"),
        pytest.param(LOOPED, id="looped", marks=pytest.mark.slow),
        pytest.param(NARROW, id="narrow", marks=pytest.mark.slow),
    ],
)
def test_speculative_equals_autoregressive(config: DraftConfig) -> None:
    tree = TreeConfig(depth=3 if config.is_looped else 4, top_k=3, total_tokens=12)
    Shape(LLAMA, config, tree, 3, is_sampled=True).check_pairs()


def feed_back_normed(params: Any, config: Any, embedded: Any, features: Any) -> Any:
    """Predicted features are normed before they are fed back."""
    if features.shape[-1] == embedded.shape[-1]:
        features = rms_norm(features, params["norm"]["scale"], eps=1e-5)
    return EAGLE3.join(params, config, embedded, features)


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Golden:
    return load_golden(tmp_path_factory.getbasetemp() / "golden", METHODS_E3[-1])


@pytest.mark.slow
def test_a_mistake_in_the_family_is_noticed(golden: Golden, monkeypatch: Any) -> None:
    """Under another name, since programs are compiled by name."""
    mistaken = dataclasses.replace(EAGLE3, join=feed_back_normed)
    monkeypatch.setitem(FAMILIES, "mistaken", mistaken)
    config = dataclasses.replace(golden.draft_config, family="mistaken")
    record = dataclasses.replace(golden.draft_record, config=config)
    with pytest.raises(AssertionError):
        check_rounds(dataclasses.replace(golden, draft_record=record), "_small")


def test_a_shifted_vocabulary_is_noticed(golden: Golden) -> None:
    first, *others = golden.draft_record.draft_vocabulary or ()
    record = dataclasses.replace(golden.draft_record, draft_vocabulary=(*others, first))
    with pytest.raises(AssertionError):
        check_rounds(dataclasses.replace(golden, draft_record=record), "_small")


# --------------------------------------------------------------------------------------------------
# Conversion


@pytest.fixture(scope="module")
def target(golden: Golden) -> Path:
    return golden.target_folder


def write(folder: Path, tensors: dict[str, np.ndarray], **config: Any) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    values = {k: v for k, v in (read_config(SOURCE) | config).items() if v is not None}
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def plan(source: Path, target: Path) -> Any:
    spans = tuple(map(int, SPANS_E3[SOURCE.name].split(",")))
    return plan_draft(str(source), target, positions_per_specialist=spans)


def arrays(conversion: Any) -> dict[str, np.ndarray]:
    return {
        "/".join((name, *path)): array
        for name, item in conversion.items
        for path, array in flatten_item(item).items()
    }


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (r"^layers\.", "midlayers."),
        (r"^(?!d2t|t2d)", "model."),
        (r"^(?!d2t|t2d)", "draft_model."),
        (r"^layers\.", "model.midlayers."),
    ],
)
def test_layouts(old: str, new: str, target: Path, tmp_path: Path) -> None:
    want = plan(SOURCE, target)
    tensors = {re.sub(old, new, key): array for key, array in read_tensors(SOURCE).items()}
    got = plan(write(tmp_path / "source", tensors), target)
    assert got.record.config == want.record.config
    assert got.record.draft_vocabulary == want.record.draft_vocabulary
    ours, theirs = arrays(got), arrays(want)
    assert list(ours) == list(theirs)
    for name, array in theirs.items():
        np.testing.assert_array_equal(ours[name], array)


def test_config_and_vocabulary(target: Path, tmp_path: Path) -> None:
    tensors = read_tensors(SOURCE)
    record = plan(SOURCE, target).record
    assert record.draft_vocabulary == tuple(np.flatnonzero(tensors["t2d"]).tolist())
    assert (record.draft.aux_layers, record.draft.head_size) == ((2, 4, 5), 80)
    assert (record.method, record.kv) == ("poss332-eagle3", "shared")
    assert record.draft.layer.rope.theta == 10000
    del tensors["t2d"]  # as ModelOpt exports it
    chosen = {"eagle_aux_hidden_state_layer_ids": [0, 2, 6]}  # outputs, as SpecForge counts
    without = plan(write(tmp_path / "s", tensors, eagle_config=chosen), target).record
    assert without.draft_vocabulary == record.draft_vocabulary
    assert without.draft.aux_layers == (1, 3, 7)


def test_a_draft_that_is_wider_than_its_target(golden: Golden, tmp_path: Path) -> None:
    """Zeros widen a draft; it drafts as recorded."""
    embedding = np.asarray(golden.target["embed"]["weight"])
    tensors, config = widen(SOURCE, embedding)
    source, out = write(tmp_path / "source", tensors, **config), tmp_path / "out"
    convert(
        "draft",
        source=source,
        target=golden.target_folder,
        output=out,
        positions_per_specialist=SPANS_E3[SOURCE.name],
    )
    record, draft = load_draft(out, jnp.float32, target=golden.target_record)
    assert (record.draft.layer.hidden_size, record.draft.feature_size) == (160, 128)
    check_rounds(dataclasses.replace(golden, draft_record=record, draft=draft), "_small")


def scales(*keys: str, width: int = 128) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {key: rng.normal(size=width).astype(np.float32) for key in keys}


WHOLE = scales("input_norm.weight", width=384)
EACH = scales("fc_norm.0.weight", "fc_norm.1.weight", "fc_norm.2.weight")
SPECULATORS = {"speculators_model_type": "eagle3", "architectures": ["Eagle3Speculator"]}


def one_specialist(change: dict[str, Any]) -> dict[str, Any]:
    """Tensors of a draft of one specialist, with `change`."""
    tensors = {k: v for k, v in read_tensors(SOURCE).items() if not re.match(r"layers\.[12]", k)}
    return tensors | change


@pytest.mark.parametrize(
    ("tensors", "config", "fields", "assumed"),
    [
        (EACH, {"fc_norm": True, "norm_output": True}, {"fc_norm": "each"}, "norm_output True: "),
        (EACH, {}, {"fc_norm": "each"}, "fc_norm True, because the weights hold fc_norm"),
        ({}, {"norm_output": False}, {"output_norm": None}, "no norm at all, because SpecForge"),
        (WHOLE, {"eagle_config": {"norm_before_fc": True}}, {"fc_norm": "whole"}, ""),
    ],
)
def test_variants_of_specforge(tensors, config, fields, assumed, target, tmp_path) -> None:
    source = write(tmp_path / "source", one_specialist(tensors), num_hidden_layers=1, **config)
    want = plan_draft(
        str(write(tmp_path / "plain", one_specialist({}), num_hidden_layers=1)), target
    )
    got = plan_draft(str(source), target)
    assert got.record.config == dataclasses.replace(want.record.draft, **fields)
    assert any(assumed in line for line in got.assumed)
    assert arrays(got).keys() >= arrays(want).keys()


def test_a_draft_of_speculators(target: Path, tmp_path: Path) -> None:
    embedding = read_tensors(ROOT_E3 / "target")["model.embed_tokens.weight"]
    tensors = one_specialist(WHOLE | {"embed_tokens.weight": embedding})
    inner = {k: v for k, v in read_config(SOURCE).items() if k != "draft_vocab_size"}
    flags = {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True}
    flags |= {"eagle_aux_hidden_state_layer_ids": [1, 3, 7], "draft_vocab_size": 80}
    folder = write(tmp_path / "source", tensors)
    inner |= {"num_hidden_layers": 1}
    config = SPECULATORS | flags | {"transformer_layer_config": inner}
    (folder / "config.json").write_text(json.dumps(config))
    record = plan_draft(str(folder), target).record
    assert record.draft.aux_layers == (1, 3, 7)  # indices of hidden states: inputs of layers
    assert (record.draft.fc_norm, record.draft.output_norm) == ("whole", "fed_back")
    assert record.draft.norm_before_residual and record.draft.head_size == 80
    del config["norm_before_residual"]
    (folder / "config.json").write_text(json.dumps(config))
    assert any("norm_before_residual False" in s for s in plan_draft(str(folder), target).assumed)
    (folder / "config.json").write_text(json.dumps(config | {"embed_requires_grad": True}))
    own = plan_draft(str(folder), target)
    assert own.record.draft.has_embedding
    np.testing.assert_array_equal(arrays(own)["embed/weight"], embedding)


EMBEDDING = {"embed_tokens.weight": np.ones((260, 128), np.float32)}
MASK = np.random.default_rng(0).normal(size=(1, 1, 384)).astype(np.float32)


@pytest.mark.parametrize("key", ["mask_token_id", "pard_token", "ptd_token_id"])
def test_a_draft_of_p_eagle(key: str, target: Path, tmp_path: Path) -> None:
    tensors = one_specialist(EMBEDDING | {"mask_hidden": MASK})
    names = {"architectures": ["PEagleDraftModel"], "num_hidden_layers": 1}
    got = plan_draft(str(write(tmp_path / "source", tensors, **names, **{key: 7})), target)
    assert (got.record.method, got.record.draft.mask_token) == ("p-eagle", 7)
    assert got.record.draft.has_embedding  # P-EAGLE trains it
    ours = arrays(got)
    np.testing.assert_array_equal(ours["mask/weight"], MASK)
    plain = plan_draft(str(write(tmp_path / "p", one_specialist({}), num_hidden_layers=1)), target)
    assert ours.keys() - arrays(plain).keys() == {"mask/weight", "embed/weight"}
    with pytest.raises(UserError, match="want one of 260 tokens, got 260"):
        plan_draft(str(write(tmp_path / "far", tensors, **names, **{key: 260})), target)


def sliding(kinds: list[str], **change: Any) -> dict[str, Any]:
    return {"layer_types": kinds, "sliding_window": 64, "use_sliding_window": True} | change


@pytest.mark.parametrize(
    ("config", "window"),
    [
        (sliding(["sliding_attention"]), 64),
        (sliding(["sliding_attention", "full_attention"]), 64),  # it has one layer
        (sliding(["sliding_attention"], sliding_window=512), None),  # the whole context
        (sliding(["full_attention"]), None),
        ({"sliding_window": 64}, None),
    ],
)
def test_a_sliding_window(config: Any, window: int | None, target: Path, tmp_path: Path) -> None:
    source = write(tmp_path / "source", one_specialist({}), num_hidden_layers=1, **config)
    draft = plan_draft(str(source), target).record.draft
    assert draft.trained_window == window == draft.window


def test_what_specforge_may_have_done_is_said(target: Path, tmp_path: Path) -> None:
    tensors = {k.replace("layers.0", "midlayer"): v for k, v in one_specialist({}).items()}
    source = write(tmp_path / "source", tensors, num_hidden_layers=1)
    assert any(
        "SpecForge trained wrongly" in line for line in plan_draft(str(source), target).assumed
    )
    inner = {"use_aux_hidden_state": True}  # as ModelOpt writes
    other = write(tmp_path / "other", tensors, num_hidden_layers=1, eagle_config=inner)
    assert not any("SpecForge" in line for line in plan_draft(str(other), target).assumed)


@pytest.mark.parametrize(
    ("change", "config", "error"),
    [
        ({"d2t": None}, {}, r"want int64 \[80\], got none"),
        ({"d2t": np.zeros(80, np.int64) - 1}, {}, "want the offsets of 80 ascending ids"),
        ({"norm.weight": None}, {}, r"missing norm\.weight \[128\]"),
        ({}, {"fc_norm": True}, r"says fc_norm True, the weights hold no fc_norm\.0\.weight"),
        (WHOLE, {"norm_before_fc": False}, "says norm_before_fc False, the weights hold input"),
        (WHOLE | EACH, {}, r"unknown fc_norm\.0\.weight"),
        (EACH | {"fc_norm.2.weight": None}, {}, r"missing fc_norm\.2\.weight \[128\]"),
        ({}, {"norm_output": "yes"}, "norm_output: want true or false, got 'yes'"),
        ({}, {"target_hidden_size": 64}, r"missing embed_tokens\.weight \[260, 128\];"),
        ({}, {"target_hidden_size": "x"}, "target_hidden_size: Input should be a valid integer"),
        (
            {},
            sliding(["sliding_attention", "full_attention", "sliding_attention"]),
            "layer_types: want one kind for all 3 layers of a draft, got",
        ),
        ({"mask_hidden": MASK}, {}, "want mask_token_id or pard_token or ptd_token_id, the tok"),
        ({"mask_hidden": MASK}, {"mask_token_id": 3}, "only a draft of one specialist"),
        ({"eagle_module.fc.weight": np.zeros(2)}, {}, "export it with ModelOpt and convert what"),
        ({"d2t": np.zeros(80, np.int32)}, {}, "d2t, .*: want int64 .*, got I32"),
        ({"d2t": np.zeros((80, 1), np.int64)}, {}, r"want int64 \[80\], got int64 \[80, 1\]"),
        (EMBEDDING, {}, r"embed_tokens\.weight differs .* by embed_requires_grad"),
        ({}, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [-1] * 3}}, "want a list of"),
        ({}, {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}, "want it inside of eagle_config"),
        (
            {},
            {
                "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
                "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]},
            },
            r"want \[3, 5, 6\] at the top, as vLLM counts eagle_config's .* got \[2, 4, 5\]",
        ),
        ({}, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 7]}}, "of 8; give the"),
        ({}, {"draft_vocab_size": 70}, r"lm_head\.weight want \[70, 128\] got \[80, 128\]"),
    ],
)
def test_what_is_refused(change, config, error, target, tmp_path) -> None:
    tensors = {k: v for k, v in (read_tensors(SOURCE) | change).items() if v is not None}
    source = write(tmp_path / "source", tensors, **config)
    with pytest.raises(UserError, match=error):
        plan(source, target)
