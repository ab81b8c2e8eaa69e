"""Command lines: keys of a config as options, sampling settings, trees."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from programs import refusal

from poss_jax import TreeConfig
from poss_jax.config.bench import AheadConfig, BenchConfig
from poss_jax.config.decoding import GenerateConfig, SamplingOptions, ServeConfig
from poss_jax.config.models import CPU_TREE
from poss_jax.config.reading import UserError, list_keys
from poss_jax.config.regenerate import RegenerateConfig
from poss_jax.config.training import TrainConfig
from poss_jax.engine import trees
from poss_jax.engine.trees import read_trees
from poss_jax.program.arguments import list_options, read_arguments
from poss_jax.program.options import load_engine

CONFIGS = Path(__file__).parent.parent / "configs"
KINDS = [GenerateConfig, RegenerateConfig, BenchConfig, TrainConfig]
DEEP = "want total_tokens above depth, {}, since every level needs a node and the root is one"


def read(arguments: list[str]) -> GenerateConfig:
    needed = ["--target", "t", "--prompt", "p"]
    found, _ = read_arguments(GenerateConfig, [*needed, *arguments], prog="test", doc=None)
    return found


def sampling(arguments: list[str]) -> SamplingOptions:
    return read(arguments).sampling


def tree(arguments: list[str]) -> TreeConfig | None:
    return read(arguments).tree


# --------------------------------------------------------------------------------------------------
# Keys as options


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_options_have_different_names(kind):
    flags = [option.flag for option in list_options(kind)]
    assert len(set(flags)) == len(flags)
    assert not {"--config", "--overwrite", "--dry-run"} & set(flags)


def test_options_win_over_overrides_and_overrides_over_the_file(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("target: t\nprompts: p\nbatch_size: 2\nmax_length: 3\nmax_new_tokens: 4\n")
    words = ["--batch-size=7", "batch_size=6", "max_length=5", "sampling.top_p=0.5", "--config"]
    found, _ = read_arguments(GenerateConfig, [*words, str(path)], prog="test", doc=None)
    assert (found.batch_size, found.max_length, found.max_new_tokens) == (7, 5, 4)
    assert (found.target, found.sampling.top_p) == ("t", 0.5)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ("--temprature 1", "unknown option --temprature; did you mean --temperature?"),
        ("--temprature=1", "unknown option --temprature; did you mean --temperature?"),
        ("--bogus 1", "unknown option --bogus; see --help"),
        ("sampling.temprature=1", "temprature=1': unknown key 'sampling.temprature'; did you mean"),
        ("word", "'word' and --target: both name the target; leave out one"),
        ("a=1 word", "override 'word': want section.key=value"),
        ("--config nowhere", "config nowhere: No such file"),
        ("sampling.top_k=-1", "override 'sampling.top_k=-1': Input should be greater than or"),
        ("sampling.top_k=-1 --top-k=-2", "--top-k: Input should be greater than or equal to 0,"),
        ("--max-length 0", "--max-length: Input should be greater than 0, got '0'"),
        ("--prompts x", "want a question, a text (prompt) or a file of prompts (prompts)"),
        # Sampling
        ("--temperature hot", "--temperature: Input should be a valid number, unable to parse"),
        ("--temperature nan", "--temperature: Input should be a finite number"),
        ("--temperature 1e-30", "--temperature: want no number closer to 0 than 1e-20"),
        ("--top-k " + "9" * 5000, "--top-k: Unable to parse input string as an integer, exceeded"),
        ("--logit-bias 5", "--logit-bias '5': want ID=VALUE"),
        ("--logit-bias a=1", "--logit-bias: a.[key]: Input should be a valid integer"),
        ("--logit-bias -1=1", "argument --logit-bias: expected one argument"),
        ("--logit-bias 5=inf", "--logit-bias: 5: Input should be a finite number, got 'inf'"),
        (f"--logit-bias {'9' * 5000}=1", "Unable to parse input string as an integer, exceeded"),
        (f"--logit-bias {'9' * 5000}", "--logit-bias '999999999999...9999999999999': want ID=VAL"),
        ("--logit-bias 5=1 --logit-bias 5=2", "'5=2': 5 is named already; name another"),
        # Trees
        ("--tree 6/10", "--tree '6/10': want DEPTH/TOP_K/TOTAL_TOKENS such as 6/10/60, chain:N, "),
        ("--tree chain", "--tree 'chain': want DEPTH/TOP_K/TOTAL_TOKENS such as 6/10/60, chain:N,"),
        ("--tree 0/1/2", "--tree: depth: Input should be greater than 0, got 0"),
        ("--tree chain:1001", "--tree: depth: Input should be less than or equal to 1000, got"),
        (f"--tree chain:{'9' * 5000}", "'chain:99999"),
        ("--tree 40/1/5", f"tree 40/1/5: {DEEP.format(40)}"),
        ("--tree-depth 40 --tree-total-tokens 5", f"tree 40/4/5: {DEEP.format(40)}"),
        ("tree.depth=5 tree.total_tokens=5", f"tree 5/10/5: {DEEP.format(5)}"),
        ("--tree none --tree-depth 2", "want it alone, got a tree, too; leave out one of them"),
        ("--tree 2/2/4 --trees file", "--trees: want it alone, got a tree, too"),
    ],
    ids=lambda text: text[:40],
)
def test_command_line_is_refused(arguments, error):
    message = refusal(read, *arguments.split())
    assert error in message and len(message) < 300


@pytest.mark.parametrize(
    ("section", "option"), [("sampling: 5", "--temperature=1"), ("tree: 6/10/60", "--tree-depth=4")]
)
def test_an_option_does_not_replace_a_malformed_section(tmp_path, section, option):
    path, (name, _, value) = tmp_path / "run.yaml", section.partition(": ")
    path.write_text(section)
    assert f"{path}: {name}: want a mapping" in refusal(read, "--config", str(path), option)
    assert f"override '{name}={value}': want a mapping" in refusal(read, f"{name}={value}", option)


def test_a_missing_key_names_its_option():
    with pytest.raises(UserError, match="want --output PATH, or the key output in the file"):
        read_arguments(RegenerateConfig, ["--target=t"], prog="test", doc=None)


def shown_help(kind: Any, *words: str, doc: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as caught:
        read_arguments(kind, list(words), prog="test", doc=doc)
    assert caught.value.code == 0
    return capsys.readouterr().out


def test_short_help_has_what_is_required(capsys):
    for kind in KINDS:
        printed = shown_help(kind, "--help", doc="x", capsys=capsys)
        for option in list_options(kind):
            assert not option.declaration.is_required or f"  {option.flag} " in printed


def test_options_of_another_option_are_shown_with_it(capsys):
    actions: Any = {"--tune": {"action": "store_true", "help": "Tune."}}
    actions |= {"--sizes": {"help": "With --tune: sizes."}}
    for words, is_shown in ((["--help"], False), (["--tune", "--help"], True)):
        with pytest.raises(SystemExit):
            read_arguments(GenerateConfig, words, prog="test", doc="x", actions=actions)
        assert ("--sizes" in capsys.readouterr().out) == is_shown


def test_help_lists_every_key_with_its_default(capsys):
    printed = shown_help(TrainConfig, "--help-all", doc="The description.", capsys=capsys)
    for key, about in list_keys(TrainConfig).items():
        name = key if "." in key else f"--{key.replace('_', '-')}"
        assert about.is_section or f" {name} " in printed.replace("\n", " "), key
    for part in ("per row;", "(default: 256)", "specialist serves, such as [3, 3]. (default: [1])"):
        assert part in " ".join(printed.split())


# --------------------------------------------------------------------------------------------------
# Sampling


def test_sampling_options_are_the_fields_of_the_settings():
    options = "--temperature .7 --top-k 5 --top-p .9 --min-p .1 --repetition-penalty 1.1 --seed 3"
    assert sampling([*options.split(), "--logit-bias", "5=-2.5", "--logit-bias=7=1"]) == (
        SamplingOptions(
            temperature=0.7,
            top_k=5,
            top_p=0.9,
            min_p=0.1,
            repetition_penalty=1.1,
            logit_bias={5: -2.5, 7: 1.0},
            seed=3,
        )
    )


def test_what_is_not_given_is_left_as_it_is():
    assert sampling([]) == SamplingOptions()
    words = ["sampling={temperature: 1, top_p: 0.5, logit_bias: {1: 1}, seed: 9}"]
    settings = SamplingOptions(temperature=1, top_p=0.5, logit_bias={1: 1}, seed=9)
    assert sampling(words) == settings
    changed = SamplingOptions(temperature=0.5, top_p=0.5, logit_bias={2: 1}, seed=9)
    assert sampling([*words, "--temperature", "0.5", "--logit-bias", "2=1"]) == changed


def test_filters_without_temperature_are_said_to_do_nothing(caplog):
    def read_bench(*arguments: str) -> None:
        read_arguments(BenchConfig, arguments, prog="test", doc=None)

    read_bench("--top-p=.9")
    (record,) = caplog.records
    assert record.getMessage() == "at temperature 0, top_p changes nothing; give --temperature"
    read_bench("--top-p=.9", "--temperature=1")
    sampling(["--top-p=.9"])  # the model may have a temperature
    assert len(caplog.records) == 1


@pytest.mark.parametrize("option", ["--top-k", "--logit-bias", "--tree-depth"])
def test_arguments_that_are_not_utf8_are_refused(option):
    text = os.fsdecode(b"caf\xe9" * 100)
    message = refusal(sampling, option, text)
    assert message.startswith("argument 'caf\\udce9") and len(message) < 100
    assert message.endswith("want UTF-8; write it in UTF-8")


# --------------------------------------------------------------------------------------------------
# Trees


def test_trees_of_a_file(tmp_path):
    path = tmp_path / "trees.yaml"
    path.write_text("1: {depth: 2, top_k: 2, total_tokens: 5}\n4: {total_tokens: 8}\n16: null\n")
    default = {"depth": CPU_TREE.depth, "top_k": CPU_TREE.top_k}
    assert read(["--trees", str(path)]).trees == str(path)
    assert read_trees(path) == {
        1: TreeConfig(depth=2, top_k=2, total_tokens=5),
        4: TreeConfig(**default, total_tokens=8),
        16: None,
    }


def test_what_devices_are_planned_with_is_not_the_tree_of_this_one():
    model = ["--config", str(CONFIGS / "aot" / "llama3-8b.yaml")]
    config, _ = read_arguments(AheadConfig, [*model, "--tree-depth", "8"], prog="test", doc=None)
    assert config.tree == TreeConfig(depth=8, top_k=10, total_tokens=60)


def test_requests_of_a_server_have_their_own_seeds():
    with pytest.raises(UserError, match=r"^--seed: want none, got 3; every request has its own"):
        read_arguments(ServeConfig, ["--seed", "3"], prog="test", doc=None)


def test_draft_without_a_name_is_called_as_its_folder():
    words = ["--draft", "EAGLE-2", "--draft", "models/poss3/", "--draft", "A=b"]
    config, _ = read_arguments(BenchConfig, words, prog="test", doc=None)
    assert config.drafts == {"EAGLE-2": "EAGLE-2", "poss3": "models/poss3/", "A": "b"}


def test_options_do_not_ask_for_devices(monkeypatch):
    monkeypatch.setattr(trees, "default_tree", lambda: pytest.fail("asked for devices"))
    assert read(["--max-new-tokens", "7"]).max_new_tokens == 7


def test_one_tree_for_all():
    assert tree([]) is None
    assert tree(["--tree-depth", "2"]) == TreeConfig(depth=2, top_k=4, total_tokens=16)
    assert tree(["--tree-depth", "2", "--tree-top-k", "3", "--tree-total-tokens", "9"]) == (
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
        ("1: null\n1: {depth: 2}", "not valid YAML: the key '1' is given twice"),
        (f"1: {'x' * 9000}", "want depth, top_k and total_tokens, or null; got 'xxxxx"),
    ],
)
def test_trees_that_are_refused(tmp_path, text, error):
    (tmp_path / "trees").write_text(text)
    message = refusal(lambda words: read_trees(Path(words[0])), str(tmp_path / "trees"))
    assert error in message and len(message) < 500


@pytest.mark.parametrize(
    ("text", "sizes"), [("6/10/60", (6, 10, 60)), ("chain:5", (5, 1, 6)), ("1/1/2", (1, 1, 2))]
)
def test_a_tree_in_one_word(text, sizes):
    expected = TreeConfig(**dict(zip(("depth", "top_k", "total_tokens"), sizes, strict=True)))
    assert tree(["--tree", text]) == expected
    assert tree([f"--tree={text}", "--tree-depth", "1"]) == replace(expected, depth=1)
    assert tree(["--tree", text, "tree.depth=9"]) == expected


def test_a_tree_of_the_command_line_wins_over_a_file(tmp_path):
    (tmp_path / "tree.yaml").write_text("tree: {depth: 2, top_k: 2, total_tokens: 5}")
    (tmp_path / "trees.yaml").write_text("trees: some.yaml")
    for name in ("tree", "trees"):
        given = ["--config", str(tmp_path / f"{name}.yaml")]
        assert tree([*given, "--tree", "chain:2"]) == TreeConfig(depth=2, top_k=1, total_tokens=3)
        automatic = read([*given, "--tree", "auto"])
        assert automatic.tree is automatic.trees is None
        without = read([*given, "--tree", "none"])
        assert without.tree is None
        assert read_trees(Path(without.trees or "")) == {1: None}


def test_programs_with_a_tree_of_their_own_take_it_as_auto():
    model = ["--config", str(CONFIGS / "aot" / "llama3-8b.yaml"), "--tree"]
    for text, expected in (("auto", TreeConfig()), ("4/4/16", CPU_TREE)):
        assert read_arguments(AheadConfig, [*model, text], prog="t", doc=None)[0].tree == expected
    with pytest.raises(UserError, match=r"^--tree 'none': want DEPTH/TOP_K/TOTAL_.* or auto$"):
        read_arguments(AheadConfig, [*model, "none"], prog="t", doc=None)


def test_trees_of_methods_and_of_files_are_not_too_deep(tmp_path):
    deep, error = "{depth: 5, total_tokens: 5}", DEEP.format(5)
    method = [f"methods={{a: {{draft: d, tree: {deep}}}}}"]
    with pytest.raises(UserError, match=error):
        read_arguments(BenchConfig, method, prog="test", doc=None)
    (tmp_path / "trees").write_text(f"4: {deep}")
    with pytest.raises(UserError, match=error):
        load_engine(read(["--trees", str(tmp_path / "trees")]))
