"""What the settings of a run mean, in numbers: printed at the start of every run and by --dry-run."""

from __future__ import annotations

from typing import Any

import torch

from lagrpo.backends.attention import Shape
from lagrpo.backends.cpu.fused import FAMILIES
from lagrpo.backends.cpu.logprobs import KEPT_LOGITS, KERNEL_LOGITS
from lagrpo.backends.hardware import pick_device, pick_dtype
from lagrpo.backends.logprobs import CHUNK_LOGITS
from lagrpo.errors import refusing
from lagrpo.model.configs import read_config
from lagrpo.model.embedded import resolve_model
from lagrpo.model.loading import check_supported
from lagrpo.model.lora import count_of_adapters, count_parameters
from lagrpo.objective.compose import Recipe
from lagrpo.ranks.rank import Rank
from lagrpo.rollout.schedule import Schedule, largest_lag
from lagrpo.settings.schema import Settings
from lagrpo.terminal.text import count_of
from lagrpo.training.build import Parts, loading, lora_of, offline_prompts
from lagrpo.training.checks import count_shards
from lagrpo.training.environments import OF_RUN

BYTES = {"bfloat16": 2, "float32": 4}
HIDDEN_BYTES = {2: 44, 4: 54}  # by the bytes of a number
PROGRAM = 400 * 2**20  # Python, torch and transformers themselves
IDLE = 0.15  # of all that is used: gaps that the allocator cannot fill
IN_HAND = 2  # layers that FSDP2 holds whole: one computes, the next is gathered


def meaning(settings: Settings, recipe: Recipe, parts: Parts | None = None) -> list[str]:
    """One line for each thing that people get wrong about a run, on the ranks that torchrun has started if it has.
    Without its parts the model's sizes are read from its config (no weights are loaded)."""
    rank = Rank.find()
    ranks, shards = rank.size if rank is not None else 1, count_shards(settings, rank)
    s, sampling, policy = settings.schedule, settings.sampling, parts.learner.policy if parts else None
    per_batch, batches = s.prompts * sampling.G, s.stages * s.batches
    config, parameters, adapters = _sizes(settings, policy.model.lm if policy else None)
    device = policy.device if policy else pick_device(settings.model.device)
    dtype, why = pick_dtype(settings.model.dtype, device)
    text = config.get_text_config()
    fused = kernels_compute(settings, text) if policy is None else policy.model.layers is not None
    if adapters:
        memory = memory_with_adapters(settings, recipe, text, (parameters, adapters), fused, ranks=ranks, shards=shards)
    else:
        memory = expected_memory(settings, recipe, text, parameters, fused, ranks=ranks, shards=shards)
    changes = ", ".join(f"{name} = {value}" for name, value in settings.objective.overrides.items())
    return [
        f"recipe      {recipe.name}: {recipe.formula}" + (f"; here with {changes}" if changes else ""),
        f"batch       {s.prompts} prompts x {sampling.G} completions = {per_batch:,} samples, used for "
        f"{count_of(s.i, 'update')} (i = {s.i}){_from_file(settings)}",
        f"schedule    {_weight_syncs(settings)}",
        *_sampler(settings),
        *_environment(settings, parts),
        *([] if parts and parts.own_task else _rewards(settings)),
        *_evaluations(settings),
        f"run         {count_of(s.stages, 'stage')} x {count_of(s.batches, 'batch', 'es')} = "
        f"{count_of(batches * s.i, 'update')}, {batches * per_batch:,} samples",
        f"tokens      at most {per_batch * sampling.max_tokens:,} sampled per batch, "
        f"{settings.optimizer.micro_batch_tokens:,} in a micro-batch",
        f"memory      at most about {_size(sum(memory.values()))}{' for each rank' if ranks > 1 else ''}: "
        + ", ".join(f"{name} {_size(size)}" for name, size in memory.items()),
        *_adapters(settings, parameters, adapters),
        *_moved(settings, parameters, adapters, BYTES[dtype], ranks),
        f"arithmetic  {dtype} ({why}) on {device}"
        + (f", {settings.optimizer.masters} float32 masters" if dtype == "bfloat16" else "")
        + (f"; {policy.model.computation}" if policy else ""),
        *([f"decoding    {parts.sampled.model.decoding}"] if parts and parts.sampled else []),
        *([f"parity      {parts.parity}"] if parts and parts.parity else []),
        *([f"offline     {parts.offline}"] if parts and parts.offline is not None else []),
    ]


