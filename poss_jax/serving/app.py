"""The ASGI application: endpoints of the OpenAI API over one scheduler.

    config = ServeConfig(target="models/llama", draft="models/poss3")
    uvicorn.run(guarded(create_app(config), config, api_key=None))

`create_app` has the endpoints; `guarded` adds the checks of key, host and size. The
same application runs under Ray Serve (examples/ray_serve) or any other ASGI server.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from html import escape
from pathlib import Path
from typing import Annotated, Any, cast

import jax
from fastapi import Depends, FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse
from prometheus_client import generate_latest
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from poss_jax.config import __version__
from poss_jax.config.decoding import ServeConfig
from poss_jax.engine.device import device_memory
from poss_jax.engine.engine import Engine
from poss_jax.engine.prompts import PreparedPrompt
from poss_jax.engine.scheduler import Closed, QueueFull, Scheduler
from poss_jax.engine.slots import Slots
from poss_jax.program.options import choose_sampling, load_engine
from poss_jax.serving.bodies import (
    ApiError,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    add_schemas,
    schema_of,
)
from poss_jax.serving.guard import Guard
from poss_jax.serving.requests import (
    read_chat,
    read_completion,
    read_text,
    read_tokenizer,
    read_tokens,
)
from poss_jax.serving.responses import ResponseReply, ResponseRequest, read_response
from poss_jax.serving.service import Service

_LOG = logging.getLogger(__package__)
_PROGRESS_SECONDS = 5.0
_CSP = (
    "default-src 'self'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; frame-ancestors 'none'"
)
_LIST_CSP = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"
_STYLE = "body{font:16px system-ui;max-width:60em;margin:2em auto;padding:0 1em}code{color:#036}"
_ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"description": "the request cannot be served"},
    401: {"description": "no or a wrong API key"},
    403: {"description": "a foreign name in the header Host"},
    404: {"description": "no such model"},
    413: {"description": "the body is too large"},
    429: {"description": "too many requests wait"},
    503: {"description": "starting, draining, or failed"},
}


def make_slots(engine: Engine, config: ServeConfig) -> Slots:
    """Allocates the slots of a config.

    Raises:
      UserError: what `Slots` or `Engine.check_stop` refuses, or more biases or stop ids than a
        request may have.
    """
    max_length = min(config.max_length or 8192, engine.max_length)
    engine.check_stop(config.stop)
    sizes, max_size = [config.batch_size], config.batch_size
    if jax.default_backend() == "cpu":  # where an empty slot costs as much as a full one
        sizes = sorted({min(4**power, max_size) for power in range(max_size.bit_length())})
    prefix_unit = 2**30 if config.prefix_cache >= 1 else device_memory() or 0  # 0: unknown
    slots = Slots(
        engine,
        sizes=config.slots or sizes,
        max_length=max_length,
        max_logprobs=config.max_logprobs,
        max_cache_bytes=None if config.cache_gib is None else int(config.cache_gib * 2**30),
        max_prefix_bytes=int(config.prefix_cache * prefix_unit),
    )
    sampling = choose_sampling(config.sampling, engine)
    slots.check(PreparedPrompt([0], 1, sampling, engine.stop_ids))
    num_tokens, gib = slots.prefixes.most * slots.chunk, slots.prefixes.most_bytes / 2**30
    _LOG.warning("prefix cache: room for %d tokens, at most %.2f GiB per device", num_tokens, gib)
    return slots


def create_app(
    config: ServeConfig, engine: Engine | None = None, *, slots: Slots | None = None
) -> FastAPI:
    """Makes the application; it loads the models when it starts.

    Args:
      config: settings; plain, so that it can be pickled.
      engine: loaded target and draft; None loads what the config names.
      slots: slots already made, with their engine.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        allocated = slots or await asyncio.to_thread(
            lambda: make_slots(engine or load_engine(config), config)
        )
        scheduler = Scheduler(allocated, max_queue=config.max_queue)
        answering = cast(Engine, allocated.engine)  # slots need its models alone
        app.state.service = service = Service(config, answering, scheduler)
        warm_up = asyncio.create_task(_warm_up(service))
        try:
            yield
        finally:
            warm_up.cancel()
            await asyncio.to_thread(service.close)

    app = FastAPI(
        title="poss_jax",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        responses=_ERRORS,
    )
    add_errors(app)
    _add_state(app)
    add_api(app)
    return app


def guarded(app: FastAPI, config: ServeConfig, *, api_key: str | None) -> Any:
    """Puts an application behind the checks of `guard.py`, and lets other sites' pages ask it."""
    guard = Guard(
        app,
        api_key=api_key,
        max_body_bytes=config.max_body_bytes,
        max_requests=config.max_requests,
        allowed_hosts=config.allowed_hosts,
    )
    if not config.allowed_origins:
        return guard
    return CORSMiddleware(
        guard,
        allow_origins=config.allowed_origins,
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=["x-request-id", "retry-after"],
    )


async def _warm_up(service: Service) -> None:
    """Compiles in another thread, and logs how far it is."""
    begun, scheduler = time.monotonic(), service.scheduler
    compiling = asyncio.create_task(asyncio.to_thread(scheduler.warm_up))
    while not (await asyncio.wait([compiling], timeout=_PROGRESS_SECONDS))[0]:
        if scheduler.compilation is not None:
            _LOG.warning("%s%s", "ready; " if service.is_ready else "", scheduler.compilation)
    with suppress(Closed):  # the scheduler has logged why
        await compiling
        _LOG.warning("%s in %.0f s", scheduler.compilation, time.monotonic() - begun)


async def _find_service(request: Request) -> Service:
    return request.app.state.service


