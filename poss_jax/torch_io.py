"""Reading PyTorch `.bin` state dicts; the only file that imports torch."""

import pickle
import zipfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from poss_jax.config import UserError


def read_bin(path: str | Path) -> dict[str, np.ndarray]:
    """Reads a state dict without running any code from the file.

    Files of the zip format are mapped into memory, so a tensor costs memory only once it is used.

    Args:
      path: a file written by `torch.save`.

    Returns:
      Arrays by name; bfloat16 as `ml_dtypes.bfloat16`.

    Raises:
      UserError: torch is not installed; the file is damaged, wants to run code, or holds something
        else than named tensors.
    """
    torch = _import_torch()
    try:
        mapped = zipfile.is_zipfile(path)
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        raise UserError(
            f"{path}: want plain tensors, got a pickle that holds or runs other things; "
            "use a safetensors file instead"
        ) from error
    except (OSError, EOFError, RuntimeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"{path}: cannot be read ({reason}); fetch the file again") from error
    if not isinstance(state, dict) or not all(
        isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in state.items()
    ):
        raise UserError(f"{path}: want a flat dict of named tensors; export the state dict alone")
    return {name: _to_numpy(torch, value, f"{path}, {name}") for name, value in state.items()}


def _import_torch() -> Any:
    try:
        import torch  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise UserError(
            "reading a .bin file needs torch; install the `torch` extra "
            "(pip install 'poss-jax[torch]') or use a safetensors file"
        ) from error
    return torch


def _to_numpy(torch: Any, tensor: Any, origin: str) -> np.ndarray:
    tensor = tensor.detach()
    if tensor.dtype == torch.bfloat16:  # NumPy has no such type; the bits are the same
        return tensor.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    try:
        return tensor.numpy()
    except (TypeError, RuntimeError) as error:
        raise UserError(
            f"{origin}: want a plain tensor, got {tensor.dtype} ({tensor.layout}); "
            "quantised and sparse weights cannot be read"
        ) from error
