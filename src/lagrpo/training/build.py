"""From settings to the parts of Algorithm 1."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from lagrpo.core.objective import Recipe
from lagrpo.cpu.library import NoKernels
from lagrpo.data.offline import OfflineData, Records, read_records
from lagrpo.data.prompts import PromptSource
from lagrpo.errors import SettingsError, refusing
from lagrpo.model.backend import choose_backend, pick_device, pick_dtype
from lagrpo.model.embedded import resolve_model
from lagrpo.model.loading import check_context, check_files, load_policy, without_progress_bars
from lagrpo.model.lora import Lora, save_adapter, save_merged
from lagrpo.model.model import AdapterWeights, Policy, PolicyCopy, copy_policy, fingerprint
from lagrpo.rewards.pool import RewardPool
from lagrpo.rollout.episodes import Episodes
from lagrpo.rollout.local import LocalSampler
from lagrpo.rollout.prefetch import Prefetcher
from lagrpo.rollout.schedule import Schedule
from lagrpo.rollout.sync_check import CHECK_PROMPTS, Agreement, WeightSyncCheck, WeightSyncError
from lagrpo.rollout.vllm.client import VllmClient
from lagrpo.rollout.vllm.engine import VllmEngine, VllmEvaluator, build_engine
from lagrpo.rollout.vllm.server import StartedServer, open_servers
from lagrpo.settings.schema import EvalSettings, ModelSettings, Settings
from lagrpo.tasks import Task, check_task, load_task
from lagrpo.tasks.environments import load_environment
from lagrpo.training.checks import chat_template
from lagrpo.training.environments import OF_RUN, check_environment, find_environment_setups, replied
from lagrpo.training.fsdp import copy_sharded, copy_whole, why_not_shardable, with_modules, without_values
from lagrpo.training.ranks import (
    FirstRankEvaluator,
    FirstRankSampler,
    RankBorrower,
    RankRewardPool,
    Ranks,
    RankSampler,
    RankTrainer,
)
from lagrpo.training.trainer import Optimization, Trainer
from lagrpo.types import Group


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


@dataclass(frozen=True, slots=True)
class RunData:
    """What a run reads before it loads a model: its task, its offline completions, and the tasks of evaluation sets
    that have their own, by the name of the set."""

    task: Task
    records: Records | None
    of_sets: Mapping[str, Task]


def load_data(settings: Settings, task: Task | None) -> RunData:
    """`task` replaces settings.task. Raises SettingsError for data that is missing or malformed."""
    with refusing():
        task = check_task(task) if task is not None else load_task(settings.task, settings.run.seed)
    of_sets = {}
    for each in settings.eval.sets:
        if each.task is not None:
            with concerning_set(each.name):
                of_sets[each.name] = other = load_task(each.task, settings.run.seed)
                check_environment(settings, getattr(other, "environment", None), each.task)
    with refusing("environment"):
        check_environment(settings, load_environment(settings.environment, task), settings.task)
    with refusing("offline.data"):
        names = settings.offline.data
        return RunData(task, read_records(names, settings.task.system_prompt) if names else None, of_sets)


@dataclass(frozen=True, slots=True)
class TrainerComponents:
    """What a run is made of, on this rank."""

    settings: Settings
    task: Task
    own_task: bool  # the caller gave the task as an object
    model: str  # the fingerprint of the initial weights
    trainer: Trainer  # with the policy, the recipe and the reference
    sampler: LocalSampler | VllmEngine | FirstRankSampler
    evaluator: LocalSampler | VllmEvaluator | FirstRankEvaluator
    prefetcher: Prefetcher
    prompts: PromptSource
    offline: OfflineData | None  # completions of files
    reward_pool: RewardPool
    schedule: Schedule
    check_weight_sync: WeightSyncCheck | None  # None if the run asks for no check
    check_evaluated: WeightSyncCheck | None = None  # of servers that evaluate
    others: Mapping[str, tuple[Task, RewardPool]] = field(default_factory=dict)  # of evaluation sets
    ranks: Ranks = field(default_factory=Ranks)
    talking: Mapping[str, Episodes] = field(default_factory=dict)  # environments of the run and of evaluation sets
    asking: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # what the prompts of these need
    skeleton: Any = None  # the model of transformers without its numbers, if layers are sharded

    @staticmethod
    def build(
        settings: Settings, recipe: Recipe, task: Task | None = None, ranks: Ranks | None = None
    ) -> TrainerComponents:
        """The data first, then the model: errors that are cheap to find come first. After an error, whatever was
        started is ended. Raises SettingsError for data or a model that is missing, or does not fit."""
        ranks = ranks or Ranks()
        with ExitStack() as undo:
            servers, data = [], load_data(settings, task)
            if settings.rollout.engine == "vllm" and ranks.is_first:
                with loading(settings.model):
                    check_files(resolve_model(settings.model.path))
                opened = open_servers(settings, replied(settings, data.task))
                servers = [undo.enter_context(closing(server)) for server in opened]
            parts = TrainerComponents._build(settings, recipe, data, task is not None, servers, undo, ranks)
            undo.pop_all()
            return parts

    @staticmethod
    def _build(
        settings: Settings, recipe: Recipe, data: RunData, own_task: bool, servers: list[VllmClient], undo: ExitStack,
        ranks: Ranks,
    ) -> TrainerComponents:  # fmt: skip
        task = data.task
        longest = settings.longest + replied(settings, task, *data.of_sets.values())
        policy = build_policy(settings.model, settings.rollout.temperature, longest, settings.run.seed)
        model = check_same_model(ranks, fingerprint(policy.all_weights))
        talks = find_environment_setups(settings, task, data.of_sets, policy.chat)
        talking = {name: talk.start(settings, policy.chat, undo) for name, talk in talks.items()}
        asking = {name: talk.asking(talking[name]) for name, talk in talks.items()}
        prompts = build_prompts(settings, task, policy, asking.get(OF_RUN, {}))
        offline = build_offline(settings, recipe, policy, data.records) if data.records else None
        sampler = build_sampler(settings, policy, servers, talking.get(OF_RUN), ranks)
        skeleton = without_values(policy.model.lm) if ranks.mesh is not None else None
        trainer, evaluator = build_trainer(settings, recipe, policy, ranks)
        policy, evaluator.known = trainer.policy, talking
        reward_pool = undo.enter_context(build_reward_pool(settings, task, ranks))
        others = {
            name: (each, undo.enter_context(build_reward_pool(settings, each, ranks)))
            for name, each in data.of_sets.items()
        }
        check = build_weight_sync_check(settings, policy, prompts, sampler) if settings.rollout.parity_check else None
        lent = settings.eval.sampler == "vllm" and not isinstance(sampler, LocalSampler)
        return TrainerComponents(
            settings=settings,
            task=task,
            own_task=own_task,
            model=model,
            trainer=trainer,
            sampler=sampler,
            evaluator=build_vllm_evaluator(sampler) if lent else evaluator,
            prefetcher=Prefetcher(sampler, prompts.batch, settings.rollout.num_generations),
            prompts=prompts,
            offline=offline,
            reward_pool=reward_pool,
            schedule=Schedule(settings.schedule.kind, settings.schedule.sync_every, settings.schedule.delta),
            check_weight_sync=check,
            check_evaluated=build_weight_sync_check(settings, policy, prompts, sampler) if check and lent else None,
            others=others,
            asking=asking,
            ranks=ranks,
            talking=talking,
            skeleton=skeleton,
        )

    @property
    def sampled(self) -> Policy | PolicyCopy | None:
        """The policy of the in-process sampler, which computes as the trainer does, up to rounding; None for vLLM."""
        return self.sampler.policy if isinstance(self.sampler, LocalSampler) else None

    @property
    def agreement(self) -> Agreement | None:
        """How far trainer and in-process sampler agree; None if that was not measured."""
        return self.check_weight_sync.agreement if self.check_weight_sync is not None else None

    def read_offline(self, b: int) -> Sequence[Group]:
        """The groups of batch b that come from a file."""
        return self.offline.batch(b, offline_prompts(self.settings)) if self.offline is not None else ()

    def whole_weights(self) -> dict[str, Tensor] | None:
        """What `save_policy` writes, on rank 0, if layers are sharded. Collective."""
        policy = self.trainer.policy
        if self.ranks.mesh is None:
            return None
        return self.ranks.gather_whole(policy.all_weights if self.settings.model.lora_merge else policy.weights)

    def save_policy(self, directory: Path, whole: Mapping[str, Tensor] | None) -> None:
        """Write π as it is now, a model or its adapter; `whole` are `whole_weights`."""
        policy, merge = self.trainer.policy, self.settings.model.lora_merge
        if whole is None:
            return policy.save_merged(directory) if merge else policy.save(directory)
        if merge:
            save_merged(self.skeleton, directory, dict(whole))
        elif isinstance(policy.weights, AdapterWeights):
            save_adapter(self.skeleton, policy.weights, directory)
        else:
            self.skeleton.save_pretrained(directory, state_dict=dict(whole))
        policy.chat.save(directory)

    def close(self) -> None:
        """End the workers and the servers that were started."""
        judges = [judge for _, judge in self.others.values()]
        with ExitStack() as last:
            for part in (self.sampler, self.reward_pool, *judges):
                last.callback(part.close)
            for episodes in self.talking.values():
                last.callback(episodes.environments.close)

    def keep_logs(self, run: Path) -> None:
        """Put the logs of the servers that were started for a run into its directory."""
        own = self.sampler.own if isinstance(self.sampler, FirstRankSampler) else self.sampler
        if isinstance(own, VllmEngine):
            earlier = len([*run.glob("vllm-*.log")])  # of the servers of a run that is resumed
            for number, server in enumerate(own.servers, start=1 + earlier):
                if isinstance(server, StartedServer):
                    server.keep_log(run / f"vllm-{number}.log")


@contextmanager
def concerning_set(name: str) -> Iterator[None]:
    """Inside, errors of settings and data name the evaluation set."""
    try:
        with refusing():
            yield
    except SettingsError as error:
        raise SettingsError(f"eval.sets, {name!r}: {error}") from error


def check_same_model(ranks: Ranks, own: str) -> str:
    """The fingerprint `own`. Raises SettingsError if another rank has another model. Collective."""
    found = ranks.gather(own)
    if strange := [rank for rank, other in enumerate(found) if other != found[0]]:
        raise SettingsError(
            f"model weights differ between ranks 0 and {strange[0]} (model.path): fingerprints {found[0]} and "
            f"{found[strange[0]]}. All hosts need the same files"
        )
    return own


def build_prompts(
    settings: Settings, task: Task, policy: Policy, asking: Mapping[str, Any] = MappingProxyType({})
) -> PromptSource:
    """The prompts of every batch, all tokenized once, so that a bad one is found before the run is made. `asking` is
    what an environment's prompts need."""
    fresh = settings.schedule.prompts_per_batch - offline_prompts(settings)
    prompts = PromptSource(task, policy, settings.run.seed, fresh, settings.rollout.max_prompt_length, **asking)
    prompts.tokenized("train", 0)  # a chat template that cannot be rendered
    with refusing("task"):
        prompts.check(settings.schedule.stages * settings.schedule.batches)
    return prompts


