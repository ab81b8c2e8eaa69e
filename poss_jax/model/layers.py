"""The leaves of every model here: RMSNorm, rotary embedding, attention, one decoder layer.

A decoder layer comes in three pieces (`queries`, `keys_values`, `finish`) rather than one call,
because its users differ only in between: in which keys a row may attend. The target attends its
cache, a specialist its committed pairs and the drafted levels, the training rollout several
versions of one row.
"""

import itertools
import math
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax

from poss_jax.config.models import LlamaConfig, RopeConfig
from poss_jax.model.kernel import call_on_cpu, cosines, normalise
from poss_jax.model.linear import linear
from poss_jax.model.sharding import Axes
from poss_jax.shapes import Array, Float, Int, Params

WIDENS: tuple[Axes, ...] = ("tensor", "fsdp")
"""Mesh axes of a weight whose output is sharded by `tensor`."""

NARROWS: tuple[Axes, ...] = ("fsdp", "tensor")
"""Mesh axes of a weight whose input is sharded by `tensor`."""

NOTHING = -1e30
"""Score of a masked column, and log of the sum over no column."""


class Parameter(NamedTuple):
    """The row of one parameter in a model's table; its Flax leaf gives shape and initial value."""

    torch: str  # name in PyTorch checkpoints
    axes: tuple[Axes, ...]  # mesh axes that shard its last dimensions


def linear_rows(path: str, torch: str, axes: tuple[Axes, ...]) -> dict[str, Parameter]:
    """Rows of the weight and the bias of a linear map."""
    bias = Parameter(f"{torch}.bias", ("tensor" if axes == WIDENS else None,))
    return {f"{path}/weight": Parameter(f"{torch}.weight", axes), f"{path}/bias": bias}


def norm_row(path: str, torch: str) -> dict[str, Parameter]:
    """Row of the scale of an RMSNorm, which is replicated."""
    return {f"{path}/scale": Parameter(f"{torch}.weight", (None,))}


DECODER_LAYER = {
    **norm_row("input_norm", "input_layernorm"),
    **linear_rows("attention/q", "self_attn.q_proj", WIDENS),
    **linear_rows("attention/k", "self_attn.k_proj", WIDENS),
    **linear_rows("attention/v", "self_attn.v_proj", WIDENS),
    **linear_rows("attention/o", "self_attn.o_proj", NARROWS),
    **norm_row("attention/q_norm", "self_attn.q_norm"),
    **norm_row("attention/k_norm", "self_attn.k_norm"),
    **norm_row("mlp_norm", "post_attention_layernorm"),
    **linear_rows("mlp/gate", "mlp.gate_proj", WIDENS),
    **linear_rows("mlp/up", "mlp.up_proj", WIDENS),
    **linear_rows("mlp/down", "mlp.down_proj", NARROWS),
}
"""Every parameter that a `DecoderLayer` may have."""


def layer_rows(path: str, torch: str) -> dict[str, Parameter]:
    """Rows of a list of layers: `*` in path and name stands for the number of the layer."""
    return {
        f"{path}/*/{inner}": row._replace(torch=f"{torch}.*.{row.torch}")
        for inner, row in DECODER_LAYER.items()
    }


def rms_norm(
    x: Float[Array, "*rows D"], scale: Float[Array, " D"], *, eps: float
) -> Float[Array, "*rows D"]:
    """Divides each row by its root mean square (in fp32) and multiplies by `scale`."""

    def on_cpu(x: Array, scale: Array) -> Array:
        rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
        return normalise(rows, scale, eps=eps).reshape(x.shape)

    def elsewhere(x: Array, scale: Array) -> Array:
        wide = x.astype(jnp.float32)
        normed = wide * lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + eps)
        return normed.astype(x.dtype) * scale.reshape((1,) * (x.ndim - 1) + (-1,))

    return call_on_cpu(on_cpu, elsewhere, x, scale)


