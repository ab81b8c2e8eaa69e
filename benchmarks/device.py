"""The queue of measurements for a GPU or TPU, in order of worth; `benchmarks/device.sh` runs it.

A stage is a command with a limit and a folder in runs/device for its report; its log and how it
ended lie next to it. Started again, the queue resumes at the first stage that has not ended well;
remove runs/device/NAME* to measure one again. The last lines compare every number
with the committed report of such a device, and tell what it decides (docs/results/accelerator.md).
"""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from poss_jax.program.arguments import at_least
from poss_jax.program.running import Parser, run_program

ROOT = Path("runs/device")
COMMITTED = Path("docs/results")
MIN_SECONDS = 20  # with less left no stage is begun
GRACE_SECONDS = 20  # between asking a stage to stop and killing it
TIMED_OUT = 124  # of `timeout`

SIZES = {
    "own": "512",
    "near": "512/8192",
    "far": "4096/16384 16128/16384",
    "prompts": "512 4096",
    "tree": "6/10/60",
    "chain": "5/1/6",
    "clients": "1 8 32",
    "pair": "",
    "make": "CHATS=27000 BATCH=512 JOBS=4",
    "answers": "max_new_tokens=128",
    "copies": "max_new_tokens=128 num_prompts=4",
}
"""What the commands of a GPU or TPU take."""

TINY = {
    "own": "8",
    "near": "8/320",
    "far": "16/640 32/640",
    "prompts": "8 16",
    "tree": "2/2/5",
    "chain": "2/1/3",
    "clients": "1 2",
    "pair": "--tiny",
    "make": "ASK='--source configs/smollm2/questions.jsonl' BATCH=4 JOBS=2 TOKENS=16 "
    "VOCABULARY=512 ARGS='data.sequence_length=256 data.validation_fraction=0.5 num_epochs=1 "
    "batch_size=2 export_dtype=float32'",
    "answers": "max_new_tokens=8 num_prompts=2 temperatures=[0]",
    "copies": "max_new_tokens=8 num_prompts=1 temperatures=[0]",
}
"""What a rehearsal on a CPU takes instead."""


class Stage(NamedTuple):
    """A command of bash, which finds its folder in OUT, and the seconds it may take."""

    name: str
    limit: int
    command: str


def list_stages(sizes: Mapping[str, Any]) -> list[Stage]:
    """All stages, the one with the most to decide first."""
    pair = '"$PY" -m benchmarks.accelerator {pair} --output "$OUT" --only'
    rounds = f"{pair} methods --trees {{tree}} --contexts {{own}} {{near}}"
    subset = f"{pair} methods --trees {{tree}} --contexts {{near}} --methods autoregressive poss3"
    server = f"{pair} server --contexts {{own}} --clients {{clients}} --methods poss3"
    quantised = f"{pair} methods --trees {{tree}} --contexts {{own}} --quantise"
    drafts = {"EAGLE-2": "eagle", "EAGLE-3": "eagle3", "PosS-1": "poss1", "MTP": "mtp3"}
    drafts |= {"PosS-1 by reach": "poss1_reach", "PosS-1 on EAGLE-3": "poss1_e3"}
    models = [f"--draft '{name}=runs/smollm2/{run}/model'" for name, run in drafts.items()]
    table = {
        "kernels": (90, 'JAX_PLATFORMS= "$PY" -m pytest -q -m device tests/test_used_rows.py'),
        "rounds": (180, f"{rounds} {{far}}"),
        "used_rows": (180, f"POSS_JAX_USED_ROWS=1 {rounds} {{far}}"),
        "loops": (60, f"XLA_FLAGS=--xla_gpu_enable_command_buffer=+WHILE {subset}"),
        "exact": (60, f"XLA_FLAGS=--xla_allow_excess_precision=false {subset}"),
        "chains": (60, f"{pair} methods --trees {{chain}} --contexts {{own}} --methods poss3"),
        "chats": (400, "{make} DRAFTS= bash configs/smollm2/all.sh"),
        "drafts": (
            400,
            "{make} DRAFTS='poss1 poss1_reach mtp3 poss1_e3' bash configs/smollm2/all.sh",
        ),
        "smollm2": (
            150,
            '"$PY" -m infer.bench --config configs/smollm2/demo.yaml --target runs/smollm2/target '
            f'{" ".join(models)} --tree 3/1/4 {{answers}} "output=$OUT"',
        ),
        "lookup": (
            120,
            '"$PY" -m infer.bench --config configs/smollm2/lookup.yaml tree=null {copies} '
            "target=runs/smollm2/target drafts.PosS-1=runs/smollm2/poss1/model "
            "methods.PosS-1+lookup.draft=runs/smollm2/poss1/model "
            '"output=$OUT"',
        ),
        "server": (150, f"{server} autoregressive"),
        "fixed_tree": (120, f"{server} --fixed-tree --trees {{tree}}"),
        "int8": (60, f"{quantised} int8"),
        "fp8": (60, f"{quantised} fp8"),
        "prefill": (60, f"{pair} prefill --trees {{tree}} --contexts {{prompts}}"),
        "training": (90, f"{pair} training"),
    }
    return [Stage(name, limit, text.format(**sizes)) for name, (limit, text) in table.items()]


