"""Tokens that no policy sampled are context: the model reads them; counts and losses skip them."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from running import tiny_settings
from tiny import save_tiny, tiny_policy
from torch import Tensor, tensor

import lagrpo
from lagrpo.core.recipes import resolve
from lagrpo.data.offline import OfflineData, read_records
from lagrpo.model.model import Packed, Policy
from lagrpo.rollout.local import LocalSampler
from lagrpo.rollout.schedule import LoopState
from lagrpo.runs import load_metrics, load_rollouts
from lagrpo.training.batch import Batch, assemble, left_out, micro_batches
from lagrpo.training.metrics import batch_metrics
from lagrpo.training.optimizer import Optimization
from lagrpo.training.step import Step, Times, record_completions
from lagrpo.training.trainer import Trainer
from lagrpo.types import Completion, Group, Outcome, Prompt, SyncReason
from lagrpo.verify import verify_run

MAX_TOKENS = 8
ENVIRONMENT = -77  # the version of tokens that no policy sampled: nothing may read it
NAN = math.nan


def completion(ids: list[int], sampled: list[int], reward: float) -> Completion:
    is_sampled = tensor(sampled, dtype=torch.bool)
    logp = torch.where(is_sampled, -2.0 - 0.1 * torch.arange(len(ids)), tensor(NAN))
    versions = torch.where(is_sampled, 3, ENVIRONMENT)
    return Completion(tensor(ids), logp, versions, True, "text", Outcome.scored(reward), is_sampled)


def groups() -> list[Group]:
    """Two prompts; of the three completions of the first, one has two unsampled tokens in its
    middle and one ends with such a token."""
    first = (
        completion([5, 8, 40, 41, 9, 2], [1, 1, 0, 0, 1, 1], 1.0),
        completion([7, 30, 12], [1, 1, 0], 0.0),
        completion([11, 2], [1, 1], 0.0),
    )
    second = (completion([20, 21, 22, 2], [1, 0, 1, 1], 0.5), completion([6, 2], [1, 1], 1.0))
    return [
        Group(Prompt(n, (), "", ids), cs)
        for n, (ids, cs) in enumerate([((10, 11, 12), first), ((13,), second)])
    ]


def alone(policy: Policy, group: Group, c: Completion) -> Tensor:
    """log-probs of the sampled tokens of one completion, computed in a row of its own, with all
    tokens as context."""
    return policy.logp(Packed.build([(group.prompt.token_ids, [c.token_ids])]))[c.sampled]


def by_hand(name: str, policy: Policy, reference: Policy) -> tuple[Tensor, Tensor]:
    """The loss at pi = pi_k as its paper writes it, over the sampled tokens, and the lengths."""
    losses, lengths = [], []
    for group in groups():
        r = tensor(group.rewards, dtype=torch.float64)
        advantages = (
            r - r.mean()
            if name == "dr_grpo"
            else (r - r.mean()) / (r.var(correction=0) + 1e-4).sqrt()
        )
        for c, A in zip(group.completions, advantages.tolist(), strict=True):
            logp = alone(policy, group, c)
            log_rho = logp - c.rollout_logp[c.sampled]
            rho = log_rho.mean().exp().expand(len(logp)) if name == "gspo" else log_rho.exp()
            low, high = (3e-4, 4e-4) if name == "gspo" else (0.2, 0.28 if name == "dapo" else 0.2)
            value = torch.minimum(rho * A, rho.clamp(1 - low, 1 + high) * A)
            d = logp - alone(reference, group, c).detach()
            losses.append(value - (0.04 * ((-d).exp() + d - 1) if name == "grpo" else 0.0))
            lengths.append(len(logp))
    if name == "dapo":
        return -torch.cat(losses).sum() / sum(lengths), tensor(lengths)
    if name == "dr_grpo":
        return -torch.cat(losses).sum() / (len(lengths) * MAX_TOKENS), tensor(lengths)
    return -torch.stack([values.mean() for values in losses]).mean(), tensor(lengths)


def gradient(policy: Policy) -> Tensor:
    parameters = policy.model.parameters()
    return torch.cat(
        [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters]
    )


@pytest.mark.parametrize(
    ("name", "tokens"), [("grpo", 8), ("dapo", 1000), ("dr_grpo", 8), ("gspo", 1000)]
)
def test_loss_gradient_and_normalizer_are_those_of_the_sampled_tokens(name, tokens):
    policy, reference = tiny_policy(dtype=torch.float64), tiny_policy(seed=1, dtype=torch.float64)
    expected, lengths_C = by_hand(name, policy, reference)
    expected.backward()
    expected_gradient = gradient(policy)
    policy.model.zero_grad()

    recipe = resolve(name)
    batch = assemble(groups(), recipe, MAX_TOKENS, seed=0, b=1)
    assert torch.equal(batch.lengths_C, lengths_C)
    rows = micro_batches(batch, tokens)
    total = torch.zeros(())
    for row in rows:
        with torch.no_grad():
            row = replace(
                row, ref_logp_T=reference.logp(row.packed) if recipe.needs_pi_ref else None
            )
        logp_T = policy.logp(row.packed)
        assert len(logp_T) == len(row.completion_T) == int(lengths_C[list(row.members)].sum())
        x = row.with_logprobs(logp_T.detach()).loss_inputs(logp_T, policy.version)
        loss = recipe.loss(x, row.weight_C)
        loss.backward()
        total = total + loss.detach()
    torch.testing.assert_close(total.double(), expected.detach().double(), rtol=1e-5, atol=1e-7)
    assert expected_gradient.norm() > 1e-3
    torch.testing.assert_close(gradient(policy), expected_gradient, rtol=1e-4, atol=1e-7)


def used() -> tuple[Batch, list[Any], list[dict[str, float]], list[Tensor]]:
    """A batch after one update, its rows, and log π_k of each completion by itself."""
    policy, recipe = tiny_policy(), resolve("dapo")
    logps = [alone(policy, group, c).detach() for group in groups() for c in group.completions]
    batch = assemble(groups(), recipe, MAX_TOKENS, seed=0, b=1)
    trainer = Trainer(policy, recipe, Optimization(lr=1e-3))
    rows, sums = trainer.step(trainer.pack(batch, 1000), in_objective=batch.in_objective)
    assert left_out(batch, 1000) == []  # log α of every sampled token is known
    return batch, rows, [sums], logps


def test_metrics_and_lag_are_those_of_the_sampled_tokens():
    batch, rows, updates, old_logp = used()
    completions = [c for group in groups() for c in group.completions]
    log_rho = [
        logp - c.rollout_logp[c.sampled] for logp, c in zip(old_logp, completions, strict=True)
    ]
    sums_C = torch.stack([x.double().sum() for x in log_rho])
    records = record_completions(batch, rows)
    torch.testing.assert_close(records.log_ratio_C, sums_C, rtol=1e-5, atol=1e-5)
    kl_C = torch.stack([(x.exp() - 1 - x).double().sum() for x in log_rho])
    torch.testing.assert_close(records.kl_C, kl_C, rtol=1e-4, atol=1e-4)

    step = Step(
        1,
        1,
        5,
        SyncReason.NOT_DUE,
        {},
        batch,
        rows,
        updates,
        records,
        Times({}, total=1.0),
        LoopState(1, alpha=3),
    )
    metrics, flat = batch_metrics(step), torch.cat(log_rho)
    assert metrics["num_tokens"] == 4 + 2 + 2 + 3 + 2
    assert metrics["completions/mean_length"] == 13 / 5
    assert (metrics["staleness/mean"], metrics["staleness/max"]) == (2.0, 2)
    assert metrics["rollout/ratio_mean"] == pytest.approx(float(flat.exp().mean()), rel=1e-4)
    assert metrics["rollout/kl"] == pytest.approx(float((flat.exp() - 1 - flat).mean()), rel=1e-4)
    assert metrics["rollout/logp_difference_max"] == pytest.approx(
        float(flat.abs().max()), rel=1e-4
    )
    assert metrics["grad_norm"] == updates[-1]["grad_norm"]


def test_all_tokens_are_sampled_by_default():
    c = Completion(tensor([4, 5]), torch.zeros(2), torch.zeros(2), True, "")
    assert (c.sampled.tolist(), c.sampled.dtype, c.length) == ([True, True], torch.bool, 2)


def written(path: Path, **columns: Any) -> Path:
    row = {
        "prompt": "a",
        "token_ids": [5, 8, 40, 9],
        "reward": 1.0,
        "rollout_logprobs": [-1.0, -1.0, None, -1.0],
    }
    pq.write_table(pa.Table.from_pylist([row | columns]), path)
    return path


def test_offline_data_may_say_which_tokens_were_sampled(tmp_path):
    policy = tiny_policy()
    file = written(tmp_path / "given.parquet", loss_mask=[True, True, False, True])
    data = OfflineData(read_records(file), policy, 4, 0, reads_logp=True)
    (c,) = data.batch(1, 1)[0].completions
    assert c.sampled.tolist() == [True, True, False, True]
    assert data.has_logp
    silent = OfflineData(read_records(written(tmp_path / "silent.parquet")), policy, 4, 0)
    assert (silent.batch(1, 1)[0].completions[0].length, silent.has_logp) == (4, False)


def test_a_run_with_unsampled_tokens_agrees_with_its_replay(tmp_path, monkeypatch):
    """The second token of every longer completion counts as an environment's reply: it stays in
    context."""
    original = LocalSampler._complete

    def with_a_reply(self, row):
        c = original(self, row)
        if row.request.batch < 1:  # of the weight-sync check
            return c
        is_sampled = torch.arange(len(c.token_ids)) != (1 if len(c.token_ids) > 2 else -1)
        logp, versions = (
            torch.where(is_sampled, c.rollout_logp, NAN),
            torch.where(is_sampled, c.versions, ENVIRONMENT),
        )
        return replace(c, rollout_logp=logp, versions=versions, sampled=is_sampled)

    monkeypatch.setattr(LocalSampler, "_complete", with_a_reply)
    settings = tiny_settings(
        save_tiny(tmp_path / "model"),
        tmp_path / "runs",
        checkpoint={"export_every": 1},
        schedule={"sync_every": 2},
        eval={"at_start": False},
    )
    run = lagrpo.train(settings).run
    rows = load_rollouts(run)
    sampled = [sum(row["loss_mask"]) for row in rows]
    assert sum(sampled) < sum(len(row["token_ids"]) for row in rows)
    assert sum(line["num_tokens"] for line in load_metrics(run)) == sum(sampled)
    report = verify_run(run, None, trust_run_code=True)
    assert report.differences == []
    done = report.compared
    assert done["samples"] == done["rollout_logprobs"] == sum(sampled)
