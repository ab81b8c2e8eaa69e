"""A conversion holds one item at a time, however many layers a model has; loading holds each once.

Random Llamas are converted and loaded, each in its own process whose anonymous memory (RssAnon) is
sampled.
"""

import json
import math
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from convert_sources import write_shards
from models import tiny_llama

from poss_jax.convert.layouts import target_config_json
from poss_jax.convert.tensors import slots_by_key
from poss_jax.model.parameters import flatten_item, item_shapes

INTERVAL = 0.01  # seconds between two looks
SHAPE = {"vocab_size": 256, "hidden_size": 1024, "intermediate_size": 4096, "head_dim": 64}
SMALL = tiny_llama(**SHAPE, num_heads=32, num_kv_heads=8)
LAYER = 2 * sum(math.prod(shape) for shape in flatten_item(item_shapes(SMALL)["layers/0"]).values())
LOAD = "import sys; from poss_jax.checkpoint.folder import load_target; load_target(*sys.argv[1:])"


def watch(command: list[str]) -> int:
    """Runs a program; the most anonymous memory, in bytes, that it was seen to have."""
    peak = 0
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while process.poll() is None:
        status = Path(f"/proc/{process.pid}/status").read_text()
        if found := re.search(r"^RssAnon:\s+(\d+) kB", status, re.MULTILINE):
            peak = max(peak, 1024 * int(found[1]))
        time.sleep(INTERVAL)
    assert process.returncode == 0, command
    return peak


def convert(folder: Path, num_layers: int) -> int:
    """Makes a random source of bfloat16 in shards, and watches its conversion."""
    config, source = replace(SMALL, num_layers=num_layers), folder / "source"
    source.mkdir(parents=True)
    (source / "config.json").write_text(json.dumps(target_config_json(config, "bfloat16")))
    rng = np.random.default_rng(0)
    tensors = {
        key: rng.random(slot.shape, np.float32).astype(ml_dtypes.bfloat16)
        for key, slot in slots_by_key(config).items()
    }
    write_shards(source, tensors, num_shards=num_layers)
    program = [sys.executable, "-m", "poss_jax.convert", "target"]
    return watch([*program, "--source", str(source), "--output", str(folder / "target")])


def test_memory_does_not_grow_with_the_number_of_layers(tmp_path):
    assert LAYER > 25e6
    two, eight = (convert(tmp_path / str(count), count) for count in (2, 8))
    assert eight - two < 3 * LAYER  # six layers more; all held: 6


@pytest.mark.slow
def test_loading_holds_every_layer_once(tmp_path):
    held = []
    for count in (2, 8):
        convert(tmp_path / str(count), count)
        held.append(watch([sys.executable, "-c", LOAD, str(tmp_path / str(count) / "target")]))
    assert 4 * LAYER < held[1] - held[0] < 10 * LAYER  # six more; twice: 12
