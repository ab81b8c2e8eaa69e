r"""Compiles decoding for a TPU slice or GPU that this machine need not have.

Needs no weights and no accelerator, only shapes. TPUs need libtpu (pip install libtpu; one process
at a time), GPUs the wheels of jax[cuda13]. Prints for every program its compile time, its memory
and the device's, the bytes it accesses and the bytes it must move, and how many kernels it starts;
as its last line one JSON object, unless a terminal shows it.

    python -m benchmarks.aot --config configs/aot/llama3-8b.yaml \
        --topology v6e:1x1 programs=[step,round]
    python -m benchmarks.aot --config configs/aot/llama3-8b.yaml --gpu h100
    python -m benchmarks.aot --target DIR --draft DIR --gpu h200
"""

import json
import os
import re
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding

from infer.bench import costs
from infer.bench.costs import DEVICES, Device
from infer.bench.phases import run_round, run_rounds
from infer.bench.report import with_provenance
from poss_jax.bundled.default import with_bundled
from poss_jax.checkpoint.folder import read_draft
from poss_jax.checkpoint.record import ModelRecord, TargetIdentity, read_record
from poss_jax.config.bench import AheadConfig, ProgramName
from poss_jax.config.models import DraftConfig
from poss_jax.config.reading import UserError, one_line
from poss_jax.decode import speculate
from poss_jax.decode.state import Request, StaticShape, Weights
from poss_jax.engine.device import ACCELERATOR_CHUNKS, with_rows
from poss_jax.engine.prompts import PreparedPrompt, lay_out, make_request
from poss_jax.engine.steps import on_mesh
from poss_jax.engine.trees import fit_tree
from poss_jax.learn.task import describe_draft
from poss_jax.model.families import init_draft
from poss_jax.model.parameters import shapes_on
from poss_jax.model.quantise import quantise_specialists, quantise_target
from poss_jax.model.sharding import (
    bytes_per_device,
    decoding_mesh,
    make_mesh,
    partition_state,
    replicate,
)
from poss_jax.model.specialists import borrow_from_target, fuse_draft
from poss_jax.model.target import fuse_target, init_target
from poss_jax.program.arguments import read_arguments
from poss_jax.program.output import check_writable, print_summary
from poss_jax.program.running import run_program
from poss_jax.shapes import Params
from train.memory import planned_memory, tpu_slice

GPUS = {"h100": ("NVIDIA H100 80GB HBM3", 79), "h200": ("NVIDIA H200", 140)}
"""GPUs that can be compiled for without having one: name, and GiB of memory."""

_ACTIONS = {
    "--topology": {"metavar": "SLICE", "help": "TPU slice, such as v6e:1x1."},
    "--gpu": {"choices": [*GPUS], "help": "A machine with one such GPU."},
    "--output": {"metavar": "FILE", "type": Path, "help": "JSON file for the report."},
    "--dump": {"metavar": "FOLDER", "type": Path, "help": "Folder for optimised HLO."},
}
_KERNEL = re.compile(
    r" (fusion|custom-call|dot|convolution|reduce|sort|scatter|gather|copy|transpose|convert"
    r"|(?:dynamic-)?(?:update-)?slice|all-reduce|all-gather|reduce-scatter|all-to-all"
    r"|collective-permute|call)(?:-start)?\("
)
_prefill = jax.jit(on_mesh(speculate.prefill), static_argnums=1)
_start = on_mesh(speculate.start)


