"""Names of the files of evaluations: before, batch-000010, after; alone or followed by .SET."""

from __future__ import annotations

from enum import StrEnum

BATCH_PREFIX = "batch-"


class Moment(StrEnum):
    """When an evaluation takes place, as the names of its files say it."""

    BETWEEN = ""
    """after a batch; its number is in the name"""
    BEFORE = "before"
    """before the first batch"""
    AFTER = "after"
    """after the last batch"""


def evaluation_name(batch: int, set_name: str, moment: Moment) -> str:
    """Returns the name of an evaluation's files, without their endings.

    >>> evaluation_name(10, "easy", Moment.BETWEEN)
    'batch-000010.easy'
    """
    name = f"{BATCH_PREFIX}{batch:06d}" if moment == Moment.BETWEEN else moment.value
    return f"{name}.{set_name}" if set_name else name


def moment_of(name: str) -> Moment:
    """Returns the moment that the name of an evaluation's files says."""
    beginning = name.partition(".")[0]
    if beginning in (Moment.BEFORE, Moment.AFTER):
        return Moment(beginning)
    return Moment.BETWEEN


def batch_of(name: str) -> int | None:
    """Returns the batch that the name of an evaluation's files says; None if it says none."""
    beginning = name.partition(".")[0]
    if not beginning.startswith(BATCH_PREFIX):
        return None
    return int(beginning.removeprefix(BATCH_PREFIX))
