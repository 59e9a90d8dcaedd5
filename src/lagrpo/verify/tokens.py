"""Samples and log-probs, token by token, against plain transformers.

A token y sampled at uniform u is right when F(y - 1) <= u < F(y), with F the cumulative distribution of α over the
vocabulary. F is recomputed, so tokens are judged in log-odds: logits that are off by at most e move the log-odds of any
F by at most 2 e. A token within EDGE times the noise of an edge of its part is undecided. The noise comes from the run:
the median error of a token's log-odds, which wrong values of up to half the tokens cannot move.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lagrpo.errors import SettingsError, as_settings_error
from lagrpo.model.directory import naming_damage
from lagrpo.model.embedded import ALIASES, is_adapter, resolve_model
from lagrpo.rng import permutation, uniforms
from lagrpo.verify.record import RecordedRun, Row, sampled

EDGE, TOKEN = (
    8.0,
    24.0,
)  # times the noise: of a sample, of a log-prob. Honest runs stay within half of either
NOISE = {
    "bfloat16": (1e-3, 0.15),
    "float32": (1e-6, 1e-2),
}  # min and max noise that a dtype explains, log-odds
CHUNK = 1 << 22  # probabilities in memory at once


def find_path(run: RecordedRun, name: str) -> Path:
    """A path of the settings, relative to the directory in which the run was started."""
    return Path(run.environment.get("directory") or ".") / Path(name).expanduser()


def find_weights(run: RecordedRun) -> dict[int, str]:
    """The directory of the weights of each version on disk. Version 0 is the model of the settings."""
    name = run.settings.model.path
    path = find_path(run, name)
    with as_settings_error("model.path"):
        is_here = name not in ALIASES and path.is_dir()
        base = resolve_model(str(path) if is_here else name)
    return {0: base} | {
        int(v.name[1:]): str(v) for v in sorted((run.path / "weights").glob("v[0-9]*"))
    }


def load_model(run: RecordedRun, folder: str) -> Any:
    """A model, rounded to the run's dtype as the run had it, computing in float32: if only one of two sides rounds,
    they lie closer together. Raises SettingsError for a broken directory."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    if is_adapter(folder) and importlib.util.find_spec("peft") is None:
        raise SettingsError(
            f"{folder}: verifying versions of adapters needs the package peft: pip install peft"
        )
    logging.disable_progress_bar()
    with as_settings_error(), naming_damage(folder, f"{folder} cannot be loaded"):
        dtype = getattr(torch, run.environment["dtype"])
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation="eager"
        )
        return model.float().eval()


class Reading(NamedTuple):
    """What transformers says about the t tokens of a completion under one version; every field is a tensor [t]."""

    logp: Tensor
    outside: Tensor  # how far u lies outside its token's part of the distribution, in log-odds; negative inside
    expected: Tensor  # the token that F gives at u
    grain: Tensor  # how finely float32 resolves a log-prob there


def read_tokens(scaled_TV: Tensor, token_T: Tensor, uniform_T: Tensor) -> Reading:
    """The reading of tokens y, sampled at uniforms u from logits / tau x float64."""
    y, u = token_T.unsqueeze(1), uniform_T.unsqueeze(1)
    log_sum, chosen = scaled_TV.logsumexp(-1, keepdim=True), scaled_TV.gather(1, y)
    cdf = (scaled_TV - log_sum).exp().cumsum(-1)
    cdf = cdf / cdf[:, -1:]
    before = torch.where(y > 0, cdf.gather(1, (y - 1).clamp(min=0)), 0.0)
    outside = torch.maximum(before.logit() - u.logit(), u.logit() - cdf.gather(1, y).logit())
    expected = torch.searchsorted(cdf, u, right=True).clamp(max=cdf.shape[1] - 1)
    grain = 2.0**-22 * torch.maximum(chosen.abs(), log_sum.abs())
    return Reading(*(column.squeeze(1) for column in (chosen - log_sum, outside, expected, grain)))


