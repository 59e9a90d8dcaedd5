"""Losses and gradients of every row as commit f16e863 computed them, for tests/core/test_golden.py:

    git worktree add ../f16e863 f16e863
    PYTHONPATH=../f16e863/src python tests/core/make_golden.py > tests/core/golden.json

The script speaks the interface of that commit; the names of knobs that have changed since are in
CASES. The inputs are in the file, so no later change of random numbers matters.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportArgumentType=false

import json

import torch

LENGTHS = [3, 1, 2, 4, 1, 2, 3]
GROUPS = [0, 0, 0, 0, 1, 1, 1]
REWARDS = [1.0, 0.0, 0.25, 0.0, 0.5, 0.5, 0.5]
OTHER_REWARDS = [0.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.5]
UNIFORM = [0.7, 0.1, 0.4, 0.9, 0.3, 0.8, 0.2]
MAX_LENGTH = 4
FAR = {1: 10.0, 5: -7.0, 9: 3.0, 12: -2.0}  # log-ratios of some tokens, nats

CASES = [  # recipe, knobs then, knobs now
    ("grpo", {"epsilon_low": 0.1, "epsilon_high": 0.3}, None),
    ("grpo", {"ratio": "sequence"}, {"surrogate.ratio": "sequence"}),
    ("grpo", {"ratio": "length_normalized", "dual_clip": 3.0}, None),
    ("grpo", {"denominator": "pi_k"}, None),
    ("grpo", {"surrogate": "unclipped"}, None),
    ("grpo", {"kl": "k2", "kl_importance": True}, None),
    ("grpo", {"kl": "k3_clamped", "kl_bound": 2.0}, None),
    ("grpo", {"kl": "k3_linear", "kl_bound": 2.0}, None),
    ("grpo", {"kl": "k3_bias_corrected"}, None),
    ("grpo", {"advantage": "normalized_unbiased", "std_offset": 0.1}, None),
    ("grpo", {"advantage": "leave_one_out", "reduction": "token_mean"}, None),
    ("grpo", {"advantage": "log_mean_exp", "strength": 0.5}, None),
    ("grpo_masked", {"masked_count": True, "eps_std": 0.01}, None),
    ("off_policy_grpo_exact", {"ratio": "sequence", "dual_clip": 4.0}, None),
    ("dapo", {"overlong_buffer": 2}, None),
    ("dr_grpo", {"mask_zero_variance": True}, None),
    (
        "rloo",
        {"correction": "truncated", "correction_level": "sequence"},
        {"correction": "truncated", "level": "sequence"},
    ),
    ("grpo_tis", {"correction_cap": 1.5, "correction_floor": 0.5}, {"cap": 1.5, "floor": 0.5}),
    ("grpo_tis", {"correction": "none"}, None),
    (
        "grpo_mis_sequence",
        {"correction_level": "length_normalized"},
        {"level": "length_normalized"},
    ),
    ("cispo", {"epsilon_high": 1.0, "ratio": "sequence"}, None),
    ("topr", {"ratio": "token"}, None),
    (
        "reinforce",
        {"mask": "ring", "weight": "importance", "ratio": "sequence"},
        {
            "mask": "ring",
            "weight": "importance",
            "mask.ratio": "sequence",
            "weight.ratio": "sequence",
        },
    ),
    ("reinforce", {"mask": "two_side", "epsilon_low": 0.5, "epsilon_high": 1.0}, None),
    (
        "rec_one_side_is",
        {"denominator": "pi_k"},
        {"mask.denominator": "pi_k", "weight.denominator": "pi_k"},
    ),
    ("rec_ring_is", {"outer_low": 0.7, "outer_high": 1.5}, None),
    ("red_weight", {"weight_temperature": 0.5}, None),
    ("asymre", {"strength": 0.3}, None),
    ("opmd", {"anchor": "pi_ref", "strength": 0.2}, None),
    ("opmd_kimi", {"strength": 0.3}, {"advantage.strength": 0.3, "surrogate.strength": 0.3}),
    ("opmd_pairwise", {"anchor": "alpha", "strength": 0.3}, None),
]


def make_inputs() -> dict[str, list[float]]:
    """Log-probs of 16 tokens, rounded so that the file can be read."""
    generator = torch.Generator().manual_seed(46)
    T = sum(LENGTHS)

    def normal(scale: float) -> torch.Tensor:
        return scale * torch.randn(T, generator=generator, dtype=torch.float64)

    alpha = -0.5 - normal(1.0).abs()
    log_ratio = normal(0.3)
    for token, far in FAR.items():
        log_ratio[token] = far
    logp = alpha + log_ratio
    columns = {
        "logp": logp,
        "rollout_logp": alpha,
        "old_logp": logp + normal(0.2),
        "ref_logp": logp + normal(0.5),
    }
    return {
        name: [round(value, 4) for value in column.tolist()] for name, column in columns.items()
    }


def main() -> None:
    from lagrpo.core.advantages import zero_variance
    from lagrpo.core.losses import LossInputs
    from lagrpo.core.recipes import resolve
    from lagrpo.core.rows import RECIPES

    columns = make_inputs()
    lengths_C = torch.tensor(LENGTHS)
    group_C = torch.tensor(GROUPS)
    uniform_C = torch.tensor(UNIFORM, dtype=torch.float64)

    def compute(name: str, overrides: dict, rewards: list[float]) -> dict:
        recipe = resolve(name, overrides)
        rewards_C = torch.tensor(rewards, dtype=torch.float64)
        advantages = []
        is_flat = []
        for group in (0, 1):
            members = group_C == group
            advantage_arguments = (
                rewards_C[members],
                lengths_C[members],
                MAX_LENGTH,
                uniform_C[members],
            )
            advantages.append(recipe.advantages(*advantage_arguments))
            is_flat.append(zero_variance(rewards_C[members]).expand(int(members.sum())))
        weight_C = recipe.weights(lengths_C, torch.cat(is_flat), MAX_LENGTH).double()
        token_tensors = {
            n: torch.tensor(column, dtype=torch.float64) for n, column in columns.items()
        }
        token_tensors["logp"].requires_grad_()
        x = LossInputs(
            **token_tensors,
            completion=torch.arange(len(LENGTHS)).repeat_interleave(lengths_C),
            advantages=torch.cat(advantages),
            group=group_C,
        )
        loss, _ = recipe.loss(x, weight_C)
        (gradient_T,) = torch.autograd.grad(loss, x.logp)
        return {"loss": loss.item(), "gradient": gradient_T.tolist()}

    rows = [(name, {}, None) for name in RECIPES]
    lines = []
    for name, then, now in [*rows, *CASES]:
        case = {"recipe": name, "overrides": then if now is None else now}
        case["with_a_flat_group"] = compute(name, then, REWARDS)
        case["without"] = compute(name, then, OTHER_REWARDS)
        lines.append("    " + json.dumps(case))
    head = {
        "made_by": "git worktree add ../f16e863 f16e863; PYTHONPATH=../f16e863/src python "
        "tests/core/make_golden.py > tests/core/golden.json",
        "lengths": LENGTHS,
        "groups": GROUPS,
        "uniform": UNIFORM,
        "max_length": MAX_LENGTH,
        "rewards": {"with_a_flat_group": REWARDS, "without": OTHER_REWARDS},
        **columns,
    }
    parts = [f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in head.items()]
    parts.append('  "cases": [\n' + ",\n".join(lines) + "\n  ]")
    print("{\n" + ",\n".join(parts) + "\n}")


if __name__ == "__main__":
    main()
