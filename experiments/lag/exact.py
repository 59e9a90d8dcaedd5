"""Two toys at a constant lag whose expected gradients are sums over all completions.

    python -m experiments.lag.exact     # results/exact.md and exact.png, in a minute

arms        one token of three: probabilities (.3, .6, .1), rewards (0, .8, 1), as in
            experiments/theory/bandit.py
two tokens  two tokens of three symbols each, the second given the first; the reward is the mean of
            the symbols' rewards

No sampling, no optimizer: softmax logits, steps of the exact gradient at learning rate 1, samples
as old as the lag. Methods that have a row in the table "equal" are those of that table, so that the
loss alone differs. The toys show what a loss does in expectation. The best symbol is rare under the
first policy, so a method that leans on what it sees often ends at .8.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from experiments.theory.style import BLUE, FAINT, GREEN, ORANGE, PURPLE, VERMILLION, canvas, plain
from lagrpo.core.inputs import LossInputs
from lagrpo.core.objective import Recipe
from lagrpo.runs.files import write_atomically

from .methods import load_methods
from .records import RESULTS

LAGS = (0, 1, 4, 16, 64, 256)
STEPS = 1024
STATISTICS_FROM = 1000
"""completions, in the proportions of alpha, that make the statistics of a step"""
FIGURE_METHODS = ("stale_reinforce", "grpo", "positive_only", "topr", "dppo_tv", "vespo")


@dataclass(frozen=True, slots=True)
class Toy:
    """A policy over n completions of up to two tokens.

    Rows are lags that are computed side by side.
    """

    name: str
    tokens: int
    rewards: Tensor
    """[n] float64"""

    @property
    def first_logits(self) -> Tensor:
        """The logits of each token given what comes before it, [contexts, 3]."""
        contexts = 1 if self.tokens == 1 else 4
        return torch.tensor([0.3, 0.6, 0.1], dtype=torch.float64).log().repeat(contexts, 1)

    def log_probs(self, logits: Tensor) -> Tensor:
        """The log-prob of each token of each completion, [rows, n, tokens].

        logits: [rows, contexts, 3].
        """
        log_p = logits.log_softmax(dim=-1)
        first = log_p[:, 0]  # [rows, 3]
        if self.tokens == 1:
            return first[..., None]
        second = log_p[:, 1:].flatten(1)  # [rows, 9], by first and second symbol
        return torch.stack([first.repeat_interleave(3, dim=1), second], dim=-1)

    def mean_reward(self, logits: Tensor) -> Tensor:
        """J of each row."""
        return (self.log_probs(logits).sum(dim=-1).exp() * self.rewards).sum(dim=-1)


SYMBOL_REWARDS = torch.tensor([0.0, 0.8, 1.0], dtype=torch.float64)
TOYS = (
    Toy("arms", 1, SYMBOL_REWARDS),
    Toy("two tokens", 2, (SYMBOL_REWARDS[:, None] + SYMBOL_REWARDS).flatten() / 2),
)


def has_exact_gradient(recipe: Recipe) -> bool:
    """False if the expected gradient is more than a sum over completions.

    That is so for advantages that draw random numbers, and for losses of whole groups or of pi_ref.
    """
    is_known = recipe.advantage.name in ADVANTAGES
    return is_known and not recipe.needs_whole_groups and not recipe.needs_pi_ref


def _normalized(rewards: Tensor, alpha: Tensor, recipe: Recipe) -> Tensor:
    centered = _centered(rewards, alpha, recipe)
    variance = (alpha * centered.square()).sum(dim=-1, keepdim=True)
    return centered / (variance + recipe.eps_std).sqrt()


def _centered(rewards: Tensor, alpha: Tensor, _recipe: Recipe) -> Tensor:
    return rewards - (alpha * rewards).sum(dim=-1, keepdim=True)


def _normalized_positive(rewards: Tensor, alpha: Tensor, recipe: Recipe) -> Tensor:
    return _normalized(rewards, alpha, recipe).clamp(min=0)


def _log_mean_exp(rewards: Tensor, alpha: Tensor, recipe: Recipe) -> Tensor:
    strength = cast(float, recipe.advantage.knobs["strength"])
    return rewards - strength * (alpha * (rewards / strength).exp()).sum(-1, keepdim=True).log()


ADVANTAGES = {
    "normalized": _normalized,
    "centered": _centered,
    "normalized_positive": _normalized_positive,
    "log_mean_exp": _log_mean_exp,
}
"""The advantages of lagrpo.core by name, with the statistics of alpha itself instead of those of a
group.
"""


def run(recipe: Recipe, toy: Toy, lags: Sequence[int] = LAGS, steps: int = STEPS) -> Tensor:
    """J before the first step and after each, [steps + 1, lags]."""
    logits = toy.first_logits.repeat(len(lags), 1, 1)
    path = [logits]
    for step in range(steps):
        behavior = torch.stack([path[max(step - lag, 0)][row] for row, lag in enumerate(lags)])
        staleness = torch.tensor([min(step, lag) for lag in lags])
        logits = logits.detach().requires_grad_()
        logp = toy.log_probs(logits)  # [rows, n, tokens]
        inputs, alpha = _inputs(recipe, toy, logp.detach(), toy.log_probs(behavior), staleness)
        logp_gradient = recipe.differentiate(inputs, alpha.flatten()).gradient_T
        (gradient,) = torch.autograd.grad(logp, logits, logp_gradient.view_as(logp))
        logits = logits.detach() - gradient
        path.append(logits)
    return torch.stack([toy.mean_reward(logits) for logits in path])


def _inputs(
    recipe: Recipe, toy: Toy, logp: Tensor, rollout_logp: Tensor, staleness: Tensor
) -> tuple[LossInputs, Tensor]:
    """All completions of all rows as a batch, and their weights alpha(y), [rows, n]."""
    rows, n, tokens = logp.shape
    alpha = rollout_logp.sum(dim=-1).exp()
    advantages = ADVANTAGES[recipe.advantage.name](toy.rewards, alpha, recipe)
    inputs = LossInputs(
        logp=logp.flatten(),
        rollout_logp=rollout_logp.flatten(),
        old_logp=logp.flatten(),
        ref_logp=None,
        completion=torch.arange(rows * n).repeat_interleave(tokens),
        advantages=advantages.flatten(),
        staleness=staleness.repeat_interleave(n * tokens),
    )
    if recipe.needs_step_statistics:
        statistics = _statistics(recipe, logp, rollout_logp, advantages, alpha)
        inputs = replace(inputs, step=statistics)
    return inputs, alpha


def _statistics(
    recipe: Recipe, logp: Tensor, rollout_logp: Tensor, advantages: Tensor, alpha: Tensor
) -> dict[str, Tensor]:
    """The recipe's statistics of the step for each token, by row."""
    _, n, tokens = logp.shape
    columns: dict[str, list[Tensor]] = {}
    for row, alpha_of_row in enumerate(alpha):
        # A collector takes a sample, not probabilities: a sample in their proportions.
        copies = (alpha_of_row * STATISTICS_FROM).round().long()
        drawn = torch.arange(n).repeat_interleave(copies)
        batch = LossInputs(
            logp=logp[row, drawn].flatten(),
            rollout_logp=rollout_logp[row, drawn].flatten(),
            old_logp=None,
            ref_logp=None,
            completion=torch.arange(len(drawn)).repeat_interleave(tokens),
            advantages=advantages[row, drawn],
        )
        for name, value in recipe.collect(batch).items():
            columns.setdefault(name, []).append(value)
    return {
        name: torch.stack(values, dim=-1).repeat_interleave(n * tokens, dim=-1)
        for name, values in columns.items()
    }


