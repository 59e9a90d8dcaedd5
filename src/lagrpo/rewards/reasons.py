"""Reasons of unscored completions that depend on the machine, and not on the completion alone."""

from __future__ import annotations

from enum import StrEnum


class MachineReason(StrEnum):
    """The beginning of a reason that another run, on another machine, may not have.

    The reason goes into the column `reason`. Numbers, and the name of the reward, come after the
    beginning.
    """

    PAST_DEADLINE = "no reward within"
    """the call did not return in time"""
    WORKER_ENDED = "the worker process ended"
    """the call, or something else, ended the process that ran it"""


MACHINE_REASONS = tuple(MachineReason)


def depends_on_machine(reason: str) -> bool:
    """True if the reason of an outcome is one of MACHINE_REASONS."""
    return reason.startswith(MACHINE_REASONS)


def past_deadline(seconds: float) -> str:
    """Returns the reason of a call that did not return within `seconds`."""
    return f"{MachineReason.PAST_DEADLINE} {seconds:g} s"
