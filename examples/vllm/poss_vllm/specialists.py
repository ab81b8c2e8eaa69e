"""PosS drafts as models of vLLM 0.32: every draft position has its specialist, a decoder layer.

vLLM's EAGLE proposer drafts a chain: it fuses the target's features, runs the draft over all new
tokens, and once more for each further position. Here these runs are counted, and the specialist of
the position computes each:

    run            first: new tokens   second    third     fourth
    spans 3, 3     specialist 0        0         0         1

Keys and values lie in vLLM's paged cache. The first run overwrites drafted rows.
"""

from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention.attention import unified_kv_cache_update
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.models.llama import LlamaAttention
from vllm.model_executor.models.llama_eagle import EagleLlamaForCausalLM
from vllm.model_executor.models.llama_eagle import LlamaDecoderLayer as EagleLayer
from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM
from vllm.model_executor.models.llama_eagle3 import LlamaDecoderLayer as Eagle3Layer
from vllm.model_executor.models.utils import maybe_prefix

Rows = tuple[torch.Tensor, torch.Tensor]
"""Rows that the head multiplies, and rows that the next specialist reads, [tokens D] each."""


class Specialists(Eagle3LlamaForCausalLM):
    """A draft with a layer for every specialist, in place of vLLM's stack of layers."""

    def __new__(cls, *, vllm_config: VllmConfig, prefix: str = "") -> Any:
        """Leaves drafts of one specialist, or of unknown ones, to vLLM."""
        if len(read_spans(vllm_config)) < 2:
            return Eagle3LlamaForCausalLM(vllm_config=vllm_config, prefix=prefix)
        return super().__new__(cls, vllm_config=vllm_config, prefix=prefix)

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        if vllm_config.use_v2_model_runner:
            raise ValueError("PosS wants vLLM's V1 model runner; set VLLM_USE_V2_MODEL_RUNNER=0")
        draft_config(vllm_config).num_hidden_layers = 0
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        spans = read_spans(vllm_config)
        first = self.config.target_layer_count  # the draft's layers are numbered after the target's
        for index in range(first, first + len(spans)):
            name = maybe_prefix(prefix, f"model.layers.{index}")
            self.model.layers.append(self.make_layer(vllm_config, name))
        self.specialist_at = [index for index, span in enumerate(spans) for _ in range(span)]
        self.position = 0

    def make_layer(self, vllm_config: VllmConfig, prefix: str) -> nn.Module:
        raise NotImplementedError

    def run(
        self, layer: Any, positions: torch.Tensor, embeds: torch.Tensor, features: torch.Tensor
    ) -> Rows:
        """Runs a specialist on rows of an embedding and a feature, [tokens D] each."""
        raise NotImplementedError

    def combine_hidden_states(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Fuses the target's features; a chain begins with it."""
        self.position = 0
        return super().combine_hidden_states(hidden_states)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        inputs_embeds: torch.Tensor | None = None,
    ) -> Rows:
        index = self.specialist_at[min(self.position, len(self.specialist_at) - 1)]
        self.position += 1
        embeds = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
        return self.run(self.model.layers[index], positions, embeds, hidden_states)


class Eagle3Specialists(Specialists):
    """PosS on EAGLE-3: all specialists read and write one stream of keys and values."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        first, *others = (layer.self_attn for layer in self.model.layers)
        for other in others:
            # vLLM gives every attention that it knows a cache.
            del vllm_config.compilation_config.static_forward_context[other.attn.layer_name]
            other.attn = first.attn

    def make_layer(self, vllm_config: VllmConfig, prefix: str) -> nn.Module:
        return Eagle3Layer(vllm_config, prefix=prefix, config=self.config)

    def run(
        self, layer: Any, positions: torch.Tensor, embeds: torch.Tensor, features: torch.Tensor
    ) -> Rows:
        return self.model.norm(*layer(positions, embeds, features, None))


class EagleSpecialists(Specialists):
    """PosS on EAGLE-2: every specialist has keys and values of all rows, drafted ones too.

    They follow from a row's input alone, so each run writes them for all specialists.
    """

    load_weights = EagleLlamaForCausalLM.load_weights

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        config = draft_config(vllm_config)
        if config.poss_jax.get("kv") == "shared":
            raise ValueError(
                "PosS on EAGLE-2 wants keys and values per specialist, got shared ones"
            )
        has_bias, config.bias = config.bias, False  # of `fc`; vLLM's layers would take it, too
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        width = config.hidden_size
        self.model.fc = ReplicatedLinear(2 * width, width, bias=has_bias, return_bias=False)

    def make_layer(self, vllm_config: VllmConfig, prefix: str) -> nn.Module:
        return EagleLayer(vllm_config, True, prefix=prefix, config=self.config)

    def run(
        self, layer: Any, positions: torch.Tensor, embeds: torch.Tensor, features: torch.Tensor
    ) -> Rows:
        rows = self.model.fc(torch.cat([embeds, features], dim=-1))
        for other in self.model.layers:
            if other is not layer:
                write_keys_values(other.self_attn, positions, rows)
        hidden, residual = layer(positions, rows, None)
        return hidden + residual, hidden + residual


def write_keys_values(
    attention: LlamaAttention, positions: torch.Tensor, rows: torch.Tensor
) -> None:
    """Writes the keys and values of rows [tokens D] into the cache of a specialist."""
    projected, _ = attention.qkv_proj(rows)
    q, k, v = projected.split([attention.q_size, attention.kv_size, attention.kv_size], dim=-1)
    k = attention.rotary_emb(positions, q, k)[1]
    shape = (-1, attention.num_kv_heads, attention.head_dim)
    unified_kv_cache_update(k.view(shape), v.view(shape), attention.attn.layer_name)


def draft_config(vllm_config: VllmConfig) -> Any:
    """Gives the draft's config.json."""
    return vllm_config.speculative_config.draft_model_config.hf_config


def read_spans(vllm_config: VllmConfig) -> list[int]:
    """Reads how many positions each specialist drafts; none if our export did not write it."""
    return getattr(draft_config(vllm_config), "poss_jax", {}).get("positions_per_specialist", [])
