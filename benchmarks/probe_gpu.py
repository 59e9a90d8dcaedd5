"""Probes of one GPU, a minute each: where the time goes, and which bits depend on what.

python benchmarks/probe_gpu.py STAGE …
python benchmarks/probe_gpu.py --quick STAGE …     # tiny sizes, also on a CPU

    peak        how fast it copies and multiplies
    learn       an update of 1.5b: GPU seconds and launches by kind of kernel, memory
    learn-135m  the same for 135m
    host        the parts of an update of 1.5b, and what the host does in them
    free        the update of 1.5b without deterministic algorithms: what these cost
    sample      decoding 128 rows of each model: tokens/s, GPU seconds by kind of kernel
    rows        which products give a row other bits if other rows are computed with it
    rows-no-split
                the same without split-K; no other stage may run before it (needs a GPU)
    attention   rows of FlashAttention in decoding that differ from the trainer's (needs a GPU)

A stage prints its results and adds them to gpu-probes.json in the directory of results.
`make measure-gpu` runs all.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
import torch.nn.functional as F
from bench_gpu import device_name, free_memory, learning_flops, make_policy, rewarded
from torch.autograd.profiler_util import FunctionEventAvg
from torch.profiler import ProfilerActivity, profile
from work import SEED, common_options

from lagrpo.core.recipes import resolve
from lagrpo.gpu import exactness
from lagrpo.model.model import Policy, copy_policy
from lagrpo.rollout.local import LocalSampler
from lagrpo.training import trainer as trainers
from lagrpo.training.batch import MicroBatch, assemble
from lagrpo.training.optimizer import Optimization
from lagrpo.training.trainer import Trainer
from lagrpo.types import Completion, Group, JsonObject, Prompt, Request

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
KINDS = {
    "product": ("gemm", "nvjet", "cutlass", "xmma", "wgmma"),
    "attention": ("flash", "fmha"),
    "sort, index": ("sort", "radix", "indexing_backward", "index_put", "scan", "onesweep"),
    "sum": ("reduce",),
    "gather, copy": ("gather", "index", "catarray", "copy", "memcpy", "memset", "fill"),
    "softmax": ("exp", "entr"),
    "optimizer": ("adam", "multi_tensor"),
}
"""Kinds of kernels, and words in their names. A kernel has the first kind that fits."""
MATRICES = {
    "135m": [(576, 576), (192, 576), (1536, 576), (576, 1536), (49_152, 576)],
    "1.5b": [(1536, 1536), (256, 1536), (8960, 1536), (1536, 8960), (151_936, 1536)],
    "tiny": [(64, 64), (128, 64)],
}
"""Outputs and inputs of the linear layers of bench_gpu's models, the head last."""

Values = JsonObject
"""Results that JSON can hold."""


def main() -> None:
    run_stages(__doc__, STAGES)


def run_stages(description: str | None, stages: Mapping[str, Stage]) -> None:
    """Runs the stages that the command line names, and records what they measure."""
    parser = common_options(description)
    parser.add_argument("stages", nargs="+", choices=stages, metavar="STAGE")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for stage in options.stages:
        started = time.perf_counter()
        for name, values in stages[stage](options):
            record(options, name, values)
        free_memory(DEVICE)
        print(f"-- {stage}: {time.perf_counter() - started:.0f} s", flush=True)


def record(options: argparse.Namespace, name: str, values: Values) -> None:
    """Adds values to the file of results, at once: a later stage may end this process."""
    path = options.results / "gpu-probes.json"
    results = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    results[name] = {"device": device_name(DEVICE), "torch": torch.__version__, **values}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(name, json.dumps(values), flush=True)


Answers = Iterator[tuple[str, Values]]
Stage = Callable[[argparse.Namespace], Answers]


# Stages


def peak(options: argparse.Namespace) -> Answers:
    """Times a copy and a matrix product, each too large for caches."""
    size = 1 << 20 if options.quick else 1 << 31  # bytes
    source = torch.empty(size, dtype=torch.uint8, device=DEVICE)
    target = torch.empty(size, dtype=torch.uint8, device=DEVICE)
    width = 256 if options.quick else 8192
    a = torch.randn(width, width, device=DEVICE).bfloat16()
    b = torch.randn(width, width, device=DEVICE).bfloat16()
    copy_seconds = seconds_of(lambda: target.copy_(source))
    product_seconds = seconds_of(lambda: a @ b)
    values = {
        "copy_TB_s": 2 * size / copy_seconds / 1e12,  # each byte is read and written
        "product_TFLOP_s": 2 * width**3 / product_seconds / 1e12,
    }
    yield "peak", values


