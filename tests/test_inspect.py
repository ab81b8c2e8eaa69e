"""inspect: describes any source, and converts nothing."""

import json
from pathlib import Path

import numpy as np
import pytest
from convert_sources import (
    TINY,
    convert_tiny,
    draft_tensors,
    draw,
    run,
    target_tensors,
    write_source,
)
from hub_server import COMMIT, Hub, run_with_hub, serve

from poss_jax.config.reading import UserError
from poss_jax.convert.__main__ import main
from poss_jax.convert.inspection import inspect


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return convert_tiny(tmp_path_factory.mktemp("tiny"))


def show(source, *flags):
    """Everything that is printed about a source: text, and the JSON of the last line."""
    main(["inspect", str(source), *flags])


def show_refused(source):
    with pytest.raises(SystemExit) as caught:
        show(source)
    assert caught.value.code == 1


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


LORA = draw({"base.q_proj.lora_A.weight": (2, 8)})


@pytest.mark.parametrize(
    ("tensors", "config", "message"),
    [
        (LORA, {}, "a LoRA adapter"),
        (target_tensors(), {"model_type": "gpt2"}, "model_type: want one of"),
        (target_tensors(extra=(3,)), {}, "unknown extra [3]"),
        (draft_tensors(), {"intermediate_size": 20}, "intermediate_size 20"),
    ],
)
def test_what_would_be_refused(tmp_path, capsys, tensors, config, message):
    config = {"architectures": ["SomeForCausalLM"]} | config
    show_refused(write_source(tmp_path / "source", tensors, **config))
    text, summary = read(capsys)
    assert message in summary["refused"] and f"refused: {summary['refused']}" in text
    assert "SomeForCausalLM" in text
    assert "convert with" not in text
    assert summary["parameters"] == sum(np.size(value) for value in tensors.values())
    assert next(iter(tensors)).partition("layers.")[0] in text


# Classes and kinds that speculators 0.9, SpecForge 0.2 and vLLM 0.32 write or read.
OTHER_DRAFTS = {
    "DSpark": ("DSparkDraftModel", "Qwen3DSparkModel", "dspark", "corrects each token by the"),
    "DFlash": ("DFlashDraftModel", "DFlash2DraftModel", "dflash", "a block of masked positions"),
    "MTP": ("DeepSeekMTPModel", "Qwen3NextMTP", "mtp", "a further layer of the target itself"),
}


@pytest.mark.parametrize("kind", OTHER_DRAFTS)
def test_other_kinds_of_drafts_are_explained(tmp_path, capsys, kind):
    *names, of_speculators, about = OTHER_DRAFTS[kind]
    configs = [{"architectures": [name]} for name in names]
    configs += [{"speculators_model_type": of_speculators, "transformer_layer_config": TINY}]
    for number, config in enumerate(configs):
        show_refused(write_source(tmp_path / str(number), draft_tensors(), **config))
        text, summary = read(capsys)
        assert f"holds                   a{'n' * (kind == 'MTP')} {kind} draft, which " in text
        assert about in text and "not supported yet" in summary["refused"]


def test_an_adapter_folder_and_an_empty_one(tmp_path, capsys):
    (tmp_path / "adapter_config.json").write_text("{}")
    show_refused(tmp_path)
    assert "a LoRA adapter" in read(capsys)[1]["refused"]
    (tmp_path / "adapter_config.json").unlink()
    show_refused(tmp_path)
    assert "config.json: No such file" in read(capsys)[1]["refused"]


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


def test_verify_finds_damage(tmp_path, tiny):
    run("target", source=tiny / "source", output=tmp_path / "target")
    record = tmp_path / "target/model.json"
    record.write_text(record.read_text().replace('"num_layers"', ' "num_layers"'))
    with pytest.raises(UserError, match="SHA256SUMS says"):
        inspect(str(tmp_path / "target"), verify=True)
    with pytest.raises(UserError, match="--verify: want a model folder"):
        inspect(str(tiny / "source"), verify=True)


@pytest.mark.parametrize("source", ["missing", "a/b/c"])
def test_source_that_is_missing(source):
    with pytest.raises(UserError, match="does not exist; give a folder, a GGUF file or a Hub id"):
        inspect(source)


INSPECT = """
import json, sys
from poss_jax.convert.inspection import inspect
print(json.dumps({name: inspect(name).summary for name in sys.argv[1:]}))
"""


def test_only_headers_are_fetched(tmp_path):
    tensors = draft_tensors(2, **{"embed_tokens.weight": (16, 8)})
    tensors["layers.0.mlp.up_proj.weight"] = np.zeros((200_000, 8), np.float32)
    big = write_source(tmp_path / "big", tensors)
    only_bin = tmp_path / "only_bin"
    only_bin.mkdir()
    (only_bin / "config.json").write_text(json.dumps(TINY))
    (only_bin / "pytorch_model.bin").write_bytes(b"no header to fetch alone")
    with serve(Hub(models={"owner/big": big, "owner/bin": only_bin})) as hub:
        said = run_with_hub(hub.url, tmp_path / "home", INSPECT, "owner/big", "owner/bin")
    assert said["owner/big"]["parameters"] == sum(value.size for value in tensors.values())
    assert "up_proj.weight want [12, 8] got [200000, 8]" in said["owner/big"]["refused"]
    assert hub.num_bytes < 200_000
    assert "pytorch_model.bin" in said["owner/bin"]["refused"]
    assert any(path.startswith(f"owner/big/resolve/{COMMIT}/") for _, path, _ in hub.requests)
