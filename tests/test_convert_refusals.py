"""Sources that cannot be converted: one clear line, the same from inspect, nothing left behind."""

import json
import os
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from convert_sources import (
    TINY,
    WEIGHTS,
    damages,
    draft_tensors,
    draw,
    fuse,
    refusal_of,
    run,
    save_bin,
    target_tensors,
    write_shards,
    write_source,
)
from flax.traverse_util import flatten_dict
from programs import refusal
from safetensors.numpy import load_file, save_file

from poss_jax.checkpoint import torch_io, writing
from poss_jax.checkpoint.record import read_record
from poss_jax.checkpoint.writing import copy_tokenizer, write_sums
from poss_jax.config.json_reading import MAX_BYTES
from poss_jax.config.models import DraftConfig
from poss_jax.config.reading import UserError
from poss_jax.convert.__main__ import main
from poss_jax.convert.hf import parse_llama_config
from poss_jax.convert.plan import inspect, is_finite, plan_draft, plan_target
from poss_jax.convert.reading import slots_by_key
from poss_jax.convert.source import open_tensors
from poss_jax.data.tokenizer import load_tokenizer

KEY = "model.layers.1.mlp.up_proj.weight"
INDEX = f"{WEIGHTS}.index.json"
SHARDS = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]

# --------------------------------------------------------------------------------------------------
# Changes of a source

Change = Callable[[Path], object]


def written(name: str, content: str | bytes) -> Change:
    content = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / name).write_bytes(content)


def removed(name: str) -> Change:
    return lambda folder: (folder / name).unlink()


def config(**values: Any) -> Change:
    """Keys of config.json."""
    return lambda folder: [setting(key, json.dumps(values[key]))(folder) for key in values]


def setting(key: str, text: str, name: str = "config.json") -> Change:
    """A file's value of a key, as JSON text."""

    def change(folder: Path) -> None:
        path = folder / name
        values = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(values | {key: "HERE"}).replace('"HERE"', text))

    return change


def added(*keys: str, shape: tuple[int, ...] = (8, 8), dtype: Any = np.float32) -> Change:
    """Weights that are added, or that take the place of others."""

    def change(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS) | draw(dict.fromkeys(keys, shape), dtype)
        save_file(tensors, folder / WEIGHTS)

    return change


def only(tensors: dict[str, np.ndarray]) -> Change:
    """Other weights."""
    return lambda folder: save_file(tensors, folder / WEIGHTS)


def holding(value: float, dtype: Any = np.float32) -> Change:
    """A target with one weight that is no number."""
    tensors = target_tensors(dtype)
    tensors[KEY][3, 2] = value
    return only(tensors)


def doubled(name: str, key: str) -> Change:
    """A JSON file, or a header, that has a key and its value twice."""

    def change(folder: Path) -> None:
        content, pattern = (
            (folder / name).read_bytes(),
            rf'"{re.escape(key)}":\s*(\{{.*?\}}|[^,}}]*)',
        )
        entry = next(re.finditer(pattern.encode(), content))[0]
        content = content.replace(entry, entry + b"," + entry, 1)
        if name == WEIGHTS:
            size = int.from_bytes(content[:8], "little") + len(entry) + 1
            content = struct.pack("<Q", size) + content[8:]
        (folder / name).write_bytes(content)

    return change


def linked(name: str, *, hops: int = 1) -> Change:
    """A file that lies beside the source, behind a link, or a link to a link."""

    def change(folder: Path) -> None:
        outside = folder.parent / "secret"
        if (folder / name).exists():
            (folder / name).rename(outside)
        else:
            outside.write_text("{}")
        if hops == 2:
            (folder / "inside").symlink_to(outside)
        (folder / name).symlink_to(outside if hops == 1 else "inside")

    return change


def waiting(name: str) -> Change:
    """A pipe, which would be waited for."""

    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return change


def flipped(name: str) -> Change:
    """A file whose last byte differs from its checksum."""

    def change(folder: Path) -> None:
        write_sums(folder, [path.name for path in folder.iterdir()])
        content = bytearray((folder / name).read_bytes())
        content[-1] ^= 1
        (folder / name).write_bytes(content)

    return change


def alone(change: Change) -> Change:
    """A change of an empty folder."""

    def change_alone(folder: Path) -> None:
        for path in folder.iterdir():
            path.unlink()
        change(folder)

    return change_alone