def _weight_syncs(settings: Settings) -> str:
    """When the sampler gets new weights, and how far it can fall behind."""
    s = settings.schedule
    schedule = Schedule(s.kind, s.v, s.delta)
    always = s.kind == "lagged" or s.v == 1
    when = "before every batch" if always else f"every {s.v} batches"
    if s.kind == "budget":
        when = f"when KL(alpha||pi_k) of a completion passes {s.delta:g} nats, at the latest {when}"
    updates = count_of(s.i if always else s.v * s.i, "update")
    lag = count_of(largest_lag(schedule, s.stages, s.batches, s.i), "update")
    return f"{schedule}: new weights {when}, {updates} per weight sync; largest possible lag {lag}"


def _environment(settings: Settings, parts: Parts | None) -> list[str]:
    """What completions talk to, and what ends them."""
    if not settings.replied and (parts is None or OF_RUN not in parts.talking):
        return []
    e, deadline = settings.environment, settings.verifier.deadline
    what = e.name or ", ".join(e.tools) or settings.task.name
    return [
        f"environment {what}: at most {count_of(e.max_turns, 'turn')} and {e.max_tokens:,} tokens of replies in a "
        f"completion; {deadline:g} s for a reply"
    ]


def _sampler(settings: Settings) -> list[str]:
    """Who samples, and how weights get there: of the vLLM sampler."""
    v, check = settings.vllm, settings.sampling.parity_check
    parity = "off (sampling.parity_check = false)"
    if settings.sampling.sampler == "local":
        return [] if check else [f"parity      {parity}"]
    who = ", ".join(v.urls) if v.urls else "a server that the run starts"
    return [
        f"sampler     vLLM: {who}; weights by {v.weight_sync}, {_IN_FLIGHT[v.in_flight]}",
        f"parity      {'mean difference at most the tolerance of the dtype' if check else parity}",
    ]


def _rewards(settings: Settings) -> list[str]:
    """What the reward is made of, where it is several."""
    if not (rewards := settings.task.rewards):
        return []
    low, high = settings.task.reward_range
    parts = " + ".join(f"{each.weight:g} x {each.name} ({each.reward})" for each in rewards)
    decides = [each.name for each in rewards if each.right] or [rewards[0].name]
    return [f"reward      {parts}, from {low:g} to {high:g}; right is what has the greatest {' and '.join(decides)}"]


def _evaluations(settings: Settings) -> list[str]:
    """What is evaluated, where it is several sets of prompts or not by this process."""
    e = settings.evaluation
    if not e.sets and e.sampler == "local" and e.best is None:
        return []
    sets = ", ".join(f"{each.name} ({(each.task or settings.task).name})" for each in e.sets)
    who = "vLLM, which gets the weights of pi for it" if e.sampler == "vllm" else "this process"
    best = f"; the policy with the {e.best_is} {e.best} is kept in weights/best" if e.best else ""
    return [f"evaluation  {sets or 'the held-out prompts'}, by {who}{best}"]


def _adapters(settings: Settings, parameters: int, adapters: int) -> list[str]:
    """How much is trained, where that is not the model itself."""
    lora = settings.model.lora
    if not adapters:
        return []
    return [
        f"adapters    r = {lora.r}, alpha = {lora.alpha:g}, beside {', '.join(lora.targets)}: {adapters:,} numbers are "
        f"trained, {adapters / parameters:.1%} of the model's {parameters:,}, which are frozen; a version is an adapter"
    ]


