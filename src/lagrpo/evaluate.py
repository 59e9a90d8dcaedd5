"""pass@k of a policy on the held-out prompts of a task.

Completions are drawn at the sampling temperature, `samples` for each prompt; pass@1 is the mean reward of the scored
completions where rewards are 0 or 1, pass@k the unbiased estimator; intervals are bootstraps over prompts. The draws
have the same addresses every time, so before and after differ in the policy only.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch

from lagrpo.build import build_policy, build_task
from lagrpo.checks import check_evaluation, refusing
from lagrpo.config import EvalSettings
from lagrpo.core.estimators import bootstrap_interval, pass_at_k
from lagrpo.process import restored
from lagrpo.prompts import PromptSource
from lagrpo.runs.files import to_json, write_atomically
from lagrpo.sampling.base import Request, Sampler
from lagrpo.sampling.local import LocalSampler
from lagrpo.tasks import Task
from lagrpo.text import formatted
from lagrpo.threads import team
from lagrpo.types import Group
from lagrpo.verify import Verifier


@dataclass(frozen=True, slots=True)
class Evaluation:
    """`summary` for people and plots, `records` one row per prompt, `groups` what was drawn."""

    summary: dict[str, Any]
    records: list[dict[str, Any]]
    groups: list[Group]


def evaluate(sampler: Sampler, verifier: Verifier, requests: Sequence[Request], samples: int, seed: int) -> Evaluation:
    """Draw, judge and count. A completion counts as right when its reward is at least 1.

    Raises:
        ValueError: no prompts.
    """
    if not requests:
        raise ValueError("there are no test prompts to evaluate on")
    drawn = (group for _, group in sampler.sample(requests, samples))
    groups = sorted(verifier.judge(drawn), key=lambda group: group.prompt.key)
    records = [_record(group) for group in groups]
    return Evaluation(_summary(records, samples, seed), records, groups)


def _record(group: Group) -> dict[str, Any]:
    rewards = group.rewards
    right = sum(reward >= 1 for reward in rewards)
    tokens = [len(c.token_ids) for c in group.completions]
    return {
        "prompt_key": group.prompt.key,
        "prompt": group.prompt.messages[-1]["content"],
        "gold": str(group.prompt.gold),
        "samples": len(group.completions),
        "scored": len(rewards),
        "right": right,
        "reward_mean": sum(rewards) / len(rewards) if rewards else None,
        "pass_at_1": right / len(rewards) if rewards else None,
        "tokens_mean": sum(tokens) / len(tokens),
        "finished_share": sum(c.finished for c in group.completions) / len(group.completions),
        "completions": [c.text for c in group.completions],
        "rewards": [c.reward for c in group.completions],
    }


def _summary(records: list[dict[str, Any]], samples: int, seed: int) -> dict[str, Any]:
    scored = [r for r in records if r["scored"]]
    unscored = sum(r["samples"] - r["scored"] for r in records)
    summary: dict[str, Any] = {"prompts": len(records), "samples": samples, "unscored": unscored}
    if not scored:
        return summary
    measures = {"reward_mean": [r["reward_mean"] for r in scored]}
    for k in sorted({samples, *(1 << n for n in range(samples.bit_length()))}):
        measures[f"pass_at_{k}"] = [pass_at_k(r["scored"], r["right"], k) for r in scored if r["scored"] >= k]
    for name, values in measures.items():
        if values:
            low, high = bootstrap_interval(torch.tensor(values, dtype=torch.float64), seed=seed)
            summary |= {name: sum(values) / len(values), f"{name}_low": low, f"{name}_high": high}
    return summary


def evaluate_model(settings: EvalSettings) -> Evaluation:
    """Evaluate the model of the settings on the test prompts of their task; prints the summary, and writes summary and
    per-prompt records where settings.output says (see `place`).

    Raises:
        SettingsError: settings that cannot be run, before anything heavy is loaded where that can be seen.
        VerifierError: too many completions could not be judged.
    """
    check_evaluation(settings)
    task = build_task(settings.task, settings.seed)
    output = place(settings, task.name)
    with restored():
        evaluation = _evaluated(settings, task)
    model = settings.model.path
    summary = {"model": model, "task": task.name, **evaluation.summary, "settings": settings.model_dump()}
    _write(output, summary, evaluation.records)
    _print(summary, output)
    return evaluation


def _evaluated(settings: EvalSettings, task: Task) -> Evaluation:
    print(f"loading {settings.model.path} …", file=sys.stderr, flush=True)
    policy = build_policy(settings.model, settings.temperature, settings.max_prompt_tokens + settings.max_tokens)
    print(f"computing with {policy.computation}; decoding {policy.decoding}", file=sys.stderr, flush=True)
    team.tell(lambda line: print(line, file=sys.stderr, flush=True))
    prompts = PromptSource(task, policy, settings.seed, 1, settings.max_prompt_tokens)
    requests = prompts.held_out(settings.prompts or task.size("test"))
    sampler = LocalSampler(policy, settings.seed, settings.max_tokens, settings.rows, purpose="evaluate")
    v = settings.verifier
    with refusing("task", TypeError):
        verifier = Verifier(task.judge, workers=v.workers, deadline=v.deadline, max_unscored_share=v.max_unscored)
    with verifier:
        return evaluate(sampler, verifier, requests, settings.samples, settings.seed)


def place(settings: EvalSettings, task: str) -> Path:
    """The directory for an evaluation: settings.output, else evaluations/MODEL-TASK, or that with the first number
    behind it (-2, -3 …) whose directory has no evaluation with other settings.

    Raises:
        SettingsError: settings.output has an evaluation with other settings, or something else's summary.json.
    """
    if settings.output:
        with refusing("output"):
            if problem := _occupied(Path(settings.output), settings):
                raise ValueError(f"{problem}: name another directory")
        return Path(settings.output)
    name = f"evaluations/{label(settings.model.path)}-{task}"
    places = (Path(name if n == 1 else f"{name}-{n}") for n in count(1))
    return next(path for path in places if not _occupied(path, settings))


def _occupied(output: Path, settings: EvalSettings) -> str | None:
    """Why an evaluation with these settings must not be written there; None where it may."""
    file = output / "summary.json"
    if not file.exists():
        return None
    try:
        earlier = _flat(json.loads(file.read_bytes())["settings"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{file} is not that of an evaluation"
    ours = _flat(json.loads(to_json(settings.model_dump())))
    names = [n for n in ours | earlier if ours.get(n) != earlier.get(n) and n != "output"]
    differing = ", ".join(f"{n} = {earlier.get(n)}, not {ours.get(n)}" for n in names[:3])
    return f"{output} holds an evaluation with other settings ({differing})" if names else None


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """section.name -> value."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return flat


