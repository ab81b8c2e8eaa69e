"""A chat server with OpenAI's interface on this machine, with scripted answers."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from threading import Lock
from typing import Any

from hub_server import http_server

Reply = tuple[int, Any]


def said(text: Any, reason: str = "stop", **fields: Any) -> Reply:
    """An answer; its message has these fields, too."""
    choice = {"index": 0, "message": {"role": "assistant", "content": text, **fields}}
    return 200, {"choices": [choice | {"finish_reason": reason}]}


def echo(body: dict[str, Any]) -> Reply:
    """Answers with what was asked last, and the seed."""
    return said(f"<{body['messages'][-1]['content']}:{body['seed']}>")


@dataclass
class ChatServer:
    """A server, and what it was asked."""

    url: str = ""
    reply: Callable[[dict[str, Any]], Reply] = echo  # to a body; status 0 hangs up
    models: Reply = (200, {"data": [{"id": "tiny"}, {"id": "other"}]})
    headers: dict[str, str] = field(default_factory=dict)  # further ones of failures
    bodies: list[dict[str, Any]] = field(default_factory=list)  # of all requests for an answer
    keys: list[str | None] = field(default_factory=list)  # header Authorization of all requests
    most: int = 0  # requests that were under way together
    under_way: int = 0
    lock: Any = field(default_factory=Lock)

    @contextmanager
    def counted(self) -> Iterator[None]:
        with self.lock:
            self.under_way += 1
            self.most = max(self.most, self.under_way)
        try:
            yield
        finally:
            with self.lock:
                self.under_way -= 1


@contextmanager
def serve(chat: ChatServer) -> Iterator[ChatServer]:
    """Runs the server in a thread."""
    with http_server(type("Handler", (_Handler,), {"chat": chat})) as address:
        chat.url = f"{address}/v1"
        yield chat


class _Handler(BaseHTTPRequestHandler):
    chat: ChatServer

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        self.chat.keys.append(self.headers["Authorization"])
        self._send(*(self.chat.models if self.path == "/v1/models" else (404, {})))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.chat.counted():
            self.chat.bodies.append(body)
            self.chat.keys.append(self.headers["Authorization"])
            known = self.path in ("/v1/chat/completions", "/v1/completions")
            reply = self.chat.reply(body) if known else (404, {})
        self._send(*reply)

    def _send(self, status: int, content: Any) -> None:
        if status == 0:
            self.close_connection = True
            return
        content = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in self.chat.headers.items() if status != 200 else ():
            self.send_header(name, value)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
