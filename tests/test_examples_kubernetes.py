"""The files of examples/kubernetes start our server, and ask it for what it has."""

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml

from poss_jax.config.decoding import ServeConfig
from poss_jax.engine.scheduler import Scheduler
from poss_jax.engine.streams import Stats
from poss_jax.program.arguments import read_arguments

pytest.importorskip("fastapi")
from poss_jax.serving.app import create_app
from poss_jax.serving.service import Metrics

FOLDER = Path(__file__).parent.parent / "examples" / "kubernetes"


def dictionaries(value: Any) -> Iterator[dict[str, Any]]:
    """All dictionaries in a YAML value."""
    if isinstance(value, dict):
        yield value
    for inner in value.values() if isinstance(value, dict) else value:
        if isinstance(inner, dict | list):
            yield from dictionaries(inner)


def test_options_paths_and_metrics_exist():
    routes = {getattr(route, "path", None) for route in create_app(ServeConfig()).routes}
    files = [FOLDER / "serve.yaml", FOLDER / "several_hosts.yaml"]
    parts = list(dictionaries([list(yaml.safe_load_all(file.read_text())) for file in files]))
    containers = [part for part in parts if "image" in part]
    dockerfile = (FOLDER / "Dockerfile").read_text()
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

    pool = yaml.safe_load((FOLDER / "inference_pool.yaml").read_text())
    idle = mock.create_autospec(Scheduler, num_waiting=0, num_running=0, num_slots=1, stats=Stats())
    names = {metric.name for metric in Metrics(idle, "target").collect()}
    assert set(pool["inferenceExtension"]["flags"].values()) <= names