def final_returns(steps: int = STEPS) -> dict[str, dict[str, list[float]]]:
    """J at the end by toy, method and lag."""
    rows = load_methods("published") | load_methods("equal")
    methods = [m for m in rows.values() if has_exact_gradient(m.recipe) and not m.same_as]
    return {
        toy.name: {m.name: run(m.recipe, toy, steps=steps)[-1].tolist() for m in methods}
        for toy in TOYS
    }


def to_markdown(returns: Mapping[str, Mapping[str, Sequence[float]]]) -> str:
    parts = ["# Exact toys", f"Mean reward after {STEPS} steps of the expected gradient, by lag."]
    for toy, by_method in returns.items():
        lines = ["| method | " + " | ".join(map(str, LAGS)) + " |", "|---" * 7 + "|"]
        for method, values in by_method.items():
            lines.append(f"| {method} | " + " | ".join(f"{value:.3f}" for value in values) + " |")
        parts += [f"## {toy}", "\n".join(lines)]
    return "\n\n".join(parts) + "\n"


def draw(returns: Mapping[str, Mapping[str, Sequence[float]]]):
    """Final return against lag, a panel per toy."""
    figure = canvas(9.2, 3.8)
    colors = (FAINT, BLUE, ORANGE, GREEN, VERMILLION, PURPLE)
    styles = (":", "-", "--", "-", "-.", "--")
    markers = ("x", "o", "s", "^", "D", "v")
    all_axes = figure.subplots(1, len(returns), sharey=True)
    for axes, (toy, by_method) in zip(all_axes, returns.items(), strict=True):
        plain(axes, toy, "constant lag (steps)", "mean reward at the end")
        for method, color, style, marker in zip(
            FIGURE_METHODS, colors, styles, markers, strict=True
        ):
            values = by_method[method]
            axes.plot(values, color=color, linestyle=style, marker=marker, label=method)
        axes.set_xticks(range(len(LAGS)), [str(lag) for lag in LAGS])
    lines, names = all_axes[0].get_legend_handles_labels()
    figure.legend(lines, names, loc="outside lower center", ncols=6, frameon=False, fontsize=9)
    return figure


def main() -> None:
    torch.set_num_threads(1)
    returns = final_returns()
    write_atomically(RESULTS / "exact.md", to_markdown(returns))
    figure = draw(returns)
    write_atomically(
        RESULTS / "exact.png", lambda path: figure.savefig(path, format="png", dpi=150)
    )
    print(to_markdown(returns))


if __name__ == "__main__":
    main()
