"""uvicorn's server that also finishes answers, and ends if decoding fails.

server = DrainingServer(create_app(config), config, api_key=None)
server.run(sockets=[listen("127.0.0.1", 8000)])
"""

import logging
import os
import signal
import socket
import threading
from types import FrameType

import uvicorn
from fastapi import FastAPI

from poss_jax.config.decoding import ServeConfig
from poss_jax.config.reading import UserError
from poss_jax.serving.app import guarded

_LOG = logging.getLogger(__package__)
_BACKLOG = 2048  # as uvicorn's


class DrainingServer(uvicorn.Server):
    """Answers 503 after the first SIGTERM, and stops once all answers are finished.

    It also stops when decoding has failed, so that a supervisor can restart it.
    """

    def __init__(self, app: FastAPI, config: ServeConfig, *, api_key: str | None) -> None:
        """Makes the server of an application; `api_key`: key that requests must carry, if any."""
        settings = uvicorn.Config(
            guarded(app, config, api_key=api_key),
            http="h11",
            ws="none",
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=5,
        )
        super().__init__(settings)
        self._app, self._drain_seconds, self._is_draining = app, config.drain_seconds, False

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


def listen(host: str, port: int) -> socket.socket:
    """Reserves a port; connections are answered once a server runs.

    Raises:
      UserError: no such address, or the port is taken.
    """
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        has_both = family == socket.AF_INET6  # it takes connections of IPv4, too
        return socket.create_server(
            address, family=family, backlog=_BACKLOG, dualstack_ipv6=has_both
        )
    except (OSError, ValueError) as error:  # no such name; no IPv6
        raise UserError(
            f"host {host}, port {port}: {error}; choose others with --host and --port"
        ) from error
