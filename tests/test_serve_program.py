"""`infer.serve` as a process: its address, signals in the midst of answers, wrong input."""

import json
import signal
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from programs import Runs, refusal
from serving import Program, started, until

from benchmarks import serving as serving_benchmark
from infer.serve import main
from poss_jax.engine.scheduler import Scheduler
from poss_jax.serving.server import listen

SMALL = ["--batch-size", "1", "--max-logprobs", "0", "--port", "0"]
PATH = "/v1/completions"
LONG = {"prompt": "def area_7", "max_tokens": 230, "ignore_eos": True}
STREAMED = LONG | {"stream": True}
CUT = "the server stops; this answer is cut"


@contextmanager
def serving(runs: Runs, *arguments: str) -> Iterator[tuple[Program, httpx.Client]]:
    """A server in a new process, and a client of it."""
    command = ["-m", "infer.serve", "--target", runs.model("target"), *SMALL, *arguments]
    with started(command) as program:
        url = program.find(r"listening at (http://127.0.0.1:\d+)/")
        with httpx.Client(base_url=url, timeout=60) as client:
            yield program, client
        assert program.process.poll() is None or "Traceback" not in program.said


def last_event(lines: Iterator[str]) -> dict[str, Any]:
    *_, last = (line for line in lines if line not in ("", "data: [DONE]"))
    return json.loads(last.removeprefix("data: "))


@pytest.mark.slow
def test_sigterm_finishes_what_was_begun(runs: Runs) -> None:
    with serving(runs, "--model-name", "mine") as (program, client):
        assert "<html" in client.get("/").text.lower()
        until(lambda: '"path": "/"' in program.said)
        entry = next(json.loads(line) for line in program.said.splitlines() if line[:1] == "{")
        assert (entry["method"], entry["status"]) == ("GET", 200) and entry["id"]
        with client.stream("POST", PATH, json=STREAMED) as stream:  # waits for the compiler
            program.process.send_signal(signal.SIGTERM)
            until(lambda: "draining: 1 answers" in program.said)
            refused = client.post(PATH, json=LONG)
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            assert client.get("/ready").status_code == 503 and client.get("/health").is_success
            assert last_event(stream.iter_lines())["choices"][0]["finish_reason"] == "length"
        assert program.process.wait(60) == 0


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_cut_answers_after_a_time(runs: Runs, number: int) -> None:
    options = ["--drain-seconds", "0"] if number == signal.SIGTERM else []
    with serving(runs, *options) as (program, client):
        with client.stream("POST", PATH, json=STREAMED) as stream:  # waits for the compiler
            program.process.send_signal(number)
            assert last_event(stream.iter_lines())["error"]["message"] == CUT
        assert program.process.wait(100) == 0 and "the other answers are cut" in program.said


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_while_it_compiles(runs: Runs, number: int) -> None:
    with serving(runs) as (program, _):
        program.process.send_signal(number)
        assert program.process.wait(100) == 0


@pytest.mark.slow
def test_a_second_signal_waits_for_nothing(runs: Runs) -> None:
    with serving(runs) as (program, _):
        program.process.send_signal(signal.SIGTERM)
        until(lambda: "draining" in program.said)
        program.process.send_signal(signal.SIGTERM)
        assert program.process.wait(1) in (0, 128 + signal.SIGTERM)


@pytest.mark.parametrize("take", [socket.create_server, lambda place: listen(*place)])
def test_a_port_is_taken_before_and_while_models_are_loaded(tmp_path: Path, take: Any) -> None:
    with closing(take(("127.0.0.1", 0))) as other:
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
        main(["--target", runs.model("target"), *SMALL])
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
