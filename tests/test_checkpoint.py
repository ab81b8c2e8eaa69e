"""The model folder: what it holds, that it comes back bit for bit, checksums, what is refused."""

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from convert_sources import convert_tiny
from etils import epath
from models import IDENTITY, assert_same, random_target, tiny_llama

from poss_jax.checkpoint import folder as folder_module
from poss_jax.checkpoint.folder import load_draft, load_item, load_target, read_draft
from poss_jax.checkpoint.record import new_record, provenance, read_record, tokenizer_hashes
from poss_jax.checkpoint.writing import (
    hash_item,
    hash_values,
    target_identity,
    verify_model,
    write_model,
)
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


def paths(items) -> dict[str, Any]:
    """Leaves by their path."""
    return {
        "/".join((item, *path)): leaf
        for item, tree in items.items()
        for path, leaf in flatten_item(tree).items()
    }


def test_paths_are_stable():
    """Other readers of our folders rely on them; `test_format_v1.py` holds the usual ones."""
    layer = paths({"": item_shapes(TARGET)["layers/1"]})
    assert (
        len(layer) == 18
        and layer.items()
        > {
            "/attention/o/bias": (8,),
            "/attention/q_norm/scale": (6,),
            "/attention/k_norm/scale": (6,),
            "/mlp/gate/bias": (12,),
            "/mlp/up/bias": (12,),
            "/mlp/down/bias": (8,),
        }.items()
    )
    assert list(item_shapes(TARGET)) == ["embed", "layers/0", "layers/1", "norm", "head"]
    assert "bias" not in item_shapes(replace(DRAFT, fc_bias=False))["fc"]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float16])
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
    assert_same(parts, jax.tree.map(lambda leaf: leaf.astype(dtype or leaf.dtype), whole))
    arrays = paths(dict(split_items(TARGET, parts)))
    assert arrays.keys() == paths(item_shapes(TARGET)).keys()
    for name, array in arrays.items():
        assert array.sharding == half_of_the_first_axis(name, array.shape)
        rows = len(array) // 2 if array.ndim == 2 else len(array)
        assert {shard.data.shape[0] for shard in array.addressable_shards} == {rows}
    assert len(arrays["norm/scale"].sharding.device_set) == 1


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


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("/home/me/venv/bin/python -m train.main", "python -m train.main"),
        ("/usr/bin/python3 /usr/bin/poss-train /data/a", "python3 poss-train /data/a"),
        (".venv/bin/python examples/a.py", ".venv/bin/python examples/a.py"),
    ],
)
def test_the_command_of_a_record_names_no_folder_of_programs(monkeypatch, given, kept) -> None:
    monkeypatch.setattr(sys, "orig_argv", given.split())
    assert provenance()["command"] == kept.split()


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


# --------------------------------------------------------------------------------------------------
# Checksums: what they cover, and that damage anywhere is found


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("integrity")
    (folder / "source").mkdir()
    (folder / "source/tokenizer.json").write_text('{"version": "1.0"}')
    (folder / "source/generation_config.json").write_text("{}")
    return convert_tiny(folder) / "target"


def test_one_target_in_every_stored_type_has_one_hash():
    values = np.random.default_rng(0).standard_normal((5, 7)).astype(np.float32)
    cast = values.astype(jnp.bfloat16)
    assert (cast.astype(np.float32) != values).any()
    want = hash_values(values)
    assert hash_values(cast) == hash_values(cast.astype(np.float32)) == want
    assert hash_values(values.T) != want
    other = cast.copy()
    other[4, 6] = 9
    assert hash_values(other) != want


def test_hash_is_of_shape_and_bfloat16_bytes():
    values = np.array([[1.0, -2.0, 3.0]], np.float32)
    plain = hashlib.sha256(b"bfloat16 (1, 3)" + values.astype(jnp.bfloat16).tobytes())
    assert hash_values(values) == plain.hexdigest()


