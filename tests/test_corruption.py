"""Damaged sources: one clear error and nothing left behind, or the result of the intact ones.

Every file that a conversion reads is cut at random places and has random bits flipped. Where
SHA256SUMS names it, that is the whole truth. Without, safetensors have no checksums: a
bit flipped in their data changes the one number it is in, and nothing else; a digit flipped in a
config changes the config, and no weight.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from convert_sources import (
    convert_tiny,
    damages,
    draft_tensors,
    target_tensors,
    write_shards,
    write_source,
)
from flax.traverse_util import flatten_dict

from poss_jax.checkpoint.sums import write_sums
from poss_jax.config.reading import UserError
from poss_jax.convert.__main__ import cli
from poss_jax.convert.plan import Conversion, plan_draft, plan_target

NUM_CASES = 20
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Result:
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
