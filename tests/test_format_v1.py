"""The frozen checkpoint of format version 1: it stays readable, number for number.

Its numbers follow from their names (`value_of`); a newer format gets a new folder and test.
"""

import json
import zlib
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from models import assert_same

from poss_jax.checkpoint.folder import load_draft, load_target
from poss_jax.checkpoint.writing import verify_model
from poss_jax.config.decoding import EngineConfig
from poss_jax.config.models import DraftConfig, LlamaConfig, RopeConfig, TreeConfig
from poss_jax.engine.engine import Engine
from poss_jax.model.parameters import item_shapes, join_items

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


@pytest.fixture(scope="module")
def folder(fixtures) -> Path:
    return fixtures / "format_v1"


def test_records_and_arrays(folder):
    record, draft_record = verify_model(folder / "target"), verify_model(folder / "draft")
    assert (record.format_version, record.config) == (1, TARGET)
    assert (draft_record.format_version, draft_record.config) == (1, DRAFT)
    assert draft_record.target == record.target and record.target.name == "format-v1"
    assert (draft_record.method, draft_record.kv) == ("poss12", "per_specialist")
    assert_same(load_target(folder / "target")[1], params_of(TARGET))
    assert_same(load_draft(folder / "draft", target=record)[1], params_of(DRAFT))


def test_decoding(folder):
    engine = Engine.load(folder / "target", folder / "draft", EngineConfig(tree=TREE))
    (answer,) = engine.generate([PROMPT], max_new_tokens=24)
    expected = json.loads((folder / "decoded.json").read_text())
    assert answer.output_ids == expected["output_ids"]
    assert answer.accepted_per_round == expected["accepted_per_round"]
