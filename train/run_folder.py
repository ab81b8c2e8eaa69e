"""The folder of a training run: config, provenance, metrics, checkpoints, and the trained model.

config.yaml  provenance.json  metrics.jsonl  checkpoints/<step>/  model/
"""

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
import yaml

from poss_jax.checkpoint import provenance
from poss_jax.config import TrainConfig, UserError, config_to_dict
from poss_jax.train_step import TrainState


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
        values = yaml.safe_dump(config_to_dict(config), sort_keys=False)
        (partial / "config.yaml").write_text(values)
        if path.exists():
            path.replace(Path(scratch.name) / "replaced")
        partial.replace(path)


class RunFolder:
    """A run's folder, once it is claimed: what the run saves, and reads again to continue."""

    def __init__(self, config: TrainConfig) -> None:
        self.path = Path(config.output).absolute()
        options = ocp.CheckpointManagerOptions(max_to_keep=2)
        self._manager = ocp.CheckpointManager(self.path / "checkpoints", options=options)

    @property
    def model(self) -> Path:
        """Where the trained model goes; it exists once the run is complete."""
        return self.path / "model"

    def restore(self, state: TrainState) -> TrainState:
        """Returns the last saved state, placed like `state`; or `state` itself if none is saved."""
        step = self._manager.latest_step()
        if step is not None:
            abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, vars(state))
            saved = self._manager.restore(step, args=ocp.args.StandardRestore(abstract))
            state = state.replace(**saved)
        self._drop_metrics_after(step or 0)
        return state

    def save(self, step: int, state: TrainState) -> None:
        """Saves the state in the background."""
        if step not in self._manager.all_steps():
            self._manager.save(step, args=ocp.args.StandardSave(vars(state)))

    def log(self, metrics: dict[str, Any]) -> None:
        """Appends one line to metrics.jsonl; the first process holds the pen."""
        if jax.process_index() != 0:
            return
        with (self.path / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(metrics) + "\n")

    def close(self) -> None:
        """Waits for saves under way."""
        self._manager.close()

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
    different = _differences(saved, config_to_dict(config))
    if different and not overwrite:
        raise UserError(
            f"output {path} holds a run with another config ({different[0]}); "
            "name another folder, or start anew with --overwrite"
        )
    return not overwrite


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
