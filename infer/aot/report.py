"""Compiles the wanted programs, and reports what they cost."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import jax

from poss_jax.config.reading import UserError
from poss_jax.model.sharding import make_mesh
from poss_jax.program.ahead import planned_memory, tpu_slice
from poss_jax.program.output import check_writable, print_summary

from ..bench.costs import DEVICES, Device
from ..bench.report import with_provenance
from . import findings, hlo
from .config import AheadConfig, ProgramName
from .gpus import gpu
from .programs import Compiled, Plan, cache_shapes, compile_program, plan, weight_shapes

_CLOCKS_GHZ = {"v5e": 1.5, "v5p": 1.75, "v6e": 1.75}  # of the compiler's cycles
_MOST = 10
_SMALL = 2**14  # bytes; anything smaller costs only its launch
_MB = 1e6


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
    jax.config.update("jax_enable_compilation_cache", False)  # compile times are part of the report
    devices = gpu(name) if args.gpu else tpu_slice(name)
    report = with_provenance(_compile_all(config, devices, name, args.dump), config)
    if args.output is not None:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(report, indent=2) + "\n")
        print(f"report: {args.output}")
    print_summary(report, "")


def _compile_all(
    config: AheadConfig, devices: Sequence[Any], name: str, dump: Path | None
) -> dict[str, Any]:
    """Compiles the wanted programs, prints what they cost, and returns the report."""
    planned = plan(config, make_mesh(config.mesh, devices))
    device = DEVICES[name.partition(":")[0]]
    programs = {}
    own = ("prefill", "step") if planned.decode.draft is None else get_args(ProgramName)
    for wanted in config.programs or own:
        compiled = compile_program(wanted, planned)
        if dump is not None:
            (dump / f"{wanted}.txt").write_text(compiled.text)
        programs[wanted] = measure(wanted, compiled, planned, device)
        print(format_report(wanted, programs[wanted]), flush=True)
    return {"device": name, "programs": programs}


def measure(name: str, compiled: Compiled, plan: Plan, device: Device) -> dict[str, Any]:
    """Reads everything that is reported of one program, JSON-compatible."""
    used = plan.work.context, plan.decode.rows
    program = hlo.Program(compiled.text, trips=plan.num_blocks, used=used)
    loop = find_main_loop(program) if name == "rounds" else None
    cost = compiled.program.cost_analysis() or {}
    floor, kinds = plan.floor(name), findings.count_kernels(program, loop)
    memory = planned_memory(compiled.program)
    for key in ("arguments", "total"):  # what the draft borrows from the target counts once
        memory[key] -= plan.shared_bytes(name)
    report: dict[str, Any] = {
        "compile_seconds": round(compiled.seconds[0], 1),
        "compile_cpu_seconds": round(compiled.seconds[1], 1),
        "memory": memory | {"available": device.memory_bytes},  # bytes per device
        "floor_bytes": floor.bytes,
        "floor_ms": floor.milliseconds(device),
        "moved_bytes": sum(
            findings.moved_bytes(program, place) * place.times for place in program.kernels(loop)
        ),
        "accessed_bytes": None if loop else cost.get("bytes accessed"),
        "kernels": sum(kinds.values()),
        "kernels_by_kind": kinds,
        "loops": [_show(program, place) for place in program.loops(loop)],
    }
    if device.name in _CLOCKS_GHZ:
        per_ms = _CLOCKS_GHZ[device.name] * 1e6
        for key in ("scope", "source"):
            cycles = findings.cycles_by(program, key, loop)
            report["estimated_ms"] = sum(cycles.values()) / per_ms
            report[f"estimated_ms_by_{key}"] = {k: v / per_ms for k, v in cycles.items() if v}
    places = _find_places(name, program, loop, plan)
    return report | {key: _summary(program, few) for key, few in places.items()}


def _find_places(
    name: str, program: hlo.Program, loop: str | None, plan: Plan
) -> dict[str, Sequence[hlo.Place]]:
    """Lists what a good program has few of."""
    decode = plan.decode._replace(draft=None) if name == "step" else plan.decode
    weights, caches = weight_shapes(plan), cache_shapes(plan, decode)
    kernels = [place for place in program.kernels(loop) if place.op.nbytes >= _SMALL]
    relayouts = [place for place in kernels if findings.is_relayout(program, place)]
    copies = [place for place in kernels if findings.is_copy(program, place)]
    return {
        "copies": [place for place in copies if place not in relayouts],
        "relayouts": relayouts,
        "upcasts": [place for place in kernels if findings.is_upcast(program, place)],
        "collectives": list(filter(findings.is_collective, kernels)),
        "vocabulary_sorts": findings.sorts(program, plan.vocabulary),
        "vector_products": findings.vector_products(program, weights),
        "copied_weights_and_caches": findings.copies_of(program, [*weights, *caches]),
        "scatters": findings.scatters(program),
    }


def format_report(name: str, report: dict[str, Any]) -> str:
    """The report of one program for people."""
    memory, floor = report["memory"], report["floor_ms"]
    sizes = (f"{key} {memory[key] / 2**30:.2f}" for key in ("arguments", "temporaries", "total"))
    lines = [
        f"{name}: compiled in {report['compile_seconds']} s "
        f"({report['compile_cpu_seconds']} of all cores), {report['kernels']} kernels, "
        f"{len(report['loops'])} loops",
        f"  memory  {', '.join(sizes)} of {memory['available'] / 2**30:.2f} GiB",
        f"  floor   {report['floor_bytes'] / 1e9:.2f} GB, {floor:.2f} ms",
    ]
    ratio = report["moved_bytes"] / report["floor_bytes"]
    lines.append(f"  bytes   {report['moved_bytes'] / 1e9:.2f} GB, {ratio:.2f} x floor")
    if "estimated_ms" in report:
        time = report["estimated_ms"]
        lines.append(f"  time    {time:.2f} ms estimated (no sorts), {time / floor:.2f} x floor")
        for key in ("scope", "source"):
            items = list(report[f"estimated_ms_by_{key}"].items())[:_MOST]
            lines.append(f"    by {key}: " + ", ".join(f"{k} {v:.2f}" for k, v in items))
    kinds = list(report["kernels_by_kind"].items())[:_MOST]
    lines.append("  kernels " + ", ".join(f"{count} {kind}" for kind, count in kinds))
    for key in _LISTS:
        part = report[key]
        words = key.replace("_", " ")
        lines.append(f"  {words}: {part['number']}, {part['bytes'] / _MB:.1f} MB")
        lines += [f"    {line}" for line in part["largest"]]
    return "\n".join(lines)


def find_main_loop(program: hlo.Program) -> str:
    """Body of the loop of rounds: the loop whose body has most kernels."""
    bodies = [place.op.calls_as("body") for place in program.loops()]
    return max(bodies, key=lambda body: sum(findings.count_kernels(program, body).values()))


_LISTS = (
    *("copies", "relayouts", "upcasts", "collectives", "vocabulary_sorts", "vector_products"),
    *("copied_weights_and_caches", "scatters"),
)


def _summary(program: hlo.Program, places: Sequence[hlo.Place]) -> dict[str, Any]:
    """Number and bytes of some operations, and the largest of them, equal ones in one line."""
    found: dict[str, list[int]] = {}
    for place in places:
        found.setdefault(_show(program, place), []).append(place.op.nbytes)
    order = sorted(found, key=lambda line: -sum(found[line]))
    return {
        "number": len(places),
        "bytes": sum(place.op.nbytes for place in places),
        "largest": [
            f"{len(found[line])} x {found[line][0] / _MB:.2f} MB {line}" for line in order[:_MOST]
        ],
    }


def _show(program: hlo.Program, place: hlo.Place) -> str:
    shapes = " ".join(map(str, place.op.shapes[:2]))
    return f"{place.op.kind} {shapes} {program.source(place.op)} {findings.scope_of(place.op.path)}"
