"""The small model of the studies, as it lies in the repository: what its program says of it."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean

import pytest
import torch
from small_model import FOLDER, RIGHT, Sum, line, loss_of, one_token, rate, split
from transformers import AutoTokenizer, LlamaForCausalLM

pytestmark = pytest.mark.experiments


@pytest.fixture(scope="module")
def rates() -> dict[Sum, float]:
    """The model's probability of the right answer to each sum, its end included."""
    model = LlamaForCausalLM.from_pretrained(FOLDER / "model", dtype=torch.float32)
    encode = AutoTokenizer.from_pretrained(FOLDER / "model")
    sums = [*split()[0], *split()[1]]
    with torch.no_grad():
        probabilities = [
            loss_of(model, torch.tensor([encode(lesson(digits)).input_ids])).item()
            for digits in sums
        ]
    lengths = [len(str(sum(digits))) + 1 for digits in sums]
    return {
        digits: float(torch.tensor(-nats * n).exp())
        for digits, nats, n in zip(sums, probabilities, lengths, strict=True)
    }


def lesson(digits: Sum) -> str:
    row = json.loads(line(digits))
    return f"{row['prompt']}{row['answer']}."


def lines_of(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


def test_recorded_data_equals_the_output_of_its_program():
    training, testing = split()
    assert len(training) == 800
    assert len({*training, *testing}) == 1000
    assert lines_of(FOLDER / "sums" / "train.jsonl") == [*map(line, training)]
    assert lines_of(FOLDER / "sums" / "test.jsonl") == [*map(line, testing)]
    one_token_rows = one_token(training)
    assert lines_of(FOLDER / "one-token.jsonl") == [*map(line, one_token_rows)]
    assert len({*one_token_rows}) == 16
    assert all(sum(digits) < 10 for digits in one_token_rows)
    assert sum(rate(digits) == RIGHT[0] for digits in one_token_rows) == 8


def test_small_model_solves_about_as_many_sums_as_its_training_data(rates):
    means = [fmean(p for digits, p in rates.items() if rate(digits) == right) for right in RIGHT]
    assert means == pytest.approx(RIGHT, abs=0.1)
    assert means == sorted(means, reverse=True)
    assert 0.2 < fmean(rates[digits] for digits in split()[1]) < 0.3
    assert (
        sum(p > 0.02 for p in rates.values()) > 980
    )  # nearly every prompt has the right answer to offer
