"""Compiles the wanted programs, and reports what they cost."""

import argparse
import json
import os
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any, get_args

import jax
from jax.experimental import topologies

from benchmarks.aot.config import AheadConfig, ProgramName
from benchmarks.aot.programs import Compiled, Plan, compile_program, plan
from infer.bench.costs import DEVICES, Device
from infer.bench.report import with_provenance
from poss_jax.config.reading import UserError, one_line
from poss_jax.model.sharding import make_mesh
from poss_jax.program.output import check_writable, print_summary
from train.memory import planned_memory, tpu_slice

_KERNEL = re.compile(
    r" (fusion|custom-call|dot|convolution|reduce|sort|scatter|gather|copy|transpose|convert"
    r"|(?:dynamic-)?(?:update-)?slice|all-reduce|all-gather|reduce-scatter|all-to-all"
    r"|collective-permute|call)(?:-start)?\("
)

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


def run(config: AheadConfig, args: argparse.Namespace) -> None:
    """Compiles for the device that the command line names, prints, and writes the report."""
    name: str = args.gpu or args.topology
    slices = [device for device in DEVICES if device.startswith("v")]
    if args.gpu is None and name.partition(":")[0] not in slices:
        raise UserError(f"topology {name}: want one of {', '.join(slices)}, as in v6e:1x1")
    if args.output is not None:
        check_writable(args.output)
    if args.dump is not None:
        check_writable(args.dump, is_folder=True)
        args.dump.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_enable_compilation_cache", False)  # compile times are reported
    planned = plan(config, make_mesh(config.mesh, gpu(name) if args.gpu else tpu_slice(name)))
    device, programs = DEVICES[name.partition(":")[0]], {}
    default = ("prefill", "step") if planned.decode.draft is None else get_args(ProgramName)
    for program in config.programs or default:
        compiled = compile_program(program, planned)
        if args.dump is not None:
            (args.dump / f"{program}.txt").write_text(compiled.text)
        programs[program] = measure(program, compiled, planned, device)
        print(format_report(program, programs[program]), flush=True)
    report = with_provenance({"device": name, "programs": programs}, config)
    if args.output is not None:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(report, indent=2) + "\n")
        print(f"report: {args.output}")
    print_summary(report, "")


def measure(name: str, compiled: Compiled, plan: Plan, device: Device) -> dict[str, Any]:
    """Reads everything that is reported of one program, JSON-compatible; bytes per device."""
    cost, floor = compiled.program.cost_analysis() or {}, plan.floor(name)
    memory = planned_memory(compiled.program)
    for key in ("arguments", "total"):  # what the draft borrows from the target counts once
        memory[key] -= plan.shared_bytes(name)
    kinds = count_kernels(compiled.text)
    return {
        "compile_seconds": round(compiled.seconds, 1),
        "memory": memory | {"available": device.memory_bytes},
        "floor_bytes": floor.bytes,
        "floor_ms": floor.milliseconds(device),
        "accessed_bytes": cost.get("bytes accessed"),
        "kernels": sum(kinds.values()),
        "kernels_by_kind": kinds,
    }


def count_kernels(text: str) -> dict[str, int]:
    """Counts what a device runs by itself in optimised HLO, by kind; a loop's body counts once."""
    fused = set(re.findall(r"calls=%?([\w.-]+)", text))
    blocks = re.findall(r"^(?:ENTRY )?%?([\w.-]+) .*\{\n((?:  .*\n)+)\}", text, re.MULTILINE)
    bodies = (body for name, body in blocks if name not in fused)
    return dict(Counter(kind for body in bodies for kind in _KERNEL.findall(body)).most_common())


def format_report(name: str, report: dict[str, Any]) -> str:
    """The report of one program for people."""
    memory, accessed = report["memory"], report["accessed_bytes"]
    sizes = (f"{key} {memory[key] / 2**30:.2f}" for key in ("arguments", "temporaries", "total"))
    kinds = ", ".join(f"{count} {kind}" for kind, count in report["kernels_by_kind"].items())
    return (
        f"{name}: compiled in {report['compile_seconds']} s\n"
        f"  memory  {', '.join(sizes)} of {memory['available'] / 2**30:.2f} GiB\n"
        f"  bytes   {'unknown' if accessed is None else f'{accessed / 1e9:.2f} GB'} accessed, "
        f"floor {report['floor_bytes'] / 1e9:.2f} GB, "
        f"{report['floor_ms']:.2f} ms\n"
        f"  kernels {report['kernels']}: {kinds}"
    )


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
