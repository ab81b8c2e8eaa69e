"""What the records of a prompt file (`poss_jax.data.read_prompts`) ask for."""

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from poss_jax.data import PROMPT_KEYS
from poss_jax.engine import Prompt


def num_turns(record: dict[str, Any]) -> int:
    """How many answers a record wants."""
    return len(record.get("turns", [None]))


def next_prompt(record: dict[str, Any], answers: Sequence[str]) -> Prompt:
    """What a record asks after its first answers: its prompt, or the next of its turns as a chat.

    turns [a, b], answers [x]  ->  user a, assistant x, user b
    """
    if "turns" not in record:
        return next(record[key] for key in PROMPT_KEYS if key in record)
    messages: list[dict[str, str]] = []
    for turn, answer in zip_longest(record["turns"][: len(answers) + 1], answers):
        messages += [{"role": "user", "content": turn}, {"role": "assistant", "content": answer}]
    return messages[:-1]
