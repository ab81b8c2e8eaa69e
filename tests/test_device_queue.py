"""The queue of measurements: it goes on where it was stopped, and decides by what it measured."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from serving import ROOT, until

from benchmarks import device
from benchmarks.device import SIZES, TINY, Stage, list_stages, run_queue

TABLE = """
from pathlib import Path
from benchmarks.device import Stage, run_queue

stages = [
    Stage("quick", 60, "echo quick >> trace; echo '{}' > $OUT/report.json"),
    Stage("slow", 60, "echo slow >> trace; [ -e go ] || { sleep 99 & echo $! > child; wait; }"),
    Stage("stuck", 1, "echo stuck >> trace; sleep 60"),
    Stage("fails", 60, "echo fails >> trace; [ -e go ]"),
]
print(run_queue(stages, Path("runs"), seconds=100))
"""


def start_queue(folder: Path) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", TABLE]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    return subprocess.Popen(words, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE)


def is_running(child: Path) -> bool:
    status = Path("/proc", child.read_text().strip() or "none", "status")
    return status.exists() and "State:\tZ" not in status.read_text()


def test_a_queue_that_was_killed_goes_on(tmp_path: Path) -> None:
    trace, child = tmp_path / "trace", tmp_path / "child"
    with start_queue(tmp_path) as queue:
        until(lambda: child.exists() and is_running(child))
        queue.send_signal(signal.SIGINT)  # as SIGTERM does in the program
    until(lambda: not is_running(child))
    assert trace.read_text().split() == ["quick", "slow"]
    (tmp_path / "go").touch()
    with start_queue(tmp_path) as queue:
        lines = queue.communicate()[0].splitlines()
    assert trace.read_text().split() == ["quick", "slow", "slow", "stuck", "fails"]
    assert [line.partition("  [")[0] for line in lines] == [
        "quick: done before",
        "slow: done in 0 s",
        "stuck: stopped after 1 s, see runs/stuck.log",
        "fails: done in 0 s",
        "False",
    ]


def test_nothing_is_begun_when_the_time_is_over(tmp_path: Path) -> None:
    stages = [Stage("late", 60, "touch $OUT/begun")]
    assert not run_queue(stages, tmp_path, seconds=device.MIN_SECONDS - 1)
    assert not list(tmp_path.iterdir())
    assert run_queue(stages, tmp_path, seconds=100) and (tmp_path / "late" / "begun").exists()
    changed = [Stage("late", 60, "exit 3")]
    assert not run_queue(changed, tmp_path, seconds=100)  # another command: not done


@pytest.mark.parametrize("sizes", [SIZES, TINY])
def test_every_command_is_one_of_bash(sizes: dict[str, Any]) -> None:
    for stage in list_stages(sizes):
        subprocess.run(["bash", "-n", "-c", stage.command], check=True)


def rounds(near: float, far: float) -> dict[str, float]:
    times = {"poss3 6/10/60, 512 of 8192": near, "poss3 6/10/60, 512": far}
    times["autoregressive, 512 of 8192"] = 5.0
    return {f"{name}: round_milliseconds": time for name, time in times.items()}


def drafts(mtp: float) -> dict[str, float]:
    speeds = {"PosS-1": 100.0, "PosS-1 on EAGLE-3": 50.0, "MTP": mtp}
    return {f"{name}, T = 0: tokens_per_second": speed for name, speed in speeds.items()}


def served(tree: str, speed: float) -> dict[str, float]:
    return {f"poss3{tree}, 32 clients: tokens_per_second": speed}


PLAIN = {"rounds": rounds(10.0, 10.0), "server": served("", 100.0)}


@pytest.mark.parametrize(
    ("numbers", "decision"),
    [
        ({"used_rows": rounds(8.5, 10.2)}, "used_rows: on by default"),
        ({"used_rows": rounds(8.5, 10.3)}, "used_rows: model/used_rows.py leaves"),  # one slower
        ({"used_rows": rounds(8.6, 10.0)}, "used_rows: model/used_rows.py leaves"),  # not enough
        ({"smollm2": drafts(99.0)}, "mtp: family mtp leaves"),
        ({"smollm2": drafts(101.0)}, "mtp: family mtp stays"),
        ({"fixed_tree": served(" 6/10/60", 100.0)}, "trees: they shrink with the load"),
        ({"fixed_tree": served(" 6/10/60", 103.0)}, "trees: one tree for all"),
    ],
)
def test_rules_decide_by_what_was_measured(numbers: Any, decision: str) -> None:
    """What was not measured stays open."""
    lines = device.decide(PLAIN | numbers, SIZES)
    assert [line for line in lines if not line.endswith(": open")] == [f"decision, {decision}"]


def test_numbers_stand_beside_the_committed_ones(tmp_path: Path) -> None:
    near = {"round_milliseconds": 9.0, "floor_to_round": 0.7}
    far = {"round_milliseconds": 12.0, "floor_to_round": 0.8}
    contexts = {"512": near, "512 of 8192": near, "16128 of 16384": far}
    methods = {f"poss3 6/10/60, {context}": row for context, row in contexts.items()}
    report = {"device": {"name": "NVIDIA H200"}, "methods": methods}
    (tmp_path / "rounds").mkdir()
    (tmp_path / "rounds" / "report.json").write_text(json.dumps(report))
    lines = list(device.summarise([Stage("rounds", 1, "")], tmp_path, SIZES))
    committed = json.loads((device.COMMITTED / "accelerator" / "report.json").read_text())
    before = committed["methods"]["poss3 6/10/60"]["round_milliseconds"]
    key = "6/10/60, 512: round_milliseconds"
    assert lines[0] == f"rounds: poss3 {key} 9.000 ({9 / before:.2f} x {before:.3f})"
    assert lines[1].endswith("(none committed)")
    assert lines[-2:] == [
        "mark, poss3 6/10/60, 512 of 8192: MISSED, 8.5 ms",
        "mark, poss3 6/10/60, 16128 of 16384: met, 1.35 x the floor",
    ]
