"""One real vLLM server: completions, weight syncs with their parity check, refusals. `make test-vllm` runs these."""

from __future__ import annotations

import json
import os
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from running import tiny_settings
from test_sampling import request, requests_for
from vllm_servers import DEADLINES, perturb, policy_of, sampler_over, start, tiny_directory

from lagrpo.errors import SettingsError
from lagrpo.model.model import Packed
from lagrpo.model.replica import replica
from lagrpo.rollout.local import LocalSampler
from lagrpo.rollout.parity import ParityCheck, ParityError
from lagrpo.rollout.vllm import connecting, weights
from lagrpo.rollout.vllm.connecting import KEY
from lagrpo.rollout.vllm.server import SamplerError, Server
from lagrpo.rollout.vllm.weights import CorruptError
from lagrpo.runs import load_metrics, load_rollouts
from lagrpo.settings import schema as config
from lagrpo.training import run as training

pytest_plugins = ["vllm_fixtures"]
pytestmark = pytest.mark.vllm


@pytest.fixture
def policy(model):
    return policy_of(model)


def learner_logp(policy, prompt_ids, completion):
    packed = Packed.build([(prompt_ids, [completion.token_ids])])
    with torch.no_grad():
        return policy.logp(packed)


@pytest.mark.parametrize("tau", [1.0, 0.7])
def test_learner_and_server_agree_after_each_of_five_syncs(attached, model, tmp_path, tau):
    policy = policy_of(model, tau)
    sampler = sampler_over([attached], policy, tmp_path)
    check = ParityCheck(requests_for(policy, 4), torch.float32)
    for version in range(5):
        assert sampler.sync_weights(policy.weights, version)["sync_bytes"] == sum(
            tensor.numel() * 4 for tensor in policy.weights.values()
        )
        metrics = check(policy, sampler)
        assert metrics["parity_mean"] < 1e-4
        assert metrics["parity_max"] < 1e-3
        if version:
            assert metrics["parity_telling"] > 5
        for _, group in sampler.sample(requests_for(policy, 3, batch=version), 4):
            for completion in group.completions:
                assert completion.versions.tolist() == [version] * len(completion.token_ids)
                expected = learner_logp(policy, group.prompt.token_ids, completion)
                assert (completion.logp_alpha - expected).abs().max() < 2e-3
        perturb(policy)
    sampler.close()


class Withheld(Server):
    """A server that says it loaded the weights, and did not."""

    withhold = False

    def reload(self, directory):
        if not self.withhold:
            super().reload(directory)


class Outdated(Server):
    """A server that loads the version before the one it is given."""

    before: str | None = None

    def reload(self, directory):
        super().reload(self.before or directory)
        self.before = directory


def test_a_withheld_sync_is_caught(attached, policy, server, tmp_path):
    withheld = Withheld(server.url, server.key, DEADLINES)
    sampler = sampler_over([withheld], policy, tmp_path)
    check = ParityCheck(requests_for(policy, 4), torch.float32)
    sampler.sync_weights(policy.weights, 0)
    check(policy, sampler)
    perturb(policy, 1e-4)  # far below the tolerance: only the comparison with the sync before can tell
    withheld.withhold = True
    sampler.sync_weights(policy.weights, 1)
    assert sampler.version == 1
    with pytest.raises(ParityError, match=r"did not change at all with the weight sync.* did not load the new weights"):
        check(policy, sampler)
    sampler.close()


def test_weights_of_the_sync_before_are_caught(policy, server, tmp_path):
    outdated = Outdated(server.url, server.key, DEADLINES)
    sampler = sampler_over([outdated], policy, tmp_path)
    sampler.weights.directories.drop_before = lambda version: None
    check = ParityCheck(requests_for(policy, 4), torch.float32, tolerance=10.0)
    sampler.sync_weights(policy.weights, 0)
    check(policy, sampler)
    outdated.before = None
    perturb(policy)
    sampler.sync_weights(policy.weights, 1)
    check(policy, sampler)
    perturb(policy)
    sampler.sync_weights(policy.weights, 2)  # loads version 1 again
    with pytest.raises(ParityError, match=r"did not change at all"):
        check(policy, sampler)
    sampler.close()


def test_the_weights_of_another_run_are_not_taken_for_ours_and_ours_are_synced_again(attached, policy, tmp_path):
    ours, theirs = (sampler_over([attached], policy, tmp_path / name) for name in ("ours", "theirs"))
    ours.sync_weights(policy.weights, 3)
    theirs.sync_weights(policy.weights, 3)
    assert (ours.version, theirs.version) == (-1, 3)
    ((_, group),) = ours.sample(requests_for(policy, 1), 2)
    assert {int(v) for c in group.completions for v in c.versions} == {3}
    assert (ours.version, theirs.version) == (3, -1)
    metrics = ours.read()
    assert (metrics["recoveries"], metrics["regenerated"]) == (1, 1)


