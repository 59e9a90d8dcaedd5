"""Samples and log-probs, token by token, against plain transformers.

A token y sampled at uniform u is right when F(y - 1) <= u < F(y), with F the cumulative distribution of α over the
vocabulary. F is recomputed, so tokens are judged in log-odds: logits that are off by at most e move the log-odds of any
F by at most 2 e. A token within EDGE times the noise of an edge of its part is undecided. The noise comes from the run:
the median error of a token's log-odds, which wrong values of up to half the tokens cannot move.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lagrpo.errors import one_line, refusing
from lagrpo.model.embedded import ALIASES, resolve_model
from lagrpo.rng import permutation, uniforms
from lagrpo.verify.record import RecordedRun, Report, Row, is_generated, sampled

EDGE, TOKEN = 8.0, 24.0  # times the noise: of a sample, of a log-prob. Honest runs stay within half of either
NOISE = {"bfloat16": (1e-3, 0.15), "float32": (1e-6, 1e-2)}  # min and max noise that a dtype explains, log-odds
CHUNK = 1 << 22  # probabilities in memory at once
KEEP = "set checkpoint.export_every = 1 to keep the weights of every version"


class Weights:
    """Where the weights of each version are (`folders`). Version 0 is the model of the settings, seen from the
    directory in which the run was started; `absent` says why it was not found."""

    def __init__(self, run: RecordedRun) -> None:
        from transformers import AutoConfig

        self.run, self.folders, self.absent = run, dict[int, str](), ""
        saved, name = run.path / "weights", run.settings.model.path
        try:
            path = self.find(name)
            base = resolve_model(name) if name in ALIASES else str(path) if path.is_dir() else name
            AutoConfig.from_pretrained(base)
            self.folders[0] = base
        except (OSError, ValueError) as error:
            self.absent = f"model.path = {name!r} is not here: {one_line(str(error), 100)}"
        self.folders |= {int(v.name[1:]): str(v) for v in sorted(saved.glob("v[0-9]*")) if v.name[1:].isdigit()}
        after = [e["policy_version"] for e in run.evaluations if e["name"].startswith("after")]
        if after and (saved / "final").is_dir():
            self.folders.setdefault(after[0], str(saved / "final"))

    def find(self, name: str) -> Path:
        """A path of the settings, relative to the directory in which the run was started."""
        return Path(self.run.environment.get("directory") or ".") / Path(name).expanduser()

    def load_tokenizer(self) -> tuple[Any, set[int]]:
        """The tokenizer, and the ids that end a completion. Raises OSError if none is on disk."""
        from transformers import AutoTokenizer, GenerationConfig

        if not self.folders:
            raise OSError(self.absent)
        folder, template = next(iter(self.folders.values())), self.run.settings.model.chat_template
        tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        tokenizer.chat_template = self.find(template).read_text("utf-8") if template else tokenizer.chat_template
        ends = GenerationConfig.from_pretrained(folder).eos_token_id
        return tokenizer, {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])} - {None}

    def load_model(self, version: int) -> Any:
        """The model of a version, rounded to the run's dtype as the run had it, computing in float32: if only one of
        two sides rounds, they lie closer together. Raises SettingsError for a broken directory."""
        from safetensors import SafetensorError
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        folder, dtype = self.folders[version], getattr(torch, self.run.environment["dtype"])
        with refusing(folder, SafetensorError, KeyError):
            model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
            return model.float().eval()


class Reading(NamedTuple):
    """What transformers says about the t tokens of a completion under one version; every field is a tensor [t]."""

    logp: Tensor
    outside: Tensor
    """how far u lies outside its token's part of the distribution, in log-odds; negative inside"""
    expected: Tensor
    """the token that F gives at u"""
    grain: Tensor
    """how finely float32 resolves a log-prob there"""

    @property
    def room(self) -> Tensor:
        """1 - p: an error e of a token's log-odds is an error e (1 - p) of its log-prob."""
        return -torch.expm1(self.logp)


def read_tokens(scaled_TV: Tensor, token_T: Tensor, uniform_T: Tensor) -> Reading:
    """The reading of tokens y, sampled at uniforms u from logits / tau x float64."""
    at, last = token_T.unsqueeze(1), scaled_TV.shape[1] - 1
    log_sum, chosen = scaled_TV.logsumexp(-1, keepdim=True), scaled_TV.gather(1, at)
    p, u = (scaled_TV - log_sum).exp(), uniform_T.unsqueeze(1).clamp(min=1e-300)
    below, above = p.cumsum(-1), p.flip(-1).cumsum(-1).flip(-1)  # sums up to each token, and from it on
    before = torch.where(at > 0, below.gather(1, (at - 1).clamp(min=0)), 0.0)
    after = torch.where(at < last, above.gather(1, (at + 1).clamp(max=last)), 0.0)
    low, high = before.log() - (p.gather(1, at) + after).log(), below.gather(1, at).log() - after.log()
    odds = u.log() - torch.log1p(-u)
    expected = torch.searchsorted(below, u * below[:, -1:], right=True).clamp(max=last)
    grain = 2.0**-22 * torch.maximum(chosen.abs(), log_sum.abs())
    columns = chosen - log_sum, torch.maximum(low - odds, odds - high), expected, grain
    return Reading(*(column.squeeze(1) for column in columns))


