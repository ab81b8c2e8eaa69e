"""Fields that constrain an answer: OpenAI's `response_format`, vLLM's `structured_outputs`."""

import json
from typing import Any

from poss_jax.config.reading import UserError, cut
from poss_jax.engine.grammar import Grammar
from poss_jax.serving.bodies import CommonRequest

GRAMMAR_FIELDS = ("response_format", "structured_outputs")
_OBJECT = {"type": "object"}


def read_grammar(body: CommonRequest, of_calls: Grammar | None) -> Grammar | None:
    """Reads what the answer of a request must match; None: any text.

    Args:
      of_calls: what its tools demand, with which it has no other field.

    Raises:
      UserError: both fields, ones that cannot be served, or `ignore_eos`, since EOS ends a match.
    """
    candidates = [_read_response_format(body), _read_structured_outputs(body), of_calls]
    grammars = [grammar for grammar in candidates if grammar is not None]
    if of_calls and len(grammars) > 1:
        message = "not served together with strict tools or a forced call"
        raise UserError(f"{grammars[0].name}: {message}")
    if len(grammars) > 1:
        raise UserError("structured_outputs: want this or response_format, got both")
    if grammars and body.ignore_eos:
        raise UserError(f"{grammars[0].name}: not served together with ignore_eos")
    return grammars[0] if grammars else None


def _read_response_format(body: CommonRequest) -> Grammar | None:
    name, fields = "response_format", body.response_format
    if fields is None:
        return None
    match fields.get("type"):
        case "text":
            return None
        case "json_object":
            return Grammar.json_schema(_OBJECT, name)
        case "json_schema":
            schema = fields.get("json_schema")
            return Grammar.json_schema(_read_schema(schema, "schema", name), name)
    raise UserError(f"{name}: want a type of text, json_object, json_schema")


def _read_structured_outputs(body: CommonRequest) -> Grammar | None:
    name, fields = "structured_outputs", body.structured_outputs or {}
    # Empty values say something: any JSON, no choice, the empty text.
    fields = {key: value for key, value in fields.items() if value is not None}
    fields.pop("disable_any_whitespace", None)  # white space between parts of JSON is fixed
    if fields.get("json_object") is False:
        del fields["json_object"]
    if not fields:
        return None
    if len(fields) > 1:
        raise UserError(f"{name}: want one of them, got {cut(ascii(sorted(fields)))}")
    match fields:
        case {"json": _}:
            return Grammar.json_schema(_read_schema(fields, "json", name), name)
        case {"json_object": True}:
            return Grammar.json_schema(_OBJECT, name)
        case {"regex": str(pattern)}:
            return Grammar.regex(pattern, name)
        case {"choice": [*texts]} if all(isinstance(text, str) for text in texts):
            return Grammar.choice(texts, name)
        case {"grammar": str(text)}:
            return Grammar.lark(text, name)
    raise UserError(f"{name}: want json, json_object, regex, choice (texts) or grammar")


def _read_schema(fields: Any, key: str, name: str) -> dict[str, Any]:
    """Reads a JSON schema, which may be text."""
    schema = fields.get(key) if isinstance(fields, dict) else None
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{name}: want a JSON schema, got other text") from error
    if not isinstance(schema, dict):
        raise UserError(f"{name}: want a JSON schema in {key}")
    return schema
