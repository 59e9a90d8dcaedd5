"""Evaluations by a real vLLM server, and a judge that it serves. `make test-vllm` runs these."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from running import tiny_settings, without_timings
from test_sampling import requests_for
from vllm_servers import perturb, policy_of, sampler_over

from lagrpo import cli
from lagrpo.rollout.base import Manner
from lagrpo.rollout.vllm.evaluating import VllmEvaluator
from lagrpo.runs import load_evaluations, load_metrics, load_rollouts
from lagrpo.runs.reading import load_evaluation_records
from lagrpo.tasks.llm_judge import LlmJudge
from lagrpo.tasks.rewards import Reward, Rewards
from lagrpo.training.run import train
from lagrpo.types import Completion, Group, Prompt
from lagrpo.verify import Verifier

pytest_plugins = ["vllm_fixtures"]
pytestmark = pytest.mark.vllm


def run(model, root, server, by: str, **sections: Any):
    vllm = {"urls": [server.url], "directory": str(root)}
    sets = [{"name": "own"}, {"name": "long", "max_tokens": 12, "temperature": 0.5}]
    evaluation = {"sampler": by, "every": 1, "sets": sets}
    settings = tiny_settings(model, root, vllm=vllm, sampling={"sampler": "vllm"}, evaluation=evaluation, **sections)
    return train(settings)


@pytest.mark.parametrize(
    ("kind", "v"),
    [("every", 4), *(pytest.param(*each, marks=pytest.mark.long) for each in (("every", 1), ("lagged", 2)))],
)
def test_evaluations_by_the_server_change_no_record_of_training(attached, model, tmp_path, kind, v):
    schedule = {"kind": kind, "v": v, "batches": 5}
    made = [run(model, tmp_path / by, attached, by, schedule=schedule) for by in ("local", "vllm")]
    columns = ["batch", "prompt_key", "completion", "token_ids", "versions", "lag", "pi_k_version"]
    rows = [[{name: row[name] for name in columns} for row in load_rollouts(result.run)] for result in made]
    assert rows[0] == rows[1]
    lines = [without_timings(load_metrics(result.run)) for result in made]
    for local, by_server in zip(*lines, strict=True):
        for name in ("version", "synced", "lag_min", "lag_max", "reward_mean"):
            assert local[name] == by_server[name]
    summaries = [load_evaluations(result.run) for result in made]
    assert [(s["name"], s["version"]) for s in summaries[0]] == [(s["name"], s["version"]) for s in summaries[1]]
    assert {s["without_reward"] for s in summaries[1]} == {0}
    longest = [load_evaluation_records(made[1].run, f"after.{name}") for name in ("own", "long")]
    assert max(r["tokens_mean"] for r in longest[0]) <= 6 < max(r["tokens_mean"] for r in longest[1])


@pytest.mark.parametrize("fails", [False, True])
def test_the_server_has_its_own_version_again_whatever_comes_between(attached, model, tmp_path, fails):
    policy = policy_of(model)
    sampler = sampler_over([attached], policy, tmp_path)
    sampler.sync_weights(policy.weights, 0)
    items = [(request.prompt.token_ids, [5, 6, 7]) for request in requests_for(policy, 2)]
    before = sampler.scores(items)
    old = {name: tensor.clone() for name, tensor in sampler.served()[1].items()}
    perturb(policy, 0.5)
    evaluator = VllmEvaluator(sampler)
    evaluator.adopt(Manner("evaluate", 1.0, 5))

    def borrow() -> None:
        with sampler.lent(policy.weights, 1, back=True):
            assert sampler.version == 1
            version, served = sampler.served()  # what a checkpoint would keep: α
            assert version == 0
            assert all(torch.equal(served[name], tensor) for name, tensor in old.items())
            for _, group in evaluator.sample(requests_for(policy, 2), 2):
                assert {v for c in group.completions for v in c.versions.tolist()} == {1}
            assert sampler.scores(items) != before
            if fails:
                raise KeyboardInterrupt

    if fails:
        with pytest.raises(KeyboardInterrupt):
            borrow()
    else:
        borrow()
    assert sampler.version == 0
    assert sampler.scores(items) == before
    sampler.sync_weights(policy.weights, 1)
    assert sampler.version == 1
    sampler.close()


def test_lagrpo_eval_by_a_server_finds_what_this_process_finds(attached, model, tmp_path, capsys):
    """At a temperature of .01 nearly every token is the likeliest, whoever samples it."""
    words = ["eval", str(model), "--task", "sample_task:load", "--model.dtype", "float32", "--model.device", "cpu"]
    words += ["--samples", "2", "--max_tokens", "6", "--max_prompt_tokens", "64", "--temperature", "0.01"]
    cli.main([*words, "--output", str(tmp_path / "local")])
    by_server = ["--sampling.sampler", "vllm", "--vllm.urls", attached.url, "--output", str(tmp_path / "vllm")]
    cli.main([*words, *by_server])
    said = capsys.readouterr()
    assert "decoding by vLLM (http://127.0.0.1" in said.err
    means = [json.loads((tmp_path / by / "summary.json").read_bytes())["reward_mean"] for by in ("local", "vllm")]
    assert means[0] == pytest.approx(means[1], abs=0.2)
    assert (tmp_path / "vllm" / "records.parquet").is_file()


def test_a_model_that_a_server_of_ours_serves_is_a_judge(server, model, monkeypatch):
    """A random model grades what it is made to: one of two answers."""
    monkeypatch.setenv("JUDGE_API_KEY", server.key)
    body = {"structured_outputs": {"choice": ["Score: 3", "Score: 7"]}}
    given: dict[str, Any] = {
        "url": f"{server.url}/v1",
        "model": str(model),
        "api_key_env": "JUDGE_API_KEY",
        "max_tokens": 16,
    }
    other: dict[str, Any] = {**given, "model": "another"}
    judge = LlmJudge(**given, prompt="{completion}?", body=body, temperature=1.0)
    none = torch.zeros(0)
    completions = tuple(Completion(none, none, none, finished=True, text=f"{n}") for n in range(6))
    for shown, expected in ((judge, {0.3, 0.7}), (LlmJudge(**other), {None})):
        several = Rewards((Reward("judge", shown, takes="answer", deadline=60.0),))
        with Verifier(several, workers=1, max_without_reward=1.0) as verifier:
            (found,) = verifier.judge([Group(Prompt(0, ({"role": "user", "content": "?"},), "g"), completions)])
        assert {c.reward for c in found.completions} <= expected
        reasons = {c.outcome.reason for c in found.completions if c.outcome is not None}
        assert all("refused (404)" in reason for reason in reasons) or reasons == {""}
