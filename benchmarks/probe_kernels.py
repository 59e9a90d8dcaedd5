"""Probes of lagrpo's own code on one GPU: Triton kernels, decoding, exact products.

python benchmarks/probe_kernels.py STAGE …
python benchmarks/probe_kernels.py --quick STAGE …     # tiny sizes, also on a CPU

    kernels       time and bandwidth of each Triton kernel, beside PyTorch's operations
    decode        tokens/s of the sampler by the number of rows, up to 1,280
    learn-torch   an update of 1.5b without the Triton kernels: what these gain
    agree         log-probs of the trainer that differ from the sampler's
    joined        the products of a layer one by one, and with those of one input joined

A stage prints its results and adds them to gpu-probes.json in the directory of results.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import probe_gpu
import torch
import torch.nn.functional as F
from bench_gpu import free_memory, make_policy
from probe_gpu import (
    DEVICE,
    ON_GPU,
    Answers,
    Stage,
    peak_memory,
    profile_update,
    run_stages,
    seconds_of,
    synchronize,
)
from torch import Tensor, nn
from work import SEED

from lagrpo.cpu.autograd import Linears
from lagrpo.cpu.panels import joined as groups_of_layer
from lagrpo.gpu import exactness
from lagrpo.model.backend import choose_backend
from lagrpo.model.layout import PackedLayout
from lagrpo.model.model import Model, Packed, Policy, copy_policy
from lagrpo.rollout.local import LocalSampler
from lagrpo.types import Group, JsonObject, Prompt, Request


def main() -> None:
    run_stages(__doc__, STAGES)


# Kernels


def kernels(options: argparse.Namespace) -> Answers:
    """Times kernels at the sizes of 1.5b with 24,576 rows, the softmax with 4,096.

    `TB_s` counts what has to be read and written once. The copy of stage `peak` is the most that it
    can be.
    """
    if not ON_GPU and not options.quick:
        print("kernels: Triton compiles for a GPU")
        return
    torch.manual_seed(SEED)
    yield from softmax_kernels(quick=options.quick)
    yield from layer_kernels(quick=options.quick)
    yield from key_kernel(quick=options.quick)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE).bfloat16()


def softmax_kernels(*, quick: bool) -> Answers:
    # Not at the top: CPU builds of PyTorch come without Triton.
    from lagrpo.gpu import softmax

    rows, vocabulary = (6, 5000) if quick else (4096, 151_936)
    logits = normal(rows, vocabulary)
    tokens = torch.randint(vocabulary, (rows,), device=DEVICE)
    entropy = torch.empty(rows, device=DEVICE)
    grad = torch.randn(rows, device=DEVICE)
    grad_entropy = torch.randn(rows, device=DEVICE)
    _, log_sum_exp = softmax.token_logp(logits, tokens, 1.0)
    # float32 copies of all rows would take too much memory.
    eighth = logits[: max(1, rows // 8)]
    values = timing(
        logits.nbytes,
        lambda: softmax.token_logp(logits, tokens, 1.0, entropy),
        lambda: torch.log_softmax(eighth.float(), -1),
    )
    yield "kernel token_logp; by PyTorch an eighth of it", values

    few = logits[:128]
    uniform = torch.rand(len(few), dtype=torch.float64, device=DEVICE)
    values = timing(few.nbytes, lambda: softmax.sample_tokens(few, 1.0, uniform))
    yield "kernel sample_tokens, 128 rows", values

    # Last, because they overwrite the logits.
    values = timing(
        2 * logits.nbytes,
        lambda: softmax.token_logp_backward(logits, tokens, 1.0, log_sum_exp, grad),
    )
    yield "kernel token_logp_backward", values
    values = timing(
        2 * logits.nbytes,
        lambda: softmax.token_logp_backward(
            logits, tokens, 1.0, log_sum_exp, grad, entropy, grad_entropy
        ),
    )
    yield "kernel token_logp_backward, with the entropy", values


def layer_kernels(*, quick: bool) -> Answers:
    from lagrpo.gpu import layers

    rows, width, inner, heads, d = (20, 96, 40, 3, 64) if quick else (24_576, 1536, 8960, 12, 128)
    x, delta, grad_y = normal(rows, width), normal(rows, width), normal(rows, width)
    weight = 1 + 0.1 * normal(width)
    total, _, rstd = layers.norm(x, delta, weight, 1e-6)

    def norm_of_transformers() -> Tensor:
        h = (x + delta).float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
        return weight * h.to(x.dtype)

    # Reads x and delta, writes their sum and its norm; backward reads three and writes one.
    values = timing(4 * x.nbytes, lambda: layers.norm(x, delta, weight, 1e-6), norm_of_transformers)
    yield "kernel norm", values
    values = timing(4 * x.nbytes, lambda: layers.norm_backward(total, weight, rstd, grad_y, delta))
    yield "kernel norm_backward", values

    gate, up, grad_gated = normal(rows, inner), normal(rows, inner), normal(rows, inner)
    # Reads gate and up, writes their product; backward reads three and writes three.
    values = timing(3 * gate.nbytes, lambda: layers.swiglu(gate, up), lambda: F.silu(gate) * up)
    yield "kernel swiglu", values
    values = timing(6 * gate.nbytes, lambda: layers.swiglu_backward(gate, up, grad_gated))
    yield "kernel swiglu_backward", values

    query, cosine, sine = normal(rows, heads, d), normal(rows, d), normal(rows, d)
    yield "kernel rotary", timing(2 * query.nbytes, lambda: layers.rotary(query, cosine, sine))

    # So small that the time between two calls is the host's: no call waits for the GPU.
    one = normal(1, 64)
    launches = 1000 if ON_GPU else 1
    synchronize()
    started = time.perf_counter()
    for _ in range(launches):
        layers.swiglu(one, one)
    host_seconds = (time.perf_counter() - started) / launches
    synchronize()
    yield "kernel launch", {"host_us": 1e6 * host_seconds}


def key_kernel(*, quick: bool) -> Answers:
    from lagrpo.gpu import keys

    # Four prompts with sixteen completions: about as many rows as the layers above.
    prompt, completion = (3, 2) if quick else (300, 357)
    layout = PackedLayout.build([(prompt, [completion] * 16)] * 4, DEVICE)
    grad = normal(len(layout.seen_rows), 2, 128)
    values = timing(grad.nbytes, lambda: keys.gather_keys_backward(grad, *layout.seen_by))
    yield "kernel gather_keys_backward", values


def timing(
    num_bytes: int, compute: Callable[[], object], by_pytorch: Callable[[], object] | None = None
) -> dict[str, float]:
    repetitions = 20 if ON_GPU else 1
    seconds = seconds_of(compute, repetitions)
    values = {"us": 1e6 * seconds, "TB_s": num_bytes / seconds / 1e12}
    if by_pytorch is not None:
        values["us_by_pytorch"] = 1e6 * seconds_of(by_pytorch, repetitions)
    return values


# Decoding


def decode(options: argparse.Namespace) -> Answers:
    sizes = [("135m", 128), ("1.5b", 128), ("1.5b", 512), ("135m", 1280), ("1.5b", 1280)]
    tokens, prompt_length, completions = 192, 128, 16
    if options.quick:
        sizes, tokens, prompt_length, completions = [("tiny", 8)], 24, 8, 4
    for name, rows in sizes:
        free_memory(DEVICE)
        if ON_GPU:
            torch.cuda.reset_peak_memory_stats()
        sampler = LocalSampler(copy_policy(make_policy(name, DEVICE)), SEED, tokens, rows)
        requests = same_prompts(rows // completions, prompt_length)
        seconds: list[float] = []
        groups: list[Group] = []
        # In the first batch Triton compiles and graphs are recorded.
        for _ in range(3):
            started = time.perf_counter()
            groups = [group for _, group in sampler.sample(requests, completions)]
            synchronize()
            seconds.append(time.perf_counter() - started)
        num_tokens = sum(c.length for group in groups for c in group.completions)
        best = min(seconds[1:])
        yield (
            f"decode {name}, {rows} rows",
            {
                "tokens_s": num_tokens / best,
                "ms_a_step": 1e3 * best / tokens,
                "seconds_of_batches": seconds,
                "memory_GB": peak_memory(),
            },
        )
        del sampler


def same_prompts(count: int, length: int) -> list[Request]:
    token_ids = tuple(range(100, 100 + length))
    return [Request(0, 0, Prompt(key, (), None, token_ids)) for key in range(count)]


# An update without our kernels


def learn_torch(options: argparse.Namespace) -> Answers:
    name = "tiny" if options.quick else "1.5b"
    with pytorch_alone():
        values = profile_update(name, 8192, quick=options.quick)
    yield f"learn {name}, without Triton kernels", values


@contextmanager
def pytorch_alone() -> Iterator[None]:
    """Lets updates compute by PyTorch's operations."""

    def policy_by_pytorch(name: str, device: str) -> Policy:
        policy = make_policy(name, device)
        backend = choose_backend("torch", policy.device, policy.dtype)
        return replace(policy, model=Model(policy.model.lm, backend))

    probe_gpu.make_policy = policy_by_pytorch
    try:
        yield
    finally:
        probe_gpu.make_policy = make_policy


