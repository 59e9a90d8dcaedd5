"""GRPO in one file, on-policy and off-policy, on the pieces of lagrpo: the first thing to read.

    python examples/minimal.py          # on-policy: the sampler has the newest weights
    python examples/minimal.py --v 4    # off-policy: it gets new weights every 4 batches

SmolLM2-135M learns to add one-digit numbers in a few minutes on two cores. `train` is Algorithm 1
of Mroueh et al. (arXiv 2505.22257) with one update per batch; the numbers in its comments are the
paper's lines. `lagrpo train` runs the same algorithm with what a real run needs: micro-batches,
bfloat16 weights with float32 masters, rewards in worker processes, a check of every weight sync,
files, and some 60 objectives.

`policy.version` counts its optimizer updates. The sampler stamps the version of its weights on each
token, so `lag` is read from the samples, not computed from `v`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import lagrpo  # noqa: F401  before torch: it says how OpenMP's threads wait

# isort: split
import torch
from torch import Tensor

from lagrpo.core.advantages import AdvantageInputs, normalized
from lagrpo.core.inputs import LossInputs
from lagrpo.core.losses import clipped
from lagrpo.data.prompts import PromptSource
from lagrpo.model.embedded import resolve_model
from lagrpo.model.loading import load_policy
from lagrpo.model.model import Packed, Policy, copy_policy
from lagrpo.rewards.reward import Rewards
from lagrpo.rollout.local import LocalSampler
from lagrpo.tasks import Task, arithmetic
from lagrpo.types import Group, Outcome, Request

SEED = 0
N, G = 8, 16  # prompts per batch, completions per prompt (a group)
MAX_TOKENS = 16  # of a completion
EPSILON = 0.2  # ratios are clipped to 1 - EPSILON .. 1 + EPSILON
EPS_STD = 1e-4  # variance floor of the advantage


def grpo_loss(policy: Policy, groups: Sequence[Group]) -> tuple[Tensor, Tensor]:
    """Minus the GRPO objective of a batch, and ρ = π/α of each token [T].

    The objective is Eq. 7 without its KL term, clipped around 1:

        loss = - mean over completions of the mean over tokens of min(ρ A, clip(ρ, 1 - ε, 1 + ε) A)

    Tokens are flat, without padding. Each prompt stands once in the packed row; its completions
    attend to it.
    """
    completions = [completion for group in groups for completion in group.completions]
    lengths_C = torch.tensor([len(completion.token_ids) for completion in completions])
    rewards = [reward for group in groups for reward in group.rewards]
    rewards_C = torch.tensor(rewards, dtype=torch.float64)
    group_C = torch.arange(len(groups)).repeat_interleave(G)
    scored = AdvantageInputs(rewards_C, group_C)
    advantage_C = normalized(scored, eps_std=EPS_STD).float()  # A_α, Eq. 2
    packed = Packed.build(
        [(group.prompt.token_ids, [c.token_ids for c in group.completions]) for group in groups]
    )
    logp_T = policy.logp(packed)  # log π: the only term with a gradient
    rollout_logp_T = torch.cat(
        [completion.rollout_logp for completion in completions]
    )  # recorded by the sampler
    completion_T = torch.arange(len(completions)).repeat_interleave(lengths_C)
    inputs = LossInputs(logp_T, rollout_logp_T, None, None, completion_T, advantage_C)
    value_T = clipped(inputs, epsilon_low=EPSILON, epsilon_high=EPSILON)
    weight_T = (1 / (len(completions) * lengths_C))[completion_T]
    return -(weight_T * value_T).sum(), (logp_T - rollout_logp_T).exp().detach()


@dataclass(frozen=True)
class Step:
    """Batch k: its lag in updates, its mean reward, and the largest |ln ρ| of its tokens, nats."""

    k: int
    lag: int
    reward: float
    log_ratio: float


def train(policy: Policy, task: Task, v: int, batches: int, lr: float = 2e-5) -> Iterator[Step]:
    """GRPO with α ← π every `v` batches; v = 1 is on-policy.

    Yields after each update of `policy`.
    """
    prompts = PromptSource(task, policy, SEED, N, max_prompt_tokens=128)
    sampler = LocalSampler(
        copy_policy(policy), SEED, MAX_TOKENS, max_num_seqs=N * G
    )  # α: a separate copy
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr, weight_decay=0.0)
    for k in range(1, batches + 1):  # 6
        requests = prompts.batch(k)  # 7   D_b, a function of (seed, k)
        if k % v == 0:  # 8
            sampler.sync_weights(policy.weights, policy.version)  # 9   α <- π
        groups = sample(sampler, requests, task)  # 10, 11   y ~ α with log α, and r(x, y)
        oldest = min(int(c.versions.min()) for group in groups for c in group.completions)
        loss, ratio_T = grpo_loss(policy, groups)  # 12, 13
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.model.parameters(), 1.0)
        optimizer.step()  # 14, 15
        optimizer.zero_grad()
        yield Step(
            k, policy.version - oldest, mean_reward(groups), ratio_T.log().abs().max().item()
        )
        policy.advance()


def sample(sampler: LocalSampler, requests: Sequence[Request], task: Task) -> list[Group]:
    """A scored group for each request. `lagrpo.rewards.pool` scores in processes with deadlines."""
    (reward,) = Rewards.from_reward(
        task.reward
    ).parts  # of several rewards, `Rewards.combine` makes the sum
    groups = []
    for _, group in sampler.sample(requests, G):  # each as soon as its last completion ends
        answer = group.prompt.answer
        outcomes = [Outcome.scored(reward.function(c.text, answer)) for c in group.completions]
        scored = [replace(c, outcome=o) for c, o in zip(group.completions, outcomes, strict=True)]
        groups.append(replace(group, completions=tuple(scored)))
    return groups


def mean_reward(groups: Sequence[Group]) -> float:
    return sum(sum(group.rewards) for group in groups) / sum(len(group.rewards) for group in groups)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="GRPO on one-digit sums, on-policy or off-policy.")
    parser.add_argument("--v", type=int, default=1, help="batches per weight sync; 1 is on-policy")
    parser.add_argument(
        "--model", default="smollm2", help="smollm2, or a Hugging Face directory or hub id"
    )
    parser.add_argument("--batches", type=int, default=20)
    options = parser.parse_args()
    model = load_policy(resolve_model(options.model), torch.float32)
    for step in train(model, arithmetic.load(SEED), options.v, options.batches):
        print(
            f"batch {step.k:3}  lag {step.lag:2}  reward {step.reward:.3f}  "
            f"max |ln pi/alpha| {step.log_ratio:.4f}"
        )
