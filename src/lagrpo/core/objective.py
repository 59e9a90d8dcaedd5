"""An objective, made of pieces, and what follows from them. core/recipes.py has the table of the published ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lagrpo.core.advantages import AdvantageInputs, normalized, overlong_penalty
from lagrpo.core.inputs import LossInputs, alpha, without_gradient
from lagrpo.core.kl import k3
from lagrpo.core.losses import clipped
from lagrpo.core.pieces import Piece, as_piece, knob_paths, piece, with_knob
from lagrpo.core.probe import RecordedInputs, random_inputs
from lagrpo.core.ratios import token
from lagrpo.core.reductions import token_mean

PIECES = ("advantage", "surrogate", "correction", "kl", "reduction")
NUMBERS = ("beta", "kl_importance", "overlong_buffer", "mask_zero_variance", "masked_count")


@dataclass(frozen=True, slots=True)
class Derivative:
    """A micro-batch's part of the loss, and its derivative by log pi of each token."""

    loss: Tensor
    """a number"""
    gradient_T: Tensor
    """[T] d loss / d log pi"""
    clipped_T: Tensor
    """[T] True where the surrogate has no gradient: the token is clipped, masked or filtered"""
    filtered_T: Tensor
    """[T] True where a filter drops the token"""
    kl_T: Tensor
    """[T] estimate of KL(pi || pi_ref); 0 without a KL term"""


