from math import log

import pytest
import torch
from torch import tensor
from torch.testing import assert_close

from lagrpo.core.ratios import length_normalized_ratio, sequence_ratio, token_ratio

# two completions, of two tokens and of one, interleaved on purpose
COMPLETION_T = tensor([0, 1, 0])
LOGP_ALPHA_T = tensor([log(0.5), log(0.1), log(0.2)])
LOGP_T = tensor([log(0.25), log(0.3), log(0.4)])  # token ratios .5, 3, 2


def test_the_three_levels_by_hand():
    assert_close(token_ratio(LOGP_T, LOGP_ALPHA_T), tensor([0.5, 3.0, 2.0]))
    assert_close(sequence_ratio(LOGP_T, LOGP_ALPHA_T, COMPLETION_T, 2), tensor([1.0, 3.0, 1.0]))
    logp_T = tensor([log(0.5), log(0.3), log(0.8)])  # 1, 3, 4: the geometric mean of 1 and 4 is 2
    assert_close(length_normalized_ratio(logp_T, LOGP_ALPHA_T, COMPLETION_T, 2), tensor([2.0, 3.0, 2.0]))


def test_all_are_one_at_pi_equal_alpha():
    assert token_ratio(LOGP_T, LOGP_T).tolist() == [1.0, 1.0, 1.0]
    assert sequence_ratio(LOGP_T, LOGP_T, COMPLETION_T, 2).tolist() == [1.0, 1.0, 1.0]
    assert length_normalized_ratio(LOGP_T, LOGP_T, COMPLETION_T, 2).tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("ratio", "expected"),
    [
        # d ratio_0 / d logp: token: itself. sequence: ratio at each token of completion 0. normalized: ratio / length
        (lambda logp_T: token_ratio(logp_T, LOGP_ALPHA_T), [0.5, 0.0, 0.0]),
        (lambda logp_T: sequence_ratio(logp_T, LOGP_ALPHA_T, COMPLETION_T, 2), [1.0, 0.0, 1.0]),
        (lambda logp_T: length_normalized_ratio(logp_T, LOGP_ALPHA_T, COMPLETION_T, 2), [0.5, 0.0, 0.5]),
    ],
)
def test_gradient_of_the_first_tokens_ratio(ratio, expected):
    logp_T = LOGP_T.clone().requires_grad_()
    ratio(logp_T)[0].backward()
    assert logp_T.grad is not None
    assert_close(logp_T.grad, tensor(expected))


def test_a_completion_without_tokens_here_disturbs_nobody():
    with_a_gap = length_normalized_ratio(LOGP_T, LOGP_ALPHA_T, tensor([0, 2, 0]), 4)
    assert_close(with_a_gap, length_normalized_ratio(LOGP_T, LOGP_ALPHA_T, COMPLETION_T, 2))


def test_a_padded_or_misaligned_tensor_is_refused(unchecked):
    with pytest.raises(ValueError, match=r"one shape: logp_T \(3,\), logp_alpha_T \(1,\)"):
        token_ratio(LOGP_T, LOGP_ALPHA_T[:1])  # would broadcast
    with pytest.raises(ValueError, match=r"logp_T must be flat .* shape \(1, 3\)"):
        sequence_ratio(LOGP_T[None], LOGP_ALPHA_T[None], COMPLETION_T[None], 2)
    with pytest.raises(ValueError, match="one shape"):
        length_normalized_ratio(LOGP_T, LOGP_ALPHA_T, COMPLETION_T[:2], 2)
    assert torch.is_tensor(token_ratio(LOGP_T, LOGP_ALPHA_T))
