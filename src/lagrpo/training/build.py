"""From settings to the parts of Algorithm 1."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lagrpo.backends.choose import choose_backend
from lagrpo.backends.cpu.build import NoKernels
from lagrpo.backends.hardware import pick_device, pick_dtype
from lagrpo.backends.process import keep_freed_memory
from lagrpo.data.offline import OfflineData
from lagrpo.data.prompts import PromptSource
from lagrpo.errors import SettingsError, refusing
from lagrpo.objective.compose import Recipe
from lagrpo.policy.chat import Templates
from lagrpo.policy.embedded import resolve_model
from lagrpo.policy.learner import Learner, Optimization
from lagrpo.policy.loading import check_context, check_files, load_policy
from lagrpo.policy.model import Policy
from lagrpo.policy.replica import replica
from lagrpo.sampling.base import Sampler
from lagrpo.sampling.local import LocalSampler
from lagrpo.sampling.parity import PARITY_PROMPTS, Parity, ParityCheck, ParityError
from lagrpo.sampling.prefetch import Prefetcher
from lagrpo.sampling.schedule import Schedule
from lagrpo.sampling.vllm.connecting import build_vllm, open_servers
from lagrpo.sampling.vllm.sampler import VllmSampler
from lagrpo.sampling.vllm.server import Server
from lagrpo.settings.schema import EvalSettings, ModelSettings, Settings
from lagrpo.tasks import Task, TaskSettings, load_task
from lagrpo.threads import team
from lagrpo.training.checks import chat_template
from lagrpo.types import Group
from lagrpo.verify import Verifier

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
    dtype = DTYPES[pick_dtype(model.dtype, device)[0]]
    with refusing("model.kernels", NoKernels):
        backend = choose_backend(model.kernels, device, dtype)
    with loading(model), without_progress_bars():
        policy = load_policy(resolve_model(model.path), dtype, device, tau, chat_template(model), templates, backend)
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
    """transformers' own bars (loading and writing weights take a second) out of the way; bars of downloads stay."""
    from transformers.utils import logging

    with _QUIET:
        before = logging.set_tqdm_hook(lambda factory, args, kwargs: logging.EmptyTqdm(*args, **kwargs))
        try:
            yield
        finally:
            logging.set_tqdm_hook(before)


@dataclass(frozen=True, slots=True)
class Parts:
    """What a run is made of."""

    settings: Settings
    task: Task
    own_task: bool
    """the caller gave the task as an object"""
    learner: Learner
    """with the policy, the recipe and the reference"""
    sampler: Sampler
    evaluator: LocalSampler
    prefetcher: Prefetcher
    prompts: PromptSource
    offline: OfflineData | None
    """completions of a file"""
    verifier: Verifier
    schedule: Schedule
    check_parity: Callable[[Policy, Any], Mapping[str, float]] | None
    """raises unless the sampler serves the weights that were synced; None where the run asks for no check"""

    @staticmethod
    def build(settings: Settings, recipe: Recipe, task: Task | None = None) -> Parts:
        """The task's data first, then the model: what is cheap to refuse is refused first. Whatever was started is
        ended where something fails.

        Raises:
            SettingsError: data or a model that is not there, or that the settings do not fit.
        """
        with ExitStack() as undo:
            servers = []
            if settings.sampling.sampler == "vllm":  # starting them writes files and takes minutes
                with loading(settings.model), without_progress_bars():
                    check_files(resolve_model(settings.model.path))
                servers = [undo.enter_context(closing(server)) for server in open_servers(settings)]
            parts = Parts._build(settings, recipe, task, servers, undo)
            undo.pop_all()
            return parts

    @staticmethod
    def _build(
        settings: Settings, recipe: Recipe, own: Task | None, servers: Sequence[Server], undo: ExitStack
    ) -> Parts:
        sampling, seed = settings.sampling, settings.run.seed
        task = own if own is not None else build_task(settings.task, seed)
        templates = undo.enter_context(closing(Templates()))
        longest = sampling.max_prompt_tokens + sampling.max_tokens
        policy = build_policy(settings.model, sampling.temperature, longest, templates)
        prompts = build_prompts(settings, task, policy)
        offline = build_offline(settings, recipe, policy) if settings.offline.data else None
        learner = build_learner(settings, recipe, policy)
        sampler = (
            build_vllm(settings, policy, servers)
            if servers
            else LocalSampler(replica(policy), seed, sampling.max_tokens, sampling.max_num_seqs)
        )
        return Parts(
            settings=settings,
            task=task,
            own_task=own is not None,
            learner=learner,
            sampler=sampler,
            evaluator=build_evaluator(settings, policy),
            prefetcher=Prefetcher(sampler, prompts.batch, sampling.G),
            prompts=prompts,
            offline=offline,
            check_parity=build_parity_check(settings, policy, prompts, sampler) if sampling.parity_check else None,
            schedule=Schedule(settings.schedule.kind, settings.schedule.v, settings.schedule.delta),
            verifier=undo.enter_context(build_verifier(settings, task)),
        )

    @property
    def parity(self) -> Parity | None:
        """How far learner and in-process sampler agree; None where that was not asked or the sampler is vLLM."""
        return self.check_parity.parity if isinstance(self.check_parity, ParityCheck) else None

    @property
    def one_program(self) -> bool:
        """Whether the sampler computes as the learner does, up to rounding."""
        return isinstance(self.sampler, LocalSampler)

    @property
    def prefetches(self) -> bool:
        """Whether all batches up to the next weight sync are asked for at once."""
        return self.settings.sampling.prefetch and not self.settings.sampling.dynamic_sampling

    def read_offline(self, b: int) -> Sequence[Group]:
        """The groups of batch b that come from a file."""
        return self.offline.batch(b, offline_prompts(self.settings)) if self.offline is not None else ()

    def close(self) -> None:
        """End the workers, the servers that were started, and the process that renders prompts."""
        with ExitStack() as last:  # each, whatever becomes of the others
            for part in (self.learner.policy.chat.templates, self.sampler, self.verifier):
                last.callback(part.close)

    def keep_logs(self, run: Path) -> None:
        """The logs of the servers that were started for a run go to its directory."""
        if isinstance(self.sampler, VllmSampler):
            for number, server in enumerate(self.sampler.servers, start=1):
                server.keep_log(run / f"vllm-{number}.log")


