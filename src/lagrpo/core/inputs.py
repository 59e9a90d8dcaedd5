"""The inputs of an objective: the tokens of a micro-batch, flat, and facts about completions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeAlias, TypeVar, cast

import torch
from torch import Tensor

Function = TypeVar("Function", bound=Callable[..., Tensor])


class Statistics(dict[str, Tensor]):
    """Statistics of a whole optimizer step, by the name of the function that reads them."""

    def __missing__(self, name: str) -> Tensor:
        raise LookupError(
            f"x.step has no {name!r}: a function decorated with @collects(statistic) finds "
            "the result in x.step under its own name"
        )


@dataclass(frozen=True, slots=True)
class LossInputs:
    """A micro-batch of whole completions: tensors of its tokens [T], and of its completions [C].

    An optional tensor is None if the data lacks it. Raises ValueError for tensors of tokens that
    are not aligned.
    """

    logp: Tensor
    """[T] log pi of the sampled tokens, nats; the only tensor with a gradient"""
    rollout_logp: Tensor | None
    """[T] log alpha, recorded when the tokens were sampled"""
    old_logp: Tensor | None
    """[T] log pi_k, the policy at the start of the batch"""
    ref_logp: Tensor | None
    """[T] log pi_ref"""
    completion: Tensor
    """[T] index of each token's completion"""
    advantages: Tensor
    """[C]"""
    group: Tensor | None = None
    """[C] number of each completion's group in the whole batch, so it may be larger than C"""
    staleness: Tensor | None = None
    """[T] updates between the policy that sampled the token and the one that learns from it"""
    entropy: Tensor | None = None
    """[T] entropy of pi_k at the token, nats"""
    finished: Tensor | None = None
    """[C] True if an end token or a stop text ended the completion, False if it was cut"""
    step: Mapping[str, Tensor] = field(default_factory=Statistics)
    """statistics of the whole optimizer step, by the name of the function that collects them"""
    token_advantages: Tensor | None = None
    """[T] what the recipe adds to the advantage of each token; None: nothing"""
    logged: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    """metrics of your own, by name: what `log` was called with"""

    def __post_init__(self) -> None:
        token_tensors = {
            "rollout_logp": self.rollout_logp,
            "old_logp": self.old_logp,
            "ref_logp": self.ref_logp,
            "completion": self.completion,
            "staleness": self.staleness,
            "entropy": self.entropy,
            "token_advantages": self.token_advantages,
        }
        for name, tensor in token_tensors.items():
            if tensor is not None and (tensor.dim() != 1 or tensor.shape != self.logp.shape):
                shapes = f"logp {list(self.logp.shape)}, {name} {list(tensor.shape)}"
                raise ValueError(f"numbers of tokens must be flat and aligned: {shapes}")

    @property
    def advantage(self) -> Tensor:
        """[T] the advantage of each token: its completion's, and what is added to the token's."""
        advantage_T = self.advantages[self.completion]
        if self.token_advantages is None:
            return advantage_T
        return advantage_T + self.token_advantages

    def with_token_advantages(self, token_advantages: Tensor) -> LossInputs:
        """The same inputs, with numbers [T] that are added to the advantage of each token."""
        return replace(self, token_advantages=token_advantages)

    def log(self, name: str, value: Tensor) -> None:
        """Records a metric of your own, such as "mine/spread": its mean over the batch.

        `value` has a number for each token [T] or completion [C], or is one number, which then
        counts for each token of the micro-batch. A second call with the same name replaces the
        first. Raises ValueError for another shape, and for a name without "/": those are lagrpo's.
        """
        if "/" not in name:
            raise ValueError(f"metric {name!r}: your own metrics need a slash: mine/{name}")
        if value.shape not in (self.logp.shape, self.advantages.shape, torch.Size()):
            expected = f"{list(self.logp.shape)}, {list(self.advantages.shape)} or []"
            raise ValueError(f"metric {name!r} has the shape {list(value.shape)}, not {expected}")
        value = value.detach()
        self.logged[name] = value if value.dim() else value.expand_as(self.logp)


