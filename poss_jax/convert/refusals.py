"""What we recognise and cannot convert, each with its name: a guess would run, and run wrongly."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from poss_jax.config import UserError, cut, shorten
from poss_jax.convert.names import FC, QUERY, plain_name
from poss_jax.convert.source import LazyTensor

_ADAPTER = "a LoRA adapter"
_EAGLE3 = "an EAGLE-3 draft"
_EXPERTS = "a mixture of experts"
_QUANTISED = "quantised weights"
_SPECULATORS = "an EAGLE-1 draft of speculators with layers of its own"
_INPUT_NORM = "an input norm"

_NOT_YET = "not supported yet, give an EAGLE-2, HASS or PosS draft"
_ADVICE = {
    _ADAPTER: "merge it into its base model and convert the result",
    _EAGLE3: _NOT_YET,
    _EXPERTS: "only dense models can be converted",
    _QUANTISED: "convert the model it was quantised from",
    _SPECULATORS: "give a draft of the original layout",
    _INPUT_NORM: "no EAGLE-2, HASS or PosS draft has one, give the draft's own files",
}

# What tells them: parts of config.json's names and of the weights' plain names.
_EXPERT_MODELS = re.compile(r"moe|mixtral|llama4|deepseek_v|dbrx", re.IGNORECASE)
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
_EAGLE3_NAME = re.compile(r"eagle3", re.IGNORECASE)
_EAGLE3_KEYS = re.compile(r"midlayers?\.|d2t$|t2d$|layers\.\d+\.hidden_norm\.")
_LAYER = re.compile(r"(?:mid)?layers\.(\d+)\.")
_KEYS = {
    _ADAPTER: re.compile(r"(^|\.)lora_(A|B|embedding_[AB])(\.|$)"),
    _EXPERTS: re.compile(r"\.(experts|block_sparse_moe)\."),
    _QUANTISED: re.compile(
        r"\.(qweight|qzeros|scales|g_idx|SCB|weight_scale(_inv)?|weight_packed"
        r"|weight\.(absmax|quant_map|quant_state\..*))$"
    ),
}
_QUANTISED_TYPE = re.compile(r"[UIF][48](_.*)?|u?int8|float8.*")
_DRAFT_KEYS = {
    _SPECULATORS: re.compile(
        r"^(embed_layernorm|embedding_layernorm|post_embedding_layernorm|pre_lm_head_layernorm"
        r"|fusion_fc|transformer)\."
    ),
    _INPUT_NORM: re.compile(r"\.input_layernorm\."),
}


def refuse_config(values: Mapping[str, Any], origin: str) -> None:
    """Refuses what config.json says cannot be converted.

    Args:
      values: its contents.
      origin: what they came from, for the message.

    Raises:
      UserError: quantised, a mixture of experts, an EAGLE-3 draft or another of speculators.
    """
    refuse_speculators(values, origin)
    quantisation = values.get("quantization_config") or values.get("compression_config")
    if quantisation:
        method = quantisation.get("quant_method") if isinstance(quantisation, dict) else None
        _refuse(origin, _QUANTISED, f"quantization_config with quant_method {shorten(method)}")
    name = eagle3_name(values) or ("draft_vocab_size" if values.get("draft_vocab_size") else None)
    if name:
        _refuse(origin, _EAGLE3, name)
    for name in model_names(values):
        if _EXPERT_MODELS.search(name):
            _refuse(origin, _EXPERTS, name)
    for key in _EXPERT_COUNTS:
        if values.get(key):
            _refuse(origin, _EXPERTS, f"{key} {shorten(values[key])}")


def refuse_speculators(values: Mapping[str, Any], origin: str) -> None:
    """Refuses the classes of vLLM's speculators other than EAGLE-1, by their name.

    Raises:
      UserError: names the class.
    """
    kind = values.get("speculators_model_type")
    if kind is not None and kind != "eagle":
        name = (model_names(values) or [str(kind)])[0]
        what = _EAGLE3 if _EAGLE3_NAME.search(f"{kind}{name}") else f"a {cut(str(kind))} draft"
        _refuse(origin, f"{what} of speculators", name, _NOT_YET)


def model_names(values: Mapping[str, Any]) -> list[str]:
    """What config.json calls the model: its classes, then its type."""
    classes = values.get("architectures")
    names = [*classes] if isinstance(classes, list) else []
    return [str(name) for name in (*names, values.get("model_type")) if name is not None]


def eagle3_name(values: Mapping[str, Any]) -> str | None:
    """The name by which config.json says EAGLE-3, if any."""
    return next(filter(_EAGLE3_NAME.search, model_names(values)), None)


def refuse_tensors(tensors: Mapping[str, LazyTensor], origin: str) -> None:
    """Refuses what the names, shapes and types of the weights say cannot be converted.

    Args:
      tensors: of the source, by key.
      origin: the source, for the message.

    Raises:
      UserError: a LoRA adapter, an EAGLE-3 draft, a mixture of experts, or quantised.
    """
    _refuse_keys(tensors, origin, {_ADAPTER: _KEYS[_ADAPTER]})
    _refuse_eagle3(tensors, origin)
    _refuse_keys(tensors, origin, _KEYS)
    for key, tensor in tensors.items():
        if _QUANTISED_TYPE.fullmatch(tensor.dtype):
            _refuse(origin, _QUANTISED, f"{key} of type {tensor.dtype}")


def refuse_draft(tensors: Mapping[str, LazyTensor], origin: str) -> None:
    """Refuses a draft in the place of a target.

    Raises:
      UserError: there is a fusion layer.
    """
    key = next((key for key in tensors if plain_name(key) == FC), None)
    if key is not None:
        advice = "convert it with the draft command, and give its target here"
        _refuse(origin, "a draft", key, advice)


def refuse_other_drafts(tensors: Mapping[str, LazyTensor], origin: str) -> None:
    """Refuses what is no EAGLE-2, HASS or PosS draft.

    Args:
      tensors: by key.
      origin: the source, for the message.

    Raises:
      UserError: names what it is and what told it.
    """
    names = set(map(plain_name, tensors))
    if FC not in names and {"embed_tokens.weight", "norm.weight"} <= names:
        advice = "convert it with the target command, and give the draft's own files here"
        _refuse(origin, "a whole target", f"norm.weight, and no {FC}", advice)
    refuse_tensors(tensors, origin)
    _refuse_keys(tensors, origin, _DRAFT_KEYS)


def refuse_adapter(folder: Path) -> None:
    """Refuses a folder that holds a LoRA adapter and no model.

    Raises:
      UserError: there is an adapter_config.json, and no config.json beside it.
    """
    if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
        _refuse(str(folder), _ADAPTER, "adapter_config.json")


def _refuse_eagle3(tensors: Mapping[str, LazyTensor], origin: str) -> None:
    """EAGLE-3, and PosS on EAGLE-3: other names, or twice or three times the width."""
    shapes = {plain_name(key): tensor.shape for key, tensor in tensors.items()}
    sign = next(filter(_EAGLE3_KEYS.match, shapes), None)
    fc_shape = shapes.get(FC, ())
    for key, times in ((FC, 3), (QUERY, 2)):
        if (
            sign is None
            and len(fc_shape) == 2
            and shapes.get(key, ())[1:] == (times * fc_shape[0],)
        ):
            sign = f"{key} {list(shapes[key])}"
    if sign is not None:
        layers = {match[1] for match in map(_LAYER.match, shapes) if match}
        several = FC in shapes and len(layers) > 1
        what = "a PosS draft on EAGLE-3" if several else _EAGLE3
        _refuse(origin, what, sign, _NOT_YET)


def _refuse_keys(keys: Iterable[str], origin: str, signs: Mapping[str, re.Pattern[str]]) -> None:
    for what, sign in signs.items():
        for key in keys:
            if sign.search(plain_name(key)):
                _refuse(origin, what, key)


def _refuse(origin: str, what: str, sign: str, advice: str = "") -> NoReturn:
    raise UserError(f"{origin}: holds {what} ({cut(sign)}); {advice or _ADVICE[what]}")