# --------------------------------------------------------------------------------------------------
# Running


def run_queue(stages: Sequence[Stage], root: Path, *, seconds: float) -> bool:
    """Runs what has not ended well before, until the time is over; True if all has now."""
    began = time.monotonic()
    for stage in stages:
        remaining = seconds - (time.monotonic() - began)
        if is_done(stage, root):
            print(f"{stage.name}: done before", flush=True)
        elif remaining < MIN_SECONDS:
            print(f"{stage.name}: not begun, the time is over", flush=True)
        else:
            print(f"{stage.name}: {run_stage(stage, root, min(stage.limit, remaining))}"
                  f"  [{time.monotonic() - began:.0f} s]", flush=True)  # fmt: skip
    return all(is_done(stage, root) for stage in stages)


def is_done(stage: Stage, root: Path) -> bool:
    """Tells whether this command has ended well."""
    end = read_json(root / f"{stage.name}.json")
    return end.get("command") == stage.command and end.get("exit") == 0


def run_stage(stage: Stage, root: Path, limit: float) -> str:
    """Runs a stage, keeps how it ended, and tells it in a few words."""
    folder, began = root / stage.name, time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    environment = {"PY": "python3"} | os.environ | {"OUT": str(folder)}
    # `timeout` ends all that the command started, even if this process is gone.
    words = ["timeout", f"--kill-after={GRACE_SECONDS}", f"{limit:.0f}", "bash", "-c"]
    with (
        (root / f"{stage.name}.log").open("w") as log,
        subprocess.Popen(
            [*words, stage.command], stdout=log, stderr=subprocess.STDOUT, env=environment
        ) as process,
    ):
        try:
            code = process.wait()
        finally:
            process.terminate()  # if this process is asked to stop
    took = time.monotonic() - began
    end = {"command": stage.command, "exit": code, "seconds": took}
    (root / f"{stage.name}.json").write_text(json.dumps(end, indent=2) + "\n")
    if code == 0:
        return f"done in {took:.0f} s"
    kind = f"stopped after {took:.0f} s" if code == TIMED_OUT else f"failed with exit code {code}"
    return f"{kind}, see {root / stage.name}.log"


def read_json(file: Path) -> dict[str, Any]:
    """Reads an object; an empty one if there is none, or not a whole one."""
    with suppress(OSError, ValueError):
        return json.loads(file.read_text())
    return {}


# --------------------------------------------------------------------------------------------------
# The summary

NUMBERS = {
    "methods": "round_milliseconds",
    "prefill": "milliseconds",
    "server": "tokens_per_second",
    "training": "step_seconds",
}
"""What is compared, by section of a report of `benchmarks.accelerator`."""
Numbers = Mapping[str, Mapping[str, float]]
"""Stage -> what was measured -> number."""


def list_numbers(report: Mapping[str, Any]) -> dict[str, float]:
    """All numbers of a report of `benchmarks.accelerator` or `infer.bench`."""
    numbers = {}
    for section, key in NUMBERS.items():
        for name, row in report.get(section, {}).items():
            if key in row:
                numbers[f"{name}: {key}"] = row[key]
    for group in report.get("groups", ()):
        for method, entry in group["methods"].items():
            for key in ("acceptance_length", "tokens_per_second"):
                name = f"{method}, {group['set']}, T = {group['temperature']:g}: {key}"
                numbers[name] = entry["all"][key]["value"]
    return numbers


def device_of(report: Mapping[str, Any]) -> str:
    """The device a report was measured on."""
    device = report.get("roofline", report).get("device", "")
    return device["name"] if isinstance(device, dict) else device


def read_committed(stage: str, device: str) -> dict[str, float]:
    """Committed numbers of a stage on such a device."""
    numbers: dict[str, float] = {}
    for name in ("accelerator", "accelerator_e3") if stage == "rounds" else ():  # at 512 tokens
        report = read_json(COMMITTED / name / "report.json")
        if device_of(report) == device:
            rows = list_numbers(report).items()
            numbers |= {name.replace(":", ", 512:"): number for name, number in rows}
    report = read_json(COMMITTED / "device" / stage / "report.json")
    return numbers | (list_numbers(report) if device_of(report) == device else {})


