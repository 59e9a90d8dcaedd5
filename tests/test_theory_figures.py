import math
from itertools import pairwise
from pathlib import Path

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from theory import FIGURES, amplification, bandit_curves, bernoulli, figure
from theory.bandit import METHODS, curves
from theory.style import apart

IMAGES = Path(__file__).parents[1] / "docs" / "images"


def xs(line) -> list[float]:
    return numpy.asarray(line.get_xdata()).tolist()


def ys(line) -> list[float]:
    return numpy.asarray(line.get_ydata()).tolist()


@pytest.mark.parametrize(("suffix", "head"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")])
def test_a_figure_is_written_in_the_format_of_its_name(suffix, head, tmp_path):
    target = tmp_path / "new" / f"fig{suffix}"
    assert figure("bernoulli", target) == target
    assert target.read_bytes().startswith(head)
    assert [path.name for path in target.parent.iterdir()] == [target.name]  # nothing temporary is left


def test_without_an_output_it_lies_here_under_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert figure("amplification") == Path("amplification.png")
    assert (tmp_path / "amplification.png").stat().st_size < 100_000


def test_unknown_names_and_formats_are_refused(tmp_path):
    with pytest.raises(ValueError, match="unknown figure 'bernouli'; the nearest is 'bernoulli'"):
        figure("bernouli")
    with pytest.raises(ValueError, match="'xyz' is none of the formats"):
        figure("bernoulli", tmp_path / "fig.xyz")
    assert not list(tmp_path.iterdir())


def test_the_documentation_shows_every_figure():
    page = (IMAGES.parents[1] / "reports" / "theory.md").read_text()
    for name in FIGURES:
        assert f"images/{name}.png" in page
        assert (IMAGES / f"{name}.png").stat().st_size < 100_000


def test_bernoulli_draws_the_penalty_of_figure_1():
    p = torch.tensor([0.5, 0.1, 0.01, 0.99], dtype=torch.float64)
    assert bernoulli.cost(p, 0.0).tolist() == pytest.approx([1.0, 7 / 3, 9.050378, 9.050378])
    assert bernoulli.cost(torch.zeros(1), 0.0).item() == math.inf
    assert bernoulli.cost(torch.zeros(1), 0.01).item() == pytest.approx(9.0)
    whole, corner = bernoulli.draw().axes
    *_, groups = whole.lines
    assert xs(groups)[0] == 1 / 16
    assert ys(groups)[::7] == pytest.approx([3.131182, 1.0, 3.131182])  # 16 / sqrt(15) - 1
    assert any("98.5" in text.get_text() for text in corner.texts)
    (finite,) = [line for line in corner.lines if line.get_label() == "w_G - 1"]
    assert max(ys(finite)) == pytest.approx(math.sqrt(15) - 1, abs=1e-3)
    assert any("at most 2.87" in text.get_text() for text in corner.texts)


def test_amplification_draws_the_targets():
    paths, stable, cycle = amplification.draw().axes
    assert ys(paths.lines[0])[:4] == pytest.approx([0.05, 0.8374, 0.4414, 0.2827], abs=5e-5)
    shown = " ".join(text.get_text() for text in paths.texts)
    for end in ("0.3126", "0.1673", "0.4087", "0.7646", "0.0944", "0.2806"):
        assert end in shown
    assert [text.get_text() for text in stable.texts] == ["0.3126", "0.9774", "1"]
    near, from_reference = cycle.lines[-2:]
    assert sorted({round(p, 3) for p in ys(near)[-4:]}) == [0.036, 0.52]  # a cycle of two
    assert ys(from_reference)[-1] == pytest.approx(1.0)


def test_bandit_names_each_variant_at_the_end_of_its_curve():
    assert set(bandit_curves.STYLES) == set(METHODS)
    assert len(set(bandit_curves.STYLES.values())) == len(METHODS)
    results = curves(steps=120)
    never, synced = bandit_curves.draw(results).axes
    for label, J in results["never synced"].items():
        (line,) = [line for line in never.lines if line.get_label() == label]
        assert ys(line) == J[1:]
        assert f"{label}  {J[-1]:.3f}" in [text.get_text() for text in never.texts]
        assert label in [line.get_label() for line in synced.lines]


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=12), st.floats(0.01, 2))
def test_labels_end_up_apart_in_their_order_around_their_mean(positions, gap):
    moved = apart(positions, gap)
    order = sorted(range(len(positions)), key=lambda at: positions[at])
    for before, after in pairwise(order):
        assert moved[after] - moved[before] >= gap - 1e-9
    assert sum(moved) == pytest.approx(sum(positions), abs=1e-6)
    if all(positions[after] - positions[before] >= gap for before, after in pairwise(order)):
        assert moved == pytest.approx(positions)
