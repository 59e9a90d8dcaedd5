"""Sampling and learning on a GPU: tokens per second, share of the matrix peak, memory. See README.md.

make bench-gpu
python benchmarks/bench_gpu.py --help

Models of the shapes of SmolLM2-135M and Qwen2.5-1.5B with random weights, at contexts of 512 and 1,024 tokens of which
a quarter is the prompt. The defaults are meant for a GPU of 80 GB and five minutes. Runs on a CPU as well.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import time
from collections.abc import Callable
from typing import Any

import torch
from measuring import Load, Report, gigabytes, machine, median, spread
from ours import learning_flops, matrix_product
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config
from work import SEED, common_options

from lagrpo.core.recipes import resolve
from lagrpo.model import attention
from lagrpo.model.embedded import resolve_model
from lagrpo.model.model import Policy, copy_policy
from lagrpo.rng import uniforms
from lagrpo.rollout.base import Request
from lagrpo.rollout.local import LocalSampler
from lagrpo.training.batch import assemble
from lagrpo.training.trainer import Optimization, Trainer
from lagrpo.types import Group, Outcome, Prompt

QWEN = Qwen2Config(
    vocab_size=151_936,
    hidden_size=1536,
    intermediate_size=8960,
    num_hidden_layers=28,
    num_attention_heads=12,
    num_key_value_heads=2,
    max_position_embeddings=32_768,
    tie_word_embeddings=True,
)
SMOLLM2 = Qwen2Config(
    vocab_size=49_152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    max_position_embeddings=8192,
    tie_word_embeddings=True,
)
TINY = Qwen2Config(
    vocab_size=512,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=4096,
    tie_word_embeddings=True,
)
MODELS = {"135m": SMOLLM2, "1.5b": QWEN, "tiny": TINY}
DATA_SHEET = {
    "H100 PCIe": 756,
    "H100 NVL": 835,
    "H100": 989,
    "H200": 989,
    "GH200": 989,
    "A100": 312,
    "L40S": 362,
    "B200": 2250,
}
"""TFLOP/s of dense bfloat16 products by NVIDIA's data sheets; the first name that is part of the GPU's"""


def options() -> argparse.Namespace:
    parser = common_options(__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["1.5b", "135m"])
    parser.add_argument(
        "--contexts",
        type=int,
        nargs="+",
        default=[512, 1024],
        help="prompt and completion, in tokens",
    )
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--completions", type=int, default=16, help="of each prompt")
    parser.add_argument("--tokens", type=int, default=8192, help="in a micro-batch")
    parser.add_argument("--rounds", type=int, default=2, help="after one that is not counted")
    asked = parser.parse_args()
    if asked.quick:
        asked.models, asked.contexts = ["tiny"], [64]
        asked.prompts, asked.completions, asked.rounds = 2, 4, 1
    return asked


def main() -> None:
    asked = options()
    torch.set_num_threads(asked.threads)
    load = Load()
    name = "gpu" if asked.device.startswith("cuda") else "gpu-on-cpu"
    report = Report(name, f"Sampling and learning on {device_name(asked.device)}", asked.results)
    rates = [
        r
        for size in (4096, 8192)
        for r in matrix_product(size // (8 if asked.quick else 1), 5, asked.device)["rates"]
    ]
    peaks = {"the measured peak": max(rates)}
    sheet = data_sheet_peak(device_name(asked.device))
    if sheet is not None:
        peaks["the data sheet's peak"] = sheet
    report.text(
        f"{asked.prompts} prompts × {asked.completions} completions; a quarter of the context is the prompt; "
        f"{asked.tokens} tokens in a micro-batch. Medians, with the smallest and largest value. Peaks of bfloat16 "
        f"products in TFLOP/s: {max(rates) / 1e12:.3g} measured with square matrices"
        + (f", {sheet / 1e12:.3g} by the data sheet." if sheet is not None else ".")
    )
    for context in asked.contexts:  # what needs least time first
        for name in asked.models:
            row = measure(asked, name, context, peaks, report)
            report.table(f"{name}, {context} tokens", [row])
            report.write(machine(asked.threads, load))  # kept, whatever the next one does


def measure(
    asked: argparse.Namespace, name: str, context: int, peaks: dict[str, float], report: Report
) -> dict[str, str]:
    """The row of a model at a context."""
    free_memory(asked.device)  # of the model before
    policy = make_policy(name, asked.device)
    trainer = Trainer(policy, resolve("grpo", {"beta": 0.0}), Optimization(lr=1e-6))
    sampler = LocalSampler(
        copy_policy(policy), SEED, context - context // 4, asked.prompts * asked.completions
    )
    turns = [once(asked, trainer, sampler, context, turn) for turn in range(1 + asked.rounds)][1:]
    column = {key: [turn[key] for turn in turns] for key in turns[0]}
    report.raw[f"{name}, {context}"] = column
    row = {
        "sampling, tokens/s": spread(column["sampling"], digits=4),
        "learning, tokens/s": spread(column["learning"], digits=4),
    }
    for label, peak in peaks.items():
        row[f"learning, share of {label}"] = f"{median(column['flops']) / peak:.1%}"
    if asked.device.startswith("cuda"):
        row |= {
            phase: gigabytes(max(column[phase]))
            for phase in ("memory of sampling", "memory of learning")
        }
    return row


def once(
    asked: argparse.Namespace, trainer: Trainer, sampler: LocalSampler, context: int, turn: int
) -> dict[str, float]:
    """A batch is sampled and learned from; rewards are drawn, so that every group has a signal."""
    policy = trainer.policy
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
    _, learning, learning_memory = timed(
        asked.device, lambda: trainer.step(rows, in_objective=batch.in_objective)
    )
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


def free_memory(device: str) -> None:
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()


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
    """A model of random weights, with the embedded model's tokenizer."""
    attention.register()
    torch.manual_seed(SEED)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            MODELS[name], dtype=torch.bfloat16, attn_implementation=attention.NAME
        )
    return Policy.from_model(model, AutoTokenizer.from_pretrained(resolve_model("smollm2")))


def data_sheet_peak(name: str) -> float | None:
    """FLOP/s of bfloat16 products by the data sheet of a GPU; None for one that DATA_SHEET does not have."""
    return next((1e12 * peak for gpu, peak in DATA_SHEET.items() if gpu in name), None)


def device_name(device: str) -> str:
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else "the CPU"


if __name__ == "__main__":
    main()
