"""TRL's side of a comparison: `GRPOTrainer.train`, one update per request.

It runs in TRL's environment.

    python benchmarks/trl_peer.py REQUEST.json

The request: `model` (directory), `config` (arguments of GRPOConfig), `prompts`
(work.write_prompts), `reward` ("module:function", called with the text and the answer, as lagrpo
calls it).
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
import time
from pathlib import Path
from typing import TypedDict

import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from wire import Gate, Wire, imported


class Row(TypedDict):
    """A row of the dataset."""

    prompt: list[dict[str, str]]
    """The messages."""
    answer: object
    key: int


class Measured(GRPOTrainer):
    """A GRPOTrainer that records seconds and tokens of its rollouts."""

    measurements: dict[str, object]
    """Those of wire.Update that this class knows."""
    rewards: list[float]
    """The rewards of the current batch, which the reward function appends."""

    def _generate_and_score_completions(self, inputs: list[Row]) -> dict[str, object]:
        self.rewards = []
        started = time.perf_counter()
        batch = super()._generate_and_score_completions(inputs)
        tokens = int(batch["completion_mask"].sum())
        # [groups, G]. Equal rewards give advantages of 0.
        advantages = batch["advantages"].view(-1, self.num_generations)
        self.measurements = {
            "phases": {"sampling and rewards": time.perf_counter() - started},
            "prompts": sorted({row["key"] for row in inputs}),
            # TRL repeats a prompt for each of its completions; lagrpo counts it once.
            "prompt_tokens": int(batch["prompt_mask"].sum()) // self.num_generations,
            "completions": len(inputs),
            "sampled": tokens,
            "learned": tokens,
            "micro_batches": self.args.steps_per_generation,
            "flat": float((advantages == 0).all(1).float().mean()),
            "reward": sum(self.rewards) / len(self.rewards),
            "weights": str(next(self.model.parameters()).dtype),
        }
        return batch


class Stepping(TrainerCallback):
    """Makes one update per request, from the rollouts to the optimizer's step."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate
        self.trainer: Measured | None = None

    def on_train_begin(self, *_: object, **__: object) -> None:
        self.gate.wait()

    def on_step_end(self, *_: object, **__: object) -> None:
        assert self.trainer is not None
        self.gate.done(**self.trainer.measurements)
        self.gate.wait()


def main() -> None:
    wire = Wire()
    request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    lines = Path(request["prompts"]).read_text(encoding="utf-8").splitlines()
    prompts = [json.loads(line) for line in lines]
    rows: list[dict[str, object]] = [
        {"prompt": prompt["messages"], "answer": prompt["answer"], "key": prompt["key"]}
        for prompt in prompts
    ]
    judge = imported(request["reward"])

    def reward(
        completions: list[list[dict[str, str]]], answer: list[object], **_: object
    ) -> list[float]:
        pairs = zip(completions, answer, strict=True)
        # A completion is a list of messages: here one, of the assistant.
        rewards = [judge(completion[0]["content"], gold) for completion, gold in pairs]
        trainer.rewards += rewards
        return rewards

    stepping = Stepping(Gate(wire))
    trainer = Measured(
        model=request["model"],
        reward_funcs=reward,
        args=GRPOConfig(str(Path(sys.argv[1]).parent / "trainer"), **request["config"]),
        train_dataset=Dataset.from_list(rows),
        callbacks=[stepping],
    )
    stepping.trainer = trainer
    packages = ("trl", "torch", "transformers", "accelerate")
    versions = {name: importlib.metadata.version(name) for name in packages}
    # This tells the driver that the model is loaded.
    wire.reply(threads=torch.get_num_threads(), versions=versions)
    trainer.train()


if __name__ == "__main__":
    main()
