"""Claiming the folder of a run: one run writes there at a time, and none destroys another.

A folder that holds this run is continued. A new one appears once the run can start.
"""

import json
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import yaml
from etils import epath

from poss_jax.checkpoint.record import provenance
from poss_jax.checkpoint.whole import renamed, sole_writer, write_file
from poss_jax.config.paths import (
    AnyPath,
    absolute,
    as_path,
    copy_files,
    is_uri,
    read_text,
    real_path,
)
from poss_jax.config.reading import UserError, config_to_dict, parse_yaml, shorten
from poss_jax.config.training import TrainConfig

from .devices import barrier, broadcast_from_first

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
    """Keeps other runs out of the folder of this one; its first process holds the lock.

    Raises:
      UserError: in every process, another run is at work there.
    """
    with ExitStack() as held:
        broadcast_from_first(lambda: held.enter_context(sole_writer(config.output)))
        yield


@contextmanager
def claim_together(config: TrainConfig, *, overwrite: bool) -> Iterator[AnyPath]:
    """Calls `claim_folder` in the first process; all processes use its result.

    Raises:
      UserError: in every process, what `claim_folder` refuses in the first.
    """
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
    for model in (config.target, config.init_target, config.init_draft):
        if model is not None and real_path(model).is_relative_to(real_path(path)):
            raise UserError(f"output {path} holds {model}, which is needed; name another folder")
    inputs = config.features.cache, config.specialists.draft_vocabulary
    inputs += config.data.source, config.data.template
    for file in inputs if overwrite else ():
        if file is not None and real_path(file).is_relative_to(real_path(path)):
            raise UserError(f"output {path} holds {file}, which --overwrite would remove; move it")
    is_empty = path.is_dir() and {entry.name for entry in path.iterdir()} <= {".lock"}
    if is_empty or not path.exists():
        return False
    saved = saved_config(path)
    if saved is None:
        raise UserError(
            f"output {path} is not empty, and its config.yaml is not that of a training run; put "
            "that back, or name another folder"
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
