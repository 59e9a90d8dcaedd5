"""Real vLLM servers with a tiny model, which runs start, attach to and lose. `make test-vllm` runs these."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import talkers
import torch
from chaos import merged
from running import tiny_settings, without_timings
from test_episodes import TURNS, ask
from test_lora import LORA
from test_sampling import request, requests_for
from tiny import tiny_model, tiny_tokenizer
from together import together
from vllm_servers import SIZES, engine_of, kill, policy_of, start, tiny_directory, update

from lagrpo import cli
from lagrpo.errors import SettingsError
from lagrpo.model.chat import Replies
from lagrpo.model.model import Packed, copy_policy
from lagrpo.rollout.episodes import Episodes, Limits
from lagrpo.rollout.local import LocalSampler
from lagrpo.rollout.sync_check import WeightSyncCheck, WeightSyncError
from lagrpo.rollout.vllm.client import KEY, SamplerError, VllmClient
from lagrpo.rollout.vllm.server import StartedServer
from lagrpo.rollout.vllm.weights import DIRECTORY, FILE
from lagrpo.runs import load_evaluations, load_metrics, load_rollouts
from lagrpo.tasks.environments import EnvironmentPool
from lagrpo.training import run as training
from lagrpo.training.run import Result, train
from lagrpo.verify import verify_run

pytestmark = pytest.mark.vllm


@pytest.fixture(autouse=True)
def _transfer_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DIRECTORY, str(tmp_path / "transfer"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that ends about every tenth token, with a chat template for several turns."""
    directory = tmp_path_factory.mktemp("vllm") / "model"
    made = tiny_model(**SIZES)
    made.get_output_embeddings().weight.data[1] *= 3
    made.save_pretrained(directory)
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


def distance(policy: Any, group: Any) -> float:
    """The largest difference between the trainer's log-probs and those that came with the completions."""
    packed = Packed.build([(group.prompt.token_ids, [c.token_ids for c in group.completions])])
    own = torch.cat([c.sampled for c in group.completions])
    with torch.no_grad():
        return float((policy.logp(packed) - torch.cat([c.logp_alpha for c in group.completions]))[own].abs().max())


def versions(group: Any) -> set[int]:
    return {version for c in group.completions for version in c.versions[c.sampled].tolist()}


def run(model: Path, root: Path, server: VllmClient | None = None, /, **sections: Any) -> Result:
    base = {"sampling": {"sampler": "vllm"}, "vllm": {"urls": [server.url]} if server is not None else {}}
    return train(tiny_settings(model, root, **merged(base, sections)))


# Weight syncs


@pytest.mark.parametrize("tau", [1.0, 0.7])
@pytest.mark.parametrize("lora", [None, LORA])
def test_trainer_and_server_agree_after_each_sync(request, model, tau, lora):
    server = request.getfixturevalue("adapting" if lora else "server")
    policy = policy_of(model, tau, lora=lora)
    engine, check = engine_of([server], policy), WeightSyncCheck(requests_for(policy, 4), torch.float32)
    for version in range(4):
        engine.sync_weights(policy.weights, version)
        metrics = check(policy, engine)
        assert metrics["parity_mean"] < 1e-4
        assert not version or metrics["parity_telling"] > 5
        for _, group in engine.sample(requests_for(policy, 3, batch=version), 4):
            assert versions(group) == {version}
            assert distance(policy, group) < 2e-3
        update(policy)
    assert not lora or len(server.list_adapters()) == 1
    engine.weights.close([server])


class Withheld(VllmClient):
    """A server that says it loaded the weights, and did not."""

    withholds = False

    def call(self, method: str, path: str, *rest: Any, **more: Any) -> Any:
        return None if self.withholds and path == "/collective_rpc" else super().call(method, path, *rest, **more)


def test_withheld_sync_is_caught(server, model):
    policy, withheld = policy_of(model), Withheld(server.url, server.key)
    engine, check = engine_of([withheld], policy), WeightSyncCheck(requests_for(policy, 4), torch.float32)
    engine.sync_weights(policy.weights, 0)
    check(policy, engine)
    update(policy, 1e-4)  # far below the tolerance: only the comparison with the sync before can tell
    withheld.withholds = True
    engine.sync_weights(policy.weights, 1)
    assert engine.version == 1
    with pytest.raises(
        WeightSyncError, match=r"did not change at all with the weight sync.* did not load the new weights"
    ):
        check(policy, engine)
    engine.close()


