"""Evaluations: pass@k of a policy on held-out prompts, with intervals.

A completion is correct if it reaches the maximum of `task.reward_range`. pass@1 is the share of correct completions
among the scored ones, pass@k the unbiased estimator. Intervals are for the mean over all prompts that the held-out ones
are drawn from. Random numbers have the same keys every time, so "before" and "after" differ in the policy only, and
`compare` compares them prompt by prompt.

`evaluate` makes one evaluation; `Evaluations` are all of a run, on its evaluation sets.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from lagrpo.core.estimators import bootstrap_interval, clustered_interval, paired_interval, pass_at_k
from lagrpo.rewards.pool import RewardPool
from lagrpo.rollout.base import Request, SamplingParams
from lagrpo.rollout.schedule import LoopState
from lagrpo.rollout.vllm.engine import VllmEvaluator
from lagrpo.runs.directory import BEST, Run
from lagrpo.runs.reading import load_evaluation_records, load_evaluations
from lagrpo.runs.rollouts import REWARD
from lagrpo.settings.evaluation import OF_A_SET, EvaluationSet
from lagrpo.tasks import reward_names
from lagrpo.terminal.text import count_of, formatted_interval
from lagrpo.training.build import TrainerComponents
from lagrpo.training.checkpoint import needs_alpha
from lagrpo.training.data import TaskSetup, concerning_set
from lagrpo.training.ranks import Ranks
from lagrpo.types import Group, Outcome, Range, is_correct

ENOUGH_PROMPTS = 50
PURPOSE = "evaluate"
OF_PLACE = ("step", "policy_version", "set", "reward_range")
"""What the JSON file of an evaluation says about where and how it was made."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The result of an evaluation: a summary for people and plots, and one row per prompt."""

    summary: dict[str, Any]
    records: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class EvalSet:
    """Prompts that policies are evaluated on, and how. `rewards` are the names of several rewards."""

    requests: Sequence[Request]
    reward_pool: RewardPool
    params: SamplingParams
    samples: int
    """completions per prompt"""
    seed: int = 0
    reward_range: Range = (0.0, 1.0)
    rewards: Sequence[str] = ()
    name: str = ""
    """"" if the run has no sets"""
    every: int = 0
    """batches between evaluations; 0: only before and after"""

    def file_name(self, moment: str) -> str:
        """The name of the evaluation's files: before, after, batch-000010, each with the set appended."""
        return f"{moment}.{self.name}" if self.name else moment


def evaluate(of: EvalSet, evaluator: Any, ranks: Ranks | None = None) -> Evaluation:
    """Sample completions of the policy that the evaluator samples from, score and count them. Each of several ranks
    does so for its share, unless servers sample for rank 0. Raises ValueError if there are no requests."""
    if not of.requests:
        raise ValueError("there are no test prompts to evaluate on")
    evaluator.set_sampling_params(of.params)
    ranks = ranks or Ranks()
    own = of.requests if isinstance(evaluator, VllmEvaluator) else ranks.share(of.requests)
    with ranks.stopping_together():
        scored = list(of.reward_pool.score(group for _, group in evaluator.sample(own, of.samples)))
    groups = sorted(ranks.join(scored), key=lambda group: group.prompt.key)
    records = [_record(group, of.reward_range, of.rewards) for group in groups]
    summary = _summarize(records, of.samples, of.seed, of.reward_range)
    for column in (f"{REWARD}{name}" for name in of.rewards):
        found = [[value for value in record[column] if value is not None] for record in records]
        if means := [sum(values) / len(values) for values in found if values]:
            summary[f"rewards/{column.removeprefix(REWARD)}/mean"] = sum(means) / len(means)
    return Evaluation(summary, records)


def _record(group: Group, reward_range: Range, names: Sequence[str]) -> dict[str, Any]:
    rewards, completions = group.rewards, group.completions
    outcomes = [c.outcome or Outcome.unscored("") for c in completions]
    correct = sum(is_correct(o.reward, reward_range, o.correct) for o in outcomes if o.reward is not None)
    record = {
        "prompt_id": group.prompt.key,
        "prompt": group.prompt.messages[-1]["content"],
        "answer": str(group.prompt.answer),
        "samples": len(completions),
        "scored": len(rewards),
        "correct": correct,
        "reward": sum(rewards) / len(rewards) if rewards else None,
        "pass@1": correct / len(rewards) if rewards else None,
        "mean_length": sum(c.length for c in completions) / len(completions),
        "clipped_ratio": sum(not c.finished for c in completions) / len(completions),
        "num_turns": sum(c.policy_turns for c in completions) / len(completions),
        "completions": [c.text for c in completions],
        "rewards": [c.reward for c in completions],
    }
    if names:
        record |= {f"{REWARD}{name}": [o.parts.get(name) for o in outcomes] for name in names}
        record |= {"is_correct": [o.correct for o in outcomes], "tokens": [c.length for c in completions]}
    return record