def learn(options: argparse.Namespace, name: str = "1.5b", tokens: int = 8192) -> Answers:
    """Profiles an update of a model. `tokens`: in a micro-batch."""
    if options.quick:
        name = "tiny"
    yield f"learn {name}", profile_update(name, tokens, quick=options.quick)


def learn_135m(options: argparse.Namespace) -> Answers:
    yield from learn(options, "135m", 32_768)


def host(options: argparse.Namespace) -> Answers:
    """Times the parts of an update, each with a wait at its end, and profiles the host."""
    name = "tiny" if options.quick else "1.5b"
    policy = make_policy(name, DEVICE)
    trainer = Trainer(policy, resolve("grpo", {"beta": 0.0}), Optimization(lr=1e-6))
    micro_batches = random_micro_batches(trainer, policy, 8192, quick=options.quick)
    for _ in range(2):
        trainer.step(micro_batches)
    packed = micro_batches[0].packed

    def forward() -> None:
        policy.logp(packed)

    def forward_and_backward() -> None:
        with trainers.deterministic(policy.model):
            policy.logp(packed).sum().backward()

    forward_seconds = seconds_of(forward, repetitions=3)
    both_seconds = seconds_of(forward_and_backward, repetitions=3)
    values = {
        "micro_batches": len(micro_batches),
        "forward_ms": 1e3 * forward_seconds,
        "backward_ms": 1e3 * (both_seconds - forward_seconds),
        "update_ms": 1e3 * seconds_of(trainer.update, repetitions=3),
    }
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        forward_and_backward()
        synchronize()
    averages = profiler.key_averages()
    print(averages.table(sort_by="self_cpu_time_total", row_limit=30, max_name_column_width=60))
    yield f"host {name}", values


def free(options: argparse.Namespace) -> Answers:
    """Profiles an update whose gradient differs from pass to pass."""
    name = "tiny" if options.quick else "1.5b"
    with nothing_deterministic():
        values = profile_update(name, 8192, quick=options.quick)
    yield f"learn {name}, not deterministic", values