def test_tied_head_is_renewed(tmp_path, monkeypatch):
    """vLLM's own reload keeps the first head if oneDNN has packed it; on processors where it cannot, PyTorch multiplies
    by the embedding, which is renewed."""
    model = tiny_directory(tmp_path, tie_word_embeddings=True)
    server = start(model, tmp_path / "vllm.log", "bfloat16")
    try:
        policy = policy_of(model, dtype=torch.bfloat16)
        engine = engine_of([server], policy)
        check = WeightSyncCheck(requests_for(policy, 4), torch.bfloat16, tolerance=0.02)
        for version in range(3):
            engine.sync_weights(policy.weights, version)
            check(policy, engine)
            update(policy, 0.3)
        monkeypatch.setattr(server, "reload_method", VllmClient.reload_method)
        engine.sync_weights(policy.weights, 3)
        packed = "fallback to torch linear" not in (tmp_path / "vllm.log").read_text()
        with pytest.raises(WeightSyncError) if packed else nullcontext():
            check(policy, engine)
        engine.close()
    finally:
        server.close()


def test_damaged_weights_end_the_run(attached, model):
    policy = policy_of(model)
    server = start(model, model.parent / "damaged.log")
    engine = engine_of([server], policy)
    engine.sync_weights(policy.weights, 0)
    update(policy)
    file = engine.weights.pack(policy.weights, 1).directory / FILE
    file.write_bytes(file.read_bytes()[:-5000])
    with pytest.raises(SamplerError):
        engine.sync_weights(policy.weights, 1)
    assert engine.current_weights()[0] == 0
    engine.close()
    assert server.guard.poll() is not None


# Sampling


def test_local_and_vllm_engines_sample_the_same_distribution(attached, model):
    """Two-sample chi-square on each of the first two tokens of 4,096 completions of each engine, rare ones pooled. The
    power of the test: against temperature .6 instead of .4 the statistic is far outside."""
    policy = policy_of(model, tau=0.4)
    engine = engine_of([attached], policy, max_tokens=2, rows=64)
    engine.sync_weights(policy.weights, 0)
    requests = [request(0, batch=b, policy=policy) for b in range(64)]
    vllm = list(engine.sample(requests, 64))
    local, warmer = (list(LocalSampler(copy_policy(policy), 1, 2, 64, tau).sample(requests, 64)) for tau in (0.4, 0.6))
    for place in (0, 1):
        statistic, freedom = chi_square(vllm, local, place)
        assert freedom > 10
        assert abs(statistic - freedom) < 5 * (2 * freedom) ** 0.5, (place, statistic, freedom)
    statistic, freedom = chi_square(vllm, warmer, 0)
    assert statistic - freedom > 10 * (2 * freedom) ** 0.5, (statistic, freedom)
    engine.close()


def chi_square(ours: Any, theirs: Any, place: int) -> tuple[float, int]:
    """The two-sample statistic of the token at `place`, -1 if a completion has none, and its degrees of freedom."""
    counts = []
    for groups in (ours, theirs):
        ids = [[*c.token_ids.tolist(), -1, -1] for _, group in groups for c in group.completions]
        counts.append(Counter(tokens[place] for tokens in ids))
    kept = [token for token in counts[0] | counts[1] if counts[0][token] + counts[1][token] >= 20]
    table = [[c[token] for token in kept] + [4096 - sum(c[token] for token in kept)] for c in counts]
    return sum((a - b) ** 2 / (a + b) for a, b in zip(*table, strict=True) if a + b), len(kept)


@contextmanager
def conversing(servers: Any, model: Path, make: Any = talkers.Counting, sampled: int = 60) -> Iterator[Any]:
    """An engine of completions of several turns, and its policy."""
    policy = policy_of(model)
    engine = engine_of(servers, policy, "span", sampled, rows=8)
    with EnvironmentPool(make, workers=1, deadline=20.0) as environments:
        engine.episodes = Episodes(environments, Replies(policy.chat), Limits(8, sampled, 120))
        engine.sync_weights(policy.weights, 0)
        yield engine, policy
    engine.weights.close(servers)


