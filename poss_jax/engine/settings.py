"""Defaults that depend on the device, trees per batch size, and sampling settings as arrays."""

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from poss_jax.config import ACCELERATOR_TREE, CPU_TREE, SamplingConfig, TreeConfig, UserError
from poss_jax.decode.sampling import Sampling

Trees = Mapping[int, TreeConfig | None]
"""Batch size -> tree for that many prompts and more; None decodes them without a draft."""

_SLOW_DEPTH = 16
"""Every drafted position is compiled by itself. A tiny draft took 12, 14, 26, 55 and 64 s at depths
4, 8, 16, 32 and 64 on two busy CPU cores; `tests/test_compilation.py` measures it again."""

_LOG = logging.getLogger(__package__)


def default_dtype() -> Any:
    """float32 on CPU, where bfloat16 is many times slower; bfloat16 elsewhere."""
    return jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16


def default_tree() -> TreeConfig:
    """The tree that suits this kind of device."""
    return CPU_TREE if jax.default_backend() == "cpu" else ACCELERATOR_TREE


def fit_tree(tree: TreeConfig, draft_vocab_size: int) -> TreeConfig:
    """Clamps a tree to what can be drafted; says in the log if it did, or if compiling takes long.

    Raises:
      UserError: more candidates than can be counted on the device.
    """
    fitted = dataclasses.replace(tree, top_k=min(tree.top_k, draft_vocab_size))
    fitted = dataclasses.replace(fitted, total_tokens=fitted.num_nodes)
    if fitted != tree:
        _LOG.warning(
            "tree %d/%d/%d (depth/top_k/total_tokens) asks for more than can be drafted; using "
            "%d/%d/%d",
            *dataclasses.astuple(tree),
            *dataclasses.astuple(fitted),
        )
    if fitted.num_candidates >= 2**31:
        raise UserError(
            f"tree of depth {tree.depth} and top_k {tree.top_k}: want fewer than 2**31 candidates, "
            f"got {fitted.num_candidates:,}; lower top_k or depth"
        )
    if fitted.depth > _SLOW_DEPTH:
        _LOG.warning(
            "a tree of depth %d may take minutes to compile, once per shape, since every drafted "
            "position is compiled by itself; lower depth to start sooner",
            fitted.depth,
        )
    return fitted


def tree_for(trees: Trees, batch_size: int) -> TreeConfig | None:
    """The tree of the largest batch size that is not above the given one; else of the smallest."""
    below = [size for size in trees if size <= batch_size]
    return trees[max(below) if below else min(trees)]


def sampling_per_prompt(
    sampling: SamplingConfig | Sequence[SamplingConfig] | None, num_prompts: int
) -> list[SamplingConfig]:
    """Gives every prompt its settings; prompts that share them get different seeds.

    Raises:
      UserError: a list of another length than the prompts.
    """
    if sampling is None or isinstance(sampling, SamplingConfig):
        shared = sampling or SamplingConfig()
        return [
            dataclasses.replace(shared, seed=prompt_seed(shared.seed, index))
            for index in range(num_prompts)
        ]
    if len(sampling) != num_prompts:
        raise UserError(
            f"sampling: want one for all or one per prompt ({num_prompts}), got {len(sampling)}"
        )
    return list(sampling)


def prompt_seed(seed: int, index: int) -> int:
    """Seed of a prompt within a run: the run's own for the first, others derived from it."""
    if index == 0:
        return seed
    return int(np.random.SeedSequence([seed, index]).generate_state(1)[0])


def check_bias(settings: Sequence[SamplingConfig], vocab_size: int) -> None:
    """Raises UserError where a biased token is not in the vocabulary."""
    outside = [t for one in settings for t in one.logit_bias if not 0 <= t < vocab_size]
    if outside:
        raise UserError(f"logit_bias: want token ids of 0 to {vocab_size - 1}, got {outside[0]}")


def sampling_arrays(settings: Sequence[SamplingConfig], vocab_size: int) -> Sampling | None:
    """Settings of a batch as arrays; None where the argmax of the logits is all there is to do.

    Raises:
      UserError: a biased token is not in the vocabulary.
    """
    if all(one.is_plain for one in settings):
        return None
    check_bias(settings, vocab_size)
    most = max(len(one.logit_bias) for one in settings)
    width = 1 << (most - 1).bit_length() if most else 0  # few shapes to compile
    ids = np.full((len(settings), width), -1, np.int32)
    bias = np.zeros((len(settings), width), np.float32)
    for row, one in enumerate(settings):
        ids[row, : len(one.logit_bias)] = list(one.logit_bias)
        bias[row, : len(one.logit_bias)] = list(one.logit_bias.values())

    def column(name: str, dtype: Any) -> jax.Array:
        return jnp.asarray([getattr(one, name) for one in settings], dtype)

    return Sampling(
        seed=column("seed", jnp.uint32),
        temperature=column("temperature", jnp.float32),
        top_k=column("top_k", jnp.int32),
        top_p=column("top_p", jnp.float32),
        min_p=column("min_p", jnp.float32),
        repetition_penalty=column("repetition_penalty", jnp.float32),
        bias_ids=jnp.asarray(ids),
        bias=jnp.asarray(bias),
    )
