"""The choice between integer and float products of int8 weights on a CPU."""

import os
import platform
from functools import cache
from pathlib import Path
from typing import Literal

from poss_jax.config.reading import UserError

Int8Products = Literal["integer", "float"]

SETTING = "POSS_JAX_INT8_PRODUCTS"
"""Environment variable that names the products; without it the processor decides."""

_FOURFOLD = {"avx512_vnni", "avx_vnni", "amx_int8", "asimddp", "i8mm"}
"""Flags of processors that multiply four pairs of int8 at once (VNNI, AMX, ARM's dot products)."""


@cache
def int8_products() -> Int8Products:
    """Chooses the products of this process, integers where the processor is fast with them.

    Raises:
      UserError: the environment names others.
    """
    named = os.environ.get(SETTING, "")
    if named == "integer" or named == "float":
        return named
    if named:
        raise UserError(f"{SETTING}: want integer or float, got {named!r}")
    return "integer" if _FOURFOLD & _processor_flags() else "float"


@cache
def has_unsigned_products() -> bool:
    """True if products of uint8 with int8 are faster than those of int8 with int8.

    YNNPACK's kernels for AVX-512 VNNI take uint8; without VNNI, it has no fast kernel for uint8.
    """
    return "avx512_vnni" in _processor_flags()


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
