"""What the settings of a run mean, in numbers: printed at the start of every run and by --dry-run."""

from __future__ import annotations

from typing import Any

import torch

from lagrpo.core.objective import Recipe
from lagrpo.errors import refusing
from lagrpo.model.attention import Shape
from lagrpo.model.backend import pick_device, pick_dtype
from lagrpo.model.embedded import resolve_model
from lagrpo.model.loading import check_supported, load_config
from lagrpo.model.logprobs import KEPT_LOGITS, KERNEL_LOGITS
from lagrpo.model.lora import count_parameters
from lagrpo.rollout.schedule import Schedule, lags
from lagrpo.settings.schema import Settings
from lagrpo.terminal.text import count_of
from lagrpo.training.build import loading, lora_of
from lagrpo.training.checks import offline_prompts, world_size

BYTES = {"bfloat16": 2, "float32": 4}
HIDDEN_BYTES = {2: 44, 4: 54}  # of activations for each hidden unit, by the bytes of a number; measured on Llama layers
PROGRAM = 400 * 2**20  # Python, torch and transformers themselves
IDLE = 0.15  # gaps that the allocator cannot fill


def meaning(settings: Settings, recipe: Recipe) -> list[str]:
    """One line for each thing that people get wrong about a run. The model's sizes are read from its config."""
    s, rollout, o = settings.schedule, settings.rollout, settings.optimizer
    per_batch, device = s.prompts_per_batch * rollout.num_generations, pick_device()
    dtype, why = pick_dtype(settings.model.dtype, device)
    masters = f", {'dithered' if o.dither_master_weights else 'plain'} float32 masters" * (dtype == "bfloat16")
    changes = ", ".join(f"{name} = {value}" for name, value in settings.loss.knobs.items())
    offline = offline_prompts(settings)
    of_files = f"; {count_of(offline, 'prompt')} of them from {', '.join(settings.offline.data)}" * bool(offline)
    return [
        f"recipe      {recipe.name}: {recipe.formula}" + (f"; here with {changes}" if changes else ""),
        f"batch       {s.prompts_per_batch} prompts x {rollout.num_generations} completions = {per_batch:,} samples, "
        f"used for {count_of(s.num_iterations, 'update')}{of_files}",
        f"schedule    {_weight_syncs(settings)}",
        f"run         {count_of(s.batches, 'batch', 'es')} = {count_of(s.batches * s.num_iterations, 'update')}, "
        f"{s.batches * per_batch:,} samples, at most {per_batch * rollout.max_completion_length:,} tokens of a batch",
        *_servers_and_rewards(settings),
        *_memory(settings, recipe),
        f"arithmetic  {dtype} ({why}) on {device}{masters}",
    ]


def _weight_syncs(settings: Settings) -> str:
    """When the sampler gets new weights, and how stale it can become."""
    s = settings.schedule
    when = "before every batch" if s.constant_lag is not None or s.v == 1 else f"every {s.v} batches"
    if s.sync_at_kl is not None:
        when = f"when KL(alpha||pi_k) of a completion passes {s.sync_at_kl:g} nats, at the latest {when}"
    return f"new weights {when}; largest possible staleness {count_of(largest_lag(settings), 'update')}"


def largest_lag(settings: Settings) -> int:
    """The largest possible lag of a batch, in optimizer updates."""
    s = settings.schedule
    return max(lags(Schedule(s.kind, s.v, s.sync_at_kl), s.batches, s.stage_length, s.num_iterations))


def _servers_and_rewards(settings: Settings) -> list[str]:
    v, task, lines = settings.vllm, settings.task, list[str]()
    if settings.rollout.engine == "vllm":
        who = ", ".join(v.urls) if v.urls else "a server that the run starts"
        lines = [f"sampler     vLLM: {who}; weights by {v.weight_transfer}, completions under way: {v.on_weight_sync}"]
    if task.rewards:
        total = " + ".join(f"{each.weight:g} x {each.name} ({each.reward})" for each in task.rewards)
        lines.append(f"reward      {total}, from {task.reward_range[0]:g} to {task.reward_range[1]:g}")
    return lines


