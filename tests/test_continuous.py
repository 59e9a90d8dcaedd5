"""Completions that go on after weight syncs (schedule.max_staleness), with the local engine."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from chaos import Sections, leaves, merged
from ranks import together
from running import tiny_settings
from test_episodes import episode_requests, make_episodes, sample_groups, talking_policy
from test_resume import cut_to, differing, go_on
from test_talking_runs import model as talking_model  # noqa: F401 - a fixture

from lagrpo import train
from lagrpo.model.layout import Packed
from lagrpo.model.loading import load_policy
from lagrpo.model.model import copy_policy
from lagrpo.rollout.local import LocalSampler
from lagrpo.runs import load_metrics, load_rollouts
from lagrpo.types import Completion, JsonObject
from lagrpo.verify import verify_run

# Lengths differ within a group and between groups: a random model ends a completion by chance.
BASE: Sections = {
    "model": {"dtype": "bfloat16"},
    "rollout": {"max_completion_length": 24, "max_num_seqs": 8, "num_generations": 2},
    "schedule": {"batches": 5, "prompts_per_batch": 3, "max_staleness": 3},
    "checkpoint": {"save_every": 1, "save_minutes": 0, "save_total_limit": 20},
    "loss": {"recipe": "grpo"},
    "optimizer": {"learning_rate": 3e-3},
    "eval": {"every": 0, "at_start": False},
}
OF_SCHEDULE = ("completions/occupancy", "weight_sync/recomputed")
"""Metrics that other schedules do not have."""


def settings_in(root: Path, model: Path, name: str, /, *layers: Sections) -> dict[str, JsonObject]:
    return merged(tiny_settings(model, root), BASE, *layers, {"run": {"name": name}})


@pytest.fixture(scope="module")
def run_with(model, tmp_path_factory):
    """Returns the run with other values of `schedule` and rows. Tests leave it as it is."""
    root = tmp_path_factory.mktemp("runs")

    def run(max_staleness: int | None = 3, num_iterations: int = 1, rows: int = 8) -> Path:
        return make(max_staleness, num_iterations, rows)

    @cache
    def make(max_staleness: int | None, num_iterations: int, rows: int) -> Path:
        sections: Sections = {
            "schedule": {"max_staleness": max_staleness, "num_iterations": num_iterations},
            "rollout": {"max_num_seqs": rows},
            "checkpoint": {"export_every": 1},
        }
        name = f"k{max_staleness}-i{num_iterations}-rows{rows}"
        return train(settings_in(root, model, name, sections)).run

    return run


def versions_of(row: JsonObject) -> list[int]:
    """The versions of the sampled tokens of a completion."""
    return [version for version in row["policy_versions"] if version >= 0]


@pytest.mark.parametrize(("num_iterations", "bound"), [(1, 3), (2, 2)])
def test_no_token_is_older_than_the_bound(run_with, num_iterations, bound):
    """K = 3 is one batch ahead if a batch makes two updates."""
    rows = load_rollouts(run_with(num_iterations=num_iterations))
    ages = [row["policy_version"] - version for row in rows for version in versions_of(row)]
    assert min(ages) >= 0
    assert 0 < max(ages) <= bound


def test_batches_have_the_prompts_of_an_on_policy_run(run_with):
    def prompts(run: Path) -> list[tuple[int, ...]]:
        names = ("step", "epoch", "prompt_id", "sample_index")
        return [tuple(row[name] for name in names) for row in load_rollouts(run)]

    assert prompts(run_with()) == prompts(run_with(None))


def test_versions_never_fall_within_a_completion_of_several(run_with):
    versions = [versions_of(row) for row in load_rollouts(run_with())]
    assert any(len(set(versions_of_row)) > 1 for versions_of_row in versions)
    assert all(a <= b for versions_of_row in versions for a, b in pairwise(versions_of_row))


def test_bound_of_zero_is_on_policy_to_the_bit(run_with):
    outputs, expected = (leaves(run_with(bound), exact=True) for bound in (0, None))
    for line in [*outputs["metrics"], *expected["metrics"]]:
        for name in OF_SCHEDULE:
            del line[name]
    assert [name for name in expected if outputs[name] != expected[name]] == []


def test_logprobs_are_those_of_the_version_that_sampled_each_token(run_with, model):
    """Each version computes the whole completion. Its kernels are exact in bfloat16."""
    run = run_with()
    rows = load_rollouts(run)
    num_compared = 0
    for version in sorted({version for row in rows for version in versions_of(row)}):
        folder = run / f"weights/v{version:06d}" if version else model
        policy = load_policy(str(folder), torch.bfloat16)
        tolerance = 0.0 if policy.model.exact else 0.02
        for row in rows:
            places = [t for t, v in enumerate(row["policy_versions"]) if v == version]
            completion = torch.tensor(row["token_ids"])
            with torch.no_grad():
                logp = policy.logp(Packed.build([(row["prompt_token_ids"], [completion])]))
            recorded = torch.tensor(row["rollout_logprobs"])
            torch.testing.assert_close(recorded[places], logp[places], rtol=0, atol=tolerance)
            num_compared += len(places)
    assert num_compared == sum(len(row["token_ids"]) for row in rows)


def test_keys_and_version_decide_tokens_whatever_is_sampled_beside(run_with):
    """The initial policy samples batch 1 in both runs. Half as many rows begin its groups later."""

    def tokens(run: Path) -> list[list[int]]:
        rows = [row for row in load_rollouts(run) if row["step"] == 1]
        assert {version for row in rows for version in versions_of(row)} == {0}
        return [row["token_ids"] for row in rows]

    assert tokens(run_with(rows=4)) == tokens(run_with())


def test_last_batch_leaves_nothing_in_flight(run_with):
    state = json.loads((run_with() / "checkpoints/step-000005/state.json").read_bytes())
    assert (state["announced"], state["in_flight"]) == ({}, [])
    assert state["loop"]["prefetched"] == []


def test_replay_finds_no_difference_in_completions_of_several_versions(run_with):
    report = verify_run(run_with(), None, trust_run_code=True)
    assert report.differences == []
    assert report.compared["samples"] == report.compared["rollout_logprobs"] > 0


def test_metrics_count_mixed_completions_rows_and_tokens_computed_again(run_with):
    first, *later = load_metrics(run_with())
    assert (first["staleness/mixed"], first["weight_sync/recomputed"]) == (0, 0)
    assert max(line["staleness/mixed"] for line in later) > 0
    assert max(line["weight_sync/recomputed"] for line in later) > 0
    # A batch whose completions came before needs no step.
    assert all(0 < (line["completions/occupancy"] or 1) <= 1 for line in [first, *later])


# Resume


@pytest.mark.parametrize("batch", [2, 4])
def test_run_killed_after_a_batch_resumes_to_the_bit(run_with, tmp_path, batch):
    whole = run_with()
    stopped = cut_to(whole, batch, tmp_path)
    state = json.loads((stopped / f"checkpoints/step-{batch:06d}/state.json").read_bytes())
    assert len(state["in_flight"]) > 0
    assert differing(go_on(stopped).run, leaves(whole, exact=True)) == []


CASES: dict[str, Sections] = {
    "float32": {"model": {"dtype": "float32"}},
    "dynamic sampling": {
        "task": {"name": "sample_task:load_vowels"},
        "rollout": {"dynamic_sampling_rounds": 2},
    },
    "evaluations": {"eval": {"every": 1, "at_start": True}},
    "adapters": {"model": {"lora_r": 4}},
}


def differences_after_resuming(root: Path, settings: dict[str, JsonObject]) -> list[str]:
    """Makes a run, and another that resumes after its second batch. Returns what differs."""
    whole = train(merged(settings, {"schedule": {"batches": 4}})).run
    stopped = cut_to(whole, 2, root)
    return differing(go_on(stopped).run, leaves(whole, exact=True))


@pytest.mark.parametrize("sections", [pytest.param(CASES[name], id=name) for name in CASES])
def test_resumed_run_equals_an_uninterrupted_run_with(model, tmp_path, sections):
    settings = settings_in(tmp_path / "whole", model, "run", sections)
    assert differences_after_resuming(tmp_path, settings) == []


def test_resumed_run_with_offline_rows_equals_an_uninterrupted_run(run_with, model, tmp_path):
    offline = {"offline": {"data": (str(run_with()),), "fraction": 0.34}}
    settings = settings_in(tmp_path / "whole", model, "run", offline)
    assert differences_after_resuming(tmp_path, settings) == []


def test_resumed_run_replays_the_turns_of_environments(talking_model, tmp_path):  # noqa: F811
    sections: Sections = {
        "task": {"name": "talkers:load"},
        "rollout": {"max_completion_length": 40, "stop": ("e",)},
    }
    settings = settings_in(tmp_path / "whole", talking_model, "run", sections)
    assert differences_after_resuming(tmp_path, settings) == []
    rows = load_rollouts(tmp_path / "whole/run")
    assert any(len(set(versions_of(row))) > 1 and len(row["messages"]) > 1 for row in rows)


@pytest.mark.parametrize("change", [0, 1], ids=["same replies", "other replies"])
def test_conversations_go_on_if_they_replay_and_else_begin_anew(change):
    """Either way they end as they would have: the keys and the weights are the same."""
    policy = talking_policy(torch.float64, backend="torch")
    episodes = make_episodes(policy)
    expected = sample_groups(policy, episodes)
    before, after = (
        LocalSampler(
            copy_policy(policy),
            0,
            episodes.sampled,
            64,
            episodes=episodes,
            continues_completions=True,
        )
        for _ in range(2)
    )
    requests = episode_requests(policy)
    first, _ = next(iter(before.sample(requests, 5)))
    begun = [
        replace(request, begun=tuple(with_other_replies(c, change) for c in request.begun))
        for request in before.in_flight()
        if not all(c.has_ended for c in request.begun)
    ]
    assert any(not c.sampled.all() and not c.has_ended for r in begun for c in r.begun)
    groups = {request.prompt.key: group for request, group in after.sample(begun, 5)}
    assert first.prompt.key not in groups
    for key, group in groups.items():
        for one, other in zip(group.completions, expected[key].completions, strict=True):
            assert torch.equal(one.token_ids, other.token_ids)
            assert (one.turns, one.outcome) == (other.turns, other.outcome)


def with_other_replies(completion: Completion, change: int) -> Completion:
    """The completion with other tokens where an environment replied."""
    return replace(completion, token_ids=completion.token_ids + change * ~completion.sampled)


def test_each_of_two_ranks_goes_on_with_its_share(model, tmp_path):
    settings = settings_in(tmp_path, model, "run", {"rollout": {"max_num_seqs": 4}})
    whole = together(2, settings)[0].run
    ages = [
        row["policy_version"] - version
        for row in load_rollouts(whole)
        for version in versions_of(row)
    ]
    assert 0 < max(ages) <= 3
    stopped = cut_to(whole, 2, tmp_path / "cut")
    resumed = together(2, settings, resume=stopped)[0].run
    assert differing(resumed, leaves(whole, exact=True)) == []
