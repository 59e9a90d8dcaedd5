"""Evaluations: pass@k of a policy on held-out prompts.

Intervals are for the mean over all prompts of their kind. A completion is correct if it reaches the
maximum of the range of rewards. Random numbers have the same keys every time, so "before" and
"after" differ in the policy only.

`evaluate` makes one evaluation, `Evaluations` the evaluations of a run.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from lagrpo.core.estimators import (
    bootstrap_interval,
    clustered_interval,
    paired_interval,
    pass_at_k,
)
from lagrpo.distributed.ranks import Ranks
from lagrpo.errors import as_settings_error
from lagrpo.interrupts import raise_if_asked
from lagrpo.model.model import Policy
from lagrpo.rewards.pool import RewardPool
from lagrpo.rewards.reward import NOT_SCORED, Rewards
from lagrpo.rollout.base import RolloutEngine, SamplingParams
from lagrpo.runs.directory import BEST, Run
from lagrpo.runs.evaluation_names import Moment, evaluation_name, moment_of
from lagrpo.runs.files import read_json_object
from lagrpo.runs.reading import load_evaluation_records, load_evaluations
from lagrpo.runs.rollouts import REWARD
from lagrpo.settings.schema import Settings
from lagrpo.settings.sections import EvalSetSettings
from lagrpo.tasks.episodes import MAIN_TASK
from lagrpo.terminal.text import count_reasons
from lagrpo.training.sampling import TaskSetup, share
from lagrpo.types import Group, JsonObject, Outcome, Range, Request, is_correct

logger = logging.getLogger("lagrpo")


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The result of an evaluation: a summary for people and plots, and one row per prompt."""

    summary: JsonObject
    records: list[JsonObject] = field(repr=False)  # long: left out of what a notebook prints
    warnings: Sequence[str] = ()  # of rewards outside their range


@dataclass(frozen=True, slots=True)
class EvalSet:
    """Prompts that policies are evaluated on, and how."""

    requests: Sequence[Request]
    reward_pool: RewardPool
    params: SamplingParams
    samples: int  # completions per prompt
    seed: int = 0
    reward_range: Range = (0.0, 1.0)
    # Their names and ranges judge the completions.
    rewards: Rewards = field(default_factory=lambda: Rewards(()))
    name: str = ""  # "" without sets
    every: int = 0  # batches between evaluations; 0: before and after training only


@dataclass(frozen=True, slots=True)
class _Measure:
    """A metric of an evaluation before it is averaged."""

    by_prompt: dict[int, float]
    """values by prompt id, without prompts that have too few scored completions"""
    tries: float
    """independent tries of the metric that a prompt has: one try of pass@k takes k samples"""


def evaluate(eval_set: EvalSet, engine: RolloutEngine, ranks: Ranks | None = None) -> Evaluation:
    """Samples completions of the policy that the engine has, scores and counts them.

    Each of several ranks does so for its share, unless servers sample for rank 0. Raises
    Interrupted after a group, and RewardError if too many completions of all ranks have no reward.
    Collective.
    """
    ranks = ranks or Ranks()
    requests = share(engine, ranks, eval_set.requests)
    reward_pool = eval_set.reward_pool
    # One of several ranks has only a share of the completions, which says little about all.
    max_without_reward = None if ranks.size == 1 else 1.0
    scored: list[Group] = []
    with ranks.sync_interrupts():
        sampled = engine.sample(requests, eval_set.samples, eval_set.params)
        sampled_groups = (group for _, group in sampled)
        for group in reward_pool.score(sampled_groups, max_without_reward=max_without_reward):
            scored.append(group)
            raise_if_asked()
    # Groups come as they end; the order of the records must not depend on that or on the ranks.
    groups = sorted(ranks.join(scored), key=lambda group: group.prompt.key)
    reward_pool.check_groups(groups)
    rewards = eval_set.rewards
    records = [_record(group, eval_set.reward_range, rewards.names) for group in groups]
    warnings = rewards.describe_outside(
        [outcome for group in groups for outcome in _outcomes(group)]
    )
    return Evaluation(_summarize(records, eval_set), records, warnings)


def _outcomes(group: Group) -> list[Outcome]:
    return [completion.outcome or Outcome.unscored("") for completion in group.completions]


