"""The folder of a run: claiming it, what it holds, and resuming from it.

config.yaml  provenance.json  metrics.jsonl  checkpoints/<step>/  samples/<step>.md  model/

One run writes to it at a time, and none destroys another. A folder that holds this run is
continued. A new one appears once the run can start, and then holds the config, the provenance and
the prepared data.

The folder may be a URI. An object store has no locks, so nothing keeps a second run out, and cannot
append: metrics.jsonl is rewritten with each checkpoint. A new folder gets config.yaml last, a model
model.json last.
"""

import json
import math
import secrets
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from errno import EDQUOT, ENOSPC
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
import yaml
from etils import epath
from orbax.checkpoint import checkpoint_managers

from poss_jax.checkpoint.record import provenance
from poss_jax.checkpoint.whole import renamed, sole_writer, write_file
from poss_jax.checkpoint.writing import failed_write
from poss_jax.config.paths import (
    AnyPath,
    absolute,
    as_path,
    copy_files,
    is_uri,
    read_text,
    real_path,
)
from poss_jax.config.reading import (
    UserError,
    config_to_dict,
    is_out_of_memory,
    parse_yaml,
    shorten,
)
from poss_jax.config.training import TrainConfig
from poss_jax.learn.step import TrainState

from .devices import barrier, broadcast_from_first, is_first_process

# Settings that may change on resume: they change what a run learns by rounding at most.
_FREE_KEYS = {
    "checkpoint_every",
    "explosion_factor",
    "features",
    "keep_checkpoints",
    "log_every",
    "loggers",
    "mesh",
    "num_samples",
    "output",
    "profile",
    "step",
}

# Orbax moves checkpoints here before it deletes them, so none is ever seen in part.
_REMOVED = ".removed"


class _Manager(ocp.CheckpointManager):
    """Leaves preemption to the loop (`run_steps`), and saves when asked."""

    def reached_preemption(self, step: int) -> bool:
        return False


