"""The training loop: steps, validations and checkpoints, every one a function of its step."""

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import numpy as np

from poss_jax.config.reading import UserError
from poss_jax.config.training import TrainConfig
from poss_jax.data.rows import batch_at, rows_at
from poss_jax.learn.state import TrainState
from poss_jax.model.documents import TrainBatch

from .devices import put_batch
from .divergence import Diverged
from .journal import Journal
from .preemption import preemption_notice
from .profile import Profiler
from .run_folder import RunFolder
from .samples import format_samples
from .stages import Stage

StepFunction = Callable[[TrainState, TrainBatch], tuple[TrainState, dict[str, Any]]]


def run_steps(
    config: TrainConfig, folder: RunFolder, stage: Stage, step_fn: StepFunction, state: TrainState
) -> TrainState:
    """Trains from the state's step to the last, or to where the run is told to stop.

    Returns:
      The last state, which is saved.

    Raises:
      UserError: the run diverged; the checkpoints are of the time before.
    """
    first_step = int(state.step)
    with (
        preemption_notice() as is_told_to_stop,
        Journal(config, folder, first_step) as journal,
        closing(Profiler(config.profile, folder.path / "profile")) as profiler,
    ):
        try:
            for step in range(first_step + 1, config.num_steps + 1):
                profiler.before(step)
                rows = batch_at(stage.rows, step - 1, config.batch_size, config.seed)
                state, metrics = step_fn(state, put_batch(rows, stage.mesh))
                profiler.after(step, metrics)
                journal.record(step, metrics)
                is_stopping = is_told_to_stop(step)
                if is_stopping or _is_due(config, step, config.checkpoint_every):
                    _check_in(config, folder, stage, journal, step, state)
                if is_stopping:
                    break
        except Diverged as error:
            raise UserError(_describe_divergence(config, folder, stage, error)) from error
    return state


def _check_in(
    config: TrainConfig,
    folder: RunFolder,
    stage: Stage,
    journal: Journal,
    step: int,
    state: TrainState,
) -> None:
    """Validates if that is due, and saves; but not what went wrong."""
    journal.settle()
    score = None
    if _is_due(config, step, config.validate_every):
        results, shown = stage.validate(state.params, _validation_batches(config, stage))
        journal.validated(step, results)
        folder.write_sample(f"{step}.md", format_samples(stage, shown, config.num_samples))
        score = stage.score(results)
    folder.save(step, state, score=score, loss_level=journal.loss_level)


def _is_due(config: TrainConfig, step: int, every: int) -> bool:
    """Tells whether a step ends with a checkpoint; every validation brings one."""
    return step == config.num_steps or any(step % n == 0 for n in {every, config.validate_every})


def _validation_batches(config: TrainConfig, stage: Stage) -> Iterator[TrainBatch]:
    """The same held-out batches every time."""
    size = config.batch_size
    for index in range(min(config.validation_batches, len(stage.validation_rows) // size)):
        yield put_batch(stage.validation_rows[index * size : (index + 1) * size], stage.mesh)


def _describe_divergence(
    config: TrainConfig, folder: RunFolder, stage: Stage, error: Diverged
) -> str:
    """Names the batch, and writes its text where one can look at it."""
    rows = rows_at(len(stage.rows), error.step - 1, config.batch_size, config.seed)
    texts = [stage.tokenizer.decode(tokens) for tokens in stage.rows.tokens[rows]]
    named = [f"# row {row}\n\n{text}\n" for row, text in zip(rows, texts, strict=True)]
    place = folder.write_sample(f"diverged-{error.step}.md", "\n".join(named))
    listed = ", ".join(map(str, np.sort(rows)))
    kept = f"the checkpoint of step {folder.latest_step} is kept"
    if not folder.latest_step:
        kept = "nothing is saved yet"
    return (
        f"step {error.step} diverged: {error}; {kept}, its batch is rows {listed} of the training "
        f"data (text: {place}); mend the data, lower optimizer.learning_rate, or raise "
        "explosion_factor if the loss is to be that high"
    )
