"""Positions of a draft's specialists, which only our own exports state: published drafts."""

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from poss_jax.config.reading import UserError, change_config
from poss_jax.convert.hf import DraftMetadata
from poss_jax.convert.reading import Reading, list_counts
from poss_jax.convert.source import CACHED, Source


class Published(NamedTuple):
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
_LLAMA31 = "meta-llama/Llama-3.1-8B-Instruct"
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
    "HINT-lab/PosS3-E3-Llama3.1-8B-Instruct": Published(_LLAMA31, (3, 3, 2), 8),
    "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B": Published(_LLAMA31, trained_depth=7),
    "yuhuili/EAGLE3-Vicuna1.3-13B": Published("lmsys/vicuna-13b-v1.3", trained_depth=7),
    "yuhuili/EAGLE-LLaMA3-Instruct-8B": Published(_LLAMA3),
    "yuhuili/EAGLE-LLaMA3-Instruct-70B": Published("meta-llama/Meta-Llama-3-70B-Instruct"),
    "yuhuili/EAGLE-LLaMA3.1-Instruct-8B": Published(_LLAMA31),
    "yuhuili/EAGLE-llama2-chat-7B": Published("meta-llama/Llama-2-7b-chat-hf"),
    "yuhuili/EAGLE-llama2-chat-13B": Published(_LLAMA2),
    "yuhuili/EAGLE-llama2-chat-70B": Published("meta-llama/Llama-2-70b-chat-hf"),
    "yuhuili/EAGLE-Vicuna-7B-v1.3": Published("lmsys/vicuna-7b-v1.3"),
    "yuhuili/EAGLE-Vicuna-13B-v1.3": Published("lmsys/vicuna-13b-v1.3"),
    "yuhuili/EAGLE-Vicuna-33B-v1.3": Published("lmsys/vicuna-33b-v1.3"),
}


def find_published(source: Source) -> tuple[str, str] | None:
    """Finds a published draft by its Hub id, its folder in the Hub's cache, or its folder's name.

    Returns:
      Hub id (a key of `PUBLISHED`), and what told it; None for anything else.
    """
    if source.revision and source.name in PUBLISHED:
        return source.name, "its id on the Hub"
    for part in source.folder.absolute().parts:
        match = CACHED.fullmatch(part)
        if match and f"{match[1]}/{match[2]}" in PUBLISHED:
            return f"{match[1]}/{match[2]}", "its folder in the Hub's cache"
    for hub_id in PUBLISHED:
        if Path(hub_id).name == source.name and not source.revision:
            return hub_id, f"its folder's name {source.name}"
    return None


def place_specialists(
    reading: Reading,
    positions_per_specialist: tuple[int, ...] | None = None,
    trained_depth: int | None = None,
) -> Reading:
    """Gives a draft's config its positions per specialist and trained depth.

    Args:
      reading: a draft as it was read.
      positions_per_specialist: what the user says; None takes what an export of ours says, what is
        known of a published draft, or 1 for a single specialist.
      trained_depth: what the user says; None takes what is known, or the sum of the spans.

    Raises:
      UserError: the positions are not known, or are those of another number of specialists.
    """
    known, because = _known(reading)
    known_spans = known.positions_per_specialist if known else None
    spans = _check_spans(reading, positions_per_specialist or known_spans)
    assumed = list(reading.assumed)
    if known and spans != known_spans:
        assumed.append(
            f"{list_counts(spans)} positions per specialist as asked, although {because}"
        )
        known = None
    elif isinstance(known, Published):
        assumed.append(f"{list_counts(spans)} positions per specialist, because {because}")
    if trained_depth is None:
        trained_depth, why = (known.trained_depth, because) if known else _guess_depth(spans)
        if not isinstance(known, DraftMetadata):
            assumed.append(f"trained depth {trained_depth}, because {why}")
    config = change_config(
        reading.draft,
        origin=str(reading.source.folder),
        positions_per_specialist=spans,
        trained_depth=trained_depth,
    )
    return replace(reading, config=config, assumed=tuple(assumed))


def _known(reading: Reading) -> tuple[DraftMetadata | Published | None, str]:
    """Finds what is known without asking the user, and says how."""
    if reading.metadata is not None:
        known, says = reading.metadata, "config.json says"
    elif (found := find_published(reading.source)) is not None:
        hub_id, told_by = found
        known, says = PUBLISHED[hub_id], f"{told_by} is that of {hub_id}, published with"
    else:
        return None, ""
    spans = list_counts(known.positions_per_specialist)
    return known, f"{says} {spans}, trained depth {known.trained_depth}"


def _check_spans(reading: Reading, spans: tuple[int, ...] | None) -> tuple[int, ...]:
    """Refuses spans of another number of specialists; None is enough for a single one."""
    number = reading.draft.num_specialists
    if spans is None and number == 1:
        return (1,)
    if spans is None or len(spans) != number:
        got = " and does not say which positions each drafts"
        if spans is not None:
            got = f", got {len(spans)} positions per specialist"
        raise UserError(
            f"{reading.source.folder} has {number} specialists{got}; give {number} counts, such as "
            f"--positions-per-specialist {list_counts((3,) * number)}"
        )
    return spans


def _guess_depth(spans: tuple[int, ...]) -> tuple[int, str]:
    """Trained depth of a draft that is not known, and the reason."""
    if len(spans) == 1:
        return 1, "a single layer does not say; give --trained-depth (HASS: 3)"
    return sum(spans), "the positions per specialist add up to it"
