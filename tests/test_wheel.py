"""The wheel: one package with all programs, which run without a checkout."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = {"poss_jax": "poss_jax", "train": "poss_jax/train", "infer": "poss_jax/infer"}
BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
LOAD_PROGRAMS = """
from importlib.metadata import distribution
from importlib.util import find_spec

programs = distribution("poss-jax").entry_points
print(len([program.load() for program in programs]))
assert find_spec("train") is find_spec("infer") is None
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, since setuptools writes next to the sources."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    run([sys.executable, "-c", BUILD, str(folder)], source)
    (path,) = folder.glob("*.whl")
    return path


def run(command: list[str], folder: Path) -> str:
    quick = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    environment = {name: os.environ[name] for name in os.environ if name != "PYTHONPATH"} | quick
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_wheel_holds_one_package(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    expected = {
        f"{place}/{path.relative_to(ROOT / folder).as_posix()}"
        for folder, place in PACKAGES.items()
        for path in (ROOT / folder).rglob("*.py")
    }
    assert {name for name in names if name.endswith(".py")} == expected  # see pyproject.toml
    assert {name.split("/")[0].split("-")[0] for name in names} == {"poss_jax"}
    assert {"poss_jax/infer/bench/page.html", "poss_jax/serving/chat.html"} <= set(names)
    bundled = [path for path in (ROOT / "poss_jax/bundled").rglob("*") if path.is_file()]
    assert {str(path.relative_to(ROOT)) for path in bundled if path.suffix != ".pyc"} <= set(names)


@pytest.mark.slow
def test_programs_run_where_there_is_no_checkout(wheel, fixtures, tmp_path):
    environment, folder = tmp_path / "environment", tmp_path / "empty"
    folder.mkdir()
    venv.create(environment)
    python = environment / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q"]
    run([*pip, "--no-deps", "--no-index", str(wheel)], folder)
    (site,) = environment.glob("lib/*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    assert run([str(python), "-c", LOAD_PROGRAMS], folder) == "12\n"
    poss = str(environment / "bin" / "poss")
    assert run([poss, "plot", "--help"], folder).startswith("usage: poss plot ")
    options = "--prompt import --max-new-tokens 4 --tree-depth 1 --stream"
    models = [f"--{name}={fixtures / 'format_v1' / name}" for name in ("target", "draft")]
    command = [str(environment / "bin" / "poss-generate"), *models, *options.split()]
    assert '"new_tokens": 4' in run(command, folder)
    assert list(folder.iterdir()) == []
