"""The page on 127.0.0.1, with newer data when files of its runs change. Only this machine is answered, and only by the
names of this machine: a page of a stranger cannot read it through a name that it points to 127.0.0.1."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from lagrpo.errors import one_line
from lagrpo.view.data import take_stamp
from lagrpo.view.page import make_page

HOST = "127.0.0.1"
HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
}


class Source:
    """The data of runs, collected anew by `collect` when one of their files has changed."""

    def __init__(self, paths: Sequence[Path], collect: Callable[[], bytes]) -> None:
        self.names = [path.name for path in paths]
        self._paths, self._collect, self._lock = paths, collect, threading.Lock()
        self._stamp, self._packed = "", b""

    def read(self) -> tuple[str, bytes]:
        """The stamp of the files, and the data. Raises as `data.collect` does."""
        with self._lock:
            if (stamp := take_stamp(self._paths)) != self._stamp:
                self._packed = self._collect()
                self._stamp = stamp
            return self._stamp, self._packed


class Server(ThreadingHTTPServer):
    """Answers / with the page and /data?stamp=S with newer data than that of stamp S: 204 where there is none."""

    daemon_threads = True

    def __init__(self, source: Source, port: int = 0) -> None:
        self.source = source
        super().__init__((HOST, port), Handler)

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server_port}/"

    @property
    def hosts(self) -> set[str]:
        """What a request may call this server."""
        return {f"{name}:{self.server_port}" for name in (HOST, "localhost")}


class Handler(BaseHTTPRequestHandler):
    """One request."""

    server: Server
    timeout = 30  # seconds for a request to arrive

    def do_GET(self) -> None:
        if self.headers.get("Host") not in self.server.hosts:
            return self._answer(HTTPStatus.FORBIDDEN, "text/plain", b"this server answers as 127.0.0.1 only\n")
        url = urlsplit(self.path)
        if url.path not in ("/", "/data"):
            return self._answer(HTTPStatus.NOT_FOUND, "text/plain", b"there is / and nothing else\n")
        try:
            stamp, packed = self.server.source.read()
        except (OSError, ValueError) as error:
            text = one_line(str(error)).encode(errors="replace")
            return self._answer(HTTPStatus.SERVICE_UNAVAILABLE, "text/plain; charset=utf-8", text)
        if url.path == "/":
            page = make_page(self.server.source.names, packed, live=True)
            return self._answer(HTTPStatus.OK, "text/html; charset=utf-8", page.encode())
        if parse_qs(url.query).get("stamp") == [stamp]:
            return self._answer(HTTPStatus.NO_CONTENT)
        return self._answer(HTTPStatus.OK, "application/octet-stream", packed)

    def _answer(self, status: HTTPStatus, kind: str = "", body: bytes = b"") -> None:
        self.send_response(status)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        if kind:
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Requests are not printed."""
