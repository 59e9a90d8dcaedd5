"""Samples and log-probs, token by token, against plain transformers.

A token y sampled at uniform u is right when F(y - 1) <= u < F(y), with F the cumulative distribution of α over the
vocabulary. F is recomputed here, so it carries the noise of two arithmetics, and a token is judged in log-odds: logits
that are off by at most e move the log-odds of any F by at most 2 e, because F/(1 - F) is a ratio of two sums of
exponentials. Within EDGE times the noise of an edge of its part a token is undecided. The noise is read from the run
itself: the median error of a token's own log-odds, which wrong values of up to half the tokens cannot move.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from lagrpo.replay.findings import Check, Difference, Report
from lagrpo.replay.source import Row, Source
from lagrpo.replay.weights import Weights
from lagrpo.rng import permutation, uniforms

EDGE = 8.0  # honest runs stay within 4 times the noise: SmolLM2 and tiny models, bfloat16 and float32
TOKEN = 24.0  # honest log-probs stay within 12 times the noise
NOISE = {"bfloat16": (1e-3, 0.15), "float32": (1e-6, 1e-2)}  # least and greatest noise that a dtype explains, log-odds
ELSEWHERE = 1 << 32  # completions that no run has: the uniforms of the control
CHUNK = 1 << 22  # probabilities in hand
KEEP = "set run.save_every = 1 to keep the weights of every version"


class Replay:
    """What transformers says of a completion of t tokens. Every tensor is [t].

    sampled     whether the sampler sampled the token
    recorded    log α as the run recorded it; NaN where it did not
    uniform     the random number at its address
    known       whether the token was sampled and α's weights are on disk: only then the next fields have a meaning
    logp        log α
    low, high   log-odds of F(y - 1) and of F(y)
    expected    the token that F gives at `uniform`
    grain       how finely float32 resolves a log-prob there
    logp_k      log π_k; None where its weights are not on disk
    """

    def __init__(self, row: Row, seed: int) -> None:
        t = len(row["token_ids"])
        self.row = row
        self.sampled = torch.tensor(row["sampled"], dtype=torch.bool)
        logp_alpha = [math.nan if logp is None else logp for logp in row["logp_alpha"]]
        self.recorded = torch.tensor(logp_alpha, dtype=torch.float64)
        self.uniform = torch.from_numpy(uniforms(t, seed, "sample", *row.address))
        self.known = torch.zeros(t, dtype=torch.bool)
        self.logp, self.low, self.high, self.grain = torch.zeros(4, t, dtype=torch.float64)
        self.expected = torch.zeros(t, dtype=torch.long)
        self.logp_k: Tensor | None = None

    @property
    def gap(self) -> Tensor:
        """|log α recorded - recomputed| [t], beyond the grain of float32; NaN where there is none."""
        return ((self.recorded - self.logp).abs() - self.grain).clamp(min=0)

    @property
    def room(self) -> Tensor:
        """1 - p of each token: an error e of its log-odds is one of e (1 - p) in its log-prob."""
        return -torch.expm1(self.logp)

    def outside(self, uniform_T: Tensor) -> Tensor:
        """How far u lies outside its token's part of the distribution, in log-odds [t]; negative inside."""
        odds = uniform_T.clamp(min=1e-300).log() - torch.log1p(-uniform_T)
        return torch.maximum(self.low - odds, odds - self.high)


def check(source: Source, weights: Weights, rows: Sequence[Row], count: int | None, seed: int, report: Report) -> None:
    """Check samples, log-probs of α by version, and divergences of π_k from α, for `count` completions (None: all)."""
    chosen = choose_rows(weights, rows, count, seed, report)
    replays = replay_rows(source, weights, chosen)
    least, greatest = NOISE[source.dtype]
    errors = [(r.gap / r.room)[r.known & (r.room > 1e-3) & ~r.recorded.isnan()] for r in replays]
    together = torch.cat([torch.empty(0, dtype=torch.float64), *errors])
    noise = min(max(together.median().item(), least), greatest) if len(together) else least
    own = [r for r in replays if source.at(r.row["batch"]).settings.sampling.sampler == "local"]
    if own or not replays:
        check_samples(source, own, noise, report)
    tokens = sum(replay.row.length for replay in replays) - sum(replay.row.length for replay in own)
    report.skip("samples: tokens", "vLLM sampled them with random numbers of its own", tokens)
    check_logp(replays, noise, report)
    check_divergences(source, replays, noise, report)


