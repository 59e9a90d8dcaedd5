"""Sampling and learning on a GPU: tokens per second, share of the matrix peak, memory. See README.md.

make bench-gpu
python benchmarks/bench_gpu.py --help

SmolLM2-135M, and a model of the shape of Qwen2.5-1.5B with random weights, at contexts of 1,024 and 4,096 tokens of
which a quarter is the prompt. What $LAGRPO_KERNELS = auto and torch compute with, in turn. Runs on a CPU as well.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import time
from collections.abc import Callable
from typing import Any

import torch
from measuring import Load, Report, gigabytes, machine, median, ratio, spread
from ours import learning_flops, matrix_product
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config
from work import SEED, common_options

from lagrpo.core.recipes import resolve
from lagrpo.model import attention
from lagrpo.model.backend import Choice, choose_backend
from lagrpo.model.embedded import resolve_model
from lagrpo.model.loading import load_policy
from lagrpo.model.model import Model, Policy, copy_policy
from lagrpo.rng import uniforms
from lagrpo.rollout.base import Request
from lagrpo.rollout.local import LocalSampler
from lagrpo.training.batch import assemble
from lagrpo.training.trainer import Optimization, Trainer
from lagrpo.types import Group, Outcome, Prompt

QWEN = Qwen2Config(
    vocab_size=151_936, hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12,
    num_key_value_heads=2, max_position_embeddings=32_768, tie_word_embeddings=True,
)  # fmt: skip
TINY = Qwen2Config(
    vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, max_position_embeddings=4096, tie_word_embeddings=True,
)  # fmt: skip
MODELS = {"smollm2": None, "random-1.5b": QWEN, "tiny": TINY}


def options() -> argparse.Namespace:
    parser = common_options(__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["smollm2", "random-1.5b"])
    parser.add_argument(
        "--contexts", type=int, nargs="+", default=[1024, 4096], help="prompt and completion, in tokens"
    )
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--completions", type=int, default=16, help="of each prompt")
    parser.add_argument("--tokens", type=int, default=32_768, help="in a micro-batch")
    parser.add_argument("--rounds", type=int, default=3, help="of each way of computing, after one that is not counted")
    asked = parser.parse_args()
    if asked.quick:
        asked.models, asked.contexts, asked.prompts, asked.completions, asked.rounds = ["tiny"], [64], 2, 4, 1
    return asked


def main() -> None:
    asked = options()
    torch.set_num_threads(asked.threads)
    load = Load()
    name = "gpu" if asked.device.startswith("cuda") else "gpu-on-cpu"
    report = Report(name, f"Sampling and learning on {device_name(asked.device)}", asked.results)
    report.text(
        "Medians, with the smallest and largest value. *auto* is what a run takes by itself, *torch* PyTorch's plain "
        "operations; a ratio above 1 says that auto is faster, or smaller."
    )
    rates = [
        r for size in (4096, 8192) for r in matrix_product(size // (8 if asked.quick else 1), 5, asked.device)["rates"]
    ]
    peak = max(rates)
    report.text(f"bfloat16 product of square matrices: {peak / 1e12:.3g} TFLOP/s, the peak below.")
    for name in asked.models:
        for context in asked.contexts:
            measure(asked, name, context, peak, report)
    report.write(machine(asked.threads, load) | {"device": device_name(asked.device)})


def measure(asked: argparse.Namespace, name: str, context: int, peak: float, report: Report) -> None:
    """One table: a model at a context."""
    policy = make_policy(name, asked.device)
    ways: tuple[Choice, ...] = ("auto", "torch")
    policies = {
        way: dataclasses.replace(policy, model=Model(policy.model.lm, choose_backend(way, policy.device, policy.dtype)))
        for way in ways
    }
    trainer = Trainer(policy, resolve("grpo", {"beta": 0.0}), Optimization(lr=1e-6))
    length = context - context // 4
    taken: dict[str, list[dict[str, float]]] = {"auto": [], "torch": []}
    samplers: dict[str, LocalSampler] = {}
    said: dict[str, str] = {}
    for turn in range(1 + asked.rounds):
        for way in ways if turn % 2 == 0 else reversed(ways):
            policy = trainer.policy = policies[way]
            said[way] = policy.model.computation
            samplers.setdefault(way, LocalSampler(copy_policy(policy), SEED, length, asked.prompts * asked.completions))
            taken[way].append(once(asked, policy, trainer, samplers[way], context, turn))
            print(f"  {name}, {context}, {way}: {taken[way][-1]}", flush=True)
    taken = {way: measurements[1:] for way, measurements in taken.items()}
    report.raw[f"{name}, {context}"] = taken
    column = lambda measurement, way: [measurements[measurement] for measurements in taken[way]]  # noqa: E731
    rows = []
    for measurement in ("sampling", "learning"):
        each = {way: spread(column(measurement, way), " tokens/s", 4) for way in taken}
        rows.append(
            {"": measurement, **each, "ratio": ratio(column(measurement, "auto"), column(measurement, "torch"))}
        )
    shares = {way: f"{median(column('flops', way)) / peak:.0%}" for way in taken}
    rows.append({"": "learning, share of the peak", **shares})
    for measurement in ("memory of sampling", "memory of learning") if asked.device.startswith("cuda") else ():
        most = {way: max(column(measurement, way)) for way in taken}
        sizes = {way: gigabytes(size) for way, size in most.items()}
        rows.append({"": measurement, **sizes, "ratio": f"{most['torch'] / most['auto']:.2f}"})
    report.table(
        f"{name}: {asked.prompts} prompts of {context // 4} tokens × {asked.completions} completions × ≤ {length} "
        f"tokens; {asked.tokens} tokens in a micro-batch",
        rows,
    )
    report.text("; ".join(f"{way}: {what}" for way, what in said.items()) + ".")


def once(
    asked: argparse.Namespace, policy: Policy, trainer: Trainer, sampler: LocalSampler, context: int, turn: int
) -> dict[str, float]:
    """A batch is sampled and learned from; rewards are drawn, so that every group has a signal."""
    vocabulary = min(policy.model.head.weight.shape[0], 40_000)
    requests = []
    for key in range(asked.prompts):
        ids = (uniforms(context // 4, SEED, "prompt", turn, key) * vocabulary).astype("int64")
        requests.append(Request(turn, 0, Prompt(key, (), None, tuple(ids.tolist()))))
    sampler.sync_weights(policy.weights, policy.version)
    generated, sampling, sampling_memory = timed(
        asked.device, lambda: list(sampler.sample(requests, asked.completions))
    )
    groups = [rewarded(group, turn) for _, group in generated]
    batch = assemble(groups, trainer.recipe, context - context // 4, SEED, turn)
    rows = trainer.pack(batch, asked.tokens)
    _, learning, learning_memory = timed(asked.device, lambda: trainer.step(rows, batch.in_objective))
    tokens = sum(len(c.token_ids) for group in groups for c in group.completions)
    return {
        "sampling": tokens / sampling,
        "learning": sum(len(micro.packed.token_ids) for micro in rows) / learning,
        "flops": sum(learning_flops(micro, policy) for micro in rows) / learning,
        "memory of sampling": sampling_memory,
        "memory of learning": learning_memory,
    }


def timed(device: str, compute: Callable[[], Any]) -> tuple[Any, float, float]:
    """What it returns, its seconds, and the most memory allocated on a GPU meanwhile (0 on a CPU), in bytes."""
    on_gpu = device.startswith("cuda")
    gc.collect()
    if on_gpu:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    started = time.perf_counter()
    made = compute()
    if on_gpu:
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - started
    return made, seconds, torch.cuda.max_memory_allocated(device) if on_gpu else 0


def rewarded(group: Group, turn: int) -> Group:
    rewards = uniforms(len(group.completions), SEED, "reward", turn, group.prompt.key)
    return dataclasses.replace(
        group,
        completions=tuple(
            dataclasses.replace(c, outcome=Outcome.scored(float(reward)))
            for c, reward in zip(group.completions, rewards, strict=True)
        ),
    )


def make_policy(name: str, device: str) -> Policy:
    """The embedded model, or one of random weights with its tokenizer."""
    config = MODELS[name]
    if config is None:
        return load_policy(str(resolve_model(name)), torch.bfloat16, device)
    attention.register()
    torch.manual_seed(SEED)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=attention.NAME)
    return Policy.from_model(model, AutoTokenizer.from_pretrained(resolve_model("smollm2")))


def device_name(device: str) -> str:
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else "the CPU"


if __name__ == "__main__":
    main()
