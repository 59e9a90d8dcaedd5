"""What transformers says of the completions of a run: log-probs, cumulative distributions, samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lagrpo.replay.findings import Report
from lagrpo.replay.source import Row, Source
from lagrpo.replay.weights import Weights
from lagrpo.rng import permutation, uniforms

CHUNK = 1 << 22  # probabilities in hand
KEEP = "set run.save_every = 1 to keep the weights of every version"


@dataclass(slots=True)
class Replay:
    """What transformers says of a completion of t tokens. Every tensor is [t]."""

    row: Row
    known: Tensor
    """Whether the token was sampled and α's weights are on disk: only then the next fields have a meaning."""
    uniform: Tensor
    logp: Tensor
    """Under α."""
    low: Tensor
    """Log-odds of F(y - 1)."""
    high: Tensor
    """Log-odds of F(y)."""
    expected: Tensor
    """The token that F gives at `uniform`."""
    grain: Tensor
    """How finely float32 resolves a log-prob there."""
    logp_k: Tensor | None = None
    """Under π_k; None where its weights are not on disk."""
    recorded: Tensor = field(init=False)
    """log α as the run recorded it."""
    sampled: Tensor = field(init=False)

    def __post_init__(self) -> None:
        nan = float("nan")
        logp_alpha = [nan if logp is None else logp for logp in self.row["logp_alpha"]]
        self.recorded = torch.tensor(logp_alpha, dtype=torch.float64)
        self.sampled = torch.tensor(self.row["sampled"], dtype=torch.bool)

    @staticmethod
    def empty(row: Row, seed: int) -> Replay:
        t = len(row["token_ids"])
        logp, low, high, grain = torch.zeros(4, t, dtype=torch.float64)
        uniform = torch.from_numpy(uniforms(t, seed, "sample", *row.address))
        return Replay(row, torch.zeros(t, dtype=torch.bool), uniform, logp, low, high, torch.zeros(t).long(), grain)

    @property
    def gap(self) -> Tensor:
        """|log α recorded - recomputed| [t], beyond the grain of float32; NaN where there is none."""
        return ((self.recorded - self.logp).abs() - self.grain).clamp(min=0)

    @property
    def room(self) -> Tensor:
        """1 - p of each token: an error e of its log-odds is one of e (1 - p) in its log-prob."""
        return -torch.expm1(self.logp)


def subset(
    source: Source, weights: Weights, rows: Sequence[Row], count: int | None, seed: int, report: Report
) -> list[Row]:
    """The completions to recompute: in a random order, taken from each version in turn."""
    own = [row for row in rows if row.generated and row.length]
    what = "samples and log-probs: completions"
    report.skip(what, "offline data", sum(row["source"] != "sampler" for row in rows))
    there = [row for row in own if set(row.sampled("versions")) & set(weights.directories)]
    lacking = sorted({v for row in own for v in row.sampled("versions")} - set(weights.directories))
    if lacking:
        kept = weights.absent if lacking == [0] else KEEP
        why = f"no weights on disk of version{'s' * (len(lacking) > 1)} {spans(lacking)}: {kept}"
        report.skip(what, why, sum(bool(set(row.sampled("versions")) - set(weights.directories)) for row in own))
    by_version: dict[int, list[Row]] = {}
    for index in permutation(len(there), seed, "replay").tolist():
        by_version.setdefault(there[index].sampled("versions")[0], []).append(there[index])
    ranked = sorted(((turn, v) for v, members in by_version.items() for turn in range(len(members))))
    chosen = [by_version[v][turn] for turn, v in ranked][: len(ranked) if count is None else count]
    report.skip(what, "not in the subset: take more with --rows N, or --all", len(there) - len(chosen))
    return chosen


def replayed(source: Source, weights: Weights, rows: Sequence[Row]) -> list[Replay]:
    """Replay rows model after model: each version is loaded once."""
    replays = [Replay.empty(row, source.settings.run.seed) for row in rows]
    for version in sorted(weights.directories):
        for replay in replays:
            row = replay.row
            alpha = replay.sampled & (torch.tensor(row["versions"]) == version)
            if not bool(alpha.any()) and row["pi_k_version"] != version:
                continue
            scaled = weights.scaled_logits(version, row["prompt_token_ids"], row["token_ids"])
            for piece, read in _read(scaled, replay):
                if row["pi_k_version"] == version:
                    replay.logp_k = torch.zeros_like(replay.logp) if replay.logp_k is None else replay.logp_k
                    replay.logp_k[piece] = read["logp"]
                for name, value in read.items():
                    field_T = getattr(replay, name)
                    field_T[piece] = torch.where(alpha[piece], value, field_T[piece])
            replay.known |= alpha
    return replays


def _read(scaled_TV: Tensor, replay: Replay) -> Iterator[tuple[slice, dict[str, Tensor]]]:
    """Log-probs, edges and expected tokens of a completion, from its logits / tau, a piece at a time."""
    tokens = torch.tensor(replay.row["token_ids"])
    step = max(1, CHUNK // scaled_TV.shape[1])
    for first in range(0, len(tokens), step):
        piece = slice(first, min(first + step, len(tokens)))
        yield piece, read_tokens(scaled_TV[piece].double(), tokens[piece], replay.uniform[piece])


def read_tokens(scaled_TV: Tensor, token_T: Tensor, uniform_T: Tensor) -> dict[str, Tensor]:
    """Of each token y with logits / tau x float64: log p(y), the log-odds of F(y - 1) and F(y), the token y' with
    F(y' - 1) <= u < F(y'), and the grain of float32 at x."""
    at = token_T.unsqueeze(1)
    log_sum = scaled_TV.logsumexp(-1, keepdim=True)
    p = (scaled_TV - log_sum).exp()
    below, above = p.cumsum(-1), p.flip(-1).cumsum(-1).flip(-1)  # sums up to and from each token on
    up_to, own = below.gather(1, at), p.gather(1, at)
    before = torch.where(at > 0, below.gather(1, (at - 1).clamp(min=0)), 0.0)
    last = p.shape[1] - 1
    after = torch.where(at < last, above.gather(1, (at + 1).clamp(max=last)), 0.0)
    expected = torch.searchsorted(below, uniform_T.unsqueeze(1) * below[:, -1:], right=True).clamp(max=last)
    chosen = scaled_TV.gather(1, at)
    return {
        "logp": (chosen - log_sum).squeeze(1),
        "low": (before.log() - (own + after).log()).squeeze(1),
        "high": (up_to.log() - after.log()).squeeze(1),
        "expected": expected.squeeze(1),
        "grain": (2.0**-22 * torch.maximum(chosen.abs(), log_sum.abs())).squeeze(1),
    }


def spans(numbers: Sequence[int]) -> str:
    """Whole numbers, ascending, with runs of them as spans.

    >>> spans([1, 2, 3, 5, 8, 9])
    '1-3, 5, 8-9'
    """
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
