"""The grid of devices, and the sharding of arrays along its axes.

The devices form a grid of three axes:

    data     splits the batch
    fsdp     splits the batch too, and every weight with its gradient and optimizer state
    tensor   splits the width of every layer (heads, MLP, vocabulary), so also its work

Linear weights are [out, in]. Widening ones (q, k, v, gate, up, embedding, head) are sharded by
`tensor` along the output, narrowing ones (o, down) along the input; `fsdp` takes the other
dimension. A dimension that an axis does not divide is not sharded on that axis. The axes of every
parameter are in the tables of the models (`parameters.py`).

Decoding uses `data` and `tensor` only. Every group of devices along `data` decodes its part of the
batch by itself; within a group weights and caches are sharded by `tensor`, and the compiler adds
the sums over the devices.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from poss_jax.config.models import MeshConfig
from poss_jax.config.reading import UserError
from poss_jax.shapes import Array, Float

BATCH = ("data", "fsdp")
"""The axes that split a batch, jointly."""

Axes = str | tuple[str, ...] | None


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """Arranges devices in a grid.

    Args:
      config: size of each axis; an axis of -1 takes the remaining devices.
      devices: all devices; None: the ones JAX sees. A grid of one takes the first.
    """
    devices = list(jax.devices() if devices is None else devices)
    sizes = config.sizes(len(devices))
    if sizes == (1, 1, 1):
        devices = devices[:1]
    automatic = (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(sizes, ("data", "fsdp", "tensor"), automatic, devices=devices)


def decoding_mesh(mesh: MeshConfig | Mesh | None) -> Mesh | None:
    """Arranges devices for decoding, without `fsdp`; None is one device."""
    if isinstance(mesh, MeshConfig):
        mesh = make_mesh(mesh)
    if mesh is None or mesh.size == 1:
        return None
    if mesh.shape["fsdp"] > 1:
        raise UserError(
            f"mesh.fsdp {mesh.shape['fsdp']}: decoding would gather all weights for every token; "
            "want 1, and the devices in mesh.tensor or mesh.data"
        )
    return mesh


def dividing_axes(axes: Axes, size: int, mesh: Mesh | AbstractMesh) -> Axes:
    """Returns the axes that divide a dimension into equal parts."""
    kept: list[str] = []
    for axis in (axes,) if isinstance(axes, str) else axes or ():
        if size % mesh.shape[axis] == 0 and mesh.shape[axis] > 1:
            kept.append(axis)
            size //= mesh.shape[axis]
    return kept[0] if len(kept) == 1 else tuple(kept) or None


def place_batch(mesh: Mesh) -> NamedSharding:
    """Sharding of a batch [B ...]."""
    return NamedSharding(mesh, PartitionSpec(BATCH))


def replicate(mesh: Mesh) -> NamedSharding:
    """Sharding of replicated arrays."""
    return NamedSharding(mesh, PartitionSpec())


def partition_state(shape: Sequence[int], mesh: Mesh | AbstractMesh) -> PartitionSpec:
    """Sharding of an array of a running batch [B ...]; caches [B K S H] also by heads."""
    if len(shape) == 4:
        return PartitionSpec("data", dividing_axes("tensor", shape[1], mesh))
    return PartitionSpec("data")


def check_processes(mesh: Mesh) -> None:
    """Raises UserError unless every process has a device of the mesh."""
    taking_part = {device.process_index for device in mesh.devices.flat}
    if len(taking_part) < jax.process_count():
        raise UserError(
            f"mesh: want devices of all {jax.process_count()} processes, got {mesh.size} of "
            f"{jax.device_count()}, of {len(taking_part)}; set one of its sizes to -1"
        )


def check_batch_size(batch_size: int, mesh: Mesh) -> None:
    """Raises UserError unless every device gets the same number of rows of a batch."""
    parts = mesh.shape["data"] * mesh.shape["fsdp"]
    if batch_size % parts:
        raise UserError(
            f"batch_size {batch_size} does not divide among mesh.data x mesh.fsdp = "
            f"{mesh.shape['data']} x {mesh.shape['fsdp']} devices; want a multiple of {parts}"
        )


def gather_head(head: Float[Array, "V D"]) -> Float[Array, "V D"]:
    """Gathers the head along `fsdp` inside a jitted step.

    It is used in a loop over chunks; the compiler gathers other weights where they are used.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return head
    spec = PartitionSpec(dividing_axes("tensor", len(head), mesh), None)
    return lax.with_sharding_constraint(head, spec)


def whole_rows(x: Array) -> Array:
    """Replicates rows over a group's devices inside a jitted step; without a mesh, does nothing.

    The compiler might otherwise shard the input of a product and then move its weight.
    """
    if jax.sharding.get_abstract_mesh().empty:
        return x
    return lax.with_sharding_constraint(x, PartitionSpec())


def highest_of_groups(x: Array) -> Array:
    """Takes the maximum within each group of devices, so that all take the same branch.

    Use it for any value that decides a branch or a loop's turns. A collective may span all devices,
    and a group that took another branch would make the others wait forever.
    """
    is_group = "data" in jax.sharding.get_abstract_mesh().manual_axes
    return lax.pmax(x, "data") if is_group else x


def split_batch(x: Array, axis: int = 0) -> Array:
    """Keeps an array inside a jitted step sharded along its batch, and otherwise replicated.

    The compiler might otherwise gather activations instead of weights. Does nothing without a mesh
    in the context (`jax.set_mesh`).
    """
    if jax.sharding.get_abstract_mesh().empty:
        return x
    return lax.with_sharding_constraint(x, PartitionSpec(*(None,) * axis, BATCH))


def bytes_per_device(tree: Any) -> int:
    """Bytes per device of a tree of sharded arrays, or of their shapes."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )
