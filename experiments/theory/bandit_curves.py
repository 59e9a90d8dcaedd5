"""Where each variant ends on the three-armed bandit of theory.bandit, with alpha fixed and with alpha synced."""

from __future__ import annotations

from typing import TYPE_CHECKING

from theory.style import (
    BLUE,
    FAINT,
    GREEN,
    INK,
    MAUVE,
    ORANGE,
    PURPLE,
    SKY,
    VERMILLION,
    apart,
    canvas,
    plain,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from theory.bandit import Curves

STYLES = {
    "REINFORCE": (INK, "-"),
    "one-side NoIS .2": (SKY, "-"),
    "one-side IS .2": (SKY, "--"),
    "GRPO": (GREEN, "-"),
    "one-side NoIS (.6, 2)": (BLUE, "-"),
    "OPMD .1": (ORANGE, "-"),
    "AsymRE .3": (VERMILLION, "-"),
    "RED-Weight 1": (MAUVE, "-"),
    "RED-Weight .1": (PURPLE, "-"),
}
SHOWN_WITH_SYNCS = 1000


def draw(results: Curves | None = None) -> Figure:
    """J(pi) over the steps, one panel per schedule. `results`: of `theory.bandit.curves`, computed if absent."""
    if results is None:
        from theory.bandit import curves

        results = curves()
    never, synced = results.values()
    figure = canvas(10.2, 4.6)
    left, right = figure.subplots(1, 2, sharey=True, gridspec_kw={"width_ratios": (1.5, 1)})
    _draw_never(left, never)
    _draw_synced(right, synced)
    return figure


def _draw_never(axes: Axes, never: dict[str, list[float]]) -> None:
    """Logarithmic in the step; each variant named at the end of its curve."""
    steps = len(next(iter(never.values()))) - 1
    _draw_arms(axes)
    for reward, text in ((0.8, "arm 2 pays .8"), (1.0, "arm 3 pays 1")):
        axes.annotate(text, (1, reward), (4, -11), textcoords="offset points", fontsize=8.5, color=INK)
    for label, J in never.items():
        _line(axes, label, range(1, steps + 1), J[1:])
    ends = [J[-1] for J in never.values()]
    for label, end, at in zip(never, ends, apart(ends, 0.0245), strict=True):
        axes.annotate(
            f"{label}  {end:.3f}",
            (steps, end),
            (18, at),
            textcoords=("offset points", "data"),
            color=STYLES[label][0],
            fontsize=9,
            va="center",
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": FAINT,
                "linewidth": 0.6,
                "shrinkA": 0,
                "shrinkB": 0,
                "relpos": (0, 0.5),
            },
        )
    axes.set(xscale="log", xlim=(1, steps), ylim=(0.56, 1.015))
    plain(axes, r"$\alpha$ never changes", "step (logarithmic)", r"$J(\pi)$, the expected reward")


def _draw_synced(axes: Axes, synced: dict[str, list[float]]) -> None:
    """Linear in the step, with a tick at each sync."""
    _draw_arms(axes)
    for label, J in synced.items():
        shown = J[: SHOWN_WITH_SYNCS + 1]
        _line(axes, label, range(len(shown)), shown)
    axes.set(xlim=(0, SHOWN_WITH_SYNCS), xticks=range(0, SHOWN_WITH_SYNCS + 1, 200))
    axes.set_xticks(range(0, SHOWN_WITH_SYNCS, 100), minor=True)
    plain(axes, r"$\alpha \leftarrow \pi$ every 100 steps", "step", "")


def _line(axes: Axes, label: str, steps: range, J: list[float]) -> None:
    color, dashes = STYLES[label]
    axes.plot(steps, J, color=color, linestyle=dashes, linewidth=1.8, label=label)


def _draw_arms(axes: Axes) -> None:
    """What the second and the best arm pay."""
    for reward in (0.8, 1.0):
        axes.axhline(reward, color=FAINT, linewidth=0.9, linestyle=(0, (4, 3)), zorder=1)
