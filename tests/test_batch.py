"""From scored groups to advantages and weights, and what each token of a micro-batch brings with
it."""

from __future__ import annotations

import pytest
import torch

from lagrpo.core.recipes import resolve
from lagrpo.training.batch import Batch, assemble, micro_batches
from lagrpo.types import Completion, Group, Outcome, Prompt


def completion(reward: float, versions: list[int], finished: bool = True) -> Completion:
    count = len(versions)
    return Completion(
        token_ids=torch.arange(3, 3 + count),
        rollout_logp=-torch.ones(count),
        versions=torch.tensor(versions),
        finished=finished,
        text="",
        outcome=Outcome.scored(reward),
    )


def groups_of(rewards_NG: list[list[float]]) -> list[Group]:
    return [
        Group(Prompt(n, (), "", (5, 6)), tuple(completion(r, [0, 0]) for r in rewards))
        for n, rewards in enumerate(rewards_NG)
    ]


def assembled(groups: list[Group], recipe: str = "red_drop", seed: int = 0, b: int = 1) -> Batch:
    return assemble(groups, resolve(recipe), 8, seed=seed, b=b)


ONE_IN_EIGHT = [1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]


def kept_failures(batch: Batch) -> list[int]:
    """The index of the failure that RED-Drop keeps, for each group of eight with one success."""
    return (batch.advantage_C.view(-1, 8) < 0).int().argmax(dim=1).tolist()


def test_random_numbers_of_advantages_differ_between_groups():
    failures = kept_failures(assembled(groups_of([ONE_IN_EIGHT] * 20)))
    assert len(set(failures)) > 4  # of seven failures


def test_random_numbers_of_advantages_are_keyed_by_seed_batch_and_group():
    """A group keeps its own, whatever groups are beside it; another batch or seed has others."""
    failures = kept_failures(assembled(groups_of([ONE_IN_EIGHT] * 20)))
    assert kept_failures(assembled(groups_of([ONE_IN_EIGHT] * 20))) == failures
    assert kept_failures(assembled(groups_of([ONE_IN_EIGHT] * 7))) == failures[:7]
    assert kept_failures(assembled(groups_of([ONE_IN_EIGHT] * 20), b=2)) != failures
    assert kept_failures(assembled(groups_of([ONE_IN_EIGHT] * 20), seed=1)) != failures


@pytest.mark.parametrize(
    ("recipe", "scale"), [("grpo_batch_scaled", True), ("dr_grpo", False)], ids=["batch", "group"]
)
def test_advantages_have_statistics_of_the_whole_batch_if_the_recipe_says_so(recipe, scale):
    """Another group with larger rewards changes the advantages of the first one, or does not."""
    one = assembled(groups_of([[1.0, 0.0]]), recipe).advantage_C
    two = assembled(groups_of([[1.0, 0.0], [9.0, -9.0]]), recipe).advantage_C[:2]
    assert torch.equal(one, two) != scale


def test_inputs_of_a_micro_batch_say_how_stale_each_token_is_and_what_was_cut():
    members = (completion(1.0, [3, 3, 5]), completion(0.0, [4], finished=False))
    (row,) = micro_batches(assembled([Group(Prompt(0, (), "", (5,)), members)], "dr_grpo"), 99)
    x = row.loss_inputs(torch.zeros(4), version=7)
    by_completion = {
        c: (x.staleness[x.completion == n].tolist(), bool(x.finished[n]))
        for n, c in enumerate(row.members)
        if x.staleness is not None and x.finished is not None
    }
    assert by_completion == {0: ([4, 4, 2], True), 1: ([3], False)}


def test_staleness_of_offline_completions_is_unknown():
    members = (completion(1.0, [-1, -1]), completion(0.0, [-1]))
    (row,) = micro_batches(assembled([Group(Prompt(0, (), "", (5,)), members)], "dr_grpo"), 99)
    assert row.loss_inputs(torch.zeros(3), version=7).staleness is None


def test_staleness_of_a_row_with_offline_and_sampled_completions_is_unknown():
    """In a row of their own, the sampled completions still know theirs."""
    offline = Group(Prompt(0, (), "", (5,)), (completion(1.0, [-1, -1]), completion(0.0, [-1])))
    sampled = Group(Prompt(1, (), "", (6,)), (completion(1.0, [5, 5]), completion(0.0, [6, 6])))
    (mixed_row,) = micro_batches(assembled([offline, sampled], "dr_grpo"), 99)
    assert mixed_row.loss_inputs(torch.zeros(7), version=8).staleness is None
    (sampled_row,) = micro_batches(assembled([sampled], "dr_grpo"), 99)
    staleness = sampled_row.loss_inputs(torch.zeros(4), version=8).staleness
    assert staleness is not None
    assert sorted(staleness.tolist()) == [2, 2, 3, 3]


def test_first_update_on_a_batch_has_pi_as_pi_k_without_a_gradient():
    (row,) = micro_batches(assembled(groups_of([[1.0, 0.0]]), "dr_grpo"), 99)
    logp_T = torch.zeros(4, requires_grad=True)
    x = row.loss_inputs(logp_T, version=0)
    assert x.old_logp is not None
    assert not x.old_logp.requires_grad
    assert x.old_logp.tolist() == logp_T.tolist()
    later = row.with_logprobs(torch.ones(4)).loss_inputs(logp_T, version=1)
    assert later.old_logp is not None
    assert later.old_logp.tolist() == [1.0] * 4