def in_shards(change: Change) -> Change:
    """A change of a target in three shards."""

    def change_shards(folder: Path) -> None:
        write_shards(folder, target_tensors())
        change(folder)

    return change_shards


def without_head(folder: Path) -> None:
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    del weight_map["lm_head.weight"]
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def mapped(shard: object) -> Change:
    return written(INDEX, json.dumps({"weight_map": {KEY: shard}}))


def of_shape(**values: Any) -> Change:
    """A whole draft of another shape."""
    layer = parse_llama_config(TINY | values, {}, origin="config")
    shapes = {key: slot.shape for key, slot in slots_by_key(DraftConfig(layer=layer)).items()}
    return lambda folder: write_source(folder, draw(shapes), **values)


# --------------------------------------------------------------------------------------------------
# Targets

# A few types read every number: one key shows what its type refuses, the others that they have one.
_NO_SIZES = ["-1", "0.5", "1e999", "NaN", '"many"', "[8]", "1" * 5000]
_NO_STOPS = ["1e999", "4294967296", '"end"', "[1, -2]", "[[1]]"]
_COUNTS = ["vocab_size", "num_hidden_layers", "num_key_value_heads", "head_dim"]
_BESIDE = ["generation_config.json", "tokenizer.json", "merges.txt", "SHA256SUMS"]
_NO_SHARDS = [3, None, "", "..", "x" * 300, "a\0b", "a\nb", "config.json/x", "/dev/zero"]
_OUT = "a link that leads out of its folder"
_MISSING = rf"index\.json names the shard .* of {re.escape(KEY)}, which is missing"
_Q = "model.layers.0.self_attn.q_proj"
_FLOAT8 = b'{"model.norm.weight": {"dtype": "F8_E4M3", "shape": [8], "data_offsets": [0, 8]}}'
TARGETS = [
    (removed("config.json"), r"config\.json: No such file"),
    (removed(WEIGHTS), "holds no weights"),
    (written("config.json", "{"), r"config\.json: not valid JSON"),
    (written("config.json", '{"a": ' + "[" * 100_000), r"config\.json: not valid JSON"),
    (lambda folder: os.truncate(folder / "config.json", MAX_BYTES + 1), r"want at most \d.* bytes"),
    (written(WEIGHTS, b"\xff" * 100), r"model\.safetensors"),
    (doubled("config.json", "hidden_size"), r"config\.json: hidden_size is given twice"),
    (doubled(WEIGHTS, KEY), rf"header: {re.escape(KEY)} is given twice"),
    *((setting("hidden_size", text), r"config\.json") for text in _NO_SIZES),
    *((setting(key, "1" * 30), r"config\.json") for key in _COUNTS),
    (config(rms_norm_eps=-1), r"config\.json: rms"),
    (setting("rope_theta", "1e999"), r"config\.json: rope"),
    (config(max_position_embeddings=-1), r"config\.json: max"),
    *((setting("eos_token_id", text), r"/config\.json: eos_token_id: ") for text in _NO_STOPS),
    (setting("eos_token_id", '"end"', "generation_config.json"), r"/generation_config\.json:"),
    *((linked(name), rf"{re.escape(name)}: {_OUT}") for name in ("config.json", *_BESIDE)),
    (linked("tokenizer.json", hops=2), rf"tokenizer\.json: {_OUT}"),
    (linked(WEIGHTS), rf"model\.safetensors: {_OUT}"),
    (alone(linked("model.gguf")), rf"model\.gguf: {_OUT}"),
    (waiting("config.json"), r"config\.json: want a regular file"),
    (waiting("tokenizer_config.json"), r"tokenizer_config\.json: want a regular file"),
    (flipped("config.json"), r"config\.json: (SHA256SUMS says SHA-256|not valid JSON)"),
    # As in Vicuna's folder: nothing that is loaded later could read it.
    (written("tokenizer.model", ""), r"want tokenizer\.json, got tokenizer\.model alone; copy"),
    # Other kinds of models, by config.json
    (config(model_type="gpt2"), "model_type: want one of"),
    (config(quantization_config={"quant_method": "gptq"}), "quantised weights .*'gptq'"),
    (config(compression_config={"format": "x"}), "quantised weights"),
    (config(model_type="mixtral"), "a mixture of experts .mixtral"),
    (config(model_type="llama4_text"), "a mixture of experts .llama4_text"),
    (config(num_local_experts=8), "a mixture of experts .num_local_experts 8"),
    (config(architectures=["LlamaForCausalLMEagle3"]), "an EAGLE-3 draft"),
    (config(draft_vocab_size=32000), "an EAGLE-3 draft"),
    (config(speculators_model_type="x" * 9000), r"a draft of speculators .x{97}\.\.\.\)"),
    # Classes and kinds that speculators 0.9, SpecForge 0.2 and vLLM 0.32 write or read
    (config(architectures=["DSparkDraftModel"]), "a DSpark draft .*not supported yet"),
    (config(architectures=["Qwen3DSparkModel"]), "a DSpark draft"),
    (config(speculators_model_type="dspark", transformer_layer_config=TINY), "a DSpark draft"),
    (config(architectures=["DFlash2DraftModel"]), "a DFlash draft .*not supported yet"),
    (config(speculators_model_type="dflash", transformer_layer_config=TINY), "a DFlash draft"),
    (config(architectures=["DeepSeekMTPModel"]), "an MTP draft .*not supported yet"),
    (config(speculators_model_type="mtp", transformer_layer_config=TINY), "an MTP draft"),
    # and by their weights
    (alone(written("adapter_config.json", "{}")), "a LoRA adapter .adapter_config.json.*merge it"),
    (added(f"base_model.model.{_Q}.lora_A.weight"), "a LoRA adapter .*lora_A.*merge it"),
    (added(f"{_Q}.qweight", dtype=np.int32), "quantised weights .*qweight"),
    (added(f"{_Q}.scales", dtype=np.float16), "quantised weights .*scales"),
    (added(f"{_Q}.weight_scale"), "quantised weights .*weight_scale"),
    (added(f"{_Q}.weight_scale_inv"), "quantised weights .*weight_scale_inv"),
    (added(f"{_Q}.weight.absmax"), "quantised weights .*absmax"),
    (added(f"{_Q}.weight", dtype=np.int8), "quantised weights .*q_proj.weight of type I8"),
    (added(f"{_Q}.weight", dtype=np.uint8), "quantised weights .*q_proj.weight of type U8"),
    (written(WEIGHTS, struct.pack("<Q", len(_FLOAT8)) + _FLOAT8 + bytes(8)), "of type F8_E4M3"),
    (added("model.layers.0.mlp.experts.0.w1.weight"), "a mixture of experts"),
    (added("model.layers.0.block_sparse_moe.gate.weight"), "experts .*block_sparse_"),
    (only(fuse(target_tensors())), r"missing .*q_proj.*unknown model\.layers\.0\..*qkv_proj"),
    # Shards
    (in_shards(removed(SHARDS[1])), "which is missing"),
    (in_shards(without_head), r"disagree about lm_head\.weight"),
    (in_shards(lambda folder: save_file(target_tensors(), folder / SHARDS[1])), "disagree .*-0000"),
    (in_shards(written(INDEX, '{"weight_map": {}}')), "want a weight_map"),
    (in_shards(doubled(INDEX, KEY)), rf"{re.escape(INDEX)}: {re.escape(KEY)} is given twice"),
    *((in_shards(mapped(shard)), _MISSING) for shard in (*_NO_SHARDS, f"../source/{SHARDS[0]}")),
    (in_shards(linked(INDEX)), rf"{re.escape(INDEX)}: {_OUT}"),
    (in_shards(linked(SHARDS[0])), rf"{re.escape(SHARDS[0])}: {_OUT}"),
    (in_shards(waiting(SHARDS[0])), rf"{re.escape(SHARDS[0])}: want a regular file"),
]
# What inspect does not refuse, which reads no weights and takes drafts as well.
NOT_SEEN_BY_INSPECT = [
    (holding(np.nan), rf"{WEIGHTS}: {KEY} holds NaN or infinity"),
    (holding(np.inf), rf"{KEY} holds NaN or infinity"),
    (holding(-np.inf), rf"{KEY} holds NaN or infinity"),
    (holding(np.nan, np.float16), rf"{KEY} holds NaN or infinity"),
    (holding(np.inf, jnp.bfloat16), rf"{KEY} holds NaN or infinity"),
    (added("midlayer.hidden_norm.weight"), "an EAGLE-3 draft .midlayer"),
    (added("d2t", "t2d", dtype=np.int64), "an EAGLE-3 draft .d2t"),
    (only(draft_tensors()), r"holds a draft \(fc\.weight\); .* the draft command"),
    (in_shards(flipped(SHARDS[1])), rf"{re.escape(SHARDS[1])}: SHA256SUMS says SHA-256"),
]


