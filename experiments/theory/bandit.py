"""Bandits that tell the variants apart: three arms, the best of them rarely drawn.

The first has the set-up of Yao et al. (arXiv 2509.24203): rewards (0, .8, 1), a behavior policy alpha = (.3, .6, .1)
that favors the second-best arm, a softmax policy that starts at alpha, the exact expected gradient at learning rate 1.
Either alpha never changes, or it becomes pi every 100 steps. What to expect: without a sync REINFORCE ends on arm 2 (J
= .8) and a clip stops near alpha; a wide clip, OPMD, AsymRE and RED-Weight go further; with syncs all but REINFORCE
find arm 3.

The second tells the masks apart: pi starts away from alpha, worse than it or better. Out of its range two-side does
not move at all, for better or worse; one-side goes where the advantage points until it has left its range on that
side; ring does so only from inside or from far out.

The tables: `python experiments/bandit.py`. The figure: `python experiments/figures.py bandit`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lagrpo.core.bounds import sigma
from lagrpo.core.loss import Terms
from lagrpo.objective.recipes import Recipe, resolve

Curves = dict[str, dict[str, list[float]]]


def arms(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


ALPHA, REWARD = arms(0.3, 0.6, 0.1), arms(0.0, 0.8, 1.0)
STARTS = {"worse": (arms(0.1, 0.3, 0.6), arms(0.4, 0.5, 0.1)), "better": (ALPHA, arms(0.1, 0.1, 0.8))}  # alpha, pi

METHODS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "REINFORCE": ("reinforce", {}),
    "one-side NoIS .2": ("rec_one_side_nois", {}),
    "one-side NoIS (.6, 2)": ("rec_one_side_nois_wide", {}),
    "one-side IS .2": ("rec_one_side_is", {}),
    "GRPO": ("rec_grpo", {"eps_std": 0.0}),
    "OPMD .1": ("opmd", {}),
    "AsymRE .3": ("asymre", {"strength": 0.3}),
    "RED-Weight 1": ("red_weight", {}),
    "RED-Weight .1": ("red_weight", {"weight_temperature": 0.1}),
}
MASKS = ["reinforce"] + [
    f"rec_{mask}_{weight}" for mask in ("one_side", "two_side", "ring") for weight in ("nois", "is")
]


def advantage(recipe: Recipe, alpha: Tensor) -> Tensor:
    """A of each arm by the exact statistics of alpha: r - J(alpha), over the standard deviation where normalized."""
    centered = REWARD - (alpha * REWARD).sum()
    normalized = recipe.composition.advantage == "normalized"
    return centered / sigma(alpha, REWARD, recipe.composition.eps_std) if normalized else centered


def run(
    recipe: Recipe,
    sync_every: int | None,
    steps: int = 4000,
    alpha: Tensor = ALPHA,
    start: Tensor = ALPHA,
    lr: float = 1.0,
) -> list[float]:
    """J(pi) before the first step and after each. An arm is a completion of one token, weighted by alpha."""
    logits, completion_T = start.log(), torch.arange(3)
    J = [float((start * REWARD).sum())]
    for step in range(steps):
        if sync_every and step % sync_every == 0:
            alpha = torch.softmax(logits, dim=0)
        logits = logits.detach().requires_grad_()
        logp = torch.log_softmax(logits, dim=0)
        terms = Terms(logp, alpha.log(), None, None, completion_T, advantage(recipe, alpha))
        (gradient,) = torch.autograd.grad((alpha * recipe.value(terms)).sum(), logits)
        logits = logits.detach() + lr * gradient
        J.append(float((torch.softmax(logits, dim=0) * REWARD).sum()))
    return J


def curves(steps: int = 4000) -> Curves:
    """J over the steps, by schedule and method."""
    recipes = {label: resolve(name, changes) for label, (name, changes) in METHODS.items()}
    schedules = {"never synced": None, "synced every 100": 100}
    return {
        schedule: {label: run(recipe, every, steps) for label, recipe in recipes.items()}
        for schedule, every in schedules.items()
    }


def table(results: Curves) -> str:
    """J to three decimals, by method: at the end without syncs; at step 500 and at the end with them."""
    never, synced = results.values()
    lines = [f"{'':24}{'never synced':>14}{'synced, 500':>14}{'synced, end':>14}"]
    for label in METHODS:
        at_500 = synced[label][min(500, len(synced[label]) - 1)]
        lines.append(f"{label:24}{never[label][-1]:14.3f}{at_500:14.3f}{synced[label][-1]:14.3f}")
    return "\n".join(lines)


def masks_table(steps: int = 2000) -> str:
    """J at the end, never synced, of the policy that starts away from alpha."""
    lines = [f"{'':24}" + "".join(f"{label + ' start':>14}" for label in STARTS)]
    for name in MASKS:
        ends = [run(resolve(name), None, steps, alpha, start)[-1] for alpha, start in STARTS.values()]
        lines.append(f"{name:24}" + "".join(f"{J:14.3f}" for J in ends))
    start = [float((start * REWARD).sum()) for _, start in STARTS.values()]
    return "\n".join([*lines, f"{'(J at the start)':24}" + "".join(f"{J:14.3f}" for J in start)])
