"""Samples and log-probs, token by token, against plain transformers.

A token y sampled at the uniform number u is right when F(y - 1) <= u < F(y), with F the cumulative
distribution of α over the vocabulary. F is recomputed, so tokens are judged in log-odds, in units
of the rounding noise of F (noise.py). A token whose u lies within MAX_NOISE of a boundary is
undecided.
"""

from __future__ import annotations

import importlib.util
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lagrpo.errors import SettingsError, as_settings_error
from lagrpo.model.directory import check_directory, naming_damage
from lagrpo.model.embedded import ALIASES, is_adapter, resolve_model
from lagrpo.model.lora import load_adapter_config
from lagrpo.rng import permutation, uniforms
from lagrpo.verify.noise import (
    MAX_NOISE,
    boundary_noise,
    float32_grain,
    hidden_noise,
    logit_noise,
)
from lagrpo.verify.record import RecordedRun, Row, sampled

if TYPE_CHECKING:
    from transformers import PreTrainedModel

COLUMNS = ("rollout_logprobs", "old_logprobs")
"""log α and log π_k"""

MAX_PROBABILITIES = 1 << 22
"""Probabilities in memory at once."""


def find_path(run: RecordedRun, name: str) -> Path:
    """Returns a path of the settings, relative to the directory in which the run was started."""
    start = Path(run.environment.get("directory") or ".")
    return start / Path(name).expanduser()


def find_model(run: RecordedRun, name: str, setting: str) -> str:
    """Returns what `from_pretrained` takes for the model of a setting."""
    path = find_path(run, name)
    with as_settings_error(setting):
        is_directory = name not in ALIASES and path.is_dir()
        return resolve_model(str(path) if is_directory else name)


def find_weights(run: RecordedRun) -> dict[int, str]:
    """Returns the directory of each version on disk. Version 0 is the model of the settings."""
    folders = {0: find_model(run, run.settings.model.path, "model.path")}
    for folder in sorted((run.path / "weights").glob("v[0-9]*")):
        version = int(folder.name.removeprefix("v"))
        folders[version] = str(folder)
    return folders


def load_model(run: RecordedRun, folder: str, dtype_entry: str = "dtype") -> PreTrainedModel:
    """Loads a model, rounded to the run's dtype as in the run, that computes in float32.

    `dtype_entry` is the entry of environment.json with that dtype.

    If only one of two computations rounds, they lie closer together. Raises SettingsError for a
    broken directory.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    if is_adapter(folder):
        _check_adapter(Path(folder))
    logging.disable_progress_bar()
    with as_settings_error(), naming_damage(folder, f"{folder} cannot be loaded"):
        dtype = getattr(torch, run.environment[dtype_entry])
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
        advice = "verifying versions of adapters needs the package peft: pip install peft"
        raise SettingsError(f"{folder}: {advice}")
    with as_settings_error():
        check_directory(folder)
        load_adapter_config(folder)


@dataclass(frozen=True, slots=True)
class Reading:
    """Numbers from transformers about the t tokens of a completion under one version, each [t]."""

    logp: Tensor
    """log-prob, nats"""
    entropy: Tensor
    """entropy of the distribution, nats"""
    deviation: Tensor
    """rounding noise of the log-prob, nats"""
    outside: Tensor
    """distance of u from its token's interval, in units of its noise; negative inside"""
    expected: Tensor
    """the token whose interval holds u"""
    expected_logp: Tensor
    """its log-prob, nats"""

    @staticmethod
    def concatenate(pieces: Sequence[Reading]) -> Reading:
        columns = {
            field.name: torch.cat([getattr(piece, field.name) for piece in pieces])
            for field in fields(Reading)
        }
        return Reading(**columns)


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

    def column(self, name: str) -> Tensor:
        """Returns the recorded log-probs by this version, float64 [t], NaN for others and null.

        `name` is rollout_logprobs, of α, or old_logprobs, of π_k.
        """
        values = self.row[name]
        if not values:
            values = [None] * len(self.row["token_ids"])
        numbers = [math.nan if value is None else value for value in values]
        is_by_version = self.is_sampled_by_version()
        if name == "old_logprobs":
            is_pi_k = self.version == self.row["policy_version"]
            is_by_version = torch.tensor(self.row["loss_mask"]) & is_pi_k
        return torch.tensor(numbers, dtype=torch.float64).where(is_by_version, math.nan)


