"""Sampled texts: speculative = autoregressive for any settings, prompts, seeds and drafts.

The logits are whole numbers, summed without rounding, so that no difference is a near tie.
"""

from functools import cache

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models import exact_pair
from test_certain import DRAFT, LLAMA, NUM_NEW, PROMPT_SIZE, TREES, alone, program, request

from poss_jax.decode.sampling import Sampling
from poss_jax.decode.state import Request, Weights
from poss_jax.model.specialists import borrow_from_target

V = LLAMA.vocab_size
# A tree takes seconds to compile; this is the smallest one.
SHAPES = TREES if settings.get_current_profile_name() == "fuzz" else TREES[2:3]
compiled = cache(program)


def draw_request(rng: np.random.Generator) -> Request:
    """Rows of every kind, of the shape that `test_certain` compiles for."""
    B = len(request().tokens)

    def some(dtype: type, default: float, values: np.ndarray) -> jnp.ndarray:
        return jnp.asarray(np.where(rng.random(B) < 0.5, default, values), dtype)

    sampling = Sampling(
        seed=jnp.asarray(rng.integers(0, 2**32, B), jnp.uint32),
        temperature=jnp.asarray(np.where(rng.random(B) < 0.1, 0, 10 ** rng.uniform(-7, 2, B))),
        top_k=some(jnp.int32, 0, rng.choice([1, 2, 5, V, 2**31 - 1], B)),
        top_p=some(jnp.float32, 1, rng.uniform(1e-6, 1, B)),
        min_p=some(jnp.float32, 0, rng.uniform(0, 1, B)),
        repetition_penalty=some(jnp.float32, 1, 10 ** rng.uniform(-2, 2, B)),
        bias_ids=jnp.asarray(rng.integers(-1, V, (B, 2)), jnp.int32),
        bias=jnp.asarray(rng.normal(size=(B, 2)) * 10 ** rng.uniform(-2, 3), jnp.float32),
    )
    return Request(
        tokens=jnp.asarray(rng.integers(0, V, (B, PROMPT_SIZE)), jnp.int32),
        lengths=jnp.asarray(rng.integers(1, PROMPT_SIZE + 1, B), jnp.int32),
        max_new_tokens=jnp.asarray(rng.integers(1, NUM_NEW + 1, B), jnp.int32),
        stop_ids=jnp.asarray([[rng.integers(-1, V)]], jnp.int32),
        sampling=sampling,
    )


@pytest.mark.slow
@given(
    st.sampled_from(SHAPES),
    st.integers(0, 2**32 - 1),
    st.sampled_from([0.125, 1.0, 16.0, 1024.0]),
    st.integers(0, LLAMA.hidden_size),
)
def test_speculative_equals_autoregressive(shape, seed, sharpness, num_flipped):
    target, drafted = exact_pair(
        LLAMA, DRAFT, sharpness=sharpness, num_flipped=num_flipped, seed=seed
    )
    asked = draw_request(np.random.default_rng(seed))
    wanted = alone(Weights(target, {}), asked)
    output = compiled(shape)(Weights(target, borrow_from_target(drafted, target)), asked)
    np.testing.assert_array_equal(output.num_tokens, wanted.num_tokens)
    is_text = np.arange(NUM_NEW)[None] < np.array(wanted.num_tokens)[:, None]
    texts = (np.where(is_text, one.tokens[:, :NUM_NEW], -1) for one in (output, wanted))
    np.testing.assert_array_equal(*texts)
    assert int(output.num_accepted.max()) <= shape[0]
