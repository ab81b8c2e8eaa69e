"""Text that grows token by token: whole characters only, and an end where a stop string begins."""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
_BYTE = re.compile("<0x[0-9A-F]{2}>")


class Piece(NamedTuple):
    """Text that one token added."""

    text: str
    is_drafted: bool


class TextStream:
    """Turns tokens into text that may be shown: it is never taken back.

    A token that ends within a character adds nothing; the one that completes it adds it. Text that
    may be the beginning of a stop string is held back until that is decided. Of several stop
    strings, the one that is complete first counts; among those, the one that began first.

    Attributes:
      is_stopped: a stop string was found; what comes from it on is not given out.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self._decoder = _Decoder(tokenizer)
        self._stop = tuple(stop)
        self._held: list[Piece] = []
        self.is_stopped = False

    def push(self, token: int, *, is_drafted: bool) -> list[Piece]:
        """Adds a token and returns what may be shown now."""
        return self._add(self._decoder.push(token, is_drafted=is_drafted))

    def finish(self) -> list[Piece]:
        """Returns what was held back, once no more tokens come."""
        pieces = self._add(self._decoder.flush()) + self._held
        self._held = []
        return pieces

    def _add(self, pieces: Sequence[Piece]) -> list[Piece]:
        if self.is_stopped:
            return []
        self._held += pieces
        held = "".join(piece.text for piece in self._held)
        found = [(held.find(string), string) for string in self._stop if string in held]
        if found:
            self.is_stopped = True
            _, start = min((at + len(string), at) for at, string in found)
            shown, self._held = self._split(start)[0], []
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


class _Decoder:
    """Decodes token by token; all that it gives out is the text of all tokens, decoded at once.

    Bytes that are no character are decoded as U+FFFD, and so is an unfinished character: the last
    U+FFFD is undecided. Tokens that each are a byte (`<0xE4>`) are worse, and undecided up to the
    next token of another kind: one byte that fits nowhere spoils the run of them.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder
        self._special = {token for token, content in added.items() if content.special}
        self._ids: list[int] = []  # the last tokens, from a place between characters on
        self._num_shown = 0  # characters of their text that were given out
        self._is_drafted = False  # the last token
        self._in_bytes = False

    def push(self, token: int, *, is_drafted: bool) -> list[Piece]:
        name = self._tokenizer.convert_ids_to_tokens(token)
        if token in self._special or name is None:  # targets may embed more than there are
            return []
        is_byte = _BYTE.fullmatch(name) is not None
        pieces = self.flush() if self._in_bytes and not is_byte else []
        self._ids.append(token)
        self._is_drafted, self._in_bytes = is_drafted, is_byte
        if is_byte:
            return pieces
        text = self._decode(self._ids)
        pieces += self._show(text.removesuffix(_UNFINISHED))
        if not text.endswith(_UNFINISHED):
            # One token goes before the next, since some decoders drop a space at the beginning.
            self._ids, self._num_shown = [token], len(self._decode([token]))
        return pieces

    def flush(self) -> list[Piece]:
        """Gives out what is undecided, since nothing that follows can change it."""
        return self._show(self._decode(self._ids))

    def _show(self, text: str) -> list[Piece]:
        shown, self._num_shown = self._num_shown, max(len(text), self._num_shown)
        return [Piece(text[shown:], self._is_drafted)] if len(text) > shown else []

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)


def _begins(text: str, strings: Sequence[str]) -> bool:
    return any(string.startswith(text) for string in strings)
