"""Checks on the way in and out of every request: id, key, name, size, log, readers that stall."""

import asyncio
import hmac
import json
import logging
import os
import re
import secrets
import time
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from contextlib import suppress
from typing import Any

from starlette.exceptions import HTTPException

from poss_jax.config.reading import UserError
from poss_jax.serving.bodies import ApiError

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

PATIENCE = 60.0
"""Seconds a client may take to send a request, and to read the reply."""

_OPEN = {"/", "/health", "/ready", "/version", "/metrics", "/docs"}
_ID = re.compile(r"[\x21-\x7e]{1,128}")
_LENGTH = re.compile(rb"[0-9]{1,20}")
_BEARER = re.compile(rb"bearer +([^ ]+)", re.IGNORECASE)
_KEY = re.compile(r"[\x21-\x7e]+")
_PORT = re.compile(r":[0-9]*$")
_MOST_BODIES = 64
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
        max_requests: int | None = None,
        allowed_hosts: Sequence[str] = (),
        patience: float = PATIENCE,
    ) -> None:
        """Wraps an application.

        Args:
          app: the application.
          api_key: key that requests to the API must carry; None: they need none.
          max_body_bytes: largest body; all bodies together may be 64 times as large.
          max_requests: most requests to the API at once; None: any number.
          allowed_hosts: names allowed in the header Host without a key, besides localhost and
            addresses; `*` allows all.
          patience: seconds a client may take to send a body, and to read the reply.
        """
        self._app, self._max_requests, self._patience = app, max_requests, patience
        self._api_key = None if api_key is None else api_key.encode()
        self._hosts = {name.lower() for name in allowed_hosts}
        self._bodies = _Bodies(max_body_bytes, patience)
        self._num_requests = 0

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serves one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        given = headers.get(b"x-request-id", b"").decode("latin-1")
        request_id = given if _ID.fullmatch(given) else secrets.token_hex(8)
        begun, status = time.monotonic(), 0
        body = _Body(self._bodies, headers, receive)

        async def send_on(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                own = [
                    (b"x-request-id", request_id.encode()),
                    (b"x-content-type-options", b"nosniff"),
                ]
                message["headers"] = [*message.get("headers", []), *own]
            elif body.has_more and not message.get("more_body", False):
                await self._send_in_time(send, {**message, "more_body": True})
                await body.drop()
                message = {"type": message["type"]}
            await self._send_in_time(send, message)

        try:
            error = self._refuse(scope, headers)
            if error is None:
                await self._serve(scope, body.receive, send_on)
            else:
                await send_error(error, send_on)
        except TimeoutError:
            status = 499  # the client does not read; the answer is cut
        finally:
            body.close()
            entry = {
                "id": request_id,
                "method": scope["method"],
                "path": scope["path"],
                "status": status,
                "milliseconds": round(1000 * (time.monotonic() - begun)),
            }
            _LOG.info("%s", json.dumps(entry))

    async def _send_in_time(self, send: Send, message: Message) -> None:
        async with asyncio.timeout(self._patience):
            await send(message)

    async def _serve(self, scope: Message, receive: Receive, send: Send) -> None:
        """Lets the application answer unless it is full; probes are always answered."""
        if scope["path"] in _OPEN:
            await self._app(scope, receive, send)
            return
        if self._max_requests is not None and self._num_requests >= self._max_requests:
            await send_error(ApiError(503, "too many requests; try again", retry_after=1), send)
            return
        self._num_requests += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._num_requests -= 1

    def _refuse(self, scope: Message, headers: dict[bytes, bytes]) -> ApiError | None:
        length = headers.get(b"content-length", b"0")
        if not _LENGTH.fullmatch(length) or int(length) > self._bodies.most:
            return self._bodies.too_large()
        if self._api_key is None:
            return self._refuse_name(headers.get(b"host", b"").decode("latin-1"))
        if scope["path"] in _OPEN:
            return None
        given = _BEARER.fullmatch(headers.get(b"authorization", b""))
        if given is not None and hmac.compare_digest(given[1], self._api_key):
            return None
        message = "want the API key in the header Authorization, as Bearer KEY"
        return ApiError(401, message, code="invalid_api_key")

    def _refuse_name(self, name: str) -> ApiError | None:
        """Refuses unknown host names, against DNS rebinding.

        A web page whose name was pointed at this machine could otherwise read answers.
        """
        plain = name.rpartition(":")[0] if _PORT.search(name) else name
        known = _LOCAL_NAME.fullmatch(name) or "*" in self._hosts or plain.lower() in self._hosts
        if known:
            return None
        return ApiError(
            403,
            "Host: want localhost, an address or the name of an --allowed-host; with an API key "
            "any name will do",
        )


class _Bodies:
    """Limits on bodies, and the bytes held now.

    Attributes:
      most: bytes of one body.
      patience: seconds for one body.
      held: bytes of all requests that are served.
    """

    def __init__(self, most: int, patience: float) -> None:
        self.most, self.patience, self.held = most, patience, 0

    def too_large(self) -> ApiError:
        """Says how large a body may be."""
        return ApiError(413, f"body: want at most {self.most:,} bytes")

    def check(self, size: int) -> None:
        """Refuses a body that is too large by itself, or together with the others."""
        if size > self.most:
            raise _Refused(self.too_large())
        if self.held > _MOST_BODIES * self.most:
            message = "the bodies of other requests take all the room; try again"
            raise _Refused(ApiError(503, message, retry_after=1))


class _Body:
    """The body of one request.

    Attributes:
      has_more: more of it is to come.
    """

    def __init__(self, all_bodies: _Bodies, headers: dict[bytes, bytes], receive: Receive) -> None:
        self._all, self._receive, self._size = all_bodies, receive, 0
        self._deadline = asyncio.get_running_loop().time() + all_bodies.patience
        is_given = headers.get(b"content-length", b"0").strip(b"0") != b""
        self.has_more = is_given or b"transfer-encoding" in headers

    async def receive(self) -> Message:
        """Receives a part; refuses a body that is too large, or takes too long."""
        try:
            async with asyncio.timeout_at(self._deadline if self.has_more else None):
                message = await self._receive()
        except TimeoutError:
            within = f"body: want all of it within {self._all.patience:.0f} seconds"
            raise _Refused(ApiError(408, within)) from None
        size = self._note(message)
        self._size += size
        self._all.held += size
        self._all.check(self._size)
        return message

    async def drop(self) -> None:
        """Receives and drops the rest for a while, so that the client reads why it was refused.

        Closing at once would reset the connection, and the error with it.
        """
        dropped = 0
        with suppress(TimeoutError):
            async with asyncio.timeout(min(_LINGER_SECONDS, self._all.patience)):
                while self.has_more and dropped < _LINGER_BYTES:
                    dropped += self._note(await self._receive())
        self.has_more = False

    def close(self) -> None:
        """Releases its bytes."""
        self._all.held -= self._size

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
        raise UserError(
            "POSS_API_KEY: want printable ASCII without spaces, got "
            f"{'nothing' if not key.strip() else 'something else'}; unset it to serve without a key"
        )
    return key


class _Refused(HTTPException):
    """Raised while the application reads a refused body; it becomes the reply."""

    def __init__(self, error: ApiError) -> None:
        more = {} if error.retry_after is None else {"retry-after": str(error.retry_after)}
        super().__init__(error.status, error.message, {"connection": "close"} | more)


async def send_error(error: ApiError, send: Send) -> None:
    """Sends an error of the API as the whole response."""
    body = json.dumps(error.body()).encode()
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    headers.append((b"content-length", str(len(body)).encode()))
    if error.retry_after is not None:
        headers.append((b"retry-after", str(error.retry_after).encode()))
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
