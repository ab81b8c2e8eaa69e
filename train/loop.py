"""The training loop: steps, validations and checkpoints, every one a function of its step."""

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import jax
import numpy as np

from poss_jax.config.paths import AnyPath
from poss_jax.config.reading import UserError
from poss_jax.config.training import ProfileConfig, TrainConfig
from poss_jax.data.rows import Rows, batch_at, rows_at
from poss_jax.learn.state import TrainState
from poss_jax.learn.validation import Predictions
from poss_jax.model.documents import TrainBatch
from poss_jax.program.output import format_rows

from .devices import preemption_notice, put_batch
from .draft_stage import DraftStage
from .preparation import num_validation_rows
from .run_folder import RunFolder
from .run_log import Diverged, RunLog
from .target_stage import TargetStage

Stage = DraftStage | TargetStage
StepFunction = Callable[[TrainState, TrainBatch], tuple[TrainState, dict[str, Any]]]

# For samples: tokens shown before a position, and positions per row.
_TOKENS_BEFORE = 16
_NUM_POSITIONS = 4


def run_steps(
    config: TrainConfig, folder: RunFolder, stage: Stage, step_fn: StepFunction, state: TrainState
) -> TrainState:
    """Trains from the state's step to the last, or until a signal stops the run.

    Returns:
      The last state, already saved.

    Raises:
      UserError: the run diverged; checkpoints from before remain.
    """
    first_step = int(state.step)
    with (
        preemption_notice() as is_told_to_stop,
        RunLog(config, folder, first_step) as log,
        closing(Profiler(config.profile, folder.path / "profile")) as profiler,
    ):
        try:
            for step in range(first_step + 1, config.num_steps + 1):
                profiler.before(step)
                rows = batch_at(stage.rows, step - 1, config.batch_size, config.seed)
                state, metrics = step_fn(state, put_batch(rows, stage.mesh))
                profiler.after(step, metrics)
                log.record(step, metrics)
                is_stopping = is_told_to_stop(step - first_step)
                if is_stopping or _is_due(config, step, config.checkpoint_every):
                    _check_in(config, folder, stage, log, step, state)
                if is_stopping:
                    break
        except Diverged as error:
            raise UserError(_describe_divergence(config, folder, stage, error)) from error
    return state


def _check_in(
    config: TrainConfig, folder: RunFolder, stage: Stage, log: RunLog, step: int, state: TrainState
) -> None:
    """Validates if due, and saves; a diverged state is not saved."""
    log.flush()
    score = None
    if _is_due(config, step, config.validate_every):
        results, shown = stage.validate(state.params, validation_batches(config, stage))
        log.validated(step, results)
        folder.write_sample(f"{step}.md", format_samples(stage, shown, config.num_samples))
        score = stage.score(results)
    folder.save(step, state, score=score, loss_level=log.loss_level)


def _is_due(config: TrainConfig, step: int, every: int) -> bool:
    """True if a step ends with a checkpoint; every validation does."""
    return step == config.num_steps or any(step % n == 0 for n in {every, config.validate_every})


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


class Profiler:
    """Records the steps that the config names, if the run reaches them."""

    def __init__(self, config: ProfileConfig | None, folder: AnyPath) -> None:
        self._folder, self._is_on = folder, False
        self._steps = range(config.start, config.start + config.steps) if config else range(0)

    def before(self, step: int) -> None:
        """Starts recording at the window's first step."""
        if step in self._steps[:1]:
            jax.profiler.start_trace(self._folder)
            self._is_on = True

    def after(self, step: int, arrays: Any) -> None:
        """Stops recording after the window's last step, once its arrays are computed."""
        if self._is_on and step in self._steps[-1:]:
            jax.block_until_ready(arrays)
            self.close()

    def close(self) -> None:
        """Stops recording, if it is on."""
        if self._is_on:
            jax.profiler.stop_trace()
            self._is_on = False


# --------------------------------------------------------------------------------------------------
# Samples


def format_samples(stage: Stage, shown: Predictions, num_samples: int) -> str:
    """Formats the predictions at a few positions of the first `num_samples` validation rows.

    Returns:
      Markdown: a table per row, with a line per position and a column per depth.
    """
    depth = len(shown.tokens)
    head = ["text before", *(f"depth {d}" for d in range(depth))]
    lines = ["Held-out text, and what is predicted to follow: `right` or ~~`wrong`~~ `wanted`."]
    for index in range(min(num_samples, len(shown.labels))):
        table = []
        for start in _sample_positions(shown.is_trained[index], depth):
            prefix = _text_before(stage.validation_rows[index : index + 1], start + stage.lookahead)
            cells = [_quoted(stage.tokenizer, prefix)]
            for d, row in enumerate(range(start, start + depth)):
                label, got = shown.labels[index, row], shown.tokens[d, index, row]
                wrong = "" if got == label else f"~~{_quoted(stage.tokenizer, [got])}~~ "
                cells.append(wrong + _quoted(stage.tokenizer, [label]))
            table.append(cells)
        lines += ["", f"## Row {index}", "", *format_rows(head, table)]
    return "\n".join(lines) + "\n"


def _sample_positions(is_trained: np.ndarray, depth: int) -> list[int]:
    """Positions spread over the row, each followed by `depth` consecutive trained rows."""
    starts = range(len(is_trained) - depth + 1)
    valid = [start for start in starts if is_trained[start : start + depth].all()]
    picked = np.linspace(0, len(valid) - 1, _NUM_POSITIONS).round().astype(int) if valid else []
    return [valid[i] for i in dict.fromkeys(picked)]


def _text_before(row: Rows, end: int) -> np.ndarray:
    """The last tokens before a position, within its document."""
    tokens, documents = row.tokens[0, :end], row.documents[0, :end]
    return tokens[documents == documents[-1]][-_TOKENS_BEFORE:]


def _quoted(tokenizer: Any, tokens: Any) -> str:
    """Text as inline code for a table cell, line ends and spaces visible."""
    text = repr(tokenizer.decode(tokens))[1:-1]
    return f"`` {text} ``".replace("|", "\\|")
