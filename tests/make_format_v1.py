"""Made tests/fixtures/format_v1 once; the folder is frozen and must stay readable for ever.

    python tests/make_format_v1.py NEW_FOLDER

A newer format gets a new script and folder.
"""

import json
import sys
import tempfile
import zlib
from dataclasses import replace
from pathlib import Path

import jax
import ml_dtypes
import numpy as np

from poss_jax.checkpoint.record import new_record, provenance
from poss_jax.checkpoint.writing import target_identity, write_model
from poss_jax.config.decoding import EngineConfig
from poss_jax.config.models import DraftConfig, LlamaConfig, RopeConfig, TreeConfig
from poss_jax.data.tokenizer import train_tokenizer
from poss_jax.engine.engine import Engine
from poss_jax.model.parameters import item_shapes, join_items, split_items

TARGET = LlamaConfig(
    vocab_size=272,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    max_position_embeddings=128,
    rope=RopeConfig(type="llama3", theta=5e5, factor=8.0, original_max_position_embeddings=64),
    qkv_bias=True,
    eos_token_ids=(271,),
)
DRAFT = DraftConfig(layer=TARGET, positions_per_specialist=(1, 2), trained_depth=3, fc_bias=True)
TREE = TreeConfig(depth=3, top_k=32, total_tokens=96)
PROMPT = [3, 141, 59, 26, 53, 58]


def value_of(path: str, shape: tuple[int, ...]) -> np.ndarray:
    """The array at a key path: its numbers follow from the path and their place alone."""
    mixed = np.arange(np.prod(shape), dtype=np.uint64) + np.uint64(zlib.crc32(path.encode()) << 20)
    for factor, shift in ((0xBF58476D1CE4E5B9, 30), (0x94D049BB133111EB, 27)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    uniform = (mixed >> np.uint64(40)).astype(np.float64) / 2**24 - 0.5
    kind = path.rpartition("/")[2]
    scale, offset = {"weight": (6 / shape[-1] ** 0.5, 0), "bias": (0.5, 0), "scale": (0.5, 1)}[kind]
    return (uniform * scale + offset).reshape(shape).astype(ml_dtypes.bfloat16)


def params_of(config: LlamaConfig | DraftConfig) -> dict:
    """All arrays of a model."""
    return join_items(
        (
            name,
            jax.tree_util.tree_map_with_path(
                lambda keys, shape, name=name: value_of(
                    "/".join([name, *(key.key for key in keys)]), shape
                ),
                shapes,
                is_leaf=lambda leaf: isinstance(leaf, tuple),
            ),
        )
        for name, shapes in item_shapes(config).items()
    )


def write(folder: Path, config: LlamaConfig | DraftConfig, tokenizer: Path) -> None:
    target = params_of(TARGET)
    identity = target_identity(
        "format-v1", None, target["embed"]["weight"], target["head"]["weight"]
    )
    record = new_record(config, identity, tokenizer_from=tokenizer)
    made = provenance() | {"command": ["tests/make_format_v1.py"], "git_sha": None}
    record = replace(record, provenance=made)
    items = split_items(config, params_of(config))
    write_model(folder, record, items, tokenizer_from=tokenizer)


def main(folder: Path) -> None:
    """Writes target, draft, and what they decode to."""
    with tempfile.TemporaryDirectory() as tokenizer:
        train_tokenizer(["a small tokenizer of a small model"] * 9, 272, Path(tokenizer))
        write(folder / "target", TARGET, Path(tokenizer))
        write(folder / "draft", DRAFT, Path(tokenizer))
    engine = Engine.load(folder / "target", folder / "draft", EngineConfig(tree=TREE))
    (answer,) = engine.generate([PROMPT], max_new_tokens=24)
    (plain,) = Engine.load(folder / "target").generate([PROMPT], max_new_tokens=24)
    assert answer.output_ids == plain.output_ids
    expected = {"output_ids": answer.output_ids, "accepted_per_round": answer.accepted_per_round}
    (folder / "decoded.json").write_text(json.dumps(expected) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
