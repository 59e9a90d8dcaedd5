"""Starting points: models that imitate a task's teacher.

    python -m experiments.lag.starts chain gamble    # makes them anew and prints how good they are

`load_start` makes one where it is missing, in a minute or less, and keeps it in runs/lag/starts.
Those of the second instances are shipped.
The same machine makes the same weights; another one may round differently.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from .model import Architecture, StackedLlama, initial_weights, unpack
from .tasks import TASKS, Chain, Gamble, Task

DIRECTORY = Path("runs") / "lag" / "starts"
UPDATES = 2000
PROMPTS = 64
LEARNING_RATE = 3e-3
# Several right answers per digit take longer to learn.
MORE_UPDATES = {"chain-many": 4000, "chain-wide": 4000}
LARGE_MODELS = ("chain-large", "gamble-large")
"""Tasks whose policy has 8 times as many parameters."""
SEED = 0
SHIPPED = Path(__file__).parent / "shipped"
"""Starts in the checkout, so that all seeds have the same one on every processor."""
OTHER_STARTS = ("chain-other", "gamble-other")
"""Tasks whose start has another seed."""
GOOD_TEACHERS: dict[str, Callable[[], Task]] = {
    "chain": lambda: Chain(teacher_is_right=(0.99, 0.99, 0.99)),
    "gamble": lambda: Gamble(teacher_likes=(1.0, 0.02, 0.02)),
}
"""The main tasks with a teacher who rarely errs."""


def architecture_of(name: str) -> Architecture:
    """The architecture of the policy of a task."""
    vocabulary = TASKS[name]().vocabulary
    if name in LARGE_MODELS:
        return Architecture(vocabulary, width=64, inner=256, layers=2, heads=4)
    return Architecture(vocabulary)


def load_start(name: str, directory: Path = DIRECTORY) -> tuple[Architecture, Tensor]:
    """The architecture and the weights [1, parameters] of a task's starting point."""
    architecture = architecture_of(name)
    file = directory / f"{name}.safetensors"
    shipped_file = SHIPPED / file.name
    if shipped_file.is_file():
        file = shipped_file
    elif not file.is_file():
        updates = MORE_UPDATES.get(name, UPDATES)
        seed = SEED + 1 if name in OTHER_STARTS else SEED
        _write(file, imitate_teacher(TASKS[name](), architecture, updates, seed))
    return architecture, load_file(file)["weights"]


def load_teacher(name: str, directory: Path = DIRECTORY) -> tuple[Architecture, Tensor]:
    """The architecture and the weights [1, parameters] of the teacher of a main task.

    It has the larger architecture, and imitates a teacher who rarely errs.
    """
    architecture = architecture_of(f"{name}-large")
    file = directory / f"{name}-teacher.safetensors"
    if not file.is_file():
        _write(file, imitate_teacher(GOOD_TEACHERS[name](), architecture, UPDATES))
    return architecture, load_file(file)["weights"]


def _write(file: Path, weights: Tensor) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file({"weights": weights}, file)


def imitate_teacher(
    task: Task, architecture: Architecture, updates: int, seed: int = SEED
) -> Tensor:
    """The weights [1, parameters] of a model that has learned to write as the teacher does."""
    random = np.random.default_rng(seed)
    model = StackedLlama(architecture, task.prompt_length, task.completion_length)
    flat = initial_weights(architecture, seed).requires_grad_()
    optimizer = torch.optim.AdamW([flat], betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, LEARNING_RATE, total_steps=updates, pct_start=0.05
    )
    for _ in range(updates):
        prompts = task.prompts(random, PROMPTS)
        completions = task.teach(random, prompts)
        is_token = completions != task.padding
        logp = model.log_probs(
            unpack(architecture, flat), prompts[None], completions[None, :, None]
        )
        loss = -(logp[0, :, 0] * is_token).sum() / is_token.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return flat.detach()


@dataclass(frozen=True, slots=True)
class StartMeasures:
    """Means over completions of a starting point."""

    score: float
    mistakes: float
    """steps that lower the score"""
    entropy: float
    """nats"""


def mean_score(task: Task, architecture: Architecture, flat: Tensor, prompts: int = 512) -> float:
    """The mean score of 8 completions of each of some random prompts."""
    return measure(task, architecture, flat, prompts).score


def measure(
    task: Task, architecture: Architecture, flat: Tensor, prompts: int = 512
) -> StartMeasures:
    """Measures 8 completions of each of some random prompts."""
    # Not the prompts that the imitation was trained on.
    random = np.random.default_rng(SEED + 1)
    questions = task.prompts(random, prompts)[None]
    uniform = random.random((1, prompts, 8, task.completion_length), dtype=np.float32)
    model = StackedLlama(architecture, task.prompt_length, task.completion_length)
    weights = unpack(architecture, flat)
    samples = model.sample([weights], questions, torch.from_numpy(uniform), task.end, task.padding)
    _, scores = task.grade(questions, samples.tokens, torch.ones(1, prompts, 8))
    return StartMeasures(
        score=float(scores.mean()),
        mistakes=float(task.mistakes(questions, samples.tokens).float().mean()),
        entropy=float(samples.entropy.sum(dim=-1).mean()),
    )


def main(names: Sequence[str]) -> None:
    torch.set_num_threads(1)
    for name in names or TASKS:
        # Else load_start would return the file that is there.
        (DIRECTORY / f"{name}.safetensors").unlink(missing_ok=True)
        began = time.perf_counter()
        architecture, flat = load_start(name)
        seconds = time.perf_counter() - began
        start = measure(TASKS[name](), architecture, flat)
        print(
            f"{name:14} {architecture.parameters} parameters, {seconds:.0f} s. A completion: "
            f"score {start.score:.3f}, {start.mistakes:.1f} mistakes, {start.entropy:.1f} nats"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
