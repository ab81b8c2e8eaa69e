"""The numbers and tables of a benchmark, worked out by hand, and its page."""

import json
import random
from dataclasses import replace

import pytest
from made_up import (
    DIVERSE,
    Page,
    answer,
    grids_of,
    made_up_answers,
    made_up_group,
    made_up_report,
    value,
)

from infer.bench import report as report_module
from infer.bench.journal import Answer, write_answer_files
from infer.bench.report import describe, format_brief, format_report, write_page
from infer.bench.summary import Grid, summarise, summarise_group


def test_text_is_the_same_up_to_the_first_difference():
    def grid(*outputs: list[int]) -> Grid:
        return Grid([[[answer((0, "m", i), ids, [], [], 1.0) for i, ids in enumerate(outputs)]]])

    plain = grid([1, 2, 3, 4], [5, 6], [7, 8])
    other = grid([1, 2, 9, 4], [5, 6], [9])
    assert summarise(other, plain)["same_text"] == 4 / 8


def test_numbers_of_a_method():
    rows = made_up_group()["methods"]["draft"]
    one, both = rows["not_looping"], rows["all"]
    assert value(one["acceptance_length"]) == pytest.approx(1 + 5 / 3)
    assert value(one["pooled_acceptance_length"]) == pytest.approx(1 + 5 / 3)
    # 4 tokens before the end of the 8, only the first round had begun
    assert value(one["whole_rounds_acceptance_length"]) == 4
    # offered 4 2 1, accepted 3 1 1: three rounds of three, one of two, the only one, not it
    assert value(one["positionwise_acceptance"]) == [1, 1 / 2, 1, 0]
    assert value(one["positions_reached"]) == pytest.approx([1, 1 / 3, 1 / 3, 0])
    assert (value(one["copied_per_round"]), value(both["copied_per_round"])) == (3 / 3, 7 / 5)
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


def test_rounds_deeper_than_the_table_count_as_a_whole():
    plain = answer((0, "plain", 0), DIVERSE, [0] * 11, [0] * 11, 1.0)
    deep = answer((0, "draft", 0), DIVERSE, [10], [12], 1.0)
    group = summarise_group(grids_of([plain, deep], repeats=1, num_questions=1), "plain")
    rows = group["methods"]["draft"]["all"]
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


def test_whole_rounds_are_counted_as_by_vllm():
    """vLLM stops with the round that reaches its limit, and counts all that this accepted."""
    limit, depth, draw = 33, 5, random.Random(0)
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


def of_method(answer: Answer, method: str) -> Answer:
    return replace(answer, key=answer.key._replace(method=method))


def test_drafts_are_compared_without_looping_answers_too():
    answers = made_up_answers()
    answers += [of_method(answer, "other") for answer in answers if answer.key.method == "draft"]
    group = summarise_group(grids_of(answers, repeats=2, num_questions=2), "plain")
    assert len(group["comparisons"]) == 1
    (pair,) = group["comparisons_not_looping"]
    assert pair["acceptance_length"]["p_value"] == 1  # of the one question that is left
    text = format_report(made_up_report() | {"groups": [made_up_report()["groups"][0] | group]})
    assert text.count("| other - draft |") == 2


def test_answers_without_a_round_are_left_out_of_acceptance():
    """As where the first token ends the text, or is all that was asked for."""
    one, none = answer((0, "d", 0), DIVERSE, [3], [4], 1.0), answer((0, "d", 1), [1], [], [], 1.0)
    answers = [of_method(known, name) for name in ("plain", "d", "e") for known in (one, none)]
    answers.append(answer((0, "e", 0), DIVERSE, [5], [6], 1.0))
    grids = grids_of(answers, repeats=1, num_questions=2)
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


def test_answer_files_are_those_of_the_last_report_and_have_names_of_their_own(tmp_path):
    foreign = tmp_path / "eagle" / "model.json"
    foreign.parent.mkdir()
    foreign.write_text("{}")
    one = answer((0, "a b", 0), DIVERSE, [3], [4], 1.0)
    same = of_method(one, "a-b")
    write_answer_files([one], tmp_path)
    write_answer_files([one, same], tmp_path)
    assert len(list(tmp_path.glob("eagle/*/*/*.jsonl"))) == 2
    write_answer_files([same], tmp_path)
    assert len(list(tmp_path.glob("spec-bench/*/*/*.jsonl"))) == 1 and foreign.exists()


