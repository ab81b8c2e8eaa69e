"""Names say what they hold: no assigned name or parameter is a bare word."""

import ast

import pytest
from house_map import ROOT

BARE = frozenset(
    "about after before few found given known least left most one other others own part place rest "
    "said wanted whole".split()
)
ALLOWED = {("infer/tune/search.py", "rest")}  # a field's name is a key of printed reports
FOLDERS = ("poss_jax", "train", "infer", "benchmarks")


def bare_names(source: str) -> dict[str, int]:
    """The bare words that a module assigns to or takes as parameters, and a line of each."""
    names: dict[str, int] = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names[node.id] = node.lineno
        elif isinstance(node, ast.arg):
            names[node.arg] = node.lineno
    return {name: line for name, line in names.items() if name.strip("_") in BARE}


def test_names_say_what_they_hold() -> None:
    listed = [
        f"{name}:{line} {word}"
        for top in FOLDERS
        for path in sorted((ROOT / top).rglob("*.py"))
        for name in [str(path.relative_to(ROOT))]
        for word, line in bare_names(path.read_text("utf-8")).items()
        if (name, word) not in ALLOWED
    ]
    assert not listed, "name what it is, such as row, chunk, matches, suffix or max_rows"


@pytest.mark.parametrize(
    "source",
    [
        "one = 1",
        "_one: int = 1",
        "def f(a, *, one=2): pass",
        "f = lambda *one: 0",
        "for a, (b, *one) in c: pass",
        "[one for one in a]",
        "with a as one: pass",
        "if one := a: pass",
        "class A:\n    one: int",
    ],
)
def test_a_bare_word_is_found_wherever_it_is_bound(source: str) -> None:
    assert list(bare_names(source)) == ["_one" if "_one" in source else "one"]
