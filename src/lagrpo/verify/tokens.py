"""Samples and log-probs, token by token, against plain transformers.

A token y sampled at the uniform number u is right when F(y - 1) <= u < F(y), with F the cumulative
distribution of α over the vocabulary. F is recomputed, so tokens are judged in log-odds: logits
that are off by at most e move the log-odds of any F by at most 2 e. A token whose u lies within
MAX_SAMPLE_NOISE times the noise of a boundary is undecided.

The noise comes from the run: it is the median error of a token's log-odds, which wrong values of up
to half the tokens cannot move.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lagrpo.errors import SettingsError, as_settings_error
from lagrpo.model.directory import check_directory, naming_damage
from lagrpo.model.embedded import ALIASES, is_adapter, resolve_model
from lagrpo.model.lora import load_adapter_config
from lagrpo.rng import permutation, uniforms
from lagrpo.verify.record import RecordedRun, Row, sampled

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MAX_SAMPLE_NOISE = 8.0
"""Times the noise that u may lie outside its token's interval. Honest runs stay within half."""

MAX_LOGP_NOISE = 24.0
"""Times the noise that a log-prob may be off. Honest runs stay within half."""

NOISE_RANGE = {"bfloat16": (1e-3, 0.15), "float32": (1e-6, 1e-2)}
"""The smallest and the largest noise that a dtype explains, in log-odds."""

FLOAT32_GRAIN = 2.0**-22
"""Relative rounding of a logit in float32, with a margin."""

MAX_PROBABILITIES = 1 << 22
"""Probabilities in memory at once."""


def find_path(run: RecordedRun, name: str) -> Path:
    """Returns a path of the settings, relative to the directory in which the run was started."""
    start = Path(run.environment.get("directory") or ".")
    return start / Path(name).expanduser()


def find_weights(run: RecordedRun) -> dict[int, str]:
    """Returns the directory of each version on disk. Version 0 is the model of the settings."""
    name = run.settings.model.path
    path = find_path(run, name)
    with as_settings_error("model.path"):
        is_directory = name not in ALIASES and path.is_dir()
        folders = {0: resolve_model(str(path) if is_directory else name)}
    for folder in sorted((run.path / "weights").glob("v[0-9]*")):
        version = int(folder.name.removeprefix("v"))
        folders[version] = str(folder)
    return folders


def load_model(run: RecordedRun, folder: str) -> PreTrainedModel:
    """Loads a model, rounded to the run's dtype as in the run, that computes in float32.

    If only one of two computations rounds, they lie closer together. Raises SettingsError for a
    broken directory.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    if is_adapter(folder):
        _check_adapter(Path(folder))
    logging.disable_progress_bar()
    with as_settings_error(), naming_damage(folder, f"{folder} cannot be loaded"):
        dtype = getattr(torch, run.environment["dtype"])
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            attn_implementation="eager",
            use_safetensors=True,
            trust_remote_code=False,
        )
        return model.float().eval()


def _check_adapter(folder: Path) -> None:
    """Raises SettingsError without PEFT, and for adapters that are pickled or not plain LoRA."""
    if importlib.util.find_spec("peft") is None:
        cure = "verifying versions of adapters needs the package peft: pip install peft"
        raise SettingsError(f"{folder}: {cure}")
    with as_settings_error():
        check_directory(folder)
        load_adapter_config(folder)


@dataclass(frozen=True, slots=True)
class Reading:
    """Numbers from transformers about the t tokens of a completion under one version, each [t]."""

    logp: Tensor
    """log-prob, nats"""
    outside: Tensor
    """distance of u from its token's interval, in log-odds; negative inside"""
    expected: Tensor
    """the token whose interval holds u"""
    grain: Tensor
    """how finely float32 resolves the log-prob"""

    @staticmethod
    def concatenate(pieces: Sequence[Reading]) -> Reading:
        return Reading(
            logp=torch.cat([piece.logp for piece in pieces]),
            outside=torch.cat([piece.outside for piece in pieces]),
            expected=torch.cat([piece.expected for piece in pieces]),
            grain=torch.cat([piece.grain for piece in pieces]),
        )


