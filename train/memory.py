"""Memory that a training step takes on each device.

The persistent arrays are counted, the temporary ones planned by the compiler; no weight is made.
Also plans for absent devices: a TPU slice is compiled for ahead of time, with libtpu alone.
"""

import os
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import Mesh

from poss_jax.config.models import LlamaConfig
from poss_jax.config.reading import UserError, one_line
from poss_jax.config.training import TrainConfig
from poss_jax.engine.device import device_memory
from poss_jax.learn.step import (
    TrainState,
    init_state,
    make_draft_step,
    make_optimizer,
    make_target_step,
)
from poss_jax.learn.task import DraftTask
from poss_jax.model.documents import TrainBatch
from poss_jax.model.families import init_draft
from poss_jax.model.parameters import shapes_on
from poss_jax.model.sharding import bytes_per_device, place_batch, replicate
from poss_jax.model.specialists import split_embedding
from poss_jax.model.target import init_target, stack_layers, without_tied_head

from .devices import OnMesh, make_step_on


class PlannedStep(NamedTuple):
    """A step and the shapes and shardings of its arguments."""

    step: OnMesh  # `(state, *inputs) -> (state, metrics)`
    state: TrainState  # parameters and optimizer state
    inputs: tuple[Any, ...]  # for a draft's step the frozen target, the batch and the random key
    hidden: int  # bytes per device of one layer's output, the least that a step holds

    @property
    def kept(self) -> dict[str, Any]:
        """Arrays that stay on the devices between steps, by name."""
        kept = {"parameters": self.state.params, "optimizer": self.state.opt_state}
        return kept | ({"target": self.inputs[0]} if len(self.inputs) > 1 else {})


def plan_draft_step(
    task: DraftTask, config: TrainConfig, dtype: Any, mesh: Mesh, *, has_features: bool = False
) -> PlannedStep:
    """Plans the step that trains a draft, on a mesh whose devices need not exist.

    Args:
      has_features: whether batches bring the target's features, so its layers are not needed.
    """

    def stacked(name: str, init: Callable[..., Any], shape: Any) -> Any:
        params = init(shape, jax.random.key(0))
        return params | {name: stack_layers(params[name])}

    optimizer = make_optimizer(config.optimizer, 1)
    target = shapes_on(mesh, lambda: stacked("layers", init_target, task.target), dtype)

    def draft() -> tuple[Any, Any]:
        return split_embedding(stacked("specialists", init_draft, task.draft))

    state = shapes_on(mesh, lambda: init_state(draft()[0], optimizer))
    target["draft"] = shapes_on(mesh, lambda: draft()[1])
    batch = _abstract_batch(config, mesh)
    if has_features:
        del target["layers"]
        width = (len(task.draft.aux_layers) + 1) * task.target.hidden_size
        shape, where = (*batch.tokens.shape, width), batch.tokens.sharding
        batch = batch.replace(features=jax.ShapeDtypeStruct(shape, dtype, sharding=where))
    key = jax.eval_shape(lambda: jax.random.key(0))
    key = jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=replicate(mesh))
    step = make_step_on(mesh, make_draft_step(task, optimizer), state)
    hidden = _hidden_bytes(task.target, config, dtype, mesh)
    return PlannedStep(step, state, (target, batch, key), hidden)


def plan_target_step(
    llama: LlamaConfig, config: TrainConfig, dtype: Any, mesh: Mesh
) -> PlannedStep:
    """Plans the step that trains a target, on a mesh whose devices need not exist."""

    def init() -> Any:
        params = init_target(llama, jax.random.key(0))
        return without_tied_head(params, llama) | {"layers": stack_layers(params["layers"])}

    optimizer = make_optimizer(config.optimizer, 1)
    state = shapes_on(mesh, lambda: init_state(init(), optimizer))
    step = make_step_on(mesh, make_target_step(llama, optimizer, config.step, dtype), state)
    hidden = _hidden_bytes(llama, config, dtype, mesh)
    return PlannedStep(step, state, (_abstract_batch(config, mesh),), hidden)


