"""A conversion holds one item at a time, however large the model."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import conversion_memory as bench

CONFIG = replace(bench.SHAPE, vocab_size=256, hidden_size=1024, intermediate_size=4096)
LAYER_BYTES = bench.largest_item(CONFIG)


def convert(folder: Path, *, num_layers: int) -> int:
    """Most bytes that were held while a model was converted into a folder."""
    folder.mkdir()
    deep = replace(CONFIG, num_layers=num_layers)
    return bench.convert(folder, deep, "safetensors")["peak_bytes"]


def test_memory_does_not_grow_with_the_number_of_layers(tmp_path):
    assert LAYER_BYTES > 25e6
    two, eight = (convert(tmp_path / str(count), num_layers=count) for count in (2, 8))
    assert eight - two < 3 * LAYER_BYTES  # six layers more; all held: 6


@pytest.mark.slow
def test_loading_holds_every_layer_once(tmp_path):
    held = []
    for count in (2, 8):
        convert(tmp_path / str(count), num_layers=count)
        held.append(bench.load(tmp_path / str(count))["peak_bytes"])
    assert 4 * LAYER_BYTES < held[1] - held[0] < 10 * LAYER_BYTES  # six more; twice: 12


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("form", ["safetensors", "bin"])
def test_four_gigabytes(tmp_path, form):
    command = [sys.executable, bench.__file__, "--format", form, "--folder", str(tmp_path)]
    subprocess.run(command, check=True)
