"""What the settings of a run mean, in numbers: printed at the start of every run and by --dry-run."""

from __future__ import annotations

from typing import Any

import torch

from lagrpo.core.objective import Recipe
from lagrpo.cpu.decoder import FAMILIES
from lagrpo.errors import refusing
from lagrpo.model.attention import Shape
from lagrpo.model.backend import pick_device, pick_dtype
from lagrpo.model.embedded import resolve_model
from lagrpo.model.loading import check_supported, load_config
from lagrpo.model.logprobs import KEPT_LOGITS, KERNEL_LOGITS
from lagrpo.model.lora import count_of_adapters, count_parameters
from lagrpo.rollout.schedule import Schedule, lags
from lagrpo.settings.schema import Settings
from lagrpo.terminal.text import count_of
from lagrpo.training.build import TrainerComponents, loading, lora_of, offline_prompts
from lagrpo.training.checks import local_size, world_size
from lagrpo.training.environments import OF_RUN

BYTES = {"bfloat16": 2, "float32": 4}
HIDDEN_BYTES = {2: 44, 4: 54}  # of activations for each hidden unit, by the bytes of a number; measured on Llama layers
PROGRAM = 400 * 2**20  # Python, torch and transformers themselves
IDLE = 0.15  # gaps that the allocator cannot fill


def meaning(settings: Settings, recipe: Recipe, parts: TrainerComponents | None = None) -> list[str]:
    """One line for each thing that people get wrong about a run. Without its parts the model's sizes are read from its
    config; no weights are loaded."""
    s, sampling, policy = settings.schedule, settings.rollout, parts.trainer.policy if parts else None
    per_batch, batches, ranks = s.prompts_per_batch * sampling.num_generations, s.stages * s.batches, world_size()
    config, parameters, adapters = _sizes(settings, policy.model.lm if policy else None)
    device = policy.device if policy else pick_device(settings.model.device)
    dtype, why = pick_dtype(settings.model.dtype, device)
    text = config.get_text_config()
    fused = kernels_compute(settings, text) if policy is None else policy.model.layers is not None
    shards = local_size() if ranks % local_size() == 0 else ranks
    memory = expected_memory(settings, recipe, text, parameters, fused, adapters, ranks, shards)
    changes = ", ".join(f"{name} = {value}" for name, value in settings.loss.knobs.items())
    return [
        f"recipe      {recipe.name}: {recipe.formula}" + (f"; here with {changes}" if changes else ""),
        f"batch       {s.prompts_per_batch} prompts x {sampling.num_generations} completions = {per_batch:,} samples, "
        f"used for {count_of(s.num_iterations, 'update')} (i = {s.num_iterations}){_from_file(settings)}",
        f"schedule    {_weight_syncs(settings)}",
        *_sampler(settings),
        *_environment(settings, parts),
        *([] if parts and parts.own_task else _rewards(settings)),
        f"run         {count_of(s.stages, 'stage')} x {count_of(s.batches, 'batch', 'es')} = "
        f"{count_of(batches * s.num_iterations, 'update')}, {batches * per_batch:,} samples",
        f"tokens      at most {per_batch * sampling.max_completion_length:,} sampled per batch, "
        f"{settings.optimizer.micro_batch_tokens:,} in a micro-batch",
        f"memory      at most about {_size(sum(memory.values()))}{' for each rank' if ranks > 1 else ''}: "
        + ", ".join(f"{name} {_size(size)}" for name, size in memory.items()),
        *_adapters(settings, parameters, adapters),
        f"arithmetic  {dtype} ({why}) on {device}"
        + (
            f", {'dithered' * settings.optimizer.dither_master_weights or 'plain'} float32 masters"
            if dtype == "bfloat16"
            else ""
        )
        + (f"; {policy.model.computation}" if policy else ""),
        *([f"decoding    {parts.sampled.model.decoding}"] if parts and parts.sampled else []),
        *([f"agreement   {parts.agreement}"] if parts and parts.agreement else []),
        *([f"offline     {parts.offline}"] if parts and parts.offline is not None else []),
    ]


def _weight_syncs(settings: Settings) -> str:
    """When the sampler gets new weights, and how stale it can become."""
    s = settings.schedule
    schedule = Schedule(s.kind, s.sync_every, s.delta)
    always = s.kind == "lagged" or s.sync_every == 1
    when = "before every batch" if always else f"every {s.sync_every} batches"
    if s.kind == "budget":
        when = f"when KL(alpha||pi_k) of a completion passes {s.delta:g} nats, at the latest {when}"
    updates = count_of(s.num_iterations if always else s.sync_every * s.num_iterations, "update")
    lag = count_of(max(lags(schedule, s.stages, s.batches, s.num_iterations)), "update")
    return f"{schedule}: new weights {when}, {updates} per weight sync; largest possible lag {lag}"


