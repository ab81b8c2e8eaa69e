"""Held-out texts and what the model predicts there, so that people can look."""

from typing import Any

import numpy as np

from poss_jax.data.rows import Rows
from poss_jax.learn.validation import Predictions

from .stages import Stage

_TOKENS_BEFORE = 16
_PLACES = 4  # of each text


def format_samples(stage: Stage, shown: Predictions, num_samples: int) -> str:
    """Writes down what is predicted at a few places of the first validation rows.

    Args:
      stage: whose validation it was.
      shown: predictions for its first rows.
      num_samples: how many of them are used, if there are so many.

    Returns:
      Markdown: a table for each row, and a line in it for each place, the depths side by side.
    """
    depth = len(shown.tokens)
    head = ["text before", *(f"depth {d}" for d in range(depth))]
    lines = ["Held-out text, and what is predicted to follow: `right` or ~~`wrong`~~ `wanted`."]
    for index in range(min(num_samples, len(shown.wanted))):
        lines += ["", f"## Row {index}", "", f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
        for place in _places(shown.is_trained[index], depth):
            before = _text_before(stage.validation_rows[index : index + 1], place + stage.lookahead)
            cells = [_quoted(stage.tokenizer, before)]
            for d, row in enumerate(range(place, place + depth)):
                wanted, got = shown.wanted[index, row], shown.tokens[d, index, row]
                cell = _quoted(stage.tokenizer, [wanted])
                cells.append(
                    cell if got == wanted else f"~~{_quoted(stage.tokenizer, [got])}~~ {cell}"
                )
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _places(is_trained: np.ndarray, depth: int) -> list[int]:
    """Rows spread over the text from which `depth` trained rows follow each other."""
    starts = range(len(is_trained) - depth + 1)
    places = [start for start in starts if is_trained[start : start + depth].all()]
    picked = np.linspace(0, len(places) - 1, _PLACES).round().astype(int) if places else []
    return [places[i] for i in dict.fromkeys(picked)]


def _text_before(row: Rows, end: int) -> np.ndarray:
    """The last tokens before a place, of its own document."""
    tokens, documents = row.tokens[0, :end], row.documents[0, :end]
    return tokens[documents == documents[-1]][-_TOKENS_BEFORE:]


def _quoted(tokenizer: Any, tokens: Any) -> str:
    """Text as code in a cell of a table, line ends and spaces visible."""
    text = repr(tokenizer.decode(tokens))[1:-1]
    return f"`` {text} ``".replace("|", "\\|")
