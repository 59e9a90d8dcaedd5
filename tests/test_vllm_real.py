"""Real vLLM servers with a tiny model, which runs start, attach to and lose. `make test-vllm` runs
these."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import urllib3
from chaos import merged
from ranks import together
from running import tiny_settings, without_timings
from test_lora import LORA
from test_sampling import requests_for
from tiny import TURNS, tiny_model, tiny_tokenizer
from vllm_servers import SIZES, engine_of, kill, policy_of, start, tiny_directory, update, versions

from lagrpo.errors import SettingsError
from lagrpo.lifecycle.run import Result, train
from lagrpo.lifecycle.start_to_end import Training
from lagrpo.model.model import Packed, Policy
from lagrpo.rollout.base import WeightSyncError
from lagrpo.rollout.sync_check import ServerCheck
from lagrpo.rollout.vllm.client import KEY, SamplerError, VllmClient
from lagrpo.rollout.vllm.server import StartedServer
from lagrpo.rollout.vllm.weights import DIRECTORY
from lagrpo.runs import load_evaluations, load_events, load_metrics, load_rollouts
from lagrpo.training.step import Step
from lagrpo.types import Group, JsonObject
from lagrpo.verify import verify_run

pytestmark = pytest.mark.vllm


@pytest.fixture(autouse=True)
def _transfer_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DIRECTORY, str(tmp_path / "transfer"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that ends about every tenth token, with a chat template for several turns."""
    directory = tmp_path_factory.mktemp("vllm") / "model"
    saved_model = tiny_model(**SIZES)
    saved_model.get_output_embeddings().weight.data[1] *= 3
    saved_model.save_pretrained(directory)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TURNS
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[StartedServer]:
    server = start(model, model.parent / "vllm.log")
    yield server
    server.close()


@pytest.fixture(scope="module")
def adapting(model: Path) -> Iterator[StartedServer]:
    """A server for adapters."""
    server = start(model, model.parent / "adapters.log", lora_rank=8)
    yield server
    server.close()


@pytest.fixture
def attached(server: StartedServer, monkeypatch: pytest.MonkeyPatch) -> VllmClient:
    """The server as somebody else's: reached by URL and key, not ended by an engine's close."""
    monkeypatch.setenv(KEY, server.key)
    client = VllmClient(server.url, server.key)
    client.reload_method = server.reload_method
    return client


def run(
    model: Path,
    root: Path,
    server: VllmClient | None = None,
    /,
    resume: Path | str | None = None,
    **sections: Any,
) -> Result:
    base = {
        "rollout": {"engine": "vllm"},
        "vllm": {"urls": [server.url]} if server is not None else {},
    }
    return train(
        tiny_settings(model, root, **merged(base, sections)), resume=resume, trust_run_code=True
    )


# Weight syncs


def distance(policy: Policy, group: Group) -> float:
    """The largest difference between the trainer's log-probs and those that came with the
    completions."""
    packed = Packed.build([(group.prompt.token_ids, [c.token_ids for c in group.completions])])
    with torch.no_grad():
        return float(
            (policy.logp(packed) - torch.cat([c.rollout_logp for c in group.completions]))
            .abs()
            .max()
        )


@pytest.mark.parametrize(("tau", "lora"), [(0.7, None), (1.0, LORA)])
def test_trainer_and_server_agree_after_each_sync(request, model, tau, lora):
    server = request.getfixturevalue("adapting" if lora else "server")
    policy = policy_of(model, tau, lora=lora)
    engine = engine_of([server], policy)
    check = engine.weight_check(policy, requests_for(policy, 4))
    for version in range(4):
        engine.sync_weights(policy.weights, version)
        metrics = check(policy)
        assert metrics["logp_difference_mean"] < 1e-4
        assert not version or metrics["telling_tokens"] > 5
        for _, group in engine.sample(requests_for(policy, 3, batch=version), 4):
            assert versions(group.completions) == {version}
            assert distance(policy, group) < 2e-3
        update(policy)
    assert not lora or len(server.list_adapters()) == 1
    engine.weights.close([server])


def test_tied_head_is_updated_by_a_weight_sync(tmp_path, monkeypatch):
    """vLLM's own reload keeps the first head if oneDNN has packed it; on processors where it
    cannot, PyTorch multiplies by the embedding, which is renewed."""
    model = tiny_directory(tmp_path, tie_word_embeddings=True)
    server = start(model, tmp_path / "vllm.log", "bfloat16")
    try:
        policy = policy_of(model, dtype=torch.bfloat16)
        engine = engine_of([server], policy)
        check = ServerCheck(engine, requests_for(policy, 4), torch.bfloat16, tolerance=0.02)
        for version in range(3):
            engine.sync_weights(policy.weights, version)
            check(policy)
            update(policy, 0.3)
        monkeypatch.setattr(server, "reload_method", VllmClient.reload_method)
        engine.sync_weights(policy.weights, 3)
        packed = "fallback to torch linear" not in (tmp_path / "vllm.log").read_text(
            encoding="utf-8"
        )
        with pytest.raises(WeightSyncError) if packed else nullcontext():
            check(policy)
        engine.close()
    finally:
        server.close()


