"""Sampling and learning on a GPU: tokens per second, share of the peak, memory. See README.md.

make bench-gpu
python benchmarks/bench_gpu.py --help

The models have the shapes of SmolLM2-135M, Qwen2.5-0.5B and Qwen2.5-1.5B and random weights.
Contexts have 512 and 1,024 tokens, a quarter of which is the prompt. At last Qwen3-0.6B learns from
sequences of 16,384 tokens with gradient checkpointing, which is what prime-rl's benchmark measures;
their tokens are random, because sampling them would take longer than all else. The defaults are
meant for a GPU of 80 GB and five minutes. Runs on a CPU as well.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import math
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from measuring import Load, Report, gigabytes, machine, median
from ours import learning_flops, matrix_product
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config, Qwen3Config
from work import SEED, common_options

from lagrpo.core.recipes import resolve
from lagrpo.model import attention
from lagrpo.model.model import Policy, copy_policy
from lagrpo.rng import uniforms
from lagrpo.rollout.local import LocalSampler
from lagrpo.training.batch import assemble
from lagrpo.training.optimizer import Optimization
from lagrpo.training.trainer import Trainer
from lagrpo.types import Completion, Group, Outcome, Prompt, Request

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
QWEN_HALF = Qwen2Config(
    vocab_size=151_936,
    hidden_size=896,
    intermediate_size=4864,
    num_hidden_layers=24,
    num_attention_heads=14,
    num_key_value_heads=2,
    max_position_embeddings=32_768,
    tie_word_embeddings=True,
)
QWEN3 = Qwen3Config(
    vocab_size=151_936,
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=40_960,
    tie_word_embeddings=True,
)
# In Qwen2's architecture, which adds only the biases of queries, keys and values to SmolLM2's.
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
Result = TypeVar("Result")

MODELS = {"135m": SMOLLM2, "0.5b": QWEN_HALF, "qwen3-0.6b": QWEN3, "1.5b": QWEN, "tiny": TINY}
# Tokens in a micro-batch. The host takes as long to launch the kernels of a small one as of a large
# one, so a small model needs many; the activations of 1.5b have to fit 80 GB.
MOST_TOKENS = 65_536
TOKENS = {"1.5b": 32_768}
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
"""TFLOP/s of dense bfloat16 products by NVIDIA's data sheets.