class RunFolder:
    """A claimed folder of a run; its methods raise UserError if it cannot be read or written."""

    def __init__(self, config: TrainConfig) -> None:
        self.path = absolute(config.output)
        self._checkpoints = self.path / "checkpoints"
        self._unwritten: list[str] = []  # lines of metrics.jsonl
        self._empty_removed()
        model = self.model
        if not isinstance(model, Path) and not holds_model(self.path):
            # A killed process may have uploaded a part.
            broadcast_from_first(lambda: model.rmtree(missing_ok=True))
        policies = [
            checkpoint_managers.LatestN(config.keep_checkpoints),
            checkpoint_managers.BestN(get_metric_fn=_score, n=1),
        ]
        options = ocp.CheckpointManagerOptions(
            best_fn=_score,
            preservation_policy=checkpoint_managers.AnyPreservationPolicy(policies),
            todelete_subdir=None if is_uri(self.path) else _REMOVED,
            cleanup_tmp_directories=True,  # unfinished saves of a killed process
        )
        with self._reading("the checkpoints"):
            self._manager = _Manager(self._checkpoints, options=options)

    @property
    def model(self) -> AnyPath:
        """Folder of the trained model; it exists once the run is complete."""
        return self.path / "model"

    @property
    def latest_step(self) -> int:
        """The step of the newest checkpoint; 0 if there is none."""
        return self._manager.latest_step() or 0

    @property
    def loss_level(self) -> float | None:
        """The running mean of the loss at the newest checkpoint; None if there is none."""
        metrics = self._manager.metrics(self.latest_step) if self.latest_step else None
        return (metrics or {}).get("loss_level")

    def restore(self, state: TrainState) -> TrainState:
        """Returns the newest saved state; the given one if none is saved.

        Later metrics are dropped: the run writes them again.
        """

        def drop_later_metrics() -> None:
            if (path := self.path / "metrics.jsonl").exists():
                kept = [line for step, _, line in self._logged() if step <= self.latest_step]
                write_file(path, b"".join(kept).decode())

        broadcast_from_first(drop_later_metrics)
        return self._read(self.latest_step, state) if self.latest_step else state

    def save(
        self, step: int, state: TrainState, *, score: float | None, loss_level: float | None
    ) -> None:
        """Saves the state in the background; it may be donated once this returns."""
        metrics = {"score": score, "loss_level": loss_level}
        with self._saving():
            self._write_metrics()
            self._manager.wait_until_finished()  # the previous save moves folders
            self._empty_removed()
            self._manager.save(step, args=ocp.args.StandardSave(vars(state)), metrics=metrics)

    def exported_step(self, export: str) -> int:
        """The step of the `best` or the `last` checkpoint."""
        best = self._manager.best_step()
        return self.latest_step if export == "last" or best is None else best

    def exported(self, export: str, state: TrainState) -> TrainState:
        """Returns the state of that step; `state` is the newest one, and may be freed."""
        with self._saving():
            self._manager.wait_until_finished()
        step = self.exported_step(export)
        return state if step == int(state.step) else self._read(step, state)

    def log(self, metrics: dict[str, Any]) -> None:
        """Appends one line to metrics.jsonl; in process 0 only."""
        if not is_first_process():
            return
        self._unwritten.append(json.dumps(metrics) + "\n")
        if not is_uri(self.path):
            self._write_metrics()

    def logged_validation(self, step: int) -> dict[str, Any]:
        """Validation logged for a step; empty if there is none."""
        for logged_step, metrics, _ in self._logged():
            if logged_step == step and "validation_loss" in metrics:
                return {key: value for key, value in metrics.items() if key != "step"}
        return {}

    def write_sample(self, name: str, text: str) -> AnyPath:
        """Writes a text for people to read; in process 0 only."""
        path = self.path / "samples" / name
        if is_first_process():
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        return path

    def close(self) -> None:
        """Waits for saves under way."""
        with self._saving():
            self._write_metrics()
            self._manager.close()
        self._empty_removed()

    # ----------------------------------------------------------------------------------------------
    # Checkpoints

    @contextmanager
    def _saving(self) -> Iterator[None]:
        """Turns what Orbax raises on a failed save into one UserError."""
        try:
            yield
        except Exception as error:  # Orbax raises many kinds
            reason = failed_write(error)
            mended = "make room there" if reason.errno in (ENOSPC, EDQUOT) else "mend that"
            raise UserError(
                f"cannot save to {self._checkpoints}: {reason.strerror}; {mended}, and the same "
                "command continues from the last complete checkpoint"
            ) from error

    @contextmanager
    def _reading(self, what: str) -> Iterator[None]:
        """Turns what Orbax raises on what it cannot read into one UserError."""
        try:
            yield
        except Exception as error:  # Orbax raises many kinds
            if is_out_of_memory(error):
                raise
            reason = " ".join(str(error).partition(". See full")[0].split())[:200]
            raise UserError(
                f"{what} of {self.path} cannot be read ({reason}); move a damaged checkpoint away, "
                "and the same command continues from the one before"
            ) from error

    def _empty_removed(self) -> None:
        """Deletes the checkpoints that Orbax moved away, in process 0."""
        if is_first_process() and not is_uri(self.path):
            shutil.rmtree(self._checkpoints / _REMOVED, ignore_errors=True)

    def _read(self, step: int, state: TrainState) -> TrainState:
        """Reads a state with the shardings of `state`, which is freed first."""
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, vars(state))
        jax.tree.map(lambda array: array.delete(), vars(state))
        with self._reading(f"checkpoint {step}"):
            saved = self._manager.restore(step, args=ocp.args.StandardRestore(abstract))
        return state.replace(**saved)

    # ----------------------------------------------------------------------------------------------
    # Metrics

    def _write_metrics(self) -> None:
        """Appends what was logged to metrics.jsonl; at a URI the file is replaced."""
        path, text = self.path / "metrics.jsonl", "".join(self._unwritten)
        self._unwritten.clear()
        if not text:
            return
        if isinstance(path, Path):
            with path.open("a") as file:
                file.write(text)
        else:
            path.write_text((read_text(path) if path.exists() else "") + text)

    def _logged(self) -> list[tuple[int, dict[str, Any], bytes]]:
        """Steps, metrics and lines of metrics.jsonl, without what a killed process left in part."""
        path = self.path / "metrics.jsonl"
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        logged = []
        for number, line in enumerate(lines, start=1):
            try:
                if line.endswith(b"\n"):
                    metrics = json.loads(line)
                    logged.append((metrics["step"], metrics, line))
            except (ValueError, LookupError, TypeError) as error:
                raise UserError(f"{path}: line {number} is damaged; mend or remove it") from error
        return logged


def holds_model(run: AnyPath) -> bool:
    """True if a run is complete; a model at a URI may be uploaded in part."""
    model = run / "model"
    return (model / "model.json" if is_uri(run) else model).exists()


def _score(metrics: dict[str, Any]) -> float:
    score = metrics.get("score")
    return -math.inf if score is None else score


# --------------------------------------------------------------------------------------------------
# Claiming it