@dataclass(frozen=True)
class Recipe:
    """An objective: a row of the table, or one of your own.

    A function stands for a piece with the defaults of its knobs.

        advantage       AdvantageInputs -> [C]
        surrogate, kl   LossInputs -> [T]
        correction      LossInputs -> the weight of each value [T]
        filters         LossInputs -> 1 or 0 for each token [T]
        reduction       lengths, counted [C], max_length -> weights [C]
    """

    formula: str = ""
    source: str = ""
    family: str = "your own"
    advantage: Piece = field(default_factory=lambda: piece(normalized))
    surrogate: Piece = field(default_factory=lambda: piece(clipped))
    correction: Piece | None = None
    filters: tuple[Piece, ...] = ()
    kl: Piece = field(default_factory=lambda: piece(k3))
    reduction: Piece = field(default_factory=lambda: piece(token_mean))
    beta: float = 0.0
    kl_importance: bool = False
    overlong_buffer: int = 0
    mask_zero_variance: bool = False
    masked_count: bool = False
    name: str = ""

    def __post_init__(self) -> None:
        for name in PIECES:
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, _as_piece_of(name, value))
        filters = self.filters
        if callable(filters) or isinstance(filters, str):
            filters = (filters,)
        object.__setattr__(self, "filters", tuple(_as_piece_of("filters", f) for f in filters))

    # What it computes

    def advantages(self, x: AdvantageInputs, max_length: int) -> Tensor:
        """The advantage of each completion of a batch [C]. `max_length` is how many tokens a completion may have."""
        if self.overlong_buffer:
            if x.lengths is None:
                raise ValueError("overlong_buffer needs the lengths of the completions")
            penalty_C = overlong_penalty(x.lengths, max_length, self.overlong_buffer)
            x = replace(x, rewards=x.rewards + penalty_C)
        return self.advantage(x)

    def weights(self, lengths_C: Tensor, zero_variance_C: Tensor, max_length: int) -> Tensor:
        """The weight of each completion of the whole batch in the objective; 0 in masked groups."""
        is_kept_C = torch.ones_like(zero_variance_C)
        if self.mask_zero_variance:
            is_kept_C = ~zero_variance_C
        return is_kept_C * self.reduction(lengths_C, is_kept_C | self.masked_count, max_length)

    def collect(self, step: LossInputs) -> dict[str, Tensor]:
        """The statistics that pieces read in `x.step`, by their names, from the tokens of the whole step."""
        return {p.function.__name__: p.function.collect(step, **p.knobs) for p in self._collectors}  # type: ignore[attr-defined]

    def value(self, x: LossInputs) -> Tensor:
        """The surrogate of each token [T], corrected; 0 where a filter drops it."""
        value_T = self.surrogate(x)
        if self.correction is not None:
            value_T = self.correction(x) * value_T
        if self.filters:
            value_T = value_T * self.kept(x)
        return value_T

    def kept(self, x: LossInputs) -> Tensor:
        """1 for the tokens that all filters keep, else 0, [T], without a gradient."""
        kept_T = torch.ones_like(x.logp).detach()
        for keep in self.filters:
            kept_T = kept_T * keep(x).detach()
        return kept_T

    def penalty(self, x: LossInputs) -> Tensor:
        """The estimate of KL(pi || pi_ref) at each token [T], 0 without a KL term."""
        if self.beta == 0:
            return torch.zeros_like(x.logp)
        kl_T = self.kl(x)
        if self.kl_importance:
            kl_T = token(x.logp - alpha(x), x.completion).detach() * kl_T
        return kl_T

    def loss(self, x: LossInputs, weight_C: Tensor) -> Tensor:
        """-sum_t weight (value - beta kl): a micro-batch's share of minus Eq. 7 of arXiv 2505.22257, of Eq. 8 if the
        weights mask groups. Backward on one micro-batch after the other gives the gradient of the batch."""
        weight_T = weight_C[x.completion]
        return -(weight_T * (self.value(x) - self.beta * self.penalty(x))).sum()

    def differentiate(self, x: LossInputs, weight_C: Tensor) -> Derivative:
        """The loss and its derivative by log pi, without a pass through what computed log pi: the caller sends
        `gradient_T` backward from there. Surrogate and KL term are differentiated one after the other, so that
        clipped tokens show as zeros whatever the KL term does."""
        logp_T = x.logp.detach().requires_grad_()
        x = replace(x, logp=logp_T)
        weight_T = weight_C[x.completion]
        with torch.enable_grad():
            surrogate_loss = -(weight_T * self.value(x)).sum()
            surrogate_gradient_T = _derivative(surrogate_loss, logp_T)
            kl_T = self.penalty(x)
            kl_loss = self.beta * (weight_T * kl_T).sum()
        gradient_T = surrogate_gradient_T
        if self.beta > 0:
            gradient_T = surrogate_gradient_T + _derivative(kl_loss, logp_T)
        return Derivative(
            loss=(surrogate_loss + kl_loss).detach(),
            gradient_T=gradient_T,
            clipped_T=surrogate_gradient_T == 0,
            filtered_T=self.kept(x) == 0,
            kl_T=kl_T.detach(),
        )

    # What it is made of

    @property
    def pieces(self) -> dict[str, Piece]:
        """The pieces that compute it, by their paths; the KL estimator only with a KL term."""
        pieces = {"advantage": self.advantage, "surrogate": self.surrogate}
        if self.correction is not None:
            pieces["correction"] = self.correction
        for keep in self.filters:
            pieces[f"filters.{keep.name}"] = keep
        if self.beta > 0:
            pieces["kl"] = self.kl
        pieces["reduction"] = self.reduction
        return pieces

    @property
    def knobs(self) -> dict[str, Any]:
        """Every knob that it reads, by its path: numbers, and pieces."""
        knobs: dict[str, Any] = {name: getattr(self, name) for name in NUMBERS}
        knobs |= {"correction": self.correction, "filters": self.filters}
        for path, root in self.pieces.items():
            knobs[path] = root
            knobs |= dict(knob_paths(root, path))
        return knobs

    def with_knob(self, path: str, value: Any) -> Recipe:
        """The recipe with another value at a path of `knobs`."""
        if path.startswith("filters."):
            changed = [_change_filter(keep, path, value) for keep in self.filters]
            return replace(self, filters=tuple(changed))
        root, *below = path.split(".")
        if below:
            value = with_knob(getattr(self, root), below, value)
        return replace(self, **{root: value})

    @property
    def settings(self) -> dict[str, Any]:
        """`knobs` as settings write them, functions by their names."""
        return {path: _as_setting(value) for path, value in self.knobs.items()}

    @property
    def functions(self) -> list[Callable]:
        """The functions that compute it, each once."""
        functions = [f for root in self.pieces.values() for f in root.functions()]
        with_statistics = []
        for function in functions:
            statistic = getattr(function, "collect", None)
            with_statistics += [function] if statistic is None else [statistic, function]
        return list(dict.fromkeys(with_statistics))

    @property
    def _collectors(self) -> list[Piece]:
        """The pieces that read a statistic of the whole step."""
        pieces = [p for root in self.pieces.values() for p in _pieces_below(root)]
        return [p for p in pieces if hasattr(p.function, "collect")]

    # What follows

    @cached_property
    def required_inputs(self) -> frozenset[str]:
        """The optional fields of LossInputs that the loss reads, found by computing it once on random inputs."""
        x = random_inputs()
        step = RecordedInputs.record(without_gradient(x))
        statistics = self.collect(step)
        micro_batch = RecordedInputs.record(replace(x, step=statistics))
        self.value(micro_batch)
        self.penalty(micro_batch)
        return frozenset(step.fields_read | micro_batch.fields_read)

    @cached_property
    def skips_zero_advantage(self) -> bool:
        """True if a completion with advantage 0 has no gradient, so that it need not be computed. A statistic of the
        whole step is one of all its completions, and a group is whole with all of its completions."""
        if self.needs_step_statistics or self.needs_whole_groups:
            return False
        x = random_inputs()
        derivative = self.differentiate(x, torch.ones_like(x.advantages))
        return bool((derivative.gradient_T[x.advantage == 0] == 0).all())

    @property
    def needs_step_statistics(self) -> bool:
        """True if a step has a first pass, which computes log pi of all its tokens before any loss."""
        return bool(self._collectors)

    @property
    def needs_rollout_logp(self) -> bool:
        """True if data must come with the log-probs of the policy that sampled it."""
        return "rollout_logp" in self.required_inputs

    @property
    def needs_old_logp(self) -> bool:
        """True if the loss compares with the policy at the start of the batch."""
        return "old_logp" in self.required_inputs

    @property
    def needs_pi_ref(self) -> bool:
        """True if the loss compares with the reference policy."""
        return "ref_logp" in self.required_inputs

    @property
    def needs_staleness(self) -> bool:
        """True if data must come with the version of the policy that sampled it."""
        return "staleness" in self.required_inputs

    @property
    def needs_whole_groups(self) -> bool:
        """True if a micro-batch must hold all completions of a group."""
        return "group" in self.required_inputs

    @property
    def eps_std(self) -> float:
        """The variance floor of sigma, also for metrics of recipes that do not divide by it."""
        return self.advantage.knobs.get("eps_std", 1e-4)


