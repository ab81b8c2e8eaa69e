"""The recorded numbers: models and results of the original PyTorch implementations, fp32 on CPU.

`tests/fixtures/` holds two of the five methods of EAGLE-2's family, `tests/fixtures_e3/` two of the
four drafts of EAGLE-3's. `POSS_JAX_FIXTURES` and `POSS_JAX_FIXTURES_E3` may name folders of that
layout with all of them (their drafts may be `.bin` files, which need torch).
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file

from poss_jax.checkpoint.folder import load_draft, load_target
from poss_jax.checkpoint.record import ModelRecord
from poss_jax.checkpoint.torch_io import read_bin
from poss_jax.config.models import DraftConfig, LlamaConfig, TreeConfig
from poss_jax.convert.__main__ import main as convert
from poss_jax.decode.state import StaticShape, Weights
from poss_jax.model.specialists import borrow_from_target
from poss_jax.shapes import Params

ROWS = 256
"""Room for every recorded prompt and answer."""

ROOT = Path(os.environ.get("POSS_JAX_FIXTURES", Path(__file__).parent / "fixtures"))
SPANS = {"eagle": "1", "hass": "1", "poss1": "1,1,1,1,1,1", "poss2": "2,2,2", "poss3": "3,3"}
TRAINED_DEPTH = {"eagle": 1, "hass": 3, "poss1": 6, "poss2": 6, "poss3": 6}
TRAINED_DEPTH |= {"eagle3": 7, "eagle3_full": 7, "poss3_e3": 8, "poss134": 8}
METHODS = [name for name in SPANS if (ROOT / "draft" / name).is_dir()]
TREES = {
    "": TreeConfig(depth=6, top_k=10, total_tokens=60),
    "_small": TreeConfig(depth=4, top_k=4, total_tokens=16),
    "_deep": TreeConfig(depth=8, top_k=6, total_tokens=40),
}
ROOT_E3 = Path(os.environ.get("POSS_JAX_FIXTURES_E3", Path(__file__).parent / "fixtures_e3"))
SPANS_E3 = {"eagle3": "1", "eagle3_full": "1", "poss3_e3": "3,3,2", "poss134": "1,3,4"}
METHODS_E3 = [name for name in SPANS_E3 if (ROOT_E3 / "draft" / name).is_dir()]
TREES_E3 = {
    "": TreeConfig(depth=8, top_k=10, total_tokens=60),
    "_small": TreeConfig(depth=4, top_k=4, total_tokens=16),
    "_deep": TreeConfig(depth=10, top_k=6, total_tokens=40),
}


@dataclass(frozen=True)
class Golden:
    """The recorded target and one draft, converted by our own converter."""

    method: str
    target_folder: Path
    draft_folder: Path
    target_record: ModelRecord
    target: Params
    draft_record: ModelRecord
    draft: Params

    @property
    def trees(self) -> dict[str, TreeConfig]:
        """The recorded tree settings, by the suffix of their files."""
        return TREES_E3 if self.method in SPANS_E3 else TREES

    def recorded(self, name: str) -> Any:
        """A recorded result of this method, or None where there is none."""
        return read_json(f"{name}_{self.method}", root_of(self.method))

    @property
    def llama(self) -> LlamaConfig:
        return self.target_record.llama

    @property
    def draft_config(self) -> DraftConfig:
        return self.draft_record.draft

    @property
    def weights(self) -> Weights:
        vocabulary = self.draft_record.draft_vocabulary
        ids = None if vocabulary is None else jnp.asarray(vocabulary, jnp.int32)
        return Weights(self.target, borrow_from_target(self.draft, self.target, ids))

    def decode_config(self, tree: TreeConfig) -> StaticShape:
        return StaticShape(self.llama, self.draft_config, tree, ROWS)


def load_golden(folder: Path, method: str) -> Golden:
    """Converts target and draft into `folder` (once) and loads them."""
    root = root_of(method)
    target, draft = folder / root.name / "target", folder / root.name / method
    if not target.exists():
        convert(["target", "--source", str(root / "target"), "--output", str(target)])
    if not draft.exists():
        arguments = ["--source", str(root / "draft" / method), "--target", str(target)]
        spans = (SPANS | SPANS_E3)[method]
        arguments += ["--positions-per-specialist", spans, "--output", str(draft)]
        convert(["draft", *arguments, "--trained-depth", str(TRAINED_DEPTH[method])])
    record, params = load_target(target, jnp.float32)
    drafted = load_draft(draft, jnp.float32, target=record)
    return Golden(method, target, draft, record, params, *drafted)


def widen(source: Path, embedding: np.ndarray) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Tensors and config of an EAGLE-3 draft with 32 further dimensions, all zero.

    It drafts what the draft drafts: norms divide by less, which their weights make up for.
    """
    config = read_config(source)
    D, W = config["hidden_size"], config["hidden_size"] + 32
    wide = {}
    for key, array in (read_tensors(source) | {"embed_tokens.weight": embedding}).items():
        name = key.removesuffix(".weight").rpartition(".")[2]
        if name in ("q_proj", "k_proj", "v_proj"):  # they read two halves
            halves = np.split(array, 2, axis=1)
            array = np.concatenate([_pad(half, 1, W - D) for half in halves], axis=1)
        elif name in ("gate_proj", "up_proj", "lm_head", "embed_tokens"):
            array = _pad(array, 1, W - D)
        elif name in ("fc", "o_proj", "down_proj"):
            array = _pad(array, 0, W - D)
        elif name.endswith("norm"):
            array = _pad(array, 0, W - D) * np.float32((D / W) ** 0.5)
        wide[key] = array
    changes = {"hidden_size": W, "target_hidden_size": D, "head_dim": 32}
    return wide, config | changes | {"rms_norm_eps": config["rms_norm_eps"] * D / W}


def _pad(array: np.ndarray, axis: int, number: int) -> np.ndarray:
    return np.pad(array, [(0, number * (axis == other)) for other in range(array.ndim)])


def root_of(method: str) -> Path:
    """Folder of the fixtures that a method belongs to."""
    return ROOT_E3 if method in SPANS_E3 else ROOT


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a recorded model."""
    return json.loads((folder / "config.json").read_text())


def read_tensors(folder: Path) -> dict[str, np.ndarray]:
    """Weights of a recorded model, by the original's keys."""
    if (folder / "model.safetensors").exists():
        return load_file(folder / "model.safetensors")
    return read_bin(folder / "pytorch_model.bin")


def read_json(name: str, root: Path = ROOT) -> Any:
    """A recorded result, or None where this method has none."""
    path = root / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def read_npz(name: str, root: Path = ROOT) -> dict[str, np.ndarray]:
    """Recorded arrays."""
    with np.load(root / f"{name}.npz") as arrays:
        return dict(arrays)
