"""`lagrpo view`: write the page, or serve it on 127.0.0.1 with newer data when files of its runs change.

The page is one HTML file without links, which asks no network. Scripts and styles are allowed by their hashes alone.
The data is base64, and names in the title are escaped; the script puts every other text into the page as text.

Only this machine is answered, and only by the names of this machine: another web page cannot read the server through a
name that it points to 127.0.0.1."""

from __future__ import annotations

import base64
import hashlib
import html
import webbrowser
from collections.abc import Callable, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from lagrpo.errors import SettingsError, as_settings_error, one_line
from lagrpo.runs.files import write_atomically
from lagrpo.runs.reading import open_run
from lagrpo.view.data import collect, take_stamp

STYLES = ("uplot.css", "style.css")
SCRIPTS = ("dom", "data", "trend", "groups", "tokens", "rollouts", "evaluations", "settings", "app")
HOST, FILE = "127.0.0.1", "view.html"
HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


def view(
    runs: Sequence[Path],
    out: Path | None = None,
    completions: int = 10_000,
    opens: bool = False,
    port: int | None = None,
) -> Path:
    """Write the page of these runs to `out` (default: view.html of the run, or of the working directory for several),
    and open it in the browser if asked to. With a port (0: a free one) serve it until Ctrl-C, and write it again when
    the runs have changed and a browser asks. Raises RunNotFoundError, or SettingsError for damaged files, a port and an
    `out` that cannot be used."""
    if not runs:
        raise SettingsError("view needs a run: lagrpo view runs/NAME")
    found = [open_run(run).path for run in runs]
    paths = list({path.resolve(): path for path in found}.values())
    target = out or (paths[0] / FILE if len(paths) == 1 else Path(FILE))

    def collect_and_write() -> bytes:
        packed = collect(paths, completions)
        with as_settings_error():
            write_atomically(target, make_page([path.name for path in paths], packed))
        return packed

    collect_and_write()
    if port is None:
        print(
            f"{target} ({target.stat().st_size / 1e6:.1f} MB): open it in a browser, or copy it anywhere"
        )
        if opens:
            webbrowser.open(target.absolute().as_uri())
        return target
    with as_settings_error(f"port {port}", OverflowError):
        server = Server(paths, collect_and_write, port)
    with server:
        print(
            f"{server.url}  shows {', '.join(map(str, paths))} and follows new batches; Ctrl-C stops",
            flush=True,
        )
        if opens:
            webbrowser.open(server.url)
        server.serve_forever()
    return target


def make_page(names: Sequence[str], packed: bytes, live: bool = False) -> str:
    """The page of runs with these names; `live` lets it ask the server that it comes from for newer data."""
    scripts = "\n".join(_asset(f"{name}.js") for name in SCRIPTS)
    style, library = "\n".join(map(_asset, STYLES)), _asset("uplot.js")
    program = f'(() => {{\n"use strict";\n{scripts}\n}})();'  # one function: its names are its own
    connect = "'self'" if live else "'none'"
    policy = (
        f"default-src 'none'; script-src {_hash(library)} {_hash(program)}; style-src {_hash(style)}; "
        f"connect-src {connect}; base-uri 'none'; form-action 'none'"
    )
    title = html.escape(f"{', '.join(names)} · lagrpo view".encode(errors="replace").decode())
    data, marks = base64.b64encode(packed).decode(), " data-live" if live else ""
    parts = {"title": title, "style": style, "data": data, "library": library, "program": program}
    return _asset("page.html").format(live=marks, policy=policy, **parts)


def _asset(name: str) -> str:
    return files("lagrpo.view").joinpath("assets", name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


class Server(ThreadingHTTPServer):
    """Answers / with the page of these runs and /data?stamp=S with data newer than stamp S, or 204 without any."""

    daemon_threads = True

    def __init__(self, paths: Sequence[Path], collect: Callable[[], bytes], port: int = 0) -> None:
        self.paths, self.collect = paths, collect
        super().__init__((HOST, port), Handler)
        self.url = f"http://{HOST}:{self.server_port}/"
        self.hosts = {f"{name}:{self.server_port}" for name in (HOST, "localhost")}


class Handler(BaseHTTPRequestHandler):
    """One request."""

    server: Server
    timeout = 30  # seconds for a request to arrive

    def do_GET(self) -> None:
        url, paths = urlsplit(self.path), self.server.paths
        if self.headers.get("Host") not in self.server.hosts:
            return self._answer(
                HTTPStatus.FORBIDDEN, "text/plain", b"this server answers at 127.0.0.1 only\n"
            )
        if url.path not in ("/", "/data"):
            return self._answer(HTTPStatus.NOT_FOUND, "text/plain", b"the only page is /\n")
        if url.path == "/data" and parse_qs(url.query).get("stamp") == [take_stamp(paths)]:
            return self._answer(HTTPStatus.NO_CONTENT)
        try:
            packed = self.server.collect()
        except (OSError, ValueError) as error:
            text = one_line(str(error)).encode(errors="replace")
            return self._answer(HTTPStatus.SERVICE_UNAVAILABLE, "text/plain; charset=utf-8", text)
        if url.path == "/data":
            return self._answer(HTTPStatus.OK, "application/octet-stream", packed)
        page = make_page([path.name for path in paths], packed, live=True)
        self._answer(HTTPStatus.OK, "text/html; charset=utf-8", page.encode())

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
