"""Rollouts of tunix that poss_jax decodes: a draft proposes, the policy decides.

engine = poss_jax.Engine.load("models/llama3-8b", draft="models/poss3")
ClusterConfig(rollout_engine=functools.partial(PossRollout, engine=engine), ...)
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import lax
from tunix.rl.rollout.base_rollout import BaseRollout, RolloutConfig, RolloutOutput

from poss_jax import Engine, SamplingConfig, UserError
from poss_jax.config.models import LlamaConfig, RopeConfig
from poss_jax.model.cache import KVCache, commit_rows, init_cache
from poss_jax.model.linear import linear
from poss_jax.model.target import compute_dtype, run_layers
from poss_jax.shapes import Array, Float, Int, Params

CHUNK = 64
"""Tokens of a text whose log-probabilities are computed at a time."""


class PossRollout(BaseRollout):
    """Draws texts from tunix's policy with an engine, which it takes over.

    The engine's target gets the policy's weights, at the start and at every `update_params`. The
    seeds of texts follow from `RolloutConfig.seed`, the number of the call and the place of the
    prompt, so that no two texts share their noise.
    """

    def __init__(
        self,
        rollout_actor: nnx.Module,
        tokenizer: Any,
        *,
        engine: Engine,
        batch_size: int = 8,
        **unused: Any,
    ) -> None:
        """Takes `RLCluster`'s arguments for a rollout engine, and two more.

        Args:
          rollout_actor: the policy, a `tunix.models.llama3.model.Llama3`.
          tokenizer: tunix's `TokenizerAdapter`.
          engine: holds a target of the policy's shape, and the draft.
          batch_size: number of texts decoded together.
          **unused: mesh and rollout_config; the engine has its own devices, `generate` its config.
        """
        self._tokenizer, self._batch_size = tokenizer, batch_size
        self._engine = engine
        self._num_calls = 0
        engine.target_config = rotate_as_tunix(engine.target_config)
        self.update_params(nnx.state(rollout_actor))

    def generate(
        self, prompts: list[str], rollout_config: RolloutConfig, **unused: Any
    ) -> RolloutOutput:
        """Continues every prompt; tokens hold the stop token, texts do not."""
        stop_ids = sorted(rollout_config.eos_tokens or [self.eos_id()])
        self._engine.stop_ids = stop_ids
        ids = [self._tokenise(prompt) for prompt in prompts]
        answers = self._engine.generate(
            ids,
            max_new_tokens=rollout_config.max_tokens_to_generate,
            batch_size=self._batch_size,
            sampling=self._sampling(rollout_config, len(prompts)),
        )
        outputs = [answer.output_ids for answer in answers]
        texts = [output[:-1] if output[-1] in stop_ids else output for output in outputs]
        return RolloutOutput(
            text=[self._tokenizer.decode(text) for text in texts],
            logits=None,  # type: ignore[arg-type]  # as tunix's other engines
            tokens=[np.array(output, np.int32) for output in outputs],
            left_padded_prompt_tokens=self._pad_left(ids, rollout_config.max_prompt_length),
            logprobs=self._logprobs(ids, outputs, rollout_config),
        )

    def get_per_token_logps(
        self, prompt_tokens: Int[Array, "B P"], completion_tokens: Int[Array, "B C"]
    ) -> Float[Array, "B C"]:
        """Log-probabilities of completions under the weights that draw them; 0 for padding.

        Padding on either side is left out, as in tunix.
        """
        tokens = np.concatenate([prompt_tokens, completion_tokens], axis=1)
        is_text = tokens != self.pad_id()
        texts = [row[keep].tolist() for row, keep in zip(tokens, is_text, strict=True)]
        log_probs = np.zeros(tokens.shape, np.float32)
        log_probs[is_text] = np.concatenate(self._score(texts, temperature=1.0))
        return jnp.asarray(log_probs[:, prompt_tokens.shape[1] :])

    def update_params(self, params: Any, filter_types: tuple[Any, ...] | None = None) -> None:
        """Gives the engine the policy's weights; compiles nothing again.

        Args:
          params: `nnx.state` of the policy.
          filter_types: types of variables that `params` was reduced to; it needs all weights.

        Raises:
          UserError: adapters that are not merged into the weights, or another shape.
        """
        dtype = compute_dtype(self._engine.weights.target)
        self._engine.update_weights(target_params(params, dtype))

    def pad_id(self) -> int:
        """Token that fills prompts on the left and completions on the right."""
        return self._tokenizer.pad_id()

    def eos_id(self) -> int:
        """Token that ends a text."""
        return self._tokenizer.eos_id()

    def model(self) -> None:
        """Returns None: a learner that is given its own policy takes it that no sync is needed."""

    # ----------------------------------------------------------------------------------------------

    def _tokenise(self, prompt: str) -> list[int]:
        """Token ids of a prompt, with one BOS if the tokenizer has it, as tunix's own sampler."""
        bos = [self._tokenizer.bos_id()] if self._tokenizer.bos_id() else []
        return list(self._tokenizer.dedup_bos_ids(bos + list(self._tokenizer.encode(prompt))))

    def _sampling(self, config: RolloutConfig, num_prompts: int) -> list[SamplingConfig]:
        seed = [] if config.seed is None else np.ravel(np.asarray(config.seed)).tolist()
        seeds = np.random.SeedSequence([*seed, self._num_calls]).generate_state(num_prompts)
        self._num_calls += 1
        return [
            SamplingConfig(
                temperature=config.temperature,
                top_k=max(config.top_k or 0, 0),  # none and -1 allow all, as 0 does here
                top_p=1.0 if config.top_p is None else config.top_p,
                seed=int(seed),
            )
            for seed in seeds
        ]

    def _pad_left(self, ids: Sequence[list[int]], width: int) -> np.ndarray:
        longest = max(map(len, ids))
        width = width if longest <= width else _power_of_two(longest)
        return np.array([[self.pad_id()] * (width - len(row)) + row for row in ids], np.int32)

    def _logprobs(
        self, ids: Sequence[list[int]], outputs: Sequence[list[int]], config: RolloutConfig
    ) -> list[np.ndarray] | None:
        """Log-probabilities of answers at the temperature they were drawn at; no top-k or top-p."""
        if not config.return_logprobs:
            return None
        texts = [prompt + output for prompt, output in zip(ids, outputs, strict=True)]
        rows = self._score(texts, temperature=config.temperature or 1.0)
        return [row[len(prompt) :] for row, prompt in zip(rows, ids, strict=True)]

    def _score(self, texts: Sequence[list[int]], *, temperature: float) -> list[np.ndarray]:
        """Log-probability of every token of some texts, given those before; 0 for the first."""
        width = max(CHUNK, _power_of_two(max(map(len, texts))))
        rows: list[np.ndarray] = []
        for first in range(0, len(texts), self._batch_size):
            batch = texts[first : first + self._batch_size]
            tokens = np.zeros((self._batch_size, width), np.int32)
            for row, text in zip(tokens, batch, strict=False):
                row[: len(text)] = text
            lengths = [len(text) for text in batch] + [1] * (self._batch_size - len(batch))
            scored = score_texts(
                self._engine.weights.target,
                self._engine.target_config,
                jnp.asarray(tokens),
                jnp.asarray(lengths, jnp.int32),
                jnp.float32(temperature),
            )
            rows += [row[: len(text)] for row, text in zip(np.asarray(scored), batch, strict=False)]
        return rows


