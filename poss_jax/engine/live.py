"""Answers that grow step by step: one step runs while the host reads the one before.

A step is a few rounds; with grammars, one round with the host in between:

    draft (device) ─► walk the trees (host) ─► verify (device)
                      masks of all nodes       accept, commit

The draft knows what a grammar allows after the root; `guides.Walk` mends the deeper nodes. On
several hosts process 0 walks for slots, and the others get its plan (`leader.py`).
"""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from poss_jax.decode import speculate
from poss_jax.decode.rejection import DrawnTree
from poss_jax.decode.state import DecodeState, Request, StaticShape, Weights
from poss_jax.decode.tree import Tree, make_tree
from poss_jax.engine.answers import Chunk, Generation, LiveAnswer, Round
from poss_jax.engine.guides import GrammarState
from poss_jax.engine.rounds import (
    Pace,
    PackedRounds,
    count_rounds,
    end_others,
    jit_step,
    mark,
    pack_new,
    read_rounds,
    run_step,
    start,
)
from poss_jax.shapes import Array, Bool, Float, UInt

_WALK_SECONDS = 0.05  # per tree; a harmless grammar takes 2 ms for 60 nodes
_WALKERS = ThreadPoolExecutor(thread_name_prefix="poss-grammar")

Drafted = tuple[Tree, Float[Array, "B positions V"] | None]
"""A drafted tree, and the noise of the round."""


class Plan(NamedTuple):
    """The host's decisions about the trees of a round.

    Attributes:
      tokens: token of every node.
      parents: node that each one continues, as in `Tree`.
      masks: which tokens may follow each node (see `sampling.unpack`).
    """

    tokens: np.ndarray  # [B M] int32
    parents: np.ndarray  # [B M] int32
    masks: np.ndarray  # [B M words] uint32


def _draft(
    weights: Weights,
    config: StaticShape,
    request: Request,
    state: DecodeState,
    is_active: Bool[Array, " B"],
    allowed: UInt[Array, "B words"],
) -> tuple[DecodeState, Drafted]:
    state = end_others(config, state, is_active)
    noise = speculate.round_noise(config, request, state)
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
        is_copied = tree.is_copied & is_same if config.num_copied else None
        tree = make_tree(tokens, parents, depth=config.max_accepted, is_copied=is_copied)
    previous = state.output
    state = speculate.finish_round(weights, config, request, state, tree, noise, masks)
    return state, pack_new(config, previous, state.output)


draft = jit_step(_draft, donate_argnums=3)
verify = jit_step(_verify, donate_argnums=3)


def run_guided(
    weights: Weights,
    config: StaticShape,
    request: Request,
    state: DecodeState,
    *,
    active: Sequence[int],
    guides: Mapping[int, GrammarState],
) -> tuple[DecodeState, PackedRounds]:
    """Runs a round; returns before it is verified.

    Args:
      state: donated; the host has read all tokens in it.
      active: indices of the sequences that continue; others end.
      guides: grammars of some sequences, after all of these tokens.
    """
    batch_size = len(request.max_new_tokens)
    first = first_masks(guides, batch_size, config.target.vocab_size)
    batch = weights, config, request
    state, drafted = draft(*batch, state, mark(active, batch_size), first)
    # Processes that all walk must find the same, and may differ in speed.
    plan = walk_trees(config, drafted[0], guides, has_time=jax.process_count() > 1)
    return verify(*batch, state, drafted, plan)


def walk_trees(
    config: StaticShape, tree: Tree, guides: Mapping[int, GrammarState], *, has_time: bool = False
) -> Plan:
    """Walks the trees of some sequences, in parallel, once the device has drafted them.

    Args:
      guides: grammars of some sequences, at the roots; they stay as they are.
      has_time: whether walks may take any time; else they end early.
    """
    # A drawn child that the target accepts is kept, so all nodes of such trees need their masks.
    has_time |= isinstance(tree, DrawnTree)
    tokens, parents = _read(tree.tokens), _read(tree.parents)
    plan = Plan(tokens, parents, no_masks(config.target.vocab_size, *tokens.shape))

    def walk(index: int) -> None:
        seconds = math.inf if has_time else _WALK_SECONDS
        row = (array[index] for array in plan)
        guides[index].mend(*row, depth=config.max_accepted, seconds=seconds)

    list(_WALKERS.map(walk, guides))
    return plan


def _read(numbers: Array) -> np.ndarray:
    """Numbers on the host, to be changed; of a shape, which only compiles, any."""
    is_shape = isinstance(numbers, jax.ShapeDtypeStruct)
    return np.zeros(numbers.shape, numbers.dtype) if is_shape else np.array(numbers)


def first_masks(guides: Mapping[int, GrammarState], batch_size: int, vocab_size: int) -> np.ndarray:
    """Masks of the next token of every sequence, [B words] uint32."""
    masks = no_masks(vocab_size, batch_size)
    for index, guide in guides.items():
        guide.fill(masks[index])
    return masks


def no_masks(vocab_size: int, *shape: int) -> np.ndarray:
    """Masks that allow all tokens (see `sampling.unpack`), [*shape words] uint32."""
    return np.full((*shape, -(-vocab_size // 32)), 2**32 - 1, np.uint32)


def run_live(
    weights: Weights, config: StaticShape, request: Request, answers: Sequence[LiveAnswer]
) -> Iterator[tuple[int, Chunk]]:
    """Decodes a batch step by step, until all answers have ended.

    Args:
      request: the batch; sequences beyond `answers` are padding.
      answers: one per sequence; the rounds are added to them.

    Yields:
      The index of an answer, and what a round added to it.
    """
    guides = {
        index: answer.guide for index, answer in enumerate(answers) if answer.guide is not None
    }
    masks = first_masks(guides, len(request.max_new_tokens), config.target.vocab_size)
    state = start(weights, config, request, *([masks] if guides else []))
    roots, is_done = jax.device_get((state.root, state.output.is_done))
    for index, answer in enumerate(answers):
        first = Round([int(roots[index])], None, None, is_done=bool(is_done[index]))
        yield index, answer.add(first)
    pace, under_way = Pace(), None
    while not all(answer.is_ended for answer in answers):
        active = [index for index, answer in enumerate(answers) if not answer.is_ended]
        guides = {index: guide for index, guide in guides.items() if index in active}
        # On several hosts every process must run the same number of rounds.
        num_rounds = pace.num_rounds if jax.process_count() == 1 else 1
        if guides:  # their next step depends on all tokens of this one
            state, rounds = run_guided(
                weights, config, request, state, active=active, guides=guides
            )
            finished = rounds, time.monotonic()
        else:
            state, rounds = run_step(
                weights, config, request, state, active=active, num_rounds=num_rounds
            )
            finished, under_way = under_way, (rounds, time.monotonic())
        if finished is None:
            continue
        new = read_rounds(finished[0])
        pace.record(count_rounds(new), begun=finished[1])
        for index, (answer, rounds) in enumerate(zip(answers, new, strict=False)):
            yield from ((index, answer.add(added)) for added in rounds if not answer.is_ended)


def answer_live(
    weights: Weights, config: StaticShape, request: Request, answers: Sequence[LiveAnswer]
) -> list[Generation]:
    """Decodes a batch as `run_live` does, and returns its answers."""
    rounds = run_live(weights, config, request, answers)
    ended = {index: chunk.answer for index, chunk in rounds if chunk.answer}
    return [ended[index] for index in range(len(answers))]
