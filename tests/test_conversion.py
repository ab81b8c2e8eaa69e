"""What users name as a model: folders, checkpoints, files and Hub ids, converted once."""

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from convert_sources import draft_tensors, target_tensors, write_source
from programs import refusal

from infer.generate import main as generate
from poss_jax.bundled import default
from poss_jax.bundled.default import find_model
from poss_jax.checkpoint.record import read_record
from poss_jax.config.decoding import GenerateConfig
from poss_jax.config.reading import UserError
from poss_jax.convert.__main__ import main as convert
from poss_jax.program.arguments import read_arguments


@pytest.fixture
def conversions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """An empty cache; the arguments of the conversions, which run in this process."""
    commands: list[list[str]] = []

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        assert command[1:4] == ["-P", "-m", "poss_jax.convert"]
        commands.append(command[4:])
        try:
            convert(command[4:])
        except UserError as error:
            return subprocess.CompletedProcess(command, 2, stderr=f"tqdm\nerror: {error}\n")
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setenv("POSS_JAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(default, "subprocess", SimpleNamespace(run=run))
    return commands


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_source(tmp_path / "tiny-llama-3.2", target_tensors())


def test_a_checkpoint_is_converted_once(conversions, checkpoint, tmp_path, caplog) -> None:
    folder = Path(find_model(str(checkpoint)))
    assert folder.parent == tmp_path / "cache" / "models"
    assert folder.name.startswith("tiny-llama-3.2-") and read_record(folder).llama.vocab_size == 16
    assert f"converting {checkpoint} into {folder}, once" in caplog.text
    assert "MB" in caplog.text
    assert find_model(str(checkpoint)) == find_model(f"{checkpoint}/") == folder
    assert find_model(str(folder)) == str(folder)
    assert len(conversions) == 1
    write_source(checkpoint, target_tensors(), rms_norm_eps=0.5)
    assert find_model(str(checkpoint)) != folder and len(conversions) == 2


def test_a_draft_is_converted_for_its_target(conversions, checkpoint, tmp_path) -> None:
    draft = write_source(tmp_path / "eagle", draft_tensors())
    target = find_model(str(checkpoint))
    folder = find_model(str(draft), target=target)
    assert read_record(folder).target == read_record(target).target
    assert conversions[1][:3] == ["draft", "--target", str(target)]


def test_what_is_not_here_is_one_line(conversions: list[list[str]], tmp_path: Path) -> None:
    error = refusal(generate, "owner/no-such-model", "--prompt", "x")
    assert error.startswith("owner/no-such-model: HF_HUB_OFFLINE is set, and the cache ")
    missing = str(tmp_path / "nothing" / "here")
    assert missing in refusal(generate, missing, "--prompt", "x")
    assert len(conversions) == 1


def test_an_empty_path_is_not_the_working_folder(checkpoint, monkeypatch, conversions) -> None:
    monkeypatch.chdir(checkpoint)
    for words in (["--target", ""], [""], [".", "--draft", ""], [".", "--output", ""]):
        message = refusal(generate, *words, "--prompt", "x")
        assert message.startswith("want a path, got an empty text"), words
    assert len(conversions) == 1  # of `.`


def test_the_target_comes_first() -> None:
    def read(*words: str) -> GenerateConfig:
        return read_arguments(GenerateConfig, [*words], prog="test", doc=None)[0]

    assert read("a/b", "--prompt", "x").target == "a/b"
    config = read("--prompt", "x", "m.gguf", "sampling.temperature=1")
    assert (config.target, config.sampling.temperature) == ("m.gguf", 1)
    with pytest.raises(UserError, match="'m' and --target: both name the target"):
        read("m", "--target", "n", "--prompt", "x")
