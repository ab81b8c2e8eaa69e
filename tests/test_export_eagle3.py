"""EAGLE-3 drafts exported: every layout comes back as it was and holds what its readers want."""

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from convert_sources import draw, run
from golden import ROOT_E3, Golden, load_golden, read_tensors
from models import assert_same, random_draft
from safetensors.numpy import save_file
from test_export import assert_same_model, read_folder

from poss_jax.checkpoint.folder import load_item
from poss_jax.checkpoint.record import new_record, read_record
from poss_jax.checkpoint.writing import write_model
from poss_jax.config.models import DraftConfig, RopeConfig
from poss_jax.config.reading import UserError
from poss_jax.convert.layouts import LAYOUTS, Outgoing
from poss_jax.convert.plan import plan_draft
from poss_jax.convert.reading import slots_by_key
from poss_jax.model.parameters import flatten_item, item_shapes, split_items

LAYOUT = {layout.name: layout for layout in LAYOUTS if layout.family == "eagle3"}
SINGLE = ("eagle3", "specforge", "sglang", "speculators")
LAYER = {
    *(f"self_attn.{name}_proj.weight" for name in "qkvo"),
    *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    *(f"{name}.weight" for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm")),
}
SHARED = {"fc.weight", "norm.weight", "lm_head.weight"}


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Golden:
    """A draft of one layer whose head knows all tokens."""
    return load_golden(tmp_path_factory.getbasetemp() / "golden", "eagle3_full")


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Golden:
    """A draft of three specialists whose head knows 80 tokens of 260."""
    return load_golden(tmp_path_factory.getbasetemp() / "golden", "poss3_e3")


HUB_ID = "owner/target"


def export(golden: Golden, output: Path, *, model: Path | None = None, **flags: Any) -> Path:
    if flags.get("format") == "speculators":  # the target's folder is not an id of the Hub
        flags = {"verifier": HUB_ID} | flags
    run(
        "export",
        model=model or golden.draft_folder,
        target=golden.target_folder,
        output=output,
        **flags,
    )
    return output


def convert(golden: Golden, source: Path, output: Path) -> Path:
    run("draft", source=source, target=golden.target_folder, output=output)
    return output


@pytest.mark.parametrize("form", SINGLE)
def test_a_draft_of_one_layer_comes_back(form, one, tmp_path, capsys) -> None:
    out = export(one, tmp_path / "out", format=form)
    assert_same_model(one.draft_folder, convert(one, out, tmp_path / "again"))
    assert "->  specialists/0/feature_norm/scale " in capsys.readouterr().out
    tensors, _ = read_folder(out)
    layer = "layers.0" if form == "speculators" else "midlayer"
    want = SHARED | {f"{layer}.{key}" for key in LAYER}
    want |= {"embed_tokens.weight"} if form in ("specforge", "speculators") else set()
    want |= {"d2t", "t2d"} if form == "specforge" else set()  # which wants them, vLLM takes none
    assert tensors.keys() == want
    if "d2t" in want:
        assert tensors["t2d"].all() and not tensors["d2t"].any()
    if "embed_tokens.weight" in want:
        np.testing.assert_array_equal(tensors["embed_tokens.weight"], one.target["embed"]["weight"])


@pytest.mark.parametrize(
    ("form", "layer"), [("poss", r"layers.\1"), ("poss-midlayers", r"midlayers.\1")]
)
def test_specialists_come_back(form: str, layer: str, three: Golden, tmp_path: Path) -> None:
    out = export(three, tmp_path / "out", format=form)
    source = read_tensors(ROOT_E3 / "draft/poss3_e3")
    tensors, config = read_folder(out)
    assert_same(tensors, {re.sub(r"^layers\.(\d)", layer, k): v for k, v in source.items()})
    assert (config["num_hidden_layers"], config["draft_vocab_size"]) == (3, 80)
    assert_same_model(three.draft_folder, convert(three, out, tmp_path / "again"))


@pytest.mark.parametrize("form", ["eagle3", "speculators"])
def test_one_specialist_is_an_eagle3_draft(form: str, three: Golden, tmp_path: Path) -> None:
    out = export(three, tmp_path / "out", format=form, specialist=1)
    again = read_record(convert(three, out, tmp_path / "again"))
    assert again.draft == dataclasses.replace(three.draft_config, positions_per_specialist=(1,))
    assert again.draft_vocabulary == three.draft_record.draft_vocabulary
    for item in item_shapes(again.draft):
        origin = "specialists/1" if item == "specialists/0" else item
        ours = flatten_item(load_item(tmp_path / "again", again, item))
        for path, array in flatten_item(
            load_item(three.draft_folder, three.draft_record, origin)
        ).items():
            np.testing.assert_array_equal(ours[path], array)
    source, (tensors, _) = read_tensors(ROOT_E3 / "draft/poss3_e3"), read_folder(out)
    for name in ("d2t", "t2d", "lm_head.weight"):
        np.testing.assert_array_equal(tensors[name], source[name])


def test_what_is_exported_by_default(one: Golden, three: Golden, tmp_path: Path) -> None:
    assert "midlayer.hidden_norm.weight" in read_folder(export(one, tmp_path / "one"))[0]
    assert "layers.2.hidden_norm.weight" in read_folder(export(three, tmp_path / "three"))[0]
    chosen = read_folder(export(three, tmp_path / "chosen", specialist=0))[0]
    assert {"midlayer.hidden_norm.weight", "d2t", "t2d"} < chosen.keys()


def changed(golden: Golden, **changes: Any) -> DraftConfig:
    layer = dataclasses.replace(golden.draft_config.layer, **changes.pop("layer", {}))
    return dataclasses.replace(golden.draft_config, layer=layer, **changes)


def describe(
    golden: Golden, form: str, *, verifier: str | None = HUB_ID, **changes: Any
) -> dict[str, Any]:
    """config.json of a changed draft in a layout."""
    config, vocabulary = changed(golden, **changes), golden.draft_record.draft_vocabulary
    draft = Outgoing("folder", config, vocabulary, golden.target_record, "float32", verifier)
    return LAYOUT[form].describe(draft)


def variant(golden: Golden, folder: Path, **changes: Any) -> Path:
    """A model folder of a draft drawn at random for the recorded target."""
    config = changed(golden, **changes)
    record = new_record(config, golden.target_record.target, tokenizer_from=None)
    items = split_items(config, random_draft(config))
    write_model(folder, record, items, tokenizer_from=None)
    return folder


NARROW = {"layer": {"hidden_size": 96, "head_dim": 24}, "target_size": 128, "has_embedding": True}
YARN = RopeConfig(type="yarn", factor=4.0, original_max_position_embeddings=32, truncate=False)
PARALLEL = {"mask_token": 7, "has_embedding": True, "layers_per_specialist": (2,)}
OF_SPECULATORS = {"norm_before_residual": True, "fc_norm": "whole", "output_norm": "fed_back"}


@pytest.mark.parametrize(
    ("form", "changes", "said"),
    [
        ("speculators", OF_SPECULATORS, {"norm_before_fc": True, "fc_norm": False}),
        ("speculators", {"fc_norm": "each"}, {"fc_norm": True, "norm_output": False}),
        ("speculators", {"layer": {"qk_norm": True}}, {"fc_norm": False}),
        ("speculators", {"aux_layers": (0, 1, 7)}, {"eagle_aux_hidden_state_layer_ids": [0, 1, 7]}),
        ("specforge", {"fc_norm": "each", "output_norm": None}, {"norm_output": False}),
        ("sglang", {"fc_norm": "each"}, {"fc_norm": True}),
        ("sglang", {"layer": {"rope": YARN}}, {}),
        ("speculators", {"layer": {"rope": YARN}}, {}),
        ("eagle3", {"has_embedding": True}, {"embed_requires_grad": True}),
        ("eagle3", NARROW, {"target_hidden_size": 128, "hidden_size": 96}),
        ("specforge", NARROW, {"target_hidden_size": 128}),
        ("speculators", PARALLEL, {"mask_token_id": 7, "speculators_model_type": "peagle"}),
        ("speculators", {"window": 64, "num_sinks": 0}, {"embed_requires_grad": False}),
        ("speculators", NARROW, {"target_hidden_size": 128, "embed_requires_grad": True}),
    ],
)
def test_variants_are_read_as_they_were_described(form, changes, said, one, tmp_path) -> None:
    config, values = changed(one, **changes), describe(one, form, **changes)
    assert {key: values[key] for key in said} == said
    assert form == "speculators" or values.get("norm_output") is not True
    (tmp_path / "config.json").write_text(json.dumps(values))
    shapes = {LAYOUT[form].key(key): slot.shape for key, slot in slots_by_key(config).items()}
    save_file(draw(shapes), tmp_path / "model.safetensors")
    assert plan_draft(str(tmp_path), one.target_folder).record.draft == config


@pytest.mark.parametrize("changes", [NARROW, PARALLEL, OF_SPECULATORS])
def test_weights_of_variants_come_back(changes, one, tmp_path) -> None:
    model = variant(one, tmp_path / "model", **changes)
    out = export(one, tmp_path / "out", model=model, format="speculators")
    assert_same_model(model, convert(one, out, tmp_path / "again"))


def test_a_stack_of_layers_comes_back(one: Golden, tmp_path: Path) -> None:
    model = variant(one, tmp_path / "model", layers_per_specialist=(3,))
    with pytest.raises(UserError, match="want --format speculators for one specialist"):
        export(one, tmp_path / "out", model=model, format="eagle3")
    out = export(one, tmp_path / "out", model=model, format="speculators")
    assert_same_model(model, convert(one, out, tmp_path / "again"))
    tensors, config = read_folder(out)
    assert config["transformer_layer_config"]["num_hidden_layers"] == 3
    later = {key for key in tensors if key.startswith(("layers.1.", "layers.2."))}
    assert later == {f"layers.{n}.{key}" for n in (1, 2) for key in LAYER - {"hidden_norm.weight"}}
    assert tensors["layers.2.self_attn.q_proj.weight"].shape == (128, 128)


@pytest.mark.parametrize(
    ("form", "changes", "message"),
    [
        ("eagle3", {"norm_before_residual": True}, "no place for norm_before_residual True"),
        ("eagle3", {"fc_norm": "each"}, "no place for fc_norm each"),
        ("eagle3", {"output_norm": None}, "no place for output_norm None"),
        ("eagle3", {"aux_layers": (1, 3, 7)}, r"no place for aux_layers \[1, 3, 7\]"),
        ("eagle3", {"layer": {"qkv_bias": True}}, "no place for qkv_bias"),
        ("eagle3", {"layer": {"rope": RopeConfig(type="llama3")}}, "no place for rope llama3"),
        ("eagle3", {"layer": {"rope": YARN}}, "no place for rope yarn"),
        ("eagle3", {"layer": {"head_dim": 16}}, "no place for 4 heads of 16 for a width of 128"),
        ("specforge", {"fc_norm": "whole"}, "no place for fc_norm whole"),
        ("specforge", {"aux_layers": (0, 1, 2)}, "no place for aux_layers 0, the output of no"),
        ("sglang", {"output_norm": "fed_back"}, "no place for output_norm fed_back"),
        ("speculators", {"output_norm": None}, "no place for output_norm None"),
        ("speculators", {"layer": {"qkv_bias": True}}, "no place for layers of qwen2"),
        ("speculators", {"aux_layers": (1, 2)}, r"no place for aux_layers \[1, 2\]"),
        ("poss", {"fc_norm": "whole"}, "no place for fc_norm whole"),
        ("sglang", {"window": 64, "num_sinks": 0}, "no place for a sliding window of 64 rows"),
        ("sglang", {"mask_token": 7}, "no place for mask token 7"),
        ("poss", {"has_embedding": True}, "no place for an own embedding"),
    ],
)
def test_what_a_layout_cannot_hold(form, changes, message, one) -> None:
    with pytest.raises(UserError, match=message):
        describe(one, form, **changes)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"format": "eagle3"}, "for all 3 specialists, got --format eagle3; --specialist 0 to 2"),
        ({"format": "speculators"}, "want --format poss or --format poss-midlayers for all 3"),
        ({"format": "eagle"}, "want --format poss or --format poss-midlayers for .* got --format"),
        ({"format": "poss", "specialist": 1}, "want --format eagle3 or .* for one specialist, got"),
        ({"specialist": 3}, "specialist 3 does not exist; the draft has 3"),
        ({"verifier": "a/b"}, "--verifier is for --format speculators; --format poss does not"),
        ({"format": "speculators", "specialist": 0, "verifier": "nowhere"}, "nowhere is no Hub id"),
    ],
)
def test_choices_that_do_not_fit(flags, message, three, tmp_path) -> None:
    with pytest.raises(UserError, match=message):
        export(three, tmp_path / "out", **flags)
    assert not (tmp_path / "out").exists()