def choose_rows(weights: Weights, rows: Sequence[Row], count: int | None, seed: int, report: Report) -> list[Row]:
    """The completions to recompute: in a random order, taken from each version in turn."""
    own = [row for row in rows if row.generated and row.length]
    what, there = "samples and log-probs: completions", set(weights.directories)
    report.skip(what, "offline data", sum(row["source"] != "sampler" for row in rows))
    if lacking := sorted({v for row in own for v in row.sampled("versions")} - there):
        kept = weights.absent if lacking == [0] else KEEP
        why = f"no weights on disk of version{'s' * (len(lacking) > 1)} {spans(lacking)}: {kept}"
        report.skip(what, why, sum(bool(set(row.sampled("versions")) - there) for row in own))
    own = [row for row in own if set(row.sampled("versions")) & there]
    by_version: dict[int, list[Row]] = {}
    for index in permutation(len(own), seed, "replay").tolist():
        by_version.setdefault(own[index].sampled("versions")[0], []).append(own[index])
    ranked = sorted((turn, v) for v, members in by_version.items() for turn in range(len(members)))
    chosen = [by_version[v][turn] for turn, v in ranked][:count]
    report.skip(what, "not in the subset: take more with --rows N, or --all", len(own) - len(chosen))
    return chosen


def replay_rows(source: Source, weights: Weights, rows: Sequence[Row]) -> list[Replay]:
    """Replay rows model after model: each version is loaded once."""
    replays = [Replay(row, source.settings.run.seed) for row in rows]
    for version in sorted(weights.directories):
        for replay in replays:
            row = replay.row
            alpha, is_pi_k = replay.sampled & (torch.tensor(row["versions"]) == version), row["pi_k_version"] == version
            if not bool(alpha.any()) and not is_pi_k:
                continue
            tau = source.at(row["batch"]).settings.sampling.temperature
            scaled = weights.scaled_logits(version, row["prompt_token_ids"], row["token_ids"], tau)
            read = _read_pieces(scaled, torch.tensor(row["token_ids"]), replay.uniform)
            if is_pi_k:
                replay.logp_k = read["logp"]
            for name, value in read.items():
                setattr(replay, name, torch.where(alpha, value, getattr(replay, name)))
            replay.known |= alpha
    return replays


