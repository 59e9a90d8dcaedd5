"""Judges and environments in worker processes, each call with a deadline: scored, or unscored with a reason."""

from __future__ import annotations

from lagrpo.verify.environments import Environments
from lagrpo.verify.pool import VerifierError
from lagrpo.verify.verifier import Verifier

__all__ = ["Environments", "Verifier", "VerifierError"]