@torch.no_grad()
def read_row(run: RecordedRun, model: Any, row: Row) -> Reading:
    """One sequence, without a cache; at most CHUNK probabilities are in memory."""
    ids, tau = torch.tensor(row["token_ids"]), run.settings.rollout.temperature
    key = row["step"], row["epoch"], row["prompt_id"], row["sample_index"]
    uniform = torch.from_numpy(uniforms(len(ids), run.settings.run.seed, "sample", *key))
    sequence = torch.tensor([[*row["prompt_token_ids"], *row["token_ids"]]])
    logits = model(input_ids=sequence, use_cache=False, logits_to_keep=len(ids) + 1).logits[0, :-1]
    pieces = zip(*(x.split(max(1, CHUNK // logits.shape[1])) for x in (logits, ids, uniform)), strict=True)
    read = [read_tokens((x / tau).double(), token, u) for x, token, u in pieces]
    return Reading(*(torch.cat(column) for column in zip(*read, strict=True)))


def check_tokens(
    run: RecordedRun, weights: Weights, rows: Sequence[Row], count: int | None, seed: int, report: Report
) -> None:
    """Check samples, log α and log π_k for `count` completions (None: all)."""
    chosen, readings = choose_rows(weights, rows, count, seed, report), list[tuple[Row, int, Reading]]()
    for version in sorted(weights.folders):
        due = [row for row in chosen if version in (row["policy_version"], *sampled(row, "policy_versions"))]
        model = weights.load_model(version) if due else None
        readings += [(row, version, read_row(run, model, row)) for row in due]
    noise = measure_noise(readings, *NOISE[run.environment["dtype"]])
    for row, version, read in readings:
        check_row(run, row, version, read, noise, report)


def choose_rows(weights: Weights, rows: Sequence[Row], count: int | None, seed: int, report: Report) -> list[Row]:
    """A random choice of the completions whose weights are on disk."""
    what, known = "samples and log-probs of completions:", list[Row]()
    report.skip(f"{what} offline data", sum(row["source"] != "sampler" for row in rows))
    for row in (row for row in rows if is_generated(row) and any(row["loss_mask"])):
        if lacking := sorted(set(sampled(row, "policy_versions")) - set(weights.folders)):
            why = f"no weights of their version on disk: {KEEP}" if lacking[0] else f"no weights: {weights.absent}"
            report.skip(f"{what} {why}")
        known += [] if lacking else [row]
    order = permutation(len(known), seed, "replay").tolist()
    report.skip(f"{what} not chosen; take more with --rows N, or --all", len(order[count:]) if count else 0)
    return [known[index] for index in order[:count]]


def column_of(row: Row, name: str) -> Tensor:
    """A column of log-probs [t], NaN where it is null."""
    values = row[name] or [None] * len(row["token_ids"])
    return torch.tensor([math.nan if value is None else value for value in values], dtype=torch.float64)


def sampled_by(row: Row, version: int) -> Tensor:
    """Which tokens a version sampled, bool [t]."""
    return torch.tensor(row["loss_mask"]) & (torch.tensor(row["policy_versions"]) == version)


def measure_noise(readings: Sequence[tuple[Row, int, Reading]], least: float, most: float) -> float:
    """The median error of a token's log-odds, between what the dtype explains at least and at most."""
    errors = [torch.empty(0, dtype=torch.float64)]
    for row, version, read in readings:
        gap = ((column_of(row, "rollout_logprobs") - read.logp).abs() - read.grain).clamp(min=0)
        errors.append((gap / read.room)[sampled_by(row, version) & (read.room > 1e-3) & ~gap.isnan()])
    return min(max(torch.cat(errors).median().item(), least), most) if any(map(len, errors)) else least


def check_row(run: RecordedRun, row: Row, version: int, read: Reading, noise: float, report: Report) -> None:
    """Whether every token that a version sampled is the inverse CDF of α at its key, its log α, and log π_k."""
    own, allowed = sampled_by(row, version), TOKEN * noise * read.room + read.grain
    for t in own.nonzero().squeeze(1).tolist() if run.settings.rollout.engine == "local" else ():
        token, far = row["token_ids"][t], read.outside[t].item()
        expected = int(read.expected[t]) if far > EDGE * noise else token
        report.compare("samples", f"{row['where']}, token {t}", {"token_ids": expected}, {"token_ids": token})
        report.undecided["samples"] += abs(far) <= EDGE * noise
    k = torch.tensor(row["loss_mask"]) if version == row["policy_version"] else own & False
    for name, which in (("rollout_logprobs", own), ("old_logprobs", k)):
        recorded = column_of(row, name)
        for t in (which & ~recorded.isnan()).nonzero().squeeze(1).tolist():
            expected, found = {name: read.logp[t].item()}, {name: recorded[t].item()}
            report.compare(name, f"{row['where']}, token {t}", expected, found, allowed[t].item())
