"""Measures this device once and keeps the rates: read bandwidth, and matrix products by rows.

Where the kernel multiplies int8 weights (`poss_jax.model.kernel`), its rate is measured, too.
"""

import dataclasses
import json
import os
import platform
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from poss_jax.checkpoint.whole import write_file
from poss_jax.config.paths import is_uri
from poss_jax.decode.state import Weights
from poss_jax.engine.device import default_dtype, device_memory
from poss_jax.model.kernel import has_kernel
from poss_jax.model.linear import linear
from poss_jax.model.quantise import quantise, sum_values, tile_values
from poss_jax.shapes import Array

from .costs import Device

ROWS = (1, 8, 16, 64, 512)
_SECONDS = 0.3  # spent on every program
_WIDTHS = {"cpu": (8192, 2048)}
"""Widths of a weight larger than all caches, and of a square product that keeps all units busy."""
_OTHER_WIDTHS = (32768, 8192)


@dataclasses.dataclass(frozen=True)
class Roofline:
    """Measured rates of a device."""

    device: Device  # the best rates, of float products; `device_for` has those of floors
    # FLOPs per second of a product with a large weight, by its number of rows; `square`: a product
    # of two square matrices; `int8`: the kernel's product with an int8 weight, if there is one.
    flops_by_rows: dict[str, float]

    def device_for(self, weights: Weights) -> Device:
        """Returns the device with the rate of a model's products, which its floors need."""
        is_tiled = getattr(weights.target["head"]["weight"], "is_tiled", False)
        if not is_tiled or "int8" not in self.flops_by_rows:
            return self.device
        return dataclasses.replace(self.device, flops_per_second=self.flops_by_rows["int8"])


def find_roofline() -> Roofline:
    """Returns the kept rates of this device; measures and keeps them if there are none."""
    file, kept = _file(), {}
    with suppress(OSError, ValueError):
        kept = json.loads(file.read_text()) if file else {}
    kept = kept if isinstance(kept, dict) else {}
    with suppress(TypeError, KeyError):  # none, or of another version
        rates = kept[device_name()]
        if "int8" in rates["flops_by_rows"] or not has_kernel():
            return Roofline(Device(**rates["device"]), rates["flops_by_rows"])
    roofline = measure_roofline()
    if file is not None:
        kept |= {roofline.device.name: dataclasses.asdict(roofline)}
        with suppress(OSError):  # a folder that may not be written to
            file.parent.mkdir(parents=True, exist_ok=True)
            write_file(file, json.dumps(kept, indent=2) + "\n")
    return roofline


def measure_roofline() -> Roofline:
    """Measures this device."""
    wide, square = _WIDTHS.get(jax.default_backend(), _OTHER_WIDTHS)
    weight = jnp.ones((wide, wide), default_dtype())
    read = [weight.nbytes / _best_seconds(jax.jit(jnp.sum), weight)]
    rates = {}
    for num_rows in ROWS:
        rows = jnp.ones((num_rows, wide), weight.dtype)
        seconds = min(_best_seconds(product, rows, weight) for product in (_plain, _transposed))
        read.append(weight.nbytes / seconds)
        rates[str(num_rows)] = 2 * num_rows * wide**2 / seconds
    corner = weight[:square, :square]
    rates["square"] = 2 * square**3 / _best_seconds(_plain, corner, corner)
    device = Device(
        name=device_name(),
        bytes_per_second=max(read),
        flops_per_second=max(rates.values()),
        memory_bytes=device_memory() or 0,
    )
    if has_kernel():
        tiled = tile_values(sum_values({"weight": quantise(weight, "int8")}))["weight"]
        seconds = _best_seconds(jax.jit(linear), rows, tiled)
        rates["int8"] = 2 * ROWS[-1] * wide**2 / seconds
    return Roofline(device, rates)


@jax.jit
def _plain(rows: Array, weight: Array) -> Array:
    return rows @ weight.T


@jax.jit
def _transposed(rows: Array, weight: Array) -> Array:
    """The same product in the form that CPU libraries run fastest for a few rows."""
    if len(rows) == 1:
        return weight @ rows[0]
    return lax.optimization_barrier(weight @ rows.T)


def _best_seconds(program: Callable[..., Any], *arrays: Array) -> float:
    """Seconds of the fastest of several calls."""
    run = partial(program, *arrays)
    jax.block_until_ready(run())
    began, best = time.perf_counter(), float("inf")
    while time.perf_counter() - began < _SECONDS:
        started = time.perf_counter()
        jax.block_until_ready(run())
        best = min(best, time.perf_counter() - started)
    return best


def count_cores() -> int:
    """Counts the cores that this process may use."""
    has_affinity = hasattr(os, "sched_getaffinity")  # not on a Mac
    return len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1


def device_name() -> str:
    """Name of the device; for CPUs, which share one name, the machine's."""
    kind = jax.devices()[0].device_kind
    if jax.default_backend() != "cpu":
        return kind
    return f"{kind} of {platform.node()}, {count_cores()} cores"


def _file() -> Path | None:
    """File of all devices' rates, in the compilation cache's folder; None: none is kept."""
    folder = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]
    return None if folder is None or is_uri(folder) else Path(folder) / "roofline.json"
