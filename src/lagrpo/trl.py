"""TRL's GRPOTrainer with a recipe: its advantages, loss and normalizer.

from lagrpo.trl import GRPOTrainer

GRPOTrainer(model, rewards, GRPOConfig(...), train_dataset=data, recipe="prime_rl")
"""

# TRL is in no environment of ours.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import inspect
from collections.abc import Mapping
from copy import copy
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from lagrpo.core.advantages import AdvantageInputs, zero_variance
from lagrpo.core.inputs import without_gradient
from lagrpo.core.objective import Recipe
from lagrpo.core.padded import flatten
from lagrpo.core.pieces import PieceFunction
from lagrpo.core.recipes import resolve

try:
    import trl
except ModuleNotFoundError as error:
    raise ImportError(
        f"lagrpo.trl needs TRL, and {error.name} is not installed: pip install 'trl>=1.16'"
    ) from error

LOSS_SETTINGS = (
    *("beta", "delta", "entropy_coef", "epsilon", "epsilon_high", "importance_sampling_level"),
    *("loss_type", "mask_truncated_completions", "multi_objective_aggregation"),
    *("off_policy_mask_threshold", "sapo_temperature_neg", "sapo_temperature_pos"),
    *("scale_rewards", "top_entropy_quantile", "use_adaptive_entropy", "use_bias_correction_kl"),
    *("vespo_k_neg", "vespo_k_pos", "vespo_lambda_neg", "vespo_lambda_pos"),
)
"""The settings of GRPOConfig that a recipe takes the place of."""


def _check_version() -> None:
    """Raises ImportError for a TRL whose trainer has other methods than this file replaces."""
    expected = {
        "_calculate_rewards": ["self", "inputs", "prompts", "completions", "completion_ids_list"],
        "_compute_loss": ["self", "model", "inputs"],
        "_generate_and_score_completions": ["self", "inputs"],
    }
    for name, parameters in expected.items():
        method = getattr(trl.GRPOTrainer, name, None)
        if method is None or list(inspect.signature(method).parameters) != parameters:
            break
    else:
        major, minor, *_ = trl.__version__.split(".")
        if (int(major), int(minor)) >= (1, 16):
            return
    raise ImportError(
        f"lagrpo.trl works with TRL 1.16, and this is {trl.__version__}: pip install 'trl==1.16.*'"
    )


_check_version()


