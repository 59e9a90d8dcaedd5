"""Several ranks that learn from what one real vLLM server samples. `make test-vllm` runs these."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from chaos import merged
from running import tiny_settings
from safetensors.torch import load_file
from together import QUICK, together
from vllm_servers import DEADLINES, PYTHON, tiny_directory

from lagrpo import Observer
from lagrpo.model.adapter_files import read_weights
from lagrpo.rollout.vllm.sampler import VllmSampler
from lagrpo.runs import load_events, load_metrics
from lagrpo.training.run import Result
from lagrpo.training.shares import Share

pytestmark = pytest.mark.vllm

SECTIONS: dict[str, Any] = {
    "schedule": {"kind": "every", "v": 2, "i": 2, "batches": 6, "prompts": 3},
    "objective": {"recipe": "grpo", "beta": 0.05},
    "sampling": {"sampler": "vllm"},
    "evaluation": {"every": 3},
    "vllm": {"python": PYTHON, "start_deadline": DEADLINES.start, "request_deadline": DEADLINES.request},
}


class Sent(Observer):
    """Keeps a fingerprint of what each weight sync sent, by version."""

    def __init__(self, path: Path) -> None:
        self.path = path
        sync = VllmSampler.sync_weights

        def keep(sampler: VllmSampler, weights: Mapping[str, Any], version: int) -> Any:
            said = {str(version): {name: float(tensor.double().sum()) for name, tensor in weights.items()}}
            before = json.loads(path.read_text()) if path.exists() else {}
            path.write_text(json.dumps(before | said))
            return sync(sampler, weights, version)

        VllmSampler.sync_weights = keep  # type: ignore[method-assign]


def watch(root: Path, rank: int) -> list[Observer]:
    """On rank 0 what is sent; on every rank its own whole copy of the weights after each update, where it has one."""
    if rank == 0:
        return [Sent(root / "sent.json")]
    update = Share.update

    def keep(share: Share) -> Any:
        found = update(share)
        if not share.learner.in_step:
            path, policy = root / f"rank-{rank}.json", share.learner.policy
            before = json.loads(path.read_text()) if path.exists() else {}
            own = {name: float(tensor.double().sum()) for name, tensor in policy.weights.items()}
            path.write_text(json.dumps(before | {str(policy.version): own}))
        return found

    Share.update = keep  # type: ignore[method-assign]
    return []


@pytest.mark.parametrize(
    ("shard", "lora"), [("optimizer", 0), ("layers", 0), pytest.param("layers", 4, marks=pytest.mark.long)]
)
def test_ranks_learn_from_what_a_server_samples(tmp_path, shard, lora):
    """Every batch once, by the announced versions, with the parity check after each sync. What the server gets is what
    rank 1 has, where that has a whole copy. The run ends with later weights than it got last."""
    model = tiny_directory(tmp_path)
    own = {"run": {"name": "run"}, "distributed": {**QUICK, "shard": shard}}
    adapters = {"model": {"lora": {"r": lora}}} if lora else {}
    settings = merged(tiny_settings(model, tmp_path), SECTIONS, own, adapters)
    found = together(2, settings, partial(watch, tmp_path))
    assert all(isinstance(one, Result) for one in found), "\n\n".join(map(str, found))
    run = found[0].run
    metrics = load_metrics(run)
    assert [m["batch"] for m in metrics] == [1, 2, 3, 4, 5, 6]
    assert [(m["lag_min"], m["lag_max"]) for m in metrics] == [(lag, lag) for lag in (0, 0, 2, 0, 2, 0)]
    syncs = [event for event in load_events(run) if event["event"] == "weight_sync"]
    assert len(syncs) == 4
    assert all(m["parity_mean"] < 1e-3 for m in metrics if m["synced"])
    sent = json.loads((tmp_path / "sent.json").read_text())
    assert [*sent] == ["0", "2", "6", "10"]
    if shard == "optimizer":
        of_rank = json.loads((tmp_path / "rank-1.json").read_text())
        assert all(of_rank[version] == sent[version] for version in ("2", "6", "10"))
    final = read_weights(run / "weights/final") if lora else load_file(run / "weights/final/model.safetensors")
    assert final.keys() == sent["10"].keys()
    assert any(float(tensor.double().sum()) != sent["10"][name] for name, tensor in final.items())
