"""The server as replicas under Ray Serve: the same application, several processes, one address.

    cd examples/ray_serve
    PYTHONPATH=$PWD serve run serve.yaml
    serve run app:app target=../../models/llama draft=../../models/poss3 batch_size=32

Settings are `poss-serve`'s. A replica takes requests once it is warmed up, and Ray replaces it when
its decoding fails.
"""

import asyncio
import json
from typing import Any

from ray import serve
from ray.serve import Application

from poss_jax.config.decoding import ServeConfig
from poss_jax.config.reading import build_config, read_values
from poss_jax.serving.app import create_app, guarded
from poss_jax.serving.guard import Guard, read_api_key


@serve.deployment(num_replicas=2, max_ongoing_requests=64)
@serve.ingress()
class Server:
    """One replica."""

    def __init__(self, config: ServeConfig) -> None:
        self._config = config

    def __serve_build_asgi_app__(self) -> Guard:
        """Makes the application; Ray calls this in the replica, and then starts it."""
        self._poss = create_app(self._config)
        return guarded(self._poss, self._config, api_key=read_api_key())

    async def check_health(self) -> None:
        """Waits for the warm-up at the first call; raises RuntimeError if decoding has failed."""
        service = self._poss.state.service
        while not service.is_ready and service.scheduler.error is None:
            await asyncio.sleep(0.1)
        if service.scheduler.error is not None:
            raise RuntimeError("decoding failed") from service.scheduler.error


def app(args: dict[str, Any]) -> Application:
    """Builds the Ray application.

    Args:
      args: settings of `poss-serve`, as `serve.yaml` or the command line has them.
    """
    given = [
        f"{key}={value if isinstance(value, str) else json.dumps(value)}"
        for key, value in args.items()
    ]
    config = build_config(ServeConfig, read_values(None, given), origin="arguments of app")
    return Server.bind(config)
