"""A first specialist of several layers: its arithmetic, its start, its training and its files."""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import (
    IDENTITY,
    jit_predict_depths,
    make_engine,
    random_draft,
    random_target,
    stacked,
    tiny_llama,
)
from plain_chain import check_chains, predict_eagle
from programs import DRAFT, POSS2, Runs, config_file, generate, refusal

from poss_jax.checkpoint.folder import load_draft
from poss_jax.checkpoint.record import new_record, read_record
from poss_jax.config.decoding import EngineConfig
from poss_jax.config.models import DraftConfig, TreeConfig
from poss_jax.config.reading import load_config
from poss_jax.config.training import TrainConfig
from poss_jax.convert.__main__ import main as convert
from poss_jax.engine.engine import Engine
from poss_jax.learn.recursion import DraftInputs
from poss_jax.model.quantise import Quantised, quantise_target
from poss_jax.model.specialists import add_layers
from train.main import main
from train.training import open_stage

LLAMA = tiny_llama()
PLAIN = DraftConfig(layer=LLAMA, positions_per_specialist=(1, 2), trained_depth=3)
DEEP = replace(PLAIN, layers_per_specialist=(3,))
PROMPTS = [[1, 2, 3], [9]]
T = 9
RUN = POSS2 | {
    "specialists": {
        "positions_per_specialist": [1, 2],
        "layers_per_specialist": [3, 1],
        "depth": 3,
    },
    "num_tokens": 6 * 64,
    "checkpoint_every": 2,
    "validate_every": 3,
}


def test_training_and_drafting_equal_a_float64_forward() -> None:
    check_chains(DEEP, predict_eagle, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_further_layers_start_without_a_jump() -> None:
    """A deepened draft predicts, drafts and decodes what the trained one does, bit for bit."""
    target, draft = random_target(LLAMA), random_draft(PLAIN)
    deepened = add_layers(draft, DEEP, jax.random.key(5))
    assert len(deepened["further"]) == 2
    assert add_layers(draft, PLAIN, jax.random.key(5)) is draft
    features, embedded = (jax.random.normal(jax.random.key(n), (2, T, 32)) for n in range(2))
    inputs = DraftInputs(features, embedded, jnp.ones((2, T), jnp.int32))
    before, after = (
        jit_predict_depths(stacked(one), config, inputs, 3, block=4)
        for one, config in ((draft, PLAIN), (deepened, DEEP))
    )
    np.testing.assert_array_equal(before, after)
    tree = TreeConfig(depth=2, top_k=3, total_tokens=7)
    plain, deep = (
        make_engine(LLAMA, target, config, one, tree=tree).generate(
            PROMPTS, max_new_tokens=20, batch_size=2
        )
        for one, config in ((draft, PLAIN), (deepened, DEEP))
    )
    assert plain == deep and sum(plain[0].accepted_per_round) > 0


def test_a_trained_draft_is_deepened(runs: Runs, tmp_path: Path) -> None:
    eagle = runs.model("eagle")
    config = load_config(TrainConfig, config_file(runs, tmp_path, RUN, init_draft=eagle))
    stage = open_stage(config, tmp_path)
    stage.load_weights()
    params = stage.init_params()
    _, before = load_draft(eagle, target=read_record(runs.model("target")))
    np.testing.assert_array_equal(params["fc"]["weight"], before["fc"]["weight"])
    assert len(params["further"]) == 2
    for layer in params["further"]:
        assert not layer["attention"]["o"]["weight"].any() and layer["mlp"]["up"]["weight"].any()


@pytest.fixture(scope="module")
def trained(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deep")
    main(["--config", config_file(runs, folder, RUN, init_draft=runs.model("eagle"))])
    return folder / "run"


def test_every_layer_is_trained_and_the_texts_stay(runs, trained, tmp_path) -> None:
    record, draft = load_draft(trained / "model", target=read_record(runs.model("target")))
    assert (record.method, record.draft.layers_per_specialist) == ("poss12-deep3", (3, 1))
    for layer in draft["further"]:
        assert all(np.asarray(leaf).any() for leaf in jax.tree.leaves(layer))
    prompts = ["--prompt", "def area_7", "--tree", "2/2/5"]
    alone = generate(runs.model("target"), None, tmp_path, *prompts)
    deep = generate(runs.model("target"), str(trained / "model"), tmp_path, *prompts)
    assert [one["text"] for one in deep] == [one["text"] for one in alone]


@pytest.mark.slow
def test_a_deep_draft_of_8_bits_writes_the_same_texts() -> None:
    target = quantise_target(random_target(LLAMA), "int8")
    record = new_record(LLAMA, IDENTITY, tokenizer_from=None, quantised="int8")
    alone = Engine(record, target, EngineConfig(tree=TreeConfig(depth=2, top_k=2, total_tokens=5)))
    draft = new_record(DEEP, IDENTITY, tokenizer_from=None)
    deep = alone.with_draft(draft, random_draft(DEEP))
    for layer in deep.weights.draft["further"]:
        assert isinstance(layer["attention"]["o"]["weight"], Quantised)
    texts, drafted = (
        [one.output_ids for one in engine.generate(PROMPTS, max_new_tokens=20, batch_size=2)]
        for engine in (alone, deep)
    )
    assert texts == drafted


@pytest.mark.parametrize(
    ("spans", "layers", "error"),
    [
        ((1, 1), (1, 2), r"only the first specialist may have several layers, got \[1, 2\]"),
        ((1, 1), (2, 1, 1), r"only the first .*\[2, 1, 1\] for positions_per_specialist \[1, 1\]"),
        ((2, 1), (2,), "a specialist of several layers drafts one position, and another one"),
    ],
)
def test_layers_that_training_cannot_follow(spans, layers, error) -> None:
    with pytest.raises(ValueError, match=error):
        DraftConfig(layer=LLAMA, positions_per_specialist=spans, layers_per_specialist=layers)


def test_settings_and_layouts_without_room_for_it(runs, trained, tmp_path) -> None:
    values = DRAFT | {"specialists": {"positions_per_specialist": [1, 2], "depth": 3}}
    config = config_file(runs, tmp_path, values, init_draft=str(trained / "model"))
    assert "want 3 or more, as init_draft" in refusal(main, "--config", config)
    model, target = str(trained / "model"), runs.model("target")
    arguments = ["--model", model, "--target", target, "--output", str(tmp_path / "exported")]
    assert "no layout holds a specialist of 3 layers" in refusal(convert, "export", *arguments)
