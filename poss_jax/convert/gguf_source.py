"""A GGUF file as a checkpoint in Hugging Face's terms: its config, weights and tokenizer."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from poss_jax.config.numbers import (
    Count,
    CountOrZero,
    Fraction,
    HeadDim,
    NumLayers,
    Positive,
    PositiveOrZero,
)
from poss_jax.config.reading import UserError, shorten
from poss_jax.convert.gguf_file import GgufFile, StoredTensor, make_scratch, shortest
from poss_jax.convert.gguf_tokenizer import special_id, stop_ids, token_list, write_tokenizer
from poss_jax.convert.source import Source
from poss_jax.convert.tensors import LazyTensor

# Metadata of the model, by its key behind the architecture -> key of config.json, type.
_CONFIG_KEYS = {
    "block_count": ("num_hidden_layers", NumLayers),
    "context_length": ("max_position_embeddings", Count),
    "embedding_length": ("hidden_size", Count),
    "feed_forward_length": ("intermediate_size", Count),
    "attention.head_count": ("num_attention_heads", Count),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", Fraction),
}
_OTHER_KEYS = {
    "vocab_size",  # the embedding's rows count
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.sliding_window",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scale_linear",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.attn_factor",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
    "tensor_data_layout",
    "expert_count",  # refused as experts
    "expert_used_count",
}

# Tensors that are not weights but settings of the rope.
_DIVISORS, _SHORT, _LONG = (
    f"rope_{name}.weight" for name in ("freqs", "factors_short", "factors_long")
)

_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_FUSED = {"ffn_up": "mlp.gate_up_proj"}  # what Phi-3 calls so holds both

_ARCHITECTURES = ("llama", "qwen2", "qwen3", "phi3")
_TRAINED = "original_max_position_embeddings"
_LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, _TRAINED: 8192}


@dataclass(frozen=True)
class GgufSource(Source):
    """A GGUF file, as `Source` presents a folder.

    Attributes:
      gguf: its header.
    """

    gguf: GgufFile = field(kw_only=True)

    @property
    def config_name(self) -> str:
        """Name of the config's file, for messages."""
        return f"{self.folder}: metadata"

    @cached_property
    def values(self) -> dict[str, Any]:
        """The metadata, as config.json says it."""
        return _read_config(self.gguf)

    @cached_property
    def tensors(self) -> dict[str, LazyTensor]:
        """The weights under Hugging Face's names; unknown ones keep theirs."""
        return _list_tensors(self.gguf)

    @cached_property
    def tokenizer_folder(self) -> Path:
        """A temporary folder with the tokenizer's files."""
        folder = make_scratch()
        write_tokenizer(self.gguf, folder)
        return folder


# --------------------------------------------------------------------------------------------------
# The config


def _read_config(gguf: GgufFile) -> dict[str, Any]:
    """Translates the metadata; refuses keys that may change what the model computes."""
    if gguf.architecture not in _ARCHITECTURES:
        return {"model_type": gguf.architecture}  # which the reader of config.json refuses
    values = {name: _number(gguf, key, kind) for key, (name, kind) in _CONFIG_KEYS.items()}
    _refuse_unknown(gguf)
    tensors, head_dim = gguf.tensors, _head_dim(gguf, values)
    embedding = tensors.get("token_embd.weight")
    return values | {
        "model_type": gguf.architecture,
        "vocab_size": embedding.shape[0] if embedding else len(token_list(gguf)),
        "num_key_value_heads": _number(gguf, "attention.head_count_kv", Count | None),
        "head_dim": head_dim,
        "partial_rotary_factor": _number(gguf, "rope.dimension_count", Count, head_dim) / head_dim,
        "num_experts": gguf.of_model("expert_count"),
        "sliding_window": None,
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
        "bos_token_id": special_id(gguf, "bos"),
        "eos_token_id": stop_ids(gguf),
        **_read_rope(gguf, head_dim, values["max_position_embeddings"]),
    }


def _number(gguf: GgufFile, key: str, kind: Any, default: float | None = None) -> Any:
    return gguf.number(f"{gguf.architecture}.{key}", kind, default)


def _refuse_unknown(gguf: GgufFile) -> None:
    prefix = f"{gguf.architecture}."
    for key, value in gguf.metadata.items():
        name = key.removeprefix(prefix)
        is_known = name in (*_CONFIG_KEYS, *_OTHER_KEYS) or name.startswith("rope.scaling.yarn_")
        if key.startswith(prefix) and value and not is_known:
            raise UserError(
                f"{gguf.path}: metadata {key} is {shorten(value)}, which is not known and may "
                "change what the model computes; such a model cannot be converted"
            )
    window = _number(gguf, "attention.sliding_window", CountOrZero, 0)
    if 0 < window < _number(gguf, "context_length", Count):
        raise UserError(
            f"{gguf.path}: a sliding window of {window} tokens is active, which is not supported; "
            "take a model without one"
        )


def _head_dim(gguf: GgufFile, values: Mapping[str, Any]) -> int:
    usual = values["hidden_size"] // values["num_attention_heads"]
    key, value = (
        _number(gguf, f"attention.{name}_length", HeadDim, usual) for name in ("key", "value")
    )
    if key != value:
        raise UserError(
            f"{gguf.path}: want heads of one width, got keys of {key} and values of {value}; such "
            "a model cannot be converted"
        )
    return key


