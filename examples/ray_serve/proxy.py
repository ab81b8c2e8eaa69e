r"""Proxy in front of several servers: a stream whose server dies is continued on another one.

    python examples/ray_serve/proxy.py --upstream http://10.0.0.1:8000 \
        --upstream http://10.0.0.2:8000

The upstreams are `poss-serve` with the same models and settings, or one address of Ray Serve. A
text depends on prompt, settings and seed alone, so the proxy gives every stream a seed, remembers
the token ids that it delivered, and asks another server for the rest:

    client  <-- 5 8 2 9 | 4 7 1 ...          one stream, one id
    server a -- 5 8 2 9 X
    server b --           4 7 1 ...          prompt + 5 8 2 9, continued_tokens 4, the same seed

README.md says what is guaranteed.
"""

import argparse
import asyncio
import json
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx
import uvicorn
from continued import ContinuedStream, Settings, plain
from pool import Call, GivenUp, Pool
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from poss_jax.serving.bodies import ApiError
from poss_jax.serving.guard import Guard

_STREAMED = {"/v1/completions", "/v1/chat/completions"}
_PASSED = ("authorization", "content-type", "x-request-id")
_MAX_BODY_BYTES = 8 * 2**20
_SPARE_SECONDS = 30.0  # after the time of an answer is over, until its server counts as dead


async def unless_gone(request: Request, answer: Coroutine[Any, Any, Response]) -> Response:
    """Waits for an answer, but not for a client that has left."""

    async def wait() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, gone = asyncio.create_task(answer), asyncio.create_task(wait())
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else Response(status_code=499)
    finally:
        task.cancel()
        gone.cancel()


def create_proxy(
    urls: Sequence[str],
    settings: Settings = Settings(),  # noqa: B008
    *,
    allowed_hosts: Sequence[str] = (),
) -> Guard:
    """Makes the ASGI application in front of upstreams; `allowed_hosts` are `Guard`'s."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(limits=limits, trust_env=False) as client:
            app.state.pool = pool = Pool(urls, client)
            await pool.check()
            watch = asyncio.create_task(pool.watch())
            yield
            watch.cancel()

    async def health(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def ready(request: Request) -> Response:
        is_ready = request.app.state.pool.is_ready
        return JSONResponse({"ready": is_ready}, 200 if is_ready else 503)

    async def fetch(pool: Pool, call: Call) -> Response:
        return plain(await pool.fetch(call))

    async def forward(request: Request) -> Response:
        pool, path = request.app.state.pool, request.url.path
        headers = {key: request.headers[key] for key in _PASSED if key in request.headers}
        content = await request.body()
        silence = settings.timeout_seconds + _SPARE_SECONDS
        call = Call(request.method, path, content, headers, silence)
        body = read_object(content) if path in _STREAMED else {}
        try:
            if body.get("stream"):
                return await ContinuedStream(pool, settings, call, body).respond()
            return await unless_gone(request, fetch(pool, call))
        except GivenUp as error:
            return ApiError(503, str(error), retry_after=1).response()

    routes = [Route("/health", health), Route("/ready", ready)]
    for path in ("/", "/version", "/tokenize", "/v1/{rest:path}"):
        routes.append(Route(path, forward, methods=["GET", "POST"]))
    app = Starlette(routes=routes, lifespan=lifespan)
    return Guard(app, api_key=None, max_body_bytes=_MAX_BODY_BYTES, allowed_hosts=allowed_hosts)


def read_object(content: bytes) -> dict[str, Any]:
    """JSON object of a body; empty if it is something else, which the server refuses."""
    try:
        body = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    return body if isinstance(body, dict) else {}


def address(url: str) -> str:
    """Checks the address of a server, as --upstream gives it; argparse tells of a ValueError."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
        raise ValueError(url)
    return url


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the options and serves until a signal comes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    defaults = Settings()
    parser.add_argument(
        "--upstream", action="append", type=address, required=True, help="address of a server"
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8080)
    for name in ("max_new_tokens", "timeout_seconds"):
        value, flag = getattr(defaults, name), f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=type(value), default=value, help="as the servers have it")
    parser.add_argument(
        "--allowed-host", action="append", default=[], help="name it is reached by; '*': any"
    )
    args = parser.parse_args(arguments)
    settings = Settings(args.max_new_tokens, args.timeout_seconds)
    proxy = create_proxy(args.upstream, settings, allowed_hosts=args.allowed_host)
    uvicorn.run(proxy, host=args.host, port=args.port, access_log=False)


if __name__ == "__main__":
    main()
