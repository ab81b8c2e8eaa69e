"""Where the arrays of a training run lie on many devices: one table, read by path.

The devices form a grid of three axes:

    data     splits the batch
    fsdp     splits the batch too, and every weight with its gradient and optimizer state
    tensor   splits the width of every layer (heads, MLP, vocabulary), so also its work

Linear weights are [out, in]. What widens (q, k, v, gate, up, embedding, head) is cut by `tensor`
along its output, what narrows again (o, down) along its input; `fsdp` takes the other dimension.
A dimension that an axis does not divide stays whole on that axis.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from poss_jax.config import MeshConfig, UserError
from poss_jax.shapes import Array, Float

BATCH = ("data", "fsdp")
"""The axes that split a batch, jointly."""

Axes = str | tuple[str, ...] | None

# The end of a path -> axes of the last dimensions. Layers and specialists are cut alike whether
# they are stacked or not, and so is what the optimizer keeps under the path of a parameter.
_TABLE: tuple[tuple[str, tuple[Axes, ...]], ...] = (
    (r"(embed|head)/weight", ("tensor", "fsdp")),
    # Its input is split in two (embedding, feature), so only its output is cut.
    (r"fc/weight", (("tensor", "fsdp"), None)),
    (r"attention/[qkv]/weight", ("tensor", "fsdp")),
    (r"attention/[qkv]/bias", ("tensor",)),
    (r"attention/o/weight", ("fsdp", "tensor")),
    (r"mlp/(gate|up)/weight", ("tensor", "fsdp")),
    (r"mlp/(gate|up)/bias", ("tensor",)),
    (r"mlp/down/weight", ("fsdp", "tensor")),
    (r"(fc|attention/o|mlp/down)/bias", (None,)),
    (r"(norm|input_norm|mlp_norm|attention/[qk]_norm)/scale", (None,)),
)


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """Arranges devices in a grid.

    Args:
      config: size of each axis; an axis of -1 takes the devices that are left.
      devices: all of them; None: those JAX sees. A grid of one takes the first.

    Raises:
      UserError: the grid does not have as many places as there are devices.
    """
    devices = list(jax.devices() if devices is None else devices)
    sizes = config.sizes(len(devices))
    if sizes == (1, 1, 1):
        devices = devices[:1]
    automatic = (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(sizes, ("data", "fsdp", "tensor"), automatic, devices=devices)


def partition(path: str, shape: Sequence[int], mesh: Mesh) -> PartitionSpec:
    """How an array is cut.

    Args:
      path: ends like `attention/q/weight`.
      shape: of the array; dimensions in front of those in the table (layers, specialists) stay
        whole, and so do scalars.
      mesh: whose axes cut.

    Raises:
      ValueError: the table does not know the path.
    """
    if not shape:
        return PartitionSpec()
    wanted = [axes for pattern, axes in _TABLE if re.fullmatch(f"(.*/)?{pattern}", path)]
    if len(wanted) != 1:
        raise ValueError(f"{path}: want one row in the table of sharding.py, got {len(wanted)}")
    front = (None,) * (len(shape) - len(wanted[0]))
    rest = zip(wanted[0], shape[len(front) :], strict=True)
    return PartitionSpec(*front, *(_dividing(axes, size, mesh) for axes, size in rest))


def _dividing(axes: Axes, size: int, mesh: Mesh | AbstractMesh) -> Axes:
    """Those of the axes that cut a dimension into equal parts."""
    kept: list[str] = []
    for axis in (axes,) if isinstance(axes, str) else axes or ():
        if size % mesh.shape[axis] == 0 and mesh.shape[axis] > 1:
            kept.append(axis)
            size //= mesh.shape[axis]
    return kept[0] if len(kept) == 1 else tuple(kept) or None


def place_weights(mesh: Mesh) -> Callable[[str, tuple[int, ...]], NamedSharding]:
    """(path, shape) -> where the array lies: what loading a model asks for."""
    return lambda path, shape: NamedSharding(mesh, partition(path, shape, mesh))


def place_tree(tree: Any, mesh: Mesh) -> Any:
    """Where every leaf of a tree lies: parameters, or a whole training state (arrays or shapes)."""

    def place(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return NamedSharding(mesh, partition(name, leaf.shape, mesh))

    return jax.tree_util.tree_map_with_path(place, tree)


def place_batch(mesh: Mesh) -> NamedSharding:
    """Where a batch [B ...] lies."""
    return NamedSharding(mesh, PartitionSpec(BATCH))


def replicate(mesh: Mesh) -> NamedSharding:
    """Where lies what every device holds."""
    return NamedSharding(mesh, PartitionSpec())


def check_batch_size(batch_size: int, mesh: Mesh) -> None:
    """Raises UserError unless every device gets equally many rows of a batch."""
    parts = mesh.shape["data"] * mesh.shape["fsdp"]
    if batch_size % parts:
        raise UserError(
            f"batch_size {batch_size} does not divide among mesh.data x mesh.fsdp = "
            f"{mesh.shape['data']} x {mesh.shape['fsdp']} devices; want a multiple of {parts}"
        )


def gather_head(head: Float[Array, "V D"]) -> Float[Array, "V D"]:
    """Undoes, inside a jitted step, what `fsdp` cuts of the head.

    It is used in a loop over chunks; other weights the compiler gathers where they are used.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return head
    spec = PartitionSpec(_dividing("tensor", len(head), mesh), None)
    return lax.with_sharding_constraint(head, spec)


def split_batch(x: Array, axis: int = 0) -> Array:
    """Keeps an array inside a jitted step cut along its batch, and whole otherwise.

    The compiler's own choice may gather activations where it should gather weights. Without a mesh
    in the context (`jax.set_mesh`) nothing happens.
    """
    if jax.sharding.get_abstract_mesh().empty:
        return x
    return lax.with_sharding_constraint(x, PartitionSpec(*(None,) * axis, BATCH))
