"""Rounds: what runs on the devices without the host, and how new tokens reach it.

    decode_batch   all rounds in one step, for answers that nobody streams
    run_step       a few rounds: one step runs while the host reads the one before

The steps in which slots read prompts are in `steps.py`.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from poss_jax.decode import speculate
from poss_jax.decode.state import DecodeState, Logprobs, Output, Request, StaticShape, Weights
from poss_jax.engine.answers import Round, TokenLogprobs
from poss_jax.model.cache import KVCache
from poss_jax.model.sharding import highest_of_groups, partition_state
from poss_jax.model.target import Prefilled
from poss_jax.shapes import Array, Bool, Int

MOST_ROUNDS = 32
"""Most rounds of one step."""

_STEP_SECONDS = 0.02  # time a step should take

StateT = TypeVar("StateT")


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

        def run_group(weights: Weights, request: Any, *state: Any) -> Any:
            result = function(weights, config, request, *state)
            return _hold_cut(result, mesh) if is_state else result

        cut, replicated = PartitionSpec("data"), PartitionSpec()
        group = jax.shard_map(
            run_group,
            mesh=mesh,
            in_specs=(replicated, cut, *[cut if _has_rows(tree) else replicated for tree in state]),
            out_specs=cut,
            axis_names={"data"},
            check_vma=False,
        )
        return group(weights, request, *state)

    return run


def _has_rows(tree: Any) -> bool:
    return jax.tree.leaves(tree)[0].ndim > 0


def _hold_cut(state: StateT, mesh: Mesh) -> StateT:
    """Holds the sharding of a state fixed, so that all rounds are one program."""

    def hold(leaf: jax.Array) -> jax.Array:
        _, *inner = partition_state(leaf.shape, mesh)
        return lax.with_sharding_constraint(leaf, PartitionSpec(None, *inner))

    return jax.tree.map(hold, state)


def jit_step(function: Callable[..., Any], **settings: Any) -> Callable[..., Any]:
    """Jits a step of slots, which given shapes of weights (see `steps`) compiles instead."""
    jitted = jax.jit(on_mesh(function), static_argnums=1, **settings)

    @wraps(function)
    def run_or_compile(weights: Weights, *args: Any) -> Any:
        if not isinstance(weights.target["norm"]["scale"], jax.ShapeDtypeStruct):
            return jitted(weights, *args)
        return jitted.lower(weights, *args).compile().out_info  # JAX keeps what is compiled

    return run_or_compile


# --------------------------------------------------------------------------------------------------
# Rounds


class PackedRounds(struct.PyTreeNode):
    """The rounds of a step, on the device, packed: one transfer to the host is faster than six.

    Attributes:
      numbers: per sequence, in this order: number of new tokens (0 for an empty slot); number of
        rounds (0 for the first token); whether the sequence ended; R counts of accepted drafted
        tokens; R deepest positions offered along the accepted path; R counts of copied ones among
        the accepted; the new tokens.
      logprobs: log-probabilities of the new tokens; None if not requested.
      num_rounds: R, most rounds in this step.
    """

    numbers: Array  # [B 3+3R+R*A] int32
    logprobs: Logprobs | None
    num_rounds: int = struct.field(pytree_node=False)


def pack_first(output: Output) -> PackedRounds:
    """Packs the first token of every sequence."""
    rounds = [rows[:, :1] for rows in (output.num_accepted, output.num_offered, output.num_copied)]
    counts = output.num_tokens, output.num_rounds, output.is_done
    logprobs = jax.tree.map(lambda rows: rows[:, :1], output.logprobs)
    return _pack(counts, rounds, output.tokens[:, :1], logprobs)


def _run_step(
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


def pack_new(config: StaticShape, previous: Output, current: Output) -> PackedRounds:
    """Packs what the rounds added between two outputs."""

    def new(rows: Array, start: Array, count: int) -> Array:
        columns = start[:, None] + jnp.arange(count)[None]
        return jax.vmap(lambda row, at: jnp.take(row, at, axis=0, mode="clip"))(rows, columns)

    def of_tokens(rows: Array) -> Array:
        return new(rows, previous.num_tokens, MOST_ROUNDS * (config.max_accepted + 1))

    def of_rounds(rows: Array) -> Array:
        return new(rows, previous.num_rounds, MOST_ROUNDS)

    num_tokens = current.num_tokens - previous.num_tokens
    counts = num_tokens, current.num_rounds - previous.num_rounds, current.is_done
    records = current.num_accepted, current.num_offered, current.num_copied
    logprobs = jax.tree.map(of_tokens, current.logprobs) if config.num_logprobs else None
    return _pack(counts, [*map(of_rounds, records)], of_tokens(current.tokens), logprobs)


def _pack(
    counts: Sequence[Array], rounds: Sequence[Array], tokens: Array, logprobs: Any
) -> PackedRounds:
    """Packs the numbers of a `PackedRounds` into one array."""
    columns = *(count[:, None] for count in counts), *rounds, tokens
    numbers = jnp.concatenate([column.astype(jnp.int32) for column in columns], axis=1)
    return PackedRounds(numbers, logprobs, num_rounds=rounds[0].shape[1])


def _first_state(
    weights: Weights, config: StaticShape, request: Request, caches: Any, last: Any, *allowed: Any
) -> DecodeState:
    return speculate.first_state(weights, config, request, Prefilled(*last, *caches), *allowed)


# Several programs, not one: the caches of a running batch are the same arrays in all of them, and
# what changes from call to call (prompts, limits) is data.
prefill = jax.jit(on_mesh(speculate.prefill), static_argnums=1)
_choose_first = jax.jit(on_mesh(_first_state), static_argnums=1, donate_argnums=3)
run_round = jax.jit(on_mesh(speculate.run_round), static_argnums=1, donate_argnums=3)
run_rounds = jax.jit(on_mesh(speculate.run_rounds), static_argnums=1, donate_argnums=3)
_step = jit_step(_run_step, donate_argnums=3)


def start(weights: Weights, config: StaticShape, request: Request, *allowed: Any) -> DecodeState:
    """`speculate.start` in two programs: however tokens are chosen, one does the prefill."""
    read = config._replace(drafting="coupled", num_logprobs=0)
    unchosen = request.replace(sampling=None, output_starts=None, drafts=None, lookup=None)
    out = prefill(weights, read, unchosen)
    return _choose_first(weights, config, request, out[2:], out[:2], *allowed)


def run_step(
    weights: Weights,
    config: StaticShape,
    request: Request,
    state: DecodeState,
    *,
    active: Sequence[int] = (),
    num_rounds: int = 1,
) -> tuple[DecodeState, PackedRounds]:
    """Runs some rounds, fewer if a sequence ends; returns before they are done.

    Args:
      state: donated.
      active: indices of the sequences that continue; others end.
      num_rounds: how many, at most `MOST_ROUNDS`.
    """
    is_active = mark(active, len(request.max_new_tokens))
    rounds = np.full(len(is_active), num_rounds, np.int32)
    return _step(weights, config, request, state, is_active, rounds)


def mark(active: Sequence[int], batch_size: int) -> np.ndarray:
    """Marks some of the sequences, [B] bool."""
    return np.isin(np.arange(batch_size), active)


# --------------------------------------------------------------------------------------------------
# On the host


def read_rounds(rounds: PackedRounds) -> list[list[Round]]:
    """Brings a step to the host; a list of rounds per sequence."""
    numbers, logprobs = jax.device_get((rounds.numbers, rounds.logprobs and vars(rounds.logprobs)))
    columns = np.split(numbers, np.cumsum([3, *[rounds.num_rounds] * 3]), axis=1)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return [list(_read_sequence(*row, logprobs, index)) for index, row in enumerate(rows)]


def _read_sequence(
    counts: list[int],
    accepted: list[int],
    offered: list[int],
    copied: list[int],
    tokens: list[int],
    logprobs: dict[str, np.ndarray] | None,
    index: int,
) -> Iterator[Round]:
    """The rounds of a sequence; each has one token more than it accepted, unless it is the last."""
    num_tokens, num_rounds, is_done = counts
    first = 0
    for turn in range(num_rounds if num_rounds else num_tokens):
        is_last = turn + 1 >= num_rounds
        end = num_tokens if is_last else first + accepted[turn] + 1
        new, first = slice(first, end), end
        yield Round(
            tokens=tokens[new],
            num_accepted=accepted[turn] if num_rounds else None,
            num_offered=offered[turn] if num_rounds else None,
            num_copied=copied[turn] if num_rounds else 0,
            is_done=is_last and bool(is_done),
            logprobs=_read_logprobs(logprobs, index, new) if logprobs else (),
        )


def read_scores(logprobs: Logprobs, index: int, count: int) -> list[TokenLogprobs]:
    """Brings the first log-probabilities of a sequence to the host."""
    return _read_logprobs(jax.device_get(vars(logprobs)), index, slice(0, count))


def _read_logprobs(host: dict[str, np.ndarray], index: int, new: slice) -> list[TokenLogprobs]:
    columns = (host[name][index, new].tolist() for name in ("chosen", "ids", "top"))
    return [TokenLogprobs(*values) for values in zip(*columns, strict=True)]


def count_rounds(active: Sequence[Sequence[Round]]) -> int:
    """Rounds of a step, given what `read_rounds` returns."""
    return max(sum(new.num_accepted is not None for new in rounds) for rounds in active)


class Pace:
    """Chooses the number of rounds in a step, so that a step takes about `_STEP_SECONDS`.

    Attributes:
      num_rounds: number for the next step.
    """

    def __init__(self) -> None:
        self.num_rounds = 1
        self._last = 0.0

    def record(self, num_rounds: int, begun: float) -> None:
        """Records rounds that have reached the host, and when they were started."""
        now = time.monotonic()
        if num_rounds:  # the device started them after the rounds before
            seconds = (now - max(begun, self._last)) / num_rounds
            ideal = min(max(int(_STEP_SECONDS / seconds), 1), MOST_ROUNDS)
            self.num_rounds = min(ideal, 2 * self.num_rounds)
        self._last = now


def decode_batch(weights: Weights, config: StaticShape, request: Request) -> DecodeState:
    """Decodes until every sequence is done, without the host in between."""
    return run_rounds(weights, config, request, start(weights, config, request))


def compile_batch(weights: Weights, config: StaticShape, request: Request) -> None:
    """Compiles the programs that answer a batch, whole or as streams, by answers of one token."""
    ended = request.replace(max_new_tokens=jnp.ones_like(request.max_new_tokens))
    # Nested, so that no name keeps the donated caches alive.
    jax.block_until_ready(run_step(weights, config, ended, decode_batch(weights, config, ended)))
