"""Configs: spans drawn, values and files read strictly, and the message a user gets."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import jaxtyping
import pydantic
import pytest
from models import tiny_llama
from shape_checks import check

from benchmarks.study import StudyConfig
from poss_jax.config import bench, data, decoding, models, regenerate, training
from poss_jax.config.bench import AheadConfig, BenchConfig
from poss_jax.config.decoding import AnswerConfig, DecodingConfig, GenerateConfig, SamplingConfig
from poss_jax.config.models import DraftConfig, LlamaConfig, RopeConfig, TreeConfig
from poss_jax.config.reading import UserError, build_config, config_to_dict, load_config, read_yaml
from poss_jax.config.regenerate import RegenerateConfig
from poss_jax.config.training import OptimizerConfig, TrainConfig
from poss_jax.model.families import method_of
from poss_jax.shapes import Array, Float

ROPE = RopeConfig(type="llama3", theta=5e5, factor=8.0)
LAYER = tiny_llama(rope=ROPE, eos_token_ids=(1, 2))
LLAMA = config_to_dict(LAYER)
ODD_HEADS = LLAMA | {"num_kv_heads": 3}
DRAFT_RUN = {"stage": "draft", "output": "runs/x", "target": "models/t", "num_epochs": 2}


def test_specialist_at_drawn():
    # depth       0  1  2  3  4  5  6  7 | 8  9    beyond the last span the last one continues
    # span        0  1  1  1  2  2  2  2 |
    draft = DraftConfig(layer=LAYER, positions_per_specialist=(1, 3, 4), trained_depth=8)
    assert [draft.specialist_at(depth) for depth in range(10)] == [0, 1, 1, 1, 2, 2, 2, 2, 2, 2]


# --------------------------------------------------------------------------------------------------
# Reading


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sed": 1, "target": None}, "unknown key 'sed'; did you mean seed?"),
        ({"weight_decay": 1}, "unknown key 'weight_decay'; did you mean optimizer.weight_decay?"),
        ({"mesh": {"dta": 1}}, "unknown key 'mesh.dta'; did you mean mesh.data?"),
        ({"target": None}, "stage draft needs the key 'target'"),
        ({"model": ODD_HEADS}, "model: num_heads 4 is not a multiple of num_kv_heads 3"),
        ({"model": {}}, "missing key 'model.vocab_size'"),
        ({"data": None}, "data: want a mapping of keys, got None"),
        ({"batch_size": 0}, "batch_size: Input should be greater than 0, got 0"),
        ({"num_tokens": 5}, "want either num_tokens or num_epochs; set the other to null"),
        ({"num_epochs": None}, "want either num_tokens or num_epochs; set the other to null"),
        ({"stage": "both"}, "stage: Input should be 'target' or 'draft', got 'both'"),
        (
            {"specialists": {"positions_per_specialist": [3, 0]}},
            "specialists.positions_per_specialist.1: Input should be greater than 0, got 0",
        ),
        ({1: 2}, "1: Keys should be strings, got 1"),
    ],
)
def test_refusals_are_one_clear_line(change, message):
    with pytest.raises(UserError) as caught:
        build_config(TrainConfig, DRAFT_RUN | change, origin="run.yaml")
    assert str(caught.value) == f"run.yaml: {message}"


# --------------------------------------------------------------------------------------------------
# Numbers

KINDS = [
    kind
    for module in (models, data, training, regenerate, decoding, bench)
    for kind in vars(module).values()
    if isinstance(kind, type) and kind.__module__ == module.__name__
]
NEEDED = {
    LlamaConfig: LLAMA,
    DraftConfig: {"layer": LAYER},
    TrainConfig: DRAFT_RUN,
    BenchConfig: {"target": "t"},
    AheadConfig: {"target": "t"},
    DecodingConfig: {"target": "t"},
    AnswerConfig: {"target": "t"},
    GenerateConfig: {"target": "t", "prompt": "p"},
    RegenerateConfig: {"target": "t", "output": "o", "data": {"source": "s"}},
}


def numbers(schema: Any, where: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """The parts of a JSON schema that are numbers, and where they are."""
    if isinstance(schema, dict):
        if schema.get("type") in ("integer", "number"):
            yield where, schema
        for key, part in schema.items():
            yield from numbers(part, f"{where}/{key}")
    elif isinstance(schema, list):
        for part in schema:
            yield from numbers(part, where)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_number_has_both_bounds(kind):
    for where, number in numbers(pydantic.TypeAdapter(kind).json_schema()):
        lower = [number[key] for key in ("minimum", "exclusiveMinimum") if key in number]
        upper = [number[key] for key in ("maximum", "exclusiveMaximum") if key in number]
        wide_integers = ("/seed", "/seeds/items", "/num_tokens/anyOf")
        is_wide = number["type"] == "number" or where.endswith(wide_integers)
        assert -1e30 <= max(lower) < min(upper) <= (1e30 if is_wide else 2**31), where


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_no_number_is_true_or_endless(kind):
    properties = pydantic.TypeAdapter(kind).json_schema()["properties"]
    names = [name for name in properties if dict(numbers({name: properties[name]}))]
    for name in names:
        is_list = properties[name].get("type") == "array"
        for value in (True, 10**400, -(10**400), "9" * 5000, float("nan"), float("-inf"), 1e308):
            values = NEEDED.get(kind, {}) | {name: [value] if is_list else value}
            with pytest.raises(UserError) as caught:
                build_config(kind, values, origin="test")
            assert f"test: {name}" in str(caught.value) and len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        (SamplingConfig, {"temperature": 1e-30}, "temperature: want no number closer to 0 than"),
        (SamplingConfig, {"logit_bias": {True: 1}}, "logit_bias.1.[key]: want a number"),
        (SamplingConfig, {"logit_bias": {2**31: 1}}, "[key]: Input should be less than 2147483648"),
        (OptimizerConfig, {"b2": 0.99999999}, "b2: Input should be less than or equal to 0.999999"),
        (OptimizerConfig, {"eps": 1e-50}, "eps: want no number closer to 0 than 1e-30"),
    ],
)
def test_numbers_that_are_refused(kind, change, message):
    with pytest.raises(UserError) as caught:
        build_config(kind, NEEDED.get(kind, {}) | change, origin="test")
    assert message in str(caught.value)


def test_numbers_may_be_text_as_yaml_reads_them():
    values = DRAFT_RUN | {"batch_size": "8", "seed": 3.0, "optimizer": {"learning_rate": "1e-4"}}
    run = build_config(TrainConfig, values, origin="test")
    assert (run.batch_size, run.seed, run.optimizer.learning_rate) == (8, 3, 1e-4)


def test_steps_spend_the_budget():
    budget = {"num_tokens": 10_000, "num_epochs": None, "batch_size": 4}
    run = TrainConfig(**DRAFT_RUN | budget)  # 256 tokens a row
    assert run.num_steps == 10 and run.with_budget(1000) is run
    epochs = TrainConfig(**DRAFT_RUN | {"num_epochs": 1.5, "batch_size": 4}).with_budget(9)
    assert (epochs.num_tokens, epochs.num_steps) == (3456, 4)  # 13.5 rows, 3.4 batches
    run = TrainConfig(**DRAFT_RUN | {"num_epochs": 1e6})
    with pytest.raises(UserError, match=r"num_epochs 1e\+06: num_tokens: Input should be less"):
        run.with_budget(10**12)


def test_annotations_are_checked_while_testing():
    with pytest.raises(jaxtyping.TypeCheckError):
        build_config(TreeConfig, {}, origin=5)


@jaxtyping.jaxtyped(typechecker=check)
def pad(row: Float[Array, " T"], width: int) -> Float[Array, " T"]:
    return jnp.pad(row, (0, width))


def test_sizes_of_a_result_are_those_of_the_parameters():
    assert pad(jnp.ones(3), 0).shape == (3,)
    for row, width in [(jnp.ones(3), 1), (jnp.ones((3, 1)), 0), (jnp.ones(3), "0")]:
        with pytest.raises(jaxtyping.TypeCheckError):
            pad(row, width)


def test_overrides_win_over_file_and_base(tmp_path):
    (tmp_path / "base.yaml").write_text(
        "{stage: draft, output: a, target: t, num_tokens: 9, optimizer: {b1: 0.5, b2: 0.6}}"
    )
    run = tmp_path / "runs" / "run.yaml"
    run.parent.mkdir()
    run.write_text("base: ../base.yaml\noutput: b\nseed: 2\noptimizer: {b2: 0.7}\n")
    words = ["seed=3", "optimizer.clip_value=null", "data.source=a=b.txt"]
    words += ["specialists={positions_per_specialist: [3, 3], depth: 6}"]
    for overrides, seed, clipped in ((), 2, {}), (words, 3, {"clip_value": None}):
        config = load_config(TrainConfig, run, overrides)
        assert (config.output, config.seed, config.target) == ("b", seed, "t")
        assert config.optimizer == OptimizerConfig(b1=0.5, b2=0.7, **clipped)
    assert config.specialists.positions_per_specialist == (3, 3)
    assert config.data.source == "a=b.txt"


RUN = "{stage: draft, output: a, target: t, num_tokens: 9}"


def refused(folder: Path, text: str | bytes, *overrides: str) -> str:
    (folder / "run.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError) as caught:
        load_config(TrainConfig, folder / "run.yaml", overrides)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 700
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "want a mapping of keys, got NoneType"),
        (b"\xff\xfe\x00", "not valid YAML"),
        ("base: missing.yaml", "missing.yaml: No such file or directory; give the path of a YAML"),
        ("base: run.yaml", "base: want the path of another YAML file, got 'run.yaml'"),
        ("base: circle.yaml", "circle.yaml: base: want the path of another YAML file, got 'run"),
        ("base: 3", "base: want the path of another YAML file, got 3"),
    ],
    ids=lambda text: repr(text)[:20],
)
def test_bad_file_is_refused(tmp_path, text, message):
    (tmp_path / "circle.yaml").write_text("base: run.yaml")
    assert message in refused(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[draft", "while parsing a flow sequence"),
        ("2024-13-45", "month must be in 1..12"),
        ("9" * 5000, "Exceeds the limit (4300 digits)"),
        ("[" * 1000, "maximum recursion depth exceeded"),
        ("{b1: 1, b1: 2}", "the key 'b1' is given twice"),
        ("{? [a] : 1}", "found unhashable key"),
        ("!!bool maybe", "'maybe'"),
        ("!!timestamp x", ""),
        ("!!python/object:os.system x", "could not determine a constructor"),
    ],
    ids=lambda text: text[:20],
)
def test_yaml_that_is_refused(tmp_path, text, problem):
    override = refused(tmp_path, RUN, f"output={text}")
    assert "override 'output=" in override
    for message in (override, refused(tmp_path, f"output: {text}")):
        assert problem in message


def test_merged_keys_are_not_given_twice(tmp_path):
    path = tmp_path / "shared.yaml"
    path.write_text("x: &x {b1: 0.5}\noptimizer: {<<: *x, b2: 0.6}\ndrafts: *x")
    assert read_yaml(path)["optimizer"] == {"b1": 0.5, "b2": 0.6}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("=3", "override '=3': want section.key=value"),
        ("optimizer={b3: 1}", "override 'optimizer={b3: 1}': unknown key 'optimizer.b3'; did"),
        ("optimizer={b1: x}", "override 'optimizer={b1: x}': b1: Input should be a valid number"),
        ("optimizer.b1=true", "override 'optimizer.b1=true': want a number, got True"),
        ("seed.x=1", "seed: Input should be a valid integer"),
        ("seed" * 3000 + "=1", "unknown key 'seedseed"),
        ("output=2024-12-12", "Input should be a valid string, got datetime.date("),
    ],
    ids=lambda text: text[:20],
)
def test_bad_override_is_refused(tmp_path, override, message):
    assert message in refused(tmp_path, RUN, override)


# --------------------------------------------------------------------------------------------------
# All configs of the repository, whose recipes are the methods they say they are

CONFIGS = Path(__file__).parent.parent / "configs"
FILES = sorted(CONFIGS.rglob("*.yaml"))
DEPTHS = {  # published
    "llama3-8b-instruct": {"eagle": 1, "hass": 3, "poss1": 7, "poss2": 8, "poss3": 12},
    "llama2-13b-chat": {"eagle": 1, "hass": 3, "poss1": 6, "poss2": 6, "poss3": 6},
    "llama3-70b-instruct": {"poss3": 12},
}
RECIPES = [(folder, name) for folder, names in DEPTHS.items() for name in names]


def header(path: Path) -> str:
    lines = path.read_text().splitlines()
    return "\n".join(line for line in lines if line.startswith("#"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(CONFIGS)))
def test_config_is_read_and_its_header_gives_its_command(path):
    by_key = {"stage": TrainConfig, "variants": StudyConfig}
    kinds = [kind for key, kind in by_key.items() if key in read_yaml(path)]
    kinds += [AheadConfig if path.parent.name == "aot" else BenchConfig]
    load_config(kinds[0], path)
    assert f"--config {path.relative_to(CONFIGS.parent)}" in header(path)
    assert "# Hardware: " in header(path)


@pytest.mark.parametrize(("folder", "name"), RECIPES)
def test_recipe_is_the_published_method(folder, name):
    path = CONFIGS / folder / f"{name}.yaml"
    run = load_config(TrainConfig, path)
    depth = DEPTHS[folder][name]
    spans = run.specialists.positions_per_specialist
    draft = DraftConfig(layer=tiny_llama(), positions_per_specialist=spans, trained_depth=depth)
    assert run.specialists.depth == depth
    assert method_of(draft) == {"eagle": "eagle2"}.get(name, name)
    assert sum(spans) == (depth if name.startswith("poss") else 1)
    assert run.objective.top_k_weight == (1.0 if name == "hass" else 0.0)
    assert run.optimizer == OptimizerConfig(
        learning_rate=3e-5, warmup_fraction=0.01, b1=0.9, b2=0.95, weight_decay=0.01, clip_value=0.5
    )
    assert (run.num_epochs, run.data.sequence_length, run.batch_size) == (20, 2048, 8)
    assert run.init_draft is not None and run.output == f"runs/{folder}/{name}"
    assert all(f"# {said}:" in header(path) for said in ("Memory", "Expect", "Needs"))
