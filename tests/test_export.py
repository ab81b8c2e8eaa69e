"""Export: what comes out is what came in, and PyTorch's own classes load it."""

import json
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from convert_sources import (
    LAYER_SHAPES,
    PHI3,
    assert_stored,
    draft_tensors,
    draw,
    fuse,
    refusal_of,
    run,
    target_keys,
    target_tensors,
    write_source,
)
from flax.traverse_util import unflatten_dict
from models import assert_same
from safetensors.numpy import load_file
from test_hf_config import LLAMA, TARGETS

from poss_jax.checkpoint.folder import load_item, load_target
from poss_jax.checkpoint.record import new_record, read_record
from poss_jax.checkpoint.torch_io import read_bin
from poss_jax.checkpoint.writing import read_sums, target_identity, verify_model, write_model
from poss_jax.config.models import LlamaConfig, RopeConfig
from poss_jax.config.reading import UserError
from poss_jax.convert.export import plan_export, write_export
from poss_jax.convert.layouts import LAYOUTS, Outgoing
from poss_jax.convert.reading import cut_tensors, slots_by_key
from poss_jax.convert.source import open_source
from poss_jax.model.documents import encode
from poss_jax.model.parameters import flatten_item, item_shapes
from poss_jax.model.target import stack_layers
from poss_jax.shapes import Params

ROOT = Path(__file__).parents[1]


def read_folder(folder: Path):
    """Tensors of an exported folder, and config.json."""
    config = json.loads((folder / "config.json").read_text())
    if (folder / "pytorch_model.bin").exists():
        return read_bin(folder / "pytorch_model.bin"), config
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors, config


def assert_same_model(first: Path, second: Path):
    """Two model folders with the same config and the same bits."""
    one, two = read_record(first), read_record(second)
    ignored = {"provenance": {}, "target": two.target}
    assert replace(one, **ignored) == replace(two, **ignored)
    assert one.weights_sha256 == two.weights_sha256 is not None
    assert one.target.same_weights(two.target)
    verify_model(second)


# --------------------------------------------------------------------------------------------------
# Round trips


@pytest.mark.quick
@pytest.mark.parametrize(
    ("dtype", "form"),
    [
        (jnp.bfloat16, "safetensors"),
        pytest.param(jnp.bfloat16, "bin", marks=pytest.mark.torch),
        pytest.param(np.float16, "bin", marks=pytest.mark.torch),
    ],
)
def test_target_and_draft_come_back_bit_for_bit(tmp_path, dtype, form):
    flags = ["--bin"] if form == "bin" else []
    tensors = target_tensors(dtype)
    source = write_source(tmp_path / "hf", tensors, eos_token_id=[3, 5], bos_token_id=1)
    (source / "tokenizer.json").write_text("{}")
    (source / "generation_config.json").write_text('{"eos_token_id": 7}')
    of_draft = draft_tensors(2, dtype, **{"fc.bias": (8,)})
    of_draft["embed_tokens.weight"] = tensors["model.embed_tokens.weight"]
    write_source(tmp_path / "poss", of_draft, bias=True, rope_theta=1e4)
    spans = {"positions_per_specialist": "1,4", "trained_depth": 7}
    first, again, exported = tmp_path / "first", tmp_path / "again", tmp_path / "exported"
    for sources, models, known in ((tmp_path, first, spans), (exported, again, {})):
        run("target", source=sources / "hf", output=models / "target")
        there = {"target": models / "target"}
        run("draft", source=sources / "poss", output=models / "draft", **there, **known)
        if models == first:
            run("export", *flags, model=first / "target", output=exported / "hf")
            run("export", *flags, model=first / "draft", output=exported / "poss", **there)
    assert_same(read_folder(exported / "hf")[0], tensors)
    assert_same(read_folder(exported / "poss")[0], of_draft)
    for family in ("target", "draft"):
        assert_same_model(first / family, again / family)
    assert (exported / "hf/tokenizer.json").read_text() == "{}"
    assert read_record(again / "target").llama.eos_token_ids == (7,)


