"""Compiling ahead of time for TPU slices that need not be present; needs only libtpu."""

import os
from typing import Any

import jax
from jax.experimental import topologies

from poss_jax.config.reading import UserError, one_line


def tpu_slice(name: str) -> list[Any]:
    """Devices of a TPU slice such as `v5p:2x2x1`.

    Raises:
      UserError: no such slice, or no compiler for it.
    """
    if jax.default_backend() != "tpu":  # without a TPU libtpu would look for one
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    try:
        bounds = _host_bounds(name)
        topology = topologies.get_topology_desc(platform="tpu", topology_name=name, **bounds)
        return list(topology.devices)
    except Exception as error:  # libtpu is missing, or refuses the name
        raise UserError(
            f"cannot compile for {name}: {one_line(error)}; want a TPU slice "
            "such as v5p:2x2x1, and libtpu installed (pip install libtpu)"
        ) from error


def _host_bounds(name: str) -> dict[str, Any]:
    """States that a one-chip host has one chip, which not every libtpu assumes."""
    sizes = name.partition(":")[2].split("x")
    return {"chips_per_host_bounds": (1, 1, 1)} if set(sizes) == {"1"} else {}


def planned_memory(compiled: jax.stages.Compiled) -> dict[str, int]:
    """Bytes per device of a compiled program, as planned by the compiler."""
    memory = compiled.memory_analysis()
    assert memory is not None, "every compiler of XLA plans memory"
    kept = memory.argument_size_in_bytes
    new = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return {
        "arguments": kept,
        "donated": memory.alias_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
        "total": kept + new + memory.temp_size_in_bytes,
    }
