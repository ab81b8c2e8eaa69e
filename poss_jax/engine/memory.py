"""Least memory that decoding needs; a batch that needs more than the device has is refused."""

import os

import jax

from poss_jax.config import LlamaConfig, UserError
from poss_jax.decode.state import DecodeConfig, Weights


def device_memory() -> int | None:
    """Bytes that this process may use on its device; None where nobody says."""
    stats = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" in stats:
        return stats["bytes_limit"]
    if jax.default_backend() != "cpu" or not hasattr(os, "sysconf"):
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def check_memory(
    weights: Weights, config: DecodeConfig, *, batch_size: int, prompt_size: int
) -> None:
    """Refuses a batch that cannot fit.

    Args:
      weights: parameters of target and draft.
      config: the static side.
      batch_size: number of sequences.
      prompt_size: length that the prompts are padded to.

    Raises:
      UserError: even the weights, the caches and one round's logits are more than the memory.
    """
    needed = least_bytes(weights, config, batch_size=batch_size, prompt_size=prompt_size)
    available = device_memory()
    if available is not None and needed > available:
        raise UserError(
            f"batch_size {batch_size}, prompts of up to {prompt_size} tokens and "
            f"{config.max_new_tokens} new ones need at least {_gib(needed)}, the device has "
            f"{_gib(available)}; lower batch_size, max_new_tokens or the tree, or shorten the "
            "prompts"
        )


def least_bytes(
    weights: Weights, config: DecodeConfig, *, batch_size: int, prompt_size: int
) -> int:
    """Counts what must be held at once: weights, caches, the output, a round's logits."""
    size = weights.target["embed"]["weight"].dtype.itemsize
    arrays = {id(leaf): leaf.nbytes for leaf in jax.tree.leaves(weights)}  # some are shared
    target, num_nodes = config.target, config.tree.num_nodes if config.draft else 1
    rows = config.target_cache_size(prompt_size)
    each = 4 * prompt_size + 12 * config.max_new_tokens
    each += size * (target.num_layers * rows * _pair(target) + num_nodes * target.vocab_size)
    if config.draft is not None:
        rows = config.draft_cache_size(prompt_size)
        each += size * config.draft.num_streams * rows * _pair(config.draft.layer)
        each += 8 * config.tree.num_candidates
    return sum(arrays.values()) + batch_size * each


def _pair(config: LlamaConfig) -> int:
    """Numbers in the key and the value of one position in one layer."""
    return 2 * config.num_kv_heads * config.head_dim


def _gib(number: int) -> str:
    return f"{number / 2**30:,.1f} GiB"
