"""Reading and writing PyTorch `.bin` state dicts; the only file that imports torch."""

import pickle
import re
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from poss_jax.config.reading import UserError

_ZIP_MAGIC = b"PK\x03\x04"
_GLOBAL = re.compile(r"GLOBAL (\S+)")


def read_bin(path: str | Path, *, check: bool = True) -> dict[str, np.ndarray]:
    """Reads a state dict without running any code from the file.

    Checksums of zip-format files are compared first, and the files are memory-mapped, so a tensor
    costs memory only once used. The older format has no checksums and is read whole.

    Args:
      check: compare the checksums; False reads only what is used.

    Returns:
      Arrays by name; bfloat16 as `ml_dtypes.bfloat16`.

    Raises:
      UserError: torch is not installed; the file is damaged, needs to run code, or holds something
        other than named tensors.
    """
    path = Path(path)
    torch = _import_torch(str(path))
    try:
        with path.open("rb") as file:
            is_zip = file.read(len(_ZIP_MAGIC)) == _ZIP_MAGIC  # torch's test, too
        if is_zip and check:
            with zipfile.ZipFile(path) as archive:
                damaged = archive.testzip()
            if damaged is not None:
                raise ValueError(f"the checksum of {damaged} does not match")
        with warnings.catch_warnings():  # about old pickles, which are read or refused below
            warnings.simplefilter("ignore")
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except pickle.UnpicklingError as error:
        match = _GLOBAL.search(str(error))
        what = f"wants to use {match[1]}" if match else "holds or runs other things"
        damaged = "" if is_zip and check else " (or the file is damaged)"
        raise UserError(
            f"{path}: want a pickle of plain tensors, got one that {what}{damaged}; use a "
            "safetensors file"
        ) from error
    except Exception as error:  # a damaged pickle can raise any kind
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise UserError(f"{path}: cannot be read ({reason}); fetch the file again") from error
    if not isinstance(state, dict) or not all(
        isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in state.items()
    ):
        raise UserError(f"{path}: want a flat dict of named tensors; export the state dict alone")
    return {name: _to_numpy(torch, value, f"{path}, {name}") for name, value in state.items()}


def write_bin(path: str | Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes a state dict that `torch.load(weights_only=True)` reads.

    Args:
      arrays: arrays by name; NumPy types that PyTorch has, or `ml_dtypes.bfloat16`.
    """
    torch = _import_torch(Path(path).name)
    state = {}
    for name, array in arrays.items():
        array = array if array.flags.writeable else array.copy()  # or torch warns
        if array.dtype == ml_dtypes.bfloat16:  # as in _to_numpy
            state[name] = torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        else:
            state[name] = torch.from_numpy(array)
    try:
        torch.save(state, path)
    except (OSError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"{Path(path).name} cannot be written: {reason}; nothing is kept"
        ) from error


def _import_torch(path: str) -> Any:
    try:
        import torch  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise UserError(
            f"{path} needs torch, which is not installed; install the `torch` extra "
            "(pip install 'poss-jax[torch]') or use a safetensors file"
        ) from error
    return torch


def _to_numpy(torch: Any, tensor: Any, origin: str) -> np.ndarray:
    tensor = tensor.detach()
    if tensor.dtype == torch.bfloat16:  # NumPy has no bfloat16; pass the bits
        return tensor.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    try:
        return tensor.numpy()
    except (TypeError, RuntimeError) as error:
        raise UserError(
            f"{origin}: want a plain tensor, got {tensor.dtype} ({tensor.layout}); "
            "quantised and sparse weights cannot be read"
        ) from error
