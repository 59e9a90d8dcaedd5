"""What is computed does not depend on the number of threads, which may change at any time."""

from __future__ import annotations

import pytest
import torch
from running import tiny_settings, without_timings
from test_learner import assembled, generate_groups, gradient, judge_groups
from tiny import save_tiny, tiny_policy

from lagrpo.backends.cpu import kernels
from lagrpo.objective.recipes import resolve
from lagrpo.policy.batch import micro_batches
from lagrpo.runs import load_metrics
from lagrpo.threads import team
from lagrpo.training.run import train


@pytest.fixture(autouse=True)
def _kernels_and_threads(with_kernels):
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def with_threads(threads: int, compute):
    torch.set_num_threads(threads)
    return compute()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [1, 5, 300])
def test_a_norms_gradient_is_a_sum_over_the_same_slices(rows, dtype):
    noise = torch.Generator().manual_seed(0)
    x, grad_y, grad_total = (torch.randn(rows, 48, generator=noise).to(dtype) for _ in range(3))
    weight = torch.randn(48, generator=noise).to(dtype)
    rstd = kernels.norm(x, None, weight, 1e-5)[2]
    one, *others = [
        with_threads(n, lambda: kernels.norm_backward(x, weight, rstd, grad_y, grad_total)) for n in (1, 2, 3)
    ]
    assert one[1].abs().max() > 0
    for other in others:
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1], other[1])


def test_the_learners_gradient_to_the_bit():
    """In bfloat16: our kernels, PyTorch's products and reductions."""
    policy, recipe = tiny_policy(dtype=torch.bfloat16), resolve("grpo", {"beta": 0.0})
    rows = micro_batches(assembled(recipe, judge_groups(generate_groups(policy))), 10_000)
    one, two = (with_threads(n, lambda: gradient(policy, recipe, rows)) for n in (1, 2))
    assert one.abs().max() > 0
    assert torch.equal(one, two)


def test_a_run_whose_threads_come_and_go_is_the_run_with_one(tmp_path, monkeypatch):
    """Down and up again at every place where the number may change."""
    model, numbers = save_tiny(tmp_path / "tiny"), []

    def changing() -> None:
        numbers.append(1 + len(numbers) % 2)
        torch.set_num_threads(numbers[-1])

    def metrics(name: str) -> list:
        settings = tiny_settings(model, tmp_path / name, model={"dtype": "bfloat16"})
        return without_timings(load_metrics(train(settings).run))

    alone = metrics("alone")
    monkeypatch.setattr(team, "look", changing)
    assert metrics("changing") == alone
    assert len(numbers) > 10
    assert {line["threads"] for line in alone} == {1}
