"""Products, attention, norms and noise in float32 by a kernel in C, compiled on first use.

XLA has YNNPACK pack a weight for every product, which takes longer than reading it (docs/LOG.md).
The kernel (kernel.c) reads int8 weights that `to_tiles` ordered once. It needs a processor with
AVX-512 VNNI and a C compiler. A row's bits do not depend on other rows.
"""

import logging
import math
import subprocess
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from poss_jax.config.processor import Int8Products, int8_products, load_library
from poss_jax.config.reading import UserError
from poss_jax.shapes import Array, Bool, Float, Int, UInt

_LOG = logging.getLogger(__name__)
_PREFIX = "poss_jax_"
_FUNCTIONS = ("multiply_rows", "attend", "normalise", "cosines", "gumbel")
_TILE = 32  # outputs
_DTYPES = (jnp.float32, jnp.uint32)


def has_kernel() -> bool:
    """True on a CPU with the kernel, which is compiled once per machine (about a second).

    If the compiler fails, the log says so in a line.
    """
    return jax.default_backend() == "cpu" and int8_products() == "kernel" and _register()


@cache
def _register() -> bool:
    try:
        library = load_library(Path(__file__).with_suffix(".c"), Path(jax.ffi.include_dir()))
    except (OSError, subprocess.SubprocessError, UserError) as error:
        output = " ".join((getattr(error, "stderr", None) or str(error)).split())[:300]
        _LOG.warning("int8 products by XLA, slower: kernel.c cannot be used: %s", output)
        return False
    for name in _FUNCTIONS:
        capsule = jax.ffi.pycapsule(getattr(library, name))
        jax.ffi.register_ffi_target(_PREFIX + name, capsule, platform="cpu")
    return True


def products_in_use() -> Int8Products:
    """The products of this process: those that it chose, unless the kernel cannot be compiled."""
    kind = int8_products()
    return "integer" if kind == "kernel" and not has_kernel() else kind


def fits_tiles(shape: tuple[int, ...]) -> bool:
    """True if the kernel can multiply a weight [... in] of this shape."""
    *out_dims, in_dim = shape
    return math.prod(out_dims) % _TILE == 0 and in_dim % 4 == 0


@jax.jit
def to_tiles(values: Int[Array, "*out_dims in_dim"]) -> Int[Array, "*out_dims in_dim"]:
    """Orders a weight's values for the kernel: tiles of 32 outputs; the shape stays."""
    in_dim = values.shape[-1]
    tiles = values.reshape(-1, _TILE, in_dim // 4, 4).swapaxes(1, 2)
    return tiles.reshape(values.shape)


@jax.jit
def from_tiles(values: Int[Array, "*out_dims in_dim"]) -> Int[Array, "*out_dims in_dim"]:
    """Reverses `to_tiles`."""
    in_dim = values.shape[-1]
    tiles = values.reshape(-1, in_dim // 4, _TILE, 4).swapaxes(1, 2)
    return tiles.reshape(values.shape)


def multiply_tiles(
    rows: Float[Array, "rows in_dim"],
    values: Int[Array, "out_dim in_dim"],
    sums: Int[Array, " out_dim"],
    scale: Float[Array, " out_dim"],
    *,
    num_limbs: int,
) -> Float[Array, "rows out_dim"]:
    """Multiplies float32 rows by an int8 weight in tiles.

    Args:
      rows: split into limbs as in `linear.split_limbs`.
      values: from `to_tiles`; `sums`: of each output's values.
      scale: factor of each output.
      num_limbs: limbs per element, 1 to 3.
    """
    multiply = _kernel("multiply_rows", (len(rows), len(values)))
    return multiply(rows, values, sums, scale, num_limbs=np.int64(num_limbs))


def _kernel(
    name: str, *shapes: tuple[int, ...], vmap_method: str = "sequential"
) -> Callable[..., Any]:
    """A function of the kernel with float32 outputs; `vmap_method` as in `jax.ffi.ffi_call`."""
    outputs = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    output = outputs[0] if len(outputs) == 1 else outputs
    return jax.ffi.ffi_call(f"{_PREFIX}{name}", output, vmap_method=vmap_method)


def cpu_branch(
    by_kernel: Callable[..., Any], by_jax: Callable[..., Any], *arrays: Array
) -> dict[str, Callable[..., Any]]:
    """Returns the branch of `lax.platform_dependent` for a CPU, empty where the kernel is not used.

    The kernel serves float32 and uint32, on one device; its derivative is the one of `by_jax`.
    """
    is_alone = jax.sharding.get_abstract_mesh().empty
    if any(x.dtype not in _DTYPES for x in arrays) or not is_alone or not has_kernel():
        return {}
    branch = jax.custom_jvp(by_kernel)
    branch.defjvp(partial(jax.jvp, by_jax))
    return {"cpu": branch}


def call_on_cpu(by_kernel: Callable[..., Any], by_jax: Callable[..., Any], *arrays: Array) -> Any:
    """Calls the kernel in a program for a CPU, and the same function in JAX elsewhere."""
    if not (on_cpu := cpu_branch(by_kernel, by_jax, *arrays)):
        return by_jax(*arrays)  # without a choice, whose derivative keeps more
    return lax.platform_dependent(*arrays, **on_cpu, default=by_jax)


def cosines(
    angles: Float[Array, "*shape"],
) -> tuple[Float[Array, "*shape"], Float[Array, "*shape"]]:
    """Computes cosines and sines, once for all their users."""
    cos, sin = _kernel("cosines", angles.shape, angles.shape)(angles)
    return cos, sin


def gumbel(keys: UInt[Array, "keys 2"], *, size: int) -> Float[Array, "keys size"]:
    """Draws `jax.random.gumbel(mode="high")` of each key's data, up to rounding."""
    return _kernel("gumbel", (len(keys), size), vmap_method="broadcast_all")(keys)


def normalise(
    rows: Float[Array, "rows D"], scale: Float[Array, " D"], *, eps: float
) -> Float[Array, "rows D"]:
    """Normalises as `layers.rms_norm` does; a row's bits do not depend on the number of rows."""
    return _kernel("normalise", rows.shape)(rows, scale, eps=np.float32(eps))


def attend(
    q: Float[Array, "B N T H"],
    stored: tuple[Float[Array, "B K S H"], Float[Array, "B K S H"]],
    length: Int[Array, " B"],
    new: tuple[Float[Array, "B K M H"], Float[Array, "B K M H"]],
    can_attend: Bool[Array, "#B T M"] | None,
) -> Float[Array, "B T N*H"]:
    """Attends as `cache.attend_cached` does; a row that may attend nothing becomes zeros.

    A row's bits depend on the keys that it attends and their order, not on which of them are
    committed, nor on other rows.
    """
    B, N, T, H = q.shape
    if can_attend is None:
        can_attend = jnp.tril(jnp.ones((1, T, T), bool))
    return _kernel("attend", (B, T, N * H))(q, *stored, length, *new, can_attend)