def rope_frequencies(
    rope: RopeConfig, head_dim: int, length: Int[Array, " B"]
) -> Float[Array, "B half"]:
    """Angle per position of every pair of dimensions, in radians.

    Args:
      length: most positions each sequence will hold, for a rope that `follows_length`. One number
        per sequence rotates all its keys alike, in any order of computation.
    """
    exponents = jnp.arange(0, head_dim, 2, dtype=jnp.float32)[None] / head_dim
    theta = jnp.full((len(length), 1), rope.theta, jnp.float32)
    if rope.type == "dynamic":
        stretch = jnp.maximum(length, rope.original_max_position_embeddings).astype(jnp.float32)
        stretch = rope.factor * stretch / rope.original_max_position_embeddings - rope.factor + 1
        theta = theta * stretch[:, None] ** (head_dim / (head_dim - 2))
    frequencies = theta**-exponents
    if rope.type == "linear":
        return frequencies / rope.factor
    if rope.type == "llama3":
        # Slow rotations are divided by the factor, fast ones kept, between is interpolated.
        turns = rope.original_max_position_embeddings * frequencies / (2 * jnp.pi)
        kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        kept = jnp.clip(kept, 0.0, 1.0)
        return frequencies * (kept + (1 - kept) / rope.factor)
    if rope.type == "yarn":
        return _yarn_frequencies(rope, frequencies)
    if rope.type == "longrope":
        is_long = (length > rope.original_max_position_embeddings)[:, None]
        short, long = (jnp.array([x], jnp.float32) for x in (rope.short_factor, rope.long_factor))
        return frequencies / jnp.where(is_long, long, short)
    return frequencies


def _yarn_frequencies(rope: RopeConfig, frequencies: Array) -> Array:
    """As llama3's, but linear in the frequency's number (arXiv 2309.00071)."""
    half = frequencies.shape[-1]

    def number_of(turns: float) -> float:
        period = rope.original_max_position_embeddings / (turns * 2 * math.pi)
        return half * math.log(period) / math.log(rope.theta)

    low, high = number_of(rope.beta_fast), number_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)  # as transformers, which clips by the head
    divided = (jnp.arange(half, dtype=jnp.float32)[None] - low) / ((high - low) or 0.001)
    kept = 1 - jnp.clip(divided, 0.0, 1.0)
    return frequencies * (kept + (1 - kept) / rope.factor)


def rotate(
    x: Float[Array, "B heads T H"],
    positions: Int[Array, "B T"],
    frequencies: Float[Array, "B *rows half"],
    *,
    scale: float = 1.0,
) -> Float[Array, "B heads T H"]:
    """Applies the rotary embedding in the half-split convention of Hugging Face checkpoints.

    Args:
      x: queries or keys.
      frequencies: angle per position, per sequence or per row; see `rope_frequencies`.
      scale: factor of the result, see `RopeConfig.scale`. Static.
    """
    if frequencies.ndim == 2:
        frequencies = frequencies[:, None]
    angles = (positions.astype(jnp.float32)[..., None] * frequencies)[:, None]
    turns = call_on_cpu(cosines, lambda angles: (jnp.cos(angles), jnp.sin(angles)), angles)
    cos, sin = ((scale * factor).astype(x.dtype) for factor in turns)
    return lax.platform_dependent(x, cos, sin, cuda=_rotate_turned, default=_rotate_halves)


def _rotate_halves(x: Array, cos: Array, sin: Array) -> Array:
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _rotate_turned(x: Array, cos: Array, sin: Array) -> Array:
    # A concatenation ends a kernel on a GPU; to turn two halves around does not.
    halves = x.reshape(*x.shape[:-1], 2, -1)
    signs = jnp.array([-1, 1], x.dtype).reshape(*[1] * (x.ndim - 1), 2, 1)
    turned = lax.rev(halves, [x.ndim - 1]) * (signs * sin[..., None, :])
    return (halves * cos[..., None, :] + turned).reshape(x.shape)


def split_heads(x: Float[Array, "B T width"], head_dim: int) -> Float[Array, "B heads T H"]:
    """Splits rows into heads; the head axis comes first."""
    B, T, width = x.shape
    return jnp.swapaxes(x.reshape(B, T, width // head_dim, head_dim), 1, 2)


def merge_heads(x: Float[Array, "B heads T H"]) -> Float[Array, "B T width"]:
    """The reverse of `split_heads`."""
    B, heads, T, H = x.shape
    return jnp.swapaxes(x, 1, 2).reshape(B, T, heads * H)


class Linear(nn.Module):
    """Parameters of a linear map, `weight` [out, in] and maybe `bias` [out]."""

    out_dim: int | tuple[int, ...]  # width of the output; a tuple for several axes
    use_bias: bool = False  # whether there is a bias
    init_scale: float = 1.0  # variance of the output for input of variance 1

    @nn.compact
    def __call__(self, x: Array) -> Array:
        out = (self.out_dim,) if isinstance(self.out_dim, int) else self.out_dim
        init = nn.initializers.variance_scaling(
            self.init_scale, "fan_in", "normal", in_axis=-1, out_axis=0
        )
        weight = self.param("weight", init, (*out, x.shape[-1]), jnp.float32)
        zeros = nn.initializers.zeros
        bias = self.param("bias", zeros, out, jnp.float32) if self.use_bias else None
        return linear(x, weight, bias)


class RMSNorm(nn.Module):
    """Parameters of an RMSNorm, `scale` [D]."""

    eps: float

    @nn.compact
    def __call__(self, x: Array) -> Array:
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],), jnp.float32)
        return rms_norm(x, scale, eps=self.eps)


