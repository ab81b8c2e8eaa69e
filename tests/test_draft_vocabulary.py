"""Draft vocabularies: counted as training counts, read strictly, lossless in decoding."""

import json
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden import METHODS_E3, load_golden
from models import tiny_llama
from oracle import Shape
from programs import (
    DRAFT,
    TARGET,
    Runs,
    config_file,
    copy_model,
    generate,
    refusal,
    summary,
    write_lines,
)

from infer.bench.__main__ import main as bench
from infer.generate import main as generate_main
from poss_jax.checkpoint.record import (
    DraftVocabulary,
    read_draft_vocabulary,
    with_vocabulary,
    write_draft_vocabulary,
)
from poss_jax.config.decoding import EngineConfig
from poss_jax.config.models import DraftConfig, TreeConfig
from poss_jax.config.reading import UserError, load_config
from poss_jax.config.training import TrainConfig
from poss_jax.data.rows import Rows
from poss_jax.engine.engine import Engine
from train.draft_vocab import main
from train.training import open_stage
from train.vocabulary import choose_tokens, count_trained, coverage_of, size_for_coverage

LLAMA = tiny_llama()
TREE = TreeConfig(depth=3, top_k=3, total_tokens=12)


def test_tokens_that_are_trained_on_are_counted() -> None:
    tokens = np.array([[4, 1, 1, 2], [1, 5, 0, 0]], np.int32)
    mask = np.array([[0, 1, 1, 1], [1, 1, 0, 0]], bool)
    counts = count_trained(Rows(tokens, mask, np.ones_like(tokens)), 7)
    assert counts.tolist() == [0, 3, 1, 0, 0, 1, 0]


def test_the_most_frequent_are_chosen_and_ties_go_to_the_lowest_id() -> None:
    counts = np.array([0, 5, 2, 9, 2, 2, 0])
    for size, chosen in ((2, [1, 3]), (4, [1, 2, 3, 4]), (6, [0, 1, 2, 3, 4, 5])):
        assert choose_tokens(counts, size).tolist() == chosen
    for size in (1, 8):
        with pytest.raises(UserError, match=f"want a size of 2 to 7, .*, got {size}"):
            choose_tokens(counts, size)


def test_the_smallest_size_of_a_coverage() -> None:
    counts = np.array([0, 5, 2, 9, 2, 2, 0])
    sizes = {share: size_for_coverage(counts, share) for share in (0.1, 0.7, 0.71, 0.9, 0.95, 1)}
    assert sizes == {0.1: 2, 0.7: 2, 0.71: 3, 0.9: 4, 0.95: 5, 1: 5}
    for share, size in sizes.items():
        assert coverage_of(counts, choose_tokens(counts, size)) >= share


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ({"tokens": [3, 1]}, "tokens: want ascending ids below vocab_size 9"),
        ({"tokens": [3, 3]}, "tokens: want ascending ids below vocab_size 9"),
        ({"tokens": [3, 9]}, "tokens: want ascending ids below vocab_size 9"),
        ({"tokens": [-1, 3]}, "tokens.0: Input should be greater than or equal to 0, got -1"),
        ({"tokens": [3]}, "tokens: "),
        ({"tokens": [True, 3]}, "tokens.0: want a number, got True"),
        ({"tokens": None}, "missing key 'tokens'"),
        ({"vocab_size": 10}, "want a draft vocabulary of 9 tokens, .* got one made for 10; count"),
        ({"coverage": 2}, "coverage: "),
        ({"ids": []}, "unknown key 'ids'; want one of vocab_size, tokens"),
    ],
)
def test_what_is_refused(values: dict[str, Any], error: str, tmp_path: Path) -> None:
    path = tmp_path / "v.json"
    values = {"vocab_size": 9, "tokens": [1, 3]} | values
    path.write_text(json.dumps({k: v for k, v in values.items() if v is not None}))
    with pytest.raises(UserError, match=error) as caught:
        read_draft_vocabulary(path, 9)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def count(runs: Runs, folder: Path, *arguments: str) -> list[str]:
    return ["--config", config_file(runs, folder, DRAFT), *arguments]


