"""The server under a hostile client: memory, and how soon /health answers meanwhile.

Starts `python -m infer.serve --batch-size 4` on the default model. During an attack it asks
/health every 20 ms, each time over a new connection, and reads the server's memory.

    bodies        one body of --mib MiB, and then 16 clients with --small-mib MiB each: a long role,
                  empty lists or objects for a prompt, many token ids, messages, parts or fields
    connections   430 that are idle, and 430 that send half of a body and wait
    answers       one request of 128 choices with all log-probabilities, which is served

Prints a table, and as its last line one JSON object; --output keeps report.json and report.md.

    python -m benchmarks.hostile --output docs/results/hostile
"""

import argparse
import http.client
import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, NamedTuple

from tqdm import tqdm

from benchmarks.options import make_parser
from benchmarks.serving import resident_mib, running
from infer.bench.report import show_report
from poss_jax.checkpoint.record import provenance
from poss_jax.program.running import run_program
from poss_jax.program.tables import format_rows

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
NUM_CLIENTS = 16
NUM_CONNECTIONS = 430
_SETTLE_SECONDS = 5.0


class Body(NamedTuple):
    """A body of any size: a beginning, an end, and a unit that is repeated between them.

    Attributes:
      path: endpoint.
      begin: what it begins with.
      unit: what is repeated.
      end: what it ends with.
    """

    path: str
    begin: bytes
    unit: bytes
    end: bytes

    def fill(self, mib: float) -> bytes:
        """The body, grown to `mib` MiB or a little less."""
        room = int(mib * 2**20) - len(self.begin) - len(self.end)
        return self.begin + self.unit * (room // len(self.unit)) + self.end


_PROMPT = b'{"max_tokens":1,"prompt":['
_MESSAGES = b'{"max_tokens":1,"messages":[{"role":"'
BODIES = {
    "long role": Body(CHAT, _MESSAGES, b"a b ", b'","content":"x"}]}'),
    "long text": Body(TEXT, b'{"max_tokens":1,"prompt":"', b"a b ", b'"}'),
    "empty lists": Body(TEXT, _PROMPT, b"[],", b"[]]}"),
    "empty objects": Body(TEXT, _PROMPT, b"{},", b"{}]}"),
    "token ids": Body(TEXT, _PROMPT, b"5,", b"5]}"),
    "messages": Body(CHAT, _MESSAGES, b'user","content":""},{"role":"', b'user","content":"x"}]}'),
    "parts": Body(CHAT, _MESSAGES + b'user","content":[', b'{"type":"text"},', b'{"type":""}]}]}'),
    "unknown lists": Body(TEXT, b'{"max_tokens":1,"prompt":"a","zz":[', b"[],", b"[]]}"),
}


class Watch(threading.Thread):
    """Asks /health and reads the memory of a server until it is stopped.

    Attributes:
      delays: seconds that each answer took.
      refused: how many got no answer, or another one than 200.
      memory: MiB, every time.
    """

    def __init__(self, port: int, pid: int) -> None:
        super().__init__(daemon=True)
        self.delays: list[float] = []
        self.refused = 0
        self.memory = [resident_mib(pid)]
        self._port, self._pid, self._is_over = port, pid, threading.Event()

    def run(self) -> None:
        """Asks every 20 ms."""
        while not self._is_over.wait(0.02):
            begun = time.monotonic()
            self.refused += send(self._port, "GET", "/health") != "200"
            self.delays.append(time.monotonic() - begun)
            self.memory.append(resident_mib(self._pid))

    def stop(self) -> None:
        """Ends it."""
        self._is_over.set()
        self.join()


def send(port: int, method: str, path: str, body: bytes = b"") -> str:
    """Sends a request; gives its status, or the name of what went wrong."""
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    try:
        client.request(method, path, body, {"content-type": "application/json"})
        response = client.getresponse()
        response.read()
    except (OSError, http.client.HTTPException) as error:
        return type(error).__name__
    finally:
        client.close()
    return str(response.status)


def send_many(body: Body, mib: float, count: int, port: int) -> Counter[str]:
    """Sends a body from several clients at once; counts how it was answered."""
    content = body.fill(mib)
    with ThreadPoolExecutor(count) as pool:
        return Counter(pool.map(lambda _: send(port, "POST", body.path, content), range(count)))


def connect_many(sent: bytes, port: int) -> Counter[str]:
    """Opens connections, sends each the same, and keeps them for 10 s."""
    with ExitStack() as opened:
        for _ in range(NUM_CONNECTIONS):
            sock = opened.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30))
            with suppress(OSError):
                sock.sendall(sent)
        time.sleep(10)
    return Counter({"left": NUM_CONNECTIONS})


