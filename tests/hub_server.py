"""A Hub of a few models on this machine: the endpoints that fetching a snapshot uses, over HTTP."""

import hashlib
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_of_the_tests"
_LARGE = (".safetensors", ".bin", ".model")


@dataclass
class Hub:
    """Models by id, and what was asked for."""

    url: str = ""
    models: dict[str, Path] = field(default_factory=dict)  # folders
    gated: set[str] = field(default_factory=set)  # shown to all, given to those who send TOKEN
    private: set[str] = field(default_factory=set)  # not even shown without TOKEN
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)  # method, path, token
    num_bytes: Counter[str] = field(default_factory=Counter)  # sent in the bodies of every model


@contextmanager
def serve(hub: Hub) -> Iterator[Hub]:
    """Runs the server in a thread."""
    with http_server(type("Handler", (_Handler,), {"hub": hub})) as hub.url:
        yield hub


@contextmanager
def http_server(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Serves in a thread; gives the address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = Thread(target=server.serve_forever, args=[0.01], daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def run_with_hub(hub_url: str, home: Path, code: str, *arguments: str, **variables: str) -> dict:
    """Runs code in a new process that fetches from a Hub; returns the JSON of its last line.

    A new one, because huggingface_hub reads most of its settings when it is imported.
    """
    env = {key: value for key, value in os.environ.items() if "proxy" not in key.lower()}
    env |= {"HF_ENDPOINT": hub_url, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0"} | variables
    env |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    command, root = [sys.executable, "-c", code, *arguments], Path(__file__).parents[1]
    result = subprocess.run(command, capture_output=True, text=True, cwd=root, env=env)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _answer(self, *, with_body: bool) -> None:
        path = unquote(urlsplit(self.path).path).strip("/")
        parts = path.removeprefix("api/models/").split("/")
        if len(parts) < 4:  # what the client asks on its own account
            self.send_error(404)
            return
        token = (self.headers.get("authorization") or "").removeprefix("Bearer ") or None
        self.hub.requests.append((self.command, path, token))
        model, (kind, revision, *name) = "/".join(parts[:2]), parts[2:]
        status, headers, body = self._find(model, kind, revision, "/".join(name), token)
        wanted = (self.headers.get("range") or "").removeprefix("bytes=")
        if status == 200 and wanted:
            first, last = map(int, wanted.split("-"))
            status, body = 206, body[first : last + 1]
        self.send_response(status)
        for key, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(key, value)
        self.end_headers()
        if with_body:
            self.hub.num_bytes[model] += len(body)
            self.wfile.write(body)

    def _find(
        self, model: str, kind: str, revision: str, name: str, token: str | None
    ) -> tuple[int, dict[str, str], bytes]:
        hub = self.hub
        if model not in hub.models or (model in hub.private and token != TOKEN):
            return 401, {"X-Error-Code": "RepoNotFound"}, b"{}"
        if revision not in ("main", COMMIT):
            return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
        files = {path.name: path.read_bytes() for path in hub.models[model].iterdir()}
        if kind == "revision":
            return 200, {}, json.dumps({"id": model, "sha": COMMIT}).encode()
        if kind == "tree":
            entries = [_tree_entry(key, content) for key, content in files.items()]
            return 200, {}, json.dumps(entries).encode()
        assert kind == "resolve", kind
        if model in hub.gated and token != TOKEN:
            return 403, {"X-Error-Code": "GatedRepo"}, b"{}"
        if name not in files:
            return 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT}, b""
        content = files[name]
        etag = _tree_entry(name, content).get("lfs", {}).get("oid") or _git_sha1(content)
        return 200, {"X-Repo-Commit": COMMIT, "ETag": f'"{etag}"'}, content


def _tree_entry(name: str, content: bytes) -> dict:
    entry = {"type": "file", "path": name, "size": len(content), "oid": _git_sha1(content)}
    if name.endswith(_LARGE):
        sha256 = hashlib.sha256(content).hexdigest()
        entry["lfs"] = {"oid": sha256, "size": len(content), "pointerSize": 134}
    return entry


def _git_sha1(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