def test_shared_keys_and_values_come_back(tmp_path, tiny, two):
    record = read_record(two)
    shared = tmp_path / "shared"
    items = [(name, load_item(two, record, name)) for name in record.items]
    write_model(shared, replace(record, kv="shared"), items, tokenizer_from=None)
    there = {"target": tiny / "target"}
    run("export", model=shared, output=tmp_path / "out", **there)
    run("draft", source=tmp_path / "out", output=tmp_path / "again", **there)
    assert read_record(tmp_path / "again").draft.kv == "shared"
    assert_same_model(shared, tmp_path / "again")
    run("export", model=two, output=tmp_path / "apart", **there)
    assert "kv" not in read_folder(tmp_path / "apart")[1]["poss_jax"]


def draw_items(config: LlamaConfig) -> dict[str, Params]:
    shapes = item_shapes(config)
    return {name: unflatten_dict(draw(flatten_item(item))) for name, item in shapes.items()}


def write_target(folder: Path, config: LlamaConfig, items: dict[str, Params] | None = None) -> Path:
    """A model folder, by default with random weights, made without the converter."""
    items = items or draw_items(config)
    embedding = items["embed"]["weight"]
    head = embedding if config.tie_embeddings else items["head"]["weight"]
    record = new_record(config, target_identity("tiny", None, embedding, head), tokenizer_from=None)
    write_model(folder, record, items.items(), tokenizer_from=None)
    return folder


@pytest.mark.torch
@pytest.mark.parametrize("name", TARGETS)
def test_transformers_loads_an_exported_target(tmp_path, name):
    import torch
    import transformers

    folder = write_target(tmp_path / "target", TARGETS[name])
    run("export", model=folder, output=tmp_path / "hf", format="hf")
    model, loading = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", dtype=torch.float32, output_loading_info=True
    )
    assert not any(loading.values()), loading
    tokens = jnp.asarray([[1, 4, 2, 8, 5, 7]])
    with torch.no_grad():
        want = model(torch.from_numpy(np.array(tokens))).logits.numpy()
    params = load_target(folder)[1]
    features = encode(params | {"layers": stack_layers(params["layers"])}, TARGETS[name], tokens)
    got = features @ params["head"]["weight"].T
    np.testing.assert_allclose(got, want, atol=2e-5, rtol=0)


# --------------------------------------------------------------------------------------------------
# Drafts for the original code


def convert_draft(folder, tiny, num_layers, **extra):
    """Converts a tiny draft; its folder."""
    source = write_source(folder / "source", draft_tensors(num_layers, **extra))
    spans = ",".join("2" * num_layers)
    there = {"target": tiny / "target", "positions_per_specialist": spans}
    run("draft", source=source, output=folder / "draft", **there)
    return folder / "draft"


@pytest.fixture(scope="module")
def two(tmp_path_factory, tiny) -> Path:
    """A draft of two specialists."""
    return convert_draft(tmp_path_factory.mktemp("two"), tiny, 2)


QKV_BIAS = {f"layers.0.self_attn.{n}_proj.bias": (8 if n == "q" else 4,) for n in "qkv"}


@pytest.mark.parametrize(
    ("num_layers", "extra"), [(1, {}), (1, {"fc.bias": (8,), **QKV_BIAS}), (3, {"fc.bias": (8,)})]
)
def test_keys_are_those_the_original_loads_strictly(tmp_path, tiny, num_layers, extra):
    draft = convert_draft(tmp_path, tiny, num_layers, **extra)
    there = {"target": tiny / "target", "output": tmp_path / "out"}
    run("export", model=draft, format="eagle" if num_layers == 1 else "poss", **there)
    tensors, config = read_folder(tmp_path / "out")
    embedding = target_tensors()["model.embed_tokens.weight"]
    assert_same(tensors, draft_tensors(num_layers, **extra) | {"embed_tokens.weight": embedding})
    assert (config["bias"], config["num_hidden_layers"]) == ("fc.bias" in extra, 1)
    assert config.get("qkv_bias", False) == (extra.keys() > QKV_BIAS.keys())


def test_one_specialist_is_an_eagle_draft(tmp_path, tiny, two):
    run("export", model=two, target=tiny / "target", specialist=1, output=tmp_path / "out")
    tensors, _ = read_folder(tmp_path / "out")
    card = (tmp_path / "out/README.md").read_text()
    assert "specialist 1 of a PosS draft" in card and "layout `eagle`" in card
    whole = draft_tensors(2)
    want = {"embed_tokens.weight": target_tensors()["model.embed_tokens.weight"]}
    want |= {"fc.weight": whole["fc.weight"]}
    want |= {f"layers.0.{key}": whole[f"layers.1.{key}"] for key in LAYER_SHAPES}
    assert_same(tensors, want)
    run("draft", source=tmp_path / "out", target=tiny / "target", output=tmp_path / "again")
    config = read_record(tmp_path / "again").draft
    assert (config.positions_per_specialist, config.trained_depth) == ((1,), 4)


