"""config.json as Hugging Face and the original code read it, written from our configs."""

from typing import Any

from poss_jax.config import DraftConfig, LlamaConfig, RopeConfig, UserError, config_to_dict
from poss_jax.convert.draft_config import METADATA, DraftMetadata

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def target_config_json(config: LlamaConfig, dtype: str) -> dict[str, Any]:
    """Describes a target to `transformers` 4 and 5.

    Args:
      config: of the target.
      dtype: its weights are written in.

    Raises:
      UserError: no family of Hugging Face has these biases and norms.
    """
    family = _family(config)
    values = {"architectures": [_ARCHITECTURES[family]], "model_type": family}
    values |= _shape(config, dtype) | {"tie_word_embeddings": config.tie_embeddings}
    if family != "llama":
        values |= {"use_sliding_window": False}
    if family != "qwen2":
        values |= {"attention_bias": config.qkv_bias}
    return values | ({"mlp_bias": config.mlp_bias} if family == "llama" else {})


def draft_config_json(config: DraftConfig, metadata: DraftMetadata, dtype: str) -> dict[str, Any]:
    """Describes a draft to the original code, and to our own converter.

    Args:
      config: of the draft.
      metadata: what the layout has no key for.
      dtype: its weights are written in.

    Raises:
      UserError: the original code has no such layers.
    """
    layer = config.layer
    wrong = [field for field in ("o_bias", "qk_norm", "mlp_bias") if getattr(layer, field)]
    if layer.num_heads * layer.head_dim != layer.hidden_size:
        wrong.append(
            f"{layer.num_heads} heads of {layer.head_dim} for a width of {layer.hidden_size}"
        )
    if wrong:
        raise UserError(
            f"the original code has no draft layers with {', '.join(wrong)}; such a draft stays "
            "with poss_jax"
        )
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **_shape(layer, dtype),
        "num_hidden_layers": 1,  # whatever the number of specialists: so do the published ones
        "tie_word_embeddings": layer.tie_embeddings,
        "pad_token_id": 0,
        "qkv_bias": layer.qkv_bias,
        "bias": config.fc_bias,
        METADATA: {k: v for k, v in config_to_dict(metadata).items() if v is not None},
    }


def _family(config: LlamaConfig) -> str:
    """The family whose own code has these biases and norms."""
    if config.qk_norm and config.qkv_bias == config.o_bias and not config.mlp_bias:
        return "qwen3"
    if not config.qk_norm and config.qkv_bias == config.o_bias:
        return "llama"
    if not config.qk_norm and config.qkv_bias and not config.mlp_bias:
        return "qwen2"
    raise UserError(
        f"no family of transformers has qkv_bias {config.qkv_bias}, o_bias {config.o_bias}, "
        f"qk_norm {config.qk_norm} and mlp_bias {config.mlp_bias} together; such a target stays "
        "with poss_jax"
    )


def _shape(config: LlamaConfig, dtype: str) -> dict[str, Any]:
    stop_ids = list(config.eos_token_ids)
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        **_rope(config),
        "bos_token_id": config.bos_token_id,
        "eos_token_id": stop_ids if len(stop_ids) > 1 else next(iter(stop_ids), None),
        "torch_dtype": dtype,
        "dtype": dtype,
    }


def _rope(config: LlamaConfig) -> dict[str, Any]:
    """Both spellings: rope_theta and rope_scaling (transformers 4), rope_parameters (5)."""
    rope, scaling = config.rope, None
    if rope.type != "default":
        scaling = {"type": rope.type, "rope_type": rope.type, **_scaling(rope, config)}
    both = {key: value for key, value in (scaling or {}).items() if key != "type"}
    return {
        "rope_theta": rope.theta,
        "rope_scaling": scaling,
        "rope_parameters": {"rope_type": rope.type, "rope_theta": rope.theta} | both,
    }


def _scaling(rope: RopeConfig, config: LlamaConfig) -> dict[str, Any]:
    if rope.type == "llama3":
        return {
            "factor": rope.factor,
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
            "original_max_position_embeddings": rope.original_max_position_embeddings,
        }
    trained, longest = rope.original_max_position_embeddings, config.max_position_embeddings
    if rope.type == "dynamic" and trained != longest:  # Hugging Face has one number for both
        raise UserError(
            f"rope type dynamic: transformers takes max_position_embeddings ({longest}) for the "
            f"trained context ({trained}); such a target stays with poss_jax"
        )
    return {"factor": rope.factor}