TokenFunction: TypeAlias = Callable[[LossInputs], Tensor]
"""LossInputs -> a value at each token [T]: a policy, mask, weight, regularizer or filter."""


def concatenate(micro_batches: Sequence[LossInputs]) -> LossInputs:
    """The completions of several micro-batches of a step as one.

    A tensor that one micro-batch lacks is left out for all.
    """
    completions: list[Tensor] = []
    completions_before = 0
    for x in micro_batches:
        # Indices of completions begin at 0 in each micro-batch, so they are shifted.
        completions.append(x.completion + completions_before)
        completions_before += len(x.advantages)
    return LossInputs(
        logp=torch.cat([x.logp for x in micro_batches]),
        rollout_logp=_concatenate_known([x.rollout_logp for x in micro_batches]),
        old_logp=_concatenate_known([x.old_logp for x in micro_batches]),
        ref_logp=_concatenate_known([x.ref_logp for x in micro_batches]),
        completion=torch.cat(completions),
        advantages=torch.cat([x.advantages for x in micro_batches]),
        group=_concatenate_known([x.group for x in micro_batches]),
        staleness=_concatenate_known([x.staleness for x in micro_batches]),
        entropy=_concatenate_known([x.entropy for x in micro_batches]),
        finished=_concatenate_known([x.finished for x in micro_batches]),
    )


def _concatenate_known(tensors: Sequence[Tensor | None]) -> Tensor | None:
    """The tensors as one; None if one of them is missing."""
    known = [tensor for tensor in tensors if tensor is not None]
    return torch.cat(known) if len(known) == len(tensors) else None


def on_device(x: LossInputs, device: torch.device | str) -> LossInputs:
    """Copies the inputs to another device, except `step`."""

    def move(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.to(device)

    return replace(
        x,
        logp=x.logp.to(device),
        rollout_logp=move(x.rollout_logp),
        old_logp=move(x.old_logp),
        ref_logp=move(x.ref_logp),
        completion=x.completion.to(device),
        advantages=x.advantages.to(device),
        group=move(x.group),
        staleness=move(x.staleness),
        entropy=move(x.entropy),
        finished=move(x.finished),
    )


def without_gradient(x: LossInputs) -> LossInputs:
    """The same inputs with log pi as a number."""
    return replace(x, logp=x.logp.detach())


# Policies: values of the knobs `denominator`, `anchor` and `student`. Each gives log-probs [T],
# nats.


def pi(x: LossInputs) -> Tensor:
    """The policy that learns, as a number: without a gradient."""
    return x.logp.detach()


def alpha(x: LossInputs) -> Tensor:
    """The behavior policy, which sampled the tokens."""
    return _require(x.rollout_logp, "rollout_logp")


def pi_k(x: LossInputs) -> Tensor:
    """The policy at the start of the batch."""
    return _require(x.old_logp, "old_logp")


def pi_ref(x: LossInputs) -> Tensor:
    """The reference policy."""
    return _require(x.ref_logp, "ref_logp")


def _require(tensor: Tensor | None, name: str) -> Tensor:
    if tensor is None:
        raise ValueError(f"this objective needs {name}")
    return tensor


# Statistics of the whole step


class _WithStatistic(Protocol):
    """A function that `collects` has marked."""

    collect: Callable[..., Tensor]


def collects(statistic: Callable[..., Tensor]) -> Callable[[Function], Function]:
    """Gives a function of `LossInputs` a statistic of the whole optimizer step.

    Before the losses of a step, `statistic(x, **knobs)` is called once: x has the tokens of all
    micro-batches and ranks, without a gradient, and the knobs are the function's own. The function
    finds the result in `x.step[NAME]`, NAME being its own name; it should use it elementwise.
    """

    def mark(function: Function) -> Function:
        cast(_WithStatistic, function).collect = statistic
        return function

    return mark


def statistic_of(function: Callable[..., Tensor]) -> Callable[..., Tensor] | None:
    """The statistic of the whole step that a function reads; None if it reads none."""
    return getattr(function, "collect", None)
