"""Checks on the way in and out of every request: id, key, name, size, log, readers that stall."""

import asyncio
import hmac
import ipaddress
import json
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.exceptions import HTTPException

from poss_jax.serving.requests import ApiError

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

PATIENCE = 60.0
"""Seconds that a client may take to send a request, and to read what it was sent."""

_OPEN = {"/", "/health", "/ready", "/version", "/metrics"}
_ID = re.compile(r"[\x21-\x7e]{1,128}")
_LENGTH = re.compile(rb"[0-9]{1,20}")
_LOCAL_NAME = re.compile(r"(localhost|[0-9.]+|\[[0-9a-f:.]+\])?(:[0-9]*)?", re.IGNORECASE)
_LOG = logging.getLogger("poss_jax.access")


class Guard:
    """ASGI middleware around the application."""

    def __init__(
        self, app: Any, *, api_key: str | None, max_body_bytes: int, patience: float = PATIENCE
    ) -> None:
        """Wraps an application.

        Args:
          app: the application.
          api_key: key that requests to the API must carry; None: they need none.
          max_body_bytes: largest body.
          patience: seconds that a client may take to send a body, and to read what it was sent.
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
        begun, status = time.monotonic(), 0

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

        try:
            error = self._refuse(scope, headers)
            if error is None:
                await self._app(scope, self._bounded(receive), send_on)
            else:
                await send_error(error, send_on)
        except TimeoutError:
            status = 499  # the client does not read; the answer breaks off
        finally:
            entry = {
                "id": request_id,
                "method": scope["method"],
                "path": scope["path"],
                "status": status,
                "milliseconds": round(1000 * (time.monotonic() - begun)),
            }
            _LOG.info("%s", json.dumps(entry))

    def _bounded(self, receive: Receive) -> Receive:
        """Refuses a body that is too large, or takes too long."""
        deadline = asyncio.get_running_loop().time() + self._patience
        size, has_more = 0, True

        async def receive_on() -> Message:
            nonlocal size, has_more
            try:
                async with asyncio.timeout_at(deadline if has_more else None):
                    message = await receive()
            except TimeoutError:
                raise _Refused(self._too_slow()) from None
            size += len(message.get("body", b""))
            has_more = message.get("more_body", False)
            if size > self._max_body_bytes:
                raise _Refused(self._too_large())
            return message

        return receive_on

    def _refuse(self, scope: Message, headers: dict[bytes, bytes]) -> ApiError | None:
        length = headers.get(b"content-length", b"0")
        if not _LENGTH.fullmatch(length) or int(length) > self._max_body_bytes:
            return self._too_large()
        if self._api_key is None:
            return _refuse_name(scope, headers.get(b"host", b"").decode("latin-1"))
        if scope["path"] in _OPEN:
            return None
        given = headers.get(b"authorization", b"").removeprefix(b"Bearer ")
        if hmac.compare_digest(given, self._api_key):
            return None
        return ApiError(401, "want the API key in the header Authorization", code="invalid_api_key")

    def _too_large(self) -> ApiError:
        return ApiError(413, f"body: want at most {self._max_body_bytes:,} bytes")

    def _too_slow(self) -> ApiError:
        return ApiError(408, f"body: want all of it within {self._patience:.0f} seconds")


def _refuse_name(scope: Message, name: str) -> ApiError | None:
    """Refuses other names of the address that only this machine can reach.

    The page of a name that was made to point at 127.0.0.1 could read answers (DNS rebinding).
    """
    own, _ = scope.get("server") or ("", None)
    if not is_loopback(own) or _LOCAL_NAME.fullmatch(name):
        return None
    return ApiError(403, "Host: want localhost or an address; with an API key any name will do")


def is_loopback(address: str) -> bool:
    """Tells whether only this machine can reach an address."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:  # a socket's path
        return False
    return (getattr(found, "ipv4_mapped", None) or found).is_loopback


class _Refused(HTTPException):
    """The body of a request is refused while the application reads it, which answers so."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(error.status, error.message, {"connection": "close"})


async def send_error(error: ApiError, send: Send) -> None:
    """Sends an error of the API as the whole response."""
    body = json.dumps(error.body()).encode()
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    if error.retry_after is not None:
        headers.append((b"retry-after", str(error.retry_after).encode()))
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
