"""Draws which package imports which into CONTRIBUTING.md: `python tests/house_map.py`.

What a package holds is the first line of its docstring.
"""

import ast
import re
import textwrap
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "CONTRIBUTING.md"
TOPS = ("poss_jax", "train", "infer", "benchmarks")
COMMANDS = "poss_jax/__main__.py"  # drawn for all programs in poss_jax, and the names it exports
BASE = ("shapes",)  # a module that is drawn with config
MAP = re.compile(r"(?<=```text\n).*?(?=```)", re.S)
_NAMES, _WIDTH = 21, 100

Graph = dict[str, set[str]]


def imports(tree: ast.AST, *, highest: int) -> Iterator[str]:
    """Dotted names; `from a import b` gives a.b, `import poss_jax` what is then taken from it.

    Relative ones, `from .a import b`, give nothing; `highest` is how many dots they may have.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name != "poss_jax")
        elif isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "poss_jax":
            yield f"poss_jax.{node.attr}"
        elif isinstance(node, ast.ImportFrom) and node.level:
            assert node.level <= highest, f"line {node.lineno}: import by the full name"
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def read_imports(root: Path) -> Graph:
    """Maps every package to those that it imports."""
    found: Graph = {}
    for path in sorted(path for top in TOPS for path in (root / top).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        names = imports(ast.parse(path.read_text()), highest=len(parts))
        split = [name.split(".") for name in names]
        others = {_package(root, name) for name in split if name[0] in TOPS}
        package = _package(root, parts)
        found.setdefault(package, set()).update(others - {package})
    return found


def draw(root: Path) -> str:
    """Draws the packages, programs at the top, with the arrows that no others imply."""
    graph = read_imports(root)

    @cache
    def below(package: str) -> frozenset[str]:
        return frozenset(graph[package].union(*map(below, graph[package])))

    @cache
    def layer(package: str) -> int:
        return 1 + max(map(layer, graph[package]), default=-1)

    storeys = []
    for level in range(max(map(layer, graph)), -1, -1):
        entries = []
        for package in sorted(name for name in graph if layer(name) == level):
            arrows = graph[package].difference(*map(below, graph[package]))
            entries.append(_entry(root / package, package, sorted(arrows)))
        storeys.append("".join(entries))
    return "\n".join(storeys)


def _package(root: Path, parts: Sequence[str]) -> str:
    """The package of a module, as a path; `train`, `infer` and `benchmarks` are one each."""
    top, second = (*parts, "__init__")[:2]
    if top != "poss_jax":
        return top
    is_package = (root / top / second).is_dir() and parts[-1] != "__main__"
    return f"{top}/config" if second in BASE else f"{top}/{second}" if is_package else COMMANDS


def _entry(path: Path, package: str, arrows: list[str]) -> str:
    """Lines on what a package holds, and one on what it imports."""
    source = path if path.is_file() else path / "__init__.py"
    holds = (ast.get_docstring(ast.parse(source.read_text())) or "").split("\n")[0]
    margin = " " * _NAMES
    text = textwrap.fill(f"{package:{_NAMES}}{holds}", _WIDTH, subsequent_indent=margin)
    others = ", ".join(name.removeprefix("poss_jax/") for name in arrows)
    return f"{text}\n{margin}→ {others}\n" if arrows else f"{text}\n"


if __name__ == "__main__":
    PAGE.write_text(MAP.sub(lambda _: draw(ROOT), PAGE.read_text()))
