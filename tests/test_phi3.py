"""Phi-3: fused projections come apart and together again, and drafts have separate ones."""

from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from convert_sources import (
    PHI3,
    assert_stored,
    draft_tensors,
    draw,
    fuse,
    run,
    target_keys,
    target_tensors,
    write_shards,
    write_source,
)
from flax.traverse_util import unflatten_dict
from test_export import assert_same, assert_same_model, read_folder
from test_hf_config import TARGETS

from poss_jax.checkpoint.folder import load_target
from poss_jax.checkpoint.record import new_record, read_record
from poss_jax.checkpoint.writing import target_identity, write_model
from poss_jax.config.models import RopeConfig
from poss_jax.config.reading import UserError
from poss_jax.convert.export import plan_export
from poss_jax.convert.source import open_source
from poss_jax.convert.tensors import cut_tensors, slots_by_key
from poss_jax.model.parameters import flatten_item, item_shapes

QKV, GATE_UP = "self_attn.qkv_proj.weight", "mlp.gate_up_proj.weight"


def convert(folder: Path, tensors, *, sharded: bool = False) -> Path:
    source = write_source(folder / "source", tensors, **PHI3)
    if sharded:
        write_shards(source, tensors)
    run("target", source=source, output=folder / "target")
    return folder / "target"


@pytest.fixture(scope="module")
def phi3(tmp_path_factory) -> Path:
    return convert(tmp_path_factory.mktemp("phi3"), fuse(target_tensors()))


@pytest.mark.parametrize("sharded", [False, True], ids=["one_file", "shards"])
def test_parts_arrive_where_they_belong(tmp_path, capsys, sharded):
    tensors = target_tensors()
    record, params = load_target(convert(tmp_path, fuse(tensors), sharded=sharded))
    assert_stored(params, target_keys(2), tensors)
    config = record.llama
    assert config.fused_projections and config.max_position_embeddings == 128
    assert config.rope == RopeConfig(
        type="longrope",
        factor=8.0,
        original_max_position_embeddings=16,
        short_factor=(1.0, 1.25),
        long_factor=(2.0, 24.5),
    )
    printed = " ".join(capsys.readouterr().out.split())
    for rows, path in (("[0:8]", "q"), ("[8:12]", "k"), ("[12:16]", "v")):
        key = f"model.layers.{{0..1}}.{QKV}{rows}"
        assert f"{key} -> layers/{{0..1}}/attention/{path}/weight" in printed


def test_parts_are_mapped_not_copied(tmp_path):
    source = write_source(tmp_path, fuse(target_tensors()), **PHI3)
    config = replace(TARGETS["phi3"], head_dim=4)
    tensors = cut_tensors(open_source(str(source)).tensors, slots_by_key(config))
    part = tensors[f"model.layers.0.{QKV}[8:12]"]
    assert part.shape == part.read().shape == (4, 8)
    assert isinstance(part.read(), np.memmap)


def test_wrong_keys_are_listed_by_the_names_of_the_files(tmp_path):
    tensors = fuse(target_tensors())
    del tensors[f"model.layers.0.{QKV}"]
    tensors["model.layers.0.self_attn.q_proj.weight"] = np.zeros((8, 8), np.float32)
    tensors[f"model.layers.1.{GATE_UP}"] = np.zeros((20, 8), np.float32)
    with pytest.raises(UserError) as error:
        convert(tmp_path, tensors)
    message = str(error.value)
    assert f"missing model.layers.0.{QKV} [16, 8]" in message
    assert "unknown model.layers.0.self_attn.q_proj.weight [8, 8]" in message
    assert f"model.layers.1.{GATE_UP} want [24, 8] got [20, 8]" in message
    assert not (tmp_path / "target").exists()


def test_fused_tensors_of_another_family_are_unknown(tmp_path):
    source = write_source(tmp_path / "source", fuse(target_tensors()))
    with pytest.raises(UserError, match=rf"missing .*q_proj.*unknown model\.layers\.0\.{QKV}"):
        run("target", source=source, output=tmp_path / "out")


@pytest.mark.parametrize("dtype", [np.float32, np.float16, jnp.bfloat16])
def test_it_comes_back_bit_for_bit(tmp_path, dtype):
    tensors = fuse(target_tensors(dtype))
    target = convert(tmp_path, tensors)
    run("export", model=target, output=tmp_path / "out")
    exported, config = read_folder(tmp_path / "out")
    assert_same(exported, tensors)
    assert (config["model_type"], config["architectures"]) == ("phi3", ["Phi3ForCausalLM"])
    run("target", source=tmp_path / "out", output=tmp_path / "again")
    assert_same_model(target, tmp_path / "again")


def test_parts_of_several_types_are_joined_without_rounding(tmp_path):
    config = TARGETS["phi3"]
    flat = {name: draw(flatten_item(shapes)) for name, shapes in item_shapes(config).items()}
    items = {name: unflatten_dict(arrays) for name, arrays in flat.items()}
    q = items["layers/1"]["attention"]["q"]
    q["weight"] = q["weight"].astype(jnp.bfloat16)
    embedding, head = (items[name]["weight"] for name in ("embed", "head"))
    record = new_record(config, target_identity("tiny", None, embedding, head), tokenizer_from=None)
    write_model(tmp_path / "target", record, items.items(), tokenizer_from=None)
    exported = dict(plan_export(tmp_path / "target").arrays())
    parts = (items["layers/1"]["attention"][name]["weight"] for name in "qkv")
    want = np.concatenate([np.asarray(part, np.float32) for part in parts])
    np.testing.assert_array_equal(exported[f"model.layers.1.{QKV}"], want)


def test_drafts_hold_their_projections_apart(phi3, tmp_path):
    """With any name in config.json; an export gives the same draft again."""
    source = write_source(tmp_path / "source", draft_tensors(), **PHI3)
    for name in ("first", "second"):
        run("draft", source=source, target=phi3, output=tmp_path / name)
        source = tmp_path / f"export of {name}"
        run("export", model=tmp_path / name, target=phi3, output=source)
    layer = read_record(tmp_path / "first").draft.layer
    assert layer.rope == read_record(phi3).llama.rope and not layer.fused_projections
    assert_same_model(tmp_path / "first", tmp_path / "second")
