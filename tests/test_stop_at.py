"""Runs that end once a metric has held a value: schedule.stop_at."""

import pytest
from running import tiny_settings

import lagrpo
from lagrpo.errors import SettingsError
from lagrpo.runs import load_metrics
from lagrpo.settings.load import load_settings
from lagrpo.settings.stop_rule import StopRule
from lagrpo.startup.checks import check_settings


@pytest.mark.parametrize(
    ("rule", "values", "holds"),
    [
        ("reward >= 0.95 for 3", [0.95, 1.0, 0.96], True),
        ("reward >= 0.95 for 3", [1.0, 1.0, 0.9, 1.0, 1.0], False),
        ("reward >= 0.95 for 3", [0.1, 0.95, 1.0, 0.96], True),
        ("reward >= 0.95 for 3", [1.0, 1.0], False),
        ("rollout/kl <= 1e-3", [0.5, 1e-3], True),
        ("rollout/kl<=.001", [1e-4, 0.5], False),
    ],
    ids=["held", "interrupted", "held at the end", "too few", "at most", "no spaces"],
)
def test_rule_holds_if_all_newest_values_reach_the_bound(rule, values, holds):
    assert StopRule.parse(rule).holds(values) == holds


def settings(model, root, stop_at, **schedule):
    return tiny_settings(
        model, root, run={"name": "one"}, schedule={"stop_at": stop_at, **schedule}
    )


@pytest.mark.parametrize(
    ("stop_at", "problem"),
    [
        ("reward > 1", "not a rule"),
        ("reward >= high", "'high' is not a number"),
        ("reward >= 1 for 0", "not a rule"),
        ("rewrad >= 1", "Did you mean 'reward'"),
        ("rollout/k1 >= 1", "Did you mean 'rollout/kl'"),
    ],
)
def test_rule_that_could_never_hold_is_rejected(model, tmp_path, stop_at, problem):
    with pytest.raises(SettingsError, match=problem):
        check_settings(load_settings(settings(model, tmp_path, stop_at)))


def test_run_ends_once_the_rule_holds_and_says_why(model, tmp_path, capsys):
    stop_at = "completions/mean_length >= 1 for 2"
    result = lagrpo.train(settings(model, tmp_path, stop_at, batches=5))
    assert (result.batches, result.version) == (2, 2)
    assert result.after is not None
    reason = "Stopped after batch 2 of 5: completions/mean_length was at least 1, 2 times in a row"
    assert reason in " ".join(capsys.readouterr().out.split())
    assert result.weights is not None
    assert reason in (result.weights / "README.md").read_text(encoding="utf-8")
    # It has reached its goal already: resuming makes no batch, and a later goal makes more.
    assert lagrpo.train(trust_run_code=True, resume=result.run).batches == 2
    later = lagrpo.train(
        trust_run_code=True, resume=result.run, settings={"schedule.stop_at": "loss >= 1e9"}
    )
    assert later.batches == 5
    assert [line["step"] for line in load_metrics(result.run)] == [1, 2, 3, 4, 5]


def test_resumed_run_counts_the_values_before_its_checkpoint(model, tmp_path):
    class Stop(lagrpo.Callback):
        def on_batch(self, metrics, rollouts):
            raise KeyboardInterrupt

    stop_at = "completions/mean_length >= 1 for 2"
    with pytest.raises(KeyboardInterrupt):
        lagrpo.train(settings(model, tmp_path, stop_at, batches=5), callbacks=[Stop()])
    assert lagrpo.train(trust_run_code=True, resume=tmp_path / "one").batches == 2
