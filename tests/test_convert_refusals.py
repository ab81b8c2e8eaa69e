"""The converter and bad input: one clear line, exit code 2, nothing left behind."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from convert_sources import (
    convert_tiny,
    draft_tensors,
    run,
    target_tensors,
    write_source,
)

import poss_jax.checkpoint.items
from poss_jax.config.reading import UserError
from poss_jax.convert.__main__ import cli, main
from poss_jax.convert.inspection import inspect


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return convert_tiny(tmp_path_factory.mktemp("tiny"))


# --------------------------------------------------------------------------------------------------
# Keys and files that do not fit


def test_every_wrong_key_is_listed(tmp_path):
    tensors = target_tensors(**{"model.layers.2.mlp.gate_proj.weight": (12, 8)})
    del tensors["model.norm.weight"]
    tensors["model.layers.1.self_attn.k_proj.weight"] = np.zeros((8, 8), np.float32)
    tensors["lm_head.weight"] = np.zeros((16, 8), np.int32)
    folder = write_source(tmp_path / "source", tensors)
    with pytest.raises(UserError) as error:
        run("target", source=folder, output=tmp_path / "out")
    message = str(error.value)
    assert "missing model.norm.weight [8]" in message
    assert "unknown model.layers.2.mlp.gate_proj.weight [12, 8]" in message
    assert "model.layers.1.self_attn.k_proj.weight want [4, 8] got [8, 8]" in message
    assert "lm_head.weight want float32 or bfloat16 or float16 got I32" in message
    assert message.count("\n") == 0
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("key", ["layers.0.norm.weight", "token_map", "norm.weight"])
def test_unknown_draft_keys(tmp_path, tiny, key):
    source = write_source(tmp_path / "source", draft_tensors(**{key: (8,)}))
    with pytest.raises(UserError, match=f"unknown {key}"):
        run("draft", source=source, target=tiny / "target", output=tmp_path / "out")


def test_a_sentencepiece_model_alone(tmp_path):
    """As in Vicuna's folder: nothing that is loaded later could read it."""
    source = write_source(tmp_path / "source", target_tensors())
    (source / "tokenizer.model").write_bytes(b"sentencepiece")
    with pytest.raises(UserError, match=r"want tokenizer\.json, got tokenizer\.model alone; copy"):
        run("target", source=source, output=tmp_path / "out")
    assert "tokenizer.model alone" in str(inspect(str(source)).refused)
    assert not (tmp_path / "out").exists()
    (source / "tokenizer.json").write_text("{}")
    run("target", source=source, output=tmp_path / "out")


def test_a_draft_given_as_target(tmp_path):
    source = write_source(tmp_path / "source", draft_tensors())
    with pytest.raises(UserError, match=r"holds a draft \(fc\.weight\); .* the draft command"):
        run("target", source=source, output=tmp_path / "out")


def test_draft_without_layers(tmp_path, tiny):
    source = write_source(tmp_path / "source", draft_tensors(0))
    with pytest.raises(UserError, match=r"missing layers\.0\.self_attn\.q_proj\.weight"):
        run("draft", source=source, target=tiny / "target", output=tmp_path / "out")


# --------------------------------------------------------------------------------------------------
# The program


def test_table_and_summary(tmp_path, tiny, capsys):
    run("target", source=tiny / "source", output=tmp_path / "out")
    *table, last = capsys.readouterr().out.splitlines()
    assert len(table) == 3 + 9
    assert table[0].split() == [
        *("model.embed_tokens.weight", "->", "embed/weight", "16x8", "float32")
    ]
    assert table[7].split() == [
        *("model.layers.{0..1}.mlp.gate_proj.weight", "->", "layers/{0..1}/mlp/gate/weight"),
        *("12x8", "float32"),
    ]
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


def test_output_that_is_not_empty(tmp_path, tiny):
    (tmp_path / "keep.txt").write_text("mine")
    with pytest.raises(UserError, match="not empty"):
        run("target", source=tiny / "source", output=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["keep.txt"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_interrupted_conversion_leaves_nothing(tmp_path, tiny, monkeypatch, error):
    checkpointer = poss_jax.checkpoint.items._writer()
    save = checkpointer.save

    def fail_at_the_norm(path, args):
        if path.name == "norm":
            raise error("stop")
        save(path, args=args)

    monkeypatch.setattr(checkpointer, "save", fail_at_the_norm)
    with pytest.raises(UserError if error is RuntimeError else error, match="stop"):
        run("target", source=tiny / "source", output=tmp_path / "new" / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def said(monkeypatch, capsys):
    """Runs the program in this process; gives the one line it says before exit code 2."""
    monkeypatch.setattr("poss_jax.program.running._leave", sys.exit)  # and the process

    def run(argv: list[str]) -> str:
        monkeypatch.setattr(sys, "argv", ["poss-convert", *argv])
        with pytest.raises(SystemExit) as exit_info:
            cli()
        assert exit_info.value.code == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("error: ") and err.count("\n") == 1
        return err

    return run


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["frobnicate"],
        ["target", "--source", "x"],
        ["target", "--source", "x", "--output", "y", "--dtype", "int8"],
        ["init-specialists", "--draft", "x", "--output", "y"],
        ["init-specialists", "--draft", "x", "--output", "y", "--positions-per-specialist", "3,0"],
        ["draft", "--source", "x", "--target", "t", "--output", "y", "--trained-depth", "-1"],
    ],
)
def test_wrong_arguments_are_one_line(argv, said):
    assert "--help" in said(argv)


@pytest.mark.parametrize(
    "command", [[], ["inspect"], ["target"], ["draft"], ["init-specialists"], ["export"]]
)
def test_help(command, capsys):
    with pytest.raises(SystemExit) as exit_info:
        main([*command, "--help"])
    assert exit_info.value.code == 0
    assert "python -m poss_jax.convert" in capsys.readouterr().out


def as_a_process(source, output):
    command = [sys.executable, "-m", "poss_jax.convert", "target"]
    command += ["--source", str(source), "--output", str(output)]
    root = Path(__file__).parents[1]
    return subprocess.run(command, capture_output=True, text=True, cwd=root)


def test_a_refusal_as_a_process(tmp_path):
    result = as_a_process(tmp_path / "missing", tmp_path / "out")
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: source ") and result.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
