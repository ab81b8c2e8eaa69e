"""The target against `transformers`, and its ways through the cache against plain encoding."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from convert_sources import run as convert
from jax import lax
from models import random_draft, random_target, random_tokens, stacked, tiny_llama

from poss_jax.checkpoint.folder import load_target
from poss_jax.config.models import DraftConfig, LlamaConfig, RopeConfig, TreeConfig
from poss_jax.decode import speculate
from poss_jax.decode.state import Request, StaticShape, Weights
from poss_jax.decode.tree import make_tree, root_tree
from poss_jax.model.cache import KVCache
from poss_jax.model.documents import encode
from poss_jax.model.specialists import borrow_from_target
from poss_jax.model.target import decode, read_logits, verify

LENGTHS, PROMPT_SIZE, NUM_STEPS, CHUNK = (5, 12), 14, 6, 4
ENDS = tuple(length + NUM_STEPS for length in LENGTHS)
CONFIG = tiny_llama(
    qkv_bias=True,
    o_bias=True,
    qk_norm=True,
    rope=RopeConfig(type="llama3", factor=4.0, theta=100.0, original_max_position_embeddings=32),
)


def prompts_of(params, config: LlamaConfig, tokens, *, chunk=CHUNK, draft=None):
    """Weights, shapes and the request of prompts of `LENGTHS`."""
    drafted, weights = (None, {}) if draft is None else draft
    lengths, limits = jnp.array(LENGTHS, jnp.int32), jnp.full(len(LENGTHS), NUM_STEPS, jnp.int32)
    tree = TreeConfig(depth=1, top_k=1, total_tokens=2)
    shape = StaticShape(config, drafted, tree, rows=4 * CHUNK + 16, chunk=chunk)
    request = Request(tokens[:, :PROMPT_SIZE], lengths, limits, stop_ids=jnp.full((1, 1), -1))
    return Weights(params, weights), shape, request


def read_through_cache(params, config: LlamaConfig, tokens):
    """(logits, features) of rows length - 1 to the end, by prefill and decode steps."""
    lengths = jnp.array(LENGTHS, jnp.int32)
    out = speculate.prefill(*prompts_of(params, config, tokens))
    tree = root_tree(tokens[:, 0])

    def step(cache, index):
        following = jnp.take_along_axis(tokens, (lengths + index)[:, None], axis=1)
        node = verify(params, config, cache, following, tree.depths, tree.ancestors)
        logits, cache = decode(params, config, cache, following[:, 0])
        return cache, (logits, node.features[:, 0])

    _, rest = lax.scan(step, out.cache, jnp.arange(NUM_STEPS))
    first = out.logits, out.features[:, 0]
    steps = jax.tree.map(lambda a, b: jnp.concatenate([a[None], b]), first, rest)
    return jax.tree.map(lambda x: x.swapaxes(0, 1), steps)


@partial(jax.jit, static_argnums=1)
def read_both_ways(params, config: LlamaConfig, tokens):
    """(logits, features) of all rows by `encode`, and of the last ones through the cache."""
    features = encode(stacked(params), config, tokens)
    whole = read_logits(params, features), features
    return whole, read_through_cache(params, config, tokens)


# --------------------------------------------------------------------------------------------------
# transformers

TRAINED = "original_max_position_embeddings"
ROPES = {
    "default": {"rope_type": "default", "rope_theta": 1e4},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    # max_position_embeddings is 8: all texts are longer.
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
    "llama3": {"rope_type": "llama3", "rope_theta": 1e3, "factor": 8.0, TRAINED: 64}
    | {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {"rope_type": "yarn", "rope_theta": 1e3, "factor": 4.0, TRAINED: 64},
    "longrope": {  # the second text outgrows the trained context
        "rope_type": "longrope",
        "rope_theta": 1e3,
        "short_factor": [1.0, 1.2, 1.5, 2.0],
        "long_factor": [1.5, 3.0, 6.0, 12.0],
        "original_max_position_embeddings": 14,
    },
}


def random_transformer(model_type: str = "llama", **changes):
    """A random model of `transformers` in float32."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = {
        "vocab_size": 53,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 8,
    }
    config = AutoConfig.for_model(model_type, **shape | changes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        width = parameter.shape[-1] if parameter.ndim == 2 else 25
        is_scale = name.endswith("norm.weight")
        torch.nn.init.normal_(parameter, mean=float(is_scale), std=width**-0.5)
    return model


# Model type, and what differs from the shape above.
FAMILIES = {
    "llama": ("llama", {"num_key_value_heads": 4}),
    "llama_biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama_tied": ("llama", {"tie_word_embeddings": True}),
    "llama_head_dim": ("llama", {"head_dim": 12, "num_key_value_heads": 1}),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 8}),
    "phi3": ("phi3", {TRAINED: 14, "max_position_embeddings": 64, "pad_token_id": None}),
}
# Every family, and every rope in two of them.
CASES = [(family, "default") for family in FAMILIES]
CASES += [("llama", rope) for rope in ROPES if rope not in ("default", "longrope")]
CASES += [("qwen3", rope) for rope in ROPES if rope not in ("default", "longrope")]
CASES += [("phi3", "longrope")]


