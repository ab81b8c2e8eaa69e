"""One device, eight devices and two processes train the same model; nothing is held twice."""

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from isolation import QUICK_COMPILATION
from models import random_draft, random_target, random_tokens, tiny_llama
from programs import DRAFT, Runs, refusal, weights, write_config

from poss_jax.config.models import DraftConfig, MeshConfig
from poss_jax.config.reading import UserError
from poss_jax.config.training import ObjectiveConfig, OptimizerConfig, StepConfig
from poss_jax.data.rows import Rows
from poss_jax.learn.step import init_state, make_draft_step, make_optimizer
from poss_jax.learn.task import DraftTask
from poss_jax.model.parameters import place_tree
from poss_jax.model.sharding import make_mesh
from poss_jax.model.target import stack_layers
from poss_jax.program.running import expects_processes, start_processes
from train import devices
from train.devices import broadcast_from_first, make_on, make_step_on, put_batch, stack_on
from train.main import main

LLAMA = tiny_llama(vocab_size=64)
TASK = DraftTask(
    target=LLAMA,
    draft=DraftConfig(layer=LLAMA, positions_per_specialist=(1, 2), trained_depth=3, fc_bias=True),
    objective=ObjectiveConfig(),
    step=StepConfig(vocabulary_chunk=5, attention_block=5),
)
DEEP = TASK._replace(
    draft=replace(TASK.draft, layers_per_specialist=(2, 1)),
    objective=ObjectiveConfig(depth_weighting="reach"),
)
CHAINS = TASK._replace(
    draft=replace(
        TASK.draft, family="eagle3", kv="shared", aux_layers=(0, 1), head_size=32, fc_bias=False
    ),
    objective=ObjectiveConfig(
        feature_weight=0.0, probability_weight=1.0, average_over="all", depth_weighting="reach"
    ),
    vocabulary=tuple(range(0, 64, 2)),
)
STEPS = 3


def rows_of(seed: int) -> Rows:
    """Eight rows of two documents each, padded, some tokens not trained."""
    rng = np.random.default_rng(seed)
    tokens = np.asarray(random_tokens(LLAMA, 8, 12, seed=seed))
    documents = np.sort(rng.integers(1, 3, (8, 12)), axis=1).astype(np.int32)
    documents[:, 10:] = 0
    return Rows(tokens, rng.random((8, 12)) < 0.8, documents)


@cache
def trained_alone(task: DraftTask) -> tuple[np.ndarray, Any]:
    """See `trained_on`."""
    return trained_on({"data": 1}, task)


def trained_on(sizes: dict[str, int], task: DraftTask) -> tuple[np.ndarray, Any]:
    """Losses of a few steps and the parameters after them."""
    mesh = make_mesh(MeshConfig(**sizes))
    target, draft = random_target(LLAMA), random_draft(task.draft)
    target |= {"layers": stack_on(mesh, target["layers"])}
    target = jax.device_put(target, place_tree(target, mesh))
    optimizer = make_optimizer(OptimizerConfig(learning_rate=1e-2, warmup_fraction=0.0), STEPS)

    def init(draft):
        stacked = draft | {"specialists": stack_layers(draft["specialists"])}
        return init_state(stacked, optimizer)

    state = make_on(mesh, init, draft)
    step = make_step_on(mesh, make_draft_step(task, optimizer), state)
    losses = []
    for index in range(STEPS):
        before = state
        state, loss = step(state, target, put_batch(rows_of(index), mesh), jax.random.key(7))
        losses.append(np.asarray(loss["loss_per_depth"]))
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before))
    assert jax.tree.map(lambda leaf: leaf.sharding, state) == place_tree(state, mesh)
    return np.stack(losses), jax.tree.map(np.asarray, state.params)


EIGHT = {"data": 2, "fsdp": 2, "tensor": 2}


