"""`lagrpo doctor`: what this machine has, how a run would compute here, what is missing, and the command that mends it.

findings.py  what is said of one thing    machine.py    processor, memory, GPUs, disks
computing.py device, dtype, kernels       packages.py   what is installed
report.py    all of it, for people and for programs
"""

from __future__ import annotations

import sys


def doctor(json: bool = False) -> None:
    """Say what this machine has, how a run would compute here, and what is missing, with the command that mends it.

    The exit code is 0 where training can run. The first time it compiles the kernels, in 6 to 16 seconds.

    Args:
        json: Print it for programs.
    """
    from lagrpo.doctor.report import diagnose

    if not diagnose(json):
        sys.exit(1)
