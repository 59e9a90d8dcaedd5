"""Algorithm 1 of Mroueh et al. (arXiv 2505.22257), and nothing else.

The numbers beside the lines are the paper's. Batches are counted through all stages: b = (s - 1)·M + k. What happens
around the algorithm (building its parts, evaluating, the files of a run) is in training.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from lagrpo.interrupts import whole
from lagrpo.metrics import Clock
from lagrpo.policy.batch import Batch, assemble, micro_batches
from lagrpo.policy.learner import Learner
from lagrpo.sampling.base import Sampler
from lagrpo.sampling.draws import Draws
from lagrpo.sampling.proof import Probe, prove_delivery
from lagrpo.sampling.schedule import Schedule
from lagrpo.verify import Verifier


class Listener(Protocol):
    """What is told about the run: the files on disk, the display, trackers."""

    def phase(self, name: str) -> None:
        """What is being done from now on."""
        ...

    def batch(
        self, stage: int, b: int, version: int, batch: Batch, updates: list[dict[str, float]], clock: Clock
    ) -> None:
        """Batch b of the run was used: π_k had `version`; one dict of figures for each of its i updates."""
        ...


@dataclass(frozen=True, slots=True)
class Algorithm:
    """The parts of Algorithm 1. `advantage(b)(rewards_G, lengths_G, g)` gives A_α of group g of batch b, `weights` the
    normaliser (see policy/batch.py); the rest of the objective is the recipe that the learner holds."""

    learner: Learner
    sampler: Sampler
    draws: Draws
    verifier: Verifier
    schedule: Schedule
    probe: Probe
    listener: Listener
    advantage: Callable[[int], Callable[[Tensor, Tensor, int], Tensor]]
    weights: Callable[[Tensor, Tensor], Tensor]
    S: int
    M: int
    i: int
    ahead: bool
    tokens: int
    reset_optimizer: bool


def iterative_grpo(a: Algorithm) -> None:
    """Lines 5-17. The initial policy is delivered before the first batch: the paper leaves α undefined for k < v."""
    learner, policy = a.learner, a.learner.policy
    plan = a.schedule.plan(a.S, a.M, a.ahead)
    deliver(a, Clock())
    for s in range(1, a.S + 1):  # 5
        for k in range(1, a.M + 1):  # 6
            b, clock, due = (s - 1) * a.M + k, Clock(), next(plan)
            if due.deliver and b > 1:  # 8
                deliver(a, clock)  # 9   α <- π_θ
            a.listener.phase("sampling")
            a.draws.ask(due.draws, a.sampler.version)  # 7, 10   prompts of D_b, y ~ α
            with clock("judging"):
                groups = list(a.verifier.judge(a.draws.take(b)))  # 11   r(x, y), while sampling goes on
            clock.move("judging", "sampling", a.draws.read_seconds())
            a.listener.phase("learning")
            with clock("learning"):
                batch = assemble(groups, a.advantage(b), a.weights)  # 12-13   A_α, Eq. 2
                rows = micro_batches(batch, a.tokens, policy.device, learner.recipe.needs_whole_groups)
                learner.score_reference(rows)
                version = policy.version
                updates = [learner.step(rows) for _ in range(a.i)]  # 14-15   Eq. 7 or 8
            with whole():
                a.listener.batch(s, b, version, batch, updates, clock)
        learner.end_stage(a.reset_optimizer)  # 16   π_ref <- π_θ


def deliver(a: Algorithm, clock: Clock) -> None:
    """α <- π_θ, proven by the probe."""
    a.listener.phase("delivery")
    with clock("sampling"):
        a.draws.finish()
    a.draws.read_seconds()
    with clock("delivery"):
        policy = a.learner.policy
        a.sampler.deliver(policy.weights(), policy.version)
        prove_delivery(a.probe, policy, a.sampler)
