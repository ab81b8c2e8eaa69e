"""Answers, which grow round by round.

PackedRounds (device) ─► Round ─► LiveAnswer.add ─► Chunk; the last holds the Generation
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

from poss_jax.engine.guides import GrammarState
from poss_jax.engine.prompts import PreparedPrompt
from poss_jax.engine.text import Piece, TextStream, find_anchor

StopReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True)
class Generation:
    """One answer.

    Attributes:
      prompt_ids: tokens that were continued.
      output_ids: new tokens, including a stop token or stop string.
      text: the new tokens as text, without stop token or stop string; None without a tokenizer.
      accepted_per_round: accepted drafted or copied tokens of every round, without the bonus token
        and tokens that a grammar makes certain.
      offered_per_round: deepest position that the tree offered on the accepted path, per round;
        likewise.
      stop_reason: `stop` (a stop token or stop string), `length` (the limit), or `cancelled` (by
        the caller, or at its deadline).
      copied_per_round: accepted tokens of every round that lookup copied and no draft proposed.
      cached_tokens: prompt tokens that were not read, since earlier prompts began with them.
    """

    prompt_ids: list[int]
    output_ids: list[int]
    text: str | None
    accepted_per_round: list[int]
    offered_per_round: list[int]
    stop_reason: StopReason
    copied_per_round: list[int] = field(default_factory=list)
    cached_tokens: int = field(default=0, compare=False)

    @property
    def mean_acceptance_length(self) -> float:
        """Accepted tokens per round, and the bonus token; 1 where no round was needed."""
        return float(np.mean(self.accepted_per_round)) + 1 if self.accepted_per_round else 1.0


class TokenLogprobs(NamedTuple):
    """Log-probabilities at the position of one token (see `decode.verify.Logprobs`)."""

    chosen: float  # of the token
    ids: list[int]  # the most likely tokens, best first
    top: list[float]  # their log-probabilities


class Round(NamedTuple):
    """One round of one sequence, on the host."""

    tokens: list[int]  # the new ones
    is_done: bool  # the text ended at a stop token or its limit
    logprobs: Sequence[TokenLogprobs] = ()  # of the new tokens, if requested
    # Accepted nodes of the tree: first drafted ones, then copied ones, then certain ones; None for
    # the first token, which no round chose.
    num_accepted: int | None = None
    num_offered: int | None = None  # deepest position offered along the accepted path
    num_copied: int = 0  # accepted tokens that only lookup proposed
    num_certain: int = 0  # accepted tokens that only a grammar proposed, which allows no others

    @property
    def depths(self) -> list[int]:
        """See `Chunk`."""
        num_proposed = (self.num_accepted or 0) - self.num_certain
        num_drafted = num_proposed - self.num_copied
        positions = range(1, num_proposed + 1)
        proposed = [depth if depth <= num_drafted else -depth for depth in positions]
        return proposed + [0] * (len(self.tokens) - len(proposed))


@dataclass(frozen=True)
class Chunk:
    """The part of an answer that one round added, or several.

    Attributes:
      pieces: text that may be shown now, by token; undecided text comes with a later chunk.
      output_ids: tokens of these rounds.
      depths: position that each token was drafted at, from 1; negative if lookup copied it, 0 if
        neither, as the target's own tokens and those that a grammar makes certain.
      answer: the whole answer; only the last chunk has it.
      logprobs: log-probabilities of these tokens, if requested.
    """

    pieces: list[Piece]
    output_ids: list[int]
    depths: list[int]
    answer: Generation | None = None
    logprobs: Sequence[TokenLogprobs] = ()

    @property
    def is_drafted(self) -> list[bool]:
        """True for each token that the draft or lookup proposed."""
        return [depth != 0 for depth in self.depths]

    @property
    def text(self) -> str:
        """Text that may be shown now; all chunks together give the answer's text."""
        return "".join(piece.text for piece in self.pieces)

    def __add__(self, later: "Chunk") -> "Chunk":
        return Chunk(
            self.pieces + later.pieces,
            self.output_ids + later.output_ids,
            self.depths + later.depths,
            later.answer,
            [*self.logprobs, *later.logprobs],
        )


