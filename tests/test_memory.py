"""Memory of a training step, planned and refused, and of conversions, watched as they run."""

import importlib.util
import json
import math
import re
import subprocess
import sys
import time
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from convert_sources import write_shards
from models import random_draft, stacked, tiny_llama
from programs import POSS2, Runs, refusal, write_config

from poss_jax.config.models import DraftConfig
from poss_jax.config.reading import UserError, build_config
from poss_jax.config.training import ObjectiveConfig, OptimizerConfig, StepConfig, TrainConfig
from poss_jax.convert.layouts import target_config_json
from poss_jax.convert.reading import slots_by_key
from poss_jax.learn.step import init_state, make_draft_step, make_optimizer
from poss_jax.learn.task import DraftTask
from poss_jax.model.documents import TrainBatch
from poss_jax.model.families import init_draft
from poss_jax.model.parameters import flatten_item, item_shapes
from poss_jax.model.sharding import bytes_per_device, make_mesh
from poss_jax.model.target import init_target, stack_layers
from train.devices import make_on
from train.main import main
from train.memory import check_memory, compile_memory, plan_draft_step, tpu_slice

LLAMA = tiny_llama(vocab_size=64)
DRAFT = DraftConfig(layer=LLAMA, positions_per_specialist=(1, 2), trained_depth=3)


def run(**mesh: int) -> TrainConfig:
    values = {"stage": "draft", "output": "x", "target": "y", "num_epochs": 1, "mesh": mesh}
    return build_config(TrainConfig, values | {"data": {"sequence_length": 16}}, origin="test")


def plan(config: TrainConfig, devices: str = "here"):
    task = DraftTask(LLAMA, DRAFT, config.objective, config.step)
    there = None if devices == "here" else tpu_slice(devices)
    return plan_draft_step(task, config, jnp.float32, make_mesh(config.mesh, there))


def test_what_is_kept_is_counted_as_it_lies():
    config = run(data=2, fsdp=2, tensor=2)
    planned = plan(config)
    optimizer = make_optimizer(config.optimizer, 1)
    state = make_on(
        make_mesh(config.mesh), lambda: init_state(stacked(random_draft(DRAFT)), optimizer)
    )
    assert jax.tree.map(jnp.shape, state) == jax.tree.map(jnp.shape, planned.state)
    held = sum(leaf.addressable_data(0).nbytes for leaf in jax.tree.leaves(state))
    assert bytes_per_device(planned.state) == held
    assert bytes_per_device(planned.inputs[1]) == 2 * 16 * (4 + 1 + 4)  # 2 of 8 rows


def test_the_compiler_keeps_what_is_counted_and_copies_no_state():
    planned = plan(run(data=1))
    memory = compile_memory(planned)
    counted = bytes_per_device((planned.state, planned.inputs))
    assert abs(memory["arguments"] - counted) < 1024  # the key's own size
    assert memory["donated"] == pytest.approx(bytes_per_device(planned.state), rel=0.01)
    assert memory["total"] < memory["arguments"] + memory["temporaries"] + 4096


def test_a_step_that_cannot_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = run(data=1)
    check_memory(plan(config))
    large = replace(config, batch_size=2**27, data=replace(config.data, sequence_length=2**10))
    with pytest.raises(
        UserError, match=r"a step needs at least [0-9.]+ GiB of each device, which "
    ):
        check_memory(plan(large))
    spare = bytes_per_device((plan(config).state, plan(config).inputs)) + plan(config).hidden
    monkeypatch.setattr("train.memory.device_memory", lambda: spare)
    check_memory(plan(config))
    monkeypatch.setattr("train.memory.device_memory", lambda: spare - 1)
    with pytest.raises(UserError, match=r"lower batch_size or data\.sequence_length"):
        check_memory(plan(config))


def test_a_run_that_cannot_fit_reads_no_weights(runs, tmp_path, monkeypatch) -> None:
    config = config_file(runs, tmp_path)
    forbid_weights(monkeypatch)
    monkeypatch.setattr("train.memory.device_memory", lambda: 1000)
    assert "a step needs at least" in refusal(main, "--config", config)
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="needs libtpu")
def test_a_tpu_slice_is_compiled_for_without_a_tpu():
    assert compile_memory(plan(run(data=1, fsdp=2, tensor=2), "v5p:2x2x1"))["temporaries"] > 0


def forbid_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_weights(*_: Any, **__: Any) -> None:
        raise AssertionError("weights are read")

    for name in ("load_target", "load_draft", "load_layers"):
        monkeypatch.setattr(f"train.stages.{name}", no_weights)


def config_file(runs: Runs, folder: Path) -> str:
    values = POSS2 | {"target": runs.model("target"), "output": str(folder / "run")}
    return write_config(folder / "configs", values | {"data": runs.data})


def test_a_dry_run_says_what_a_device_holds(runs, tmp_path, capsys, monkeypatch) -> None:
    forbid_weights(monkeypatch)
    main(["--config", config_file(runs, tmp_path), "--dry-run", "--compile-for", "here"])
    printed = capsys.readouterr().out
    assert "parameters/specialists/attention/q/weight  2 32 32 " in printed
    capsys.readouterr()
    assert "compiled  of each device: arguments " in printed
    assert not (tmp_path / "run").exists()


# Wide heads and a small layer, so that the versions are what there is most of.
WIDE = tiny_llama(hidden_size=128, intermediate_size=128, head_dim=32, num_layers=2)
B, T = 2, 512
HASS = DraftConfig(layer=WIDE)
EAGLE3 = DraftConfig(
    layer=WIDE, family="eagle3", kv="shared", aux_layers=(0, 1), head_size=WIDE.vocab_size
)


@cache
def temporary_bytes(draft: DraftConfig, depth: int, length: int) -> int:
    draft = replace(draft, trained_depth=depth)
    step = StepConfig(vocabulary_chunk=64, attention_block=64)
    task = DraftTask(WIDE, draft, ObjectiveConfig(), step)
    optimizer = make_optimizer(OptimizerConfig(), 10)

    def init():
        target, params = init_target(WIDE, jax.random.key(0)), init_draft(draft, jax.random.key(1))
        target |= {"layers": stack_layers(target["layers"])}
        params |= {"specialists": stack_layers(params["specialists"])}
        return init_state(params, optimizer), target

    state, target = jax.eval_shape(init)
    shape = partial(jax.ShapeDtypeStruct, (B, length))
    batch = TrainBatch(shape(jnp.int32), shape(bool), shape(jnp.int32))
    key = jax.eval_shape(lambda: jax.random.key(0))
    compiled = make_draft_step(task, optimizer).lower(state, target, batch, key).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def test_depth_costs_one_version_each():
    grown = temporary_bytes(HASS, 4, T) - temporary_bytes(HASS, 2, T)
    assert 0 < grown <= 1.05 * 2 * B * T * WIDE.hidden_size * 4


@pytest.mark.parametrize(
    "draft", [HASS, pytest.param(EAGLE3, marks=pytest.mark.slow)], ids=lambda draft: draft.family
)
def test_memory_is_linear_in_length(draft):
    """Twice the rows, twice the memory; scores of all rows would be four times."""
    assert temporary_bytes(draft, 4, 2 * T) <= 1.05 * 2 * temporary_bytes(draft, 4, T)


# --------------------------------------------------------------------------------------------------
# A conversion holds one item at a time, however many layers a model has; loading holds each once

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