def refusal_of_inspect(source: Path) -> str | None:
    try:
        return inspect(str(source)).refused
    except UserError as error:
        return str(error)


@pytest.mark.parametrize(("change", "message"), TARGETS)
def test_changed_target_is_refused(tmp_path, change, message):
    change(write_source(tmp_path / "source", target_tensors()))
    text = refusal_of(tmp_path / "source")
    assert re.search(message, text) and len(text) < 1500
    assert re.search(message, refusal_of_inspect(tmp_path / "source") or "")


@pytest.mark.parametrize(("change", "message"), NOT_SEEN_BY_INSPECT)
def test_changed_target_is_refused_by_the_converter_alone(tmp_path, change, message):
    change(write_source(tmp_path / "source", target_tensors()))
    assert re.search(message, refusal_of(tmp_path / "source"))


def test_every_wrong_key_is_listed(tmp_path):
    tensors = target_tensors(**{"model.layers.2.mlp.gate_proj.weight": (12, 8)})
    del tensors["model.norm.weight"]
    tensors["model.layers.1.self_attn.k_proj.weight"] = np.zeros((8, 8), np.float32)
    tensors["lm_head.weight"] = np.zeros((16, 8), np.int32)
    write_source(tmp_path / "source", tensors)
    message = refusal_of(tmp_path / "source")
    assert "missing model.norm.weight [8]" in message
    assert "unknown model.layers.2.mlp.gate_proj.weight [12, 8]" in message
    assert "model.layers.1.self_attn.k_proj.weight want [4, 8] got [8, 8]" in message
    assert "lm_head.weight want float32 or bfloat16 or float16 got I32" in message


