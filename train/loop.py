"""The training loop: steps, validations and checkpoints, every one a function of its step.

A run shows a progress bar and writes metrics.jsonl, and TensorBoard or Weights & Biases if wanted.
"""

import hashlib
import importlib.util
import logging
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import jax
import numpy as np

from poss_jax.config.paths import AnyPath
from poss_jax.config.reading import UserError, config_to_dict
from poss_jax.config.training import TrainConfig
from poss_jax.data.progress import progress_bar
from poss_jax.data.rows import batch_at, rows_at
from poss_jax.learn.step import TrainState
from poss_jax.learn.validation import Predictions
from poss_jax.model.documents import TrainBatch
from poss_jax.program.output import format_rows

from .devices import is_first_process, preemption_notice, put_batch
from .run_folder import RunFolder
from .stages import Stage

_LOG = logging.getLogger(__name__)

StepFunction = Callable[[TrainState, TrainBatch], tuple[TrainState, dict[str, Any]]]

# For samples: tokens shown before a position, and positions per row.
_TOKENS_BEFORE = 16
_NUM_POSITIONS = 4

_DECAY = 0.98  # the running mean covers about fifty steps
_MARGIN = 1.0  # a loss near zero may jump by several times its size


# --------------------------------------------------------------------------------------------------
# Output


class Diverged(Exception):
    """A step diverged; nothing after it is worth saving."""

    def __init__(self, step: int, reason: str) -> None:
        super().__init__(reason)
        self.step = step


def next_level(
    level: float | None, step: int, metrics: dict[str, Any], factor: float | None
) -> float | None:
    """Running mean of the loss after a step (None before the first); raises `Diverged`."""
    loss = metrics["loss"]
    check_finite(step, {"loss": loss, **metrics})
    if loss == 0:  # the batch has no trained token
        return level
    if level is None:
        return loss
    if factor is not None and loss > max(factor * level, level + _MARGIN):
        raise Diverged(step, f"loss {loss:.4g}, its running mean {level:.4g}")
    return _DECAY * level + (1 - _DECAY) * loss


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
        self.loss_level = folder.loss_level  # the running mean
        self._pending: tuple[int, dict[str, Any]] | None = None
        self._started = time.monotonic()
        self._last_line = first_step, self._started
        names = config.loggers if is_first_process() else ()
        self._loggers = [LOGGERS[name](config, folder.path, first_step) for name in names]
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
        factor = self._config.explosion_factor
        self.loss_level = next_level(self.loss_level, step, metrics, factor)
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


LOGGERS = {"tensorboard": _TensorBoard, "wandb": _Wandb}
_PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb"}


def check_loggers(config: TrainConfig) -> None:
    """Raises UserError if a package that the run needs is missing."""
    for name in config.loggers:
        if importlib.util.find_spec(package := _PACKAGES[name]) is None:
            raise UserError(
                f"loggers: {name} needs the package {package}, which is not installed; "
                f"pip install 'poss-jax[{name}]', or take {name} out of loggers"
            )


def scalars(metrics: dict[str, Any]) -> dict[str, float]:
    """Splits lists: agreement [0.7, 0.6] gives agreement/depth_0 and agreement/depth_1."""
    numbers = {name: value for name, value in metrics.items() if not isinstance(value, list)}
    for name in metrics.keys() - numbers.keys():
        numbers |= {f"{name}/depth_{depth}": value for depth, value in enumerate(metrics[name])}
    return numbers


# --------------------------------------------------------------------------------------------------
# Steps


def run_steps(
    config: TrainConfig, folder: RunFolder, stage: Stage, step_fn: StepFunction, state: TrainState
) -> TrainState:
    """Trains from the state's step to the last or until a signal; returns the last state, saved.

    Raises:
      UserError: the run diverged; checkpoints from before remain.
    """
    first_step = int(state.step)
    with (
        preemption_notice() as is_told_to_stop,
        RunLog(config, folder, first_step) as log,
        ExitStack() as profiling,
    ):
        try:
            for step in range(first_step + 1, config.num_steps + 1):
                if config.profile and step == config.profile.start:
                    profiling.enter_context(jax.profiler.trace(folder.path / "profile"))
                rows = batch_at(stage.rows, step - 1, config.batch_size, config.seed)
                state, metrics = step_fn(state, put_batch(rows, stage.mesh))
                if config.profile and step == config.profile.start + config.profile.steps - 1:
                    jax.block_until_ready(metrics)
                    profiling.close()
                log.record(step, metrics)
                is_stopping = is_told_to_stop(step - first_step)
                is_validating = step == config.num_steps or step % config.validate_every == 0
                if is_stopping or is_validating or step % config.checkpoint_every == 0:
                    log.flush()  # a diverged state is not saved
                    score = _validate(config, folder, stage, log, state) if is_validating else None
                    folder.save(step, state, score=score, loss_level=log.loss_level)
                if is_stopping:
                    break
        except Diverged as error:
            raise UserError(_describe_divergence(config, folder, stage, error)) from error
    return state


