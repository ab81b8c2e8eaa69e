"""Untrusted YAML: plain values within limits, or an error of one line."""

from typing import Any

import yaml

LARGEST_TEXT = 2**18  # bytes
_DEEPEST = 50
_MOST_NODES = 50_000  # an alias counts its contents each time
_MOST_BITS = 1024

_TAGS = ("null", "bool", "int", "float", "str", "seq", "map", "timestamp")


def parse_yaml(text: str) -> Any:
    """Reads a YAML document of plain values, without repeated keys.

    Raises:
      ValueError: malformed or beyond the limits; the message is one line.
    """
    if len(text) > LARGEST_TEXT:
        raise ValueError(f"want at most {LARGEST_TEXT:,} characters, got {len(text):,}")
    try:
        return yaml.load(text, _Loader)
    except RecursionError as error:
        raise ValueError(f"nested more than {_DEEPEST} deep") from error
    except Exception as error:  # PyYAML's constructors raise many kinds on malformed values
        problem = " ".join(str(error).replace('in "<unicode string>", line', "at line").split())
        raise ValueError(problem[:300]) from error


def lone_surrogates(text: str) -> set[str]:
    """Halves of characters in a text, which UTF-8 cannot encode."""
    return {letter for letter in text if "\ud800" <= letter <= "\udfff"}


class _Loader(yaml.SafeLoader):
    """The safe loader with bounds on nesting, aliases and numbers."""

    def fetch_flow_collection_start(self, TokenClass: Any) -> None:
        # Well before Python's limit, which deep brackets reach only after seconds.
        if self.flow_level >= _DEEPEST:
            raise yaml.YAMLError(f"nested more than {_DEEPEST} deep")
        super().fetch_flow_collection_start(TokenClass)

    def get_single_node(self) -> Any:
        node = super().get_single_node()
        if node is not None:
            self._check(node)
        return node

    def _check(self, root: Any) -> None:
        """Walks the tree with all aliases expanded, as readers of the values will."""
        waiting, num_nodes = [(root, 1)], 0
        while waiting:
            node, depth = waiting.pop()
            num_nodes += 1
            if depth > _DEEPEST:
                raise _problem(f"nested more than {_DEEPEST} deep", node)
            if num_nodes > _MOST_NODES:
                raise _problem(f"more than {_MOST_NODES:,} values", node)
            if isinstance(node, yaml.MappingNode):
                self._check_keys(node)
                waiting += [(part, depth + 1) for pair in node.value for part in pair]
            elif isinstance(node, yaml.SequenceNode):
                waiting += [(part, depth + 1) for part in node.value]

    def _check_keys(self, node: yaml.MappingNode) -> None:
        keys = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise _problem("want plain keys", key_node)
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node)
            if key in keys:
                raise _problem(f"the key {str(key)[:100]!r} is given twice", key_node)
            keys.add(key)

    def construct_scalar(self, node: Any) -> str:
        """Reads text that can be a file name and be encoded as UTF-8."""
        text = super().construct_scalar(node)
        if "\0" in text or lone_surrogates(text):
            raise _problem("text with a character that no text may hold", node)
        return text

    def construct_yaml_int(self, node: Any) -> int:
        number = super().construct_yaml_int(node)
        if number.bit_length() > _MOST_BITS:
            raise _problem("number of too many digits", node)
        return number


def _problem(what: str, node: Any) -> yaml.constructor.ConstructorError:
    return yaml.constructor.ConstructorError(None, None, what, node.start_mark)


_Loader.yaml_constructors = {
    f"tag:yaml.org,2002:{tag}": getattr(_Loader, f"construct_yaml_{tag}") for tag in _TAGS
} | {None: _Loader.construct_undefined}
