"""A GGUF file as a checkpoint in Hugging Face's terms: its config, weights and tokenizer."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
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
from poss_jax.convert.gguf_file import GgufFile, make_scratch, shortest
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

_NAME = re.compile(r"(blk\.\d+\.)?(\w+)\.(weight|bias)")
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
_LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    _TRAINED: 8192,
}


@dataclass(frozen=True)
class GgufSource(Source):
    """A GGUF file, as `Source` presents a folder."""

    gguf: GgufFile = field(kw_only=True)

    @property
    def config_name(self) -> str:
        """Name of the config's file, for messages."""
        return f"{self.folder}: metadata"

    @cached_property
    def values(self) -> dict[str, Any]:
        """The metadata, as config.json says it."""
        gguf = self.gguf
        if gguf.architecture not in _ARCHITECTURES:
            return {"model_type": gguf.architecture}  # which the reader of config.json refuses
        values = {name: gguf.of_model(key, kind) for key, (name, kind) in _CONFIG_KEYS.items()}
        longest = values["max_position_embeddings"]
        _refuse_unknown(gguf, longest)
        usual = values["hidden_size"] // values["num_attention_heads"]
        head_dim = gguf.of_model("attention.key_length", HeadDim, usual)
        value_dim = gguf.of_model("attention.value_length", HeadDim, usual)
        if head_dim != value_dim:
            raise UserError(
                f"{gguf.path}: want heads of one width, got keys of {head_dim} and values of "
                f"{value_dim}; such a model cannot be converted"
            )
        embedding = gguf.tensors.get("token_embd.weight")
        rotated = gguf.of_model("rope.dimension_count", Count, head_dim)
        return values | {
            "model_type": gguf.architecture,
            "vocab_size": embedding.shape[0] if embedding else len(token_list(gguf)),
            "num_key_value_heads": gguf.of_model("attention.head_count_kv", Count | None),
            "head_dim": head_dim,
            "partial_rotary_factor": rotated / head_dim,
            "num_experts": gguf.of_model("expert_count"),
            "sliding_window": None,
            "tie_word_embeddings": "output.weight" not in gguf.tensors,
            "attention_bias": "blk.0.attn_q.bias" in gguf.tensors,
            "mlp_bias": "blk.0.ffn_up.bias" in gguf.tensors,
            "bos_token_id": special_id(gguf, "bos"),
            "eos_token_id": stop_ids(gguf),
            **_read_rope(gguf, head_dim, longest),
        }

    @cached_property
    def tensors(self) -> dict[str, LazyTensor]:
        """The weights under Hugging Face's names, in float32; unknown ones keep theirs."""
        gguf, heads = self.gguf, {}
        if gguf.architecture == "llama":
            heads["attn_q"] = gguf.of_model("attention.head_count", Count)
            heads["attn_k"] = gguf.of_model("attention.head_count_kv", Count, heads["attn_q"])
        modules = _NAMES | (_FUSED if gguf.architecture == "phi3" else {})
        tensors = {}
        for name, tensor in gguf.tensors.items():
            key, read = name, tensor.read
            if (match := _NAME.fullmatch(name)) and match[2] in modules:
                layer, module, kind = match.groups(default="")
                key = f"{layer.replace('blk', 'model.layers')}{modules[module]}.{kind}"
                if module in heads:
                    read = partial(_read_rotated, tensor.read, heads[module])
            if name not in (_DIVISORS, _SHORT, _LONG):
                tensors[key] = replace(tensor, dtype="float32", read=read)
        return tensors

    @cached_property
    def tokenizer_folder(self) -> Path:
        """A temporary folder with the tokenizer's files."""
        folder = make_scratch()
        write_tokenizer(self.gguf, folder)
        return folder