def read_tokens(
    scaled_TV: Tensor, token_T: Tensor, uniform_T: Tensor, *, hidden: float, dtype: str
) -> Reading:
    """Reads tokens y that were sampled at uniform numbers u from logits / temperature, float64.

    `hidden` is the share of `hidden_noise` for a run in `dtype`.
    """
    y = token_T.unsqueeze(1)  # [T, 1]
    u = uniform_T.unsqueeze(1)  # [T, 1]
    log_sum = scaled_TV.logsumexp(-1, keepdim=True)  # [T, 1]
    logit = scaled_TV.gather(1, y)  # [T, 1]
    logp_TV = scaled_TV - log_sum
    p_TV = logp_TV.exp()
    logp = logit - log_sum  # [T, 1]
    size_T = torch.maximum(logit.abs(), log_sum.abs()).squeeze(1)
    logit_noise_T = logit_noise(scaled_TV, size_T, hidden, dtype)
    log_odds_noise_T = math.sqrt(2) * logit_noise_T
    grain_T = float32_grain(size_T, scaled_TV.shape[1])

    cdf_TV = p_TV.cumsum(-1)
    # Rounding leaves the last value beside 1.
    cdf_TV = cdf_TV / cdf_TV[:, -1:]
    squares_TV = p_TV.square().cumsum(-1)

    def distance_to_boundary(cdf: Tensor, squares_below: Tensor, sign: int) -> Tensor:
        """The distance of u from a boundary F, in units of its noise, [T, 1]."""
        noise = boundary_noise(cdf, squares_below, squares_TV[:, -1:])
        # logit(0) is -inf and logit(1) is inf: nothing lies outside of the first and last boundary.
        return sign * (u.logit() - cdf.logit()) / (noise * logit_noise_T.unsqueeze(1))

    is_first = y == 0
    before = (y - 1).clamp(min=0)
    lower = torch.where(is_first, 0.0, cdf_TV.gather(1, before))  # F(y - 1), [T, 1]
    squares_lower = torch.where(is_first, 0.0, squares_TV.gather(1, before))
    outside = torch.maximum(
        distance_to_boundary(lower, squares_lower, sign=-1),
        distance_to_boundary(cdf_TV.gather(1, y), squares_TV.gather(1, y), sign=1),
    )
    expected = torch.searchsorted(cdf_TV, u, right=True).clamp(max=cdf_TV.shape[1] - 1)
    return Reading(
        logp=logp.squeeze(1),
        entropy=-(p_TV * logp_TV).sum(-1),
        deviation=-logp.squeeze(1).expm1() * log_odds_noise_T + grain_T,
        outside=outside.squeeze(1),
        expected=expected.squeeze(1),
        expected_logp=logp_TV.gather(1, expected).squeeze(1),
    )


