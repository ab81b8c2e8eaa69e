"""The steps of the devices, all of them: each is one program per shape of its arguments.

    begin ─► extend ... extend ─► choose_first    prompts of a batch, prefilled together
                                  insert          one prompt, into a slot of a running batch
    run                                           some rounds of all sequences
    draft ─► (the host walks) ─► verify           one round with grammars
    resize, score                                 another batch size; log-probabilities of a prompt
    allocate, put                                 empty slots; a request from the host
    cut_block, append_block                       chunks of a prompt, to and from the prefix cache

The host chooses which step comes next: `loop.py` for `batch.py` and `slots.py`. Given the shapes of
weights (`shapes_of`) in place of weights, a step compiles and returns shapes.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from poss_jax.decode import speculate
from poss_jax.decode.rejection import DrawnTree
from poss_jax.decode.state import DecodeState, Prefill, Request, StaticShape, Weights
from poss_jax.decode.tree import Tree, make_tree
from poss_jax.decode.verify import Logprobs, token_logprobs
from poss_jax.engine.prompts import make_request
from poss_jax.engine.rounds import PackedRounds, pack_first, pack_new
from poss_jax.model import target as targets
from poss_jax.model.cache import KeysValues, KVCache, commit_rows, cut_rows
from poss_jax.model.sharding import highest_of_groups, partition_state
from poss_jax.shapes import Array, Bool, Float, Int, UInt

_BLOCK = 64  # scored rows whose logits are held at once; a larger chunk is a multiple

StateT = TypeVar("StateT")
Drafted = tuple[Tree, Float[Array, "B positions V"] | None]
"""A drafted tree, and the noise of the round."""
Block = tuple[KeysValues, KeysValues | None]
"""Rows of a chunk, copied out of the target's cache and of the draft's, if there is one."""


class Plan(NamedTuple):
    """The host's decisions about the trees of a round."""

    tokens: np.ndarray  # [B M] int32, of every node
    parents: np.ndarray  # [B M] int32, the node that each one continues, as in `Tree`
    masks: np.ndarray  # [B M words] uint32, which tokens may follow each (see `sampling.unpack`)


# --------------------------------------------------------------------------------------------------
# On meshes, and for shapes


def on_mesh(function: Callable[..., StateT], *, is_state: bool = True) -> Callable[..., StateT]:
    """Shards a decoding step along the axes of `StaticShape.mesh`, if there is one.

    Args:
      function: (weights, config, request, *state) -> state; the request may be on the host. All
        arrays but weights are [B ...] or numbers.
      is_state: shard the result as all states; False leaves it to the compiler, which then does
        not gather the scores of a tree.
    """

    @wraps(function)
    def run(weights: Weights, config: StaticShape, request: Any, *state: Any) -> StateT:
        mesh = config.mesh
        if mesh is None:
            return function(weights, config, request, *state)

        def hold(leaf: jax.Array) -> jax.Array:
            _, *inner = partition_state(leaf.shape, mesh)
            return lax.with_sharding_constraint(leaf, PartitionSpec(None, *inner))

        def run_group(weights: Weights, request: Any, *state: Any) -> Any:
            result = function(weights, config, request, *state)
            # A fixed sharding makes all rounds one program.
            return jax.tree.map(hold, result) if is_state else result

        cut, replicated = PartitionSpec("data"), PartitionSpec()
        has_rows = [jax.tree.leaves(tree)[0].ndim > 0 for tree in state]
        group = jax.shard_map(
            run_group,
            mesh=mesh,
            in_specs=(replicated, cut, *[cut if rows else replicated for rows in has_rows]),
            out_specs=cut,
            axis_names={"data"},
            check_vma=False,
        )
        return group(weights, request, *state)

    return run


def jit_step(function: Callable[..., Any], **settings: Any) -> Callable[..., Any]:
    """Jits a step, which given shapes of weights (`shapes_of`) compiles instead."""
    jitted = jax.jit(on_mesh(function), static_argnums=1, **settings)

    @wraps(function)
    def run_or_compile(weights: Weights, *args: Any) -> Any:
        if not isinstance(weights.target["norm"]["scale"], jax.ShapeDtypeStruct):
            return jitted(weights, *args)
        return jitted.lower(weights, *args).compile().out_info  # JAX keeps what is compiled

    return run_or_compile


