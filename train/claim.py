"""The folder of a training run: config, provenance, metrics, checkpoints, and the trained model.

config.yaml  provenance.json  metrics.jsonl  checkpoints/<step>/  samples/<step>.md  model/
"""

import json
import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
import yaml
from orbax.checkpoint import checkpoint_managers

from poss_jax.checkpoint import failed_write, provenance
from poss_jax.config import TrainConfig, UserError, config_to_dict
from poss_jax.train_state import TrainState

# What a run may be continued with other values of: none changes what it learns but by rounding.
_FREE_KEYS = {
    "checkpoint_every",
    "explosion_factor",
    "features",
    "keep_checkpoints",
    "log_every",
    "loggers",
    "mesh",
    "num_samples",
    "profile",
    "step",
}


@contextmanager
def claim_folder(config: TrainConfig, *, overwrite: bool = False) -> Iterator[Path]:
    """Yields where a run keeps what it prepares before its first step.

    For a run that continues, this is its folder. For a new one it is a temporary sibling, which
    takes the place of the folder (and of an earlier run in it) when the block ends well: a run
    that cannot start leaves nothing behind and destroys nothing.

    Args:
      config: the run.
      overwrite: start anew where the folder holds a run.

    Raises:
      UserError: the folder holds something else, or a run with another config, or cannot be made.
    """
    path = Path(config.output).absolute()
    if _continues(config, path, overwrite=overwrite):
        _write_config(path, config)
        yield path
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = tempfile.TemporaryDirectory(prefix=f".{path.name}.partial-", dir=path.parent)
    except OSError as error:
        raise UserError(f"output {path}: {error.strerror}; name another folder") from error
    with scratch:
        partial = Path(scratch.name) / path.name
        partial.mkdir()
        yield partial
        (partial / "provenance.json").write_text(json.dumps(provenance(), indent=2) + "\n")
        _write_config(partial, config)
        if path.exists():
            path.replace(Path(scratch.name) / "replaced")
        partial.replace(path)


