"""lagrpo's side of a comparison: its training loop, one batch per request.

    python benchmarks/ours.py REQUEST.json

The request: `settings` of a run, `prompts` (work.write_prompts), `reward` ("module:function").
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from statistics import fmean

import lagrpo  # noqa: F401 - before PyTorch, as on the command line: it says how threads wait

# isort: split
import torch
from wire import Gate, Wire, imported
from work import PromptRow, read_prompts

from lagrpo.lifecycle.start_to_end import Training
from lagrpo.model.model import Policy
from lagrpo.settings.load import load_settings
from lagrpo.startup.build import BuiltRun, build_run
from lagrpo.startup.checks import check_settings
from lagrpo.tasks import RowTask, order_prompts
from lagrpo.training.batch import MicroBatch, has_zero_variance
from lagrpo.training.step import Step
from lagrpo.types import JsonObject


class Stepped(Training):
    """Waits for a request before each batch, from its weight sync to its line of metrics."""

    def __init__(self, built: BuiltRun, gate: Gate) -> None:
        super().__init__(built)
        self.gate = gate

    def begin(self) -> None:
        super().begin()
        self.gate.wait()

    def record(self, step: Step) -> None:
        super().record(step)
        self.gate.done(**measurements(step, self.policy))
        self.gate.wait()


def measurements(step: Step, policy: Policy) -> JsonObject:
    """The measurements of a batch: wire.Update without its times from outside."""
    groups = step.batch.groups
    completions = [completion for group in groups for completion in group.completions]
    rewards = [completion.reward for completion in completions if completion.reward is not None]
    zero_variance_groups = sum(has_zero_variance(group) for group in groups)
    return {
        "phases": dict(step.times.seconds),
        "prompts": sorted(group.prompt.key for group in groups),
        "prompt_tokens": sum(len(group.prompt.token_ids) for group in groups),
        "completions": len(completions),
        "sampled": sum(completion.length for completion in completions),
        "learned": sum(len(micro.packed.token_ids) for micro in step.rows),
        "micro_batches": len(step.rows),
        "threads": torch.get_num_threads(),
        "flat": zero_variance_groups / len(groups),
        "reward": fmean(rewards),
        "flops": sum(learning_flops(micro, policy) for micro in step.rows),
    }


def learning_flops(micro: MicroBatch, policy: Policy) -> float:
    """Floating-point operations that a forward and a backward pass over a micro-batch need.

    These are 6 per weight and row of each linear layer (the head: rows of completion tokens only),
    and in the attention 12 per layer, channel, and pair of a token and one that it attends to:
    forward 2 per multiplication and addition, backward twice as many. Operations that are computed
    twice to save memory count once.
    """
    linear_layers = [m for m in policy.model.decoder.modules() if isinstance(m, torch.nn.Linear)]
    decoder_weights = sum(layer.weight.numel() for layer in linear_layers)
    head_weights = policy.model.head.weight.numel()

    text = policy.model.config.get_text_config()
    # Some configurations give the size of a head, others leave it to the quotient.
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    channels = text.num_attention_heads * head_dim

    layout = micro.packed.layout
    completion_tokens = len(micro.packed.token_ids)
    # A token attends to itself and to all before it, so to one more than its position.
    attended_pairs = int((layout.position_ids + 1).sum())
    return (
        6.0 * (decoder_weights * layout.rows + head_weights * completion_tokens)
        + 12.0 * text.num_hidden_layers * channels * attended_pairs
    )


def matrix_product(
    size: int, repetitions: int, device: str = "cpu", dtype: str = "bfloat16"
) -> dict[str, list[float]]:
    """Operations per second of products of square matrices, one value for each repetition."""
    a = torch.randn(size, size, device=device).to(getattr(torch, dtype))
    b = torch.randn(size, size, device=device).to(getattr(torch, dtype))
    wait = torch.cuda.synchronize if device.startswith("cuda") else lambda: None
    torch.mm(a, b)  # the first product also chooses kernels and allocates
    rates = []
    for _ in range(repetitions):
        wait()
        started = time.perf_counter()
        torch.mm(a, b)
        wait()
        # A multiplication and an addition for each of size^3 pairs of numbers.
        rates.append(2 * size**3 / (time.perf_counter() - started))
    return {"rates": rates}


def task(request: JsonObject, seed: int) -> RowTask:
    """A task whose prompts a run of this seed visits in the order of the file."""
    visited = read_prompts(Path(request["prompts"]))
    # The order is a permutation, so every row gets replaced.
    rows = list(visited)
    for position, index in enumerate(order_prompts(seed, 0, len(visited))):
        rows[index] = visited[position]

    def ask(row: PromptRow) -> tuple[list[dict[str, str]], object]:
        return row["messages"], row["answer"]

    return RowTask("benchmark", {"train": rows, "test": []}, ask, imported(request["reward"]))


def main() -> None:
    wire = Wire()
    request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    settings = load_settings(request["settings"])
    prompts_task = task(request, settings.run.seed)
    checked = check_settings(settings, prompts_task)
    built = build_run(settings, checked, prompts_task)
    training = Stepped(built, Gate(wire, {"matrix_product": matrix_product}))
    # This tells the driver that the model is loaded.
    computation = training.policy.model.computation
    wire.reply(threads=torch.get_num_threads(), computation=computation)
    training.run()


if __name__ == "__main__":
    main()