def build_prompts(settings: Settings, task: Task, policy: Policy) -> PromptSource:
    """The prompts of every batch, all of them tokenized once: one that cannot be asked shows before the run is made."""
    fresh = settings.schedule.prompts - offline_prompts(settings)
    prompts = PromptSource(task, policy, settings.run.seed, fresh, settings.sampling.max_prompt_tokens)
    prompts.tokenized("train", 0)  # a chat template that cannot be rendered shows here
    with refusing("task"):
        prompts.check(settings.schedule.stages * settings.schedule.batches)
    return prompts


def build_learner(settings: Settings, recipe: Recipe, policy: Policy) -> Learner:
    """The learner, with a reference where the recipe has a KL term."""
    reference = replica(policy) if recipe.needs_pi_ref else None
    checkpointing = settings.optimizer.activation_checkpointing
    return Learner(policy, recipe, optimization(settings), reference, checkpointing, settings.run.entropy)


def build_evaluator(settings: Settings, policy: Policy) -> LocalSampler:
    """What samples for evaluations: the learner's policy itself."""
    s = settings.sampling
    return LocalSampler(
        policy, settings.run.seed, s.max_tokens, s.max_num_seqs, settings.evaluation.temperature, "evaluate"
    )


def build_verifier(settings: Settings | EvalSettings, task: Task) -> Verifier:
    """The judge of the task in worker processes. Raises SettingsError for one that cannot be sent to them."""
    v = settings.verifier
    with refusing("task", TypeError):
        return Verifier(task.judge, workers=v.workers, deadline=v.deadline, max_without_reward=v.max_without_reward)


def build_parity_check(settings: Settings, policy: Policy, source: PromptSource, sampler: Sampler) -> ParityCheck:
    """What is called after every weight sync (see sampling/parity.py).

    Raises:
        SettingsError: the in-process sampler computes something else than the learner.
    """
    parity_prompts = source.parity_prompts(PARITY_PROMPTS)
    if isinstance(sampler, VllmSampler):
        return ParityCheck(parity_prompts, sampler.weights.dtype, settings.vllm.tolerance)
    assert isinstance(sampler, LocalSampler)
    check = ParityCheck(parity_prompts, policy.dtype)
    with refusing("model.path", ParityError):
        check.start(policy, sampler)
    return check


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
