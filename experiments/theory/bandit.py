"""Bandits that tell the variants apart: three arms, the best of them rarely drawn.

The first has the setup of Yao et al. (arXiv 2509.24203): rewards (0, .8, 1), a behavior policy
alpha = (.3, .6, .1) that favors the second-best arm, a softmax policy that starts at alpha, the
exact expected gradient at learning rate 1. Either alpha never changes, or it becomes pi every 100
steps. Without a sync REINFORCE ends on arm 2 (J = .8) and a clip stops near alpha; a wide clip,
OPMD, AsymRE and RED-Weight go further. With syncs all but REINFORCE find arm 3.

The second tells the masks apart: pi starts away from alpha, worse than it or better. Out of its
range two-side does not move at all, for better or worse; one-side goes where the advantage points
until it has left its range on that side; ring does so only from inside or from far out.

The tables: `python experiments/bandit.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lagrpo.core.advantages import normalized
from lagrpo.core.bounds import sigma
from lagrpo.core.inputs import LossInputs
from lagrpo.core.objective import Recipe
from lagrpo.core.recipes import resolve

Curves = dict[str, dict[str, list[float]]]


def arms(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


ALPHA = arms(0.3, 0.6, 0.1)
REWARD = arms(0.0, 0.8, 1.0)
STARTS = {
    "worse": (arms(0.1, 0.3, 0.6), arms(0.4, 0.5, 0.1)),
    "better": (ALPHA, arms(0.1, 0.1, 0.8)),
}
"""alpha and the first pi."""

# Label -> recipe, and the knobs that differ from its defaults. The variance of alpha's rewards is
# never 0 here, so GRPO needs no eps_std.
METHODS: dict[str, tuple[str, Mapping[str, object]]] = {
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
    """A of each arm by the exact statistics of alpha.

    r - J(alpha), divided by the standard deviation if the recipe normalizes.
    """
    centered = REWARD - (alpha * REWARD).sum()
    if recipe.advantage.function is normalized:
        return centered / sigma(alpha, REWARD, recipe.eps_std)
    return centered


def run(
    recipe: Recipe,
    syncs: Sequence[int | None],
    steps: int = 4000,
    alphas: Sequence[Tensor] = (ALPHA,),
    starts: Sequence[Tensor] = (ALPHA,),
    lr: float = 1.0,
) -> list[list[float]]:
    """J(pi) before the first step and after each, of several bandits: [bandits][steps + 1].

    `syncs` are the steps between two syncs (None: never), `alphas` the behavior policies, `starts`
    the first pi. There are as many bandits as the longest argument has entries; shorter ones are
    repeated. Bandits do not affect each other: side by side they take the time of one. An arm is a
    completion of one token, weighted by alpha.
    """
    count = max(len(syncs), len(alphas), len(starts))
    syncs = list(syncs) * (count // len(syncs))
    alpha = torch.stack(list(alphas) * (count // len(alphas)))  # [bandits, arms]
    logits = torch.stack(list(starts) * (count // len(starts))).log()  # [bandits, arms]
    # Every arm of every bandit is a completion of one token: T = C = bandits * arms.
    completion_T = torch.arange(alpha.numel())
    path = [logits]
    # Log-probs and advantages depend on alpha alone, so they are computed again only after a sync.
    log_alpha, advantage_T = _constants(recipe, alpha)
    for step in range(steps):
        is_synced = False
        for row, every in enumerate(syncs):
            if every and step % every == 0:
                alpha[row] = torch.softmax(logits[row], dim=0)
                is_synced = True
        if is_synced:
            log_alpha, advantage_T = _constants(recipe, alpha)
        logits = logits.detach().requires_grad_()
        # [bandits, arms] -> [T]
        logp_T = torch.log_softmax(logits, dim=1).flatten()
        terms = LossInputs(logp_T, log_alpha, None, None, completion_T, advantage_T)
        # Weighted by alpha, the sum over the arms of a bandit is the exact expectation over samples
        # of its alpha. The sum over bandits leaves their gradients apart.
        (gradient,) = torch.autograd.grad((alpha.flatten() * recipe.value(terms)).sum(), logits)
        logits = logits.detach() + lr * gradient
        path.append(logits)
    # [steps + 1, bandits, arms] -> J [bandits, steps + 1]
    return (torch.softmax(torch.stack(path), dim=-1) * REWARD).sum(dim=-1).T.tolist()


def _constants(recipe: Recipe, alpha: Tensor) -> tuple[Tensor, Tensor]:
    """The log-probs and advantages of the arms of all bandits, flat, for alpha [bandits, arms]."""
    return alpha.log().flatten(), torch.cat([advantage(recipe, row) for row in alpha])


def curves(steps: int = 4000) -> Curves:
    """J over the steps, by schedule and method."""
    recipes = {label: resolve(name, changes) for label, (name, changes) in METHODS.items()}
    schedules = {"never synced": None, "synced every 100": 100}
    runs = {label: run(recipe, [*schedules.values()], steps) for label, recipe in recipes.items()}
    return {
        schedule: {label: J[row] for label, J in runs.items()}
        for row, schedule in enumerate(schedules)
    }


def table(results: Curves) -> str:
    """J by method: at the end without syncs; at step 500 and at the end with syncs."""
    never, synced = results.values()
    lines = [f"{'':24}{'never synced':>14}{'synced, 500':>14}{'synced, end':>14}"]
    for label in METHODS:
        at_500 = synced[label][min(500, len(synced[label]) - 1)]
        lines.append(f"{label:24}{never[label][-1]:14.3f}{at_500:14.3f}{synced[label][-1]:14.3f}")
    return "\n".join(lines)


def masks_table(steps: int = 2000) -> str:
    """J at the end, never synced, of the policy that starts away from alpha."""
    lines = [f"{'':24}" + "".join(f"{label + ' start':>14}" for label in STARTS)]
    alphas, starts = zip(*STARTS.values(), strict=True)
    for name in MASKS:
        ends = [J[-1] for J in run(resolve(name), [None], steps, alphas, starts)]
        lines.append(f"{name:24}" + "".join(f"{J:14.3f}" for J in ends))
    start = [float((start * REWARD).sum()) for start in starts]
    return "\n".join([*lines, f"{'(J at the start)':24}" + "".join(f"{J:14.3f}" for J in start)])