class Plan(NamedTuple):
    """Everything that is compiled: models, request and devices."""

    weights: Weights  # shapes of both models, placed
    decode: StaticShape
    request: Request  # shapes of a batch
    mesh: Mesh
    work: costs.Workload  # the same for counting floors

    def shared_bytes(self, name: str) -> int:
        """Bytes per device that a program is given twice but the device holds once."""
        draft = self.decode.draft
        if draft is None or name == "step":
            return 0
        has_head = draft.head_size is not None or self.work.draft_vocabulary is not None
        lent = [] if draft.has_embedding else ["embed"]
        lent += [] if has_head or name == "prefill" else ["head"]
        return bytes_per_device([self.weights.draft[key] for key in lent])

    def floor(self, name: str) -> costs.Cost:
        """Least bytes and operations of a program, per device (a loop's: one round).

        A group of devices along `data` reads all weights for its part of the batch.
        """
        work = replace(self.work, batch=-(-self.work.batch // self.mesh.shape["data"]))
        card = costs.cost_card(work, prompt_tokens=work.context) | {"step": costs.decode(work)}
        return card.get(name, card["round"]) / costs.num_parts(self.mesh)


class Compiled(NamedTuple):
    """A compiled program."""

    program: jax.stages.Compiled
    text: str  # its optimised HLO
    seconds: float  # of tracing and compiling


def plan(config: AheadConfig, mesh: Mesh) -> Plan:
    """Describes models and request by their shapes.

    Raises:
      UserError: a folder is missing or broken, or the models do not fit.
    """
    record, draft, num_tokens = _describe_models(config)
    target, kind = record.llama, config.quantise or record.quantised
    dtype, key = jnp.dtype(config.dtype), jax.random.key(0)

    def cast(params: Params) -> Params:
        return jax.tree.map(lambda leaf: leaf.astype(dtype), params)

    def make_target() -> Params:
        params = cast(init_target(target, key))
        return fuse_target(params if kind is None else quantise_target(params, kind), target)

    def make_draft(draft: DraftConfig) -> Params:
        params = cast(init_draft(draft, key))
        params = fuse_draft(params if kind is None else quantise_specialists(params, kind), draft)
        ids = None if num_tokens is None else jnp.zeros(num_tokens, jnp.int32)
        return borrow_from_target(params, make_target(), ids)

    weights = Weights(shapes_on(mesh, make_target), {})
    if draft is not None:
        weights = weights._replace(draft=shapes_on(mesh, lambda: make_draft(draft)))
    tree = fit_tree(config.tree, num_tokens or target.vocab_size)
    decode = StaticShape(target, draft, tree, rows=0, chunk=ACCELERATOR_CHUNKS[0])
    decode = decode._replace(mesh=decoding_mesh(mesh), lookup=config.lookup)
    length = config.context + config.max_new_tokens
    decode = with_rows(decode, length, max_length=target.max_position_embeddings)
    work = costs.Workload(
        target=target,
        draft=draft,
        tree=tree,
        lookup=config.lookup,
        batch=config.batch_size,
        context=config.context,
        draft_vocabulary=num_tokens,
        **dict.fromkeys(("target_bytes", "specialist_bytes"), 1 if kind else dtype.itemsize),
        **dict.fromkeys(("draft_bytes", "cache_bytes"), dtype.itemsize),
    )
    return Plan(weights, decode, _describe_request(config, decode, mesh), mesh, work)


def _describe_models(
    config: AheadConfig,
) -> tuple[ModelRecord, DraftConfig | None, int | None]:
    """Target, draft, and the size of a draft vocabulary (None: all tokens)."""
    if config.model is None:
        record = read_record(str(config.target), "target")
    else:
        unknown = TargetIdentity(name="model", embedding_sha256="", head_sha256="")
        record = ModelRecord(family="target", config=config.model, target=unknown, provenance={})
    if record.quantised is not None and config.quantise not in (None, record.quantised):
        raise UserError(
            f"quantise {config.quantise}: the target is quantised to {record.quantised}"
        )
    num_tokens, vocab_size = config.draft_tokens, record.llama.vocab_size
    if num_tokens is not None and num_tokens > vocab_size:
        raise UserError(f"draft_tokens: want at most the target's {vocab_size}, got {num_tokens}")
    if config.specialists is not None:
        draft = describe_draft(config.specialists, record.llama, num_tokens or vocab_size)
        return record, draft, num_tokens
    if config.draft is None:
        return record, None, None
    draft = read_draft(config.draft, target=record, allow_target_mismatch=True)
    if num_tokens is not None and draft.draft.head_size is not None:
        raise UserError(f"draft_tokens: draft {config.draft} has its own head; leave it out")
    if num_tokens is None and draft.draft_vocabulary is not None:
        num_tokens = len(draft.draft_vocabulary)
    return record, draft.draft, num_tokens


def _describe_request(config: AheadConfig, decode: StaticShape, mesh: Mesh) -> Request:
    prompt = PreparedPrompt([0], 1, config.sampling, decode.target.eos_token_ids)
    host = lay_out([prompt] * config.batch_size, num_tokens=decode.rows)
    request = jax.eval_shape(make_request, host)
    if config.sampling.is_plain:
        request = request.replace(sampling=None)
    return jax.tree.map(lambda leaf: leaf.update(sharding=replicate(mesh)), request)


def state_shapes(plan: Plan, decode: StaticShape) -> Any:
    """Shapes of the state after the prompt."""
    state = jax.eval_shape(lambda w, r: _start(w, decode, r), plan.weights, plan.request)

    def place(leaf: Any) -> Any:
        where = NamedSharding(plan.mesh, partition_state(leaf.shape, plan.mesh))
        return leaf.update(sharding=where)

    return jax.tree.map(place, state)


def compile_program(name: str, plan: Plan) -> Compiled:
    """Compiles one of `AheadConfig.programs`."""
    decode = plan.decode._replace(draft=None) if name == "step" else plan.decode
    jitted = {"prefill": _prefill, "rounds": run_rounds}.get(name, run_round)
    state = () if name == "prefill" else (state_shapes(plan, decode),)
    is_tpu = plan.mesh.devices.flat[0].platform == "tpu"
    began = time.monotonic()
    lowered = jitted.lower(plan.weights, decode, plan.request, *state)
    with tempfile.TemporaryDirectory() as folder:
        program = lowered.compile(compiler_options={"xla_dump_to": folder} if is_tpu else None)
        try:
            text = program.as_text() or ""
        except jax.errors.JaxRuntimeError:  # JAX cannot print some asynchronous copies of TPUs
            (path,) = Path(folder).glob("*after_codegen.txt")
            text = path.read_text()
    return Compiled(program, text, time.monotonic() - began)


# --------------------------------------------------------------------------------------------------
# What they cost


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


# --------------------------------------------------------------------------------------------------
# GPUs, described to XLA's compiler


def gpu(name: str) -> list[Any]:
    """The device of a machine with one GPU of `GPUS`.

    Raises:
      UserError: there is no compiler for it.
    """
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
    """Describes a GPU as XLA reads it: a `GpuTargetConfigProto` in protobuf's text format.

    The facts about Hopper GPUs come from NVIDIA's tuning guide.
    """
    full_name, memory = GPUS[name]
    return f"""
        platform_name: "CUDA"
        dnn_version_info {{ major: 9 minor: 10 }}
        device_description_str: "{full_name}"
        gpu_device_info {{
          name: "{full_name}"
          device_vendor: "NVIDIA Corporation"
          cuda_compute_capability {{ major: 9 feature_extension: ACCELERATED_FEATURES }}
          driver_version: "13.0.0" runtime_version: "13.0.0"
          compile_time_toolkit_version: "13.0.0" dnn_version: "9.10.0"
          core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98 device_address_bits: 64
          device_memory_size: {memory * 2**30} l2_cache_size: {50 * 2**20}
          memory_bandwidth: {DEVICES[name].bytes_per_second:.0f}
          shared_memory_per_core: {228 * 2**10} shared_memory_per_block: {48 * 2**10}
          shared_memory_per_block_optin: {227 * 2**10}
          registers_per_core_limit: {2**16} registers_per_block_limit: {2**16}
          threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
          thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
          block_dim_limit_x: {2**31 - 1} block_dim_limit_y: {2**16 - 1}
          block_dim_limit_z: {2**16 - 1}
        }}"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses arguments, compiles, prints, writes."""
    config, args = read_arguments(
        AheadConfig, arguments, prog="benchmarks.aot", doc=__doc__, actions=_ACTIONS
    )
    if (args.topology is None) == (args.gpu is None):
        raise UserError("want either --topology SLICE or --gpu NAME; see --help")
    name: str = args.gpu or args.topology
    slices = [device for device in DEVICES if device not in GPUS]
    if args.gpu is None and name.partition(":")[0] not in slices:
        raise UserError(f"topology {name}: want one of {', '.join(slices)}, as in v6e:1x1")
    config = with_bundled(config)
    if args.output is not None:
        check_writable(args.output)
    if args.dump is not None:
        args.dump.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_enable_compilation_cache", False)  # compile times are reported
    mesh = make_mesh(config.mesh, gpu(name) if args.gpu else tpu_slice(name))
    planned, programs = plan(config, mesh), {}
    default = ("prefill", "step") if planned.decode.draft is None else get_args(ProgramName)
    for program in config.programs or default:
        compiled = compile_program(program, planned)
        if args.dump is not None:
            (args.dump / f"{program}.txt").write_text(compiled.text)
        programs[program] = measure(program, compiled, planned, DEVICES[name.partition(":")[0]])
        print(format_report(program, programs[program]), flush=True)
    report = with_provenance({"device": name, "programs": programs}, config)
    if args.output is not None:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(report, indent=2) + "\n")
        print(f"report: {args.output}")
    print_summary(report, "")


if __name__ == "__main__":
    run_program(main)
