"""From settings to the parts of Algorithm 1."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lagrpo.core.objective import Recipe
from lagrpo.cpu.library import NoKernels
from lagrpo.data.offline import OfflineData
from lagrpo.data.prompts import PromptSource
from lagrpo.errors import SettingsError, refusing
from lagrpo.model.backend import choose_backend, pick_device, pick_dtype
from lagrpo.model.embedded import resolve_model
from lagrpo.model.loading import check_context, check_files, load_policy, without_progress_bars
from lagrpo.model.lora import Lora, save_adapter
from lagrpo.model.model import Policy, copy_policy, fingerprint
from lagrpo.rewards.pool import RewardPool
from lagrpo.rollout.base import Request
from lagrpo.rollout.episodes import Episodes
from lagrpo.rollout.local import LocalSampler
from lagrpo.rollout.prefetch import Prefetcher
from lagrpo.rollout.schedule import Schedule
from lagrpo.rollout.sync_check import CHECK_PROMPTS, Agreement, WeightSyncCheck, WeightSyncError
from lagrpo.rollout.vllm.client import VllmClient
from lagrpo.rollout.vllm.engine import VllmEngine, VllmEvaluator, build_engine
from lagrpo.rollout.vllm.server import StartedServer, open_servers
from lagrpo.settings.schema import ModelSettings, Settings
from lagrpo.tasks import Task
from lagrpo.training.checks import chat_template
from lagrpo.training.data import TaskSetup, build_offline, load_data, offline_prompts
from lagrpo.training.fsdp import (
    BorrowingSampler,
    copy_sharded,
    copy_whole,
    why_not_shardable,
    with_modules,
    without_values,
)
from lagrpo.training.ranks import FirstRankSampler, Ranks
from lagrpo.training.trainer import Optimization, Trainer
from lagrpo.types import Group

Evaluator = LocalSampler | VllmEvaluator
Sampling = LocalSampler | VllmEngine | FirstRankSampler


@dataclass(frozen=True, slots=True)
class TrainerComponents:
    """What a run is made of, on this rank."""

    settings: Settings
    main: TaskSetup  # the run's task
    others: Mapping[str, TaskSetup]  # tasks of evaluation sets that have their own, by the name of the set
    own_task: bool  # the caller gave the task as an object
    model: str  # the fingerprint of the initial weights
    trainer: Trainer  # with the policy, the recipe and the reference
    sampler: Sampling
    evaluator: Evaluator
    prefetcher: Prefetcher
    offline: OfflineData | None  # completions of files
    schedule: Schedule
    check_weight_sync: WeightSyncCheck | None  # None if the run asks for no check
    ranks: Ranks
    skeleton: Any  # the model of transformers without its numbers, if layers are sharded
    processes: ExitStack  # ends workers, and servers that were started

    @staticmethod
    def build(
        settings: Settings, recipe: Recipe, task: Task | None = None, ranks: Ranks | None = None
    ) -> TrainerComponents:
        """The data first, then the model: errors that are cheap to find come first. After an error, whatever was
        started is ended. Raises SettingsError for data or a model that is missing, or does not fit."""
        ranks = ranks or Ranks()
        with ExitStack() as undo:
            data = load_data(settings, task)
            servers = start_servers(settings, data.replied, undo) if ranks.is_first else []
            policy = build_policy(settings.model, settings.rollout.temperature, data.longest, settings.run.seed)
            model = check_same_model(ranks, fingerprint(policy.all_weights))
            main, others = data.set_up(policy, undo)
            offline = build_offline(settings, recipe, policy, data.records) if data.records else None
            sampler = build_sampler(settings, policy, servers, main.episodes, ranks)
            undo.callback(sampler.close)
            skeleton = without_values(policy.model.lm) if ranks.mesh is not None else None
            evaluator = build_evaluator(settings, policy, sampler, ranks)
            trainer = build_trainer(settings, recipe, policy, ranks)
            if isinstance(evaluator, BorrowingSampler):
                evaluator.source = trainer.policy
            return TrainerComponents(
                settings=settings,
                main=main,
                others=others,
                own_task=task is not None,
                model=model,
                trainer=trainer,
                sampler=sampler,
                evaluator=evaluator,
                prefetcher=Prefetcher(
                    sampler, lambda b: share(ranks, sampler, main.prompts.batch(b)), settings.rollout.num_generations
                ),
                offline=offline,
                schedule=Schedule(settings.schedule.kind, settings.schedule.sync_every, settings.schedule.delta),
                check_weight_sync=build_weight_sync_check(settings, trainer.policy, main.prompts, sampler),
                ranks=ranks,
                skeleton=skeleton,
                processes=undo.pop_all(),
            )

    @property
    def task(self) -> Task:
        return self.main.task

    @property
    def prompts(self) -> PromptSource:
        return self.main.prompts

    @property
    def reward_pool(self) -> RewardPool:
        return self.main.reward_pool

    @property
    def sampled(self) -> Policy | None:
        """The policy of the in-process sampler, which computes as the trainer does, up to rounding; None for vLLM."""
        return self.sampler.policy if isinstance(self.sampler, LocalSampler) else None

    @property
    def agreement(self) -> Agreement | None:
        """How far trainer and in-process sampler agree; None if that was not measured."""
        return self.check_weight_sync.agreement if self.check_weight_sync is not None else None

    def read_offline(self, b: int) -> Sequence[Group]:
        """The groups of batch b that come from a file, on rank 0."""
        if self.offline is None or not self.ranks.is_first:
            return ()
        return self.offline.batch(b, offline_prompts(self.settings))

    def share(self, requests: Sequence[Request]) -> list[Request]:
        """The requests of a batch that this rank samples and scores."""
        return share(self.ranks, self.sampler, requests)

    def whole_weights(self) -> dict[str, Tensor] | None:
        """What `save_policy` writes, on rank 0, if layers are sharded. Collective."""
        return None if self.ranks.mesh is None else self.ranks.gather_whole(self.trainer.policy.weights)

    def save_policy(self, directory: Path, whole: Mapping[str, Tensor] | None) -> None:
        """Write π as it is now, a model or its adapter; `whole` are `whole_weights`."""
        policy = self.trainer.policy
        if whole is None:
            return policy.save(directory)
        if policy.weights.adapters:
            save_adapter(self.skeleton, policy.weights, directory)
        else:
            self.skeleton.save_pretrained(directory, state_dict=dict(whole))
        policy.chat.save(directory)

    def keep_logs(self, run: Path) -> None:
        """Put the logs of the servers that were started for a run into its directory."""
        own = self.sampler.own if isinstance(self.sampler, FirstRankSampler) else self.sampler
        started = [s for s in own.servers if isinstance(s, StartedServer)] if isinstance(own, VllmEngine) else []
        for number, server in enumerate(started, start=1 + len([*run.glob("vllm-*.log")])):
            server.keep_log(run / f"vllm-{number}.log")

    def close(self) -> None:
        """End the workers and the servers that were started."""
        self.processes.close()


def build_policy(model: ModelSettings, tau: float, longest: int, seed: int = 0) -> Policy:
    """The policy at temperature tau, checked against the `longest` possible sequence in tokens; `seed` keys the random
    start of adapters. Raises SettingsError for a model that is missing or unsupported."""
    device = pick_device(model.device)
    dtype = getattr(torch, pick_dtype(model.dtype, device)[0])
    with refusing("model.kernels", NoKernels):
        backend = choose_backend(model.kernels, device, dtype)
    given = chat_template(model), backend, lora_of(model, seed)
    with loading(model):
        policy = load_policy(resolve_model(model.path), dtype, device, tau, *given)
    with refusing("model.path"):
        check_context(policy, longest)
    return policy


def lora_of(model: ModelSettings, seed: int = 0) -> Lora | None:
    """The adapters that the settings ask for; None for full training."""
    return Lora(model.lora_r, model.lora_alpha, model.lora_target_modules, seed) if model.lora_r else None


@contextmanager
def loading(model: ModelSettings) -> Iterator[None]:
    """Inside, a model is read: errors become a SettingsError that says where, and transformers prints only errors."""
    from transformers.utils import logging

    with without_progress_bars():
        verbosity = logging.get_verbosity()
        logging.set_verbosity_error()
        try:
            yield
        except SettingsError:
            raise
        except (OSError, ValueError) as error:
            here = Path(model.path).expanduser()
            looked = f"in {here}" if here.is_dir() else f"on the Hugging Face hub, as there is no directory {here} here"
            problem, reason = f"model.path = {model.path!r}: no model could be loaded", str(error).partition("\n")[0]
            raise SettingsError(f"{problem}. Looked {looked}: {reason}") from error
        finally:
            logging.set_verbosity(verbosity)


def check_same_model(ranks: Ranks, own: str) -> str:
    """The fingerprint `own`. Raises SettingsError if another rank has another model. Collective."""
    found = ranks.gather(own)
    if strange := [rank for rank, other in enumerate(found) if other != found[0]]:
        raise SettingsError(
            f"model weights differ between ranks 0 and {strange[0]} (model.path): fingerprints {found[0]} and "
            f"{found[strange[0]]}. All hosts need the same files"
        )
    return own


def share(ranks: Ranks, sampler: Any, requests: Sequence[Request]) -> list[Request]:
    """The requests that this rank samples: if servers do that, rank 0 has all."""
    if isinstance(sampler, FirstRankSampler):
        return list(requests) if ranks.is_first else []
    return ranks.share(requests)


def start_servers(settings: Settings, replied: int, undo: ExitStack) -> list[VllmClient]:
    """The vLLM servers of a run, on their way up; none if this process samples."""
    if settings.rollout.engine != "vllm":
        return []
    with loading(settings.model):
        check_files(resolve_model(settings.model.path))
    return [undo.enter_context(closing(server)) for server in open_servers(settings, replied)]


def build_sampler(
    settings: Settings, policy: Policy, servers: list[VllmClient], episodes: Episodes | None, ranks: Ranks
) -> Sampling:
    """What samples training batches: this process with a copy of the policy, or the servers."""
    sampling = settings.rollout
    if sampling.engine == "vllm":
        own: Any = build_engine(settings, policy, servers) if ranks.is_first else None
        if own is not None:
            own.episodes = episodes
        return FirstRankSampler(ranks, own) if own is None or ranks.size > 1 else own
    limits = sampling.max_completion_length, sampling.max_num_seqs
    sampler = LocalSampler(copy_policy(policy), settings.run.seed, *limits)
    sampler.episodes = episodes
    return sampler


def build_evaluator(settings: Settings, policy: Policy, sampler: Sampling, ranks: Ranks) -> Evaluator:
    """What samples evaluations: the policy itself in this process, or the servers. Before the trainer shards it."""
    if not isinstance(sampler, LocalSampler):
        return VllmEvaluator(sampler)
    given = settings.run.seed, settings.rollout.max_completion_length, settings.rollout.max_num_seqs
    if ranks.mesh is not None:
        return BorrowingSampler((copy_whole if policy.weights.adapters else copy_policy)(policy), *given)
    return LocalSampler(policy, *given)


def build_trainer(settings: Settings, recipe: Recipe, policy: Policy, ranks: Ranks) -> Trainer:
    """The trainer, with a reference if the recipe has a KL term. If layers are sharded, the policy given is used up.
    Raises SettingsError for a model whose layers cannot be."""
    o, s = settings.optimizer, settings.schedule
    optimization = Optimization(
        lr=o.learning_rate,
        betas=(o.beta1, o.beta2),
        weight_decay=o.weight_decay,
        max_grad_norm=o.max_grad_norm or None,
        schedule=o.lr_scheduler_type,
        warmup=o.warmup_steps,
        masters="dithered" if o.dither_master_weights else "plain",
        offload_moments=o.offload_optimizer,
        updates=s.stages * s.batches * s.num_iterations,
        seed=settings.run.seed,
    )
    if ranks.mesh is None:
        reference = copy_policy(policy) if recipe.needs_pi_ref else None
    else:
        if reason := why_not_shardable(policy):
            raise SettingsError(f"distributed.strategy = 'fsdp2' cannot shard this model: {reason}")
        policy = with_modules(policy)
        reference = copy_sharded(policy, ranks.mesh) if recipe.needs_pi_ref else None
    return Trainer(policy, recipe, optimization, reference, o.gradient_checkpointing, settings.run.entropy, ranks)


def build_weight_sync_check(
    settings: Settings, policy: Policy, source: PromptSource, sampler: Any
) -> WeightSyncCheck | None:
    """The check after every weight sync; None if the run asks for none. Raises SettingsError if the in-process sampler
    computes something else than the trainer."""
    if not settings.rollout.parity_check:
        return None
    prompts = source.check_prompts(CHECK_PROMPTS)
    if not isinstance(sampler, LocalSampler):
        return WeightSyncCheck(
            prompts, sampler.dtype if isinstance(sampler, FirstRankSampler) else sampler.weights.dtype
        )
    check = WeightSyncCheck(prompts, policy.dtype)
    with refusing("model.path", WeightSyncError):
        check.start(policy, sampler)
    return check
