"""Calls of the peers' own loss code with a case, as tensors that PyTorch can differentiate.

Every function here only carries tensors to a peer and back. JAX's losses come back as value and
gradient. The names of the peers' losses are in the with_*.py.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import cast

import numpy as np
import torch
from cases import LONGEST, MAX_LENGTH, Case, G
from pairing import other_token
from torch import Tensor


def trl(
    case: Case,
    logp: Tensor,
    advantages: Tensor,
    loss_type: str,
    *,
    level: str = "token",
    epsilon: tuple[float, float] = (0.2, 0.2),
    beta: float = 0.0,
    delta: float | None = None,
    corrected_kl: bool = False,
    old: str = "alpha",
    weights: Tensor | None = None,
    top_entropy: float = 1.0,
    opsm_delta: float | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """`GRPOTrainer._compute_loss`, on an object with only the attributes that it reads.

    `old` names the policy of the old log-probs, `weights` stand for `importance_sampling_ratio`,
    `mask` for `completion_mask`. The settings of SAPO and VESPO are the defaults of `GRPOConfig`.
    """
    from trl.trainer.grpo_trainer import GRPOTrainer

    if mask is None:
        mask = case.mask
    logps_and_entropies = (case.padded(logp), case.padded(case.entropy), None)
    sapo_settings = _defaults_of_trl("sapo_temperature_pos", "sapo_temperature_neg")
    vespo_settings = _defaults_of_trl(
        "vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"
    )
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *a, **k: logps_and_entropies,
        args=SimpleNamespace(
            delta=delta,
            use_bias_correction_kl=corrected_kl,
            steps_per_generation=1,
            **sapo_settings,
            **vespo_settings,
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
        # TRL multiplies by importance_sampling_ratio only if it samples with vLLM.
        use_vllm=weights is not None,
        vllm_importance_sampling_correction=True,
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        max_completion_length=MAX_LENGTH,
        _metrics={"train": defaultdict(list)},
    )
    # The other two methods are static; this one reads the trainer's accelerator.
    trainer.get_high_entropy_mask = partial(GRPOTrainer.get_high_entropy_mask, trainer)
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
        # A single process with one micro-batch: all tokens of the step.
        "num_items_in_batch": mask.sum(),
    }
    return GRPOTrainer._compute_loss(trainer, None, inputs)


def trl_scored(case: Case, **options: object) -> dict[str, Tensor]:
    """`GRPOTrainer._generate_and_score_completions` of the case's completions and rewards.

    Returns advantages [C], the mask of the completions' tokens, and more. Token 1 ends a
    completion; completions that did not finish end with token 2. `options` are attributes of the
    trainer.
    """
    from trl.trainer.grpo_trainer import GRPOTrainer

    token_ids = []
    for length, is_finished in zip(case.lengths.tolist(), case.finished, strict=True):
        last = 1 if is_finished else 2
        token_ids.append([2] * (length - 1) + [last])
    # The parts of what `_generate` returns. Only the ids of prompts and completions are not empty.
    generated = ([[3]] * case.C, token_ids, None, [""] * case.C, None, {}, None, None)
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
    # Last, so that an option replaces the attribute of the same name above.
    vars(trainer).update(options)
    return GRPOTrainer._generate_and_score_completions(trainer, [{"prompt": ""}] * case.C)


def trl_iw_opd(
    case: Case, logp: Tensor, _advantages: Tensor, *, gamma: float, recorded: bool = True
) -> Tensor:
    """`IWOPDTrainer._compute_iw_opd_loss`; without `recorded` log-probs, they are those of pi."""
    from trl.experimental.iw_opd import IWOPDTrainer

    trainer = SimpleNamespace(
        temperature=1.0,
        iw_opd_gamma=gamma,
        iw_opd_epsilon=1e-8,
        model=SimpleNamespace(training=True),
        _metrics={"train": defaultdict(list)},
    )
    first_token = torch.zeros(case.mask.shape, dtype=torch.long)
    return IWOPDTrainer._compute_iw_opd_loss(
        trainer,
        student_logits=torch.stack([case.padded(logp), case.padded(other_token(logp))], dim=-1),
        completion_tokens=first_token,
        labels=first_token.masked_fill(case.mask == 0, -100),
        teacher_actual_logprobs=case.padded(case.ref),
        rollout_logprobs=case.padded(case.alpha) if recorded else None,
    )


def trl_divergence(case: Case, logp: Tensor, beta: float) -> Tensor:
    """The loss of `DistillationTrainer` over a vocabulary of two tokens, a mean over tokens."""
    from trl.trainer.distillation_trainer import _chunked_divergence_loss

    def logits(first: Tensor) -> Tensor:
        return torch.stack([first, other_token(first)], dim=-1).unsqueeze(0)

    # With this head the hidden states are the logits.
    head = torch.eye(2, dtype=torch.float64)
    mask = torch.ones(1, len(logp), dtype=torch.long)
    return _chunked_divergence_loss(logits(logp), logits(case.ref), head, head, mask, beta)[0]


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


def _defaults_of_trl(*names: str) -> dict[str, object]:
    """The defaults of these settings of GRPOConfig."""
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
    epsilon: tuple[float, float] = (0.2, 0.2),
    dual: float = 1e9,
    weights: Tensor | None = None,
    horizon: int | None = None,
    completions: int | None = None,
    **policy_settings: object,
) -> Tensor:
    """A registered policy loss of verl.

    `dual` is clip_ratio_c, which no setting switches off. `completions` is the size of the batch
    that means are over; by default the completions that verl's masks leave.
    """
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.workers.config import ActorConfig

    config = ActorConfig(
        # ActorConfig requires these; the losses do not read them.
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        use_dynamic_bsz=True,
    )
    settings = {
        "clip_ratio_low": epsilon[0],
        "clip_ratio_high": epsilon[1],
        "clip_ratio_c": dual,
        "global_batch_info": {"loss_scale_factor": horizon, "global_batch_size": completions},
    }
    # The configuration is frozen.
    for key, value in settings.items():
        object.__setattr__(config, key, value)
    for key, value in policy_settings.items():
        object.__setattr__(config.policy_loss, key, value)
    policy_loss = get_policy_loss_fn(name)
    return policy_loss(
        case.padded(getattr(case, old)),
        case.padded(logp),
        case.spread(advantages),
        case.mask,
        aggregation,
        config,
        weights,
    )[0]


def verl_distillation(
    case: Case,
    logp: Tensor,
    advantages: Tensor,
    mode: str,
    *,
    aggregation: str = "token-mean",
    as_reward: bool = True,
    task_rewards: bool = False,
) -> Tensor:
    """verl's `distillation_ppo_loss`, with alpha's log-probs as the old ones.

    `mode` is its KL estimator, which is a reward or, without `as_reward`, the loss itself.
    """
    from verl.trainer.distillation.losses import distillation_ppo_loss
    from verl.utils.tensordict_utils import get_tensordict
    from verl.workers.config import ActorConfig, DistillationConfig, DistillationLossConfig

    sizes = case.lengths.tolist()

    def nested(values: Tensor, *, has_prompt: bool = False) -> Tensor:
        # A model's output has a row for the prompt's only token, which predicts the first token.
        end = values.new_zeros(int(has_prompt))
        parts = [torch.cat([part, end]) for part in values.split(sizes)]
        return torch.nested.as_nested_tensor(parts, layout=torch.jagged)

    zeros = torch.zeros(len(logp), dtype=torch.long)
    batch = {
        "prompts": torch.nested.as_nested_tensor([zeros[:1]] * case.C, layout=torch.jagged),
        "responses": nested(zeros),
        "response_mask": nested(torch.ones_like(zeros)),
        "old_log_probs": nested(case.alpha),
        "advantages": nested(advantages[case.completion]),
        "teacher_logprobs": nested(case.ref, has_prompt=True),
    }
    sizes_of_step = {"dp_size": 1, "batch_num_tokens": len(logp), "global_batch_size": case.C}
    loss_settings = DistillationLossConfig(
        loss_mode=mode,
        use_policy_gradient=as_reward,
        use_task_rewards=task_rewards,
        loss_max_clamp=None,
    )
    # What switches off the second clip is not among the settings of this loss.
    object.__setattr__(loss_settings, "clip_ratio_c", 1e9)
    actor = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        use_dynamic_bsz=True,
        loss_agg_mode=aggregation,
        clip_ratio_c=1e9,
    )
    settings = DistillationConfig(distillation_loss=loss_settings)
    output = {"log_probs": nested(logp, has_prompt=True)}
    rows = get_tensordict(batch, non_tensor_dict=sizes_of_step)
    return distillation_ppo_loss(actor, settings, output, rows)[0]


def verl_weights(case: Case, level: str, threshold: str | float) -> Tensor:
    """verl's importance weights pi_k/alpha [C, LONGEST]."""
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights

    log_ratio = case.padded(case.pi_k - case.alpha)
    return compute_rollout_correction_weights(log_ratio, case.mask, level, threshold)[0]


