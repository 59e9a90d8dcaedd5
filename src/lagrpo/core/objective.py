"""An objective, made of pieces, and what follows from them.

core/rows.py has the table of the published ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, cast

import torch
from torch import Tensor

from lagrpo.core.advantages import AdvantageInputs, normalized, overlong_penalty, zero
from lagrpo.core.inputs import LossInputs, Statistics, alpha, statistic_of, without_gradient
from lagrpo.core.kl import k3
from lagrpo.core.losses import clipped, reinforce
from lagrpo.core.pieces import (
    Minimum,
    NonNegative,
    Piece,
    PieceFunction,
    as_piece,
    knob_paths,
    piece,
    with_knob,
)
from lagrpo.core.probe import RecordedInputs, random_inputs
from lagrpo.core.ratios import token
from lagrpo.core.reductions import token_mean

PIECES = ("advantage", "token_advantage", "surrogate", "correction", "kl", "reduction")
"""The fields of a Recipe that hold one piece each."""

NUMBERS = ("beta", "kl_importance", "overlong_buffer", "mask_zero_variance", "masked_count")
"""The fields of a Recipe that hold a number or a flag."""


@dataclass(frozen=True, slots=True)
class Derivative:
    """A micro-batch's part of the loss, and its derivative by log pi of each token."""

    loss: Tensor
    """a number"""
    gradient_T: Tensor
    """[T] d loss / d log pi"""
    clipped_T: Tensor
    """[T] True for a clipped, masked or filtered token: the surrogate gives it no gradient, only a
    regularizer may"""
    filtered_T: Tensor
    """[T] True where a filter drops the token"""
    kl_T: Tensor
    """[T] estimate of KL(pi || pi_ref), nats; 0 without a KL term or a teacher"""


