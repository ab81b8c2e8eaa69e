"""A GGUF file as a checkpoint in Hugging Face's terms: its config, weights and tokenizer.

The `gguf` package knows the types of tensors and dequantises them. We read the header ourselves:
the package's reader makes an array of every value, which takes 2 s for 49,152 tokens and 280 bytes
of memory per byte of the file, and counts to any length that a file of 100 bytes states.
"""

import math
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter, ValidationError

from poss_jax.config.numbers import (
    Count,
    CountOrZero,
    Fraction,
    HeadDim,
    NumLayers,
    Positive,
    PositiveOrZero,
    TokenId,
)
from poss_jax.config.reading import UserError, one_line, shorten
from poss_jax.convert.source import LazyTensor, Source, make_scratch, map_array

# --------------------------------------------------------------------------------------------------
# The file: its header, and tensors that are dequantised on demand

# Numbers by their type in the metadata, as `struct` writes them.
_NUMBERS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
_FLOAT32, _STRING, _ARRAY = 6, 8, 9


@dataclass(frozen=True)
class GgufFile:
    """The header of a GGUF file."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, LazyTensor]  # read in float32; `dtype` is the name of the stored type

    @property
    def architecture(self) -> str:
        """The family of models, as llama.cpp calls it."""
        return str(self.metadata.get("general.architecture"))

    def unfit(self, key: str, want: str, got: Any) -> UserError:
        """Makes the error for a value of the metadata that is not what is wanted."""
        return UserError(
            f"{self.path}: metadata {key}: want {want}, got {shorten(got)}; convert the model to "
            "GGUF again"
        )

    def read(self, key: str, kind: Any, default: Any = None) -> Any:
        """Gives a value of the metadata if it is of a type, such as `poss_jax.config.numbers` has.

        Raises:
          UserError: it is missing without a default, of another type, or outside the bounds.
        """
        value = self.metadata.get(key, default)
        try:
            return TypeAdapter(kind).validate_python(value)
        except ValidationError as error:
            want = error.errors()[0]["msg"].removeprefix("Input should be ")
            raise self.unfit(key, want, value) from error

    def of_model(self, key: str, kind: Any = Any, default: Any = None) -> Any:
        """Reads the value of a key that starts with the architecture."""
        return self.read(f"{self.architecture}.{key}", kind, default)

    @property
    def tokens(self) -> list[str]:
        """Texts of the tokens by id; empty if the file has no tokenizer."""
        return self.read("tokenizer.ggml.tokens", list[str], [])

    def special_id(self, key: str, default: int | None = None) -> int | None:
        """Reads the id of a special token, which the metadata calls `KEY_token_id`."""
        return self.read(f"tokenizer.ggml.{key}_token_id", TokenId | None, default)


def open_gguf(path: Path) -> GgufFile:
    """Reads the header of a GGUF file, and checks that the file is whole.

    Raises:
      UserError: another kind of file, a damaged one, part of a split one, or a tensor of a type
        that cannot be dequantised.
    """
    try:
        return _read_header(path, _Cursor(map_array(path, 0, (path.stat().st_size,), "uint8").data))
    except (ValueError, KeyError, IndexError) as error:
        reason = one_line(error)
        raise UserError(f"{path}: the file is damaged ({reason}); fetch it again") from error


def _read_header(path: Path, cursor: "_Cursor") -> GgufFile:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize, quant_shape_to_byte_shape

    if cursor.take(4) != b"GGUF":
        raise UserError(f"{path}: want a GGUF file, got another kind; fetch the file again")
    if (version := cursor.number("I")) not in (2, 3):
        raise UserError(
            f"{path}: want GGUF version 2 or 3, little-endian, got {version}; convert the model to "
            "GGUF again"
        )
    num_tensors, num_keys = cursor.number("Q"), cursor.number("Q")
    metadata = {cursor.text(): cursor.value(cursor.number("I")) for _ in range(num_keys)}
    if (parts := metadata.get("split.count", 1)) not in (0, 1):
        raise UserError(
            f"{path}: is one of {shorten(parts)} parts of a model; join them with llama.cpp's "
            "llama-gguf-split --merge"
        )
    stored = []
    for _ in range(num_tensors):
        name, rank = cursor.text(), cursor.number("I")
        shape = tuple(cursor.number("Q") for _ in range(min(rank, 8)))[::-1]  # rows first
        stored.append((name, shape, GGMLQuantizationType(cursor.number("I")), cursor.number("Q")))
    gguf = GgufFile(path, metadata, {})
    alignment = gguf.read("general.alignment", Count, 32)
    begin = -(-cursor.place // alignment) * alignment
    for name, shape, kind, offset in stored:
        byte_shape = quant_shape_to_byte_shape(shape, kind)  # ValueError: no whole blocks
        end = begin + offset + math.prod(byte_shape)
        if end > len(cursor.content):
            raise ValueError(f"{name} ends at byte {end} of {len(cursor.content)}")
        try:
            dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
        except NotImplementedError as error:
            raise UserError(
                f"{path}: {name} is of type {kind.name}, which cannot be dequantised; take a file "
                "of another quantisation"
            ) from error
        read = partial(_read, path, begin + offset, byte_shape, kind)
        gguf.tensors[name] = LazyTensor(path, shape, kind.name, read)
    return gguf


def _read(path: Path, start: int, byte_shape: tuple[int, ...], kind: Any) -> np.ndarray:
    """Reads and dequantises a tensor, to float32."""
    from gguf.quants import dequantize

    return dequantize(map_array(path, start, byte_shape, "uint8"), kind)


class _Cursor:
    """Reads a header from its start; anything past the end of the file is a ValueError."""

    def __init__(self, content: memoryview) -> None:
        self.content, self.place = content, 0

    def take(self, size: int) -> bytes:
        start, self.place = self.place, self.place + size
        if self.place > len(self.content):
            raise ValueError(f"its header ends at byte {len(self.content)}")
        return bytes(self.content[start : self.place])

    def number(self, form: str) -> Any:
        return struct.unpack(f"<{form}", self.take(struct.calcsize(f"<{form}")))[0]

    def text(self) -> str:
        return self.take(self.number("Q")).decode()

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            kind, length = self.number("I"), self.number("Q")
            if kind == _STRING:
                return [self.text() for _ in range(length)]
            dtype = np.dtype(_NUMBERS[kind]).newbyteorder("<")
            return np.frombuffer(self.take(length * dtype.itemsize), dtype).tolist()
        number = self.number(_NUMBERS[kind])
        return shortest(number) if kind == _FLOAT32 else number


def shortest(number: float) -> float:
    """Returns the number of fewest digits that is the same float32, such as 1e-5."""
    return float(str(np.float32(number)))


# --------------------------------------------------------------------------------------------------
# The checkpoint

# Metadata of the model, by its key behind the architecture -> key of config.json, type.
_CONFIG_KEYS = {
    "block_count": ("num_hidden_layers", NumLayers),
    "context_length": ("max_position_embeddings", Count),
    "embedding_length": ("hidden_size", Count),
    "feed_forward_length": ("intermediate_size", Count),
    "attention.head_count": ("num_attention_heads", Count),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", Fraction),
}
# Other known keys. Instead of `vocab_size` the embedding's rows count; experts are refused as such.
_OTHER_KEYS = (
    "vocab_size attention.head_count_kv attention.key_length attention.value_length "
    "attention.sliding_window rope.dimension_count rope.freq_base rope.scale_linear "
    "rope.scaling.type rope.scaling.factor rope.scaling.attn_factor rope.scaling.finetuned "
    "rope.scaling.original_context_length tensor_data_layout expert_count expert_used_count"
).split()

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

STOPS = frozenset(
    "<|eot_id|> <|im_end|> <|end|> <end_of_turn> <|endoftext|> </s> <|eom_id|> <EOT> _<EOT> "
    "<|end_of_text|> <｜end▁of▁sentence｜>".split()
)
"""Tokens that always end a text: the metadata often names only one of several."""

_ARCHITECTURES = ("llama", "qwen2", "qwen3", "phi3")
_TRAINED = "original_max_position_embeddings"


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
        stop_ids = [gguf.special_id(name) for name in ("eos", "eot", "eom")]
        stop_ids += [index for index, token in enumerate(gguf.tokens) if token in STOPS]
        return values | {
            "model_type": gguf.architecture,
            "vocab_size": embedding.shape[0] if embedding else len(gguf.tokens),
            "num_key_value_heads": gguf.of_model("attention.head_count_kv", Count | None),
            "head_dim": head_dim,
            "partial_rotary_factor": rotated / head_dim,
            "num_experts": gguf.of_model("expert_count"),
            "sliding_window": None,
            "tie_word_embeddings": "output.weight" not in gguf.tensors,
            "attention_bias": "blk.0.attn_q.bias" in gguf.tensors,
            "mlp_bias": "blk.0.ffn_up.bias" in gguf.tensors,
            "bos_token_id": gguf.special_id("bos"),
            "eos_token_id": [*dict.fromkeys(index for index in stop_ids if index is not None)],
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
        from poss_jax.convert.gguf_tokenizer import write_tokenizer  # it builds on this module

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
    low, high, trained = 1.0, 4.0, 8192
    turns = theta ** (-np.arange(0, head_dim, 2) / head_dim) * trained / (2 * math.pi)
    share = np.clip((turns - low) / (high - low), 0.0, 1.0)
    if np.allclose(divisors, 1 / ((1 - share) / factor + share), rtol=1e-5, atol=0):
        factors = {"factor": factor, "low_freq_factor": low, "high_freq_factor": high}
        return {"rope_type": "llama3", **factors, _TRAINED: trained}
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
