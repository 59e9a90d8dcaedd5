"""The vLLM engine against a fake server: requests, versions, servers that die, weight syncs,
evaluations."""

from __future__ import annotations

import asyncio
import base64
import runpy
import select
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from subprocess import PIPE, Popen
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import pytest
import torch
from ranks import run_on_ranks
from running import Section, tiny_settings
from safetensors.torch import load_file
from test_episodes import episode_requests, make_episodes, talking_policy
from test_lora import LORA
from test_sampling import requests_for
from tiny import save_tiny, tiny_policy
from torch import Tensor
from torch.distributed import ProcessGroup
from vllm_servers import Answer, FakeServer, Ours, choice, engine_of, update, versions

from lagrpo import machine
from lagrpo.errors import SettingsError
from lagrpo.interrupts import Interrupted, deferring, interruptible
from lagrpo.lifecycle.run import train
from lagrpo.model import backend
from lagrpo.model.chat import Chat
from lagrpo.model.lora import load_adapter_weights
from lagrpo.model.model import Policy
from lagrpo.rewards.pool import RewardPool
from lagrpo.rollout.base import SamplingParams
from lagrpo.rollout.local import LocalSampler
from lagrpo.rollout.prefetch import Prefetcher
from lagrpo.rollout.vllm import client, group_queue, nccl_transfer, server, weights
from lagrpo.rollout.vllm.client import GENERATE, KEY, SamplerError, VllmClient
from lagrpo.rollout.vllm.engine import VllmEngine
from lagrpo.rollout.vllm.server import EXTENSION, GUARD, Launch, find_python, open_servers
from lagrpo.settings.schema import Settings
from lagrpo.startup import build
from lagrpo.startup.checks import check_settings, server_shares_gpu
from lagrpo.threads import call_in_thread
from lagrpo.training.trainer import Trainer
from lagrpo.types import Completion, Group, JsonObject


@pytest.fixture(autouse=True)
def _transfer_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(weights.DIRECTORY, str(tmp_path / "transfer"))
    monkeypatch.delenv(KEY, raising=False)


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with FakeServer() as fake:
        yield fake


@pytest.fixture
def policy() -> Policy:
    return tiny_policy()


@pytest.fixture
def engine(fake: FakeServer, policy: Policy) -> Iterator[VllmEngine]:
    """It has synced version 0."""
    engine = engine_of([Ours(fake)], policy, rows=8)
    engine.sync_weights(policy.weights, 0)
    yield engine
    engine.close()


def sampled(engine: VllmEngine, policy: Policy, count: int = 2, G: int = 2) -> list[Completion]:
    return [
        c for _, group in engine.sample(requests_for(policy, count), G) for c in group.completions
    ]


def loaded(fake: FakeServer) -> list[str]:
    return [Path(body["kwargs"]["weights_path"]).name for body in fake.bodies("/collective_rpc")]


# Requests and answers


def test_seeds_are_keyed_by_prompt_and_the_label_salts_the_cache(fake, engine, policy):
    sampled(engine, policy, 3)
    update(policy)
    engine.sync_weights(policy.weights, 1)
    sampled(engine, policy, 3)
    bodies = fake.bodies(GENERATE)
    seeds = [body["sampling_params"]["seed"] for body in bodies]
    assert sorted(seeds[:3]) == sorted(seeds[3:])
    assert len({*seeds}) == 3
    run = engine.weights.run
    assert [body["cache_salt"] for body in bodies] == [f"{run}:0"] * 3 + [f"{run}:1"] * 3
    assert bodies[0]["sampling_params"]["stop_token_ids"] == sorted(policy.chat.eos_ids)


def test_unusable_completion_fails_and_never_has_a_log_prob_of_zero(fake, engine, policy):
    cases: list[tuple[JsonObject, str]] = [
        ({"logprobs": (-0.5, -9999.0)}, "a log-prob that is not finite"),  # as vLLM writes -inf
        ({"logprobs": (-0.5,)}, "a log-prob that is not finite"),
        ({"tokens": ()}, "('stop') after 0 tokens"),
        ({"end": "error"}, "('error') after 2 tokens"),
    ]
    for changes, reason in cases:
        fake.answers[GENERATE] = lambda _, parts=changes: (
            200,
            {"choices": [choice(fake.label, **parts)]},
        )
        (completion,) = sampled(engine, policy, 1, 1)
        assert completion.outcome is not None
        assert completion.outcome.kind == "failed"
        assert reason in completion.outcome.reason
        assert not (completion.rollout_logp == 0).any()


def test_training_asks_for_the_whole_distribution_and_an_evaluation_for_its_own(
    fake, engine, policy
):
    evaluation = SamplingParams("evaluate", tau=0.6, max_tokens=4, top_p=0.95)
    list(engine.sample(requests_for(policy, 1), 2))
    list(engine.sample(requests_for(policy, 1), 2, evaluation))
    requested = [body["sampling_params"] for body in fake.bodies(GENERATE)]
    assert [(one["temperature"], one["top_p"]) for one in requested] == [
        (policy.tau, 1.0),
        (0.6, 0.95),
    ]


def test_weights_of_another_run_end_the_run(fake, engine, policy):
    fake.label = "other:0"
    assert engine.version == -1
    with pytest.raises(SamplerError, match=r"weights labeled other:0"):
        sampled(engine, policy)


# Servers that die


def test_groups_of_a_dead_server_are_sampled_again_with_the_same_seeds(fake, policy):
    with FakeServer() as other:
        engine = engine_of([Ours(fake), Ours(other)], policy, rows=4)
        engine.sync_weights(policy.weights, 7)
        fake.die_at(GENERATE)
        groups = list(engine.sample(requests_for(policy, 8), 2))
        assert len(groups) == len({request.prompt.key for request, _ in groups}) == 8
        assert versions([c for _, group in groups for c in group.completions]) == {7}
        assert engine.pop_metrics() == {"recoveries": 1}
        assert loaded(fake) == ["v000007"] * 2
        assert engine.version == 7
        seeds = [
            body["sampling_params"]["seed"]
            for one in (fake, other)
            for body in one.bodies(GENERATE)
        ]
        assert len({*seeds}) == 8
        engine.close()


