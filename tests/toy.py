"""The search without a transformer: draft and target know the next token from the last one alone.

A round of it compiles in a second and tells whether expansion, selection and acceptance together
are lossless for any log-probabilities.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from watch import tree_faults

from poss_jax.config.models import TreeConfig
from poss_jax.decode import drafting, speculate, tree
from poss_jax.decode.drafting import Level
from poss_jax.decode.verify import Acceptance
from poss_jax.shapes import Array

VOCABULARY = 7

Round = Callable[[Array, Array, Array, Array], tuple[Acceptance, dict[str, Array]]]


def run_round(
    logits: Array, following: Array, root: Array, config: TreeConfig
) -> tuple[Acceptance, dict[str, Array]]:
    """Drafts, selects and accepts once; also gives the faults of the tree (see `watch`).

    Args:
      logits: draft's logits of the next token, [B V V], by last token.
      following: token that the target chooses after each token, [B V].
      root: last chosen token, [B].
      config: size of the tree.
    """
    beam, tokens, levels = tree.root_beam(len(root)), root[:, None], []
    for depth in range(config.depth):
        level = Level(depth, root, tokens[:, :0], beam.ancestors)
        rows = jnp.take_along_axis(logits, tokens[:, :, None], axis=1)
        ids, log_probs = drafting.top_children(rows, level, config.top_k)
        levels.append(drafting.expand(beam, ids, log_probs))
        if depth + 1 < config.depth:
            first_index = sum(level.tokens.shape[1] for level in levels[:-1])
            beam, picks = tree.next_beam(
                beam, levels[-1], first_index=first_index, top_k=config.top_k
            )
            tokens = jnp.take_along_axis(levels[-1].tokens, picks, axis=1)
    candidates = tree.join_levels(levels)
    selected = speculate.select(root, candidates, config)
    faults = tree_faults(selected, candidates, config.depth)
    chosen = jnp.take_along_axis(following, selected.tokens, axis=1)
    acceptance = speculate.accept(selected, chosen, max_accepted=config.max_accepted)
    return acceptance, faults


def program(config: TreeConfig) -> Round:
    """Compiles a round; log-probabilities come out `rounding` (its last argument) too high."""

    @jax.jit
    def run(logits: Array, following: Array, root: Array, rounding: Array):
        def rounded(*args, **kwargs):
            return jax.scipy.special.logsumexp(*args, **kwargs) - rounding

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(jax.nn, "logsumexp", rounded)
            return run_round(logits, following, root, config)

    return run


def check_round(
    run: Round, logits: np.ndarray, following: np.ndarray, *, rounding: float
) -> list[str]:
    """Runs a round and compares what it emits with what the target alone writes.

    Returns:
      Faults of the trees.
    """
    root = jnp.arange(len(logits), dtype=jnp.int32) % VOCABULARY
    acceptance, faults = run(*map(jnp.asarray, (logits, following, root, np.float32(rounding))))
    assert (acceptance.num_accepted < acceptance.path.shape[1]).all()
    for row, accepted in enumerate(acceptance.num_accepted.tolist()):
        text = [int(root[row])]
        for _ in range(accepted + 1):
            text.append(int(following[row, text[-1]]))
        assert acceptance.emitted[row, : accepted + 1].tolist() == text[1:]
    return [name for name, rows in faults.items() if rows.any()]


def draw_world(
    rng: np.random.Generator, batch: int, *, sharpness: float, disagreement: float
) -> tuple[np.ndarray, np.ndarray]:
    """Logits of a draft, and a target that mostly chooses its best token."""
    logits = rng.normal(size=(batch, VOCABULARY, VOCABULARY)) * sharpness
    other = rng.integers(0, VOCABULARY, (batch, VOCABULARY))
    following = np.where(rng.random(other.shape) < disagreement, other, logits.argmax(axis=2))
    return logits.astype(np.float32), following.astype(np.int32)
