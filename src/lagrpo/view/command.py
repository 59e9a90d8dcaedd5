"""`lagrpo view`: write the page, say what is in it, and serve it where that is asked for."""

from __future__ import annotations

import webbrowser
from collections.abc import Sequence
from pathlib import Path

from lagrpo.errors import SettingsError, refusing
from lagrpo.runs.files import write_atomically
from lagrpo.runs.reading import open_run
from lagrpo.terminal.text import count_of
from lagrpo.view.data import collect
from lagrpo.view.page import make_page
from lagrpo.view.serve import Server, Source

COMPLETIONS = 10_000
FILE = "view.html"


def view(runs: Sequence[Path], out: Path | None = None, completions: int = COMPLETIONS, opens: bool = False) -> Path:
    """Write the page of these runs to `out` (default: view.html of the run, or of the working directory for several),
    and open it in the browser where `opens`. Raises RunNotFoundError, or SettingsError for damaged files, an `out` that
    cannot be written and fewer completions than 0."""
    paths = _check(runs, completions)
    target = write_page(paths, collect(paths, completions), out)
    print(f"{target} ({_size(target.stat().st_size)}): open it in a browser, or copy it anywhere")
    if opens:
        webbrowser.open(target.absolute().as_uri())
    return target


def serve(
    runs: Sequence[Path],
    out: Path | None = None,
    completions: int = COMPLETIONS,
    opens: bool = False,
    port: int = 0,
) -> None:
    """Serve the page on 127.0.0.1 until Ctrl-C, and write it anew whenever the runs have changed and a browser asks."""
    paths = _check(runs, completions)

    def collect_and_write() -> bytes:
        packed = collect(paths, completions)
        write_page(paths, packed, out)
        return packed

    source = Source(paths, collect_and_write)
    source.read()
    with refusing(f"port {port}", OverflowError):
        server = Server(source, port)
    with server:
        print(f"{server.url}  shows {_named(paths)} and follows it; Ctrl-C ends", flush=True)
        if opens:
            webbrowser.open(server.url)
        server.serve_forever()


def write_page(paths: Sequence[Path], packed: bytes, out: Path | None = None) -> Path:
    """Write the page, whole or not at all, and return where it is."""
    target = out or (paths[0] / FILE if len(paths) == 1 else Path(FILE))
    if target.is_dir():
        raise SettingsError(f"{target} is a directory: name the file to write, --out {target / FILE}")
    with refusing():
        return write_atomically(target, make_page([path.name for path in paths], packed))


def _check(runs: Sequence[Path], completions: int) -> list[Path]:
    if not runs:
        raise SettingsError("view needs a run: lagrpo view runs/NAME")
    if completions < 0:
        raise SettingsError(f"--completions is {completions}: it is a number of completions, 0 or more")
    found = [open_run(run).path for run in runs]
    return list({path.resolve(): path for path in found}.values())


def _named(paths: Sequence[Path]) -> str:
    return str(paths[0]) if len(paths) == 1 else count_of(len(paths), "run")


def _size(size: int) -> str:
    return f"{size / 1e6:.1f} MB" if size >= 1e6 else f"{size / 1e3:.0f} kB"
