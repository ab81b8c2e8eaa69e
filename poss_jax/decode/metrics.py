"""Statistics of decoding: acceptance by round and position, and how much text loops."""

from collections.abc import Sequence

import numpy as np


def pooled_acceptance_length(accepted: Sequence[Sequence[int]]) -> float:
    """Tokens per round over all rounds of all prompts, bonus token included.

    Args:
      accepted: per prompt, the accepted drafted tokens of every round.
    """
    rounds = [count for prompt in accepted for count in prompt]
    return float(np.mean(rounds)) + 1 if rounds else 1.0


def mean_acceptance_length(accepted: Sequence[Sequence[int]]) -> float:
    """Tokens per round of each prompt, averaged over prompts (how the papers report it)."""
    per_prompt = [float(np.mean(prompt)) + 1 for prompt in accepted if len(prompt)]
    return float(np.mean(per_prompt)) if per_prompt else 1.0


def positionwise_acceptance(
    accepted: Sequence[Sequence[int]], offered: Sequence[Sequence[int]]
) -> list[float]:
    """Share of rounds that accepted position i, among those that could have.

    A round could if it accepted all positions before i and its tree offered a token at i after
    them:

        accepted 2, offered 3     position 1 yes, 2 yes, 3 no
        accepted 2, offered 2     position 1 yes, 2 yes (the path ends in a leaf: 3 does not count)

    Args:
      accepted: per prompt, the accepted drafted tokens of every round.
      offered: likewise, the deepest position offered along the accepted path.

    Returns:
      The share at positions 1, 2, ... as far as any round was offered one.
    """
    reached = np.array([count for prompt in accepted for count in prompt])
    limit = np.array([count for prompt in offered for count in prompt])
    positions = range(1, int(limit.max(initial=0)) + 1)
    return [float((reached[limit >= i] >= i).mean()) for i in positions]


def distinct_ngram_share(tokens: Sequence[int], n: int = 4) -> float:
    """Share of n-grams that are not a repeat; looping text, easy to draft, comes near 0.

    1 for a text too short to hold two.
    """
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0
