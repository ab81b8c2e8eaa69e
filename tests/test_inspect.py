"""inspect: describes any source, and converts nothing."""

import json

import numpy as np
import pytest
from convert_sources import (
    draft_tensors,
    run,
    target_tensors,
    write_source,
)

from poss_jax.config.reading import UserError
from poss_jax.convert.__main__ import main


def show(source, *flags):
    """Everything that is printed about a source: text, and the JSON of the last line."""
    main(["inspect", str(source), *flags])


def read(capsys):
    *lines, last = capsys.readouterr().out.splitlines()
    return "\n".join(lines), json.loads(last)


def test_target(tmp_path, capsys):
    rope = {"rope_type": "linear", "factor": 2.0}
    source = write_source(tmp_path / "t", target_tensors(), rope_scaling=rope, eos_token_id=[3, 5])
    (source / "tokenizer.json").write_text("{}")
    show(source)
    text, summary = read(capsys)
    assert "a target of 2 layers" in text
    assert "width 8, mlp 12, 2 heads of 4, 1 for keys and values" in text
    assert "linear, theta 10000, factor 2; up to 2048 positions" in text
    assert "16 tokens, stop tokens 3, 5" in text
    assert "tokenizer.json" in text
    assert "model.layers.{0..1}.mlp.up_proj.weight" in text
    assert f"convert target --source {source} --output DIR" in text
    assert summary == {
        "source": str(source),
        "family": "target",
        "method": None,
        "parameters": sum(value.size for value in target_tensors().values()),
        "dtypes": ["float32"],
        "assumed": [],
        "needs": None,
        "refused": None,
    }


def test_draft_that_says_all(tmp_path, capsys):
    source = write_source(tmp_path / "PosS3-Llama2-13B-Chat", draft_tensors(2), bias=True)
    show(source)
    text, summary = read(capsys)
    assert "a poss3 draft of 2 specialists, positions per specialist 3,3, trained depth 6" in text
    assert "meta-llama/Llama-2-13b-chat-hf" in text
    assert summary["method"] == "poss3"
    assert summary["needs"] is summary["refused"] is None
    assert [f"assumed: {line}" in text for line in summary["assumed"]] == [True] * 5
    assert any("fc without bias" in line for line in summary["assumed"])


def test_draft_whose_spans_nobody_knows(tmp_path, capsys):
    show(write_source(tmp_path / "draft", draft_tensors(2)))
    text, summary = read(capsys)
    assert "a PosS draft of 2 specialists" in text
    assert "--positions-per-specialist N,N,... --output DIR" in text
    assert "--positions-per-specialist 3,3" in summary["needs"]
    assert summary["refused"] is None
    assert f"needs: {summary['needs']}" in text


@pytest.mark.parametrize(
    ("tensors", "config", "message"),
    [
        (target_tensors(extra=(3,)), {"architectures": ["SomeForCausalLM"]}, "unknown extra [3]"),
        (draft_tensors(), {"architectures": ["DFlashDraftModel"]}, "a DFlash draft (DFlashDraft"),
    ],
)
def test_what_would_be_refused(tmp_path, capsys, tensors, config, message):
    with pytest.raises(SystemExit) as caught:
        show(write_source(tmp_path / "source", tensors, **config))
    assert caught.value.code == 1
    text, summary = read(capsys)
    assert message in summary["refused"] and f"refused: {summary['refused']}" in text
    assert config["architectures"][0] in text and "convert with" not in text
    assert ("a DFlash draft, which fills a block of masked" in text) == ("DFlash" in message)
    assert summary["parameters"] == sum(np.size(value) for value in tensors.values())
    assert next(iter(tensors)).partition("layers.")[0] in text


def test_model_folders(tmp_path, tiny, capsys):
    source = write_source(tmp_path / "source", draft_tensors(2))
    spans = {"positions_per_specialist": "1,3"}
    run("draft", source=source, target=tiny / "target", output=tmp_path / "draft", **spans)
    capsys.readouterr()
    show(tmp_path / "draft", "--verify")
    text, summary = read(capsys)
    assert "a poss13 draft of 2 specialists, positions per specialist 1,3, trained depth 4" in text
    assert "source, revision unknown" in text
    assert "checksums               all agree" in text
    assert "specialists/{0..1}/attention/q/weight" in text
    assert (summary["family"], summary["method"]) == ("draft", "poss13")
    show(tiny / "target")
    text, summary = read(capsys)
    assert "a model folder: a target of 2 layers" in text and "checksums" not in text
    assert summary["parameters"] == sum(value.size for value in target_tensors().values())
    with pytest.raises(UserError, match="--verify: want a model folder"):
        show(tiny / "source", "--verify")
