"""The curve that a stage is held against, and the stages of a run read from its evaluations."""

from __future__ import annotations

import json
from statistics import fmean

import amplification
import pytest
from amplification import Stage, fixed_point, logit, maximizer, read, weight
from hypothesis import given
from hypothesis import strategies as st
from running import tiny_settings
from theory.success import amplified, fixed_points
from tiny import save_tiny

from lagrpo import train
from lagrpo.runs import load_evaluations

pytestmark = pytest.mark.experiments

PROBABILITIES = st.floats(0.02, 0.98)
BETAS = st.floats(0.5, 8.0)


@given(p=PROBABILITIES, beta=BETAS)
def test_a_stage_with_one_sampling_policy_ends_on_mrouehs_curve(p, beta):
    assert maximizer(p, beta, None) == pytest.approx(
        amplified(p, p, beta, amplification.EPS_STD), rel=1e-9
    )


@given(p=PROBABILITIES, beta=BETAS, G=st.sampled_from([None, 8, 16]))
def test_fixed_point_satisfies_its_equation(p, beta, G):
    end = fixed_point(p, beta, G)
    assert end > p
    if logit(end) < logit(p) + 14.9:  # the search ends at 15
        assert logit(end) == pytest.approx(logit(p) + weight(end, G) / beta, abs=1e-3)


@pytest.mark.parametrize(
    ("p", "beta"),
    [
        pytest.param(0.05, 1.0, id="p 0.05, beta 1"),
        pytest.param(0.05, 2.0, id="p 0.05, beta 2"),
        pytest.param(0.2, 2.0, id="p 0.2, beta 2"),
        pytest.param(0.5, 2.0, id="p 0.5, beta 2"),
    ],
)
def test_predicted_end_is_the_lowest_fixed_point(p, beta):
    assert fixed_point(p, beta, None) == pytest.approx(
        fixed_points(p, beta, amplification.EPS_STD)[0][0], abs=1e-6
    )


def test_the_stages_of_a_run_join(tmp_path, monkeypatch, capsys):
    settings = tiny_settings(
        save_tiny(tmp_path / "model"),
        tmp_path / "study",
        run={"seed": 5, "name": "one"},
        schedule={"batches": 4, "sync_every": 2, "ref_sync_every": 2},
        loss={"recipe": "off_policy_grpo", "beta": 2.0},
        eval={"every": 2},
    )
    run = train(settings).run
    assert run is not None
    first, second = read(tmp_path / "study")
    assert (first.beta, first.v, first.G, first.seed, first.stage, second.stage) == (
        2.0,
        2,
        4,
        5,
        1,
        2,
    )
    assert first.after == second.before
    rates = {summary["step"]: summary["pass@1"] for summary in load_evaluations(run)}
    for batch, probabilities in zip(
        (0, 2, 4), (first.before, first.after, second.after), strict=True
    ):
        assert fmean(probabilities) == pytest.approx((3 * rates[batch] + 0.5) / 4, abs=1e-4)

    monkeypatch.setattr(amplification, "POINTS", tmp_path / "kept")
    monkeypatch.setattr("sys.argv", ["amplification.py", str(tmp_path / "study")])
    amplification.main()
    assert capsys.readouterr().out.count("| 2 | 2 |") == 2
    recorded = json.loads((tmp_path / "kept" / "study-points.json").read_text(encoding="utf-8"))
    assert [Stage(**stage) for stage in recorded] == [first, second]
