import subprocess
import sys
from pathlib import Path

import pytest
from theory.bandit import METHODS, curves, masks_table, table

SCRIPT = Path(__file__).parents[1] / "experiments" / "bandit.py"

EXPECTED = {  # J at the end without syncs; at step 500 and at the end with a sync every 100 steps
    "REINFORCE": (0.800, 0.800, 0.800),
    "one-side NoIS .2": (0.701, 0.865, 1.000),
    "one-side NoIS (.6, 2)": (0.847, 0.998, 1.000),
    "one-side IS .2": (0.708, 0.867, 1.000),
    "GRPO": (0.713, 0.926, 1.000),
    "OPMD .1": (0.829, 0.981, 1.000),
    "AsymRE .3": (0.820, 0.906, 1.000),
    "RED-Weight 1": (0.823, 0.999, 1.000),
    "RED-Weight .1": (0.940, 0.997, 0.999),
}


@pytest.mark.usefixtures("unchecked")  # 72,000 gradient steps: without the run-time checks of shapes
def test_the_bandit_to_three_decimals():
    results = curves()
    never, synced = results["never synced"], results["synced every 100"]
    found = {label: (never[label][-1], synced[label][500], synced[label][-1]) for label in never}
    assert {label: tuple(round(J, 3) for J in values) for label, values in found.items()} == EXPECTED
    assert min(synced[label][-1] for label in synced if label != "REINFORCE") >= 0.999 - 5e-4
    # AsymRE's fixed point: w = alpha (r - mu + .3) = (-.084, .312, .072), pi = (w - .042)+ / .3 = (0, .9, .1)
    assert never["AsymRE .3"][-1] == pytest.approx(0.9 * 0.8 + 0.1 * 1.0, abs=1e-4)
    assert "GRPO                             0.713         0.926         1.000" in table(results)


@pytest.mark.usefixtures("unchecked")
def test_the_masks_tell_themselves_apart_where_pi_starts_away_from_alpha():
    rows = [line.split() for line in masks_table().splitlines()[1:]]
    assert {name: values for name, *values in rows[:-1]} == {
        "reinforce": ["1.000", "0.800"],
        "rec_one_side_nois": ["0.896", "0.777"],
        "rec_one_side_is": ["0.899", "0.777"],
        "rec_two_side_nois": ["0.500", "0.880"],  # as at the start: no token is in range
        "rec_two_side_is": ["0.500", "0.880"],
        "rec_ring_nois": ["0.633", "0.823"],
        "rec_ring_is": ["0.644", "0.827"],
    }


def test_the_script_prints_both_tables():
    done = subprocess.run([sys.executable, SCRIPT, "--steps", "4"], capture_output=True, text=True, check=True)
    variants, masks = done.stdout.split("\n\n")
    assert [line[:24].rstrip() for line in variants.splitlines()[1:]] == list(METHODS)
    assert "(J at the start)                 0.500         0.880" in masks
