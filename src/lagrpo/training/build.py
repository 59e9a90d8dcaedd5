"""From settings to the parts of Algorithm 1."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from lagrpo.backends.choose import choose_backend
from lagrpo.backends.cpu.build import NoKernels
from lagrpo.backends.hardware import pick_device, pick_dtype
from lagrpo.backends.process import keep_freed_memory
from lagrpo.data.offline import OfflineData, Records, read_records
from lagrpo.data.prompts import PromptSource
from lagrpo.errors import SettingsError, refusing
from lagrpo.model.adapter_files import Lora
from lagrpo.model.chat import Templates
from lagrpo.model.embedded import resolve_model
from lagrpo.model.layered import make_layered_replica, make_whole_replica, why_not, with_modules, without_numbers
from lagrpo.model.learner import Learner, Optimization
from lagrpo.model.loading import check_context, check_files, load_policy
from lagrpo.model.masters import fingerprint
from lagrpo.model.model import AdapterWeights, Policy
from lagrpo.model.replica import Replica, replica
from lagrpo.objective.compose import Recipe
from lagrpo.ranks.world import World
from lagrpo.rollout.episodes import Episodes
from lagrpo.rollout.local import BorrowingSampler, LocalSampler
from lagrpo.rollout.parity import PARITY_PROMPTS, Parity, ParityCheck, ParityError
from lagrpo.rollout.prefetch import Prefetcher
from lagrpo.rollout.schedule import Schedule
from lagrpo.rollout.vllm.client import VllmClient
from lagrpo.rollout.vllm.engine import VllmEngine, VllmEvaluator, build_engine
from lagrpo.rollout.vllm.server import open_servers
from lagrpo.settings.schema import EvalSettings, ModelSettings, Settings
from lagrpo.tasks import Task, load_task
from lagrpo.tasks.environments import load_environment
from lagrpo.training.checks import chat_template
from lagrpo.training.environments import OF_RUN, check_environment, find_talks, replied
from lagrpo.training.exams import Exam, build_exams, concerning_set
from lagrpo.training.lead import LeadLearner, LeadSampler
from lagrpo.types import Group
from lagrpo.verify import Verifier

_QUIET = threading.RLock()  # what transformers says is set for the process: runs in several threads take turns


def build_policy(
    model: ModelSettings, tau: float, longest: int, templates: Templates | None = None, seed: int = 0
) -> Policy:
    """The policy of the settings at temperature tau, checked against the `longest` sequence that they allow, in tokens;
    `templates` renders its prompts; adapters start at draws of `seed`. Raises SettingsError for a model that is not
    there or cannot be run."""
    device = pick_device(model.device)
    if device.type == "cpu":
        keep_freed_memory()
    dtype = getattr(torch, pick_dtype(model.dtype, device)[0])
    with refusing("model.kernels", NoKernels):
        backend = choose_backend(model.kernels, device, dtype)
    given = chat_template(model), templates, backend, lora_of(model, seed)
    with loading(model):
        policy = load_policy(resolve_model(model.path), dtype, device, tau, *given)
    with refusing("model.path"):
        check_context(policy, longest)
    return policy


def lora_of(model: ModelSettings, seed: int = 0) -> Lora | None:
    """The adapters that the settings ask for; None for full training."""
    lora = model.lora
    return Lora(lora.r, lora.alpha, lora.targets, seed) if lora.r else None


@contextmanager
def loading(model: ModelSettings) -> Iterator[None]:
    """Inside, a model is read. An error that says that it is not there, or cannot be run, becomes a SettingsError that
    says where it was looked for; of transformers' own reports only errors reach the terminal."""
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
class Data:
    """What a run reads before a model is loaded: its task, and the offline completions if it has any."""

    task: Task
    records: Records | None
    of_sets: Mapping[str, Task]
    """by the name of the evaluation set: its task, where it has one of its own"""

    @staticmethod
    def read(settings: Settings, task: Task | None) -> Data:
        """`task` stands in for settings.task. Raises SettingsError for data that is missing or malformed."""
        with refusing():
            task = task if task is not None else load_task(settings.task, settings.run.seed)
        of_sets = {}
        for each in settings.evaluation.sets:
            if each.task is not None:
                with concerning_set(each.name):
                    of_sets[each.name] = other = load_task(each.task, settings.run.seed)
                    check_environment(settings, getattr(other, "environment", None), each.task)
        with refusing("environment"):  # a function that is not there shows before a model is loaded
            check_environment(settings, load_environment(settings.environment, task), settings.task)
        with refusing("offline.data"):
            names = settings.offline.data
            return Data(task, read_records(names, settings.task.system_prompt) if names else None, of_sets)