def _summarize(records: list[dict[str, Any]], samples: int, seed: int, reward_range: Range) -> dict[str, Any]:
    unscored = sum(r["samples"] - r["scored"] for r in records)
    summary: dict[str, Any] = {"prompts": len(records), "samples": samples, "unscored": unscored}
    for name, (values, tries) in _measures(records, samples).items():
        if values:
            ends = reward_range if name == "reward" else (0.0, 1.0)
            low, high = _interval(list(values.values()), tries, seed, ends)
            summary |= {name: sum(values.values()) / len(values), f"{name}_low": low, f"{name}_high": high}
    return summary


def _measures(records: list[dict[str, Any]], samples: int) -> dict[str, tuple[dict[int, float], float]]:
    """Each metric by prompt, without prompts that have too few scored completions; and how many independent tries of it
    the samples of a prompt hold: one try of pass@k takes k samples."""
    measures = {"reward": ({r["prompt_id"]: r["reward"] for r in records if r["scored"]}, float(samples))}
    for k in sorted({samples, *(1 << n for n in range(samples.bit_length()))}):
        by_prompt = {r["prompt_id"]: pass_at_k(r["scored"], r["correct"], k) for r in records if r["scored"] >= k}
        measures[f"pass@{k}"] = by_prompt, samples / k
    return measures


def _interval(values: list[float], tries: float, seed: int, ends: Range) -> tuple[float, float]:
    """The 95 % interval of a metric in [ends]: `clustered_interval` of the values scaled to [0, 1]; a bootstrap over
    prompts if a value lies outside."""
    values_N, (low, high) = torch.tensor(values, dtype=torch.float64), ends
    if not all(low <= value <= high for value in values):
        return bootstrap_interval(values_N, seed=seed)
    below, above = clustered_interval((values_N - low) / (high - low), tries)
    return low + below * (high - low), low + above * (high - low)


def compare(before: Evaluation, after: Evaluation) -> dict[str, float]:
    """How each pass@k changed, over the prompts that have scores in both: the mean difference and its 95 % interval
    (`paired_interval`), for the summary of the second evaluation."""
    found: dict[str, float] = {}
    old, new = (_measures(e.records, after.summary["samples"]) for e in (before, after))
    for name, (values, tries) in new.items():
        both = sorted(old[name][0].keys() & values.keys())
        if both and name != "reward":
            b_N, a_N = (torch.tensor([m[key] for key in both], dtype=torch.float64) for m in (old[name][0], values))
            low, high = paired_interval(b_N, a_N, tries)
            difference = float(a_N.mean() - b_N.mean())
            found |= {f"{name}_change": difference, f"{name}_change_low": low, f"{name}_change_high": high}
    return found


# For people


def few_prompts(prompts: int) -> str | None:
    """The warning for an evaluation on too few prompts; None if they suffice."""
    if prompts >= ENOUGH_PROMPTS:
        return None
    return (
        f"WARNING: only {count_of(prompts, 'test prompt')}: the 95 % intervals of pass@k are wide, and near 0 and "
        f"100 % too narrow; use at least {ENOUGH_PROMPTS}"
    )


def interval(summary: Mapping[str, Any], name: str) -> str:
    """One metric of a summary with its interval, for people.

    >>> interval({"pass@1": 0.5, "pass@1_low": 0.25, "pass@1_high": 0.7}, "pass@1")
    'pass@1       50.0%   95 % interval 25.0% to 70.0%'
    """
    heading = name.replace("_", " ")
    return f"{heading:<11} {formatted_interval(summary, name, '.3f' if name == 'reward' else '.1%')}"


def headline(summary: Mapping[str, Any]) -> str:
    mean = summary.get("reward")
    graded = f", mean reward {mean:.3f}" if mean not in (None, summary.get("pass@1")) else ""
    return f"{interval(summary, 'pass@1')}{graded}"


def moment_of(batch: int) -> str:
    """What the evaluation after a batch is called while others follow.

    >>> moment_of(0), moment_of(12)
    ('before', 'batch-000012')
    """
    return f"batch-{batch:06d}" if batch else "before"


# What a run evaluates, and when


