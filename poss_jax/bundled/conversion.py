"""Model folders in the cache: a checkpoint that a user names is converted once, and then found."""

import hashlib
import logging
import re
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from poss_jax.checkpoint.record import FORMAT_VERSION
from poss_jax.checkpoint.whole import hold_lock
from poss_jax.config.paths import cache_folder, child_python, is_uri, local_path
from poss_jax.config.reading import UserError

_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")
_LOG = logging.getLogger(__name__)


def find_model(source: str, *, target: str | Path | None = None) -> str | Path:
    """Returns the model folder of what a user names; the first call converts a checkpoint.

    Args:
      source: a model folder, which is returned as it is; a checkpoint's folder, a GGUF file, or a
        Hub id.
      target: model folder of the target, if `source` is a draft.

    Raises:
      UserError: what the converter refuses.
    """
    if is_uri(source):
        return source
    path = local_path(source, "model")
    is_local = path.exists()
    if (path / "model.json").is_file() or not (is_local or _HUB_ID.fullmatch(source)):
        return source  # a model folder, or nothing
    facts = [*(_list_files(path.resolve()) if is_local else [source]), str(target)]
    digest = hashlib.sha256("\n".join(facts).encode()).hexdigest()
    name = path.resolve().name.removesuffix(".gguf") if is_local else source.replace("/", "--")
    kind = ["target"] if target is None else ["draft", "--target", str(target)]
    return convert_once(f"{name}-{digest[:8]}", lambda: path if is_local else source, *kind)


def _list_files(path: Path) -> Iterator[str]:
    """Names, sizes and times of a checkpoint's files: another checkpoint has others."""
    yield str(path)
    for file in sorted(path.iterdir()) if path.is_dir() else [path]:
        status = file.stat()
        yield f"{file.name} {status.st_size} {status.st_mtime_ns}"


def convert_once(name: str, find_source: Callable[[], str | Path], *command: str) -> Path:
    """Converts a checkpoint into the cache, unless that is done; returns the model folder.

    Args:
      name: name of the folder, without the version of its format.
      find_source: finds the checkpoint if it must be converted.
      command: the converter's other arguments.

    Raises:
      UserError: what `find_source` or the converter refuses, or the cache folder cannot be written.
    """
    folder = cache_folder() / "models" / f"{name}-v{FORMAT_VERSION}"
    if not _is_there(folder):
        source = find_source()
        folder.parent.mkdir(parents=True, exist_ok=True)
        with hold_lock(folder.with_name(f".{folder.name}.lock"), _say_that_it_waits):
            if not _is_there(folder):  # another process may have converted it
                _convert(str(source), folder, command)
    return folder


def _is_there(folder: Path) -> bool:
    return (folder / "model.json").is_file()  # the folder is written atomically


def _convert(source: str, folder: Path, command: Sequence[str]) -> None:
    _LOG.warning("converting %s into %s, once", source, folder)
    # Another process gives its memory back, and leaves an accelerator to this one.
    words, environment = child_python("-m", "poss_jax.convert", *command)
    words += ["--source", source, "--output", str(folder)]
    environment["JAX_PLATFORMS"] = "cpu"
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"{source}: {done.stderr.strip().rpartition('error: ')[2]}")
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    _LOG.warning("converted %s: %.0f MB", source, size / 1e6)


def _say_that_it_waits(holder: str) -> None:
    _LOG.warning("waiting for %s, which converts the same model", holder)