@dataclass(frozen=True, slots=True)
class RowReading:
    """A recorded completion, and its reading under one version."""

    row: Row
    version: int
    tokens: Reading

    def is_sampled_by_version(self) -> Tensor:
        """Returns True for the tokens that this version sampled, bool [t]."""
        is_sampled = torch.tensor(self.row["loss_mask"])
        return is_sampled & (torch.tensor(self.row["policy_versions"]) == self.version)


def read_tokens(scaled_TV: Tensor, token_T: Tensor, uniform_T: Tensor) -> Reading:
    """Reads tokens y that were sampled at uniform numbers u from logits / temperature, float64."""
    y = token_T.unsqueeze(1)  # [T, 1]
    u = uniform_T.unsqueeze(1)  # [T, 1]
    log_sum = scaled_TV.logsumexp(-1, keepdim=True)  # [T, 1]
    logit = scaled_TV.gather(1, y)  # [T, 1]
    cdf_TV = (scaled_TV - log_sum).exp().cumsum(-1)
    # Rounding leaves the last value beside 1.
    cdf_TV = cdf_TV / cdf_TV[:, -1:]
    upper = cdf_TV.gather(1, y)  # F(y), [T, 1]
    lower = torch.where(y > 0, cdf_TV.gather(1, (y - 1).clamp(min=0)), 0.0)  # F(y - 1), [T, 1]
    # logit(0) is -inf and logit(1) is inf: nothing lies below the first interval or above the last.
    outside = torch.maximum(lower.logit() - u.logit(), u.logit() - upper.logit())
    expected = torch.searchsorted(cdf_TV, u, right=True).clamp(max=cdf_TV.shape[1] - 1)
    return Reading(
        logp=(logit - log_sum).squeeze(1),
        outside=outside.squeeze(1),
        expected=expected.squeeze(1),
        grain=FLOAT32_GRAIN * torch.maximum(logit.abs(), log_sum.abs()).squeeze(1),
    )


