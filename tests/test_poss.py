"""The command `poss`: it starts at once, knows every program, names and completes them."""

import importlib
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from programs import refusal

import poss_jax
from poss_jax import __main__ as poss
from poss_jax.program.commands import COMMANDS, started_as

ROOT = Path(__file__).parent.parent
SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
IMPORTED = """
import runpy, sys
sys.argv = {argv!r}
try:
    runpy.run_module("poss_jax", run_name="__main__", alter_sys=True)
finally:
    print("imported", *sys.modules)
"""


def start(*words: str) -> tuple[str, set[str]]:
    """What `python -m poss_jax` prints, and which packages it imports."""
    code = IMPORTED.format(argv=["poss", *words])
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    printed, _, modules = result.stdout.rpartition("imported ")
    return printed, set(modules.split())


def test_it_starts_without_the_packages_of_its_programs(capsys) -> None:
    printed, modules = start()
    assert not {"jax", "numpy", "pydantic", "transformers", "tqdm"} & modules
    lines = printed.splitlines()
    assert all(any(line.startswith(f"  {name} ") for line in lines) for name in COMMANDS)
    assert len(lines) <= 24 and max(map(len, lines)) <= 80
    poss.main(["--version"])
    assert capsys.readouterr().out == f"poss_jax {poss_jax.__version__}\n"


ASKED = """
import sys
WORDS = ["--help", "--version", "--nonsense"]
from poss_jax.__main__ import find_program
from poss_jax.program.commands import COMMANDS

for name, command in COMMANDS.items():
    sys.argv = ["python -m poss_jax " + name]
    for word, ending in zip(WORDS, (SystemExit, SystemExit, Exception)):
        try:
            find_program(command.module).main([*command.words, word])
        except ending as error:
            print(type(error).__name__, error)
print("imported", *sys.modules)
"""


@pytest.mark.parametrize("is_checkout", [True, False])
def test_help_fits_a_screen_and_what_needs_no_work_imports_no_jax(is_checkout, tmp_path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", ASKED],
        env=os.environ | {"COLUMNS": "80", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        cwd=ROOT if is_checkout else tmp_path,
    )
    printed, _, modules = result.stdout.rpartition("imported ")
    assert not {"jax", "numpy", "transformers"} & set(modules.split())
    asked = rf"^SystemExit 0\nposs_jax {poss_jax.__version__}\nSystemExit 0\nUserError .*\n"
    shown = re.split(asked, printed, flags=re.M)
    assert len(shown) == len(COMMANDS) + 1 and not shown.pop(), result.stderr
    for name, text in zip(COMMANDS, shown, strict=True):
        lines = text.splitlines()
        assert lines[0].startswith("usage: python -m poss_jax") and not lines[1], name
        assert len(lines) <= 50 and max(map(len, lines)) <= 80, text
        assert f"\n    poss {name}" in text or name == "inspect", name
        assert "--json" in text or name in ("chat", "serve", "convert", "draft-vocab"), name


def test_without_arguments_generate_shows_how_to_start() -> None:
    printed, _ = start("generate")
    assert printed == start("generate", "--help")[0]
    assert ' generate --question "How do I poach an egg?" --stream' in printed


def test_every_script_of_the_package_has_a_command() -> None:
    programs = {place.removeprefix("poss_jax.") for place in SCRIPTS.values()}
    modules = {one.module.removeprefix("poss_jax.") for one in COMMANDS.values()}
    expected = {f"{name.removesuffix('.__main__')}:cli" for name in modules}
    assert {name.replace(".__main__:", ":") for name in programs} - {"__main__:cli"} == expected
    for name, place in SCRIPTS.items():
        module, words = place.split(":")[0].removesuffix(".__main__"), name.partition("-")[2]
        if words:
            assert COMMANDS[words].module.removeprefix("poss_jax.") in module, name


def test_a_command_hands_its_arguments_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    monkeypatch.setattr(sys, "argv", ["/usr/bin/poss"])
    for name in ("poss_jax.convert.__main__", "infer.bench.__main__"):
        program = importlib.import_module(name)
        monkeypatch.setattr(program, "cli", lambda: seen.append(list(sys.argv)))
    poss.main(["inspect", "folder"])
    monkeypatch.setattr(sys, "argv", ["/usr/bin/poss"])
    poss.main(["bench"])
    assert seen == [["poss", "inspect", "folder"], ["poss bench"]]


@pytest.mark.parametrize(
    ("typed", "hint"),
    [("genrate", "did you mean generate?"), ("x" * 500, "see poss --help")],
)
def test_an_unknown_command_names_the_nearest(typed, hint, capsys, monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/usr/bin/poss"])
    with pytest.raises(SystemExit) as caught:
        poss.main([typed])
    assert caught.value.code == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: unknown command") and err.count("\n") == 1
    assert err.endswith(f"{hint}\n")


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("infer/generate.py", "python -m infer.generate"),
        ("/my bench", "python -m infer.generate"),
        ("/bin/poss-generate", "poss-generate"),
        ("poss generate", "poss generate"),
        ("python -m poss_jax chat", "python -m poss_jax chat"),
        ("poss", "poss"),
    ],
)
def test_help_names_a_program_as_the_user_started_it(typed, expected, monkeypatch):
    monkeypatch.setattr(sys, "argv", [typed])
    assert started_as("infer.generate") == expected


def test_names_of_the_package_are_imported_when_they_are_used() -> None:
    for name in poss_jax.__all__:
        assert getattr(poss_jax, name)
    with pytest.raises(AttributeError, match="module 'poss_jax' has no attribute 'Enigne'"):
        _ = poss_jax.Enigne  # type: ignore[attr-defined]


# --------------------------------------------------------------------------------------------------
# Completion in a shell

COMPLETE = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
"$(complete -p poss | sed 's/.*-F \\([^ ]*\\).*/\\1/')" 2>/dev/null
echo "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def completion(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("completion") / "poss"
    path.write_text(poss.make_completion(["bash"]))
    return str(path)


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("", [*COMMANDS]),
        ("bench --overw", ["--overwrite"]),
        ("inspect --veri", ["--verify"]),
        ("convert export --mod", ["--model"]),
        ("generate --prompts pypro", ["pyproject.toml"]),
        ("convert target --source pypro", ["pyproject.toml"]),
    ],
)
def test_bash_completes(completion, typed, expected):
    words = ["bash", "-c", COMPLETE, "bash", completion, "poss", *typed.split(" ")]
    found = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, check=True)
    assert sorted(found.stdout.split()) == sorted(expected)


def test_completion_of_other_shells(monkeypatch):
    zsh = poss.make_completion(["zsh"])
    assert zsh.startswith("#compdef poss") and all(f"{name}:" in zsh for name in COMMANDS)
    for words in (["csh"], [], ["bash", "zsh"]):
        assert "want bash or zsh, got" in refusal(poss.make_completion, *words)
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert "pip install 'poss-jax[completion]'" in refusal(poss.make_completion, "bash")