def _read_rotated(read: Callable[[], np.ndarray], heads: int) -> np.ndarray:
    """Puts the rows of queries or keys back: llama.cpp rotates neighbours, we rotate halves."""
    rows = read()
    pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _refuse_unknown(gguf: GgufFile, longest: int) -> None:
    """Refuses keys that may change what the model computes."""
    prefix = f"{gguf.architecture}."
    for key, value in gguf.metadata.items():
        name = key.removeprefix(prefix)
        is_known = name in (*_CONFIG_KEYS, *_OTHER_KEYS) or name.startswith("rope.scaling.yarn_")
        if key.startswith(prefix) and value and not is_known:
            raise UserError(
                f"{gguf.path}: metadata {key} is {shorten(value)}, which is not known and may "
                "change what the model computes; such a model cannot be converted"
            )
    window = gguf.of_model("attention.sliding_window", CountOrZero, 0)
    if 0 < window < longest:
        raise UserError(
            f"{gguf.path}: a sliding window of {window} tokens is active, which is not supported; "
            "take a model without one"
        )


# --------------------------------------------------------------------------------------------------
# The rope, some of whose settings are tensors


def _read_rope(gguf: GgufFile, head_dim: int, longest: int) -> dict[str, Any]:
    theta = gguf.of_model("rope.freq_base", Positive, 10000.0)
    factor = gguf.of_model("rope.scale_linear", PositiveOrZero, 0)
    factor = gguf.of_model("rope.scaling.factor", PositiveOrZero, factor)
    kind = gguf.of_model("rope.scaling.type", default="linear")  # as llama.cpp
    is_plain = kind == "none" or (kind == "linear" and factor in (0, 1))
    is_long = _LONG in gguf.tensors or kind == "longrope"
    if kind == "yarn" or (_DIVISORS in gguf.tensors and not is_plain and not is_long):
        raise UserError(
            f"{gguf.path}: rope type {shorten(kind)} is read from safetensors only; convert the "
            "model that this file was made from"
        )
    scaling = None if is_plain else {"rope_type": kind, "factor": factor}
    if is_long:
        trained = gguf.of_model("rope.scaling.original_context_length", Count, longest)
        factor = gguf.of_model("rope.scaling.attn_factor", Positive, 1.0)
        stretch = max(longest / trained, 1.0)
        usual = math.sqrt(1 + math.log(stretch) / math.log(max(trained, 2)))  # `RopeConfig.scale`
        scaling = {
            "rope_type": "longrope",
            "short_factor": _values_of(gguf, _SHORT, head_dim),
            "long_factor": _values_of(gguf, _LONG, head_dim),
            _TRAINED: trained,
            "attention_factor": None if math.isclose(factor, usual, rel_tol=1e-6) else factor,
        }
    elif _DIVISORS in gguf.tensors:
        scaling = _read_divisors(gguf, theta, head_dim, longest)
    trained = (scaling or {}).get(_TRAINED)
    return {"rope_theta": theta, "rope_scaling": scaling, _TRAINED: trained}  # Phi-3's place for it


def _read_divisors(gguf: GgufFile, theta: float, head_dim: int, longest: int) -> dict[str, Any]:
    """Recognises Llama 3.1's rope, of which the file holds only the divisors.

    Other divisors become a longrope that divides short and long texts alike.
    """
    divisors = _values_of(gguf, _DIVISORS, head_dim)
    factor = max(divisors, default=1.0)
    # Llama 3.1's divisor of each frequency: 1 for high ones, the factor for low ones.
    low, high, trained = (_LLAMA3[key] for key in ("low_freq_factor", "high_freq_factor", _TRAINED))
    turns = theta ** (-np.arange(0, head_dim, 2) / head_dim) * trained / (2 * math.pi)
    share = np.clip((turns - low) / (high - low), 0.0, 1.0)
    if np.allclose(divisors, 1 / ((1 - share) / factor + share), rtol=1e-5, atol=0):
        return _LLAMA3 | {"factor": factor}
    return {
        "rope_type": "longrope",
        "short_factor": divisors,
        "long_factor": divisors,
        _TRAINED: longest,
        "attention_factor": 1.0,
    }


def _values_of(gguf: GgufFile, name: str, head_dim: int) -> list[float]:
    """Reads a number per frequency."""
    tensor = gguf.tensors.get(name)
    if tensor is None or tensor.shape != (head_dim // 2,):
        got = "none" if tensor is None else f"shape {list(tensor.shape)}"
        raise UserError(
            f"{gguf.path}: {name}: want {head_dim // 2} numbers for heads of {head_dim}, got "
            f"{got}; convert the model to GGUF again"
        )
    return [shortest(value) for value in tensor.read().ravel().tolist()]
