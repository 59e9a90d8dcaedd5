"""What the settings of a run mean, in numbers: printed at the start of every run and by --dry-run."""

from __future__ import annotations

from typing import Any

import torch

from lagrpo.core.lag_table import held_lag, measured_lags, recipes_that_hold
from lagrpo.core.objective import Recipe
from lagrpo.core.recipes import bounds_whole_completions, clips_around_pi_k, inert_over_pi_k
from lagrpo.errors import as_settings_error
from lagrpo.model.backend import pick_device, pick_dtype
from lagrpo.model.embedded import resolve_model
from lagrpo.model.loading import check_supported, load_config
from lagrpo.model.lora import count_parameters
from lagrpo.rollout.schedule import Schedule, lags
from lagrpo.settings.schema import Settings
from lagrpo.terminal.text import count_of
from lagrpo.training.build import loading, lora_of
from lagrpo.training.checks import offline_prompts, world_size


def meaning(settings: Settings, recipe: Recipe) -> list[str]:
    """One line for each thing that people get wrong about a run. The model's sizes are read from its config."""
    s, rollout, o = settings.schedule, settings.rollout, settings.optimizer
    per_batch, device = s.prompts_per_batch * rollout.num_generations, pick_device()
    dtype, why = pick_dtype(settings.model.dtype, device)
    masters = f", {'dithered' if o.dither_master_weights else 'plain'} fp32 master weights" * (
        dtype == "bfloat16"
    )
    changes = ", ".join(f"{name} = {value}" for name, value in settings.loss.knobs.items())
    offline = offline_prompts(settings)
    of_files = (
        f"; {count_of(offline, 'prompt')} of them from {', '.join(settings.offline.data)}"
        * bool(offline)
    )
    return [
        f"recipe      {recipe.name}: {recipe.formula}" + (f"; with {changes}" if changes else ""),
        *_notes(recipe, settings),
        *_staleness_note(recipe, settings),
        f"batch       {s.prompts_per_batch} prompts x {rollout.num_generations} completions = {per_batch:,} samples, "
        f"used for {count_of(s.num_iterations, 'update')}{of_files}",
        f"schedule    {_weight_syncs(settings)}",
        f"run         {count_of(s.batches, 'batch', 'es')} = {count_of(s.batches * s.num_iterations, 'update')}, "
        f"{s.batches * per_batch:,} samples, at most {per_batch * rollout.max_completion_length:,} tokens per batch",
        *_memory(settings, recipe),
        f"arithmetic  {dtype} ({why}) on {device}{masters}",
    ]


def _notes(recipe: Recipe, settings: Settings) -> list[str]:
    """Lines about what a recipe costs, and what of it does not act."""
    notes = []
    if bounded := bounds_whole_completions(recipe):
        notes.append(
            f"note        {', '.join(bounded)} bounds the ratio of a whole completion: the longer a "
            "completion, the more often it is cut"
        )
    if recipe.needs_step_statistics:
        notes.append(
            "note        the loss reads a statistic of the whole step: every update has a second pass, without gradient"
        )
    if settings.schedule.num_iterations == 1 and (
        clips_around_pi_k(recipe) or inert_over_pi_k(recipe)
    ):
        notes.append(
            "note        with one update per batch pi is pi_k, so the clip never acts, only the weight "
            "pi_k/alpha does"
        )
    return notes


def _weight_syncs(settings: Settings) -> str:
    """When the sampler gets new weights, and how stale it can become."""
    s = settings.schedule
    if s.constant_lag is not None:
        when = f"before every batch, {count_of(s.constant_lag, 'batch', 'es')} late"
    elif s.v == 1:
        when = "before every batch"
    else:
        when = f"every {s.v} batches"
    if s.sync_at_kl is not None:
        when = f"when KL(alpha||pi_k) of a completion passes {s.sync_at_kl:g} nats, at the latest {when}"
    largest = count_of(largest_staleness(settings), "update")
    return f"weight sync {when}; staleness at most {largest}"


def largest_staleness(settings: Settings) -> int:
    """The largest staleness that the schedule allows, in updates."""
    s = settings.schedule
    schedule = Schedule(s.kind, s.v, s.sync_at_kl)
    return max(lags(schedule, s.batches, s.stage_length, s.num_iterations))


def _staleness_note(recipe: Recipe, settings: Settings) -> list[str]:
    """A line if the samples become staler than the recipe was measured to hold, with two recipes that do."""
    largest = largest_staleness(settings)
    held = held_lag(recipe.name)
    if held is None or largest <= held or set(settings.loss.knobs) - {"beta"}:
        return []
    tried = measured_lags(recipe.name)
    if held == tried[-1]:
        limit = f"but {recipe.name} was measured only up to {held}, where it holds"
    elif held > 0:
        limit = f"but {recipe.name} was measured to hold only up to {held}"
    else:
        limit = f"and {recipe.name} did not hold at {tried[0]}, the smallest lag that was measured"
    lag, others = recipes_that_hold(largest)
    is_help = bool(others) and lag > held
    cure = f"; {' and '.join(others)} held at {lag}" if is_help else ""
    return [
        f"note        staleness reaches {count_of(largest, 'update')}, {limit}{cure} "
        "(docs/off-policy.md)"
    ]


def _memory(settings: Settings, recipe: Recipe) -> list[str]:
    """What a rank needs at the least, and what LoRA trains."""
    lm, lora, ranks = empty_model(settings), lora_of(settings.model), world_size()
    with as_settings_error("model.lora_r"):
        adapters = count_parameters(lm, lora) if lora else 0
    memory = expected_memory(settings, recipe, lm.num_parameters(), adapters, ranks)
    parts = ", ".join(f"{name} {size / 2**30:.2f} GiB" for name, size in memory.items())
    lines = [f"memory      {parts}{' per rank' * (ranks > 1)}, plus activations and caches"]
    if lora:
        lines.append(
            f"adapters    {adapters:,} trained parameters; the model's {lm.num_parameters():,} stay frozen"
        )
    return lines


def expected_memory(
    settings: Settings, recipe: Recipe, parameters: int, adapters: int = 0, ranks: int = 1
) -> dict[str, int]:
    """Bytes of a rank by purpose. With P trained parameters in bfloat16 on R ranks:

        strategy   π    π_ref   α    gradient   masters and moments
        zero1      2P   2P      2P   4P         12P/R
        fsdp2      2P/R 2P/R    2P   4P/R       12P/R                 and 2P to evaluate

    α has no copy if vLLM samples. With `adapters`, their numbers are trained, and the model is frozen."""
    size = getattr(torch, pick_dtype(settings.model.dtype, pick_device())[0]).itemsize
    local, trained = settings.rollout.engine == "local", adapters or parameters
    numbers = trained * (1 + recipe.needs_pi_ref) + parameters * bool(adapters)
    if sharded := ranks > 1 and settings.distributed.strategy == "fsdp2":
        numbers = numbers // ranks + 2 * parameters * local
    else:
        numbers += trained * local
    masters = 4 * trained // ranks if size == 2 or ranks > 1 else 0
    gradient = 4 * trained // (ranks if sharded else 1)
    return {
        "weights": size * numbers,
        "gradient and optimizer": gradient + masters + 8 * trained // ranks,
    }


def empty_model(settings: Settings) -> Any:
    """The model of the settings by its config, on the meta device. Raises SettingsError for an unsupported one."""
    from transformers import AutoModelForCausalLM

    with loading(settings.model):
        config = load_config(resolve_model(settings.model.path))
        check_supported(config)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)