def sample(options: argparse.Namespace) -> Answers:
    """Profiles the decoding of a batch, with recorded graphs."""
    if options.quick:
        models, rows, tokens, prompt_length = ["tiny"], 8, 24, 8
    else:
        models, rows, tokens, prompt_length = ["135m", "1.5b"], 128, 192, 128
    for name in models:
        free_memory(DEVICE)
        sampler = LocalSampler(copy_policy(make_policy(name, DEVICE)), SEED, tokens, rows)
        token_ids = tuple(range(100, 100 + prompt_length))
        prompts = [Prompt(key, (), None, token_ids) for key in range(rows // 4)]
        requests = [Request(0, 0, prompt) for prompt in prompts]

        def decode(
            sampler: LocalSampler = sampler, requests: list[Request] = requests
        ) -> list[Group]:
            return [group for _, group in sampler.sample(requests, 4)]

        decode()  # records the graphs
        started = time.perf_counter()
        groups = decode()
        synchronize()
        seconds = time.perf_counter() - started
        sampled = sum(c.length for group in groups for c in group.completions)
        values = {
            "tokens_s": sampled / seconds,
            "ms_a_step": 1e3 * seconds / tokens,
            "memory_GB": peak_memory(),
        }
        yield f"sample {name}, {rows} rows", values | kernels_of(decode)


def rows(options: argparse.Namespace, way: str = "default") -> Answers:
    """Compares products of a few rows with products of many.

    Equal bits make the importance ratio exactly 1.
    """
    if options.quick:
        models = ["tiny"]
        counts = [2, 4, 16]
    else:
        models = ["135m", "1.5b"]
        counts = [1, 2, 4, 8, 16, 32, 64, 128, 256, 682, 1024, 4096]
    differing = {}
    for model in models:
        for outputs, inputs in MATRICES[model]:
            torch.manual_seed(SEED)
            weight = torch.randn(outputs, inputs, device=DEVICE).bfloat16()
            x = torch.randn(counts[-1], inputs, device=DEVICE).bfloat16()
            all_rows = F.linear(x, weight)  # [counts[-1], outputs]
            differing[f"{model} {outputs} x {inputs}"] = [
                count
                for count in counts
                if not torch.equal(F.linear(x[:count], weight), all_rows[:count])
            ]
    values: Values = {"row_counts_with_other_bits": differing}
    for variable in ("CUBLAS_WORKSPACE_CONFIG", "CUBLASLT_WORKSPACE_SIZE"):
        values[variable] = os.environ.get(variable)
    yield f"rows, {way}", values


def rows_without_split_k(options: argparse.Namespace) -> Answers:
    """The same with products without split-K. No other stage may run before it in a process."""
    if not ON_GPU:
        print("rows-no-split: cuBLASLt needs a GPU")
        return
    exactness.forbid_split_k()
    yield from rows(options, way="without split-K")


def attention(options: argparse.Namespace) -> Answers:
    """Compares the bits of attention in a decoding step with the trainer's."""
    if not ON_GPU:
        print("attention: FlashAttention needs a GPU")
        return
    # The heads of 1.5b and of 135m.
    for heads, kv_heads, head_dim in ((12, 2, 128), (9, 3, 64)):
        values = compare_attention(heads, kv_heads, head_dim)
        yield f"attention, {heads} and {kv_heads} heads of {head_dim}", values


def compare_attention(heads: int, kv_heads: int, d: int) -> Values:
    """Compares FlashAttention of a decoding step and along the sequence. `d`: size of a head.

    In a decoding step the query heads of a key head are its tokens, and each row uses a part of its
    cache.
    """
    from torch.nn.attention.varlen import varlen_attn

    # No length or number of rows is a multiple of a kernel's block, so that edges count, too.
    length = 700
    capacity = 1024
    count = 37
    torch.manual_seed(SEED)
    lengths = torch.randint(1, length, (count,)).tolist()
    q = torch.randn(length, heads, d, device=DEVICE).bfloat16()
    k = torch.randn(length, kv_heads, d, device=DEVICE).bfloat16()
    v = torch.randn(length, kv_heads, d, device=DEVICE).bfloat16()
    ends = torch.tensor([0, length], dtype=torch.int32, device=DEVICE)
    # Newer versions of torch want to be told that there are fewer key heads than query heads.
    attend = varlen_attn
    if "enable_gqa" in varlen_attn.__code__.co_varnames:
        attend = partial(varlen_attn, enable_gqa=True)
    # [length, heads, d]
    # A window of all earlier tokens and none of the later ones: causal.
    along_sequence = attend(q, k, v, ends, ends, length, length, window_size=(-1, 0))

    # Row r attends to the first lengths[r] tokens, which are the first in its cache.
    keys = torch.zeros(count, capacity, kv_heads, d, device=DEVICE).bfloat16()
    values = torch.zeros(count, capacity, kv_heads, d, device=DEVICE).bfloat16()
    for row, used in enumerate(lengths):
        keys[row, :used] = k[:used]
        values[row, :used] = v[:used]
    last = torch.stack([q[used - 1] for used in lengths])  # [rows, heads, d]
    heads_per_key = heads // kv_heads
    # [rows · heads_per_key, kv_heads, d]
    tokens = last.view(count, kv_heads, heads_per_key, d).transpose(1, 2).reshape(-1, kv_heads, d)
    row_numbers = torch.arange(count + 1, dtype=torch.int32, device=DEVICE)
    out = torch.ops.aten._flash_attention_forward(
        tokens,
        keys.view(-1, kv_heads, d),
        values.view(-1, kv_heads, d),
        row_numbers * heads_per_key,
        row_numbers * capacity,
        heads_per_key,
        capacity,
        dropout_p=0.0,
        is_causal=False,
        return_debug_mask=False,
        scale=d**-0.5,
        seqused_k=torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
    )[0]
    out = out.view(count, heads_per_key, kv_heads, d).transpose(1, 2).reshape(count, heads, d)
    expected = torch.stack([along_sequence[used - 1] for used in lengths])
    return {
        "rows": count,
        "rows_with_other_bits": int((out != expected).flatten(1).any(1).sum()),
        "largest_difference": float((out - expected).abs().max()),
    }


STAGES: dict[str, Stage] = {
    "peak": peak,
    "learn": learn,
    "learn-135m": learn_135m,
    "host": host,
    "free": free,
    "sample": sample,
    "rows": rows,
    "rows-no-split": rows_without_split_k,
    "attention": attention,
}


# An update, and what it costs


def profile_update(name: str, tokens: int, *, quick: bool) -> Values:
    """Measures the second update on a batch with random completions."""
    policy = make_policy(name, DEVICE)
    trainer = Trainer(policy, resolve("grpo", {"beta": 0.0}), Optimization(lr=1e-6))
    micro_batches = random_micro_batches(trainer, policy, tokens, quick=quick)

    def update() -> object:
        return trainer.step(micro_batches)

    update()  # a warm-up
    synchronize()
    if ON_GPU:
        torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    update()
    synchronize()
    seconds = time.perf_counter() - started
    learned_tokens = sum(len(micro.packed.token_ids) for micro in micro_batches)
    flops = sum(learning_flops(micro, policy) for micro in micro_batches)
    values = {
        "seconds": seconds,
        "TFLOP_s": flops / seconds / 1e12,
        "tokens_s": learned_tokens / seconds,
        "micro_batches": len(micro_batches),
        "memory_GB": peak_memory(),
    }
    return values | kernels_of(update)


def random_micro_batches(
    trainer: Trainer, policy: Policy, tokens: int, *, quick: bool
) -> list[MicroBatch]:
    """A packed batch of random prompts, completions and rewards."""
    if quick:
        prompts, completions, length, prompt_length = 2, 4, 24, 8
    else:
        prompts, completions, length, prompt_length = 8, 16, 384, 128
    vocabulary = min(policy.model.head.weight.shape[0], 40_000)
    rng = torch.Generator().manual_seed(SEED)
    groups = []
    for key in range(prompts):
        prompt_ids = torch.randint(vocabulary, (prompt_length,), generator=rng)
        members = tuple(
            Completion(
                token_ids=torch.randint(vocabulary, (length,), generator=rng),
                # Any number does: only the time is measured.
                rollout_logp=torch.full((length,), -9.0),
                versions=torch.zeros(length, dtype=torch.long),
                finished=False,
                text="",
            )
            for _ in range(completions)
        )
        prompt = Prompt(key, (), None, tuple(prompt_ids.tolist()))
        groups.append(rewarded(Group(prompt, members), turn=0))
    return trainer.pack(assemble(groups, trainer.recipe, length, SEED, 0), tokens)


@contextmanager
def nothing_deterministic() -> Iterator[None]:
    """Lets updates add up gradients in any order. Replaces a function of the trainer meanwhile."""

    @contextmanager
    def leave_as_it_is(_: object) -> Iterator[None]:
        yield

    deterministic = trainers.deterministic
    trainers.deterministic = leave_as_it_is
    try:
        yield
    finally:
        trainers.deterministic = deterministic


# Measuring


def synchronize() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


def peak_memory() -> float:
    """The most memory of the GPU that was allocated, in GB; 0 on a CPU."""
    return torch.cuda.max_memory_allocated() / 1e9 if ON_GPU else 0.0


def seconds_of(compute: Callable[[], object], repetitions: int = 10) -> float:
    """Mean seconds of a computation, after one that does not count."""
    compute()
    synchronize()
    started = time.perf_counter()
    for _ in range(repetitions):
        compute()
    synchronize()
    return (time.perf_counter() - started) / repetitions


def kernels_of(compute: Callable[[], object]) -> Values:
    """Seconds and launches on the GPU, by kind of kernel. Prints the longest kernels."""
    if not ON_GPU:
        compute()
        return {}
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        compute()
        synchronize()
    averages = profiler.key_averages()
    print(averages.table(sort_by="self_device_time_total", row_limit=20, max_name_column_width=70))
    events = [event for event in averages if event.device_type.name == "CUDA"]
    busy = sum(event.self_device_time_total for event in events) / 1e6
    return {"gpu_seconds": busy, "gpu_seconds_and_launches": by_kind(events)}


def by_kind(events: Iterable[FunctionEventAvg]) -> dict[str, tuple[float, int]]:
    """(seconds, launches) by kind of kernel, the longest first."""
    seconds: defaultdict[str, float] = defaultdict(float)
    launches: defaultdict[str, int] = defaultdict(int)
    for event in events:
        kind = kind_of(str(event.key).lower())
        seconds[kind] += event.self_device_time_total / 1e6
        launches[kind] += event.count
    longest_first = sorted(seconds, key=seconds.__getitem__, reverse=True)
    return {kind: (round(seconds[kind], 4), launches[kind]) for kind in longest_first}


def kind_of(kernel: str) -> str:
    for kind, words in KINDS.items():
        if any(word in kernel for word in words):
            return kind
    return "elementwise"


if __name__ == "__main__":
    main()
