"""Answers of a benchmark made up by hand, and the report of them."""

from collections import Counter
from collections.abc import Iterable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from programs import write_lines

from infer.bench.journal import Answer, Cell, Key, Turn
from infer.bench.phases import phases_to_round
from infer.bench.summary import Grid, make_grid, summarise_group
from poss_jax.config.decoding import SamplingConfig
from poss_jax.config.reading import config_to_dict

N = 12
TREE = "--tree-depth 3 --tree-top-k 2 --tree-total-tokens 6".split()  # compiled by other tests, too


def write_prompts(folder: Path) -> str:
    """Three prompts, one of them token ids."""
    lines = [{"prompt": "def area_7"}, {"prompt_ids": [0, 70, 71]}, {"prompt": "heig"}]
    return write_lines(folder / "prompts.jsonl", *lines)


# Two questions: the output of one is diverse, the other's loops
DIVERSE, LOOPING = [1, 2, 3, 4, 5, 6, 7, 8], [9] * 8


CELL = Cell("made up", 0.0, 0)


def answer(
    key: tuple[int, str, int], output: list[int], accepted: list[int], offered: list[int], s: float
) -> Answer:
    turn = Turn(
        text="",
        output_ids=output,
        accepted=accepted,
        offered=offered,
        copied=accepted[:1],
        seconds=s,
        first_token_seconds=s / 4,
    )
    return Answer(Key(CELL, *key), f"q{key[2]}", "writing", [turn])


def made_up_answers() -> list[Answer]:
    """Two passes; in the second, an output of the draft differs."""
    zeros, other = [0] * 7, [9] * 7 + [8]
    return [
        answer((0, "plain", 0), DIVERSE, zeros, zeros, 1.0),
        answer((0, "plain", 1), LOOPING, zeros, zeros, 3.0),
        answer((1, "plain", 0), DIVERSE, zeros, zeros, 3.0),
        answer((1, "plain", 1), LOOPING, zeros, zeros, 3.0),
        answer((0, "draft", 0), DIVERSE, [3, 1, 1], [4, 2, 1], 0.5),
        answer((0, "draft", 1), LOOPING, [4, 0], [4, 1], 0.5),
        answer((1, "draft", 0), DIVERSE, [3, 1, 1], [4, 2, 1], 0.5),
        answer((1, "draft", 1), other, [4, 0], [4, 1], 1.5),
    ]


def grids_of(answers: Iterable[Answer], *, repeats: int, num_questions: int) -> dict[str, Grid]:
    """The grid of every method."""
    by_key = {answer.key: answer for answer in answers}
    size = {"repeats": repeats, "num_questions": num_questions}
    names = dict.fromkeys(key.method for key in by_key)
    return {name: make_grid(by_key, [CELL], name, **size) for name in names}


def made_up_group() -> dict[str, Any]:
    return summarise_group(grids_of(made_up_answers(), repeats=2, num_questions=2), "plain")


def value(number: dict[str, Any]) -> Any:
    return number["value"]


def made_up_card(milliseconds: dict[str, float]) -> dict[str, Any]:
    """Phases of a method, all with the same costs."""
    floor = {"bytes": 2.5e6, "flops": 1e7, "floor_milliseconds": 0.25, "floor_to_measured": 0.125}
    memory = {"draft_parameters": 1234, "draft_bytes": 4936}
    memory |= {"target_cache_bytes_per_token": 1024, "draft_cache_bytes_per_token": 64}
    return {
        "phase_milliseconds": milliseconds,
        "phases_to_round": phases_to_round(milliseconds),
        "costs": {"verify": floor},
        "first_token_seconds": {"cold": 1.5, "warm": 0.0125},
        "memory": memory,
    }


def made_up_report() -> dict[str, Any]:
    steps = {"plain": 2.5, "loop": 3, "loop_to_plain": 1.2, "floor": 1.5, "floor_to_loop": 0.5}
    device = {"name": "abacus", "bytes_per_second": 1e10, "flops_per_second": 2e11}
    plain = made_up_card({"verify": 2, "accept": 0.5, "commit": 0.25, "round": 2.5})
    parts = {"draft": 1.5, "draft/level0": 1.5, "verify": 2, "accept": 0, "commit": 0.5}
    draft = made_up_card(parts | {"round": 5})
    pieces = [["a < b", 0], ["def", 1], [" f(", 2], ["x", 0]]
    example = {"prompt": "# a & b\n", "answers": {"draft": pieces}}
    about = {"set": "made up", "temperature": 0.0, "seeds": [0], "example": example}
    return {
        "baseline": "plain",
        "target": "T",
        "max_new_tokens": 8,
        "repeats": 2,
        "groups": [about | made_up_group()],
        "methods": {
            "plain": plain | {"compile_seconds": 1, "tree": None, "drafting": "coupled"},
            "draft": draft | {"compile_seconds": 2.25, "tree": "4/2/9", "drafting": "coupled"},
        },
        "autoregressive_step_milliseconds": steps,
        "roofline": {"device": device, "flops_by_rows": {"int8": 4e11}},
        "device": "abacus",
        "config": {
            "target": "T",
            "sampling": config_to_dict(SamplingConfig()),
            "drafting": "coupled",
        },
        "provenance": {"command": ["python", "-m", "infer.bench"], "versions": {"jax": "1"}},
    }


class Page(HTMLParser):
    """The parts of a page that are asked about."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.links: list[str] = []
        self.coloured: list[tuple[str, str]] = []
        self.names: list[str | None] = []
        self.rows: list[list[str]] = []
        self._colour = ""
        self._is_in_cell = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        given = dict(attrs)
        self._colour = given.get("class") or "" if tag == "span" else ""
        self.links += [given[key] or "" for key in ("src", "href") if key in given]
        if tag == "svg":
            self.names.append(given.get("aria-label") if given.get("role") == "img" else None)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
            self._is_in_cell = True

    def handle_endtag(self, tag: str) -> None:
        self._is_in_cell = self._is_in_cell and tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        if self._is_in_cell:
            self.rows[-1][-1] += data
        if self._colour.startswith("d"):
            self.coloured.append((self._colour, data))
        self._colour = ""
