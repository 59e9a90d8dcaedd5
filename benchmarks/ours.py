"""Our side of a comparison: the real loop (`lagrpo.training.run`), one batch per request.

    python benchmarks/ours.py REQUEST.json

The request: `settings` of a run, `prompts` (work.write_prompts), `reward` ("module:function").
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import lagrpo  # noqa: F401 - before PyTorch, as on the command line: it says how threads wait

# isort: split
import torch
from wire import Gate, Wire, imported
from work import read_prompts

from lagrpo.model.model import Policy
from lagrpo.settings.load import load_settings
from lagrpo.tasks import RowTask, order_prompts
from lagrpo.training.batch import MicroBatch, has_zero_variance
from lagrpo.training.build import TrainerComponents
from lagrpo.training.checks import check_settings
from lagrpo.training.lifecycle import Training
from lagrpo.training.step import Step


class Stepped(Training):
    """Waits for a request before each batch, which goes from the weight sync to the line in its metrics."""

    def __init__(self, components: TrainerComponents, gate: Gate) -> None:
        super().__init__(components)
        self.gate = gate

    def begin(self) -> None:
        super().begin()
        self.gate.wait()

    def record(self, step: Step) -> None:
        super().record(step)
        self.gate.done(**measurements(step, self.policy))
        self.gate.wait()


def measurements(used: Step, policy: Policy) -> dict[str, Any]:
    """What a batch cost and what was done in it."""
    groups = used.batch.groups
    return {
        "phases": dict(used.clock.seconds),
        "prompts": sorted(group.prompt.key for group in groups),
        "prompt_tokens": sum(len(group.prompt.token_ids) for group in groups),
        "completions": sum(len(group.completions) for group in groups),
        "sampled": sum(c.length for group in groups for c in group.completions),
        "learned": sum(len(micro.packed.token_ids) for micro in used.rows),
        "micro_batches": len(used.rows),
        "threads": torch.get_num_threads(),
        "flat": sum(map(has_zero_variance, groups)) / len(groups),
        "reward": fmean(
            c.reward for group in groups for c in group.completions if c.reward is not None
        ),
        "flops": sum(learning_flops(micro, policy) for micro in used.rows),
    }


def learning_flops(micro: MicroBatch, policy: Policy) -> float:
    """Floating-point operations of a forward and a backward pass over a micro-batch that nobody can do without: 6 for
    each weight of a linear layer and row of it (the head: for completion tokens only), and in the attention 12 for each
    pair of a token and one that it sees, layer and channel. What is computed twice to save memory counts once."""
    decoder = sum(
        m.weight.numel() for m in policy.model.decoder.modules() if isinstance(m, torch.nn.Linear)
    )
    text = policy.model.config.get_text_config()
    channels = text.num_attention_heads * (
        getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    )
    rows, tokens = micro.packed.layout.rows, len(micro.packed.token_ids)
    seen = int((micro.packed.layout.position_ids + 1).sum())
    return (
        6.0 * (decoder * rows + policy.model.head.weight.numel() * tokens)
        + 12.0 * text.num_hidden_layers * channels * seen
    )


def matrix_product(
    size: int, repetitions: int, device: str = "cpu", dtype: str = "bfloat16"
) -> dict[str, list[float]]:
    """Operations per second of products of square matrices, one value for each repetition."""
    a, b = (torch.randn(size, size, device=device).to(getattr(torch, dtype)) for _ in range(2))
    wait = torch.cuda.synchronize if device.startswith("cuda") else lambda: None
    torch.mm(a, b)
    rates = []
    for _ in range(repetitions):
        wait()
        started = time.perf_counter()
        torch.mm(a, b)
        wait()
        rates.append(2 * size**3 / (time.perf_counter() - started))
    return {"rates": rates}


def task(request: dict[str, Any], seed: int) -> RowTask:
    """The prompts in such an order that a run of this seed visits them in that of the file."""
    visited = read_prompts(Path(request["prompts"]))
    rows: list[Any] = [None] * len(visited)
    for place, index in enumerate(order_prompts(seed, 0, len(visited))):
        rows[index] = visited[place]
    ask = lambda row: (row["messages"], row["answer"])  # noqa: E731
    return RowTask("benchmark", {"train": rows, "test": []}, ask, imported(request["reward"]))


def main() -> None:
    wire = Wire()
    request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    settings = load_settings(request["settings"])
    own = task(request, settings.run.seed)
    parts = TrainerComponents.build(settings, check_settings(settings, own), own)
    run = Stepped(parts, Gate(wire, {"matrix_product": matrix_product}))
    wire.reply(threads=torch.get_num_threads())
    run.run()


if __name__ == "__main__":
    main()
