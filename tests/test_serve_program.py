"""`infer.serve` as a process: its address, signals in the midst of answers, wrong input."""

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from programs import Runs, refusal
from self_killing import ROOT
from serving import until

from benchmarks import serving as serving_benchmark
from infer.serve import main
from poss_jax.engine.scheduler import Scheduler
from poss_jax.serving.server import listen

SMALL = ["--batch-size", "1", "--max-logprobs", "0"]
LONG = {"prompt": "def area_7", "max_tokens": 230, "ignore_eos": True}


class Process:
    """A server in a new process; its messages go to a file."""

    def __init__(self, runs: Runs, log: Path, *arguments: str) -> None:
        command = [sys.executable, "-m", "infer.serve", "--target", runs.model("target")]
        self._log = log
        self._opened: list[Any] = []
        with log.open("w") as file:
            self.popen = subprocess.Popen(
                [*command, *SMALL, "--port", "0", *arguments],
                cwd=ROOT,
                env={name: value for name, value in os.environ.items() if name != "POSS_API_KEY"},
                stdout=file,
                stderr=file,
            )

    @property
    def said(self) -> str:
        return self._log.read_text()

    @property
    def port(self) -> int:
        found = re.search(r"listening at http://127.0.0.1:(\d+)/", self.said)
        return int(found[1]) if found else 0

    def connect(self) -> http.client.HTTPConnection:
        self._opened.append(http.client.HTTPConnection("127.0.0.1", self.port, timeout=60))
        return self._opened[-1]

    def post(self, connection: http.client.HTTPConnection, body: Any) -> http.client.HTTPResponse:
        headers = {"content-type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        self._opened.append(connection.getresponse())
        return self._opened[-1]

    def status(self, path: str) -> int:
        with closing(self.connect()) as connection:
            connection.request("GET", path)
            with connection.getresponse() as response:
                return response.status

    def ends_with(self, seconds: float = 60) -> int:
        return self.popen.wait(seconds)

    def end(self) -> None:
        for one in self._opened:
            one.close()
        self.popen.kill()
        self.popen.wait()


@contextmanager
def serving(runs: Runs, log: Path, *arguments: str) -> Iterator[Process]:
    process = Process(runs, log, *arguments)
    try:
        until(lambda: process.port or process.popen.poll() is not None, seconds=120)
        assert process.popen.poll() is None, process.said
        yield process
    finally:
        process.end()


def last_event(stream: http.client.HTTPResponse) -> dict[str, Any]:
    """The last part of a stream."""
    *_, last = (line for line in stream.read().split(b"\n") if line)
    return json.loads(last.removeprefix(b"data: "))


@pytest.mark.slow
def test_sigterm_finishes_what_was_begun(runs: Runs, tmp_path: Path) -> None:
    with serving(runs, tmp_path / "log") as process:
        until(lambda: process.status("/ready") == 200, seconds=200)
        idle = process.connect()
        assert process.post(idle, LONG | {"max_tokens": 1}).read()
        stream = process.post(process.connect(), LONG | {"stream": True})
        first = stream.readline()
        process.popen.send_signal(signal.SIGTERM)
        until(lambda: "draining: 1 answers" in process.said)
        refused = process.post(idle, LONG)
        assert (refused.status, refused.headers["retry-after"]) == (503, "1")
        refused.read()
        assert process.status("/ready") == 503 and process.status("/health") == 200
        lines = [line for line in (first + stream.read()).split(b"\n") if line]
        assert lines[-1] == b"data: [DONE]"
        events = [json.loads(line.removeprefix(b"data: ")) for line in lines[:-1]]
        assert events[-1]["choices"][0]["finish_reason"] == "length"
        assert process.ends_with() == 0
        assert "Traceback" not in process.said


@pytest.mark.slow
def test_sigterm_cuts_answers_after_a_time(runs: Runs, tmp_path: Path) -> None:
    with serving(runs, tmp_path / "log", "--drain-seconds", "0") as process:
        until(lambda: process.status("/ready") == 200, seconds=200)
        stream = process.post(process.connect(), LONG | {"stream": True})
        assert stream.readline()
        process.popen.send_signal(signal.SIGTERM)
        assert last_event(stream)["error"]["message"] == "the server stops; this answer is cut"
        assert process.ends_with() == 0
        assert "the other answers are cut" in process.said and "Traceback" not in process.said


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_while_it_compiles(runs: Runs, tmp_path: Path, number: int) -> None:
    with serving(runs, tmp_path / "log") as process:
        process.popen.send_signal(number)
        assert process.ends_with(100) == 0
        assert "Traceback" not in process.said


@pytest.mark.slow
def test_an_interrupt_cuts_answers(runs: Runs, tmp_path: Path) -> None:
    with serving(runs, tmp_path / "log") as process:
        stream = process.post(process.connect(), LONG | {"stream": True})  # waits for the compiler
        process.popen.send_signal(signal.SIGINT)
        assert last_event(stream)["error"]["message"] == "the server stops; this answer is cut"
        assert process.ends_with(100) == 0 and "Traceback" not in process.said


@pytest.mark.slow
def test_a_second_signal_waits_for_nothing(runs: Runs, tmp_path: Path) -> None:
    with serving(runs, tmp_path / "log") as process:
        process.popen.send_signal(signal.SIGTERM)
        until(lambda: "draining" in process.said)
        process.popen.send_signal(signal.SIGTERM)
        assert process.ends_with(1) in (0, 128 + signal.SIGTERM)


@pytest.mark.slow
def test_the_page_and_the_log(runs: Runs, tmp_path: Path) -> None:
    with serving(runs, tmp_path / "log", "--model-name", "mine") as process:
        url = f"http://127.0.0.1:{process.port}/"
        with urllib.request.urlopen(url, timeout=30) as response:
            assert b"<html" in response.read().lower()
        until(lambda: '"path": "/"' in process.said)
        entry = next(json.loads(line) for line in process.said.splitlines() if line[:1] == "{")
        assert (entry["method"], entry["status"]) == ("GET", 200) and entry["id"]


# --------------------------------------------------------------------------------------------------
# Wrong input


def test_a_port_in_use_shows_before_models_are_loaded(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        message = refusal(main, "--port", port, "--target", str(tmp_path / "missing"))
    assert "in use" in message and f"port {port}" in message


def test_a_port_is_taken_while_models_are_loaded(tmp_path: Path) -> None:
    with closing(listen("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        message = refusal(main, "--port", port, "--target", str(tmp_path / "missing"))
    assert "in use" in message and f"port {port}" in message


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--target", "/nowhere/model"], "/nowhere/model"),
        (["slots=[1, 2]"], "slots"),
        (["--host", "256.0.0.1"], "256.0.0.1"),
        (["--host", "a" * 80 + ".b"], "--host"),
        (["--host", "x..y"], "--host"),
        (["--port", "70000"], "port"),
        (["--batch-size", "0"], "--batch-size"),
        (["--cache-gib", "1e-6"], "cache_gib"),
        (["--batchsize", "4"], "--batch-size"),
    ],
    ids=str,
)
def test_wrong_input_is_one_line(runs: Runs, arguments: list[str], named: str) -> None:
    given = [] if "--target" in arguments else ["--target", runs.model("target")]
    given += [] if "--port" in arguments else ["--port", "0"]
    assert named in refusal(main, *given, *arguments)


def test_it_ends_when_decoding_fails(runs, monkeypatch, caplog) -> None:
    def fail(self: Scheduler) -> None:
        raise MemoryError("no room for a program")

    monkeypatch.setattr(Scheduler, "_compile", fail)
    with pytest.raises(SystemExit) as ended:
        main(["--target", runs.model("target"), "--port", "0", *SMALL])
    assert ended.value.code == 1
    assert "decoding failed" in caplog.text and "no room for a program" in caplog.text


@pytest.mark.slow
def test_the_benchmark_finds_no_wrong_text(tmp_path: Path) -> None:
    words = ["--clients", "4", "--seconds", "3", "--max-length", "256", "--max-new-tokens", "16"]
    words += ["--repeats", "1", "--sizes", "1"]
    serving_benchmark.main([*words, "--output", str(tmp_path)])
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["load"]["answers"] > 4 and report["load"]["left"] > 0
    for name in ("wrong", "lost", "crossed", "duplicated"):
        assert report["load"][name] == 0
    assert report["load"]["cached_tokens"] > 0
    assert [len(rows) for rows in report["throughput"].values()] == [1] * 2
    assert "**0 wrong**" in (tmp_path / "report.md").read_text()
