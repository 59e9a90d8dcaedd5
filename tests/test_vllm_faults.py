"""Real vLLM servers that are killed while a run uses them. `make test-vllm` runs these."""

from __future__ import annotations

import time
from itertools import count
from pathlib import Path

import pytest
from running import tiny_settings
from test_sampling import requests_for
from vllm_servers import PYTHON, kill, perturb, policy_of, sampler_over, start, tiny_directory

from lagrpo.rollout.vllm.process import StartedServer
from lagrpo.rollout.vllm.server import SamplerError, Server
from lagrpo.rollout.vllm.weights import FILE
from lagrpo.runs import load_metrics, load_rollouts
from lagrpo.training import build
from lagrpo.training import run as training

pytestmark = pytest.mark.vllm

BATCHES, PROMPTS, G = 4, 2, 4


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_directory(tmp_path_factory.mktemp("vllm"))


@pytest.fixture
def servers(monkeypatch):
    """The servers that the run starts, for the test to kill."""
    found: list[StartedServer] = []
    original = StartedServer.__init__

    def remembered(self, *args, **kwargs):
        original(self, *args, **kwargs)
        found.append(self)

    monkeypatch.setattr(StartedServer, "__init__", remembered)
    return found


def settings_of(model, root, v=1, **vllm):
    """Four batches of two groups of four, by a server that the run starts."""
    own = {"python": PYTHON, "directory": str(root), "start_deadline": 240.0} | vllm
    return tiny_settings(
        model,
        root,
        schedule={"v": v, "batches": BATCHES, "prompts": PROMPTS},
        sampling={"sampler": "vllm", "G": G, "max_tokens": 32},
        vllm=own,
        evaluation={"before_and_after": False},
    )


def during_sampling(monkeypatch, servers):
    """While a group of the second batch is under way, and before another one's request is sent."""
    calls, original = count(1), Server.generate

    def generate(self, prompt_ids, n, *args, **kwargs):
        if n == G and next(calls) == PROMPTS + 2:
            time.sleep(0.02)
            kill(servers[0])
        return original(self, prompt_ids, n, *args, **kwargs)

    monkeypatch.setattr(Server, "generate", generate)


def during_a_sync(monkeypatch, servers):
    calls, original = count(1), Server.reload

    def reload(self, directory):
        if next(calls) == 3:
            kill(servers[0])
        return original(self, directory)

    monkeypatch.setattr(Server, "reload", reload)


def between(monkeypatch, servers):
    calls, original = count(1), training.Training.record

    def record(self, step):
        original(self, step)
        if next(calls) == 2:
            kill(servers[0])

    monkeypatch.setattr(training.Training, "record", record)


@pytest.mark.parametrize(
    ("moment", "v"),
    [
        (during_sampling, 2),
        (during_a_sync, 1),
        *(pytest.param(*case, marks=pytest.mark.long) for case in [(during_sampling, 1), (between, 1), (between, 2)]),
    ],
)
def test_a_killed_server_loses_nothing_and_counts_nothing_twice(model, tmp_path, monkeypatch, servers, moment, v):
    moment(monkeypatch, servers)
    result = training.train(settings_of(model, tmp_path, v=v))
    rows, metrics = load_rollouts(result.run), load_metrics(result.run)
    assert sum(line["recoveries"] for line in metrics) == 1
    keys = [(row["batch"], row["epoch"], row["prompt_key"], row["completion"]) for row in rows]
    assert len(keys) == len(set(keys)) == BATCHES * PROMPTS * G
    assert {row["outcome"] for row in rows} == {"scored"}
    alpha = [0, 1, 2, 3] if v == 1 else [0, 1, 1, 3]
    for row in rows:
        assert set(row["versions"]) == {alpha[row["batch"] - 1]}
    assert all(line["parity_mean"] < 1e-3 for line in metrics)
    assert "restarting" not in (result.run / "vllm-1.log").read_text()
    assert not list(tmp_path.glob("lagrpo-*"))


def test_what_the_server_cannot_load_is_refused_and_the_old_version_goes_on_serving(model, tmp_path):
    """The file is damaged after we have checked it, so that vLLM fails in the middle of loading."""
    policy, server = policy_of(model), start(model, tmp_path / "vllm.log")
    sampler = sampler_over([server], policy, tmp_path)
    sampler.sync_weights(policy.weights, 0)
    prompt_ids = requests_for(policy, 1)[0].prompt.token_ids
    ((before,),) = sampler.scores([(prompt_ids, [10, 11, 12])])
    original = server.reload

    def reload(directory):
        file = Path(directory) / FILE
        if directory.endswith("v000001"):
            file.write_bytes(file.read_bytes()[:-5000])
        original(directory)

    server.reload = reload
    perturb(policy)
    with pytest.raises(SamplerError, match=r"version 1 was refused: .*go on with the version they had"):
        sampler.sync_weights(policy.weights, 1)
    assert sampler.version == 0
    assert sampler.scores([(prompt_ids, [10, 11, 12])]) == [[before]]
    ((_, group),) = sampler.sample(requests_for(policy, 1), 2)
    assert {int(v) for c in group.completions for v in c.versions} == {0}
    sampler.close()
    assert not server.running


def test_when_the_failures_are_spent_the_run_stops_with_what_it_had(model, tmp_path, monkeypatch, servers):
    original = training.Training.record

    def record(self, step):
        original(self, step)
        kill(servers[0])

    monkeypatch.setattr(training.Training, "record", record)
    with pytest.raises(SamplerError, match=r"one failure more than vllm.failures allows") as raised:
        training.train(settings_of(model, tmp_path, failures=1))
    assert "2 of 4 batches are finished" in raised.value.__notes__[0]
    (run,) = (path for path in tmp_path.iterdir() if (path / "metrics.jsonl").is_file())
    assert [line["batch"] for line in load_metrics(run)] == [1, 2]
    assert len(load_rollouts(run)) == 2 * PROMPTS * G
    assert (run / "weights" / "final" / "model.safetensors").is_file()
    assert not servers[0].running


def test_a_server_that_cannot_start_shows_its_log(model, tmp_path):
    (tmp_path / "no-tokens").mkdir()
    with pytest.raises(build.SettingsError, match=r"(?s)the vLLM server ended within.*The end of its log"):
        training.train(settings_of(model, tmp_path, options=("--no-such-option",)))


@pytest.mark.long
def test_two_servers_generate_what_one_does_and_the_one_that_dies_is_replaced(model, tmp_path, monkeypatch, servers):
    between(monkeypatch, servers)
    result = training.train(settings_of(model, tmp_path, servers=2))
    rows = load_rollouts(result.run)
    assert len(rows) == BATCHES * PROMPTS * G
    assert {row["pi_k_version"] - version for row in rows for version in row["versions"]} == {0}
    assert isinstance(servers[1], StartedServer)
    assert len({server.url for server in servers}) == 2