def _read_rope(gguf: GgufFile, head_dim: int, longest: int) -> dict[str, Any]:
    """Reads the settings of the rope, some of which are tensors."""
    theta = _number(gguf, "rope.freq_base", Positive, 10000.0)
    factor = _number(gguf, "rope.scale_linear", PositiveOrZero, 0)
    factor = _number(gguf, "rope.scaling.factor", PositiveOrZero, factor)
    kind = gguf.of_model("rope.scaling.type", "linear")  # as llama.cpp
    if kind == "yarn":
        raise UserError(
            f"{gguf.path}: rope type yarn is read from safetensors only; convert the model that "
            "this file was made from"
        )
    is_plain = kind == "none" or (kind == "linear" and factor in (0, 1))
    scaling = None if is_plain else {"rope_type": kind, "factor": factor}
    if _LONG in gguf.tensors or kind == "longrope":
        scaling = _read_longrope(gguf, head_dim, longest)
    elif _DIVISORS in gguf.tensors:
        if not is_plain:
            raise UserError(
                f"{gguf.path}: holds both {_DIVISORS} and rope type {shorten(kind)}, which is not "
                "supported; such a model cannot be converted"
            )
        scaling = _read_divisors(gguf, theta, head_dim, longest)
    trained = (scaling or {}).get(_TRAINED)
    return {"rope_theta": theta, "rope_scaling": scaling, _TRAINED: trained}  # Phi-3's place for it


def _read_longrope(gguf: GgufFile, head_dim: int, longest: int) -> dict[str, Any]:
    trained = _number(gguf, "rope.scaling.original_context_length", Count, longest)
    factor = _number(gguf, "rope.scaling.attn_factor", Positive, 1.0)
    stretch = max(longest / trained, 1.0)
    usual = math.sqrt(1 + math.log(stretch) / math.log(max(trained, 2)))  # as `RopeConfig.scale`
    return {
        "rope_type": "longrope",
        "short_factor": _values_of(gguf, _SHORT, head_dim),
        "long_factor": _values_of(gguf, _LONG, head_dim),
        _TRAINED: trained,
        "attention_factor": None if math.isclose(factor, usual, rel_tol=1e-6) else factor,
    }


def _read_divisors(gguf: GgufFile, theta: float, head_dim: int, longest: int) -> dict[str, Any]:
    """Recognises Llama 3.1's rope, of which the file holds only the divisors.

    Other divisors become a longrope that divides short and long texts alike.
    """
    divisors = _values_of(gguf, _DIVISORS, head_dim)
    scaling = _LLAMA3 | {"factor": max(divisors, default=1.0)}
    frequencies = theta ** (-np.arange(0, head_dim, 2) / head_dim)
    if np.allclose(divisors, _llama3_divisors(frequencies, scaling), rtol=1e-5, atol=0):
        return scaling
    return {
        "rope_type": "longrope",
        "short_factor": divisors,
        "long_factor": divisors,
        _TRAINED: longest,
        "attention_factor": 1.0,
    }


def _llama3_divisors(frequencies: np.ndarray, scaling: Mapping[str, Any]) -> np.ndarray:
    """Llama 3.1's divisor of each frequency: 1 for high ones, `factor` for low ones."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = frequencies * scaling["original_max_position_embeddings"] / (2 * math.pi)
    share = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return 1 / ((1 - share) / scaling["factor"] + share)


def _values_of(gguf: GgufFile, name: str, head_dim: int) -> list[float]:
    """Reads a number per frequency."""
    if name not in gguf.tensors:
        raise UserError(f"{gguf.path}: {name} is missing; fetch the file again")
    if (shape := gguf.tensors[name].shape) != (head_dim // 2,):
        raise UserError(
            f"{gguf.path}: {name}: want {head_dim // 2} numbers for heads of {head_dim}, got shape "
            f"{list(shape)}; convert the model to GGUF again"
        )
    return [shortest(value) for value in gguf.tensors[name].read().ravel().tolist()]


# --------------------------------------------------------------------------------------------------
# The weights


def _list_tensors(gguf: GgufFile) -> dict[str, LazyTensor]:
    """Lists the weights under Hugging Face's names, in float32; unknown ones keep theirs."""
    heads: dict[str, int] = {}
    if gguf.architecture == "llama":
        heads["attn_q"] = _number(gguf, "attention.head_count", Count)
        heads["attn_k"] = _number(gguf, "attention.head_count_kv", Count, heads["attn_q"])
    tensors = {}
    for name, stored in gguf.tensors.items():
        if name in (_DIVISORS, _SHORT, _LONG):
            continue
        match = _LAYER.fullmatch(name)
        num_heads = heads.get(match[2]) if match else None
        read = partial(_read_rotated, stored, num_heads) if num_heads else stored.read
        key = _hugging_face_name(gguf.architecture, name)
        tensors[key] = LazyTensor(gguf.path, stored.shape, "float32", read)
    return tensors


def _hugging_face_name(architecture: str, name: str) -> str:
    names = _NAMES | (_FUSED if architecture == "phi3" else {})
    if match := _LAYER.fullmatch(name):
        layer, module, kind = match.groups()
        return f"model.layers.{layer}.{names[module]}.{kind}" if module in names else name
    module, _, kind = name.rpartition(".")
    return f"{names[module]}.{kind}" if module in names else name


def _read_rotated(stored: StoredTensor, heads: int) -> np.ndarray:
    """Puts the rows of queries or keys back: llama.cpp rotates neighbours, we rotate halves."""
    rows = stored.read()
    pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)
