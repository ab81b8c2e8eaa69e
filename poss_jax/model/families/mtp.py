"""Specialists shaped like multi-token-prediction modules (DeepSeek-V3, MiMo), one per position.

A row holds the embedding e of token x_{j+1} and a feature f of the target, or a predicted one. Each
specialist norms both, projects them, and runs a whole layer of the target with its input norm:

    x = proj [norm(e); norm(f)]      h = layer(x)      prediction = norm(h)

The target's head reads predictions, and the next specialist, as in MiMo: nothing is shared between
positions but the target's embedding and head. The modules of such models are trained with their
target; ours are trained afterwards, on a frozen one (arXiv 2610.00888), by EAGLE's recursion.
"""

import jax
import jax.numpy as jnp

from poss_jax.config.models import DraftConfig
from poss_jax.model.layers import DecoderLayer, Linear, RMSNorm, layer_rows, linear_rows, norm_row
from poss_jax.model.specialists import Family, draw_specialists, side_by_side
from poss_jax.shapes import Array, Float, Params


class Specialist(DecoderLayer):
    """A layer of the target over projected rows [e; f], and a norm after it."""

    def setup(self) -> None:
        super().setup()
        self.token_norm = RMSNorm(self.config.rms_norm_eps)
        self.feature_norm = RMSNorm(self.config.rms_norm_eps)
        self.project = Linear(self.config.hidden_size)
        self.output_norm = RMSNorm(self.config.rms_norm_eps)

    def normed(self, hidden: Float[Array, "B T both"]) -> Float[Array, "B T D"]:
        """Projects both halves and applies the input norm."""
        return super().normed(self._joined(hidden))

    def finish(
        self, hidden: Float[Array, "B T both"], attended: Float[Array, "B T NH"]
    ) -> Float[Array, "B T D"]:
        """Adds the attention output and the MLP to the projected rows, and norms the sum."""
        return self.output_norm(super().finish(self._joined(hidden), attended))

    def _joined(self, hidden: Float[Array, "B T both"]) -> Float[Array, "B T D"]:
        embedded, feature = jnp.split(hidden, 2, axis=-1)
        normed = self.token_norm(embedded), self.feature_norm(feature)
        return self.project(jnp.concatenate(normed, axis=-1))


def init(config: DraftConfig, key: Array) -> Params:
    """Draws a random draft: `{"specialists": [...]}`."""
    keys = jax.random.split(key, config.num_specialists)
    width = 2 * config.layer.hidden_size
    return {"specialists": draw_specialists(layer, config, list(keys), width=width)}


def layer(config: DraftConfig) -> Specialist:
    """Describes the layer of one specialist."""
    return Specialist(config.layer)


MTP = Family(
    parameters={
        **norm_row("specialists/*/token_norm", "layers.*.enorm"),
        **norm_row("specialists/*/feature_norm", "layers.*.hnorm"),
        # Its input is two halves (embedding, feature), so only its output is sharded.
        **linear_rows("specialists/*/project", "layers.*.eh_proj", (("tensor", "fsdp"), None)),
        **layer_rows("specialists", "layers"),
        **norm_row("specialists/*/output_norm", "layers.*.shared_head.norm"),
    },
    init=init,
    layer=layer,
    join=lambda params, config, embedded, features: side_by_side(params, embedded, features),
    default_fields=lambda target, num_tokens: {"kv": "per_specialist"},
)