@pytest.mark.torch
@pytest.mark.parametrize(("family", "rope"), CASES)
def test_transformers(tmp_path, family, rope):
    import torch

    model_type, changes = FAMILIES[family]
    model = random_transformer(model_type, rope_parameters=ROPES[rope], **changes)
    model.save_pretrained(tmp_path / "source")
    convert("target", source=tmp_path / "source", output=tmp_path / "target")
    record, params = load_target(tmp_path / "target")
    assert record.config.rope.type == rope
    tokens = random_tokens(record.config, 2, max(ENDS))
    whole, through_cache = read_both_ways(params, record.config, tokens)

    def assert_equal(row, end, first, got):
        with torch.no_grad():
            ids = torch.tensor(np.asarray(tokens)[row : row + 1, :end], dtype=torch.long)
            out = model(ids, output_hidden_states=True)
        for ours, theirs in zip(got, (out.logits, out.hidden_states[-1]), strict=True):
            np.testing.assert_allclose(ours[row], theirs[0, first:], rtol=0, atol=2e-5)

    # Dynamic frequencies and longrope's follow the longest text seen: short ones first.
    for row, length in enumerate(LENGTHS):
        assert_equal(row, length + NUM_STEPS, length - 1, through_cache)
    for row in range(len(LENGTHS)):
        assert_equal(row, max(ENDS), 0, whole)


# --------------------------------------------------------------------------------------------------
# Through the cache


@pytest.fixture(scope="module")
def target():
    return random_target(CONFIG)


def test_prefill_and_decode_read_what_encode_reads(target):
    tokens = random_tokens(CONFIG, 2, max(ENDS))
    whole, through_cache = read_both_ways(target, CONFIG, tokens)
    for complete, part in zip(whole, through_cache, strict=True):
        for row, length in enumerate(LENGTHS):
            want = complete[row, length - 1 : length + NUM_STEPS]
            np.testing.assert_allclose(part[row], want, rtol=0, atol=1e-5)


def random_tree(num_nodes: int):
    rng = np.random.default_rng(0)
    parents = [[0] + [rng.integers(node) for node in range(1, num_nodes)] for _ in LENGTHS]
    tokens = random_tokens(CONFIG, len(LENGTHS), num_nodes, seed=3)
    grow = jax.jit(make_tree, static_argnames="depth")
    return grow(tokens, jnp.array(parents, jnp.int32), depth=num_nodes)


def test_each_node_of_a_tree_reads_its_own_path(target):
    tokens, tree = random_tokens(CONFIG, 2, PROMPT_SIZE), random_tree(8)
    ancestors, node_tokens = np.asarray(tree.ancestors), np.asarray(tree.tokens)
    texts, ends = np.zeros((2, 8, PROMPT_SIZE + 8), np.int32), []
    for row, node in np.ndindex(2, 8):
        path = node_tokens[row, ancestors[row, node]]
        text = [*tokens[row, : LENGTHS[row]].tolist(), *path]
        texts[row, node, : len(text)] = text
        ends.append(len(text))
    assert len(set(ends)) > 6  # of many depths

    @jax.jit
    def run(params, tokens, tree, texts):
        cache = speculate.prefill(*prompts_of(params, CONFIG, tokens)).cache
        out = verify(params, CONFIG, cache, tree.tokens, tree.depths, tree.ancestors)
        return out, encode(stacked(params), CONFIG, texts)

    out, features = run(target, tokens, tree, jnp.asarray(texts.reshape(16, -1)))
    want = np.asarray(features)[np.arange(16), np.array(ends) - 1]
    np.testing.assert_allclose(out.features.reshape(16, -1), want, rtol=0, atol=1e-5)
    want = want @ np.asarray(target["head"]["weight"]).T
    np.testing.assert_allclose(out.logits.reshape(16, -1), want, rtol=0, atol=1e-5)