def build_sampler(
    settings: Settings, policy: Policy, servers: list[VllmClient], episodes: Episodes | None, ranks: Ranks
) -> LocalSampler | VllmEngine | FirstRankSampler:
    """What samples training batches: this process with a copy of the policy, or the servers."""
    sampling = settings.rollout
    if sampling.engine == "vllm":
        own: Any = build_engine(settings, policy, servers) if ranks.is_first else None
        if own is not None:
            own.episodes = episodes
        return FirstRankSampler(ranks, own) if own is None or ranks.size > 1 else own
    given = copy_policy(policy), settings.run.seed, sampling.max_completion_length, sampling.max_num_seqs
    sampler = LocalSampler(*given) if ranks.size == 1 else RankSampler(ranks, *given)
    sampler.episodes = episodes
    return sampler


def build_vllm_evaluator(sampler: Any) -> VllmEvaluator | FirstRankEvaluator:
    return FirstRankEvaluator(sampler) if isinstance(sampler, FirstRankSampler) else VllmEvaluator(sampler)


def build_trainer(settings: Settings, recipe: Recipe, policy: Policy, ranks: Ranks) -> tuple[Trainer, LocalSampler]:
    """The trainer, with a reference if the recipe has a KL term, and what samples evaluations from its policy. If
    layers are sharded, the policy given is used up. Raises SettingsError for a model whose layers cannot be."""
    o, s = settings.optimizer, settings.schedule
    same = {"lr": o.learning_rate, "weight_decay": o.weight_decay, "schedule": o.lr_scheduler_type}
    same |= {"warmup": o.warmup_steps, "masters": "dithered" if o.dither_master_weights else "plain"}
    same |= {"offload_moments": o.offload_optimizer}
    betas, max_grad_norm, updates = (o.beta1, o.beta2), o.max_grad_norm or None, s.stages * s.batches * s.num_iterations
    optimization = Optimization(
        **same, betas=betas, max_grad_norm=max_grad_norm, updates=updates, seed=settings.run.seed
    )
    evaluating = (
        *(settings.run.seed, settings.rollout.max_completion_length, settings.rollout.max_num_seqs),
        *(settings.eval.temperature, "evaluate"),
    )
    given = o.gradient_checkpointing, settings.run.entropy
    if ranks.mesh is None:
        reference = copy_policy(policy) if recipe.needs_pi_ref else None
        if ranks.size == 1:
            return Trainer(policy, recipe, optimization, reference, *given), LocalSampler(policy, *evaluating)
        trainer = RankTrainer(ranks, policy, recipe, optimization, reference, *given)
        return trainer, RankSampler(ranks, policy, *evaluating)
    if reason := why_not_shardable(policy):
        raise SettingsError(f"distributed.strategy = 'fsdp2' cannot shard this model: {reason}")
    whole = copy_whole if isinstance(policy.weights, AdapterWeights) else copy_policy
    evaluator, policy = RankBorrower(ranks, whole(policy), *evaluating), with_modules(policy)
    reference = copy_sharded(policy, ranks.mesh) if recipe.needs_pi_ref else None
    trainer = RankTrainer(ranks, policy, recipe, optimization, reference, *given)
    evaluator.source = trainer.policy
    return trainer, evaluator


