"""From settings to the parts of Algorithm 1. The data comes first, then the model: errors that are cheap to find come
first."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from lagrpo.core.objective import Recipe
from lagrpo.cpu.library import NoKernels
from lagrpo.data.fingerprint import Digests, check_places, digest_places, digest_visited
from lagrpo.data.offline import OfflineData, read_records
from lagrpo.data.prompts import PromptSource
from lagrpo.errors import SettingsError, as_settings_error
from lagrpo.model.backend import choose_backend, chosen_kernels, pick_device, pick_dtype
from lagrpo.model.chat import Chat
from lagrpo.model.embedded import is_adapter, resolve_model
from lagrpo.model.files import save_model
from lagrpo.model.loading import check_context, check_files, load_config, load_policy, quiet
from lagrpo.model.lora import Lora, load_adapter_config
from lagrpo.model.model import Policy, copy_policy, fingerprint
from lagrpo.rewards import builtin
from lagrpo.rewards.pool import RewardPool
from lagrpo.rewards.reward import Rewards
from lagrpo.rollout.base import Request
from lagrpo.rollout.episodes import MAIN_TASK, Episodes, build_episodes, max_reply_tokens
from lagrpo.rollout.local import LocalSampler
from lagrpo.rollout.prefetch import Prefetcher
from lagrpo.rollout.schedule import LoopState, Schedule, SyncDecision
from lagrpo.rollout.sync_check import CHECK_PROMPTS, WeightSyncCheck, WeightSyncError
from lagrpo.rollout.vllm.client import VllmClient
from lagrpo.rollout.vllm.engine import VllmEngine, build_engine
from lagrpo.rollout.vllm.server import StartedServer, open_servers
from lagrpo.settings.schema import Settings
from lagrpo.settings.sections import ModelSettings
from lagrpo.tasks import Task, complete_task, drop_overlong, load_task
from lagrpo.training import fsdp
from lagrpo.training.checks import chat_template, offline_prompts
from lagrpo.training.ranks import FirstRankSampler, Ranks
from lagrpo.training.trainer import Optimization, Trainer
from lagrpo.types import Group, Prompt

logger = logging.getLogger("lagrpo")
Engine = LocalSampler | VllmEngine | FirstRankSampler


@dataclass(frozen=True, slots=True)
class TaskSetup:
    """A task as a run uses it: its prompts, what scores its completions, and what they talk to, if anything."""

    task: Task
    prompts: PromptSource
    reward_pool: RewardPool
    episodes: Episodes | None


@dataclass(frozen=True, slots=True)
class TrainerComponents:
    """What a run is made of, on this rank."""

    settings: Settings
    tasks: Mapping[
        str, TaskSetup
    ]  # of the run (MAIN_TASK), and of evaluation sets with their own, by name
    own_task: bool  # the caller gave the run's task as an object
    model: str  # the fingerprint of the initial weights
    data: Digests
    """the digests of all rows (`places`) and of the prompts that the run visits (`visited`)"""
    trainer: Trainer  # with the policy, the recipe and the reference
    sampler: Engine
    evaluator: Engine
    share: Callable[
        [Sequence[Request]], list[Request]
    ]  # the requests that this rank samples and scores
    prefetcher: Prefetcher
    offline: OfflineData | None  # completions of files
    schedule: Schedule
    check_weight_sync: WeightSyncCheck
    ranks: Ranks
    skeleton: Any  # the model of transformers without its numbers, if layers are sharded
    processes: ExitStack  # ends workers, and servers that were started

    @staticmethod
    def build(
        settings: Settings,
        recipe: Recipe,
        task: Task | None = None,
        ranks: Ranks | None = None,
        started: str | None = None,
        recorded: Mapping[str, Any] | None = None,
    ) -> TrainerComponents:
        """`task` replaces settings.task. `started`: when the run began, if it resumes; chat templates show that date.
        `recorded`: the digests of the rows that it began with, by place. Raises SettingsError for data or a model that
        is missing, does not fit, or has changed."""
        ranks = ranks or Ranks()
        with ExitStack() as undo:
            loaded = load_tasks(settings, task)
            with as_settings_error("offline.data"):
                records = read_records(settings.offline.data) if settings.offline.data else []
                check_logp(
                    recipe,
                    not records or any(row.get("rollout_logprobs") is not None for row in records),
                )
            places = digest_places(loaded, records, settings.eval.takes_place)
            with as_settings_error():
                check_places(recorded or {}, places)
            replied = max_reply_tokens(settings, *loaded.values())
            if ranks.is_first:
                print(f"loading {settings.model.path} …", flush=True)
            servers = start_servers(settings, replied, undo) if ranks.is_first else []
            s, seed = settings.rollout, settings.run.seed
            policy = build_policy(settings.model, s.temperature, settings.longest + replied, seed)
            now = datetime.now(UTC).isoformat(timespec="seconds")
            moment = datetime.fromisoformat(ranks.on_rank0(lambda: started or now))
            policy = replace(policy, chat=replace(policy.chat, started=moment))
            model = check_same_model(ranks, fingerprint(policy.all_weights))
            tasks = set_up_tasks(settings, loaded, policy, undo)
            prompts = tasks[MAIN_TASK].prompts
            with as_settings_error("task"):
                prompts.check(settings.schedule.batches)
                if ranks.is_first:
                    first_prompt = prompts.check_prompts(1)[0].prompt
                    warn_of_formats(tasks[MAIN_TASK].task.reward, first_prompt, policy.chat)
            data = {"places": places, "visited": digest_visited(prompts.visited)}
            offline = build_offline(settings, recipe, policy, records) if records else None
            sampler = build_sampler(settings, policy, servers, tasks[MAIN_TASK].episodes, ranks)
            share = ranks.share
            if s.engine == "vllm":
                share = lambda requests: list(requests) if ranks.is_first else []  # noqa: E731
            undo.callback(sampler.close)
            skeleton = fsdp.without_values(policy.model.lm) if ranks.mesh is not None else None
            evaluator = build_evaluator(settings, policy, sampler, ranks)
            trainer = build_trainer(settings, recipe, policy, ranks)
            if isinstance(evaluator, fsdp.EvaluationSampler):
                evaluator.source = trainer.policy
            return TrainerComponents(
                settings=settings,
                tasks=tasks,
                own_task=task is not None,
                model=model,
                data=data,
                trainer=trainer,
                sampler=sampler,
                evaluator=evaluator,
                share=share,
                offline=offline,
                ranks=ranks,
                skeleton=skeleton,
                prefetcher=Prefetcher(
                    sampler, lambda b: share(prompts.batch(b)), s.num_generations
                ),
                schedule=Schedule(
                    settings.schedule.kind, settings.schedule.v, settings.schedule.sync_at_kl
                ),
                check_weight_sync=build_weight_sync_check(trainer.policy, prompts, sampler),
                processes=undo.pop_all(),
            )

    @property
    def main(self) -> TaskSetup:
        """The task that the run trains on; evaluation sets may have others."""
        return self.tasks[MAIN_TASK]

    @property
    def samples_here(self) -> bool:
        """Whether this process samples, computing as the trainer does, up to rounding."""
        return isinstance(self.sampler, LocalSampler)

    def next_sync(self, state: LoopState, further: int = 0) -> SyncDecision:
        """What the schedule says of the batch after `state`, if the run has `further` batches."""
        s, ahead = self.settings.schedule, not self.settings.rollout.dynamic_sampling_rounds
        return self.schedule.next(state, s.batches + further, s.stage_length, ahead)

    def read_offline(self, b: int) -> Sequence[Group]:
        """The groups of batch b that come from a file, on rank 0."""
        if self.offline is None or not self.ranks.is_first:
            return ()
        return self.offline.batch(b, offline_prompts(self.settings))

    def gather_policy(self) -> Callable[[Path], None]:
        """What writes π as it is now into a directory, on rank 0: a model, or its adapter. Collective."""
        policy, skeleton = self.trainer.policy, self.skeleton
        if skeleton is None:
            return policy.save
        whole = self.ranks.gather_whole(policy.weights)

        def save(directory: Path) -> None:
            save_model(skeleton, directory, whole)
            policy.chat.save(directory)

        return save

    def keep_logs(self, run: Path) -> None:
        own = self.sampler.own if isinstance(self.sampler, FirstRankSampler) else self.sampler
        for server in own.servers if isinstance(own, VllmEngine) else ():
            if isinstance(server, StartedServer) and server.log.is_file():
                server.log = server.log.rename(
                    run / f"vllm-{1 + len([*run.glob('vllm-*.log')])}.log"
                )

    def close(self) -> None:
        self.processes.close()


# Data


def load_tasks(settings: Settings, task: Task | None = None) -> dict[str, Task]:
    """The run's task, as MAIN_TASK, and those of evaluation sets with their own, by the set's name.

    A `task` replaces settings.task.
    """
    own = settings.task
    with as_settings_error():
        main = load_task(own, settings.run.seed) if task is None else complete_task(task, own.tools)
    tasks = {MAIN_TASK: main}
    for each in settings.eval.sets:
        if each.task is not None:
            with as_settings_error(f"eval.sets, {each.name!r}"):
                tasks[each.name] = load_task(each.task, settings.run.seed)
    return tasks


def set_up_tasks(
    settings: Settings, tasks: Mapping[str, Task], policy: Policy, undo: ExitStack
) -> dict[str, TaskSetup]:
    """Tasks with their prompts, tokenized once, reward workers and environments. Raises SettingsError."""
    found = {}
    N, s = settings.schedule.prompts_per_batch - offline_prompts(settings), settings.rollout
    for name, task in tasks.items():
        if (episodes := build_episodes(settings, task, policy.chat)) is not None:
            undo.enter_context(episodes.pool)
        with as_settings_error("task"):
            task = drop_overlong(task, s, policy.chat)
            prompts = PromptSource(
                task, policy, settings.run.seed, N, s.max_prompt_length, episodes
            )
            pool = undo.enter_context(
                RewardPool(task.reward, deadline=settings.task.reward_timeout)
            )
        found[name] = TaskSetup(task, prompts, pool, episodes)
    return found


def warn_of_formats(reward: Any, prompt: Prompt, chat: Chat) -> None:
    """Warn of a built-in reward `format` that no completion can get: tokens that end completions are not in their text,
    and what the chat template begins an answer with may not fit."""
    for part in Rewards.from_reward(reward).parts:
        function = getattr(part.function, "func", part.function)
        if function is not builtin.format:
            continue
        options = getattr(part.function, "keywords", {})
        name = part.name or "format"
        if (pattern := options.get("pattern")) is not None:
            plain_pattern = pattern.replace("\\", "")
            silent = [token for token, n in chat.special_tokens.items() if n in chat.silent_ids]
            if inner := [token for token in silent if token in plain_pattern]:
                text = (
                    "the reward %r has %s in its pattern, which is not in the text of completions"
                )
                logger.warning(text, name, inner[0])
            continue
        example = builtin.format_example(options.get("tags"))
        text = prompt.prefix + chat.as_completion(example.removeprefix(prompt.prefix.strip()))
        if not part.function(completion=text):
            message = "no completion can get the reward %r: %r would be read as %r"
            logger.warning(message, name, example, text)


def build_offline(settings: Settings, recipe: Recipe, policy: Policy, records: Any) -> OfflineData:
    """The completions of these records. Raises SettingsError for those that model or recipe cannot use."""
    sampling = settings.rollout
    with as_settings_error("offline.data"):
        found = OfflineData(
            records,
            policy,
            sampling.num_generations,
            settings.run.seed,
            system_prompt=settings.task.system_prompt,
            max_prompt_tokens=sampling.max_prompt_length,
            max_completion_tokens=sampling.max_completion_length,
            reads_logp=recipe.needs_rollout_logp,
        )
        check_logp(recipe, found.has_logp)
    return found


def check_logp(recipe: Recipe, known: bool) -> None:
    """Raise ValueError for offline completions without log-probs if the recipe reads log α."""
    if recipe.needs_rollout_logp and not known:
        what = f"it has no rollout_logprobs, which loss.recipe = {recipe.name!r} needs"
        raise ValueError(f"{what}; recipes that do not: reinforce, asymre, red_drop, red_weight")


# The model


def build_policy(model: ModelSettings, tau: float, longest: int, seed: int = 0) -> Policy:
    """The policy at temperature tau, for sequences of `longest` tokens; `seed` keys the start of adapters."""
    device = pick_device()
    dtype = getattr(torch, pick_dtype(model.dtype, device)[0])
    with as_settings_error("LAGRPO_KERNELS", NoKernels):
        backend = choose_backend(chosen_kernels(), device, dtype)
    given = chat_template(model), backend, lora_of(model, seed), model.chat_template_kwargs
    with loading(model):
        path = resolve_model(model.path)
        base = resolve_model(load_adapter_config(Path(path))[1]) if is_adapter(path) else path
        check_context(load_config(base), longest)
        return load_policy(path, dtype, device, tau, *given)


def lora_of(model: ModelSettings, seed: int = 0) -> Lora | None:
    """The adapters that the settings ask for; None for full training."""
    return (
        Lora(model.lora_r, model.lora_alpha, model.lora_target_modules, seed)
        if model.lora_r
        else None
    )


@contextmanager
def loading(model: ModelSettings) -> Iterator[None]:
    """Inside, a model is read: errors become a SettingsError, and transformers prints only errors."""
    try:
        with quiet():
            yield
    except (OSError, ValueError) as error:
        if isinstance(error, SettingsError):
            raise
        where = (
            ""
            if Path(model.path).expanduser().is_dir()
            else " (not a directory here, so from the hub)"
        )
        reason = str(error).partition("\n")[0]
        raise SettingsError(
            f"model.path = {model.path!r}{where}: the model cannot be loaded: {reason}"
        ) from error


def check_same_model(ranks: Ranks, own: str) -> str:
    """The fingerprint `own`. Raises SettingsError if another rank has another model. Collective."""
    found = ranks.gather(own)
    if strange := [rank for rank, other in enumerate(found) if other != found[0]]:
        raise SettingsError(f"model.path: model weights differ between ranks 0 and {strange[0]}")
    return own


# What samples and what learns


def start_servers(settings: Settings, replied: int, undo: ExitStack) -> list[VllmClient]:
    """The vLLM servers of a run, on their way up; none if this process samples."""
    if settings.rollout.engine != "vllm":
        return []
    with loading(settings.model):
        check_files(resolve_model(settings.model.path))
    return [undo.enter_context(closing(server)) for server in open_servers(settings, replied)]


def build_sampler(
    settings: Settings,
    policy: Policy,
    servers: list[VllmClient],
    episodes: Episodes | None,
    ranks: Ranks,
) -> Engine:
    """What samples training batches."""
    s = settings.rollout
    if s.engine != "vllm":
        given = settings.run.seed, s.max_completion_length, s.max_num_seqs
        return LocalSampler(copy_policy(policy), *given, episodes=episodes)
    engine = build_engine(settings, policy, servers, episodes) if ranks.is_first else None
    return FirstRankSampler(ranks, engine) if engine is None or ranks.size > 1 else engine


def build_evaluator(settings: Settings, policy: Policy, sampler: Engine, ranks: Ranks) -> Engine:
    """What samples evaluations: the policy itself in this process, or the servers. Before the trainer shards it."""
    if not isinstance(sampler, LocalSampler):
        return sampler
    s, sharded = settings.rollout, ranks.mesh is not None
    kind, by = (fsdp.EvaluationSampler, copy_policy(policy)) if sharded else (LocalSampler, policy)
    return kind(by, settings.run.seed, s.max_completion_length, s.max_num_seqs)


def build_trainer(settings: Settings, recipe: Recipe, policy: Policy, ranks: Ranks) -> Trainer:
    o, s = settings.optimizer, settings.schedule
    optimization = Optimization(
        lr=o.learning_rate,
        weight_decay=o.weight_decay,
        max_grad_norm=o.max_grad_norm or None,
        schedule=o.lr_scheduler_type,
        warmup=o.warmup_steps,
        masters="dithered" if o.dither_master_weights else "plain",
        offload_moments=o.offload_optimizer,
        full_rate_ess=o.scale_lr_by_ess,
        log_gradient_cosine=o.log_gradient_cosine,
        updates=s.batches * s.num_iterations,
        seed=settings.run.seed,
    )
    if ranks.mesh is None:
        reference = copy_policy(policy) if recipe.needs_pi_ref else None
    else:
        policy = fsdp.with_modules(policy)
        reference = fsdp.copy_sharded(policy, ranks.mesh) if recipe.needs_pi_ref else None
    return Trainer(policy, recipe, optimization, reference, o.gradient_checkpointing, ranks)


def build_weight_sync_check(policy: Policy, source: PromptSource, sampler: Any) -> WeightSyncCheck:
    """The check after every weight sync. Raises SettingsError if the in-process sampler computes something else than
    the trainer."""
    prompts = source.check_prompts(CHECK_PROMPTS)
    if not isinstance(sampler, LocalSampler):
        dtype = sampler.dtype if isinstance(sampler, FirstRankSampler) else sampler.weights.dtype
        return WeightSyncCheck(prompts, dtype)
    check = WeightSyncCheck(prompts, policy.dtype)
    with as_settings_error("model.path", WeightSyncError):
        check.start(policy, sampler)
    return check
