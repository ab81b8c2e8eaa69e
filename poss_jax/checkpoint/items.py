"""Which weight items a model has, their key paths and shapes: one table for reading and writing.

    embed           {"weight": [V, D]}
    layers/0 ...    {"input_norm": {"scale"}, "attention": {"q", "k", "v", "o"},
                     "mlp_norm": {"scale"}, "mlp": {"gate", "up", "down"}};
                    with qk_norm, "q_norm" and "k_norm" {"scale": [H]} in the attention
    norm            {"scale": [D]}
    head            {"weight": [V, D]}, absent when the embeddings are tied
    fc              {"weight": [D, 2D], "bias": [D] with fc_bias}                       (draft)
    specialists/0   a layer without input_norm                                          (draft)

Linear layers are {"weight": [out, in]} and, where the config says so, "bias": [out]. The paths are
public: other programs may read them. In memory the numbered items of a model are one list.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from flax.traverse_util import flatten_dict

from poss_jax.config import DraftConfig, LlamaConfig
from poss_jax.shapes import Params


def target_shapes(config: LlamaConfig) -> dict[str, Params]:
    """Items of a target in the order of the data flow: name -> nested dict of shapes (tuples)."""
    shapes: dict[str, Params] = {
        "embed": {"weight": (config.vocab_size, config.hidden_size)},
    }
    for index in range(config.num_layers):
        norm = {"input_norm": {"scale": (config.hidden_size,)}}
        shapes[f"layers/{index}"] = norm | _layer_shapes(config)
    shapes["norm"] = {"scale": (config.hidden_size,)}
    if not config.tie_embeddings:
        shapes["head"] = {"weight": (config.vocab_size, config.hidden_size)}
    return shapes


def draft_shapes(config: DraftConfig) -> dict[str, Params]:
    """Items of a draft: name -> nested dict of shapes (tuples)."""
    D = config.layer.hidden_size
    shapes: dict[str, Params] = {"fc": _linear_shapes(D, 2 * D, config.fc_bias)}
    for index in range(config.num_specialists):
        shapes[f"specialists/{index}"] = _layer_shapes(config.layer)
    return shapes


def item_shapes(config: LlamaConfig | DraftConfig) -> dict[str, Params]:
    """`target_shapes` or `draft_shapes`, as the config is."""
    return draft_shapes(config) if isinstance(config, DraftConfig) else target_shapes(config)


def count_parameters(config: LlamaConfig | DraftConfig) -> int:
    """Number of parameters in the model's items (a tied head is not counted twice)."""
    return sum(
        int(np.prod(shape))
        for shapes in item_shapes(config).values()
        for shape in flatten_item(shapes).values()
    )


def flatten_item(item: Params) -> dict[tuple[str, ...], Any]:
    """Lists the leaves of an item (arrays or shapes) by their path."""
    leaves: Any = flatten_dict(item)
    return leaves


def split_items(config: LlamaConfig | DraftConfig, params: Params) -> Iterator[tuple[str, Params]]:
    """Cuts a model in memory into its items, in the order `write_model` wants them."""
    for name in item_shapes(config):
        group, _, index = name.partition("/")
        yield name, params[group][int(index)] if index else params[group]


def join_items(items: Iterable[tuple[str, Params]]) -> Params:
    """The reverse of `split_items`: numbered items, which come in order, become one list."""
    params: Params = {}
    for name, item in items:
        group, _, index = name.partition("/")
        if index:
            params.setdefault(group, []).append(item)
        else:
            params[group] = item
    return params


def _layer_shapes(config: LlamaConfig) -> Params:
    D, F = config.hidden_size, config.intermediate_size
    q_width = config.num_heads * config.head_dim
    kv_width = config.num_kv_heads * config.head_dim
    head_norm = {"scale": (config.head_dim,)}
    return {
        "attention": {
            "q": _linear_shapes(q_width, D, config.qkv_bias),
            "k": _linear_shapes(kv_width, D, config.qkv_bias),
            "v": _linear_shapes(kv_width, D, config.qkv_bias),
            "o": _linear_shapes(D, q_width, config.o_bias),
            **({"q_norm": head_norm, "k_norm": head_norm} if config.qk_norm else {}),
        },
        "mlp_norm": {"scale": (D,)},
        "mlp": {
            "gate": _linear_shapes(F, D, config.mlp_bias),
            "up": _linear_shapes(F, D, config.mlp_bias),
            "down": _linear_shapes(D, F, config.mlp_bias),
        },
    }


def _linear_shapes(out_width: int, in_width: int, bias: bool) -> Params:
    return {"weight": (out_width, in_width)} | ({"bias": (out_width,)} if bias else {})
