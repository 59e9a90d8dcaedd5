"""Judging completions in worker processes, each with a deadline: scored, or unscored with a reason."""

from __future__ import annotations

from lagrpo.verify.verifier import Verifier, VerifierError

__all__ = ["Verifier", "VerifierError"]
