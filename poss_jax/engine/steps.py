"""Steps of slots: prefill of one prompt, chunk by chunk, and its insertion into a running batch.

The scheduler chooses which step comes next; rounds of all slots are in `rounds.py`. Given the
shapes of weights (`shapes_of`) in place of weights, these steps compile and return shapes.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from poss_jax.decode import speculate
from poss_jax.decode.state import DecodeState, Logprobs, Request, StaticShape, Weights
from poss_jax.engine.prompts import HostRequest, make_request
from poss_jax.engine.rounds import PackedRounds, jit_step, pack_first
from poss_jax.model.cache import KeysValues, KVCache, commit_rows, cut_rows
from poss_jax.model.target import Prefill, end_prefill, read_logits, verify
from poss_jax.shapes import Array, Bool, Int, UInt

_BLOCK = 64  # scored rows whose logits are held at once; a larger chunk is a multiple


class Block(NamedTuple):
    """Rows of a chunk, copied out of the caches.

    Attributes:
      target: rows of the target's cache.
      draft: rows of the draft's; None without a draft.
    """

    target: KeysValues
    draft: KeysValues | None


def _make_empty(
    weights: Weights, config: StaticShape, request: Request, slots: Int[Array, " B"]
) -> tuple[Request, DecodeState]:
    """Makes empty slots with the shapes of a request and its first state."""

    def empty_rows(leaf: Array) -> Array:
        return jnp.zeros((len(slots), *leaf.shape[1:]), leaf.dtype)

    first = speculate.start(weights, config, request)
    request, state = jax.tree.map(empty_rows, (request, first))
    output = state.output.replace(is_done=jnp.ones(len(slots), bool))
    return request, state.replace(output=output)


def _put(weights: Weights, config: StaticShape, host: HostRequest) -> Request:
    del weights, config
    return make_request(host)


def _cut_block(
    weights: Weights,
    config: StaticShape,
    request: Request,
    prefill: Prefill,
    first: Int[Array, ""],
) -> Block:
    """Copies the chunk that begins at row `first`."""
    del weights, request

    def cut(cache: KVCache) -> KeysValues:
        return cut_rows(cache, first, count=config.chunk)

    return Block(cut(prefill.cache), prefill.carry and cut(prefill.carry))


def _append_block(
    weights: Weights, config: StaticShape, request: Request, prefill: Prefill, block: Block
) -> Prefill:
    """Takes the next chunk of a prompt from a block, instead of computing it."""
    del weights, request

    def append(cache: KVCache, rows: KeysValues) -> KVCache:
        return commit_rows(cache, rows, jnp.full_like(cache.length, config.chunk))

    carry = block.draft and append(prefill.carry, block.draft)
    return prefill.replace(cache=append(prefill.cache, block.target), carry=carry)


def _insert(
    weights: Weights,
    config: StaticShape,
    request: Request,
    state: DecodeState,
    new_request: Request,
    prefill: Prefill,
    slot: Int[Array, ""],
    allowed: UInt[Array, "1 words"],
) -> tuple[Request, DecodeState, PackedRounds]:
    """Chooses the first token of a prefilled prompt, and gives the request a slot."""
    out = end_prefill(weights.target, prefill, new_request.lengths)
    first = speculate.first_state(weights, config, new_request, out, allowed)

    def write(stored: Array, new: Array) -> Array:
        return lax.dynamic_update_slice_in_dim(stored, new, slot, 0)

    request, state = (
        jax.tree.map(write, *pair) for pair in ((request, new_request), (state, first))
    )
    return request, state, pack_first(first.output)


def _move(
    weights: Weights,
    config: StaticShape,
    request: Request,
    state: DecodeState,
    index: Int[Array, " B"],
    is_kept: Bool[Array, " B"],
) -> tuple[Request, DecodeState]:
    """Moves slots into a batch of another size; slots that are not kept end."""
    del weights, config
    request, state = jax.tree.map(lambda rows: jnp.take(rows, index, axis=0), (request, state))
    output = state.output.replace(is_done=state.output.is_done | ~is_kept)
    return request, state.replace(output=output)


@jax.named_scope("score")
def _score_chunk(
    weights: Weights,
    config: StaticShape,
    request: Request,
    prefill: Prefill,
    index: Int[Array, ""],
) -> tuple[Prefill, Logprobs]:
    """Reads a chunk of the prompts; scores the token after each of its rows.

    No more than a block's logits are held.

    Args:
      config: its `num_logprobs` is at least 1.
      prefill: all chunks before, for the target alone.

    Returns:
      The chunks so far, and log-probabilities of tokens `first + 1` to `first + chunk` [B chunk].
    """
    size = config.chunk
    tokens = jnp.pad(request.tokens, ((0, 0), (0, -request.tokens.shape[1] % size + 1)))
    both = lax.dynamic_slice_in_dim(tokens, index * size, size + 1, axis=1)
    depths = jnp.broadcast_to(jnp.arange(size)[None], (len(tokens), size))
    causal = depths[:, :, None] >= depths[:, None, :]
    out = verify(weights.target, config.target, prefill.cache, both[:, :-1], depths, causal)
    cache = commit_rows(prefill.cache, out.rows, jnp.full_like(request.lengths, size))

    def score(block: tuple[Array, Array]) -> Logprobs:
        hidden, following = block
        return speculate.token_logprobs(config, read_logits(weights.target, hidden), following)

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


def shapes_of(tree: Any) -> Any:
    """Shapes, dtypes and shardings of the arrays of a tree, as a step of slots takes them."""

    def shape_of(leaf: jax.Array | jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        sharding = leaf.sharding if leaf.committed else None
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(shape_of, tree)


# Created arrays follow the placement of the arguments, so unused weights stay arguments.
allocate = jit_step(_make_empty, keep_unused=True)
put = jit_step(_put, keep_unused=True)  # faster than jax.device_put
begin = jit_step(speculate.begin_prefill, keep_unused=True)
extend = jit_step(speculate.run_chunks, donate_argnums=3)
cut_block = jit_step(_cut_block)
append_block = jit_step(_append_block, donate_argnums=3)
score = jit_step(_score_chunk, donate_argnums=3)
insert = jit_step(_insert, donate_argnums=(2, 3))
resize = jit_step(_move)
