"""The peers' own loss code on a case, as scalars that PyTorch can differentiate (JAX: as value and gradient).

Every function here only carries tensors to a peer and back. Module paths are in the with_*.py.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from cases import LONGEST, MAX_LENGTH, Case, G
from torch import Tensor


def trl(
    case: Case,
    logp: Tensor,
    advantages: Tensor,
    loss_type: str,
    *,
    level: str = "token",
    epsilon: tuple = (0.2, 0.2),
    beta: float = 0.0,
    delta: float | None = None,
    corrected_kl: bool = False,
    old: str = "alpha",
    weights: Tensor | None = None,
    top_entropy: float = 1.0,
    opsm_delta: float | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """`GRPOTrainer._compute_loss` itself, on a trainer that has the attributes which it reads and nothing else.

    `weights` stand for `importance_sampling_ratio`, `mask` for `completion_mask`. The settings of SAPO and VESPO are
    the defaults of `GRPOConfig`."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *a, **k: (
            case.padded(logp),
            case.padded(case.entropy),
            None,
        ),
        args=SimpleNamespace(
            delta=delta,
            use_bias_correction_kl=corrected_kl,
            steps_per_generation=1,
            **_defaults_of_trl("sapo_temperature_pos", "sapo_temperature_neg"),
            **_defaults_of_trl(
                "vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"
            ),
        ),
        accelerator=_one_process(),
        aux_loss_enabled=False,
        top_entropy_quantile=top_entropy,
        off_policy_mask_threshold=opsm_delta,
        get_off_policy_mask=GRPOTrainer.get_off_policy_mask,
        get_gamma_weights=GRPOTrainer.get_gamma_weights,
        _entropy_bonus_enabled=False,
        importance_sampling_level=level,
        beta=beta,
        loss_type=loss_type,
        epsilon_low=epsilon[0],
        epsilon_high=epsilon[1],
        use_vllm=weights is not None,
        vllm_importance_sampling_correction=True,
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        max_completion_length=MAX_LENGTH,
        _metrics={"train": defaultdict(list)},
    )
    trainer.get_high_entropy_mask = partial(GRPOTrainer.get_high_entropy_mask, trainer)
    mask = case.mask if mask is None else mask
    inputs = {
        "prompt_ids": torch.zeros(case.C, 1, dtype=torch.long),
        "prompt_mask": torch.ones(case.C, 1),
        "completion_ids": torch.zeros(case.mask.shape, dtype=torch.long),
        "completion_mask": mask,
        "advantages": advantages,
        "old_per_token_logps": case.padded(getattr(case, old)),
        "sampling_per_token_logps": case.padded(case.alpha),
        "ref_per_token_logps": case.padded(case.ref),
        "importance_sampling_ratio": weights,
        "num_items_in_batch": mask.sum(),
    }
    return GRPOTrainer._compute_loss(trainer, None, inputs)


def trl_scored(case: Case, **options: Any) -> dict[str, Tensor]:
    """What `GRPOTrainer._generate_and_score_completions` makes of the case's completions and rewards: advantages [C],
    the mask of their tokens, and more. Token 1 ends a completion; those that did not finish end with token 2."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    lengths = case.lengths.tolist()
    ids = [
        [2] * (n - 1) + [1 if done else 2] for n, done in zip(lengths, case.finished, strict=True)
    ]
    generated = ([[3]] * case.C, ids, None, [""] * case.C, None, {}, None, None)
    trainer = SimpleNamespace(
        accelerator=_one_process(),
        model=SimpleNamespace(training=True, is_gradient_checkpointing=False),
        args=SimpleNamespace(
            per_device_train_batch_size=case.C,
            steps_per_generation=1,
            gradient_accumulation_steps=1,
            gradient_checkpointing_kwargs=None,
        ),
        environment_factories=None,
        environments=None,
        tools=None,
        use_vllm=False,
        vllm_importance_sampling_correction=False,
        num_iterations=1,
        beta=0.0,
        num_generations=G,
        _generate=lambda prompts: generated,
        _calculate_rewards=lambda *a: case.rewards.unsqueeze(1),
        _tokenizer=SimpleNamespace(pad_token_id=0, batch_decode=lambda ids, **k: [""] * len(ids)),
        eos_token_ids=[1],
        pad_to_multiple_of=LONGEST,
        reward_weights=torch.ones(1, dtype=torch.float64),
        reward_func_names=["reward"],
        reward_funcs=[None],
        multi_objective_aggregation="sum_then_normalize",
        log_multimodal=False,
        _metrics={"train": defaultdict(list)},
        _logs=defaultdict(list) | {"rewards": defaultdict(list), "extra": defaultdict(list)},
        _pending_extra_logs={},
        _pending_metrics={},
        mask_truncated_completions=False,
        scale_rewards="group",
    )
    vars(trainer).update(options)
    return GRPOTrainer._generate_and_score_completions(trainer, [{"prompt": ""}] * case.C)


def _one_process() -> SimpleNamespace:
    """An accelerator of a single process."""
    return SimpleNamespace(
        device="cpu",
        num_processes=1,
        process_index=0,
        gather=lambda x: x,
        reduce=lambda x, reduction: x,
        gather_for_metrics=lambda x: x,
        pad_across_processes=lambda x, **k: x,
    )


def _defaults_of_trl(*names: str) -> dict[str, Any]:
    """The defaults of these settings."""
    from trl import GRPOConfig

    return {name: GRPOConfig.__dataclass_fields__[name].default for name in names}


def verl(
    case: Case,
    logp: Tensor,
    advantages: Tensor,
    name: str,
    aggregation: str = "token-mean",
    *,
    old: str = "alpha",
    epsilon: tuple = (0.2, 0.2),
    dual: float = 1e9,
    weights: Tensor | None = None,
    horizon: int | None = None,
    completions: int | None = None,
    **policy: Any,
) -> Tensor:
    """A registered policy loss of verl. `dual` is clip_ratio_c, which no setting switches off; `completions` the size
    of the batch that its means are over, by default those that its masks leave."""
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.workers.config import ActorConfig

    config = ActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, use_dynamic_bsz=True
    )
    values = {"clip_ratio_low": epsilon[0], "clip_ratio_high": epsilon[1], "clip_ratio_c": dual}
    batch = {"loss_scale_factor": horizon, "global_batch_size": completions}
    values |= {"global_batch_info": batch}
    for key, value in values.items():
        object.__setattr__(config, key, value)
    for key, value in policy.items():
        object.__setattr__(config.policy_loss, key, value)
    tensors = case.padded(getattr(case, old)), case.padded(logp), case.spread(advantages), case.mask
    return get_policy_loss_fn(name)(*tensors, aggregation, config, weights)[0]


def verl_weights(case: Case, level: str, threshold: str | float) -> Tensor:
    """verl's importance weights pi_k/alpha [C, LONGEST]."""
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights

    log_ratio = case.padded(case.pi_k - case.alpha)
    return compute_rollout_correction_weights(log_ratio, case.mask, level, threshold)[0]


