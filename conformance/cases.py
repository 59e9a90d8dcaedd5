"""Random rollouts in both forms: flat for us, padded for the peers. Everything is float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

G, GROUPS, LONGEST = 4, 4, 9
MAX_LENGTH = 12
VALUES = 3  # rewards are 0, 1/2 or 1, so that some groups have equal ones


@dataclass(frozen=True)
class Case:
    """C = 16 completions of 1 .. 9 tokens. `lengths` [C], `completion` [T], `rewards` [C], `group` [C]; log-probs [T]
    under pi, alpha, pi_k and pi_ref, with log-ratios of a standard deviation of .4 (one in ten: of 1.6). `staleness`
    [T] is 0 .. 4 updates, `entropy` [T] is exact in float32, `finished` [C] is False for one completion in four."""

    lengths: Tensor
    rewards: Tensor
    logp: Tensor
    alpha: Tensor
    pi_k: Tensor
    ref: Tensor
    staleness: Tensor
    entropy: Tensor
    finished: Tensor

    @staticmethod
    def draw(seed: int) -> Case:
        rng = torch.Generator().manual_seed(seed)
        lengths = torch.randint(1, LONGEST + 1, (G * GROUPS,), generator=rng)
        rewards = torch.randint(VALUES, (G * GROUPS,), generator=rng).double() / (VALUES - 1)
        rewards[:G] = rewards[0] if seed % 2 else rewards[:G]
        T = int(lengths.sum())

        def normal() -> Tensor:
            return torch.randn(T, generator=rng, dtype=torch.float64)

        logp = -normal().abs() * 2 - 0.01
        wide = torch.where(torch.rand(T, generator=rng) < 0.1, 1.6, 0.4).double()
        alpha, pi_k, ref = (_as_logp(logp + wide * normal()) for _ in range(3))
        return Case(
            lengths=lengths,
            rewards=rewards,
            logp=logp,
            alpha=alpha,
            pi_k=pi_k,
            ref=ref,
            staleness=torch.randint(0, 5, (T,), generator=rng),
            entropy=normal().abs().float().double(),
            finished=torch.rand(G * GROUPS, generator=rng) < 0.75,
        )

    @property
    def C(self) -> int:  # noqa: N802
        return len(self.lengths)

    @property
    def completion(self) -> Tensor:
        return torch.arange(self.C).repeat_interleave(self.lengths)

    @property
    def group(self) -> Tensor:
        return torch.arange(GROUPS).repeat_interleave(G)

    @property
    def flat(self) -> Tensor:
        """True for a completion whose group has equal rewards [C]."""
        by_group = self.rewards.view(GROUPS, G)
        return (by_group == by_group[:, :1]).all(1).repeat_interleave(G)

    @property
    def mask(self) -> Tensor:
        """float64 [C, LONGEST]: 1 where a token is."""
        return (torch.arange(LONGEST) < self.lengths.unsqueeze(1)).double()

    def padded(self, values_T: Tensor) -> Tensor:
        """[T] as [C, LONGEST], 0 where there is no token."""
        return torch.zeros(self.C, LONGEST, dtype=values_T.dtype).masked_scatter(
            self.mask.bool(), values_T
        )

    def spread(self, values_C: Tensor) -> Tensor:
        """[C] as [C, LONGEST], each at every token of its completion."""
        return values_C.unsqueeze(1) * self.mask


def _as_logp(values: Tensor) -> Tensor:
    """The values as log-probs: of a probability below 1."""
    return values.clamp(max=-1e-3)
