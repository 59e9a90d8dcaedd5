"""The figures of a batch, worked by hand, and all of them documented."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from lagrpo.policy.batch import Batch
from lagrpo.sampling.schedule import LoopState
from lagrpo.training.clock import Clock
from lagrpo.training.loop import Step
from lagrpo.training.metrics import batch_metrics
from lagrpo.types import Completion, Group, Outcome, Prompt

DOCUMENT = Path(__file__).parent.parent / "docs" / "run-directory.md"
GOLDEN = Path(__file__).parent / "golden" / "metrics_keys.txt"


def completion(versions: list[int], outcome: Outcome, finished: bool = True) -> Completion:
    count = len(versions)
    return Completion(torch.arange(count), torch.zeros(count), torch.tensor(versions), finished, "", outcome)


def group(*completions: Completion) -> Group:
    return Group(Prompt(0, ({"role": "user", "content": "?"},), ""), completions)


def batch(*groups: Group) -> Batch:
    empty = torch.empty(0)
    return Batch(groups, (), empty, empty.bool(), empty.long(), empty)


def metrics_of(stage: int, b: int, version: int, batch: Batch, updates: list, clock: Clock, delivered: bool):
    reason = "schedule" if delivered else ""
    step = Step(stage, b, version, 0, reason, {}, {}, batch, (), updates, None, clock, LoopState(batch=b))
    return batch_metrics(step)


@pytest.fixture
def used() -> Batch:
    """A group with a signal, one without, and one of which nothing could be scored; drawn by versions 3 to 5."""
    right, wrong = Outcome.scored(1.0), Outcome.scored(0.0)
    return batch(
        group(completion([3, 3, 4], right), completion([5], wrong, finished=False)),
        group(completion([4, 4], wrong), completion([4, 4], wrong)),
        group(completion([4], Outcome.rejected("no")), completion([], Outcome.failed("lost"))),
    )


def test_counts_rewards_and_lag(used):
    clock = Clock()
    clock.seconds["sampling"], clock.drawn = 2.0, 30  # tokens that came meanwhile, of this batch and later ones
    metrics = metrics_of(2, 7, 6, used, [], clock, delivered=True)
    assert (metrics["stage"], metrics["batch"], metrics["version"], metrics["delivered"]) == (2, 7, 6, 1)
    assert (metrics["completions"], metrics["rejected"], metrics["failed"]) == (6, 1, 1)
    assert (metrics["lag_min"], metrics["lag_max"]) == (1, 3)
    assert metrics["lag_mean"] == pytest.approx(6 - (3 + 3 + 4 + 5 + 4 * 5) / 9)
    assert metrics["reward_mean"] == 1 / 4
    assert metrics["reward_std"] == pytest.approx((3 / 16) ** 0.5)
    assert metrics["zero_variance_share"] == 1 / 2  # of the groups that have scores
    assert metrics["tokens_mean"] == 9 / 6
    assert metrics["finished_share"] == 5 / 6
    assert metrics["tokens_per_s_sampling"] == 30 / 2
    assert metrics["grad_norm"] is metrics["ratio_mean"] is metrics["tokens_per_s_learning"] is None


def test_figures_of_the_objective_are_those_of_the_first_update_and_those_of_the_step_of_the_last(used):
    first = {"tokens": 4.0, "tokens_alpha": 2.0, "ratio": 5.0, "ratio_squared": 10.0, "kl_alpha": 1.0, "kl_ref": 2.0,
             "abs_log_ratio": 8.0, "clipped_positive": 1.0,
             "clipped_negative": 2.0, "max_abs_log_ratio": 3.0, "objective": 0.5,
             "loss": -0.5, "grad_norm": 9.0, "lr": 1.0}  # fmt: skip
    last = first | {"kl_alpha": 100.0, "loss": -0.75, "grad_norm": 7.0, "lr": 2.0, "clipped_positive": 3.0}
    metrics = metrics_of(1, 1, 6, used, [first, last], Clock(), delivered=False)
    expected = {"kl_alpha": 0.5, "kl_ref": 0.5, "ratio_mean": 2.5, "ess": 25 / 20, "mismatch_mean": 4.0,
                "mismatch_max": 3.0, "clip_high_share": 0.25, "clip_low_share": 0.5,
                "clip_high_share_last": 0.75, "clip_low_share_last": 0.5, "objective": 0.5,
                "loss": -0.75, "grad_norm": 7.0, "lr": 2.0, "tokens_learned": 8.0}  # fmt: skip
    assert {name: metrics[name] for name in expected} == expected


def test_nothing_drawn_and_nothing_scored_has_no_means():
    metrics = metrics_of(1, 1, 0, batch(group(completion([], Outcome.failed("lost")))), [], Clock(), delivered=False)
    for name in ("lag_min", "lag_mean", "lag_max", "reward_mean", "reward_std", "zero_variance_share"):
        assert metrics[name] is None, name


def test_the_clock_books_time_to_phases(monkeypatch):
    now = [10.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    clock = Clock()
    with clock("judging"):
        now[0] += 5
    with clock("judging"), clock("learning"):
        now[0] += 1
    clock.move("judging", "sampling", 4)
    assert dict(clock.seconds) == {"judging": 2, "learning": 1, "sampling": 4}
    assert clock.total == 6


@pytest.mark.parametrize("run", ["on-policy", "lagged with everything", "alpha unknown"])
def test_every_line_of_every_run_has_the_same_keys_and_holds_numbers(tmp_path, run):
    """The keys are those of a golden file, in its order: a key that comes, goes or moves is seen in a review."""
    from running import tiny_settings
    from tiny import save_tiny

    from lagrpo.runs import load_metrics
    from lagrpo.training.run import train

    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(f'{{"prompt": "a", "completion": "b{n}", "reward": {n}}}\n' for n in (0, 1)))
    sections: dict[str, Any] = {
        "on-policy": {},
        "lagged with everything": {"run": {"score_update": True, "entropy": True}, "schedule": {"v": 2, "i": 2}},
        "alpha unknown": {"offline": {"data": str(texts)}, "objective": {"recipe": "reinforce"}},
    }[run]
    model = save_tiny(tmp_path / "tiny")
    settings = tiny_settings(model, tmp_path, evaluation={"before_and_after": False}, **sections)
    for line in load_metrics(train(settings).run):
        assert list(line) == GOLDEN.read_text(encoding="utf-8").split()
        assert {type(value) for value in line.values()} <= {int, float, type(None)}


def test_every_figure_is_documented():
    section = DOCUMENT.read_text(encoding="utf-8").partition("## metrics.jsonl")[2].partition("## events")[0]
    first_cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    documented: set[str] = set()
    for cell in first_cells:
        names = re.findall(r"`(\w+)`", cell)
        documented |= {name for name in names if not name.startswith("_")}
        documented |= {names[0] + name for name in names if name.startswith("_")}
    documented |= {f"sigma_bin_{n}" for n in range(10)}  # the table has the first and the last
    assert documented == set(GOLDEN.read_text(encoding="utf-8").split())
