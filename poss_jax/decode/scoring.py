"""Log-probabilities of given texts, chunk by chunk: no more than a block's logits are held."""

import jax
import jax.numpy as jnp
from jax import lax

from poss_jax.decode.speculate import token_logprobs
from poss_jax.decode.state import DecodeConfig, Logprobs, Request, Weights
from poss_jax.model import target as targets
from poss_jax.model.cache import commit_rows
from poss_jax.shapes import Array, Int

_BLOCK = 64  # rows whose logits are held at once; a larger chunk is a multiple


@jax.named_scope("score")
def score_chunk(
    weights: Weights,
    config: DecodeConfig,
    request: Request,
    prefill: targets.Prefill,
    index: Int[Array, ""],
) -> tuple[targets.Prefill, Logprobs]:
    """Reads a chunk of the prompts; scores the token after each of its rows.

    Args:
      weights: parameters of the target.
      config: static settings; `num_logprobs` is at least 1.
      request: the batch.
      prefill: all chunks before, for the target alone.
      index: index of the chunk.

    Returns:
      The chunks so far, and log-probabilities of tokens `first + 1` to `first + chunk` [B chunk].
    """
    size = config.chunk
    tokens = jnp.pad(request.tokens, ((0, 0), (0, -request.tokens.shape[1] % size + 1)))
    both = lax.dynamic_slice_in_dim(tokens, index * size, size + 1, axis=1)
    depths = jnp.broadcast_to(jnp.arange(size)[None], (len(tokens), size))
    causal = depths[:, :, None] >= depths[:, None, :]
    out = targets.verify(weights.target, config.target, prefill.cache, both[:, :-1], depths, causal)
    cache = commit_rows(prefill.cache, out.rows, jnp.full_like(request.lengths, size))

    def score(block: tuple[Array, Array]) -> Logprobs:
        hidden, following = block
        return token_logprobs(config, targets.read_logits(weights.target, hidden), following)

    parts = jax.tree.map(_split, (out.features, both[:, 1:]))
    return prefill.replace(cache=cache), jax.tree.map(_join, lax.map(score, parts))


def _split(rows: Array) -> Array:
    """[B T ...] -> [blocks B T / blocks ...]."""
    block = min(_BLOCK, rows.shape[1])
    return jnp.moveaxis(rows.reshape(len(rows), -1, block, *rows.shape[2:]), 1, 0)


def _join(blocks: Array) -> Array:
    """Undoes `_split`."""
    rows = jnp.moveaxis(blocks, 0, 1)
    return rows.reshape(len(rows), -1, *rows.shape[3:])
