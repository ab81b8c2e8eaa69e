"""Compiles the wanted programs, prints what they cost, and writes the report."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import jax

from poss_jax.config.reading import UserError
from poss_jax.model.sharding import make_mesh
from poss_jax.program.ahead import tpu_slice
from poss_jax.program.output import check_writable, print_summary

from ..bench.costs import DEVICES
from ..bench.report import with_provenance
from .config import AheadConfig, Program
from .gpus import gpu
from .programs import compile_program, plan
from .report import format_report, measure


def run(config: AheadConfig, args: argparse.Namespace) -> None:
    """Compiles for the device that the command line names, prints, and writes the report."""
    name: str = args.gpu or args.topology
    if args.gpu is None:
        _check_topology(name)
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


def _check_topology(name: str) -> None:
    known = [device for device in DEVICES if device.startswith("v")]
    if name.partition(":")[0] not in known:
        raise UserError(f"topology {name}: want one of {', '.join(known)}, as in v6e:1x1")


def _compile_all(
    config: AheadConfig, devices: Sequence[Any], name: str, dump: Path | None
) -> dict[str, Any]:
    """Compiles the wanted programs, prints what they cost, and returns the report."""
    planned = plan(config, make_mesh(config.mesh, devices))
    device = DEVICES[name.partition(":")[0]]
    programs = {}
    own = ("prefill", "step") if planned.decode.draft is None else get_args(Program)
    for wanted in config.programs or own:
        compiled = compile_program(wanted, planned)
        if dump is not None:
            (dump / f"{wanted}.txt").write_text(compiled.text)
        programs[wanted] = measure(wanted, compiled, planned, device)
        print(format_report(wanted, programs[wanted]), flush=True)
    return {"device": name, "programs": programs}
