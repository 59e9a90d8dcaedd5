"""TRL's loss and gradient on given rollouts.

It runs in TRL's environment, started by tests/test_against_trl.py:

    python benchmarks/trl_loss.py REQUEST.json LOSS.json GRADIENT.safetensors

`GRPOTrainer.train` itself makes one update. It gets the token ids through its `rollout_func` and
the rewards through a reward function; its own pipeline (advantages, micro-batches, normalizers,
`_compute_loss`, backward) is unchanged. The program reads the loss of every micro-batch, and the
gradient just before the optimizer's step. It sets one value itself, because TRL takes it only from
vLLM: the log-probs of the policy that generated the samples (`old_per_token_logps`).

The request: `model` (directory), `config` (arguments of GRPOConfig), and `groups`, each with
`prompt` (token ids) and `completions` [{`token_ids`, `rollout_logp`, `reward`}].
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypedDict

import torch
from datasets import Dataset
from safetensors.torch import save_file
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class CompletionRow(TypedDict):
    """A completion of a request, with the log-probs of the policy that generated it."""

    token_ids: list[int]
    rollout_logp: list[float]
    reward: float


class GroupRow(TypedDict):
    """A prompt's token ids and its completions."""

    prompt: list[int]
    completions: list[CompletionRow]


class Request(TypedDict):
    """The content of REQUEST.json."""

    model: str
    config: dict[str, object]
    groups: list[GroupRow]


class GivenRollouts(GRPOTrainer):
    """A GRPOTrainer with the rollouts of a request, which keeps the losses of its micro-batches."""

    def __init__(self, completions: list[CompletionRow], **arguments: object) -> None:
        self.completions = completions
        self.losses: list[float] = []
        super().__init__(**arguments)

    def _generate_and_score_completions(self, inputs: list[dict[str, object]]) -> dict[str, object]:
        batch = super()._generate_and_score_completions(inputs)
        old_logps = torch.zeros(batch["completion_ids"].shape)  # [completions, longest]
        for row, completion in enumerate(self.completions):
            length = len(completion["token_ids"])
            # TRL pads completions on the right. What stands at padding does not count.
            old_logps[row, :length] = torch.tensor(completion["rollout_logp"])
        return {**batch, "old_per_token_logps": old_logps}

    def _compute_loss(self, model: torch.nn.Module, inputs: dict[str, object]) -> torch.Tensor:
        loss = super()._compute_loss(model, inputs)
        self.losses.append(loss.item())
        return loss


class KeepGradient(TrainerCallback):
    """Keeps the gradient of the whole update, just before the optimizer's step."""

    def __init__(self) -> None:
        self.gradient: dict[str, torch.Tensor] = {}

    def on_pre_optimizer_step(
        self, args: object, state: object, control: object, model: Any = None, **_: object
    ) -> None:
        self.gradient = {name: p.grad.detach().clone() for name, p in model.named_parameters()}


def rows_of(request: Request) -> Iterator[tuple[list[int], CompletionRow]]:
    """(prompt token ids, completion) of every row of the batch."""
    for group in request["groups"]:
        for completion in group["completions"]:
            yield group["prompt"], completion


def compute(request: Request, scratch: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Makes one update. Returns the losses of its micro-batches and its gradient.

    The sum of the losses is the loss of the update.
    """
    rows = list(rows_of(request))
    keep_gradient = KeepGradient()

    def rollout(prompts: list[str], trainer: GRPOTrainer) -> dict[str, object]:
        return {
            "prompt_ids": [prompt for prompt, _ in rows],
            "completion_ids": [completion["token_ids"] for _, completion in rows],
            "logprobs": None,
        }

    def reward(completions: list[str], **_: object) -> list[float]:
        return [completion["reward"] for _, completion in rows]

    trainer = GivenRollouts(
        [completion for _, completion in rows],
        model=request["model"],
        reward_funcs=reward,
        args=GRPOConfig(str(scratch), **request["config"]),
        # `rollout` ignores the text of a prompt, but the dataset needs one row per group.
        train_dataset=Dataset.from_list(
            [{"prompt": str(number)} for number in range(len(request["groups"]))]
        ),
        rollout_func=rollout,
        callbacks=[keep_gradient],
    )
    trainer.train()
    return trainer.losses, keep_gradient.gradient


def main() -> None:
    request_path, loss_path, gradient_path = map(Path, sys.argv[1:])
    request = json.loads(request_path.read_text(encoding="utf-8"))
    losses, gradient = compute(request, loss_path.parent / "trainer")
    loss_path.write_text(json.dumps({"losses": losses}), encoding="utf-8")
    save_file(gradient, gradient_path)


if __name__ == "__main__":
    main()