# Runs that attach to a server


@pytest.mark.parametrize("schedule", ["constant_lag", "max_staleness"])
@pytest.mark.parametrize("lora", [None, LORA], ids=["whole", "adapters"])
def test_completions_in_flight_at_a_sync(request, monkeypatch, model, tmp_path, schedule, lora):
    """Batches of one prompt, three ahead: completions are submitted while others are in flight."""
    server = request.getfixturevalue("adapting" if lora else "server")
    monkeypatch.setenv(KEY, server.key)
    client = VllmClient(server.url, server.key)
    client.reload_method = server.reload_method
    directory = run(
        model,
        tmp_path,
        client,
        model={} if lora is None else {"lora_r": 8},
        schedule={schedule: 3, "batches": 6, "prompts_per_batch": 1},
        rollout={"max_completion_length": 300},
        eval={"at_start": False},
    ).run
    rows = load_rollouts(directory)
    assert len(rows) == 6 * 4
    assert {row["outcome"] for row in rows} == {"scored"}
    for row in rows:
        assert row["policy_versions"] == sorted(row["policy_versions"])
        ages = {row["policy_version"] - version for version in row["policy_versions"]}
        assert max(ages) <= 3
        assert schedule == "max_staleness" or len(ages) == 1
    assert verify_run(directory, None, trust_run_code=True).differences == []


def generated_tokens(server: VllmClient) -> float:
    """The tokens that a server has sampled since its start."""
    answer = urllib3.request("GET", f"{server.url}/metrics", headers=server._http.headers)
    lines = answer.data.decode().splitlines()
    counters = [line for line in lines if line.startswith("vllm:generation_tokens_total")]
    return sum(float(line.rpartition(" ")[2]) for line in counters)


def test_tokens_have_the_log_probs_of_their_versions_if_syncs_stop_completions(attached, model):
    """Four completions of 200 tokens, and three syncs meanwhile."""
    policy = policy_of(model)
    engine = engine_of([attached], policy, max_tokens=200)
    engine.chat = replace(policy.chat, eos_ids=frozenset())
    engine.sync_weights(policy.weights, 0)
    weights = [{name: tensor.clone() for name, tensor in policy.weights.items()}]
    groups: list[Group] = []
    before = generated_tokens(attached)
    coming = engine.sample(requests_for(policy, 2), 2)
    reader = threading.Thread(target=lambda: groups.extend(group for _, group in coming))
    reader.start()
    for number in range(1, 4):
        while generated_tokens(attached) < before + 200 * number:
            assert reader.is_alive()
        update(policy)
        engine.sync_weights(policy.weights, policy.version)
        weights.append({name: tensor.clone() for name, tensor in policy.weights.items()})
    reader.join()
    for group in groups:
        packed = Packed.build([(group.prompt.token_ids, [c.token_ids for c in group.completions])])
        logp_T = torch.cat([c.rollout_logp for c in group.completions])
        versions_T = torch.cat([c.versions for c in group.completions])
        assert len(logp_T) == 2 * 200
        assert len(versions_T.unique()) > 2
        for version in versions_T.unique().tolist():
            policy.load(weights[version], version)
            with torch.no_grad():
                difference_T = (policy.logp(packed) - logp_T).abs()
            assert float(difference_T[versions_T == version].max()) < 2e-3
    engine.weights.close([attached])


def test_run_of_several_turns_is_replayed(attached, model, tmp_path):
    directory = run(
        model,
        tmp_path,
        attached,
        task={"name": "guess_number", "options": {"largest": 9}, "max_turns": 4},
        schedule={"max_staleness": 1, "batches": 4},
        rollout={"max_completion_length": 40, "max_prompt_length": 100},
        eval={"at_start": False},
    ).run
    assert max(len(row["messages"]) for row in load_rollouts(directory)) > 1
    assert max(line["staleness/max"] for line in load_metrics(directory)) == 1
    assert verify_run(directory, None).differences == []


def test_evaluations_by_the_server_change_no_record_of_training(attached, model, tmp_path):
    sets = [{"name": "own"}, {"name": "long", "max_completion_length": 12}]
    evaluations: dict[str, JsonObject] = {
        "none": {"at_start": False},
        "many": {"every": 1, "sets": sets},
    }
    results = [
        run(
            model,
            tmp_path / name,
            attached,
            schedule={"sync_every": 4, "batches": 5},
            eval=eval_section,
        )
        for name, eval_section in evaluations.items()
    ]
    columns = [
        "step",
        "prompt_id",
        "sample_index",
        "token_ids",
        "policy_versions",
        "staleness",
        "policy_version",
    ]
    rows = [
        [{name: row[name] for name in columns} for row in load_rollouts(one.run)] for one in results
    ]
    assert rows[0] == rows[1]
    names = ("policy_version", "weight_sync/performed", "staleness/max", "reward")
    lines = [
        [[line[n] for n in names] for line in without_timings(load_metrics(one.run))]
        for one in results
    ]
    assert lines[0] == lines[1]
    assert {one["policy_version"] for one in load_evaluations(results[1].run)} == {0, 1, 2, 3, 4, 5}