A GPU has the first name that is part of its own, so "H100 PCIe" stands before "H100".
"""


def parse_options() -> argparse.Namespace:
    parser = common_options(__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["1.5b", "0.5b", "135m"])
    parser.add_argument(
        "--contexts",
        type=int,
        nargs="+",
        default=[512, 1024],
        help="prompt and completion, in tokens",
    )
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--completions", type=int, default=16, help="of each prompt")
    parser.add_argument(
        "--tokens", type=int, help="in a micro-batch; default: 32,768 for 1.5b, else 65,536"
    )
    parser.add_argument("--long-model", choices=MODELS, default="qwen3-0.6b")
    parser.add_argument(
        "--long-context", type=int, default=16_384, help="of sequences to learn from; 0: none"
    )
    parser.add_argument("--rounds", type=int, default=2, help="after one that is not counted")
    options = parser.parse_args()
    if options.quick:
        options.models = ["tiny"]
        options.contexts = [64]
        options.long_model = "tiny"
        options.long_context = 256
        options.prompts = 2
        options.completions = 4
        options.rounds = 1
    return options


def main() -> None:
    options = parse_options()
    torch.set_num_threads(options.threads)
    load = Load()
    name = "gpu" if options.device.startswith("cuda") else "gpu-on-cpu"
    report = Report(
        name, f"Sampling and learning on {device_name(options.device)}", options.results
    )
    # Large enough that a GPU's launches and memory do not bound them.
    sizes = (512, 1024) if options.quick else (4096, 8192)
    rates = []
    for size in sizes:
        rates += matrix_product(size, 5, options.device)["rates"]
    peaks = {"the measured peak": max(rates)}
    peaks_text = f"{max(rates) / 1e12:.3g} measured with square matrices"
    sheet_peak = data_sheet_peak(device_name(options.device))
    if sheet_peak is not None:
        peaks["the data sheet's peak"] = sheet_peak
        peaks_text += f", {sheet_peak / 1e12:.3g} by the data sheet"
    report.text(
        f"{options.prompts} prompts × {options.completions} completions; "
        "a quarter of the context is the prompt; "
        f"{describe_tokens(options)} tokens in a micro-batch. "
        "Medians, with the smallest and largest value. "
        f"Peaks of bfloat16 products in TFLOP/s: {peaks_text}."
    )
    # Contexts in the outer loop: short ones, which take least time, come first for all models.
    for context in options.contexts:
        for name in options.models:
            row = measure(options, name, context, peaks, report)
            report.table(f"{name}, {context} tokens", [row])
            # Written after each row, so that a later one that fails loses nothing.
            report.write(machine(options.threads, load))
    if options.long_context:
        row = measure_long(options, peaks, report)
        title = f"{options.long_model}, {options.long_context} tokens, gradient checkpointing"
        report.table(title, [row])
        report.write(machine(options.threads, load))


def describe_tokens(options: argparse.Namespace) -> str:
    if options.tokens:
        return f"{options.tokens:,}"
    exceptions = [f"{tokens:,} ({name})" for name, tokens in TOKENS.items()]
    return f"{MOST_TOKENS:,}, {', '.join(exceptions)}"


def measure_long(
    options: argparse.Namespace, peaks: dict[str, float], report: Report
) -> dict[str, str]:
    """Measures learning from long sequences, one in a micro-batch, and returns its row."""
    free_memory(options.device)  # that of the previous model
    policy = make_policy(options.long_model, options.device)
    trainer = Trainer(
        policy,
        resolve("grpo", {"beta": 0.0}),
        Optimization(lr=1e-6),
        activation_checkpointing=True,
    )
    context = options.long_context
    batches = []
    for turn in range(1 + options.rounds):
        groups = [rewarded(random_group(policy, context, turn, key), turn) for key in range(2)]
        batches.append(learn(options, trainer, groups, context, turn, tokens=context))
    del batches[0]  # a warm-up
    columns = {key: [batch[key] for batch in batches] for key in batches[0]}
    report.raw[f"{options.long_model}, {context}"] = columns
    return learning_columns(options, columns, peaks)


def random_group(policy: Policy, context: int, turn: int, key: int) -> Group:
    """Two completions of a prompt, all of random tokens."""
    token_ids = random_tokens(policy, prompt_length(context), "prompt", turn, key)
    completions = []
    for index in range(2):
        length = completion_length(context)
        completion_ids = random_tokens(policy, length, "completion", turn, key, index)
        completions.append(
            Completion(
                token_ids=torch.tensor(completion_ids),
                # What a model with random weights gives, roughly.
                rollout_logp=torch.full((length,), -math.log(vocabulary_of(policy))),
                versions=torch.full((length,), policy.version),
                finished=False,
                text="",
            )
        )
    return Group(Prompt(key, (), None, tuple(token_ids)), tuple(completions), 0)


def random_tokens(policy: Policy, length: int, *address: int | str) -> list[int]:
    # Keyed, so that the work is the same on every GPU and in every version of PyTorch.
    random_numbers = uniforms(length, SEED, *address)
    return (random_numbers * vocabulary_of(policy)).astype("int64").tolist()


def vocabulary_of(policy: Policy) -> int:
    """Tokens to draw from: the tokenizer knows fewer tokens than some heads have rows."""
    return min(policy.model.head.weight.shape[0], 40_000)


def measure(
    options: argparse.Namespace, name: str, context: int, peaks: dict[str, float], report: Report
) -> dict[str, str]:
    """Measures a model at a context and returns its row of the table."""
    free_memory(options.device)  # that of the previous model
    policy = make_policy(name, options.device)
    trainer = Trainer(policy, resolve("grpo", {"beta": 0.0}), Optimization(lr=1e-6))
    rows_at_once = options.prompts * options.completions
    sampler = LocalSampler(copy_policy(policy), SEED, completion_length(context), rows_at_once)
    tokens = options.tokens or TOKENS.get(name, MOST_TOKENS)
    batches = [
        train_batch(options, trainer, sampler, context, turn, tokens)
        for turn in range(1 + options.rounds)
    ]
    del batches[0]  # a warm-up
    columns = {key: [batch[key] for batch in batches] for key in batches[0]}
    report.raw[f"{name}, {context}"] = columns
    row = {"sampling, tokens/s": format_rate(columns["sampling"])}
    if options.device.startswith("cuda"):
        row["memory of sampling"] = gigabytes(max(columns["memory of sampling"]))
    return row | learning_columns(options, columns, peaks)


def learning_columns(
    options: argparse.Namespace, columns: dict[str, list[float]], peaks: dict[str, float]
) -> dict[str, str]:
    """Speed of learning, its share of each peak, and its memory."""
    row = {"learning, tokens/s": format_rate(columns["learning"])}
    for label, peak in peaks.items():
        row[f"learning, share of {label}"] = f"{median(columns['flops']) / peak:.1%}"
    if options.device.startswith("cuda"):
        row["memory of learning"] = gigabytes(max(columns["memory of learning"]))
    return row


def format_rate(values: Sequence[float]) -> str:
    """The median of large numbers, with the smallest and the largest if there are several."""
    middle = f"{median(values):,.0f}"
    if len(values) == 1:
        return middle
    return f"{middle} ({min(values):,.0f} … {max(values):,.0f})"


def prompt_length(context: int) -> int:
    return context // 4


def completion_length(context: int) -> int:
    return context - prompt_length(context)


def train_batch(
    options: argparse.Namespace,
    trainer: Trainer,
    sampler: LocalSampler,
    context: int,
    turn: int,
    tokens: int,
) -> dict[str, float]:
    """Samples a batch and learns from it. Rewards are random, so that every group has a signal.

    Returns tokens and operations per second, and bytes of memory.
    """
    policy = trainer.policy
    requests = []
    for key in range(options.prompts):
        token_ids = random_tokens(policy, prompt_length(context), "prompt", turn, key)
        prompt = Prompt(key, (), None, tuple(token_ids))
        requests.append(Request(turn, 0, prompt))
    # The sampler has the weights of this version, as with v = 1, so that the ratio is near 1.
    sampler.sync_weights(policy.weights, policy.version)
    generated, sampling_seconds, sampling_memory = timed(
        options.device, lambda: list(sampler.sample(requests, options.completions))
    )
    groups = [rewarded(group, turn) for _, group in generated]
    sampled = sum(len(c.token_ids) for group in groups for c in group.completions)
    return {
        "sampling": sampled / sampling_seconds,
        "memory of sampling": sampling_memory,
        **learn(options, trainer, groups, context, turn, tokens),
    }


def learn(
    options: argparse.Namespace,
    trainer: Trainer,
    groups: Sequence[Group],
    context: int,
    turn: int,
    tokens: int,
) -> dict[str, float]:
    """Makes an update from groups, `tokens` in a micro-batch.

    Returns tokens and operations per second, and bytes of memory.
    """
    batch = assemble(groups, trainer.recipe, completion_length(context), SEED, turn)
    rows = trainer.pack(batch, tokens)
    _, learning_seconds, learning_memory = timed(
        options.device, lambda: trainer.step(rows, in_objective=batch.in_objective)
    )
    learned = sum(len(micro.packed.token_ids) for micro in rows)
    flops = sum(learning_flops(micro, trainer.policy) for micro in rows)
    return {
        "learning": learned / learning_seconds,
        "flops": flops / learning_seconds,
        "memory of learning": learning_memory,
    }


def timed(device: str, compute: Callable[[], Result]) -> tuple[Result, float, float]:
    """Result and seconds of a computation, and the most bytes allocated on a GPU (0 on a CPU)."""
    on_gpu = device.startswith("cuda")
    gc.collect()
    if on_gpu:
        torch.cuda.synchronize(device)
        # A call returns before its kernels have run, so the clock starts and stops after a wait.
        torch.cuda.reset_peak_memory_stats(device)
    started = time.perf_counter()
    result = compute()
    if on_gpu:
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - started
    memory = torch.cuda.max_memory_allocated(device) if on_gpu else 0
    return result, seconds, memory


def free_memory(device: str) -> None:
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()


def rewarded(group: Group, turn: int) -> Group:
    """The group with random rewards, which depend on the turn and the prompt."""
    rewards = uniforms(len(group.completions), SEED, "reward", turn, group.prompt.key)
    completions = tuple(
        dataclasses.replace(completion, outcome=Outcome.scored(float(reward)))
        for completion, reward in zip(group.completions, rewards, strict=True)
    )
    return dataclasses.replace(group, completions=completions)


def make_policy(name: str, device: str) -> Policy:
    """A model with random weights."""
    attention.register()
    torch.manual_seed(SEED)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            MODELS[name], dtype=torch.bfloat16, attn_implementation=attention.NAME
        )
    return Policy.from_model(model, make_tokenizer())


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of two tokens, which needs no file: random weights say nothing anyway."""
    tokenizer = Tokenizer(WordLevel({"<end>": 0, "<unknown>": 1}, unk_token="<unknown>"))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>", unk_token="<unknown>"
    )


def data_sheet_peak(name: str) -> float | None:
    """FLOP/s of bfloat16 products by a GPU's data sheet; None if DATA_SHEET lacks it."""
    for gpu, teraflops in DATA_SHEET.items():
        if gpu in name:
            return 1e12 * teraflops
    return None


def device_name(device: str) -> str:
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else "the CPU"


if __name__ == "__main__":
    main()
