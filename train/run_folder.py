"""The folder of a training run: config, provenance, metrics, checkpoints, and the trained model.

config.yaml  provenance.json  metrics.jsonl  checkpoints/<step>/  model/
"""

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
import yaml

from poss_jax.checkpoint import provenance
from poss_jax.config import TrainConfig, UserError, config_to_dict


class RunFolder:
    """Opens a run's folder: a new one, or one with the same config to continue.

    Raises:
      UserError: the folder holds something else, or a run with another config.
    """

    def __init__(self, config: TrainConfig, *, overwrite: bool = False) -> None:
        self.path = Path(config.output).absolute()
        values = config_to_dict(config)
        if overwrite and (self.path / "config.yaml").is_file():
            shutil.rmtree(self.path)
        if self.path.is_dir() and any(self.path.iterdir()):
            _check_same_run(self.path, values)
        else:
            self.path.mkdir(parents=True, exist_ok=True)
            (self.path / "provenance.json").write_text(json.dumps(provenance(), indent=2) + "\n")
            (self.path / "config.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
        options = ocp.CheckpointManagerOptions(max_to_keep=2)
        self._manager = ocp.CheckpointManager(self.path / "checkpoints", options=options)

    @property
    def model(self) -> Path:
        """Where the trained model goes; it exists once the run is complete."""
        return self.path / "model"

    def restore(self, state: Any) -> Any:
        """Returns the last saved state, placed like `state`; or `state` itself if none is saved."""
        step = self._manager.latest_step()
        if step is not None:
            abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
            state = self._manager.restore(step, args=ocp.args.StandardRestore(abstract))
        self._drop_metrics_after(step or 0)
        return state

    def save(self, step: int, state: Any) -> None:
        """Saves the state in the background."""
        if step not in self._manager.all_steps():
            self._manager.save(step, args=ocp.args.StandardSave(state))

    def log(self, metrics: dict[str, Any]) -> None:
        """Appends one line to metrics.jsonl."""
        with (self.path / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(metrics) + "\n")

    def close(self) -> None:
        """Waits for saves under way."""
        self._manager.close()

    def _drop_metrics_after(self, step: int) -> None:
        """A resumed run writes again what it had logged beyond its checkpoint."""
        path = self.path / "metrics.jsonl"
        if not path.exists():
            return
        lines = [line for line in path.read_text().splitlines(keepends=True) if line[-1] == "\n"]
        kept = [line for line in lines if json.loads(line)["step"] <= step]
        replacement = path.with_suffix(".tmp")
        replacement.write_text("".join(kept))
        replacement.replace(path)


def _check_same_run(path: Path, values: dict[str, Any]) -> None:
    saved_path = path / "config.yaml"
    if not saved_path.is_file():
        raise UserError(f"output {path} is not empty and not a training run; name another folder")
    saved = yaml.safe_load(saved_path.read_text())
    if different := _differences(saved, values):
        raise UserError(
            f"output {path} holds a run with another config ({different[0]}); "
            "name another folder, or start anew with --overwrite"
        )


def _differences(saved: Any, wanted: Any, key: str = "") -> list[str]:
    if isinstance(saved, dict) and isinstance(wanted, dict):
        names = [*wanted, *(name for name in saved if name not in wanted)]
        return [
            line
            for name in names
            for line in _differences(saved.get(name), wanted.get(name), f"{key}.{name}".strip("."))
        ]
    return [] if saved == wanted else [f"{key}: saved {saved!r}, asked {wanted!r}"]