def _environment(settings: Settings, parts: TrainerComponents | None) -> list[str]:
    if not settings.replied and (parts is None or OF_RUN not in parts.talking):
        return []
    e, deadline = settings.environment, settings.verifier.deadline
    what = e.name or ", ".join(e.tools) or settings.task.name
    return [
        f"environment {what}: at most {count_of(e.max_turns, 'turn')} and {e.max_tokens:,} tokens of replies in a "
        f"completion; {deadline:g} s for a reply"
    ]


def _sampler(settings: Settings) -> list[str]:
    """Who samples, how weights get there, and whether they are checked."""
    v, off = settings.vllm, ["agreement   off (rollout.parity_check = false)"]
    off = [] if settings.rollout.parity_check else off
    if settings.rollout.engine == "local":
        return off
    who = ", ".join(v.urls) if v.urls else "a server that the run starts"
    return [f"sampler     vLLM: {who}; weights by {v.weight_transfer}, completions under way: {v.on_weight_sync}", *off]


def _rewards(settings: Settings) -> list[str]:
    """What the reward is made of, if it is several."""
    if not (rewards := settings.task.rewards):
        return []
    low, high = settings.task.reward_range
    parts = " + ".join(f"{each.weight:g} x {each.name} ({each.reward})" for each in rewards)
    decides = [each.name for each in rewards if each.right] or [rewards[0].name]
    return [f"reward      {parts}, from {low:g} to {high:g}; right is what has the greatest {' and '.join(decides)}"]


def _adapters(settings: Settings, parameters: int, adapters: int) -> list[str]:
    """How much is trained, if that is not the model itself."""
    model = settings.model
    if not adapters:
        return []
    return [
        f"adapters    r = {model.lora_r}, alpha = {model.lora_alpha:g}, for {', '.join(model.lora_target_modules)}: "
        f"{adapters:,} numbers are trained, {adapters / parameters:.1%} of the model's {parameters:,}, which are "
        "frozen; a version is an adapter"
    ]


def _from_file(settings: Settings) -> str:
    offline = offline_prompts(settings)
    return f"; {count_of(offline, 'prompt')} of them from {', '.join(settings.offline.data or ())}" if offline else ""


def kernels_compute(settings: Settings, config: Any) -> bool:
    """Whether the kernels should compute whole layers here, as far as the settings and the model's config say."""
    on_cpu = pick_device(settings.model.device).type == "cpu"
    return on_cpu and settings.model.kernels != "torch" and config.model_type in FAMILIES


