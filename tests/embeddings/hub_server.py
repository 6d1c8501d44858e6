"""A hub on this machine: documents from one server, large files by redirect from a storage server with ranges."""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

TOKEN = "hf_secret"


@dataclass
class Served:
    """What a server was asked for and how many bytes of content it sent."""

    paths: list[str] = field(default_factory=list)
    tokens: list[str | None] = field(default_factory=list)
    ranges: list[str | None] = field(default_factory=list)
    bytes: int = 0


@dataclass
class LocalHub:
    """Two servers: ``endpoint`` is the hub's; its repositories are the folders below ``root``."""

    root: Path
    endpoint: str = ""
    storage_url: str = ""
    needs_token: bool = False
    ranges: bool = True  # whether the storage server honours them
    cut: int | None = None  # bytes after which the storage server hangs up
    hub: Served = field(default_factory=Served)
    storage: Served = field(default_factory=Served)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    local: LocalHub  # set on the class that a hub derives
    served: Served

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def note(self) -> None:
        self.served.paths.append(self.path)
        self.served.tokens.append(self.headers.get("Authorization"))
        self.served.ranges.append(self.headers.get("Range"))

    def answer(self, status: int, content: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.served.bytes += len(content)
        self.wfile.write(content)


class _HubHandler(_Handler):
    def do_GET(self) -> None:
        self.note()
        match = re.fullmatch(r"/([\w-]+/[\w-]+)/resolve/([\w%.-]+)/([\w.-]+)", self.path)
        if match is None:
            return self.answer(404)
        repository, revision, file = match.groups()
        if repository == "old/name":  # renamed: a redirect within the hub
            return self.answer(307, headers={"Location": f"/org/model/resolve/{revision}/{file}"})
        path = self.local.root / repository / file
        if self.local.needs_token and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.answer(401)
        if revision not in ("main", "refs%2Fpr%2F1") or not path.is_file():
            return self.answer(404)
        if path.suffix == ".safetensors":
            location = f"{self.local.storage_url}/{repository}/{file}?signature=x"
            return self.answer(302, headers={"Location": location})
        return self.answer(200, path.read_bytes())


class _StorageHandler(_Handler):
    def do_GET(self) -> None:
        self.note()
        content = (self.local.root / self.path.partition("?")[0].lstrip("/")).read_bytes()
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if asked is None or not self.local.ranges:
            return self.answer(200, content)
        start, end = int(asked[1]), min(int(asked[2]), len(content) - 1)
        if start > end:
            return self.answer(416)
        part = content[start : end + 1]
        headers = {"Content-Range": f"bytes {start}-{end}/{len(content)}", "Content-Length": str(len(part))}
        self.close_connection = self.local.cut is not None
        return self.answer(206, part[: self.local.cut], headers)


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up on an answer it did not ask for is no error."""


@contextmanager
def local_hub(root: Path) -> Iterator[LocalHub]:
    """Both servers, until the block is left."""
    local = LocalHub(root)
    servers = []
    for base, served in ((_HubHandler, local.hub), (_StorageHandler, local.storage)):
        handler = type(base.__name__, (base,), {"local": local, "served": served})
        server = _Server(("127.0.0.1", 0), handler)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        servers.append(server)
    # Two names of this machine, as hub and storage have two.
    local.endpoint = f"http://127.0.0.1:{servers[0].server_port}"
    local.storage_url = f"http://localhost:{servers[1].server_port}"
    try:
        yield local
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()