def test_groups_of_a_dead_attached_server_go_to_the_others_until_it_is_back(
    fake, policy, monkeypatch
):
    monkeypatch.setattr(group_queue, "POLL_SECONDS", 0.0)
    with FakeServer() as other:
        engine = engine_of([VllmClient(fake.url), VllmClient(other.url)], policy, rows=4)
        engine.sync_weights(policy.weights, 7)
        fake.die_at(GENERATE)
        groups = list(engine.sample(requests_for(policy, 8), 2))
        assert len(groups) == len({request.prompt.key for request, _ in groups}) == 8
        assert versions([c for _, group in groups for c in group.completions]) == {7}
        seeds = [
            body["sampling_params"]["seed"]
            for one in (fake, other)
            for body in one.bodies(GENERATE)
        ]
        assert len({*seeds}) == 8
        num_loads = len(loaded(fake))
        engine.sync_weights(policy.weights, 8)
        assert (engine.version, len(loaded(fake))) == (8, num_loads)
        assert engine.pop_metrics() == {"recoveries": 0}

        fake.start()  # with the model's own weights
        list(engine.sample(requests_for(policy, 1), 2))
        assert loaded(fake)[num_loads:] == ["v000008"]
        assert engine.version == 8
        assert engine.pop_metrics() == {"recoveries": 1}
        fake.calls.clear()
        assert versions(sampled(engine, policy, 8)) == {8}
        assert fake.bodies(GENERATE)
        engine.close()


def test_attached_server_that_dies_in_a_weight_sync_is_set_aside(fake, policy):
    with FakeServer() as other:
        engine = engine_of([VllmClient(fake.url), VllmClient(other.url)], policy)
        fake.die_at("/collective_rpc")
        engine.sync_weights(policy.weights, 7)
        assert engine.version == 7
        assert versions(sampled(engine, policy)) == {7}
        engine.close()


def test_last_attached_server_and_a_failing_healthy_server_end_the_run(fake, engine, policy):
    fake.answers[GENERATE] = lambda _: (500, {"error": "a bug"})
    with pytest.raises(SamplerError, match=r"failed with status 500.*a bug"):
        sampled(engine, policy)
    attached = engine_of([VllmClient(fake.url)], policy)
    attached.sync_weights(policy.weights, 0)
    fake.is_dead = True
    for ask in (partial(sampled, attached, policy, 8), lambda: attached.version):
        with pytest.raises(SamplerError, match="No server is left"):
            ask()
    attached.weights.close([])


@pytest.mark.parametrize("stops", [False, True], ids=["at once", "after a sync"])
def test_run_that_waits_for_a_silent_server_can_be_stopped_and_ends(
    monkeypatch, fake, engine, policy, stops
):
    released = threading.Event()

    def wait_for_ever(body: JsonObject) -> Answer:
        if stops and len(fake.bodies(GENERATE)) == 1:
            return 200, {"choices": [choice(fake.label, n, end="abort") for n in range(2)]}
        is_silent.set()
        released.wait()

    is_silent = threading.Event()
    fake.answers[GENERATE] = wait_for_ever
    engine.sync_weights(policy.weights, 0)
    threads = set(threading.enumerate())
    with interruptible(), deferring():
        groups = engine.sample(requests_for(policy, 1), 2)
        assert is_silent.wait(10)
        # Python waits at its end for all others.
        assert all(thread.daemon for thread in set(threading.enumerate()) - threads)
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Interrupted):
            next(groups)
    fake.answers["/abort_requests"] = wait_for_ever
    monkeypatch.setattr(client, "HEALTH_TIMEOUT", 0.1)
    call_in_thread(engine.close).result(timeout=20)
    released.set()


def test_request_that_takes_too_long_names_the_setting(fake):
    fake.answers[GENERATE] = lambda _: time.sleep(0.5)
    server = VllmClient(fake.url, generate_timeout=0.1)
    with pytest.raises(SamplerError, match="generate_timeout"):
        server.get_logprobs([1], [2])


def test_log_probs_come_from_each_replica_of_a_server(fake, engine):
    fake.config["parallel_config"] = {"data_parallel_size": 3}

    def answer(body: JsonObject) -> Answer:
        entries = [{str(token): {"logprob": -body["replica"]}} for token in body["token_ids"]]
        return 200, {"prompt_logprobs": [None, *entries[1:]]}

    fake.answers[GENERATE] = answer
    logprobs = engine.get_logprobs([([1, 2], [3, 4]), ([1], [5])])
    assert [*logprobs] == [f"{fake.url}, replica {number}" for number in range(3)]
    assert [*logprobs.values()] == [[[-n, -n], [-n]] for n in (0.0, 1.0, 2.0)]
    # Behind a load balancer a server has the replicas of its node.
    fake.config["parallel_config"] |= {
        "data_parallel_size_local": 1,
        "data_parallel_hybrid_lb": True,
    }
    assert [*engine.get_logprobs([([1], [5])])] == [fake.url]


def test_server_that_died_of_a_signal_to_all_processes_is_not_restarted(fake, engine, policy):
    """A batch system ends a job so. The run stops, instead of waiting for a new server."""
    fake.is_dead = True
    with interruptible(), deferring():
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Interrupted):
            sampled(engine, policy)
    assert engine.pop_metrics() == {"recoveries": 0}


def test_error_of_a_started_server_names_its_log(fake, engine, policy):
    fake.answers[GENERATE] = lambda _: (500, {"error": "a bug"})
    with pytest.raises(SamplerError) as raised:
        sampled(engine, policy)
    assert raised.value.__notes__ == ["The server's log: vllm-1.log"]


# Weight syncs


def test_sync_loads_the_weights_in_the_servers_dtype_while_paused(fake, engine, policy):
    update(policy)
    engine.weights.dtype = torch.bfloat16
    count = torch.tensor(2**20 + 1)
    fake.calls.clear()
    engine.sync_weights({**policy.weights, "count": count}, 1)
    paths = ["/pause?mode=abort", "/collective_rpc", "/update_weight_version", "/resume"]
    assert [path for path, _ in fake.calls] == paths
    (path,) = (Path(body["kwargs"]["weights_path"]) for body in fake.bodies("/collective_rpc"))
    written = load_files(path)
    assert written.pop("count") == count
    assert all(
        torch.equal(written[name], tensor.bfloat16()) for name, tensor in policy.weights.items()
    )
    assert [old.name for old in path.parent.glob("v*")] == ["v000001"]
    engine.close()
    assert not path.parent.exists()