@partial(jax.jit, static_argnums=1)
def score_texts(
    target: Params,
    config: LlamaConfig,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    temperature: Float[Array, ""],
) -> Float[Array, "B T"]:
    """Log-probability of every token given those before; 0 for the first.

    The texts pass the target as prompts do, so that the weights that decode serve here, too.

    Args:
      target: parameters of the target, fused for decoding.
      tokens: texts, padded on the right with any token; T is a multiple of `CHUNK`.
      lengths: tokens of each text, at least 1.
    """
    B, T = tokens.shape
    following = jnp.roll(tokens, -1, axis=1)
    depths = jnp.broadcast_to(jnp.arange(CHUNK)[None], (B, CHUNK))

    def score_chunk(index: Array, state: tuple[KVCache, Array]) -> tuple[KVCache, Array]:
        (cache, log_probs), first = state, index * CHUNK
        new, taken = (
            lax.dynamic_slice_in_dim(x, first, CHUNK, axis=1) for x in (tokens, following)
        )
        hidden, _, rows = run_layers(target, config, cache, new, depths, None)
        logits = linear(hidden, target["head"]["weight"]).astype(jnp.float32) / temperature
        chunk = jnp.take_along_axis(jax.nn.log_softmax(logits), taken[..., None], axis=-1)[..., 0]
        log_probs = lax.dynamic_update_slice_in_dim(log_probs, chunk, first, axis=1)
        return commit_rows(cache, rows, jnp.full_like(lengths, CHUNK)), log_probs

    cache = init_cache(
        config,
        num_layers=config.num_layers,
        size=T,
        rope_length=lengths,
        dtype=compute_dtype(target),
    )
    empty = cache, jnp.zeros((B, T), jnp.float32)
    _, log_probs = lax.fori_loop(0, (lengths.max() + CHUNK - 1) // CHUNK, score_chunk, empty)
    return jnp.pad(log_probs[:, :-1], ((0, 0), (1, 0)))


def _power_of_two(length: int) -> int:
    return 1 << (length - 1).bit_length()


# --------------------------------------------------------------------------------------------------
# A policy of tunix (its Llama 3) as parameters of a target

ROPE_THETA = 1_000_000
"""Rope theta of tunix 0.1.7, which ignores `ModelConfig.rope_theta` and scales no frequencies."""

OUTER = {
    "embedder/input_embedding": "embed/weight",
    "final_norm/w": "norm/scale",
    "lm_head/w": "head/weight",
}
LAYER = {
    "input_layernorm/w": "input_norm/scale",
    "attn/q_proj/w": "attention/q/weight",
    "attn/k_proj/w": "attention/k/weight",
    "attn/v_proj/w": "attention/v/weight",
    "attn/o_proj/w": "attention/o/weight",
    "post_attention_layernorm/w": "mlp_norm/scale",
    "mlp/gate_proj/kernel": "mlp/gate/weight",
    "mlp/up_proj/kernel": "mlp/up/weight",
    "mlp/down_proj/kernel": "mlp/down/weight",
}


def rotate_as_tunix(config: LlamaConfig) -> LlamaConfig:
    """Returns the config of a target that computes what tunix computes with the same weights."""
    return replace(config, rope=RopeConfig(theta=ROPE_THETA))


def target_params(state: Any, dtype: Any) -> Params:
    """Converts the state of a policy; layers are in a list, linear weights `[out, in]`.

    Args:
      state: `nnx.state` of a `tunix.models.llama3.model.Llama3`.
      dtype: dtype of the parameters returned.

    Raises:
      UserError: a parameter that such a model does not have.
    """
    leaves = flatten_dict(nnx.to_pure_dict(state))
    named = {_name(path): leaf for path, leaf in leaves.items()}
    params = unflatten_dict(
        {name: _as_linear(name, leaf).astype(dtype) for name, leaf in named.items()}, sep="/"
    )
    layers = params["layers"]
    return params | {"layers": [layers[str(index)] for index in range(len(layers))]}


def _name(path: tuple[Any, ...]) -> str:
    """Name of a parameter of tunix in a target."""
    given = "/".join(map(str, path))
    if path[0] == "layers" and (inner := LAYER.get("/".join(path[2:]))):
        return f"layers/{path[1]}/{inner}"
    if given not in OUTER:
        raise UserError(
            f"policy: want the parameters of tunix's Llama 3, got {given}; "
            "merge adapters into the weights first"
        )
    return OUTER[given]


def _as_linear(name: str, leaf: Array) -> Array:
    """Turns a kernel, input axes first, into a matrix `[out, in]`; other arrays stay."""
    if leaf.ndim == 1 or name == "embed/weight":
        return leaf
    if name.endswith("/o/weight"):  # its input has two axes: heads and their width
        return leaf.reshape(-1, leaf.shape[-1]).T
    return leaf.reshape(len(leaf), -1).T
