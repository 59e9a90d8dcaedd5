"""A loss of your own, against GRPO, on samples that are 16 updates old.

    python examples/own_loss.py    # a few minutes on two cores, from the root of the checkout

`dppo` is DPPO-TV (arXiv 2602.04879). lagrpo calls it on the tokens of a micro-batch and
differentiates it; its keyword-only arguments are knobs that settings can change
(`--loss.overrides.delta .2`). The command line takes the same file, in the directory where it lies:
`lagrpo train --recipe own_loss:dppo`.
"""

import torch

import lagrpo
from lagrpo.core.inputs import LossInputs


def dppo(x: LossInputs, *, delta: float = 0.15) -> torch.Tensor:
    """rho A, without a gradient of tokens that moved too far in the direction of A.

    These have pi - alpha > delta and A > 0, or alpha - pi > delta and A < 0.
    """
    assert x.rollout_logp is not None  # lagrpo has seen that this function reads it
    rho = (x.logp - x.rollout_logp).exp()
    change = x.logp.exp() - x.rollout_logp.exp()  # of the token's probability
    is_far = torch.sign(x.advantage) * change > delta
    return torch.where(is_far, 0.0, rho * x.advantage)


if __name__ == "__main__":
    stale = {"schedule.constant_lag": 16, "run.output_dir": "runs/own_loss"}
    for name, loss in {"grpo": "grpo", "dppo": dppo}.items():
        result = lagrpo.train("experiments/small/base.toml", loss=loss, settings=stale)
        assert result.after is not None
        print(f"{name}: pass@1 {result.after['pass@1']:.1%} at a lag of 16 updates, {result.run}")
