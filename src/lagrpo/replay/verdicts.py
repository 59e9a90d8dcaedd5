"""Completions judged again, and their outcomes beside the recorded ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from lagrpo.replay.findings import Check
from lagrpo.replay.source import Source
from lagrpo.tasks import Task
from lagrpo.tasks.rewards import Answer, Reward, Rewards, sum_up
from lagrpo.types import Completion, Group, Outcome, Prompt
from lagrpo.verify import Verifier

Tasks = Callable[[int], Task | None]
"""The task of a batch; None where it cannot be had."""
Judging = Callable[[Iterable[Sequence[Answer]]], Iterator[Outcome]]
"""From the answers of each group to the outcome of each answer."""

ASKED = "a server gave them, and might give others: their weighted sum was checked"
_BY_MACHINE = ("no verdict within ", "the worker process ")  # how reasons begin that another machine may not give


def of(judge: Any) -> tuple[Reward, ...]:
    """The rewards of a task that has several."""
    return judge.of if isinstance(judge, Rewards) else ()


@contextmanager
def judging_again(source: Source, judge: Any) -> Iterator[Judging]:
    """Inside, worker processes judge as `judge` does; of several rewards those that repeat themselves."""
    settings = source.settings.verifier.model_copy(update={"max_without_reward": 1.0}).of_a_batch
    repeating = tuple(reward for reward in of(judge) if reward.repeats)
    if of(judge) and not repeating:
        yield lambda groups: (Outcome.scored(0.0) for group in groups for _ in group)
        return
    with Verifier(Rewards(repeating) if repeating else judge, **settings) as judges:
        yield lambda groups: judge_answers(judges, groups)


def judge_answers(judges: Verifier, groups: Iterable[Sequence[Answer]]) -> Iterator[Outcome]:
    """The outcome of each answer of each group, which has one gold answer."""
    asked = (
        Group(Prompt(n, (), answers[0].gold), tuple(map(_completion, answers)))
        for n, answers in enumerate(groups)
        if answers
    )
    for group in judges.judge(asked):
        for completion in group.completions:
            assert completion.outcome is not None
            yield completion.outcome


def _completion(answer: Answer) -> Completion:
    none = torch.zeros(answer.tokens)
    return Completion(none, none, none, finished=answer.finished, text=answer.text)


def compare(found: Check, file: str, place: str, recorded: Outcome, verdict: Outcome, judge: Any = None) -> None:
    """An outcome and the one that judging again gives. A verdict that did not come in time on either side, or whose
    process ended, decides nothing: that depends on the machine."""
    if not (rewards := of(judge)):
        return _compare(found, file, place, "reward", recorded, verdict)
    for name, value in verdict.parts.items():
        one, other = (
            _part(outcome, number) for outcome, number in ((recorded, recorded.parts.get(name)), (verdict, value))
        )
        _compare(found, file, place, f"reward_{name}", one, other)
    values = [value for value in (recorded.parts.get(reward.name) for reward in rewards) if value is not None]
    known = len(values) == len(rewards)
    total = sum_up([reward.weight * value for reward, value in zip(rewards, values, strict=True)]) if known else None
    total = total if total is not None and math.isfinite(total) else None
    found.near(file, place, "reward", recorded.reward, total, 0.0)
    found.equal(file, place, "right", recorded.right, _call_right(rewards, values) if total is not None else None)


def _part(outcome: Outcome, value: float | None) -> Outcome:
    return Outcome.unscored(outcome.reason) if value is None else Outcome.scored(value)


def _call_right(rewards: Sequence[Reward], values: Sequence[float]) -> bool:
    """Whether the rewards that decide have their greatest value: the first of them where none says that it does."""
    deciding = [n for n, reward in enumerate(rewards) if reward.decides] or [0]
    return all(values[n] >= rewards[n].range[1] for n in deciding)


def _compare(found: Check, file: str, place: str, name: str, recorded: Outcome, verdict: Outcome) -> None:
    if recorded.kind == verdict.kind == "scored":
        found.near(file, place, name, recorded.reward, verdict.reward, 0.0)
    elif recorded.kind != verdict.kind and any(o.reason.startswith(_BY_MACHINE) for o in (recorded, verdict)):
        found.compared += 1
        found.undecided += 1
    else:
        found.equal(file, place, "outcome" if name == "reward" else name, recorded.kind, verdict.kind)
