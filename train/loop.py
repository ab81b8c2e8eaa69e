"""The training loop: steps, validations and checkpoints, every one a function of its step."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import jax
import numpy as np

from poss_jax.config.reading import UserError
from poss_jax.config.training import TrainConfig
from poss_jax.data.rows import batch_at, rows_at
from poss_jax.learn.state import TrainState
from poss_jax.learn.validation import Predictions
from poss_jax.model.documents import TrainBatch
from poss_jax.program.output import format_rows

from .devices import preemption_notice, put_batch
from .run_folder import RunFolder
from .run_log import Diverged, RunLog
from .stages import Stage

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

    Returns:
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