def label(model: str) -> str:
    """A name for a model: its directory's, with the run's where it is a run's.

    >>> label("Qwen/Qwen2.5-0.5B"), label("runs/addition/weights/final")
    ('Qwen2.5-0.5B', 'addition-final')
    """
    path = Path(model)
    return f"{path.parent.parent.name}-{path.name}" if path.parent.name == "weights" else path.name


def _write(output: Path, summary: dict[str, Any], records: list[dict[str, Any]]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    output.mkdir(parents=True, exist_ok=True)
    write_atomically(output / "records.parquet", lambda path: pq.write_table(pa.Table.from_pylist(records), path))
    write_atomically(output / "summary.json", to_json(summary) + "\n")


def _print(summary: dict[str, Any], output: Path) -> None:
    print(f"{summary['model']} on {summary['task']}: {summary['prompts']} prompts x {summary['samples']} samples")
    names = [name for name in summary if f"{name}_low" in summary]
    for name in names if summary.get("reward_mean") != summary.get("pass_at_1") else names[1:]:
        print(f"  {interval(summary, name)}")
    if summary["unscored"]:
        print(f"  {summary['unscored']} completions could not be judged and are not counted")
    print(f"  per-prompt records: {output / 'records.parquet'}")


def interval(summary: Mapping[str, Any], name: str) -> str:
    """One figure of a summary with its interval, for people.

    >>> interval({"pass_at_1": 0.5, "pass_at_1_low": 0.25, "pass_at_1_high": 0.7}, "pass_at_1")
    'pass@1       50.0%   95 % interval 25.0% to 70.0%'
    """
    form = ".3f" if name == "reward_mean" else ".1%"
    label = name.replace("_at_", "@").replace("_", " ")
    value, low, high = (formatted(summary.get(key), form) for key in (name, f"{name}_low", f"{name}_high"))
    return f"{label:<11} {value:>6}   95 % interval {low} to {high}"