@dataclass(frozen=True, slots=True)
class Parts:
    """What a run is made of."""

    settings: Settings
    task: Task
    own_task: bool
    """the caller gave the task as an object"""
    model: str
    """the fingerprint of all weights that it starts with"""
    learner: Learner | LeadLearner
    """with the policy, the recipe and the reference"""
    sampler: LocalSampler | LeadSampler | VllmEngine
    evaluator: LocalSampler | LeadSampler | VllmEvaluator
    exams: tuple[Exam, ...]
    """what it is evaluated on"""
    prefetcher: Prefetcher
    prompts: PromptSource
    offline: OfflineData | None
    """completions of a file"""
    verifier: Verifier
    schedule: Schedule
    check_parity: ParityCheck | None
    """None where the run asks for no check"""
    check_evaluated: ParityCheck | None = None
    """the check of servers that evaluate; it has a memory of its own"""
    others: Sequence[Verifier] = ()
    """the judges of evaluation sets with tasks of their own"""
    world: World | None = None
    """the other ranks; None in a run of one process"""
    talking: Mapping[str, Episodes] = field(default_factory=dict)
    """what completions of several turns talk to: those of the run's task, and of evaluation sets by their names"""

    @staticmethod
    def build(settings: Settings, recipe: Recipe, task: Task | None = None, world: World | None = None) -> Parts:
        """The data first, then the model: what is cheap to refuse is refused first. Where something fails, whatever was
        started is ended. With `world` this is rank 0. Raises SettingsError for data or a model that is missing, or does
        not fit."""
        with ExitStack() as undo:
            servers, data = [], Data.read(settings, task)
            if settings.sampling.sampler == "vllm":  # starting them writes files and takes minutes
                with loading(settings.model):
                    check_files(resolve_model(settings.model.path))
                servers = [
                    undo.enter_context(closing(server))
                    for server in open_servers(settings, replied(settings, data.task))
                ]
            parts = Parts._build(settings, recipe, data, task is not None, servers, undo, world)
            undo.pop_all()
            return parts

    @staticmethod
    def _build(
        settings: Settings, recipe: Recipe, data: Data, own_task: bool, servers: list[VllmClient], undo: ExitStack,
        world: World | None,
    ) -> Parts:  # fmt: skip
        sampling, task = settings.sampling, data.task
        templates = undo.enter_context(closing(Templates()))
        longest = settings.longest + replied(settings, task, *data.of_sets.values())
        policy = build_policy(settings.model, sampling.temperature, longest, templates, settings.run.seed)
        talks = find_talks(settings, task, data.of_sets, policy.chat)
        talking = {name: talk.start(settings, policy.chat, undo) for name, talk in talks.items()}
        asking = {name: talk.asking(talking[name]) for name, talk in talks.items()}
        prompts = build_prompts(settings, task, policy, asking.get(OF_RUN, {}))
        offline = build_offline(settings, recipe, policy, data.records) if data.records else None
        episodes = talking.get(OF_RUN)
        sampler = build_engine(settings, policy, servers) if servers else build_local_sampler(settings, policy)
        found = fingerprint(policy.all_weights)
        skeleton = without_numbers(policy.model.lm) if world is not None and world.mesh is not None else None
        learner, evaluator = build_learner(settings, recipe, policy, world)
        evaluator.known, sampler.episodes = talking, episodes
        if world is not None:
            meet(world, found)
            if talks:
                world.lead("starting the environments", lambda: None, talks)
            evaluator = LeadSampler(world, evaluator, "evaluation", learner)
            sampler = LeadSampler(world, sampler, "sampling", learner) if isinstance(sampler, LocalSampler) else sampler
            learner = LeadLearner(world, learner, skeleton)
            policy = learner.policy
        verifier = undo.enter_context(build_verifier(settings, task))
        others = {
            name: (other, undo.enter_context(build_verifier(settings, other))) for name, other in data.of_sets.items()
        }
        check = build_parity_check(settings, policy, prompts, sampler) if sampling.parity_check else None
        lent = sampler if settings.evaluation.sampler == "vllm" and isinstance(sampler, VllmEngine) else None
        return Parts(
            settings=settings,
            task=task,
            own_task=own_task,
            model=found,
            learner=learner,
            sampler=sampler,
            evaluator=VllmEvaluator(lent) if lent is not None else evaluator,
            exams=build_exams(settings, policy, prompts, verifier, others, asking),
            prefetcher=Prefetcher(sampler, prompts.batch, sampling.G),
            prompts=prompts,
            offline=offline,
            check_parity=check,
            check_evaluated=build_parity_check(settings, policy, prompts, sampler) if check and lent else None,
            schedule=Schedule(settings.schedule.kind, settings.schedule.v, settings.schedule.delta),
            verifier=verifier,
            others=[judging for _, judging in others.values()],
            world=world,
            talking=talking,
        )

    @property
    def sampled(self) -> Policy | Replica | None:
        """The policy of the in-process sampler, which computes as the learner does, up to rounding; None for vLLM."""
        return self.sampler.policy if isinstance(self.sampler, LocalSampler | LeadSampler) else None

    @property
    def parity(self) -> Parity | None:
        """How far learner and in-process sampler agree; None where that was not asked or the sampler is vLLM."""
        return self.check_parity.parity if self.check_parity is not None else None

    def read_offline(self, b: int) -> Sequence[Group]:
        """The groups of batch b that come from a file."""
        return self.offline.batch(b, offline_prompts(self.settings)) if self.offline is not None else ()

    def close(self) -> None:
        """End the workers, the servers that were started, and the process that renders prompts."""
        with ExitStack() as last:  # each, whatever becomes of the others
            for part in (self.learner.policy.chat.templates, self.sampler, self.verifier, *self.others):
                last.callback(part.close)
            for episodes in self.talking.values():
                last.callback(episodes.environments.close)

    def keep_logs(self, run: Path) -> None:
        """The logs of the servers that were started for a run go to its directory."""
        if isinstance(self.sampler, VllmEngine):
            earlier = len([*run.glob("vllm-*.log")])  # of the servers of a run that is resumed
            for number, server in enumerate(self.sampler.servers, start=1 + earlier):
                server.keep_log(run / f"vllm-{number}.log")


