"""Bounds on text growth by a tokenizer's normaliser, which comes with a model and is untrusted."""

import base64
import json
import math
from typing import Any

from poss_jax.config.reading import UserError

MOST_GROWTH = 16.0


def check_growth(tokenizer: Any, origin: object) -> None:
    """Raises UserError if a tokenizer's normaliser may grow a text too much.

    Args:
      tokenizer: a tokenizer of `transformers`; slow ones have none.
      origin: its path, for the message.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or backend.normalizer is None:
        return
    growth = _growth(json.loads(backend.normalizer.__getstate__()))
    if growth > MOST_GROWTH:
        raise UserError(
            f"{origin}: tokenizer.json: want a normalizer that makes a text at most "
            f"{MOST_GROWTH:g} times as long, got up to {growth:,.0f}; fetch the file again"
        )


def _growth(about: dict[str, Any]) -> float:
    """Most characters that one may become; Unicode's own forms give few."""
    match about:
        case {"type": "Sequence", "normalizers": parts}:
            return math.prod(map(_growth, parts))
        case {"type": "Replace", "pattern": {"String": old}, "content": new} if old:
            return max(1.0, len(new) / len(old))
        case {"type": "Replace", "content": new}:  # a pattern may match between any two characters
            return 1.0 + len(new)
        case {"type": "Prepend", "prepend": before}:
            return 1.0 + len(before)
        case {"type": "Precompiled", "precompiled_charsmap": table}:
            return _longest_entry(base64.b64decode(table))
    return 1.0


def _longest_entry(table: bytes) -> float:
    """Longest text in a SentencePiece table: trie size, trie, texts separated by zeros."""
    texts = table[4 + int.from_bytes(table[:4], "little") :]
    return float(max(1, *map(len, texts.split(b"\0"))))
