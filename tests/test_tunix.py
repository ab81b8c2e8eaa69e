"""The rollout engine of examples/tunix, where tunix is installed."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from models import make_engine, random_draft, random_target, stacked, tiny_llama

from poss_jax import Engine, TreeConfig, UserError
from poss_jax.config.models import DraftConfig, MeshConfig
from poss_jax.model.documents import encode

with pytest.MonkeyPatch.context() as patch:
    patch.setattr("warnings.showwarning", lambda *args, **kwargs: None)
    pytest.importorskip("tunix.rl.rl_cluster", reason="needs tunix: see examples/tunix/README.md")

from flax import nnx
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.models.llama3 import model as llama3
from tunix.rl import common, rl_cluster
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner
from tunix.rl.rollout.base_rollout import RolloutConfig

from examples.tunix.rollout import PossRollout, rotate_as_tunix, target_params

pytestmark = pytest.mark.filterwarnings("ignore")  # tunix's

LLAMA = tiny_llama(vocab_size=64, max_position_embeddings=128)
DRAFT = DraftConfig(layer=LLAMA, positions_per_specialist=(1, 2))
PROMPTS = ["hello", "wor", "a longer prompt", "hello", "x"]
CONFIG = RolloutConfig(max_tokens_to_generate=16, max_prompt_length=8, temperature=1.0)
PAD, BOS, EOS = 0, 1, 2


class Letters:
    """A tokenizer of one token per character."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) % 60 + 3 for letter in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(token + 32) for token in ids)

    def bos_id(self) -> int:
        return BOS

    def eos_id(self) -> int:
        return EOS

    def pad_id(self) -> int:
        return PAD


