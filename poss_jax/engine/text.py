"""Text that grows token by token: whole characters only, and an end where a stop string begins."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from tokenizers.decoders import DecodeStream


class Piece(NamedTuple):
    """Text that one token added."""

    text: str
    is_drafted: bool


class TextStream:
    """Turns tokens into text that may be shown: it is never taken back.

    A token that ends within a character adds nothing; the one that completes it adds it. Text that
    may be the beginning of a stop string is held back until that is decided.

    Attributes:
      is_stopped: a stop string was found; what comes from it on is not given out.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._decoder = DecodeStream(skip_special_tokens=True)
        self._ids: list[int] = []
        self._decoded = ""
        self._held: list[Piece] = []
        self.is_stopped = False

    def push(self, token: int, *, is_drafted: bool) -> list[Piece]:
        """Adds a token and returns what may be shown now."""
        self._ids.append(token)
        text = self._decoder.step(self._tokenizer.backend_tokenizer, token) or ""
        return self._add(text, is_drafted=is_drafted)

    def finish(self) -> list[Piece]:
        """Returns what was held back, once no more tokens come."""
        whole = self._tokenizer.decode(self._ids, skip_special_tokens=True)
        is_longer = whole.startswith(self._decoded)  # an unfinished character was left
        rest = whole[len(self._decoded) :] if is_longer else ""
        pieces = self._add(rest, is_drafted=False) + self._held
        self._held = []
        return pieces

    def _add(self, text: str, *, is_drafted: bool) -> list[Piece]:
        if self.is_stopped or not text:
            return []
        self._decoded += text
        self._held.append(Piece(text, is_drafted))
        held = "".join(piece.text for piece in self._held)
        found = [at for at in map(held.find, self._stop) if at >= 0]
        if found:
            self.is_stopped = True
            shown, self._held = self._split(min(found))[0], []
            return shown
        shown, self._held = self._split(len(held) - self._num_undecided(held))
        return shown

    def _num_undecided(self, held: str) -> int:
        """Length of the longest end of `held` that begins a stop string."""
        longest = max(map(len, self._stop), default=1) - 1
        return next(
            (n for n in range(min(longest, len(held)), 0, -1) if _begins(held[-n:], self._stop)), 0
        )

    def _split(self, end: int) -> tuple[list[Piece], list[Piece]]:
        """Cuts the held pieces after so many characters."""
        before: list[Piece] = []
        after: list[Piece] = []
        for piece in self._held:
            length = max(0, min(end, len(piece.text)))
            before.append(Piece(piece.text[:length], piece.is_drafted))
            after.append(Piece(piece.text[length:], piece.is_drafted))
            end -= len(piece.text)
        return [piece for piece in before if piece.text], [piece for piece in after if piece.text]


def _begins(text: str, strings: Sequence[str]) -> bool:
    return any(string.startswith(text) for string in strings)