def _as_piece_of(name: str, value: Any) -> Piece:
    """The piece of a function. Raises TypeError for a name: only settings name functions."""
    if not callable(value):
        raise TypeError(f"Recipe: {name} = {value!r} is not a function; names are for settings")
    return as_piece(value)  # pyright: ignore[reportArgumentType]


def _derivative(value: Tensor, logp_T: Tensor) -> Tensor:
    """d value / d log pi, zeros if the value does not depend on it."""
    if not value.requires_grad:
        return torch.zeros_like(logp_T)
    (gradient_T,) = torch.autograd.grad(value, logp_T, allow_unused=True)
    return torch.zeros_like(logp_T) if gradient_T is None else gradient_T


def _change_filter(keep: Piece, path: str, value: Any) -> Piece:
    """The filter with a knob replaced, or another one in its place, if the path is one of its paths. Its name may have
    dots: `filters.my_package.losses:keep.share`."""
    own_path = f"filters.{keep.name}"
    if path == own_path:
        return as_piece(value)
    if path.startswith(f"{own_path}."):
        return with_knob(keep, path.removeprefix(f"{own_path}.").split("."), value)
    return keep


def _pieces_below(root: Piece) -> Iterator[Piece]:
    yield root
    for value in root.knobs.values():
        if isinstance(value, Piece):
            yield from _pieces_below(value)


def _as_setting(value: Any) -> Any:
    if isinstance(value, Piece):
        return value.name
    if isinstance(value, tuple):
        return [keep.name for keep in value]
    return value