class Attention(nn.Module):
    """The four projections of grouped-query attention, and the norms of queries and keys.

    Decoding keeps some of them fused (`fuse_layer`): `kv` in place of `k` and `v`, or `qkv`.
    """

    config: LlamaConfig

    def setup(self) -> None:
        c = self.config
        self.q = Linear(c.num_heads * c.head_dim, c.qkv_bias)
        self.k = Linear(c.num_kv_heads * c.head_dim, c.qkv_bias)
        self.v = Linear(c.num_kv_heads * c.head_dim, c.qkv_bias)
        self.kv = Linear(2 * c.num_kv_heads * c.head_dim, c.qkv_bias)
        self.qkv = Linear((c.num_heads + 2 * c.num_kv_heads) * c.head_dim, c.qkv_bias)
        self.o = Linear(c.hidden_size, c.o_bias, _residual_scale(c))
        if c.qk_norm:
            self.q_norm = RMSNorm(c.rms_norm_eps)
            self.k_norm = RMSNorm(c.rms_norm_eps)

    def queries(
        self,
        normed: Float[Array, "B T D"],
        positions: Int[Array, "B T"],
        frequencies: Float[Array, "B *rows half"],
    ) -> Float[Array, "B N T H"]:
        """Projects and rotates queries."""
        q = split_heads(self.q(normed), self.config.head_dim)
        return self._rotate_queries(q, positions, frequencies)

    def keys_values(
        self,
        normed: Float[Array, "B T D"],
        positions: Int[Array, "B T"],
        frequencies: Float[Array, "B *rows half"],
    ) -> tuple[Float[Array, "B K T H"], Float[Array, "B K T H"]]:
        """Projects keys (rotated) and values."""
        if self.has_variable("params", "kv"):
            k, v = self._parts(self.kv(normed), 1, 1)
        else:
            k, v = (split_heads(layer(normed), self.config.head_dim) for layer in (self.k, self.v))
        return self._rotate_keys(k, positions, frequencies), v

    def queries_keys_values(
        self,
        normed: Float[Array, "B T D"],
        positions: Int[Array, "B T"],
        frequencies: Float[Array, "B *rows half"],
    ) -> tuple[Float[Array, "B N T H"], Float[Array, "B K T H"], Float[Array, "B K T H"]]:
        """Projects queries and keys (both rotated) and values."""
        rotary = positions, frequencies
        if not self.has_variable("params", "qkv"):
            return self.queries(normed, *rotary), *self.keys_values(normed, *rotary)
        group = self.config.num_heads // self.config.num_kv_heads
        q, k, v = self._parts(self.qkv(normed), group, 1, 1)
        return self._rotate_queries(q, *rotary), self._rotate_keys(k, *rotary), v

    def _parts(self, projected: Float[Array, "B T width"], *heads: int) -> list[Array]:
        """Splits the output of a fused projection into parts; `heads` per key head."""
        B, T, _ = projected.shape
        K, H = self.config.num_kv_heads, self.config.head_dim
        grouped = projected.reshape(B, T, K, sum(heads), H)
        ends = list(itertools.accumulate(heads))
        parts = jnp.split(grouped, ends[:-1], axis=3)
        return [jnp.moveaxis(block.reshape(B, T, -1, H), 2, 1) for block in parts]

    def _rotate_queries(self, q: Array, *rotary: Array) -> Array:
        q = self.q_norm(q) if self.config.qk_norm else q
        return rotate(q, *rotary, scale=self.config.rope.scale)

    def _rotate_keys(self, k: Array, *rotary: Array) -> Array:
        k = self.k_norm(k) if self.config.qk_norm else k
        return rotate(k, *rotary, scale=self.config.rope.scale)