def verl_rejected(case: Case, metric: str, threshold: str) -> Tensor:
    """verl's rejection by pi_k/alpha: 1 for the tokens that stay [C, LONGEST]."""
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
    """The REINFORCE loss of verl's bypass mode. A `cap` weights it by min(pi(y)/alpha(y), cap)."""
    from verl.trainer.ppo.core_algos import compute_policy_loss_reinforce
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights

    weights = None
    if cap is not None:
        # In bypass mode the policy that learns takes the place of pi_k.
        log_ratio = case.padded((logp - case.alpha).detach())
        weights = compute_rollout_correction_weights(log_ratio, case.mask, "sequence", cap)[0]
    # The only attribute that this loss reads.
    config = SimpleNamespace(global_batch_info={})
    return compute_policy_loss_reinforce(
        case.padded(case.alpha),
        case.padded(logp),
        case.spread(advantages),
        case.mask,
        aggregation,
        config,
        weights,
    )[0]


def verl_kl(case: Case, logp: Tensor, name: str) -> Tensor:
    """verl's estimate of KL(pi || pi_ref), a mean over tokens."""
    from verl.trainer.ppo.core_algos import kl_penalty

    # verl's estimate is not masked, so the mean leaves the padding out.
    estimate = kl_penalty(case.padded(logp), case.padded(case.ref), name)
    return (estimate * case.mask).sum() / case.mask.sum()