@pytest.mark.parametrize("name", ["eagle", "hass", "poss1"])
def test_every_layout_holds_the_drafts_that_come_with_the_package(name):
    record = read_record(ROOT / "poss_jax/bundled/smollm2" / name)
    draft = Outgoing(name, record.draft, record.draft_vocabulary, record, "bfloat16")
    for layout in LAYOUTS:
        if layout.family == "eagle":
            config = layout.describe(draft)
            assert config["hidden_size"] == 576
            # vLLM runs only several specialists as EAGLE-3, which examples/vllm builds on.
            assert ("eagle_config" in config) == (name == "poss1")


def test_the_embedding_takes_the_drafts_type(tmp_path, tiny):
    draft = draft_tensors(dtype=jnp.bfloat16)
    source = write_source(tmp_path / "source", draft)
    run("draft", source=source, target=tiny / "target", output=tmp_path / "draft")
    there = {"target": tiny / "target", "output": tmp_path / "out"}
    run("export", model=tmp_path / "draft", **there)
    tensors, config = read_folder(tmp_path / "out")
    assert {value.dtype for value in tensors.values()} == {np.dtype(jnp.bfloat16)}
    assert config["torch_dtype"] == config["dtype"] == "bfloat16"


# --------------------------------------------------------------------------------------------------
# Files


def test_shards_and_their_index(tmp_path, tiny):
    export = plan_export(tiny / "target")
    write_export(tmp_path / "out", export, export.arrays(), max_shard_bytes=1000)
    shards = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert shards[0] == f"model-00001-of-{len(shards):05}.safetensors" and len(shards) > 3
    assert_same(read_folder(tmp_path / "out")[0], target_tensors())
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(v.nbytes for v in target_tensors().values())
    run("target", source=tmp_path / "out", output=tmp_path / "again")
    assert_same_model(tiny / "target", tmp_path / "again")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert read_sums(tmp_path / "out").keys() == names - {"SHA256SUMS"}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dtype_flag(tmp_path, tiny, dtype, capsys):
    run("export", model=tiny / "target", output=tmp_path / "out", dtype=dtype)
    want = {key: value.astype(jnp.dtype(dtype)) for key, value in target_tensors().items()}
    tensors, config = read_folder(tmp_path / "out")
    assert_same(tensors, want)
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert config["dtype"] == summary["dtype"] == dtype


def test_numbers_that_a_type_cannot_hold(tmp_path):
    tensors = target_tensors() | {"lm_head.weight": np.full((16, 8), 1e6, np.float32)}
    run("target", source=write_source(tmp_path / "s", tensors), output=tmp_path / "target")
    with pytest.raises(UserError, match=r"lm_head\.weight holds numbers beyond float16"):
        run("export", model=tmp_path / "target", output=tmp_path / "out", dtype="float16")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s", "target"]


# --------------------------------------------------------------------------------------------------
# Refusals


@pytest.mark.parametrize(
    ("model", "flags", "message"),
    [
        ("draft", {}, "parts of their target, such as its embedding; give its folder: --target"),
        ("draft", {"format": "hf"}, "want --format poss for all 2 specialists, got --format hf"),
        ("draft", {"format": "eagle", "target": "target"}, "--specialist 0 to 1 writes one"),
        ("draft", {"specialist": 2, "target": "target"}, "specialist 2 does not exist"),
        ("draft", {"specialist": 1, "format": "poss", "target": "target"}, "want --format eagle"),
        ("draft", {"target": "draft"}, "want the target source .* got draft source"),
        ("draft", {"target": "other"}, "want the target source .* with another embedding or head"),
        ("target", {"target": "target"}, "--target, --specialist and --verifier are for drafts"),
        ("target", {"format": "poss", "target": "target"}, "is a target; give --format hf"),
        ("source", {}, "not a model folder of poss_jax"),
    ],
)
def test_refusals(tmp_path, tiny, two, model, flags, message):
    folders = {"target": tiny / "target", "source": tiny / "source", "draft": two}
    if "other" in flags.values():
        folders["other"] = write_target(tmp_path / "other", LLAMA)
    flags = {key: folders.get(value, value) for key, value in flags.items()}
    with pytest.raises(UserError, match=message):
        run("export", model=folders[model], output=tmp_path / "out", **flags)
    assert not (tmp_path / "out").exists()


