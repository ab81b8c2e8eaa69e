"""Bodies of requests: bytes -> what pydantic makes of them, with limits on time and memory."""

import re
from typing import Any, TypeVar

from fastapi import FastAPI
from pydantic import BaseModel, ValidationError
from pydantic.json_schema import models_json_schema
from starlette.requests import ClientDisconnect, Request

from poss_jax.serving.requests import KINDS, ApiError, explain

BodyT = TypeVar("BodyT", bound=BaseModel)

_MOST_CONTAINERS = 10_000
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_JSON = re.compile(r"application/(.+\+)?json")
_NO_OBJECT = "body: want a JSON object, with Content-Type: application/json"
_SCHEMAS = "#/components/schemas/"


async def receive_body(request: Request) -> bytes:
    """Receives a body, whose type must be JSON, so that another site's page cannot send it.

    Raises:
      ApiError: another type, an empty body, or one that breaks off.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if not _JSON.fullmatch(kind):
        raise ApiError(400, _NO_OBJECT)
    try:
        content = b"".join([part async for part in request.stream()])
    except ClientDisconnect as error:
        raise ApiError(400, "body: want all of it, got a part") from error
    if not content:
        raise ApiError(400, _NO_OBJECT)
    return content


def parse_body(kind: type[BodyT], content: bytes) -> BodyT:
    """Parses the body of a request; types are strict, so "3" is refused as a number.

    Raises:
      ApiError: invalid JSON, too many lists and objects, or a wrong value in a field.
    """
    if _num_containers(content) > _MOST_CONTAINERS:
        raise ApiError(400, f"body: want at most {_MOST_CONTAINERS:,} lists and objects")
    try:
        return kind.model_validate_json(content, strict=True)
    except ValidationError as error:
        raise _refusal(error.errors(include_url=False, include_input=False)[0]) from error


def _num_containers(content: bytes) -> int:
    """Upper bound of the number of lists and objects in JSON."""
    for pattern in (None, _STRING):
        outside = pattern.sub(b"", content) if pattern else content
        if (count := outside.count(b"[") + outside.count(b"{")) <= _MOST_CONTAINERS:
            break
    return count


def _refusal(first: Any) -> ApiError:
    """Turns pydantic's first finding into an error."""
    if first["type"] == "json_invalid":
        return ApiError(400, f"body: want JSON, got none: {first['ctx']['error']}")
    if not first["loc"]:
        return ApiError(400, _NO_OBJECT)
    field, *rest = map(str, first["loc"])
    where, message = ".".join([field, *rest]), explain(first)
    if rest and field in KINDS:
        where, message = field, KINDS[field]
    shown = where if where.isascii() and len(where) <= 100 else field
    return ApiError(400, f"{shown}: {message}", param=field)


def schema_of(kind: type[BaseModel]) -> dict[str, Any]:
    """OpenAPI schema of an endpoint that parses the body itself."""
    content = {"application/json": {"schema": {"$ref": _SCHEMAS + kind.__name__}}}
    return {"requestBody": {"required": True, "content": content}}


def add_schemas(app: FastAPI, *kinds: type[BaseModel]) -> None:
    """Adds the schemas that `schema_of` names to an application's OpenAPI."""
    wanted, template, without = [(one, "validation") for one in kinds], "{model}", app.openapi
    _, found = models_json_schema(wanted, ref_template=_SCHEMAS + template)  # type: ignore[arg-type]

    def openapi() -> dict[str, Any]:
        schema = without()
        schema.setdefault("components", {}).setdefault("schemas", {}).update(found["$defs"])
        return schema

    app.openapi = openapi
