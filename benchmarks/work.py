"""The work that is measured: prompts, completions, tokens; the same for both sides."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from lagrpo.model.backend import pick_device, pick_dtype
from lagrpo.model.embedded import resolve_model
from lagrpo.settings.sections import TaskSettings
from lagrpo.tasks import load_task, order_prompts

RESULTS = Path(__file__).parent / "results"
DTYPE = pick_dtype("auto", pick_device())[0]
"""What both sides of a comparison compute in: the default of a run on this machine."""
SEED = 0
PROMPTS = 384  # more than any benchmark visits: where one ends, the two sides would go on in different orders


@dataclass(frozen=True)
class Work:
    """N prompts of a task, whose length in tokens is within `prompt_tokens`, G completions of each, of at most
    `max_tokens` tokens. `judge` is the task's own reward."""

    name: str
    N: int
    G: int
    max_tokens: int
    task: Mapping[str, Any]
    judge: str
    prompt_tokens: tuple[int, int]
    model: str = "smollm2"

    @property
    def completions(self) -> int:
        return self.N * self.G

    @property
    def title(self) -> str:
        low, high = self.prompt_tokens
        return (
            f"{self.name}: {self.N} prompts ({self.task['name']}, {low} to {high} tokens) × {self.G} completions "
            f"× ≤ {self.max_tokens} tokens"
        )


SHORT = Work(
    "short",
    8,
    16,
    16,
    {"name": "arithmetic", "options": {"operations": ["+"], "digits": 1}},
    "lagrpo.tasks.arithmetic:score",
    (1, 100),
)
LONG = Work("long", 4, 8, 128, {"name": "gsm8k"}, "lagrpo.tasks.gsm8k:score", (100, 200))
WORKS = {work.name: work for work in (SHORT, LONG)}
HASHED = "rewards:hashed"


class Quick(argparse.Action):
    """Tiny work, whose results do not take the place of real ones."""

    def __call__(self, parser, namespace, values, option_string=None) -> None:
        namespace.quick = True
        if namespace.results == RESULTS:
            namespace.results = RESULTS / "quick"


def common_options(description: str | None) -> argparse.ArgumentParser:
    """The options that every benchmark has. From now on SIGTERM, too, ends it by way of its `with` blocks."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--threads", type=int, default=len(os.sched_getaffinity(0)), help="of each side"
    )
    parser.add_argument("--model", default="smollm2", help="alias or directory")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument(
        "--quick",
        action=Quick,
        nargs=0,
        default=False,
        help="tiny work, to see that everything runs; results/quick",
    )
    return parser


def require_peer(asked: argparse.Namespace, target: str) -> None:
    """End with what to do where the other program's Python is not there."""
    if not asked.peer.exists():
        raise SystemExit(
            f"{asked.peer}: no such Python. `make {target}` makes it; --peer names another"
        )


def asked_for(work: Work, asked: argparse.Namespace) -> Work:
    """The work with the model that was asked for; tiny where that was asked for."""
    work = replace(work, model=asked.model)
    return replace(work, N=2, G=4, max_tokens=4, prompt_tokens=(1, 1000)) if asked.quick else work


def write_prompts(work: Work, path: Path, seed: int = SEED) -> Path:
    """PROMPTS prompts in the order in which a run of this seed visits them, one JSON object per line: key, messages,
    gold, tokens. A task that has fewer is gone through again. GSM8K comes from LAGRPO_DATA, else from the hub. Raises
    lagrpo's own errors where the data is not there."""
    tokenizer = AutoTokenizer.from_pretrained(resolve_model(work.model))
    hub: dict[str, Any] = (
        {"data": "openai/gsm8k"}
        if work.task["name"] == "gsm8k" and "LAGRPO_DATA" not in os.environ
        else {}
    )
    task = load_task(TaskSettings(**work.task, **hub), SEED)
    rows: list[dict[str, Any]] = []
    low, high = work.prompt_tokens
    for index in range(task.size("train")):
        prompt = task.prompt("train", index)
        messages = [dict(message) for message in prompt.messages]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)[
            "input_ids"
        ]
        if low <= len(ids) <= high:
            rows.append({"messages": messages, "answer": prompt.answer, "tokens": len(ids)})
        if len(rows) == PROMPTS:
            break
    if not rows:
        raise ValueError(f"{work.title}: no prompt is that long")
    order = order_prompts(seed, 0, PROMPTS)
    path.write_text(
        "".join(json.dumps({"key": key, **rows[key % len(rows)]}) + "\n" for key in order),
        encoding="utf-8",
    )
    return path


def read_prompts(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def ours(work: Work, scratch: Path, **sections: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a run of ours on this work, evaluated at no time and written to `scratch`."""
    base: dict[str, dict[str, Any]] = {
        "run": {"output_dir": str(scratch / "runs"), "seed": SEED},
        "model": {"path": work.model, "dtype": DTYPE},
        "rollout": {
            "num_generations": work.G,
            "max_completion_length": work.max_tokens,
            "max_num_seqs": max(128, work.G),
        },
        "schedule": {"prompts_per_batch": work.N, "batches": 100_000},
        "loss": {"recipe": "grpo", "beta": 0.0},
        "optimizer": {"learning_rate": 1e-5},
        "eval": {"at_start": False},
    }
    return {name: base.get(name, {}) | dict(sections.get(name, {})) for name in base | sections}


def trl(work: Work, per_device: int, **settings: Any) -> dict[str, Any]:
    """Arguments of GRPOConfig for the same work in micro-batches of `per_device` completions: the objective of ours
    (grpo, no KL term), AdamW at the same constant rate, float32 weights that are multiplied in DTYPE, and nothing
    written or logged. What is not named here or in `settings` is TRL's default."""
    if work.completions % per_device:
        raise ValueError(
            f"micro-batches of {per_device} do not divide {work.completions} completions"
        )
    return {
        "num_generations": work.G,
        "max_completion_length": work.max_tokens,
        "per_device_train_batch_size": per_device,
        "gradient_accumulation_steps": work.completions // per_device,
        "loss_type": "grpo",
        "beta": 0.0,
        "learning_rate": 1e-5,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 1.0,
        "max_steps": 100_000,
        "use_cpu": pick_device().type == "cpu",
        "bf16": DTYPE == "bfloat16",
        "gradient_checkpointing": False,
        "shuffle_dataset": False,
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        **settings,
    }
