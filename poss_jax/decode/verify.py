"""Acceptance: the path that agrees with the target's choices (`speculate.choose_tokens`).

Drafts are a deterministic expansion, so accepting the token the target itself chose, if the tree
has it, is EAGLE-2's accept/reject scheme with the same acceptance probability, and the output is
what the target alone would have written. For sampled drafts `rejection` makes the choices.
"""

import jax
import jax.numpy as jnp
from flax import struct

from poss_jax.decode.tree import Tree, is_child
from poss_jax.model.cache import write_rows
from poss_jax.model.ranking import top_k
from poss_jax.shapes import Array, Float, Int


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


class Logprobs(struct.PyTreeNode):
    """The target's log-probabilities: log-softmax of its raw logits.

    Attributes:
      chosen: log-probability of the token that was chosen.
      ids: the most likely tokens, best first.
      top: log-probabilities of `ids`.
    """

    chosen: Array  # [B S] float32
    ids: Array  # [B S K] int32
    top: Array  # [B S K] float32


def token_logprobs(
    logits: Float[Array, "B A V"], tokens: Int[Array, "B A"], *, count: int
) -> Logprobs:
    """Log-probabilities of chosen tokens and of the `count` most likely ones."""
    logits = logits.astype(jnp.float32)
    total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    best, ids = top_k(logits, min(count, logits.shape[-1]))
    chosen = jnp.take_along_axis(logits, tokens[..., None], axis=-1)
    return Logprobs(chosen=(chosen - total)[..., 0], ids=ids, top=best - total)


def first_logprobs(
    logits: Float[Array, "B V"], root: Int[Array, " B"], *, count: int, rows: int
) -> Logprobs | None:
    """Allocates `rows` per sequence and writes the first token's; None if `count` is 0."""
    if not count:
        return None
    first = token_logprobs(logits[:, None], root[:, None], count=count)

    def with_room(leaf: Array) -> Array:
        return jnp.zeros((len(leaf), rows, *leaf.shape[2:]), leaf.dtype).at[:, :1].set(leaf)

    return jax.tree.map(with_room, first)


def path_logprobs(
    logits: Float[Array, "B M V"], acceptance: Acceptance, *, count: int
) -> Logprobs | None:
    """Log-probabilities of the tokens that a round emitted; None if `count` is 0."""
    if not count:
        return None
    on_path = jnp.take_along_axis(logits, acceptance.path[:, :, None], axis=1)
    return token_logprobs(on_path, acceptance.emitted, count=count)


def append_logprobs(
    stored: Logprobs | None, new: Logprobs | None, start: Int[Array, " B"]
) -> Logprobs | None:
    """Appends a round's log-probabilities, if it has any."""
    if stored is None or new is None:
        return stored
    return jax.tree.map(lambda old, rows: write_rows(old, rows, start, axis=1), stored, new)
