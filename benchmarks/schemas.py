"""JSON schemas of the kinds that clients send, small and different each time they are drawn."""

import random
from collections.abc import Callable, Iterator
from typing import Any

Schema = dict[str, Any]

_NAMES = ("name", "title", "city", "color", "count", "price", "score", "owner", "tag", "level")
_WORDS = ("red", "green", "blue", "small", "large", "open", "done", "cat", "dog", "north", "south")
_PATTERNS = ("^[A-Z][a-z]{2,8}$", "^[0-9]{3}-[0-9]{4}$", "^(alpha|beta|gamma)$", "^#[0-9a-f]{6}$",
             "^v[0-9]+\\.[0-9]+$", "^[a-z]+(-[a-z]+){0,2}$")  # fmt: skip
_FORMATS = ("date", "uuid", "ipv4", "ipv6")


def draw_schemas(num_each: int, seed: int = 0) -> Iterator[tuple[str, Schema]]:
    """Draws some schemas of every kind, with the kind's name."""
    rng = random.Random(seed)
    for _ in range(num_each):
        for kind, draw in KINDS.items():
            yield kind, draw(rng)


def _string(rng: random.Random) -> Schema:
    return {"type": "string", "minLength": rng.randint(0, 2), "maxLength": rng.randint(3, 12)}


def _integer(rng: random.Random) -> Schema:
    low = rng.randint(-50, 50)
    return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 500)}


def _number(rng: random.Random) -> Schema:
    low = rng.randint(-5, 5)
    return {"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": low + 1.5}


def _multiple(rng: random.Random) -> Schema:
    return {"type": "integer", "multipleOf": rng.choice((2, 5, 7, 10)), "minimum": 0, "maximum": 99}


def _enum(rng: random.Random) -> Schema:
    return {"enum": rng.sample(_WORDS, 3)}


def _mixed_enum(rng: random.Random) -> Schema:
    return {"enum": [rng.choice(_WORDS), rng.randint(0, 9), None, True, [1], {"a": 1}]}


def _const(rng: random.Random) -> Schema:
    return {"const": {"kind": rng.choice(_WORDS), "version": rng.randint(1, 9)}}


def _pattern(rng: random.Random) -> Schema:
    return {"type": "string", "pattern": rng.choice(_PATTERNS)}


def _format(rng: random.Random) -> Schema:
    return {"type": "string", "format": rng.choice(_FORMATS)}


def _simple(rng: random.Random) -> Schema:
    """A value without parts."""
    kinds = _string, _integer, _enum, _pattern
    return rng.choice((*(kind(rng) for kind in kinds), {"type": "boolean"}, {"type": "null"}))


def _object(rng: random.Random, part: Callable[[random.Random], Schema] = _simple) -> Schema:
    names = rng.sample(_NAMES, rng.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: part(rng) for name in names},
        "required": names,
        "additionalProperties": False,
    }


def _optional(rng: random.Random) -> Schema:
    schema = _object(rng)
    return schema | {"required": schema["required"][:1]}


def _nested(rng: random.Random) -> Schema:
    return _object(rng, lambda rng: _object(rng, _object))


def _array(rng: random.Random, part: Callable[[random.Random], Schema] = _simple) -> Schema:
    low = rng.randint(0, 2)
    size = {"minItems": low, "maxItems": low + rng.randint(0, 3)}
    return {"type": "array", "items": part(rng)} | size


def _records(rng: random.Random) -> Schema:
    return _array(rng, _object)


def _matrix(rng: random.Random) -> Schema:
    return _array(rng, lambda rng: _array(rng, _integer))


def _tuple(rng: random.Random) -> Schema:
    parts = [_simple(rng) for _ in range(rng.randint(1, 3))]
    return {"type": "array", "prefixItems": parts, "items": False, "minItems": len(parts)}


def _any_of(rng: random.Random) -> Schema:
    return {"anyOf": [_simple(rng), _object(rng), _array(rng)]}


def _union(rng: random.Random) -> Schema:
    """Objects told apart by a constant, as pydantic writes them."""

    def one(tag: str) -> Schema:
        schema = _object(rng)
        properties = {"type": {"const": tag}} | schema["properties"]
        return schema | {"properties": properties, "required": list(properties)}

    return {"oneOf": [one(tag) for tag in rng.sample(_WORDS, 2)]}


def _all_of(rng: random.Random) -> Schema:
    low = rng.randint(0, 50)
    return {"allOf": [{"type": "integer", "minimum": low}, {"maximum": low + 9}]}


def _types(rng: random.Random) -> Schema:
    return {"type": rng.sample(("boolean", "null", "integer"), 2), "minimum": 0, "maximum": 99}


def _nullable(rng: random.Random) -> Schema:
    return _object(rng, lambda rng: {"anyOf": [_simple(rng), {"type": "null"}]})


def _reference(rng: random.Random) -> Schema:
    return {
        "$defs": {"part": _object(rng)},
        "type": "object",
        "properties": {"first": {"$ref": "#/$defs/part"}, "second": {"$ref": "#/$defs/part"}},
        "required": ["first", "second"],
        "additionalProperties": False,
    }


def _recursive(rng: random.Random) -> Schema:
    following = {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}
    node = {
        "properties": {"value": _integer(rng), "next": following},
        "required": ["value", "next"],
    }
    node = node | {"type": "object", "additionalProperties": False}
    return {"$ref": "#/$defs/node", "$defs": {"node": node}}


def _further(rng: random.Random) -> Schema:
    """Names that the schema does not list, whose values it bounds."""
    schema = _object(rng)
    return schema | {"additionalProperties": _integer(rng)}


def _title(rng: random.Random) -> Schema:
    """Words about a schema that change nothing."""
    about = {"title": "Record", "description": "A record.", "examples": [1], "default": None}
    return _object(rng) | about


KINDS: dict[str, Callable[[random.Random], Schema]] = {
    draw.__name__.strip("_"): draw
    for draw in (
        *(_string, _integer, _number, _multiple, _enum, _mixed_enum, _const, _pattern, _format),
        *(_object, _optional, _nested, _array, _records, _matrix, _tuple, _any_of, _union, _all_of),
        *(_types, _nullable, _reference, _recursive, _further, _title),
    )
}