def _memory(settings: Settings, recipe: Recipe) -> list[str]:
    """What a rank needs at the most, and what is trained if that is not the model itself."""
    lm, lora, ranks = empty_model(settings), lora_of(settings.model), world_size()
    with refusing("model.lora_r"):
        adapters = count_parameters(lm, lora) if lora else 0
    text, parameters = lm.config.get_text_config(), lm.num_parameters()
    memory = expected_memory(settings, recipe, text, parameters, adapters, ranks)
    total, each = _size(sum(memory.values())), " for each rank" if ranks > 1 else ""
    lines = [f"memory      at most about {total}{each}: {', '.join(f'{k} {_size(v)}' for k, v in memory.items())}"]
    if lora:
        what = f"r = {lora.r}, alpha = {lora.alpha:g}, for {', '.join(lora.targets)}"
        lines.append(f"adapters    {what}: {adapters:,} numbers are trained, the model's {parameters:,} are frozen")
    return lines


def expected_memory(
    settings: Settings, recipe: Recipe, config: Any, parameters: int, adapters: int = 0, ranks: int = 1
) -> dict[str, int]:
    """The most bytes of a rank by purpose. With P trained parameters in bfloat16 on R ranks:

        strategy   π    π_ref   α    gradient   masters and moments
        zero1      2P   2P      2P   4P         12P/R
        fsdp2      2P/R 2P/R    2P   4P/R       12P/R                 and two layers, and 2P to evaluate

    α has no copy if vLLM samples. The kernels may pack one more copy of π. With `adapters`, their numbers are trained,
    and the model is frozen. docs/scaling.md compares this with measured peaks."""
    size, s = BYTES[pick_dtype(settings.model.dtype, pick_device())[0]], settings.schedule
    local, trained, P = settings.rollout.engine == "local", adapters or parameters, parameters
    stale = s.num_iterations > 1 or largest_lag(settings) > 0
    numbers = trained * (1 + recipe.needs_pi_ref) + P * bool(adapters)
    if sharded := ranks > 1 and settings.distributed.strategy == "fsdp2":
        head = config.vocab_size * config.hidden_size
        layer = max(0, P - head) // Shape.of(config).layers
        numbers = numbers // ranks + max(2 * layer, head + layer) + P * local * (1 + settings.eval.takes_place)
    else:
        packed = pick_device().type == "cpu" and size == 2
        numbers += trained * (local + (packed and stale)) + P * bool(adapters and packed)
    masters = 4 * trained // ranks if size == 2 or ranks > 1 else 0
    memory = {
        "program": PROGRAM,
        "weights": size * numbers,
        "optimizer": 4 * trained // (ranks if sharded else 1) + masters + 8 * trained // ranks,
        "activations": _activations(settings, config, size, ranks),
        "sampler": _cache(settings, config, size) if local else 0,
    }
    memory["idle"] = int(IDLE * sum(memory.values()))
    if settings.checkpoint.save_minutes or settings.checkpoint.save_every:
        memory["checkpoint"] = 12 * trained // ranks + trained * size * (stale + recipe.needs_pi_ref)
    return memory


def _activations(settings: Settings, config: Any, size: int, ranks: int) -> int:
    """Bytes that a micro-batch leaves for the backward pass, and its logits. With checkpointing one row per layer, and
    about three layers while one is recomputed."""
    s, shape, hidden = settings.rollout, Shape.of(config), config.hidden_size
    completions = s.num_generations * (s.max_completion_length + settings.replied)
    tokens = -(-settings.schedule.prompts_per_batch // ranks) * (s.max_prompt_length + completions)
    tokens = min(settings.optimizer.micro_batch_tokens, tokens)
    layer = HIDDEN_BYTES[size] * hidden + 4 * size * (getattr(config, "intermediate_size", None) or 4 * hidden)
    of_token = shape.layers * layer
    if settings.optimizer.gradient_checkpointing:
        of_token = shape.layers * hidden * size + min(3, shape.layers) * layer
    gradient = 0 if settings.model.lora_r else (4 + size) * config.vocab_size * hidden
    return tokens * of_token + size * min(KEPT_LOGITS + KERNEL_LOGITS, tokens * config.vocab_size) + gradient


def _cache(settings: Settings, config: Any, size: int) -> int:
    """Bytes of the keys and values of as many rows as the local sampler decodes at a time."""
    rollout, rows = settings.rollout, settings.rollout.max_num_seqs
    longest = settings.longest - rollout.max_prompt_length + settings.replied  # also of evaluation sets
    tokens = rows * longest + rows // rollout.num_generations * rollout.max_prompt_length
    layers, _, kv_heads, d = Shape.of(config)
    return tokens * 2 * layers * kv_heads * d * size


def empty_model(settings: Settings) -> Any:
    """The model of the settings by its config, on the meta device. Raises SettingsError for a missing or unsupported
    one."""
    from transformers import AutoModelForCausalLM

    with loading(settings.model):
        config = load_config(resolve_model(settings.model.path))
        check_supported(config)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)


def _size(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"
