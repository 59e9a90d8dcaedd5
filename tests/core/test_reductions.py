import pytest
from torch import tensor
from torch.testing import assert_close

from lagrpo.core.recipes import resolve
from lagrpo.core.reductions import constant_length, sequence_mean, sequence_sum, token_mean

LENGTHS_C = tensor([1, 2, 5])
ALL = tensor([True] * 3)
NONE = tensor([False] * 3)
FIRST_TWO = tensor([True, True, False])


@pytest.mark.parametrize(
    ("reduction", "all_counted", "two_counted"),
    [
        (token_mean, [1 / 8, 1 / 8, 1 / 8], [1 / 3, 1 / 3, 1 / 3]),
        (sequence_mean, [1 / 3, 1 / 6, 1 / 15], [1 / 2, 1 / 4, 1 / 10]),
        (sequence_sum, [1 / 3, 1 / 3, 1 / 3], [1 / 2, 1 / 2, 1 / 2]),
        (constant_length, [1 / 30, 1 / 30, 1 / 30], [1 / 20, 1 / 20, 1 / 20]),
    ],
)
def test_weights_by_hand(reduction, all_counted, two_counted):
    assert_close(reduction(LENGTHS_C, ALL, 10), tensor(all_counted))
    assert_close(reduction(LENGTHS_C, FIRST_TWO, 10), tensor(two_counted))
    assert bool(reduction(LENGTHS_C, NONE, 10).isfinite().all())


def test_masked_groups_counted_or_not_differ_by_the_normalizer_only():
    flat_C = ~FIRST_TWO
    assert_close(resolve("dapo").weights(LENGTHS_C, flat_C, 9), tensor([1 / 3, 1 / 3, 0.0]))
    assert_close(
        resolve("dapo", {"masked_count": True}).weights(LENGTHS_C, flat_C, 9),
        tensor([1 / 8, 1 / 8, 0.0]),
    )
    assert_close(
        resolve("dapo", {"mask_zero_variance": False}).weights(LENGTHS_C, flat_C, 9),
        tensor([1 / 8] * 3),
    )
    assert resolve("dapo").weights(LENGTHS_C, ALL, 9).tolist() == [0.0] * 3
