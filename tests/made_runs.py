"""Writes the files of runs, without training, in milliseconds, for tests of `lagrpo view`."""

from __future__ import annotations

import json
import struct
import tomllib
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from tiny import tiny_tokenizer

from lagrpo.runs import Run
from lagrpo.settings.load import load_settings, to_toml
from lagrpo.types import JsonObject

HOSTILE = (
    "<script>window.planted = 1</script></script><img src=x onerror='window.planted = 2'> & "
    "&lt;b&gt; \u2028\u2029 \u202eright to left\u202c \u2066isolate\u2069 <!-- ]]> '\"` "
    "${window.planted = 3} \x1b[31m \x00"
)


def make_run(root: Path, name: str = "made", /, **sections: JsonObject) -> Run:
    """A run with settings and an environment, and nothing else."""
    base: dict[str, JsonObject] = {
        "run": {"output_dir": str(root), "name": name, "seed": 3},
        "model": {"path": str(root / "no-model")},
        "task": {"name": "arithmetic"},
        "rollout": {"num_generations": 4, "max_completion_length": 6},
        "schedule": {"prompts_per_batch": 3, "batches": 4, "sync_every": 2},
    }
    settings = load_settings(
        {section: base.get(section, {}) | sections.get(section, {}) for section in base | sections}
    )
    environment = {
        "id": "0123456789abcdef",
        "command": "lagrpo train",
        "git": {"commit": "abc", "dirty": False},
    }
    text = to_toml(settings)
    return Run.create(root, name, tomllib.loads(text), text, environment)


def save_tokenizer(run: Run) -> None:
    """Put the tokenizer of tiny models where a run keeps its weights."""
    tiny_tokenizer().save_pretrained(run.path / "weights" / "final")


def row(text: str, reward: float | None = 1.0, /, **changes: object) -> JsonObject:
    """A completion of printable characters, one token each as the tiny tokenizer has them."""
    from string import printable

    ids = [3 + printable.index(letter) if letter in printable else 0 for letter in text]
    outcome = "scored" if reward is not None else "unscored"
    base = {
        "step": 1,
        "source": "sampler",
        "epoch": 0,
        "prompt_id": 7,
        "prompt_text": "What is 2 + 2?",
        "prompt_token_ids": [3, 4],
        "answer": '"4"',
        "sample_index": 0,
        "completion": text,
        "token_ids": ids,
        "rollout_logprobs": [-0.25 * (n + 1) for n in range(len(ids))],
        "policy_versions": [0] * len(ids),
        "old_logprobs": [-0.25 * (n + 1) + 0.3 for n in range(len(ids))],
        "loss_mask": [True] * len(ids),
        "policy_version": 1,
        "staleness": 1,
        "finished": True,
        "outcome": outcome,
        "reward": reward,
        "reason": "",
        "advantage": 0.5 if reward is not None else None,
        "group_std": 0.5,
        "excluded_reason": "" if reward is not None else "unscored",
    }
    return base | changes


def group(key: int, rewards: list[float | None], /, **changes: object) -> list[JsonObject]:
    """The completions of one prompt; the text of each says its number."""
    flat = len({reward for reward in rewards if reward is not None}) == 1
    rows = [
        row(f"answer {n} of {key}", reward, prompt_id=key, sample_index=n)
        for n, reward in enumerate(rewards)
    ]
    for completion_row in rows:
        completion_row["prompt_text"] = f"Question {key}: what is {key} + {key}?"
        completion_row["excluded_reason"] = completion_row["excluded_reason"] or (
            "zero_variance" if flat else ""
        )
    return [completion_row | changes for completion_row in rows]


def metrics(batch: int, **changes: Any) -> dict[str, float | None]:
    """Some of the numbers of a batch."""
    base = {
        "step": batch,
        "policy_version": batch - 1,
        "weight_sync/performed": batch % 2,
        "staleness/max": 1 - batch % 2,
        "completions/unscored": 0,
        "completions/failed": 0,
        "reward": 0.1 * batch,
        "frac_reward_zero_std": 0.9,
        "completions/mean_length": 5.0 + batch,
        "completions/clipped_ratio": 0.75,
        "rollout/kl": 0.001 * batch,
        "rollout/ess": 0.9,
        "entropy": None,
        "grad_norm": 1.0 + 1 / batch,
        "time/step": 2.0,
        "num_tokens": 60,
    }
    return base | changes


def fill(run: Run, batches: int = 4) -> Run:
    """Metrics, events, rollouts of three groups a batch, and evaluations before and after."""
    for batch in range(1, batches + 1):
        if batch % 2:
            run.record_event(
                "weight_sync",
                batch,
                policy_version=batch - 1,
                reason="schedule" if batch > 1 else "start",
            )
        run.record(metrics(batch))
        rows = (
            group(1, [1.0, 0.0, 0.0, 1.0]) + group(2, [0.0] * 4) + group(3, [1.0, None, 0.0, 1.0])
        )
        rows[9] |= {"reason": "no number in the answer", "finished": False}
        batch_columns = {"step": batch, "policy_version": batch - 1}
        run.record_rollouts(batch, [row | batch_columns for row in rows])
    run.record_event("warning", 2, text="WARNING: something is odd")
    evaluate(run, "before", 0, {1: [0.0, 0.0], 2: [1.0, 0.0], 3: [1.0, 1.0]})
    evaluate(run, "after", batches, {1: [1.0, 1.0], 2: [0.0, 0.0], 3: [1.0, 1.0]})
    run.record_event(
        "end", batches, status="finished", detail=f"{batches} of {batches} batches are finished"
    )
    return run


def evaluate(
    run: Run, name: str, batch: int, rewards: dict[int, list[float]], **facts: object
) -> None:
    """An evaluation whose completions say what they got, with further facts in its summary."""
    records = [
        {
            "prompt_id": key,
            "prompt": f"Held-out question {key}",
            "answer": str(key),
            "samples": len(rewards_of_prompt),
            "scored": len(rewards_of_prompt),
            "correct": sum(reward >= 1 for reward in rewards_of_prompt),
            "reward": sum(rewards_of_prompt) / len(rewards_of_prompt),
            "completions": [f"{name} {key}: {reward}" for reward in rewards_of_prompt],
            "rewards": rewards_of_prompt,
        }
        for key, rewards_of_prompt in rewards.items()
    ]
    mean = sum(record["correct"] for record in records) / sum(
        record["scored"] for record in records
    )
    summary = {"step": batch, "prompts": len(records), "samples": 2, "reward": mean, "unscored": 0}
    summary |= {"pass@1": mean, "pass@1_low": max(0, mean - 0.2), "pass@1_high": min(1, mean + 0.2)}
    run.record_evaluation(name, summary | {"pass@2": 1.0} | facts, records)


def unpack(packed: bytes) -> tuple[JsonObject, list[np.ndarray]]:
    """The header and the arrays of a page's data."""
    content = zlib.decompress(packed)
    (length,) = struct.unpack_from("<I", content)
    header, start = json.loads(content[4 : 4 + length]), 4 + length + -(4 + length) % 8
    return header, [
        np.frombuffer(content, np.dtype(kind), n, start + at) for kind, at, n in header["arrays"]
    ]