# --------------------------------------------------------------------------------------------------
# Drafts

_EAGLE3 = r"read as an EAGLE-3 draft: .*missing layers\.0\.input_layernorm\.weight \[8\]"
_NORM = r"layers\.0\.input_layernorm\.weight\); no EAGLE-2, HASS or PosS draft has one"
_XPRESS = {"speculators_model_type": "xpress", "architectures": ["XPressDraftModel"]}
DRAFTS = [
    # What config.json and the weights say
    (config(hidden_size=16), r"hidden_size 16, the weights have fc\.weight \[8, 16\]"),
    (config(intermediate_size=20), r"intermediate_size 20, .* \[12, 8\]"),
    (config(head_dim=6), r"num_attention_heads times head_dim 12, .*q_proj\.weight \[8, 8\]"),
    (config(num_key_value_heads=2), r"num_key_value_heads times head_dim 8, .* \[4, 8\]"),
    (config(vocab_size=32), r"vocab_size 32, .* \[16, 8\]"),
    (config(num_hidden_layers=3), r"num_hidden_layers 3, the weights hold 1"),
    (config(qkv_bias=True), r"qkv_bias True, the weights hold no layers\.0\.self_attn\.q_proj"),
    (config(attention_bias=True), r"attention_bias True, the weights hold no"),
    (config(mlp_bias=True), r"mlp_bias True, the weights hold no"),
    (of_shape(model_type="qwen2", qkv_bias=False), "says qkv_bias False, the weights hold a"),
    (config(architectures=["LlamaForCausalLMEagle3"]), r"says EAGLE-3 .* EAGLE-2's layout"),
    (config(poss_jax=[3]), r"poss_jax: want an object"),
    (config(poss_jax={"trained_depth": 3}), r"missing key 'positions_per_specialist'"),
    # Other kinds of drafts
    (added("midlayers.1.hidden_norm.weight", shape=(8,)), _EAGLE3),
    (added("d2t", "t2d", shape=(16,)), _EAGLE3),
    (added("fc.weight", shape=(8, 24)), _EAGLE3),
    (added("layers.0.self_attn.q_proj.weight", shape=(8, 16)), _EAGLE3),
    (config(speculators_model_type="eagle3", architectures=["Eagle3DraftModel"]), _EAGLE3),
    (config(**_XPRESS), r"a draft of speculators \(xpress: XPressDraftModel\); not supported yet"),
    (added("embed_layernorm.weight", shape=(8,)), r"an EAGLE-1 draft .*\(embed_layernorm\.weight"),
    (added("layers.0.input_layernorm.weight", shape=(8,)), _NORM),
    (only(target_tensors()), r"holds a whole target .* with the target command"),
    # Weights that do not belong to it
    (added("layers.0.norm.weight", shape=(8,)), r"unknown layers\.0\.norm\.weight"),
    (added("token_map", shape=(8,)), "unknown token_map"),
    (only(draft_tensors(0)), r"missing layers\.0\.self_attn\.q_proj\.weight"),
    (added("model.fc.weight", shape=(8, 16)), r"both fc\.weight and model\.fc\.weight"),
    (added("model.lm_head.weight", shape=(16, 8)), r"model\.lm_head\.weight differs from the head"),
    (only(draft_tensors(**{"embed_tokens.weight": (16, 8)})), "differs from the embedding of the"),
    (of_shape(hidden_size=16, head_dim=4), "does not fit the target source"),
    (of_shape(vocab_size=32), "does not fit the target source"),
]


