"""Options that several programs share: sampling settings and trees."""

import os
from pathlib import Path

import pytest
from programs import refusal

from poss_jax import SamplingConfig, TreeConfig
from poss_jax.config import CPU_TREE
from poss_jax.engine import Trees
from poss_jax.program import Parser
from poss_jax.program.options import (
    add_sampling_options,
    add_tree_options,
    add_trees_option,
    read_sampling,
    read_trees,
)


def sampling(arguments: list[str], settings: SamplingConfig | None = None) -> SamplingConfig:
    parser = Parser()
    add_sampling_options(parser)
    return read_sampling(parser.parse_args(arguments), settings)


def trees(arguments: list[str]) -> TreeConfig | Trees | None:
    parser = Parser()
    add_tree_options(parser)
    add_trees_option(parser)
    return read_trees(parser.parse_args(arguments))


# --------------------------------------------------------------------------------------------------
# Sampling


def test_sampling_options_are_the_fields_of_the_settings() -> None:
    options = "--temperature .7 --top-k 5 --top-p .9 --min-p .1 --repetition-penalty 1.1 --seed 3"
    assert sampling([*options.split(), "--logit-bias", "5=-2.5", "--logit-bias=7=1"]) == (
        SamplingConfig(
            temperature=0.7,
            top_k=5,
            top_p=0.9,
            min_p=0.1,
            repetition_penalty=1.1,
            logit_bias={5: -2.5, 7: 1.0},
            seed=3,
        )
    )


def test_what_is_not_given_is_left_as_it_is() -> None:
    assert sampling([]) == SamplingConfig()
    settings = SamplingConfig(temperature=1, top_p=0.5, logit_bias={1: 1}, seed=9)
    assert sampling([], settings) == settings
    changed = SamplingConfig(temperature=0.5, top_p=0.5, logit_bias={2: 1}, seed=9)
    assert sampling(["--temperature", "0.5", "--logit-bias", "2=1"], settings) == changed


def test_filters_without_temperature_are_said_to_do_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sampling(["--top-p=.9"])
    (record,) = caplog.records
    assert record.getMessage() == "at temperature 0, top_p changes nothing; give --temperature"
    sampling(["--top-p=.9", "--temperature=1"])
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ("--temperature hot", "argument --temperature: invalid float value: 'hot'; see --help"),
        ("--temperature -1", "sampling: temperature: Input should be greater than or equal to 0"),
        ("--temperature nan", "sampling: temperature: Input should be a finite number"),
        ("--top-p 0", "sampling: top_p: Input should be greater than 0, got 0.0"),
        ("--top-p nan", "sampling: top_p: Input should be "),
        ("--min-p 1.5", "sampling: min_p: Input should be less than or equal to 1, got 1.5"),
        ("--repetition-penalty 0", "sampling: repetition_penalty: Input should be greater than 0"),
        ("--top-k -2", "argument --top-k: want a number, at least 0, got '-2'"),
        ("--seed 4294967296", "sampling: seed: Input should be less than 4294967296"),
        ("--logit-bias 5", "--logit-bias '5': want ID=VALUE, such as 42=-1.5"),
        ("--logit-bias =1", "--logit-bias '=1': want a token id that is not named already"),
        ("--logit-bias a=1", "--logit-bias 'a=1': want a token id"),
        ("--logit-bias -1=1", "argument --logit-bias: expected one argument"),
        ("--logit-bias 5=inf", "sampling: logit_bias.5: Input should be a finite number, got inf"),
        ("--top-k 3000000000", "--top-k: want a number, at most 2147483647, got '3000000000'"),
        ("--top-k " + "9" * 5000, "--top-k: want a number, at most 2147483647, got '99999"),
        ("--seed " + "9" * 5000, "--seed: want a number, at most 1000000000000000000, got '999"),
        ("--temperature 1e999", "sampling: temperature: Input should be "),
        ("--temperature 1e-30", "sampling: temperature: want no number closer to 0 than 1e-20"),
        ("--repetition-penalty 1e-9", "sampling: repetition_penalty: want no number closer to 0"),
        (f"--logit-bias {'9' * 5000}=1", "[key]: Input should be less than 2147483648"),
        ("--logit-bias 3000000000=1", "[key]: Input should be less than 2147483648"),
        ("--logit-bias 5=1e40", "sampling: logit_bias.5: Input should be less than or equal to"),
        (f"--logit-bias {'9' * 5000}", "--logit-bias '999999999999...9999999999999': want ID=VAL"),
        ("--logit-bias 5=1 --logit-bias 5=2", "'5=2': want a token id that is not named already"),
    ],
)
def test_settings_that_are_refused(arguments: str, error: str) -> None:
    message = refusal(sampling, *arguments.split())
    assert error in message and len(message) < 300


