"""Random rollouts in both forms: flat for lagrpo, padded for the peers. All numbers are float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Completions of a group, groups of a case, tokens of the longest completion.
G = 4
GROUPS = 4
LONGEST = 9
# The limit that some normalizers divide by. It is not LONGEST, so that dividing by the longest
# completion would show.
MAX_LENGTH = 12
# Rewards are 0, 1/2 or 1, so that some groups have equal ones.
VALUES = 3


@dataclass(frozen=True)
class Case:
    """Completions with rewards, and the log-probs of their tokens under four policies.

    There are C = 16 completions of 1 to 9 tokens, T tokens in all. Log-ratios have a standard
    deviation of .4; one in ten has 1.6, so that both sides of every bound occur.
    """

    lengths: Tensor
    """[C]"""
    rewards: Tensor
    """[C]"""
    logp: Tensor
    """[T], under pi"""
    alpha: Tensor
    """[T], log-probs under alpha"""
    pi_k: Tensor
    """[T], log-probs under pi_k"""
    ref: Tensor
    """[T], log-probs under pi_ref"""
    staleness: Tensor
    """[T], 0 to 4 updates"""
    entropy: Tensor
    """[T], exact in float32"""
    finished: Tensor
    """[C], False for one completion in four"""

    @staticmethod
    def draw(seed: int) -> Case:
        rng = torch.Generator().manual_seed(seed)
        lengths = torch.randint(1, LONGEST + 1, (G * GROUPS,), generator=rng)
        rewards = torch.randint(VALUES, (G * GROUPS,), generator=rng).double() / (VALUES - 1)
        # Three values seldom give a group of equal rewards, so every second case gets one.
        if seed % 2:
            rewards[:G] = rewards[0].clone()
        T = int(lengths.sum())

        def normal() -> Tensor:
            return torch.randn(T, generator=rng, dtype=torch.float64)

        # 1.6 nats a token on average, and never 0.
        logp = -normal().abs() * 2 - 0.01
        # One deviation for all three policies: outliers are the same tokens in all.
        deviation = torch.where(torch.rand(T, generator=rng) < 0.1, 1.6, 0.4).double()
        alpha = _as_logp(logp + deviation * normal())
        pi_k = _as_logp(logp + deviation * normal())
        ref = _as_logp(logp + deviation * normal())
        return Case(
            lengths=lengths,
            rewards=rewards,
            logp=logp,
            alpha=alpha,
            pi_k=pi_k,
            ref=ref,
            staleness=torch.randint(0, 5, (T,), generator=rng),
            # TRL takes the quantile in float32: rounded entropies fall on the same side of it in
            # both.
            entropy=normal().abs().float().double(),
            finished=torch.rand(G * GROUPS, generator=rng) < 0.75,
        )

    @property
    def C(self) -> int:  # noqa: N802
        return len(self.lengths)

    @property
    def completion(self) -> Tensor:
        """The completion of each token [T]."""
        return torch.arange(self.C).repeat_interleave(self.lengths)

    @property
    def group(self) -> Tensor:
        """The group of each completion [C]."""
        return torch.arange(GROUPS).repeat_interleave(G)

    @property
    def flat(self) -> Tensor:
        """True for a completion whose group has equal rewards [C]."""
        by_group = self.rewards.view(GROUPS, G)
        return (by_group == by_group[:, :1]).all(1).repeat_interleave(G)

    @property
    def mask(self) -> Tensor:
        """1 for each token, 0 for padding: float64 [C, LONGEST]."""
        return (torch.arange(LONGEST) < self.lengths.unsqueeze(1)).double()

    def padded(self, values_T: Tensor) -> Tensor:
        """[T] as [C, LONGEST], 0 for padding."""
        zeros = torch.zeros(self.C, LONGEST, dtype=values_T.dtype)
        # It fills row by row, which is the order of the flat tokens.
        return zeros.masked_scatter(self.mask.bool(), values_T)

    def spread(self, values_C: Tensor) -> Tensor:
        """[C] as [C, LONGEST]: each value at every token of its completion, 0 for padding."""
        return values_C.unsqueeze(1) * self.mask


def _as_logp(values: Tensor) -> Tensor:
    """The values as log-probs: bounded so that each is that of a probability below 1."""
    return values.clamp(max=-1e-3)