# Sampler and trainer


def agree(options: argparse.Namespace) -> Answers:
    """Samples, and computes the log-probs of the same tokens as the trainer does.

    If none differ, the importance ratio after a weight sync is exactly 1.
    """
    for name in ["tiny"] if options.quick else ["135m", "1.5b"]:
        free_memory(DEVICE)
        rows, tokens, completions = (8, 24, 4) if options.quick else (128, 192, 16)
        policy = make_policy(name, DEVICE)
        sampler = LocalSampler(copy_policy(policy), SEED, tokens, rows)
        requests = same_prompts(rows // completions, 128 if not options.quick else 8)
        groups = [group for _, group in sampler.sample(requests, completions)]
        difference = difference_of_log_probs(policy, groups)
        yield (
            f"agree {name}",
            {
                "is_exact": policy.model.exact,
                "tokens": len(difference),
                "tokens_that_differ": int((difference != 0).sum()),
                "largest_difference": float(difference.max()),
            },
        )
        del sampler, policy


def difference_of_log_probs(policy: Policy, groups: list[Group]) -> Tensor:
    """Returns |trainer's log-prob - sampler's| of each token: float32 [T], nats."""
    packed = Packed.build(
        [(g.prompt.token_ids, [c.token_ids for c in g.completions]) for g in groups],
        policy.device,
    )
    sampled = torch.cat([c.rollout_logp for g in groups for c in g.completions])
    with torch.no_grad():
        return (policy.logp(packed).cpu() - sampled).abs()


# Joined products


def joined(options: argparse.Namespace) -> Answers:
    """Times the products of a layer, forward and backward, one by one and joined.

    Query, key and value have the same input, as have gate and up: each group could be one product
    with weights that lie behind one another. In small models the host launches products more slowly
    than the GPU computes them, so fewer of them may be faster.
    """
    for name in ["tiny"] if options.quick else ["135m", "1.5b"]:
        free_memory(DEVICE)
        policy = make_policy(name, DEVICE)
        layer = policy.model.decoder.layers[0]  # type: ignore[index]
        groups = groups_of_layer(layer)
        wide_layers = [[as_one_linear(group)] for group in groups]
        for label, parts in ("one by one", groups), ("joined", wide_layers):
            linears = [Linears(part, None) for part in parts]
            joined_layers = [
                len(group) // len(part) for group, part in zip(groups, parts, strict=True)
            ]
            values: JsonObject = {
                "products_forward": sum(map(len, parts)),
                "rows_are_independent": exact_rows(parts),
            }
            for rows in (16, 32) if options.quick else (256, 4096, 16_384):
                inputs = [normal(rows, part[0].in_features) for part in parts]
                seconds = seconds_of_products(linears, inputs, joined_layers)
                values[f"us_{rows}_rows"] = 1e6 * seconds
            if ON_GPU:
                inputs = [normal(128, part[0].in_features) for part in parts]
                values["us_decoding_128_rows"] = 1e6 * seconds_in_graph(linears, inputs)
            yield f"products of a layer of {name}, {label}", values
        del policy


def as_one_linear(layers: Sequence[nn.Linear]) -> nn.Linear:
    """A linear layer whose outputs are those of all layers, one after the other."""
    weight = torch.cat([layer.weight for layer in layers]).detach()
    outputs, inputs = weight.shape
    has_bias = layers[0].bias is not None
    one = nn.Linear(inputs, outputs, bias=has_bias, device=weight.device, dtype=weight.dtype)
    one.weight = nn.Parameter(weight)
    if has_bias:
        one.bias = nn.Parameter(torch.cat([layer.bias for layer in layers]).detach())
    return one


def exact_rows(parts: Sequence[Sequence[nn.Linear]]) -> bool | None:
    """True if no row's bits depend on other rows; None on a CPU, where nobody asks."""
    if not ON_GPU:
        return None
    modules = nn.ModuleList(layer for part in parts for layer in part)
    return exactness.rows_are_independent(modules, torch.device(DEVICE))


def seconds_of_products(
    linears: Sequence[Linears], inputs: Sequence[Tensor], joined_layers: Sequence[int]
) -> float:
    """Seconds of all products of a layer, forward and backward.

    `joined_layers` is how many layers each linear layer was made of: in training the gradients of
    its outputs come in as many parts, which are put together first.
    """

    def forward_and_backward() -> None:
        for linear, x, num_parts in zip(linears, inputs, joined_layers, strict=True):
            parameters = linear.parameters
            needs_grad = [parameter is not None for parameter in parameters]
            # Any numbers of the right shape serve as the gradients of the outputs.
            grads = linear.forward(x)
            if num_parts > 1:
                grads = [torch.cat(grad.chunk(num_parts, dim=1), dim=1) for grad in grads]
            linear.grad_parameters(x, grads, parameters, needs_grad)
            linear.grad_input(grads, parameters)

    with torch.no_grad():
        return seconds_of(forward_and_backward, repetitions=50 if ON_GPU else 1)


def seconds_in_graph(linears: Sequence[Linears], inputs: Sequence[Tensor]) -> float:
    """Seconds of all forward products of a layer in a recorded graph, as decoding runs them."""

    def forward() -> None:
        for linear, x in zip(linears, inputs, strict=True):
            linear.forward(x)

    with torch.no_grad():
        forward()
        synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            forward()
        return seconds_of(graph.replay, repetitions=100)


STAGES: dict[str, Stage] = {
    "kernels": kernels,
    "decode": decode,
    "learn-torch": learn_torch,
    "agree": agree,
    "joined": joined,
}


if __name__ == "__main__":
    main()