def expected_memory(
    settings: Settings, recipe: Recipe, config: Any, parameters: int, fused: bool = False, adapters: int = 0,
    ranks: int = 1, shards: int | None = None,
) -> dict[str, int]:  # fmt: skip
    """The most bytes of a rank by purpose. With P trained parameters in bfloat16 on R ranks:

        sharding   π    π_ref   α    gradient   masters and moments
        optimizer  2P   2P      2P   4P         12P/R
        layers     2P/R 2P/R    2P   4P/R       12P/R                 and two layers, and 2P to evaluate

    α has no copy if vLLM samples; π has one more, packed, if the kernels multiply and α is stale. With `adapters`,
    their numbers are trained, and the model is frozen. Layers are divided by `shards` ranks. docs/scaling.md compares
    this with measured peaks."""
    size = BYTES[pick_dtype(settings.model.dtype, pick_device(settings.model.device))[0]]
    s, local = settings.schedule, settings.rollout.engine == "local"
    layers, trained = ranks > 1 and settings.distributed.strategy == "fsdp2", adapters or parameters
    parts = (shards or ranks) if layers and not adapters else ranks
    stale = (
        s.num_iterations > 1
        or max(lags(Schedule(s.kind, s.sync_every, s.delta), s.stages, s.batches, s.num_iterations)) > 0
    )
    packed, own = fused and size == 2 and not layers, 1 + recipe.needs_pi_ref
    weights = 0 if layers and not adapters else trained * size * (own + local + (packed and stale))
    if layers:
        evaluates = settings.eval.sampler == "local" and settings.eval.takes_place
        head = config.vocab_size * config.hidden_size
        layer = max(0, parameters - head) // Shape.of(config).layers
        copies = 1 if adapters else own
        weights += copies * parameters * size // (shards or ranks) + (local + evaluates) * parameters * size
        weights += size * max(2 * layer, head + layer)
    elif adapters:
        weights += parameters * size * (1 + packed)
    moments = trained * 8 // parts
    masters = trained * 4 // parts if size == 2 or ranks > 1 else 0
    memory = {
        "program": PROGRAM,
        "weights": weights,
        "optimizer": trained * 4 // (parts if layers and not adapters else 1) + masters + moments,
        "activations": _activations(settings, config, size, fused and not layers, -(-s.prompts_per_batch // ranks)),
        "sampler": _tokens_held(settings, ranks) * _kv_bytes(config, size),
    }
    memory["idle"] = int(IDLE * sum(memory.values()))
    writes = settings.checkpoint.save_minutes or settings.checkpoint.save_every
    lagging = trained * size * (stale + recipe.needs_pi_ref)
    return memory | ({"checkpoint": trained * 12 // parts + lagging} if writes else {})


def _kv_bytes(config: Any, size: int) -> int:
    """Bytes of the keys and values of a token."""
    layers, _, kv_heads, d = Shape.of(config)
    return 2 * layers * kv_heads * d * size


def _tokens_held(settings: Settings, ranks: int) -> int:
    """The most tokens whose keys and values a rank holds: of as many rows as it decodes at a time; of its share of the
    prompts, or of an evaluation, with several ranks."""
    s, sampling, e, rows = settings.schedule, settings.rollout, settings.eval, settings.rollout.max_num_seqs
    local, evaluates = sampling.engine == "local", e.sampler == "local" and e.takes_place
    if not (local or evaluates):
        return 0
    if ranks > 1:
        together = s.sync_every if s.kind == "every" and sampling.prefetch else 1
        share = -(-s.prompts_per_batch * together // ranks) * sampling.num_generations if local else 0
        rows = min(rows, max(share, -(-e.num_prompts // ranks) * e.num_samples if evaluates else 0))
    longest = settings.longest - sampling.max_prompt_length + settings.replied  # also of evaluation sets
    return rows * longest + rows // sampling.num_generations * sampling.max_prompt_length


def _activations(settings: Settings, config: Any, size: int, fused: bool, prompts: int) -> int:
    """Bytes that a micro-batch of at most so many prompts leaves for the backward pass, and its logits."""
    sampling = settings.rollout
    of_a_batch = prompts * (
        sampling.max_prompt_length + sampling.num_generations * (sampling.max_completion_length + settings.replied)
    )
    learned = min(settings.optimizer.micro_batch_tokens, of_a_batch)
    numbers, head = learned * config.vocab_size, config.vocab_size * config.hidden_size
    gradient = 0 if settings.model.lora_r else head
    logits = size * min(KEPT_LOGITS + KERNEL_LOGITS, numbers) + (4 + size) * gradient
    return learned * activation_bytes(settings, config, size, fused) + logits


def activation_bytes(settings: Settings, config: Any, size: int, fused: bool = False) -> int:
    """Bytes that one token leaves for the backward pass. `fused`, if the kernels compute whole layers: in each the
    residual stream twice, queries, keys, values and the attention's output, gate and up; norms and activations are
    computed again. With checkpointing one row per layer, and about three layers while one is recomputed."""
    shape, hidden = Shape.of(config), config.hidden_size
    inner = getattr(config, "intermediate_size", None) or 4 * hidden
    if fused:
        layer = 2 * size * (hidden + (shape.heads + shape.kv_heads) * shape.d + inner)
    else:
        layer = HIDDEN_BYTES[size] * hidden + 4 * size * inner
    if settings.optimizer.gradient_checkpointing:
        return shape.layers * hidden * size + min(3, shape.layers) * layer
    return shape.layers * layer


def _sizes(settings: Settings, lm: Any) -> tuple[Any, int, int]:
    """The model's config, its parameters, and the numbers of its adapters; of the model of the settings if there is
    none yet. Raises SettingsError for adapters that do not fit it."""
    if lm is not None:
        adapters = count_of_adapters(lm)
        return lm.config, lm.num_parameters() - adapters, adapters
    lm, lora = empty_model(settings), lora_of(settings.model)
    with refusing("model.lora_r"):
        return lm.config, lm.num_parameters(), count_parameters(lm, lora) if lora else 0


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
