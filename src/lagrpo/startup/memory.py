"""The memory that a rank of a run needs, term by term: the numbers of a dry run.

`expected_memory` is a pure function of a model's sizes, the settings and what computes. The test of
it compares the sums with the measured peaks of benchmarks/results.

P parameters, of which P_t are trained (all, or the adapters), in a dtype of s bytes, on R ranks:

    term                  zero1           fsdp2
    weights               s P             0: the masters are the weights
    weights that sample   s P             s P, and s P to evaluate
      on-policy           0               s P for both
    reference weights     s P             s P / R, P and s of the teacher if there is one
    master weights        4 P_t / R       4 P / R
      on a GPU            2 P_t / R       4 P / R
    gradient              4 P_t           4 P / R
    optimizer states      8 P_t / R       8 P / R

Weights that the C kernels have packed come on top. With zero1 a weight in float32 is its own
master, and in bfloat16 on a GPU half of it. Activations, logits and caches follow from the tokens
of the largest micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from lagrpo.core.objective import Recipe
from lagrpo.model.attention import Shape
from lagrpo.model.logprobs import KEPT_LOGITS, ON_CPU, ON_GPU
from lagrpo.model.lora import count_parameters
from lagrpo.rollout.decoding import BLOCK
from lagrpo.rollout.recorded import KEPT_SHARE, round_up_keys
from lagrpo.rollout.vllm.server import SHARED_MEMORY, chosen_share
from lagrpo.settings.schema import Settings
from lagrpo.settings.sections import split_server_args
from lagrpo.training.batch import balanced

if TYPE_CHECKING:
    from lagrpo.model.lora import Lora

Phase = Literal["always", "sampling", "learning", "backward", "update"]
"""When memory is taken. Learning is the backward passes, then the update."""

ERROR = 0.15
"""The largest share by which a measured peak differed from the estimate."""

PROGRAM = 570 << 20
"""Bytes of Python, its libraries and the tables that they make, in a process on a CPU."""
RANKS_PROGRAM = 60 << 20
"""Bytes of the libraries by which ranks communicate."""
FREED_SHARE = 0.08
"""Bytes of freed blocks between used ones that stay with a process on a CPU, by byte in use."""
KEYS_AND_VALUES = "keys and values"


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """The numbers of a model's config that its memory depends on.

    `embedded` is the number of [vocabulary, hidden] weights: 1 if embedding and head are tied.
    `head_norms`: queries and keys have norms, as in Qwen3. `adapters`: numbers in adapters.
    """

    parameters: int
    vocabulary: int
    hidden: int
    mlp: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    embedded: int = 1
    head_norms: bool = False
    adapters: int = 0

    @staticmethod
    def of(lm: Any, lora: Lora | None) -> ModelSizes:
        """Returns the sizes of a model of transformers, which may be on the meta device."""
        text_config = lm.config.get_text_config()
        shape = Shape.of(text_config)
        is_tied = lm.get_input_embeddings().weight is lm.get_output_embeddings().weight
        return ModelSizes(
            parameters=lm.num_parameters(),
            vocabulary=text_config.vocab_size,
            hidden=text_config.hidden_size,
            # Without the entry it is the usual width.
            mlp=getattr(text_config, "intermediate_size", None) or 4 * text_config.hidden_size,
            layers=shape.layers,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.d,
            embedded=1 if is_tied else 2,
            head_norms=any(name.endswith("q_norm") for name, _ in lm.named_modules()),
            adapters=count_parameters(lm, lora) if lora else 0,
        )

    @property
    def trained(self) -> int:
        """The number of trained parameters."""
        return self.adapters or self.parameters

    @property
    def head(self) -> int:
        """The numbers of the head, and of the embedding."""
        return self.vocabulary * self.hidden

    @property
    def in_layers(self) -> int:
        """The parameters of all decoder layers."""
        return self.parameters - self.embedded * self.head

    @property
    def queries(self) -> int:
        """The numbers of all query heads of a token."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """The numbers of all key heads of a token; the values have as many."""
        return self.kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class Computation:
    """What computes a run.

    - `itemsize`: bytes of a number of the model
    - `fused`: kernels compute whole layers; without it the modules of transformers do
    - `packed`: the C kernels multiply by packed weights
    - `memory`: bytes that a rank has: its GPU's, or its share of the host's; None if unknown
    - `shares_gpu`: a vLLM server has the GPU together with the trainer
    """

    itemsize: int
    ranks: int = 1
    on_gpu: bool = False
    fused: bool = True
    packed: bool = False
    memory: int | None = None
    shares_gpu: bool = False


@dataclass(frozen=True, slots=True)
class Teacher:
    """A reference that is another model: its sizes, and what computes it."""

    sizes: ModelSizes
    computation: Computation


@dataclass(frozen=True, slots=True)
class Term:
    """Memory of a rank for one purpose: its bytes, when it is taken, and what lowers it."""

    name: str
    size: int
    advice: str
    phase: Phase = "always"


@dataclass(frozen=True, slots=True)
class LargestMicroBatch:
    """The largest micro-batch of a rank, if prompts and completions have their full lengths.

    - `rows`: tokens that go through the model
    - `tokens`: completion tokens, each with a row of logits
    - `seen`: keys of all segments, a prompt once for each of its completions
    - `is_only`: the rank has no other micro-batch
    """

    rows: int
    tokens: int
    seen: int
    is_only: bool


def expected_memory(
    sizes: ModelSizes,
    settings: Settings,
    recipe: Recipe,
    computation: Computation,
    teacher: Teacher | None = None,
) -> list[Term]:
    """Returns the terms of the memory of a rank, without those that are 0."""
    micro_batch = largest_micro_batch(settings, recipe, computation)
    terms = [
        *_weights(sizes, settings, recipe, computation, teacher),
        *_optimizer(sizes, settings, computation, micro_batch),
        *_learning(sizes, settings, computation, micro_batch),
        *_sampling(sizes, settings, computation),
    ]
    if _drops_idle_cache(terms, settings, computation):
        terms = [replace(t, phase="sampling") if t.name == KEYS_AND_VALUES else t for t in terms]
    if not computation.on_gpu:
        terms.append(Term("freed, kept for reuse", int(FREED_SHARE * peak(terms)), ""))
        terms.append(Term("Python and libraries", program_size(computation), ""))
        copy = Term("copy for a checkpoint", _checkpoint(sizes, settings, recipe, computation), "")
        # If memory is short, the run waits for checkpoints, and makes no copy.
        if computation.memory is None or peak([*terms, copy]) <= computation.memory:
            terms.append(copy)
    return [term for term in terms if term.size > 0]


def peak(terms: Sequence[Term]) -> int:
    """Returns the most bytes that a rank has at a time."""
    return sum(term.size for term in terms_at_peak(terms))


def terms_at_peak(terms: Sequence[Term]) -> list[Term]:
    """Returns the terms that are there when a rank has most."""
    moments: tuple[tuple[Phase, ...], ...] = (
        ("always", "sampling"),
        ("always", "learning", "backward"),
        ("always", "learning", "update"),
    )
    by_moment = [[term for term in terms if term.phase in phases] for phases in moments]
    return max(by_moment, key=lambda chosen: sum(term.size for term in chosen))


def largest_term(terms: Sequence[Term]) -> Term:
    """Returns the largest term at the peak that a setting lowers."""
    lowered = [term for term in terms_at_peak(terms) if term.advice]
    return max(lowered, key=lambda term: term.size)


def program_size(computation: Computation) -> int:
    """Returns the bytes of a process on a CPU before it has a model."""
    return PROGRAM + (RANKS_PROGRAM if computation.ranks > 1 else 0)


# Weights and optimizer


def _is_sharded(settings: Settings, computation: Computation) -> bool:
    return computation.ranks > 1 and settings.distributed.strategy == "fsdp2"


def _weights(
    sizes: ModelSizes,
    settings: Settings,
    recipe: Recipe,
    computation: Computation,
    teacher: Teacher | None,
) -> list[Term]:
    """The policy, the copy that samples, and the reference, with their packed weights."""
    s = computation.itemsize
    is_sharded = _is_sharded(settings, computation)
    samples_here = settings.rollout.engine == "local"
    whole = s * sizes.parameters
    packed = _packed(sizes, computation)
    adapters = s * sizes.adapters * (2 if computation.packed else 1)
    # Copies have empty weights instead of packed ones.
    copied = s * sizes.embedded * sizes.head + packed if packed else whole

    if sizes.adapters:
        weights = whole + packed + adapters
        copied = adapters
    elif is_sharded:
        weights = 0
    else:
        weights = whole + packed
    sampler = 0
    if samples_here and not _samples_by_policy(settings, computation):
        sampler = copied
    if samples_here and is_sharded:
        sampler += whole + packed
    reference = 0
    advice = "loss.beta = 0"
    if teacher is not None:
        reference = teacher.computation.itemsize * teacher.sizes.parameters
        advice = "a smaller loss.reference"
        if is_sharded:
            reference //= computation.ranks
        else:
            reference += _packed(teacher.sizes, teacher.computation)
    elif recipe.needs_pi_ref:
        reference = whole // computation.ranks if is_sharded else copied
    return [
        Term("weights", weights, _shard_or_shrink(computation)),
        Term("weights that sample", sampler, 'rollout.engine = "vllm"'),
        Term("reference weights", reference, advice),
    ]


def _packed(sizes: ModelSizes, computation: Computation) -> int:
    """The bytes of the packed weights of a model, the head's included."""
    return 2 * (sizes.in_layers + sizes.head) if computation.packed else 0


