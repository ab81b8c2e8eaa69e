"""The seam: a draft family with one more parameter is one file, this one.

The family's `gain` multiplies features before the head. Initial value, checkpoint, sharding,
PyTorch name, training and decoding follow from the lines of `GAINED`; nothing else knows of it.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from models import random_draft, random_target, random_tokens, stacked, tiny_llama
from oracle import greedy_request

from poss_jax.checkpoint.folder import load_draft, write_model
from poss_jax.checkpoint.record import TargetIdentity, new_record, read_record
from poss_jax.config.models import DraftConfig, MeshConfig, TreeConfig
from poss_jax.config.reading import UserError
from poss_jax.config.training import ObjectiveConfig
from poss_jax.convert.names import slots_by_key
from poss_jax.decode import speculate
from poss_jax.decode.state import StaticShape, Weights
from poss_jax.learn.state import init_state
from poss_jax.learn.step import make_draft_step
from poss_jax.learn.task import DraftTask
from poss_jax.model.documents import TrainBatch
from poss_jax.model.families import FAMILIES, family_of, init_draft
from poss_jax.model.families.eagle import EAGLE
from poss_jax.model.layers import norm_row
from poss_jax.model.parameters import item_shapes, partition, split_items
from poss_jax.model.sharding import make_mesh
from poss_jax.model.specialists import borrow_from_target

GAINED = dataclasses.replace(
    EAGLE,
    parameters={**EAGLE.parameters, **norm_row("gain", "output_gain")},
    init=lambda config, key: (
        EAGLE.init(config, key) | {"gain": {"scale": jnp.full(config.layer.hidden_size, 0.5)}}
    ),
    read=lambda params, config, features: features * params["gain"]["scale"][None, None],
)
LLAMA = tiny_llama(vocab_size=23)
CONFIG = DraftConfig(layer=LLAMA, positions_per_specialist=(1, 2), family="gained")
D = LLAMA.hidden_size


@pytest.fixture(autouse=True)
def gained(monkeypatch):
    monkeypatch.setitem(FAMILIES, "gained", GAINED)


def test_an_unknown_family_is_named():
    config = dataclasses.replace(CONFIG, family="gainde")
    with pytest.raises(
        UserError, match=r"draft family: want one of eagle, eagle3, mtp, gained, got 'gainde'"
    ):
        family_of(config)


def test_items_shapes_names_and_shardings_follow():
    assert item_shapes(CONFIG)["gain"] == {"scale": (D,)}
    assert "gain" not in item_shapes(DraftConfig(layer=LLAMA))
    assert str(slots_by_key(CONFIG)["output_gain.weight"]) == "gain/scale"
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    assert partition("opt_state/0/mu/gain/scale", (D,), mesh) == P(None)


def test_it_is_written_and_read(tmp_path):
    draft = init_draft(CONFIG, jax.random.key(0))
    identity = TargetIdentity(name="tiny", embedding_sha256="e", head_sha256="h")
    target = new_record(LLAMA, identity, tokenizer_from=None)
    write_model(
        tmp_path / "draft",
        new_record(CONFIG, identity, tokenizer_from=None),
        split_items(CONFIG, draft),
        tokenizer_from=None,
    )
    record, loaded = load_draft(tmp_path / "draft", target=target)
    assert record.draft == CONFIG
    jax.tree.map(np.testing.assert_array_equal, loaded, draft)


def test_the_family_of_eagle_is_not_written(tmp_path):
    """Folders of format version 1 name no family: theirs is EAGLE's."""
    config = DraftConfig(layer=LLAMA)
    identity = TargetIdentity(name="tiny", embedding_sha256="e", head_sha256="h")
    record = new_record(config, identity, tokenizer_from=None)
    items = split_items(config, init_draft(config, jax.random.key(0)))
    write_model(tmp_path / "draft", record, items, tokenizer_from=None)
    assert read_record(tmp_path / "draft").draft.family == "eagle"
    written = (tmp_path / "draft" / "model.json").read_text()
    assert "gained" not in written and '"eagle"' not in written


def test_it_is_trained():
    target, draft = stacked(random_target(LLAMA)), stacked(random_draft(CONFIG))
    tokens = random_tokens(LLAMA, 2, 10)
    batch = TrainBatch(tokens, jnp.ones_like(tokens, bool), jnp.ones_like(tokens))
    before = np.asarray(draft["gain"]["scale"])
    objective = ObjectiveConfig(top_k=3)
    task = DraftTask(LLAMA, dataclasses.replace(CONFIG, trained_depth=3), objective)
    optimizer = optax.sgd(1.0)
    step = make_draft_step(task, optimizer)
    state, metrics = step(init_state(draft, optimizer), target, batch, jax.random.key(1))
    assert np.isfinite(metrics["loss_per_depth"]).all()
    assert np.all(np.asarray(state.params["gain"]["scale"]) != before)


def test_it_is_decoded_with():
    """The tree depends on the parameter, the text does not."""
    target, draft = random_target(LLAMA), random_draft(CONFIG)
    request = greedy_request([5, 6, 7, 8], limit=12)

    @jax.jit
    def run(weights: Weights):
        drafted = StaticShape(LLAMA, CONFIG, TreeConfig(depth=3, top_k=2, total_tokens=8), 64)
        alone = drafted._replace(draft=None)
        state = speculate.start(weights, drafted, request)
        tree = speculate.draft_tree(weights, drafted, request, state, None)
        texts = (speculate.generate(weights, config, request) for config in (drafted, alone))
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
