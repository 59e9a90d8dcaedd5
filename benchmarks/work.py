"""The work that is measured: prompts, completions, tokens. Both sides get the same."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypedDict

from transformers import AutoTokenizer

from lagrpo.model.backend import pick_device, pick_dtype
from lagrpo.model.embedded import resolve_model
from lagrpo.settings.sections import OptimizerSettings, TaskSettings
from lagrpo.tasks import load_task, order_prompts
from lagrpo.types import JsonObject, JsonView

RESULTS = Path(__file__).parent / "results"
DEMO = Path(__file__).parent.parent / "experiments" / "addition" / "full.toml"
ON_GPU = pick_device().type == "cuda"
DTYPE = pick_dtype("auto", pick_device())[0]
"""The dtype of both sides of a comparison: the default of a run on this machine."""
MICRO_BATCH_TOKENS = OptimizerSettings().tokens_in_micro_batch(on_gpu=ON_GPU)
"""Tokens in a micro-batch of lagrpo on this machine, unless a benchmark sets them."""
SEED = 0
# More than any benchmark visits: after the last prompt the two sides would go on in different
# orders.
PROMPTS = 384

Settings = dict[str, JsonObject]
"""Settings of lagrpo by section and name."""


class PromptRow(TypedDict):
    """A line of the file of prompts."""

    key: int
    """The prompt's index in the task."""
    messages: list[dict[str, str]]
    answer: Any
    tokens: int


@dataclass(frozen=True)
class Work:
    """N prompts of a task, with G completions of each."""

    name: str
    N: int
    G: int
    max_tokens: int
    """Of a completion."""
    task: JsonView
    """Settings of the section [task]."""
    judge: str
    """The task's own reward, as "module:function"."""
    prompt_tokens: tuple[int, int]
    """Shortest and longest prompt."""
    model: str = "smollm2"

    @property
    def completions(self) -> int:
        return self.N * self.G

    @property
    def title(self) -> str:
        low, high = self.prompt_tokens
        return (
            f"{self.name}: {self.N} prompts ({self.task['name']}, {low} to {high} tokens) "
            f"× {self.G} completions × ≤ {self.max_tokens} tokens"
        )


SHORT = Work(
    name="short",
    N=8,
    G=16,
    max_tokens=16,
    task={"name": "arithmetic", "options": {"operations": ["+"], "digits": 1}},
    judge="lagrpo.tasks.arithmetic:score",
    prompt_tokens=(1, 100),
)
LONG = Work(
    name="long",
    N=4,
    G=8,
    max_tokens=128,
    task={"name": "gsm8k"},
    judge="lagrpo.tasks.gsm8k:score",
    prompt_tokens=(100, 200),
)
WORKS = {work.name: work for work in (SHORT, LONG)}
HASHED = "rewards:hashed"


class Quick(argparse.Action):
    """Sets `quick`, and puts results into a folder of their own so that real ones stay."""

    def __call__(self, parser, namespace, values, option_string=None) -> None:
        namespace.quick = True
        if namespace.results == RESULTS:
            namespace.results = RESULTS / "quick"


def common_options(description: str | None) -> argparse.ArgumentParser:
    """A parser with the options that every benchmark has.

    From now on SIGTERM ends the benchmark through its `with` blocks, which end the programs it
    started.
    """
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


def require_peer(options: argparse.Namespace, target: str) -> None:
    """Raises SystemExit with what to do if the other program's Python does not exist."""
    if not options.peer.exists():
        raise SystemExit(
            f"{options.peer}: no such Python. `make {target}` makes it; --peer names another"
        )


def apply_options(work: Work, options: argparse.Namespace) -> Work:
    """The work with the model of --model, and tiny with --quick."""
    work = replace(work, model=options.model)
    if options.quick:
        return replace(work, N=2, G=4, max_tokens=4, prompt_tokens=(1, 1000))
    return work


def write_prompts(work: Work, path: Path, seed: int = SEED) -> Path:
    """Writes PROMPTS prompts in the order in which a run of this seed visits them.

    Repeats the prompts of a task that has fewer. GSM8K comes from LAGRPO_DATA, else from the hub.
    Returns the path. Raises lagrpo's own errors if the data is missing.
    """
    tokenizer = AutoTokenizer.from_pretrained(resolve_model(work.model))
    settings = dict(work.task)
    if work.task["name"] == "gsm8k" and "LAGRPO_DATA" not in os.environ:
        settings["data"] = "openai/gsm8k"
    task = load_task(TaskSettings(**settings), SEED)
    rows = []
    low, high = work.prompt_tokens
    for index in range(task.size("train")):
        prompt = task.prompt("train", index)
        messages = [dict(message) for message in prompt.messages]
        encoded = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True
        )
        tokens = len(encoded["input_ids"])
        if low <= tokens <= high:
            rows.append({"messages": messages, "answer": prompt.answer, "tokens": tokens})
        if len(rows) == PROMPTS:
            break
    if not rows:
        raise ValueError(f"{work.title}: no prompt is that long")
    order = order_prompts(seed, 0, PROMPTS)
    # Sides get the rows in the order of keys that a run of lagrpo draws.
    lines = [json.dumps({"key": key, **rows[key % len(rows)]}) + "\n" for key in order]
    path.write_text("".join(lines), encoding="utf-8")
    return path


def read_prompts(path: Path) -> list[PromptRow]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def ours(work: Work, scratch: Path, **sections: JsonView) -> Settings:
    """Settings of a run of lagrpo on this work, which makes no evaluation and writes to `scratch`.

    `sections` changes or adds settings, by section.
    """
    base: Settings = {
        "run": {"output_dir": str(scratch / "runs"), "seed": SEED},
        "model": {"path": work.model, "dtype": DTYPE},
        "rollout": {
            "num_generations": work.G,
            "max_completion_length": work.max_tokens,
            # All completions of a batch of either work at once.
            "max_num_seqs": max(128, work.G),
        },
        # The driver ends the run, long before this number of batches.
        "schedule": {"prompts_per_batch": work.N, "batches": 100_000},
        "loss": {"recipe": "grpo", "beta": 0.0},
        "optimizer": {"learning_rate": 1e-5},
        "eval": {"at_start": False},
    }
    return {name: base.get(name, {}) | dict(sections.get(name, {})) for name in base | sections}


def demo_settings(model: str, batches: int, scratch: Path) -> dict[str, object]:
    """Settings of a run of DEMO that only trains: no evaluations, no checkpoints."""
    return {
        "run.output_dir": scratch,
        "run.name": "run",
        "checkpoint.save-total-limit": 0,
        "checkpoint.save-minutes": 0,
        "eval.at-start": False,
        "model.path": model,
        "schedule.batches": batches,
    }


def trl(work: Work, per_device: int, **settings: object) -> JsonObject:
    """Arguments of GRPOConfig for the same work in micro-batches of `per_device` completions.

    They give lagrpo's objective (grpo, no KL term), AdamW at the same constant rate, float32
    weights that are multiplied in DTYPE, and neither files nor logs. Attention is PyTorch's
    scaled_dot_product_attention, transformers' default on every device. `settings` changes or adds
    arguments; all others keep TRL's default. Raises ValueError if micro-batches would not have
    equal sizes.
    """
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
        # The driver ends the run, long before this number of updates.
        "max_steps": 100_000,
        "use_cpu": not ON_GPU,
        "bf16": DTYPE == "bfloat16",
        "gradient_checkpointing": False,
        # The file has the order in which lagrpo visits the prompts; TRL must keep it.
        "shuffle_dataset": False,
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        **settings,
    }