def build_reward_pool(settings: Settings | EvalSettings, task: Task, ranks: Ranks | None = None) -> RewardPool:
    """The task's rewards in worker processes. Raises SettingsError for functions of another signature."""
    with refusing("task"):
        if ranks is None or ranks.size == 1:
            return RewardPool(task.reward, **settings.verifier.of_a_batch)
        return RankRewardPool(ranks, task.reward, **settings.verifier.of_a_batch)


def build_weight_sync_check(settings: Settings, policy: Policy, source: PromptSource, sampler: Any) -> WeightSyncCheck:
    """The check after every weight sync. Raises SettingsError if the in-process sampler computes something else than
    the trainer."""
    check_prompts = source.check_prompts(CHECK_PROMPTS)
    if not isinstance(sampler, LocalSampler):
        return WeightSyncCheck(
            check_prompts, sampler.dtype if isinstance(sampler, FirstRankSampler) else sampler.weights.dtype
        )
    check = WeightSyncCheck(check_prompts, policy.dtype)
    with refusing("model.path", WeightSyncError):
        check.start(policy, sampler)
    return check


def offline_prompts(settings: Settings) -> int:
    """How many prompts of each batch come from a file of completions: the share of N, at least one."""
    data, share = settings.offline.data, settings.offline.fraction
    return max(1, round(share * settings.schedule.prompts_per_batch)) if data is not None else 0


def build_offline(settings: Settings, recipe: Recipe, policy: Policy, records: Records) -> OfflineData:
    """The completions of settings.offline.data. Raises SettingsError for those that cannot be used with the model, and
    for files without log-probs if the recipe reads log α."""
    sampling, data = settings.rollout, settings.offline.data
    assert data is not None
    with refusing("offline.data"):
        limits = {"max_prompt_tokens": sampling.max_prompt_length, "reads_logp": recipe.needs_logp_alpha}
        found = OfflineData(records, policy, sampling.num_generations, settings.run.seed, **limits)
    if recipe.needs_logp_alpha and not found.has_logp:
        raise SettingsError(
            f"offline.data = {', '.join(data)} does not say how likely its completions were (rollout_logprobs), and "
            f"recipe {recipe.name!r} reads that; use one that does not, such as reinforce, asymre, red_drop, red_weight"
        )
    if found.longest > sampling.max_completion_length:
        has = f"offline.data has a completion of {found.longest} tokens"
        raise SettingsError(f"{has}; rollout.max_completion_length is {sampling.max_completion_length}")
    return found