def _read_pieces(scaled_TV: Tensor, token_T: Tensor, uniform_T: Tensor) -> dict[str, Tensor]:
    """`read_tokens`, with at most CHUNK probabilities in hand."""
    step = max(1, CHUNK // scaled_TV.shape[1])
    pieces = zip(scaled_TV.split(step), token_T.split(step), uniform_T.split(step), strict=True)
    read = [read_tokens(scaled.double(), tokens, uniform) for scaled, tokens, uniform in pieces]
    return {name: torch.cat([piece[name] for piece in read]) for name in read[0]}


def read_tokens(scaled_TV: Tensor, token_T: Tensor, uniform_T: Tensor) -> dict[str, Tensor]:
    """Of each token y with logits / tau x float64: log p(y), the log-odds of F(y - 1) and F(y), the token y' with
    F(y' - 1) <= u < F(y'), and the grain of float32 at x."""
    at, last = token_T.unsqueeze(1), scaled_TV.shape[1] - 1
    log_sum, chosen = scaled_TV.logsumexp(-1, keepdim=True), scaled_TV.gather(1, at)
    p = (scaled_TV - log_sum).exp()
    below, above = p.cumsum(-1), p.flip(-1).cumsum(-1).flip(-1)  # sums up to and from each token on
    before = torch.where(at > 0, below.gather(1, (at - 1).clamp(min=0)), 0.0)
    after = torch.where(at < last, above.gather(1, (at + 1).clamp(max=last)), 0.0)
    expected = torch.searchsorted(below, uniform_T.unsqueeze(1) * below[:, -1:], right=True).clamp(max=last)
    read = {
        "logp": chosen - log_sum,
        "low": before.log() - (p.gather(1, at) + after).log(),
        "high": below.gather(1, at).log() - after.log(),
        "expected": expected,
        "grain": 2.0**-22 * torch.maximum(chosen.abs(), log_sum.abs()),
    }
    return {name: column.squeeze(1) for name, column in read.items()}


def check_samples(source: Source, replays: Sequence[Replay], noise: float, report: Report) -> None:
    """Whether every token is the inverse CDF of α at its address. The control asks the same of random numbers of other
    addresses: the share that differs there is the power of the check."""
    margin = EDGE * noise
    found = report.check("samples", "log-odds")
    caught = 0
    for replay in replays:
        row, places = replay.row, replay.known.nonzero().squeeze(1)
        far = replay.outside(replay.uniform)
        *address, completion = row.address
        other = uniforms(len(far), source.settings.run.seed, "sample", *address, completion + ELSEWHERE)
        caught += int((replay.outside(torch.from_numpy(other)) > margin)[places].sum())
        found.compared += len(places)
        found.undecided += int((far.abs() <= margin)[places].sum())
        for t in places[far[places] > 0].tolist():
            found.measure(far[t].item())
        for t in places[far[places] > margin].tolist():
            place = f"{row.place}, token {t} at uniform {replay.uniform[t].item():.6f}"
            expected = int(replay.expected[t])
            found.differences.append(Difference(row.file, place, "token_ids", row["token_ids"][t], expected))
    share = f"{caught / found.compared:.0%}" if found.compared else ""
    found.note = (
        f"tokens at the inverse CDF of α; undecided within {margin:.2g} log-odds of an edge of the token's part, "
        f"{EDGE:g} times the noise" + (f"; at random numbers of other addresses {share} would differ" if share else "")
    )


def check_logp(replays: Sequence[Replay], noise: float, report: Report) -> None:
    """The recorded log α of every token, by version."""
    allowed = TOKEN * noise
    checks: dict[int, Check] = {}
    unknown = 0
    for replay in replays:
        row, tolerance_T = replay.row, allowed * replay.room + replay.grain
        for t in replay.known.nonzero().squeeze(1).tolist():
            if math.isnan(recorded := replay.recorded[t].item()):
                unknown += 1
                continue
            version, replayed, tolerance = row["versions"][t], replay.logp[t].item(), tolerance_T[t].item()
            found = checks.setdefault(version, Check(f"log α, version {version}", "nats"))
            found.near(row.file, f"{row.place}, token {t}", "logp_alpha", recorded, replayed, tolerance)
    report.skip("log α: tokens", "not recorded", unknown)
    for _, found in sorted(checks.items()):
        mean = sum(found.gaps) / len(found.gaps) if found.gaps else 0.0
        found.note = f"mean difference {mean:.2g} nats; allowed {allowed:.2g} (1 - p), {TOKEN:g} times the noise"
        report.checks.append(found)


def check_divergences(source: Source, replays: Sequence[Replay], noise: float, report: Report) -> None:
    """log π_k - log α of whole completions and Σ_t (ρ_t - 1 - ln ρ_t), where both policies are on disk. Where they are
    the same version and the run computed them alike to the bit, both are 0."""
    found = report.check("log π_k - log α", "nats")
    unknown = 0
    for replay in replays:
        row, own = replay.row, replay.sampled
        if row["log_ratio"] is None:
            continue
        if replay.logp_k is None or not bool(replay.known[own].all()):
            unknown += 1
            continue
        difference_T = (replay.logp_k - replay.logp)[own]
        same = source.exact and set(row.sampled("versions")) == {row["pi_k_version"]}
        slack_T = (2 * replay.grain + (0.0 if same else EDGE * noise * replay.room))[own]
        kl = (torch.expm1(difference_T) - difference_T).sum().item()
        kl_slack = (slack_T * (torch.exp(difference_T.abs() + slack_T) - 1)).sum().item()
        log_ratio, slack = difference_T.sum().item(), slack_T.sum().item()
        found.near(row.file, row.place, "log_ratio", row["log_ratio"], log_ratio, slack)
        found.near(row.file, row.place, "kl_alpha", row["kl_alpha"], kl, kl_slack)
    report.skip("log π_k - log α: completions", f"no weights on disk of π_k or of α: {KEEP}", unknown)


def spans(numbers: Sequence[int]) -> str:
    """Whole numbers, ascending, with runs of them as spans.

    >>> spans([1, 2, 3, 5, 8, 9])
    '1-3, 5, 8-9'
    """
    grouped = groupby(enumerate(numbers), lambda counted: counted[1] - counted[0])  # the same along a run
    runs = [[number for _, number in run] for _, run in grouped]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
