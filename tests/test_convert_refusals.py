"""The converter and bad or damaged input: one clear line, exit code 2, nothing left behind."""

import json
import os
import re
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
from convert_sources import (
    convert_tiny,
    damages,
    draft_tensors,
    refusal_of,
    run,
    target_tensors,
    write_shards,
    write_source,
)
from flax.traverse_util import flatten_dict
from programs import refusal
from safetensors.numpy import save_file

from poss_jax.checkpoint.sums import write_sums
from poss_jax.config import json_reading
from poss_jax.config.json_reading import read_json
from poss_jax.config.reading import UserError
from poss_jax.convert.__main__ import cli, main
from poss_jax.convert.inspection import inspect
from poss_jax.convert.plan import Conversion, plan_draft, plan_target
from poss_jax.convert.source import open_tensors

KEY = "model.layers.1.mlp.up_proj.weight"
INDEX = "model.safetensors.index.json"
SHARDS = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]


Change = Callable[[Path], object]


def written(name: str, content: str | bytes) -> Change:
    content = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / name).write_bytes(content)


def removed(name: str) -> Change:
    return lambda folder: (folder / name).unlink()


def setting(key: str, text: str, name: str = "config.json") -> Change:
    """A file's value of a key, as JSON text."""

    def change(folder: Path) -> None:
        path = folder / name
        values = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(values | {key: "HERE"}).replace('"HERE"', text))

    return change


def doubled(name: str, key: str) -> Change:
    """A JSON file, or a header, that has a key and its value twice."""

    def change(folder: Path) -> None:
        content = (folder / name).read_bytes()
        is_weights = name.endswith(".safetensors")
        end = 8 + int.from_bytes(content[:8], "little") if is_weights else len(content)
        text = content[8:end].decode() if is_weights else content.decode()
        entry = re.search(rf'"{re.escape(key)}":\s*(\{{[^}}]*\}}|[^,}}]*)', text)
        assert entry is not None
        twice = text.replace(entry[0], f"{entry[0]},{entry[0]}", 1).encode()
        header = struct.pack("<Q", len(twice)) if is_weights else b""
        (folder / name).write_bytes(header + twice + content[end:])

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


def gguf_behind_a_link(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()
    linked("model.gguf")(folder)


def without_head(folder: Path) -> None:
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    del weight_map["lm_head.weight"]
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def mapped(shard: object) -> Change:
    return written(INDEX, json.dumps({"weight_map": {KEY: shard}}))


# A few types read every number: one key shows what its type refuses, the others that they have one.
_NO_SIZES = ["-1", "0", "0.5", "1e999", "NaN", '"many"', "[8]", "{}", "1" * 30, "1" * 5000]
_NO_STOPS = ["1e999", "4294967296", '"end"', "[1, -2]", "[[1]]"]
_COUNTS = ["vocab_size", "num_hidden_layers", "num_key_value_heads", "head_dim"]
_BESIDE = ["generation_config.json", "tokenizer.json", "merges.txt", "SHA256SUMS"]
_NO_SHARDS = [3, None, "", ".", "..", "x" * 300, "a\0b", "a\nb", "config.json/x", "../a"]
_OUT = "a link that leads out of its folder"
CHANGES = [
    (removed("config.json"), r"config\.json: No such file"),
    (removed("model.safetensors"), "holds no weights"),
    (written("config.json", "{"), r"config\.json: not valid JSON"),
    (written("config.json", '{"a": ' + "[" * 100_000), r"config\.json: not valid JSON"),
    (written("model.safetensors", b"\xff" * 100), r"model\.safetensors"),
    (doubled("config.json", "hidden_size"), r"config\.json: hidden_size is given twice"),
    (doubled("model.safetensors", KEY), rf"header: {re.escape(KEY)} is given twice"),
    *((setting("hidden_size", text), r"config\.json") for text in _NO_SIZES),
    *((setting(key, "1" * 30), r"config\.json") for key in _COUNTS),
    (setting("rms_norm_eps", "-1"), r"config\.json: rms"),
    (setting("rope_theta", "1e999"), r"config\.json: rope"),
    (setting("max_position_embeddings", "-1"), r"config\.json: max"),
    *((setting("eos_token_id", text), r"/config\.json: eos_token_id: ") for text in _NO_STOPS),
    (setting("eos_token_id", '"end"', "generation_config.json"), r"/generation_config\.json:"),
    *((linked(name), rf"{re.escape(name)}: {_OUT}") for name in ("config.json", *_BESIDE)),
    (linked("tokenizer.json", hops=2), rf"tokenizer\.json: {_OUT}"),
    (linked("model.safetensors"), rf"model\.safetensors: {_OUT}"),
    (gguf_behind_a_link, rf"model\.gguf: {_OUT}"),
    (waiting("config.json"), r"config\.json: want a regular file"),
    (waiting("tokenizer_config.json"), r"tokenizer_config\.json: want a regular file"),
    (flipped("config.json"), r"config\.json: (SHA256SUMS says SHA-256|not valid JSON)"),
    # As in Vicuna's folder: nothing that is loaded later could read it.
    (written("tokenizer.model", ""), r"want tokenizer\.json, got tokenizer\.model alone; copy"),
]
CHANGED_SHARDS = [
    (removed(SHARDS[1]), "which is missing"),
    (without_head, r"disagree about lm_head\.weight"),
    (lambda folder: save_file(target_tensors(), folder / SHARDS[1]), rf"disagree .* {SHARDS[1]}"),
    (written(INDEX, '{"weight_map": {}}'), "want a weight_map"),
    (doubled(INDEX, KEY), rf"{re.escape(INDEX)}: {re.escape(KEY)} is given twice"),
    *(
        (mapped(shard), rf"index\.json names the shard .* of {re.escape(KEY)}, which is missing")
        for shard in (*_NO_SHARDS, "/dev/zero", f"../source/{SHARDS[0]}")
    ),
    (linked(INDEX), rf"{re.escape(INDEX)}: {_OUT}"),
    (linked(SHARDS[0]), rf"{re.escape(SHARDS[0])}: {_OUT}"),
    (waiting(SHARDS[0]), rf"{re.escape(SHARDS[0])}: want a regular file"),
    (flipped(SHARDS[1]), rf"{re.escape(SHARDS[1])}: SHA256SUMS says SHA-256"),
]


@pytest.mark.parametrize(("change", "message"), CHANGES)
def test_changed_source_is_refused(tmp_path, change, message):
    change(write_source(tmp_path / "source", target_tensors()))
    assert re.search(message, refusal_of(tmp_path / "source"))


@pytest.mark.parametrize(("change", "message"), CHANGED_SHARDS)
def test_changed_shards_are_refused(tmp_path, change, message):
    folder = write_source(tmp_path / "source", target_tensors())
    write_shards(folder, target_tensors())
    change(folder)
    assert re.search(message, refusal_of(tmp_path / "source"))


def test_inspect_refuses_links_pipes_and_tokenizer_models_without_checksums(tmp_path):
    folder = write_source(tmp_path / "source", target_tensors())
    written("tokenizer.model", "")(folder)
    assert "tokenizer.model alone" in str(inspect(str(folder)).refused)
    linked("model.safetensors")(folder)
    with pytest.raises(UserError, match=_OUT):
        open_tensors(folder, verify=False)
    waiting("config.json")(folder)
    with pytest.raises(UserError, match="want a regular file"):
        read_json(folder / "config.json")


def test_json_file_that_is_too_large(tmp_path, monkeypatch):
    monkeypatch.setattr(json_reading, "MAX_BYTES", 100)
    write_source(tmp_path / "source", target_tensors())
    message = refusal_of(tmp_path / "source")
    assert re.search(r"config\.json: want at most 100 bytes of JSON, got \d+", message)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, jnp.bfloat16])
