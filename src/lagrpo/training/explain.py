"""What the settings of a run mean, in numbers: printed at the start of every run and by --dry-run; and what a run warns
of while it trains."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from lagrpo.core.objective import Recipe
from lagrpo.cpu.decoder import FAMILIES
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
from lagrpo.training.checks import world_size
from lagrpo.training.data import offline_prompts

if TYPE_CHECKING:
    from lagrpo.training.loop import Step

BYTES = {"bfloat16": 2, "float32": 4}
HIDDEN_BYTES = {2: 44, 4: 54}  # of activations for each hidden unit, by the bytes of a number; measured on Llama layers
PROGRAM = 400 * 2**20  # Python, torch and transformers themselves
IDLE = 0.15  # gaps that the allocator cannot fill
STILL = 1e-4  # a weight sync that changes a smaller share of the weights is warned of


def meaning(settings: Settings, recipe: Recipe) -> list[str]:
    """One line for each thing that people get wrong about a run. The model's sizes are read from its config."""
    s, sampling, o = settings.schedule, settings.rollout, settings.optimizer
    per_batch, batches = s.prompts_per_batch * sampling.num_generations, s.stages * s.batches
    device = pick_device(settings.model.device)
    dtype, why = pick_dtype(settings.model.dtype, device)
    masters = f", {'dithered' * o.dither_master_weights or 'plain'} float32 masters" if dtype == "bfloat16" else ""
    changes = ", ".join(f"{name} = {value}" for name, value in settings.loss.knobs.items())
    offline = offline_prompts(settings)
    of_files = f"; {count_of(offline, 'prompt')} of them from {', '.join(settings.offline.data or ())}"
    return [
        f"recipe      {recipe.name}: {recipe.formula}" + (f"; here with {changes}" if changes else ""),
        f"batch       {s.prompts_per_batch} prompts x {sampling.num_generations} completions = {per_batch:,} samples, "
        f"used for {count_of(s.num_iterations, 'update')} (i = {s.num_iterations}){of_files if offline else ''}",
        f"schedule    {_weight_syncs(settings)}",
        *_who_samples(settings),
        f"run         {count_of(s.stages, 'stage')} x {count_of(s.batches, 'batch', 'es')} = "
        f"{count_of(batches * s.num_iterations, 'update')}, {batches * per_batch:,} samples",
        f"tokens      at most {per_batch * sampling.max_completion_length:,} sampled per batch, "
        f"{o.micro_batch_tokens:,} in a micro-batch",
        *_memory(settings, recipe),
        f"arithmetic  {dtype} ({why}) on {device}{masters}",
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


def _who_samples(settings: Settings) -> list[str]:
    """Servers, environments and several rewards."""
    v, e, task, lines = settings.vllm, settings.environment, settings.task, []
    if settings.rollout.engine == "vllm":
        who = ", ".join(v.urls) if v.urls else "a server that the run starts"
        lines.append(
            f"sampler     vLLM: {who}; weights by {v.weight_transfer}, completions under way: {v.on_weight_sync}"
        )
    if not settings.rollout.parity_check:
        lines.append("agreement   off (rollout.parity_check = false)")
    if settings.replied:
        what, turns = e.name or ", ".join(e.tools) or task.name, count_of(e.max_turns, "turn")
        lines.append(f"environment {what}: at most {turns} and {e.max_tokens:,} tokens of replies in a completion")
    if task.rewards:
        (low, high), right = task.reward_range, [each.name for each in task.rewards if each.right]
        total = " + ".join(f"{each.weight:g} x {each.name} ({each.reward})" for each in task.rewards)
        decides = " and ".join(right or [task.rewards[0].name])
        lines.append(f"reward      {total}, from {low:g} to {high:g}; right is what has the greatest {decides}")
    return lines


def _memory(settings: Settings, recipe: Recipe) -> list[str]:
    """What a rank needs at the most, and what is trained if that is not the model itself."""
    lm, lora, ranks = empty_model(settings), lora_of(settings.model), world_size()
    with refusing("model.lora_r"):
        adapters = count_parameters(lm, lora) if lora else 0
    text, parameters = lm.config.get_text_config(), lm.num_parameters()
    fused = kernels_compute(settings, text)
    memory = expected_memory(settings, recipe, text, parameters, fused, adapters, ranks)
    total, each = _size(sum(memory.values())), " for each rank" if ranks > 1 else ""
    lines = [f"memory      at most about {total}{each}: {', '.join(f'{k} {_size(v)}' for k, v in memory.items())}"]
    if lora:
        what = f"r = {lora.r}, alpha = {lora.alpha:g}, for {', '.join(lora.targets)}"
        lines.append(f"adapters    {what}: {adapters:,} numbers are trained, the model's {parameters:,} are frozen")
    return lines


def kernels_compute(settings: Settings, config: Any) -> bool:
    """Whether the kernels should compute whole layers here, as far as the settings and the model's config say."""
    on_cpu = pick_device(settings.model.device).type == "cpu"
    return on_cpu and settings.model.kernels != "torch" and config.model_type in FAMILIES


def expected_memory(
    settings: Settings, recipe: Recipe, config: Any, parameters: int, fused: bool = False, adapters: int = 0,
    ranks: int = 1,
) -> dict[str, int]:  # fmt: skip
    """The most bytes of a rank by purpose. With P trained parameters in bfloat16 on R ranks:

        sharding   π    π_ref   α    gradient   masters and moments
        optimizer  2P   2P      2P   4P         12P/R
        layers     2P/R 2P/R    2P   4P/R       12P/R                 and two layers, and 2P to evaluate

    α has no copy if vLLM samples; π has one more, packed, if the kernels multiply and α is stale. With `adapters`,
    their numbers are trained, and the model is frozen. docs/scaling.md compares
    this with measured peaks."""
    size = BYTES[pick_dtype(settings.model.dtype, pick_device(settings.model.device))[0]]
    s, local, reference = settings.schedule, settings.rollout.engine == "local", recipe.needs_pi_ref
    layers, trained = ranks > 1 and settings.distributed.strategy == "fsdp2", adapters or parameters
    parts = ranks
    stale = (
        s.num_iterations > 1
        or max(lags(Schedule(s.kind, s.sync_every, s.delta), s.stages, s.batches, s.num_iterations)) > 0
    )
    if layers:
        head = config.vocab_size * config.hidden_size
        layer = max(0, parameters - head) // Shape.of(config).layers
        numbers = adapters * (1 + reference + local) + max(2 * layer, head + layer)
        numbers += parameters * (1 if adapters else 1 + reference) // ranks
        numbers += parameters * local * (1 + settings.eval.takes_place)
    else:
        packed = fused and size == 2
        numbers = trained * (1 + reference + local + (packed and stale))
        numbers += parameters * (1 + packed) if adapters else 0
    masters = trained * 4 // parts if size == 2 or ranks > 1 else 0
    memory = {
        "program": PROGRAM,
        "weights": size * numbers,
        "optimizer": trained * 4 // (parts if layers and not adapters else 1) + masters + trained * 8 // parts,
        "activations": _activations(settings, config, size, fused and not layers, -(-s.prompts_per_batch // ranks)),
        "sampler": _cache(settings, config, size, ranks) if local else 0,
    }
    memory["idle"] = int(IDLE * sum(memory.values()))
    if settings.checkpoint.save_minutes or settings.checkpoint.save_every:
        memory["checkpoint"] = trained * 12 // parts + trained * size * (stale + reference)
    return memory


def _cache(settings: Settings, config: Any, size: int, ranks: int) -> int:
    """Bytes of the keys and values that the local sampler of a rank holds: of as many rows as it decodes at a time; of
    its share of the prompts, or of an evaluation, with several ranks."""
    s, sampling, e, rows = settings.schedule, settings.rollout, settings.eval, settings.rollout.max_num_seqs
    if ranks > 1:
        together = s.sync_every if s.kind == "every" and sampling.prefetch else 1
        evaluated = -(-e.num_prompts // ranks) * e.num_samples if e.takes_place else 0
        rows = min(rows, max(-(-s.prompts_per_batch * together // ranks) * sampling.num_generations, evaluated))
    longest = settings.longest - sampling.max_prompt_length + settings.replied  # also of evaluation sets
    tokens = rows * longest + rows // sampling.num_generations * sampling.max_prompt_length
    layers, _, kv_heads, d = Shape.of(config)
    return tokens * 2 * layers * kv_heads * d * size


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


def find_warnings(settings: Settings, step: Step, had_gradient: bool) -> dict[str, str]:
    """What is to be said of a batch, by name; a run says each once. `had_gradient`: an update since the weight sync
    before had one."""
    found, share = {}, step.state.sync.get("changed_fraction")
    if step.reason and had_gradient and share is not None and share < STILL:
        found["standstill"] = (
            f"the weight sync of version {step.alpha} changes {share:.4%} of the sampler's weights, less than 1 in "
            "10,000: updates are lost in rounding. Set optimizer.dither_master_weights = true, or raise "
            "optimizer.learning_rate or schedule.sync_every (docs/precision.md, said once)"
        )
    low, high = settings.task.reward_range
    rewards = [c.reward for group in step.batch.groups for c in group.completions if c.reward is not None]
    if beyond := [reward for reward in rewards if not low <= reward <= high]:
        found["range"] = (
            f"{count_of(len(beyond), 'reward')} of a batch outside of task.reward_range = [{low:g}, {high:g}], such as "
            f"{beyond[0]:g}: such batches have no bounds, and the range decides what counts as right. Set it to the "
            "smallest and the largest reward (said once)"
        )
    return found