ServiceOf = Annotated[Service, Depends(_find_service)]


def _add_state(app: FastAPI) -> None:
    """Adds the endpoints for health, version and metrics."""

    @app.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def page() -> Response:
        text = (Path(__file__).parent / "chat.html").read_text()
        return HTMLResponse(text, headers={"content-security-policy": _CSP})

    @app.get("/health")
    async def health(service: ServiceOf) -> Response:
        """Alive: the thread that decodes has not failed."""
        if service.scheduler.error is not None:
            raise ApiError(503, "decoding failed; restart the server")
        return JSONResponse({"status": "ok"})

    @app.get("/ready")
    async def ready(service: ServiceOf) -> Response:
        """Ready: answers requests. Some sizes of batch may still be compiled."""
        progress = str(service.scheduler.compilation)
        if not service.is_ready:
            message = "draining" if service.is_draining else f"starting: {progress}"
            raise ApiError(503, message, retry_after=1)
        state = {"is_compiled": service.is_compiled, "progress": progress}
        return JSONResponse({"status": "ok", **state})

    @app.get("/version")
    async def version() -> Response:
        """The version of poss_jax."""
        return JSONResponse({"version": __version__})

    @app.get("/metrics")
    async def metrics(service: ServiceOf) -> Response:
        """Metrics in Prometheus' format."""
        text = generate_latest(service.metrics)  # type: ignore[arg-type]
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


def add_api(app: FastAPI) -> None:
    """Adds the endpoints of the OpenAI API, for tokens, and their page."""

    @app.get("/v1/models")
    async def models(service: ServiceOf) -> Response:
        """The one model."""
        return JSONResponse({"object": "list", "data": [service.about_model]})

    @app.get("/v1/models/{name:path}")
    async def model(service: ServiceOf, name: str) -> Response:
        """The one model, by its name."""
        service.check_model(name)
        return JSONResponse(service.about_model)

    @app.post("/v1/completions", openapi_extra=schema_of(CompletionRequest))
    async def completions(request: Request, service: ServiceOf) -> Response:
        """Continues prompts."""
        _, job = await service.read(request, CompletionRequest, read_completion)
        return await service.answer(request, job)

    @app.post("/v1/chat/completions", openapi_extra=schema_of(ChatRequest))
    async def chat(request: Request, service: ServiceOf) -> Response:
        """Answers a chat."""
        _, job = await service.read(request, ChatRequest, read_chat)
        return await service.answer(request, job)

    @app.post("/v1/responses", openapi_extra=schema_of(ResponseRequest))
    async def responses(request: Request, service: ServiceOf) -> Response:
        """Answers an input of messages, calls and their results."""
        body, job = await service.read(request, ResponseRequest, read_response)
        return await service.answer(request, job, partial(ResponseReply, body))

    @app.post("/tokenize", openapi_extra=schema_of(TokenizeRequest))
    async def tokenize(request: Request, service: ServiceOf) -> Response:
        """Token ids of a text, as /v1/completions would read it, or of a chat."""
        _, ids = await service.read(request, TokenizeRequest, read_text)
        max_length = service.limits.max_length
        return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": max_length})

    @app.post("/detokenize", openapi_extra=schema_of(DetokenizeRequest))
    async def detokenize(request: Request, service: ServiceOf) -> Response:
        """The text of token ids."""
        _, text = await service.read(request, DetokenizeRequest, read_tokens)
        return JSONResponse({"prompt": text})

    @app.get("/tokenizer_info")
    async def tokenizer_info(service: ServiceOf) -> Response:
        """Special tokens and the chat template."""
        return JSONResponse(read_tokenizer(service.engine))

    @app.get("/docs", response_class=HTMLResponse, include_in_schema=False)
    async def docs() -> Response:
        page = _list_endpoints(app.openapi())
        return HTMLResponse(page, headers={"content-security-policy": _LIST_CSP})

    kinds = CompletionRequest, ChatRequest, ResponseRequest, TokenizeRequest, DetokenizeRequest
    add_schemas(app, *kinds)


def add_errors(app: FastAPI) -> None:
    """Lets all errors be written as the API writes them."""

    async def respond(_: Request, error: Any) -> Response:
        match error:
            case ApiError():
                return error.response()
            case QueueFull():
                error = ApiError(429, "too many requests wait; try again", retry_after=1)
            case Closed():
                error = ApiError(503, "the server stops; try another one", retry_after=1)
            case HTTPException():
                response = ApiError(error.status_code, str(error.detail)).response()
                response.headers.update(error.headers or {})
                return response
            case _:
                error = ApiError(500, "an error of the server; see its log")
        return error.response()

    for kind in (QueueFull, Closed, HTTPException, Exception):
        app.add_exception_handler(kind, respond)


def _list_endpoints(schema: dict[str, Any]) -> str:
    """A page that lists the endpoints of an OpenAPI schema, and the fields of their bodies."""
    lines = [f"<title>{escape(schema['info']['title'])}</title><style>{_STYLE}</style>"]
    lines.append("<p>The same for programs: <a href=/openapi.json>/openapi.json</a></p>")
    for path, methods in schema["paths"].items():
        for method, operation in methods.items():
            lines.append(f"<h2><code>{method.upper()} {escape(path)}</code></h2>")
            lines.append(f"<p>{escape(operation.get('description', ''))}</p>")
            if body := operation.get("requestBody"):
                name = body["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
                fields = schema["components"]["schemas"][name]["properties"]
                lines.append(f"<p>{', '.join(f'<code>{escape(key)}</code>' for key in fields)}</p>")
    return "<!doctype html><html lang=en><meta charset=utf-8>" + "\n".join(lines)