def test_weight_that_is_not_finite_is_refused(tmp_path, dtype, value):
    tensors = target_tensors(dtype)
    tensors[KEY][3, 2] = value
    folder = write_source(tmp_path / "source", tensors)
    line = f"{folder / 'model.safetensors'}: {KEY} holds NaN or infinity"
    assert line in refusal_of(tmp_path / "source")


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


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (draft_tensors(**{"layers.0.norm.weight": (8,)}), "unknown layers.0.norm.weight"),
        (draft_tensors(token_map=(8,)), "unknown token_map"),
        (draft_tensors(0), "missing layers.0.self_attn.q_proj.weight"),
    ],
)
def test_draft_with_wrong_keys_is_refused(tmp_path, tiny, tensors, message):
    write_source(tmp_path / "source", tensors)
    assert message in refusal_of(tmp_path / "source", "draft", target=tiny / "target")


def test_draft_given_as_target_is_refused(tmp_path):
    write_source(tmp_path / "source", draft_tensors())
    message = refusal_of(tmp_path / "source")
    assert re.search(r"holds a draft \(fc\.weight\); .* the draft command", message)


def test_table_and_summary(tmp_path, tiny, capsys):
    run("target", source=tiny / "source", output=tmp_path / "out")
    *table, last = capsys.readouterr().out.splitlines()
    assert len(table) == 3 + 9
    assert table[0].split() == "model.embed_tokens.weight -> embed/weight 16x8 float32".split()
    layers = "model.layers.{0..1}.mlp.gate_proj.weight -> layers/{0..1}/mlp/gate/weight"
    assert table[7].split() == [*layers.split(), "12x8", "float32"]
    assert json.loads(last) == {
        "output": str(tmp_path / "out"),
        "family": "target",
        "method": None,
        "parameters": sum(value.size for value in target_tensors().values()),
        "dtype": "float32",
        "quantised": None,
        "assumed": [],
    }


