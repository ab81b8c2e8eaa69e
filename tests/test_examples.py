"""The launchers and manifests of examples/: they call what exists, and start again what stopped."""

import json
import os
import re
import shlex
import signal
import subprocess
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml

from poss_jax.config.decoding import ServeConfig
from poss_jax.config.reading import load_config
from poss_jax.config.training import TrainConfig
from poss_jax.engine.scheduler import Scheduler
from poss_jax.engine.streams import Stats
from poss_jax.program.arguments import read_arguments

ROOT = Path(__file__).parent.parent
LAUNCH, KUBERNETES = ROOT / "examples" / "launch", ROOT / "examples" / "kubernetes"
DONE = 'echo \'{"model": "runs/x/model"}\''
STOPPED = 'echo \'{"stopped_at": 7, "steps": 9}\''


def manifest(name: str) -> Any:
    return yaml.safe_load((LAUNCH / name).read_text())


def pod() -> Any:
    [job] = manifest("jobset.yaml")["spec"]["replicatedJobs"]
    return job["template"]["spec"]["template"]["spec"]


def scripts() -> dict[str, str]:
    """Shell text of each launcher."""
    [container] = pod()["containers"]
    return {
        "slurm.sh": (LAUNCH / "slurm.sh").read_text(),
        "jobset.yaml": container["command"][-1],
        "sky.yaml": manifest("sky.yaml")["run"],
    }


def start(name: str, train: str, folder: Path) -> subprocess.Popen[str]:
    """Starts a launcher where shell lines stand for poss-train and the tools of clusters."""
    tools = folder / "bin"
    tools.mkdir()
    lines = {"poss-train": f'echo "$@" > {folder}/given\n{train}', "srun": 'shift; exec "$@"'}
    lines |= {"pip": "", "scontrol": f'echo "$@" > {folder}/requeued'}
    for tool, line in lines.items():
        (tools / tool).write_text(f"#!/bin/bash\n{line}\n")
        (tools / tool).chmod(0o755)
    text = scripts()[name].replace("/tmp/", f"{folder}/").replace("/work", str(folder))
    text = text.replace("$PWD/.venv/bin", str(tools))
    environment = os.environ | {"PATH": f"{tools}:{os.environ['PATH']}", "SLURM_JOB_ID": "5"}
    environment |= {"SLURM_CPUS_PER_TASK": "4", "SLURM_GPUS_ON_NODE": "4"}
    return subprocess.Popen(
        ["bash", "-c", text, "launcher", "configs/llama3-8b-instruct/poss3.yaml", "seed=3"],
        env=environment,
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
    )


@pytest.mark.parametrize("name", scripts())
def test_what_is_called_exists(name):
    text = scripts()[name].replace("\\\n", " ")
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0
    commands = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    called = re.findall(r"poss-\w+(?= --)", text)
    assert called == ["poss-train"] and set(called) <= set(commands)
    config = re.search(r"configs/\S+\.yaml", text)
    line = re.search(r"poss-train (.*?)(?:>|\)|$)", text, re.M)
    assert config and line
    words = [word for word in shlex.split(line[1]) if re.fullmatch(r"[\w.]+=\S+", word)]
    load_config(TrainConfig, ROOT / config[0], words)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extra in re.findall(r"\[(\w+)\]'", text + str(manifest("sky.yaml")["setup"])):
        assert extra in extras["optional-dependencies"]


def test_the_batch_divides_among_the_chips_of_the_slice():
    spec = manifest("jobset.yaml")["spec"]["replicatedJobs"][0]["template"]["spec"]
    [container] = pod()["containers"]
    across, along = pod()["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x")
    chips = spec["parallelism"] * container["resources"]["limits"]["google.com/tpu"]
    assert chips == int(across) * int(along) and spec["completions"] == spec["parallelism"]
    assert f"mesh.fsdp={chips}" in scripts()["jobset.yaml"]
    rule = spec["podFailurePolicy"]["rules"][0]["onExitCodes"]
    assert (rule["containerName"], rule["values"]) == (container["name"], [2])


@pytest.mark.parametrize("name", scripts())
@pytest.mark.parametrize(("train", "code"), [(DONE, 0), (STOPPED, 75), ("exit 2", 2)])
def test_a_stopped_run_starts_again(name, train, code, tmp_path):
    process = start(name, train, tmp_path)
    printed, _ = process.communicate(timeout=60)
    is_slurm = name == "slurm.sh"  # queues itself and is done
    assert process.returncode == (0 if is_slurm and code == 75 else code)
    assert (tmp_path / "requeued").exists() == (is_slurm and code == 75)
    assert ("{" in printed) == (code != 2)
    given = (tmp_path / "given").read_text()
    assert given.startswith("--config ") and "configs/llama3-8b-instruct/poss3.yaml" in given


def test_slurm_gives_a_process_all_devices_of_its_host(tmp_path):
    process = start("slurm.sh", "echo $JAX_LOCAL_DEVICE_IDS", tmp_path)
    assert process.communicate(timeout=60)[0] == "0,1,2,3\n"
    assert (tmp_path / "given").read_text().split()[-1] == "seed=3"


def test_a_pod_passes_sigterm_on(tmp_path):
    train = f"""stop() {{ sleep 0.2; {STOPPED}; exit; }}
trap stop TERM
touch {tmp_path}/ready
while :; do sleep 0.1; done"""
    process = start("jobset.yaml", train, tmp_path)
    while not (tmp_path / "ready").exists():
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 75


def dictionaries(value: Any) -> Iterator[dict[str, Any]]:
    """All dictionaries in a YAML value."""
    if isinstance(value, dict):
        yield value
    for inner in value.values() if isinstance(value, dict) else value:
        if isinstance(inner, dict | list):
            yield from dictionaries(inner)


def test_options_paths_and_metrics_of_kubernetes_exist():
    """The files start our server, and ask it for what it has."""
    pytest.importorskip("fastapi")
    from poss_jax.serving.app import create_app
    from poss_jax.serving.service import Metrics

    routes = {getattr(route, "path", None) for route in create_app(ServeConfig()).routes}
    files = [KUBERNETES / "serve.yaml", KUBERNETES / "several_hosts.yaml"]
    parts = list(dictionaries([list(yaml.safe_load_all(file.read_text())) for file in files]))
    containers = [part for part in parts if "image" in part]
    dockerfile = (KUBERNETES / "Dockerfile").read_text()
    lines = [json.loads(re.findall(r"^CMD (\[.*\])$", dockerfile, re.M)[0])]
    for container in containers:
        text = container.get("command", [""])[-1].replace("\\\n", " ")
        lines += map(shlex.split, re.findall(r"^exec poss-serve (.*)$", text, re.M))
        lines += [container["args"]] if "args" in container else []
    assert len(lines) == 1 + len(containers) == 4
    for words in lines:
        config, _ = read_arguments(ServeConfig, words, prog="infer.serve", doc="")
        assert (config.host, config.port) == ("0.0.0.0", 8000)
    assert {part["httpGet"]["path"] for part in parts if "httpGet" in part} <= routes

    pool = yaml.safe_load((KUBERNETES / "inference_pool.yaml").read_text())
    idle = mock.create_autospec(Scheduler, num_waiting=0, num_running=0, num_slots=1, stats=Stats())
    names = {metric.name for metric in Metrics(idle, "target").collect()}
    assert set(pool["inferenceExtension"]["flags"].values()) <= names