def test_rows_beyond_the_length_and_padding_are_never_read(target):
    tokens, tree = random_tokens(CONFIG, 2, PROMPT_SIZE), random_tree(8)
    lengths = jnp.array(LENGTHS, jnp.int32)

    def spoil(cache: KVCache, first_row) -> KVCache:
        size = cache.k[0].shape[2]
        is_free = jnp.arange(size)[None] >= first_row[:, None]
        spoilt = [jnp.where(is_free[:, None, :, None], 1e30, x) for x in (*cache.k, *cache.v)]
        return cache.replace(k=spoilt[: CONFIG.num_layers], v=spoilt[CONFIG.num_layers :])

    @jax.jit
    def run(tokens, is_spoilt):
        weights, shape, request = prompts_of(target, CONFIG, tokens)
        empty = speculate.begin_prefill(weights, shape, request)
        cache = lax.cond(is_spoilt, spoil, lambda cache, _: cache, empty.cache, 0 * lengths)
        chunks = 0, -(-max(LENGTHS) // CHUNK)
        state = speculate.run_chunks(weights, shape, request, empty.replace(cache=cache), chunks)
        prompt = speculate.end_prefill(weights, request, state)
        cache = lax.cond(is_spoilt, spoil, lambda cache, _: cache, prompt.cache, lengths)
        nodes = verify(target, CONFIG, cache, tree.tokens, tree.depths, tree.ancestors)
        following = decode(target, CONFIG, cache, tree.tokens[:, 0])[0]
        first_values = prompt.cache.v[0][:, :, : PROMPT_SIZE + 2]
        return prompt.logits, prompt.features, nodes.logits, nodes.features, following, first_values

    is_padding = jnp.arange(PROMPT_SIZE)[None] >= lengths[:, None]
    *clean, values = run(tokens, jnp.array(False))
    *spoilt, spoilt_values = run(jnp.where(is_padding, 7, tokens), jnp.array(True))
    jax.tree.map(np.testing.assert_array_equal, spoilt, clean)
    assert (spoilt_values != values).any()  # the padding was another


@pytest.mark.parametrize("chunk", [3, 16])
def test_prefill_in_chunks_of_any_size(target, chunk):
    """Both caches hold the same keys and values; the draft's are of every row's features."""
    tokens = random_tokens(CONFIG, 2, PROMPT_SIZE)
    config = DraftConfig(layer=replace(CONFIG, num_layers=1))
    draft = config, borrow_from_target(random_draft(config), target, None)

    @partial(jax.jit, static_argnums=0)
    def run(chunk):
        return speculate.prefill(*prompts_of(target, CONFIG, tokens, chunk=chunk, draft=draft))

    whole, out = run(PROMPT_SIZE), run(chunk)
    np.testing.assert_array_equal(out.cache.length, LENGTHS)
    for name, num_unpaired in (("cache", 0), ("draft_cache", 1)):
        got, want = ([*cache.k, *cache.v] for cache in (getattr(x, name) for x in (out, whole)))
        for row, length in enumerate(LENGTHS):
            kept = np.s_[row, :, : length - num_unpaired]
            for rows in zip(got, want, strict=True):
                np.testing.assert_allclose(*(x[kept] for x in rows), atol=1e-5)
    np.testing.assert_allclose(out.features, whole.features, atol=1e-5)
    np.testing.assert_allclose(out.logits, whole.logits, atol=1e-5)


def rounded(params):
    """Parameters in bfloat16, and the same numbers in float32."""
    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    return narrow, jax.tree.map(lambda leaf: leaf.astype(jnp.float32), narrow)


def test_bfloat16_stays_bfloat16(target):
    narrow, wide = jax.jit(rounded)(target)
    tokens = random_tokens(CONFIG, 2, max(ENDS))
    outs, exact = (read_both_ways(params, CONFIG, tokens) for params in (narrow, wide))
    for out, want in zip(jax.tree.leaves(outs), jax.tree.leaves(exact), strict=True):
        is_logits = out.shape[-1] == CONFIG.vocab_size
        assert out.dtype == (jnp.float32 if is_logits else jnp.bfloat16)
        error = np.asarray(out, np.float32) - want
        assert np.linalg.norm(error) < 0.02 * np.linalg.norm(want)  # 0.011 measured
