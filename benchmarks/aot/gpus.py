"""GPUs that programs can be compiled for without having one.

The compiler comes with the wheels of `jax[cuda13]` and needs a description of the device. Nothing
runs, so no driver is needed.
"""

import json
import os
from collections.abc import Mapping
from typing import Any

from jax.experimental import topologies

from infer.bench.costs import DEVICES
from poss_jax.config.reading import UserError, one_line

_SM90: dict[str, Any] = {
    "threads_per_block_limit": 1024,
    "threads_per_warp": 32,
    "shared_memory_per_block": 48 * 1024,
    "shared_memory_per_block_optin": 227 * 1024,
    "shared_memory_per_core": 228 * 1024,
    "threads_per_core_limit": 2048,
    "core_count": 132,
    "fpus_per_core": 128,
    "block_dim_limit_x": 2**31 - 1,
    "block_dim_limit_y": 2**16 - 1,
    "block_dim_limit_z": 2**16 - 1,
    "thread_dim_limit_x": 1024,
    "thread_dim_limit_y": 1024,
    "thread_dim_limit_z": 64,
    "registers_per_core_limit": 2**16,
    "registers_per_block_limit": 2**16,
    "l2_cache_size": 50 * 2**20,
    "clock_rate_ghz": 1.98,
    "device_address_bits": 64,
    "device_vendor": "NVIDIA Corporation",
    "cuda_compute_capability": {"major": 9, "feature_extension": ("ACCELERATED_FEATURES",)},
    "driver_version": "13.0.0",
    "runtime_version": "13.0.0",
    "compile_time_toolkit_version": "13.0.0",
    "dnn_version": "9.10.0",
}
"""Facts about Hopper GPUs from NVIDIA's tuning guide, as XLA names them."""

GPUS: Mapping[str, Mapping[str, Any]] = {
    "h100": {
        **_SM90,
        "name": "NVIDIA H100 80GB HBM3",
        "memory_bandwidth": int(DEVICES["h100"].bytes_per_second),
        "device_memory_size": 79 * 2**30,
    },
    "h200": {
        **_SM90,
        "name": "NVIDIA H200",
        "memory_bandwidth": int(DEVICES["h200"].bytes_per_second),
        "device_memory_size": 140 * 2**30,
    },
}
"""GPUs that can be compiled for without having one."""


def gpu(name: str) -> list[Any]:
    """The device of a machine with one GPU of `GPUS`.

    Raises:
      UserError: no such GPU, or no compiler for it.
    """
    if name not in GPUS:
        raise UserError(f"gpu {name}: want one of {', '.join(GPUS)}")
    # Without a driver JAX cannot ask CUDA's libraries for their versions, and gives up.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    try:
        topology = topologies.get_topology_desc(
            name, platform="cuda", topology="1x1x1", target_config=describe_gpu(name)
        )
    except Exception as error:  # the wheels are missing
        raise UserError(
            f"cannot compile for {name}: {one_line(error)}; want JAX with CUDA "
            'installed (pip install "jax[cuda13]")'
        ) from error
    return list(topology.devices)


def describe_gpu(name: str) -> str:
    """Describes a GPU as XLA reads it: a `GpuTargetConfigProto` in protobuf's text format."""
    facts = GPUS[name]
    return _as_text(
        {
            "gpu_device_info": facts,
            "platform_name": "CUDA",
            "dnn_version_info": {"major": 9, "minor": 10},
            "device_description_str": facts["name"],
        }
    )


def _as_text(message: Mapping[str, Any]) -> str:
    """Formats a message as protobuf text; enum names are tuples of one here."""
    parts = []
    for name, value in message.items():
        if isinstance(value, Mapping):
            parts.append(f"{name} {{ {_as_text(value)} }}")
        else:
            shown = value[0] if isinstance(value, tuple) else json.dumps(value)
            parts.append(f"{name}: {shown}")
    return " ".join(parts)
