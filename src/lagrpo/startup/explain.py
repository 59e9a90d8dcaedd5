"""The meaning of a run's settings in numbers.

Every run prints it at its start, and --dry-run prints it alone.
"""

# Some methods of transformers have no types.
# pyright: reportUnknownMemberType=false
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

import tomli_w
import torch

from lagrpo.core.objective import Recipe
from lagrpo.core.recipes import bounds_whole_completions, clips_around_pi_k, inert_over_pi_k
from lagrpo.cpu.decoder import is_reproduced
from lagrpo.cpu.library import NoKernels
from lagrpo.distributed.torchrun import local_size, read_count, world_size
from lagrpo.errors import as_settings_error
from lagrpo.logs import print_text, redact_values
from lagrpo.machine import memory_limit
from lagrpo.model.attention import Shape
from lagrpo.model.backend import choose_backend, chosen_kernels, pick_device, pick_dtype
from lagrpo.model.embedded import resolve_model
from lagrpo.model.loading import check_context, check_supported, load_config
from lagrpo.rollout.recorded import total_memory
from lagrpo.rollout.schedule import Schedule, lags
from lagrpo.settings.lag_table import ADVICE, Advice, advice_for, nearest_lag, shares_kept
from lagrpo.settings.schema import Settings
from lagrpo.startup.build_policy import loading, lora_of
from lagrpo.startup.checks import server_shares_gpu
from lagrpo.startup.memory import (
    Computation,
    ModelSizes,
    Teacher,
    Term,
    expected_memory,
    largest_term,
)
from lagrpo.startup.memory_words import (
    check_memory,
    how_to_lower,
    memory_table,
    memory_warning,
    needs,
)
from lagrpo.startup.teacher import SETTING, find_base, teacher_dtype
from lagrpo.tasks import Task
from lagrpo.tasks.episodes import MAIN_TASK
from lagrpo.terminal.text import count_of
from lagrpo.training.entropy import check_entropy_target

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def meaning(
    settings: Settings, recipe: Recipe, memory: Memory | None = None, *, has_table: bool = False
) -> list[str]:
    """One line for each thing that people get wrong about a run.

    The model's sizes are read from its config, unless `memory` has them. `has_table` adds the terms
    of its memory.
    """
    return [
        f"recipe      {_recipe(settings, recipe)}",
        *_reference(settings),
        *_entropy_term(settings),
        *_rate_control(settings),
        *_notes(recipe, settings),
        *_staleness_note(recipe, settings),
        *_rows_note(settings),
        f"batch       {_batch(settings)}",
        f"schedule    {_weight_syncs(settings)}",
        f"run         {_length(settings)}",
        *_memory_lines(memory or memory_of_run(settings, recipe), has_table=has_table),
        f"arithmetic  {_arithmetic(settings)}",
    ]


def print_meaning(settings: Settings, recipe: Recipe, tasks: Mapping[str, Task]) -> None:
    """Prints for a dry run what the settings mean as comments, and those that differ as TOML.

    `tasks`: what `load_tasks` returned. Only the first process of torchrun prints. At the end it
    raises SettingsError if the run cannot fit into memory.
    """
    memory = memory_of_run(settings, recipe)
    if read_count("RANK", default=0) == 0:
        for line in [*_data(tasks), *meaning(settings, recipe, memory, has_table=True)]:
            print_text(f"# {line}")
        print_text("# dry run: nothing was written. Settings that are not the defaults:")
        changed = settings.model_dump(exclude_none=True, exclude_defaults=True)
        print_text(tomli_w.dumps(redact_values(changed)), end="")
    check_memory(memory.terms, memory.computation)


def _data(tasks: Mapping[str, Task]) -> list[str]:
    """The number of prompts of the run's task, and of other tasks that evaluation sets have."""
    lines: list[str] = []
    for name, task in tasks.items():
        test_prompts = count_of(task.size("test"), "test prompt")
        if name == MAIN_TASK:
            training_prompts = count_of(task.size("train"), "training prompt")
            lines.append(f"data        {training_prompts}, {test_prompts}")
        else:
            lines.append(f"data        {test_prompts} in the evaluation set {name}")
    return lines


def _recipe(settings: Settings, recipe: Recipe) -> str:
    """Name and formula of the recipe, and the knobs that the settings change.

    The formula is the recipe's own: it may name what the settings replace.
    """
    changes = [
        f"{name} = {value:g}" if isinstance(value, float) else f"{name} = {value}"
        for name, value in settings.loss.knobs.items()
    ]
    text = recipe.name
    if changes:
        text += f" with {', '.join(changes)}"
    # The function of a user may have no docstring.
    if not recipe.formula:
        return text
    return f"{text}; the recipe alone: {recipe.formula}" if changes else f"{text}: {recipe.formula}"


