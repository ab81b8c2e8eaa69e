"""Log-probabilities that the target gives to the chosen tokens and to the most likely ones."""

import jax
import jax.numpy as jnp
from flax import struct

from poss_jax.decode.verify import Acceptance
from poss_jax.model.cache import write_rows
from poss_jax.model.ranking import top_k
from poss_jax.shapes import Array, Float, Int


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
