"""Measures how much memory converting and loading a large target takes beside its files.

Makes a synthetic Llama in bfloat16 (the widths of Llama-3.2-1B, as many layers as the size needs),
converts it and loads the result, each in a process of its own whose anonymous memory (RssAnon) is
sampled. Allowed while converting: twice the largest item and 1 GB; while loading: the weights
themselves, the largest item and 1 GB. The last line is one JSON object; exits 1 beyond the bounds.

    python -m benchmarks.conversion_memory
    python -m benchmarks.conversion_memory --gigabytes 1 --format bin --folder runs/scratch
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from poss_jax.config.models import LlamaConfig
from poss_jax.convert.names import slots_by_key
from poss_jax.model.parameters import count_parameters, flatten_item, item_shapes
from poss_jax.program.running import Parser, run_program

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
LOAD = "import sys; from poss_jax.checkpoint.folder import load_target; load_target(*sys.argv[1:])"


def fit_layers(gigabytes: float) -> LlamaConfig:
    """The shape with so many layers that its weights have about this size."""
    one = count_parameters(SHAPE)
    per_layer = count_parameters(replace(SHAPE, num_layers=2)) - one
    wanted = gigabytes * GB / BYTES_PER_VALUE
    return replace(SHAPE, num_layers=max(1, round((wanted - one) / per_layer) + 1))


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


def watch(command: list[str]) -> dict[str, float]:
    """Runs a program; seconds it took, and the most anonymous memory it was seen to have."""
    started, peak = time.perf_counter(), 0
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while process.poll() is None:
        status = Path(f"/proc/{process.pid}/status").read_text()
        if found := re.search(r"^RssAnon:\s+(\d+) kB", status, re.MULTILINE):
            peak = max(peak, 1024 * int(found[1]))
        time.sleep(INTERVAL)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with exit code {process.returncode}")
    return {"seconds": round(time.perf_counter() - started, 1), "peak_bytes": peak}


def convert(folder: Path, config: LlamaConfig, form: str) -> dict[str, float]:
    """Makes a source in the folder and watches its conversion."""
    source, target = folder / "source", folder / "target"
    make_source(source, config, form)
    program = [sys.executable, "-m", "poss_jax.convert", "target"]
    return watch([*program, "--source", str(source), "--output", str(target)])


def load(folder: Path, *dtype: str) -> dict[str, float]:
    """Watches what `convert` wrote being loaded."""
    return watch([sys.executable, "-c", LOAD, str(folder / "target"), *dtype])


def measure(folder: Path, config: LlamaConfig, form: str) -> dict[str, dict[str, float]]:
    """Makes a source in the folder, converts it and loads the result."""
    results = {"nothing": watch([sys.executable, "-c", LOAD.partition("; load")[0]])}
    results["convert"] = convert(folder, config, form)
    results["load"] = load(folder)
    results["load as float32"] = load(folder, "float32")
    size, item = BYTES_PER_VALUE * count_parameters(config), largest_item(config)
    results["nothing"]["allowed_bytes"] = GB
    results["convert"]["allowed_bytes"] = 2 * item + GB
    results["load"]["allowed_bytes"] = size + item + GB
    results["load as float32"]["allowed_bytes"] = 2 * (size + item) + GB
    return results


def main() -> None:
    """Prints the table."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=4.0, help="size of the weights")
    parser.add_argument("--format", choices=("safetensors", "bin"), default="safetensors")
    parser.add_argument("--folder", type=Path, help="where twice as much space is free")
    args = parser.parse_args()
    config = fit_layers(args.gigabytes)
    if args.folder is not None:
        args.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        results = measure(Path(folder), config, args.format)
    print("| step | seconds | peak RssAnon, GB | allowed, GB |\n|---|---|---|---|")
    for name, row in results.items():
        peak, allowed = row["peak_bytes"] / GB, row["allowed_bytes"] / GB
        print(f"| {name} | {row['seconds']} | {peak:.2f} | {allowed:.2f} |")
    summary = {
        "format": args.format,
        "weights_bytes": BYTES_PER_VALUE * count_parameters(config),
        "largest_item_bytes": largest_item(config),
        "results": results,
    }
    print(json.dumps(summary))
    sys.exit(any(row["peak_bytes"] > row["allowed_bytes"] for row in results.values()))


if __name__ == "__main__":
    run_program(main)