@dataclass(frozen=True)
class Recipe:
    """An objective: a row of the table, or one of your own.

    A function stands for a piece with the defaults of its knobs.

        advantage        AdvantageInputs -> [C]
        token_advantage  LossInputs -> [T], added to the advantage of each token
        surrogate, kl    LossInputs -> [T]
        correction       LossInputs -> the weight of each value [T]
        filters          LossInputs -> 1 or 0 for each token [T]
        reduction        lengths, counted [C], max_length -> weights [C]
    """

    formula: str = ""
    source: str = ""
    family: str = "your own"
    advantage: Piece = field(default_factory=lambda: piece(normalized))
    token_advantage: Piece | None = None
    surrogate: Piece = field(default_factory=lambda: piece(clipped))
    correction: Piece | None = None
    filters: tuple[Piece, ...] = ()
    kl: Piece = field(default_factory=lambda: piece(k3))
    reduction: Piece = field(default_factory=lambda: piece(token_mean))
    beta: NonNegative = 0.0
    """weight of the KL term; 0: no KL term, so no reference policy"""
    kl_importance: bool = False
    """weight each token's KL estimate by its ratio pi/alpha"""
    overlong_buffer: Annotated[int, Minimum(0)] = 0
    """tokens before the limit in which DAPO's penalty for length grows; 0: no penalty"""
    mask_zero_variance: bool = False
    """give groups whose rewards are all equal a weight of 0"""
    masked_count: bool = False
    """count masked groups in the normalizer, as Eq. 8 of arXiv 2505.22257 does"""
    name: str = ""

    def __post_init__(self) -> None:
        # The class is frozen, so only object.__setattr__ can replace functions by pieces.
        for name in PIECES:
            function = getattr(self, name)
            if function is not None:
                object.__setattr__(self, name, _read_piece(name, function))
        object.__setattr__(self, "filters", _read_filters(self.filters))

    # The loss

    def advantages(self, x: AdvantageInputs, max_length: int) -> Tensor:
        """The advantage of each completion of a batch [C].

        `max_length` is the most tokens that a completion may have.
        """
        if self.overlong_buffer:
            if x.lengths is None:
                raise ValueError("overlong_buffer needs the lengths of the completions")
            penalty_C = overlong_penalty(x.lengths, max_length, self.overlong_buffer)
            x = replace(x, rewards=x.rewards + penalty_C)
        return self.advantage(x)

    def weights(self, lengths_C: Tensor, zero_variance_C: Tensor, max_length: int) -> Tensor:
        """The weight of each completion of the whole batch [C]; 0 in masked groups."""
        is_kept_C = torch.ones_like(zero_variance_C)
        if self.mask_zero_variance:
            is_kept_C = ~zero_variance_C
        # A masked group may count in the normalizer, but has no weight itself.
        is_counted_C = is_kept_C | self.masked_count
        return is_kept_C * self.reduction(lengths_C, is_counted_C, max_length)

    def with_token_advantages(self, x: LossInputs) -> LossInputs:
        """The inputs with what this recipe adds to the advantage of each token, as a number."""
        if self.token_advantage is None or x.token_advantages is not None:
            return x
        return x.with_token_advantages(self.token_advantage(x).detach())

    def collect(self, step: LossInputs) -> dict[str, Tensor]:
        """The statistics that pieces read in `x.step`, from the tokens of the whole step."""
        step = self.with_token_advantages(step)
        statistics = Statistics()
        for part in self._all_pieces():
            statistic = statistic_of(part.function)
            if statistic is not None:
                statistics[part.function.__name__] = statistic(step, **part.knobs)
        return statistics

    def value(self, x: LossInputs) -> Tensor:
        """The surrogate of each token [T], corrected; 0 where a filter drops it."""
        x = self.with_token_advantages(x)
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
        """The estimate of KL(pi || pi_ref) at each token [T], nats; 0 without a KL term."""
        if self.beta == 0:
            return torch.zeros_like(x.logp)
        kl_T = self.kl(x)
        if self.kl_importance:
            kl_T = token(x.logp - alpha(x), x.completion).detach() * kl_T
        return kl_T

    def loss(self, x: LossInputs, weight_C: Tensor) -> Tensor:
        """-sum_t weight (value - beta kl): a micro-batch's share of the loss, a number.

        The loss is minus Eq. 7 of arXiv 2505.22257, minus Eq. 8 if the weights mask groups.
        Backward on one micro-batch after the other gives the gradient of the batch. The trainer
        calls `differentiate`, which has the same loss and also says which tokens are clipped.
        """
        weight_T = weight_C[x.completion]
        return -(weight_T * (self.value(x) - self.beta * self.penalty(x))).sum()

    def differentiate(self, x: LossInputs, weight_C: Tensor) -> Derivative:
        """The loss and its derivative by log pi, [T].

        The model that computed log pi is not passed: the caller sends `gradient_T` backward from
        there.
        """
        logp_T = x.logp.detach().requires_grad_()
        x = self.with_token_advantages(replace(x, logp=logp_T))
        weight_T = weight_C[x.completion]
        # Surrogate and KL term are differentiated one after the other, so that a clipped token
        # shows as a zero in the first derivative, whatever the KL term does.
        with torch.enable_grad():
            surrogate_loss = -(weight_T * self.value(x)).sum()
            surrogate_gradient_T = _derivative(surrogate_loss, logp_T)
            kl_T = self.penalty(x)
            kl_loss = self.beta * (weight_T * kl_T).sum()
        if self.beta == 0 and self.needs_teacher:
            # Not in the loss: it shows how far the teacher is.
            kl_T = self.kl(x)
        gradient_T = surrogate_gradient_T
        if self.beta > 0:
            gradient_T = surrogate_gradient_T + _derivative(kl_loss, logp_T)
        return Derivative(
            loss=(surrogate_loss + kl_loss).detach(),
            gradient_T=gradient_T,
            clipped_T=self._is_clipped(x, weight_T, surrogate_gradient_T),
            filtered_T=self.kept(x) == 0,
            kl_T=kl_T.detach(),
        )

    def _is_clipped(self, x: LossInputs, weight_T: Tensor, surrogate_gradient_T: Tensor) -> Tensor:
        """True for tokens to which the surrogate itself gives no gradient, [T].

        A regularizer of `reinforce` also has a gradient where the mask cuts the reward's, so the
        surrogate is differentiated without it.
        """
        surrogate = self.surrogate
        if surrogate.function is not reinforce or surrogate.knobs["regularizer"] is None:
            return surrogate_gradient_T == 0
        unregularized = replace(self, surrogate=with_knob(surrogate, ["regularizer"], None))
        with torch.enable_grad():
            value = (weight_T * unregularized.value(x)).sum()
            return _derivative(value, x.logp) == 0

    # Its pieces and knobs

    @property
    def pieces(self) -> dict[str, Piece]:
        """The pieces that compute it, by their paths; the KL estimator only with a KL term."""
        pieces = {"advantage": self.advantage}
        if self.token_advantage is not None:
            pieces["token_advantage"] = self.token_advantage
        pieces["surrogate"] = self.surrogate
        if self.correction is not None:
            pieces["correction"] = self.correction
        for keep in self.filters:
            pieces[f"filters.{keep.name}"] = keep
        if self.beta > 0:
            pieces["kl"] = self.kl
        pieces["reduction"] = self.reduction
        return pieces

    @property
    def knobs(self) -> dict[str, object]:
        """Every knob that it reads, by its path: numbers, and pieces."""
        knobs: dict[str, object] = {name: getattr(self, name) for name in NUMBERS}
        knobs |= {
            "token_advantage": self.token_advantage,
            "correction": self.correction,
            "filters": self.filters,
        }
        for path, root in self.pieces.items():
            knobs[path] = root
            knobs |= dict(knob_paths(root, path))
        return knobs

    def with_knob(self, path: str, value: object) -> Recipe:
        """The recipe with another value at a path of `knobs`."""
        if path.startswith("filters."):
            filters = [_change_filter(keep, path, value) for keep in self.filters]
            return replace(self, filters=tuple(filters))
        field_name, *path_below = path.split(".")
        if path_below:
            value = with_knob(getattr(self, field_name), path_below, value)
        return replace(self, **{field_name: value})

    @property
    def settings(self) -> dict[str, object]:
        """`knobs` as settings write them, functions by their names."""
        return {path: _as_setting(value) for path, value in self.knobs.items()}

    @property
    def functions(self) -> list[PieceFunction]:
        """The functions that compute it, each once, and a statistic before its reader."""
        functions: list[PieceFunction] = []
        for part in self._all_pieces():
            statistic = statistic_of(part.function)
            if statistic is not None:
                functions.append(statistic)
            functions.append(part.function)
        return list(dict.fromkeys(functions))

    def _all_pieces(self) -> list[Piece]:
        """The pieces that compute it, and the pieces among their knobs."""
        return [part for root in self.pieces.values() for part in root.pieces()]

    # Its needs

    @cached_property
    def own_metrics(self) -> tuple[str, ...]:
        """The names of the metrics that its functions log with `x.log`."""
        x = random_inputs()
        x = replace(x, step=self.collect(without_gradient(x)))
        self.differentiate(x, torch.ones_like(x.advantages))
        return tuple(x.logged)

    @cached_property
    def required_inputs(self) -> frozenset[str]:
        """The optional fields of LossInputs that the loss reads.

        They are found by computing the loss once on random inputs.
        """
        x = random_inputs()
        step = RecordedInputs.record(without_gradient(x))
        statistics = self.collect(step)
        micro_batch = RecordedInputs.record(replace(x, step=statistics))
        self.value(micro_batch)
        self.penalty(micro_batch)
        return frozenset(step.fields_read | micro_batch.fields_read)

    @cached_property
    def skips_zero_advantage(self) -> bool:
        """True if a completion with advantage 0 has no gradient, so it need not be computed."""
        # Statistics of the step and groups read all of their completions.
        if self.needs_step_statistics or self.needs_whole_groups:
            return False
        x = random_inputs()
        derivative = self.differentiate(x, torch.ones_like(x.advantages))
        return bool((derivative.gradient_T[x.advantage == 0] == 0).all())

    @property
    def needs_step_statistics(self) -> bool:
        """True if a step has a first pass, which computes log pi of all tokens before any loss."""
        return any(statistic_of(part.function) is not None for part in self._all_pieces())

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
    def ignores_reward(self) -> bool:
        """True if only a `token_advantage` can teach."""
        return self.advantage.function is zero

    @cached_property
    def needs_teacher(self) -> bool:
        """True if tokens have advantages from the reference policy, as from a teacher.

        The policy's own start as the reference would teach nothing.
        """
        x = RecordedInputs.record(random_inputs())
        self.with_token_advantages(x)
        return "ref_logp" in x.fields_read

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
        eps_std = self.advantage.knobs.get("eps_std")
        return eps_std if isinstance(eps_std, int | float) else 1e-4