@pytest.mark.parametrize(("change", "message"), DRAFTS)
def test_changed_draft_is_refused(tmp_path, tiny, change, message):
    tensors = draft_tensors()
    tensors["embed_tokens.weight"] = target_tensors()["model.embed_tokens.weight"]
    change(write_source(tmp_path / "source", tensors))
    assert re.search(message, refusal_of(tmp_path / "source", "draft", target=tiny / "target"))


# --------------------------------------------------------------------------------------------------
# Sources and arguments


def test_sources_that_are_none(tmp_path, tiny):
    missing = "does not exist; give a folder, a GGUF file or a Hub id"
    for flags, message in (
        *(({"source": name}, missing) for name in ("missing", "./missing/model", "a/b/c")),
        ({"source": tiny / "source/model.safetensors"}, "is a file; give the folder it is in"),
        ({"source": tiny / "target"}, "is a model folder of poss_jax already"),
        ({"source": tiny / "source", "revision": "main"}, "has no revision main; leave it out"),
    ):
        with pytest.raises(UserError, match=message):
            run("target", output=tmp_path / "out", **flags)
    with pytest.raises(UserError, match="has no revision main"):
        main(["inspect", str(tiny / "target"), "--revision", "main"])


@pytest.mark.parametrize(
    "arguments",
    [
        "frobnicate",
        "target --source x",
        "target --source x --output y --dtype int8",
        "draft --source x --output y",
        "draft --source x --target t --output y --positions-per-specialist 3,0",
        "draft --source x --target t --output y --trained-depth -1",
    ],
)
def test_wrong_arguments_are_one_line(arguments):
    assert "--help" in refusal(main, *arguments.split())


# --------------------------------------------------------------------------------------------------
# What is read beside a source: links of the Hub's cache, tokenizers, checksums


def test_a_snapshot_may_link_only_into_its_cache(tmp_path):
    """`blobs`, where the Hub's files lie, is tested by test_hub."""
    cache = tmp_path / "models--owner--tiny"
    source = write_source(tmp_path / "files", target_tensors())
    snapshot = cache / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (cache / "other").mkdir()
    for path in source.iterdir():
        path.rename(cache / "other" / path.name)
        (snapshot / path.name).symlink_to(f"../../other/{path.name}")
    assert _OUT in refusal_of(snapshot)


def test_link_that_leads_out_of_a_model_folder(tmp_path, tiny):
    for name in ("model.json", "weights", "weights/embed", "weights/embed/d"):
        folder = shutil.copytree(tiny / "target", tmp_path / name.replace("/", "-"))
        (folder / name).rename(folder.with_suffix(".elsewhere"))
        (folder / name).symlink_to(folder.with_suffix(".elsewhere"))
        with pytest.raises(UserError, match=rf"{name}: {_OUT}"):
            read_record(folder)


def test_tokenizer_behind_a_link_is_neither_read_nor_copied(tmp_path):
    folder = tmp_path / "source"
    folder.mkdir()
    linked("tokenizer_config.json")(folder)
    for read in (load_tokenizer, lambda source: copy_tokenizer(source, tmp_path)):
        with pytest.raises(UserError, match=rf"tokenizer_config\.json: {_OUT}"):
            read(folder)


def test_sums_of_files_that_are_not_used(tmp_path):
    folder = write_source(tmp_path / "source", target_tensors())
    (folder / "SHA256SUMS").write_text(f"{'0' * 64}  README.md\n{'0' * 64}  pytorch_model.bin\n")
    (folder / "pytorch_model.bin").write_bytes(b"not looked at")
    assert plan_target(str(folder))
    (folder / "SHA256SUMS").write_text(f"{'0' * 64}  model.safetensors\n")
    assert "lm_head.weight" in open_tensors(folder, verify=False)
    with pytest.raises(UserError, match="SHA256SUMS says"):
        open_tensors(folder)


