"""pass@k, and intervals around what an evaluation reports."""

from math import comb, sqrt
from statistics import NormalDist

import torch
from jaxtyping import Float
from torch import Tensor


def pass_at_k(n: int, c: int, k: int) -> float:
    """The probability that k of n completions, drawn without replacement, hold at least one of the c correct ones:
    1 - C(n-c, k) / C(n, k), unbiased for pass@k (Chen et al., arXiv 2107.03374, Eq. 1).

    Computed in integers with one final division. Raises ValueError unless 0 <= c <= n and 1 <= k <= n."""
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass_at_k needs 0 <= c <= n and 1 <= k <= n, but n = {n}, c = {c}, k = {k}")
    return (comb(n, k) - comb(n - c, k)) / comb(n, k)


def bootstrap_interval(
    values_N: Float[Tensor, "N"], confidence: float = 0.95, resamples: int = 2000, seed: int = 0
) -> tuple[float, float]:
    """Percentile bootstrap interval for the mean over prompts (Efron 1979): prompts are resampled with replacement,
    each with all its completions, and the interval holds the central `confidence` of the resampled means.

    `values_N` is one number per prompt, for example its pass@k. A function of its arguments and nothing else.
    Raises ValueError for no prompts, no resamples or a confidence outside (0, 1)."""
    if values_N.dim() != 1 or values_N.shape[0] == 0 or resamples < 1:
        raise ValueError(
            f"bootstrap needs values of shape [N >= 1] and resamples >= 1, but {tuple(values_N.shape)}, {resamples}"
        )
    _require_confidence(confidence)
    N = values_N.shape[0]
    drawn = torch.randint(N, (resamples, N), generator=torch.Generator().manual_seed(seed))
    means = values_N.double().cpu()[drawn].mean(dim=1)
    low, high = torch.quantile(
        means, torch.tensor([(1 - confidence) / 2, (1 + confidence) / 2], dtype=means.dtype)
    ).tolist()
    return low, high


def wilson_interval(successes: int, trials: int, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval for a proportion (1927): the p with |successes/trials - p| <= z sqrt(p (1-p) / trials).

    Sensible at 0 and at all successes, where the normal interval has width 0. Raises ValueError unless
    0 <= successes <= trials, trials >= 1 and confidence in (0, 1)."""
    if not 0 <= successes <= trials or trials < 1:
        raise ValueError(f"wilson_interval needs 0 <= successes <= trials and trials >= 1, but {successes} of {trials}")
    _require_confidence(confidence)
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    p, spread = successes / trials, z * z / trials
    centre = (p + spread / 2) / (1 + spread)
    half = z * sqrt(p * (1 - p) / trials + spread / (4 * trials)) / (1 + spread)
    low = 0.0 if successes == 0 else centre - half  # both ends are exact, up to rounding
    high = 1.0 if successes == trials else centre + half
    return low, high


def _require_confidence(confidence: float) -> None:
    if not 0.0 < confidence < 1.0:
        raise ValueError(f"confidence must lie between 0 and 1, but is {confidence}")
