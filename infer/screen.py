"""Text on standard output, as it lands."""

import sys
from itertools import groupby

from poss_jax.engine.answers import Chunk
from poss_jax.program.running import text_marks


class Screen:
    """Writes chunks to standard output, each at once.

    Accepted drafts are green on a terminal (or with FORCE_COLOR), and in brackets elsewhere (or
    with NO_COLOR).
    """

    def __init__(self, *, shows_drafts: bool) -> None:
        self._marks = text_marks() if shows_drafts else ("", "")
        self._is_in_line = False
        if shows_drafts:
            sys.stderr.write("accepted drafts look {}like this{}\n".format(*self._marks))

    def show(self, chunk: Chunk) -> None:
        """Writes the text that a round added."""
        before, after = self._marks
        parts = []
        for is_drafted, pieces in groupby(chunk.pieces, lambda piece: piece.is_drafted):
            text = "".join(piece.text for piece in pieces)
            parts.append(f"{before}{text}{after}" if is_drafted else text)
        self._is_in_line = True
        sys.stdout.write("".join(parts))
        sys.stdout.flush()

    def end_line(self) -> None:
        """Begins a new line, if an answer was begun."""
        if self._is_in_line:
            sys.stdout.write("\n")
            self._is_in_line = False
