import pytest
from theory.bandit import METHODS, curves, masks_table, run, table

from lagrpo.core.recipes import resolve

pytestmark = pytest.mark.experiments

# J after 1000 steps without syncs; at step 500 and after 1000 with a sync every 100 steps
EXPECTED = {
    "REINFORCE": (0.800, 0.800, 0.800),
    "one-side NoIS .2": (0.701, 0.865, 0.986),
    "one-side NoIS (.6, 2)": (0.845, 0.998, 0.999),
    "one-side IS .2": (0.708, 0.867, 0.987),
    "GRPO": (0.713, 0.926, 0.998),
    "OPMD .1": (0.829, 0.981, 0.999),
    "AsymRE .3": (0.820, 0.906, 0.997),
    "RED-Weight 1": (0.823, 0.999, 0.999),
    "RED-Weight .1": (0.940, 0.997, 0.998),
}


def test_bandit_values_to_three_decimals():
    results = curves(1000)
    never, synced = results["never synced"], results["synced every 100"]
    values_by_label = {
        label: (never[label][-1], synced[label][500], synced[label][-1]) for label in never
    }
    assert {
        label: tuple(round(J, 3) for J in values) for label, values in values_by_label.items()
    } == EXPECTED
    assert (
        min(synced[label][-1] - synced[label][-100] for label in synced if label != "REINFORCE") > 0
    )
    # AsymRE's fixed point: w = alpha (r - mu + .3) = (-.084, .312, .072), pi = (w - .042)+ / .3 =
    # (0, .9, .1)
    assert never["AsymRE .3"][-1] == pytest.approx(0.9 * 0.8 + 0.1 * 1.0, abs=1e-4)
    assert "GRPO                             0.713         0.926         0.998" in table(results)


def test_slowest_bandit_method_converges_to_known_values():
    """Three decimals of the other methods stay from 1000 steps on where alpha is fixed, and near 1
    where it is synced."""
    name, changes = METHODS["one-side NoIS (.6, 2)"]
    assert [round(J[-1], 3) for J in run(resolve(name, changes), [None, 100], steps=4000)] == [
        0.847,
        1.000,
    ]


def test_masks_give_different_results_if_pi_starts_away_from_alpha():
    """After 500 steps, when all have come to rest."""
    rows = [line.split() for line in masks_table(500).splitlines()[1:]]
    assert {name: values for name, *values in rows[:-1]} == {
        "reinforce": ["1.000", "0.800"],
        "rec_one_side_nois": ["0.896", "0.777"],
        "rec_one_side_is": ["0.899", "0.777"],
        "rec_two_side_nois": ["0.500", "0.880"],  # as at the start: no token is in range
        "rec_two_side_is": ["0.500", "0.880"],
        "rec_ring_nois": ["0.633", "0.823"],
        "rec_ring_is": ["0.644", "0.827"],
    }
