"""From settings to the parts of Algorithm 1."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lagrpo.backends.cpu import kernels
from lagrpo.backends.hardware import pick_device, pick_dtype
from lagrpo.backends.memory import keep_freed_memory
from lagrpo.data.offline import OfflineData
from lagrpo.data.prompts import PromptSource
from lagrpo.errors import SettingsError, refusing
from lagrpo.objective.compose import Recipe
from lagrpo.policy.embedded import resolve_model
from lagrpo.policy.learner import Learner, Optimization
from lagrpo.policy.model import Policy, check_context, check_files, load_policy
from lagrpo.policy.replica import replica
from lagrpo.policy.templates import Templates
from lagrpo.rng import uniforms
from lagrpo.sampling.base import Sampler
from lagrpo.sampling.local import LocalSampler
from lagrpo.sampling.parity import PARITY_PROMPTS, Parity, ParityCheck, ParityError
from lagrpo.sampling.schedule import Schedule
from lagrpo.sampling.vllm.connecting import build_vllm, open_servers
from lagrpo.sampling.vllm.sampler import VllmSampler
from lagrpo.sampling.vllm.server import Server
from lagrpo.settings.schema import ModelSettings, Settings
from lagrpo.tasks import Task, TaskSettings, load_task
from lagrpo.threads import team
from lagrpo.training.checks import chat_template
from lagrpo.types import Group

_QUIET = threading.RLock()  # what transformers says is set for the process: runs in several threads take turns
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def build_policy(model: ModelSettings, tau: float, longest: int, templates: Templates | None = None) -> Policy:
    """The policy of the settings at temperature tau, checked against the `longest` prompt and completion that they
    allow, in tokens; `templates` renders its prompts. Raises SettingsError for a model that is not there or cannot be
    run."""
    device = pick_device(model.device)
    team.start(model.threads, device.type)
    if device.type == "cpu":
        keep_freed_memory()
    with refusing("model.kernels", kernels.NoKernels):
        kernels.select(model.kernels, device.type)
    dtype, _ = pick_dtype(model.dtype, device)
    with loading(model), without_progress_bars():
        policy = load_policy(resolve_model(model.path), DTYPES[dtype], device, tau, chat_template(model), templates)
    with refusing("model.path"):
        check_context(policy, longest)
    return policy


def build_task(settings: TaskSettings, seed: int) -> Task:
    """The task of the settings. Raises SettingsError for data or functions that are missing or unfit."""
    with refusing():
        return load_task(settings, seed)


@contextmanager
def loading(model: ModelSettings) -> Iterator[None]:
    """Inside, a model is read. An error that says that it is not there, or cannot be run, becomes a SettingsError that
    says where it was looked for; transformers' own reports stay off the terminal."""
    try:
        with quiet_transformers():
            yield
    except (OSError, ValueError) as error:
        here = Path(model.path).expanduser()
        looked = f"in {here}" if here.is_dir() else f"on the Hugging Face hub, as there is no directory {here} here"
        reason = str(error).partition("\n")[0]
        raise SettingsError(
            f"model.path = {model.path!r}: no model could be loaded. Looked {looked}: {reason}"
        ) from error


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Of what transformers reports, only errors."""
    from transformers.utils import logging

    with _QUIET:
        verbosity = logging.get_verbosity()
        logging.set_verbosity_error()
        try:
            yield
        finally:
            logging.set_verbosity(verbosity)


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """transformers' own bars (loading and writing weights take a second) out of the way; those of downloads stay."""
    from transformers.utils import logging

    with _QUIET:
        before = logging.set_tqdm_hook(lambda factory, args, kwargs: logging.EmptyTqdm(*args, **kwargs))
        try:
            yield
        finally:
            logging.set_tqdm_hook(before)


