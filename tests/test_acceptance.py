"""Statistics of decoding by hand: what answers say about their drafts, a bench about texts."""

from dataclasses import replace

import pytest

from infer.bench.summary import distinct_ngram_share
from poss_jax.engine.answers import Generation, mean_acceptance_length
from poss_jax.serving.replies import count_accepted, describe_acceptance


def answer(*rounds: tuple[int, int]) -> Generation:
    accepted, offered = ([one[i] for one in rounds] for i in (0, 1))
    return Generation([1], [2], "", accepted, offered, "stop")


def test_an_example() -> None:
    found = describe_acceptance(answer((2, 3), (0, 3), (1, 1), (0, 0)), 4)
    assert found == {
        "mean_acceptance_length": 2.0,
        "draft_acceptance_rate": 3 / 7,
        "acceptance_histogram": [1, 1, 1, 0, 0],
        "acceptance_histogram_by_draft_length": {"1": [0, 1], "3": [1, 0, 1, 0]},
        "num_spec_steps": 3,  # the last round had no draft
        "num_accepted_draft_tokens": 3,
        "num_draft_tokens": 7,
        "num_spec_tokens": 4,
    }
    copied = replace(answer((2, 3), (0, 3)), copied_per_round=[1, 0])
    assert count_accepted([copied, answer((1, 1))]) == {
        "rounds": 3,
        "accepted_tokens": 3,
        "copied_tokens": 1,
        "acceptance_length": 2.0,
        "accepted_per_position": [2, 1],
    }


def test_mean_over_prompts_that_have_a_round():
    assert mean_acceptance_length([[4, 2, 3], [1], []]) == ((1 + 9 / 3) + (1 + 1)) / 2
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
