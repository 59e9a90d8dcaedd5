"""The same rollouts give the same loss and the same gradient in TRL: make check-trl (pytest -m
peer).

The other side is one update of TRL's own `GRPOTrainer.train` in an environment of its own, see
benchmarks/trl_loss.py. Here the rollouts become a batch, micro-batches and a loss as they do in a
run. Token ids, log-probs of the policy that drew and rewards are the same; the model is a random
Llama in float32, and neither micro-batches nor groups are aligned with each other.

Three settings say the same as TRL's: the advantage `normalized_unbiased` divides by the sample
deviation (of G - 1) plus 1e-4; `masked_count` counts the tokens of groups with equal rewards; and
TRL's `dr_grpo` centers when `scale_rewards = "none"`.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_trainer import generate_groups, gradient, judge_groups
from tiny import save_tiny, tiny_policy

from lagrpo.core.recipes import resolve
from lagrpo.model.model import Policy
from lagrpo.settings.other_trainers import NAMES_OF_TRAINERS
from lagrpo.training.batch import assemble, micro_batches
from lagrpo.types import Group, JsonObject, JsonView

pytestmark = pytest.mark.peer

ROOT = Path(__file__).parent.parent
PEER = Path(os.environ.get("LAGRPO_TRL", ROOT / ".venv-trl" / "bin" / "python"))
G, MAX_TOKENS, TAU = 6, 12, 0.8


@dataclass(frozen=True)
class Case:
    """A recipe with its overrides, and what TRL calls that objective."""

    recipe: str
    trl: JsonObject
    overrides: Mapping[str, object] = field(default_factory=dict)


AS_TRL = {"advantage": "normalized_unbiased"}
CASES = [
    Case("grpo_trl", {}),
    Case("grpo", {"loss_type": "grpo"}, AS_TRL | {"beta": 0.0}),
    Case(
        "grpo_two_sided",
        {"loss_type": "grpo", "delta": 1.3},
        AS_TRL | {"beta": 0.0, "dual_clip": 1.3},
    ),
    Case("dr_grpo", {"loss_type": "dr_grpo", "scale_rewards": "none"}),
    Case("dapo", {"loss_type": "dapo", "epsilon_high": 0.28}, AS_TRL | {"masked_count": True}),
    Case(
        "cispo", {"loss_type": "cispo", "epsilon_high": 5.0}, AS_TRL
    ),  # TRL caps there, MiniMax-M1 at 1 + epsilon_high
    Case(
        "gspo",
        {
            "loss_type": "grpo",
            "importance_sampling_level": "sequence",
            "epsilon": 0.1,
            "epsilon_high": 0.15,
        },
        AS_TRL
        | {
            "epsilon_low": 0.1,
            "epsilon_high": 0.15,
        },  # wider than the paper's: completions lie on both sides
    ),
    Case("vespo", {"loss_type": "vespo"}, AS_TRL),
    Case(
        "opsm",
        {"loss_type": "grpo", "off_policy_mask_threshold": 0.05},
        AS_TRL | {"delta": 0.05},
    ),
    Case("grpo_batch_scaled", {"scale_rewards": "batch"}),
    Case("grpo_finished", {"loss_type": "grpo", "mask_truncated_completions": True}, AS_TRL),
]


@pytest.fixture(scope="module")
def policy() -> Policy:
    return tiny_policy(tau=TAU)


@pytest.fixture(scope="module")
def groups(policy: Policy) -> list[Group]:
    """Four groups with rewards of four values, but for the second, whose rewards are equal; α is
    another policy than π, so that ratios lie on both sides of the clip range."""
    rng = torch.Generator().manual_seed(7)
    rewards = torch.randint(4, (4, G), generator=rng) / 3.0
    rewards[1] = 0.5
    groups = judge_groups(generate_groups(policy, 4, G=G), lambda g, j, c: rewards[g, j].item())
    return [
        replace(
            group,
            completions=tuple(
                replace(
                    c,
                    rollout_logp=c.rollout_logp
                    + 0.3 * torch.randn(len(c.token_ids), generator=rng),
                )
                for c in group.completions
            ),
        )
        for group in groups
    ]


def of_trl(model: Path, groups: list[Group], config: JsonView, scratch: Path) -> tuple[float, dict]:
    """TRL's loss and gradient by parameter."""
    if not PEER.exists():
        pytest.fail(
            f"no environment of TRL at {PEER}: run make check-trl (LAGRPO_TRL names another Python)"
        )
    request = {
        "model": str(model),
        "config": config,
        "groups": [
            {
                "prompt": list(group.prompt.token_ids),
                "completions": [
                    {
                        "token_ids": c.token_ids.tolist(),
                        "rollout_logp": c.rollout_logp.tolist(),
                        "reward": c.reward,
                    }
                    for c in group.completions
                ],
            }
            for group in groups
        ],
    }
    request_path, loss, gradients = (
        scratch / "request.json",
        scratch / "loss.json",
        scratch / "gradient.safetensors",
    )
    request_path.write_text(json.dumps(request), encoding="utf-8")
    command = [PEER, ROOT / "benchmarks" / "trl_loss.py", request_path, loss, gradients]
    done = subprocess.run(
        command,
        capture_output=True,
        encoding="utf-8",
        timeout=300,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr
    return sum(json.loads(loss.read_text(encoding="utf-8"))["losses"]), load_file(gradients)


def of_ours(policy: Policy, groups: list[Group], case: Case) -> tuple[float, torch.Tensor, list]:
    """Our loss and flat gradient, in micro-batches of 100 tokens, and the micro-batches."""
    recipe = resolve(case.recipe, case.overrides)
    batch = assemble(groups, recipe, MAX_TOKENS, seed=0, b=1)
    rows = micro_batches(batch, 100)
    flat = gradient(policy, recipe, rows)
    with torch.no_grad():
        logps = [policy.logp(m.packed) for m in rows]
        loss = sum(
            recipe.loss(m.with_logprobs(logp_T).loss_inputs(logp_T, policy.version), m.weight_C)
            for m, logp_T in zip(rows, logps, strict=True)
        )
    return float(loss), flat, rows


def test_every_setting_of_trl_has_a_name_here_or_a_reason():
    program = (
        "import dataclasses, json, transformers, trl\n"
        "base = {f.name for f in dataclasses.fields(transformers.TrainingArguments)}\n"
        "own = [f.name for f in dataclasses.fields(trl.GRPOConfig) if f.name not in base]\n"
        "print(json.dumps(own))"
    )
    done = subprocess.run([PEER, "-c", program], capture_output=True, encoding="utf-8", check=True)
    names_here = {name for entries in NAMES_OF_TRAINERS["trl"].values() for name in entries}
    assert set(json.loads(done.stdout.splitlines()[-1])) <= names_here


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.recipe)
def test_loss_and_gradient_are_those_of_trl(case, policy, groups, tmp_path):
    loss, flat, rows = of_ours(policy, groups, case)
    assert len(rows) > 2
    config = {
        "num_generations": G,
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 3,
        "max_completion_length": MAX_TOKENS,
        "temperature": TAU,
        "beta": 0.0,
        "max_steps": 1,
        "max_grad_norm": 0.0,
        "bf16": False,
        "use_cpu": True,
        "gradient_checkpointing": False,
        "shuffle_dataset": False,
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    their_loss, theirs = of_trl(save_tiny(tmp_path / "model"), groups, config | case.trl, tmp_path)
    names = [name for name, _ in policy.model.lm.named_parameters()]
    assert set(theirs) == set(names)
    their_flat = torch.cat([theirs[name].flatten() for name in names])
    assert abs(their_loss) > 1e-3
    assert loss == pytest.approx(their_loss, rel=1e-4, abs=1e-6)
    assert flat.norm() > 1e-2
    assert (flat - their_flat).norm() <= 1e-4 * their_flat.norm()
    torch.testing.assert_close(
        flat, their_flat, rtol=1e-4, atol=1e-4 * float(their_flat.abs().max())
    )
