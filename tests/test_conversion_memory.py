"""A conversion holds one item at a time, however large the model."""

import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parent.parent / "benchmarks/conversion_memory.py"


def test_memory_does_not_grow_with_the_number_of_layers(tmp_path):
    bench = runpy.run_path(str(BENCHMARK))
    config = replace(bench["SHAPE"], vocab_size=256, hidden_size=1024, intermediate_size=4096)
    layer_bytes = bench["largest_item"](config)
    assert layer_bytes > 25e6
    converting, loading = {}, {}
    for num_layers in (2, 8):
        folder = tmp_path / str(num_layers)
        folder.mkdir()
        deep = replace(config, num_layers=num_layers)
        converting[num_layers] = bench["convert"](folder, deep, "safetensors")["peak_bytes"]
        loading[num_layers] = bench["load"](folder)["peak_bytes"]
    assert converting[8] - converting[2] < 3 * layer_bytes  # six layers more; all held: 6
    assert 4 * layer_bytes < loading[8] - loading[2] < 10 * layer_bytes  # they stay; twice: 12


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("form", ["safetensors", "bin"])
def test_four_gigabytes(tmp_path, form):
    command = [sys.executable, str(BENCHMARK), "--format", form, "--folder", str(tmp_path)]
    subprocess.run(command, check=True)
