"""Weight sync of adapters against a stub of a server: names, several versions, refusals. No vLLM is needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_lora import LORA, move
from test_sampling import requests_for
from test_vllm_client import SHORT, choice, stub
from tiny import tiny_policy

from lagrpo.model.adapter_files import read_weights
from lagrpo.rollout.vllm.adapters import AdapterSync
from lagrpo.rollout.vllm.connecting import check_adapters
from lagrpo.rollout.vllm.fleet import Fleet
from lagrpo.rollout.vllm.generation import Generation
from lagrpo.rollout.vllm.process import Launch
from lagrpo.rollout.vllm.sampler import VllmSampler
from lagrpo.rollout.vllm.server import SamplerError, Server


class Adapters:
    """A server that has adapters; it answers by the one that a request names."""

    def __init__(self) -> None:
        self.loaded: dict[str, Path] = {}
        self.asked: list[tuple[str, Any]] = []

    def __call__(self, method: str, path: str, body: Any) -> tuple[int, Any] | None:
        self.asked.append((path, body))
        if path == "/v1/models":
            return 200, {"data": [{"id": "model"}, *({"id": name} for name in self.loaded)]}
        if path == "/v1/load_lora_adapter":
            self.loaded[body["lora_name"]] = Path(body["lora_path"])
        if path == "/v1/unload_lora_adapter":
            if body["lora_name"] not in self.loaded:
                return 404, {"error": {"message": "cannot be found"}}
            del self.loaded[body["lora_name"]]
        if path == "/inference/v1/generate":
            if body["model"] not in self.loaded:
                return 404, {"error": {"message": "does not exist"}}
            return 200, {"model": body["model"], "choices": [choice(n) for n in range(body["sampling_params"]["n"])]}
        return 200, {}

    def paths(self) -> list[str]:
        return [path for path, _ in self.asked]


def sampler_at(url: str, policy: Any, root: Path) -> VllmSampler:
    generation = Generation(0, 4, policy.tau, sorted(policy.chat.eos_ids), 8, policy.chat.decode)
    fleet = Fleet([Server(url, None, SHORT)], 2)
    return VllmSampler(fleet, generation, AdapterSync(fleet, policy.model.lm, str(root), torch.float32), "span")


@pytest.fixture
def policy() -> Any:
    return tiny_policy(lora=LORA)


def versions(sampler: VllmSampler, policy: Any, count: int = 2) -> set[int]:
    groups = [group for _, group in sampler.sample(requests_for(policy, count), 2)]
    return {int(v) for group in groups for c in group.completions for v in c.versions}


def test_a_version_is_an_adapter_of_its_own_name_and_nobody_is_paused(policy, tmp_path):
    server = Adapters()
    with stub(server) as url:
        sampler = sampler_at(url, policy, tmp_path)
        cost = sampler.sync_weights(policy.weights, 0)
        assert cost["sync_bytes"] == sum(4 * tensor.numel() for tensor in policy.weights.values())
        assert cost["seconds_paused"] == 0.0
        move(policy, 0.1)
        sampler.sync_weights(policy.weights, 1)
        assert (sampler.version, versions(sampler, policy)) == (1, {1})
        ((label, path),) = server.loaded.items()
        assert label == sampler.fleet.served.label_of(1)
        written = read_weights(path)
        assert all(torch.equal(written[name], tensor) for name, tensor in policy.weights.items())
        assert not {"/pause?mode=keep", "/collective_rpc", "/update_weight_version"} & {*server.paths()}
        sampler.close()
        assert not server.loaded
        assert not path.exists()


def test_an_adapter_that_a_request_uses_stays(policy, tmp_path):
    server = Adapters()
    with stub(server) as url:
        sampler = sampler_at(url, policy, tmp_path)
        sampler.sync_weights(policy.weights, 0)
        first = sampler.fleet.served.label
        with sampler.weights.using() as label:
            assert label == first
            for version in (1, 2):
                sampler.sync_weights(policy.weights, version)
            assert [*server.loaded] == [first, sampler.fleet.served.label]
            assert server.loaded[first].is_dir()
        sampler.sync_weights(policy.weights, 3)
        assert [*server.loaded] == [sampler.fleet.served.label]
        assert [path.name for path in sampler.weights.directories.root.iterdir()] == ["v000003"]
        sampler.close()


def test_the_same_version_may_be_synced_again(policy, tmp_path):
    server = Adapters()
    with stub(server) as url:
        sampler = sampler_at(url, policy, tmp_path)
        for _ in range(2):
            sampler.sync_weights(policy.weights, 0)
            assert [*server.loaded] == [sampler.fleet.served.label]
            assert versions(sampler, policy, 1) == {0}
        assert server.paths().count("/v1/load_lora_adapter") == 1
        sampler.close()


@pytest.mark.parametrize("back", [True, False])
def test_servers_evaluate_by_an_adapter_of_its_own(policy, tmp_path, back):
    """Behind an evaluation they have the adapter of the last sync again, or keep the newer one if nobody needs that."""
    server = Adapters()
    with stub(server) as url:
        sampler = sampler_at(url, policy, tmp_path)
        sampler.sync_weights(policy.weights, 0)
        first, before = sampler.fleet.served.label, {n: t.clone() for n, t in policy.weights.items()}
        move(policy, 0.1)
        with sampler.lent(policy.weights, 3, back=back):
            assert (sampler.version, versions(sampler, policy)) == (3, {3})
            assert first in server.loaded
            version, served = sampler.served()
            assert version == (0 if back else 3)
            assert all(torch.equal(served[n], (before if back else policy.weights)[n]) for n in before)
        assert (sampler.version, versions(sampler, policy)) == ((0, {0}) if back else (3, {3}))
        assert [*server.loaded] == [sampler.fleet.served.label]
        sampler.sync_weights(policy.weights, 3)
        assert (sampler.version, versions(sampler, policy)) == (3, {3})
        assert [*server.loaded] == [sampler.fleet.served.label]
        sampler.close()
        assert not server.loaded


def test_a_server_that_lost_the_adapter_gets_it_again(policy, tmp_path):
    server = Adapters()
    with stub(server) as url:
        sampler = sampler_at(url, policy, tmp_path)
        sampler.sync_weights(policy.weights, 5)
        server.loaded.clear()
        assert sampler.version == -1
        assert versions(sampler, policy, 1) == {5}
        assert sampler.read()["recoveries"] == 1
        sampler.close()


def test_an_adapter_that_is_refused_leaves_the_one_before(policy, tmp_path):
    server, refuse = Adapters(), False

    def answer(method: str, path: str, body: Any) -> tuple[int, Any] | None:
        if refuse and path == "/v1/load_lora_adapter":
            return 400, {"error": {"message": "rank 4 is too large"}}
        return server(method, path, body)

    with stub(answer) as url:
        sampler = sampler_at(url, policy, tmp_path)
        sampler.sync_weights(policy.weights, 0)
        refuse = True
        with pytest.raises(SamplerError, match=r"version 1 was refused: .*rank 4 is too large.*lagrpo serve MODEL"):
            sampler.sync_weights(policy.weights, 1)
        assert (sampler.version, versions(sampler, policy)) == (0, {0})
        sampler.close()


@pytest.mark.parametrize(
    ("paths", "config", "label", "said"),
    [
        ({}, {}, "default", "takes no adapters, .* start it with `lagrpo serve MODEL --lora-rank 32`"),
        ({"/v1/load_lora_adapter": {}}, {"max_lora_rank": 16}, "default", "at most rank 16, and model.lora.r is 20"),
        ({"/v1/load_lora_adapter": {}}, {"max_lora_rank": 32}, "ab:3", r"synced to it \(labeled ab:3\), .* restart it"),
    ],
)  # fmt: skip
def test_a_server_for_other_work_is_refused(paths, config, label, said):
    answers = {
        "/openapi.json": {"paths": paths}, "/weight_info": {"weight_version": label},
        "/server_info?config_format=json": {"vllm_config": {"lora_config": config}},
    }  # fmt: skip
    with stub(lambda method, path, body: (200, answers[path])) as url, pytest.raises(ValueError, match=said):
        check_adapters(Server(url, None, SHORT), 20)


def test_a_server_is_started_for_adapters():
    launch = Launch("python", "model", "bfloat16", 100, 8, lora=(16, 4))
    command = " ".join(launch.command(8000))
    assert "--enable-lora --max-lora-rank 16 --max-loras 4" in command
    assert launch.environment("key")["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    whole = Launch("python", "model", "bfloat16", 100, 8)
    assert "lora" not in " ".join(whole.command(8000))
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING" not in whole.environment("key")
