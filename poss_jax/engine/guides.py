"""Guides: a grammar's state after the tokens of an answer, and its walk over a drafted tree."""

import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from poss_jax.config.reading import UserError, one_line


class GrammarState:
    """A grammar after the tokens of an answer: knows which may follow."""

    def __init__(self, matcher: Any, stop_ids: frozenset[int], name: str) -> None:
        self._matcher, self._stop_ids, self._name = matcher, stop_ids, name

    def copy(self) -> "GrammarState":
        """The same state, for another answer."""
        return GrammarState(self._matcher.deep_copy(), self._stop_ids, self._name)

    @property
    def is_broken(self) -> bool:
        """True after an error, for ever."""
        return self._matcher.is_error()

    def check(self) -> None:
        """Raises UserError after an error of the grammar."""
        if self.is_broken:
            raise UserError(f"{self._name}: {explain(self._matcher.get_error())}")

    def advance(self, tokens: Sequence[int]) -> None:
        """Appends tokens to the answer.

        Raises:
          UserError: the grammar does not allow one, or is too complex to tell.
        """
        for token in tokens:
            is_end = token in self._stop_ids
            if not (self._matcher.is_accepting() if is_end else self._matcher.consume_token(token)):
                self.check()
                raise UserError(f"{self._name}: want tokens that match, got token {token}")

    def fill(self, mask: np.ndarray) -> None:
        """Writes which tokens may follow: a mask [words] uint32, as `sampling.unpack` reads it."""
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)

    def enter(self, tokens: Sequence[int]) -> None:
        """Appends tokens that the masks allow, for a look at what may follow them."""
        self._matcher.consume_tokens(list(tokens))

    def leave(self, num_tokens: int) -> None:
        """Removes the last tokens."""
        self._matcher.rollback(num_tokens)

    def ends_with(self, token: int) -> bool:
        """True if a token ends the answer."""
        return token in self._stop_ids


class Walk:
    """A grammar's walk over one tree."""

    def __init__(
        self, guide: GrammarState, tokens: np.ndarray, parents: np.ndarray, masks: np.ndarray
    ) -> None:
        """Begins at the root.

        Args:
          guide: the grammar there; stays as it is.
          tokens, parents: the tree [M], as in `Tree`; changed by `mend`.
          masks: which tokens may follow each node [M words], ones at first; filled.
        """
        self._guide, self._here, self._path = guide, guide.copy(), list[int]()
        self._tokens, self._parents, self._masks = tokens, parents, masks
        self._leaves: dict[int, list[int]] = {}  # reached, without reached children: their paths
        self._free = set(range(1, len(tokens)))
        self._until = math.inf

    def mend(self, *, depth: int, seconds: float = math.inf) -> None:
        """Fills the masks, and replaces forbidden nodes by certain ones, in paths of up to `depth`.

        A forbidden node becomes its own parent, so that no path reaches it; so do those for which
        `seconds` do not suffice. A token is certain if it is the only one allowed.
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
        """Fills the masks of a node, at the end of a path, and of all that may follow it."""
        mask = self._masks[node]
        self._go(path)
        self._here.fill(mask)
        tokens = {child: int(self._tokens[child]) for child in children[node]}
        allowed = {
            child: token for child, token in tokens.items() if mask[token // 32] >> (token % 32) & 1
        }
        if not allowed:
            self._leaves[node] = path
        for child, token in allowed.items():
            if time.monotonic() > self._until:
                return
            self._free.remove(child)
            if not self._guide.ends_with(token):
                self._visit(child, [*path, token], children)

    def _append_certain(self, node: int, path: list[int], free: list[int], depth: int) -> None:
        """Appends certain tokens to a leaf, as long as there are places."""
        for _ in range(len(path), depth):
            words = np.flatnonzero(self._masks[node])
            word = int(self._masks[node][words[0]]) if len(words) == 1 else 0
            if not free or word.bit_count() != 1 or time.monotonic() > self._until:
                return
            child, token = free.pop(0), 32 * int(words[0]) + word.bit_length() - 1
            self._tokens[child], self._parents[child] = token, node
            if self._guide.ends_with(token):
                return
            path = [*path, token]
            self._go(path)
            self._here.fill(self._masks[child])
            node = child

    def _go(self, path: list[int]) -> None:
        """Goes to the end of a path; from an error, such as a limit, only from the root again."""
        if self._here.is_broken:
            self._here, self._path = self._guide.copy(), []
        pairs = enumerate(zip(self._path, path, strict=False))
        differing = (index for index, (here, there) in pairs if here != there)
        shared = next(differing, min(len(self._path), len(path)))
        self._here.leave(len(self._path) - shared)
        self._here.enter(path[shared:])
        self._path = path


def explain(message: str) -> str:
    """A message of llguidance in one line."""
    message = message.replace("<non-verbose/>", "").strip()
    if message in ("NoExtension", "NoExtensionBias"):
        return "want a grammar that some text matches, this model's tokens can write none"
    return one_line(message)