def load_files(directory: Path) -> dict[str, Tensor]:
    files = [load_file(file) for file in directory.glob("*.safetensors")]
    assert len({name for file in files for name in file}) == sum(map(len, files))
    return {name: tensor for file in files for name, tensor in file.items()}


class Held(Mapping[str, Tensor]):
    """Weights of 2 x 40 and 3 x 8 bytes that are made when they are read, and what is held."""

    def __init__(self) -> None:
        self.lengths = {"a": 10, "b": 10, "c": 2, "d": 2, "e": 2}
        self.alive = WeakSet[Tensor]()
        self.most_bytes = 0

    def __getitem__(self, name: str) -> Tensor:
        tensor = torch.full((self.lengths[name],), float(ord(name)))
        self.alive.add(tensor)
        self.most_bytes = max(self.most_bytes, sum(one.nbytes for one in self.alive))
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.lengths)

    def __len__(self) -> int:
        return len(self.lengths)


@pytest.mark.parametrize(
    ("bucket", "num_files", "most_bytes"),
    [
        pytest.param(1, 5, 80, id="one tensor"),
        pytest.param(50, 3, 88, id="several tensors"),
        pytest.param(1000, 1, 104, id="all"),
    ],
)
def test_version_is_written_in_buckets_that_are_dropped(
    monkeypatch, fake, engine, bucket, num_files, most_bytes
):
    monkeypatch.setattr(weights, "BUCKET", bucket)
    gathered = Held()
    fake.calls.clear()
    engine.sync_weights(gathered, 1)
    path = Path(fake.bodies("/collective_rpc")[0]["kwargs"]["weights_path"])
    assert gathered.most_bytes <= most_bytes
    assert len(list(path.iterdir())) == num_files
    for written in (load_files(path), engine.current_weights()[1]):
        assert written.keys() == gathered.keys()
        assert all(torch.equal(written[name], tensor) for name, tensor in gathered.items())


@pytest.mark.parametrize(
    ("num_bytes", "in_shared_memory"),
    [pytest.param(100, True, id="2.2 versions fit"), pytest.param(101, False, id="too large")],
)
def test_versions_that_do_not_fit_into_shared_memory_go_to_the_output_directory(
    monkeypatch, tmp_path, num_bytes, in_shared_memory
):
    monkeypatch.delenv(weights.DIRECTORY)
    shared_memory = tmp_path / "shm"
    shared_memory.mkdir()
    monkeypatch.setattr(weights, "SHARED_MEMORY", shared_memory)
    monkeypatch.setattr(weights.shutil, "disk_usage", lambda path: SimpleNamespace(free=220))
    output_dir = tmp_path / "runs"
    transfer = weights.WeightTransfer(num_bytes=num_bytes, output_dir=output_dir)
    assert transfer.root.parent == (shared_memory if in_shared_memory else output_dir)
    transfer.close([])
    assert not transfer.root.exists()


def test_directories_that_killed_runs_left_are_removed_and_no_others(monkeypatch, tmp_path):
    monkeypatch.delenv(weights.DIRECTORY)
    monkeypatch.setattr(weights, "SHARED_MEMORY", tmp_path)
    # Its process has another number in the container that shares this memory.
    in_use = weights.WeightTransfer()
    in_use.root = in_use.root.rename(tmp_path / "lagrpo-999999999-01234567")
    left = tmp_path / "lagrpo-1-89abcdef"
    left.mkdir()
    (left / weights.LOCK).touch()
    users_data = tmp_path / "lagrpo-my-data"
    users_data.mkdir()
    # Another user's, with a link to a file of this user.
    (users_data / "file").write_text("text", encoding="utf-8")
    others = tmp_path / "lagrpo-2-89abcdef"
    others.mkdir()
    (others / weights.LOCK).symlink_to(users_data / "file")
    monkeypatch.setattr(weights, "is_own", lambda path: others not in (path, path.parent))
    transfer = weights.WeightTransfer()
    assert set(tmp_path.iterdir()) == {in_use.root, users_data, others, transfer.root}
    assert (users_data / "file").read_text(encoding="utf-8") == "text"
    shutil.rmtree(others)
    transfer.close([])
    in_use.close([])
    assert list(tmp_path.iterdir()) == [users_data]


