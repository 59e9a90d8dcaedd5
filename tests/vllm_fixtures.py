"""A real vLLM server for the tests of a module, which says `pytest_plugins = ["vllm_fixtures"]`. A module may have a
`model` of its own, and says in ADAPTERS which its
server takes, and in OPTIONS what else it is started with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm_servers import DEADLINES, start, tiny_directory

from lagrpo.rollout.vllm.connecting import KEY
from lagrpo.rollout.vllm.process import StartedServer
from lagrpo.rollout.vllm.server import Server


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_directory(tmp_path_factory.mktemp("vllm"))


@pytest.fixture(scope="module")
def server(model: Path, request: pytest.FixtureRequest) -> Iterator[StartedServer]:
    own = getattr(request.module, "ADAPTERS", (0, 0)), getattr(request.module, "OPTIONS", ())
    server = start(model, model.parent / "vllm.log", "float32", *own)
    yield server
    server.close()


@pytest.fixture
def attached(server: StartedServer, monkeypatch: pytest.MonkeyPatch) -> Server:
    """The server as somebody else's: reached by URL and key, not ended by a sampler's close."""
    monkeypatch.setenv(KEY, server.key)
    return Server(server.url, server.key, DEADLINES)
