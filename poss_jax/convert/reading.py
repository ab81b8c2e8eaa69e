"""The reading of a checkpoint: its config, and the place of every weight; published drafts."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass as checked_dataclass

from poss_jax.config.models import DraftConfig, LlamaConfig, Spans
from poss_jax.config.numbers import CountOrZero, Depth
from poss_jax.config.reading import UserError, build_config, change_config, shorten
from poss_jax.convert.source import LazyTensor, Source
from poss_jax.model.families.eagle import EAGLE
from poss_jax.model.parameters import flatten_item, item_shapes, table_of, torch_name
from poss_jax.model.target import TARGET

# --------------------------------------------------------------------------------------------------
# The place of every weight: PyTorch's keys by the tables of the models

_FURTHER = re.compile(r"^further_layers\.(\d+)")
_ROWS = re.compile(r"(.+)\[(\d+):(\d+)\]")

# Projections that Phi-3's checkpoints keep in one tensor, one below the other as in our tables.
_FUSED = {
    ".self_attn.qkv_proj.": re.compile(r"\.self_attn\.[qkv]_proj\."),
    ".mlp.gate_up_proj.": re.compile(r"\.mlp\.(gate|up)_proj\."),
}

DRAFT_EMBEDDING = "embed_tokens.weight"
"""A draft's copy of the target's embedding, which we do not store."""

DRAFT_HEAD = "lm_head.weight"
"""A draft's copy of the target's head, in the layout of vLLM."""


@dataclass(frozen=True)
class Slot:
    """One array of our format."""

    item: str  # name of its item, for instance `layers/3`
    path: tuple[str, ...]  # keys inside the item
    shape: tuple[int, ...]  # shape it must have

    def __str__(self) -> str:
        return "/".join((self.item, *self.path))


def source_key(item: str, path: tuple[str, ...]) -> str:
    """Names an array of a target, or of a draft of EAGLE's family, as PyTorch checkpoints do."""
    return torch_name({**TARGET, **EAGLE.parameters}, item, path)


def slots_by_key(config: LlamaConfig | DraftConfig) -> dict[str, Slot]:
    """Finds the place of every PyTorch key of a model.

    A part of a fused tensor has the key `NAME[START:STOP]`, by its rows; the parts of a tensor
    follow each other.
    """
    table = table_of(config)
    slots = {
        torch_name(table, item, path): Slot(item, path, shape)
        for item, tree in item_shapes(config).items()
        for path, shape in flatten_item(tree).items()
    }
    if isinstance(config, DraftConfig) and config.is_looped:
        # The further layers follow the first one.
        names = (_FURTHER.sub(lambda match: f"layers.{int(match[1]) + 1}", key) for key in slots)
        return dict(zip(names, slots.values(), strict=True))
    if isinstance(config, DraftConfig) or not config.fused_projections:
        return slots
    named: dict[str, Slot] = {}
    ends: dict[str, int] = {}
    for key, slot in slots.items():
        joined_key = key
        for joined, pattern in _FUSED.items():
            joined_key = pattern.sub(joined, joined_key)
        if joined_key != key:
            start = ends.get(joined_key, 0)
            ends[joined_key] = start + slot.shape[0]
            key = f"{joined_key}[{start}:{ends[joined_key]}]"
        named[key] = slot
    return named


def split_rows(key: str) -> tuple[str, slice | None]:
    """Splits a key into the name of a tensor and the rows of it; None: all of them."""
    match = _ROWS.fullmatch(key)
    return (match[1], slice(int(match[2]), int(match[3]))) if match else (key, None)


def cut_tensors(tensors: Mapping[str, LazyTensor], keys: Iterable[str]) -> dict[str, LazyTensor]:
    """Replaces tensors by their parts, where keys name rows of them (`split_rows`)."""
    cut = dict(tensors)
    for key in keys:
        name, rows = split_rows(key)
        if rows is not None:
            tensor = tensors[name]
            cut.pop(name, None)
            shape = (rows.stop - rows.start, *tensor.shape[1:])
            read = partial(lambda tensor, rows: tensor.read()[rows], tensor, rows)
            cut[key] = replace(tensor, shape=shape, read=read)
    return cut


FC = source_key("fc", ("weight",))
FC_BIAS = source_key("fc", ("bias",))
QUERY = source_key("specialists/0", ("attention", "q", "weight"))
EMBEDDING = source_key("embed", ("weight",))
HEAD = source_key("head", ("weight",))

# --------------------------------------------------------------------------------------------------
# The reading

DType = Literal["keep", "float32", "bfloat16", "float16"]
"""Type to store the weights in."""

_READABLE = ("float32", "bfloat16", "float16")

METADATA = "poss_jax"
"""Where a config.json that we export holds what its layout has no key for."""


