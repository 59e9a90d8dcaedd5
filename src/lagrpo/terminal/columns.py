"""The columns in which a batch's metrics are shown, live and plain."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from lagrpo.terminal.text import ABSENT, formatted

Metrics = Mapping[str, Any]


class Column(NamedTuple):
    """One column of the table: its heading, its width, and the text of a batch's metrics."""

    heading: str
    width: int
    text: Callable[[Metrics], str]


def number(key: str, form: str) -> Callable[[Metrics], str]:
    """The text of one metric, in a format of Python's mini-language."""
    return lambda metrics: formatted(metrics.get(key), form)


def lag(metrics: Metrics) -> str:
    """The measured lag of the batch's tokens: one number, or the least and the greatest."""
    low, high = (formatted(metrics.get(key), ".0f") for key in ("lag_min", "lag_max"))
    return low if low == high else f"{low}..{high}"


def clip_share(metrics: Metrics) -> str:
    """The share of tokens outside the clip range on either side, at the last update on the batch."""
    low, high = metrics.get("clip_low_share_last"), metrics.get("clip_high_share_last")
    return ABSENT if low is None and high is None else formatted((low or 0) + (high or 0), ".1%")


def gained(metrics: Metrics) -> str:
    """J(π_k) - J(α), where its estimate means something."""
    return formatted(metrics.get("lag_improvement"), "+.3f") if metrics.get("lag_reliable") else ABSENT


PLAIN_WIDTH = 119  # of the lines of a log
LEGEND = (
    "no signal: groups with all rewards equal · lag: in updates, read from the tokens\n"
    "clipped: tokens outside the clip range · sampled/s, learned/s: tokens a second\n"
    "TV: between π_k and α, of whole completions · gained: J(π_k) - J(α), where enough completions estimate it"
)
# In order of importance: a narrow terminal shows the first ones, 80 columns hold the first eight.
COLUMNS = (
    Column("batch", 6, number("batch", "d")),
    Column("reward", 7, number("reward_mean", ".3f")),
    Column("no signal", 9, number("zero_variance_share", ".0%")),
    Column("lag", 7, lag),
    Column("KL to α", 8, number("kl_alpha", ".1e")),
    Column("clipped", 7, clip_share),
    Column("sampled/s", 9, number("tokens_per_s_sampling", ",.0f")),
    Column("learned/s", 9, number("tokens_per_s_learning", ",.0f")),
    Column("seconds", 7, number("seconds_total", ".1f")),
    Column("TV", 5, number("tv_sequence", ".2f")),
    Column("gained", 7, gained),
    Column("new α", 5, lambda metrics: "yes" if metrics.get("synced") else ""),
    Column("unscored", 8, number("unscored", "d")),
    Column("tokens", 6, number("tokens_mean", ".0f")),
    Column("stage", 5, number("stage", "d")),
    Column("σ", 5, number("sigma_mean", ".2f")),
)


def columns_for(width: int) -> list[Column]:
    """The columns that fit, with two spaces between them."""
    used, chosen = 0, []
    for column in COLUMNS:
        used += column.width + 2
        if used - 2 > width:
            break
        chosen.append(column)
    return chosen