@pytest.mark.parametrize(
    ("task", "sizes"),
    [
        pytest.param(TASK, {"data": 8}, id="data", marks=pytest.mark.slow),
        pytest.param(TASK, {"fsdp": -1, "data": 1}, id="fsdp", marks=pytest.mark.slow),
        pytest.param(DEEP, EIGHT, id="all-deep", marks=pytest.mark.quick),  # has all of a TASK
        pytest.param(CHAINS, EIGHT, id="all-chains", marks=pytest.mark.slow),
    ],
)
def test_eight_devices_train_as_one(task, sizes):
    alone = trained_alone(task)
    losses, params = trained_on(sizes, task)
    np.testing.assert_allclose(losses, alone[0], rtol=1e-5)
    for got, want in zip(jax.tree.leaves(params), jax.tree.leaves(alone[1]), strict=True):
        assert np.linalg.norm(got - want) <= 1e-5 * np.linalg.norm(want)


def test_an_error_of_the_first_process_reaches_the_others(monkeypatch):
    sent = []
    monkeypatch.setattr(devices.multihost_utils, "broadcast_one_to_all", sent.append)
    monkeypatch.setattr(devices, "is_first_process", lambda: True)
    with pytest.raises(ZeroDivisionError):
        broadcast_from_first(lambda: 1 // 0)
    monkeypatch.setattr(devices, "is_first_process", lambda: False)
    monkeypatch.setattr(devices.multihost_utils, "broadcast_one_to_all", lambda _: sent[0])
    with pytest.raises(UserError, match="process 0 failed; its own output says why"):
        broadcast_from_first(lambda: 1)


class Watched(np.ndarray):
    """An array that notes which parts of it are read."""

    seen: list[Any]

    def __getitem__(self, index: Any) -> Any:
        self.seen.append(index)
        return np.asarray(self)[index]


def test_a_part_that_several_devices_hold_is_read_once():
    rows = rows_of(0)
    tokens = rows.tokens.view(Watched)
    tokens.seen = []
    mesh = make_mesh(MeshConfig(data=1, fsdp=4, tensor=2))
    batch = put_batch(replace(rows, tokens=tokens), mesh)
    assert len(tokens.seen) == 4
    np.testing.assert_array_equal(batch.tokens, rows.tokens)
    assert batch.tokens.sharding.shard_shape(batch.tokens.shape) == (2, 12)


def config_for(runs: Runs, folder: Path, **changes: Any) -> str:
    """Eight steps of PosS-1, saved after the third and the sixth."""
    spans = {"positions_per_specialist": [1, 1], "depth": 2}
    objective = {"depth_weighting": "reach"}
    values = DRAFT | {"specialists": spans, "objective": objective}
    values |= {"target": runs.model("target"), "output": str(folder), "data": runs.data}
    budget = {"num_tokens": 8 * 64, "checkpoint_every": 3}
    return write_config(folder.parent / f"{folder.name}-configs", values | budget | changes)


@pytest.mark.parametrize(
    ("mesh", "error"),
    [
        ({"fsdp": 3}, "mesh data=-1 fsdp=3 tensor=1 does not fit 8 devices"),
        ({"fsdp": -1, "data": 1}, "batch_size 2 does not divide among mesh.data x mesh.fsdp"),
    ],
)
def test_devices_that_do_not_fit_are_refused(runs, tmp_path, mesh, error):
    config = config_for(runs, tmp_path / "run", mesh=mesh)
    assert error in refusal(main, "--config", config)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("environment", "are_several"),
    [
        ({}, False),
        ({"SLURM_STEP_NUM_TASKS": "1", "TPU_WORKER_HOSTNAMES": "localhost"}, False),
        ({"SLURM_STEP_NUM_TASKS": "2"}, True),
        ({"OMPI_COMM_WORLD_SIZE": "16"}, True),
        ({"TPU_WORKER_HOSTNAMES": "host-0,host-1"}, True),
        ({"JAX_COORDINATOR_ADDRESS": "host:1234"}, True),
    ],
)
def test_the_environment_says_whether_there_are_others(environment, are_several):
    assert expects_processes(environment) == are_several


