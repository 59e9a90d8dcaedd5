"""Several values in one test."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any


def each(
    names: str | tuple[str, ...], values: Iterable[Any]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """As pytest.mark.parametrize, but the test is one case, with one set of fixtures. A failure says for which
    values."""
    names, values = (names,) if isinstance(names, str) else names, list(values)

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(**fixtures: Any) -> None:
            for value in values:
                given = dict(zip(names, value if len(names) > 1 else (value,), strict=True))
                try:
                    test(**fixtures, **given)
                except Exception as error:
                    error.add_note(f"with {given}")
                    raise

        signature = inspect.signature(test)
        rest = [p for name, p in signature.parameters.items() if name not in names]
        run.__signature__ = signature.replace(parameters=rest)  # type: ignore[attr-defined]
        return run

    return decorate
