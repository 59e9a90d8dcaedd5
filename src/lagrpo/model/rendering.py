"""Renders chat templates in a process of its own (see chat.py): transformers' own rendering, with limits.

This imports no torch, and of transformers only the three modules that render, so the process is ready after a few
tenths of a second. A reply is JSON, {"text": …} or {"error": …}: the parent unpickles nothing from here."""

from __future__ import annotations

import importlib.machinery
import json
import os
import sys
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from lagrpo.errors import visible
from lagrpo.workers import die_with_parent, limit_cpu_time

LONGEST = 2**22  # characters of a rendered prompt
_LONGEST_REASON = 300
_SPARE_SECONDS = 5


def serve(connection: Connection, memory: int, deadline: float) -> None:
    """Answer requests (template, special tokens, messages) until the other side closes; the first reply is empty."""
    threading.Thread(target=die_with_parent, daemon=True).start()
    render = load_renderer()
    limit_memory(memory)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what C code prints when it fails: the parent reports it in one line
    connection.send_bytes(b"{}")
    while True:
        try:
            template, special, messages = connection.recv()
        except EOFError:
            return
        limit_cpu_time(deadline + _SPARE_SECONDS)
        connection.send_bytes(json.dumps(answer(render, memory, template, special, messages)).encode())


def answer(
    render: Callable[..., Any], memory: int, template: str, special: Mapping[str, Any], messages: Sequence[Any]
) -> dict[str, str]:
    try:
        (text,), _ = render(conversations=[messages], chat_template=template, add_generation_prompt=True, **special)
        if len(text) > LONGEST:
            return {"error": f"it makes a text of {len(text)} characters, more than {LONGEST}"}
        return {"text": text}
    except MemoryError:
        return {"error": f"it needs more than {memory >> 20} MiB of memory"}
    except Exception as error:  # noqa: BLE001 - a template can raise anything
        kind = "" if type(error).__name__.startswith("Template") else f"{type(error).__name__}: "
        return {"error": visible(" ".join(f"{kind}{error}".split())[:_LONGEST_REASON])}


def load_renderer() -> Callable[..., Any]:
    """transformers' render_jinja_template, without its packages' start-up code (most of a second) if that works."""
    before = set(sys.modules)
    try:
        for name in ("transformers", "transformers.utils"):
            _import_bare(name)
        from transformers.utils.chat_template_utils import render_jinja_template
    except (ImportError, AttributeError):
        for name in [name for name in set(sys.modules) - before if name.startswith("transformers")]:
            del sys.modules[name]
        from transformers.utils.chat_template_utils import render_jinja_template
    return render_jinja_template


def _import_bare(name: str) -> None:
    """Make the modules of a package importable without running its __init__."""
    parent = sys.modules.get(name.rpartition(".")[0])
    spec = importlib.machinery.PathFinder.find_spec(name, parent.__path__ if parent else None)
    if spec is None or spec.submodule_search_locations is None:
        raise ImportError(name)
    package = types.ModuleType(name)
    package.__path__, package.__spec__ = list(spec.submodule_search_locations), spec
    sys.modules[name] = package


def limit_memory(memory: int) -> None:
    """Limit this process to `memory` more bytes of address space. On Linux only: macOS does not enforce such limits."""
    if sys.platform != "linux":
        return
    import resource

    with open("/proc/self/statm") as statm:
        pages = int(statm.read().split()[0])
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = pages * os.sysconf("SC_PAGE_SIZE") + memory
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
