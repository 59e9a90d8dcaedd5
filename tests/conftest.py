"""Shapes and types of lagrpo.core are checked at run time, in tests only: the hook must stand before the import."""

from collections.abc import Iterator

import jaxtyping
import pytest
import tiny
from running import note_processes

jaxtyping.install_import_hook("lagrpo.core", "beartype.beartype")


@pytest.fixture(autouse=True)
def processes_of_other_tests_are_known() -> None:
    note_processes()


@pytest.fixture
def unchecked() -> Iterator[None]:
    """As a user runs it, without the run-time checks: for tests of core's own errors about shapes."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(params=["c", "torch"])
def either_computation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The test runs twice: its tiny policies compute with lagrpo's kernels, and with PyTorch's operations in their
    place."""
    monkeypatch.setattr(tiny, "BACKEND", request.param)
    return request.param


@pytest.fixture
def with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels are loaded, without fail, and tiny policies compute with them."""
    from lagrpo.backends.cpu import kernels

    assert kernels.why_not() is None
    monkeypatch.setattr(tiny, "BACKEND", "c")
