"""The ASGI application: endpoints of the OpenAI API over one scheduler.

    config = ServeConfig(target="models/llama", draft="models/poss3")
    uvicorn.run(guarded(create_app(config), config, api_key=None))

`create_app` has the endpoints; `guarded` adds the checks of key, host and size. The
same application runs under Ray Serve (examples/ray_serve) or any other ASGI server.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, StreamingResponse
from prometheus_client import generate_latest
from starlette.middleware.cors import CORSMiddleware
from starlette.types import Receive, Scope, Send

from poss_jax.config.decoding import ServeConfig
from poss_jax.config.paths import as_path
from poss_jax.config.reading import UserError
from poss_jax.config.version import __version__
from poss_jax.engine.answers import Chunk
from poss_jax.engine.device import device_memory
from poss_jax.engine.engine import Engine
from poss_jax.engine.prompts import PreparedPrompt
from poss_jax.engine.scheduler import Closed, QueueFull, Scheduler
from poss_jax.engine.slots import Slots
from poss_jax.engine.streams import Chunks, Stream, merge
from poss_jax.program.options import load_engine
from poss_jax.serving.api import add_api, add_errors, service_of
from poss_jax.serving.bodies import (
    ApiError,
    ChatRequest,
    CommonRequest,
    parse_body,
    receive_body,
)
from poss_jax.serving.grammars import GRAMMAR_FIELDS
from poss_jax.serving.guard import PATIENCE, Guard
from poss_jax.serving.metrics import Metrics
from poss_jax.serving.replies import Reply
from poss_jax.serving.requests import Job

_LOG = logging.getLogger(__package__)
_KEEP_ALIVE_SECONDS = 10.0
_POLL_SECONDS = 0.25
_PROGRESS_SECONDS = 5.0
_LARGE_BYTES = 2**16
_SLOW = [name.encode() for name in (*GRAMMAR_FIELDS, "json_schema", "tool_choice", "strict")]
_CSP = (
    "default-src 'self'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; frame-ancestors 'none'"
)
_STOPS = "the server stops; try another one"
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": about}
    for status, about in {
        400: "the request cannot be served",
        401: "no or a wrong API key",
        403: "a foreign name in the header Host",
        404: "no such model",
        413: "the body is too large",
        429: "too many requests wait",
        503: "starting, draining, or failed",
    }.items()
}


def make_slots(engine: Engine, config: ServeConfig) -> Slots:
    """Allocates the slots of a config (see `batch_sizes`).

    Raises:
      UserError: what `Slots` refuses, more biases or stop ids than a request may have, or stop
        strings that no answer can hold.
    """
    max_length = min(config.max_length or 8192, engine.max_length)
    engine.check_stop(config.stop, max_length)
    slots = Slots(
        engine,
        sizes=config.slots or batch_sizes(config.batch_size),
        max_length=max_length,
        max_logprobs=config.max_logprobs,
        max_cache_bytes=None if config.cache_gib is None else int(config.cache_gib * 2**30),
        max_prefix_bytes=_prefix_bytes(config),
    )
    slots.check(PreparedPrompt([0], 1, config.sampling))
    num_tokens, gib = slots.prefixes.most * slots.chunk, slots.prefixes.most_bytes / 2**30
    _LOG.warning("prefix cache: room for %d tokens, at most %.2f GiB per device", num_tokens, gib)
    return slots


def _prefix_bytes(config: ServeConfig) -> int:
    """Most bytes of the prefix cache per device; nothing where the memory is unknown."""
    unit = 2**30 if config.prefix_cache >= 1 else device_memory() or 0
    return int(config.prefix_cache * unit)


def batch_sizes(most: int) -> list[int]:
    """Sizes of the batch: on CPU an empty slot costs as much as a full one, elsewhere little."""
    if jax.default_backend() != "cpu":
        return [most]
    return sorted({min(4**power, most) for power in range(most.bit_length())})


class Service:
    """State shared by the endpoints.

    Attributes:
      config: settings.
      limits: the same, with the scheduler's length limit.
      engine: target and draft.
      scheduler: decodes.
      metrics: what /metrics shows.
      is_draining: running answers finish, no new ones start.
    """

    def __init__(self, config: ServeConfig, engine: Engine, scheduler: Scheduler) -> None:
        self.config, self.engine, self.scheduler = config, engine, scheduler
        self.limits = replace(config, max_length=scheduler.max_length)
        self.metrics = Metrics(scheduler)
        self.model = config.model_name or as_path(config.target).name
        self.is_draining = False
        self._reader_of_large, self._scorer = ThreadPoolExecutor(1), ThreadPoolExecutor(1)

    def close(self) -> None:
        """Ends the scheduler and the reading threads."""
        for pool in (self._reader_of_large, self._scorer):
            pool.shutdown(wait=False, cancel_futures=True)
        self.scheduler.close()

    async def read(self, request: Request, kind: type[Any], read: Callable[..., Any]) -> Any:
        """Reads a request off the event loop: its body, and what `read` makes of it.

        Large bodies and grammars are read one at a time, which bounds their memory. After each, the
        reading thread rests as long as it worked, since pydantic holds the interpreter and probes
        want their turn.

        Raises:
          ApiError: something in it cannot be served.
        """
        content = await receive_body(request)

        def parse() -> Any:
            body = parse_body(kind, content)
            self.check_model(getattr(body, "model", None))
            return body, read(self.engine, self.limits, body)

        loop = asyncio.get_running_loop()
        if len(content) <= _LARGE_BYTES and not any(name in content for name in _SLOW):
            return await loop.run_in_executor(None, parse)
        return await loop.run_in_executor(self._reader_of_large, _and_rest, parse)

    @property
    def is_ready(self) -> bool:
        """True if the server answers requests; some programs may still be compiled."""
        is_warm = self.scheduler.warmth is not None and bool(self.scheduler.warmth.sizes)
        return is_warm and not self.is_draining and self.scheduler.error is None

    @property
    def is_compiled(self) -> bool:
        """True if nothing is left to compile."""
        return self.scheduler.warmth is not None and self.scheduler.warmth.is_done

    @property
    def about_model(self) -> dict[str, Any]:
        """The model as the API describes it."""
        about = {"id": self.model, "object": "model", "created": 0, "owned_by": "poss_jax"}
        return about | {
            "max_model_len": self.scheduler.max_length,
            "has_chat_template": bool(getattr(self.engine.tokenizer, "chat_template", None)),
        }

    def check_model(self, name: str | None) -> None:
        """Raises ApiError if another model is asked for."""
        if name is not None and name != self.model:
            raise ApiError(
                404, f"want the model {self.model}", param="model", code="model_not_found"
            )

    def submit(self, job: Job) -> list[Stream]:
        """Puts all choices of a request into the queue, or none.

        Raises:
          ApiError: the queue is full, or the server stops.
        """
        try:
            return self.scheduler.submit_all(
                job.prompts,
                stop=job.stop,
                has_logprobs=job.num_logprobs is not None,
                timeout=self.config.timeout_seconds,
            )
        except QueueFull as error:
            raise ApiError(429, "too many requests wait; try again", retry_after=1) from error
        except Closed as error:
            raise ApiError(503, _STOPS, retry_after=1) from error

    async def _submit_beside(self, job: Job) -> list[Stream]:
        """Submits; in a thread if an answer is continued, since its text is decoded first."""
        if not any(prompt.num_continued for prompt in job.prompts):
            return self.submit(job)
        submitted = asyncio.create_task(asyncio.to_thread(self.submit, job))
        try:
            return await asyncio.shield(submitted)
        except asyncio.CancelledError:
            submitted.add_done_callback(
                lambda task: task.exception() or _cancel(task.result())  # nobody reads them
            )
            raise

    async def answer(
        self, request: Request, body: CommonRequest, job: Job, kind: Callable[..., Reply] = Reply
    ) -> Response:
        """Answers a request, as one body or as a stream of events."""
        arrived = time.monotonic()
        options = body.stream_options
        reply = kind(
            self.engine,
            job,
            model=self.model,
            is_chat=isinstance(body, ChatRequest),
            options={
                "usage": bool(options and options.include_usage),
                "speculation": bool(options and options.include_speculation),
                "token_ids": bool(body.return_token_ids),
            },
        )
        if job.scores_prompt:
            await self._score(job, reply)
        streams = await self._submit_beside(job)
        interval = self.config.stream_interval_seconds if body.stream else _KEEP_ALIVE_SECONDS
        chunks = merge(streams, patience=_KEEP_ALIVE_SECONDS, interval=interval)
        chunks = self._timed(chunks, arrived)
        if body.stream:
            return _Events(reply.write_events(chunks), streams)
        try:
            return await _until_disconnected(request, reply.write_body(chunks))
        finally:
            _cancel(streams)

    async def _score(self, job: Job, reply: Reply) -> None:
        """Scores the prompts, one at a time for all requests; answers are decoded meanwhile."""

        def score(index: int) -> None:
            prompt = job.prompts[index * job.num_choices]
            reply.take_scores(index, self.scheduler.score(prompt.ids))

        try:
            for index in range(len(job.prompts) // job.num_choices):
                await asyncio.get_running_loop().run_in_executor(self._scorer, score, index)
        except Closed as error:
            raise ApiError(503, _STOPS, retry_after=1) from error

    async def _timed(self, chunks: Chunks, arrived: float) -> Chunks:
        """Passes chunks on, measures their times, and refuses an answer cut by the shutdown."""
        first: dict[int, float] = {}
        try:
            async for item in chunks:
                if item is not None:
                    answer = item[1].answer
                    is_cancelled = answer is not None and answer.stop_reason == "cancelled"
                    if is_cancelled and self.scheduler.is_closed:
                        message = "the server stops; this answer is cut"
                        raise ApiError(503, message, retry_after=1)
                    self._measure(*item, first, arrived)
                yield item
        except Closed as error:
            raise ApiError(503, "decoding failed") from error
        except UserError as error:  # a grammar that is too complex here
            raise ApiError(400, str(error), param=str(error).partition(":")[0]) from error

    def _measure(self, index: int, chunk: Chunk, first: dict[int, float], arrived: float) -> None:
        now, answer = time.monotonic(), chunk.answer
        if index not in first and chunk.output_ids:
            first[index] = now
            self.metrics.first_token.observe(now - arrived)
        if answer is not None:
            self.metrics.whole.observe(now - arrived)
            more = len(answer.output_ids) - 1
            if more > 0:
                self.metrics.per_token.observe((now - first[index]) / more)


def _and_rest(work: Callable[[], Any]) -> Any:
    """Works, and sleeps as long as that took."""
    begun = time.monotonic()
    try:
        return work()
    finally:
        time.sleep(time.monotonic() - begun)


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
        own = slots or await asyncio.to_thread(_load_slots, config, engine)
        scheduler = Scheduler(own, max_queue=config.max_queue)
        app.state.service = service = Service(config, own.engine, scheduler)
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


def _load_slots(config: ServeConfig, engine: Engine | None) -> Slots:
    return make_slots(engine or load_engine(config), config)


def guarded(
    app: FastAPI, config: ServeConfig, *, api_key: str | None, patience: float = PATIENCE
) -> Any:
    """Puts an application behind the checks of `guard.py`, and lets other sites' pages ask it."""
    guard = Guard(
        app,
        api_key=api_key,
        max_body_bytes=config.max_body_bytes,
        max_requests=config.max_requests,
        allowed_hosts=config.allowed_hosts,
        patience=patience,
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
        if scheduler.warmth is not None:
            _LOG.warning("%s%s", "ready; " if service.is_ready else "", scheduler.warmth)
    with suppress(Closed):  # the scheduler has logged why
        await compiling
        _LOG.warning("%s in %.0f s", scheduler.warmth, time.monotonic() - begun)


def _add_state(app: FastAPI) -> None:
    """Adds the endpoints for health, version and metrics."""

    @app.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def page() -> Response:
        text = (Path(__file__).parent / "chat.html").read_text()
        return HTMLResponse(text, headers={"content-security-policy": _CSP})

    @app.get("/health")
    async def health(request: Request) -> Response:
        """Alive: the thread that decodes has not failed."""
        if service_of(request).scheduler.error is not None:
            raise ApiError(503, "decoding failed; restart the server")
        return JSONResponse({"status": "ok"})

    @app.get("/ready")
    async def ready(request: Request) -> Response:
        """Ready: answers requests. Some sizes of batch may still be compiled."""
        service = service_of(request)
        if not service.is_ready:
            doing = "draining" if service.is_draining else f"starting: {service.scheduler.warmth}"
            raise ApiError(503, doing, retry_after=1)
        about = {"is_compiled": service.is_compiled, "progress": str(service.scheduler.warmth)}
        return JSONResponse({"status": "ok", **about})

    @app.get("/version")
    async def version() -> Response:
        """The version of poss_jax."""
        return JSONResponse({"version": __version__})

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        """Metrics in Prometheus' format."""
        text = generate_latest(service_of(request).metrics.registry)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


def _cancel(streams: Sequence[Stream]) -> None:
    """Cancels answers that are still being decoded."""
    for stream in streams:
        stream.cancel()


class _Events(StreamingResponse):
    """A reply in events; frees the slots of a client that leaves, even before the first event."""

    def __init__(self, events: AsyncIterator[bytes], streams: Sequence[Stream]) -> None:
        headers = {"cache-control": "no-store"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._streams = streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            _cancel(self._streams)


async def _until_disconnected(request: Request, body: Coroutine[Any, Any, Any]) -> Response:
    """Waits for a body; gives up when the client leaves."""
    task = asyncio.create_task(body)
    try:
        while not task.done():
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(task), _POLL_SECONDS)
            if not task.done() and await request.is_disconnected():
                return Response(status_code=499)
        return JSONResponse(task.result())
    finally:
        task.cancel()
