import pytest
import torch
from torch import tensor
from torch.testing import assert_close

from lagrpo.core.reductions import constant_length, sequence_mean, sequence_sum, token_mean

LENGTHS_C = tensor([1, 2, 5])
ALL, NONE, FIRST_TWO = tensor([True] * 3), tensor([False] * 3), tensor([True, True, False])


def to_ten(lengths_C, kept_C, counted_C):
    return constant_length(lengths_C, kept_C, counted_C, 10)


@pytest.mark.parametrize(
    ("reduction", "everything", "masked_not_counted", "masked_counted"),
    [
        (token_mean, [1 / 8, 1 / 8, 1 / 8], [1 / 3, 1 / 3, 0], [1 / 8, 1 / 8, 0]),
        (sequence_mean, [1 / 3, 1 / 6, 1 / 15], [1 / 2, 1 / 4, 0], [1 / 3, 1 / 6, 0]),
        (sequence_sum, [1 / 3, 1 / 3, 1 / 3], [1 / 2, 1 / 2, 0], [1 / 3, 1 / 3, 0]),
        (to_ten, [1 / 30, 1 / 30, 1 / 30], [1 / 20, 1 / 20, 0], [1 / 30, 1 / 30, 0]),
    ],
)
def test_weights_by_hand_under_both_conventions(reduction, everything, masked_not_counted, masked_counted):
    assert_close(reduction(LENGTHS_C, ALL, ALL), tensor(everything))
    assert_close(reduction(LENGTHS_C, FIRST_TWO, FIRST_TWO), tensor(masked_not_counted))
    assert_close(reduction(LENGTHS_C, FIRST_TWO, ALL), tensor(masked_counted))


@pytest.mark.parametrize("reduction", [token_mean, sequence_mean, sequence_sum, to_ten])
@pytest.mark.parametrize("counted_C", [ALL, NONE])
def test_a_batch_in_which_everything_is_masked_has_weights_of_zero(reduction, counted_C):
    assert reduction(LENGTHS_C, NONE, counted_C).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("reduction", [token_mean, sequence_mean])
def test_a_mean_of_ones_is_one(reduction):
    assert_close((reduction(LENGTHS_C, FIRST_TWO, FIRST_TWO) * LENGTHS_C).sum(), tensor(1.0))


def test_what_contradicts_itself_is_refused(unchecked):
    with pytest.raises(ValueError, match="kept in the objective must be counted"):
        token_mean(LENGTHS_C, ALL, FIRST_TWO)
    with pytest.raises(ValueError, match="at least one token"):
        sequence_mean(tensor([0, 1, 1]), ALL, ALL)
    with pytest.raises(ValueError, match="max_length = 4"):
        constant_length(LENGTHS_C, ALL, ALL, 4)
    with pytest.raises(ValueError, match="one shape"):
        sequence_sum(LENGTHS_C, torch.ones(2, dtype=torch.bool), ALL)
