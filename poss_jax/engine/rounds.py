"""Rounds: how the new tokens of a step reach the host, and how many rounds a step has."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from poss_jax.decode.state import Output, StaticShape
from poss_jax.decode.verify import Logprobs
from poss_jax.engine.answers import Round, TokenLogprobs
from poss_jax.shapes import Array

MOST_ROUNDS = 32
"""Most rounds of one step."""

_STEP_SECONDS = 0.02  # time a step should take
_RECORDS = ("num_accepted", "num_offered", "num_copied", "num_certain")
"""Numbers of a round, in `Output` and in `Round`."""


class PackedRounds(struct.PyTreeNode):
    """The rounds of a step, on the device, packed: one transfer to the host is faster than many."""

    # Per sequence: number of new tokens (0 for an empty slot); number of rounds (0 for the first
    # token); whether the sequence ended; R of each of `_RECORDS`; the new tokens.
    numbers: Array  # [B 3+4R+R*A] int32
    logprobs: Logprobs | None  # of the new tokens; None if not requested
    num_rounds: int = struct.field(pytree_node=False)  # R, most rounds in this step


def pack_first(output: Output) -> PackedRounds:
    """Packs the first token of every sequence."""
    rounds = [getattr(output, name)[:, :1] for name in _RECORDS]
    counts = output.num_tokens, output.num_rounds, output.is_done
    logprobs = jax.tree.map(lambda rows: rows[:, :1], output.logprobs)
    return _pack(counts, rounds, output.tokens[:, :1], logprobs)


def pack_new(config: StaticShape, previous: Output, current: Output) -> PackedRounds:
    """Packs what the rounds added between two outputs."""

    def new(rows: Array, start: Array, count: int) -> Array:
        columns = start[:, None] + jnp.arange(count)[None]
        return jax.vmap(lambda row, at: jnp.take(row, at, axis=0, mode="clip"))(rows, columns)

    def of_tokens(rows: Array) -> Array:
        return new(rows, previous.num_tokens, MOST_ROUNDS * (config.max_accepted + 1))

    num_tokens = current.num_tokens - previous.num_tokens
    counts = num_tokens, current.num_rounds - previous.num_rounds, current.is_done
    columns = [getattr(current, name) for name in _RECORDS]
    records = [new(rows, previous.num_rounds, MOST_ROUNDS) for rows in columns]
    logprobs = jax.tree.map(of_tokens, current.logprobs) if config.num_logprobs else None
    return _pack(counts, records, of_tokens(current.tokens), logprobs)


def _pack(
    counts: Sequence[Array], rounds: Sequence[Array], tokens: Array, logprobs: Any
) -> PackedRounds:
    """Packs the numbers of a `PackedRounds` into one array."""
    columns = *(count[:, None] for count in counts), *rounds, tokens
    numbers = jnp.concatenate([column.astype(jnp.int32) for column in columns], axis=1)
    return PackedRounds(numbers, logprobs, num_rounds=rounds[0].shape[1])


# --------------------------------------------------------------------------------------------------
# On the host


def read_rounds(rounds: PackedRounds) -> list[list[Round]]:
    """Brings a step to the host; a list of rounds per sequence."""
    numbers, logprobs = jax.device_get((rounds.numbers, rounds.logprobs and vars(rounds.logprobs)))
    columns = np.split(numbers, np.cumsum([3, *[rounds.num_rounds] * len(_RECORDS)]), axis=1)
    rows: Any = zip(*(column.tolist() for column in columns), strict=True)
    sequences = list[list[Round]]()
    for index, ((num_tokens, num_rounds, is_done), *records, tokens) in enumerate(rows):
        sequence, first = list[Round](), 0
        # A round has one token more than it accepted, unless it is the sequence's last.
        for turn in range(num_rounds or num_tokens):
            is_last = turn + 1 >= num_rounds
            record = dict(zip(_RECORDS, (row[turn] for row in records), strict=True))
            end = num_tokens if is_last else first + record["num_accepted"] + 1
            new, first = slice(first, end), end
            sequence.append(
                Round(
                    tokens=tokens[new],
                    is_done=is_last and bool(is_done),
                    logprobs=_read_logprobs(logprobs, index, new) if logprobs else (),
                    **(record if num_rounds else {}),
                )
            )
        sequences.append(sequence)
    return sequences


def read_output(output: Output) -> list[list[Round]]:
    """Brings all rounds of ended sequences to the host; the first token is a round by itself."""
    counts = output.num_tokens - 1, output.num_rounds, output.is_done
    records = [getattr(output, name) for name in _RECORDS]
    later = read_rounds(_pack(counts, records, output.tokens[:, 1:], None))
    firsts = output.tokens[:, :1].tolist()
    return [
        [Round(first, is_done=not rounds), *rounds]
        for first, rounds in zip(firsts, later, strict=True)
    ]


def read_scores(score_next: Callable[[], Logprobs], num_tokens: int) -> list[TokenLogprobs]:
    """Brings the scores of a prompt, the first sequence, to the host, chunk by chunk."""
    scores = list[TokenLogprobs]()
    while (num_left := num_tokens - 1 - len(scores)) > 0:
        scores += _read_logprobs(jax.device_get(vars(score_next())), 0, slice(0, num_left))
    return scores


def _read_logprobs(host: dict[str, np.ndarray], index: int, new: slice) -> list[TokenLogprobs]:
    columns = (host[name][index, new].tolist() for name in ("chosen", "ids", "top"))
    return [TokenLogprobs(*values) for values in zip(*columns, strict=True)]


class Pace:
    """Chooses the number of rounds in a step, so that a step takes about `_STEP_SECONDS`."""

    def __init__(self) -> None:
        self.num_rounds = 1  # of the next step
        self._last = 0.0

    def record(self, num_rounds: int, begun: float) -> None:
        """Records rounds that have reached the host, and when they were started."""
        now = time.monotonic()
        if num_rounds:  # the device started them after the rounds before
            seconds = (now - max(begun, self._last)) / num_rounds
            ideal = min(max(int(_STEP_SECONDS / seconds), 1), MOST_ROUNDS)
            self.num_rounds = min(ideal, 2 * self.num_rounds)
        self._last = now
