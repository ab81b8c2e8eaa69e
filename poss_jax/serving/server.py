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
    """A connection that knows how long it has waited for its client.

    When there are too many, the one that has waited longest is cut, so that new clients can always
    ask.
    """

    def __init__(self, *args: Any, most: int, **options: Any) -> None:
        """Makes a connection; `most` is the number from which on others are cut."""
        super().__init__(*args, **options)
        self._most = most
        self._since = 0.0  # when it began to wait
        self._is_paused = False  # what was sent is not read

    def connection_made(self, transport: Any) -> None:
        """Begins to wait for a request; cuts another connection if there are too many."""
        super().connection_made(transport)
        self._since = self.loop.time()
        if len(self.connections) > self._most:
            others = {one for one in self.connections if isinstance(one, Connection)} - {self}
            if waiting := [one for one in others if one._waits_for_client]:
                min(waiting, key=lambda one: one._since).transport.abort()

    def on_response_complete(self) -> None:
        """Begins to wait for the next request."""
        self._since = self.loop.time()
        super().on_response_complete()

    def pause_writing(self) -> None:
        """Begins to wait for the client to read."""
        super().pause_writing()
        self._since, self._is_paused = self.loop.time(), True

    def resume_writing(self) -> None:
        """Stops waiting: the client has read."""
        super().resume_writing()
        self._is_paused = False

    def cut_if_late(self, patience: float) -> None:
        """Cuts a connection whose client takes too long to ask or to read; see `Guard` for bodies.

        Args:
          patience: seconds for the head of a request, and for reading what was sent.
        """
        is_waiting = self._is_paused or not self._has_asked
        if is_waiting and self.loop.time() - self._since > patience:
            self.transport.abort()

    @property
    def _has_asked(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def _waits_for_client(self) -> bool:
        """True if the client is to act: to ask, to send a body, or to read."""
        is_waiting = not self._has_asked or self.cycle.more_body or self._is_paused
        return is_waiting and not self.transport.is_closing()


class DrainingServer(uvicorn.Server):
    """Answers 503 after the first SIGTERM, and stops once all answers are finished.

    It also stops when decoding has failed, so that a supervisor can restart it.
    """

    def __init__(
        self, settings: uvicorn.Config, app: FastAPI, *, drain_seconds: float, patience: float
    ) -> None:
        """Makes a server; `run` serves.

        Args:
          drain_seconds: most seconds to finish answers.
          patience: see `Connection.cut_if_late`.
        """
        super().__init__(settings)
        self._app, self._drain_seconds, self._patience = app, drain_seconds, patience
        self._is_draining = False

    @property
    def error(self) -> Exception | None:
        """The error that ended decoding; None while it runs."""
        service = getattr(self._app.state, "service", None)
        return service and service.scheduler.error

    async def on_tick(self, counter: int) -> bool:
        """Cuts slow clients; says whether to stop. uvicorn asks several times per second."""
        for connection in list(self.server_state.connections):
            connection.cut_if_late(self._patience)  # type: ignore[union-attr]
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
      api_key: key that requests must carry; None: no key.
      patience: seconds a client may take to ask, to send a body, and to read the reply.
    """
    most = config.max_requests + _SPARE_CONNECTIONS
    settings = uvicorn.Config(
        guarded(app, config, api_key=api_key, patience=patience),
        http=partial(Connection, most=most),  # type: ignore[arg-type]
        ws="none",
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=5,
    )
    return DrainingServer(settings, app, drain_seconds=config.drain_seconds, patience=patience)


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
