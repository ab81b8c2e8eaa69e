"""Log-probabilities of prompts, chunk by chunk, beside a pass over the whole text."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import Runs

from poss_jax import Engine
from poss_jax.checkpoint.folder import load_target
from poss_jax.config.models import MeshConfig
from poss_jax.engine.scoring import score_prompt
from poss_jax.model.documents import encode
from poss_jax.model.target import stack_layers

TEXT = np.random.default_rng(0).integers(3, 300, 200).tolist()


@pytest.fixture(scope="module")
def expected(runs: Runs) -> np.ndarray:
    """Log-probabilities after each token [T V]."""
    record, params = load_target(runs.model("target"), jnp.float32)
    layers = {"layers": stack_layers(params["layers"])}
    features = encode(params | layers, record.llama, jnp.asarray([TEXT]))
    return np.asarray(jax.nn.log_softmax(features[0] @ params["head"]["weight"].T, axis=-1))


@pytest.mark.parametrize("settings", [{}, {"mesh": MeshConfig(data=4, tensor=2)}], ids=str)
def test_prompts_are_scored_as_one_pass_scores_them(runs, expected, settings) -> None:
    engine = Engine.load(runs.model("target"), runs.model("poss2"), **settings)
    for length in (1, 2, 32, 33, 200) if not settings else (33,):  # a chunk has 32
        found = score_prompt(engine, TEXT[:length], num_logprobs=3, max_length=256)
        assert len(found) == length - 1
        for row, token, one in zip(expected, TEXT[1:], found, strict=False):
            best = np.argsort(-row, kind="stable")[:3]
            assert one.ids == best.tolist()
            np.testing.assert_allclose([one.chosen, *one.top], row[[token, *best]], atol=2e-5)
