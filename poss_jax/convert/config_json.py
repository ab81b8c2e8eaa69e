"""config.json as we write it, for `transformers` 4 and 5."""

from typing import Any

from poss_jax.config.models import LlamaConfig
from poss_jax.config.reading import UserError
from poss_jax.convert.hf import CONFIG_KEYS
from poss_jax.convert.rope import write_rope


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
    if family == "phi3":  # its own default for padding lies beyond a small vocabulary
        return values | {"sliding_window": None, "pad_token_id": None}
    if family != "llama":
        values |= {"use_sliding_window": False}
    if family != "qwen2":
        values |= {"attention_bias": config.qkv_bias}
    return values | ({"mlp_bias": config.mlp_bias} if family == "llama" else {})


def _family(config: LlamaConfig) -> str:
    """Finds the family whose own code has these projections, biases and norms."""
    if config.fused_projections:
        return _check_phi3(config)
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


def _check_phi3(config: LlamaConfig) -> str:
    """Names the family of fused projections, which has no biases and few types of rope."""
    wrong = config.extras
    if config.rope.type not in ("default", "longrope"):
        wrong.append(f"rope type {config.rope.type}")
    if wrong:
        raise UserError(
            f"Phi-3, which has fused projections, has no {', '.join(wrong)}; such a target stays "
            "with poss_jax"
        )
    return "phi3"


def layer_json(config: LlamaConfig, dtype: str) -> dict[str, Any]:
    """Describes the layers of a model, of any kind."""
    stop_ids = list(config.eos_token_ids)
    return {
        **{key: getattr(config, field) for field, key in CONFIG_KEYS.items()},
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        **write_rope(config),
        "bos_token_id": config.bos_token_id,
        "eos_token_id": stop_ids if len(stop_ids) > 1 else next(iter(stop_ids), None),
        "torch_dtype": dtype,
        "dtype": dtype,
    }
