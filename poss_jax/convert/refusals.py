"""What we recognise and cannot convert, each with its name: a guess would run, and run wrongly."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from poss_jax.config import UserError
from poss_jax.convert.source import LazyTensor

_QUANTISED = "quantised weights"
_EXPERTS = "a mixture of experts"
_EAGLE3 = "an EAGLE-3 draft"
_ADAPTER = "a LoRA adapter"

_ADVICE = {
    _QUANTISED: "give the model it was quantised from",
    _EXPERTS: "only dense models are supported",
    _EAGLE3: "EAGLE-2, HASS and PosS drafts are supported so far",
    _ADAPTER: "merge it into its base model and give the result",
}

_EXPERT_MODELS = re.compile(r"moe|mixtral|llama4|deepseek_v|dbrx", re.IGNORECASE)
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")

_SIGNS = {
    _ADAPTER: re.compile(r"(^|\.)lora_(A|B|embedding_[AB])(\.|$)"),
    _EAGLE3: re.compile(r"^(model\.)?(midlayers?\.|d2t$|t2d$|layers\.\d+\.hidden_norm\.)"),
    _EXPERTS: re.compile(r"\.(experts|block_sparse_moe)\."),
    _QUANTISED: re.compile(
        r"\.(qweight|qzeros|scales|g_idx|SCB|weight_scale(_inv)?|weight_packed"
        r"|weight\.(absmax|quant_map|quant_state\..*))$"
    ),
}
_QUANTISED_TYPE = re.compile(r"[UIF][48](_.*)?|u?int8|float8.*")


def refuse_config(values: Mapping[str, Any], origin: str) -> None:
    """Refuses what config.json says cannot be converted.

    Args:
      values: its contents.
      origin: what they came from, for the message.

    Raises:
      UserError: quantised, a mixture of experts, or an EAGLE-3 draft.
    """
    quantisation = values.get("quantization_config") or values.get("compression_config")
    if quantisation:
        method = quantisation.get("quant_method") if isinstance(quantisation, dict) else None
        _refuse(origin, _QUANTISED, f"quantization_config with quant_method {method!r}")
    architectures = values.get("architectures")
    names = [str(values.get("model_type"))]
    names += map(str, architectures) if isinstance(architectures, list) else ()
    for name in names:
        if "eagle3" in name.lower():
            _refuse(origin, _EAGLE3, name)
    if values.get("draft_vocab_size") or values.get("speculators_model_type") == "eagle3":
        _refuse(origin, _EAGLE3, "draft_vocab_size")
    for name in names:
        if _EXPERT_MODELS.search(name):
            _refuse(origin, _EXPERTS, name)
    for key in _EXPERT_COUNTS:
        if values.get(key):
            _refuse(origin, _EXPERTS, f"{key} {values[key]!r}")


def refuse_tensors(tensors: Mapping[str, LazyTensor], origin: str) -> None:
    """Refuses what the names and types of the weights say cannot be converted.

    Args:
      tensors: of the source, by key.
      origin: the source, for the message.

    Raises:
      UserError: a LoRA adapter, an EAGLE-3 draft, a mixture of experts, or quantised.
    """
    for what, sign in _SIGNS.items():
        for key in tensors:
            if sign.search(key):
                _refuse(origin, what, key)
    for key, tensor in tensors.items():
        if _QUANTISED_TYPE.fullmatch(tensor.dtype):
            _refuse(origin, _QUANTISED, f"{key} of type {tensor.dtype}")


def refuse_adapter(folder: Path) -> None:
    """Refuses a folder that holds a LoRA adapter and no model.

    Raises:
      UserError: there is an adapter_config.json, and no config.json beside it.
    """
    if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
        _refuse(str(folder), _ADAPTER, "adapter_config.json")


def _refuse(origin: str, what: str, sign: str) -> None:
    raise UserError(f"{origin}: holds {what} ({sign}), which cannot be converted; {_ADVICE[what]}")
