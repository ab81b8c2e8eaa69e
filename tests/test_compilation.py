"""Shapes cost a compilation each, once; other settings and parameters of the target none."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from models import make_engine, random_target, tiny_llama

from poss_jax import Engine, SamplingConfig, TreeConfig, UserError
from poss_jax.config.models import DraftConfig, MeshConfig
from poss_jax.model.parameters import place_params
from poss_jax.model.quantise import quantise_target


@pytest.fixture
def engine() -> Engine:
    llama = tiny_llama(num_layers=1, max_position_embeddings=512)
    config = DraftConfig(layer=llama)
    return make_engine(llama, random_target(llama), config, tree=TREE)


@pytest.fixture
def compilations():
    """Names of the programs compiled so far in this test."""
    names = []

    def listen(event, duration, **details):
        if event == "/jax/core/compile/backend_compile_duration":
            names.append(details)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield names
    jax.monitoring.unregister_event_duration_listener(listen)


def test_a_second_call_of_the_same_shape_compiles_nothing(engine, compilations):
    settings = [
        SamplingConfig(temperature=1, seed=3),
        SamplingConfig(temperature=0.5, top_k=3, top_p=0.9, min_p=0.1, repetition_penalty=1.2),
        SamplingConfig(),
    ]
    call = {"max_new_tokens": 9, "batch_size": 2}
    engine.generate([[1, 2, 3], [4]], sampling=[settings[0], settings[2]], **call)
    assert compilations
    compilations.clear()
    engine.generate([[4, 5]] * 6, sampling=[*settings, *settings], **call)
    engine.generate([[1] * 90] * 2, sampling=settings[0], **call | {"max_new_tokens": 30})
    assert not compilations
    engine.generate([[1] * 200] * 2, sampling=settings[0], **call | {"max_new_tokens": 1})
    assert compilations


def test_what_is_compiled_beforehand_is_not_compiled_again(engine, compilations):
    engine.precompile([100])
    assert compilations
    compilations.clear()
    for sampling in (None, SamplingConfig(temperature=1, top_p=0.9, seed=3)):
        engine.generate([[1, 2, 3]], max_new_tokens=120, sampling=sampling)
        assert list(engine.stream([4] * 90, max_new_tokens=5, sampling=sampling))
    assert not compilations
    with pytest.raises(UserError, match="precompile: want 2 to 512 tokens, got 513"):
        engine.precompile([513])


LLAMA = tiny_llama(vocab_size=64, max_position_embeddings=128)
EAGLE = DraftConfig(layer=LLAMA)
EAGLE3 = DraftConfig(layer=LLAMA, family="eagle3", aux_layers=(0, 1), kv="shared", head_size=64)
TREE = TreeConfig(depth=1, top_k=2, total_tokens=3)
EVEN = tuple(range(0, 64, 2))
PROMPTS = [[1, 2, 3], [4, 5, 6, 7]]
SAMPLING = [SamplingConfig(temperature=1, seed=3), SamplingConfig()]


def answers(engine: Engine) -> list[Any]:
    return engine.generate(PROMPTS, max_new_tokens=12, batch_size=2, sampling=SAMPLING)


@pytest.mark.parametrize(
    "draft, vocabulary, tied",
    [
        pytest.param(EAGLE, EVEN, True, id="vocabulary of a tied head"),
        pytest.param(EAGLE3, None, False, id="eagle3"),
    ],
)
def test_an_updated_engine_is_one_that_was_made_of_the_new_weights(draft, vocabulary, tied):
    llama = replace(LLAMA, tie_embeddings=tied)

    def make(seed: int) -> Engine:
        target = random_target(llama, seed)
        return make_engine(llama, target, draft, vocabulary=vocabulary, tree=TREE)

    engine, wanted = make(seed=0), make(seed=7)
    old = answers(engine)
    engine.update_weights(random_target(llama, seed=7))
    jax.tree.map(lambda a, b: assert_equal(a, b), engine.weights, wanted.weights)
    # Rounds and drafted positions are equal too: the draft reads the new embedding and head.
    assert answers(engine) == answers(wanted) != old


def assert_equal(a: jax.Array, b: jax.Array) -> None:
    assert a.sharding == b.sharding and (a == b).all()


def test_an_update_compiles_nothing(compilations):
    engine = make_engine(LLAMA, random_target(LLAMA), EAGLE, tree=TREE)
    answers(engine)
    new = random_target(LLAMA, seed=7)
    compilations.clear()
    engine.update_weights(new)
    answers(engine)
    assert not compilations


@pytest.mark.parametrize("mesh", [None, MeshConfig(data=2, tensor=4)])
def test_an_update_goes_to_the_devices_of_the_old_weights(compilations, mesh):
    first, last = jax.devices()[0], jax.devices()[-1]
    target = jax.device_put(random_target(LLAMA), first)
    engine = make_engine(LLAMA, target, EAGLE, tree=TREE, mesh=mesh)
    old = answers(engine)
    places = [leaf.sharding for leaf in jax.tree.leaves(engine.weights)]
    engine.update_weights(jax.device_put(random_target(LLAMA, seed=7), last))
    compilations.clear()
    assert answers(engine) != old
    assert not compilations
    assert [leaf.sharding for leaf in jax.tree.leaves(engine.weights)] == places


def test_an_engine_of_the_same_target_and_a_running_stream_keep_it():
    target = random_target(LLAMA)
    engine = make_engine(LLAMA, target, EAGLE, tree=TREE)
    other = engine.with_tree(TREE)
    wanted = answers(engine)[0]
    stream = engine.stream(PROMPTS[0], max_new_tokens=12, sampling=SAMPLING[0])
    chunks = [next(stream)]
    engine.update_weights(random_target(LLAMA, seed=7))
    assert engine.fingerprint != other.fingerprint == engine.record.fingerprint
    assert [*chunks, *stream][-1].answer == wanted == answers(other)[0]
    engine.update_weights(target)
    assert len(target["layers"]) == LLAMA.num_layers  # the caller's own list
    assert answers(engine)[0] == wanted


@pytest.mark.parametrize("mesh", [None, MeshConfig(data=2, tensor=4)])
def test_a_trainer_may_donate_what_it_gave(mesh):
    engine = make_engine(LLAMA, random_target(LLAMA), EAGLE, tree=TREE, mesh=mesh)
    new = random_target(LLAMA, seed=7)
    if engine.mesh is not None:
        new = place_params(new, engine.mesh)
    engine.update_weights(new)
    wanted = answers(engine)
    step = jax.jit(partial(jax.tree.map, lambda leaf: leaf + 1), donate_argnums=0)
    jax.block_until_ready(step(new))
    assert new["embed"]["weight"].is_deleted()
    assert answers(engine) == wanted


@pytest.mark.parametrize(
    "change, message",
    [
        (
            lambda params: params | {"norm": {"scale": jnp.ones(33)}},
            r"norm/scale: want \[32\] float32, got \[33\] float32; give parameters",
        ),
        (
            lambda params: params | {"layers": params["layers"][:1]},
            r"layers/1/attention/k/weight: want \[16, 32\] float32, got none",
        ),
        (
            lambda params: jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params),
            r"embed/weight: want \[64, 32\] float32, got \[64, 32\] bfloat16",
        ),
        (lambda params: params | {"bias": jnp.ones(3)}, r"bias: want none, got \[3\] float32"),
    ],
)
def test_other_parameters_are_refused_and_change_nothing(change, message):
    engine = make_engine(LLAMA, random_target(LLAMA), tree=TREE)
    weights = engine.weights
    with pytest.raises(UserError, match=message) as refused:
        engine.update_weights(change(random_target(LLAMA, seed=7)))
    assert "\n" not in str(refused.value)
    assert engine.weights is weights


def test_a_quantised_target_is_refused():
    engine = make_engine(LLAMA, quantise_target(random_target(LLAMA), "int8"))
    with pytest.raises(UserError, match="want a target that is not quantised; load it without"):
        engine.update_weights(random_target(LLAMA))