class GRPOTrainer(trl.GRPOTrainer):
    """TRL's GRPOTrainer with the objective of a recipe.

    The arguments are TRL's, and

        recipe     a name of the table, "package.module:function", or a Recipe
        overrides  its knobs, by their paths

    Completions without a reward stay out of groups and loss. Raises ValueError for an unknown
    recipe, for settings of TRL's own losses, and for a recipe whose needs the batches do not meet.
    """

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: Any = None,
        *more: Any,
        recipe: str | Recipe | PieceFunction,
        overrides: Mapping[str, object] | None = None,
        **others: Any,
    ) -> None:
        self.recipe = resolve(recipe, overrides)
        # Copied, because beta below is ours.
        args = copy(args) if args is not None else trl.GRPOConfig()
        check_settings(self.recipe, args)
        if self.recipe.needs_pi_ref:
            # TRL loads the reference policy, and computes its log-probs, if this is not 0.
            args.beta = self.recipe.beta or 1.0
        super().__init__(model, reward_funcs, args, *more, **others)
        if self.aux_loss_enabled:
            raise ValueError(
                "a recipe has no router loss: set the model's output_router_logits to False"
            )

    def _calculate_rewards(self, *arguments: Any, **others: Any) -> Tensor:
        self._rewards = super()._calculate_rewards(*arguments, **others)  # [all C, functions]
        return self._rewards

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """TRL's batch with the recipe's advantages, and what the loss reads besides."""
        output = super()._generate_and_score_completions(inputs)
        is_training = self.model.training
        lengths_C = self.accelerator.gather(_sampled(output).sum(1))
        reward_weights = self.reward_weights.to(self._rewards.device)
        rewards_C = (self._rewards * reward_weights).nansum(1)
        is_scored_C = ~self._rewards.isnan().all(1)
        G = self.num_generations if is_training else self.num_generations_eval
        group_C = torch.arange(len(rewards_C), device=rewards_C.device) // G
        # The same numbers in every process.
        generator = torch.Generator().manual_seed(self.args.seed + self.state.global_step)
        uniform_C = torch.rand(len(rewards_C), generator=generator).to(rewards_C.device)
        scored_lengths_C = lengths_C[is_scored_C].clamp(min=1)
        x = AdvantageInputs(
            rewards=rewards_C[is_scored_C],
            group=group_C[is_scored_C],
            lengths=scored_lengths_C,
            uniform=uniform_C[is_scored_C],
        )
        limit = self.max_completion_length
        advantages_C = torch.zeros_like(rewards_C)
        advantages_C[is_scored_C] = self.recipe.advantages(x, limit)
        flat_C = zero_variance(x.rewards, x.group)
        scored_weight_C = self.recipe.weights(scored_lengths_C, flat_C, limit)
        weight_C = torch.zeros_like(rewards_C)
        weight_C[is_scored_C] = scored_weight_C.to(weight_C.dtype)
        # The table of completions shows these advantages instead of TRL's.
        logged = self._logs["advantages"]
        for _ in range(min(len(logged), len(advantages_C))):
            logged.pop()
        logged.extend(advantages_C.tolist())
        first = self.accelerator.process_index * len(inputs)
        own = slice(first, first + len(inputs))
        last_tokens = output["completion_ids"].gather(
            1, (output["completion_mask"].sum(1, keepdim=True) - 1).clamp(min=0)
        )
        ends = torch.tensor(self.eos_token_ids, device=last_tokens.device)
        return output | {
            "advantages": advantages_C[own],
            "weight": weight_C[own],
            "scored": is_scored_C[own],
            "group": group_C[own],
            "finished": torch.isin(last_tokens.squeeze(1), ends),
            "version": torch.full_like(group_C[own], self.state.global_step),
        }

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        """The recipe's loss of a micro-batch; the sum over a step is the loss of the step."""
        completion_ids = inputs["completion_ids"]
        compute_logps = self._get_per_token_logps_and_entropies
        # Images and the like have the same names in both.
        known = [name for name in inspect.signature(compute_logps).parameters if name in inputs]
        logp, entropy, _ = compute_logps(
            model,
            torch.cat([inputs["prompt_ids"], completion_ids], dim=1),
            torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
            completion_ids.size(1),
            compute_entropy=True,
            **{name: inputs[name] for name in known},
        )
        is_scored = inputs["scored"]
        mask = _sampled(inputs).bool()[is_scored]
        if not mask.any():
            return 0.0 * logp.sum()
        # Without this entry the batch is used up before the first update that would change π.
        at_generation = inputs.get("old_per_token_logps", logp.detach())
        sampled = inputs.get("sampling_per_token_logps", at_generation)
        # vLLM gives no number for some tokens.
        sampled = torch.where(sampled.isnan(), at_generation, sampled)
        # With one iteration each update has its own batch.
        old_logp = logp.detach() if self.num_iterations == 1 else at_generation
        ref_logp = inputs.get("ref_per_token_logps")
        age_C = self.state.global_step - inputs["version"]
        x = flatten(
            logp[is_scored],
            mask,
            inputs["advantages"][is_scored],
            rollout_logp=sampled[is_scored],
            old_logp=old_logp[is_scored],
            ref_logp=None if ref_logp is None else ref_logp[is_scored],
            staleness=age_C[is_scored].unsqueeze(1).expand_as(mask),
            entropy=entropy[is_scored].detach(),
            group_C=inputs["group"][is_scored],
            finished_C=inputs["finished"][is_scored],
        )
        x = replace(x, step=self.recipe.collect(without_gradient(x)))
        weight_C = inputs["weight"][is_scored] * self._scale_of_step()
        derivative = self.recipe.differentiate(x, weight_C)
        means = {"entropy": x.entropy, "clip_ratio/region_mean": derivative.clipped_T, **x.logged}
        if self.recipe.beta > 0:
            means["kl"] = derivative.kl_T
        mode = "train" if self.model.training else "eval"
        for name, numbers in means.items():
            self._metrics[mode][name].append(numbers.float().mean().item())
        # Its gradient is the derivative; its value, the loss.
        linear = (derivative.gradient_T * x.logp).sum()
        return linear + (derivative.loss - linear.detach())

    def _scale_of_step(self) -> float:
        """The factor from a mean over generated completions to a mean over a step's completions.

        Gradients of processes are averaged, and the normalizer covers all processes.
        """
        if not self.model.training:
            return float(self.accelerator.num_processes)
        parts_of_step = self.args.steps_per_generation / self.current_gradient_accumulation_steps
        return parts_of_step * self.accelerator.num_processes


def check_settings(recipe: Recipe, args: Any) -> None:
    """Raises ValueError for settings of GRPOConfig that do not go with a recipe."""
    defaults = {field.name: field.default for field in fields(args)}
    for name in LOSS_SETTINGS:
        if name in defaults and getattr(args, name) != defaults[name]:
            raise ValueError(
                f"GRPOConfig.{name} has no effect with recipe {recipe.name!r}: leave it out, and "
                "set a knob of the recipe by overrides"
            )
    for problem in unmet_needs(recipe, args):
        raise ValueError(f"recipe {recipe.name!r} needs {problem}")


def unmet_needs(recipe: Recipe, args: Any) -> list[str]:
    """The settings that a recipe needs, in words, and GRPOConfig does not have."""
    needs: list[str] = []
    if recipe.needs_teacher:
        needs.append(
            "a teacher, and the reference policy of TRL is the start of the trained one: "
            "take lagrpo train"
        )
    is_one_batch = args.steps_per_generation == args.gradient_accumulation_steps
    if args.num_iterations > 1 and "entropy" in recipe.required_inputs:
        needs.append("entropies of the policy before the batch: set num_iterations = 1")
    if args.num_iterations > 1 and recipe.needs_old_logp and not is_one_batch:
        needs.append(
            "log-probs of the policy before the batch: set num_iterations = 1, or "
            "steps_per_generation = gradient_accumulation_steps"
        )
    is_one_micro_batch = args.gradient_accumulation_steps * args.world_size == 1
    if recipe.needs_step_statistics and not is_one_micro_batch:
        needs.append(
            "statistics of the whole step: set gradient_accumulation_steps = 1, in one process"
        )
    has_groups = args.steps_per_generation == 1
    if recipe.needs_whole_groups and not (
        has_groups and args.per_device_train_batch_size % args.num_generations == 0
    ):
        needs.append(
            "whole groups in a micro-batch: set steps_per_generation = 1, and "
            "per_device_train_batch_size to a multiple of num_generations"
        )
    return needs


def _sampled(batch: Mapping[str, Tensor]) -> Tensor:
    """1 for the tokens that the policy sampled, [C, L]: not padding, not results of tools."""
    mask = batch["completion_mask"]
    return mask * batch["tool_mask"] if "tool_mask" in batch else mask
