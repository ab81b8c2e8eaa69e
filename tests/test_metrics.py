"""Statistics of decoding, worked out by hand."""

import pytest

from infer.bench.summary import distinct_ngram_share
from poss_jax.engine.answers import mean_acceptance_length


def test_acceptance_lengths():
    accepted = [[4, 2, 3], [1]]
    assert mean_acceptance_length(accepted) == ((1 + 9 / 3) + (1 + 1)) / 2


def test_prompts_without_a_round_do_not_count():
    assert mean_acceptance_length([[], [2]]) == 3.0
    assert mean_acceptance_length([[]]) == mean_acceptance_length([]) == 1.0


@pytest.mark.parametrize(
    ("tokens", "n", "share"),
    [
        ([1, 2, 3, 4, 5, 6], 4, 1.0),
        ([1, 2, 1, 2, 1, 2, 1], 4, 2 / 4),  # 1212 2121 1212 2121
        ([5, 5, 5, 5], 1, 1 / 4),
        ([5, 5, 5], 4, 1.0),
        ([], 4, 1.0),
    ],
)
def test_distinct_ngram_share(tokens, n, share):
    assert distinct_ngram_share(tokens, n) == share


def test_ngrams_have_four_tokens_by_default():
    assert distinct_ngram_share([1, 2, 1, 2, 1, 2, 1]) == 2 / 4