@pytest.mark.parametrize("damage", ["truncated", "flipped"])
def test_a_corrupted_file_is_refused_and_the_old_version_goes_on_serving(
    attached, policy, tmp_path, monkeypatch, damage
):
    sampler = sampler_over([attached], policy, tmp_path)
    sampler.sync_weights(policy.weights, 0)
    items = [(request(0, policy=policy).prompt.token_ids, list(range(10, 20)))]
    before = sampler.scores(items)
    original = weights.check_file

    def damaged(path, weights):
        content = path.read_bytes()
        path.write_bytes(content[:-400] if damage == "truncated" else content[:-9] + b"\x55" + content[-8:])
        original(path, weights)

    monkeypatch.setattr(weights, "check_file", damaged)
    perturb(policy)
    with pytest.raises(CorruptError, match=r"was not written as it should be"):
        sampler.sync_weights(policy.weights, 1)
    assert sampler.version == 0
    assert sampler.scores(items) == before
    (_, group), *_ = sampler.sample(requests_for(policy, 1), 2)
    assert {int(v) for c in group.completions for v in c.versions} == {0}
    sampler.close()


def test_weights_of_another_shape_are_not_sent(attached, policy, tmp_path):
    sampler = sampler_over([attached], policy, tmp_path)
    sampler.sync_weights(policy.weights, 0)
    items = [(request(0, policy=policy).prompt.token_ids, list(range(10, 20)))]
    before = sampler.scores(items)
    wrong = {name: tensor[: len(tensor) // 2] for name, tensor in policy.weights.items()}
    with pytest.raises(SamplerError, match=r"version 1 has other parameters or shapes"):
        sampler.sync_weights(wrong, 1)
    assert sampler.version == 0
    assert sampler.scores(items) == before
    sampler.close()


def test_a_sync_waits_for_completions_under_way(attached, policy, tmp_path):
    sampler = sampler_over([attached], policy, tmp_path)
    sampler.sync_weights(policy.weights, 0)
    groups = sampler.sample(requests_for(policy, 3), 4)
    with pytest.raises(RuntimeError, match=r"version 1 was to be synced while 3 groups are open"):
        sampler.sync_weights(policy.weights, 1)
    assert len(list(groups)) == 3
    sampler.close()


def test_local_and_vllm_samplers_sample_the_same_distribution(attached, model, tmp_path):
    """Two-sample chi-square on each of the first two tokens of 4,096 completions of each sampler, rare ones pooled. The
    power of the test: against temperature .6 in place of .4 the statistic is far outside."""
    policy = policy_of(model, tau=0.4)
    sampler = sampler_over([attached], policy, tmp_path)
    sampler.sync_weights(policy.weights, 0)
    sampler.generation = replace(sampler.generation, max_tokens=2, max_num_seqs=64)
    requests = [request(0, batch=b, policy=policy) for b in range(64)]
    vllm = list(sampler.sample(requests, 64))
    local, warmer = (list(LocalSampler(replica(policy), 1, 2, 64, tau).sample(requests, 64)) for tau in (0.4, 0.6))
    for place in (0, 1):
        statistic, freedom = chi_square(vllm, local, place)
        assert freedom > 20
        assert abs(statistic - freedom) < 5 * (2 * freedom) ** 0.5, (place, statistic, freedom)
    statistic, freedom = chi_square(vllm, warmer, 0)
    assert statistic - freedom > 10 * (2 * freedom) ** 0.5, (statistic, freedom)
    sampler.close()


def chi_square(ours, theirs, place):
    """The two-sample statistic of the token at `place`, -1 where a completion has none, and its degrees of freedom."""
    counts = []
    for groups in (ours, theirs):
        ids = [[*c.token_ids.tolist(), -1] for _, group in groups for c in group.completions]
        counts.append(Counter(tokens[place] for tokens in ids))
    total = [sum(c.values()) for c in counts]
    assert total == [4096, 4096]
    kept = [token for token in counts[0] | counts[1] if counts[0][token] + counts[1][token] >= 20]
    table = [[c[token] for token in kept] + [4096 - sum(c[token] for token in kept)] for c in counts]
    return sum((a - b) ** 2 / (a + b) for a, b in zip(*table, strict=True) if a + b), len(kept)


def run(model, root, server, **sections):
    vllm = {"urls": [server.url], "directory": str(root)} | sections.pop("vllm", {})
    sampling = {"sampler": "vllm"} | sections.pop("sampling", {})
    settings = tiny_settings(model, root, vllm=vllm, sampling=sampling, **sections)
    return training.train(settings).run


@pytest.mark.parametrize(("v", "lags"), [(1, [0] * 6), (4, [0, 1, 2, 0, 1, 2])])
def test_the_lag_table_is_read_from_the_tokens(attached, model, tmp_path, v, lags):
    metrics = load_metrics(run(model, tmp_path, attached, schedule={"v": v, "batches": 6}))
    assert [(line["lag_min"], line["lag_max"]) for line in metrics] == [(lag, lag) for lag in lags]
    assert [line["synced"] for line in metrics] == [lag == 0 for lag in lags]
    assert all(line["failed"] == 0 and line["mismatch_max"] is not None for line in metrics)


def test_prefetching_changes_no_record(attached, model, tmp_path):
    records = []
    for name, prefetch in (("prefetch", True), ("apart", False)):
        directory = run(
            model, tmp_path / name, attached, schedule={"v": 4, "batches": 7}, sampling={"prefetch": prefetch, "G": 4}
        )
        rows = load_rollouts(directory)
        records.append([(r["batch"], r["prompt_key"], r["completion"], r["token_ids"], r["versions"]) for r in rows])
    assert records[0] == records[1]


@pytest.mark.parametrize("in_flight", ["finish", "span", "regenerate"])
def test_completions_under_way_at_a_sync(attached, model, tmp_path, in_flight):
    """A pipeline of one batch ahead: completions may span two versions, or are generated again; the lag is 0 or 1."""
    directory = run(
        model,
        tmp_path,
        attached,
        schedule={"kind": "lagged", "v": 1, "batches": 6},
        sampling={"max_tokens": 48, "G": 4},
        vllm={"in_flight": in_flight},
    )
    rows = load_rollouts(directory)
    assert len(rows) == 6 * 2 * 4
    assert {row["outcome"] for row in rows} == {"scored"}
    for row in rows:
        assert row["versions"] == sorted(row["versions"])
        assert {row["pi_k_version"] - version for version in row["versions"]} <= {0, 1}
        if in_flight != "span":
            assert len(set(row["versions"])) == 1


def test_what_is_wrong_with_a_server_is_said_before_anything_is_loaded(attached, model, tmp_path, monkeypatch):
    monkeypatch.setattr(training.Parts, "_build", lambda *_: pytest.fail("a model was loaded"))
    monkeypatch.setenv(KEY, "wrong")
    with pytest.raises(SettingsError, match=r"does not accept the API key; set LAGRPO_VLLM_API_KEY"):
        run(model, tmp_path, attached)
    monkeypatch.delenv(KEY)
    nobody = Server("http://127.0.0.1:9", None, DEADLINES)
    with pytest.raises(SettingsError, match=r"http://127.0.0.1:9 cannot be reached: .*refused"):
        run(model, tmp_path, nobody)


def test_another_model_is_refused(attached, model, tmp_path):
    other = tiny_directory(tmp_path / "other", num_hidden_layers=3)
    with pytest.raises(SettingsError, match=r"serves another model.*num_hidden_layers 2"):
        run(other, tmp_path, attached)


def test_a_head_that_is_the_embedding_is_renewed(tmp_path, monkeypatch):
    """In bfloat16, where the tolerance of log-probs may hide an old head. vLLM's own reload keeps the first head where
    oneDNN has packed it; on processors where it cannot, PyTorch multiplies by the embedding, which is renewed."""
    model = tiny_directory(tmp_path, tie_word_embeddings=True)
    server = start(model, tmp_path / "vllm.log", "bfloat16")
    try:
        policy = policy_of(model, dtype=torch.bfloat16)
        sampler = sampler_over([server], policy, tmp_path)
        check = ParityCheck(requests_for(policy, 4), torch.bfloat16, tolerance=0.02)
        for version in range(3):
            sampler.sync_weights(policy.weights, version)
            check(policy, sampler)
            perturb(policy, 0.3)
        monkeypatch.setattr(server, "reloading", Server.reloading)
        sampler.sync_weights(policy.weights, 3)
        packed = "fallback to torch linear" not in (tmp_path / "vllm.log").read_text()
        with pytest.raises(ParityError) if packed else nullcontext():
            check(policy, sampler)
        monkeypatch.setattr(connecting, "EXTENDED", "somebody.Else")
        monkeypatch.setenv(KEY, server.key)
        with pytest.raises(SettingsError, match="would go on with the head of its first weights"):
            run(model, tmp_path, server)
        sampler.close()
    finally:
        server.close()


def test_another_tokenizer_is_refused(attached, model, tmp_path):
    """The same sizes, so that only the tokenizer tells."""
    other = tiny_directory(tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    ids = tokenizer["model"]["vocab"]
    ids["o"], ids["r"] = ids["r"], ids["o"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(SettingsError, match=r"otherwise than model.path does: it serves another model"):
        run(other, tmp_path, attached)


def test_longer_sequences_than_the_server_takes_are_refused(attached, model, tmp_path):
    with pytest.raises(SettingsError, match=r"takes sequences of at most 256 tokens"):
        run(model, tmp_path, attached, sampling={"max_tokens": 300})


def test_the_key_is_not_on_the_command_line(server):
    import psutil

    assert server.guard is not None
    children = psutil.Process(server.guard.pid).children(recursive=True)
    assert children
    assert not any(server.key in word for child in children for word in child.cmdline())
    assert os.environ.get("VLLM_API_KEY") is None
    assert config.Settings().vllm.urls == ()