def test_checksums_inside_a_bin_file_are_for_files_without_others(tmp_path, monkeypatch):
    checked = []
    monkeypatch.setattr(torch_io, "read_bin", lambda _, check: checked.append(check) or {})
    (tmp_path / "pytorch_model.bin").write_bytes(b"not looked at")
    open_tensors(tmp_path, verify=False)
    open_tensors(tmp_path)
    write_sums(tmp_path, ["pytorch_model.bin"])
    open_tensors(tmp_path)
    assert checked == [False, True, False]


def test_every_chunk_is_looked_at(monkeypatch):
    monkeypatch.setattr(writing, "_CHUNK_VALUES", 4)
    for index in range(10):
        values = np.zeros(10, np.float32)
        assert is_finite(values)
        values[index] = np.nan
        assert not is_finite(values.reshape(5, 2))


# --------------------------------------------------------------------------------------------------
# Damaged sources: one clear error, or the result of the intact ones.
#
# Files are cut at random places and have random bits flipped. Without SHA256SUMS a bit flipped in
# the data of safetensors changes the one number it is in, a digit in a config the config alone.

NUM_CASES = 20
FILES = [
    ("target", "single", "config.json"),
    ("target", "single", "generation_config.json"),
    ("target", "single", WEIGHTS),
    ("target", "shards", INDEX),
    ("target", "shards", SHARDS[1]),
    ("draft", "single", "config.json"),
    ("draft", "single", WEIGHTS),
    ("draft", "shards", SHARDS[2]),
    pytest.param("target", "bin", "pytorch_model.bin", marks=pytest.mark.torch),
    pytest.param("draft", "bin", "pytorch_model.bin", marks=pytest.mark.torch),
]


def build(source: Path, family: str, form: str) -> None:
    tensors = target_tensors() if family == "target" else draft_tensors(2)
    write_source(source, tensors)
    (source / "generation_config.json").write_text('{"eos_token_id": [3, 5]}')
    if form == "shards":
        write_shards(source, tensors)
    elif form == "bin":
        (source / WEIGHTS).unlink()
        save_bin(tensors, source / "pytorch_model.bin")


def convert(source: Path, target: Path | None) -> tuple[Any, Any, dict[str, np.ndarray]]:
    """The config, target and arrays that a conversion would write."""
    if target is None:
        planned = plan_target(str(source))
    else:
        planned = plan_draft(str(source), target, positions_per_specialist=(1, 3))
    arrays = {
        "/".join((item, *path)): np.array(array)
        for item, tree in planned.items
        for path, array in flatten_dict(tree).items()
    }
    return planned.record.config, planned.record.target, arrays


def check_damage(folder: Path, family: str, form: str, name: str, tiny: Path, *, with_sums: bool):
    source, target = folder / "source", tiny / "target" if family == "draft" else None
    build(source, family, form)
    if with_sums:
        write_sums(source, [path.name for path in source.iterdir()])
    *want, arrays = convert(source, target)
    intact = (source / name).read_bytes()
    header = 8 + int.from_bytes(intact[:8], "little")
    for done, content in damages(intact, NUM_CASES):
        (source / name).write_bytes(content)
        try:
            *got, changed = convert(source, target)
        except UserError as error:
            assert "\n" not in str(error) and (name if with_sums else str(source)) in str(error)
            continue
        num_changed = sum(
            int((changed[key].view(np.uint32) != array.view(np.uint32)).sum())
            for key, array in arrays.items()
        )
        is_data = name.endswith(".safetensors") and int(done.split()[1]) >= header
        assert num_changed == (is_data and done.startswith("flip") and not with_sums), done
        is_config = name.endswith("config.json") and not with_sums
        assert got == want or is_config or num_changed, done


@pytest.mark.parametrize(("family", "form", "name"), [*FILES, ("target", "single", "SHA256SUMS")])
def test_damage_with_checksums(tmp_path, tiny, family, form, name):
    check_damage(tmp_path, family, form, name, tiny, with_sums=True)


@pytest.mark.parametrize(("family", "form", "name"), FILES)
def test_damage_without_checksums(tmp_path, tiny, family, form, name):
    check_damage(tmp_path, family, form, name, tiny, with_sums=False)
