"""Trains a target language model, or the specialists of a draft model.

Needs a YAML config (see `configs/`); prints progress on stderr and one JSON line at the end, and
leaves a folder that holds metrics, checkpoints and the trained model. Run again to resume.

    python -m train.main --config configs/demo/target.yaml
    python -m train.main --config configs/demo/poss3.yaml optimizer.learning_rate=1e-4 --dry-run
"""

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from poss_jax import data
from poss_jax.checkpoint import count_parameters
from poss_jax.config import TrainConfig, load_config
from poss_jax.packing import TrainBatch
from poss_jax.program import Parser, run_program
from poss_jax.train_step import TrainState, init_state, make_optimizer
from train.devices import claim_together, is_first_process, make_on, put_batch, start_processes
from train.run_folder import RunFolder
from train.stages import Stage, open_stage


def train(config: TrainConfig, *, overwrite: bool = False) -> dict[str, Any]:
    """Runs (or resumes) one training run to its end.

    Returns:
      The summary that is printed: where the model lies and the last validation.

    Raises:
      UserError: bad input; nothing of an earlier run is touched.
    """
    with claim_together(config, overwrite=overwrite) as place:
        stage = open_stage(config, place)
    folder = RunFolder(config)
    try:
        optimizer = make_optimizer(config.optimizer, config.num_steps)
        start = make_on(stage.mesh, partial(init_state, optimizer=optimizer), stage.init_params())
        state = folder.restore(start)
        results = _loop(config, folder, stage, stage.make_step(optimizer, state), state)
    finally:
        folder.close()
    return {"model": str(folder.model), "steps": config.num_steps, **results}


def describe(config: TrainConfig) -> dict[str, Any]:
    """Reads everything a run would read, without training or writing anything.

    Returns:
      Sizes, budget and a decoded sample of the first training row.
    """
    with tempfile.TemporaryDirectory() as scratch:
        stage = open_stage(config, Path(scratch))
    return {
        "stage": config.stage,
        "output": config.output,
        "parameters": count_parameters(stage.config),
        "train_tokens_available": stage.rows.tokens.size,
        "validation_tokens_available": stage.validation_rows.tokens.size,
        "tokens": config.num_tokens,
        "epochs": round(config.num_tokens / stage.rows.tokens.size, 3),
        "steps": config.num_steps,
        "sample": stage.tokenizer.decode(stage.rows.tokens[0][:64]),
    }


def _loop(
    config: TrainConfig, folder: RunFolder, stage: Stage, step_fn: Any, state: TrainState
) -> dict[str, Any]:
    """Steps, logs, validates and saves; returns the last validation."""
    first = int(state.step)
    results: dict[str, Any] = {}
    started, per_step = time.monotonic(), config.batch_size * config.data.sequence_length
    with tqdm(
        total=config.num_steps * per_step,
        initial=first * per_step,
        desc=f"train {folder.path.name}",
        unit="tok",
        unit_scale=True,
        disable=not is_first_process(),
    ) as progress:
        for step in range(first + 1, config.num_steps + 1):
            rows = data.batch_at(stage.rows, step - 1, config.batch_size, config.seed)
            state, metrics = step_fn(state, put_batch(rows, stage.mesh))
            progress.update(per_step)
            is_last = step == config.num_steps
            if step % config.log_every == 0 or is_last:
                line = {name: np.asarray(value).tolist() for name, value in metrics.items()}
                seconds = round(time.monotonic() - started, 3)
                folder.log({"step": step, "tokens": step * per_step, **line, "seconds": seconds})
                progress.set_postfix(loss=f"{line['loss']:.3f}")
            if step % config.validate_every == 0 or is_last:
                results = stage.validate(state.params, _validation_batches(config, stage))
                folder.log({"step": step, **results})
            if step % config.checkpoint_every == 0 or is_last:
                folder.save(step, state)
    return _finish(config, folder, stage, state, results)


def _finish(
    config: TrainConfig,
    folder: RunFolder,
    stage: Stage,
    state: TrainState,
    results: dict[str, Any],
) -> dict[str, Any]:
    """Writes the model; a run that was complete already is only validated again."""
    if not results:
        results = stage.validate(state.params, _validation_batches(config, stage))
    if not folder.model.exists():
        stage.save_model(state.params, folder.model)
    return results


def _validation_batches(config: TrainConfig, stage: Stage) -> Iterator[TrainBatch]:
    """The same held-out batches every time."""
    size = config.batch_size
    for index in range(min(config.validation_batches, len(stage.validation_rows) // size)):
        yield put_batch(stage.validation_rows[index * size : (index + 1) * size], stage.mesh)


def main(arguments: list[str] | None = None) -> None:
    """Parses arguments, trains (or describes), prints one JSON line."""
    parser = Parser(
        prog="train.main", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="YAML file of the run")
    parser.add_argument("--dry-run", action="store_true", help="show what would run, and stop")
    parser.add_argument(
        "--overwrite", action="store_true", help="start anew where the folder holds a run"
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="change a key of the config"
    )
    args = parser.parse_intermixed_args(arguments)
    config = load_config(TrainConfig, args.config, args.overrides)
    start_processes()
    results = describe(config) if args.dry_run else train(config, overwrite=args.overwrite)
    if is_first_process():
        print(json.dumps(results))


def cli() -> None:
    """Entry point of `poss-train`."""
    run_program(main)


if __name__ == "__main__":
    cli()
