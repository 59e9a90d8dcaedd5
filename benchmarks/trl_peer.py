"""TRL's side of a comparison: `GRPOTrainer.train`, one update per request. Runs in TRL's environment.

    python benchmarks/trl_peer.py REQUEST.json

The request: `model` (directory), `config` (arguments of GRPOConfig), `prompts` (work.write_prompts), `reward`
("module:function", called as ours is, with the text and the answer).
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from wire import Gate, Wire, imported


class Measured(GRPOTrainer):
    """A GRPOTrainer that notes what its rollouts cost and how many tokens they have."""

    measurements: dict[str, Any]
    rewards: list[float]  # of the batch under way

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        started, self.rewards = time.perf_counter(), []
        batch = super()._generate_and_score_completions(inputs)
        tokens = int(batch["completion_mask"].sum())
        groups = batch["advantages"].view(-1, self.num_generations)
        self.measurements = {
            "phases": {"sampling and rewards": time.perf_counter() - started},
            "prompts": sorted({row["key"] for row in inputs}),
            "prompt_tokens": int(batch["prompt_mask"].sum()) // self.num_generations,
            "completions": len(inputs),
            "sampled": tokens,
            "learned": tokens,
            "micro_batches": self.args.steps_per_generation,
            "flat": float((groups == 0).all(1).float().mean()),
            "reward": sum(self.rewards) / len(self.rewards),
            "weights": str(next(self.model.parameters()).dtype),
        }
        return batch


class Stepping(TrainerCallback):
    """One update per request, from the rollouts to the optimizer's step."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate
        self.trainer: Measured | None = None

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.gate.wait()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        assert self.trainer is not None
        self.gate.done(**self.trainer.measurements)
        self.gate.wait()


def main() -> None:
    wire = Wire()
    request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    lines = Path(request["prompts"]).read_text(encoding="utf-8").splitlines()
    rows = [
        {"prompt": row["messages"], "answer": row["answer"], "key": row["key"]}
        for row in map(json.loads, lines)
    ]
    judge = imported(request["reward"])

    def reward(completions: list[Any], answer: list[Any], **_: Any) -> list[float]:
        pairs = zip(completions, answer, strict=True)
        rewards = [judge(completion[0]["content"], answer) for completion, answer in pairs]
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
    versions = {
        name: importlib.metadata.version(name)
        for name in ("trl", "torch", "transformers", "accelerate")
    }
    wire.reply(threads=torch.get_num_threads(), versions=versions)
    trainer.train()


if __name__ == "__main__":
    main()
