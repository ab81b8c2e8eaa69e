"""Metrics for TensorBoard and Weights & Biases, if a run asks for them."""

import hashlib
import importlib.util
from collections.abc import Iterator
from typing import Any, Protocol

from poss_jax.config.paths import AnyPath
from poss_jax.config.reading import UserError, config_to_dict
from poss_jax.config.training import TrainConfig

_PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb"}


class Logger(Protocol):
    """Receives the numbers of each step."""

    def log(self, step: int, values: dict[str, float]) -> None:
        """Logs the numbers of a step; after a resume a step may repeat."""
        ...

    def close(self) -> None:
        """Flushes what is buffered."""
        ...


class _TensorBoard:
    def __init__(self, config: TrainConfig, folder: AnyPath, first_step: int) -> None:
        del config
        from tensorboardX import SummaryWriter  # pyright: ignore[reportMissingImports]

        # Drop what an interrupted run wrote beyond its checkpoint: it is written again.
        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step + 1)

    def log(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    def __init__(self, config: TrainConfig, folder: AnyPath, first_step: int) -> None:
        del first_step
        import wandb  # pyright: ignore[reportMissingImports]

        started = (folder / "provenance.json").read_bytes() + str(folder).encode()
        self._run = wandb.init(
            project="poss_jax",
            name=folder.name,
            id=hashlib.sha256(started).hexdigest()[:16],  # a resumed run is the same one
            resume="allow",
            dir=str(folder),
            config=config_to_dict(config),
        )
        # Our own step axis: the service's must never go back, as a resumed run does.
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: dict[str, float]) -> None:
        self._run.log({"step": step, **values})

    def close(self) -> None:
        self._run.finish()


_KINDS = {"tensorboard": _TensorBoard, "wandb": _Wandb}


def check_loggers(config: TrainConfig) -> None:
    """Raises UserError if a package that the run needs is missing."""
    for name in config.loggers:
        if importlib.util.find_spec(_PACKAGES[name]) is None:
            raise UserError(
                f"loggers: {name} needs the package {_PACKAGES[name]}, which is not installed; "
                f"pip install 'poss-jax[{name}]', or take {name} out of loggers"
            )


def open_loggers(config: TrainConfig, folder: AnyPath, first_step: int) -> list[Logger]:
    """Opens every logger the run asks for.

    Args:
      config: the run.
      folder: folder of the run.
      first_step: the last completed step.
    """
    return [_KINDS[name](config, folder, first_step) for name in config.loggers]


def scalars(metrics: dict[str, Any]) -> dict[str, float]:
    """Splits lists: agreement [0.7, 0.6] gives agreement/depth_0 and agreement/depth_1."""
    return dict(_scalars(metrics))


def _scalars(metrics: dict[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in metrics.items():
        if isinstance(value, list):
            yield from ((f"{name}/depth_{depth}", item) for depth, item in enumerate(value))
        else:
            yield name, value