@torch.no_grad()
def read_row(run: RecordedRun, model: PreTrainedModel, row: Row) -> Reading:
    """Reads a completion in one forward pass over its whole sequence, without a cache."""
    token_T = torch.tensor(row["token_ids"])
    T = len(token_T)
    key = (row["step"], row["epoch"], row["prompt_id"], row["sample_index"])
    uniform_T = torch.from_numpy(uniforms(T, run.settings.run.seed, "sample", *key))
    sequence = torch.tensor([[*row["prompt_token_ids"], *row["token_ids"]]])  # [1, prompt + T]
    # The logits before each completion token; the last position predicts a token after the end.
    output = model(input_ids=sequence, use_cache=False, logits_to_keep=T + 1)
    logits_TV = output.logits[0, :-1]
    chunk = max(1, MAX_PROBABILITIES // logits_TV.shape[1])
    pieces = []
    for start in range(0, T, chunk):
        part = slice(start, start + chunk)
        scaled_TV = (logits_TV[part] / run.settings.rollout.temperature).double()
        pieces.append(read_tokens(scaled_TV, token_T[part], uniform_T[part]))
    return Reading.concatenate(pieces)


def check_tokens(run: RecordedRun, count: int | None, seed: int) -> None:
    """Checks samples, log α and log π_k of `count` completions (None: all), chosen by `seed`."""
    folders = find_weights(run)
    rows = _choose_rows(run, folders, count, seed)
    readings = []
    for version, folder in sorted(folders.items()):
        rows_of_version = [row for row in rows if version in _versions_of(row)]
        if not rows_of_version:
            continue
        # One model is in memory at a time.
        model = load_model(run, folder)
        for row in rows_of_version:
            readings.append(RowReading(row, version, read_row(run, model, row)))
    smallest_noise, largest_noise = NOISE_RANGE[run.environment["dtype"]]
    noise = measure_noise(readings, smallest_noise, largest_noise)
    for reading in readings:
        check_row(run, reading, noise)


def _versions_of(row: Row) -> set[int]:
    """Returns the versions whose log-probs the row has: of α at each token, and of π_k."""
    return {row["policy_version"], *sampled(row, "policy_versions")}


def _choose_rows(
    run: RecordedRun, folders: dict[int, str], count: int | None, seed: int
) -> list[Row]:
    """Returns the completions to replay, and reports those that are left out."""
    rows = []
    for row in run.generated:
        versions = set(sampled(row, "policy_versions"))
        if versions and versions <= folders.keys():
            rows.append(row)
    rows_to_replay = [rows[index] for index in permutation(len(rows), seed, "replay")[:count]]

    prefix = "completions, their samples and log-probs:"
    offline = sum(row["source"] != "sampler" for row in run.rows)
    run.report.skip(f"{prefix} offline data", offline)
    cure = "set checkpoint.export_every = 1 to keep the weights of every version"
    without_weights = len(run.generated) - len(rows)
    run.report.skip(
        f"{prefix} the weights of their version are not on disk; {cure}", without_weights
    )
    not_chosen = len(rows) - len(rows_to_replay)
    run.report.skip(f"{prefix} not chosen; choose more with --rows N or --all", not_chosen)
    return rows_to_replay


def column_of(row: Row, name: str) -> Tensor:
    """Returns a column of log-probs, float64 [t], NaN for null."""
    values = row[name]
    if not values:
        values = [None] * len(row["token_ids"])
    numbers = [math.nan if value is None else value for value in values]
    return torch.tensor(numbers, dtype=torch.float64)


def measure_noise(readings: Sequence[RowReading], smallest: float, largest: float) -> float:
    """Returns the median error of a token's log-odds, within the two bounds.

    An error e of a token's log-odds is an error e (1 - p) of its log-prob.
    """
    errors = [torch.tensor([smallest], dtype=torch.float64)]
    for reading in readings:
        logp = reading.tokens.logp  # [t]
        gap = (column_of(reading.row, "rollout_logprobs") - logp).abs() - reading.tokens.grain
        one_minus_p = -logp.expm1()  # [t]
        is_version = torch.tensor(reading.row["policy_versions"]) == reading.version
        # Near p = 1 the log-prob says next to nothing about the log-odds.
        is_usable = is_version & (one_minus_p > 1e-3) & ~gap.isnan()
        errors.append((gap.clamp(min=0) / one_minus_p)[is_usable])
    median = torch.cat(errors).median().item()
    return min(max(median, smallest), largest)


def check_row(run: RecordedRun, reading: RowReading, noise: float) -> None:
    """Checks the tokens that a version sampled, their log α, and log π_k if it is π_k."""
    row = reading.row
    is_sampled_by_version = reading.is_sampled_by_version()
    # Only the local engine draws from the keyed random numbers; vLLM has its own generator.
    if run.settings.rollout.engine == "local":
        _check_samples(run, reading, is_sampled_by_version, noise)
    _check_logprobs(run, reading, "rollout_logprobs", is_sampled_by_version, noise)
    is_sampled = torch.tensor(row["loss_mask"])
    is_pi_k = reading.version == row["policy_version"]
    _check_logprobs(run, reading, "old_logprobs", is_sampled & is_pi_k, noise)


def _check_samples(run: RecordedRun, reading: RowReading, is_checked: Tensor, noise: float) -> None:
    """Checks that each token is the inverse of the cumulative distribution of α at its u."""
    row = reading.row
    for t in is_checked.nonzero().flatten().tolist():
        token = row["token_ids"][t]
        outside = reading.tokens.outside[t].item()
        expected = token
        if outside > MAX_SAMPLE_NOISE * noise:
            expected = int(reading.tokens.expected[t])
        where = f"{row['where']}, token {t}"
        run.report.compare("samples", where, {"token_ids": expected}, {"token_ids": token})
        # So close to a boundary, the noise could have moved u to the neighbor's interval.
        if abs(outside) <= MAX_SAMPLE_NOISE * noise:
            run.report.undecided["samples"] += 1


def _check_logprobs(
    run: RecordedRun, reading: RowReading, column: str, is_checked: Tensor, noise: float
) -> None:
    """Checks the recorded log-probs of a column; null ones are left out."""
    logp = reading.tokens.logp  # [t]
    tolerance = MAX_LOGP_NOISE * noise * -logp.expm1() + reading.tokens.grain  # [t]
    recorded = column_of(reading.row, column)  # [t]
    for t in (is_checked & ~recorded.isnan()).nonzero().flatten().tolist():
        run.report.compare(
            column,
            f"{reading.row['where']}, token {t}",
            expected={column: logp[t].item()},
            recorded={column: recorded[t].item()},
            tolerance=tolerance[t].item(),
        )
