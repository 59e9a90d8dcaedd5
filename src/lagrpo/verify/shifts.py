"""Sums over all replayed tokens: they show changes that are too small to see at one token.

Another temperature, a scaled logit, top-p, noise, another version and updates with the wrong sign
move many tokens a little, all in one way. An honest run has errors of mean 0, up to the square of
their deviation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lagrpo.verify.record import RecordedRun
from lagrpo.verify.tokens import COLUMNS, RowReading

MAX_STANDARD_ERRORS = 6.0
"""An honest run exceeds them once in 10^9 times."""

MAX_STANDARD_ERRORS_OF_GAIN = 4.0
"""Once in 30,000 times, if updates have nothing to do with the completions. A gain needs as many
completions as the square of this number to exceed them."""


def check_shifts(run: RecordedRun, readings: Sequence[RowReading]) -> None:
    """Checks errors of log-probs, log-probs of sampled tokens, and directions of updates."""
    for column in COLUMNS:
        _check_errors(run, readings, column)
    if run.settings.rollout.engine == "local":
        _check_sampled_tokens(run, readings)
    _check_gain(run, readings)


def _check_errors(run: RecordedRun, readings: Sequence[RowReading], column: str) -> None:
    """Checks the mean, the slope and the mean square of recorded less recomputed log-probs.

    The slope is on the distance of the log-prob from its mean, minus the entropy. A change of the
    temperature, or of the scale of logits, by a share x has the slope x.
    """
    errors: list[Tensor] = []
    deviations: list[Tensor] = []
    distances: list[Tensor] = []
    for reading in readings:
        tokens = reading.tokens
        recorded = reading.column(column)
        is_known = ~recorded.isnan()
        errors.append((recorded - tokens.logp)[is_known])
        deviations.append(tokens.deviation[is_known])
        distances.append((tokens.logp + tokens.entropy)[is_known])
    error_T = _join(errors)
    deviation_T = _join(deviations)
    distance_T = _join(distances)
    n = len(error_T)
    if n == 0:
        return
    where = f"{column}, {n:,} tokens"
    bias = deviation_T.square().mean().item()

    standard_error = deviation_T.square().sum().sqrt().item() / n
    bound = MAX_STANDARD_ERRORS * standard_error + bias
    _compare(run, where, "mean error", error_T.mean().item(), bound)

    squares = distance_T.square().sum().item()
    if squares > 0:
        slope = (error_T * distance_T).sum().item() / squares
        standard_error = (deviation_T * distance_T).square().sum().sqrt().item() / squares
        bound = MAX_STANDARD_ERRORS * standard_error + bias
        _compare(run, where, "slope of errors on log-probs", slope, bound)

    mean_square = (error_T / deviation_T).square().mean().item()
    bound = 1 + MAX_STANDARD_ERRORS * math.sqrt(2 / n)
    _compare(run, where, "mean squared error, in units of the noise", mean_square, bound)


def _check_sampled_tokens(run: RecordedRun, readings: Sequence[RowReading]) -> None:
    """Checks the mean log-prob of the sampled tokens less that mean of the replay's tokens.

    Both have the same random numbers, so only tokens near a boundary differ, to either side.
    """
    differences: list[Tensor] = []
    deviations: list[Tensor] = []
    for reading in readings:
        tokens = reading.tokens
        is_sampled = reading.is_sampled_by_version()
        differences.append((tokens.logp - tokens.expected_logp)[is_sampled])
        deviations.append(tokens.deviation[is_sampled])
    difference_T = _join(differences)
    deviation_T = _join(deviations)
    n = len(difference_T)
    if n < 2:
        return
    standard_error = difference_T.std().item() / math.sqrt(n)
    bound = MAX_STANDARD_ERRORS * standard_error + deviation_T.square().mean().item()
    mean = difference_T.mean().item()
    name = "mean log-prob of sampled tokens less the replay's"
    _compare(run, f"samples, {n:,} tokens", name, mean, bound)


def _check_gain(run: RecordedRun, readings: Sequence[RowReading]) -> None:
    """Checks that updates raise log-probs of completions with a positive advantage, on average.

    To first order, sum of advantage times the change of log π is the product of the change of the
    weights with the direction in which the loss falls. An entropy term has another direction.
    """
    loss = run.settings.loss
    if loss.entropy_coef > 0 or loss.entropy_target is not None:
        run.report.skip("update directions: the loss also has the entropy")
        return
    if loss.reference is not None or loss.reference_prompt is not None:
        run.report.skip("update directions: the loss also has the teacher")
        return
    logp_by_row: dict[tuple[str, int | None], float] = {}
    for reading in readings:
        is_sampled = torch.tensor(reading.row["loss_mask"])
        logp = reading.tokens.logp[is_sampled].sum().item()
        logp_by_row[reading.row["where"], reading.version] = logp
    gains: list[float] = []
    for reading in readings:
        row = reading.row
        old_logp = logp_by_row[row["where"], reading.version]
        logp_after = logp_by_row.get((row["where"], run.version_after(row["step"])))
        if reading.version == row["policy_version"] and logp_after is not None:
            gains.append((row["advantage"] or 0.0) * (logp_after - old_logp))
    squares = sum(gain * gain for gain in gains)
    if squares == 0:
        return
    z = sum(gains) / math.sqrt(squares)
    name = "gain of the updates along the advantages"
    expected = f"above -{MAX_STANDARD_ERRORS_OF_GAIN:g} standard errors"
    recorded = expected if z > -MAX_STANDARD_ERRORS_OF_GAIN else f"{z:.1f} standard errors"
    where = f"updates, {len(gains):,} completions"
    run.report.compare("update directions", where, {name: expected}, {name: recorded})


def _compare(run: RecordedRun, where: str, name: str, value: float, bound: float) -> None:
    limit = f"at most {bound:.2g} in size"
    recorded = limit if abs(value) <= bound else f"{value:.2g}"
    run.report.compare("shifts", where, {name: limit}, {name: recorded})


def _join(pieces: Sequence[Tensor]) -> Tensor:
    return torch.cat([torch.empty(0, dtype=torch.float64), *pieces])