def _summarize(records: list[JsonObject], eval_set: EvalSet) -> JsonObject:
    """Returns the summary of an evaluation from its records, one per prompt."""
    unscored = sum(record["samples"] - record["scored"] for record in records)
    summary: JsonObject = {
        "prompts": len(records),
        "samples": eval_set.samples,
        "unscored": unscored,
    }
    if unscored:
        reasons = [reason for record in records for reason in record["reasons"] if reason]
        is_same = len(set(reasons)) == 1
        summary["unscored_reason"] = reasons[0] if is_same else count_reasons(reasons)
    for name, measure in _measures(records, eval_set.samples).items():
        values = list(measure.by_prompt.values())
        if values:
            ends = eval_set.reward_range if name == "reward" else (0.0, 1.0)
            low, high = _interval(values, measure.tries, eval_set.seed, ends)
            summary[name] = sum(values) / len(values)
            summary[f"{name}_low"] = low
            summary[f"{name}_high"] = high
    for name in eval_set.rewards.names:
        mean = _mean_over_prompts([record[f"{REWARD}{name}"] for record in records])
        if mean is not None:
            summary[f"rewards/{name}/mean"] = mean
    return summary


def _mean_over_prompts(rewards: Sequence[Sequence[float | None]]) -> float | None:
    """Returns the mean over prompts of the mean over each prompt's rewards, leaving out None."""
    means: list[float] = []
    for rewards_of_prompt in rewards:
        known = [reward for reward in rewards_of_prompt if reward is not None]
        if known:
            means.append(sum(known) / len(known))
    return sum(means) / len(means) if means else None


def _record(group: Group, reward_range: Range, names: Sequence[str]) -> JsonObject:
    """Returns the record of a prompt. `names` are the names of several rewards.

    A completion without the first of them counts as unscored: it is unknown if it is correct.
    """
    rewards = group.rewards
    completions = group.completions
    outcomes = _outcomes(group)
    if names:
        decisions = [outcome.correct for outcome in outcomes]
    else:
        decisions = [is_correct(outcome.reward, reward_range) for outcome in outcomes]
    correct = decisions.count(True)
    scored = correct + decisions.count(False)
    reasons = [outcome.reason if outcome.reward is None else "" for outcome in outcomes]
    for index, outcome in enumerate(outcomes):
        if outcome.reward is not None and decisions[index] is None:
            reasons[index] = f"{NOT_SCORED} (reward {names[0]!r})"
    count = len(completions)
    record: JsonObject = {
        "prompt_id": group.prompt.key,
        "prompt": group.prompt.messages[-1]["content"],
        "answer": str(group.prompt.answer),
        "samples": count,
        "scored": scored,
        "correct": correct,
        "reward": sum(rewards) / len(rewards) if rewards else None,
        "pass@1": correct / scored if scored else None,
        "mean_length": sum(c.length for c in completions) / count,
        "clipped_ratio": sum(not c.finished for c in completions) / count,
        "num_turns": sum(c.policy_turns for c in completions) / count,
        "completions": [c.text for c in completions],
        "rewards": [c.reward for c in completions],
        "reasons": reasons,
    }
    if names:
        for name in names:
            record[f"{REWARD}{name}"] = [outcome.parts.get(name) for outcome in outcomes]
        record["is_correct"] = decisions
        record["tokens"] = [c.length for c in completions]
    return record


def _measures(records: list[JsonObject], samples: int) -> dict[str, _Measure]:
    """Returns the reward and pass@k, for k = 1, 2, 4, … and `samples`."""
    rewards = {
        record["prompt_id"]: record["reward"] for record in records if record["reward"] is not None
    }
    measures = {"reward": _Measure(rewards, float(samples))}
    powers_of_two = {1 << n for n in range(samples.bit_length())}
    for k in sorted({samples, *powers_of_two}):
        by_prompt = {
            record["prompt_id"]: pass_at_k(record["scored"], record["correct"], k)
            for record in records
            if record["scored"] >= k
        }
        measures[f"pass@{k}"] = _Measure(by_prompt, samples / k)
    return measures


def _interval(values: list[float], tries: float, seed: int, ends: Range) -> tuple[float, float]:
    """Returns the 95 % interval of the mean of a metric in [ends].

    It is the `clustered_interval` of the values scaled to [0, 1], or a bootstrap over prompts if a
    value lies outside.
    """
    low, high = ends
    values_N = torch.tensor(values, dtype=torch.float64)
    if not all(low <= value <= high for value in values):
        return bootstrap_interval(values_N, seed=seed)
    below, above = clustered_interval((values_N - low) / (high - low), tries)
    return low + below * (high - low), low + above * (high - low)