def build_prompts(
    settings: Settings, task: Task, policy: Policy, asking: Mapping[str, Any] = MappingProxyType({})
) -> PromptSource:
    """The prompts of every batch, all of them tokenized once: one that cannot be asked shows before the run is made.
    `asking` is what those of an environment need."""
    fresh = settings.schedule.prompts - offline_prompts(settings)
    prompts = PromptSource(task, policy, settings.run.seed, fresh, settings.sampling.max_prompt_tokens, **asking)
    prompts.tokenized("train", 0)  # a chat template that cannot be rendered shows here
    with refusing("task"):
        prompts.check(settings.schedule.stages * settings.schedule.batches)
    return prompts


def build_local_sampler(settings: Settings, policy: Policy) -> LocalSampler:
    """The in-process sampler, with a copy of the policy."""
    sampling = settings.sampling
    return LocalSampler(replica(policy), settings.run.seed, sampling.max_tokens, sampling.max_num_seqs)


def meet(world: World, own: str) -> None:
    """Wait until every rank has its model, with the fingerprint `own`. Raises SettingsError where one has another."""
    _, *others = world.lead("ready", lambda: own)
    if strange := [rank for rank, found in enumerate(others, start=1) if found != own]:
        raise SettingsError(
            f"model.path is another model on rank {strange[0]} than on rank 0: its weights have the fingerprint "
            f"{others[strange[0] - 1]}, not {own}. All hosts need the same files"
        )


