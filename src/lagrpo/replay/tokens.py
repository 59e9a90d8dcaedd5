"""Samples and log-probs, token by token, against plain transformers.

A token y sampled at uniform u is right when F(y - 1) <= u < F(y), with F the cumulative distribution of α over the
vocabulary. F is recomputed here, so it carries the noise of two arithmetics, and a token is judged in log-odds: logits
that are off by at most e move the log-odds of any F by at most 2 e, because F/(1 - F) is a ratio of two sums of
exponentials. The noise is read from the run itself: the median error of a token's own log-odds, which wrong values of
up to half the tokens cannot move, within what the dtype explains.

    right       u inside [F(y - 1), F(y)) by more than EDGE times the noise
    undecided   u within EDGE times the noise of an end of it
    differs     u outside by more
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from lagrpo.replay.findings import Check, Difference, Report
from lagrpo.replay.replays import KEEP, Replay, replayed, subset
from lagrpo.replay.source import Row, Source
from lagrpo.replay.weights import Weights
from lagrpo.rng import uniforms

EDGE = 8.0  # honest runs stay within 4 times the noise: SmolLM2 and tiny models, bfloat16 and float32
TOKEN = 24.0  # honest log-probs stay within 12 times the noise
NOISE = {"bfloat16": (1e-3, 0.15), "float32": (1e-6, 1e-2)}  # least and greatest noise that a dtype explains, log-odds
ELSEWHERE = 1 << 32  # completions that no run has: the uniforms of the control


def check(source: Source, weights: Weights, rows: Sequence[Row], count: int | None, seed: int, report: Report) -> None:
    """Check samples, log-probs of α by version, and divergences of π_k from α, for `count` completions (None: all)."""
    chosen = subset(source, weights, rows, count, seed, report)
    replays = replayed(source, weights, chosen)
    noise = noise_of(replays, source.dtype)
    if source.settings.sampling.sampler == "local":
        check_samples(source, replays, noise, report)
    else:
        tokens = sum(replay.row.length for replay in replays)
        report.skip("samples: tokens", "vLLM sampled them with random numbers of its own", tokens)
    check_logp(replays, noise, report)
    check_divergences(source, replays, noise, report)


def noise_of(replays: Sequence[Replay], dtype: str) -> float:
    """The median |error| of the log-odds of a token, within what the dtype explains."""
    least, greatest = NOISE[dtype]
    errors = [(r.gap / r.room)[r.known & (r.room > 1e-3) & ~r.recorded.isnan()] for r in replays]
    together = torch.cat([torch.empty(0, dtype=torch.float64), *errors])
    return min(max(together.median().item(), least), greatest) if len(together) else least


def outside(replay: Replay, uniform_T: Tensor) -> Tensor:
    """How far u lies outside its token's part of the distribution, in log-odds [t]; negative inside."""
    odds = uniform_T.clamp(min=1e-300).log() - torch.log1p(-uniform_T)
    return torch.maximum(replay.low - odds, odds - replay.high)


def check_samples(source: Source, replays: Sequence[Replay], noise: float, report: Report) -> None:
    """Whether every token is the inverse CDF of α at its address. The control asks the same of random numbers of other
    addresses: the share that differs there is the power of the check."""
    margin = EDGE * noise
    found = report.check("samples", "log-odds")
    caught = of = 0
    for replay in replays:
        places = replay.known.nonzero().squeeze(1)
        far = outside(replay, replay.uniform)
        *address, completion = replay.row.address
        other = uniforms(len(far), source.settings.run.seed, "sample", *address, completion + ELSEWHERE)
        caught += int((outside(replay, torch.from_numpy(other)) > margin)[places].sum())
        of += len(places)
        found.compared += len(places)
        found.undecided += int((far.abs() <= margin)[places].sum())
        for t in places[far[places] > 0].tolist():
            found.measure(far[t].item())
        for t in places[far[places] > margin].tolist():
            place = f"{replay.row.place}, token {t} at uniform {replay.uniform[t].item():.6f}"
            recorded, expected = replay.row["token_ids"][t], int(replay.expected[t])
            found.differences.append(Difference(replay.row.file, place, "token_ids", recorded, expected))
    power = f"; at random numbers of other addresses {caught / of:.0%} would differ" if of else ""
    found.note = (
        f"tokens at the inverse CDF of α; undecided within {margin:.2g} log-odds of an edge of the token's part, "
        f"{EDGE:g} times the noise{power}"
    )


def check_logp(replays: Sequence[Replay], noise: float, report: Report) -> None:
    """The recorded log α of every token, by version."""
    allowed = TOKEN * noise
    checks: dict[int, Check] = {}
    unknown = 0
    for replay in replays:
        tolerance_T = allowed * replay.room + replay.grain
        for t in replay.known.nonzero().squeeze(1).tolist():
            version = replay.row["versions"][t]
            if math.isnan(recorded := replay.recorded[t].item()):
                unknown += 1
                continue
            found = checks.setdefault(version, Check(f"log α, version {version}", unit="nats"))
            place = f"{replay.row.place}, token {t}"
            replayed, tolerance = replay.logp[t].item(), tolerance_T[t].item()
            found.near(replay.row.file, place, "logp_alpha", recorded, replayed, tolerance)
    report.skip("log α: tokens", "not recorded", unknown)
    for _, found in sorted(checks.items()):
        mean = found.mean or 0.0
        found.note = f"mean difference {mean:.2g} nats; allowed {allowed:.2g} (1 - p), {TOKEN:g} times the noise"
        report.checks.append(found)


def check_divergences(source: Source, replays: Sequence[Replay], noise: float, report: Report) -> None:
    """log π_k - log α of whole completions and Σ_t (ρ_t - 1 - ln ρ_t), where both policies are on disk. Where they are
    the same version and the run computed them alike to the bit, both are 0."""
    found = report.check("log π_k - log α", "nats")
    unknown = 0
    for replay in replays:
        row = replay.row
        if row["log_ratio"] is None:
            continue
        if replay.logp_k is None or not bool(replay.known[replay.sampled].all()):
            unknown += 1
            continue
        difference_T = (replay.logp_k - replay.logp)[replay.sampled]
        same = source.exact and set(row.sampled("versions")) == {row["pi_k_version"]}
        slack_T = replay.grain * 2 if same else EDGE * noise * replay.room + 2 * replay.grain
        slack_T = slack_T[replay.sampled]
        kl = (torch.expm1(difference_T) - difference_T).sum().item()
        kl_slack = (slack_T * (torch.exp(difference_T.abs() + slack_T) - 1)).sum().item()
        log_ratio, slack = difference_T.sum().item(), slack_T.sum().item()
        found.near(row.file, row.place, "log_ratio", row["log_ratio"], log_ratio, slack)
        found.near(row.file, row.place, "kl_alpha", row["kl_alpha"], kl, kl_slack)
    report.skip("log π_k - log α: completions", f"no weights on disk of π_k or of α: {KEEP}", unknown)
