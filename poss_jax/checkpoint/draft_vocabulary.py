"""The file of a draft vocabulary: the tokens of a target that a draft may propose."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from poss_jax.checkpoint.whole import write_output
from poss_jax.config.json_reading import read_json
from poss_jax.config.numbers import AtLeastTwo, CountOrZero, Probability
from poss_jax.config.paths import AnyPath, as_path
from poss_jax.config.reading import UserError, build_config, config_to_dict

SMALLEST = 2
"""Fewest tokens that a draft may propose."""


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid", allow_inf_nan=False))
class DraftVocabulary:
    """Contents of a draft vocabulary's file.

    Attributes:
      vocab_size: number of tokens of the target.
      tokens: ids of the tokens that a draft may propose, ascending.
      coverage: share of the counted tokens in the vocabulary; None if nothing was counted.
      source: description of the counted data; informative only.
    """

    vocab_size: AtLeastTwo
    tokens: tuple[CountOrZero, ...] = Field(min_length=SMALLEST)
    coverage: Probability | None = None
    source: Any = None

    def __post_init__(self) -> None:
        ids = np.asarray(self.tokens)
        if (np.diff(ids) <= 0).any():
            at = int(np.argmax(np.diff(ids) <= 0))
            raise ValueError(f"tokens: want ascending ids, got {ids[at + 1]} after {ids[at]}")
        if ids[-1] >= self.vocab_size:
            raise ValueError(f"tokens: want ids below vocab_size {self.vocab_size}, got {ids[-1]}")


def write_draft_vocabulary(path: Path, vocabulary: DraftVocabulary) -> None:
    """Writes a draft vocabulary as a JSON file, whole or not at all.

    Raises:
      UserError: it cannot be written.
    """
    fields = config_to_dict(vocabulary).items()
    lines = [f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in fields]  # of many ids
    write_output(path, "{\n" + ",\n".join(lines) + "\n}\n")


def read_draft_vocabulary(path: str | AnyPath, vocab_size: int) -> np.ndarray:
    """Reads the tokens of a draft vocabulary.

    Args:
      path: JSON file that `poss draft-vocab` writes.

    Returns:
      [Vd] int32, ascending ids of the target.

    Raises:
      UserError: unreadable, not a draft vocabulary, or made for another vocabulary size.
    """
    vocabulary = build_config(DraftVocabulary, read_json(as_path(path)), origin=str(path))
    if vocabulary.vocab_size != vocab_size:
        raise UserError(
            f"{path}: want a draft vocabulary of {vocab_size} tokens, which the target has, got "
            f"one made for {vocabulary.vocab_size}; count again with this target"
        )
    return np.asarray(vocabulary.tokens, np.int32)
