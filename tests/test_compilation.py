"""Shapes cost a compilation each, and only once."""

import jax
import pytest
from models import make_engine, random_target, tiny_llama

from poss_jax.config.decoding import SamplingConfig
from poss_jax.config.models import DraftConfig, TreeConfig
from poss_jax.config.reading import UserError
from poss_jax.engine.engine import Engine


@pytest.fixture
def engine() -> Engine:
    llama = tiny_llama(num_layers=1, max_position_embeddings=512)
    config = DraftConfig(layer=llama)
    tree = TreeConfig(depth=1, top_k=2, total_tokens=3)
    return make_engine(llama, random_target(llama), config, tree=tree)


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
    engine.generate([[1, 2, 3]], max_new_tokens=5)
    assert compilations
    compilations.clear()
    engine.generate([[4, 5, 6, 7, 8]], max_new_tokens=9)
    engine.generate([[1] * 90], max_new_tokens=30)
    assert not compilations
    engine.generate([[1] * 200], max_new_tokens=9)
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


def test_other_settings_compile_nothing(engine, compilations):
    settings = [
        SamplingConfig(temperature=1, seed=3),
        SamplingConfig(temperature=0.5, top_k=3, top_p=0.9, min_p=0.1, repetition_penalty=1.2),
        SamplingConfig(),
    ]
    call = {"max_new_tokens": 5, "batch_size": 2}
    engine.generate([[1, 2, 3], [4]], sampling=[settings[0], settings[2]], **call)
    assert compilations
    compilations.clear()
    engine.generate([[4, 5]] * 6, sampling=[*settings, *settings], **call)
    assert not compilations
