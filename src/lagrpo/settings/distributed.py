"""How long the processes of a run wait for each other: section distributed."""

from __future__ import annotations

from pydantic import Field

from lagrpo.settings.section import Section


class DistributedSettings(Section):
    """Settings of a run that torchrun starts as several processes, the ranks; others do not read them."""

    deadline: float = Field(default=3600.0, gt=0)
    """Seconds for one step of a rank: to load the model, to sample its share of what is asked for, to learn from its
    share of a batch."""
    collective: float = Field(default=300.0, gt=0)
    """Seconds for one exchange between all ranks, and for all of them to start."""
    silence: float = Field(default=60.0, ge=5)
    """Seconds without a sign of life after which a rank is given up; every rank leaves one a second."""
