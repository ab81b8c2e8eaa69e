"""Acceptance: the path that agrees with the target's choices (`speculate.choose_tokens`).

Drafts are a deterministic expansion, so accepting the token the target itself chose, if the tree
has it, is EAGLE-2's accept/reject scheme with the same acceptance probability, and the output is
what the target alone would have written. For sampled drafts `rejection` makes the choices.
"""

import jax.numpy as jnp
from flax import struct

from poss_jax.decode.tree import Tree, is_child
from poss_jax.shapes import Array, Int


class Acceptance(struct.PyTreeNode):
    """The accepted path of a round.

    Attributes:
      path: nodes from the root along the accepted path; its last node fills the rest.
      num_accepted: accepted drafted tokens, root and bonus token not counted.
      num_offered: deepest position on this path at which the tree had any token to offer.
      num_copied: accepted tokens after the drafted ones that only `lookup` proposed.
      num_certain: accepted tokens, the last ones, that only a grammar proposed.
      emitted: the accepted tokens and then the bonus token, which fills the rest.
    """

    path: Array  # [B A] int32
    num_accepted: Array  # [B] int32
    num_offered: Array  # [B] int32
    num_copied: Array  # [B] int32
    num_certain: Array  # [B] int32
    emitted: Array  # [B A] int32


def accept(tree: Tree, chosen: Int[Array, "B M"], *, max_accepted: int) -> Acceptance:
    """Finds the longest path on which every token is what the target chose at its parent.

        root "a" ── "b" ── "d"      chosen after: root "b", "b" "d", "d" "e"
               └─── "c"             accepted "b" "d", bonus token "e"

    The walk takes at most one child per node and `max_accepted` steps, for any tree.

    Args:
      tree: the nodes.
      chosen: the target's choice of next token at every node.
      max_accepted: longest path the tree can hold, root not counted (A = this + 1).
    """
    node = jnp.zeros(len(tree.tokens), jnp.int32)
    path, num_accepted = [node], node
    for _ in range(max_accepted):
        choice = jnp.take_along_axis(chosen, node[:, None], axis=1)
        agrees = is_child(tree, node) & (tree.tokens == choice)
        has_next = agrees.any(axis=1)  # once False, always False: the walk stays in place
        node = jnp.where(has_next, agrees.argmax(axis=1).astype(jnp.int32), node)
        num_accepted += has_next.astype(jnp.int32)
        path.append(node)
    offers_more = is_child(tree, node).any(axis=1).astype(jnp.int32)
    nodes = jnp.stack(path, axis=1)
    is_accepted = jnp.arange(nodes.shape[1])[None] <= num_accepted[:, None]

    def count(marked: Array) -> Array:
        on_path = jnp.take_along_axis(marked, nodes, axis=1)
        return (on_path & is_accepted).sum(axis=1, dtype=jnp.int32)

    return Acceptance(
        path=nodes,
        num_accepted=num_accepted,
        num_offered=num_accepted + offers_more,
        num_copied=count(tree.is_copied & ~tree.is_certain),
        num_certain=count(tree.is_certain),
        emitted=jnp.take_along_axis(chosen, nodes, axis=1),
    )