def test_a_number_may_begin_with_zeros() -> None:
    assert sampling(["--top-k", "0" * 30 + "7"]).top_k == 7


@pytest.mark.parametrize("option", ["--top-k", "--logit-bias", "--tree-depth"])
def test_arguments_that_are_not_utf8_are_refused(option: str) -> None:
    text = os.fsdecode(b"caf\xe9" * 100)
    message = refusal(sampling, option, text)
    assert message.startswith("argument 'caf\\udce9") and len(message) < 100
    assert message.endswith("want UTF-8; write it in UTF-8")


# --------------------------------------------------------------------------------------------------
# Trees


def test_trees_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "trees.yaml"
    path.write_text("1: {depth: 2, top_k: 2, total_tokens: 5}\n4: {total_tokens: 8}\n16: null\n")
    default = {"depth": CPU_TREE.depth, "top_k": CPU_TREE.top_k}
    assert trees(["--trees", str(path)]) == {
        1: TreeConfig(depth=2, top_k=2, total_tokens=5),
        4: TreeConfig(**default, total_tokens=8),
        16: None,
    }


def test_one_tree_for_all() -> None:
    assert trees([]) is None
    assert trees(["--tree-depth", "2", "--tree-top-k", "3", "--tree-total-tokens", "9"]) == (
        TreeConfig(depth=2, top_k=3, total_tokens=9)
    )


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("0: null", "trees: 0: want a batch size, a whole number from 1 on"),
        ("one: null", "trees: one: want a batch size"),
        ("true: null", "trees: True: want a batch size"),
        ("1: 4/4/16", "trees: 1: want depth, top_k and total_tokens, or null; got '4/4/16'"),
        ("1: {dept: 4}", "trees: 1: unknown key 'dept'; did you mean 'depth'?"),
        ("1: {depth: 0}", "trees: 1: depth: Input should be greater than 0, got 0"),
        ("{}", "trees: want batch sizes and their trees, got none"),
        ("- 1", "trees: want a mapping of keys, got list"),
        ("3000000000: null", "trees: 3000000000: want a batch size, a whole number from 1 on"),
        ("1: null\n1: {depth: 2}", "not valid YAML: the key '1' is given twice"),
        ("1: {depth: true}", "trees: 1: depth: want a number, got True"),
        ("1: {top_k: 3000000000}", "trees: 1: top_k: Input should be less than 2147483648"),
        ("1: 2024-13-45", "not valid YAML: month must be in 1..12"),
        ("1: &a [*a]", "not valid YAML: nested more than 50 deep"),
        (f"? {'9' * 5000}", "not valid YAML: Exceeds the limit (4300 digits)"),
        (f"1: {'x' * 9000}", "want depth, top_k and total_tokens, or null; got 'xxxxx"),
    ],
)
def test_trees_that_are_refused(tmp_path: Path, text: str, error: str) -> None:
    (tmp_path / "trees").write_text(text)
    message = refusal(trees, "--trees", str(tmp_path / "trees"))
    assert error in message and len(message) < 500


@pytest.mark.parametrize(
    ("option", "error"),
    [
        ("--tree-depth=1001", "tree: depth: Input should be less than or equal to 1000, got 1001"),
        ("--tree-top-k=2147483648", "--tree-top-k: want a number, at most 2147483647"),
        ("--tree-total-tokens=" + "9" * 5000, "want a number, at most 2147483647, got '9999"),
    ],
    ids=["depth", "top_k", "total_tokens"],
)
def test_trees_out_of_bounds(option: str, error: str) -> None:
    assert error in refusal(trees, option)


def test_a_file_of_trees_stands_alone() -> None:
    error = refusal(trees, "--trees", "any", "--tree-depth", "2")
    assert error == "--trees: want it alone, got --tree-* options too; leave out one of them"