@pytest.fixture(autouse=True)
def promotion() -> Iterator[None]:
    """Allows what tunix and optax do."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def make_policy(seed: int = 0, **changes: Any) -> llama3.Llama3:
    """A policy whose weights say something; tunix draws MLPs of zeros."""
    shape = {
        "num_layers": LLAMA.num_layers,
        "vocab_size": LLAMA.vocab_size,
        "embed_dim": LLAMA.hidden_size,
        "hidden_dim": LLAMA.intermediate_size,
        "num_heads": LLAMA.num_heads,
        "head_dim": LLAMA.head_dim,
        "num_kv_heads": LLAMA.num_kv_heads,
        "rope_theta": 500_000,
        "norm_eps": LLAMA.rms_norm_eps,
    }
    model = llama3.Llama3(llama3.ModelConfig(**shape | changes), rngs=nnx.Rngs(0))
    rng = np.random.default_rng(seed)

    def draw(leaf: jax.Array) -> jax.Array:
        offset, scale = (1, 0.2) if leaf.ndim == 1 else (0, 0.3)
        return jnp.asarray(offset + scale * rng.standard_normal(leaf.shape), leaf.dtype)

    nnx.update(model, jax.tree.map(draw, nnx.state(model)))
    return model


def loaded_engine(*, draft_seed: int | None = 1, mesh: MeshConfig | None = None) -> Engine:
    target = jax.device_put(random_target(LLAMA), jax.devices()[0])  # as a loaded one lies
    tree = TreeConfig(depth=3, top_k=2, total_tokens=8)
    drafted = () if draft_seed is None else (DRAFT, random_draft(DRAFT, draft_seed))
    return make_engine(LLAMA, target, *drafted, tree=tree, mesh=mesh)


def make_rollout(policy: llama3.Llama3, **options: Any) -> PossRollout:
    tokenizer, engine = TokenizerAdapter(Letters()), loaded_engine(**options)
    return PossRollout(policy, tokenizer, engine=engine, batch_size=2, mesh=None)


def their_log_probs(policy: llama3.Llama3, prompts: Any, completions: Any) -> np.ndarray:
    graph, state = nnx.split(policy)
    out = common.compute_per_token_logps(graph, state, prompts, completions, PAD, EOS)
    return np.where(completions == PAD, 0, out)


def padded_rows() -> tuple[jax.Array, jax.Array]:
    """Prompts padded on the left, completions on the right; one prompt is a single token."""
    tokens = np.random.default_rng(2).integers(3, 64, (3, 90))
    tokens[0, :5] = tokens[0, -7:] = tokens[2, :19] = PAD
    return jnp.asarray(tokens[:, :20]), jnp.asarray(tokens[:, 20:])


@pytest.mark.parametrize("tied", [False, True])
def test_a_converted_policy_gives_its_logits(tied):
    policy = make_policy(weight_tying=tied)
    params = target_params(nnx.state(policy), jnp.float32)
    tokens = jnp.asarray(np.random.default_rng(3).integers(0, 64, (2, 48)))
    rows = jnp.broadcast_to(jnp.arange(48), (2, 48))
    wanted, _ = policy(tokens, rows, None, jnp.tril(jnp.ones((2, 48, 48), bool)))
    hidden = encode(stacked(params), rotate_as_tunix(LLAMA), tokens)
    logits = hidden @ params["embed" if tied else "head"]["weight"].T
    np.testing.assert_allclose(logits, wanted, atol=5e-5)


@pytest.mark.parametrize("mesh", [None, MeshConfig(data=1, tensor=8)])
def test_log_probs_are_those_of_tunix_for_rows_padded_on_both_sides(mesh):
    policy = make_policy()
    prompts, completions = padded_rows()
    got = make_rollout(policy, mesh=mesh).get_per_token_logps(prompts, completions)
    np.testing.assert_allclose(got, their_log_probs(policy, prompts, completions), atol=5e-5)


def test_texts_are_the_policys_with_any_draft_and_differ_from_call_to_call():
    rollouts = [make_rollout(make_policy(), draft_seed=seed) for seed in (None, 1, 2)]
    first = [rollout.generate(PROMPTS, CONFIG).text for rollout in rollouts]
    second = [rollout.generate(PROMPTS, CONFIG).text for rollout in rollouts]
    assert first[0] == first[1] == first[2] and second[0] == second[1] == second[2]
    assert len({*first[0], *second[0]}) == 2 * len(PROMPTS)  # equal prompts, too


def test_output_is_what_a_learner_of_tunix_reads():
    policy = make_policy()
    output = make_rollout(policy).generate(PROMPTS, replace(CONFIG, return_logprobs=True))
    assert output.left_padded_prompt_tokens.shape == (5, 16)  # 15 letters and BOS
    assert output.left_padded_prompt_tokens[4].tolist() == [PAD] * 14 + [BOS, ord("x") % 60 + 3]
    for row, tokens in enumerate(output.tokens):
        ends = tokens[-1] == EOS
        assert len(tokens) == 16 or ends
        assert len(output.text[row]) == len(tokens) - ends
        num_known = [*tokens, PAD].index(PAD)  # tunix takes a drawn PAD for padding
        prompt = jnp.asarray(output.left_padded_prompt_tokens[[row]])
        wanted = their_log_probs(policy, prompt, jnp.asarray(tokens[None]))[0]
        assert len(output.logprobs[row]) == len(tokens)
        np.testing.assert_allclose(output.logprobs[row][:num_known], wanted[:num_known], atol=5e-5)


def test_adapters_and_other_shapes_are_refused():
    rollout = make_rollout(make_policy())
    adapters = nnx.State({"layers": {0: {"attn": {"q_proj": {"w_lora_a": jnp.ones((2, 2))}}}}})
    with pytest.raises(UserError, match="got layers/0/attn/q_proj/w_lora_a; merge adapters"):
        rollout.update_params(adapters, (nnx.LoRAParam,))
    with pytest.raises(UserError, match=r"down/weight: want \[32, 48\] float32, got \[32, 40\]"):
        rollout.update_params(nnx.state(make_policy(hidden_dim=40)))


def test_a_learner_of_tunix_trains_with_it():
    engine = loaded_engine()
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    training = rl_cluster.RLTrainingConfig(
        actor_optimizer=optax.sgd(0.5),
        eval_every_n_steps=100,
        max_steps=2,
        mini_batch_size=2,
        train_micro_batch_size=2,
    )
    config = rl_cluster.ClusterConfig(
        role_to_mesh={role: mesh for role in rl_cluster.Role},
        rollout_engine=partial(PossRollout, engine=engine, batch_size=4),
        training_config=training,
        rollout_config=CONFIG,
    )
    cluster = rl_cluster.RLCluster(actor=make_policy(), tokenizer=Letters(), cluster_config=config)
    learner = GRPOLearner(
        rl_cluster=cluster,
        reward_fns=lambda prompts, completions, **_: [len(set(text)) for text in completions],
        algo_config=GRPOConfig(num_generations=2, num_iterations=2, beta=0.0),
    )
    old = engine.weights.target["embed"]["weight"]
    learner.train([{"prompts": np.array(["hello", "wor"])}] * 2)
    assert not (engine.weights.target["embed"]["weight"] == old).all()
    policy, rows = cluster.actor_trainer.model, padded_rows()
    got = cluster.get_old_per_token_logps(*rows)
    np.testing.assert_allclose(got, their_log_probs(policy, *rows), atol=5e-5)