def verl_rejected(case: Case, metric: str, threshold: str) -> Tensor:
    """verl's rejection by pi_k/alpha: 1 for the tokens that stay, [C, LONGEST]."""
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_rejection_mask

    log_ratio = case.padded(case.pi_k - case.alpha)
    return compute_rollout_rejection_mask(log_ratio, case.mask, metric, threshold)[0]


def verl_reinforce(
    case: Case,
    logp: Tensor,
    advantages: Tensor,
    aggregation: str,
    *,
    cap: float | None = None,
) -> Tensor:
    """The REINFORCE loss of verl's bypass mode, weighted by min(pi(y)/alpha(y), cap) if there is a cap."""
    from verl.trainer.ppo.core_algos import compute_policy_loss_reinforce
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights

    weights = None
    if cap is not None:
        log_ratio = case.padded((logp - case.alpha).detach())
        weights = compute_rollout_correction_weights(log_ratio, case.mask, "sequence", cap)[0]
    config = SimpleNamespace(global_batch_info={})
    tensors = case.padded(case.alpha), case.padded(logp), case.spread(advantages), case.mask
    return compute_policy_loss_reinforce(*tensors, aggregation, config, weights)[0]


def verl_kl(case: Case, logp: Tensor, name: str) -> Tensor:
    """verl's estimate of KL(pi || pi_ref), a mean over tokens."""
    from verl.trainer.ppo.core_algos import kl_penalty

    return (
        kl_penalty(case.padded(logp), case.padded(case.ref), name) * case.mask
    ).sum() / case.mask.sum()


def verl_advantage(case: Case, name: str, **options: Any) -> Tensor:
    """An advantage estimator of verl [C]."""
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn

    first = torch.zeros_like(case.mask)
    first[:, 0] = case.rewards
    index = np.array([str(g) for g in case.group.tolist()])
    return get_adv_estimator_fn(name)(
        token_level_rewards=first, response_mask=case.mask, index=index, **options
    )[0][:, 0]


def trinity(
    case: Case,
    logp: Tensor,
    advantages: Tensor,
    module: str,
    name: str,
    *,
    old: str = "alpha",
    **options: Any,
):
    """A policy loss of Trinity-RFT."""
    from importlib import import_module

    loss = getattr(import_module(f"trinity.algorithm.policy_loss_fn.{module}"), name)(**options)
    tensors = {"logprob": case.padded(logp), "old_logprob": case.padded(getattr(case, old))}
    tensors |= {"action_mask": case.mask, "advantages": case.spread(advantages)}
    function = type(
        loss
    ).__call__.__closure__  # the metaclass wraps __call__ to rename arguments for verl's batches
    own = next(cell.cell_contents for cell in function or () if callable(cell.cell_contents))
    return own(loss, **tensors)[0]


def trinity_kl(
    case: Case, logp: Tensor, name: str, aggregation: str = "token-mean", corrected: bool = False
) -> Tensor:
    """A KL term of Trinity-RFT, with a coefficient of 1."""
    from trinity.algorithm.kl_fn import kl_fn

    old = case.padded(case.alpha) if corrected else None
    tensors = case.padded(logp), case.padded(case.ref), case.mask
    return getattr(kl_fn, name)(kl_coef=1.0).calculate_kl_loss(*tensors, aggregation, old)[0]


def trinity_advantage(case: Case, module: str, name: str, **options: Any) -> Tensor:
    """A group advantage of Trinity-RFT [C]."""
    from importlib import import_module

    kind = getattr(import_module(f"trinity.algorithm.advantage_fn.{module}"), name)
    function, made = kind(**options), []
    for group in case.rewards.view(-1, 4):
        members = [SimpleNamespace(reward=r, action_mask=torch.ones(1)) for r in group.tolist()]
        function.calculate_group_advantage("group", members)
        made += [member.advantages for member in members]
    return torch.cat(made).double()


def rlax(loss: Callable[..., Any], *values: Tensor) -> tuple[Tensor, Tensor]:
    """Value of a function of JAX arrays, and its gradient in the first of them."""
    import jax

    jax.config.update("jax_enable_x64", True)
    arrays = [jax.numpy.asarray(value.numpy()) for value in values]
    value, gradient = jax.value_and_grad(loss)(*arrays)
    return torch.from_numpy(np.array(value)), torch.from_numpy(np.array(gradient))