def build_learner(
    settings: Settings, recipe: Recipe, policy: Policy, world: World | None = None
) -> tuple[Learner, LocalSampler]:
    """The learner, with a reference where the recipe has a KL term, and AdamW's schedule over all S·M·i updates; and
    what samples from its policy, for evaluations. With `world` this rank's part of it: masters are sharded, and with
    its mesh the layers too, which uses the policy given up. Raises SettingsError for a model whose layers cannot be."""
    o, s = settings.optimizer, settings.schedule
    same = o.model_dump(include={"lr", "weight_decay", "schedule", "warmup", "masters", "offload_moments"})
    betas, max_grad_norm, updates = (o.beta1, o.beta2), o.max_grad_norm or None, s.stages * s.batches * s.i
    optimization = Optimization(
        **same, betas=betas, max_grad_norm=max_grad_norm, updates=updates, seed=settings.run.seed
    )
    evaluating = (
        *(settings.run.seed, settings.sampling.max_tokens, settings.sampling.max_num_seqs),
        *(settings.evaluation.temperature, "evaluate"),
    )
    given = o.activation_checkpointing, settings.run.entropy
    if world is None or (mesh := world.mesh) is None:
        reference = replica(policy) if recipe.needs_pi_ref else None
        ranks = world.ranks if world is not None else None
        learner = Learner(policy, recipe, optimization, reference, *given, ranks=ranks)
        return learner, LocalSampler(policy, *evaluating)
    if reason := why_not(policy):
        raise SettingsError(f"distributed.shard = 'layers' cannot shard this model: {reason}")
    whole = make_whole_replica if isinstance(policy.weights, AdapterWeights) else replica
    evaluator, policy = BorrowingSampler(world.in_step, whole(policy), *evaluating), with_modules(policy)
    reference = make_layered_replica(policy, mesh) if recipe.needs_pi_ref else None
    learner = Learner(policy, recipe, optimization, reference, *given, ranks=world.ranks, mesh=mesh)
    evaluator.source = learner.policy
    return learner, evaluator


def build_verifier(settings: Settings | EvalSettings, task: Task) -> Verifier:
    """The judge of the task in worker processes. Raises SettingsError for one that cannot be sent to them."""
    with refusing("task", TypeError):
        return Verifier(task.judge, **settings.verifier.of_a_batch)


def build_parity_check(
    settings: Settings, policy: Policy, source: PromptSource, sampler: LocalSampler | LeadSampler | VllmEngine
) -> ParityCheck:
    """What is called after every weight sync. Raises SettingsError where the in-process sampler computes something else
    than the learner."""
    parity_prompts = source.parity_prompts(PARITY_PROMPTS)
    if isinstance(sampler, VllmEngine):
        return ParityCheck(parity_prompts, sampler.weights.dtype)
    check = ParityCheck(parity_prompts, policy.dtype)
    with refusing("model.path", ParityError):
        check.start(policy, sampler)
    return check


def offline_prompts(settings: Settings) -> int:
    """How many prompts of each batch come from a file of completions: the share of N, at least one."""
    data, share = settings.offline.data, settings.offline.share
    return max(1, round(share * settings.schedule.prompts)) if data is not None else 0


def build_offline(settings: Settings, recipe: Recipe, policy: Policy, records: Records) -> OfflineData:
    """The completions of settings.offline.data. Raises SettingsError for those that cannot be used with the model, and
    for files without log-probs where the recipe reads log α."""
    sampling, data = settings.sampling, settings.offline.data
    assert data is not None
    with refusing("offline.data"):
        limits = {"max_prompt_tokens": sampling.max_prompt_tokens, "reads_logp": recipe.needs_logp_alpha}
        found = OfflineData(records, policy, sampling.G, settings.run.seed, **limits)
    if recipe.needs_logp_alpha and not found.has_logp:
        raise SettingsError(
            f"offline.data = {', '.join(data)} does not say how likely its completions were (logp_alpha), and recipe "
            f"{recipe.name!r} reads that; use one that does not, such as reinforce, asymre, red_drop, red_weight"
        )
    if found.longest > sampling.max_tokens:
        has = f"offline.data has a completion of {found.longest} tokens"
        raise SettingsError(f"{has}; sampling.max_tokens is {sampling.max_tokens}")
    return found
