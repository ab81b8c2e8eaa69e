"""What the target makes of a tree: its choice at every node, and the path that agrees with it.

Drafts are a deterministic expansion, so "accept the token the target itself chose, if the tree
holds it" is the accept/reject scheme of EAGLE-2 with the same acceptance probability, and the
output is what the target alone would have written.
"""

import jax.numpy as jnp
from flax import struct

from poss_jax.shapes import Array, Float, Int
from poss_jax.tree import Tree, has_children


class Acceptance(struct.PyTreeNode):
    """The accepted path of a round.

    Attributes:
      path: nodes from the root along the accepted path; what follows them is padding.
      num_accepted: accepted drafted tokens, root and bonus token not counted.
      num_offered: deepest position on this path at which the tree had any token to offer.
      emitted: the accepted tokens and then the bonus token; padding as in `path`.
    """

    path: Array  # [B A] int32
    num_accepted: Array  # [B] int32
    num_offered: Array  # [B] int32
    emitted: Array  # [B A] int32


def choose(scores: Float[Array, "*rows V"]) -> Int[Array, "*rows"]:
    """The token of the highest score (logits, or scores with noise), the lowest id among equals."""
    return jnp.argmax(scores, axis=-1).astype(jnp.int32)


def accept(tree: Tree, chosen: Int[Array, "B M"], *, max_accepted: int) -> Acceptance:
    """Finds the longest path on which every token is what the target chose at its parent.

        root "a" ── "b" ── "d"      chosen after: root "b", "b" "d", "d" "e"
               └─── "c"             accepted "b" "d", bonus token "e"

    Siblings carry different tokens, so at most one child of a node agrees and the agreeing nodes
    are one path; its nodes are in ascending order because parents come before children.

    Args:
      tree: the nodes.
      chosen: the target's choice of next token at every node.
      max_accepted: longest path the tree can hold, root not counted (A = this + 1).
    """
    agrees = tree.tokens == jnp.take_along_axis(chosen, tree.parents, axis=1)
    agrees = agrees.at[:, 0].set(True)
    is_accepted = (agrees[:, None] | ~tree.ancestors).all(axis=2)
    num_accepted = is_accepted.sum(axis=1, dtype=jnp.int32) - 1
    path = jnp.argsort(~is_accepted, axis=1, stable=True)[:, : max_accepted + 1].astype(jnp.int32)
    last = jnp.take_along_axis(path, num_accepted[:, None], axis=1)
    offered_more = jnp.take_along_axis(has_children(tree), last, axis=1)[:, 0]
    return Acceptance(
        path=path,
        num_accepted=num_accepted,
        num_offered=num_accepted + offered_more.astype(jnp.int32),
        emitted=jnp.take_along_axis(chosen, path, axis=1),
    )