@torch.no_grad()
def read_row(
    run: RecordedRun,
    model: PreTrainedModel,
    row: Row,
    *,
    dtype: str,
    prompt: str = "prompt_token_ids",
    vocabulary: int | None = None,
) -> Reading:
    """Reads a completion in one forward pass over its whole sequence, without a cache.

    The run computed in `dtype`. The column `prompt` has the tokens before the completion. Logits
    beyond a `vocabulary` do not count.
    """
    token_T = torch.tensor(row["token_ids"])
    T = len(token_T)
    key = (row["step"], row["epoch"], row["prompt_id"], row["sample_index"])
    uniform_T = torch.from_numpy(uniforms(T, run.settings.run.seed, "sample", *key))
    sequence = torch.tensor([[*row[prompt], *row["token_ids"]]])  # [1, prompt + T]
    # The logits before each completion token; the last position predicts a token after the end.
    output = model(input_ids=sequence, use_cache=False, logits_to_keep=T + 1)
    logits_TV = output.logits[0, :-1, :vocabulary]
    hidden = hidden_noise(model, dtype, sequence.shape[1])
    chunk = max(1, MAX_PROBABILITIES // logits_TV.shape[1])
    pieces = []
    for start in range(0, T, chunk):
        part = slice(start, start + chunk)
        scaled_TV = (logits_TV[part] / run.settings.rollout.temperature).double()
        pieces.append(
            read_tokens(scaled_TV, token_T[part], uniform_T[part], hidden=hidden, dtype=dtype)
        )
    return Reading.concatenate(pieces)


def read_rows(run: RecordedRun, count: int | None, seed: int) -> list[RowReading]:
    """Reads `count` completions (None: all), chosen by `seed`, under each version they need."""
    folders = find_weights(run)
    rows = _choose_rows(run, folders, count, seed)
    readings = []
    for version, folder in sorted(folders.items()):
        rows_of_version = [row for row in rows if version in _versions_of(run, row)]
        if not rows_of_version:
            continue
        # One model is in memory at a time.
        model = load_model(run, folder)
        for row in rows_of_version:
            tokens = read_row(run, model, row, dtype=run.environment["dtype"])
            readings.append(RowReading(row, version, tokens))
    return readings


def _versions_of(run: RecordedRun, row: Row) -> set[int]:
    """Returns the versions to read a row with: of α at each token, π_k, and the one after."""
    versions = {row["policy_version"], *sampled(row, "policy_versions")}
    version_after = run.version_after(row["step"])
    return versions if version_after is None else versions | {version_after}


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
    advice = "set checkpoint.export_every = 1 to keep the weights of every version"
    without_weights = len(run.generated) - len(rows)
    run.report.skip(
        f"{prefix} the weights of their version are not on disk; {advice}", without_weights
    )
    not_chosen = len(rows) - len(rows_to_replay)
    run.report.skip(f"{prefix} not chosen; choose more with --rows N or --all", not_chosen)
    return rows_to_replay


def check_tokens(run: RecordedRun, readings: Sequence[RowReading]) -> None:
    """Checks samples, log α and log π_k, token by token."""
    for reading in readings:
        # Only the local engine draws from the keyed random numbers; vLLM has its own generator.
        if run.settings.rollout.engine == "local":
            _check_samples(run, reading)
        for column in COLUMNS:
            _check_logprobs(run, reading, column)
    undecided = run.report.undecided["samples"]
    compared = run.report.compared["samples"]
    if undecided > compared / 2:
        reason = f"samples, of {compared:,}: rounding leaves undecided which token is right"
        run.report.skip(f"{reason}; their mean log-prob was checked", undecided)


def _check_samples(run: RecordedRun, reading: RowReading) -> None:
    """Checks that each token is the inverse of the cumulative distribution of α at its u."""
    row = reading.row
    for t in reading.is_sampled_by_version().nonzero().flatten().tolist():
        token = row["token_ids"][t]
        outside = reading.tokens.outside[t].item()
        expected = token
        if outside > MAX_NOISE:
            expected = int(reading.tokens.expected[t])
        where = f"{row['where']}, token {t}"
        run.report.compare("samples", where, {"token_ids": expected}, {"token_ids": token})
        # So close to a boundary, the noise could have moved u to the neighbor's interval.
        if abs(outside) <= MAX_NOISE:
            run.report.undecided["samples"] += 1


def _check_logprobs(run: RecordedRun, reading: RowReading, column: str) -> None:
    """Checks the recorded log-probs of a column; null ones are left out."""
    logp = reading.tokens.logp  # [t]
    tolerance = MAX_NOISE * reading.tokens.deviation  # [t]
    recorded = reading.column(column)  # [t]
    for t in (~recorded.isnan()).nonzero().flatten().tolist():
        run.report.compare(
            column,
            f"{reading.row['where']}, token {t}",
            expected={column: logp[t].item()},
            recorded={column: recorded[t].item()},
            tolerance=tolerance[t].item(),
        )


def check_reference(run: RecordedRun, readings: Sequence[RowReading]) -> None:
    """Checks the recorded log π_ref of the completions that were read, token by token."""
    rows = {reading.row["where"]: reading.row for reading in readings}
    recorded_rows = [row for row in rows.values() if row.get("ref_logprobs")]
    if not recorded_rows:
        return
    policy_folder = find_weights(run)[0]
    if run.settings.loss.reference is not None:
        folder = find_model(run, run.settings.loss.reference, "loss.reference")
        _compare_reference(run, recorded_rows, folder, policy_folder, "reference_dtype")
        return
    rows_by_folder: defaultdict[str, list[Row]] = defaultdict(list)
    folders = find_weights(run)
    without_weights = 0
    for row in recorded_rows:
        folder = folders.get(_version_of_reference(run, row["step"]))
        if folder is None:
            without_weights += 1
        else:
            rows_by_folder[folder].append(row)
    run.report.skip("log-probs of the reference: its version is not on disk", without_weights)
    for folder, rows_of_version in rows_by_folder.items():
        _compare_reference(run, rows_of_version, folder, policy_folder, "dtype")


def _version_of_reference(run: RecordedRun, step: int) -> int:
    """Returns the version that was the reference at a step: the policy's when the stage began."""
    stage = run.settings.schedule.ref_sync_every
    if stage is None or step <= stage:
        return 0
    first_step = step - (step - 1) % stage
    return run.metrics[first_step].values["policy_version"]


def _compare_reference(
    run: RecordedRun, rows: Sequence[Row], folder: str, policy_folder: str, dtype_entry: str
) -> None:
    """Compares the recorded log π_ref of rows with the log-probs of the model in a folder."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(policy_folder, trust_remote_code=False)
    vocabulary = config.get_text_config().vocab_size
    model = load_model(run, folder, dtype_entry)
    for row in rows:
        prompt = "ref_prompt_token_ids" if row.get("ref_prompt_token_ids") else "prompt_token_ids"
        dtype = run.environment[dtype_entry]
        reading = read_row(run, model, row, dtype=dtype, prompt=prompt, vocabulary=vocabulary)
        for t, logp in enumerate(row["ref_logprobs"]):
            if logp is not None:
                run.report.compare(
                    "ref_logprobs",
                    f"{row['where']}, token {t}",
                    expected={"ref_logprobs": reading.logp[t].item()},
                    recorded={"ref_logprobs": logp},
                    tolerance=MAX_NOISE * reading.deviation[t].item(),
                )