def compare(before: Evaluation, after: Evaluation) -> dict[str, float]:
    """Returns the change of each pass@k: its mean over prompts, and its 95 % interval.

    Only prompts with scores in both evaluations count.
    """
    changes: dict[str, float] = {}
    samples = after.summary["samples"]
    old_measures = _measures(before.records, samples)
    for name, new in _measures(after.records, samples).items():
        old = old_measures[name]
        prompts = sorted(old.by_prompt.keys() & new.by_prompt.keys())
        if not prompts or name == "reward":
            continue
        old_N = torch.tensor([old.by_prompt[key] for key in prompts], dtype=torch.float64)
        new_N = torch.tensor([new.by_prompt[key] for key in prompts], dtype=torch.float64)
        low, high = paired_interval(old_N, new_N, new.tries)
        changes[f"{name}_change"] = float(new_N.mean() - old_N.mean())
        changes[f"{name}_change_low"] = low
        changes[f"{name}_change_high"] = high
    return changes


# The evaluations of a run


class Evaluations:
    """The evaluation sets of a run, or a single one without a name, and the finished evaluations.

    `finished` has them by the names of their files: before, batch-000010, after, each followed by
    .SET. Only the ones before training keep their records, which `compare` reads. Raises
    SettingsError for a set whose prompts do not fit.
    """

    def __init__(
        self, settings: Settings, tasks: Mapping[str, TaskSetup], policy: Policy, ranks: Ranks
    ) -> None:
        self.policy = policy
        self.ranks = ranks
        self.batches = settings.schedule.batches
        self.best_metric = settings.eval.best_metric
        self.finished: dict[str, Evaluation] = {}
        self.sets: list[EvalSet] = []
        if not settings.eval.takes_place:
            return
        named_sets = {set_settings.name: set_settings for set_settings in settings.eval.sets}
        for name, set_settings in (named_sets or {"": EvalSetSettings(name="only")}).items():
            setup = tasks.get(name, tasks[MAIN_TASK])
            self.sets.append(build_eval_set(settings, setup, set_settings, name))

    def add(self, name: str, evaluation: Evaluation) -> None:
        """Adds a finished evaluation, without its records unless they are needed later.

        Records have the texts of all completions, so the records of all evaluations would need much
        memory.
        """
        is_compared = moment_of(name) == Moment.BEFORE
        records = evaluation.records if is_compared else []
        self.finished[name] = Evaluation(evaluation.summary, records)

    def load(self, run: Run, batch: int) -> dict[str, Evaluation]:
        """Returns the evaluations that a run finished until a batch, by the names of their files.

        Later evaluations are removed, and so are the ones at the end of the run if it is to have
        more batches. Raises ValueError for damaged files, by name.
        """
        finished: dict[str, Evaluation] = {}
        for summary in load_evaluations(run):
            name = summary.pop("name")
            step = summary["step"]
            is_at_old_end = moment_of(name) == Moment.AFTER and step < self.batches
            if step > batch or is_at_old_end:
                for ending in ("json", "parquet"):
                    (run.path / "evaluations" / f"{name}.{ending}").unlink(missing_ok=True)
            else:
                finished[name] = Evaluation(summary, load_evaluation_records(run, name))
        return finished

    def find_due(self, batch: int, moment: Moment = Moment.BETWEEN) -> dict[str, EvalSet]:
        """Returns the sets that are due, by the names of their files.

        They are due after a batch, or before or after training.
        """
        is_between = 0 < batch < self.batches
        due: dict[str, EvalSet] = {}
        for eval_set in self.sets:
            is_its_batch = is_between and eval_set.every and batch % eval_set.every == 0
            name = evaluation_name(batch, eval_set.name, moment)
            # Moment.BETWEEN is an empty string, so it is false.
            if (moment or is_its_batch) and name not in self.finished:
                due[name] = eval_set
        return due

    def make(self, name: str, eval_set: EvalSet, engine: RolloutEngine, batch: int) -> Evaluation:
        """Evaluates the policy, and compares it with the initial one.

        The engine samples from it. Collective.
        """
        evaluation = evaluate(eval_set, engine, self.ranks)
        summary: JsonObject = {
            "step": batch,
            "policy_version": self.policy.version,
        }
        if eval_set.name:
            summary["set"] = eval_set.name
            summary["reward_range"] = list(eval_set.reward_range)
        summary |= evaluation.summary
        before = self.finished.get(evaluation_name(0, eval_set.name, Moment.BEFORE))
        if before is not None:
            summary |= compare(before, evaluation)
        evaluation = replace(evaluation, summary=summary)
        self.add(name, evaluation)
        return evaluation

    def metrics(self, batch: int) -> dict[str, float | None]:
        """Returns the metrics of each named set after `batch` batches, for the next batch's line.

        They are None if the set was not evaluated then.
        """
        moment = Moment.BEFORE if batch == 0 else Moment.BETWEEN
        metrics: dict[str, float | None] = {}
        for eval_set in self.sets:
            if not eval_set.name:
                continue
            evaluation = self.finished.get(evaluation_name(batch, eval_set.name, moment))
            summary = {} if evaluation is None else evaluation.summary
            for name in ("pass@1", "reward"):
                metrics[f"eval/{eval_set.name}/{name}"] = summary.get(name)
        return metrics

    def summary(self, moment: Moment) -> JsonObject | None:
        """Returns the summary of the first set that was evaluated before or after training."""
        for eval_set in self.sets:
            evaluation = self.finished.get(evaluation_name(0, eval_set.name, moment))
            if evaluation is not None:
                return evaluation.summary
        return None

    def find_best(self, run: Run, batch: int, moment: Moment) -> JsonObject | None:
        """Returns the facts for weights/best if the policy is the best so far, or None.

        `eval.best_metric` says which metric decides. The first of equal policies stays. In a
        resumed run, weights/best may be of a later batch than this one.
        """
        best_metric = self.best_metric
        if best_metric is None:
            return None
        value = self._recorded_value(best_metric, batch, moment)
        if value is None:
            return None
        file = run.path / "weights" / "best" / BEST
        if file.exists():
            with as_settings_error(str(file), KeyError, TypeError):
                earlier = read_json_object(file)
                earlier_batch: int = earlier["step"]
                earlier_value: float | None = earlier["value"]
                earlier_metric: str = earlier["best"]
            if earlier_metric != best_metric:  # a resumed run has changed eval.best_metric
                earlier_value = self._recorded_value(best_metric, earlier_batch)
            # A resumed run evaluates some batches again: with the same result, the weights and
            # their event are written again.
            is_same = earlier_batch == batch and earlier_value == value
            if earlier_value is not None and earlier_value >= value and not is_same:
                return None
        return {
            "best": best_metric,
            "value": value,
            "step": batch,
            "policy_version": self.policy.version,
        }

    def _recorded_value(
        self, best_metric: str, batch: int, moment: Moment | None = None
    ) -> float | None:
        """Returns the value of `eval.best_metric` after a batch, at any moment unless one is given.

        None if no evaluation has it.
        """
        set_name, _, metric = best_metric.rpartition(".")
        for possible_moment in Moment if moment is None else (moment,):
            evaluation = self.finished.get(evaluation_name(batch, set_name, possible_moment))
            if evaluation is not None and evaluation.summary["step"] == batch:
                return evaluation.summary.get(metric)
        return None


