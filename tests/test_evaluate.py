"""pass@k of a policy, by hand: what is sampled and its rewards are given, the numbers are worked
out."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import sample_rewards
import torch
from scoring import make_group
from tiny import tiny_policy

from lagrpo.core.estimators import clustered_interval, paired_interval
from lagrpo.distributed.ranks import Ranks
from lagrpo.interrupts import Interrupted, deferring, interruptible
from lagrpo.lifecycle.evaluation import EvalSet, Evaluation, Evaluations, compare, evaluate
from lagrpo.rewards.pool import RewardError, RewardPool
from lagrpo.rewards.reward import Reward
from lagrpo.rewards.reward import Rewards as SeveralRewards
from lagrpo.rollout.base import SamplingParams
from lagrpo.runs.directory import Run
from lagrpo.runs.evaluation_names import Moment
from lagrpo.settings.schema import Settings
from lagrpo.types import Completion, Group, Outcome, OutcomeKind, Prompt, Request

Rewards = dict[int, list[float | None]]
REWARDS: Rewards = {
    4: [1.0, 0.0, 0.0, 0.0],  # pass@1 1/4, pass@2 1 - C(3,2)/C(4,2) = 1/2, pass@4 1
    9: [0.0, None, 0.0, None],  # two scored: pass@1 0, pass@2 0, no pass@4
}


class GivenRewards:
    """In place of a reward pool: all completions have their outcomes."""

    def score(self, groups: Iterable[Group], **_options: object) -> Iterator[Group]:
        return iter(groups)

    def check_groups(self, groups: Iterable[Group]) -> None:
        pass


def completion(n: int, reward: float | None) -> Completion:
    outcome = Outcome.unscored("no") if reward is None else Outcome.scored(reward)
    tokens = torch.arange(n + 1)
    return Completion(
        tokens, torch.zeros(n + 1), torch.zeros(n + 1).long(), n % 2 == 0, f"text {n}", outcome
    )


def evaluated(rewards: Rewards, reward_range: tuple[float, float] = (0.0, 1.0)) -> Any:
    """The evaluation of completions with these rewards by prompt; None could not be scored. Groups
    end in the opposite order."""
    requests = [
        Request(0, 0, Prompt(k, ({"role": "user", "content": f"{k}?"},), str(k))) for k in rewards
    ]
    groups = [
        Group(r.prompt, tuple(map(completion, range(9), rewards[r.prompt.key]))) for r in requests
    ]
    answers = reversed([*zip(requests, groups, strict=True)])
    reward_pool: Any = GivenRewards()
    engine: Any = SimpleNamespace(
        sample=lambda requests, G, params: answers, samples_on_every_rank=True
    )
    samples = len(next(iter(rewards.values()), []))
    return evaluate(
        EvalSet(
            requests,
            reward_pool,
            SamplingParams("evaluate", 1.0, 8),
            samples,
            reward_range=reward_range,
        ),
        engine,
    )


def test_summary_and_records_by_hand():
    evaluation = evaluated(REWARDS)
    summary, (first, second) = evaluation.summary, evaluation.records
    assert (summary["prompts"], summary["samples"], summary["unscored"]) == (2, 4, 2)
    assert summary["pass@1"] == summary["reward"] == (1 / 4 + 0) / 2
    assert summary["pass@2"] == (1 / 2 + 0) / 2
    assert summary["pass@4"] == 1.0
    assert "pass@8" not in summary
    assert [first["prompt_id"], second["prompt_id"]] == [4, 9]
    assert (first["prompt"], first["answer"], first["clipped_ratio"]) == ("4?", "4", 0.5)
    assert (first["samples"], first["scored"], first["correct"], first["pass@1"]) == (4, 4, 1, 0.25)
    assert (second["samples"], second["scored"], second["correct"], second["reward"]) == (
        4,
        2,
        0,
        0.0,
    )
    assert second["rewards"] == [0.0, None, 0.0, None]
    assert first["mean_length"] == (1 + 2 + 3 + 4) / 4
    assert first["completions"] == ["text 0", "text 1", "text 2", "text 3"]


def test_completion_without_the_first_of_several_rewards_counts_neither_as_right_nor_as_wrong():
    """Of 4, the first reward scores three: pass@1 1/3, pass@2 1 - C(2,2)/C(3,2) = 2/3."""
    rewards = SeveralRewards(
        (
            Reward(sample_rewards.correct, name="correct"),
            Reward(sample_rewards.letters, name="letters"),
        )
    )
    values = [(1.0, 0.5), (0.0, 0.5), (None, 1.0), (0.0, None)]
    outcomes = [
        rewards.combine([Outcome(OutcomeKind.SCORED, first), Outcome(OutcomeKind.SCORED, second)])
        for first, second in values
    ]
    prompt = Prompt(4, ({"role": "user", "content": "4?"},), "4")
    completions = [replace(completion(0, 0.0), outcome=outcome) for outcome in outcomes]
    sampled = [(Request(0, 0, prompt), Group(prompt, tuple(completions)))]
    engine: Any = SimpleNamespace(
        sample=lambda requests, G, params: sampled, samples_on_every_rank=True
    )
    reward_pool: Any = GivenRewards()
    params = SamplingParams("evaluate", 1.0, 8)
    evaluation = evaluate(EvalSet([], reward_pool, params, samples=4, rewards=rewards), engine)
    (record,) = evaluation.records
    assert (record["scored"], record["correct"]) == (3, 1)
    assert record["is_correct"] == [True, False, None, False]
    assert [bool(reason) for reason in record["reasons"]] == [False, False, True, False]
    summary = evaluation.summary
    assert (summary["pass@1"], summary["pass@2"], summary["unscored"]) == (1 / 3, 2 / 3, 1)
    assert summary["reward"] == (1.5 + 0.5 + 1.0 + 0.0) / 4


def test_evaluation_names_a_reward_outside_its_range():
    rewards = SeveralRewards.from_reward(sample_rewards.correct)
    sampled = [(None, Group(Prompt(0, ({"content": "?"},), "7"), (completion(0, 5.0),)))]
    engine: Any = SimpleNamespace(
        sample=lambda requests, G, params: sampled, samples_on_every_rank=True
    )
    reward_pool: Any = GivenRewards()
    params = SamplingParams("evaluate", 1.0, 8)
    evaluation = evaluate(EvalSet([], reward_pool, params, samples=1, rewards=rewards), engine)
    assert len(evaluation.warnings) == 1


def test_largest_k_is_the_number_of_samples():
    """k is 1, 2, 4, 6. With 2 of 6 correct, pass@6 = 1 and pass@4 = 1 - C(4,4)/C(6,4) = 14/15."""
    summary = evaluated({1: [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]}).summary
    names = [name for name in summary if name.startswith("pass") and name[-1].isdigit()]
    assert names == ["pass@1", "pass@2", "pass@4", "pass@6"]
    assert summary["pass@6"] == 1
    assert summary["pass@4"] == pytest.approx(14 / 15)


def test_every_metric_has_an_interval_around_it():
    rewards: Rewards = {k: [float(k % 3 == 0), float(k % 2 == 0)] for k in range(30)}
    summary = evaluated(rewards).summary
    for name in ("reward", "pass@1", "pass@2"):
        assert 0 < summary[f"{name}_low"] < summary[name] < summary[f"{name}_high"] < 1
    sums: list[float] = [sum(samples) for samples in rewards.values()]  # type: ignore[arg-type]
    values_N = torch.tensor(sums, dtype=torch.float64) / 2
    assert (summary["pass@1_low"], summary["pass@1_high"]) == clustered_interval(values_N, 2.0)
    certain = evaluated({k: [1.0, 1.0] for k in range(20)}).summary
    assert certain["pass@1"] == certain["pass@1_high"] == 1
    assert certain["pass@1_low"] < 0.85


@pytest.mark.parametrize(("k", "tries"), [(1, 4.0), (2, 2.0), (4, 1.0)])
def test_interval_of_pass_at_k_counts_k_samples_as_a_try(k, tries):
    """Two prompts with 1 of 4 correct and two with 2 of 4, so that no prompt is like the others."""
    rewards: Rewards = {key: [1.0, float(key > 2), 0.0, 0.0] for key in (1, 2, 3, 4)}
    summary = evaluated(rewards).summary
    value_of = {1: (1 / 4, 2 / 4), 2: (3 / 6, 5 / 6), 4: (1.0, 1.0)}[k]
    values_N = torch.tensor(value_of, dtype=torch.float64).repeat_interleave(2)
    expected = clustered_interval(values_N, tries)
    assert (summary[f"pass@{k}_low"], summary[f"pass@{k}_high"]) == pytest.approx(expected)


def test_interval_of_the_reward_counts_each_sample_as_a_try():
    """Rewards of the range 0 to 2, with the means 1 and 1/2 of four samples each."""
    rewards: Rewards = {1: [2.0, 2.0, 0.0, 0.0], 2: [2.0, 0.0, 0.0, 0.0]}
    summary = evaluated(rewards, (0.0, 2.0)).summary
    low, high = clustered_interval(torch.tensor([1 / 2, 1 / 4], dtype=torch.float64), 4.0)
    assert (summary["reward_low"], summary["reward_high"]) == pytest.approx((2 * low, 2 * high))


def test_interval_of_a_change_of_pass_at_k_counts_k_samples_as_a_try():
    before = evaluated({1: [1.0, 0.0, 0.0, 0.0], 2: [1.0, 1.0, 0.0, 0.0]})
    after = evaluated({1: [1.0, 1.0, 0.0, 0.0], 2: [1.0, 0.0, 0.0, 0.0]})
    before_N = torch.tensor([3 / 6, 5 / 6], dtype=torch.float64)
    expected = paired_interval(before_N, before_N.flip(0), 4 / 2)
    comparison = compare(before, after)
    found = (comparison["pass@2_change_low"], comparison["pass@2_change_high"])
    assert found == pytest.approx(expected)


def test_correct_is_the_maximum_of_the_reward_range():
    up_to_ten = evaluated({1: [1.0, 10.0], 2: [5.0, 0.0]}, reward_range=(0.0, 10.0))
    assert up_to_ten.summary["pass@1"] == 1 / 4
    assert [r["correct"] for r in up_to_ten.records] == [1, 0]
    assert 0 < up_to_ten.summary["reward_low"] < 4 < up_to_ten.summary["reward_high"] < 10
    assert evaluated({1: [-1.0, 0.0]}, reward_range=(-1.0, 0.0)).summary["pass@1"] == 1 / 2


def test_rewards_outside_their_range_have_a_bootstrap_interval():
    rewards: Rewards = {1: [0.5, 2.0, 1.0], 2: [-1.0, None, 0.25], 3: [0.0, 0.0, 0.0]}
    summary = evaluated(rewards).summary
    assert summary["pass@1"] == pytest.approx((2 / 3 + 0) / 3)
    assert summary["reward"] == pytest.approx((3.5 / 3 - 0.75 / 2) / 3)
    assert evaluated(rewards).summary == summary


def test_before_and_after_are_compared_prompt_by_prompt():
    """Prompt 3 has no score before, and takes no part."""
    before = evaluated({1: [0.0, 0.0], 2: [1.0, 0.0], 3: [None, None]})
    after = evaluated({1: [1.0, 0.0], 2: [1.0, 1.0], 3: [0.0, 0.0]})
    comparison = compare(before, after)
    assert comparison["pass@1_change"] == (1 / 2 + 1 / 2) / 2
    assert comparison["pass@2_change"] == (1 + 0) / 2
    assert comparison["pass@1_change_low"] == pytest.approx(
        1 / 2, abs=1e-6
    )  # both rose alike: only rounding is left
    assert comparison["pass@1_change_high"] == pytest.approx(1 / 2, abs=1e-6)


def test_prompt_without_any_score_does_not_count():
    summary = evaluated({1: [None, None], 2: [1.0, 0.0]}).summary
    assert (summary["pass@1"], summary["unscored"], summary["prompts"]) == (0.5, 2, 2)
    assert evaluated({1: [None, None]}).summary == {
        "prompts": 1,
        "samples": 2,
        "unscored": 2,
        "unscored_reason": "no",
    }


def test_only_the_evaluation_before_training_keeps_the_texts_of_its_completions():
    """Later evaluations are compared with it. Their own records are written, and not read again."""
    prompt = Prompt(4, ({"role": "user", "content": "4?"},), "4")
    requests = [Request(0, 0, prompt)]
    answers = [(requests[0], Group(prompt, tuple(map(completion, range(4), REWARDS[4]))))]
    engine: Any = SimpleNamespace(
        sample=lambda requests, G, params: answers, samples_on_every_rank=True
    )
    reward_pool: Any = GivenRewards()
    eval_set = EvalSet(requests, reward_pool, SamplingParams("evaluate", 1.0, 8), samples=4)
    settings = Settings.model_validate({"eval": {"at_start": False}})
    evaluations = Evaluations(settings, {}, tiny_policy(), Ranks())
    names = ("before", "batch-000001", "after")
    results = [evaluations.make(name, eval_set, engine, batch) for batch, name in enumerate(names)]
    assert [len(evaluation.records) for evaluation in results] == [1, 1, 1]
    assert [len(evaluations.finished[name].records) for name in names] == [1, 0, 0]
    assert evaluations.finished["after"].summary["pass@1_change"] == 0.0


BEST_AT_5 = {"best": "pass@1", "value": 0.8, "step": 5, "policy_version": 5}


@pytest.mark.parametrize(
    ("best", "batch", "summary", "metric", "is_best"),
    [
        pytest.param(None, 4, {"pass@1": 0.6}, "pass@1", True, id="the first"),
        pytest.param(BEST_AT_5, 6, {"pass@1": 0.9}, "pass@1", True, id="better"),
        pytest.param(BEST_AT_5, 6, {"pass@1": 0.8}, "pass@1", False, id="equal"),
        pytest.param(BEST_AT_5, 6, {"pass@1": 0.6}, "pass@1", False, id="worse"),
        pytest.param(BEST_AT_5, 4, {"pass@1": 0.6}, "pass@1", False, id="worse, earlier batch"),
        pytest.param(BEST_AT_5, 5, {"pass@1": 0.8}, "pass@1", True, id="the same once more"),
        pytest.param(BEST_AT_5, 5, {"pass@1": 0.6}, "pass@1", False, id="same batch, worse"),
        pytest.param(BEST_AT_5, 6, {"reward": 0.4}, "reward", False, id="worse by another metric"),
        pytest.param(BEST_AT_5, 6, {"reward": 0.6}, "reward", True, id="better by another metric"),
        pytest.param(BEST_AT_5, 6, {"pass@2": 0.1}, "pass@2", True, id="metric without a record"),
        pytest.param(BEST_AT_5, 6, {"reward": 0.4}, "pass@1", False, id="no value"),
    ],
)
def test_best_policy_is_replaced_only_by_a_better_one(
    tmp_path, best, batch, summary, metric, is_best
):
    """weights/best is from batch 5, whose evaluation has a reward of .5."""
    run = Run(tmp_path)
    if best is not None:
        run.record_best(lambda folder: None, found=best)
    settings = Settings.model_validate({"eval": {"at_start": False}})
    evaluations = Evaluations(settings, {}, tiny_policy(), Ranks())
    evaluations.best_metric = metric
    evaluations.add("batch-000005", Evaluation({"step": 5, "reward": 0.5}, []))
    evaluations.add(f"batch-{batch:06d}", Evaluation({"step": batch, **summary}, []))
    found = evaluations.find_best(run, batch, Moment.BETWEEN)
    assert (found is not None) == is_best
    if found is not None:
        assert (found["step"], found["value"]) == (batch, summary[metric])


def test_signal_ends_an_evaluation_after_the_group_that_is_scored():
    scored: list[Group] = []

    def score(groups: Iterable[Group], **_options: object) -> Iterator[Group]:
        for group in groups:
            if not scored:  # a second signal would end the process at once
                signal.raise_signal(signal.SIGTERM)
            scored.append(group)
            yield group

    prompts = [Prompt(key, (), None) for key in range(3)]
    sampled = [(None, Group(prompt, ())) for prompt in prompts]
    setup: Any = SimpleNamespace(
        sample=lambda requests, G, params: iter(sampled), score=score, samples_on_every_rank=True
    )
    eval_set = EvalSet([], setup, SamplingParams("evaluate", 1.0, 8), samples=1)
    with interruptible(), deferring(), pytest.raises(Interrupted) as stop:
        evaluate(eval_set, setup)
    assert stop.value.signal == signal.SIGTERM
    assert [group.prompt.key for group in scored] == [0]


def test_share_without_a_reward_is_the_one_of_all_ranks():
    """This rank's completion has no reward. That of another rank has one, then none."""
    sampled = [(None, make_group("raise bad", key=1))]
    engine: Any = SimpleNamespace(
        sample=lambda requests, G, params: iter(sampled), samples_on_every_rank=True
    )
    groups_of_other_rank: list[Group] = []
    ranks: Any = SimpleNamespace(
        size=2,
        share=list,
        sync_interrupts=nullcontext,
        join=lambda groups: [*groups, *groups_of_other_rank],
    )
    with RewardPool(sample_rewards.act, workers=1) as reward_pool:
        eval_set = EvalSet([], reward_pool, SamplingParams("evaluate", 1.0, 8), samples=1)
        groups_of_other_rank[:] = reward_pool.score([make_group("7", key=0)])
        assert evaluate(eval_set, engine, ranks).summary["unscored"] == 1
        bad_group = make_group("raise bad", key=0)
        groups_of_other_rank[:] = reward_pool.score([bad_group], max_without_reward=1.0)
        with pytest.raises(RewardError, match="2 of 2 completions have no reward"):
            evaluate(eval_set, engine, ranks)
