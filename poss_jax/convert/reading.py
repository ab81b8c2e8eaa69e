"""The reading of a checkpoint: its config, and the place of every weight."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from poss_jax.config.models import DraftConfig, LlamaConfig
from poss_jax.config.reading import UserError
from poss_jax.convert.hf import DraftMetadata
from poss_jax.convert.names import Slot, join_rows
from poss_jax.convert.source import LazyTensor, Source

_READABLE = ("float32", "bfloat16", "float16")
_MAX_LISTED = 50


@dataclass(frozen=True)
class Reading:
    """A checkpoint whose weights have the names, shapes and types that its config wants.

    Attributes:
      source: files it was read from.
      config: shape of the model; in that of a draft every specialist has one position for now,
        see `place_specialists`.
      slots: place in our format, by key.
      dropped: reason why a key is known and not stored, by key.
      copies: item of the target that a key of a draft must equal, by key.
      assumed: one line for each thing that the files do not say.
      metadata: what our own export of a draft says beyond its layout.
      read_vocabulary: reads the target id of every token that a draft can propose; None means all.
    """

    source: Source
    config: LlamaConfig | DraftConfig
    slots: Mapping[str, Slot]
    dropped: Mapping[str, str] = field(default_factory=dict)
    copies: Mapping[str, str] = field(default_factory=dict)
    assumed: tuple[str, ...] = ()
    metadata: DraftMetadata | None = None
    read_vocabulary: Callable[[], tuple[int, ...] | None] = lambda: None

    @property
    def llama(self) -> LlamaConfig:
        """The config of a target."""
        assert isinstance(self.config, LlamaConfig)
        return self.config

    @property
    def draft(self) -> DraftConfig:
        """The config of a draft."""
        assert isinstance(self.config, DraftConfig)
        return self.config


class Row(NamedTuple):
    """One line of the table of what goes where.

    Attributes:
      key: name in the source.
      path: our path, or the reason why the tensor is not stored.
      shape: shape in the source and in our format alike.
      dtype: type that is stored; that of the source for what is not stored.
    """

    key: str
    path: str
    shape: tuple[int, ...]
    dtype: str


def check_keys(
    origin: str,
    tensors: Mapping[str, LazyTensor],
    slots: Mapping[str, Slot],
    optional: Mapping[str, tuple[int, ...]],
) -> None:
    """Compares the names, shapes and types of the weights with what the config describes."""
    shapes = {**optional, **(wanted := join_rows(slots))}
    problems = [f"missing {key} {list(wanted[key])}" for key in wanted if key not in tensors]
    for key, tensor in tensors.items():
        where = f"in {tensor.file.name}"
        if key not in shapes:
            problems.append(f"unknown {key} {list(tensor.shape)} {where}")
        elif tensor.shape != shapes[key]:
            problems.append(f"{key} want {list(shapes[key])} got {list(tensor.shape)} {where}")
        elif tensor.dtype not in _READABLE:
            problems.append(f"{key} want {' or '.join(_READABLE)} got {tensor.dtype} {where}")
    if problems:
        listed = "; ".join(problems[:_MAX_LISTED])
        more = f"; and {len(problems) - _MAX_LISTED} more" if len(problems) > _MAX_LISTED else ""
        raise UserError(
            f"{origin}: the weights do not fit what the config describes: {listed}{more}; "
            "give the model's own files"
        )


def list_counts(counts: tuple[int, ...]) -> str:
    """Lists numbers as options take them, such as 3,3."""
    return ",".join(map(str, counts))