def test_trainer_and_server_agree_on_all_turns(attached, model):
    with conversing([attached], model) as (engine, policy):
        groups = [group for _, group in engine.sample(ask(policy, 3), 4)]
    assert max(len(c.turns) for group in groups for c in group.completions) == 5
    for group in groups:
        assert distance(policy, group) < 2e-3
        for c in group.completions:
            assert c.outcome.kind == "scored"
            assert not torch.isfinite(c.logp_alpha[~c.sampled]).any()  # the environment's tokens were not sampled


def test_server_finds_earlier_turns_in_its_cache(attached, model):
    def hits() -> list[float]:
        told = attached._http.request("GET", f"{attached.url}/metrics").data.decode()
        names = ("queries", "hits")
        found = [re.search(rf"^vllm:prefix_cache_{name}_total\S* (\S+)$", told, re.MULTILINE) for name in names]
        return [float(one[1]) if one else 0.0 for one in found]

    with conversing([attached], model, talkers.Endless) as (engine, policy):
        before = hits()
        list(engine.sample(ask(policy, 3), 4))
        queries, found = (now - then for now, then in zip(hits(), before, strict=True))
    assert found > 0.3 * queries  # all but the newest turn, in whole blocks of 32 tokens


def test_turns_span_weight_syncs(attached, model):
    with conversing([attached], model, talkers.Endless) as (engine, policy):
        coming = engine.sample(ask(policy, 4), 4)
        groups = [next(coming)]
        for version in (1, 2):
            update(policy)
            engine.sync_weights(policy.weights, version)
        groups += coming
    seen = [c.versions[c.sampled].tolist() for _, group in groups for c in group.completions]
    assert all(labels == sorted(labels) and {*labels} <= {0, 1, 2} for labels in seen)
    assert any(len({*labels}) > 1 for labels in seen)


# Runs that attach to a server


@pytest.mark.parametrize(("v", "lags"), [(1, [0] * 6), (4, [0, 1, 2, 0, 1, 2])])
def test_staleness_of_a_run_is_read_from_the_tokens(attached, model, tmp_path, v, lags):
    metrics = load_metrics(run(model, tmp_path, attached, schedule={"v": v, "batches": 6}).run)
    assert [(line["lag_min"], line["lag_max"]) for line in metrics] == [(lag, lag) for lag in lags]
    assert [line["synced"] for line in metrics] == [lag == 0 for lag in lags]
    assert all(line["failed"] == 0 and line["mismatch_max"] is not None for line in metrics)


@pytest.mark.parametrize("in_flight", ["finish", "span", "regenerate"])
def test_completions_in_flight_at_a_sync(attached, model, tmp_path, in_flight):
    """A pipeline of one batch ahead: completions may span two versions, or are sampled again; the lag is 0 or 1."""
    directory = run(
        model, tmp_path, attached, schedule={"kind": "lagged", "v": 1, "batches": 6},
        sampling={"max_tokens": 48}, vllm={"in_flight": in_flight},
    ).run  # fmt: skip
    rows = load_rollouts(directory)
    assert len(rows) == 6 * 2 * 4
    assert {row["outcome"] for row in rows} == {"scored"}
    for row in rows:
        assert row["versions"] == sorted(row["versions"])
        assert {row["pi_k_version"] - version for version in row["versions"]} <= {0, 1}
        assert in_flight == "span" or len({*row["versions"]}) == 1


def test_run_of_several_turns_is_replayed(attached, model, tmp_path):
    directory = run(
        model, tmp_path, attached, task={"name": "guess_number", "largest": 9}, vllm={"in_flight": "span"},
        schedule={"kind": "lagged", "v": 1, "batches": 4}, environment={"max_turns": 4, "max_tokens": 100},
        sampling={"max_tokens": 40, "max_prompt_tokens": 100}, evaluation={"before_and_after": False},
    ).run  # fmt: skip
    assert max(len(row["turns"]) for row in load_rollouts(directory)) > 1
    assert [line["lag_max"] for line in load_metrics(directory)][1:] == [1, 1, 1]
    assert verify_run(directory, None).differences == []