@pytest.mark.parametrize("change", ["path", "dtype", "shape", "bytes"])
def test_item_hash_covers(change):
    item = {"q": {"weight": np.arange(6, dtype=np.float32).reshape(2, 3)}}
    weight = item["q"]["weight"]
    other = {
        "path": {"k": {"weight": weight}},
        "dtype": {"q": {"weight": weight.view(np.int32)}},
        "shape": {"q": {"weight": weight.reshape(3, 2)}},
        "bytes": {"q": {"weight": weight + np.float32(1)}},
    }[change]
    assert hash_item(other) != hash_item(item) == hash_item({"q": {"weight": weight.copy()}})


def test_intact_folder(model):
    record = verify_model(model)
    assert record == read_record(model)
    embed = load_item(model, record, "embed")
    assert record.weights_sha256 is not None
    assert record.weights_sha256["embed"] == hash_item(embed)
    assert list(record.weights_sha256) == ["embed", "layers/0", "layers/1", "norm", "head"]


def test_too_little_memory_is_not_damage(model, monkeypatch):
    error = RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 16 bytes")
    monkeypatch.setattr(folder_module, "_begin_read", MagicMock(side_effect=error))
    with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED"):
        load_item(model, read_record(model), "embed")


def test_unreadable_uri_names_network_and_credentials():
    with (
        pytest.raises(UserError, match=r"b/embed cannot be read \(gone\); check network and cred"),
        folder_module._explained(epath.Path("gs://b/embed")),
    ):
        raise ValueError("gone")


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="needs sha256sum")
def test_sha256sum_reads_them(model):
    subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=model, check=True)


def lengthen(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text((folder / name).read_text() + "\n")


def write_line_of_sums(line: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "SHA256SUMS").write_text(line + "\n")


def exchange_layers(folder: Path) -> None:
    shutil.rmtree(folder / "weights/layers/0")
    shutil.copytree(folder / "weights/layers/1", folder / "weights/layers/0")


def drop_hashes_of_weights(folder: Path) -> None:
    values = json.loads((folder / "model.json").read_text())
    del values["weights_sha256"]
    (folder / "model.json").write_text(json.dumps(values))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lengthen("model.json"), r"model\.json: SHA256SUMS says"),
        (lengthen("generation_config.json"), r"generation_config\.json: SHA256SUMS says"),
        (exchange_layers, "weights of item layers/0 are not those"),
        (lambda folder: (folder / "SHA256SUMS").unlink(), "has no complete checksums"),
        (drop_hashes_of_weights, "has no complete checksums"),
        (write_line_of_sums("abc  model.json"), "SHA256SUMS: line 1: want"),
    ],
)
def test_change_that_only_verifying_finds(model, tmp_path, change, message):
    copy = shutil.copytree(model, tmp_path / "copy")
    change(copy)
    load_target(copy)
    with pytest.raises(UserError, match=message):
        verify_model(copy)


@pytest.mark.parametrize("damage", ["cut", "flip"])
def test_damage_to_a_large_array(tmp_path, damage, capfd):
    """Beyond 1 KiB, Orbax keeps arrays in files without checksums; ours cover them."""
    config = tiny_llama(tie_embeddings=True)
    params = random_target(config)
    identity = target_identity("tiny", None, *(params["embed"]["weight"],) * 2)
    record = new_record(config, identity, tokenizer_from=None)
    write_model(tmp_path / "m", record, split_items(config, params), tokenizer_from=None)
    files = [path for path in (tmp_path / "m/weights/embed").rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    half = len(content) // 2
    content[half] ^= 1
    largest.write_bytes(content[:half] if damage == "cut" else content)
    if damage == "flip":
        load_target(tmp_path / "m")
    message = "embed cannot be read" if damage == "cut" else "weights of item embed are not those"
    with pytest.raises(UserError, match=message) as error:
        verify_model(tmp_path / "m")
    assert len(str(error.value)) < 400
    assert capfd.readouterr().err == ""