class RunFolder:
    """A run's folder, once it is claimed: what the run saves, and reads again to continue."""

    def __init__(self, config: TrainConfig) -> None:
        self.path = Path(config.output).absolute()
        policies = [
            checkpoint_managers.LatestN(config.keep_checkpoints),
            checkpoint_managers.BestN(get_metric_fn=_score, n=1),
        ]
        options = ocp.CheckpointManagerOptions(
            best_fn=_score,
            preservation_policy=checkpoint_managers.AnyPreservationPolicy(policies),
            cleanup_tmp_directories=True,  # what a killed process had begun to save
        )
        self._manager = ocp.CheckpointManager(self.path / "checkpoints", options=options)

    @property
    def model(self) -> Path:
        """Where the trained model goes; it exists once the run is complete."""
        return self.path / "model"

    @property
    def latest_step(self) -> int:
        """The step of the newest checkpoint; 0: there is none."""
        return self._manager.latest_step() or 0

    @property
    def loss_level(self) -> float | None:
        """The running mean of the loss at the newest checkpoint; None: there is none."""
        metrics = self._manager.metrics(self.latest_step) if self.latest_step else None
        return metrics and metrics["loss_level"]

    def restore(self, state: TrainState) -> TrainState:
        """Returns the newest saved state in place of this one; or this one if none is saved.

        Metrics beyond it are dropped: the run writes them again.
        """
        self._drop_metrics_after(self.latest_step)
        return self._read(self.latest_step, state) if self.latest_step else state

    def save(
        self, step: int, state: TrainState, *, score: float | None, loss_level: float | None
    ) -> None:
        """Saves the state in the background.

        Args:
          step: of the state.
          state: may be donated once this returns.
          score: how good it is; None: it was not validated.
          loss_level: running mean of the loss.

        Raises:
          UserError: the save before this one failed.
        """
        metrics = {"score": score, "loss_level": loss_level}
        with self._explained():
            self._manager.save(step, args=ocp.args.StandardSave(vars(state)), metrics=metrics)

    def exported_step(self, export: str) -> int:
        """The step of the `best` or the `last` checkpoint."""
        best = self._manager.best_step()
        return self.latest_step if export == "last" or best is None else best

    def exported(self, export: str, state: TrainState) -> TrainState:
        """Returns the state of that step; `state` is the newest, and is given up for it."""
        with self._explained():
            self._manager.wait_until_finished()
        step = self.exported_step(export)
        return state if step == self.latest_step else self._read(step, state)

    def log(self, metrics: dict[str, Any]) -> None:
        """Appends one line to metrics.jsonl; the first process holds the pen."""
        if jax.process_index() != 0:
            return
        with (self.path / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(metrics) + "\n")

    def logged_validation(self, step: int) -> dict[str, Any]:
        """What metrics.jsonl says of the validation at a step."""
        lines = map(json.loads, (self.path / "metrics.jsonl").read_text().splitlines())
        found = (line for line in lines if line["step"] == step and "validation_loss" in line)
        return {key: value for key, value in next(found).items() if key != "step"}

    def write_sample(self, name: str, text: str) -> Path:
        """Writes a text that people may want to look at; the first process holds the pen."""
        path = self.path / "samples" / name
        if jax.process_index() == 0:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        return path

    def close(self) -> None:
        """Waits for saves under way.

        Raises:
          UserError: one failed.
        """
        with self._explained():
            self._manager.close()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turns what Orbax raises on a failed save into one UserError."""
        try:
            yield
        except Exception as error:  # of many kinds
            raise UserError(
                f"cannot save to {self.path / 'checkpoints'}: {failed_write(error).strerror}; make "
                "room there, and the same command goes on from the last checkpoint that is whole"
            ) from error

    def _read(self, step: int, state: TrainState) -> TrainState:
        """Reads a state to where `state` lies, which is freed first."""
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, vars(state))
        jax.tree.map(lambda array: array.delete(), vars(state))
        saved = self._manager.restore(step, args=ocp.args.StandardRestore(abstract))
        return state.replace(**saved)

    def _drop_metrics_after(self, step: int) -> None:
        """A resumed run writes again what it had logged beyond its checkpoint."""
        path = self.path / "metrics.jsonl"
        if jax.process_index() != 0 or not path.exists():
            return
        lines = [line for line in path.read_text().splitlines(keepends=True) if line[-1] == "\n"]
        kept = [line for line in lines if json.loads(line)["step"] <= step]
        replacement = path.with_suffix(".tmp")
        replacement.write_text("".join(kept))
        replacement.replace(path)


def _score(metrics: dict[str, Any]) -> float:
    return -math.inf if metrics["score"] is None else metrics["score"]


def _continues(config: TrainConfig, path: Path, *, overwrite: bool) -> bool:
    """Whether the folder holds this very run; False: it holds nothing that is kept."""
    for model in (config.target, config.init_draft):
        if model is not None and Path(model).resolve().is_relative_to(path.resolve()):
            raise UserError(f"output {path} holds {model}, which is needed; name another folder")
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return False
    saved = _saved_config(path)
    if saved is None:
        raise UserError(f"output {path} is not empty and not a training run; name another folder")
    wanted = config_to_dict(config)
    for key in _FREE_KEYS & wanted.keys():
        saved[key] = wanted[key]
    different = _differences(saved, wanted)
    if different and not overwrite:
        raise UserError(
            f"output {path} holds a run with another config ({different[0]}); "
            "name another folder, or start anew with --overwrite"
        )
    return not overwrite


def _write_config(path: Path, config: TrainConfig) -> None:
    partial = path / "config.yaml.tmp"
    partial.write_text(yaml.safe_dump(config_to_dict(config), sort_keys=False))
    partial.replace(path / "config.yaml")


def _saved_config(path: Path) -> dict[str, Any] | None:
    """The config of the run in a folder; None where there is no run."""
    try:
        saved = yaml.safe_load((path / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return None
    return saved if isinstance(saved, dict) and "stage" in saved else None


def _differences(saved: Any, wanted: Any, key: str = "") -> list[str]:
    if isinstance(saved, dict) and isinstance(wanted, dict):
        names = [*wanted, *(name for name in saved if name not in wanted)]
        return [
            line
            for name in names
            for line in _differences(saved.get(name), wanted.get(name), f"{key}.{name}".strip("."))
        ]
    return [] if saved == wanted else [f"{key}: saved {saved!r}, asked {wanted!r}"]