def test_directory_that_the_user_chose_is_not_asked_for_its_space(monkeypatch, tmp_path):
    monkeypatch.setattr(weights.shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    transfer = weights.WeightTransfer(num_bytes=100, output_dir=tmp_path / "runs")
    assert transfer.root.parent == tmp_path / "transfer"
    transfer.close([])


def test_rejected_weights_leave_the_version_before_for_the_checkpoint(fake, engine, policy):
    old = {name: tensor.clone() for name, tensor in policy.weights.items()}
    fake.answers["/collective_rpc"] = lambda _: (500, {"error": "other shapes"})
    update(policy)
    with pytest.raises(SamplerError, match="other shapes"):
        engine.sync_weights(policy.weights, 1)
    version, current = engine.current_weights()
    assert version == 0
    assert all(torch.equal(current[name], tensor) for name, tensor in old.items())


def stop_first_request(fake: FakeServer) -> threading.Event:
    """Lets the first group wait for a weight sync, which stops its second completion after a token.

    The event says that the group has begun.
    """
    started, stopped = threading.Event(), threading.Event()

    def generate(body: JsonObject) -> Answer:
        del fake.answers[GENERATE]
        label = fake.label
        started.set()
        stopped.wait(20)
        choices = [choice(label), choice(label, 1, (7,), (-0.75,), "abort")]
        return 200, {"model": body.get("model"), "choices": choices}

    def stop(_: object) -> Answer:
        stopped.set()
        return 200, {}

    fake.answers[GENERATE] = generate
    fake.answers["/pause?mode=abort"] = stop
    return started


def test_completion_that_a_sync_stops_goes_on_from_its_tokens(fake, policy):
    engine = engine_of([Ours(fake)], policy, rows=2)
    engine.sync_weights(policy.weights, 0)
    started = stop_first_request(fake)
    coming = engine.sample(requests_for(policy, 1), 2)
    assert started.wait(20)
    update(policy)
    engine.sync_weights(policy.weights, 1)
    ((request, group),) = coming
    ended, stopped = group.completions
    assert ended.versions.tolist() == [0, 0]
    assert stopped.token_ids.tolist() == [7, 7, 1]
    assert stopped.rollout_logp.tolist() == [-0.75, -0.5, -0.25]
    assert stopped.versions.tolist() == [0, 1, 1]
    assert stopped.finished
    first, rest = fake.bodies(GENERATE)
    assert rest["token_ids"] == [*request.prompt.token_ids, 7]
    params = [body["sampling_params"] for body in (first, rest)]
    assert [(one["n"], one["max_tokens"]) for one in params] == [(2, 12), (1, 11)]
    assert rest["sampling_params"]["seed"] - first["sampling_params"]["seed"] not in (0, 1)
    assert rest["cache_salt"] != first["cache_salt"]
    assert engine.pop_metrics()["recomputed"] == len(rest["token_ids"])
    assert engine.in_flight() == []
    engine.close()


def test_stop_text_across_a_sync_ends_a_completion(fake, policy):
    """One 4 before the sync and one after it: together they are the text."""
    engine = engine_of([Ours(fake)], policy, rows=2)
    engine.sync_weights(policy.weights, 0)
    started = stop_first_request(fake)
    params = replace(engine.params, stop=("44",))
    coming = engine.sample(requests_for(policy, 1), 2, params)
    assert started.wait(20)
    update(policy)
    engine.sync_weights(policy.weights, 1)
    ((_, group),) = coming
    ended, stopped = group.completions
    assert (ended.text, stopped.text) == ("4", "44")
    assert stopped.versions.tolist() == [0, 1]
    assert stopped.finished
    engine.close()


def test_stopped_group_is_in_flight_until_it_ends_and_goes_on_in_another_run(fake, policy):
    """The server never answers for the rest, so the group stays as the sync has left it."""
    engine = engine_of([Ours(fake)], policy, rows=2)
    engine.sync_weights(policy.weights, 0)
    started = stop_first_request(fake)
    engine.sample(requests_for(policy, 1), 2)
    assert started.wait(20)
    asked, ended = threading.Event(), threading.Event()

    def hang(_: object) -> Answer:
        asked.set()
        ended.wait(20)
        return 200, {"choices": [choice("", end="abort")]}

    fake.answers[GENERATE] = hang
    fake.answers["/pause?mode=abort"](None)
    assert asked.wait(20)
    (request,) = engine.in_flight()
    assert [completion.has_ended for completion in request.begun] == [True, False]
    del fake.answers[GENERATE]
    resumed = engine_of([Ours(fake)], policy, rows=2)
    resumed.sync_weights(policy.weights, 0)
    ((_, group),) = resumed.sample([request], 2)
    assert [c.token_ids.tolist() for c in group.completions] == [[7, 1], [7, 7, 1]]
    ended.set()
    engine.close()
    resumed.close()


def nccl(
    monkeypatch: pytest.MonkeyPatch, fakes: list[FakeServer], policy: Policy, **calls: object
) -> tuple[VllmEngine, list[tuple[object, ...]]]:
    """A transfer by a fake NCCL to some servers, and what was sent."""
    sent: list[tuple[object, ...]] = []
    doing = {
        "unique_id": lambda: b"i" * 128,
        "init_rank": lambda world, identity, rank: (world, identity, rank),
        "all_reduce": lambda tensors, comms: None,
        "broadcast": lambda tensors, root, comms: sent.append((tensors[0].shape, root, comms)),
    } | calls
    for name, value in doing.items():
        monkeypatch.setattr(nccl_transfer.nccl, name, value)
    monkeypatch.setattr(nccl_transfer, "nccl_version", lambda: (2, 27, 3))
    monkeypatch.setattr(nccl_transfer, "_own_stream", lambda _: nullcontext())
    monkeypatch.setattr(nccl_transfer.torch.cuda, "current_device", lambda: 0)
    zeros = torch.zeros
    monkeypatch.setattr(nccl_transfer.torch, "zeros", lambda *size, **_: zeros(*size))
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    params = SamplingParams("sample", 1.0, 4)
    return VllmEngine(
        [Ours(fake) for fake in fakes],
        nccl_transfer.NcclTransfer(torch.float32),
        policy.chat,
        params,
    ), sent


def test_nccl_announces_tensors_in_the_order_of_the_broadcast(monkeypatch, fake):
    with FakeServer() as other:
        engine, sent = nccl(monkeypatch, [fake, other], tiny_policy())
        tensors = {"x": torch.ones(2, 3), "y": torch.zeros(4)}
        for version in (6, 7):
            engine.sync_weights(tensors, version)
        met = [
            body["init_info"]
            for one in (fake, other)
            for body in one.bodies("/init_weight_transfer_engine")
        ]
        assert [info["rank_offset"] for info in met] == [1, 3]  # two workers each
        assert {info["world_size"] for info in met} == {5}
        assert {base64.b64decode(info["nccl_unique_id_b64"]) for info in met} == {b"i" * 128}
        communicator = (5, b"i" * 128, 0)
        assert (
            sent
            == [(torch.Size([2, 3]), 0, [communicator]), (torch.Size([4]), 0, [communicator])] * 2
        )
        info = other.bodies("/update_weights")[0]["update_info"]
        assert info == {
            "names": ["x", "y"],
            "dtype_names": ["float32"] * 2,
            "shapes": [[2, 3], [4]],
        }
        finished = other.bodies("/finish_weight_update")
        assert [body["weight_version"].partition(":")[2] for body in finished] == ["6", "7"]
        assert torch.equal(engine.current_weights()[1]["x"], tensors["x"])
        engine.close()


def test_nccl_leaves_out_a_server_that_is_gone(monkeypatch, fake):
    with FakeServer() as other:
        engine, _ = nccl(monkeypatch, [fake, other], tiny_policy())
        monkeypatch.setattr(Ours, "can_restart", False)
        tensors = {"x": torch.ones(2, 3)}
        engine.sync_weights(tensors, 6)
        fake.is_dead = True
        engine.sync_weights(tensors, 7)
        met = [body["init_info"] for body in other.bodies("/init_weight_transfer_engine")]
        assert [(info["world_size"], info["rank_offset"]) for info in met] == [(5, 3), (3, 1)]
        assert len(other.bodies("/update_weights")) == 2
        engine.close()


@pytest.mark.parametrize("path", ["/init_weight_transfer_engine", "/update_weights"])
@pytest.mark.parametrize("loses_connection", [True, False], ids=["process is gone", "host is gone"])
def test_run_ends_with_its_last_weights_if_nccl_waits_for_a_server(
    monkeypatch, fake, path, loses_connection
):
    """A server is lost after the sync of version 6; the trainer and the other server wait."""
    released = threading.Event()

    def hang(*_: object, **__: object) -> None:
        released.wait()

    with FakeServer() as lost:
        engine, _ = nccl(monkeypatch, [fake, lost], tiny_policy())
        tensors = {"x": torch.ones(2, 3)}
        engine.sync_weights(tensors, 6)
        for client in engine.servers:
            client.load_timeout = 0.2
        for name in ("init_rank", "broadcast"):
            monkeypatch.setattr(nccl_transfer.nccl, name, hang)
        engine._groups.starts[engine.servers[1]] += path.startswith("/init")
        fake.answers[path] = hang
        lost.answers[path] = hang
        if loses_connection:
            lost.die_at(path)
        lost.answers["/health"] = lambda _: None
        with pytest.raises(SamplerError, match=f"NCCL hangs: {lost.url}") as raised:
            engine.sync_weights({"x": torch.zeros(2, 3)}, 7)
        assert fake.url not in str(raised.value)
        version, saved = engine.current_weights()
        assert version == 6
        assert torch.equal(saved["x"], tensors["x"])
        released.set()
        engine.close()


def answer_nccl_version(fake: FakeServer, version: str) -> None:
    """Lets the workers of a server have our extension, and this NCCL."""

    def answer(body: JsonObject) -> Answer:
        if body["method"] == "get_nccl_version":
            return 200, {"results": [version, version]}
        return 200, {}

    fake.answers["/collective_rpc"] = answer


@pytest.mark.parametrize(
    ("version", "meets"),
    [
        pytest.param("2.27.3", True, id="the same"),
        pytest.param("2.28.3", False, id="another one"),
        pytest.param("2.27.", False, id="patch 0, as vLLM writes it"),
    ],
)
def test_weights_go_through_the_directory_if_versions_of_nccl_differ(
    monkeypatch, fake, caplog, version, meets
):
    engine, sent = nccl(monkeypatch, [fake], tiny_policy())
    engine.servers[0].reload_method = "reload_with_head"
    answer_nccl_version(fake, version)
    tensors = {"x": torch.ones(2, 3)}
    with caplog.at_level("WARNING", logger="lagrpo"):
        engine.sync_weights(tensors, 1)
        engine.sync_weights(tensors, 2)
    assert len(sent) == (2 if meets else 0)
    assert len(fake.bodies("/init_weight_transfer_engine")) == meets
    assert len(caplog.records) == (not meets)
    if not meets:
        reloads = [b for b in fake.bodies("/collective_rpc") if b["method"] == "reload_with_head"]
        assert [Path(b["kwargs"]["weights_path"]).name for b in reloads] == ["v000001", "v000002"]
        assert engine.version == 2
    assert torch.equal(engine.current_weights()[1]["x"], tensors["x"])
    engine.close()


def test_version_of_nccl_is_the_loaded_library_s(monkeypatch):
    def write_version(pointer: Any) -> None:
        pointer._obj.value = 22807

    library = SimpleNamespace(ncclGetVersion=write_version)
    monkeypatch.setattr(nccl_transfer.ctypes, "CDLL", lambda name: library)
    monkeypatch.setattr(nccl_transfer.nccl, "version", lambda: (2, 27, 3))
    assert nccl_transfer.nccl_version() == (2, 28, 7)


def test_two_buffers_hold_all_versions_from_a_gpu(monkeypatch, fake):
    engine, _ = nccl(monkeypatch, [fake], tiny_policy())
    buffers: list[int] = []
    copy = weights.HostBuffers.copy

    def copy_and_note(
        self: weights.HostBuffers, tensors: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        copied = copy(self, tensors)
        buffers.append(copied["x"].data_ptr())
        return copied

    monkeypatch.setattr(weights.HostBuffers, "copy", copy_and_note)
    trained = torch.zeros(2, 3)
    for version in range(5):
        trained.fill_(version)
        engine.sync_weights({"x": trained}, version)
        trained.fill_(version + 0.5)
        with engine.temporary_weights({"x": trained}, 100 + version, restore_afterwards=True):
            assert engine.current_weights()[0] == version
        # The trainer goes on, but what was synced stays.
        assert engine.current_weights()[1]["x"].unique().tolist() == [version]
    assert len(buffers) == 10
    assert len(set(buffers)) <= 2
    engine.close()


def test_version_of_adapters_is_loaded_by_name_and_nothing_pauses(fake):
    lora = tiny_policy(lora=LORA)
    engine = engine_of([Ours(fake)], lora)
    engine.sync_weights(lora.weights, 0)
    with engine.weights.using() as label:  # a request in flight keeps its adapter
        update(lora)
        engine.sync_weights(lora.weights, 1)
        assert [*fake.adapters] == [label, engine.weights.current.label]  # type: ignore[union-attr]
    assert (engine.version, versions(sampled(engine, lora))) == (1, {1})
    fake.is_dead = True
    assert (versions(sampled(engine, lora)), engine.version) == ({1}, 1)
    update(lora)
    engine.sync_weights(lora.weights, 2)
    (path,) = fake.adapters.values()
    written = load_adapter_weights(Path(path))
    assert all(torch.equal(written[name], tensor) for name, tensor in lora.weights.items())
    assert not {"/pause?mode=abort", "/collective_rpc"} & {path for path, _ in fake.calls}
    engine.close()
    assert not fake.adapters


# Sleep


def test_server_sleeps_until_the_next_sync(fake, engine, policy):
    engine.sleep()
    assert fake.is_asleep
    fake.calls.clear()
    update(policy)
    engine.sync_weights(policy.weights, 1)
    assert [path for path, _ in fake.calls][:3] == [
        "/wake_up",
        "/pause?mode=abort",
        "/collective_rpc",
    ]
    assert versions(sampled(engine, policy)) == {1}
    update(policy)
    engine.sync_weights(policy.weights, 2)
    assert len(fake.bodies("/wake_up")) == 1


def test_evaluation_wakes_a_sleeping_server_also_without_other_weights(fake, engine, policy):
    engine.sleep()
    with engine.temporary_weights(policy.weights, 0, restore_afterwards=True):
        assert versions(sampled(engine, policy)) == {0}


def test_server_that_died_asleep_is_awake_with_the_next_weights(fake, engine, policy):
    engine.sleep()
    fake.is_dead = True
    update(policy)
    engine.sync_weights(policy.weights, 1)
    assert versions(sampled(engine, policy)) == {1}
    assert engine.pop_metrics() == {"recoveries": 1}


def test_server_may_sleep_between_the_last_completion_and_the_update(monkeypatch, tmp_path):
    events: list[str] = []

    def note(owner: type, name: str, event: str) -> None:
        original = getattr(owner, name)

        def noted(*arguments: object, **options: object) -> object:
            events.append(event)
            return original(*arguments, **options)

        monkeypatch.setattr(owner, name, noted)

    note(LocalSampler, "sync_weights", "sync")
    note(Prefetcher, "submit", "sample")
    note(RewardPool, "score", "score")
    note(LocalSampler, "before_learning", "sleep")
    note(Trainer, "step", "update")
    schedule = {"batches": 2, "sync_every": 1}
    model = save_tiny(tmp_path / "model")
    train(tiny_settings(model, tmp_path, schedule=schedule, eval={"at_start": False}))
    assert events == ["sync", "sample", "score", "sleep", "update"] * 2


@pytest.mark.parametrize(
    ("changes", "ranks", "message"),
    [
        pytest.param({}, 1, None, id="one GPU for both"),
        pytest.param(
            {"vllm": {"gpus": [1], "sleep": True}}, 1, "they share none", id="its own GPU"
        ),
        pytest.param({}, 2, "is for one process", id="two ranks"),
    ],
)
def test_server_sleeps_only_on_the_gpu_of_one_process(
    monkeypatch, tmp_path, changes, ranks, message
):
    monkeypatch.setattr(backend, "pick_device", lambda: torch.device("cuda"))
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    run_settings = settings(tmp_path, **{"vllm": {"sleep": True}} | changes)
    if message is None:
        check_settings(run_settings)
    else:
        with pytest.raises(SettingsError, match=message):
            check_settings(run_settings)


# Evaluations


def test_servers_get_their_version_back_after_an_evaluation_that_fails(fake, engine, policy):
    """Also inside, a checkpoint gets the weights that the run samples with."""
    old = {name: tensor.clone() for name, tensor in policy.weights.items()}
    update(policy)

    def evaluate() -> None:
        with engine.temporary_weights(policy.weights, 1, restore_afterwards=True):
            assert (engine.version, engine.current_weights()[0]) == (1, 0)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate()
    assert loaded(fake) == ["v000000", "v000001", "v000000"]
    assert engine.version == engine.current_weights()[0] == 0
    assert all(
        torch.equal(engine.current_weights()[1][name], tensor) for name, tensor in old.items()
    )
    with engine.temporary_weights(old, 0, restore_afterwards=True):  # loads nothing that is there
        pass
    with engine.temporary_weights(policy.weights, 1, restore_afterwards=False):
        pass
    assert (loaded(fake)[3:], engine.version) == (["v000001"], 1)


# Several turns


def converse(fake: FakeServer, G: int = 2, end: str = "stop", **limits: int) -> tuple[Group, Chat]:
    """A group by a server that says "ab" and ends its turn, and the policy. `end` is how later
    turns end."""
    policy = talking_policy(torch.float32)
    episodes, count = make_episodes(policy, **limits), iter(range(100))
    engine = engine_of([Ours(fake)], policy, episodes.sampled)
    engine.params = replace(engine.params, episodes=episodes)
    engine.sync_weights(policy.weights, 4)

    def generate(body: JsonObject) -> Answer:
        params, later = body["sampling_params"], next(count) > 0
        tokens = (13, 14, 1)[: params["max_tokens"]]
        choices = [
            choice(fake.label, g, tokens, (0.0, -0.5, -1.0), end if later else "stop")
            for g in range(params["n"])
        ]
        return 200, {"choices": choices}

    fake.answers[GENERATE] = generate
    ((_, group),) = engine.sample(episode_requests(policy, 1), G)
    engine.close()
    return group, policy.chat


def test_each_turn_is_a_request_with_everything_so_far(fake):
    group, chat = converse(fake)
    first, *later = fake.bodies(GENERATE)
    assert first["token_ids"] == list(group.prompt.token_ids)
    assert [body["sampling_params"]["n"] for body in (first, *later)] == [2, 1, 1, 1, 1]
    assert len({body["sampling_params"]["seed"] for body in (first, *later)}) == 5
    for c in group.completions:
        assert c.outcome is not None
        assert (c.finished, c.outcome.reason, c.turns[::2]) == (
            True,
            "after 3 turns",
            ("ab", "ab", "ab"),
        )
        ids = [*group.prompt.token_ids, *c.token_ids.tolist()]
        assert any(body["token_ids"] == ids[:-3] for body in later)
        assert (chat.decode(c.token_ids.tolist()), c.length) == (c.text, 9)
        assert c.rollout_logp[c.sampled].tolist() == [0.0, -0.5, -1.0] * 3


def test_token_limit_holds_over_all_turns_and_an_unusable_turn_fails_the_completion(fake):
    (c,) = converse(fake, G=1, sampled=8)[0].completions
    assert [body["sampling_params"]["max_tokens"] for body in fake.bodies(GENERATE)] == [8, 5, 2]
    assert (c.length, c.finished) == (8, False)
    (c,) = converse(fake, G=1, end="error")[0].completions
    assert c.outcome is not None
    assert (c.outcome.kind, c.outcome.reason) == (
        "failed",
        "the server stopped it ('error') after 3 tokens",
    )


# Attaching, starting, serving


def settings(root: Path, **sections: Section) -> Settings:
    model = save_tiny(root / "model", tie_word_embeddings=True)
    return Settings.model_validate(
        tiny_settings(model, root, **{"rollout": {"engine": "vllm"}} | sections)
    )


def test_server_for_shorter_sequences_is_rejected_before_a_model_loads(fake, tmp_path):
    run_settings = settings(tmp_path, vllm={"urls": [fake.url]})
    fake.config["parallel_config"] = {"worker_extension_cls": EXTENSION}
    assert open_servers(run_settings)[0].reload_method == "reload_with_head"
    fake.answers["/v1/models"] = lambda _: (
        200,
        {"data": [{"id": "m", "root": "m", "max_model_len": 60}]},
    )
    with pytest.raises(SettingsError, match="at most 60 tokens"):
        open_servers(run_settings)


def test_server_of_another_version_is_rejected_with_both_versions(fake, tmp_path):
    fake.answers["/version"] = lambda _: (200, {"version": "0.31.2"})
    with pytest.raises(SettingsError, match=rf"0\.31\.2.*{client.VLLM}"):
        open_servers(settings(tmp_path, vllm={"urls": [fake.url]}))


@pytest.mark.parametrize(
    ("max_tokens", "served", "compared"),
    [
        pytest.param(40, 64, 32, id="long completions"),
        pytest.param(8, 32, 7, id="short completions"),
        pytest.param(1, 26, 1, id="one token"),
    ],
)
def test_server_takes_no_longer_sequences_than_the_run_and_its_check_sample(
    fake, engine, policy, tmp_path, max_tokens, served, compared
):
    rollout = {"engine": "vllm", "max_prompt_length": 24, "max_completion_length": max_tokens}
    assert server.longest_served(settings(tmp_path, rollout=rollout)) == served
    engine.params = replace(engine.params, max_tokens=max_tokens)
    engine.generate_on_servers(requests_for(policy, 1), 1, 32)
    (body,) = fake.bodies(GENERATE)
    assert body["sampling_params"]["max_tokens"] == compared


@pytest.mark.parametrize(
    "models",
    [
        pytest.param("<html>", id="another program"),
        pytest.param({"data": []}, id="no model"),
        pytest.param({"data": [{"id": "m"}]}, id="another server with OpenAI's endpoints"),
    ],
)
def test_server_that_is_not_vllm_is_rejected_with_what_starts_one(fake, tmp_path, models):
    fake.answers["/v1/models"] = lambda _: (200, models)
    with pytest.raises(SettingsError, match=r"is not a vLLM server.*lagrpo vllm-serve"):
        open_servers(settings(tmp_path, vllm={"urls": [fake.url]}))


def test_answer_that_is_broken_json_names_the_server(fake):
    client = VllmClient(fake.url)
    with pytest.raises(SamplerError, match="broken JSON"):
        client._read("/v1/models", b'{"data":')


def test_python_without_vllm_is_named_with_the_cure(tmp_path, monkeypatch):
    (tmp_path / "signal.py").write_text("open('executed', 'w')", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    launch = Launch(sys.executable, "model", "float32", 300, 7)
    started = server.StartedServer(launch, tmp_path / "log")
    try:
        with pytest.raises(SamplerError, match="has no vLLM"):
            started.wait_until_ready()
    finally:
        started.close()
    assert not (tmp_path / "executed").exists(), "the guard and vLLM import nothing from here"


def test_server_launch_sets_the_options_that_a_run_needs(monkeypatch):
    launch = Launch(
        "python",
        "model",
        "float32",
        300,
        7,
        "nccl",
        ("--seed", "3"),
        lora_rank=20,
        gpus=(1, 2),
        sleeps=True,
    )
    command, environment = " ".join(launch.command(8000)), launch.environment("s3cret")
    for words in (
        *("--logprobs-mode processed_logprobs", "--generation-config vllm", "--enable-scale-out"),
        *(
            "--host 127.0.0.1",
            "--max-model-len 300",
            '--weight-transfer-config {"backend": "nccl"}',
        ),
        "--max-lora-rank 32",
        "--enable-sleep-mode",
        "--allowed-origins []",
        f"--middleware {server.MIDDLEWARE}",
    ):
        assert words in command
    assert command.endswith("--seed 3")
    assert "s3cret" not in command
    assert (environment["VLLM_API_KEY"], environment["CUDA_VISIBLE_DEVICES"]) == ("s3cret", "1,2")
    monkeypatch.setenv(server.PYTHON, "/nosuch")
    with pytest.raises(ValueError, match="/nosuch"):
        find_python()
    monkeypatch.setenv(server.PYTHON, __file__)
    with pytest.raises(ValueError, match="is not a program"):
        find_python()


@pytest.mark.parametrize(
    ("visible", "has_gpu", "gpus", "uses_gpu"),
    [
        pytest.param(None, True, (), True, id="a machine with a GPU"),
        pytest.param(None, False, (), False, id="a machine without"),
        pytest.param("-1", True, (), False, id="hidden by -1"),
        pytest.param("", True, (), False, id="hidden by an empty text"),
        pytest.param("GPU-8f1a", True, (), True, id="UUID"),
        pytest.param("-1", True, (1,), True, id="its own GPU"),
    ],
)
def test_server_computes_on_a_cpu_if_it_sees_no_gpu(monkeypatch, visible, has_gpu, gpus, uses_gpu):
    monkeypatch.setattr(server, "has_gpu", lambda: has_gpu)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    command = Launch("python", "model", "float32", 300, 7, gpus=gpus).command(8000)
    assert ("--enforce-eager" in command) == (not uses_gpu)


def test_server_gets_no_variables_that_the_trainer_sets_for_itself(monkeypatch):
    monkeypatch.setattr(machine, "_own_variables", {})
    for name in ("CUBLAS_WORKSPACE_CONFIG", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    for name in ("CUBLAS_WORKSPACE_CONFIG", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        machine.set_own_variable(name, "of the trainer")
    environment = Launch("python", "model", "float32", 300, 7).environment("s3cret")
    assert "CUBLAS_WORKSPACE_CONFIG" not in environment
    assert "NCCL_SOCKET_IFNAME" not in environment
    assert environment["GLOO_SOCKET_IFNAME"] == "ib0", "the user's own"


def answer_of_middleware(monkeypatch, **scope: object) -> int:
    """The status of the answer to a request, by a server whose key is s3cret and that answers 200.

    -1: a connection that was closed."""
    monkeypatch.setenv("VLLM_API_KEY", "s3cret")
    module, name = server.MIDDLEWARE.rsplit(".", 1)
    extension = Path(server.__file__).parent / "extension" / f"{module}.py"
    require_key = runpy.run_path(str(extension))[name]
    events: list[JsonObject] = []

    async def send(event: JsonObject) -> None:
        events.append(event)

    async def app(scope, receive, send) -> None:
        await send({"status": 200})

    asyncio.run(require_key(app)({"type": "http", "headers": [], **scope}, None, send))
    return events[0].get("status", -1)


@pytest.mark.parametrize("path", ["/pause", "/collective_rpc", "/v1/models", "/invocations", "//"])
@pytest.mark.parametrize(
    ("header", "status"),
    [
        pytest.param(None, 401, id="no key"),
        pytest.param(b"Bearer wrong", 401, id="wrong key"),
        pytest.param(b"Basic s3cret", 401, id="other scheme"),
        pytest.param("Bearer \xe4".encode("latin-1"), 401, id="not ASCII"),
        pytest.param(b"Bearer s3cret", 200, id="key"),
    ],
)
def test_started_server_wants_the_key_with_every_request(monkeypatch, path, header, status):
    headers = [(b"authorization", header)] if header else []
    assert answer_of_middleware(monkeypatch, path=path, headers=headers) == status


def test_started_server_says_that_it_is_healthy_without_the_key(monkeypatch):
    assert answer_of_middleware(monkeypatch, path="/health") == 200
    assert answer_of_middleware(monkeypatch, type="lifespan") == 200
    assert answer_of_middleware(monkeypatch, type="websocket", path="/v1/realtime") == -1


def fake_vllm_python(directory: Path, name: str = "python") -> Path:
    """A program that stands in for a Python with vLLM. It writes its words to NAME.words."""
    python = directory / name
    program = Path(__file__).parent / "server_program.py"
    script = f'#!/bin/sh\necho "$@" > "{python}.words"\nexec "{sys.executable}" "{program}" "$@"\n'
    python.write_text(script, encoding="utf-8")
    python.chmod(0o700)
    return python


class ModelLoadsError(Exception):
    """The run has come to the point at which its model loads."""


@pytest.mark.parametrize(
    ("vllm", "memory"),
    [
        pytest.param({}, "0.4", id="by default"),
        pytest.param({"server_args": ["--gpu-memory-utilization=0.6"]}, None, id="chosen"),
    ],
)
def test_server_on_the_trainers_gpu_is_ready_before_the_model_loads(
    monkeypatch, tmp_path, vllm, memory
):
    python = fake_vllm_python(tmp_path)
    monkeypatch.setenv(server.PYTHON, str(python))
    monkeypatch.setattr(backend, "pick_device", lambda: torch.device("cuda"))

    def load(*_: object, **_options: object) -> None:
        words = Path(f"{python}.words").read_text(encoding="utf-8").split()
        assert VllmClient(f"http://127.0.0.1:{words[words.index('--port') + 1]}").is_healthy()
        if memory is None:
            assert "--gpu-memory-utilization" not in words
        else:
            assert words[words.index("--gpu-memory-utilization") + 1] == memory
        raise ModelLoadsError

    monkeypatch.setattr(build, "build_policy", load)
    with pytest.raises(ModelLoadsError):
        train(settings(tmp_path, vllm=vllm))


@pytest.mark.parametrize(
    ("device", "visible", "vllm", "shares"),
    [
        pytest.param("cuda", None, {}, True, id="not set"),
        pytest.param("cuda", None, {"gpus": [0]}, True, id="the first"),
        pytest.param("cuda", None, {"gpus": [1]}, False, id="another one"),
        pytest.param("cuda", "4,5", {"gpus": [5]}, False, id="visible, but no rank's"),
        pytest.param("cuda", None, {"urls": ["http://a:1"]}, False, id="a running server"),
        pytest.param("cpu", None, {}, False, id="CPU"),
    ],
)
def test_server_shares_a_gpu_unless_it_has_others(
    monkeypatch, tmp_path, device, visible, vllm, shares
):
    monkeypatch.setattr(backend, "pick_device", lambda: torch.device(device))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert server_shares_gpu(settings(tmp_path, vllm=vllm)) == shares


def started_by_each_rank(group: ProcessGroup, directory: Path) -> bool:
    """A server that a rank starts, as the run does, is ready. Raises SamplerError with the server's
    log if not."""
    python = fake_vllm_python(directory, f"python-{group.rank()}")
    launch = Launch(str(python), "model", "float32", 300, 7)
    started = server.StartedServer(launch, python.with_suffix(".log"))
    try:
        started.wait_until_ready()
        return True
    finally:
        started.close()


def test_server_that_a_rank_starts_has_a_process_group_of_its_own(tmp_path):
    assert run_on_ranks(started_by_each_rank, tmp_path, size=2) == [True, True]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        pytest.param(["nvidia0"], True, id="first GPU"),
        pytest.param(["nvidia3", "nvidiactl"], True, id="another GPU alone"),
        pytest.param(["nvidiactl", "nvidia-uvm", "null"], False, id="driver without a GPU"),
    ],
)
def test_any_gpu_of_a_container_is_found(tmp_path, names, expected):
    for name in names:
        (tmp_path / name).touch()
    assert server.has_gpu(tmp_path) == expected


@pytest.mark.parametrize(
    "end",
    [
        # As when the run is killed: its end of the pipe is closed.
        pytest.param(lambda guard: guard.stdin.close(), id="the run"),
        pytest.param(lambda guard: guard.kill(), id="the guard"),
    ],
)
def test_server_ends_if_a_process_above_it_ends(end):
    serving = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    guard = Popen(
        [sys.executable, "-c", GUARD, sys.executable, "-c", serving], stdin=PIPE, stdout=PIPE
    )
    assert guard.stdout is not None
    assert int(guard.stdout.readline()) != guard.pid
    end(guard)
    assert select.select([guard.stdout], [], [], 20)[0]
    assert guard.stdout.read() == b""
    assert guard.wait(20) in (0, -signal.SIGKILL)


def test_serve_prints_how_to_attach_and_returns_the_exit_code(monkeypatch, capsys):
    started: list[tuple[Launch, int, str]] = []

    def start(*words: Any) -> Popen[bytes]:
        started.append(words)
        return Popen([sys.executable, "-c", "raise SystemExit(3)"], stdin=PIPE)

    monkeypatch.setattr(server, "start_guarded", start)
    monkeypatch.setenv(server.PYTHON, sys.executable)
    monkeypatch.setattr(server, "resolve_model", str)
    sizes = {"dtype": "bfloat16", "max_model_len": 99, "max_num_seqs": 8}
    code = server.serve("smollm2", "127.0.0.1", 8123, "nccl", 8, ("--seed 3",), **sizes)
    assert code == 3
    ((launch, port, key),) = started
    printed = capsys.readouterr().out
    options = (
        "--model smollm2 --rollout.engine vllm --vllm.urls http://127.0.0.1:8123 "
        "--vllm.weight_transfer nccl"
    )
    assert f"  lagrpo train … {options} --model.lora_r 8\n" in printed
    assert (port, launch.options) == (8123, ("--seed", "3"))
    assert f"  export {KEY}={key}\n" in printed