@pytest.mark.parametrize(
    "environment",
    [
        {"JAX_COORDINATOR_ADDRESS": "127.0.0.1:1", "JAX_NUM_PROCESSES": ""},
        {"JAX_COORDINATOR_ADDRESS": "127.0.0.1:1", "JAX_NUM_PROCESSES": "two"},
        {"SLURM_STEP_NUM_TASKS": "two"},
    ],
)
def test_others_that_cannot_be_joined_are_one_line(monkeypatch, environment):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=f"cannot join the other processes: .*int.*'{value}'; set"):
        start_processes()


CRASH = """
import os, sys, time
from pathlib import Path
from train import loop
from train.main import cli

def batch_at(rows, step, *args, batch_at=loop.batch_at):
    while step == 4 and not saved.exists():
        time.sleep(0.05)
    return os._exit(9) if step == 4 else batch_at(rows, step, *args)

loop.batch_at, saved = batch_at, Path(sys.argv.pop())
cli()
"""


TOLD_TO_STOP = """
import os, signal, time
from train import loop
from train.main import cli

def batch_at(rows, step, *args, batch_at=loop.batch_at):
    if step == 3 and os.environ["JAX_PROCESS_ID"] == "1":
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.1 * (step >= 3))
    return batch_at(rows, step, *args)

loop.batch_at = batch_at
cli()
"""


def run_in_two(folder: Path, *arguments: str) -> list[tuple[int, str]]:
    """Exit code and output of two processes with a device each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {
        "XLA_FLAGS": QUICK_COMPILATION,
        "JAX_COMPILATION_CACHE_DIR": str(folder.parent / "xla-of-two"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
        "JAX_NUM_PROCESSES": "2",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, *arguments],
            env=environment | {"JAX_PROCESS_ID": str(index)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=240)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    print(*outputs, sep="\n")  # shown where a test fails
    return list(zip((process.returncode for process in processes), outputs, strict=True))


def losses(folder: Path) -> list[list[float]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["loss_per_depth"] for line in lines if "loss_per_depth" in line]


@pytest.mark.parametrize("is_killed", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_two_processes_train_as_one_does(runs, tmp_path, is_killed):
    main(["--config", config_for(runs, tmp_path / "one", mesh={"data": 1})])
    two = tmp_path / "two"
    config = config_for(runs, two, mesh={"fsdp": 2})
    kept = []
    if is_killed:
        saved = str(two / "checkpoints" / "3")
        crashed = run_in_two(tmp_path, "-c", CRASH, "--config", config, saved)
        assert [code for code, _ in crashed] == [9, 9], crashed
        assert 3 <= len(losses(two)) <= 4 and not (two / "model").exists()
        kept = (two / "metrics.jsonl").read_text().splitlines()[:3]  # with the times of the steps
    outcomes = run_in_two(tmp_path, "-m", "train.main", "--config", config)
    assert [code for code, _ in outcomes] == [0, 0], outcomes
    assert json.loads(outcomes[0][1].splitlines()[-1])["steps"] == 8
    assert (two / "metrics.jsonl").read_text().splitlines()[: len(kept)] == kept  # it went on
    np.testing.assert_allclose(losses(two), losses(tmp_path / "one"), rtol=1e-5)
    target = runs.model("target")
    for got, want in zip(weights(two, target), weights(tmp_path / "one", target), strict=True):
        assert np.linalg.norm(got - want) <= 1e-5 * np.linalg.norm(want)


@pytest.mark.slow
def test_one_of_two_is_told_to_stop_and_both_do(runs, tmp_path):
    config = config_for(runs, tmp_path / "two", mesh={"fsdp": 2}, validate_every=999)
    changes = ["num_tokens=64000", "checkpoint_every=999"]
    outcomes = run_in_two(tmp_path, "-c", TOLD_TO_STOP, "--config", config, *changes)
    assert [code for code, _ in outcomes] == [0, 0], outcomes
    (saved,) = (tmp_path / "two" / "checkpoints").iterdir()
    assert 3 < int(saved.name) < 1000
    assert f'"stopped_at": {saved.name}' in outcomes[0][1].splitlines()[-1]
    assert "stopped after step" not in outcomes[1][1]  # the first process speaks for both