@dataclass(frozen=True, slots=True)
class Parts:
    """What the settings of a run stand for; `own_task`: the task is an object of the caller's, not of the settings;
    `parity`: how far learner and in-process sampler agree, None where that was not asked or the sampler is vLLM;
    `offline`: what was read of pre-generated (offline) completions, in words."""

    task: Task
    own_task: bool
    recipe: Recipe
    policy: Policy
    learner: Learner
    sampler: Sampler
    check_parity: Callable[[Policy, Any], Mapping[str, float]]
    parity: Parity | None
    evaluator: LocalSampler
    prompts: PromptSource
    schedule: Schedule
    offline_groups: Callable[[int], Sequence[Group]]
    offline: str | None

    @staticmethod
    def build(settings: Settings, recipe: Recipe, task: Task | None = None) -> Parts:
        """The task's data first, then the model: what is cheap to refuse is refused first.

        Raises:
            SettingsError: data or a model that is not there, or that the settings do not fit.
        """
        servers = []
        if settings.sampling.sampler == "vllm":  # starting them writes files and takes minutes
            with loading(settings.model), without_progress_bars():
                check_files(resolve_model(settings.model.path))
            servers = open_servers(settings)
        templates = Templates()
        try:
            return Parts._build(settings, recipe, task, servers, templates)
        except BaseException:
            templates.close()
            for server in servers:
                server.close()
            raise

    @staticmethod
    def _build(
        settings: Settings, recipe: Recipe, task: Task | None, servers: Sequence[Server], templates: Templates
    ) -> Parts:
        seed, sampling, offline = settings.run.seed, settings.sampling, settings.offline
        from_file = offline_prompts(settings)
        own_task = task is not None
        task = task if task is not None else build_task(settings.task, seed)
        longest = sampling.max_prompt_tokens + sampling.max_tokens
        policy = build_policy(settings.model, sampling.temperature, longest, templates)
        fresh = settings.schedule.prompts - from_file
        source = PromptSource(task, policy, seed, fresh, sampling.max_prompt_tokens)
        source.tokenized("train", 0)  # a chat template that cannot be rendered shows here, before the run is made
        with refusing("task"):
            source.check(settings.schedule.stages * settings.schedule.batches)
        offline_data = build_offline(settings, recipe, policy) if offline.data else None
        reference = replica(policy) if recipe.needs_pi_ref else None
        checkpointing = settings.optimizer.activation_checkpointing
        learner = Learner(policy, recipe, optimization(settings), reference, checkpointing, settings.run.entropy)
        sampler = (
            build_vllm(settings, policy, servers)
            if servers
            else LocalSampler(replica(policy), seed, sampling.max_tokens, sampling.max_num_seqs)
        )
        check_parity, parity = build_parity_check(settings, policy, source, sampler)
        evaluator = LocalSampler(
            policy, seed, sampling.max_tokens, sampling.max_num_seqs, settings.evaluation.temperature, "evaluate"
        )
        schedule = Schedule(settings.schedule.kind, settings.schedule.v, settings.schedule.delta)
        given = partial(offline_data.batch, count=from_file) if offline_data else _nothing
        return Parts(
            task, own_task, recipe, policy, learner, sampler, check_parity, parity, evaluator, source, schedule, given,
            str(offline_data) if offline_data else None,
        )  # fmt: skip

    def close(self) -> None:
        """End the servers that were started, and the process that renders prompts."""
        self.sampler.close()
        self.policy.templates.close()

    def keep_logs(self, run: Path) -> None:
        """The logs of the servers that were started for a run go to its directory."""
        if isinstance(self.sampler, VllmSampler):
            for number, server in enumerate(self.sampler.servers, start=1):
                server.keep_log(run / f"vllm-{number}.log")


def build_parity_check(
    settings: Settings, policy: Policy, source: PromptSource, sampler: Sampler
) -> tuple[Callable[[Policy, Any], Mapping[str, float]], Parity | None]:
    """What is called after every weight sync (see sampling/parity.py), and how far an in-process sampler agrees now.

    Raises:
        SettingsError: the in-process sampler computes something else than the learner.
    """
    if not settings.sampling.parity_check:
        return _skip_parity_check, None
    parity_prompts = source.parity_prompts(PARITY_PROMPTS)
    if isinstance(sampler, VllmSampler):
        return ParityCheck(parity_prompts, sampler.dtype, settings.vllm.tolerance), None
    assert isinstance(sampler, LocalSampler)
    parity_check = ParityCheck(parity_prompts, policy.dtype)
    with refusing("model.path", ParityError):
        return parity_check, parity_check.start(policy, sampler)


def _skip_parity_check(policy: Policy, sampler: Any) -> Mapping[str, float]:
    return {}


def _nothing(b: int) -> Sequence[Group]:
    return ()


def offline_prompts(settings: Settings) -> int:
    """How many prompts of each batch come from a file of completions: the share of N, at least one."""
    if settings.offline.data is None:
        return 0
    return max(1, round(settings.offline.share * settings.schedule.prompts))


def build_offline(settings: Settings, recipe: Recipe, policy: Policy) -> OfflineData:
    """The completions of settings.offline.data.

    Raises:
        SettingsError: a file that cannot be used, or one without log-probs for a recipe that reads log α.
    """
    sampling = settings.sampling
    with refusing("offline.data"):
        assert settings.offline.data is not None
        offline_data = OfflineData(
            settings.offline.data,
            policy,
            sampling.G,
            settings.run.seed,
            settings.task.system_prompt,
            max_prompt_tokens=sampling.max_prompt_tokens,
            reads_logp=recipe.needs_logp_alpha,
        )
    if recipe.needs_logp_alpha and not offline_data.has_logp:
        raise SettingsError(
            f"offline.data = {', '.join(settings.offline.data)} does not say how likely its completions were "
            f"(logp_alpha), and recipe {recipe.name!r} reads that; use one that does not, such as reinforce, asymre, "
            "red_drop, red_weight"
        )
    if offline_data.longest > sampling.max_tokens:
        raise SettingsError(
            f"offline.data has a completion of {offline_data.longest} tokens; sampling.max_tokens is "
            f"{sampling.max_tokens}"
        )
    return offline_data


def optimization(settings: Settings) -> Optimization:
    """AdamW and its schedule over all S·M·i updates."""
    o, s = settings.optimizer, settings.schedule
    return Optimization(
        lr=o.lr,
        betas=(o.beta1, o.beta2),
        weight_decay=o.weight_decay,
        max_grad_norm=o.max_grad_norm or None,
        schedule=o.schedule,
        warmup=o.warmup,
        updates=s.stages * s.batches * s.i,
        masters=o.masters,
        seed=settings.run.seed,
    )


def advantage_of(recipe: Recipe, seed: int, max_tokens: int):
    """advantage(b)(rewards_G, lengths_G, g): the recipe's, with random numbers addressed by batch and group."""

    def of_batch(b: int):
        def advantage(rewards_G: Tensor, lengths_G: Tensor, g: int) -> Tensor:
            uniform_G = torch.from_numpy(uniforms(len(rewards_G), seed, "advantage", b, g))
            return recipe.advantage(recipe.shaped(rewards_G, lengths_G, max_tokens), uniform_G)

        return advantage

    return of_batch