# --------------------------------------------------------------------------------------------------
# Phi-3: fused projections come apart and together again, and drafts have separate ones

QKV, GATE_UP = "self_attn.qkv_proj.weight", "mlp.gate_up_proj.weight"


def test_fused_projections_come_apart_and_together(tmp_path, capsys):
    tensors = target_tensors(jnp.bfloat16)
    source = write_source(tmp_path / "source", fuse(tensors), **PHI3)
    run("target", source=source, output=tmp_path / "target")
    printed = " ".join(capsys.readouterr().out.split())
    for rows, path in (("[0:8]", "q"), ("[8:12]", "k"), ("[12:16]", "v")):
        key = f"model.layers.{{0..1}}.{QKV}{rows}"
        assert f"{key} -> layers/{{0..1}}/attention/{path}/weight" in printed
    record, params = load_target(tmp_path / "target")
    assert_stored(params, target_keys(2), tensors)
    config = record.llama
    assert config.fused_projections and config.max_position_embeddings == 128
    factors = {"short_factor": (1.0, 1.25), "long_factor": (2.0, 24.5)}
    trained = {"factor": 8.0, "original_max_position_embeddings": 16}
    assert config.rope == RopeConfig(type="longrope", **trained, **factors)
    run("export", model=tmp_path / "target", output=tmp_path / "out")
    exported, values = read_folder(tmp_path / "out")
    assert_same(exported, fuse(tensors))
    assert (values["model_type"], values["architectures"]) == ("phi3", ["Phi3ForCausalLM"])
    run("target", source=tmp_path / "out", output=tmp_path / "again")
    assert_same_model(tmp_path / "target", tmp_path / "again")
    # Drafts hold them apart with any name in config.json; an export gives the same draft again.
    source, there = write_source(tmp_path / "d", draft_tensors(), **PHI3), tmp_path / "target"
    for name in ("first", "second"):
        run("draft", source=source, target=there, output=tmp_path / name)
        source = tmp_path / f"export of {name}"
        run("export", model=tmp_path / name, target=there, output=source)
    layer = read_record(tmp_path / "first").draft.layer
    assert layer.rope == config.rope and not layer.fused_projections
    assert_same_model(tmp_path / "first", tmp_path / "second")


def test_fused_parts_are_mapped_not_copied(tmp_path):
    source = write_source(tmp_path, fuse(target_tensors()), **PHI3)
    config = replace(TARGETS["phi3"], head_dim=4)
    tensors = cut_tensors(open_source(str(source)).tensors, slots_by_key(config))
    part = tensors[f"model.layers.0.{QKV}[8:12]"]
    assert part.shape == part.read().shape == (4, 8)
    assert isinstance(part.read(), np.memmap)


def test_wrong_fused_keys_are_listed_by_the_names_of_the_files(tmp_path):
    tensors = fuse(target_tensors())
    del tensors[f"model.layers.0.{QKV}"]
    tensors["model.layers.0.self_attn.q_proj.weight"] = np.zeros((8, 8), np.float32)
    tensors[f"model.layers.1.{GATE_UP}"] = np.zeros((20, 8), np.float32)
    message = refusal_of(write_source(tmp_path / "source", tensors, **PHI3))
    assert f"missing model.layers.0.{QKV} [16, 8]" in message
    assert "unknown model.layers.0.self_attn.q_proj.weight [8, 8]" in message
    assert f"model.layers.1.{GATE_UP} want [24, 8] got [20, 8]" in message


def test_fused_parts_of_several_types_are_joined_without_rounding(tmp_path):
    items = draw_items(TARGETS["phi3"])
    q = items["layers/1"]["attention"]["q"]
    q["weight"] = q["weight"].astype(jnp.bfloat16)
    write_target(tmp_path / "target", TARGETS["phi3"], items)
    exported = dict(plan_export(tmp_path / "target").arrays())
    parts = (items["layers/1"]["attention"][name]["weight"] for name in "qkv")
    want = np.concatenate([np.asarray(part, np.float32) for part in parts])
    np.testing.assert_array_equal(exported[f"model.layers.1.{QKV}"], want)