def test_config_of_speculators(three: Golden) -> None:
    config = describe(three, "speculators", positions_per_specialist=(1,))
    proposal = config["speculators_config"]["proposal_methods"][0]
    assert proposal["speculative_tokens"] == three.draft_config.trained_depth
    verifier = {"name_or_path": HUB_ID, "architectures": ["LlamaForCausalLM"]}
    assert config["speculators_config"]["verifier"] == verifier
    inner = config["transformer_layer_config"]
    assert (inner["num_hidden_layers"], inner["vocab_size"]) == (1, 260)
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert (config["speculators_model_type"], config["draft_vocab_size"]) == ("eagle3", 80)


def test_the_verifier_is_found_from_anywhere(one, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    for verifier, name in ((None, "target"), ("empty", "empty")):
        message = rf"{name} is no Hub id or folder with config\.json; give --verifier"
        with pytest.raises(UserError, match=message):
            describe(one, "speculators", verifier=verifier)
    run("export", model=one.target_folder, output="hf")
    verifier = describe(one, "speculators", verifier="hf")["speculators_config"]["verifier"]
    assert verifier["name_or_path"] == str(tmp_path / "hf")


# Layers that each program takes of the target, by how its loader reads config.json: vLLM 0.32
# (`_get_eagle3_aux_layers_from_config` of its V1 runner, `get_eagle3_aux_layers_from_config` of V2)
# by their inputs, SGLang 0.5.23 (`set_eagle3_layers_to_capture`) and SpecForge 0.2
# (`resolve_eagle_capture_layers`) by their outputs.
USUAL = [2, 4, 5]  # 2, n/2 and n-3 of 8
KEY = "eagle_aux_hidden_state_layer_ids"
READERS: dict[str, Callable[[dict[str, Any]], list[int]]] = {
    "vLLM V1": lambda c: c.get(KEY) or c.get("eagle_config", {}).get(KEY) or USUAL,
    "vLLM V2": lambda c: c.get(KEY) or c.get("eagle_config", {}).get("layer_ids") or USUAL,
    "SGLang": lambda c: [i + 1 for i in c["eagle_config"][KEY]] if "eagle_config" in c else USUAL,
    "SpecForge": lambda c: [i + 1 for i in c.get("eagle_config", {}).get(KEY, [1, 3, 4])],
}


@pytest.mark.parametrize(
    ("form", "reader"),
    [(form, reader) for form in ("specforge", "sglang") for reader in READERS]
    + [("speculators", reader) for reader in ("vLLM V1", "vLLM V2")],
)
@pytest.mark.parametrize("layers", [(2, 4, 5), (1, 3, 7)])
def test_every_engine_reads_the_layers_of_the_draft(layers, form, reader, one) -> None:
    assert READERS[reader](describe(one, form, aux_layers=layers)) == list(layers)


def test_heads_and_keys_of_the_official_layout(one: Golden) -> None:
    config = describe(one, "speculators", layer={"tie_embeddings": True})  # its head is its own
    inner = config["transformer_layer_config"]
    assert config["tie_word_embeddings"] is inner["tie_word_embeddings"] is False
    config = describe(one, "eagle3")
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["tie_word_embeddings"] is False and config["num_hidden_layers"] == 1
    assert not config.keys() & {"bias", "norm_output", "eagle_config", "fc_norm"}