def _moved(settings: Settings, parameters: int, adapters: int, size: int, ranks: int) -> list[str]:
    """What goes between processes: weights to servers, and between ranks the gradients and weights of an update."""
    moved, trained = [], adapters or parameters
    if settings.sampling.sampler == "vllm":
        moved.append(f"a weight sync {_size(trained * size)} to each server by {settings.vllm.weight_sync}")
    if ranks > 1:
        layers, part = settings.distributed.shard == "layers", (ranks - 1) / ranks
        in_passes = layers and not adapters
        gradients, weights = (_size(int(trained * each * part)) for each in (4, (1 + in_passes) * size))
        when = "each pass of a row" if in_passes else "an update"
        moved.append(f"{when} {gradients} of gradients and {weights} of weights from each of {ranks} ranks")
        if layers and adapters:
            frozen = _size(int(2 * parameters * size * part))
            moved.append(f"each pass of a row {frozen} of frozen weights")
    return [f"moves       {'; '.join(moved)}"] if moved else []


_IN_FLIGHT = {
    "finish": "completions under way are waited for",
    "span": "completions under way go on with the new weights and span versions",
    "regenerate": "completions under way are generated again",
}


def _from_file(settings: Settings) -> str:
    offline = offline_prompts(settings)
    return f"; {count_of(offline, 'prompt')} of them from {', '.join(settings.offline.data or ())}" if offline else ""


def kernels_compute(settings: Settings, config: Any) -> bool:
    """Whether the kernels should compute whole layers here, as far as the settings and the model's config say."""
    on_cpu = pick_device(settings.model.device).type == "cpu"
    return on_cpu and settings.model.kernels != "torch" and config.model_type in FAMILIES


