"""The choice of how a CPU multiplies by int8 weights."""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Literal, cast, get_args

from poss_jax.config.paths import cache_folder
from poss_jax.config.reading import UserError

Int8Products = Literal["kernel", "integer", "float"]
"""By our own kernel in C, or by XLA with integers or floats."""

SETTING = "POSS_JAX_INT8_PRODUCTS"
"""Environment variable that names the products; without it the processor decides."""

_FOURFOLD = {"avx512_vnni", "avx_vnni", "amx_int8", "asimddp", "i8mm"}
"""Flags of processors that multiply four pairs of int8 at once (VNNI, AMX, ARM's dot products)."""


@cache
def int8_products() -> Int8Products:
    """Chooses the products of this process, integers where the processor is fast with them.

    Raises:
      UserError: the environment names others, or the kernel for a processor without AVX-512 VNNI.
    """
    named = os.environ.get(SETTING, "")
    if named == "kernel" and not has_unsigned_products():
        raise UserError(f"{SETTING}: kernel wants a processor with AVX-512 VNNI")
    if named in get_args(Int8Products):
        return cast(Int8Products, named)
    if named:
        raise UserError(f"{SETTING}: want kernel, integer or float, got {named!r}")
    if has_unsigned_products() and shutil.which(_compiler()[0]):
        return "kernel"
    return "integer" if _FOURFOLD & _processor_flags() else "float"


@cache
def has_unsigned_products() -> bool:
    """True if multiplying uint8 by int8 is faster than int8 by int8.

    YNNPACK's kernels for AVX-512 VNNI take uint8; without VNNI, it has no fast kernel for uint8.
    """
    return "avx512_vnni" in _processor_flags()


def load_library(source: Path, include: Path) -> ctypes.CDLL:
    """Loads a C file that uses JAX's interface, compiled in the folder of caches.

    It is compiled again if the library is damaged, and for other headers or commands.

    Args:
      source: the file.
      include: folder of JAX's headers.

    Raises:
      UserError: the folder of caches is unknown.
      OSError: there is no compiler, the folder cannot be written to, or allows no libraries.
      subprocess.SubprocessError: the compiler fails.
    """
    command = [*_compiler(), "-O3", "-std=gnu11", "-shared", "-fPIC"]
    command += [f"-I{include}", str(source), "-lm"]
    files = source, include / "xla/ffi/api/c_api.h"
    text = "\0".join([*command, *(file.read_text("utf-8") for file in files)])
    library = cache_folder() / f"{source.stem}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.so"
    with suppress(OSError):
        return ctypes.CDLL(str(library))
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        output = Path(folder) / library.name
        command += ["-o", str(output)]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
        with output.open("rb") as file:
            os.fsync(file.fileno())  # a library cut short would end the process
        output.replace(library)
    return ctypes.CDLL(str(library))


def _compiler() -> list[str]:
    """The words of CC, such as `ccache gcc`."""
    return os.environ.get("CC", "").split() or ["cc"]


def _processor_flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
    except OSError:  # no Linux; the ARM processors of Macs and of Windows have dot products
        return {"asimddp"} if platform.machine().lower() == "arm64" else set()
    named = (line.partition(":") for line in lines)
    kinds = ("flags", "features")  # x86, ARM
    return {
        flag for key, _, value in named if key.strip().lower() in kinds for flag in value.split()
    }