@pytest.mark.long
def test_ranks_learn_from_what_a_server_samples(tmp_path):
    settings = tiny_settings(
        tiny_directory(tmp_path),
        tmp_path,
        rollout={"engine": "vllm"},
        distributed={"strategy": "fsdp2"},
        schedule={"sync_every": 2, "num_iterations": 2, "batches": 6, "prompts_per_batch": 3},
        loss={"recipe": "grpo", "beta": 0.05},
    )
    results = together(2, settings)
    assert all(isinstance(one, Result) for one in results), "\n\n".join(map(str, results))
    metrics = load_metrics(results[0].run)
    assert [m["staleness/max"] for m in metrics] == [0, 0, 2, 0, 2, 0]
    assert all(
        m["weight_sync/logp_difference"] < 1e-3 for m in metrics if m["weight_sync/performed"]
    )


# Runs that start a server, and lose it


@pytest.mark.parametrize(
    ("owner", "name", "call", "v"),
    [
        (VllmClient, "generate", 12, 2),
        (VllmClient, "reload", 3, 1),
    ],  # after the weight-sync check's eight
)
def test_killed_server_loses_no_completion_and_counts_none_twice(
    model, tmp_path, monkeypatch, owner, name, call, v
):
    """The server is killed just before a call."""
    started: list[StartedServer] = []
    start_server, method, calls = StartedServer._start, getattr(owner, name), iter(range(1, 1000))

    def killing(self: Any, *args: Any, **kwargs: Any) -> Any:
        if next(calls) == call:
            kill(started[0])
        return method(self, *args, **kwargs)

    monkeypatch.setattr(
        StartedServer, "_start", lambda self: (started.append(self), start_server(self))[1]
    )
    monkeypatch.setattr(owner, name, killing)
    result = run(
        model,
        tmp_path,
        schedule={"sync_every": v, "batches": 4},
        rollout={"max_completion_length": 32},
        eval={"at_start": False},
    )
    rows, metrics = load_rollouts(result.run), load_metrics(result.run)
    assert (
        sum(
            event.get("recoveries", 0)
            for event in load_events(result.run)
            if event["event"] == "recovery"
        )
        == 1
    )
    keys = {(row["step"], row["epoch"], row["prompt_id"], row["sample_index"]) for row in rows}
    assert len(keys) == len(rows) == 4 * 2 * 4
    assert {row["outcome"] for row in rows} == {"scored"}
    alpha = [0, 1, 2, 3] if v == 1 else [0, 1, 1, 3]
    assert all({*row["policy_versions"]} == {alpha[row["step"] - 1]} for row in rows)
    assert all(line["weight_sync/logp_difference"] < 1e-3 for line in metrics)
    assert (result.run / "vllm-1.log").is_file()
    assert not list((tmp_path / "transfer").iterdir())
    assert started[0].guard.poll() is not None


def test_server_that_cannot_start_shows_its_log(model, tmp_path):
    with pytest.raises(
        SettingsError, match=r"(?s)the vLLM server ended\. The end of its log.*no-such-option"
    ):
        run(model, tmp_path, vllm={"server_args": ["--no-such-option"]})


@pytest.mark.parametrize("schedule", [{"sync_every": 1}, {"max_staleness": 2}], ids=str)
def test_run_keeps_what_it_has_when_an_attached_server_dies_and_resumes_with_another(
    model, tmp_path, monkeypatch, schedule
):
    original, recorded, root = Training.record, list[Step](), tmp_path / "servers"
    root.mkdir()
    servers = [start(model, root / f"{n}.log") for n in range(2)]

    def record(self: Training, step: Step) -> None:
        original(self, step)
        recorded.append(step)
        if len(recorded) == 2:
            kill(servers[0])

    monkeypatch.setattr(Training, "record", record)
    sections: JsonObject = {"run": {"name": "one"}, "schedule": {**schedule, "batches": 4}}
    try:
        monkeypatch.setenv(KEY, servers[0].key)
        with pytest.raises(SamplerError, match="No server is left"):
            run(model, tmp_path, VllmClient(servers[0].url), **sections)
        monkeypatch.setenv(KEY, servers[1].key)
        result = run(model, tmp_path, VllmClient(servers[1].url), resume="auto", **sections)
        assert [line["step"] for line in load_metrics(result.run)] == [1, 2, 3, 4]
        assert verify_run(result.run, None, trust_run_code=True).differences == []
    finally:
        for server in servers:
            server.close()
