"""config.json as we write it, for `transformers` 4 and 5."""

from typing import Any

from poss_jax.config.models import LlamaConfig
from poss_jax.config.reading import UserError
from poss_jax.convert.hf import CONFIG_KEYS, ROPE_KEYS


def target_config_json(config: LlamaConfig, dtype: str) -> dict[str, Any]:
    """Describes a target to `transformers` 4 and 5.

    Args:
      config: shape of the target.
      dtype: type that its weights are written in.

    Raises:
      UserError: no family of Hugging Face has these biases and norms.
    """
    family = _family(config)
    values = {"architectures": [f"{family.capitalize()}ForCausalLM"], "model_type": family}
    values |= layer_json(config, dtype) | {"tie_word_embeddings": config.tie_embeddings}
    if family != "llama":
        values |= {"use_sliding_window": False}
    if family != "qwen2":
        values |= {"attention_bias": config.qkv_bias}
    return values | ({"mlp_bias": config.mlp_bias} if family == "llama" else {})


def _family(config: LlamaConfig) -> str:
    """Finds the family whose own code has these biases and norms."""
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


def layer_json(config: LlamaConfig, dtype: str) -> dict[str, Any]:
    """Describes the layers of a model, of any kind."""
    stop_ids = list(config.eos_token_ids)
    return {
        **{key: getattr(config, field) for field, key in CONFIG_KEYS.items()},
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        **_rope(config),
        "bos_token_id": config.bos_token_id,
        "eos_token_id": stop_ids if len(stop_ids) > 1 else next(iter(stop_ids), None),
        "torch_dtype": dtype,
        "dtype": dtype,
    }


def _rope(config: LlamaConfig) -> dict[str, Any]:
    """Writes both spellings: rope_theta and rope_scaling (transformers 4), rope_parameters (5)."""
    rope, scaling = config.rope, {}
    trained, longest = rope.original_max_position_embeddings, config.max_position_embeddings
    if rope.type == "dynamic" and trained != longest:  # Hugging Face has one number for both
        raise UserError(
            f"rope type dynamic: transformers takes max_position_embeddings ({longest}) for the "
            f"trained context ({trained}); such a target stays with poss_jax"
        )
    if rope.type != "default":
        keys = ROPE_KEYS[rope.type]
        scaling = {"rope_type": rope.type} | {key: getattr(rope, key) for key in keys}
    return {
        "rope_theta": rope.theta,
        "rope_scaling": {"type": rope.type} | scaling if scaling else None,
        "rope_parameters": {"rope_type": rope.type, "rope_theta": rope.theta} | scaling,
    }
