"""One training run, from its config to the trained model; or what it would be."""

import sys
import tempfile
from contextlib import closing
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from tqdm import tqdm

from poss_jax.config.paths import AnyPath
from poss_jax.config.reading import UserError, printable, printable_lines
from poss_jax.config.training import TrainConfig
from poss_jax.data.rows import Rows
from poss_jax.learn.step import init_state, make_optimizer
from poss_jax.model.parameters import count_parameters
from poss_jax.model.sharding import check_batch_size, check_processes, make_mesh
from poss_jax.program.running import text_marks

from .devices import is_first_process, make_on
from .loop import check_loggers, num_validation_rows, run_steps
from .memory import check_memory, describe_devices, tpu_slice
from .run_folder import RunFolder, check_output, claim_together, hold_together, holds_model
from .stages import DraftStage, Stage, TargetStage

_SAMPLE_TOKENS = 300


def train(config: TrainConfig, *, overwrite: bool = False) -> dict[str, Any]:
    """Runs (or resumes) one training run to its end, or until SIGTERM.

    Returns:
      The printed summary: path of the model, its step and its validation; or where it stopped.

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


def check_held_out(config: TrainConfig, rows: Rows) -> None:
    """Raises UserError if held-out rows do not fill a batch, or have nothing to validate with."""
    held_out, length = len(rows), config.data.sequence_length
    if held_out < config.batch_size:
        raise UserError(
            f"held-out documents fill {held_out} rows of {length} tokens, a batch needs "
            f"{config.batch_size}; give more documents, raise data.validation_fraction, or lower "
            "batch_size (batch_size=1)"
        )
    if not rows[: num_validation_rows(config, held_out)].loss_mask.any():
        raise UserError(
            "held-out rows: none of those that are validated with has a token to train on; raise "
            "validation_rows or data.sequence_length"
        )


def describe_data(report: dict[str, Any]) -> list[str]:
    """Describes how a data set was used, by the report of `Prepared`, in lines for people."""
    dropped = sum(report["dropped"].values())
    lines = [
        f"data      {report['source']}: {report['records']:,} records of {report['kind']}, "
        f"{dropped:,} of them dropped"
    ]
    if dropped:
        lines.append(f"dropped   {_counts(report['dropped'])}; first {report['first_dropped'][0]}")
    if report["used_in_part"]:
        lines.append(f"in part   {_counts(report['used_in_part'])}")
    if report["template"]:
        lines.append(f"template  {report['template']}")
    if not report["ends_turns"]:
        lines.append(" " * 10 + "no special token ends its answers: the model cannot learn to stop")
    if "features" in report:
        lines.append(f"features  {report['features']}")
    for name, key in (("training", "train"), ("held out", "validation")):
        stats = report[key]
        lengths = ", ".join(f"{key} {value:,}" for key, value in stats["lengths"].items())
        lines += [
            f"{name}  {stats['documents']:,} documents, {stats['tokens']:,} tokens, "
            f"{stats['learnt']:.1%} of them trained on",
            f"          lengths {lengths}; {stats['truncated']:,} cut to a row",
        ]
        if stats["split_by_answer"]:
            lines.append(
                f"          {stats['split_by_answer']:,} chats have a document per answer, because "
                "the template rewrites earlier turns"
            )
        lines.append(
            f"          {stats['rows']:,} rows, packing {report['packing']}, "
            f"{stats['filled']:.1%} filled"
        )
    return lines


def describe_sample(rows: Rows, tokenizer: Any) -> list[str]:
    """Shows the first document of the first row, marking the trained tokens."""
    mark, end_mark = text_marks()
    document = (rows.documents[0] == 1).nonzero()[0]
    begin = max(0, int(rows.loss_mask[0].argmax()) - _SAMPLE_TOKENS // 2)
    shown = document[begin : begin + _SAMPLE_TOKENS]
    parts = []
    for is_trained, group in groupby(shown, lambda index: rows.loss_mask[0, index]):
        text = printable_lines(tokenizer.decode(rows.tokens[0, list(group)]))
        parts.append(f"{mark}{text}{end_mark}" if is_trained else text)
    return [f"sample    {mark}this{end_mark} is trained on", "".join(parts).rstrip("\n")]


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{reason} {count:,}" for reason, count in counts.items())
