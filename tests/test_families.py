"""The seam: a draft family with one more parameter is one file, this one.

The families' `gain` multiplies features before the head. Initial value, checkpoint, sharding,
PyTorch name, training and decoding follow from the lines of `add_gain`; nothing else knows of them.
"""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from models import (
    IDENTITY,
    decode_all,
    random_draft,
    random_target,
    random_tokens,
    stacked,
    tiny_llama,
)
from oracle import greedy_request

from poss_jax.checkpoint.folder import load_draft
from poss_jax.checkpoint.record import new_record, read_record
from poss_jax.checkpoint.writing import write_model
from poss_jax.config.models import DraftConfig, MeshConfig, TreeConfig
from poss_jax.config.reading import UserError, config_to_dict
from poss_jax.config.training import ObjectiveConfig
from poss_jax.convert.reading import slots_by_key
from poss_jax.decode import speculate
from poss_jax.decode.state import StaticShape, Weights
from poss_jax.learn.step import init_state, make_draft_step
from poss_jax.learn.task import DraftTask
from poss_jax.model.documents import TrainBatch
from poss_jax.model.families import FAMILIES, init_draft
from poss_jax.model.families.eagle import EAGLE
from poss_jax.model.families.eagle3 import EAGLE3
from poss_jax.model.layers import norm_row
from poss_jax.model.parameters import item_shapes, partition, split_items
from poss_jax.model.sharding import make_mesh
from poss_jax.model.specialists import Family, borrow_from_target, split_embedding
from poss_jax.shapes import Array, Params


def add_gain(family: Family) -> Family:
    """The family with one more parameter."""

    def init(config: DraftConfig, key: Array) -> Params:
        return family.init(config, key) | {"gain": {"scale": jnp.full(D, 0.5)}}

    def read(params: Params, config: DraftConfig, features: Array) -> Array:
        gain = jnp.expand_dims(params["gain"]["scale"], range(features.ndim - 1))
        return family.read(params, config, features) * gain

    parameters = {**family.parameters, **norm_row("gain", "output_gain")}
    return dataclasses.replace(family, parameters=parameters, init=init, read=read)


LLAMA = tiny_llama(vocab_size=23)
LAYER = dataclasses.replace(LLAMA, num_layers=1)
D = LLAMA.hidden_size
PLAIN = DraftConfig(layer=LAYER)
GAINED = DraftConfig(layer=LAYER, positions_per_specialist=(1, 2), family="gained")
GAINED3 = DraftConfig(
    layer=LAYER,
    layers_per_specialist=(2,),
    family="gained3",
    kv="shared",
    aux_layers=(0, 1),
    has_embedding=True,
)
MASKED3 = dataclasses.replace(GAINED3, mask_token=5)


@pytest.fixture(autouse=True)
def families(monkeypatch):
    monkeypatch.setitem(FAMILIES, "gained", add_gain(EAGLE))
    monkeypatch.setitem(FAMILIES, "gained3", add_gain(EAGLE3))


@pytest.mark.parametrize("config", [GAINED, GAINED3], ids=["eagle", "eagle3"])
def test_items_shapes_names_and_shardings_follow(config):
    assert item_shapes(config)["gain"] == {"scale": (D,)}
    assert "gain" not in item_shapes(PLAIN)
    assert str(slots_by_key(config)["output_gain.weight"]) == "gain/scale"
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    assert partition("opt_state/0/mu/gain/scale", (D,), mesh) == P(None)


def test_it_is_written_and_read(tmp_path):
    config, draft = GAINED3, init_draft(GAINED3, jax.random.key(0))
    record = new_record(config, IDENTITY, tokenizer_from=None)
    write_model(tmp_path / "draft", record, split_items(config, draft), tokenizer_from=None)
    target = new_record(LLAMA, IDENTITY, tokenizer_from=None)
    record, loaded = load_draft(tmp_path / "draft", target=target)
    assert record.draft == config
    jax.tree.map(np.testing.assert_array_equal, loaded, draft)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"family": "gainde"}, "draft family: want one of eagle, .*, gained3, got 'gainde'"),
        ({"has_embedding": True}, "has_embedding: the family eagle has no such drafts; leave it"),
        ({"layers_per_specialist": [2]}, "layers_per_specialist: the family eagle has no such"),
        ({"fc_bias": 7}, "config: fc_bias: Input should be a valid boolean"),
    ],
)
def test_a_record_that_does_not_fit_its_family_is_refused(tmp_path, changes, message):
    values = config_to_dict(new_record(PLAIN, IDENTITY, tokenizer_from=None))
    assert "family" not in values["config"]  # as in folders of format version 1: EAGLE's
    values["config"] |= changes
    (tmp_path / "model.json").write_text(json.dumps(values))
    with pytest.raises(UserError, match=rf"model\.json: {message}"):
        read_record(tmp_path)


def test_it_is_trained():
    draft, own = split_embedding(stacked(random_draft(GAINED3)))
    target = stacked(random_target(LLAMA)) | {"draft": own}
    tokens = random_tokens(LLAMA, 2, 10)
    batch = TrainBatch(tokens, jnp.ones_like(tokens, bool), jnp.ones_like(tokens))
    before = np.asarray(draft["gain"]["scale"])
    objective = ObjectiveConfig(top_k=3, feature_weight=0.0)
    task = DraftTask(LLAMA, dataclasses.replace(GAINED3, trained_depth=3), objective)
    optimizer = optax.sgd(1.0)
    step = make_draft_step(task, optimizer)
    state, metrics = step(init_state(draft, optimizer), target, batch, jax.random.key(1))
    assert np.isfinite(metrics["loss_per_depth"]).all()
    assert np.all(np.asarray(state.params["gain"]["scale"]) != before)


@pytest.mark.parametrize(
    "config", [GAINED, pytest.param(MASKED3, marks=pytest.mark.slow)], ids=["eagle", "p-eagle"]
)
def test_it_is_decoded_with(config):
    """The tree depends on the parameter, the text does not."""
    target, draft = random_target(LLAMA), random_draft(config)
    request = greedy_request([5, 6, 7, 8], limit=12)

    @jax.jit
    def run(weights: Weights):
        drafted = StaticShape(LLAMA, config, TreeConfig(depth=3, top_k=2, total_tokens=8), 64)
        alone = drafted._replace(draft=None)
        state = speculate.start(weights, drafted, request)
        tree = speculate.draft_tree(weights, drafted, request, state, None)
        texts = (decode_all(weights, shape, request) for shape in (drafted, alone))
        return tree.tokens, *(state.output.tokens[:, :12] for state in texts)

    trees = []
    for sign in (1, -1):
        gain = {"scale": sign * draft["gain"]["scale"]}
        tree, speculative, autoregressive = run(
            Weights(target, borrow_from_target(draft | {"gain": gain}, target))
        )
        np.testing.assert_array_equal(speculative, autoregressive)
        trees.append(np.asarray(tree))
    assert (trees[0] != trees[1]).any()
