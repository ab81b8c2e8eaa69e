"""Data and dtype that both stages of training begin with."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from poss_jax.config.reading import UserError
from poss_jax.config.training import TrainConfig
from poss_jax.data.prepared import Prepared, prepare
from poss_jax.data.sources import Documents


def compute_dtype(config: TrainConfig, mesh: Mesh) -> Any:
    """The dtype everything is computed in on these devices."""
    is_cpu = mesh.devices.flat[0].platform == "cpu"
    return jnp.dtype(config.dtype or ("float32" if is_cpu else "bfloat16"))


def prepare_rows(
    folder: Path,
    config: TrainConfig,
    tokenizer: Any,
    vocab_size: int,
    load: Callable[[], Documents] | None = None,
) -> Prepared:
    """Rows to train on and held-out rows, of which a batch must be full.

    Args:
      folder: folder of the run, where the rows are kept.
      config: the run.
      tokenizer: cuts texts into tokens.
      vocab_size: tokens that the model knows.
      load: reads the documents if the rows are not there yet.

    Raises:
      UserError: the data cannot be used, or there is too little of it.
    """
    prepared = prepare(folder, config.data, tokenizer, vocab_size, load)
    held_out, length = len(prepared.validation), config.data.sequence_length
    if held_out < config.batch_size:
        raise UserError(
            f"held-out documents fill {held_out} rows of {length} tokens, a batch needs "
            f"{config.batch_size}; raise data.validation_fraction or give more documents"
        )
    return prepared
