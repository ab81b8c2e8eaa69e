"""Endpoints of the OpenAI API, its errors, and a page that lists all endpoints."""

from functools import partial
from html import escape
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse
from starlette.exceptions import HTTPException

from poss_jax.serving.bodies import (
    ApiError,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    add_schemas,
    schema_of,
)
from poss_jax.serving.requests import (
    read_chat,
    read_completion,
    read_text,
    read_tokenizer,
    read_tokens,
)
from poss_jax.serving.responses import ResponseReply, ResponseRequest, read_response

if TYPE_CHECKING:
    from poss_jax.serving.app import Service

_CSP = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"
_STYLE = "body{font:16px system-ui;max-width:60em;margin:2em auto;padding:0 1em}code{color:#036}"


def add_api(app: FastAPI) -> None:
    """Adds the endpoints of the OpenAI API, those of tokens, and their page."""

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        """The one model."""
        return JSONResponse({"object": "list", "data": [service_of(request).about_model]})

    @app.get("/v1/models/{name:path}")
    async def model(request: Request, name: str) -> Response:
        """The one model, by its name."""
        service = service_of(request)
        service.check_model(name)
        return JSONResponse(service.about_model)

    @app.post("/v1/completions", openapi_extra=schema_of(CompletionRequest))
    async def completions(request: Request) -> Response:
        """Continues prompts."""
        service = service_of(request)
        body, job = await service.read(request, CompletionRequest, read_completion)
        return await service.answer(request, body, job)

    @app.post("/v1/chat/completions", openapi_extra=schema_of(ChatRequest))
    async def chat(request: Request) -> Response:
        """Answers a chat."""
        service = service_of(request)
        body, job = await service.read(request, ChatRequest, read_chat)
        return await service.answer(request, body, job)

    @app.post("/v1/responses", openapi_extra=schema_of(ResponseRequest))
    async def responses(request: Request) -> Response:
        """Answers an input of messages, calls and their results."""
        service = service_of(request)
        body, (chat, job) = await service.read(request, ResponseRequest, read_response)
        return await service.answer(request, chat, job, partial(ResponseReply, body))

    @app.get("/docs", response_class=HTMLResponse, include_in_schema=False)
    async def docs() -> Response:
        page = _list_endpoints(app.openapi())
        return HTMLResponse(page, headers={"content-security-policy": _CSP})

    _add_tokens(app)
    kinds = CompletionRequest, ChatRequest, ResponseRequest, TokenizeRequest, DetokenizeRequest
    add_schemas(app, *kinds)


def _add_tokens(app: FastAPI) -> None:
    """Adds the endpoints of tokens."""

    @app.post("/tokenize", openapi_extra=schema_of(TokenizeRequest))
    async def tokenize(request: Request) -> Response:
        """Token ids of a text, as /v1/completions would read it, or of a chat."""
        service = service_of(request)
        _, ids = await service.read(request, TokenizeRequest, read_text)
        most = service.limits.max_length
        return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": most})

    @app.post("/detokenize", openapi_extra=schema_of(DetokenizeRequest))
    async def detokenize(request: Request) -> Response:
        """The text of token ids."""
        _, text = await service_of(request).read(request, DetokenizeRequest, read_tokens)
        return JSONResponse({"prompt": text})

    @app.get("/tokenizer_info")
    async def tokenizer_info(request: Request) -> Response:
        """Special tokens and the chat template."""
        return JSONResponse(read_tokenizer(service_of(request).engine))


def add_errors(app: FastAPI) -> None:
    """Lets all errors be written as the API writes them."""

    async def of_http(request: Request, error: Any) -> Response:
        del request
        if isinstance(error, ApiError):
            return error.response()
        response = ApiError(error.status_code, str(error.detail)).response()
        response.headers.update(error.headers or {})
        return response

    async def of_anything(request: Request, error: Any) -> Response:
        del request, error  # it is in the log
        return ApiError(500, "an error of the server; see its log").response()

    app.add_exception_handler(HTTPException, of_http)
    app.add_exception_handler(Exception, of_anything)


def service_of(request: Request) -> "Service":
    """The service of the application that a request came to."""
    return request.app.state.service


def _list_endpoints(schema: dict[str, Any]) -> str:
    """A page that lists the endpoints of an OpenAPI schema, and the fields of their bodies."""
    lines = [f"<title>{escape(schema['info']['title'])}</title><style>{_STYLE}</style>"]
    lines.append("<p>The same for programs: <a href=/openapi.json>/openapi.json</a></p>")
    for path, methods in schema["paths"].items():
        for method, about in methods.items():
            lines.append(f"<h2><code>{method.upper()} {escape(path)}</code></h2>")
            lines.append(f"<p>{escape(about.get('description', ''))}</p>")
            if body := about.get("requestBody"):
                name = body["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
                fields = schema["components"]["schemas"][name]["properties"]
                lines.append(f"<p>{', '.join(f'<code>{escape(one)}</code>' for one in fields)}</p>")
    return "<!doctype html><html lang=en><meta charset=utf-8>" + "\n".join(lines)