def check_output(config: TrainConfig) -> None:
    """Raises UserError if a run cannot write to its output URI."""
    if not is_uri(config.output):
        return
    if not config.output.startswith("gs://"):
        raise UserError(f"output {config.output}: want gs:// or a path of this machine")
    for name in ("loggers", "profile"):
        if getattr(config, name):
            raise UserError(
                f"{name}: its files are written to this machine alone, and output is "
                f"{config.output}; leave out {name}, or name a local output"
            )


@contextmanager
def hold_together(config: TrainConfig) -> Iterator[None]:
    """Keeps other runs out of the folder (the first process holds the lock), or refuses in all."""
    with ExitStack() as held:
        broadcast_from_first(lambda: held.enter_context(sole_writer(config.output)))
        yield


@contextmanager
def claim_together(config: TrainConfig, *, overwrite: bool) -> Iterator[AnyPath]:
    """Calls `claim_folder` in the first process; all use its result, or raise its UserError."""
    with ExitStack() as claim:
        folder = claim_folder(config, overwrite=overwrite)
        yield as_path(broadcast_from_first(lambda: str(claim.enter_context(folder))))
        barrier("run prepared")
    barrier("run claimed")


@contextmanager
def claim_folder(config: TrainConfig, *, overwrite: bool = False) -> Iterator[AnyPath]:
    """Yields the folder for what a run prepares before its first step.

    For a run that continues, this is its own folder. For a new one it is a temporary sibling that
    replaces the folder (with `overwrite` also an earlier run in it) when the block succeeds: a run
    that cannot start leaves nothing behind and destroys nothing.

    Raises:
      UserError: the folder holds something else or a run with another config, or cannot be made.
    """
    path = absolute(config.output)
    if _continues(config, path, overwrite=overwrite):
        yield path
        _write_config(path, config)
        return
    with renamed(path, overwrite=True) if isinstance(path, Path) else _copied(path) as partial:
        yield partial
        (partial / "provenance.json").write_text(json.dumps(provenance(), indent=2) + "\n")
        _write_config(partial, config)


@contextmanager
def _copied(path: epath.Path) -> Iterator[epath.Path]:
    """Yields a temporary sibling of a URI, copied there at the end."""
    partial = path.with_name(f".{path.name}.partial-{secrets.token_hex(4)}")
    try:
        yield partial
        path.rmtree(missing_ok=True)
        copy_files(partial, path)
    finally:
        partial.rmtree(missing_ok=True)


def _continues(config: TrainConfig, path: AnyPath, *, overwrite: bool) -> bool:
    """True if the folder already holds this run; False if it holds nothing to keep."""
    inputs = [config.target, config.init_target, config.init_draft]
    if overwrite:
        inputs += [config.features.cache, config.specialists.draft_vocabulary]
        inputs += [config.data.source, config.data.template]
    for file in inputs:
        if file is not None and real_path(file).is_relative_to(real_path(path)):
            raise UserError(f"output {path} holds {file}, which is needed; name another folder")
    is_empty = path.is_dir() and {entry.name for entry in path.iterdir()} <= {".lock"}
    if is_empty or not path.exists():
        return False
    saved = saved_config(path)
    if saved is None:
        raise UserError(
            f"output {path} is not empty, and no training run by its config.yaml; name another "
            "folder, or put that file back"
        )
    if (different := changed_settings(saved, config)) and not overwrite:
        raise UserError(
            f"output {path} holds a run with another config ({different[0]}); "
            "name another folder, or start from scratch with --overwrite"
        )
    return not overwrite


def _write_config(path: AnyPath, config: TrainConfig) -> None:
    write_file(path / "config.yaml", yaml.safe_dump(config_to_dict(config), sort_keys=False))


def saved_config(path: AnyPath) -> dict[str, Any] | None:
    """Reads the config of the run in a folder; None without one."""
    try:
        saved = parse_yaml(read_text(path / "config.yaml"))
    except (OSError, ValueError):
        return None
    return saved if isinstance(saved, dict) and "stage" in saved else None


def changed_settings(saved: dict[str, Any], config: TrainConfig) -> list[str]:
    """Describes how a config differs from a saved one in settings that must not change."""
    asked = config_to_dict(config)
    return _differences(saved | {key: asked[key] for key in _FREE_KEYS & asked.keys()}, asked)


def _differences(saved: Any, asked: Any, key: str = "") -> list[str]:
    if isinstance(saved, dict) and isinstance(asked, dict):
        names = [*asked, *(name for name in saved if name not in asked)]
        return [
            line
            for name in names
            for line in _differences(saved.get(name), asked.get(name), f"{key}.{name}".strip("."))
        ]
    return [] if saved == asked else [f"{key}: saved {shorten(saved)}, asked {shorten(asked)}"]
