"""Draws docs/drafts.svg: an answer of the default model, drafted tokens coloured by position.

python examples/picture.py
python examples/picture.py --question "What is a prime number?" --output prime.svg
"""

import argparse
from collections.abc import Iterable, Iterator
from pathlib import Path
from xml.sax.saxutils import escape

import poss_jax
from poss_jax.engine.text import Piece

QUESTION = "What are the benefits of regular exercise?"
COLOURS = ("#9ecbff", "#7ee2b8", "#ffd866", "#ffab70", "#f692ce", "#c8a6ff")
"""Background of a token by the position it was drafted at; the last one serves those beyond."""

_WIDTH, _COLUMNS = 860, 96
_CHARACTER, _LINE = 8.4, 22
_STYLE = f"width='{_WIDTH}' font-family='ui-monospace, Menlo, Consolas, monospace' font-size='14'"


def draw(prompt: str, rounds: Iterable[Iterable[Piece]]) -> str:
    """Draws a prompt and its answer.

    Args:
      prompt: text before the answer.
      rounds: pieces of text that each round added.

    Returns:
      The text of an SVG file.
    """
    rounds = [list(pieces) for pieces in rounds]
    places = list(_place([Piece(prompt, 0), *(piece for one in rounds for piece in one)]))
    deepest = max(piece.depth for one in rounds for piece in one)
    num_tokens = sum(1 for one in rounds for piece in one if piece.text)
    height = (places[-1][1] + 5) * _LINE
    boxes, texts = [], []
    for column, line, text, depth in places:
        x, y = 24 + column * _CHARACTER, (line + 1.6) * _LINE
        if depth:
            boxes.append(_box(x, y, len(text), depth))
        texts.append(f"<text x='{x:.1f}' y='{y:.1f}' xml:space='preserve'>{escape(text)}</text>")
    y = height - 1.2 * _LINE
    legend = f"{num_tokens} tokens in {len(rounds)} passes of the target. Drafted at position"
    texts.append(f"<text x='24' y='{y:.1f}'>{legend}</text>")
    for depth in range(1, deepest + 1):
        x = 24 + (len(legend) + 3 * depth - 1) * _CHARACTER
        boxes.append(_box(x - 4, y, 2, depth))
        texts.append(f"<text x='{x:.1f}' y='{y:.1f}'>{depth}</text>")
    return "\n".join(
        [
            f"<svg xmlns='http://www.w3.org/2000/svg' {_STYLE} height='{height:.0f}'>",
            "<rect width='100%' height='100%' rx='8' fill='#f6f8fa'/>",
            *boxes,
            *texts,
            "</svg>\n",
        ]
    )


def _place(pieces: Iterable[Piece]) -> Iterator[tuple[int, int, str, int]]:
    """Yields (column, line, text, depth) of every stretch of text that has no line end in it."""
    column = line = 0
    for piece in pieces:
        for number, part in enumerate(piece.text.expandtabs(4).split("\n")):
            if number:
                column, line = 0, line + 1
            if len(part) <= _COLUMNS < column + len(part):
                column, line, part = 0, line + 1, part.lstrip(" ")
            while part:
                if column == _COLUMNS:
                    column, line = 0, line + 1
                fits, part = part[: _COLUMNS - column], part[_COLUMNS - column :]
                yield column, line, fits, piece.depth
                column += len(fits)


def _box(x: float, y: float, num_characters: int, depth: int) -> str:
    colour = COLOURS[min(depth, len(COLOURS)) - 1]
    width = num_characters * _CHARACTER - 1
    return f"<rect x='{x:.1f}' y='{y - 15:.1f}' width='{width:.1f}' height='20' fill='{colour}'/>"


def main(arguments: list[str] | None = None) -> None:
    """Answers the question with a draft and writes the picture."""
    raw = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--question", default=QUESTION, help="Question to answer.")
    parser.add_argument("--max-new-tokens", type=int, default=80, help="Most tokens of the answer.")
    parser.add_argument("--output", type=Path, default=Path("docs/drafts.svg"))
    args = parser.parse_args(arguments)
    draft = next(iter(poss_jax.default_drafts().values()))
    engine = poss_jax.Engine.load(poss_jax.default_target(), draft)
    chat = [{"role": "user", "content": args.question}]
    chunks = engine.stream(chat, max_new_tokens=args.max_new_tokens)
    args.output.write_text(draw(f"{args.question}\n\n", [chunk.pieces for chunk in chunks]))


if __name__ == "__main__":
    main()
