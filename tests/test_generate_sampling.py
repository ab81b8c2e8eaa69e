"""The generation program's sampling: settings per line, by every way the same answers."""

from pathlib import Path
from typing import Any

import pytest
from programs import NUM_NEW, Runs, generate, write_lines

from poss_jax.engine.engine import Engine

# One program for all lines: a bias, if only of others, makes their shapes the same.
SAMPLED = ["--temperature", "1.2", "--top-p", "0.95", "--seed", "5", "--logit-bias", "299=1"]
OWN = [
    {"prompt": "def area_7"},
    {"prompt": "def area_7", "sampling": {"seed": 5}},
    {"prompt": "def area_7"},
    {"prompt": "def", "sampling": {"temperature": 0}},
    {"prompt": "def", "sampling": {"logit_bias": {"70": 1000}, "top_k": 3}},
]
TREE = "{depth: 3, top_k: 2, total_tokens: 6}"


def sample(runs: Runs, folder: Path, *options: str, draft: bool = True) -> list[Any]:
    (folder / "trees").write_text(f"1: {TREE}")
    prompts = write_lines(folder / "prompts", *OWN)
    models = runs.model("target"), runs.model("poss2") if draft else None
    options = ("--prompts", prompts, "--trees", str(folder / "trees"), *SAMPLED, *options)
    return generate(*models, folder, *options)


@pytest.fixture(scope="module")
def sampled(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return sample(runs, tmp_path_factory.mktemp("sampled"))


def test_settings_of_a_line_win_and_are_written_down(sampled: list[Any]) -> None:
    first, same_seed, other_seed, greedy, biased = (line["sampling"] for line in sampled)
    assert first == same_seed
    assert (first["temperature"], first["top_p"], first["seed"]) == (1.2, 0.95, 5)
    assert first == other_seed | {"seed": 5} and other_seed["seed"] != 5
    assert (greedy["temperature"], greedy["top_p"]) == (0, 0.95)
    assert (biased["logit_bias"], biased["top_k"]) == ({"70": 1000}, 3)
    texts = [line["output_ids"] for line in sampled]
    assert texts[0] == texts[1] != texts[2]
    assert texts[4] == [70] * NUM_NEW
    assert any(line["mean_acceptance_length"] > 1 for line in sampled[:4])


def test_sampled_answers_are_the_same_without_a_draft_and_in_batches(runs, sampled, tmp_path):
    for lines in (sample(runs, tmp_path, draft=False), sample(runs, tmp_path, "--batch-size", "3")):
        for key in ("output_ids", "text", "sampling"):
            assert [line[key] for line in lines] == [line[key] for line in sampled]


def test_a_written_line_is_a_prompt_that_brings_back_its_answer(runs, sampled, tmp_path) -> None:
    record = {key: sampled[2][key] for key in ("prompt_ids", "sampling")}
    prompts = write_lines(tmp_path / "records", record)
    (again,) = generate(runs.model("target"), None, tmp_path, "--prompts", prompts)
    assert again["output_ids"] == sampled[2]["output_ids"]


def test_another_way_to_draft_can_be_chosen(runs, tmp_path, monkeypatch) -> None:
    load, seen = Engine.load, []
    monkeypatch.setattr(
        Engine,
        "load",
        lambda *args, **options: seen.append(args[2].drafting) or load(*args, **options),
    )
    for options in ([], ["--drafting", "sampled"]):
        generate(runs.model("target"), None, tmp_path, "--prompt", "def area_7", *options)
    assert seen == ["coupled", "sampled"]