def _samples_by_policy(settings: Settings, computation: Computation) -> bool:
    """True if the local engine samples by the policy, without a copy: see `build_sampler`."""
    is_in_training_mode = (
        settings.optimizer.gradient_checkpointing
        and not computation.fused
        and not _is_sharded(settings, computation)
    )
    return settings.schedule.is_on_policy and not is_in_training_mode


def _shard_or_shrink(computation: Computation) -> str:
    if computation.ranks > 1:
        return 'distributed.strategy = "fsdp2" or a smaller model.path'
    return "a smaller model.path"


def _optimizer(
    sizes: ModelSizes,
    settings: Settings,
    computation: Computation,
    micro_batch: LargestMicroBatch,
) -> list[Term]:
    """Masters, gradient and moments."""
    ranks = computation.ranks
    trained = sizes.trained
    is_sharded = _is_sharded(settings, computation)
    masters = 4 if is_sharded else _bytes_beside_weight(computation)  # by number
    gradient = 4 * trained // ranks if is_sharded else 4 * trained
    moments = 8 * trained // ranks
    advice = "model.lora_r" if not sizes.adapters else "a smaller model.lora_r"
    offload_advice = advice
    if computation.on_gpu:
        offload_advice = f"optimizer.offload_optimizer or {advice}"
        if settings.optimizer.offload_optimizer:
            moments = 0
    if settings.optimizer.log_gradient_cosine:
        moments += 4 * trained // ranks
    # The gradient of a single micro-batch grows while its activations go. Among ranks it is a
    # buffer that is there from the start, or is summed in copies.
    grows = micro_batch.is_only and ranks == 1
    # The part of the gradient's sum over the ranks; all of the gradient is still there.
    exchanged = 4 * trained // ranks if ranks > 1 and not is_sharded else 0
    return [
        Term("master weights", masters * trained // ranks, advice),
        Term("gradient", gradient, advice, "update" if grows else "learning"),
        Term("gradient of all ranks", exchanged, advice, "update"),
        Term("optimizer states", moments, offload_advice),
    ]


def _bytes_beside_weight(computation: Computation) -> int:
    """Returns the bytes of a master that are not its weight's."""
    if computation.itemsize < 4 and not computation.on_gpu:
        return 4
    return 4 - computation.itemsize


def _checkpoint(
    sizes: ModelSizes, settings: Settings, recipe: Recipe, computation: Computation
) -> int:
    """The bytes that a thread writes while the run goes on; 0 if all checkpoints end a run."""
    if not (settings.checkpoint.save_minutes or settings.checkpoint.save_every):
        return 0
    schedule = settings.schedule
    state = 12 * sizes.trained // computation.ranks  # masters and moments
    if settings.optimizer.log_gradient_cosine:
        state += 4 * sizes.trained // computation.ranks
    # On the first rank, whole.
    other_versions = int(not (schedule.is_on_policy or schedule.continues_completions))
    if recipe.needs_pi_ref and settings.loss.reference is None:
        other_versions += 1
    return state + other_versions * computation.itemsize * sizes.trained


# Learning


def _learning(
    sizes: ModelSizes,
    settings: Settings,
    computation: Computation,
    micro_batch: LargestMicroBatch,
) -> list[Term]:
    """Activations and logits of the largest micro-batch, and gathered layers."""
    is_checkpointed = settings.optimizer.gradient_checkpointing
    advice = "optimizer.micro_batch_tokens"
    if not is_checkpointed:
        advice += " or optimizer.gradient_checkpointing"
    terms = [
        Term(
            "activations",
            _activations(sizes, micro_batch, computation, is_checkpointed=is_checkpointed),
            advice,
            "backward",
        ),
        Term(
            "logits",
            _logits(sizes, micro_batch, computation),
            "optimizer.micro_batch_tokens",
            "backward" if computation.on_gpu else "always",
        ),
    ]
    if _is_sharded(settings, computation):
        terms.append(Term("gathered layers", _gathered(sizes, computation), "", "backward"))
        if computation.packed:
            # Before they are packed, all weights of a sync are whole. On the first rank they are
            # whole once more, to be written. Freed blocks stay with a process on a CPU.
            whole = 2 * computation.itemsize * sizes.parameters
            terms.append(Term("weights to sync", whole, ""))
    return terms


def largest_micro_batch(
    settings: Settings, recipe: Recipe, computation: Computation
) -> LargestMicroBatch:
    """Returns the largest micro-batch of a rank, by the rules of training/batch.py."""
    prompt = settings.rollout.max_prompt_length
    # The last token of a completion predicts nothing.
    fed = max(1, settings.rollout.max_completion_length - 1)
    G = settings.rollout.num_generations
    N = settings.schedule.prompts_per_batch
    ranks = computation.ranks
    budget = settings.optimizer.tokens_in_micro_batch(on_gpu=computation.on_gpu)
    budget = min(budget, -(-N * (prompt + G * fed) // ranks))

    most = G if recipe.needs_whole_groups else max(1, (budget - prompt) // fed)
    completions: list[int] = []  # of each piece of a group
    for first in range(0, G, most):
        completions += [min(most, G - first)] * N
    costs = [prompt + count * fed for count in completions]
    micro_batches = balanced(costs, budget, ranks)
    largest = max(micro_batches, key=lambda pieces: sum(costs[piece] for piece in pieces))
    count = sum(completions[piece] for piece in largest)
    prompts = len(largest) * prompt
    return LargestMicroBatch(
        rows=prompts + count * fed,
        tokens=count * settings.rollout.max_completion_length,
        seen=prompts + count * (prompt + fed),
        is_only=len(micro_batches) <= ranks,
    )


def _activations(
    sizes: ModelSizes,
    micro_batch: LargestMicroBatch,
    computation: Computation,
    *,
    is_checkpointed: bool,
) -> int:
    """The bytes that wait for the backward pass, and the largest gradients of a layer."""
    s = computation.itemsize
    rows = micro_batch.rows
    # The C kernels find a prompt's keys at its place; elsewhere they are gathered.
    seen = micro_batch.seen if computation.on_gpu or not computation.fused else rows
    attention = s * (2 * sizes.queries * rows + 2 * sizes.keys * seen) + 4 * sizes.heads * rows
    if sizes.head_norms:
        attention += s * (sizes.queries + sizes.keys) * rows
    if computation.fused:
        # Inputs of two norms, gate and up.
        layer = attention + s * (2 * sizes.hidden + 2 * sizes.mlp) * rows
        inputs = 2 * s * sizes.hidden * rows
    else:
        # Of each norm the input and its quotient in float32, and two roundings; of the MLP gate,
        # its activation, up, and their product.
        norm = 8 * sizes.hidden if s < 4 else 12 * sizes.hidden
        layer = attention + (2 * norm + 4 * s * sizes.mlp) * rows
        inputs = s * sizes.hidden * rows
    # Gradients of the MLP, while it goes back: gate, up, and their product, twice.
    going_back = s * (4 * sizes.mlp + 2 * sizes.hidden) * rows
    outside = 3 * s * sizes.hidden * rows
    if is_checkpointed:
        return sizes.layers * inputs + layer + going_back + outside
    return sizes.layers * layer + going_back + outside


def _logits(sizes: ModelSizes, micro_batch: LargestMicroBatch, computation: Computation) -> int:
    """The bytes of the head's logits and of its gradient: see model/logprobs.py."""
    s = computation.itemsize
    chunks = ON_GPU if computation.on_gpu else ON_CPU
    kept = min(micro_batch.tokens, KEPT_LOGITS // sizes.vocabulary)
    others = micro_batch.tokens - kept
    piece = min(others, max(1, chunks.product // sizes.vocabulary))
    size = s * (kept + piece) * sizes.vocabulary
    if not computation.fused:
        # Two float32 copies of a piece: PyTorch's operations compute the softmax.
        rows = min(micro_batch.tokens, max(1, chunks.softmax // sizes.vocabulary))
        size += 2 * 4 * rows * sizes.vocabulary
    if sizes.adapters:
        return size
    size += s * sizes.head  # the gradient of the head's weight
    if others > 0:
        size += 4 * sizes.head
        if not chunks.sums_in_product:
            size += s * sizes.head
    return size


def _gathered(sizes: ModelSizes, computation: Computation) -> int:
    """The bytes of the root and of two layers that are whole, and of a layer's gradient."""
    s = computation.itemsize
    root = sizes.embedded * sizes.head
    layer = sizes.in_layers // sizes.layers
    return s * (root + 2 * layer) + (4 + s) * max(root, layer)


# Sampling


def _sampling(sizes: ModelSizes, settings: Settings, computation: Computation) -> list[Term]:
    """The cache of keys and values, or the share of a server."""
    rollout = settings.rollout
    if rollout.uses_vllm:
        if not computation.shares_gpu or computation.memory is None:
            return []
        share = chosen_share(split_server_args(settings.vllm.server_args)) or SHARED_MEMORY
        size = int(float(share) * computation.memory)
        phase: Phase = "sampling" if settings.vllm.sleep else "always"
        advice = "vllm.server_args = ['--gpu-memory-utilization …'] or vllm.sleep"
        return [Term("vLLM's share", size, advice, phase)]
    if rollout.engine != "local":
        return []
    cache = _cache(sizes, settings, computation)
    stays_idle = (
        computation.on_gpu
        and computation.memory is not None
        and cache <= KEPT_SHARE * computation.memory
    )
    phase = "always" if stays_idle or _samples_while_learning(settings) else "sampling"
    return [Term(KEYS_AND_VALUES, cache, "rollout.max_num_seqs", phase)]


def _samples_while_learning(settings: Settings) -> bool:
    """True if completions of later batches are in flight while the policy learns."""
    schedule = settings.schedule
    if schedule.continues_completions:
        return False  # their keys and values are computed again
    if schedule.runs_ahead:
        return True
    return schedule.v > 1 and not settings.rollout.dynamic_sampling_rounds


def _drops_idle_cache(terms: Sequence[Term], settings: Settings, computation: Computation) -> bool:
    """True if memory runs out while the policy learns beside an idle cache.

    Then the run frees the cache, and keeps none any more. Ranks that shard layers cannot do that.
    """
    if computation.memory is None or peak(terms) <= computation.memory:
        return False
    return not (_samples_while_learning(settings) or _is_sharded(settings, computation))


def _cache(sizes: ModelSizes, settings: Settings, computation: Computation) -> int:
    """The bytes of the keys and values of all completions in flight."""
    rollout = settings.rollout
    schedule = settings.schedule
    batches = schedule.v + 1 if schedule.runs_ahead else schedule.v
    groups = -(-schedule.prompts_per_batch // computation.ranks) * batches
    G = rollout.num_generations
    rows = min(max(rollout.max_num_seqs, G), G * groups)
    of_token = 2 * sizes.layers * sizes.keys * computation.itemsize
    prompt = rollout.max_prompt_length
    completion = rollout.max_completion_length
    if computation.on_gpu:
        capacity = round_up_keys(prompt + completion)
        if computation.memory is not None:
            kept_rows = int(KEPT_SHARE * computation.memory) // (of_token * capacity)
            rows = min(rows, max(G, kept_rows))
        return of_token * rows * capacity
    # A cache that grows is there twice for a moment.
    capacity = BLOCK * 2 ** max(0, math.ceil(math.log2(completion / BLOCK)))
    grown = capacity + (capacity // 2 if capacity > BLOCK else 0)
    return of_token * (rows * grown + -(-rows // G) * prompt)
