"""Text that grows token by token: whole characters only, cut where a stop string begins.

Special tokens are no part of it, but stop strings may name them:

    tokens                       Yes . <|im_end|>
    text                         Yes.
    where stop strings are       Yes.<|im_end|>      if one of them holds <|im_end|>
"""

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
_BYTE = re.compile("<0x[0-9A-F]{2}>")
_MOST_UNDECIDED = 16  # most tokens decoded together while no character is complete


class Piece(NamedTuple):
    """Text that one token added."""

    text: str
    depth: int  # position of its draft, from 1; negative if lookup copied it, 0 if neither
    is_hidden: bool = False  # the name of a special token, which only stop strings meet

    @property
    def origin(self) -> Literal["drafted", "copied", "chosen"]:
        """Who proposed the token: the draft, lookup, or neither."""
        return "drafted" if self.depth > 0 else "copied" if self.depth else "chosen"


class TextStream:
    """Turns tokens into text that may be shown and is never taken back.

    A token that ends within a character adds nothing; the token that completes the character adds
    it. Text that may begin a stop string is held back until that is decided. Of several stop
    strings the first complete one counts; among these, the one that began first. A special token
    that one of them names stands between the texts around it, for all of them.

    Attributes:
      is_stopped: a stop string was found; the text ends before it.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop: Sequence[str] = (),
        *,
        anchor: int | None = None,
        shown: Sequence[int] = (),
    ) -> None:
        """Begins a text.

        Args:
          stop: strings that end the text.
          anchor: token that the text is decoded after (see `find_anchor`); None decodes it alone.
          shown: special tokens whose names belong to the text.
        """
        names = special_names(tokenizer).items() if stop else ()
        named = {token: name for token, name in names if any(name in string for string in stop)}
        self._decoder = _Decoder(tokenizer, anchor, shown, named)
        self._stop = tuple(stop)
        self._held: list[Piece] = []
        self.is_stopped = False

    def push(self, token: int, *, depth: int, may_stop: bool = True) -> list[Piece]:
        """Adds a token and returns what may be shown now.

        Args:
          depth: see `Piece`.
          may_stop: False: look for no stop string, as before `min_tokens`; only for first tokens.
        """
        pieces = self._decoder.push(token, depth=depth)
        return _visible(self._add(pieces) if may_stop else pieces)

    def finish(self) -> list[Piece]:
        """Ends the text; returns what was held back."""
        pieces = self._add(self._decoder.flush()) + self._held
        self._held = []
        return _visible(pieces)

    def _add(self, pieces: list[Piece]) -> list[Piece]:
        if self.is_stopped:
            return []
        if not self._stop:
            return pieces
        self._held += pieces
        held = "".join(piece.text for piece in self._held)
        matches = [(held.find(string), string) for string in self._stop if string in held]
        if matches:
            self.is_stopped = True
            _, start = min((at + len(string), at) for at, string in matches)
            shown, self._held = self._split(start)[0], []
            return shown
        # Hold back the longest suffix that begins a stop string.
        longest = min(max(map(len, self._stop)) - 1, len(held))
        suffixes = (held[-n:] for n in range(longest, 0, -1))
        begins = (suffix for suffix in suffixes if any(s.startswith(suffix) for s in self._stop))
        shown, self._held = self._split(len(held) - len(next(begins, "")))
        return shown

    def _split(self, end: int) -> tuple[list[Piece], list[Piece]]:
        """Cuts the held pieces after `end` characters."""
        head: list[Piece] = []
        tail: list[Piece] = []
        for piece in self._held:
            length = max(0, min(end, len(piece.text)))
            head.append(piece._replace(text=piece.text[:length]))
            tail.append(piece._replace(text=piece.text[length:]))
            end -= len(piece.text)
        return [piece for piece in head if piece.text], [piece for piece in tail if piece.text]


class _Decoder:
    """Decodes token by token; its output equals all tokens decoded at once.

    Bytes outside characters, and an unfinished character, decode to U+FFFD, so the last U+FFFD is
    undecided. Tokens of one byte each (`<0xE4>`) are undecided up to the next token of another
    kind, since one invalid byte spoils the whole run.
    """

    def __init__(
        self, tokenizer: Any, anchor: int | None, shown: Sequence[int], named: Mapping[int, str]
    ) -> None:
        self._tokenizer, self._shown, self._named = tokenizer, shown, named
        self._ids: list[int] = []  # the last tokens, starting between characters
        self._num_shown = 0  # characters of their text already returned
        self._depth = 0  # of the last token
        self._in_bytes = False
        if anchor is not None:
            self.push(anchor, depth=0)

    def push(self, token: int, *, depth: int) -> list[Piece]:
        if token in self._shown:
            pieces, self._ids, self._num_shown = self.flush(), [], 0
            return [*pieces, Piece(self._tokenizer.convert_ids_to_tokens(token), depth)]
        if token in self._named:  # the text continues after it as if it were not there
            return [*self.flush(), Piece(self._named[token], depth, is_hidden=True)]
        alone = _read_alone(self._tokenizer, token)
        if alone is None:
            return []
        pieces = self.flush() if self._in_bytes and not alone.is_byte else []
        self._ids.append(token)
        self._depth, self._in_bytes = depth, alone.is_byte
        if alone.is_byte:
            return pieces
        text = self._decode(self._ids)
        pieces += self._show(text.removesuffix(_UNFINISHED))
        if text.endswith(_UNFINISHED):
            self._drop_settled(text)
        else:
            # Decode with the token before, since some decoders drop a leading space.
            self._ids, self._num_shown = [token], len(alone.text)
        return pieces

    def _drop_settled(self, text: str) -> None:
        """Drops the older half of many tokens, up to a place between characters."""
        if len(self._ids) <= _MOST_UNDECIDED:
            return
        half = _MOST_UNDECIDED // 2
        for end in range(half, half - 4, -1):  # a character has at most four bytes
            settled, pending = self._decode(self._ids[:end]), self._ids[end:]
            if len(settled) <= self._num_shown and settled + self._decode(pending) == text:
                self._ids, self._num_shown = pending, self._num_shown - len(settled)
                return

    def flush(self) -> list[Piece]:
        """Returns the undecided text: no token follows that could change it."""
        return self._show(self._decode(self._ids))

    def _show(self, text: str) -> list[Piece]:
        shown, self._num_shown = self._num_shown, max(len(text), self._num_shown)
        return [Piece(text[shown:], self._depth)] if len(text) > shown else []

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)


def decode_behind(
    tokenizer: Any, anchor: int | None, tokens: Sequence[int], *, skip_special_tokens: bool = True
) -> str:
    """Decodes tokens as text that follows the anchor; None decodes them alone."""
    prefix = [] if anchor is None else [anchor]
    shown = tokenizer.decode(prefix, skip_special_tokens=True)
    text = tokenizer.decode([*prefix, *tokens], skip_special_tokens=skip_special_tokens)
    return text[len(shown) :]


def find_anchor(tokenizer: Any, tokens: Sequence[int]) -> int | None:
    """Finds the last token that is whole characters; None if there is none.

    SentencePiece decoders drop a text's leading space; after an anchor it stays.
    """
    for token in reversed(tokens):
        alone = _read_alone(tokenizer, token)
        if alone is not None and not alone.is_byte and _UNFINISHED not in alone.text:
            return token
    return None


def token_bytes(tokenizer: Any, token: int) -> bytes | None:
    """Reads the bytes of a token from its name; None if the name does not show them.

    Byte tokens have names such as <0xE4>; byte-level tokenizers have a letter per byte.
    """
    name = tokenizer.convert_ids_to_tokens(token) or ""
    if _BYTE.fullmatch(name):
        return bytes([int(name[1:-1], 16)])
    letters = byte_letters()
    return bytes(map(letters.__getitem__, name)) if name and letters.keys() >= set(name) else None


@lru_cache(maxsize=1)
def byte_letters() -> dict[str, int]:
    """Maps letters of byte-level names to bytes; unprintable bytes have letters from U+0100."""
    kept = {*range(33, 127), *range(161, 173), *range(174, 256)}
    unprintable = (byte for byte in range(256) if byte not in kept)
    moved = {chr(256 + index): byte for index, byte in enumerate(unprintable)}
    return {chr(byte): byte for byte in kept} | moved


class _Alone(NamedTuple):
    """Facts about a token by itself."""

    is_byte: bool  # says its name
    text: str


@lru_cache(maxsize=1 << 17)
def _read_alone(tokenizer: Any, token: int) -> _Alone | None:
    """Reads a token by itself; None if it has no text."""
    name = tokenizer.convert_ids_to_tokens(token)
    if name is None or token in special_names(tokenizer):  # or an id beyond the tokenizer's
        return None
    text = tokenizer.decode([token], skip_special_tokens=True)
    return _Alone(_BYTE.fullmatch(name) is not None, text)


@lru_cache(maxsize=8)
def special_names(tokenizer: Any) -> dict[int, str]:
    """Names of special tokens, which are no text."""
    added = tokenizer.added_tokens_decoder.items()
    return {token: content.content for token, content in added if content.special}


def _visible(pieces: list[Piece]) -> list[Piece]:
    return [piece for piece in pieces if not piece.is_hidden]


@lru_cache(maxsize=8)
def longest_token(tokenizer: Any) -> int:
    """Most characters of a token's name; in a text there may be a space before it."""
    return max(map(len, tokenizer.get_vocab()))
