"""(1 - sigma) / sigma of a reward that is 1 with probability p: Fig. 1 of Mroueh et al. (arXiv 2505.22257), and what
becomes of it in finite groups.

sigma = sqrt(p (1-p) + eps_std). It is what TV(pi, alpha) costs in Theorem 1, but for the constant in front (2 as
published, 1 in the sharp form), which is left aside as in the paper.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from theory.style import BLUE, FAINT, GREEN, INK, ORANGE, VERMILLION, canvas, plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from torch import Tensor

FLOORS = {1e-4: ORANGE, 1e-2: GREEN, 0.1: BLUE, 0.0: VERMILLION}  # without a floor last, dashed: on top of the others
LOWEST = max(FLOORS)
GROUP = 16
LABEL = r"$(1-\sigma)\,/\,\sigma$"
ASIDE = "Theorem 1 multiplies this by a constant, 2 as published and 1 in its sharp form: left aside here."


def cost(p: Tensor, eps_std: float) -> Tensor:
    """(1 - sigma) / sigma at the success probabilities p; infinite where sigma = 0."""
    from lagrpo.core.bounds import penalty

    return penalty((p * (1 - p) + eps_std).sqrt())


def draw() -> Figure:
    """Left as in the paper, over all p; right near p = 0 on logarithmic axes, where the floor shows."""
    figure = canvas(9.2, 4.3)
    whole, corner = figure.subplots(1, 2, gridspec_kw={"width_ratios": (1.15, 1)})
    _draw_whole(whole)
    _draw_corner(corner)
    figure.supxlabel(ASIDE, fontsize=8.5, color=INK, x=0.01, ha="left")
    return figure


def _draw_whole(axes: Axes) -> None:
    import torch

    p = torch.linspace(0, 1, 2001, dtype=torch.float64)
    for eps_std, color in FLOORS.items():
        axes.plot(p, cost(p, eps_std), color=color, linewidth=2, linestyle=_dashes(eps_std), label=_floor(eps_std))
    share = torch.arange(1, GROUP, dtype=torch.float64) / GROUP
    seen = cost(share, 0.0)
    axes.plot(share, seen, "o", color=INK, markersize=4.5, markerfacecolor="white", zorder=5)
    label = f"a group of {GROUP}, one right: {float(seen[0]):.2f}"
    axes.annotate(label, (float(share[0]), float(seen[0])), (7, 4), textcoords="offset points", fontsize=9)
    axes.set(xlim=(-0.01, 1.01), ylim=(0, 10))
    *floors, none = axes.get_legend_handles_labels()[0]
    axes.legend(handles=[none, *floors], loc="upper center", frameon=False, title="variance floor", fontsize=9)
    plain(axes, "All right or all wrong: the penalty diverges", r"success probability $p$", LABEL)


def _draw_corner(axes: Axes) -> None:
    import torch

    p = torch.logspace(-6, -0.30103, 400, dtype=torch.float64)
    for eps_std, color in FLOORS.items():
        values = cost(p, eps_std)
        axes.loglog(p, values, color=color, linewidth=2, linestyle=_dashes(eps_std))
        text, at = f"{_floor(eps_std)}: {float(values[0]):.3g}", 0
        if eps_std == 0:
            text, at = rf"{_floor(eps_std)}: like $1/\sqrt{{p}}$", 70
        where = float(p[at]), float(values[at])
        offset = (6 if at else 2, -12 if eps_std == LOWEST else 4)  # the line of the groups is just above the lowest
        axes.annotate(text, where, offset, textcoords="offset points", color=color, fontsize=9)
    _draw_finite_group(axes, p)
    axes.axhline(1, color=FAINT, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
    text = r"1: the least without a floor, at $p = 1/2$"
    axes.annotate(text, (1e-6, 1), (2, -12), textcoords="offset points", fontsize=8.5, color=INK)
    axes.set(xlim=(1e-6, 0.5), ylim=(0.6, 1500))
    plain(axes, "Near $p = 0$: a floor or a group caps it", r"success probability $p$", LABEL)


def _draw_finite_group(axes: Axes, p: Tensor) -> None:
    """w_G - 1, what 1/sigma - 1 becomes where each group is normalized by itself."""
    from lagrpo.core.bounds import group_weight

    values = [group_weight(float(at), GROUP) - 1 for at in p]
    axes.loglog(p, values, color=INK, linewidth=2, label="w_G - 1")
    text = rf"groups of {GROUP}, $w_G(p) - 1$: at most {max(values):.2f}"
    axes.annotate(text, (float(p[0]), values[0]), (2, 4), textcoords="offset points", color=INK, fontsize=9)


def _floor(eps_std: float) -> str:
    return rf"$\epsilon_\mathrm{{std}} = {eps_std:g}$" if eps_std != 1e-4 else r"$\epsilon_\mathrm{std} = 10^{-4}$"


def _dashes(eps_std: float) -> str | tuple[float, tuple[float, float]]:
    return "-" if eps_std > 0 else (0.0, (3.0, 2.0))