def test_run_trains_adapters(adapting, model, tmp_path, monkeypatch):
    monkeypatch.setenv(KEY, adapting.key)
    sections = {"model": {"lora": {"r": 8}}, "vllm": {"in_flight": "span"}, "evaluation": {"sampler": "vllm"}}
    result = run(model, tmp_path, adapting, **sections, schedule={"kind": "lagged", "v": 1, "batches": 4})
    metrics = load_metrics(result.run)
    assert [line["lag_max"] for line in metrics][1:] == [1, 1, 1]
    assert all(line["parity_mean"] < 1e-3 for line in metrics)
    assert [one["version"] for one in load_evaluations(result.run)] == [0, 4]
    assert not adapting.list_adapters()


@pytest.mark.parametrize(
    ("kind", "v"),
    [("every", 4), *(pytest.param(*one, marks=pytest.mark.long) for one in (("every", 1), ("lagged", 2)))],
)
def test_evaluations_by_the_server_change_no_record_of_training(attached, model, tmp_path, kind, v):
    evaluation = {"every": 1, "sets": [{"name": "own"}, {"name": "long", "max_tokens": 12, "temperature": 0.5}]}
    made = [
        run(model, tmp_path / by, attached, schedule={"kind": kind, "v": v, "batches": 5},
            evaluation=evaluation | {"sampler": by}).run
        for by in ("local", "vllm")
    ]  # fmt: skip
    columns = ["batch", "prompt_key", "completion", "token_ids", "versions", "lag", "pi_k_version"]
    rows = [[{name: row[name] for name in columns} for row in load_rollouts(directory)] for directory in made]
    assert rows[0] == rows[1]
    for lines in zip(*(without_timings(load_metrics(directory)) for directory in made), strict=True):
        one, other = (
            {n: line[n] for n in ("version", "synced", "lag_min", "lag_max", "reward_mean")} for line in lines
        )
        assert one == other
    found = [load_evaluations(directory) for directory in made]
    assert [(s["name"], s["version"]) for s in found[0]] == [(s["name"], s["version"]) for s in found[1]]


def test_lagrpo_eval_by_a_server_finds_what_this_process_finds(attached, model, tmp_path, capsys):
    """At a temperature of .01 nearly every token is the likeliest, whoever samples it."""
    words = ["eval", str(model), "--task", "sample_task:load", "--model.dtype", "float32", "--model.device", "cpu"]
    words += ["--samples", "2", "--max_tokens", "6", "--max_prompt_tokens", "64", "--temperature", "0.01"]
    cli.main([*words, "--output", str(tmp_path / "local")])
    by_server = ["--sampling.sampler", "vllm", "--vllm.urls", attached.url, "--output", str(tmp_path / "vllm")]
    cli.main([*words, *by_server])
    assert "it differs from this process by" in capsys.readouterr().err
    means = [json.loads((tmp_path / by / "summary.json").read_bytes())["reward_mean"] for by in ("local", "vllm")]
    assert means[0] == pytest.approx(means[1], abs=0.2)


@pytest.mark.long
@pytest.mark.parametrize("shard", ["optimizer", "layers"])
def test_ranks_learn_from_what_a_server_samples(tmp_path, shard):
    settings = tiny_settings(
        tiny_directory(tmp_path), tmp_path, sampling={"sampler": "vllm"}, distributed={"shard": shard},
        schedule={"v": 2, "i": 2, "batches": 6, "prompts": 3}, objective={"recipe": "grpo", "beta": 0.05},
    )  # fmt: skip
    found = together(2, settings, lambda rank: [])
    assert all(isinstance(one, Result) for one in found), "\n\n".join(map(str, found))
    metrics = load_metrics(found[0].run)
    assert [(m["lag_min"], m["lag_max"]) for m in metrics] == [(lag, lag) for lag in (0, 0, 2, 0, 2, 0)]
    assert all(m["parity_mean"] < 1e-3 for m in metrics if m["synced"])


# Runs that start a server, and lose it


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[StartedServer]:
    """The servers that the run starts, for the test to kill."""
    found: list[StartedServer] = []
    original = StartedServer.__init__

    def remembered(self: StartedServer, *args: Any) -> None:
        original(self, *args)
        found.append(self)

    monkeypatch.setattr(StartedServer, "__init__", remembered)
    return found


