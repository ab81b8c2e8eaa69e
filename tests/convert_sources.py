"""Synthetic checkpoints in PyTorch's layouts, and where each of their keys must arrive."""

import json
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from poss_jax.config.reading import UserError
from poss_jax.convert.__main__ import main

WEIGHTS = "model.safetensors"
TINY = {
    "model_type": "llama",
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
LAYER_SHAPES = {
    "self_attn.q_proj.weight": (8, 8),
    "self_attn.k_proj.weight": (4, 8),
    "self_attn.v_proj.weight": (4, 8),
    "self_attn.o_proj.weight": (8, 8),
    "mlp.gate_proj.weight": (12, 8),
    "mlp.up_proj.weight": (12, 8),
    "mlp.down_proj.weight": (8, 12),
    "post_attention_layernorm.weight": (8,),
}


def draw(shapes, dtype=np.float32):
    rng = np.random.default_rng(0)
    return {key: rng.standard_normal(shape).astype(dtype) for key, shape in shapes.items()}


def target_tensors(dtype=np.float32, **extra):
    shapes = {"model.embed_tokens.weight": (16, 8), "model.norm.weight": (8,)}
    for index in range(2):
        shapes[f"model.layers.{index}.input_layernorm.weight"] = (8,)
        shapes |= {f"model.layers.{index}.{key}": shape for key, shape in LAYER_SHAPES.items()}
    return draw(shapes | {"lm_head.weight": (16, 8)} | extra, dtype)


def draft_tensors(num_layers=1, dtype=np.float32, **extra):
    shapes = {"fc.weight": (8, 16)} | extra
    for index in range(num_layers):
        shapes |= {f"layers.{index}.{key}": shape for key, shape in LAYER_SHAPES.items()}
    return draw(shapes, dtype)


PHI3 = {
    "model_type": "phi3",
    "sliding_window": 256,
    "max_position_embeddings": 128,
    "original_max_position_embeddings": 16,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0, 1.25], "long_factor": [2.0, 24.5]},
    "eos_token_id": 3,
}
FUSED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}


def fuse(tensors):
    """The same target in the layout of Phi-3."""
    fused = dict(tensors)
    for index in range(2):
        for whole, parts in FUSED.items():
            rows = [fused.pop(f"model.layers.{index}.{part}.weight") for part in parts]
            fused[f"model.layers.{index}.{whole}.weight"] = np.concatenate(rows)
    return fused


def write_source(folder: Path, tensors, **config) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    one_layer = {"num_hidden_layers": 1} if "fc.weight" in tensors else {}  # as drafts' files say
    (folder / "config.json").write_text(json.dumps(TINY | one_layer | config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def write_shards(folder: Path, tensors, num_shards=3, *, save=save_file, name=WEIGHTS) -> None:
    """Spreads tensors over shards, round robin."""
    (folder / WEIGHTS).unlink(missing_ok=True)
    stem, _, end = name.partition(".")
    weight_map = {}
    for index in range(num_shards):
        shard = f"{stem}-{index + 1:05}-of-{num_shards:05}.{end}"
        part = dict(list(tensors.items())[index::num_shards])
        save(part, folder / shard)
        weight_map |= dict.fromkeys(part, shard)
    (folder / f"{name}.index.json").write_text(json.dumps({"weight_map": weight_map}))


def save_bin(tensors, path: Path) -> None:
    """Saves tensors as PyTorch does."""
    import torch

    wide = {key: torch.from_numpy(array.astype(np.float32)) for key, array in tensors.items()}
    torch.save({k: t.to(getattr(torch, tensors[k].dtype.name)) for k, t in wide.items()}, path)


def run(command, *switches, **flags):
    argv = [command, *switches]
    for flag, value in flags.items():
        argv += ["--" + flag.replace("_", "-"), str(value)]
    main(argv)


def refusal_of(source: Path, command: str = "target", **flags) -> str:
    """The one line that a conversion is refused with; it leaves nothing beside its source."""
    with pytest.raises(UserError) as error:
        run(command, source=source, output=source.parent / "out", **flags)
    assert not list(source.parent.glob("*out*")) and "\n" not in str(error.value)
    return str(error.value)


def assert_stored(params, key_table, tensors):
    """Every source tensor arrived unchanged at the place the table names."""
    for key, (*path, last) in key_table.items():
        node = params
        for part in path:
            node = node[int(part)] if part.isdecimal() else node[part]
        assert node[last].dtype == tensors[key].dtype, key
        np.testing.assert_array_equal(np.asarray(node[last]), tensors[key])


# Written out once more by hand, so that a slip in the table is seen.
LAYER_KEYS = {
    "self_attn.q_proj.weight": ["attention", "q", "weight"],
    "self_attn.k_proj.weight": ["attention", "k", "weight"],
    "self_attn.v_proj.weight": ["attention", "v", "weight"],
    "self_attn.o_proj.weight": ["attention", "o", "weight"],
    "mlp.gate_proj.weight": ["mlp", "gate", "weight"],
    "mlp.up_proj.weight": ["mlp", "up", "weight"],
    "mlp.down_proj.weight": ["mlp", "down", "weight"],
    "post_attention_layernorm.weight": ["mlp_norm", "scale"],
}


def target_keys(num_layers):
    table = {
        "model.embed_tokens.weight": ["embed", "weight"],
        "model.norm.weight": ["norm", "scale"],
        "lm_head.weight": ["head", "weight"],
    }
    for i in range(num_layers):
        layer, path = f"model.layers.{i}", ["layers", str(i)]
        table[f"{layer}.input_layernorm.weight"] = [*path, "input_norm", "scale"]
        table |= {f"{layer}.{key}": [*path, *place] for key, place in LAYER_KEYS.items()}
    return table


def draft_keys(num_layers):
    table = {"fc.weight": ["fc", "weight"]}
    for i in range(num_layers):
        table |= {f"layers.{i}.{k}": ["specialists", str(i), *p] for k, p in LAYER_KEYS.items()}
    return table


def convert_tiny(folder: Path) -> Path:
    """Converts a tiny target; `source` and `target` lie in the folder."""
    write_source(folder / "source", target_tensors())
    run("target", source=folder / "source", output=folder / "target")
    return folder


def damages(content: bytes, num_cases: int) -> Iterator[tuple[str, bytes]]:
    """The content, cut and with a bit flipped, each so often, and what was done to it."""
    rng = random.Random(len(content))
    for _ in range(num_cases):
        end = rng.randrange(len(content))
        yield f"cut {end}", content[:end]
    for _ in range(num_cases):
        place, bit = rng.randrange(len(content)), rng.randrange(8)
        flipped = bytearray(content)
        flipped[place] ^= 1 << bit
        yield f"flip {place} {bit}", bytes(flipped)
