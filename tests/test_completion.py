"""Completion of `poss`: the script completes commands, options and paths, as bash does it."""

import subprocess
import sys
from pathlib import Path

import pytest
from programs import refusal

from poss_jax.__main__ import make_completion
from poss_jax.program.commands import COMMANDS

ROOT = Path(__file__).parent.parent
COMPLETE = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
"$(complete -p poss | sed 's/.*-F \\([^ ]*\\).*/\\1/')" 2>/dev/null
echo "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def completed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("completion") / "poss"
    path.write_text(make_completion(["bash"]))
    return path


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("", [*COMMANDS]),
        ("gen", ["generate"]),
        ("generate --tree-d", ["--tree-depth"]),
        ("bench --overw", ["--overwrite"]),
        ("inspect --veri", ["--verify"]),
        ("convert exp", ["export"]),
        ("convert export --mod", ["--model"]),
        ("draft-vocab --co", ["--config", "--coverage"]),
        ("generate --prompts pypro", ["pyproject.toml"]),
        ("convert target --source pypro", ["pyproject.toml"]),
    ],
)
def test_bash_completes(completed, typed, expected):
    words = ["bash", "-c", COMPLETE, "bash", str(completed), "poss", *typed.split(" ")]
    found = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, check=True)
    assert sorted(found.stdout.split()) == sorted(expected)


def test_zsh_has_all_commands():
    found = make_completion(["zsh"])
    assert found.startswith("#compdef poss")
    assert all(f"{name}:" in found for name in COMMANDS)


def test_it_is_refused_in_a_line(monkeypatch):
    for words in (["csh"], [], ["bash", "zsh"]):
        assert "want bash or zsh, got" in refusal(lambda words: make_completion(words), *words)
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert "pip install 'poss-jax[completion]'" in refusal(lambda _: make_completion(["bash"]))