def describe_devices(planned: PlannedStep, compile_for: str | None) -> dict[str, Any]:
    """Prints which axes shard every array and the memory of a step; returns bytes per device.

    With `compile_for` it also compiles, which takes a minute or more for a large model.
    """
    numbers: dict[str, Any] = {name: bytes_per_device(tree) for name, tree in planned.kept.items()}
    numbers["total_kept"] = sum(numbers.values())
    lines = [f"placed    {'array':42} {'shape':18} {'cut by':20} on each device"]
    trees = {name: tree for name, tree in planned.kept.items() if name != "optimizer"}
    for path, leaf in jax.tree.leaves_with_path(trees):
        name, shape = jax.tree_util.keystr(path, simple=True, separator="/"), map(str, leaf.shape)
        cut = " ".join(
            axes if isinstance(axes, str) else "+".join(axes or "-") for axes in leaf.sharding.spec
        )
        size = _size(bytes_per_device(leaf))
        lines.append(f"          {name:42} {' '.join(shape):18} {cut:20} {size}")
    lines.append(_describe_numbers("memory", numbers))
    if compile_for is not None:
        compiled = compile_memory(planned)
        lines.append(_describe_numbers("compiled", compiled))
        numbers |= {"compiled_for": compile_for, "compiled": compiled}
    if jax.process_index() == 0:
        print("\n".join(lines))
    return numbers


def check_memory(planned: PlannedStep) -> None:
    """Raises UserError if what stays plus one layer's output exceeds a device's memory."""
    needed = bytes_per_device((planned.state, planned.inputs)) + planned.hidden
    available = device_memory()
    if available is not None and needed > available:
        raise UserError(
            f"a step needs at least {_size(needed)} of each device, which has {_size(available)}; "
            "lower batch_size or data.sequence_length, raise step.accumulation_steps, or spread "
            "the model over more devices (mesh.fsdp)"
        )


def compile_memory(planned: PlannedStep) -> dict[str, int]:
    """Bytes per device as the compiler plans them; takes a minute or more for a large model."""
    return planned_memory(planned.step.lower(planned.state, *planned.inputs).compile())


def _describe_numbers(title: str, numbers: dict[str, int]) -> str:
    """Formats bytes as one line."""
    shown = (f"{name.replace('_', ' ')} {_size(number)}" for name, number in numbers.items())
    return f"{title:9} of each device: {', '.join(shown)}"


def _size(number: int) -> str:
    for power, unit in ((3, "GiB"), (2, "MiB")):
        if number >= 1024**power:
            return f"{number / 1024**power:.2f} {unit}"
    return f"{number / 1024:.2f} KiB"


def _abstract_batch(config: TrainConfig, mesh: Mesh) -> TrainBatch:
    shape, where = (config.batch_size, config.data.sequence_length), place_batch(mesh)
    of = partial(jax.ShapeDtypeStruct, shape, sharding=where)
    return TrainBatch(tokens=of(jnp.int32), loss_mask=of(bool), documents=of(jnp.int32))


def _hidden_bytes(llama: LlamaConfig, config: TrainConfig, dtype: Any, mesh: Mesh) -> int:
    """Size of one layer's output on a device."""
    parts = mesh.shape["data"] * mesh.shape["fsdp"] * config.step.accumulation_steps
    rows = config.batch_size * config.data.sequence_length // parts
    return rows * llama.hidden_size * jnp.dtype(dtype).itemsize


def tpu_slice(name: str) -> list[Any]:
    """Devices of a TPU slice such as `v5p:2x2x1`; UserError without the slice or its compiler."""
    if jax.default_backend() != "tpu":  # without a TPU libtpu would look for one
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    try:
        is_chip = {*name.partition(":")[2].split("x")} == {"1"}  # not every libtpu expects that
        bounds = {"chips_per_host_bounds": (1, 1, 1)} if is_chip else {}
        topology = topologies.get_topology_desc(platform="tpu", topology_name=name, **bounds)
        return list(topology.devices)
    except Exception as error:  # libtpu is missing, or refuses the name
        raise UserError(
            f"cannot compile for {name}: {one_line(error)}; want a TPU slice "
            "such as v5p:2x2x1, and libtpu installed (pip install libtpu)"
        ) from error


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