def answer_anchor(prompt: PreparedPrompt, tokenizer: Any) -> int | None:
    """Last prompt token that the answer is decoded after; None: the answer stands alone."""
    if prompt.is_chat or tokenizer is None:
        return None
    return find_anchor(tokenizer, prompt.ids[: len(prompt.ids) - prompt.num_continued])


def begin_text(
    prompt: PreparedPrompt, tokenizer: Any, stop: Sequence[str] = ()
) -> TextStream | None:
    """Begins the text of an answer, after what it continues; None without a tokenizer."""
    if tokenizer is None:
        return None
    anchor = answer_anchor(prompt, tokenizer)
    stream = TextStream(tokenizer, stop, anchor=anchor, shown=prompt.shown_ids)
    continued = prompt.ids[len(prompt.ids) - prompt.num_continued :]
    for count, token in enumerate(continued, start=1):
        stream.push(token, depth=0, may_stop=count > prompt.sampling.min_tokens)
    return stream


class LiveAnswer:
    """An answer that grows round by round."""

    def __init__(self, prompt: PreparedPrompt, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        """Begins an answer; `stop` are strings that end it, as the prompt's `stop_ids` do."""
        # The grammar after all of its tokens; None: any token may follow.
        self.guide: GrammarState | None = prompt.guide and prompt.guide.copy()
        self._prompt, self._stop_ids = prompt.ids, prompt.stop_ids
        self._least = prompt.sampling.min_tokens - prompt.num_continued
        self._stream = begin_text(prompt, tokenizer, stop)
        self._text = ""
        self._ids, self._accepted = list[int](), list[int]()
        self._offered, self._copied = list[int](), list[int]()
        self.is_ended, self.cached_tokens = False, 0

    def add(self, new: Round) -> Chunk:
        """Adds one more round to an answer that has not ended.

        Raises:
          UserError: the answer's grammar has become too complex.
        """
        tokens, depths, num_kept = new.tokens, new.depths, len(new.tokens)
        pieces = list[Piece]()
        if self._stream is not None:
            for count, (token, depth) in enumerate(zip(tokens, depths, strict=True), start=1):
                if token not in self._stop_ids:
                    may_stop = len(self._ids) + count > self._least
                    pieces += self._stream.push(token, depth=depth, may_stop=may_stop)
                if self._stream.is_stopped:
                    num_kept = count
                    break
            if new.is_done:
                pieces += self._stream.finish()
        is_cut = num_kept < len(tokens)  # as at a stop token, nothing beyond counts
        if new.num_offered is not None:
            num_offered = new.num_offered - new.num_certain
            self._accepted.append(sum(depth != 0 for depth in depths[:num_kept]))
            self._offered.append(min(num_offered, num_kept) if is_cut else num_offered)
            self._copied.append(sum(depth < 0 for depth in depths[:num_kept]))
        if self.guide is not None:
            self.guide.advance(tokens[:num_kept])
        self._ids += tokens[:num_kept]
        self._text += "".join(piece.text for piece in pieces)
        is_stopped = self._stream is not None and self._stream.is_stopped
        self.is_ended = is_stopped or new.is_done
        is_at_stop = is_stopped or tokens[-1] in self._stop_ids
        return Chunk(
            pieces,
            tokens[:num_kept],
            depths[:num_kept],
            answer=self._answer("stop" if is_at_stop else "length") if self.is_ended else None,
            logprobs=new.logprobs[:num_kept],
        )

    def cancel(self) -> Chunk:
        """Ends the answer where it is; returns the text that was held back."""
        pieces = self._stream.finish() if self._stream else []
        self._text += "".join(piece.text for piece in pieces)
        self.is_ended = True
        return Chunk(pieces, [], [], answer=self._answer("cancelled"))

    def _answer(self, stop_reason: StopReason) -> Generation:
        return Generation(
            prompt_ids=self._prompt,
            output_ids=self._ids,
            text=self._text if self._stream else None,
            accepted_per_round=self._accepted,
            offered_per_round=self._offered,
            copied_per_round=self._copied,
            stop_reason=stop_reason,
            cached_tokens=self.cached_tokens,
        )


def mean_acceptance_length(accepted: Sequence[Sequence[int]]) -> float:
    """Tokens per round of each prompt, averaged over prompts (how the papers report it)."""
    per_prompt = [float(np.mean(prompt)) + 1 for prompt in accepted if len(prompt)]
    return float(np.mean(per_prompt)) if per_prompt else 1.0