def _validate(
    config: TrainConfig, folder: RunFolder, stage: Stage, log: RunLog, state: TrainState
) -> float:
    """Validates, logs and shows samples; returns the score."""
    step = int(state.step)
    results, shown = stage.validate(state.params, validation_batches(config, stage))
    log.validated(step, results)
    folder.write_sample(f"{step}.md", format_samples(stage, shown, config.num_samples))
    return stage.score(results)


def num_validation_rows(config: TrainConfig, available: int) -> int:
    """Held-out rows per validation: as many as the config wants, in full batches."""
    size = config.batch_size
    return min(-(-config.validation_rows // size), available // size) * size


def validation_batches(config: TrainConfig, stage: Stage) -> Iterator[TrainBatch]:
    """Yields the same held-out rows every time."""
    size = config.batch_size // config.step.accumulation_steps
    for start in range(0, num_validation_rows(config, len(stage.validation_rows)), size):
        yield put_batch(stage.validation_rows[start : start + size], stage.mesh)


def _describe_divergence(
    config: TrainConfig, folder: RunFolder, stage: Stage, error: Diverged
) -> str:
    """Names the batch and writes its text to a file."""
    rows = rows_at(len(stage.rows), error.step - 1, config.batch_size, config.seed)
    texts = [stage.tokenizer.decode(tokens) for tokens in stage.rows.tokens[rows]]
    named = [f"# row {row}\n\n{text}\n" for row, text in zip(rows, texts, strict=True)]
    sample = folder.write_sample(f"diverged-{error.step}.md", "\n".join(named))
    latest, listed = folder.latest_step, ", ".join(map(str, np.sort(rows)))
    kept = f"the checkpoint of step {latest} is kept" if latest else "nothing is saved yet"
    return (
        f"step {error.step} diverged: {error}; {kept}, its batch is rows {listed} of the training "
        f"data (text: {sample}); raise explosion_factor and run again if such a loss is "
        "expected, else fix the data or lower optimizer.learning_rate and start from scratch "
        "(--overwrite, or another output)"
    )


# --------------------------------------------------------------------------------------------------
# Samples


def format_samples(stage: Stage, shown: Predictions, num_samples: int) -> str:
    """Formats the predictions at a few positions of the first `num_samples` validation rows.

    Markdown: a table per row, with a line per position and a column per depth.
    """
    depth = len(shown.tokens)
    head = ["text before", *(f"depth {d}" for d in range(depth))]
    lines = ["Held-out text, and what is predicted to follow: `right` or ~~`wrong`~~ `wanted`."]
    for index in range(min(num_samples, len(shown.labels))):
        table = []
        is_trained = shown.is_trained[index]
        starts = [
            start
            for start in range(len(is_trained) - depth + 1)
            if is_trained[start : start + depth].all()
        ]
        picked = np.linspace(0, len(starts) - 1, _NUM_POSITIONS).round().astype(int)
        for start in [starts[i] for i in dict.fromkeys(picked)] if starts else []:
            end, rows = start + stage.lookahead, stage.validation_rows
            tokens, documents = rows.tokens[index, :end], rows.documents[index, :end]
            prefix = tokens[documents == documents[-1]][-_TOKENS_BEFORE:]
            cells = [_quoted(stage.tokenizer, prefix)]
            for d, row in enumerate(range(start, start + depth)):
                label, got = shown.labels[index, row], shown.tokens[d, index, row]
                wrong = "" if got == label else f"~~{_quoted(stage.tokenizer, [got])}~~ "
                cells.append(wrong + _quoted(stage.tokenizer, [label]))
            table.append(cells)
        lines += ["", f"## Row {index}", "", *format_rows(head, table)]
    return "\n".join(lines) + "\n"


def _quoted(tokenizer: Any, tokens: Any) -> str:
    """Text as inline code for a table cell, line ends and spaces visible."""
    text = repr(tokenizer.decode(tokens))[1:-1]
    return f"`` {text} ``".replace("|", "\\|")
