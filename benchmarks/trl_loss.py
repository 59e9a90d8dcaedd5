"""TRL's loss and gradient on given rollouts. Runs in TRL's environment, started by tests/test_against_trl.py:

    python benchmarks/trl_loss.py REQUEST.json LOSS.json GRADIENT.safetensors

It is `GRPOTrainer.train` itself that makes one update: given token ids come in through its `rollout_func`, given
rewards through a reward function, and what its own pipeline does with them (advantages, micro-batches, normalizers,
`_compute_loss`, backward) is left alone. Two things are read out on the way: the loss of every micro-batch, and the
gradient just before the optimizer's step. One is put in: the log-probs of the policy that generated the samples
(`old_per_token_logps`), for which TRL has no way in other than vLLM.

The request: `model` (directory), `config` (arguments of GRPOConfig), and `groups`, each with `prompt` (token ids) and
`completions` [{`token_ids`, `logp_alpha`, `reward`}].
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from safetensors.torch import save_file
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class GivenRollouts(GRPOTrainer):
    """A GRPOTrainer whose rollouts are given, and which keeps the losses of its micro-batches."""

    def __init__(self, completions: list[dict[str, Any]], **arguments: Any) -> None:
        self.given, self.losses = completions, []
        super().__init__(**arguments)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        batch = super()._generate_and_score_completions(inputs)
        old = torch.zeros(batch["completion_ids"].shape)
        for row, completion in enumerate(self.given):
            old[row, : len(completion["token_ids"])] = torch.tensor(completion["logp_alpha"])
        return {**batch, "old_per_token_logps": old}

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        loss = super()._compute_loss(model, inputs)
        self.losses.append(loss.item())
        return loss


class KeepGradient(TrainerCallback):
    """The gradient of the whole update, as the optimizer is about to get it."""

    def __init__(self) -> None:
        self.gradient: dict[str, torch.Tensor] = {}

    def on_pre_optimizer_step(
        self, args: Any, state: Any, control: Any, model: Any = None, **_: Any
    ) -> None:
        self.gradient = {name: p.grad.detach().clone() for name, p in model.named_parameters()}


def given(request: dict[str, Any]) -> Iterator[tuple[list[int], dict[str, Any]]]:
    """(prompt token ids, completion) of every row of the batch."""
    for group in request["groups"]:
        for completion in group["completions"]:
            yield group["prompt"], completion


def compute(request: dict[str, Any], scratch: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses of the micro-batches of one update, whose sum is the loss of the update, and its gradient."""
    rows = list(given(request))
    keep = KeepGradient()

    def rollout(prompts: list[Any], trainer: GRPOTrainer) -> dict[str, Any]:
        ids = [completion["token_ids"] for _, completion in rows]
        return {
            "prompt_ids": [prompt for prompt, _ in rows],
            "completion_ids": ids,
            "logprobs": None,
        }

    def reward(completions: list[Any], **_: Any) -> list[float]:
        return [completion["reward"] for _, completion in rows]

    trainer = GivenRollouts(
        [completion for _, completion in rows],
        model=request["model"],
        reward_funcs=reward,
        args=GRPOConfig(str(scratch), **request["config"]),
        train_dataset=Dataset.from_list(
            [{"prompt": str(n)} for n in range(len(request["groups"]))]
        ),
        rollout_func=rollout,
        callbacks=[keep],
    )
    trainer.train()
    return trainer.losses, keep.gradient


def main() -> None:
    request, loss, gradient = map(Path, sys.argv[1:])
    losses, grads = compute(
        json.loads(request.read_text(encoding="utf-8")), loss.parent / "trainer"
    )
    loss.write_text(json.dumps({"losses": losses}), encoding="utf-8")
    save_file(grads, gradient)


if __name__ == "__main__":
    main()
