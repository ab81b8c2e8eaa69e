"""Traces on disk: tracing and lowering a step takes seconds, which only its first start needs.

JAX keeps what XLA compiled, but finds it by the lowered step. So a step is lowered once, exported,
and later starts call what was exported: XLA gets the same program, and texts stay the same.
"""

import hashlib
import os
import pickle
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, wraps
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
from jax import export

from poss_jax.checkpoint.whole import replaced
from poss_jax.decode.state import DecodeConfig, Weights
from poss_jax.shapes import Array

_MOST_FILES = 512  # of about 100 KB; those that were not used for longest go first
_DIGEST_BYTES = 32
_SOURCES = Path(__file__).parents[1]

_folder: Path | None = None

ResultT = TypeVar("ResultT")


class _Trace(NamedTuple):
    exported: bytes | bytearray
    tree: Any  # of the result


def keep_traces(folder: Path | None) -> None:
    """Keeps the steps that are traced from now on in a folder; None keeps none."""
    global _folder
    _folder = folder


def kept(function: Callable[..., ResultT]) -> Callable[..., ResultT]:
    """Makes a step, to be jitted, that is read from the folder instead of traced, if it is there.

    Args:
      function: (weights, config, *arrays) -> arrays.
    """

    @wraps(function)
    def run(weights: Weights, config: DecodeConfig, *args: Any) -> ResultT:
        if _folder is None or not _can_keep(config):
            return function(weights, config, *args)
        leaves, tree = jax.tree.flatten((weights, args))
        path = _folder / _name(function, config, tree, leaves)
        trace = _read(path)
        if trace is None:
            trace = _trace(function, config, tree, leaves)
            _write(path, trace)
        step = export.deserialize(bytearray(trace.exported))
        return jax.tree.unflatten(trace.tree, step.call(*leaves))

    return run


def _can_keep(config: DecodeConfig) -> bool:
    """True for steps that their settings describe, on one device; only CPUs were tried."""
    is_alone = config.mesh is None and jax.process_count() == 1
    return is_alone and config.children is None and jax.default_backend() == "cpu"


def _trace(
    function: Callable[..., Any], config: DecodeConfig, tree: Any, leaves: Sequence[Array]
) -> _Trace:
    result: list[Any] = []

    def flat(*leaves: Array) -> list[Array]:
        weights, args = jax.tree.unflatten(tree, leaves)
        out, structure = jax.tree.flatten(function(weights, config, *args))
        result.append(structure)
        return out

    shapes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
    # Custom calls may change with JAX, but then the file has another name.
    any_call = export.DisabledSafetyCheck.custom_call("ALL")
    exported = export.export(jax.jit(flat), disabled_checks=[any_call])(*shapes)
    return _Trace(exported.serialize(), result[0])


def _name(
    function: Callable[..., Any], config: DecodeConfig, tree: Any, leaves: Sequence[Array]
) -> str:
    """Names the file of a step by all that its trace depends on."""
    facts = [*_facts(), function.__module__, function.__qualname__, config, tree]
    facts += map(jax.typeof, leaves)
    text = "\n".join(map(str, facts))
    return f"{function.__name__}-{hashlib.sha256(text.encode()).hexdigest()[:32]}"


def _facts() -> list[Any]:
    """What the traces of this process have in common."""
    settings = jax.config.values.items()
    own = [(key, value) for key, value in settings if "cache" not in key and "log" not in key]
    return [*_identity(), *own]


@cache
def _identity() -> list[str]:
    """Names the sources, the libraries and the device."""
    sources = hashlib.sha256()
    for path in sorted(_SOURCES.rglob("*.py")):
        sources.update(hashlib.sha256(path.read_bytes()).digest())
    device = jax.devices()[0]
    libraries = [version(name) for name in ("jax", "jaxlib", "flax")]
    return [sources.hexdigest(), *libraries, device.device_kind, device.client.platform_version]


# --------------------------------------------------------------------------------------------------
# Files: a digest, then the rest


def _read(path: Path) -> _Trace | None:
    """Reads a trace; None if there is none, or only a damaged one."""
    try:
        stored = path.read_bytes()
        os.utime(path)
    except OSError:
        return None
    digest, rest = stored[:_DIGEST_BYTES], stored[_DIGEST_BYTES:]
    if hashlib.sha256(rest).digest() != digest:
        return None
    return _Trace(*pickle.loads(zlib.decompress(rest)))


def _write(path: Path, trace: _Trace) -> None:
    """Writes a trace atomically, and removes old ones; does nothing if the folder refuses."""
    rest = zlib.compress(pickle.dumps((bytes(trace.exported), trace.tree)), 1)
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replaced(path) as partial:
            partial.write_bytes(hashlib.sha256(rest).digest() + rest)
        files = sorted(path.parent.iterdir(), key=lambda one: one.stat().st_mtime)
        for old in files[:-_MOST_FILES]:
            old.unlink()