def build_eval_set(
    settings: Settings, setup: TaskSetup, set_settings: EvalSetSettings, name: str = ""
) -> EvalSet:
    """Returns the prompts of a set, and how completions are sampled.

    `name` keys its random numbers.
    """
    defaults = settings.eval
    sampling = settings.rollout
    max_tokens = set_settings.max_completion_length or sampling.max_completion_length
    episodes = setup.episodes
    if episodes is not None:
        episodes = replace(episodes, sampled=max_tokens)
    purpose = f"evaluate {name}".rstrip()
    temperature = set_settings.temperature or defaults.temperature or sampling.temperature
    return EvalSet(
        requests=setup.prompts.held_out(set_settings.num_prompts or defaults.num_prompts),
        reward_pool=setup.reward_pool,
        params=SamplingParams(
            purpose,
            tau=temperature,
            max_tokens=max_tokens,
            episodes=episodes,
            top_p=set_settings.top_p or defaults.top_p,
            stop=sampling.stop,
        ),
        samples=set_settings.num_samples or defaults.num_samples,
        seed=settings.run.seed,
        reward_range=(set_settings.task or settings.task).reward_range,
        rewards=Rewards.from_reward(setup.task.reward),
        name=name,
        every=defaults.every if set_settings.every is None else set_settings.every,
    )
