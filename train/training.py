"""One training run, from its config to the trained model; or what it would be."""

import sys
import tempfile
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from tqdm import tqdm

from poss_jax.config.paths import AnyPath
from poss_jax.config.reading import printable
from poss_jax.config.training import TrainConfig
from poss_jax.learn.state import init_state, make_optimizer
from poss_jax.model.parameters import count_parameters
from poss_jax.model.sharding import check_batch_size, check_processes, make_mesh

from .devices import is_first_process, make_on
from .loop import run_steps
from .memory import check_memory, describe_devices, tpu_slice
from .preparation import check_held_out, describe_data, describe_sample
from .run_folder import RunFolder, check_output, claim_together, hold_together, holds_model
from .run_log import check_loggers
from .stages import DraftStage, Stage, TargetStage


def train(config: TrainConfig, *, overwrite: bool = False) -> dict[str, Any]:
    """Runs (or resumes) one training run to its end, or until SIGTERM.

    Returns:
      The printed summary: path of the model, its step and its validation; or
      where the run stopped.

    Raises:
      UserError: bad input (an earlier run is left untouched), or the run diverged.
    """
    check_loggers(config)
    check_output(config)
    with hold_together(config):
        with claim_together(config, overwrite=overwrite) as claimed:
            stage = None if holds_model(claimed) else open_stage(config, claimed)
            if stage is not None:
                check_held_out(config, stage.validation_rows)
                check_memory(stage.plan_step())
                stage.load_weights()
        with closing(RunFolder(config)) as folder:
            if stage is not None:
                config = config.with_budget(len(stage.rows))
                if is_first_process():
                    tqdm.write("\n".join(describe_data(stage.report)), file=sys.stderr)
                if (step := _train(config, folder, stage)) < config.num_steps:
                    return {"stopped_at": step, "steps": config.num_steps}
            step = folder.exported_step(config.export)
            results = folder.logged_validation(step) if is_first_process() else {}
            steps = folder.latest_step
            return {"model": str(folder.model), "model_step": step, "steps": steps, **results}


def _train(config: TrainConfig, folder: RunFolder, stage: Stage) -> int:
    """Trains, and writes the model unless the run is stopped before; returns the last step."""
    stage.write_features()
    optimizer = make_optimizer(config.optimizer, config.num_steps)
    start = make_on(stage.mesh, partial(init_state, optimizer=optimizer), stage.init_params())
    state = folder.restore(start)
    state = run_steps(config, folder, stage, stage.make_step(optimizer, state), state)
    step = int(state.step)
    if step < config.num_steps:
        if is_first_process():
            tqdm.write(
                f"stopped after step {step} of {config.num_steps}, which is saved; "
                "run the same command again to continue",
                file=sys.stderr,
            )
        return step
    params = folder.exported(config.export, state).params
    dtype = jnp.dtype(config.export_dtype)
    stage.save_model(jax.tree.map(lambda leaf: leaf.astype(dtype), params), folder.model)
    return step


def describe(config: TrainConfig, compile_for: str | None = None) -> dict[str, Any]:
    """Reads all that a run would read except weights; trains and writes nothing.

    Args:
      compile_for: also compile the step for this machine (`here`) or a TPU slice; None: do not.

    Returns:
      Sizes, budget, how the data was used, a decoded sample of the first training row, and the
      memory of a step.
    """
    with tempfile.TemporaryDirectory() as scratch:
        stage = open_stage(config, Path(scratch), plan_for=compile_for or "here")
    config = config.with_budget(len(stage.rows))
    assert config.num_tokens is not None
    if is_first_process():
        sample = describe_sample(stage.rows, stage.tokenizer)
        print("\n".join([*map(printable, describe_data(stage.report)), *sample]))
    check_held_out(config, stage.validation_rows)
    memory = describe_devices(stage.plan_step(), compile_for)
    return {
        "stage": config.stage,
        "output": config.output,
        "parameters": count_parameters(stage.config),
        "train_tokens_available": stage.rows.tokens.size,
        "validation_tokens_available": stage.validation_rows.tokens.size,
        "tokens": config.num_tokens,
        "epochs": round(config.num_tokens / stage.rows.tokens.size, 3),
        "steps": config.num_steps,
        "data": stage.report,
        "sample": stage.tokenizer.decode(stage.rows.tokens[0][:64]),
        "memory": memory,
    }


def open_stage(config: TrainConfig, folder: AnyPath, *, plan_for: str | None = None) -> Stage:
    """Reads all that the run needs except weights: text, tokenizer, model configs.

    Args:
      folder: folder for prepared data.
      plan_for: plan a run for this machine (`here`) or a TPU slice such as `v5p:2x2x1`, without
        running it.

    Raises:
      UserError: something is missing or does not fit.
    """
    elsewhere = None if plan_for is None or plan_for == "here" else tpu_slice(plan_for)
    mesh = make_mesh(config.mesh, elsewhere)
    if plan_for is None:
        check_processes(mesh)
    check_batch_size(config.batch_size // config.step.accumulation_steps, mesh)
    if config.stage == "draft":
        return DraftStage(config, folder, mesh)
    return TargetStage(config, folder, mesh)