def summarise(stages: Sequence[Stage], root: Path, sizes: Mapping[str, Any]) -> Iterator[str]:
    """Every number next to the committed one, then the decisions."""
    reports = {stage.name: read_json(root / stage.name / "report.json") for stage in stages}
    numbers = {stage: list_numbers(report) for stage, report in reports.items()}
    for stage, measured in numbers.items():
        committed = read_committed(stage, device_of(reports[stage]))
        for name, number in measured.items():
            baseline = committed.get(name)
            compared = f"{number / baseline:.2f} x {baseline:.3f}" if baseline else "none committed"
            yield f"{stage}: {name} {number:.3f} ({compared})"
    yield from decide(numbers, sizes)
    yield from check_marks(reports.get("rounds", {}), sizes)


# --------------------------------------------------------------------------------------------------
# Decisions

FASTER, SLOWER = 0.85, 1.02
"""Rounds of a change that is taken take at most this share of the time; nothing may take more."""
MARKS = {"NVIDIA H200": {"poss3": 8.5, "poss3_e3": 6.8}, "NVIDIA H100 80GB HBM3": {"poss3": 10.0}}
"""Most milliseconds of a round at 512 tokens of 8,192."""
FAR_MARK = 1.35
"""Most times the floor at 16,128 tokens."""


def decide(numbers: Numbers, sizes: Mapping[str, Any]) -> Iterator[str]:
    """What the numbers decide; what was not measured stays open."""
    near = sizes["near"].replace("/", " of ")
    plain = numbers.get("rounds", {})
    for stage, if_true, if_false in (
        ("used_rows", "on by default", "model/used_rows.py leaves"),
        ("loops", "docs recommend +WHILE", "no flag"),
        ("exact", "docs recommend no excess precision", "no flag"),
    ):
        changed = numbers.get(stage, {})
        ratios = {name: changed[name] / plain[name] for name in changed if name in plain}
        drafted = [
            ratio
            for name, ratio in ratios.items()
            if f", {near}:" in name and not name.startswith("autoregressive")
        ]
        is_faster = max(drafted) <= FASTER and max(ratios.values()) <= SLOWER if drafted else None
        yield f"decision, {stage}: {choose(is_faster, if_true, if_false)}"
    speeds = {
        name: number
        for name, number in numbers.get("smollm2", {}).items()
        if name.endswith("tokens_per_second")
    }
    verdict = compare_all(speeds, "PosS-1,", "MTP,", min_ratio=1.0)
    yield f"decision, mtp: {choose(verdict, 'family mtp leaves', 'family mtp stays')}"
    served = {**numbers.get("server", {}), **numbers.get("fixed_tree", {})}
    verdict = compare_all(served, "poss3,", f"poss3 {sizes['tree']},", min_ratio=0.98)
    yield f"decision, trees: {choose(verdict, 'they shrink with the load', 'one tree for all')}"


def choose(verdict: bool | None, if_true: str, if_false: str) -> str:
    """The decision of a verdict."""
    return "open" if verdict is None else if_true if verdict else if_false


def compare_all(
    numbers: Mapping[str, float], ours: str, rival: str, *, min_ratio: float
) -> bool | None:
    """Tells whether the first is at least that share of the second wherever both were measured."""
    pairs = {name: name.replace(ours, rival, 1) for name in numbers if name.startswith(ours)}
    ratios = [numbers[name] / numbers[rival] for name, rival in pairs.items() if rival in numbers]
    return min(ratios) >= min_ratio if ratios else None


def check_marks(report: Mapping[str, Any], sizes: Mapping[str, Any]) -> Iterator[str]:
    """Rounds against what they were wanted to take on this device."""
    near, far = (sizes[key].split()[-1].replace("/", " of ") for key in ("near", "far"))
    marks = MARKS.get(device_of(report), {})
    for name, row in report.get("methods", {}).items():
        mark = marks.get(name.split()[0])
        if mark and name.endswith(f", {near}"):
            is_met = row["round_milliseconds"] <= mark
            yield f"mark, {name}: {'met' if is_met else 'MISSED'}, {mark} ms"
        if name.endswith(f", {far}"):
            is_met = row["floor_to_round"] * FAR_MARK >= 1
            yield f"mark, {name}: {'met' if is_met else 'MISSED'}, {FAR_MARK} x the floor"


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses arguments, runs the queue, prints the summary."""
    parser = Parser(description=__doc__)
    parser.add_argument("--minutes", type=at_least(1), default=13, metavar="N")
    parser.add_argument("--tiny", action="store_true", help="rehearse with tiny models on a CPU")
    args = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # which ends the stage, too
    sizes = TINY if args.tiny else SIZES
    stages = list_stages(sizes)
    is_whole = run_queue(stages, ROOT, seconds=60 * args.minutes)
    if args.tiny:
        print("a rehearsal: its numbers and decisions mean nothing")
    print("\n".join(summarise(stages, ROOT, sizes)))
    if not is_whole:
        raise SystemExit(1)


if __name__ == "__main__":
    run_program(main)
