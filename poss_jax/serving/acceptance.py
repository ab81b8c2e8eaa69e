"""What answers say about their drafts: our counts, and each answer's in the shape of vLLM."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from poss_jax.engine.answers import Generation


def count_accepted(answers: Sequence[Generation]) -> dict[str, Any]:
    """Counts the rounds and accepted tokens of some answers."""
    rounds = [count for answer in answers for count in answer.accepted_per_round]
    positions = Counter(i for count in rounds for i in range(1, count + 1))
    return {
        "rounds": len(rounds),
        "accepted_tokens": sum(rounds),
        "copied_tokens": sum(sum(answer.copied_per_round) for answer in answers),
        "acceptance_length": sum(rounds) / len(rounds) + 1 if rounds else 1.0,
        "accepted_per_position": [positions[i] for i in range(1, len(positions) + 1)],
    }


def describe_acceptance(answer: Generation, max_accepted: int) -> dict[str, Any]:
    """Describes the rounds of one answer that had drafts, as vLLM's `speculative_decoding`.

    A tree counts as long as the path that the text took through it: to its deepest position there.

    Args:
      max_accepted: most drafted tokens that a round can accept.
    """
    rounds = zip(answer.accepted_per_round, answer.offered_per_round, strict=True)
    steps = [(accepted, offered) for accepted, offered in rounds if offered]
    num_accepted, num_drafted = (sum(step[i] for step in steps) for i in (0, 1))
    by_length = {length: [0] * (length + 1) for length in sorted({step[1] for step in steps})}
    for accepted, offered in steps:
        by_length[offered][accepted] += 1
    counts = Counter(accepted for accepted, _ in steps)
    return {
        "mean_acceptance_length": 1 + num_accepted / max(len(steps), 1),
        "draft_acceptance_rate": num_accepted / max(num_drafted, 1),
        "acceptance_histogram": [counts[i] for i in range(max_accepted + 1)],
        "acceptance_histogram_by_draft_length": {str(k): row for k, row in by_length.items()},
        "num_spec_steps": len(steps),
        "num_accepted_draft_tokens": num_accepted,
        "num_draft_tokens": num_drafted,
        "num_spec_tokens": max_accepted,
    }