def killing(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, call: int, started: list[StartedServer]) -> None:
    """Kill the server just before a call."""
    original, calls = getattr(owner, name), iter(range(1, 1000))

    def killed(self: Any, *args: Any, **kwargs: Any) -> Any:
        if next(calls) == call:
            kill(started[0])
        return original(self, *args, **kwargs)

    monkeypatch.setattr(owner, name, killed)


@pytest.mark.parametrize(
    ("owner", "name", "call", "v"),
    [
        (VllmClient, "generate", 12, 2),  # after the weight-sync check's eight
        (VllmClient, "reload", 3, 1),
        pytest.param(training.Training, "record", 2, 1, marks=pytest.mark.long),
    ],
)
def test_killed_server_loses_no_completion_and_counts_none_twice(
    model, tmp_path, monkeypatch, started, owner, name, call, v
):
    killing(monkeypatch, owner, name, call, started)
    result = run(
        model, tmp_path, schedule={"v": v, "batches": 4}, sampling={"max_tokens": 32},
        evaluation={"before_and_after": False},
    )  # fmt: skip
    rows, metrics = load_rollouts(result.run), load_metrics(result.run)
    assert sum(line["recoveries"] for line in metrics) == 1
    keys = {(row["batch"], row["epoch"], row["prompt_key"], row["completion"]) for row in rows}
    assert len(keys) == len(rows) == 4 * 2 * 4
    assert {row["outcome"] for row in rows} == {"scored"}
    alpha = [0, 1, 2, 3] if v == 1 else [0, 1, 1, 3]
    assert all({*row["versions"]} == {alpha[row["batch"] - 1]} for row in rows)
    assert all(line["parity_mean"] < 1e-3 for line in metrics)
    assert (result.run / "vllm-1.log").is_file()
    assert not list((tmp_path / "transfer").iterdir())
    assert started[0].guard.poll() is not None


def test_server_that_cannot_start_shows_its_log(model, tmp_path):
    with pytest.raises(SettingsError, match=r"(?s)the vLLM server ended\. The end of its log.*no-such-option"):
        run(model, tmp_path, vllm={"options": ["--no-such-option"]})


def test_run_attaches_as_lagrpo_serve_prints_and_ends_with_its_server(model, tmp_path, monkeypatch):
    """The server is killed in the middle; the run keeps what it has, and resumes with another server."""
    port = "18431"
    words = [model, "--port", port, "--dtype", "float32", "--max-model-len", "256", "--max-num-seqs", "16"]
    command = [sys.executable, "-c", "from lagrpo.cli import main; main()", "serve", *map(str, words)]

    def serve() -> subprocess.Popen[str]:
        serving = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
        )
        assert serving.stdout is not None
        key = next(line.partition("=")[2].strip() for line in serving.stdout if KEY in line)
        monkeypatch.setenv(KEY, key)
        end = time.monotonic() + 240
        while not VllmClient(f"http://127.0.0.1:{port}", key).is_healthy():
            assert serving.poll() is None
            assert time.monotonic() < end
            time.sleep(0.5)
        return serving

    serving = serve()
    original = training.Training.record

    def record(self: Any, step: Any) -> None:
        original(self, step)
        if step.batch == 2 and serving.poll() is None:
            os.kill(serving.pid, signal.SIGKILL)

    monkeypatch.setattr(training.Training, "record", record)
    sections: dict[str, Any] = {
        "run": {"name": "one"},
        "vllm": {"urls": [f"http://127.0.0.1:{port}"]},
        "schedule": {"v": 1, "batches": 4},
    }
    with pytest.raises(SamplerError, match="was not started by this run: start it again, then resume the run"):
        run(model, tmp_path, **sections)
    with suppress(ProcessLookupError):
        os.killpg(serving.pid, signal.SIGKILL)
    again = serve()
    result = run(model, tmp_path, **merged(sections, {"run": {"resume": "auto"}}))
    assert [line["batch"] for line in load_metrics(result.run)] == [1, 2, 3, 4]
    again.send_signal(signal.SIGINT)
    assert psutil.wait_procs([psutil.Process(again.pid)], timeout=30)[1] == []
