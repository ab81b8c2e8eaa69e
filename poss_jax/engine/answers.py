"""What comes out of the engine."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from poss_jax.engine.text import Piece

StopReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Generation:
    """One answer.

    Attributes:
      prompt_ids: tokens that were continued.
      output_ids: new tokens, with the stop token, or those of the stop string, if there was one.
      text: the new tokens as text, without stop token or stop string; None without a tokenizer.
      accepted_per_round: accepted drafted tokens of every round, bonus token not counted.
      offered_per_round: deepest position the tree offered on the accepted path, per round.
      stop_reason: `stop` (a stop token or stop string) or `length` (the limit).
    """

    prompt_ids: list[int]
    output_ids: list[int]
    text: str | None
    accepted_per_round: list[int]
    offered_per_round: list[int]
    stop_reason: StopReason

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per round, bonus token included; 1 where no round was needed."""
        return float(np.mean(self.accepted_per_round)) + 1 if self.accepted_per_round else 1.0


@dataclass(frozen=True)
class Chunk:
    """What one round added to an answer.

    Attributes:
      pieces: text that may be shown now, by token; text that is not decided yet comes later.
      output_ids: tokens of this round.
      is_drafted: which of them the draft proposed; the others are the target's own.
      answer: the whole answer, in the last chunk alone.
    """

    pieces: list[Piece]
    output_ids: list[int]
    is_drafted: list[bool]
    answer: Generation | None = None

    @property
    def text(self) -> str:
        """Text that may be shown now; all chunks together give the answer's text."""
        return "".join(piece.text for piece in self.pieces)


def read_answer(
    prompt: list[int], output: dict[str, np.ndarray], row: int, stop_ids: Sequence[int]
) -> Generation:
    """One sequence of a batch, without its text.

    Args:
      prompt: token ids.
      output: fields of `speculate.Output`, on the host.
      row: of the sequence.
      stop_ids: tokens that end a text.
    """
    tokens = output["tokens"][row, : output["num_tokens"][row]].tolist()
    rounds = slice(0, output["num_rounds"][row])
    return Generation(
        prompt_ids=prompt,
        output_ids=tokens,
        text=None,
        accepted_per_round=output["num_accepted"][row, rounds].tolist(),
        offered_per_round=output["num_offered"][row, rounds].tolist(),
        stop_reason="stop" if tokens[-1] in stop_ids else "length",
    )
