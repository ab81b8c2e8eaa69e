"""Output of a run: progress bar, metrics.jsonl, and TensorBoard or Weights & Biases if wanted."""

import hashlib
import importlib.util
import logging
import resource
import sys
import time
from typing import Any

import jax
import numpy as np

from poss_jax.config.paths import AnyPath
from poss_jax.config.reading import UserError, config_to_dict
from poss_jax.config.training import TrainConfig
from poss_jax.data.progress import progress_bar

from .devices import is_first_process
from .run_folder import RunFolder

_LOG = logging.getLogger(__name__)

_DECAY = 0.98  # the running mean covers about fifty steps
_MARGIN = 1.0  # a loss near zero may jump by several times its size


class Diverged(Exception):
    """A step diverged; nothing after it is worth saving."""

    def __init__(self, step: int, reason: str) -> None:
        super().__init__(reason)
        self.step = step


class LossWatch:
    """Compares the loss of every step with the running mean of earlier steps."""

    def __init__(self, factor: float | None, level: float | None) -> None:
        self._factor = factor
        self.level = level  # the running mean; None before the first step

    def check(self, step: int, metrics: dict[str, Any]) -> None:
        """Adds a step's metrics, or raises `Diverged`."""
        loss, level = metrics["loss"], self.level
        check_finite(step, {"loss": loss, **metrics})
        if loss == 0:  # the batch has no trained token
            return
        if level is None:
            self.level = loss
            return
        if self._factor is not None and loss > max(self._factor * level, level + _MARGIN):
            raise Diverged(step, f"loss {loss:.4g}, its running mean {level:.4g}")
        self.level = _DECAY * level + (1 - _DECAY) * loss


def check_finite(step: int, metrics: dict[str, Any]) -> None:
    """Raises `Diverged` if a metric is infinite or NaN."""
    for name, value in metrics.items():
        if not np.isfinite(value).all():
            raise Diverged(step, f"{name} {value}")


class RunLog:
    """Writes a step's metrics once the next step has been started.

    So the device never waits for the host and is at most one step ahead. Methods raise `Diverged`
    if a step's numbers show it.
    """

    def __init__(self, config: TrainConfig, folder: RunFolder, first_step: int) -> None:
        self._config, self._folder = config, folder
        self._tokens_per_step = config.batch_size * config.data.sequence_length
        self._watch = LossWatch(config.explosion_factor, folder.loss_level)
        self._pending: tuple[int, dict[str, Any]] | None = None
        self._started = time.monotonic()
        self._last_line = first_step, self._started
        self._loggers = open_loggers(config, folder.path, first_step) if is_first_process() else []
        self._shown: dict[str, str] = {}
        self._progress = progress_bar(
            total=config.num_steps * self._tokens_per_step,
            initial=first_step * self._tokens_per_step,
            desc=f"train {folder.path.name}",
            unit="tok",
            unit_scale=True,
            disable=not is_first_process(),
        )

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.close()
        for logger in self._loggers:
            logger.close()

    @property
    def loss_level(self) -> float | None:
        """The running mean of the loss."""
        return self._watch.level

    def record(self, step: int, metrics: dict[str, Any]) -> None:
        """Adds the metrics of a started step; the arrays may not be computed yet."""
        self.flush()
        self._pending = step, metrics

    def flush(self) -> None:
        """Waits for the newest step."""
        if self._pending is None:
            return
        (step, arrays), self._pending = self._pending, None
        metrics = {name: np.asarray(x).tolist() for name, x in jax.device_get(arrays).items()}
        self._watch.check(step, metrics)
        self._progress.update(self._tokens_per_step)
        if step % self._config.log_every == 0 or step == self._config.num_steps:
            now, (last_step, then) = time.monotonic(), self._last_line
            self._last_line = step, now
            tokens = (step - last_step) * self._tokens_per_step
            costs = {  # the only numbers that vary between equal runs
                "seconds": round(now - self._started, 3),
                "tokens_per_second": round(tokens / max(now - then, 1e-9), 1),
                "peak_gib": round(_peak_bytes() / 2**30, 3),
            }
            self._write(step, {"tokens": step * self._tokens_per_step, **metrics, **costs})
            self._show(loss=metrics["loss"])

    def validated(self, step: int, results: dict[str, Any]) -> None:
        """Logs a validation."""
        check_finite(step, results)
        self._write(step, results)
        if self._progress.disable and is_first_process():  # no terminal
            numbers = (
                f"{name.replace('_', ' ')} {value:.4g}"
                for name, value in results.items()
                if isinstance(value, float)  # not those by depth
            )
            _LOG.warning("step %d of %d: %s", step, self._config.num_steps, ", ".join(numbers))
        if "simulated_acceptance_length" in results:
            self._show(accept=results["simulated_acceptance_length"])

    def _write(self, step: int, metrics: dict[str, Any]) -> None:
        self._folder.log({"step": step, **metrics})
        for logger in self._loggers:
            logger.log(step, scalars(metrics))

    def _show(self, **numbers: float) -> None:
        self._shown |= {name: f"{number:.3f}" for name, number in numbers.items()}
        self._shown["peak"] = f"{_peak_bytes() / 2**30:.1f}GiB"
        self._progress.set_postfix(self._shown)


def _peak_bytes() -> int:
    """Peak memory of the first device, or on CPU of the process."""
    stats = jax.local_devices()[0].memory_stats()
    if stats:
        return stats["peak_bytes_in_use"]
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class _TensorBoard:
    def __init__(self, config: TrainConfig, folder: AnyPath, first_step: int) -> None:
        from tensorboardX import SummaryWriter  # pyright: ignore[reportMissingImports]

        # Drop what an interrupted run wrote beyond its checkpoint: it is written again.
        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step + 1)
        self.close = self._writer.close

    def log(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)


class _Wandb:
    def __init__(self, config: TrainConfig, folder: AnyPath, first_step: int) -> None:
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


Logger = _TensorBoard | _Wandb
_PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb"}


def check_loggers(config: TrainConfig) -> None:
    """Raises UserError if a package that the run needs is missing."""
    for name in config.loggers:
        if importlib.util.find_spec(package := _PACKAGES[name]) is None:
            raise UserError(
                f"loggers: {name} needs the package {package}, which is not installed; "
                f"pip install 'poss-jax[{name}]', or take {name} out of loggers"
            )


def open_loggers(config: TrainConfig, folder: AnyPath, first_step: int) -> list[Logger]:
    """Opens every logger of the run; `first_step` is the last completed step."""
    kinds = {"tensorboard": _TensorBoard, "wandb": _Wandb}
    return [kinds[name](config, folder, first_step) for name in config.loggers]


def scalars(metrics: dict[str, Any]) -> dict[str, float]:
    """Splits lists: agreement [0.7, 0.6] gives agreement/depth_0 and agreement/depth_1."""
    numbers = {name: value for name, value in metrics.items() if not isinstance(value, list)}
    for name in metrics.keys() - numbers.keys():
        numbers |= {f"{name}/depth_{depth}": value for depth, value in enumerate(metrics[name])}
    return numbers