def test_the_original_scripts_find_the_numbers_of_the_table(tmp_path):
    """The arithmetic of the evaluation scripts of PosS and Spec-Bench, on the files written."""
    write_answer_files(made_up_answers(), tmp_path)
    both = made_up_group()["methods"]["draft"]["all"]
    name = "made%20up/model_answer/draft-temperature-0-seed-0.jsonl"
    files = [(tmp_path / kind / name).read_text() for kind in ("eagle", "spec-bench")]
    lines = [[json.loads(line) for line in text.splitlines()] for text in files]
    eagle, spec = ([line["choices"][0] for line in of_file] for of_file in lines)
    per_question = [sum(one["accept_length"]) / len(one["accept_length"]) + 1 for one in eagle]
    assert sum(per_question) / 2 == pytest.approx(value(both["acceptance_length"]))
    pooled = [count for one in spec for count in one["accept_lengths"]]
    assert sum(pooled) / len(pooled) == pytest.approx(value(both["pooled_acceptance_length"]))
    for choice in (*eagle, *spec):
        assert choice["new_tokens"] == [8] and choice["wall_time"] == [0.5]
    assert (lines[1][1]["question_id"], lines[1][1]["category"]) == ("q1", "writing")


def test_report_is_printed_as_tables():
    expected = """\
8 new tokens, 2 repeats; in brackets 95 % intervals over questions, where there are 8 or more

## made up, temperature 0

2 questions; 1 of them loop (distinct 4-grams below 0.5)

| method | acceptance length | pooled | tokens/s | speed-up | equal |
|---|---|---|---|---|---|
| plain | 1.00 | 1.00 | 3 | 1.00 | 2 of 2 |
| draft | 2.83 | 2.80 | 11 | 3.33 | 1 of 2 |

<details><summary>positions and times</summary>

| method | accepted at positions 1, 2, ... | copied | first token ms | p90 | ms per token | p90 |
|---|---|---|---|---|---|---|
| plain |  |  | 750.0 | 750.0 | 375.00 | 375.00 |
| draft | 80%, 67%, 100%, 50% | 1.40 | 125.0 | 300.0 | 62.50 | 150.00 |

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
        "abacus: 10.0 GB/s, 200 GFLOP/s, 400 with int8 weights",
        "| plain | verify | 2.50 | 0.010 | 0.250 | 2.000 | 12% |",
    ):
        assert table in text.splitlines()


def test_texts_of_a_method_with_sampled_drafts_are_not_compared():
    report = made_up_report()
    report["methods"]["draft"]["drafting"] = "sampled"
    lines = format_report(report).splitlines()
    assert lines[1].startswith("outputs are not compared: with sampled drafts")
    assert next(line for line in lines if "| plain |" in line).endswith("| 2 of 2 |")
    assert next(line for line in lines if "| draft |" in line).endswith("|  |")
    assert len(describe(report)) == 2 and "2 of 2" in format_brief(report)
    assert "draft               2.83      10.7             3.33\n" in format_brief(report)


def test_a_terminal_is_shown_what_fits_it():
    report = made_up_report()
    expected = """\
made up, temperature 0, 2 questions
       acceptance length  tokens/s  speed-up (95 %)  equal texts
plain               1.00       3.2             1.00       2 of 2
draft               2.83      10.7             3.33       1 of 2

draft wrote 2 texts 3.33 x as fast as decoding without a draft.
Tokens per pass of the target, all texts pooled: draft 2.80; without a draft 1.
1 of 2 texts with drafts equal those without, token for token."""
    assert format_brief(report) == expected
    rows = report["groups"][0]["methods"]["draft"]["all"]
    rows["equal_outputs"] = 2
    assert describe(report)[0].startswith("draft wrote the same 2 texts 3.33 x as fast")
    report["methods"]["draft"]["saves"] = 0.2
    assert describe(report)[2] == (
        "With 32,000 tokens (poss draft-vocab) rounds would read less: draft 20%."
    )
    only_plain = report | {"methods": {"plain": report["methods"]["plain"]}}
    assert describe(only_plain) == ["Without a draft: 3.2 tokens/s."]


@pytest.mark.parametrize("has_plots", [True, False])
def test_the_page_holds_everything_and_needs_no_network(tmp_path, monkeypatch, has_plots):
    if has_plots:
        pytest.importorskip("matplotlib")
    else:
        monkeypatch.setattr(report_module, "find_spec", lambda name: None)
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


def test_the_page_has_no_negative_time_and_no_floor_above_a_time(tmp_path):
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
