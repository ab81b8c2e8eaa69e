"""Command lines: keys of a config as options, sampling settings, trees."""

from pathlib import Path

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
from poss_jax.program.arguments import read_arguments
from poss_jax.program.options import load_engine

AHEAD = f"--config {Path(__file__).parent.parent}/configs/aot/llama3-8b.yaml"


def read(arguments: list[str]) -> GenerateConfig:
    needed = ["--target", "t", "--prompt", "p"]
    return read_arguments(GenerateConfig, [*needed, *arguments], prog="test", doc=None)[0]


# --------------------------------------------------------------------------------------------------
# Keys as options


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
        ("--temprature=1", "unknown option --temprature; did you mean --temperature?"),
        ("--bogus 1", "unknown option --bogus; see --help"),
        ("sampling.temprature=1", "temprature=1': unknown key 'sampling.temprature'; did you mean"),
        ("word", "'word' and --target: both name the target; leave out one"),
        ("a=1 word", "override 'word': want section.key=value"),
        ("sampling.top_k=-1", "override 'sampling.top_k=-1': Input should be greater than or"),
        ("sampling.top_k=-1 --top-k=-2", "--top-k: Input should be greater than or equal to 0,"),
        ("--prompts x", "want a question, a text (prompt) or a file of prompts (prompts)"),
        ("--top-k " + "9" * 5000, "--top-k: Unable to parse input string as an integer, exceeded"),
        ("--logit-bias 5", "--logit-bias: want ID=VALUE, each name once, got ['5']"),
        ("--logit-bias a=1", "--logit-bias: a.[key]: Input should be a valid integer"),
        ("--logit-bias -1=1", "argument --logit-bias: expected one argument"),
        (f"--logit-bias {'9' * 5000}=1", "Unable to parse input string as an integer, exceeded"),
        ("--logit-bias 5=1 --logit-bias 5=2", "want ID=VALUE, each name once, got ['5=1', '5=2']"),
        ("--tree 6/10", "--tree '6/10': want DEPTH/TOP_K/TOTAL_TOKENS such as 6/10/60, chain:N, "),
        ("--tree 0/1/2", "--tree: depth: Input should be greater than 0, got 0"),
        ("--tree chain:1001", "--tree: depth: Input should be less than or equal to 1000, got"),
        (f"--tree chain:{'9' * 5000}", "'chain:99999"),
        ("--tree 40/1/5", "--tree: want total_tokens above depth, for a node per level, got"),
        ("--tree none --tree-depth 2", "want it alone, got a tree, too; leave out one of them"),
        ("--tree 2/2/4 --trees file", "--trees: want it alone, got a tree, too"),
    ],
    ids=lambda text: text[:40],
)
def test_command_line_is_refused(arguments, error):
    message = refusal(read, *arguments.split())
    assert error in message and len(message) < 300


@pytest.mark.parametrize(
    ("kind", "arguments", "error"),
    [
        (RegenerateConfig, "--target=t", "want --output, or output in the file"),
        (ServeConfig, "--seed 3", "--seed: want none, got 3; every request has its own"),
        (AheadConfig, f"{AHEAD} --tree none", "chain:N or auto"),
    ],
)
def test_command_line_of_another_program_is_refused(kind, arguments, error):
    with pytest.raises(UserError) as caught:
        read_arguments(kind, arguments.split(), prog="test", doc=None)
    assert error in str(caught.value)


@pytest.mark.parametrize(
    ("section", "option"), [("sampling: 5", "--temperature=1"), ("tree: 6/10/60", "--tree-depth=4")]
)
def test_an_option_does_not_replace_a_malformed_section(tmp_path, section, option):
    path, (name, _, value) = tmp_path / "run.yaml", section.partition(": ")
    path.write_text(section)
    assert f"{path}: {name}: want a mapping" in refusal(read, "--config", str(path), option)
    assert f"override '{name}={value}': want a mapping" in refusal(read, f"{name}={value}", option)


def test_help_lists_every_key_with_its_default(capsys):
    with pytest.raises(SystemExit):
        read_arguments(TrainConfig, ["--help-all"], prog="test", doc="The description.")
    printed = " ".join(capsys.readouterr().out.split())
    for key, about in list_keys(TrainConfig).items():
        name = key if "." in key else f"--{key.replace('_', '-')}"
        assert about.is_section or f" {name} " in printed, key
    for part in ("per row;", "(default: 256)", "specialist serves, such as [3, 3]. (default: [1])"):
        assert part in printed


