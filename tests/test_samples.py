"""Predictions of held-out text, laid out to be looked at."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from poss_jax.data.rows import Rows
from poss_jax.learn.validation import Predictions
from train.loop import format_samples

LETTERS = "abcdefghijklmnop|\n"


def stage(text: str, documents: str, lookahead: int) -> Any:
    tokens = np.array([[LETTERS.index(letter) for letter in text]])
    rows = Rows(tokens, np.ones(tokens.shape, bool), np.array([[int(d) for d in documents]]))
    tokenizer = SimpleNamespace(decode=lambda ids: "".join(LETTERS[i] for i in ids))
    return SimpleNamespace(validation_rows=rows, lookahead=lookahead, tokenizer=tokenizer)


def predictions(labels: str, trained: str, *by_depth: str) -> Predictions:
    def ids(text: str) -> list[int]:
        return [LETTERS.index(letter) for letter in text]

    return Predictions(
        tokens=np.array([[ids(depth)] for depth in by_depth]),
        labels=np.array([ids(labels)]),
        is_trained=np.array([[mark == "x" for mark in trained]]),
    )


def test_a_draft_is_shown_from_the_token_after_its_feature() -> None:
    # The chain from row 1 reads a, b and c; its depths sit at rows 1 and 2 and predict d and e.
    shown = predictions("cdefgh", " xx   ", "..d...".replace(".", "a"), "aagaaa")
    shown = shown._replace(tokens=np.array(shown.tokens))
    shown.tokens[0, 0, 1] = LETTERS.index("d")
    out = format_samples(stage("abcdef", "111111", 2), shown, num_samples=4)
    assert out.splitlines()[2:] == [
        "## Row 0",
        "",
        "| text before | depth 0 | depth 1 |",
        "|---|---|---|",
        "| `` abc `` | `` d `` | ~~`` g ``~~ `` e `` |",
    ]


def test_text_before_is_of_the_same_document() -> None:
    shown = predictions("bcdefg", "    x ", "aaaaaf")
    line = format_samples(stage("abcdef", "111222", 1), shown, num_samples=1).splitlines()[-1]
    assert line == "| `` de `` | ~~`` a ``~~ `` f `` |"


def test_signs_of_tables_and_line_ends_are_shown_as_text() -> None:
    shown = predictions("||||||", "   x  ", "\n\n\n\n\n\n")
    line = format_samples(stage("ab|\nef", "111111", 1), shown, num_samples=1).splitlines()[-1]
    assert line == "| `` ab\\|\\n `` | ~~`` \\n ``~~ `` \\| `` |"


@pytest.mark.parametrize(
    ("trained", "rows"),
    [
        ("xxxxxxxxxxxx", [0, 3, 7, 10]),
        (" xx xx      ", [1, 4]),
        (" x x x x x x", []),  # two depths need two rows
    ],
)
def test_places_are_spread_over_what_is_trained(trained: str, rows: list[int]) -> None:
    text = "abcdefghijkl"
    out = format_samples(stage(text, "1" * 12, 1), predictions(text, trained, text, text), 1)
    lines = out.splitlines()[6:]
    assert [line.split(" ")[2] for line in lines] == [text[: row + 1] for row in rows]
