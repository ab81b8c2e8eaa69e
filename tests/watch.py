"""Watches the trees of compiled rounds: conditions that hold for any draft."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from poss_jax.config.models import TreeConfig
from poss_jax.decode import speculate
from poss_jax.decode.tree import Candidates, Tree, select
from poss_jax.decode.verify import Acceptance, accept
from poss_jax.shapes import Array

_PRIME = np.uint32(1_000_003)


class Watch:
    """Counts trees by fault, of all that are drafted and accepted from."""

    def __init__(self) -> None:
        self.num_trees, self.faults = 0, Counter[str]()

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Makes rounds that are traced meanwhile report to this watch."""

        def watched_select(root: Array, candidates: Candidates, config: TreeConfig) -> Tree:
            tree = select(root, candidates, config)
            self._report(tree_faults(tree, candidates, max(config.depth, candidates.num_copied)))
            return tree

        def watched_accept(tree: Tree, chosen: Array, *, max_accepted: int) -> Acceptance:
            acceptance = accept(tree, chosen, max_accepted=max_accepted)
            self._report(acceptance_faults(acceptance, tree, chosen))
            return acceptance

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(speculate, "select", watched_select)
            patch.setattr(speculate, "accept", watched_accept)
            yield

    def check(self, *, at_least: int = 1) -> None:
        """Fails if there was a fault, or fewer trees than are to be watched."""
        jax.effects_barrier()
        assert not self.faults and self.num_trees >= at_least, (self.faults, self.num_trees)

    def _report(self, faults: dict[str, Array]) -> None:
        if jax.sharding.get_abstract_mesh().manual_axes:
            return  # jax cannot call back from a part of a mesh

        def record(**faults: Array) -> None:  # with NumPy alone: JAX would compile the sum
            self.num_trees += len(next(iter(faults.values())))
            counts = {name: int(np.asarray(rows).sum()) for name, rows in faults.items()}
            self.faults += Counter(counts)

        jax.debug.callback(record, **faults)


def tree_faults(tree: Tree, candidates: Candidates, depth: int) -> dict[str, Array]:
    """Faults of a tree and the list it was selected from, [B] bool each."""
    M = tree.tokens.shape[1]
    node = jnp.arange(M)[None]
    is_loose = (tree.parents == node) & (candidates.num_copied > 0)  # no path has it
    is_below = (node > 0) & ~is_loose
    is_above = jnp.take_along_axis(tree.depths, tree.parents, axis=1)
    same_parent = tree.parents[:, :, None] == tree.parents[:, None, :]
    same_token = tree.tokens[:, :, None] == tree.tokens[:, None, :]
    is_other = (node[0][:, None] != node[0][None]) & (node[0] > 0)[:, None] & (node[0] > 0)[None]
    drafted = _paths(candidates.tokens, candidates.parents, depth, root=-1)
    kept = _paths(tree.tokens[:, 1:], tree.parents[:, 1:] - 1, depth, root=-1)
    is_drafted = (kept[:, :, None] == drafted[:, None, :]).any(axis=2)
    return {
        "a parent does not come before its child": ((tree.parents >= node) & is_below).any(1),
        "a depth is not the parent's plus one": ((tree.depths != is_above + 1) & is_below).any(1),
        "a node is too deep": (tree.depths > depth).any(axis=1),
        "siblings carry one token": (same_parent & same_token & is_other[None]).any(axis=(1, 2)),
        "a path was not drafted": ~(is_drafted | is_loose[:, 1:]).all(axis=1),
    }


def acceptance_faults(acceptance: Acceptance, tree: Tree, chosen: Array) -> dict[str, Array]:
    """Faults of an accepted path, [B] bool each."""
    path, num_accepted = acceptance.path, acceptance.num_accepted
    parents = jnp.take_along_axis(tree.parents, path[:, 1:], axis=1)
    tokens = jnp.take_along_axis(tree.tokens, path[:, 1:], axis=1)
    wanted = jnp.take_along_axis(chosen, path[:, :-1], axis=1)
    is_accepted = jnp.arange(path.shape[1] - 1)[None] < num_accepted[:, None]
    breaks = is_accepted & ((parents != path[:, :-1]) | (tokens != wanted))
    return {
        "more is accepted than the tree is deep": num_accepted > tree.depths.max(axis=1),
        "the accepted nodes are not a path that the target chose": breaks.any(axis=1),
    }


def _paths(tokens: Array, parents: Array, depth: int, *, root: int) -> Array:
    """A hash of the tokens between the root and each node."""
    own = tokens.astype(jnp.uint32) + 1
    hashes = own
    for _ in range(depth):
        with_root = jnp.pad(hashes, ((0, 0), (0, 1)))
        above = jnp.take_along_axis(with_root, parents, axis=1)
        hashes = jnp.where(parents == root, own, above * _PRIME + own)
    return hashes
