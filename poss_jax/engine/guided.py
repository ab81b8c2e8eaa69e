"""Rounds of a batch in which grammars guide some texts; the others may choose any token.

    draft (device) ─► walk the trees (host) ─► verify (device)
                      masks of all nodes       accept, commit

The draft knows what a grammar allows after the root. Deeper nodes that it forbids are cut off, and
tokens that are certain take their places: such as the name of the next field. On several hosts
process 0 walks, and the others get its plan (`leader.py`).
"""

import math
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from poss_jax.decode import speculate
from poss_jax.decode.rejection import DrawnTree
from poss_jax.decode.state import DecodeConfig, DecodeState, Request, Weights
from poss_jax.decode.tree import Tree, make_tree
from poss_jax.engine.grammar import Guide
from poss_jax.engine.rounds import Rounds, end_others, jit_step, mark, pack_new
from poss_jax.shapes import Array, Bool, Float, UInt

_WALK_SECONDS = 0.05  # per tree; a harmless grammar takes 2 ms for 60 nodes
_WALKERS = ThreadPoolExecutor(thread_name_prefix="poss-grammar")

Drafted = tuple[Tree, Float[Array, "B positions V"] | None]
"""A drafted tree, and the noise of the round."""


class Plan(NamedTuple):
    """What the host decides about the trees of a round.

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
    config: DecodeConfig,
    request: Request,
    state: DecodeState,
    is_text: Bool[Array, " B"],
    allowed: UInt[Array, "B words"],
) -> tuple[DecodeState, Drafted]:
    state = end_others(config, state, is_text)
    noise = speculate.round_noise(config, request, state)
    tree = speculate.draft_tree(weights, config, request, state, noise, allowed)
    return state, (tree, noise)


def _verify(
    weights: Weights,
    config: DecodeConfig,
    request: Request,
    state: DecodeState,
    drafted: Drafted,
    plan: Plan,
) -> tuple[DecodeState, Rounds]:
    tree, noise = drafted
    tokens, parents, masks = map(jnp.asarray, plan)
    if not isinstance(tree, DrawnTree):  # the test of drawn children depends on their places
        tree = make_tree(tokens, parents, depth=config.max_accepted)
    before = state.output
    state = speculate.finish_round(weights, config, request, state, tree, noise, masks)
    return state, pack_new(config, before, state.output)


draft = jit_step(_draft, donate_argnums=3)
verify = jit_step(_verify, donate_argnums=3)


def run_guided(
    weights: Weights,
    config: DecodeConfig,
    request: Request,
    state: DecodeState,
    *,
    texts: Sequence[int],
    guides: Mapping[int, Guide],
) -> tuple[DecodeState, Rounds]:
    """Runs a round; returns before it is verified.

    Args:
      weights: parameters of target and draft.
      config: static settings of decoding.
      request: the batch.
      state: donated; the host has read all tokens in it.
      texts: indices of the texts the host wants to continue; others end.
      guides: grammars of some texts, after all of these tokens.
    """
    batch_size = len(request.limits)
    first = first_masks(guides, batch_size, config.target.vocab_size)
    batch = weights, config, request
    state, drafted = draft(*batch, state, mark(texts, batch_size), first)
    # Processes that all walk must find the same, and may differ in speed.
    plan = walk_trees(config, drafted[0], guides, has_time=jax.process_count() > 1)
    return verify(*batch, state, drafted, plan)


def walk_trees(
    config: DecodeConfig, tree: Tree, guides: Mapping[int, Guide], *, has_time: bool = False
) -> Plan:
    """Walks the trees of some texts, in parallel, once the device has drafted them.

    Args:
      config: static settings of decoding.
      tree: the trees.
      guides: grammars of some texts, at the roots; they stay as they are.
      has_time: whether walks may take any time; else they end early.
    """
    # A drawn child that the target accepts is kept, so all nodes of such trees need their masks.
    has_time |= isinstance(tree, DrawnTree)
    tokens, parents = _read(tree.tokens), _read(tree.parents)
    plan = Plan(tokens, parents, no_masks(config.target.vocab_size, *tokens.shape))

    def walk(index: int) -> None:
        row = Walk(guides[index], *(part[index] for part in plan))
        row.mend(depth=config.max_accepted, seconds=math.inf if has_time else _WALK_SECONDS)

    list(_WALKERS.map(walk, guides))
    return plan


def _read(numbers: Array) -> np.ndarray:
    """Numbers on the host, to be changed; of a shape, which only compiles, any."""
    is_shape = isinstance(numbers, jax.ShapeDtypeStruct)
    return np.zeros(numbers.shape, numbers.dtype) if is_shape else np.array(numbers)


def first_masks(guides: Mapping[int, Guide], batch_size: int, vocab_size: int) -> np.ndarray:
    """Masks of the next token of every sequence, [B words] uint32."""
    masks = no_masks(vocab_size, batch_size)
    for index, guide in guides.items():
        guide.fill(masks[index])
    return masks


def no_masks(vocab_size: int, *shape: int) -> np.ndarray:
    """Masks that allow all tokens (see `sampling.unpack`), [*shape words] uint32."""
    return np.full((*shape, -(-vocab_size // 32)), 2**32 - 1, np.uint32)


class Walk:
    """A grammar's walk over one tree."""

    def __init__(
        self, guide: Guide, tokens: np.ndarray, parents: np.ndarray, masks: np.ndarray
    ) -> None:
        """Begins at the root.

        Args:
          guide: the grammar there; stays as it is.
          tokens: token of each node [M]; changed by `mend`.
          parents: node that each one continues [M], as in `Tree`; changed.
          masks: which tokens may follow each node [M words], ones at first; filled.
        """
        self._guide, self._here = guide, guide.copy()
        self._tokens, self._parents, self._masks = tokens, parents, masks
        self._leaves: dict[int, list[int]] = {}  # reached, without reached children: their paths
        self._free = set(range(1, len(tokens)))
        self._until = math.inf

    def mend(self, *, depth: int, seconds: float = math.inf) -> None:
        """Fills the masks, and replaces forbidden nodes by certain ones.

        A forbidden node becomes its own parent, so that no path reaches it; so do those for which
        there is no time. A token is certain if it is the only one allowed.

        Args:
          depth: longest path the tree may have.
          seconds: time there is.
        """
        self._until = time.monotonic() + seconds
        children: list[list[int]] = [[] for _ in self._tokens]
        for node, parent in enumerate(self._parents[1:].tolist(), start=1):
            children[parent].append(node)
        self._visit(0, [], children)
        free = sorted(self._free)
        self._parents[free] = free
        for leaf, path in self._leaves.items():
            self._append_certain(leaf, path, free, depth)

    def _visit(self, node: int, path: list[int], children: list[list[int]]) -> None:
        """Fills the masks of a node and of all that may follow it."""
        mask = self._masks[node]
        self._here.fill(mask)
        tokens = {child: int(self._tokens[child]) for child in children[node]}
        allowed = {child: token for child, token in tokens.items() if _has(mask, token)}
        if not allowed:
            self._leaves[node] = path
        for child, token in allowed.items():
            if time.monotonic() > self._until:
                return
            self._free.remove(child)
            if not self._guide.ends_with(token):
                self._here.enter([token])
                self._visit(child, [*path, token], children)
                self._return_to(path)

    def _append_certain(self, node: int, path: list[int], free: list[int], depth: int) -> None:
        """Appends certain tokens to a leaf, as long as there are places."""
        self._here = self._guide.copy()
        self._here.enter(path)
        for _ in range(len(path), depth):
            token = _only_token(self._masks[node])
            if not free or token is None or time.monotonic() > self._until:
                return
            child = free.pop(0)
            self._tokens[child], self._parents[child] = token, node
            if self._guide.ends_with(token):
                return
            self._here.enter([token])
            self._here.fill(self._masks[child])
            node = child

    def _return_to(self, path: list[int]) -> None:
        """Goes back one token; from an error, such as a limit, there is no way but a new walk."""
        if self._here.is_broken:
            self._here = self._guide.copy()
            self._here.enter(path)
        else:
            self._here.leave(1)


def _has(mask: np.ndarray, token: int) -> bool:
    return bool(mask[token // 32] >> (token % 32) & 1)


def _only_token(mask: np.ndarray) -> int | None:
    """The only token that a mask allows; None if there are others."""
    words = np.flatnonzero(mask)
    word = int(mask[words[0]]) if len(words) == 1 else 0
    return 32 * int(words[0]) + word.bit_length() - 1 if word.bit_count() == 1 else None