class MLP(nn.Module):
    """SwiGLU."""

    config: LlamaConfig

    def setup(self) -> None:
        c = self.config
        self.gate = Linear(c.intermediate_size, c.mlp_bias)
        self.up = Linear(c.intermediate_size, c.mlp_bias)
        self.gate_up = Linear((2, c.intermediate_size), c.mlp_bias)
        self.down = Linear(c.hidden_size, c.mlp_bias, _residual_scale(c))

    def __call__(self, x: Array) -> Array:
        if self.has_variable("params", "gate_up"):
            both = self.gate_up(x)
            return self.down(nn.silu(both[..., 0, :]) * both[..., 1, :])
        return self.down(nn.silu(self.gate(x)) * self.up(x))


class DecoderLayer(nn.Module):
    """One Llama layer, split where attention happens."""

    config: LlamaConfig
    has_input_norm: bool = True  # False for the specialists of EAGLE-2, HASS and PosS

    def setup(self) -> None:
        if self.has_input_norm:
            self.input_norm = RMSNorm(self.config.rms_norm_eps)
        self.attention = Attention(self.config)
        self.mlp_norm = RMSNorm(self.config.rms_norm_eps)
        self.mlp = MLP(self.config)

    def normed(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Applies the input norm, if there is one."""
        return self.input_norm(hidden) if self.has_input_norm else hidden

    def finish(
        self, hidden: Float[Array, "B T D"], attended: Float[Array, "B T NH"]
    ) -> Float[Array, "B T D"]:
        """Adds the attention output and the MLP to the residual."""
        hidden = hidden + self.attention.o(attended)
        return hidden + self.mlp(self.mlp_norm(hidden))

    def __call__(
        self,
        hidden: Float[Array, "B T width"],
        positions: Int[Array, "B T"],
        frequencies: Float[Array, "B *rows half"],
    ) -> Float[Array, "B T D"]:
        """Uses every parameter once, so that `init` draws them; without attention."""
        normed, attention = self.normed(hidden), self.attention
        attention.keys_values(normed, positions, frequencies)
        return self.finish(hidden, merge_heads(attention.queries(normed, positions, frequencies)))


def _residual_scale(config: LlamaConfig) -> float:
    """Keeps the residual's variance independent of depth: each layer adds to it twice."""
    return 1 / (2 * config.num_layers)


def fuse_layer(params: Params, config: LlamaConfig, *, parts: Literal["kv", "qkv"]) -> Params:
    """Joins projections that read the same rows, so that decoding multiplies once.

    The heads of queries, keys and values that belong together are adjacent, and gate and up become
    one weight [2 intermediate D], so that a mesh shards all parts alike. A fused layer is returned
    unchanged.
    """
    attention = params["attention"]
    if "k" in attention:
        joined = _interleave([attention[name] for name in parts], config.num_kv_heads)
        attention = {name: attention[name] for name in attention if name not in parts}
        attention |= {parts: joined}
    mlp = params["mlp"]
    if "gate" in mlp:
        mlp = {"gate_up": _stack(mlp["gate"], mlp["up"]), "down": mlp["down"]}
    return params | {"attention": attention, "mlp": mlp}


@jax.jit
def _stack(*linears: Params) -> Params:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *linears)


@partial(jax.jit, static_argnums=1)
def _interleave(linears: list[Params], num_groups: int) -> Params:
    """Stacks the outputs of linear maps, alternating groups."""

    def join(*leaves: Array) -> Array:
        groups = [leaf.reshape(num_groups, -1, *leaf.shape[1:]) for leaf in leaves]
        return jnp.concatenate(groups, axis=1).reshape(-1, *leaves[0].shape[1:])

    return jax.tree.map(join, *linears)


def zero_outputs(layer: Params) -> Params:
    """Makes a layer add nothing: its output projections become zero."""

    def zero_projection(path: tuple[Any, ...], leaf: Array) -> Array:
        return jnp.zeros_like(leaf) if {"o", "down"} & {step.key for step in path} else leaf

    return jax.tree.map_with_path(zero_projection, layer)


def init_layer(layer: DecoderLayer, key: Array, *, width: int | None = None) -> Params:
    """Draws the parameters of one layer; norms start at one, biases at zero.

    Its input has `width`; None: the hidden size.
    """
    config = layer.config
    hidden = jnp.zeros((1, 1, width or config.hidden_size))
    positions = jnp.zeros((1, 1), jnp.int32)
    frequencies = rope_frequencies(config.rope, config.head_dim, jnp.ones(1, jnp.int32))
    return dict(layer.init(key, hidden, positions, frequencies)["params"])