class Evaluations:
    """The evaluation sets of a run, or a single one without a name, and the evaluations that were made of them. Raises
    SettingsError for a set whose prompts do not fit."""

    def __init__(self, parts: TrainerComponents) -> None:
        self.parts, e = parts, parts.settings.eval
        self.sets: list[EvalSet] = []
        self.made: dict[str, Evaluation] = {}
        """by the names of their files"""
        if e.takes_place and not e.sets:
            self.sets = [build_eval_set(parts, EvaluationSet(name="only"), "")]
        for each in e.sets if e.takes_place else ():
            with concerning_set(each.name):
                self.sets.append(build_eval_set(parts, each, each.name))

    def find_due(self, moment: str, batch: int, only_due: bool) -> list[EvalSet]:
        """The sets that have not been evaluated at this moment; with `only_due` those whose turn it is."""
        sets = [each for each in self.sets if each.file_name(moment) not in self.made]
        return [each for each in sets if not only_due or (each.every and batch % each.every == 0)]

    def find_warnings(self) -> list[str]:
        """What is to be said of sets with few prompts."""
        found = [
            (f"evaluation of {each.name}: " * bool(each.name), few_prompts(len(each.requests))) for each in self.sets
        ]
        return [f"{where}{text}" for where, text in found if text]

    def make(self, each: EvalSet, moment: str) -> Evaluation:
        """Evaluate the policy that the evaluator samples from, and compare it with the initial policy."""
        found = evaluate(each, self.parts.evaluator, self.parts.ranks)
        self.parts.evaluator.free_cache()
        if (before := self.made.get(each.file_name("before"))) is not None:
            found = replace(found, summary=found.summary | compare(before, found))
        self.made[each.file_name(moment)] = found
        return found

    def metrics(self, batch: int) -> dict[str, float | None]:
        """The metrics of each set after `batch` batches, for the line of the batch that follows; None if the set was
        not evaluated then. Empty if the run has no sets."""
        metrics: dict[str, float | None] = {}
        for each in (each for each in self.sets if each.name):
            made = self.made.get(each.file_name(moment_of(batch)))
            metrics |= {f"eval/{each.name}/{name}": made.summary.get(name) if made else None for name in OF_A_SET}
        return metrics

    def summary(self, moment: str) -> dict[str, Any] | None:
        """The summary of the first set at a moment."""
        made = (self.made.get(each.file_name(moment)) for each in self.sets)
        return next((found.summary for found in made if found is not None), None)

    def find_best(self, run: Run, moment: str, batch: int) -> dict[str, Any] | None:
        """What weights/best is to say if the policy at this moment is the best so far by `eval.best_metric`; else None.
        The best so far is the one in weights/best."""
        best = self.parts.settings.eval.best_metric
        of_set, _, metric = (best or "").rpartition(".")
        made = self.made.get(f"{moment}.{of_set}" if of_set else moment)
        if best is None or made is None or (value := made.summary.get(metric)) is None:
            return None
        file = run.path / "weights" / "best" / BEST
        so_far = json.loads(file.read_bytes()) if file.exists() else {}
        if so_far.get("best") == best and so_far["value"] >= value and so_far["step"] != batch:
            return None
        return {"best": best, "value": value, "step": batch, "policy_version": self.parts.trainer.policy.version}


def build_eval_set(a: TrainerComponents, each: EvaluationSet, name: str) -> EvalSet:
    e, s = a.settings.eval, a.settings.rollout
    setup, task = a.others.get(name, a.main), each.task or a.settings.task
    params = eval_params(
        setup,
        each.temperature or e.temperature or s.temperature,
        each.max_completion_length or s.max_completion_length,
        name,
    )
    return EvalSet(
        requests=setup.prompts.held_out(each.num_prompts or e.num_prompts),
        reward_pool=setup.reward_pool,
        params=params,
        samples=each.num_samples or e.num_samples,
        seed=a.settings.run.seed,
        reward_range=task.reward_range,
        rewards=reward_names(setup.task.reward),
        name=name,
        every=e.every if each.every is None else each.every,
    )


def eval_params(setup: TaskSetup, tau: float, max_tokens: int, name: str = "") -> SamplingParams:
    """How an evaluation samples. `name` keys the random numbers of a set."""
    episodes = setup.episodes
    if episodes is not None:
        episodes = replace(episodes, limits=replace(episodes.limits, sampled=max_tokens))
    return SamplingParams(f"{PURPOSE} {name}".rstrip(), tau, max_tokens, episodes)


@contextmanager
def sampling_from_policy(a: TrainerComponents, state: LoopState) -> Iterator[None]:
    """Inside, the evaluator samples from π. vLLM servers have α: they finish what they were asked for, get π under its
    version, checked as after any weight sync, and then get α back if it is to sample more."""
    evaluator, policy, check = a.evaluator, a.trainer.policy, a.check_weight_sync
    if not isinstance(evaluator, VllmEvaluator):
        yield
        return
    a.prefetcher.finish()
    with evaluator.sampler.lent(policy.weights, policy.version, back=needs_alpha(a, state)):
        if check is not None:
            memory = check.memory()  # the next weight sync is compared with the last one
            check(policy, evaluator.sampler)
            check.remember(memory)
        yield


def load_run_evaluations(run: Run, batch: int, total: int) -> dict[str, Evaluation]:
    """What a run evaluated until a batch, by the names of the files; what it evaluated later is removed. An evaluation
    at its end gets the name of its batch if the run is to have more. Raises ValueError for damaged files, by name."""
    made: dict[str, Evaluation] = {}
    for summary in load_evaluations(run):
        name = summary.pop("name")
        records, (moment, dot, of_set) = load_evaluation_records(run, name), name.partition(".")
        ahead, renamed = (summary.get("step") or 0) > batch, moment == "after" and summary["step"] < total
        if ahead or renamed:
            for ending in ("json", "parquet"):
                (run.path / "evaluations" / f"{name}.{ending}").unlink(missing_ok=True)
        if renamed and not ahead:
            name = f"{moment_of(summary['step'])}{dot}{of_set}"
            run.record_evaluation(name, summary, records)
        if not ahead:
            made[name] = Evaluation({k: v for k, v in summary.items() if k not in OF_PLACE}, records)
    return made