def expected_memory(
    settings: Settings, recipe: Recipe, config: Any, parameters: int, fused: bool = False, size: int | None = None,
    ranks: int = 1, shards: int | None = None,
) -> dict[str, int]:  # fmt: skip
    """Bytes of a rank by purpose, at the most: the program; π, α (unless vLLM samples) and π_ref in the working dtype,
    and π once more, packed, where the kernels multiply and α lags behind; gradients in float32; masters and AdamW's two
    moments in float32, of which a rank has its part; activations of one micro-batch and the logits in hand; keys and
    values of the sampler; what lies idle between them, as the allocator cannot fill every gap; and the copy of masters,
    moments and lagging weights that a checkpoint is written from, in the host's memory. `size`: bytes of a working
    number, by default those of the settings' dtype here; `fused`: see `activation_bytes`. With P parameters in bfloat16
    on R ranks:

        sharding   π    π_ref   α    gradient   masters and moments
        optimizer  2P   2P      2P   4P         12P/R
        layers     2P/R 2P/R    2P   4P/R       12P/R                 and two layers that are gathered whole, and a
                                                                      copy to evaluate with (2P)
    Layers are divided by the `shards` ranks that have a copy between them, all unless given.

    Measured peaks without a checkpoint (CPU, SmolLM2-135M, two or three batches of experiments/demo.toml): 3.8 GiB in
    bfloat16 and 5.1 in float32 where this expects 5.0 and 6.7, as its prompts and completions are shorter than they may
    be; 4.8 with a reference and 48 tokens a completion in micro-batches of 2,048 (expected 5.0); 3.7 with checkpointing
    (4.1). Ranks: docs/scaling.md."""
    size = size or BYTES[pick_dtype(settings.model.dtype, pick_device(settings.model.device))[0]]
    s, local = settings.schedule, settings.sampling.sampler == "local"
    layers = ranks > 1 and settings.distributed.shard == "layers"
    fused = fused and not layers
    parts = (shards or ranks) if layers else ranks
    apart = s.i > 1 or largest_lag(Schedule(s.kind, s.v, s.delta), s.stages, s.batches, s.i) > 0
    own, lagging = 1 + recipe.needs_pi_ref, int(apart) + recipe.needs_pi_ref
    weights = parameters * size * (own + local + (fused and size == 2 and apart))
    gradient, sharded = parameters * 4, parameters * (12 if size == 2 or ranks > 1 else 8)
    if layers:
        weights = _sharded(settings, config, parameters, size, own, parts)
        gradient //= parts
    activations = _activations(settings, config, size, fused, -(-s.prompts // ranks))
    memory = {
        "program": PROGRAM,
        "weights": weights,
        "optimizer": gradient + sharded // parts,
        "activations": activations,
        "sampler": _tokens_held(settings, ranks) * _kv_bytes(config, size),
    }
    if layers:
        memory["gathered"] = parameters * size
    idle = {"idle": int(IDLE * sum(memory.values()))}
    if settings.optimizer.offload_moments:
        memory["moments"] = parameters * 8 // parts
        memory["optimizer"] -= memory["moments"]
    writes = settings.run.checkpoint_minutes or settings.run.checkpoint_every or settings.run.keep_optimizer
    return memory | idle | ({"checkpoint": parameters * 12 // parts + parameters * lagging * size} if writes else {})


def memory_with_adapters(
    settings: Settings, recipe: Recipe, config: Any, numbers: tuple[int, int], fused: bool = False,
    size: int | None = None, ranks: int = 1, shards: int | None = None,
) -> dict[str, int]:  # fmt: skip
    """`expected_memory` where `numbers`, those of the model and those of its adapters, are frozen and trained: the
    model is there once, and once more packed where the kernels multiply, or in shards as a model that is trained; all
    else that `expected_memory` counts for each parameter is there for each number of the adapters, which are whole."""
    parameters, adapters = numbers
    size = size or BYTES[pick_dtype(settings.model.dtype, pick_device(settings.model.device))[0]]
    layers = ranks > 1 and settings.distributed.shard == "layers"
    whole = settings.distributed.model_copy(update={"shard": "optimizer"})
    of_adapters = settings.model_copy(update={"distributed": whole})
    memory = expected_memory(of_adapters, recipe, config, adapters, fused and not layers, size, ranks)
    frozen = parameters * size * (1 + (fused and size == 2))
    if layers:
        frozen = _sharded(settings, config, parameters, size, 1, shards or ranks)
        memory |= {"gathered": parameters * size} if settings.model.lora.merge else {}
    memory["weights"] += frozen
    memory["idle"] += int(IDLE * frozen)
    return memory


def _sharded(settings: Settings, config: Any, parameters: int, size: int, copies: int, parts: int) -> int:
    """Bytes of weights in shards: the rank's part of so many copies, what is whole to sample and to evaluate with, and
    what is gathered at a time."""
    whole = (settings.sampling.sampler == "local") + _evaluates(settings)
    return copies * parameters * size // parts + whole * parameters * size + _in_hand(config, parameters, size)


HOST = ("program", "gathered", "moments", "checkpoint")
"""What of `expected_memory` lies in the host's memory where the device has its own."""


def _in_hand(config: Any, parameters: int, size: int) -> int:
    """Bytes of the weights that are gathered at a time: layers, or embedding and head where these are larger."""
    head = config.vocab_size * config.hidden_size
    layer = max(0, parameters - head) // Shape.of(config).layers
    return size * max(IN_HAND * layer, head + layer)


def _kv_bytes(config: Any, size: int) -> int:
    """Bytes of the keys and values of a token."""
    layers, _, kv_heads, d = Shape.of(config)
    return 2 * layers * kv_heads * d * size


def _evaluates(settings: Settings) -> bool:
    """Whether this process samples evaluations."""
    e = settings.evaluation
    return e.sampler == "local" and bool(e.before_and_after or e.every)


def _tokens_held(settings: Settings, ranks: int) -> int:
    """Tokens whose keys and values are held at the most: by one rank as many rows as may be decoded at a time; with
    more ranks those of its share of the prompts, or of an evaluation. None where vLLM has them."""
    s, sampling, e, rows = settings.schedule, settings.sampling, settings.evaluation, settings.sampling.max_num_seqs
    local, evaluates = sampling.sampler == "local", _evaluates(settings)
    if ranks > 1:
        together = s.v if s.kind == "every" and sampling.prefetch else 1
        share = -(-s.prompts * together // ranks) * sampling.G if local else 0
        rows = min(rows, max(share, e.prompts * e.samples if evaluates else 0))
    if not (local or evaluates):
        return 0
    longest = settings.longest - sampling.max_prompt_tokens + settings.replied  # also of evaluation sets
    return rows * longest + rows // sampling.G * sampling.max_prompt_tokens


def _activations(settings: Settings, config: Any, size: int, fused: bool, prompts: int) -> int:
    """Bytes that a micro-batch of at most so many prompts leaves for the backward pass, and its logits."""
    sampling = settings.sampling
    of_a_batch = prompts * (sampling.max_prompt_tokens + sampling.G * (sampling.max_tokens + settings.replied))
    learned = min(settings.optimizer.micro_batch_tokens, of_a_batch)
    numbers, head = learned * config.vocab_size, config.vocab_size * config.hidden_size
    gradient = 0 if settings.model.lora.r else head
    by_pytorch = 4 * (4 * min(CHUNK_LOGITS, numbers) + gradient)
    by_kernels = size * min(KEPT_LOGITS + KERNEL_LOGITS, numbers) + (4 + size) * gradient
    return learned * activation_bytes(settings, config, size, fused) + max(by_pytorch, by_kernels)


def activation_bytes(settings: Settings, config: Any, size: int, fused: bool = False) -> int:
    """Bytes that one token leaves for the backward pass. `fused`, where the kernels compute whole layers: in each the
    residual stream twice, queries, keys, values and what was attended to, gate and up; norms and activations are
    computed again. Elsewhere as measured on Llama layers (CPU, hidden sizes 512 to 1024, MLPs of 1024 to 4096): 44
    bytes a hidden unit in bfloat16 (norms and rotations are done in float32) and 54 in float32, and 4 numbers a unit of
    the MLP; within 4 %, with keys and values of every head 15 % more. With checkpointing one row per layer, and about
    three layers while one is recomputed."""
    shape, hidden = Shape.of(config), config.hidden_size
    inner = getattr(config, "intermediate_size", None) or 4 * hidden
    if fused:
        layer = 2 * size * (hidden + (shape.heads + shape.kv_heads) * shape.d + inner)
    else:
        layer = HIDDEN_BYTES[size] * hidden + 4 * size * inner
    if settings.optimizer.activation_checkpointing:
        return shape.layers * hidden * size + min(3, shape.layers) * layer
    return shape.layers * layer


def _sizes(settings: Settings, lm: Any) -> tuple[Any, int, int]:
    """The config of the model, how many parameters it has, and how many numbers its adapters have; of the model of the
    settings where there is none yet. Raises SettingsError for adapters that do not fit it."""
    if lm is not None:
        adapters = count_of_adapters(lm)
        return lm.config, lm.num_parameters() - adapters, adapters
    lm, lora = empty_model(settings), lora_of(settings.model)
    with refusing("model.lora"):
        return lm.config, lm.num_parameters(), count_parameters(lm, lora) if lora else 0


def empty_model(settings: Settings) -> Any:
    """The model of the settings by its config alone: on the device meta, no weight is read or has storage. Raises
    SettingsError for one that is not there or cannot be run."""
    from transformers import AutoModelForCausalLM

    with loading(settings.model):
        config = read_config(resolve_model(settings.model.path))
        check_supported(config)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)


def _size(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"