def verl_advantage(case: Case, name: str, **options: object) -> Tensor:
    """An advantage estimator of verl [C]."""
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn

    advantages, _ = get_adv_estimator_fn(name)(
        # verl sums the rewards of a completion's tokens, and gives each token the advantage.
        token_level_rewards=token_level_rewards(case),
        response_mask=case.mask,
        index=group_names(case),
        **options,
    )
    return advantages[:, 0]


def token_level_rewards(case: Case) -> Tensor:
    """Rewards by token [C, LONGEST]: each completion's reward at its first token."""
    rewards = torch.zeros_like(case.mask)
    rewards[:, 0] = case.rewards
    return rewards


def group_names(case: Case) -> np.ndarray:
    """The name of the group of each completion [C]."""
    return np.array([str(group) for group in case.group.tolist()])


def trinity(
    case: Case,
    logp: Tensor,
    advantages: Tensor,
    module: str,
    name: str,
    *,
    old: str = "alpha",
    **options: object,
) -> Tensor:
    """A policy loss of Trinity-RFT. Advantages are [C] or [C, LONGEST]."""
    policy_loss = getattr(import_module(f"trinity.algorithm.policy_loss_fn.{module}"), name)
    loss = policy_loss(**options)
    # The metaclass wraps __call__ to rename arguments for verl's batches. The function that it
    # wraps is in the closure.
    closure = type(loss).__call__.__closure__ or ()
    compute = cast(
        Callable[..., tuple[Tensor, object]],
        next(cell.cell_contents for cell in closure if callable(cell.cell_contents)),
    )
    return compute(
        loss,
        logprob=case.padded(logp),
        old_logprob=case.padded(getattr(case, old)),
        action_mask=case.mask,
        advantages=advantages if advantages.dim() == 2 else case.spread(advantages),
    )[0]


def trinity_distillation(case: Case, logp: Tensor, _advantages: Tensor) -> Tensor:
    """The loss of Trinity-RFT's algorithm on_policy_distill, with its advantages of tokens."""
    from trinity.algorithm.advantage_fn.on_policy_distill_advantage import OnPolicyDistillAdvantage

    batch = {
        "old_log_probs": case.padded(case.alpha),
        "teacher_logprobs": case.padded(case.ref),
        "response_mask": case.mask,
    }
    scored, _ = OnPolicyDistillAdvantage()(SimpleNamespace(batch=batch))
    return trinity(
        case,
        logp,
        scored.batch["advantages"],
        "importance_sampling_policy_loss",
        "ImportanceSamplingLossFn",
    )


def trinity_kl(
    case: Case,
    logp: Tensor,
    name: str,
    *,
    aggregation: str = "token-mean",
    corrected: bool = False,
) -> Tensor:
    """A KL term of Trinity-RFT, with a coefficient of 1."""
    from trinity.algorithm.kl_fn import kl_fn

    old = case.padded(case.alpha) if corrected else None
    kl_term = getattr(kl_fn, name)(kl_coef=1.0)
    return kl_term.calculate_kl_loss(
        case.padded(logp), case.padded(case.ref), case.mask, aggregation, old
    )[0]


def trinity_advantage(case: Case, module: str, name: str, **options: object) -> Tensor:
    """A group advantage of Trinity-RFT [C]."""
    advantage_class = getattr(import_module(f"trinity.algorithm.advantage_fn.{module}"), name)
    advantage = advantage_class(**options)
    advantages = []
    for rewards in case.rewards.view(-1, G):
        # A member of one token, so its advantage is one number.
        members = [SimpleNamespace(reward=r, action_mask=torch.ones(1)) for r in rewards.tolist()]
        advantage.calculate_group_advantage("group", members)  # sets `advantages` of each member
        advantages += [member.advantages for member in members]
    return torch.cat(advantages).double()


def rlax(loss: Callable[..., object], *values: Tensor) -> tuple[Tensor, Tensor]:
    """Value of a function of JAX arrays, and its gradient in the first argument."""
    import jax

    # JAX would cut float64 to float32.
    jax.config.update("jax_enable_x64", val=True)
    arrays = [jax.numpy.asarray(value.numpy()) for value in values]
    value, gradient = jax.value_and_grad(loss)(*arrays)
    return torch.from_numpy(np.array(value)), torch.from_numpy(np.array(gradient))