def test_draft_without_a_name_is_called_as_its_folder():
    words = ["--draft", "EAGLE-2", "--draft", "models/poss3/", "--draft", "A=b"]
    config, _ = read_arguments(BenchConfig, words, prog="test", doc=None)
    assert config.drafts == {"EAGLE-2": "EAGLE-2", "poss3": "models/poss3/", "A": "b"}


def test_options_do_not_ask_for_devices(monkeypatch):
    monkeypatch.setattr(trees, "default_tree", lambda: pytest.fail("asked for devices"))
    assert read(["--max-new-tokens", "7"]).max_new_tokens == 7


# --------------------------------------------------------------------------------------------------
# Sampling


def test_sampling_options_change_what_they_name():
    options = "--temperature .7 --top-k 5 --min-p .1 --repetition-penalty 1.1 --logit-bias 5=-2.5"
    settings = {"temperature": 0.7, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1}
    settings |= {"logit_bias": {5: -2.5, 7: 1.0}}
    words = [*options.split(), "--logit-bias=7=1"]
    assert read(words).sampling == SamplingOptions(**settings)
    words += ["sampling={temperature: 1, top_p: 0.5, logit_bias: {1: 1}, seed: 9}"]
    assert read(words).sampling == SamplingOptions(**settings, top_p=0.5, seed=9)
    assert read([]).sampling == SamplingOptions()


# --------------------------------------------------------------------------------------------------
# Trees


@pytest.mark.parametrize(
    ("words", "sizes"),
    [
        ("--tree-depth 2", (2, 4, 16)),
        ("--tree-depth 2 --tree-top-k 3 --tree-total-tokens 9", (2, 3, 9)),
        ("--tree 6/10/60", (6, 10, 60)),
        ("--tree=chain:5", (5, 1, 6)),
        ("--tree 6/10/60 --tree-depth 1", (1, 10, 60)),
        ("--tree 6/10/60 tree.depth=9", (6, 10, 60)),
    ],
)
def test_trees_of_a_command_line(words, sizes):
    expected = dict(zip(("depth", "top_k", "total_tokens"), sizes, strict=True))
    assert read(words.split()).tree == TreeConfig(**expected)


def test_a_tree_of_the_command_line_wins_over_a_file(tmp_path):
    (tmp_path / "tree.yaml").write_text("tree: {depth: 2, top_k: 2, total_tokens: 5}")
    (tmp_path / "trees.yaml").write_text("trees: some.yaml")
    for name in ("tree", "trees"):
        given = ["--config", str(tmp_path / f"{name}.yaml"), "--tree"]
        assert read([*given, "chain:2"]).tree == TreeConfig(depth=2, top_k=1, total_tokens=3)
        automatic, without = read([*given, "auto"]), read([*given, "none"])
        assert automatic.tree is automatic.trees is without.tree is None
        assert read_trees(Path(without.trees or "")) == {1: None}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--tree auto", TreeConfig()),
        ("--tree 4/4/16", CPU_TREE),
        ("--tree-depth 8", TreeConfig(depth=8, top_k=10, total_tokens=60)),
    ],
)
def test_programs_with_a_tree_of_their_own_begin_with_it(words, expected):
    arguments = f"{AHEAD} {words}".split()
    assert read_arguments(AheadConfig, arguments, prog="t", doc=None)[0].tree == expected


def test_trees_of_a_file(tmp_path):
    path = tmp_path / "trees.yaml"
    path.write_text("1: {depth: 2, top_k: 2, total_tokens: 5}\n4: {total_tokens: 8}\n16: null\n")
    assert read(["--trees", str(path)]).trees == str(path)
    assert read_trees(path) == {
        1: TreeConfig(depth=2, top_k=2, total_tokens=5),
        4: TreeConfig(depth=CPU_TREE.depth, top_k=CPU_TREE.top_k, total_tokens=8),
        16: None,
    }


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("0: null", "trees: 0: want a batch size, a whole number from 1 on"),
        ("true: null", "trees: True: want a batch size"),
        ("1: 4/4/16", "trees: 1: want depth, top_k and total_tokens, or null; got '4/4/16'"),
        ("1: {dept: 4}", "trees: 1: unknown key 'dept'; did you mean depth?"),
        ("{}", "trees: want batch sizes and their trees, got none"),
        (f"1: {'x' * 9000}", "want depth, top_k and total_tokens, or null; got 'xxxxx"),
    ],
)
def test_trees_of_a_file_that_are_refused(tmp_path, text, error):
    (tmp_path / "trees").write_text(text)
    words = ["--trees", str(tmp_path / "trees")]
    message = refusal(lambda words: load_engine(read(words)), *words)
    assert error in message and len(message) < 500
