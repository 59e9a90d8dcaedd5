"""Shapes and types of lagrpo.core are checked at run time, in tests only: the hook must stand before the import."""

from collections.abc import Iterator

import jaxtyping
import pytest

jaxtyping.install_import_hook("lagrpo.core", "beartype.beartype")


@pytest.fixture
def unchecked() -> Iterator[None]:
    """As a user runs it, without the run-time checks: for tests of core's own errors about shapes."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
