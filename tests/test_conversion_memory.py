"""A conversion holds one item at a time, however large the model; so does loading.

Synthetic Llamas of the widths of Llama-3.2-1B are converted and loaded, each in its own process
whose anonymous memory (RssAnon) is sampled.
"""

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from poss_jax.config.models import LlamaConfig
from poss_jax.convert.names import slots_by_key
from poss_jax.model.parameters import count_parameters, flatten_item, item_shapes

GB = 10**9
BYTES_PER_VALUE = 2
SHARD_BYTES = GB // 2
INTERVAL = 0.01  # seconds between two looks
SHAPE = LlamaConfig(
    vocab_size=128256,
    hidden_size=2048,
    intermediate_size=8192,
    num_layers=1,
    num_heads=32,
    num_kv_heads=8,
    head_dim=64,
)
FOUR_GIGABYTES = replace(SHAPE, num_layers=24)
SMALL = replace(SHAPE, vocab_size=256, hidden_size=1024, intermediate_size=4096)
LOAD = "import sys; from poss_jax.checkpoint.folder import load_target; load_target(*sys.argv[1:])"


def largest_item(config: LlamaConfig) -> int:
    """Bytes of the largest item."""
    return BYTES_PER_VALUE * max(
        sum(int(np.prod(shape)) for shape in flatten_item(item).values())
        for item in item_shapes(config).values()
    )


def make_source(folder: Path, config: LlamaConfig, form: str) -> None:
    """Writes config.json and shards of random weights, one shard in memory at a time."""
    folder.mkdir()
    values = {
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
    }
    (folder / "config.json").write_text(json.dumps(values))
    weight_map: dict[str, str] = {}
    for index, shard in enumerate(draw_shards(config)):
        name = f"shard-{index:03}.{form}"
        save_shard(shard, folder / name)
        weight_map |= dict.fromkeys(shard, name)
    stem = "model.safetensors" if form == "safetensors" else "pytorch_model.bin"
    (folder / f"{stem}.index.json").write_text(json.dumps({"weight_map": weight_map}))


def draw_shards(config: LlamaConfig) -> Iterator[dict[str, np.ndarray]]:
    """Tensors of at most `SHARD_BYTES` together, or a single one; they repeat one random block."""
    block = np.random.default_rng(0).standard_normal(1 << 22, np.float32)
    block = block.astype(ml_dtypes.bfloat16)
    shard: dict[str, np.ndarray] = {}
    for key, slot in slots_by_key(config).items():
        tensor = np.resize(block, slot.shape)
        if shard and sum(array.nbytes for array in shard.values()) + tensor.nbytes > SHARD_BYTES:
            yield shard
            shard = {}
        shard[key] = tensor
    yield shard


def save_shard(shard: dict[str, np.ndarray], path: Path) -> None:
    """Writes one file, as its suffix says."""
    if path.suffix == ".safetensors":
        save_file(shard, path)
        return
    import torch

    state = {
        key: torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        for key, array in shard.items()
    }
    torch.save(state, path)


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


def convert(folder: Path, config: LlamaConfig, form: str = "safetensors") -> int:
    """Makes a source in a new folder, and watches its conversion."""
    folder.mkdir()
    source, target = folder / "source", folder / "target"
    make_source(source, config, form)
    program = [sys.executable, "-m", "poss_jax.convert", "target"]
    return watch([*program, "--source", str(source), "--output", str(target)])


def load(folder: Path, *dtype: str) -> int:
    """Watches what `convert` wrote being loaded."""
    return watch([sys.executable, "-c", LOAD, str(folder / "target"), *dtype])


def test_memory_does_not_grow_with_the_number_of_layers(tmp_path):
    layer = largest_item(SMALL)
    assert layer > 25e6
    two, eight = (convert(tmp_path / str(n), replace(SMALL, num_layers=n)) for n in (2, 8))
    assert eight - two < 3 * layer  # six layers more; all held: 6


@pytest.mark.slow
def test_loading_holds_every_layer_once(tmp_path):
    held = []
    for count in (2, 8):
        convert(tmp_path / str(count), replace(SMALL, num_layers=count))
        held.append(load(tmp_path / str(count)))
    layer = largest_item(SMALL)
    assert 4 * layer < held[1] - held[0] < 10 * layer  # six more; twice: 12


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("form", ["safetensors", "bin"])
def test_four_gigabytes(tmp_path, form):
    """Beside 1 GB: twice the largest item to convert, the weights and an item to load them."""
    config = FOUR_GIGABYTES
    size, item = BYTES_PER_VALUE * count_parameters(config), largest_item(config)
    assert 3.9 * GB < size < 4.1 * GB
    folder = tmp_path / "model"
    assert convert(folder, config, form) < 2 * item + GB
    assert load(folder) < size + item + GB
    assert load(folder, "float32") < 2 * (size + item) + GB
