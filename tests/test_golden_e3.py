"""Equality with the original EAGLE-3 and PosS on EAGLE-3: inner states, rounds, generations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden import METHODS_E3, ROOT_E3, TREES_E3, Golden, load_golden, read_npz
from test_golden import check_generations, check_rounds, check_stops

from poss_jax.model.cache import init_cache
from poss_jax.model.target import prefill


@pytest.fixture(scope="module", params=METHODS_E3)
def golden(request, tmp_path_factory) -> Golden:
    """One recorded draft, converted once for all tests of a worker."""
    return load_golden(tmp_path_factory.getbasetemp() / "golden", request.param)


def test_inner_states_and_logits_of_the_target(tmp_path_factory):
    golden = load_golden(tmp_path_factory.getbasetemp() / "golden", METHODS_E3[0])
    recorded = read_npz("target_forward", ROOT_E3)
    tokens = jnp.asarray(recorded["input_ids"])
    lengths = jnp.full(len(tokens), tokens.shape[1], jnp.int32)
    aux_layers = golden.draft_config.aux_layers
    assert list(aux_layers) == recorded["aux_layers"].tolist()

    @jax.jit
    def run(params):
        size = {"num_layers": golden.llama.num_layers, "size": tokens.shape[1]}
        cache = init_cache(golden.llama, **size, rope_length=lengths, dtype=jnp.float32)
        return prefill(params, golden.llama, cache, tokens, lengths, aux_layers=aux_layers)

    out = run(golden.target)
    np.testing.assert_allclose(out.features, recorded["aux_hidden"], atol=3e-5)
    np.testing.assert_allclose(out.logits, recorded["logits"][:, -1], atol=3e-5)


@pytest.mark.parametrize("suffix", TREES_E3)
def test_rounds(golden, suffix):
    check_rounds(golden, suffix)


@pytest.mark.parametrize(("part", "suffix"), [("cases", ""), ("small", "_small")])
def test_generations(golden, part, suffix):
    check_generations(golden, part, suffix)


def test_generations_end_at_the_first_stop_token(golden):
    check_stops(golden)