def _read_piece(name: str, function: object) -> Piece:
    """The piece of a function. Raises TypeError for a name: only settings name functions."""
    if not callable(function):
        raise TypeError(f"Recipe: {name} = {function!r} is not a function; names are for settings")
    # core/own_functions.py tries functions of your own: `callable` does not show what they return.
    return as_piece(cast(PieceFunction, function))


def _read_filters(filters: object) -> tuple[Piece, ...]:
    """The filters as pieces. A single one stands for a tuple of one."""
    if callable(filters) or isinstance(filters, str):
        return (_read_piece("filters", filters),)
    return tuple(_read_piece("filters", keep) for keep in cast(Iterable[object], filters))


def _derivative(value: Tensor, logp_T: Tensor) -> Tensor:
    """d value / d log pi, [T]; zeros if the value does not depend on it."""
    if not value.requires_grad:
        return torch.zeros_like(logp_T)
    (gradient_T,) = torch.autograd.grad(value, logp_T, materialize_grads=True)
    return gradient_T


def _change_filter(keep: Piece, path: str, value: object) -> Piece:
    """The filter with the knob at a path replaced, or another filter in its place.

    The filter itself if the path is not one of its paths. Its name may have dots:
    `filters.my_package.losses:keep.share`.
    """
    filter_path = f"filters.{keep.name}"
    if path == filter_path:
        return _read_piece(filter_path, value)
    if path.startswith(f"{filter_path}."):
        path_below = path.removeprefix(f"{filter_path}.").split(".")
        return with_knob(keep, path_below, value)
    return keep


def _as_setting(value: object) -> object:
    if isinstance(value, Piece):
        return value.name
    if isinstance(value, tuple):
        filters = cast(tuple[Piece, ...], value)
        return [keep.name for keep in filters]
    return value
