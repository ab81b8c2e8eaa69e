"""The files of examples/kubernetes: options, paths, metrics and extras that they name exist."""

import json
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml

from poss_jax.config.decoding import ServeConfig
from poss_jax.engine.scheduler import Scheduler, Stats
from poss_jax.program.arguments import read_arguments

pytest.importorskip("fastapi")
from poss_jax.serving.app import create_app
from poss_jax.serving.metrics import Metrics

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "examples" / "kubernetes"
MANIFESTS = ["serve.yaml", "several_hosts.yaml"]


def documents(name: str) -> dict[str, Any]:
    """Objects of a file by kind."""
    return {one["kind"]: one for one in yaml.safe_load_all((FOLDER / name).read_text())}


def pods(name: str) -> list[Any]:
    """Pods of a file: that which answers HTTP, and workers."""
    objects = documents(name)
    if "Deployment" in objects:
        return [objects["Deployment"]["spec"]["template"]]
    group = objects["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]
    return [group["leaderTemplate"], group["workerTemplate"]]


def read_options(words: list[str]) -> ServeConfig:
    config, _ = read_arguments(ServeConfig, words, prog="infer.serve", doc="")
    return config


def config_of(container: Any) -> ServeConfig:
    if "command" not in container:
        return read_options(container["args"])
    text = container["command"][-1].replace("\\\n", " ")
    [line] = re.findall(r"^exec poss-serve (.*)$", text, re.M)
    return read_options(shlex.split(line))


@pytest.mark.parametrize("name", MANIFESTS)
def test_pods_call_the_server_and_ask_how_it_is(name: str) -> None:
    paths = {getattr(route, "path", None) for route in create_app(ServeConfig()).routes}
    for index, pod in enumerate(pods(name)):
        [container] = pod["spec"]["containers"]
        config = config_of(container)
        [port] = container["ports"] or [{"name": "http", "containerPort": config.port}]
        assert (config.host, config.port) == ("0.0.0.0", port["containerPort"])
        wait = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
        grace = pod["spec"]["terminationGracePeriodSeconds"]
        needed = wait + config.drain_seconds if index == 0 else wait
        assert needed < grace <= needed + 30
        probes = [container.get(f"{kind}Probe") for kind in ("startup", "readiness", "liveness")]
        if index > 0:
            assert probes == [None] * 3 and wait > config.drain_seconds
            continue
        assert [probe["httpGet"]["path"] for probe in probes] == ["/ready", "/ready", "/health"]
        assert {probe["httpGet"]["path"] for probe in probes} | {"/metrics"} <= paths


@pytest.mark.parametrize("name", MANIFESTS)
def test_services_find_the_pods(name: str) -> None:
    objects = documents(name)
    service = objects["Service"]["spec"]
    assert service["selector"].items() <= pods(name)[0]["metadata"]["labels"].items()
    assert service["ports"][0]["targetPort"] == "http"
    for pod in pods(name)[1:]:
        assert not service["selector"].items() <= pod["metadata"]["labels"].items()
    if "Deployment" in objects:
        spec = objects["Deployment"]["spec"]
        assert spec["selector"]["matchLabels"] == pods(name)[0]["metadata"]["labels"]
        assert objects["PodDisruptionBudget"]["spec"]["minAvailable"] < spec["replicas"]


def test_a_group_has_a_device_for_every_part_of_the_model() -> None:
    group = documents("several_hosts.yaml")["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]
    [container] = pods("several_hosts.yaml")[0]["spec"]["containers"]
    mesh = config_of(container).mesh
    assert mesh is not None
    assert mesh.tensor == group["size"] * container["resources"]["limits"]["nvidia.com/gpu"]
    assert mesh.data == mesh.fsdp == 1
    text = container["command"][-1]
    for ours in ("COORDINATOR_ADDRESS", "NUM_PROCESSES", "PROCESS_ID"):
        assert f"export JAX_{ours}=" in text


def test_the_gateway_reads_metrics_that_exist() -> None:
    values = yaml.safe_load((FOLDER / "inference_pool.yaml").read_text())
    idle = mock.create_autospec(Scheduler, num_waiting=0, num_running=0, num_slots=1, stats=Stats())
    names = {metric.name for metric in Metrics(idle).collect()}
    assert set(values["inferenceExtension"]["flags"].values()) <= names
    labels = pods("serve.yaml")[0]["metadata"]["labels"]
    assert values["inferencePool"]["modelServers"]["matchLabels"] == labels


def test_the_image_runs_the_server() -> None:
    lines = (FOLDER / "Dockerfile").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [command] = json.loads(re.findall(r"^ENTRYPOINT (\[.*\])$", lines, re.M)[0])
    assert command in project["scripts"]
    config = read_options(json.loads(re.findall(r"^CMD (\[.*\])$", lines, re.M)[0]))
    assert f"http://127.0.0.1:{config.port}/health" in lines and "EXPOSE 8000" in lines
    for extras in re.findall(r"EXTRAS=([\w,]+)", lines):
        assert set(extras.split(",")) <= set(project["optional-dependencies"])
    assert re.search(r"^USER [1-9]", lines, re.M)
    for words in re.findall(r"^COPY (.*) \S+$", lines, re.M):
        assert all((ROOT / word).exists() for word in words.split())