def _reference(settings: Settings) -> list[str]:
    """A line about a reference that is not simply the policy at the start."""
    loss = settings.loss
    if loss.reference is None and loss.reference_prompt is None:
        return []
    text = loss.reference or "the policy at the start"
    if loss.reference_prompt is not None:
        text += ", which sees the prompts of loss.reference_prompt"
    return [f"reference   {text}"]


def _entropy_term(settings: Settings) -> list[str]:
    """A line about the entropy in the loss, if there is any."""
    coef = settings.loss.entropy_coef
    target = settings.loss.entropy_target
    if target is not None:
        return [
            f"entropy     held at {target:g} nats per token or above: the coefficient begins at "
            f"{coef:g} and moves after each batch"
        ]
    if coef > 0:
        return [f"entropy     the loss has -{coef:g} x mean entropy of a token"]
    return []


def _rate_control(settings: Settings) -> list[str]:
    """Lines about a learning rate that follows the samples, if it does."""
    optimizer = settings.optimizer
    lines: list[str] = []
    names: list[str] = []
    if optimizer.scale_lr_by_kl > 0:
        names.append("scale_lr_by_kl")
        lines.append(
            f"rate        scale_lr_by_kl = {optimizer.scale_lr_by_kl:g}: the learning rate falls "
            "while KL(rollout policy, policy) is above this, in nats per token, and then returns"
        )
    if optimizer.scale_lr_by_ess > 0:
        names.append("scale_lr_by_ess")
        lines.append(
            f"rate        scale_lr_by_ess = {optimizer.scale_lr_by_ess:g}: the learning rate falls "
            "while the effective sample size is below this share of the completions"
        )
    if names and _policy_samples_all(settings):
        lines.append(
            f"note        optimizer.{' and optimizer.'.join(names)} will not act: all samples are "
            "fresh, so the rollout policy is the policy"
        )
    return lines


def _policy_samples_all(settings: Settings) -> bool:
    """True if the policy itself samples for every update, up to rounding."""
    return (
        settings.rollout.engine == "local"
        and not settings.offline.data
        and settings.schedule.num_iterations == 1
        and max(staleness_of_batches(settings)) == 0
    )


def _batch(settings: Settings) -> str:
    """The samples of a batch, where they come from, and the updates that use them."""
    prompts = settings.schedule.prompts_per_batch
    completions = settings.rollout.num_generations
    updates = count_of(settings.schedule.num_iterations, "update")
    from_files = settings.offline_prompts
    # A file may have fewer completions of a prompt.
    at_most = "at most " if from_files > 0 else ""
    text = (
        f"{prompts} prompts x {at_most}{completions} completions = "
        f"{at_most}{prompts * completions:,} samples, used for {updates}"
    )
    if from_files > 0:
        files = ", ".join(settings.offline.data)
        text += f"; {count_of(from_files, 'prompt')} of them from {files}"
    return text


def _length(settings: Settings) -> str:
    """The batches, updates, samples and tokens of a run."""
    schedule = settings.schedule
    samples = schedule.prompts_per_batch * settings.rollout.num_generations
    batches = count_of(schedule.batches, "batch", "es")
    updates = count_of(schedule.batches * schedule.num_iterations, "update")
    tokens = samples * settings.rollout.max_completion_length
    at_most = "at most " if settings.offline_prompts > 0 else ""
    return (
        f"{batches} = {updates}, {at_most}{schedule.batches * samples:,} samples, "
        f"at most {tokens:,} tokens per batch"
    )


def _arithmetic(settings: Settings) -> str:
    """The dtype of the model and why, the device, and the master weights of a bfloat16 model."""
    device = pick_device()
    dtype, reason = pick_dtype(settings.model.dtype, device)
    text = f"{dtype} ({reason}) on {device}"
    if dtype == "bfloat16":
        kind = "dithered" if settings.optimizer.dither_master_weights else "plain"
        text += f", {kind} fp32 master weights"
    return text


SMALL_RATE_OF_ADAPTERS = 1e-5
"""Adapters are scaled products of small matrices: at rates for whole weights they hardly move."""


