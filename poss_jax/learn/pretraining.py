"""Plain pre-training of a target: the jitted next-token step."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from poss_jax.config.models import LlamaConfig
from poss_jax.config.training import StepConfig
from poss_jax.learn.losses import language_model_loss
from poss_jax.learn.state import TrainState, cast, update_state
from poss_jax.model.documents import TrainBatch, count, cut_batch, encode, trained_rows
from poss_jax.model.sharding import gather_head
from poss_jax.shapes import Array, Bool, Float, Int, Params


def make_target_step(
    config: LlamaConfig,
    optimizer: optax.GradientTransformation,
    step: StepConfig,
    dtype: Any,
) -> Callable:
    """Returns the jitted `(state, batch) -> (state, metrics)` of next-token pre-training.

    The metrics: `loss` and `gradient_norm`.
    """

    @partial(jax.jit, donate_argnums=0)
    def run(state: TrainState, batch: TrainBatch):
        num_trained = jnp.maximum(count(labels_of(batch)[1]), 1.0)

        def of_part(total: tuple[Params, Array], chunk: TrainBatch):
            loss, gradients = jax.value_and_grad(
                lambda params: (
                    target_loss(cast_inner(params, dtype), chunk, config, step) / num_trained
                )
            )(state.params)
            return jax.tree.map(jnp.add, total, (gradients, loss)), None

        zeros = jax.tree.map(jnp.zeros_like, state.params), jnp.zeros(())
        (gradients, loss), _ = lax.scan(of_part, zeros, cut_batch(batch, step.accumulation_steps))
        metrics = {"loss": loss, "gradient_norm": optax.tree.norm(gradients)}
        return update_state(state, gradients, optimizer), metrics

    return run


def target_loss(
    params: Params, batch: TrainBatch, config: LlamaConfig, step: StepConfig
) -> Float[Array, ""]:
    """Sum of next-token cross-entropies in nats, over trained tokens."""
    head, features = encode_for_head(params, batch, config, step)
    return language_model_loss(head, features, *labels_of(batch), chunk=step.vocabulary_chunk)


def encode_for_head(
    params: Params, batch: TrainBatch, config: LlamaConfig, step: StepConfig
) -> tuple[Float[Array, "V D"], Float[Array, "B T D"]]:
    """Returns the head, which may be the embedding, and the features it reads."""
    features = encode(params, config, batch.tokens, batch.documents, block=step.attention_block)
    return gather_head(params["embed" if config.tie_embeddings else "head"]["weight"]), features


def cast_inner(params: Params, dtype: Any) -> Params:
    """Casts all but embedding and head, so their gradients are summed in float32."""
    wide = {name: params[name] for name in ("embed", "head") if name in params}
    return cast(params, dtype) | wide


def labels_of(batch: TrainBatch) -> tuple[Int[Array, "B T"], Bool[Array, "B T"]]:
    """Next token of every row, and whether it is trained and in the same document."""
    following = batch.replace(loss_mask=jnp.roll(batch.loss_mask, -1, axis=1))
    return jnp.roll(batch.tokens, -1, axis=1), trained_rows(following, by="token")
