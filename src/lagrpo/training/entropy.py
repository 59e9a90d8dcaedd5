"""The entropy term of the loss: its coefficient, and the controller that holds a target.

The loss of an update is the recipe's loss minus coef · Σ_t weight_t H_t. H_t is the entropy of the
policy's whole distribution at token t, at the training temperature, nats. `weight_t` is the weight
that the recipe gives the token's completion (core/reductions.py): with the reduction `token_mean`
the term is coef times the mean entropy of the batch's tokens. So advantages and entropies have the
same normalizer, whatever the micro-batches and ranks are.

The controller follows the adaptive entropy control of Skywork-OR1 (arXiv 2505.22312). After the
first update on each batch it compares the mean entropy of π_k with the target: below, the
coefficient rises by a step; above, it falls by a step, and the term is left out of the next batch.
Two things differ:

- In Skywork-OR1 a batch's own entropy decides if the term acts on it. Here the batch before
  decides, because the backward pass of the first micro-batch precedes the forward pass of the last.
- The step is STEP as there, but at least the share GROWTH of the coefficient. Where an answer has
  few tokens, rewards push each of them hard: there the coefficient that holds a target exceeds 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lagrpo.errors import SettingsError
from lagrpo.settings.loss import LARGEST_ENTROPY_COEF

STEP = 0.005
"""The least change of the coefficient after a batch; Skywork-OR1's value."""

GROWTH = 0.1
"""The change of a larger coefficient after a batch, as a share of it."""


@dataclass(slots=True)
class EntropyTerm:
    """The coefficient of the entropy in the loss. With a target, `observe` moves it.

    All ranks observe the same entropy, so they have the same coefficient.
    """

    level: float = 0.0
    """the coefficient while the term acts"""
    target: float | None = None
    """nats per token; None: the coefficient stays as it is"""
    is_acting: bool = True
    """False while the last entropy was above the target"""

    @property
    def is_used(self) -> bool:
        """True if the term acts on any batch."""
        return self.level > 0 or self.target is not None

    @property
    def coef(self) -> float:
        """The coefficient of the next update."""
        return self.level if self.is_acting else 0.0

    def observe(self, entropy: float) -> None:
        """Moves the coefficient, given the mean entropy of π_k over a batch, nats per token.

        >>> term = EntropyTerm(target=0.5)
        >>> coefs = []
        >>> for entropy in (0.4, 0.3, 0.6, 0.4):
        ...     term.observe(entropy)
        ...     coefs.append(term.coef)
        >>> coefs
        [0.005, 0.01, 0.0, 0.01]
        """
        if self.target is None:
            return
        self.is_acting = entropy <= self.target
        step = max(STEP, GROWTH * self.level)
        level = self.level + step if self.is_acting else self.level - step
        self.level = min(max(level, 0.0), LARGEST_ENTROPY_COEF)

    def state(self) -> Tensor:
        """Returns what `observe` changes: float64 [2]."""
        return torch.tensor([self.level, float(self.is_acting)], dtype=torch.float64)

    def load(self, state: Tensor) -> None:
        """Loads what `state` returned."""
        self.level = float(state[0])
        self.is_acting = bool(state[1])


def check_entropy_target(target: float | None, vocabulary: int) -> None:
    """Raises SettingsError for a target that no distribution over the vocabulary reaches."""
    largest = math.log(vocabulary)
    if target is not None and target >= largest:
        raise SettingsError(
            f"loss.entropy_target = {target:g}, but a token of the model's {vocabulary:,} has an "
            f"entropy below {largest:.2f} nats: lower the target"
        )
