"""How many completions of a whole run may end without a reward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lagrpo.verify import VerifierError

FIRST = 10  # batches before the share of a run means something


class RewardBudget:
    """At most this share of a run's completions may be unscored or failed, from batch FIRST on. One batch has its own
    limit (verifier.max_without_reward)."""

    def __init__(self, share: float) -> None:
        self.share, self.batches, self.completions, self.without = share, 0, 0, 0

    def count(self, metrics: Mapping[str, Any]) -> None:
        """One more batch, by its metrics."""
        self.batches += 1
        self.completions += metrics["completions"]
        self.without += metrics["unscored"] + metrics["failed"]

    def check(self) -> None:
        """Raise VerifierError where the share is passed."""
        if self.batches >= FIRST and self.without > self.share * self.completions:
            raise VerifierError(
                f"{self.without} of the {self.completions} completions of the {self.batches} batches so far have no "
                f"reward, more than the allowed share of {self.share:g} (verifier.max_without_reward_run). The "
                "columns outcome and reason of the rollouts say why; mend the judge, or allow more"
            )
