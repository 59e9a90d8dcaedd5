"""`lagrpo view`: writes the page, or serves it on 127.0.0.1 and follows the files of its runs.

The page is one HTML file without links, which asks no network. Scripts and styles are allowed by
their hashes alone. The data is base64, and names in the title are escaped; the script puts every
other text into the page as text.

The server answers this machine only, by its own names, and needs the token in the printed
address: neither another user of the machine, nor another web page, also not one that points its
name to 127.0.0.1.
"""

from __future__ import annotations

import base64
import hashlib
import html
import secrets
import sys
import threading
import webbrowser
from collections.abc import Callable, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from lagrpo.errors import SettingsError, as_settings_error, one_line
from lagrpo.logs import print_line, print_text, print_traceback
from lagrpo.runs.directory import check_writable
from lagrpo.runs.files import write_atomically
from lagrpo.runs.reading import open_run
from lagrpo.runs.recorded import distinct_names
from lagrpo.view.data import collect, take_stamp

STYLES = ("uplot.css", "style.css")
SCRIPTS = (
    "dom",
    "data",
    "terms",
    "units",
    "ages",
    "trend",
    "groups",
    "tokens",
    "rollouts",
    "evaluations",
    "settings",
    "diagnosis",
    "app",
)
HOST = "127.0.0.1"
FILE = "view.html"
HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


def view(
    runs: Sequence[Path],
    out: Path | None = None,
    completions: int = 10_000,
    *,
    opens: bool = False,
    port: int | None = None,
) -> Path:
    """Writes the page of these runs, and returns its file.

    runs           directories of runs
    out            the file; default: view.html in the run, or in the working directory for several
    completions    most completions on the page
    opens          opens the page in the browser
    port           serves the page until Ctrl-C (0: at a free port), and writes it again when the
                   runs have changed and a browser asks

    Raises RunNotFoundError, or SettingsError for damaged files, a port and an `out` that cannot be
    used.
    """
    if not runs:
        raise SettingsError("view needs a run: lagrpo view runs/NAME")
    paths = _distinct_paths(runs)
    if out is None:
        out = paths[0] / FILE if len(paths) == 1 else Path(FILE)
    with as_settings_error():
        check_writable(out.parent)

    def collect_and_write() -> bytes:
        packed = collect(paths, completions)
        with as_settings_error():
            page = make_page(distinct_names(paths), packed)
            write_atomically(out, page)
        return packed

    if port is None:
        collect_and_write()
        megabytes = out.stat().st_size / 1e6
        print_text(f"{out} ({megabytes:.1f} MB): open it in a browser, or copy it anywhere")
        if opens:
            webbrowser.open(out.absolute().as_uri())
        return out
    try:
        server = Server(paths, collect_and_write, port)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise SettingsError(f"--port {port}: {reason}; --port 0 takes a free one") from error
    with server:
        server.collect_newest()
        names = ", ".join(str(path) for path in paths)
        print_text(f"{server.url}  shows {names} and follows new batches; Ctrl-C stops", flush=True)
        if opens:
            webbrowser.open(server.url)
        server.serve_forever()
    return out


def _distinct_paths(runs: Sequence[Path]) -> list[Path]:
    """Returns the directories of the runs, each once. Raises RunNotFoundError."""
    paths_by_location = {}
    for run in runs:
        path = open_run(run).path
        paths_by_location[path.resolve()] = path
    return list(paths_by_location.values())


def make_page(names: Sequence[str], packed: bytes, *, live: bool = False) -> str:
    """Returns the page of runs with these names.

    `live` lets the page ask the server that it comes from for newer data.
    """
    scripts = "\n".join(_asset(f"{name}.js") for name in SCRIPTS)
    style = "\n".join(_asset(name) for name in STYLES)
    library = _asset("uplot.js")
    # One function around all scripts, so that their names do not collide with the library's.
    program = f'(() => {{\n"use strict";\n{scripts}\n}})();'
    connect = "'self'" if live else "'none'"
    policy = (
        f"default-src 'none'; script-src {_hash(library)} {_hash(program)}; "
        f"style-src {_hash(style)}; connect-src {connect}; base-uri 'none'; form-action 'none'"
    )
    # Names of directories that are not UTF-8 have lone surrogates.
    title = f"{', '.join(names)} · lagrpo view".encode(errors="replace").decode()
    return _asset("page.html").format(
        live=" data-live" if live else "",
        policy=policy,
        title=html.escape(title),
        style=style,
        data=base64.b64encode(packed).decode(),
        library=library,
        program=program,
    )


