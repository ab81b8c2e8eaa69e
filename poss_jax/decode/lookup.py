"""Lookup: nodes copied from the sequence itself, as a chain below the root of the draft tree.

    the cat sat on the mat . Then the cat sat on │ the mat . Then
    └ last earlier run ──┘            └ suffix ┘   └ copied

What is edited, quoted or filled in stands in the prompt already, and loops stand in the answer. The
longest run of ids that ends like the sequence is taken, the last one of equally long runs, and what
followed it is proposed (prompt lookup; in a draft's tree as in Graft, arXiv 2605.20104). A copy
counts as likely as runs of its length were continued, so it takes the nodes of less likely drafts
and no others. The target verifies copies like drafts: `speculate.draft_tree` merges them with what
was drafted, `tree.select` marks them in the tree, and `verify.accept` counts the accepted ones.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from poss_jax.decode.state import Output, Request
from poss_jax.decode.tree import Candidates
from poss_jax.model.cache import write_rows
from poss_jax.model.sharding import highest_of_groups
from poss_jax.shapes import Array, Bool, Float, Int, UInt

SHORTEST, LONGEST = 2, 8
"""Least length of a run, and the length from which runs count alike."""

_LONG = math.log(1 - 1 / (LONGEST - 0.5))  # only the longest runs' first copies score more


def copy_chain(
    request: Request, output: Output, size: int, allowed: UInt[Array, "B words"] | None = None
) -> Candidates:
    """Copies `size` tokens that follow the longest run; scores are -inf where there is none.

    `allowed` are those that a grammar allows next (see `sampling.unpack`); None: all.
    """
    ids = jnp.concatenate([request.tokens, jnp.zeros_like(output.tokens)], axis=1)
    ids = write_rows(ids, output.tokens, request.lengths, axis=1)
    tokens, run = look_up(ids, request.lengths + output.num_tokens, size)
    is_wanted = run >= SHORTEST
    if request.lookup is not None:
        is_wanted &= request.lookup
    if allowed is not None:
        first = tokens[:, 0]
        word = jnp.take_along_axis(allowed, first[:, None] // 32, axis=1)[:, 0]
        is_wanted &= (word >> (first % 32).astype(allowed.dtype) & 1) > 0
    scores = jnp.where(is_wanted[:, None], score(run, size), -jnp.inf)
    parents = jnp.broadcast_to(jnp.arange(size)[None] - 1, tokens.shape)
    return Candidates(tokens=tokens, scores=scores, parents=parents, num_copied=size)


def look_up(
    ids: Int[Array, "B S"], length: Int[Array, " B"], size: int
) -> tuple[Int[Array, "B N"], Int[Array, " B"]]:
    """Finds the longest earlier run that ends like each sequence, and what follows it.

    At the end of the sequence the copy continues with its own beginning, which continues a loop.

    Args:
      ids: the sequences; ids from `length` on are not part of them.
      length: tokens of each, at least 1.
      size: N, number of ids to copy.

    Returns:
      The copied ids, and the length of the run: 0 if there is none, at most `LONGEST`.
    """
    S = ids.shape[1]
    padded = jnp.pad(ids, ((0, 0), (LONGEST, 0)), constant_values=-1)
    index, last = jnp.arange(S, dtype=jnp.int32)[None], length[:, None] - 1
    matches = jnp.broadcast_to(index < last, ids.shape)  # its own end is no match
    run = jnp.zeros_like(ids)
    for back in range(LONGEST):
        first = LONGEST - back
        token = jnp.take_along_axis(padded, last + first, axis=1)
        matches &= padded[:, first : first + S] == token
        run += matches.astype(jnp.int32)
    end = jnp.argmax(run * S + index, axis=1)[:, None]
    period = jnp.maximum(last - end, 1)
    following = end + 1 + jnp.arange(size, dtype=jnp.int32)[None] % period
    tokens = jnp.take_along_axis(ids, jnp.minimum(following, last), axis=1)
    return tokens, jnp.take_along_axis(run, end, axis=1)[:, 0]


def score(run: Int[Array, " B"], size: int) -> Float[Array, "B N"]:
    """Log-probability that the first copy, the first two, ... are what the target writes.

    A run of n ids is continued alike with probability (n - 1) / n, and each copy that is right
    makes it longer: (n - 1) / (n - 1 + j) for j copies, as measured in docs/results/lookup.md.
    """
    evidence = run[:, None].astype(jnp.float32) - 1
    copies = jnp.arange(1, size + 1, dtype=jnp.float32)[None]
    return jnp.log(evidence / (evidence + copies))


def draft_unless_copied(
    draft: Callable[[], Candidates], chain: Candidates, is_done: Bool[Array, " B"]
) -> Candidates:
    """Drafts, or gives candidates of score -inf if all sequences copy one of the longest runs.

    Next to such copies hardly any draft would be kept, and fewer accepted. Sequences that are done
    do not count, unless all are.
    """
    is_copied = chain.scores[:, 0] > _LONG
    wants = jnp.where(is_done, 0, jnp.where(is_copied, 1, 2)).max()

    def nothing() -> Candidates:
        shapes = jax.eval_shape(draft)
        none = jax.tree.map(lambda leaf: jnp.full(leaf.shape, -1, leaf.dtype), shapes)
        return none.replace(scores=jnp.full_like(none.scores, -jnp.inf))

    return lax.cond(highest_of_groups(wants) != 1, draft, nothing)


def merge(drafted: Candidates, chain: Candidates, *, depth: int) -> Candidates:
    """Appends a chain (`copy_chain`) to what a draft of `depth` levels proposed.

    A copy that was drafted, too, is not kept twice: the drafted node gets the higher of both
    scores.
    """
    batch, num_drafted = drafted.tokens.shape
    node = jnp.full(batch, -1, jnp.int32)  # candidate that stands for the last copy
    drafted_scores, parents, scores = drafted.scores, [], []
    for index in range(chain.tokens.shape[1]):
        score = chain.scores[:, index]
        parents.append(node)
        added = jnp.full_like(node, num_drafted + index)
        if index < depth:
            is_same = drafted.tokens == chain.tokens[:, index, None]
            is_same &= drafted.parents == node[:, None]
            raised = jnp.maximum(drafted_scores, score[:, None])
            drafted_scores = jnp.where(is_same, raised, drafted_scores)
            is_drafted = is_same.any(axis=1)
            score = jnp.where(is_drafted, -jnp.inf, score)
            added = jnp.where(is_drafted, is_same.argmax(axis=1).astype(jnp.int32), added)
        scores.append(score)
        node = added

    return Candidates(
        tokens=jnp.concatenate([drafted.tokens, chain.tokens], axis=1),
        scores=jnp.concatenate([drafted_scores, jnp.stack(scores, axis=1)], axis=1),
        parents=jnp.concatenate([drafted.parents, jnp.stack(parents, axis=1)], axis=1),
        num_copied=chain.num_copied,
    )
