"""YAML of plain values, or an error of one line."""

import math
from itertools import chain
from typing import Any

import yaml

LARGEST_TEXT = 2**18  # bytes

_MOST_NODES = 50_000  # with every alias written out


def parse_yaml(text: str) -> Any:
    """Reads a YAML document of plain values, without repeated keys.

    Raises:
      ValueError: malformed or too large; the message is one line.
    """
    if len(text) > LARGEST_TEXT:
        raise ValueError(f"want at most {LARGEST_TEXT:,} characters, got {len(text):,}")
    try:
        return yaml.load(text, _Loader)
    except RecursionError as error:
        raise ValueError("nested too deep") from error
    except Exception as error:  # PyYAML's constructors raise many kinds on malformed values
        problem = " ".join(str(error).replace('in "<unicode string>", line', "at line").split())
        raise ValueError(problem[:300]) from error


def lone_surrogates(text: str) -> set[str]:
    """Halves of characters in a text, which UTF-8 cannot encode."""
    return {letter for letter in text if "\ud800" <= letter <= "\udfff"}


class _Loader(yaml.SafeLoader):
    """The safe loader, which also refuses repeated keys, and texts and aliases that harm."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if (key.tag, key.value) in seen:
                problem = f"the key {key.value[:100]!r} is given twice"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            seen.add((key.tag, key.value))
        return node

    def compose_scalar_node(self, anchor: Any) -> Any:
        node = super().compose_scalar_node(anchor)
        if "\0" in node.value or lone_surrogates(node.value):
            problem = "text with a character that no text may hold"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
        return node

    def get_single_node(self) -> Any:
        node = super().get_single_node()
        if node is not None and _count_nodes(node, {}) > _MOST_NODES:
            raise ValueError(f"aliases stand for more than {_MOST_NODES:,} values")
        return node


def _count_nodes(node: yaml.Node, counts: dict[int, float]) -> float:
    """Counts the values below a node, aliases written out; infinite if it holds itself."""
    if id(node) not in counts:
        counts[id(node)] = math.inf
        inner = [] if isinstance(node, yaml.ScalarNode) else node.value
        flat = chain.from_iterable(one if isinstance(one, tuple) else (one,) for one in inner)
        counts[id(node)] = 1 + sum(_count_nodes(one, counts) for one in flat)
    return counts[id(node)]
