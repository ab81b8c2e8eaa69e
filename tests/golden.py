"""The recorded numbers: models and results of the original PyTorch implementation, fp32 on CPU.

`tests/fixtures/` holds two of the five methods. `POSS_JAX_FIXTURES` may name a folder of the same
layout that holds all of them (its drafts may be `.bin` files, which need torch).
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from poss_jax.checkpoint.folder import load_draft, load_target
from poss_jax.checkpoint.record import ModelRecord
from poss_jax.checkpoint.torch_io import read_bin
from poss_jax.config.models import DraftConfig, LlamaConfig, TreeConfig
from poss_jax.convert.__main__ import main as convert
from poss_jax.decode.state import DecodeConfig, Weights
from poss_jax.model.specialists import attach
from poss_jax.shapes import Params

ROOT = Path(os.environ.get("POSS_JAX_FIXTURES", Path(__file__).parent / "fixtures"))
SPANS = {"eagle": "1", "hass": "1", "poss1": "1,1,1,1,1,1", "poss2": "2,2,2", "poss3": "3,3"}
TRAINED_DEPTH = {"eagle": 1, "hass": 3, "poss1": 6, "poss2": 6, "poss3": 6}
METHODS = [name for name in SPANS if (ROOT / "draft" / name).is_dir()]
TREES = {
    "": TreeConfig(depth=6, top_k=10, total_tokens=60),
    "_small": TreeConfig(depth=4, top_k=4, total_tokens=16),
    "_deep": TreeConfig(depth=8, top_k=6, total_tokens=40),
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
    def llama(self) -> LlamaConfig:
        return self.target_record.llama

    @property
    def draft_config(self) -> DraftConfig:
        return self.draft_record.draft

    @property
    def weights(self) -> Weights:
        return Weights(self.target, attach(self.draft, self.target))

    def decode_config(self, tree: TreeConfig, max_new_tokens: int) -> DecodeConfig:
        return DecodeConfig(self.llama, self.draft_config, tree, max_new_tokens)


def load_golden(folder: Path, method: str) -> Golden:
    """Converts target and draft into `folder` (once) and loads them."""
    target, draft = folder / "target", folder / method
    if not target.exists():
        convert(["target", "--source", str(ROOT / "target"), "--output", str(target)])
    if not draft.exists():
        arguments = ["--source", str(ROOT / "draft" / method), "--target", str(target)]
        arguments += ["--positions-per-specialist", SPANS[method], "--output", str(draft)]
        convert(["draft", *arguments, "--trained-depth", str(TRAINED_DEPTH[method])])
    record, params = load_target(target)
    return Golden(method, target, draft, record, params, *load_draft(draft, target=record))


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a recorded model."""
    return json.loads((folder / "config.json").read_text())


def read_tensors(folder: Path) -> dict[str, np.ndarray]:
    """Weights of a recorded model, by the original's keys."""
    if (folder / "model.safetensors").exists():
        return load_file(folder / "model.safetensors")
    return read_bin(folder / "pytorch_model.bin")


def read_json(name: str) -> Any:
    """A recorded result, or None where this method has none."""
    path = ROOT / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def read_npz(name: str) -> dict[str, np.ndarray]:
    """Recorded arrays."""
    with np.load(ROOT / f"{name}.npz") as arrays:
        return dict(arrays)