def test_the_rows_of_training_are_counted(runs: Runs, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "v.json"
    main(count(runs, tmp_path, "--size", "40", "--output", str(path)))
    printed = capsys.readouterr().out
    config = load_config(TrainConfig, config_file(runs, tmp_path, DRAFT))
    rows = open_stage(config, tmp_path).rows
    counts = np.bincount(rows.tokens[rows.loss_mask], minlength=300)
    found = json.loads(path.read_text())
    assert list(found) == ["vocab_size", "tokens", "coverage", "source"]
    assert (found["vocab_size"], len(found["tokens"])) == (300, 40)
    assert counts[found["tokens"]].min() >= np.delete(counts, found["tokens"]).max()
    assert found["coverage"] == pytest.approx(np.sort(counts)[-40:].sum() / counts.sum())
    assert found["source"]["trained_tokens"] == counts.sum()
    assert found["source"]["data"]["sequence_length"] == 32
    row = f"| 40 | {found['coverage']:.2%} | "
    assert row in printed and "| 300 | 100.00% | 100.00% |" in printed
    assert json.loads(printed.splitlines()[-1])["output"] == str(path)
    assert "never occur" not in printed


def test_coverage_overrides_and_tokens_that_never_occur(runs, tmp_path, capsys) -> None:
    changes = "data.sequence_length=16", "--coverage", "0.5", "data.max_documents=20"
    main(count(runs, tmp_path, *changes))
    few = summary(capsys)
    assert 2 <= few["size"] < 40 and few["coverage"] >= 0.5 and few["output"] is None
    main(count(runs, tmp_path, "--size", "300"))
    printed = capsys.readouterr().out
    assert " of the 300 tokens never occur: the lowest ids" in printed
    main(count(runs, tmp_path))
    assert summary(capsys) == {"vocab_size": 300, "output": None}


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--size", "301"], "want a size of 2 to 300, the number of tokens of the target, got 301"),
        (["--size", "1"], "argument --size: want a number, at least 2, got 1; see --help"),
        (["--coverage", "0"], "--coverage: want a share above 0 and up to 1, got 0.0"),
        (["--coverage", "nan"], "--coverage: want a share above 0 and up to 1, got nan"),
        (["--coverage", ".5", "--size", "9"], "not allowed with argument"),
        (["--output", "v.json"], "--output wants a draft vocabulary; add --size or --coverage"),
        (["--size", "9", "--output", "."], "output . exists; name another file or remove it"),
    ],
)
def test_what_count_refuses(runs: Runs, arguments: list[str], error: str, tmp_path: Path) -> None:
    assert error in refusal(main, *count(runs, tmp_path, *arguments))


def test_a_target_has_no_draft_vocabulary(runs: Runs, tmp_path: Path) -> None:
    error = "want the config of a draft (stage: draft), got one of a target"
    assert error in refusal(main, "--config", config_file(runs, tmp_path, TARGET))


def test_given_to_programs_it_leaves_texts_as_they_are(runs, tmp_path) -> None:
    target, draft = runs.model("target"), runs.model("poss2")
    path = tmp_path / "v.json"
    main(count(runs, tmp_path, "--size", "40", "--output", str(path)))
    tokens = json.loads(path.read_text())["tokens"]
    limited = copy_model(draft, tmp_path / "limited", draft_vocabulary=tokens)
    prompts = write_lines(tmp_path / "p.jsonl", {"prompt": "def area_7"}, {"prompt": "def"})
    texts, rounds, tree = [], [], ("--tree", "2/2/5")
    for folder, *options in (
        (None,),
        (draft,),
        (draft, "--draft-vocabulary", str(path)),
        (limited,),
    ):
        lines = generate(target, folder, tmp_path, "--prompts", prompts, *tree, *options)
        texts.append([line["output_ids"] for line in lines])
        rounds.append([line["accepted_per_round"] for line in lines])
    assert texts[1:] == texts[:-1]
    assert rounds[2] == rounds[3]


def test_refusals_of_programs(runs: Runs, tmp_path: Path) -> None:
    target, draft = runs.model("target"), runs.model("eagle")
    path = tmp_path / "v.json"
    write_draft_vocabulary(path, DraftVocabulary(vocab_size=61, tokens=(1, 2)))
    given = ["--target", target, "--draft-vocabulary", str(path)]
    error = "want a draft vocabulary of 300 tokens, which the target has, got one made for 61"
    assert error in refusal(generate_main, *given, "--prompt", "x", "--draft", draft)
    assert error in refusal(bench, *given, "--draft", f"E={draft}")


SUBSET = np.flatnonzero(np.arange(LLAMA.vocab_size) % 6 != 2)  # 51 of 61


@pytest.fixture(scope="module")
def shape() -> Shape:
    config = DraftConfig(layer=LLAMA, positions_per_specialist=(1, 2))
    return Shape(LLAMA, config, TREE, 3, is_sampled=True, vocabulary=SUBSET.tolist())


def test_speculative_equals_autoregressive(shape: Shape) -> None:
    shape.check_pairs()


def test_ids_off_by_one_are_noticed(shape: Shape) -> None:
    shape = copy(shape)
    right, shape.lengths_seen = shape._draft_ids, set()
    shape._draft_ids = lambda tokens: np.where(
        right(tokens) < 0, -1, (right(tokens) + 1) % len(SUBSET)
    )
    with pytest.raises(AssertionError):
        shape.check_pairs()


def test_a_draft_with_its_own_head_keeps_its_vocabulary(tmp_path: Path) -> None:
    golden = load_golden(tmp_path, METHODS_E3[-1])
    path = tmp_path / "v.json"
    write_draft_vocabulary(path, DraftVocabulary(vocab_size=260, tokens=(1, 2)))
    settings = EngineConfig(draft_vocabulary=str(path))
    engine = Engine(golden.target_record, golden.target, settings)
    with pytest.raises(UserError, match="a draft with its own head keeps its vocabulary"):
        engine.load_draft(golden.draft_folder)
    record = replace(golden.draft_record, draft_vocabulary=None)
    with pytest.raises(UserError, match="a draft with its own head"):
        with_vocabulary(record, (1, 2), origin="x")
