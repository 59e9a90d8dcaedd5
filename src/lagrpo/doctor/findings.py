"""What is said of one thing, and how looking at it never ends the report."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from lagrpo.errors import one_line

State = Literal["ok", "absent", "broken"]
"""absent: training runs without it, and lacks what it is for. broken: training cannot run."""
Look = Callable[[], Iterable["Finding"]]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. `purpose` and `remedy` are said of what is absent or broken: what it is for, and the
    command that mends it."""

    name: str
    found: str
    state: State = "ok"
    purpose: str = ""
    remedy: str = ""


def look_at(looks: Iterable[Look]) -> Iterator[Finding]:
    """What each of them finds. One that raises is a finding, too: whatever is wrong, the rest is said."""
    for look in looks:
        try:
            yield from look()
        except Exception as error:  # noqa: BLE001 - a broken package can raise anything
            yield Finding(
                look.__name__.removeprefix("look_at_"), f"{type(error).__name__}: {one_line(str(error))}", "broken"
            )
