"""What every request passes on its way in and out: id, key, size, log, and readers that stall."""

import asyncio
import hmac
import json
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from poss_jax.serving.requests import ApiError

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

_OPEN = {"/", "/health", "/ready", "/version", "/metrics"}
_ID = re.compile(r"[\x21-\x7e]{1,128}")
_LOG = logging.getLogger("poss_jax.access")


class BodyTooLarge(Exception):
    """The body of a request has more bytes than may be."""


class Guard:
    """ASGI middleware around the application."""

    def __init__(
        self, app: Any, *, api_key: str | None, max_body_bytes: int, patience: float = 60.0
    ) -> None:
        """Wraps an application.

        Args:
          app: the application.
          api_key: key that requests to the API must carry; None: they need none.
          max_body_bytes: largest body.
          patience: seconds that a client may take to read what it was sent.
        """
        self._app, self._max_body_bytes, self._patience = app, max_body_bytes, patience
        self._api_key = None if api_key is None else api_key.encode()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serves one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        given = headers.get(b"x-request-id", b"").decode("latin-1")
        request_id = given if _ID.fullmatch(given) else secrets.token_hex(8)
        begun, status, size = time.monotonic(), 0, 0

        async def send_on(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                own = [
                    (b"x-request-id", request_id.encode()),
                    (b"x-content-type-options", b"nosniff"),
                ]
                message["headers"] = [*message.get("headers", []), *own]
            async with asyncio.timeout(self._patience):
                await send(message)

        async def receive_on() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self._max_body_bytes:
                raise BodyTooLarge
            return message

        try:
            error = self._refuse(scope["path"], headers)
            if error is None:
                await self._app(scope, receive_on, send_on)
            else:
                await send_error(error, send_on)
        except BodyTooLarge:
            if not status:
                await send_error(self._too_large(), send_on)
        except TimeoutError:
            status = 499  # the client does not read; its connection is dropped
            raise
        finally:
            entry = {
                "id": request_id,
                "method": scope["method"],
                "path": scope["path"],
                "status": status,
                "milliseconds": round(1000 * (time.monotonic() - begun)),
            }
            _LOG.info("%s", json.dumps(entry))

    def _refuse(self, path: str, headers: dict[bytes, bytes]) -> ApiError | None:
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > self._max_body_bytes:
            return self._too_large()
        if self._api_key is None or path in _OPEN:
            return None
        given = headers.get(b"authorization", b"").removeprefix(b"Bearer ")
        if hmac.compare_digest(given, self._api_key):
            return None
        return ApiError(401, "want the API key in the header Authorization", code="invalid_api_key")

    def _too_large(self) -> ApiError:
        return ApiError(413, f"body: want at most {self._max_body_bytes:,} bytes")


async def send_error(error: ApiError, send: Send) -> None:
    """Sends an error of the API as the whole response."""
    body = json.dumps(error.body()).encode()
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    if error.retry_after is not None:
        headers.append((b"retry-after", str(error.retry_after).encode()))
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
