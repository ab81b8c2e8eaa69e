"""Statistics of decoding: acceptance length, and how much text loops."""

from collections.abc import Sequence

import numpy as np


def mean_acceptance_length(accepted: Sequence[Sequence[int]]) -> float:
    """Tokens per round of each prompt, averaged over prompts (how the papers report it)."""
    per_prompt = [float(np.mean(prompt)) + 1 for prompt in accepted if len(prompt)]
    return float(np.mean(per_prompt)) if per_prompt else 1.0


def distinct_ngram_share(tokens: Sequence[int], n: int = 4) -> float:
    """Share of distinct n-grams; near 0 for looping text, which is easy to draft.

    1 for a text too short for two.
    """
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0
