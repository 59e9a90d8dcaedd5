"""From settings to the parts of Algorithm 1."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lagrpo.addressed import uniforms
from lagrpo.compose import Recipe
from lagrpo.config import Settings, SettingsError
from lagrpo.embedded import resolve_model
from lagrpo.policy.learner import Learner, Optimisation
from lagrpo.policy.model import Policy, check_context, load_policy
from lagrpo.prompts import PromptSource
from lagrpo.recipes import resolve
from lagrpo.sampling.local import LocalSampler
from lagrpo.sampling.schedule import Schedule
from lagrpo.tasks import Task, check_options, load_task

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def check_settings(settings: Settings, task: Task | None = None) -> Recipe:
    """What can be refused before anything heavy is loaded; returns the resolved recipe.

    Raises:
        SettingsError: an unknown recipe or piece, a contradictory composition, options that the task does not take.
    """
    try:
        if task is None:
            check_options(settings.task)
        return resolve(settings.objective.recipe, settings.objective.overrides)
    except ValueError as error:
        raise SettingsError(str(error)) from error


def pick_device(name: str) -> torch.device:
    """The device of a setting. Raises SettingsError for one that is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise SettingsError(f"model.device = {name!r} is no device: use auto, cpu, cuda or cuda:N") from error
    if device.type == "cuda" and not (device.index or 0) < torch.cuda.device_count():
        raise SettingsError(f"model.device = {name!r}, but PyTorch sees {torch.cuda.device_count()} CUDA devices")
    return device


def use_threads(threads: int | None) -> None:
    """CPU threads of torch: as set, or one for each core that this process may use."""
    torch.set_num_threads(threads or len(os.sched_getaffinity(0)))


def build_policy(settings: Settings) -> Policy:
    """The policy of the settings, checked against the longest sequence that they allow."""
    model = settings.model
    template = Path(model.chat_template).read_text(encoding="utf-8") if model.chat_template else None
    device = pick_device(model.device)
    policy = load_policy(resolve_model(model.path), DTYPES[model.dtype], device, settings.sampling.temperature, template)
    check_context(policy, settings.sampling.max_prompt_tokens + settings.sampling.max_tokens)
    return policy


@dataclass(frozen=True, slots=True)
class Parts:
    """What the settings of a run stand for."""

    task: Task
    recipe: Recipe
    policy: Policy
    learner: Learner
    sampler: LocalSampler
    evaluator: LocalSampler
    prompts: PromptSource
    schedule: Schedule

    @staticmethod
    def build(settings: Settings, task: Task | None = None) -> Parts:
        """Cheap checks first, then the task's data, then the model."""
        recipe = check_settings(settings, task)
        use_threads(settings.model.threads)
        seed, sampling = settings.run.seed, settings.sampling
        task = task or load_task(settings.task, seed)
        policy = build_policy(settings)
        source = PromptSource(task, policy, seed, settings.schedule.prompts, sampling.max_prompt_tokens)
        reference = policy.twin() if recipe.needs_pi_ref else None
        checkpointing = settings.optimizer.activation_checkpointing
        learner = Learner(policy, recipe, optimisation(settings), reference, checkpointing)
        sampler = LocalSampler(policy.twin(), seed, sampling.max_tokens, sampling.rows)
        evaluator = LocalSampler(
            policy, seed, sampling.max_tokens, sampling.rows, settings.evaluation.temperature, "evaluate"
        )
        schedule = Schedule(settings.schedule.kind, settings.schedule.v)
        return Parts(task, recipe, policy, learner, sampler, evaluator, source, schedule)


def optimisation(settings: Settings) -> Optimisation:
    """AdamW and its schedule over all S·M·i updates."""
    o, s = settings.optimizer, settings.schedule
    return Optimisation(
        lr=o.lr,
        betas=(o.beta1, o.beta2),
        weight_decay=o.weight_decay,
        max_grad_norm=o.max_grad_norm or None,
        schedule=o.schedule,
        warmup=o.warmup,
        updates=s.stages * s.batches * s.i,
    )


def advantage_of(recipe: Recipe, seed: int, max_tokens: int):
    """advantage(b)(rewards_G, lengths_G, g): the recipe's, with random draws addressed by batch and group."""

    def of_batch(b: int):
        def advantage(rewards_G: Tensor, lengths_G: Tensor, g: int) -> Tensor:
            uniform_G = torch.from_numpy(uniforms(len(rewards_G), seed, "advantage", b, g))
            return recipe.advantage(recipe.shaped(rewards_G, lengths_G, max_tokens), uniform_G)

        return advantage

    return of_batch
