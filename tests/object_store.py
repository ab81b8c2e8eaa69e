"""A stand-in for Google Cloud Storage: objects in a folder, without folders, locks or renames.

Paths reach it as they reach the real one: `epath`'s through fsspec, arrays through
TensorStore's own driver and an HTTP server of this process. Folders are common beginnings of names,
so an empty one does not exist. gcsfs, which talks to the real store, is not part of it.
"""

import io
import json
import os
import sys
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from threading import Lock
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

import fsspec
from etils.epath import backend
from hub_server import http_server
from orbax.checkpoint._src.path import gcs_utils


class Objects:
    """Objects by name, `bucket/a/b`, each in a file."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.lock = folder, Lock()
        folder.mkdir(parents=True, exist_ok=True)

    def file(self, name: str) -> Path:
        return self.folder / quote(name, safe="")

    def names(self, prefix: str = "") -> list[str]:
        names = (unquote(file.name) for file in self.folder.iterdir())
        return sorted(name for name in names if name.startswith(prefix) and "\0" not in name)

    def get(self, name: str) -> bytes | None:
        file = self.file(name)
        return file.read_bytes() if file.is_file() else None

    def put(self, name: str, content: bytes) -> None:
        partial = self.file(f"\0{name}")  # whoever reads finds the object whole
        partial.write_bytes(content)
        partial.replace(self.file(name))

    def generation(self, name: str) -> int:
        """Number of an object's version; 0: there is none."""
        file = self.file(name)
        return file.stat().st_mtime_ns if file.is_file() else 0

    def about(self, bucket: str, name: str) -> dict[str, str]:
        """The store's JSON about an object, as far as TensorStore reads it."""
        number = str(self.generation(f"{bucket}/{name}"))
        return {"name": name, "bucket": bucket, "generation": number}


# --------------------------------------------------------------------------------------------------
# What TensorStore asks


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    objects: Objects

    def do_GET(self) -> None:
        bucket, name, query = self._asked()
        if bucket is None:
            self._answer(404)
        elif name is None:
            self._list(bucket, query)
        else:
            self._read(f"{bucket}/{name}", query)

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        bucket, _, query = self._asked()
        name = query["name"]
        with self.objects.lock:
            if self._is_wanted(f"{bucket}/{name}", query):
                self.objects.put(f"{bucket}/{name}", content)
                self._answer(200, json.dumps(self.objects.about(str(bucket), name)).encode())

    def do_DELETE(self) -> None:
        bucket, name, query = self._asked()
        with self.objects.lock:
            if self._is_wanted(f"{bucket}/{name}", query):
                is_there = self.objects.generation(f"{bucket}/{name}")
                self.objects.file(f"{bucket}/{name}").unlink(missing_ok=True)
                self._answer(204 if is_there else 404)

    def _asked(self) -> tuple[str | None, str | None, dict[str, str]]:
        """Bucket and object of the address, and its query."""
        address = urlsplit(self.path)
        parts = address.path.removeprefix("/upload").split("/")  # /storage/v1/b/BUCKET/o/NAME
        query = {key: values[0] for key, values in parse_qs(address.query).items()}
        if parts[1:2] != ["storage"]:
            return None, None, query
        return parts[4], unquote(parts[6]) if len(parts) > 6 else None, query

    def _is_wanted(self, full: str, query: dict[str, str]) -> bool:
        want = query.get("ifGenerationMatch")
        if want is not None and int(want) != self.objects.generation(full):
            self._answer(412)
            return False
        return True

    def _list(self, bucket: str, query: dict[str, str]) -> None:
        first, end = query.get("startOffset", ""), query.get("endOffset")
        names = [name.partition("/")[2] for name in self.objects.names(f"{bucket}/")]
        listed = [name for name in names if name >= first and (end is None or name < end)]
        items = [self.objects.about(bucket, name) for name in listed]
        self._answer(200, json.dumps({"kind": "storage#objects", "items": items}).encode())

    def _read(self, full: str, query: dict[str, str]) -> None:
        with self.objects.lock:
            content, number = self.objects.get(full), self.objects.generation(full)
        if content is None:
            return self._answer(404)
        about = {"x-goog-generation": str(number)}
        asked = self.headers.get("Range")
        if asked is None:
            return self._answer(200, content, about)
        first, last = asked.removeprefix("bytes=").split("-")
        begin = int(first) if first else len(content) - int(last)
        end = int(last) + 1 if first and last else len(content)
        about["Content-Range"] = f"bytes {begin}-{min(end, len(content)) - 1}/{len(content)}"
        return self._answer(206, content[begin:end], about)

    def _answer(self, code: int, content: bytes = b"", about: dict[str, str] | None = None) -> None:
        self.send_response(code)
        for key, value in (about or {}).items():
            self.send_header(key, value)
        if code != 204:
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


# --------------------------------------------------------------------------------------------------
# What epath asks


class _Upload(io.BytesIO):
    """Becomes an object when it is closed."""

    def __init__(self, objects: Objects, name: str) -> None:
        super().__init__()
        self._objects, self._name = objects, name

    def close(self) -> None:
        if not self.closed:
            self._objects.put(self._name, self.getvalue())
        super().close()


class FakeStorage(fsspec.AbstractFileSystem):
    protocol = ("gs", "gcs")
    cachable = False
    objects: Objects

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        name = self._strip_protocol(path)
        content = self.objects.get(name)
        if content is not None:
            return {"name": name, "type": "file", "size": len(content)}
        if self.objects.names(f"{name}/"):
            return {"name": name, "type": "directory", "size": 0}
        raise FileNotFoundError(path)

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        name = self._strip_protocol(path)
        if self.info(name)["type"] == "file":
            entries = [name]
        else:
            inside = (one[len(name) + 1 :] for one in self.objects.names(f"{name}/"))
            entries = sorted({f"{name}/{rest.partition('/')[0]}" for rest in inside})
        return [self.info(entry) for entry in entries] if detail else entries

    def _open(self, path: str, mode: str = "rb", **_: Any) -> Any:
        name = self._strip_protocol(path)
        if mode == "wb":
            return _Upload(self.objects, name)
        if mode != "rb":
            raise NotImplementedError(f"mode {mode}: objects are written whole")
        content = self.objects.get(name)
        if content is None:
            raise FileNotFoundError(path)
        return io.BytesIO(content)

    def rm_file(self, path: str) -> None:
        self.objects.file(self._strip_protocol(path)).unlink(missing_ok=True)


# --------------------------------------------------------------------------------------------------


_SERVING = ExitStack()


def install(folder: Path) -> Objects:
    """Makes gs:// the objects of a folder, until this process ends."""
    objects = Objects(folder)
    _Handler.objects = FakeStorage.objects = objects
    url = _SERVING.enter_context(http_server(_Handler))
    place = url.removeprefix("http://")
    os.environ |= {"TENSORSTORE_GCS_HTTP_URL": url, "GCE_METADATA_ROOT": place}
    for name in FakeStorage.protocol:
        fsspec.register_implementation(name, FakeStorage, clobber=True)
    backend.fsspec_backend._get_filesystem.cache_clear()
    gcs_utils.get_bucket = lambda name: SimpleNamespace(name=name)  # google.cloud, to delete
    return objects


if __name__ == "__main__":  # python tests/object_store.py FOLDER MODULE ARGUMENT...
    import runpy

    install(Path(sys.argv[1]))
    del sys.argv[:2]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
