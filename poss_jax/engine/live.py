"""Decoding round by round from the host: for streaming, and for stop strings."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from poss_jax.decode import speculate
from poss_jax.decode.state import DecodeConfig, Request, Weights
from poss_jax.engine.answers import Chunk, Generation, read_answer
from poss_jax.engine.text import Piece, TextStream

_start = jax.jit(speculate.start, static_argnums=1)
_run_round = jax.jit(speculate.run_round, static_argnums=1, donate_argnums=3)


def run_live(
    weights: Weights, config: DecodeConfig, request: Request, answers: Sequence["LiveAnswer"]
) -> Iterator[list[Chunk]]:
    """Decodes a batch and gives out each round as it lands, until all answers are ended.

    Args:
      weights: of target and draft.
      config: the static side.
      request: the batch; sequences beyond `answers` are padding.
      answers: what the sequences become.

    Yields:
      A chunk per answer and round; empty for one that has ended before.
    """
    state = _start(weights, config, request)
    while True:
        output = jax.device_get(vars(state.output))
        yield [answer.land(output) for answer in answers]
        if all(answer.is_ended for answer in answers):
            return
        is_done = output["is_done"].copy()
        is_done[: len(answers)] = [answer.is_ended for answer in answers]
        state = state.replace(output=state.output.replace(is_done=jnp.asarray(is_done)))
        state = _run_round(weights, config, request, state)


class LiveAnswer:
    """One sequence of a batch, as its rounds land on the host.

    Attributes:
      is_ended: by a stop token, a stop string or the limit.
    """

    def __init__(
        self,
        prompt: list[int],
        row: int,
        *,
        tokenizer: Any,
        stop_ids: Sequence[int],
        stop: Sequence[str] = (),
    ) -> None:
        self._prompt, self._row, self._stop_ids = prompt, row, stop_ids
        self._stream = None if tokenizer is None else TextStream(tokenizer, stop)
        self._text = ""
        self._num_landed = 0
        self.is_ended = False

    def land(self, output: dict[str, np.ndarray]) -> Chunk:
        """Takes in the output of the batch after one more round."""
        if self.is_ended:
            return Chunk([], [], [])
        answer = read_answer(self._prompt, output, self._row, self._stop_ids)
        accepted = answer.accepted_per_round
        tokens = answer.output_ids[self._num_landed :]
        is_drafted = [i < accepted[-1] if accepted else False for i in range(len(tokens))]
        is_done = bool(output["is_done"][self._row])
        pieces, num_kept = self._push(tokens, is_drafted, is_last=is_done)
        self._num_landed += num_kept
        self._text += "".join(piece.text for piece in pieces)
        chunk = Chunk(pieces, tokens[:num_kept], is_drafted[:num_kept])
        is_stopped = self._stream is not None and self._stream.is_stopped
        self.is_ended = is_stopped or is_done
        if not self.is_ended:
            return chunk
        if is_stopped:
            answer = _stop_after(answer, num_kept, num_beyond=len(tokens) - num_kept)
        return replace(chunk, answer=replace(answer, text=self._text if self._stream else None))

    def _push(
        self, tokens: list[int], is_drafted: list[bool], *, is_last: bool
    ) -> tuple[list[Piece], int]:
        """Text of a round's tokens, and how many of them there are up to a stop string."""
        if self._stream is None:
            return [], len(tokens)
        pieces: list[Piece] = []
        for count, (token, drafted) in enumerate(zip(tokens, is_drafted, strict=True), start=1):
            if token not in self._stop_ids:
                pieces += self._stream.push(token, is_drafted=drafted)
            if self._stream.is_stopped:
                return pieces, count
        return pieces + (self._stream.finish() if is_last else []), len(tokens)


def _stop_after(answer: Generation, num_kept: int, *, num_beyond: int) -> Generation:
    """An answer whose last round a stop string ended, and left so many tokens beyond it."""
    if not num_beyond:
        return replace(answer, stop_reason="stop")

    def cut(counts: list[int]) -> list[int]:
        # As at a stop token: nothing beyond was accepted or refused.
        return [*counts[:-1], min(counts[-1], num_kept)]

    return replace(
        answer,
        output_ids=answer.output_ids[:-num_beyond],
        accepted_per_round=cut(answer.accepted_per_round),
        offered_per_round=cut(answer.offered_per_round),
        stop_reason="stop",
    )
