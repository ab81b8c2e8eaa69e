"""The model folder: what it holds, that it comes back bit for bit, and what is refused."""

import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from models import IDENTITY, assert_same, tiny_llama

from poss_jax.checkpoint.folder import load_draft, load_target, read_draft
from poss_jax.checkpoint.record import new_record, provenance, read_record, tokenizer_hashes
from poss_jax.checkpoint.writing import target_identity, write_model
from poss_jax.config.models import DraftConfig, RopeConfig
from poss_jax.config.reading import UserError
from poss_jax.model.parameters import (
    count_parameters,
    flatten_item,
    item_shapes,
    join_items,
    split_items,
)

SHAPE = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 12, "head_dim": 6}
SHAPE |= {"num_heads": 2, "num_kv_heads": 1}
MORE = dict.fromkeys(("qkv_bias", "o_bias", "qk_norm", "mlp_bias"), True)
ROPE = RopeConfig(type="llama3", theta=5e5, factor=8.0, low_freq_factor=1.5)
TARGET = tiny_llama(**SHAPE, **MORE, rope=ROPE, eos_token_ids=(3, 5))
DRAFT = DraftConfig(
    layer=replace(TARGET, **dict.fromkeys(MORE, False)),
    positions_per_specialist=(1, 3),
    trained_depth=4,
    fc_bias=True,
)


def random_params(config, dtype=np.float32, seed=0):
    """Params of a model, with a distinct value in every place."""
    rng = np.random.default_rng(seed)

    def draw(shape):
        return rng.standard_normal(shape, dtype=np.float32).astype(dtype)

    items = item_shapes(config)
    is_shape = lambda x: isinstance(x, tuple)  # noqa: E731
    return join_items((k, jax.tree.map(draw, v, is_leaf=is_shape)) for k, v in items.items())


