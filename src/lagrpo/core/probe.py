"""Random inputs, on which an objective is tried before a model loads."""

from __future__ import annotations

from dataclasses import fields

import torch
from torch import Tensor

from lagrpo.core.advantages import AdvantageInputs
from lagrpo.core.inputs import LossInputs

OPTIONAL = ("rollout_logp", "old_logp", "ref_logp", "group", "staleness", "entropy", "finished")
"""The fields of LossInputs that a run may lack, or computes only for objectives that read them."""

LENGTHS = (3, 1, 4, 2, 5, 2)
ADVANTAGES = (1.2, -0.7, 0.0, -1.1, 0.4, 0.0)
# A micro-batch may hold any groups of a batch.
GROUPS = (7, 7, 7, 9, 9, 9)


def random_inputs() -> LossInputs:
    """Six completions in two groups, in float64; the same at every call.

    Log-ratios are some tenths of a nat, each group has an advantage of 0, and one completion was
    cut at its limit.
    """
    generator = torch.Generator().manual_seed(0)
    tokens = sum(LENGTHS)

    def normal(scale: float) -> Tensor:
        return scale * torch.randn(tokens, generator=generator, dtype=torch.float64)

    logp = -0.05 - normal(1.0).abs()
    return LossInputs(
        logp=logp.clone().requires_grad_(),
        rollout_logp=logp + normal(0.3),
        old_logp=logp + normal(0.2),
        ref_logp=logp + normal(0.4),
        completion=torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS)),
        advantages=torch.tensor(ADVANTAGES, dtype=torch.float64),
        group=torch.tensor(GROUPS),
        staleness=torch.randint(0, 5, (tokens,), generator=generator),
        entropy=normal(1.0).abs(),
        finished=torch.tensor([True, True, False, True, True, True]),
    )


def random_rewards() -> AdvantageInputs:
    """Rewards of the same six completions, in float64."""
    return AdvantageInputs(
        rewards=torch.tensor([1.0, 0.0, 0.25, 0.0, 1.0, 1.0], dtype=torch.float64),
        group=torch.tensor([0, 0, 0, 1, 1, 1]),
        lengths=torch.tensor(LENGTHS),
        uniform=torch.tensor([0.1, 0.9, 0.3, 0.5, 0.7, 0.2], dtype=torch.float64),
    )


class RecordedInputs(LossInputs):
    """LossInputs that remember which of their optional fields were read, in `fields_read`."""

    fields_read: set[str]

    def with_token_advantages(self, token_advantages: Tensor) -> LossInputs:
        """The same inputs with these numbers. Both remember in one `fields_read`."""
        fields_read = set(self.fields_read)
        x = super().with_token_advantages(token_advantages)
        # The copy has read all fields: that is forgotten, in both.
        for inputs in (self, x):
            vars(inputs)["fields_read"] = fields_read
        return x

    def __getattribute__(self, name: str) -> object:
        if name in OPTIONAL:
            # setdefault: the constructor reads fields before there is a set.
            vars(self).setdefault("fields_read", set[str]()).add(name)
        return super().__getattribute__(name)

    @staticmethod
    def record(x: LossInputs) -> RecordedInputs:
        """The same inputs, none of them read yet."""
        values = {field.name: getattr(x, field.name) for field in fields(LossInputs)}
        recorded = RecordedInputs(**values)
        # The constructor has read some. The class is frozen, so they are forgotten in its __dict__.
        vars(recorded)["fields_read"] = set[str]()
        return recorded