def shapes_of(tree: Any) -> Any:
    """Shapes, dtypes and shardings of the arrays of a tree, as a step takes them."""

    def shape_of(leaf: jax.Array | jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        sharding = leaf.sharding if leaf.committed else None
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(shape_of, tree)


# --------------------------------------------------------------------------------------------------
# Prefill


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


def _put(weights: Weights, config: StaticShape, host: dict[str, Any]) -> Request:
    del weights, config
    return make_request(host)


def _cut_block(
    weights: Weights, config: StaticShape, request: Request, prefill: Prefill, first: Int[Array, ""]
) -> Block:
    """Copies the chunk that begins at row `first`."""
    del weights, request

    def cut(cache: KVCache) -> KeysValues:
        return cut_rows(cache, first, count=config.chunk)

    return cut(prefill.cache), prefill.draft_cache and cut(prefill.draft_cache)


def _append_block(
    weights: Weights, config: StaticShape, request: Request, prefill: Prefill, block: Block
) -> Prefill:
    """Takes the next chunk of a prompt from a block, instead of computing it."""
    del weights, request

    def append(cache: KVCache, rows: KeysValues) -> KVCache:
        return commit_rows(cache, rows, jnp.full_like(cache.length, config.chunk))

    of_target, of_draft = block
    draft_cache = prefill.draft_cache
    if draft_cache is not None and of_draft is not None:
        draft_cache = append(draft_cache, of_draft)
    return prefill.replace(cache=append(prefill.cache, of_target), draft_cache=draft_cache)


def _choose_first(
    weights: Weights,
    config: StaticShape,
    request: Request,
    caches: tuple[KVCache, KVCache | None],
    last: tuple[Array, Array],  # hidden, features
    allowed: UInt[Array, "B words"] | None = None,
) -> tuple[DecodeState, PackedRounds]:
    """Chooses the first token of prefilled prompts; their caches are donated."""
    prefill = Prefill(caches[0], *last, caches[1])
    out = speculate.end_prefill(weights, request, prefill)
    state = speculate.first_state(weights, config, request, out, allowed)
    return state, pack_first(state.output)


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
    parts = (prefill.cache, prefill.draft_cache), (prefill.hidden, prefill.features)
    first, rounds = _choose_first(weights, config, new_request, *parts, allowed)

    def write(stored: Array, new: Array) -> Array:
        return lax.dynamic_update_slice_in_dim(stored, new, slot, 0)

    request, state = (
        jax.tree.map(write, *pair) for pair in ((request, new_request), (state, first))
    )
    return request, state, rounds


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


# --------------------------------------------------------------------------------------------------
# Rounds


def _run(
    weights: Weights,
    config: StaticShape,
    request: Request,
    state: DecodeState,
    is_active: Bool[Array, " B"],
    num_rounds: Int[Array, " B"],
) -> tuple[DecodeState, PackedRounds]:
    # A sequence ended that the host still counts as running: stop after one round to free its slot.
    is_news = highest_of_groups((state.output.is_done & is_active).any())
    max_rounds = jnp.where(is_news, 1, num_rounds[0])
    state = end_others(config, state, is_active)
    previous, is_done = state.output, state.output.is_done

    def goes_on(carry: tuple[Array, DecodeState]) -> Array:
        index, state = carry
        now = state.output.is_done
        is_at_end = highest_of_groups((now != is_done).any()) | ~highest_of_groups(~now.all())
        return (index < max_rounds) & ~is_at_end

    def run_one(carry: tuple[Array, DecodeState]) -> tuple[Array, DecodeState]:
        return carry[0] + 1, speculate.run_round(weights, config, request, carry[1])

    _, state = lax.while_loop(goes_on, run_one, (jnp.array(0), state))
    return state, pack_new(config, previous, state.output)


def end_others(
    config: StaticShape, state: DecodeState, is_active: Bool[Array, " B"]
) -> DecodeState:
    """Ends all sequences that are not active."""
    is_done = state.output.is_done | ~is_active
    # Attention reads the blocks of the longest sequence, so empty slots count as one row.
    short = jnp.where(is_done, 1, config.rows)

    def shortened(cache: KVCache) -> KVCache:
        return cache.replace(length=jnp.minimum(cache.length, short))

    output = state.output.replace(is_done=is_done)
    state = state.replace(target_cache=shortened(state.target_cache), output=output)
    if state.draft is not None:
        state = state.replace(draft=state.draft.replace(cache=shortened(state.draft.cache)))
    return state


def _draft(
    weights: Weights,
    config: StaticShape,
    request: Request,
    state: DecodeState,
    is_active: Bool[Array, " B"],
    allowed: UInt[Array, "B words"],
) -> tuple[DecodeState, Drafted]:
    state = end_others(config, state, is_active)
    noise = speculate.round_noise(config, request, state, is_guided=True)
    tree = speculate.draft_tree(weights, config, request, state, noise, allowed)
    return state, (tree, noise)


def _verify(
    weights: Weights,
    config: StaticShape,
    request: Request,
    state: DecodeState,
    drafted: Drafted,
    plan: Plan,
) -> tuple[DecodeState, PackedRounds]:
    tree, noise = drafted
    tokens, parents, masks = map(jnp.asarray, plan)
    if not isinstance(tree, DrawnTree):  # the test of drawn children depends on their ranks
        is_same = (tokens == tree.tokens) & (parents == tree.parents)
        tree = make_tree(
            tokens,
            parents,
            depth=config.max_accepted,
            is_copied=tree.is_copied & is_same if config.num_copied else None,
            is_certain=~is_same,
        )
    previous = state.output
    state = speculate.finish_round(weights, config, request, state, tree, noise, masks)
    return state, pack_new(config, previous, state.output)


# --------------------------------------------------------------------------------------------------
# Scores


@jax.named_scope("score")
def _score_chunk(
    weights: Weights, config: StaticShape, request: Request, prefill: Prefill, index: Int[Array, ""]
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
    out = targets.verify(weights.target, config.target, prefill.cache, both[:, :-1], depths, causal)
    cache = commit_rows(prefill.cache, out.rows, jnp.full_like(request.lengths, size))

    def split(rows: Array) -> Array:  # [B T ...] -> [blocks B T / blocks ...]
        block = min(_BLOCK, rows.shape[1])
        return jnp.moveaxis(rows.reshape(len(rows), -1, block, *rows.shape[2:]), 1, 0)

    def join(blocks: Array) -> Array:
        rows = jnp.moveaxis(blocks, 0, 1)
        return rows.reshape(len(rows), -1, *rows.shape[3:])

    def score(block: tuple[Array, Array]) -> Logprobs:
        hidden, following = block
        logits = targets.read_logits(weights.target, hidden)
        return token_logprobs(logits, following, count=config.num_logprobs)

    parts = jax.tree.map(split, (out.features, both[:, 1:]))
    return prefill.replace(cache=cache), jax.tree.map(join, lax.map(score, parts))


# --------------------------------------------------------------------------------------------------
# The table; created arrays follow the placement of the arguments, so unused weights stay arguments

allocate = jit_step(_make_empty, keep_unused=True)
put = jit_step(_put, keep_unused=True)  # faster than jax.device_put
begin = jit_step(speculate.begin_prefill, keep_unused=True)
extend = jit_step(speculate.run_chunks, donate_argnums=3)
cut_block = jit_step(_cut_block)
append_block = jit_step(_append_block, donate_argnums=3)
choose_first = jit_step(_choose_first, donate_argnums=3)
insert = jit_step(_insert, donate_argnums=(2, 3))
run = jit_step(_run, donate_argnums=3)
draft = jit_step(_draft, donate_argnums=3)
verify = jit_step(_verify, donate_argnums=3)
resize = jit_step(_move)
score = jit_step(_score_chunk, donate_argnums=3)