def test_sources_that_are_none(tmp_path, tiny):
    file = tiny / "source/model.safetensors"
    for flags, message in (
        ({"source": file}, "is a file; give the folder it is in"),
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
        "",
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
# Damaged sources: one clear error and nothing left behind, or the result of the intact ones.
#
# Every file that a conversion reads is cut at random places and has random bits flipped. Where
# SHA256SUMS names it, that is the whole truth. Without, safetensors have no checksums: a
# bit flipped in their data changes the one number it is in, and nothing else; a digit flipped in a
# config changes the config, and no weight.

NUM_CASES = 20


class Result(NamedTuple):
    """The result that a conversion would write."""

    config: Any
    target: Any
    arrays: dict[str, tuple[np.dtype, bytes]]


@dataclass(frozen=True)
class Case:
    """A source, and how it is converted."""

    folder: Path
    arguments: list[str]
    plan: Callable[[], Conversion]

    def convert(self) -> Result:
        planned = self.plan()
        arrays = {
            "/".join((item, *path)): (array.dtype, array.tobytes())
            for item, tree in planned.items
            for path, array in flatten_dict(tree).items()
        }
        return Result(planned.record.config, planned.record.target, arrays)


def build(folder: Path, form: str, *, with_sums: bool) -> Case:
    family, _, kind = form.partition("-")
    target = convert_tiny(folder / "made") / "target"
    tensors = target_tensors() if family == "target" else draft_tensors(2)
    source = write_source(folder / "source", tensors)
    (source / "generation_config.json").write_text('{"eos_token_id": [3, 5]}')
    if kind == "shards":
        write_shards(source, tensors)
    elif kind == "bin":
        import torch

        (source / "model.safetensors").unlink()
        state = {key: torch.from_numpy(value) for key, value in tensors.items()}
        torch.save(state, source / "pytorch_model.bin")
    if with_sums:
        write_sums(source, [path.name for path in source.iterdir()])
    if family == "target":
        return Case(source, ["target", "--source", str(source)], lambda: plan_target(str(source)))
    return Case(
        source,
        f"draft --source {source} --target {target} --positions-per-specialist 1,3".split(),
        lambda: plan_draft(str(source), target, positions_per_specialist=(1, 3)),
    )


@pytest.fixture
def run_cli(monkeypatch, capsys, tmp_path):
    """Runs the program on a damaged source; gives its one line."""
    monkeypatch.setattr("poss_jax.program.running._leave", sys.exit)  # and the process
    (tmp_path / "output").mkdir()

    def run(arguments: list[str]) -> str:
        argv = ["poss-convert", *arguments, "--output", str(tmp_path / "output/model")]
        monkeypatch.setattr(sys, "argv", argv)
        with pytest.raises(SystemExit) as exit_info:
            cli()
        assert exit_info.value.code == 2
        assert list((tmp_path / "output").iterdir()) == []
        line = capsys.readouterr().err
        assert line.startswith("error: ") and line.count("\n") == 1
        return line

    return run


def changed_elements(got: Result, want: Result) -> list[tuple[str, int]]:
    """Key path and index of the float32 numbers that differ."""
    return [
        (key, int(index))
        for key, (_, content) in want.arrays.items()
        for index in np.flatnonzero(
            np.frombuffer(got.arrays[key][1], np.uint32) != np.frombuffer(content, np.uint32)
        )
    ]


FORMS = [
    ("target-single", ["config.json", "generation_config.json", "model.safetensors"]),
    ("target-shards", [INDEX, "model-00002-of-00003.safetensors"]),
    ("target-bin", ["pytorch_model.bin"]),
    ("draft-single", ["config.json", "model.safetensors"]),
    ("draft-shards", [INDEX, "model-00003-of-00003.safetensors"]),
    ("draft-bin", ["pytorch_model.bin"]),
]
FILES = [
    pytest.param(form, name, marks=pytest.mark.torch if form.endswith("bin") else ())
    for form, names in FORMS
    for name in names
]


@pytest.mark.parametrize(("form", "name"), [*FILES, ("target-single", "SHA256SUMS")])
def test_with_checksums_damage_never_passes(tmp_path, run_cli, form, name):
    case = build(tmp_path, form, with_sums=True)
    want, intact = case.convert(), (case.folder / name).read_bytes()
    for done, content in damages(intact, NUM_CASES):
        (case.folder / name).write_bytes(content)
        try:
            assert case.convert() == want, done
        except UserError:
            assert name in run_cli(case.arguments), done


@pytest.mark.parametrize(("form", "name"), FILES)
def test_without_checksums(tmp_path, run_cli, form, name):
    case = build(tmp_path, form, with_sums=False)
    want, intact = case.convert(), (case.folder / name).read_bytes()
    header = 8 + int.from_bytes(intact[:8], "little")
    for done, content in damages(intact, NUM_CASES):
        (case.folder / name).write_bytes(content)
        try:
            got = case.convert()
        except UserError:
            line = run_cli(case.arguments)
            assert name in line or str(case.folder) in line, done
            continue
        changed = changed_elements(got, want)
        flipped = int(done.split()[1])
        if got == want or name.endswith("config.json"):
            assert changed == [], done
        else:
            assert name.endswith(".safetensors") and flipped >= header, done
            assert done.startswith("flip") and len(changed) == 1, done