def save(folder, config, params, tokenizer_from=None, identity=IDENTITY):
    record = new_record(config, identity, tokenizer_from=tokenizer_from)
    items = split_items(config, params)
    return write_model(folder, record, items, tokenizer_from=tokenizer_from)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A target and a draft for it; tests copy what they change."""
    folder = tmp_path_factory.mktemp("saved")
    save(folder / "target", TARGET, random_params(TARGET))
    save(folder / "draft", DRAFT, random_params(DRAFT))
    return folder


def paths(shapes) -> dict[str, tuple[int, ...]]:
    return {
        "/".join((item, *path)): shape
        for item, tree in shapes.items()
        for path, shape in flatten_item(tree).items()
    }


# Public: other readers of our folders rely on these. Changing one means a new format version.
LAYER = {
    "attention/q/weight": (12, 8),
    "attention/q/bias": (12,),
    "attention/k/weight": (6, 8),
    "attention/k/bias": (6,),
    "attention/v/weight": (6, 8),
    "attention/v/bias": (6,),
    "attention/o/weight": (8, 12),
    "attention/o/bias": (8,),
    "attention/q_norm/scale": (6,),
    "attention/k_norm/scale": (6,),
    "mlp_norm/scale": (8,),
    "mlp/gate/weight": (12, 8),
    "mlp/gate/bias": (12,),
    "mlp/up/weight": (12, 8),
    "mlp/up/bias": (12,),
    "mlp/down/weight": (8, 12),
    "mlp/down/bias": (8,),
}


def test_target_paths_are_stable():
    want = {"embed/weight": (16, 8), "norm/scale": (8,), "head/weight": (16, 8)}
    for index in range(2):
        want[f"layers/{index}/input_norm/scale"] = (8,)
        want |= {f"layers/{index}/{path}": shape for path, shape in LAYER.items()}
    assert paths(item_shapes(TARGET)) == want
    assert list(item_shapes(TARGET)) == ["embed", "layers/0", "layers/1", "norm", "head"]


def test_draft_paths_are_stable():
    want = {"fc/weight": (8, 16), "fc/bias": (8,)}
    for index in range(2):
        plain = {
            k: v
            for k, v in LAYER.items()
            if not k.endswith(("bias", "q_norm/scale", "k_norm/scale"))
        }
        want |= {f"specialists/{index}/{path}": shape for path, shape in plain.items()}
    assert paths(item_shapes(DRAFT)) == want
    assert "bias" not in item_shapes(replace(DRAFT, fc_bias=False))["fc"]


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.float16])
def test_target_comes_back_bit_for_bit(tmp_path, dtype):
    params = random_params(TARGET, dtype)
    record = save(tmp_path / "model", TARGET, params)
    got_record, got = load_target(tmp_path / "model")
    assert got_record == record
    assert_same(got, params)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(got))


def half_of_the_first_axis(path, shape):
    """The first axis over two devices; a single norm of all lies on one device."""
    if path == "norm/scale":
        return jax.sharding.SingleDeviceSharding(jax.devices()[3])
    mesh = jax.make_mesh((2, 4), ("x", "y"))
    spec = jax.sharding.PartitionSpec("x") if len(shape) == 2 else jax.sharding.PartitionSpec()
    return jax.sharding.NamedSharding(mesh, spec)


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
def test_each_device_gets_its_part(saved, dtype):
    _, whole = load_target(saved / "target")
    _, parts = load_target(saved / "target", dtype, sharding=half_of_the_first_axis)
    seen = {}
    for (item, tree), (_, want) in zip(
        split_items(TARGET, parts), split_items(TARGET, whole), strict=True
    ):
        for path, array in flatten_item(tree).items():
            stored = flatten_item(want)[path]
            name = "/".join((item, *path))
            seen[name] = array.sharding
            assert array.sharding == half_of_the_first_axis(name, array.shape)
            assert array.dtype == (dtype or stored.dtype)
            np.testing.assert_array_equal(np.asarray(array), np.asarray(stored.astype(array.dtype)))
            rows = len(array) // 2 if array.ndim == 2 else len(array)
            assert {shard.data.shape[0] for shard in array.addressable_shards} == {rows}
    assert seen.keys() == paths(item_shapes(TARGET)).keys()
    assert len(seen["norm/scale"].device_set) == 1


def test_arrays_that_cannot_be_cut_as_wanted(saved):
    mesh = jax.make_mesh((8,), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    with pytest.raises(UserError, match=r"layers/0/.* \[.*\] cannot be sharded"):
        load_target(saved / "target", sharding=sharding)


def test_draft_comes_back_bit_for_bit(saved):
    record, params = load_draft(saved / "draft", target=read_record(saved / "target"))
    assert (record.method, record.kv) == ("poss13", "per_specialist")
    assert record.config == DRAFT
    assert_same(params, random_params(DRAFT))


def test_arrays_of_devices_are_written_like_numpy_arrays(tmp_path):
    params = random_params(TARGET)
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    save(tmp_path / "model", TARGET, jax.device_put(params, everywhere))
    assert not list((tmp_path / "model").rglob("_sharding"))
    assert_same(load_target(tmp_path / "model")[1], params)


def test_tied_head_is_the_embeddings_own_array(tmp_path):
    config = replace(TARGET, tie_embeddings=True)
    save(tmp_path / "model", config, random_params(config))
    _, params = load_target(tmp_path / "model")
    assert "head" not in item_shapes(config)
    assert params["head"]["weight"] is params["embed"]["weight"]
    assert count_parameters(TARGET) - count_parameters(config) == 16 * 8


def test_items_are_plain_orbax(saved):
    item = ocp.PyTreeCheckpointer().restore((saved / "target/weights/layers/1").resolve())
    assert_same(item, random_params(TARGET)["layers"][1])


def test_record_says_where_the_model_came_from(saved):
    values = json.loads((saved / "target/model.json").read_text())
    assert values["format_version"] == 1
    assert values["target"]["name"] == "tiny"
    keys = {"command", "versions", "git_sha", "device_kind", "int8_products"}
    assert set(values["provenance"]) == keys
    assert set(values["provenance"]["versions"]) >= {"python", "jax", "flax", "poss_jax"}


def test_the_command_of_a_record_names_no_folder_of_programs(monkeypatch) -> None:
    for given, kept in (
        (["/home/me/venv/bin/python", "-m", "train.main"], ["python", "-m", "train.main"]),
        (
            ["/usr/bin/python3", "/usr/bin/poss-train", "/data/a"],
            ["python3", "poss-train", "/data/a"],
        ),
        ([".venv/bin/python", "examples/a.py"], [".venv/bin/python", "examples/a.py"]),
    ):
        monkeypatch.setattr(sys, "orig_argv", given)
        assert provenance()["command"] == kept


# --------------------------------------------------------------------------------------------------
# Identity and tokenizer


def test_identity_covers_values_and_shape():
    embed, head = np.ones((4, 2), np.float32), np.zeros((4, 2), np.float32)
    base = target_identity("a", None, embed, head)
    assert base.same_weights(target_identity("b", "main", embed, head))
    assert base.same_weights(target_identity("b", None, jnp.asarray(embed), head))
    assert not base.same_weights(target_identity("a", None, head, head))
    assert not base.same_weights(target_identity("a", None, embed.reshape(2, 4), head))


def test_tokenizer_files_travel_with_their_hashes(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    (source / "tokenizer.json").write_text("{}")
    (source / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    (source / "unrelated.txt").write_text("stays")
    record = save(tmp_path / "model", TARGET, random_params(TARGET), tokenizer_from=source)
    names = {path.name for path in (tmp_path / "model").iterdir()}
    assert names == {*"model.json weights tokenizer.json tokenizer_config.json SHA256SUMS".split()}
    assert record.tokenizer_sha256 and record.chat_template_sha256
    # The same template in its own file has the same hash, and another one has not.
    (source / "chat_template.jinja").write_text("{{ messages }}")
    assert tokenizer_hashes(source) == (record.tokenizer_sha256, record.chat_template_sha256)
    (source / "chat_template.jinja").write_text("{{ other }}")
    assert tokenizer_hashes(source)[1] != record.chat_template_sha256
    assert tokenizer_hashes(tmp_path / "model") != tokenizer_hashes(tmp_path) == (None, None)
    (tmp_path / "tokenizer.model").write_bytes(b"sentencepiece")
    assert tokenizer_hashes(tmp_path)[0] is not None


# --------------------------------------------------------------------------------------------------
# Refusals


def change_record(folder: Path, *, config=None, **values) -> None:
    path = folder / "model.json"
    record = json.loads(path.read_text()) | values
    record["config"] |= config or {}
    path.write_text(json.dumps(record))


@pytest.fixture
def copy(saved, tmp_path) -> Path:
    return shutil.copytree(saved, tmp_path / "copy")


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("model.json", None, r"holds no model\.json.*convert it first"),
        (".", None, "target does not exist"),
        ("weights/layers/1", None, "no weights item layers/1"),
        *(("model.json", text, r"model\.json") for text in ("", "{", "[]", "\xff")),
    ],
)
def test_damaged_folders(copy, file, content, message):
    path = copy / "target" / file
    if content is None:
        path.unlink() if path.is_file() else shutil.rmtree(path)
    else:
        path.write_text(content, encoding="latin-1")
    with pytest.raises(UserError, match=message):
        load_target(copy / "target")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        *(
            ({"format_version": version, "something_new": 1}, "want format_version 1, got")
            for version in (0, 2, "1", None)
        ),
        *(({key: "draft"}, r"model\.json: ") for key in ("extra", "family", "kv")),
        ({"config": {"intermediate_size": 24}}, r"down/weight want \(8, 24\) got \(8, 12\)"),
    ],
)
def test_records_that_are_refused(copy, values, message):
    change_record(copy / "target", **values)
    with pytest.raises(UserError, match=message):
        load_target(copy / "target")


def test_wrong_family(saved):
    target = read_record(saved / "target")
    with pytest.raises(UserError, match="want a target, got a draft"):
        load_target(saved / "draft")
    with pytest.raises(UserError, match="want a draft, got a target"):
        load_draft(saved / "target", target=target)
    with pytest.raises(UserError, match="want a target to draft for"):
        load_draft(saved / "draft", target=read_record(saved / "draft"))


@pytest.mark.parametrize("field", ["hidden_size", "vocab_size"])
def test_draft_that_does_not_fit_is_always_refused(saved, field):
    record = read_record(saved / "target")
    other = replace(record, config=replace(TARGET, **{field: 32}))
    with pytest.raises(UserError, match=f"want {field} 32, got"):
        load_draft(saved / "draft", target=other, allow_target_mismatch=True)


def test_a_draft_that_reads_layers_the_target_lacks_is_always_refused(copy):
    target = read_record(copy / "target")
    change_record(copy / "draft", config={"aux_layers": [0, 1]})
    assert read_draft(copy / "draft", target=target).draft.aux_layers == (0, 1)
    pruned = replace(target, config=replace(TARGET, num_layers=1))
    with pytest.raises(UserError, match=r"layers \[0, 1\], from 0, the target tiny has 1; use"):
        read_draft(copy / "draft", target=pruned, allow_target_mismatch=True)


def test_draft_of_another_target_needs_permission(saved):
    record = read_record(saved / "target")
    other = replace(record, target=replace(IDENTITY, name="other", head_sha256="x"))
    with pytest.raises(UserError, match="made for tiny, got the target other"):
        load_draft(saved / "draft", target=other)
    load_draft(saved / "draft", target=other, allow_target_mismatch=True)


# --------------------------------------------------------------------------------------------------
# All or nothing


def test_non_empty_output_is_left_alone(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/keep.txt").write_text("mine")
    with pytest.raises(UserError, match="not empty"):
        save(tmp_path / "model", TARGET, random_params(TARGET))
    assert [path.name for path in tmp_path.rglob("*")] == ["model", "keep.txt"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, OSError])
def test_interrupted_write_leaves_nothing(tmp_path, error):
    def items() -> Iterator:
        all_items = split_items(TARGET, random_params(TARGET))
        yield next(all_items)
        yield next(all_items)
        raise error("stop")

    record = new_record(TARGET, IDENTITY, tokenizer_from=None)
    with pytest.raises(UserError if error is OSError else error, match="stop"):
        write_model(tmp_path / "model", record, items(), tokenizer_from=None)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("change", ["absent", "unknown", "misshapen"])
def test_items_are_checked_before_they_are_written(tmp_path, change):
    items = dict(split_items(TARGET, random_params(TARGET)))
    if change == "absent":
        del items["layers/1"]
    elif change == "unknown":
        items["layers/2"] = items["layers/1"]
    else:
        items["norm"] = {"scale": np.ones(9, np.float32)}
    record = new_record(TARGET, IDENTITY, tokenizer_from=None)
    with pytest.raises(UserError, match="layers/1" if change == "absent" else "does not fit"):
        write_model(tmp_path / "model", record, items.items(), tokenizer_from=None)
    assert list(tmp_path.iterdir()) == []
