"""Drafts people publish: what their files do not say, by Hub id."""

import re
from dataclasses import dataclass
from pathlib import Path

from poss_jax.convert.source import Source

# How huggingface_hub names the folder of a repository in its cache.
_CACHED = re.compile(r"models--([\w.-]+?)--([\w.-]+)")


@dataclass(frozen=True)
class Published:
    """A draft on the Hub.

    Attributes:
      target: Hub id of the target it was trained for.
      positions_per_specialist: see `DraftConfig`.
      trained_depth: see `DraftConfig`.
    """

    target: str
    positions_per_specialist: tuple[int, ...] = (1,)
    trained_depth: int = 1


_LLAMA3 = "meta-llama/Meta-Llama-3-8B-Instruct"
_LLAMA2 = "meta-llama/Llama-2-13b-chat-hf"

PUBLISHED = {
    "HINT-lab/PosS1-Llama3-8B-Instruct": Published(_LLAMA3, (1,) * 7, 7),
    "HINT-lab/PosS2-Llama3-8B-Instruct": Published(_LLAMA3, (2,) * 4, 8),
    "HINT-lab/PosS3-Llama3-8B-Instruct": Published(_LLAMA3, (3,) * 4, 12),
    "HINT-lab/PosS1-Llama2-13B-Chat": Published(_LLAMA2, (1,) * 6, 6),
    "HINT-lab/PosS2-Llama2-13B-Chat": Published(_LLAMA2, (2,) * 3, 6),
    "HINT-lab/PosS3-Llama2-13B-Chat": Published(_LLAMA2, (3,) * 2, 6),
    "HINT-lab/HASS-Llama3-8B-Instruct-Reproduce": Published(_LLAMA3, trained_depth=3),
    "HArmonizedSS/HASS-LLaMA2-Chat-13B": Published(_LLAMA2, trained_depth=3),
    "HINT-lab/EAGLE-Llama3-8B-Instruct-Reproduce": Published(_LLAMA3),
    "yuhuili/EAGLE-LLaMA3-Instruct-8B": Published(_LLAMA3),
    "yuhuili/EAGLE-LLaMA3-Instruct-70B": Published("meta-llama/Meta-Llama-3-70B-Instruct"),
    "yuhuili/EAGLE-LLaMA3.1-Instruct-8B": Published("meta-llama/Llama-3.1-8B-Instruct"),
    "yuhuili/EAGLE-llama2-chat-7B": Published("meta-llama/Llama-2-7b-chat-hf"),
    "yuhuili/EAGLE-llama2-chat-13B": Published(_LLAMA2),
    "yuhuili/EAGLE-llama2-chat-70B": Published("meta-llama/Llama-2-70b-chat-hf"),
    "yuhuili/EAGLE-Vicuna-7B-v1.3": Published("lmsys/vicuna-7b-v1.3"),
    "yuhuili/EAGLE-Vicuna-13B-v1.3": Published("lmsys/vicuna-13b-v1.3"),
    "yuhuili/EAGLE-Vicuna-33B-v1.3": Published("lmsys/vicuna-33b-v1.3"),
}


def find_published(source: Source) -> tuple[str, str] | None:
    """Tells which published draft a source is.

    Args:
      source: on the Hub, in the Hub's cache, or a folder that has kept the name of the repository.

    Returns:
      Hub id (a key of `PUBLISHED`), and what told it; None for anything else.
    """
    if source.revision and source.name in PUBLISHED:
        return source.name, "its id on the Hub"
    for part in source.folder.absolute().parts:
        match = _CACHED.fullmatch(part)
        if match and f"{match[1]}/{match[2]}" in PUBLISHED:
            return f"{match[1]}/{match[2]}", "its folder in the Hub's cache"
    return next(
        (
            (hub_id, f"its folder's name {source.name}")
            for hub_id in PUBLISHED
            if Path(hub_id).name == source.name and not source.revision
        ),
        None,
    )
