"""The inputs of an objective: the tokens of a micro-batch, flat, and what belongs to each completion."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import Tensor

Function = TypeVar("Function", bound=Callable[..., Tensor])


@dataclass(frozen=True, slots=True)
class LossInputs:
    """A micro-batch of whole completions: numbers of its tokens [T], and of its completions [C]. An optional one is
    None if the data lacks it. Raises ValueError for numbers of tokens that are not aligned."""

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
    """[C] index of each completion's group"""
    staleness: Tensor | None = None
    """[T] updates between the policy that sampled the token and the one that learns from it"""
    entropy: Tensor | None = None
    """[T] entropy of pi_k at the token, nats"""
    finished: Tensor | None = None
    """[C] True if the completion ended by itself, False if it was cut at its limit"""
    step: Mapping[str, Tensor] = field(default_factory=dict)
    """statistics of the whole optimizer step, by the name of the function that collects them"""

    def __post_init__(self) -> None:
        of_tokens = {
            "rollout_logp": self.rollout_logp,
            "old_logp": self.old_logp,
            "ref_logp": self.ref_logp,
            "completion": self.completion,
            "staleness": self.staleness,
            "entropy": self.entropy,
        }
        for name, tensor in of_tokens.items():
            if tensor is not None and (tensor.dim() != 1 or tensor.shape != self.logp.shape):
                shapes = f"logp {list(self.logp.shape)}, {name} {list(tensor.shape)}"
                raise ValueError(f"numbers of tokens must be flat and aligned: {shapes}")

    @property
    def advantage(self) -> Tensor:
        """[T] the advantage of each token's completion."""
        return self.advantages[self.completion]


OF_TOKENS = ("logp", "rollout_logp", "old_logp", "ref_logp", "staleness", "entropy")
OF_COMPLETIONS = ("advantages", "group", "finished")


def concatenate(micro_batches: Sequence[LossInputs]) -> LossInputs:
    """The completions of several micro-batches of a step as one. What one micro-batch lacks, all lack."""
    columns: dict[str, Tensor | None] = {}
    for name in (*OF_TOKENS, *OF_COMPLETIONS):
        parts = [getattr(x, name) for x in micro_batches]
        is_known = all(part is not None for part in parts)
        columns[name] = torch.cat(parts) if is_known else None
    completions, first = [], 0
    for x in micro_batches:
        completions.append(x.completion + first)
        first += len(x.advantages)
    columns["completion"] = torch.cat(completions)
    return LossInputs(**columns)  # pyright: ignore[reportArgumentType] - logp and advantages are never None


def on_device(x: LossInputs, device: torch.device | str) -> LossInputs:
    """The same inputs in the memory of another device."""
    columns = {}
    for name in (*OF_TOKENS, *OF_COMPLETIONS, "completion"):
        tensor = getattr(x, name)
        columns[name] = None if tensor is None else tensor.to(device)
    return replace(x, **columns)


def without_gradient(x: LossInputs) -> LossInputs:
    """The same inputs with log pi as a number."""
    return replace(x, logp=x.logp.detach())


# Policies, for knobs named `denominator` and `anchor`


def alpha(x: LossInputs) -> Tensor:
    """The behavior policy, which sampled the tokens."""
    return _required(x.rollout_logp, "rollout_logp")


def pi_k(x: LossInputs) -> Tensor:
    """The policy at the start of the batch."""
    return _required(x.old_logp, "old_logp")


def pi_ref(x: LossInputs) -> Tensor:
    """The reference policy."""
    return _required(x.ref_logp, "ref_logp")


def _required(tensor: Tensor | None, name: str) -> Tensor:
    if tensor is None:
        raise ValueError(f"this objective needs {name}")
    return tensor


def collects(statistic: Callable[..., Tensor]) -> Callable[[Function], Function]:
    """Give a function of `LossInputs` a statistic of the whole optimizer step.

    Before the losses of a step, `statistic(x, **knobs)` is called once: x has the tokens of all
    micro-batches and ranks, without a gradient, and the knobs are the function's own. The function
    finds the result in `x.step[NAME]`, NAME being its own name; it should use it elementwise.
    """

    def attach(function: Function) -> Function:
        function.collect = statistic  # type: ignore[attr-defined]
        return function

    return attach