@checked_dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class DraftMetadata:
    """Contents of `METADATA` in a config.json that we exported."""

    positions_per_specialist: Spans  # see `DraftConfig`
    trained_depth: Depth  # see `DraftConfig`
    draft_vocabulary: tuple[CountOrZero, ...] | None = None  # see `ModelRecord`
    # See `DraftConfig`; None: the family's usual one.
    kv: Literal["per_specialist", "shared"] | None = None


def read_metadata(source: Source) -> DraftMetadata | None:
    """Reads what our own export says beyond the layout; None in the files of others."""
    values = source.settings.get(METADATA)
    if values is None:
        return None
    origin = f"{source.folder}/config.json: {METADATA}"
    if not isinstance(values, Mapping):
        raise UserError(f"{origin}: want an object, got {shorten(values)}; export the draft again")
    return build_config(DraftMetadata, values, origin=origin)


class Row(NamedTuple):
    """One line of the table of what goes where."""

    key: str  # name in the source
    path: str  # our path, or the reason why the tensor is not stored
    shape: tuple[int, ...]  # shape in the source and in our format alike
    dtype: str  # type that is stored; the source's type if the tensor is not stored


@dataclass(frozen=True)
class Reading:
    """A checkpoint whose weights have the names, shapes and types that its config wants."""

    source: Source  # files it was read from
    # Shape of the model; a draft's specialists have one position each until `place_specialists`.
    config: LlamaConfig | DraftConfig
    slots: Mapping[str, Slot]  # place in our format, by key
    # Reason why a key is known and not stored, by key.
    dropped: Mapping[str, str] = field(default_factory=dict)
    # Item of the target that a key of a draft must equal, by key.
    copies: Mapping[str, str] = field(default_factory=dict)
    assumed: tuple[str, ...] = ()  # one line for each thing that the files do not say
    metadata: DraftMetadata | None = None  # what our own export of a draft says beyond its layout
    # Reads the target id of every token that a draft can propose; None means all.
    read_vocabulary: Callable[[], tuple[int, ...] | None] = lambda: None
    # Number of the target's layers -> the ones whose inputs a draft reads, if its config does not
    # name them.
    usual_aux_layers: Callable[[int], tuple[int, ...]] | None = None

    @property
    def draft(self) -> DraftConfig:
        """The config of a draft."""
        assert isinstance(self.config, DraftConfig)
        return self.config

    def rows(self, dtype: DType = "keep") -> list[Row]:
        """Lists what is stored, in this type, and then what is not and why."""
        tensors = cut_tensors(self.source.tensors, self.slots)
        notes = {**self.dropped, **dict.fromkeys(self.copies, "a copy of the target's")}
        stored = [
            Row(key, str(slot), slot.shape, tensors[key].dtype if dtype == "keep" else dtype)
            for key, slot in self.slots.items()
        ]
        return stored + [
            Row(key, f"(not stored: {why})", tensors[key].shape, tensors[key].dtype)
            for key, why in notes.items()
        ]


def read_weights(
    source: Source,
    config: DraftConfig,
    *,
    copies: Mapping[str, str],
    dropped: Mapping[str, str] = MappingProxyType({}),
    kind: str = "",
    **more: Any,
) -> Reading:
    """Checks the weights of a draft and finds the place of each.

    Args:
      copies: see `Reading`, by plain name, as far as there are such weights.
      dropped: weights without a place, as `unused`; they are not checked.
      kind: what the draft is read as, for messages.
      more: the other fields of the reading.
    """
    slots, names = slots_by_key(config), source.names
    plain = {name: source.tensors[key] for name, key in names.items() if name not in dropped}
    shape = (config.layer.vocab_size, config.layer.hidden_size)
    check_keys(f"{source.folder}{kind}", plain, slots, dict.fromkeys(copies, shape))

    def by_key(by_name: Mapping[str, Any]) -> dict[str, Any]:
        return {names[name]: value for name, value in by_name.items() if name in names}

    return Reading(source, config, by_key(slots), by_key(dropped), by_key(copies), **more)


def check_keys(
    origin: str,
    tensors: Mapping[str, LazyTensor],
    slots: Mapping[str, Slot],
    optional: Mapping[str, tuple[int, ...]],
) -> None:
    """Compares the names, shapes and types of the weights with what the config describes."""
    expected: dict[str, tuple[int, ...]] = {}
    for key, slot in slots.items():
        name, rows = split_rows(key)
        expected[name] = slot.shape if rows is None else (rows.stop, *slot.shape[1:])
    shapes = {**optional, **expected}
    problems = [f"missing {key} {list(expected[key])}" for key in expected if key not in tensors]
    for key, tensor in tensors.items():
        where = f"in {tensor.file.name}"
        if key not in shapes:
            problems.append(f"unknown {key} {list(tensor.shape)} {where}")
        elif tensor.shape != shapes[key]:
            problems.append(f"{key} want {list(shapes[key])} got {list(tensor.shape)} {where}")
        elif tensor.dtype not in _READABLE:
            problems.append(f"{key} want {' or '.join(_READABLE)} got {tensor.dtype} {where}")
    if problems:
        listed = "; ".join(problems[:50])
        more = f"; and {len(problems) - 50} more" if len(problems) > 50 else ""
        raise UserError(
            f"{origin}: the weights do not fit what the config describes: {listed}{more}; "
            "give the model's own files"
        )


