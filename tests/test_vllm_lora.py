"""A real vLLM server with adapters: synced by name, several alive, brought back. `make test-vllm` runs these."""

from __future__ import annotations

import json

import pytest
import torch
from running import tiny_settings
from test_lora import LORA, move
from test_sampling import requests_for
from vllm_servers import kill, sampler_over

from lagrpo import cli
from lagrpo.errors import SettingsError
from lagrpo.model.loading import load_policy
from lagrpo.model.model import Packed
from lagrpo.rollout.parity import ParityCheck
from lagrpo.rollout.vllm.connecting import KEY
from lagrpo.runs import load_evaluations, load_metrics
from lagrpo.training import run as training

pytest_plugins = ["vllm_fixtures"]
pytestmark = pytest.mark.vllm
ADAPTERS = (8, 2)


@pytest.fixture
def policy(model):
    return load_policy(str(model), torch.float32, lora=LORA)


def update(policy) -> None:
    move(policy, 0.2, seed=policy.version + 7)
    policy.weights.version += 1


def distance(policy, group) -> float:
    """The largest difference between the policy's log-probs and those that came with the completions."""
    row = Packed.build([(group.prompt.token_ids, [c.token_ids for c in group.completions])])
    with torch.no_grad():
        return float((policy.logp(row) - torch.cat([c.logp_alpha for c in group.completions])).abs().max())


def versions_of(group) -> set[int]:
    return {int(v) for c in group.completions for v in c.versions}


def test_learner_and_server_agree_after_each_sync_of_an_adapter(attached, policy, tmp_path):
    sampler, check = sampler_over([attached], policy, tmp_path), ParityCheck(requests_for(policy, 4), torch.float32)
    for version in range(4):
        cost = sampler.sync_weights(policy.weights, version)
        assert cost["sync_bytes"] == sum(4 * tensor.numel() for tensor in policy.weights.values())
        metrics = check(policy, sampler)
        assert metrics["parity_mean"] < 1e-4
        assert not version or metrics["parity_telling"] > 5
        for _, group in sampler.sample(requests_for(policy, 3, batch=version), 4):
            assert versions_of(group) == {version}
            assert distance(policy, group) < 2e-3
        update(policy)
    assert len(attached.adapters()) == 1  # older ones have been unloaded
    assert [path.name for path in sampler.weights.directories.root.iterdir()] == ["v000003"]
    served, weights = sampler.served()
    assert served == 3
    assert weights.keys() == {*policy.weights}
    sampler.close()


def test_what_is_under_way_goes_on_by_the_adapter_that_it_began_with(attached, policy, tmp_path):
    sampler = sampler_over([attached], policy, tmp_path)
    sampler.in_flight, sampler.spans = "span", True
    sampler.sync_weights(policy.weights, 0)
    stream = sampler.sample(requests_for(policy, 6), 4)
    first = next(stream)
    update(policy)
    sampler.sync_weights(policy.weights, 1)
    groups = [first, *stream, *sampler.sample(requests_for(policy, 2, batch=9), 4)]
    assert all(len(versions_of(group)) == 1 for _, group in groups)
    assert [versions_of(group) for _, group in groups[-2:]] == [{1}, {1}]
    for _, group in groups:
        if versions_of(group) == {1}:
            assert distance(policy, group) < 2e-3
    sampler.close()


def test_a_server_that_dies_is_brought_back_with_the_adapter(server, policy, tmp_path):
    sampler = sampler_over([server], policy, tmp_path)
    update(policy)
    sampler.sync_weights(policy.weights, 1)
    sampler.scores([((5, 6, 7), [8, 9, 10])])
    kill(server)
    ((_, group),) = sampler.sample(requests_for(policy, 1), 4)
    assert versions_of(group) == {1}
    assert distance(policy, group) < 2e-3
    assert sampler.read()["recoveries"] == 1
    sampler.weights.close()  # the server goes on for the other tests


def test_a_run_trains_adapters_with_a_server_that_it_attaches_to(server, model, tmp_path, monkeypatch):
    monkeypatch.setenv(KEY, server.key)
    sections = {
        "model": {"lora": {"r": 8}}, "sampling": {"sampler": "vllm"},
        "vllm": {"urls": [server.url], "in_flight": "span"}, "schedule": {"kind": "lagged", "v": 1, "batches": 4},
    }  # fmt: skip
    result = training.train(tiny_settings(model, tmp_path, **sections))
    metrics = load_metrics(result.run)
    assert [line["lag_max"] for line in metrics][1:] == [1, 1, 1]
    assert all(line["parity_mean"] < 1e-3 for line in metrics)
    sections["model"] = {"lora": {"r": 9}}
    with pytest.raises(SettingsError, match=r"takes adapters of at most rank 8, and model.lora.r is 9: start it with"):
        training.train(tiny_settings(model, tmp_path, **sections))


def test_servers_evaluate_adapters(attached, model, tmp_path, capsys):
    """In a run, by an adapter beside that which samples, and by `lagrpo eval`."""
    sections = {
        "model": {"lora": {"r": 8}}, "sampling": {"sampler": "vllm"}, "optimizer": {"lr": 0.05},
        "vllm": {"urls": [attached.url]}, "schedule": {"v": 4, "batches": 4},
    }  # fmt: skip
    evaluation = {"every": 1, "samples": 2, "temperature": 0.01}
    made = [
        training.train(tiny_settings(model, tmp_path / by, **sections, evaluation=evaluation | {"sampler": by}))
        for by in ("local", "vllm")
    ]
    lines = [[(m["lag_max"], m["reward_mean"]) for m in load_metrics(result.run)] for result in made]
    assert lines[0] == lines[1]
    versions, means = zip(
        *([[s[name] for s in load_evaluations(r.run)] for name in ("version", "reward_mean")] for r in made),
        strict=True,
    )
    assert versions[0] == versions[1] == [0, 1, 2, 3, 4]
    assert means[1] == pytest.approx(means[0], abs=0.2)
    assert not attached.adapters()
    words = ["eval", str(made[1].weights), "--task", "sample_task:load", "--model.dtype", "float32"]
    words += ["--samples", "2", "--max_tokens", "6", "--max_prompt_tokens", "64", "--temperature", "0.01"]
    cli.main([*words, "--output", str(tmp_path / "local-eval")])
    by_server = ["--sampling.sampler", "vllm", "--vllm.urls", attached.url, "--output", str(tmp_path / "vllm-eval")]
    cli.main([*words, *by_server])
    assert "it differs from this process by" in capsys.readouterr().err
    found = [
        json.loads((tmp_path / f"{by}-eval" / "summary.json").read_bytes())["reward_mean"] for by in ("local", "vllm")
    ]
    assert found[0] == pytest.approx(found[1], abs=0.2)


def test_a_server_without_an_adapter_any_more_gets_it_again(attached, policy, tmp_path):
    sampler = sampler_over([attached], policy, tmp_path)
    sampler.sync_weights(policy.weights, 0)
    attached.unload_adapter(sampler.fleet.served.label)
    ((_, group),) = sampler.sample(requests_for(policy, 1), 2)
    assert versions_of(group) == {0}
    sampler.close()