@torch.no_grad()
def read_row(run: RecordedRun, model: Any, row: Row) -> Reading:
    """One sequence, without a cache; at most CHUNK probabilities are in memory."""
    ids, tau = torch.tensor(row["token_ids"]), run.settings.rollout.temperature
    key = row["step"], row["epoch"], row["prompt_id"], row["sample_index"]
    uniform = torch.from_numpy(uniforms(len(ids), run.settings.run.seed, "sample", *key))
    sequence = torch.tensor([[*row["prompt_token_ids"], *row["token_ids"]]])
    logits = model(input_ids=sequence, use_cache=False, logits_to_keep=len(ids) + 1).logits[0, :-1]
    pieces = zip(
        *(x.split(max(1, CHUNK // logits.shape[1])) for x in (logits, ids, uniform)), strict=True
    )
    read = [read_tokens((x / tau).double(), token, u) for x, token, u in pieces]
    return Reading(*(torch.cat(column) for column in zip(*read, strict=True)))


def check_tokens(run: RecordedRun, count: int | None, seed: int) -> None:
    """Check samples, log α and log π_k for `count` completions (None: all), chosen by `seed`."""
    folders, what, own = (
        find_weights(run),
        "completions, their samples and log-probs:",
        run.generated,
    )
    known = [
        row
        for row in own
        if any(row["loss_mask"]) and folders.keys() >= {*sampled(row, "policy_versions")}
    ]
    chosen = [known[index] for index in permutation(len(known), seed, "replay")[:count]]
    run.report.skip(f"{what} offline data", sum(row["source"] != "sampler" for row in run.rows))
    keep = "set checkpoint.export_every = 1 to keep the weights of every version"
    run.report.skip(
        f"{what} the weights of their version are not on disk; {keep}", len(own) - len(known)
    )
    run.report.skip(
        f"{what} not chosen; choose more with --rows N or --all", len(known) - len(chosen)
    )
    readings = list[tuple[Row, int, Reading]]()
    for version, folder in sorted(folders.items()):
        due = [
            row
            for row in chosen
            if version in (row["policy_version"], *sampled(row, "policy_versions"))
        ]
        model = load_model(run, folder) if due else None
        readings += [(row, version, read_row(run, model, row)) for row in due]
    noise = measure_noise(readings, *NOISE[run.environment["dtype"]])
    for row, version, read in readings:
        check_row(run, row, version, read, noise)


def column_of(row: Row, name: str) -> Tensor:
    """A column of log-probs [t], NaN for null."""
    values = row[name] or [None] * len(row["token_ids"])
    return torch.tensor(
        [math.nan if value is None else value for value in values], dtype=torch.float64
    )


def measure_noise(readings: Sequence[tuple[Row, int, Reading]], least: float, most: float) -> float:
    """The median error of a token's log-odds, between what the dtype explains at least and at most. An error e of a
    token's log-odds is an error e (1 - p) of its log-prob."""
    errors = [torch.tensor([least], dtype=torch.float64)]
    for row, version, read in readings:
        gap, room = (
            (column_of(row, "rollout_logprobs") - read.logp).abs() - read.grain,
            -read.logp.expm1(),
        )
        own = torch.tensor(row["policy_versions"]) == version
        errors.append((gap.clamp(min=0) / room)[own & (room > 1e-3) & ~gap.isnan()])
    return min(max(torch.cat(errors).median().item(), least), most)


def check_row(run: RecordedRun, row: Row, version: int, read: Reading, noise: float) -> None:
    """Whether every token that a version sampled is the inverse CDF of α at its key, its log α, and log π_k."""
    allowed, report, mask = (
        TOKEN * noise * -read.logp.expm1() + read.grain,
        run.report,
        torch.tensor(row["loss_mask"]),
    )
    own = mask & (torch.tensor(row["policy_versions"]) == version)
    for t in own.nonzero().flatten().tolist() if run.settings.rollout.engine == "local" else ():
        token, far = row["token_ids"][t], read.outside[t].item()
        expected = int(read.expected[t]) if far > EDGE * noise else token
        report.compare(
            "samples", f"{row['where']}, token {t}", {"token_ids": expected}, {"token_ids": token}
        )
        report.undecided["samples"] += abs(far) <= EDGE * noise
    for name, which in (
        ("rollout_logprobs", own),
        ("old_logprobs", mask & (version == row["policy_version"])),
    ):
        recorded = column_of(row, name)
        for t in (which & ~recorded.isnan()).nonzero().flatten().tolist():
            expected, found = {name: read.logp[t].item()}, {name: recorded[t].item()}
            report.compare(name, f"{row['where']}, token {t}", expected, found, allowed[t].item())
