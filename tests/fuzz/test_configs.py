"""YAML files, overrides and options: a config that reads back the same, or one line."""

import json
import tempfile
from pathlib import Path
from typing import Any

import yaml
from hypothesis import given
from hypothesis import strategies as st

from poss_jax.config.bench import BenchConfig
from poss_jax.config.decoding import GenerateConfig
from poss_jax.config.reading import UserError, build_config, config_to_dict, load_config
from poss_jax.config.training import TrainConfig
from poss_jax.program.arguments import read_arguments

RUN = {"stage": "draft", "output": "runs/x", "target": "models/t", "num_tokens": 5000}
KINDS = {TrainConfig: RUN, BenchConfig: {"target": "models/t"}}
SECTIONS = {
    TrainConfig: "model model.rope specialists data objective step optimizer mesh features profile",
    BenchConfig: "drafts tree sampling sampling.logit_bias",
}
OPTIONS = """
    --max-new-tokens --batch-size --max-length --temperature --top-k --top-p --min-p --seed
    --repetition-penalty --logit-bias --tree-depth --tree-top-k --tree-total-tokens --stop --stream
    --drafting --trees --prompt --output
""".split()
TEXTS = """
    2024-13-45 2024-12-24 12:30:45 1_000 0x1F 0b11 017 1e-4 1e400 .inf -.nan ~ null true yes = <<
    [ ] {a {a: [{a: {a: *a &a &a[*a] !!int !!binary !!python/name:os.system !!set{a} @ % ` | > - ?
    base base: '#' \\ 9223372036854775807 4294967296 2147483648 -1 0 1 0.5
""".split()


def keys(kind: type) -> list[str]:
    """Names of a config's fields, with their sections, and some that are none."""
    found = [*kind.__pydantic_fields__, "base", "sed", "", "optimizer.b1.c", "1"]  # type: ignore[attr-defined]
    for section in SECTIONS[kind].split():
        part: Any = kind
        for name in section.split("."):
            args = getattr(part.__pydantic_fields__[name].annotation, "__args__", ())
            options = (part.__pydantic_fields__[name].annotation, *args)
            part = next((o for o in options if hasattr(o, "__pydantic_fields__")), part)
        found += [f"{section}.{name}" for name in part.__pydantic_fields__]
    return found


long = st.sampled_from("9x[-{1").map(lambda letter: 6000 * letter)
texts = st.one_of(
    st.sampled_from(TEXTS), long, st.text(st.characters(exclude_characters="\0"), max_size=6)
)
numbers = st.one_of(
    st.integers(-2, 9), st.sampled_from([2**31, 2**32, 2**64, 10**30, 10**400]), st.floats()
)
plain = st.one_of(st.none(), st.booleans(), numbers, texts)
values = st.recursive(
    plain,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts | numbers, inner, max_size=2),
    max_leaves=4,
)


def check(error: UserError) -> None:
    assert "\n" not in str(error) and len(str(error)) < 1000, str(error)


def load(kind: type, text: str, overrides: list[str]) -> None:
    """Loads a config; one that is loaded reads back the same."""
    with tempfile.TemporaryDirectory() as folder:
        path, twin = Path(folder) / "a.yaml", Path(folder) / "b.yaml"
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        try:
            config = load_config(kind, path, overrides)
        except UserError as error:
            check(error)
            return
        twin.write_text(yaml.safe_dump(config_to_dict(config)))
        assert load_config(kind, twin) == config


@given(data=st.data(), kind=st.sampled_from(list(KINDS)))
def test_overrides(data: st.DataObject, kind: type) -> None:
    key = st.sampled_from(keys(kind)) | texts
    pair = st.tuples(key, values.map(json.dumps) | plain.map(str) | texts).map("=".join)
    load(kind, yaml.safe_dump(KINDS[kind]), data.draw(st.lists(pair | texts, max_size=3)))


@given(parts=st.lists(texts | st.sampled_from(["\n", ": ", "\n  ", ", ", "[", "]", "{", "}"])))
def test_texts(parts: list[str]) -> None:
    load(TrainConfig, "".join(parts), [])
    load(BenchConfig, "target: x\n" + "".join(parts), [])


@given(words=st.lists(st.sampled_from(OPTIONS) | texts | numbers.map(str), max_size=6))
def test_options(words: list[str]) -> None:
    try:
        words = ["--target", "x", "--prompt=x", *words]
        config, _ = read_arguments(GenerateConfig, words, prog="x", doc=None)
    except UserError as error:
        assert len(str(error).splitlines()) == 1, str(error)
        return
    except SystemExit as ended:  # --help
        assert ended.code == 0
        return
    assert isinstance(config, GenerateConfig)
    assert build_config(GenerateConfig, config_to_dict(config), origin="again") == config