def _notes(recipe: Recipe, settings: Settings) -> list[str]:
    """Lines about rates that are not what they seem, what a recipe costs, and what never acts."""
    notes: list[str] = []
    rate = settings.optimizer.learning_rate
    if settings.model.lora_r and rate < SMALL_RATE_OF_ADAPTERS:
        notes.append(
            f"warning     optimizer.learning_rate = {rate:g} is small for adapters (model.lora_r = "
            f"{settings.model.lora_r}), which hardly move at it: try 1e-5 to 5e-4"
        )
    warmup = settings.optimizer.warmup_steps
    updates = settings.schedule.batches * settings.schedule.num_iterations
    if warmup >= updates:
        # As in Optimization.rate: the last update is number `updates` - 1.
        largest = rate * updates / (warmup + 1)
        notes.append(
            f"warning     optimizer.warmup_steps = {warmup}, but the run has only "
            f"{count_of(updates, 'update')}: the learning rate reaches {largest:.3g}, "
            f"never {rate:g}"
        )
    bounded = bounds_whole_completions(recipe)
    if bounded:
        notes.append(
            f"note        {', '.join(bounded)} bounds the ratio of a whole completion: the longer "
            "a completion, the more often it is cut"
        )
    if recipe.needs_step_statistics:
        notes.append(
            "note        the loss reads a statistic of the whole step: every update has a second "
            "pass, without gradient"
        )
    if settings.schedule.num_iterations == 1 and (
        clips_around_pi_k(recipe) or inert_over_pi_k(recipe)
    ):
        notes.append(
            "note        with one update per batch pi is pi_k, so the clip never acts, only the "
            "weight pi_k/alpha does"
        )
    return notes


def _weight_syncs(settings: Settings) -> str:
    """When the sampler gets new weights, and how stale it can become."""
    s = settings.schedule
    if s.constant_lag is not None:
        when = f"before every batch, {count_of(s.constant_lag, 'batch', 'es')} late"
    elif s.continues_completions:
        when = "before every batch, while completions go on"
    elif s.v == 1:
        when = "before every batch"
    elif s.sync_at_kl is not None:
        when = (
            f"when KL(alpha||pi_k) of a completion passes {s.sync_at_kl:g} nats, "
            f"at the latest after {s.v} batches"
        )
    else:
        when = f"every {s.v} batches, first before batch {s.v}"
        if s.stage_length < s.batches:
            when += f" of each stage of {count_of(s.stage_length, 'batch', 'es')}"
    if _is_offline(settings):
        return f"weight sync {when}; staleness of the offline samples unknown"
    staleness = staleness_of_batches(settings)
    text = f"weight sync {when}; staleness at most {count_of(max(staleness), 'update')}"
    if (
        s.sync_at_kl is None
        and not s.continues_completions
        and s.batches > 1
        and staleness[-1] == (s.batches - 1) * s.num_iterations
    ):
        reason = f"the run has only {count_of(s.batches, 'batch', 'es')}"
        if not s.runs_ahead and s.stage_length < min(s.v, s.batches):
            reason = f"a stage has only {count_of(s.stage_length, 'batch', 'es')}"
        text += f": all samples come from the first weights, because {reason}"
    if settings.offline.data:
        text += ", of the offline samples unknown"
    return text


def _is_offline(settings: Settings) -> bool:
    """True if all samples come from files, so that the schedule says nothing of staleness."""
    return settings.offline_prompts == settings.schedule.prompts_per_batch


def staleness_of_batches(settings: Settings) -> list[int]:
    """The largest staleness that the schedule allows in each batch, in updates."""
    s = settings.schedule
    schedule = Schedule(s.kind, s.v, s.sync_at_kl)
    return lags(schedule, s.batches, s.stage_length, s.num_iterations)


def _staleness_note(recipe: Recipe, settings: Settings) -> list[str]:
    """The advice for samples as stale as these get, compared with what this recipe kept.

    Nothing for samples that are nearly fresh, nor for distillation: the advised recipes learn from
    rewards.
    """
    if _is_offline(settings) or recipe.ignores_reward:
        return []
    largest = max(staleness_of_batches(settings))
    advice = advice_for(largest)
    if advice is ADVICE[0]:
        return []
    lines = [
        f"note        samples get up to {count_of(largest, 'update')} old: start with "
        f"{' or '.join(advice.recipes)} and the learning rate {advice.rate}, where f is the best "
        "one with fresh samples (docs/off-policy.md#which-loss)"
    ]
    is_other_loss = bool(set(settings.loss.knobs) - {"beta"})
    if recipe.name not in advice.recipes and not is_other_loss:
        lines += _measured_note(recipe.name, advice, largest)
    return lines


def _rows_note(settings: Settings) -> list[str]:
    """A note if rows, not max_staleness, limit how old tokens get.

    A batch waits at most for the longest completion. Meanwhile the other rows make as many batches
    as they hold, times longest / mean length.
    """
    s = settings.schedule
    rollout = settings.rollout
    samplers = max(1, len(settings.vllm.urls)) if rollout.uses_vllm else world_size()
    rows = samplers * rollout.max_num_seqs
    batches_in_rows = rows / (s.prompts_per_batch * rollout.num_generations)
    if not s.continues_completions or s.v + 1 <= 2 * batches_in_rows:
        return []
    times = f"{batches_in_rows:.2g}"
    return [
        f"note        rollout.max_num_seqs = {rollout.max_num_seqs} makes room for {times} times a "
        f"batch: tokens get at most about {times} x longest / mean length batches old; a larger "
        "bound than that changes nothing"
    ]


