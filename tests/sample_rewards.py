"""Rewards and evaluations of a user's own, in a light module: worker processes import it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import Any


def letters(text: str, gold: Any) -> float:
    return sum(c.islower() for c in text) / 8


def scaled(text: str, gold: Any, by: float, plus: float = 0.0) -> float:
    return len(text) * by + plus


def ranked(texts: Sequence[str], golds: Sequence[Any]) -> list[float]:
    """Where each text stands among those of its group, by length: what no text says alone."""
    order = sorted(len(text) for text in texts)
    return [order.index(len(text)) / len(texts) for text in texts]


def one_short(texts: Sequence[str], golds: Sequence[Any]) -> list[float]:
    return [0.0] * (len(texts) - 1)


async def awaited(text: str, gold: Any) -> float:
    """Waits as many tenths of a second as the text says, without holding up the others."""
    if text == "fail":
        raise ConnectionError("refused")
    await asyncio.sleep(float(text) / 10)
    return 1.0


async def awaited_together(texts: Sequence[str], golds: Sequence[Any]) -> list[float]:
    await asyncio.sleep(0.01)
    return [float(text == gold) for text, gold in zip(texts, golds, strict=True)]


async def awaited_for_an_hour(texts: Sequence[str], golds: Sequence[Any]) -> list[float]:
    await asyncio.sleep(3600)
    return [0.0] * len(texts)


def keyed(texts: Sequence[str], golds: Sequence[Any]) -> dict[int, float]:
    return dict.fromkeys(range(len(texts)), 1.0)


def unprintable(text: str, gold: Any) -> float:
    raise ValueError("half a pair: \ud800")


def fragile(text: str, gold: Any) -> float:
    if text == "die":
        os._exit(3)
    if text == "raise":
        raise ValueError("no")
    return 0.5
