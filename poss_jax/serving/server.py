"""uvicorn's server that also finishes answers, cuts slow clients, ends if decoding fails.

server = make_server(create_app(config), config, api_key=None)
server.run(sockets=[listen("127.0.0.1", 8000)])
"""

import logging
import os
import signal
import socket
import threading
from functools import partial
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from poss_jax.config.decoding import ServeConfig
from poss_jax.config.reading import UserError
from poss_jax.serving.app import guarded
from poss_jax.serving.guard import PATIENCE

_LOG = logging.getLogger(__package__)
_BACKLOG = 2048  # as uvicorn's
_SPARE_CONNECTIONS = 100  # beyond one per request: probes, clients' pools


class Connection(H11Protocol):
    """A connection that is cut when its client takes too long to ask, or to read.

    When there are too many connections, the one that has waited longest for its client is cut, so
    that new clients can always ask.
    """

    def __init__(self, *args: Any, patience: float, most: int, **options: Any) -> None:
        """Makes a connection.

        Args:
          args: uvicorn's.
          patience: seconds for the head of a request, and for reading what was sent.
          most: most connections before some are cut.
          options: uvicorn's.
        """
        super().__init__(*args, **options)
        self._patience, self._most = patience, most
        self._since = 0.0
        self._to_ask: Any = None
        self._to_read: Any = None

    def connection_made(self, transport: Any) -> None:
        """Begins to wait for a request."""
        super().connection_made(transport)
        self._since = self.loop.time()
        self._await_request()
        if len(self.connections) > self._most:
            self._make_room()

    def _make_room(self) -> None:
        """Cuts another connection: the one that has waited longest for its client."""
        others = {one for one in self.connections if isinstance(one, Connection)} - {self}
        if waiting := [one for one in others if one.waits_for_client]:
            min(waiting, key=lambda one: one._since).transport.abort()

    @property
    def waits_for_client(self) -> bool:
        """True if the client is to act: to ask, to send a body, or to read."""
        if self.transport.is_closing():
            return False
        has_asked = self.cycle is not None and not self.cycle.response_complete
        return not has_asked or self.cycle.more_body or self._to_read is not None

    def on_response_complete(self) -> None:
        """Begins to wait for the next request."""
        self._since = self.loop.time()
        super().on_response_complete()

    def data_received(self, data: bytes) -> None:
        """Receives a part of a request."""
        super().data_received(data)
        self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops the timers."""
        super().connection_lost(exc)
        self._to_ask, self._to_read = _cancelled(self._to_ask), _cancelled(self._to_read)

    def pause_writing(self) -> None:
        """Begins to wait for the client to read."""
        super().pause_writing()
        self._to_read = self.loop.call_later(self._patience, self.transport.abort)

    def resume_writing(self) -> None:
        """Stops waiting: the client has read."""
        super().resume_writing()
        self._to_read = _cancelled(self._to_read)

    def _await_request(self) -> None:
        """Starts the timer if the head of a request is still to come, else stops it."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._to_ask = _cancelled(self._to_ask)
        elif self._to_ask is None:
            self._to_ask = self.loop.call_later(self._patience, self._give_up)

    def _give_up(self) -> None:
        self._to_ask = None
        if self.cycle is None or self.cycle.response_complete:
            self.transport.abort()


def _cancelled(timer: Any) -> None:  # of asyncio, or of uvloop
    if timer is not None:
        timer.cancel()


class DrainingServer(uvicorn.Server):
    """Answers 503 after the first SIGTERM, and stops once all answers are finished.

    It also stops when decoding has failed, so that a supervisor can restart it.
    """

    def __init__(self, settings: uvicorn.Config, app: FastAPI, *, drain_seconds: float) -> None:
        """Makes a server; `run` serves.

        Args:
          settings: uvicorn's.
          app: made by `create_app`.
          drain_seconds: most seconds to finish answers.
        """
        super().__init__(settings)
        self._app, self._drain_seconds = app, drain_seconds
        self._is_draining = False

    @property
    def error(self) -> Exception | None:
        """The error that ended decoding; None while it runs."""
        service = getattr(self._app.state, "service", None)
        return service and service.scheduler.error

    async def on_tick(self, counter: int) -> bool:
        """Says whether to stop; uvicorn asks several times per second."""
        return await super().on_tick(counter) or self.error is not None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts listening and logs the address."""
        await super().startup(sockets)
        for sock in sockets or []:
            host, port = sock.getsockname()[:2]
            _LOG.warning("listening at http://%s:%d/", f"[{host}]" if ":" in host else host, port)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begins to drain; an interrupt cuts all answers; a second signal ends the process."""
        del frame
        if self._is_draining:
            os._exit(128 + sig)  # a thread may be compiling for minutes; only this ends it
        self._is_draining = True
        seconds = 0.0 if sig == signal.SIGINT else self._drain_seconds
        threading.Thread(target=self._drain, args=[seconds], daemon=True).start()

    def _drain(self, seconds: float) -> None:
        service = getattr(self._app.state, "service", None)  # absent while starting
        if service is not None:
            service.is_draining = True
            num_left = service.scheduler.num_running + service.scheduler.num_waiting
            _LOG.warning("draining: %d answers to finish", num_left)
            if not service.scheduler.drain(seconds):
                if service.scheduler.error is None:
                    _LOG.warning("the time to finish is over; the other answers are cut")
                service.scheduler.close()
        self.should_exit = True


def make_server(
    app: FastAPI, config: ServeConfig, *, api_key: str | None, patience: float = PATIENCE
) -> DrainingServer:
    """Makes the server of an application.

    Args:
      app: made by `create_app`.
      config: settings.
      api_key: key that requests must carry; None: no key.
      patience: see `Guard`.
    """
    most = config.max_requests + _SPARE_CONNECTIONS
    settings = uvicorn.Config(
        guarded(app, config, api_key=api_key, patience=patience),
        http=partial(Connection, patience=patience, most=most),  # type: ignore[arg-type]
        ws="none",
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=5,
    )
    return DrainingServer(settings, app, drain_seconds=config.drain_seconds)


def listen(host: str, port: int) -> socket.socket:
    """Reserves a port; connections are answered once a server runs.

    Raises:
      UserError: no such address, or the port is taken.
    """
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return _bind(family, address)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "no such address"
        raise UserError(
            f"host {host}, port {port}: {reason}; choose others with --host and --port"
        ) from error


def _bind(family: int, address: Any) -> socket.socket:
    sock = socket.socket(family)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(_BACKLOG)  # until then, another process may bind the same port
    except OSError:
        sock.close()
        raise
    return sock
