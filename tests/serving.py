"""Servers in this process, as `infer.serve` makes them, and in others; what clients send."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest

from poss_jax import Engine, Generation
from poss_jax.config.decoding import EngineConfig, SamplingConfig, ServeConfig
from poss_jax.engine.batch import RoundKind
from poss_jax.engine.prompts import PreparedPrompt
from poss_jax.engine.scheduler import Scheduler
from poss_jax.engine.slots import Slots
from poss_jax.serving.app import create_app
from poss_jax.serving.requests import Job, add_guides, submit_grammar
from poss_jax.serving.server import DrainingServer, listen
from poss_jax.serving.service import Service

MODEL = "tiny"
ROOT = Path(__file__).parents[1]


@dataclass
class Served:
    """A server that runs."""

    engine: Engine
    service: Service  # what its endpoints share
    server: DrainingServer  # uvicorn's
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def scheduler(self) -> Scheduler:
        return self.service.scheduler

    @property
    def schema(self) -> dict[str, Any]:
        """The application's OpenAPI schema."""
        return self.server._app.openapi()

    def client(self, **options: Any) -> openai.OpenAI:
        """The official client, which tries once."""
        given = {"api_key": "none", "max_retries": 0, "timeout": 60} | options
        return openai.OpenAI(base_url=f"{self.url}/v1", **given)

    def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        """Posts JSON, or bytes as they are."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"content-type": "application/json"} | headers
        return httpx.post(self.url + path, content=content, headers=headers, timeout=60)

    def get(self, path: str, **headers: str) -> httpx.Response:
        return httpx.get(self.url + path, headers=headers, timeout=60)

    def connect(self, data: bytes = b"") -> socket.socket:
        """Opens a connection and sends bytes."""
        sock = socket.socket()
        sock.settimeout(30)
        sock.connect(("127.0.0.1", self.port))
        sock.sendall(data)
        return sock

    def exchange(self, data: bytes) -> bytes:
        """Sends bytes, and reads until the server hangs up."""
        with closing(self.connect(data)) as sock:
            return b"".join(iter(lambda: sock.recv(65536), b""))

    def metric(self, name: str) -> float:
        """Value of a metric without labels."""
        lines = self.get("/metrics").text.splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith(f"{name} "))


class WithoutGrammars(Slots):
    """Slots whose rounds for grammars are not compiled, which takes long."""

    def rare_kinds(self, size: int) -> list[RoundKind]:
        return [kind for kind in super().rare_kinds(size) if not kind.is_guided]


@contextmanager
def serving(
    engine: Engine, *, api_key: str | None = None, has_grammars: bool = False, **settings: Any
) -> Iterator[Served]:
    """Serves a tiny engine until the block ends."""
    given = {"model_name": MODEL, "batch_size": 4, "slots": (4,), "max_logprobs": 5}
    config = ServeConfig(**(given | settings))
    with pytest.MonkeyPatch.context() as patch, closing(listen("127.0.0.1", 0)) as sock:
        if not has_grammars:
            patch.setattr("poss_jax.serving.app.Slots", WithoutGrammars)
        app = create_app(config, engine)
        server = DrainingServer(app, config, api_key=api_key)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
        thread.start()
        until(lambda: server.started or not thread.is_alive())
        try:
            yield Served(engine, app.state.service, server, sock.getsockname()[1])
        finally:
            server.should_exit = True
            thread.join()


@dataclass
class Program:
    """A program in another process."""

    process: subprocess.Popen[bytes]  # which leads a group of its own
    log: Path  # file with what it prints

    @property
    def said(self) -> str:
        return self.log.read_text()

    def find(self, pattern: str) -> str:
        """Waits until it prints something."""
        until(lambda: re.search(pattern, self.said) or self.process.poll() is not None, seconds=300)
        match = re.search(pattern, self.said)
        assert match, self.said
        return match[1]


@contextmanager
def started(command: Sequence[str], **environment: str) -> Iterator[Program]:
    """Runs Python with these arguments in this checkout, and stops it after the block."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"} | environment
    options: Any = {"cwd": ROOT, "env": os.environ | environment, "start_new_session": True}
    with (
        tempfile.NamedTemporaryFile() as log,
        subprocess.Popen([sys.executable, *command], stdout=log, stderr=log, **options) as process,
    ):
        try:
            yield Program(process, Path(log.name))
        finally:
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(60)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


class Tokenising(Engine):
    """An engine without weights: it reads prompts and names tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.max_length, self.stop_ids = tokenizer, 1000, [2]
        self.target_config: Any = SimpleNamespace(vocab_size=10_000)
        self.fingerprint, self.draft_config, self.settings = "", None, EngineConfig()
        self.recommended = SamplingConfig()


def guided(engine: Engine, job: Job) -> Job:
    """A job whose grammar is compiled, as the service does it."""
    return add_guides(job, submit_grammar(engine, job.grammar)) if job.grammar else job


def decode_each(engine: Engine, prompts: Sequence[PreparedPrompt]) -> list[Generation]:
    """Answers of the target alone, each beside a prompt that has all settings: one program."""
    settings = SamplingConfig(temperature=1.0, frequency_penalty=0.5, logit_bias={5: 1.0})
    other = PreparedPrompt([5], 1, settings)
    pairs = [item for prompt in prompts for item in (prompt, other)]
    return engine.with_tree({1: None}).decode(pairs, batch_size=2)[::2]


def until(is_so: Callable[[], Any], seconds: float = 60.0) -> None:
    """Waits for something to become true."""
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, "waited for too long"
        time.sleep(0.01)


def free_port() -> int:
    with closing(socket.create_server(("127.0.0.1", 0))) as sock:
        return sock.getsockname()[1]


def request_bytes(path: str, body: Any, *headers: str) -> bytes:
    """A POST request as it goes over the wire."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = [f"POST {path} HTTP/1.1", "host: localhost", "content-type: application/json", *headers]
    if not any(line.lower().startswith("transfer-encoding") for line in headers):
        head.append(f"content-length: {len(content)}")
    return "\r\n".join([*head, "", ""]).encode() + content
