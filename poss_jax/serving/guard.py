"""Checks on the way in and out of every request: id, key, name, size, log."""

import asyncio
import hmac
import json
import logging
import math
import os
import re
import secrets
import time
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from contextlib import suppress
from typing import Any

from poss_jax.config.reading import UserError
from poss_jax.serving.bodies import ApiError

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

_OPEN = {"/", "/health", "/ready", "/version", "/metrics", "/docs"}
_ID = re.compile(r"[\x21-\x7e]{1,128}")
_LENGTH = re.compile(rb"[0-9]{1,20}")
_BEARER = re.compile(rb"bearer +([^ ]+)", re.IGNORECASE)
_KEY = re.compile(r"[\x21-\x7e]+")
_PORT = re.compile(r":[0-9]*$")
_LINGER_SECONDS = 5.0
_LINGER_BYTES = 2**26
_LOCAL_NAME = re.compile(r"(localhost|[0-9.]+|\[[0-9a-f:.]+\])?(:[0-9]*)?", re.IGNORECASE)
_LOG = logging.getLogger("poss_jax.access")


class Guard:
    """ASGI middleware around the application."""

    def __init__(
        self,
        app: Any,
        *,
        api_key: str | None,
        max_body_bytes: int,
        max_requests: float = math.inf,
        allowed_hosts: Sequence[str] = (),
    ) -> None:
        """Wraps an application.

        Args:
          api_key: key that requests to the API must carry; None: they need none.
          max_requests: most requests to the API at once.
          allowed_hosts: names allowed in the header Host without a key, besides localhost and
            addresses; `*` allows all.
        """
        self._app, self._max_requests = app, max_requests
        self._api_key = None if api_key is None else api_key.encode()
        self._hosts = {name.lower() for name in allowed_hosts}
        self.most_bytes, self._num_requests = max_body_bytes, 0

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serves one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        client_id = headers.get(b"x-request-id", b"").decode("latin-1")
        request_id = client_id if _ID.fullmatch(client_id) else secrets.token_hex(8)
        begun, status = time.monotonic(), 0
        body = _Body(self, headers, receive)

        async def send_on(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                extra = [
                    (b"x-request-id", request_id.encode()),
                    (b"x-content-type-options", b"nosniff"),
                ]
                extra += [(b"connection", b"close")] * body.has_more
                message["headers"] = [*message.get("headers", []), *extra]
            elif body.has_more and not message.get("more_body", False):
                await send({**message, "more_body": True})
                await body.drop()
                message = {"type": message["type"]}
            await send(message)

        error = self._refuse(scope, headers)
        is_counted = error is None and scope["path"] not in _OPEN
        self._num_requests += is_counted
        try:
            app = self._app if error is None else error.response()
            await app(scope, body.receive, send_on)
        finally:
            self._num_requests -= is_counted
            milliseconds = round(1000 * (time.monotonic() - begun))
            entry = {"id": request_id, "method": scope["method"], "path": scope["path"]}
            entry |= {"status": status, "milliseconds": milliseconds}
            _LOG.info("%s", json.dumps(entry))

    def _refuse(self, scope: Message, headers: dict[bytes, bytes]) -> ApiError | None:
        length, is_open = headers.get(b"content-length", b"0"), scope["path"] in _OPEN
        if not _LENGTH.fullmatch(length) or int(length) > self.most_bytes:
            return self.too_large()
        if self._api_key is None:
            # Against DNS rebinding: a web page whose name was pointed at this machine could
            # otherwise read answers.
            name = headers.get(b"host", b"").decode("latin-1")
            plain = _PORT.sub("", name)
            if not (_LOCAL_NAME.fullmatch(name) or self._hosts & {"*", plain.lower()}):
                message = "Host: want localhost, an address or the name of an --allowed-host; "
                return ApiError(403, f"{message}with an API key any name will do")
        elif not is_open:
            match = _BEARER.fullmatch(headers.get(b"authorization", b""))
            if match is None or not hmac.compare_digest(match[1], self._api_key):
                message = "want the API key in the header Authorization, as Bearer KEY"
                return ApiError(401, message, code="invalid_api_key")
        if self._num_requests >= self._max_requests and not is_open:  # probes are always answered
            return ApiError(503, "too many requests; try again", retry_after=1)
        return None

    def too_large(self) -> ApiError:
        """Says how large a body may be."""
        return ApiError(413, f"body: want at most {self.most_bytes:,} bytes")


class _Body:
    """The body of one request; `has_more` while a part of it is to come."""

    def __init__(self, guard: Guard, headers: dict[bytes, bytes], receive: Receive) -> None:
        self._guard, self._receive, self._size = guard, receive, 0
        has_length = headers.get(b"content-length", b"0").strip(b"0") != b""
        self.has_more = has_length or b"transfer-encoding" in headers

    async def receive(self) -> Message:
        """Receives a part; ApiError: the body is too large."""
        message = await self._receive()
        self._size += self._note(message)
        if self._size > self._guard.most_bytes:
            raise self._guard.too_large()
        return message

    async def drop(self) -> None:
        """Receives and drops the rest for a while, so that the client reads why it was refused.

        Closing at once would reset the connection, and the error with it.
        """
        dropped = 0
        with suppress(TimeoutError):
            async with asyncio.timeout(_LINGER_SECONDS):
                while self.has_more and dropped < _LINGER_BYTES:
                    dropped += self._note(await self._receive())
        self.has_more = False

    def _note(self, message: Message) -> int:
        self.has_more = message.get("more_body", False)
        return len(message.get("body", b""))


def read_api_key() -> str | None:
    """Reads the key of the API from the environment; None if there is none.

    Raises:
      UserError: it cannot be sent in a header.
    """
    key = os.environ.get("POSS_API_KEY")
    if key is not None and not _KEY.fullmatch(key):
        message = "POSS_API_KEY: want printable ASCII without spaces"
        raise UserError(f"{message}; unset it to serve without a key")
    return key