def _measured_note(name: str, advice: Advice, staleness: int) -> list[str]:
    """A line that compares a recipe with the advised one; none if one is unmeasured."""
    advised = advice.recipes[0]
    lag = nearest_lag(name, staleness)
    if lag is None or lag != nearest_lag(advised, staleness):
        return []
    return [
        f"note        two small tasks with samples {count_of(lag, 'update')} old: {name} learned "
        f"{shares_kept(name, lag)} of what the best loss learns from fresh samples, {advised} "
        f"{shares_kept(advised, lag)} (docs/staleness.md)"
    ]


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory that a rank of a run is expected to need, and what it follows from."""

    terms: Sequence[Term]
    sizes: ModelSizes
    computation: Computation


def memory_of_run(settings: Settings, recipe: Recipe) -> Memory:
    """Returns the memory that a rank needs, by the config of the model.

    Raises SettingsError for a model that cannot be trained.
    """
    lm = empty_model(settings)
    computation = computation_of(settings, lm, world_size(), settings.model.dtype)
    with as_settings_error("model.lora_r"):
        sizes = ModelSizes.of(lm, lora_of(settings.model))
    terms = expected_memory(sizes, settings, recipe, computation, teacher_of(settings))
    return Memory(terms, sizes, computation)


def teacher_of(settings: Settings) -> Teacher | None:
    """The sizes of the model of loss.reference, by its config; None without one.

    Adapters of it are too small to count.
    """
    name = settings.loss.reference
    if name is None:
        return None
    with loading(name, SETTING):
        config = load_config(find_base(resolve_model(name)))
        check_supported(config)
        lm = without_weights(config)
    computation = computation_of(settings, lm, world_size(), teacher_dtype(config))
    return Teacher(ModelSizes.of(lm, None), computation)


def _memory_lines(memory: Memory, *, has_table: bool) -> list[str]:
    """The memory that a rank needs, a warning if it has less, and the parameters of adapters."""
    terms = memory.terms
    sizes = memory.sizes
    computation = memory.computation
    lines = [f"memory      {needs(terms, computation)}; {how_to_lower(largest_term(terms))}"]
    if has_table:
        lines += memory_table(terms, computation.ranks)
    lines += memory_warning(terms, computation)
    if sizes.adapters:
        lines.append(
            f"adapters    {sizes.adapters:,} trained parameters; "
            f"the model's {sizes.parameters:,} stay frozen"
        )
    return lines


def computation_of(
    settings: Settings,
    lm: PreTrainedModel,
    ranks: int,
    dtype_setting: Literal["auto", "bfloat16", "float32"],
) -> Computation:
    """Returns what computes a model, which may be on the meta device, on this machine."""
    device = pick_device()
    dtype = getattr(torch, pick_dtype(dtype_setting, device)[0])
    with as_settings_error("LAGRPO_KERNELS", NoKernels):
        backend = choose_backend(chosen_kernels(), device, dtype)
    is_sharded = ranks > 1 and settings.distributed.strategy == "fsdp2"
    has_kernels = backend.kernels or backend.triton
    text_config = lm.config.get_text_config()
    fused = has_kernels and is_reproduced(lm, Shape.of(text_config).d)
    packed = fused and backend.products is not None and dtype == torch.bfloat16
    on_gpu = device.type == "cuda"
    return Computation(
        itemsize=dtype.itemsize,
        ranks=ranks,
        on_gpu=on_gpu,
        # Packed weights are whole. Sharded layers are computed without them, by their modules.
        fused=fused and not (is_sharded and packed),
        packed=packed,
        # The ranks of a host share its memory.
        memory=total_memory(device) if on_gpu else memory_limit() // local_size(),
        shares_gpu=server_shares_gpu(settings),
    )


def empty_model(settings: Settings) -> PreTrainedModel:
    """The model of the settings by its config, on the meta device.

    Raises SettingsError for an unsupported one, and for sequences that are too long for it.
    """
    with loading(settings.model.path):
        config = load_config(resolve_model(settings.model.path))
        check_supported(config)
        check_context(config, settings.max_sequence_length)
        check_entropy_target(settings.loss.entropy_target, config.get_text_config().vocab_size)
        return without_weights(config)


def without_weights(config: Any) -> PreTrainedModel:
    """The model of a config, on the meta device."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return cast(
            "PreTrainedModel",
            AutoModelForCausalLM.from_config(config, trust_remote_code=False),
        )
