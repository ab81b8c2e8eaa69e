"""What the records of a prompt file (`poss_jax.data.read_prompts`) ask for."""

from collections.abc import Sequence
from dataclasses import asdict
from itertools import zip_longest
from typing import Any

from poss_jax.config import SamplingConfig, UserError, build_config, shorten
from poss_jax.data import PROMPT_KEYS
from poss_jax.engine import Prompt, prompt_seed


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


def read_settings(
    records: Sequence[dict[str, Any]], sampling: SamplingConfig
) -> list[SamplingConfig]:
    """How the tokens of every record are chosen: by its own `sampling`, the rest as in the run.

    Without a seed of its own, a record gets one from the run's seed and its place. All turns of a
    conversation share it: their answers stand at different positions of the text, so the draws are
    different ones.

    Raises:
      UserError: invalid settings.
    """
    settings = []
    for index, record in enumerate(records):
        where = f"prompt {index + 1} of {len(records)}: sampling"
        own = record.get("sampling", {})
        if not isinstance(own, dict):
            raise UserError(
                f"{where}: want settings such as {{'temperature': 1}}, got {shorten(own)}"
            )
        shared = asdict(sampling) | {"seed": prompt_seed(sampling.seed, index)}
        settings.append(build_config(SamplingConfig, shared | own, origin=where))
    return settings
