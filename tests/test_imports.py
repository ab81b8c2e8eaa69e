"""Keeps the layering: who may import whom, who may touch torch, files and the terminal."""

import ast
import re
from pathlib import Path

import pytest
from house_map import MAP, PAGE, ROOT, draw, imports

LAYERS = {  # a folder of poss_jax imports from itself and from these
    "config": set(),
    "shapes": set(),
    "model": {"config", "shapes"},
    "decode": {"config", "shapes", "model"},
    "learn": {"config", "shapes", "model"},
    "checkpoint": {"config", "shapes", "model"},
    "data": {"config", "checkpoint"},
    "convert": {"config", "shapes", "model", "checkpoint"},
    "engine": {"config", "shapes", "model", "decode", "checkpoint", "data", "bundled"},
    "bundled": {"config", "checkpoint"},
    "program": {"config", "engine", "bundled"},  # what programs share
    "serving": {"config", "engine", "program"},
    "__init__": {"config", "engine", "bundled"},
}
MODULES = set(LAYERS) - {"__init__"}
PROGRAMS = {("__main__.py",), ("convert", "__main__.py"), ("draft_vocab.py",)}
OPENS_FILES = {"config", "checkpoint", "data", "engine", "convert", "bundled", "serving"}
FILE_CALLS = {"open", "read_text", "write_text", "read_bytes", "write_bytes"}
SOURCES = sorted(p for top in ("poss_jax", "train", "infer") for p in (ROOT / top).rglob("*.py"))


def calls(tree: ast.AST) -> set[str]:
    functions = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return {f.attr if isinstance(f, ast.Attribute) else getattr(f, "id", "") for f in functions}


def is_entry(node: ast.AST) -> bool:
    """Tells whether a statement is `if __name__ == "__main__"`."""
    return isinstance(node, ast.If) and "'__main__'" in ast.dump(node.test)


def after_entry(tree: ast.Module) -> list[ast.stmt]:
    """Statements that come too late when the module is run as a program."""
    entries = [index for index, node in enumerate(tree.body) if is_entry(node)]
    return tree.body[entries[0] + 1 :] if entries else []


def violations(path: Path, source: str) -> list[str]:
    """Lists the rules that `source`, as the module at `path` (relative to the root), breaks."""
    tree, (top, name, *_) = ast.parse(source), (*path.with_suffix("").parts, "")
    is_program = top != "poss_jax" or path.parts[1:] in PROGRAMS
    if not is_program and name not in LAYERS:
        return [f"poss_jax/{name} has no place in the table of tests/test_imports.py"]
    # Installed, the programs are poss_jax.train and poss_jax.infer, so they import relatively.
    forbidden = {"torch", "wandb", "argparse", "train", "infer"}
    forbidden -= {"wandb", "argparse"} if is_program else set()
    forbidden -= {"argparse"} if name == "program" else set()
    forbidden -= {"torch"} if path.stem == "torch_io" else set()
    found = [f"line {node.lineno}: runs after the program" for node in after_entry(tree)]
    if path.name != "paths.py" and "sys.executable" in source:
        found.append("starts Python without child_python")
    for target in imports(tree, highest=len(path.parts) - 1 if top != "poss_jax" else 0):
        first, second, *_ = (*target.split("."), "")
        module = second if second in MODULES else "__init__"
        if first in forbidden or "nnx" in target.split("."):
            found.append(f"imports {first if first in forbidden else 'nnx'}")
        elif first == "poss_jax" and not is_program and module not in LAYERS[name] | {name}:
            found.append(f"imports {target}")
    if not is_program:
        allowed_calls = FILE_CALLS if name in OPENS_FILES else set()
        found += [
            f"calls {call}" for call in calls(tree) & (FILE_CALLS | {"print"}) - allowed_calls
        ]
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_module_keeps_the_rules(path: Path):
    assert violations(path.relative_to(ROOT), path.read_text()) == []


def test_benchmarks_start_children_with_child_python():
    sources = {path: path.read_text() for path in (ROOT / "benchmarks").rglob("*.py")}
    assert [path for path, text in sources.items() if "sys.executable" in text] == []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("poss_jax/model/cache.py", "from poss_jax.decode.tree import expand"),
        ("poss_jax/learn/step.py", "from poss_jax.decode import drafting"),
        ("poss_jax/config/training.py", "import poss_jax.model.layers"),
        ("poss_jax/data/rows.py", "from poss_jax.model.layers import linear"),
        ("poss_jax/model/cache.py", "import poss_jax; f = poss_jax.Engine"),
        ("poss_jax/decode/speculate.py", "from poss_jax import checkpoint"),
        ("poss_jax/checkpoint/folder.py", "def f():\n  from poss_jax.convert import llama"),
        ("poss_jax/model/cache.py", "from poss_jax import Engine"),
        ("poss_jax/engine.py", "import train.main"),
        ("poss_jax/model/layers.py", "from flax import nnx"),
        ("poss_jax/model/layers.py", "Path('x').read_text()"),
        ("poss_jax/engine.py", "print(1)"),
        ("poss_jax/engine.py", "from poss_jax.program import run_program"),
        ("poss_jax/convert/llama.py", "import argparse"),
        ("poss_jax/convert/__main__.py", "import torch.nn"),
        ("poss_jax/new.py", ""),
        ("train/main.py", "from infer import bench"),
        ("infer/bench/compare.py", "import train"),
        ("train/main.py", "from train.loop import run_steps"),
        ("infer/lossless.py", "if __name__ == '__main__':\n  cli()\nSIZE = 3"),
        ("infer/lossless.py", "import subprocess, sys; subprocess.run([sys.executable])"),
    ],
)
def test_rule_is_enforced(path: str, source: str):
    assert len(violations(Path(path), source)) == 1


def test_map_shows_the_imports():
    found = MAP.search(PAGE.read_text())
    assert found and found[0] == draw(ROOT), "run python tests/house_map.py"


def test_walks_name_what_there_is():
    lines = (ROOT / "docs" / "walks.md").read_text().splitlines()
    walk = re.compile(r" +([\w/]+\.py) +([\w.]+(?:, [\w.]+)*)(?=  | ->|$)")
    found = [match.groups() for line in lines if (match := walk.match(line))]
    assert len(found) > 30
    for path, names in found:
        place = ROOT / path if path.startswith(("train", "infer")) else ROOT / "poss_jax" / path
        for name in names.split(", "):
            is_there = re.search(rf"\b(def|class) {name.rpartition('.')[2]}\b", place.read_text())
            assert is_there or f"\n{name} = " in place.read_text(), f"{path}: no {name}"
