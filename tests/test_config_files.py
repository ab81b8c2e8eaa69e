"""Config files: bases and overrides, what YAML may hold, and the message a user gets."""

from pathlib import Path

import pytest

from poss_jax.config.reading import UserError, load_config, read_yaml
from poss_jax.config.training import OptimizerConfig, TrainConfig


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_overrides_win_over_file_and_base(tmp_path):
    write(
        tmp_path / "base.yaml",
        "{stage: draft, output: a, target: t, num_tokens: 9, seed: 1, "
        "optimizer: {learning_rate: 1e-4, b1: 0.5}}",
    )
    (tmp_path / "runs").mkdir()
    run = write(
        tmp_path / "runs" / "run.yaml",
        "base: ../base.yaml\noutput: b\nseed: 2\noptimizer: {learning_rate: 2.0e-4}\n",
    )
    config = load_config(TrainConfig, run)
    assert (config.output, config.seed, config.target) == ("b", 2, "t")
    assert config.optimizer == OptimizerConfig(learning_rate=2e-4, b1=0.5)

    overrides = [
        "seed=3",
        "optimizer.learning_rate=1e-3",
        "optimizer.clip_value=null",
        "specialists.positions_per_specialist=[3, 3]",
        "specialists.depth=6",
        "data.source=a=b.txt",
    ]
    config = load_config(TrainConfig, run, overrides)
    assert config.seed == 3
    assert config.optimizer == OptimizerConfig(learning_rate=1e-3, b1=0.5, clip_value=None)
    assert config.specialists.positions_per_specialist == (3, 3)
    assert config.data.source == "a=b.txt"


def refused(folder: Path, text: str | bytes, *overrides: str) -> str:
    (folder / "run.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError) as caught:
        load_config(TrainConfig, folder / "run.yaml", overrides)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a\n- b\n", "want a mapping of keys, got list"),
        ("", "want a mapping of keys, got NoneType"),
        ("stage: [draft\n", "not valid YAML: while parsing"),
        (b"\xff\xfe\x00", "not valid YAML"),
        (
            "base: missing.yaml\n",
            "missing.yaml: No such file or directory; give the path of a YAML",
        ),
        ("base: run.yaml\n", "base: want the path of another YAML file, got 'run.yaml'"),
        ("base: circle.yaml\n", "circle.yaml: base: want the path of another YAML file, got 'run"),
        ("base: 3\n", "base: want the path of another YAML file, got 3"),
        (f"base: '{'9' * 6000}'", "9...: File name too long; give the path"),
    ],
    ids=lambda text: repr(text)[:20],
)
def test_bad_file_is_refused(tmp_path, text, message):
    write(tmp_path / "circle.yaml", "base: run.yaml")
    assert message in refused(tmp_path, text)


RUN = "{stage: draft, output: a, target: t, num_tokens: 9}"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("2024-13-45", "month must be in 1..12"),
        ("9" * 5000, "Exceeds the limit (4300 digits)"),
        ("[" * 1000, "nested too deep"),
        ("{b1: 1, b1: 2}", "the key 'b1' is given twice"),
        ("{? [a] : 1}", "found unhashable key"),
        ("!!bool maybe", "'maybe'"),
        ("!!timestamp x", ""),
        ("!!python/object:os.system x", "could not determine a constructor"),
        ("=", "could not determine a constructor"),
    ],
    ids=lambda text: text[:20],
)
def test_yaml_that_is_refused(tmp_path, text, problem):
    override = refused(tmp_path, RUN, f"output={text}")
    assert "override 'output=" in override and len(override) < 700
    for message in (override, refused(tmp_path, f"output: {text}")):
        assert problem in message


def test_merged_keys_are_not_given_twice(tmp_path):
    shared = write(tmp_path / "y", "x: &x {b1: 0.5}\noptimizer: {<<: *x, b2: 0.6}\ndrafts: *x")
    assert read_yaml(shared)["optimizer"] == {"b1": 0.5, "b2": 0.6}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seed", "override 'seed': want section.key=value"),
        ("=3", "override '=3': want section.key=value"),
        ("seed=[1", "override 'seed=[1': want a YAML value after the ="),
        ("optimizer.b3=1", "override 'optimizer.b3=1': unknown key 'optimizer.b3'; did you mean"),
        ("optimizer={b3: 1}", "override 'optimizer={b3: 1}': unknown key 'optimizer.b3'; did"),
        ("optimizer={b1: x}", "override 'optimizer={b1: x}': b1: Input should be a valid number"),
        ("stage=x", "override 'stage=x': Input should be "),
        ("seed.x=1", "seed: Input should be a valid integer"),
        ("seed" * 3000 + "=1", "unknown key 'seedseed"),
        (".".join("a" * 5000) + "=1", "want section.key=value"),
        ("output=2024-12-12", "Input should be a valid string, got datetime.date("),
        ("optimizer.b1=true", "override 'optimizer.b1=true': want a number, got True"),
    ],
    ids=lambda text: text[:20],
)
def test_bad_override_is_refused(tmp_path, override, message):
    error = refused(tmp_path, RUN, override)
    assert message in error and len(error) < 400
