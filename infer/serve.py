r"""Serves a target as an OpenAI-compatible server, speculatively if a draft is given.

Takes model folders (see `python -m poss_jax.convert`), without --target the small models that come
with the package. Listens at 127.0.0.1:8000; http://127.0.0.1:8000/ is a page to chat with it. If
the environment variable POSS_API_KEY is set, requests must carry it. SIGTERM finishes the answers
that are under way and then exits. Needs `pip install 'poss-jax[serve]'`.

Of several processes, started like those of a training run (docs/training.md, "Several hosts"),
the first one listens; the model is cut among the devices of all.

    python -m infer.serve
    python -m infer.serve --target models/llama --draft models/poss3 --host 0.0.0.0 --batch-size 32
    curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \
        -d '{"prompt": "def read_lines(path):", "max_tokens": 64, "temperature": 0}'
"""

import logging
import os
import signal
import socket
import threading
from collections.abc import Sequence
from dataclasses import replace
from types import FrameType

import jax

from poss_jax.config.decoding import ServeConfig
from poss_jax.config.models import MeshConfig
from poss_jax.config.reading import UserError
from poss_jax.engine.leader import follow
from poss_jax.program.options import load_engine, read_arguments
from poss_jax.program.processes import start_processes
from poss_jax.program.running import run_program

_LOG = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses arguments and serves until a signal comes."""
    config, _ = read_arguments(ServeConfig, arguments, prog="infer.serve", doc=__doc__)
    try:
        import uvicorn

        from poss_jax.serving.app import create_app, guarded, make_slots
    except ImportError as error:
        raise UserError(f"{error.name} is missing; pip install 'poss-jax[serve]'") from error
    start_processes()
    config = _on_all_devices(config)
    engine = load_engine(config)
    if jax.process_index() > 0:
        follow(make_slots(engine, config))
        return

    class DrainingServer(uvicorn.Server):
        """Answers 503 from the first signal on, and stops once all answers are finished."""

        is_draining = False

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            if self.is_draining or sig == signal.SIGINT:
                self.should_exit = self.force_exit = True
                return
            self.is_draining = True
            threading.Thread(target=self._drain, daemon=True).start()

        def _drain(self) -> None:
            service = app.state.service
            service.is_ready = False
            _LOG.warning("draining: %d answers to finish", service.scheduler.num_running)
            if not service.scheduler.drain(config.drain_seconds):
                _LOG.warning("the time to finish is over; the other answers are cut")
                service.scheduler.close()
            self.should_exit = True

    app = create_app(config, engine)
    sock = _listen(config.host, config.port)
    logging.getLogger("poss_jax.access").setLevel(logging.INFO)
    settings = uvicorn.Config(
        guarded(app, config, api_key=os.environ.get("POSS_API_KEY") or None),
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=5,
        limit_concurrency=config.max_queue + 4 * config.batch_size,
    )
    _LOG.warning("listening at http://%s:%d/", *sock.getsockname()[:2])
    DrainingServer(settings).run(sockets=[sock])


def _on_all_devices(config: ServeConfig) -> ServeConfig:
    """Gives several processes one grid of all devices, unless the config has one."""
    if jax.process_count() == 1:
        return config
    mesh = config.mesh or MeshConfig(data=1, tensor=-1)
    if mesh.sizes(jax.device_count()) == (1, 1, 1):
        raise UserError(
            f"mesh {mesh.name}: want all {jax.device_count()} devices of {jax.process_count()} "
            "processes; leave mesh out, or set mesh.tensor to -1"
        )
    return replace(config, mesh=mesh)


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        raise UserError(
            f"host {host}, port {port}: {error.strerror}; choose others with --host and --port"
        ) from error
    return sock


def cli() -> None:
    """Runs the console script `poss-serve`."""
    run_program(main)


if __name__ == "__main__":
    cli()