def _asset(name: str) -> str:
    asset = files("lagrpo.view").joinpath("assets", name)
    return asset.read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """Returns the source expression of a script or style in a Content-Security-Policy."""
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


class Server(ThreadingHTTPServer):
    """The server of a page.

    It answers /?token=T with the page, and /data?token=T&stamp=S with data newer than stamp S, or
    204 without any. T is the token in its `url`. `collect` returns the packed data.
    """

    daemon_threads = True

    def __init__(self, paths: Sequence[Path], collect: Callable[[], bytes], port: int = 0) -> None:
        self.paths = paths
        self.collect = collect
        super().__init__((HOST, port), Handler)
        self.token = secrets.token_urlsafe(24)
        self.url = f"http://{HOST}:{self.server_port}/?token={self.token}"
        self.hosts = {f"{name}:{self.server_port}" for name in (HOST, "localhost")}
        self._collecting = threading.Lock()
        self._newest: tuple[str, bytes] = ("", b"")  # the data, after the stamp of the runs

    def collect_newest(self, stamp_of_page: str | None = None) -> bytes | None:
        """Returns the packed data; None if a page with this stamp has the newest already.

        The data is collected once after each change: requests at the same time share it.
        """
        with self._collecting:
            stamp = take_stamp(self.paths)
            if stamp == stamp_of_page:
                return None
            if stamp != self._newest[0]:
                self._newest = (stamp, self.collect())
            return self._newest[1]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Prints an error on one line, unless the browser closed its connection."""
        error = sys.exception()
        if error is None or isinstance(error, ConnectionError):
            return
        print_traceback(error)
        print_line(f"a request failed: {type(error).__name__}: {one_line(str(error))}")


class Handler(BaseHTTPRequestHandler):
    """The answer to one request."""

    timeout = 30
    """seconds for a request to arrive"""

    @property
    def view_server(self) -> Server:
        """The server of the page, under its own type."""
        assert isinstance(self.server, Server)
        return self.server

    def do_GET(self) -> None:
        try:
            url = urlsplit(self.path)
        except ValueError as error:
            self._refuse(HTTPStatus.BAD_REQUEST, f"this is not an address: {one_line(str(error))}")
            return
        query = parse_qs(url.query)
        refusal = self._find_refusal(query.get("token", [""])[0])
        if refusal:
            self._refuse(HTTPStatus.FORBIDDEN, refusal)
            return
        if url.path not in ("/", "/data"):
            self._refuse(HTTPStatus.NOT_FOUND, "the only page is /")
            return
        is_data = url.path == "/data"
        stamp_of_page = query.get("stamp", [None])[0] if is_data else None
        try:
            packed = self.view_server.collect_newest(stamp_of_page)
        except (OSError, ValueError) as error:
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, one_line(str(error)))
            return
        if packed is None:
            self._answer(HTTPStatus.NO_CONTENT)
            return
        if is_data:
            self._answer(HTTPStatus.OK, "application/octet-stream", packed)
            return
        page = make_page(distinct_names(self.view_server.paths), packed, live=True)
        self._answer(HTTPStatus.OK, "text/html; charset=utf-8", page.encode())

    def _find_refusal(self, token: str) -> str:
        """Returns the reason to refuse this request; "" without one."""
        # The page of another site whose name points to 127.0.0.1 sends that name here.
        if self.headers.get("Host") not in self.view_server.hosts:
            return "this server answers at 127.0.0.1 only"
        # Browsers say which page a request comes from; other programs say nothing.
        if self.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
            return "another page may not ask: type the address that lagrpo view printed"
        if not secrets.compare_digest(token.encode(), self.view_server.token.encode()):
            return "the token is missing or wrong: use the whole address that lagrpo view printed"
        return ""

    def _refuse(self, status: HTTPStatus, reason: str) -> None:
        text = f"{reason}\n".encode(errors="replace")
        self._answer(status, "text/plain; charset=utf-8", text)

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
        """Prints nothing for a request."""
