"""The HTML around the data: one file without links, which no policy lets reach a network.

Scripts and styles are allowed by their hashes alone. The data is base64, and names in the title are escaped; the
script puts every other text into the page as text.
"""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Sequence
from importlib.resources import files

STYLES = ("uplot.css", "style.css")
SCRIPTS = ("dom", "data", "trend", "groups", "tokens", "rollouts", "evaluations", "settings", "app")

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main id="page"{live}><p class="loading">This page needs JavaScript, and a browser of 2023 or later.</p></main>
<script type="application/octet-stream" id="data">{data}</script>
<script>{library}</script>
<script>{program}</script>
</body>
</html>
"""


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
    return PAGE.format(live=marks, policy=policy, title=title, style=style, data=data, library=library, program=program)


def _asset(name: str) -> str:
    return files("lagrpo.view").joinpath("assets", name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