def list_counts(counts: tuple[int, ...]) -> str:
    """Lists numbers as options take them, such as 3,3."""
    return ",".join(map(str, counts))


# --------------------------------------------------------------------------------------------------
# Signs of a format

Sign = Callable[[Source], str | None]
"""Returns what shows a format in a checkpoint, in words; None where nothing does."""


def model_names(values: Mapping[str, Any]) -> list[str]:
    """Lists what config.json calls the model: its classes, then its type."""
    classes = values.get("architectures")
    names = [*classes] if isinstance(classes, list) else []
    return [str(name) for name in (*names, values.get("model_type")) if name is not None]


def named(pattern: str) -> Sign:
    """Finds a name of the model that holds the pattern."""
    find = re.compile(pattern, re.IGNORECASE).search
    return lambda source: next(filter(find, model_names(source.settings)), None)


NAMED_EAGLE3 = named(r"eagle3")
"""Finds a name of the model that says EAGLE-3."""


# --------------------------------------------------------------------------------------------------
# Positions of specialists, which only our own exports state: published drafts


class Published(NamedTuple):
    """A draft on the Hub."""

    target: str  # Hub id of the target it was trained for
    positions_per_specialist: tuple[int, ...] = (1,)  # see `DraftConfig`
    trained_depth: int = 1  # see `DraftConfig`


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
    "yuhuili/EAGLE3-LLaMA3.3-Instruct-70B": Published(
        "meta-llama/Llama-3.3-70B-Instruct", trained_depth=7
    ),
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
    """Finds a published draft by its Hub id or its folder's name.

    Returns:
      Hub id (a key of `PUBLISHED`), and what gave it away; None for anything else.
    """
    name, revision = source.identity
    if revision is not None:
        return (name, "its id on the Hub") if name in PUBLISHED else None
    hub_id = next((hub_id for hub_id in PUBLISHED if Path(hub_id).name == name), None)
    return None if hub_id is None else (hub_id, f"its folder's name {name}")


def place_specialists(
    reading: Reading,
    positions_per_specialist: tuple[int, ...] | None = None,
    trained_depth: int | None = None,
) -> Reading:
    """Gives a draft's config its positions per specialist and trained depth.

    Args:
      positions_per_specialist: what the user says; None takes what an export of ours says, what is
        known of a published draft, or 1 for a single specialist.
      trained_depth: what the user says; None takes what is known, or the sum of the spans.

    Raises:
      UserError: the positions are not known, or are for another number of specialists.
    """
    metadata, because = _known(reading)
    known_spans = metadata.positions_per_specialist if metadata else None
    number, assumed = reading.draft.num_specialists, list(reading.assumed)
    spans = positions_per_specialist or known_spans or ((1,) if number == 1 else ())
    if len(spans) != number:
        got = f", got {len(spans)} positions per specialist"
        got = got if spans else " and does not say which positions each drafts"
        raise UserError(
            f"{reading.source.folder} has {number} specialists{got}; give {number} counts, such as "
            f"--positions-per-specialist {list_counts((3,) * number)}"
        )
    if metadata and spans != known_spans:
        assumed.append(
            f"{list_counts(spans)} positions per specialist as asked, although {because}"
        )
        metadata = None
    elif isinstance(metadata, Published):
        assumed.append(f"{list_counts(spans)} positions per specialist, because {because}")
    if trained_depth is None:
        trained_depth, why = sum(spans), "the positions per specialist add up to it"
        if metadata:
            trained_depth, why = metadata.trained_depth, because
        elif len(spans) == 1:
            trained_depth, why = 1, "a single layer does not say; give --trained-depth (HASS: 3)"
        if not isinstance(metadata, DraftMetadata):
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
        metadata, says = reading.metadata, "config.json says"
    elif (published := find_published(reading.source)) is not None:
        hub_id, told_by = published
        metadata, says = PUBLISHED[hub_id], f"{told_by} matches {hub_id}, published with"
    else:
        return None, ""
    spans = list_counts(metadata.positions_per_specialist)
    return metadata, f"{says} {spans}, trained depth {metadata.trained_depth}"