def ask_for_much(port: int) -> Counter[str]:
    """Asks for as many choices and log-probabilities as allowed."""
    asked = {"prompt": "def f(", "n": 128, "logprobs": 20, "max_tokens": 16, "ignore_eos": True}
    return Counter([send(port, "POST", TEXT, json.dumps(asked).encode())])


def list_attacks(args: argparse.Namespace) -> dict[str, Callable[[int], Counter[str]]]:
    """All attacks by name; each takes a port."""
    half = BODIES["long text"].fill(args.small_mib)
    head = f"POST {TEXT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    head += f"content-length: {len(half)}\r\n\r\n"
    attacks: dict[str, Callable[[int], Counter[str]]] = {}
    for name, body in BODIES.items():
        attacks[f"{name}, {args.mib:g} MiB"] = partial(send_many, body, args.mib, 1)
        many = partial(send_many, body, args.small_mib, NUM_CLIENTS)
        attacks[f"{name}, {NUM_CLIENTS} of {args.small_mib:g} MiB"] = many
    attacks[f"{NUM_CONNECTIONS} idle connections"] = partial(connect_many, b"")
    half = head.encode() + half[: len(half) // 2]
    attacks[f"{NUM_CONNECTIONS} halves of a body"] = partial(connect_many, half)
    attacks["128 choices, 20 log-probabilities"] = ask_for_much
    return {name: run for name, run in attacks.items() if args.only in name}


def measure(attack: Callable[[int], Counter[str]], port: int, pid: int) -> dict[str, Any]:
    """Runs an attack."""
    watch = Watch(port, pid)
    watch.start()
    time.sleep(2)
    before, begun, quiet = watch.memory[-1], time.monotonic(), len(watch.delays)
    statuses = attack(port)
    seconds = time.monotonic() - begun
    time.sleep(_SETTLE_SECONDS)
    watch.stop()
    return {
        "answers": dict(statuses),
        "seconds": seconds,
        "quiet_health_milliseconds": 1000 * max(watch.delays[:quiet]),
        "slowest_health_milliseconds": 1000 * max(watch.delays[quiet:]),
        "refused_health": watch.refused,
        "memory_mib": {"before": before, "most": max(watch.memory), "after": watch.memory[-1]},
    }


def format_report(report: dict[str, Any]) -> str:
    """Writes the report in Markdown."""
    head = ["attack", "answers", "s", "slowest /health, ms (before)", "refused /health"]
    head += ["MiB before", "most", f"{_SETTLE_SECONDS:g} s after"]
    rows = [
        (
            name,
            ", ".join(f"{count} × {status}" for status, count in row["answers"].items()),
            f"{row['seconds']:.1f}",
            f"{row['slowest_health_milliseconds']:.0f} ({row['quiet_health_milliseconds']:.0f})",
            row["refused_health"],
            *(f"{row['memory_mib'][key]:.0f}" for key in ("before", "most", "after")),
        )
        for name, row in report["attacks"].items()
    ]
    return "\n".join(format_rows(head, rows))


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses arguments, measures, prints."""
    parser = make_parser(__doc__)
    parser.add_argument("--mib", type=float, default=7.4, help="size of the one large body")
    parser.add_argument("--small-mib", type=float, default=0.99, help="size of each of 16 bodies")
    parser.add_argument("--only", default="", metavar="PART", help="attacks with this in the name")
    args = parser.parse_args(arguments)
    attacks = list_attacks(args)
    with running(["-m", "infer.serve", "--batch-size", "4"]) as (pid, url):
        port = int(url.rpartition(":")[2])
        send(port, "POST", TEXT, b'{"prompt":"a","max_tokens":8}')
        bar = tqdm(attacks.items(), unit="attack")
        rows = {name: measure(attack, port, pid) for name, attack in bar}
    report = {"attacks": rows, "provenance": provenance()}
    show_report(report, format_report(report), args.output)


if __name__ == "__main__":
    run_program(main)
