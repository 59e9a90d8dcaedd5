"""What a run trains on: its task and the tasks of evaluation sets, with their rewards and environments, and completions
of files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from lagrpo.core.objective import Recipe
from lagrpo.data.offline import OfflineData, read_records
from lagrpo.data.prompts import PromptSource
from lagrpo.errors import SettingsError, refusing
from lagrpo.model.model import Policy
from lagrpo.rewards.pool import RewardPool
from lagrpo.rollout.episodes import OF_RUN, Episodes, build_all_episodes, max_reply_tokens
from lagrpo.settings.schema import Settings
from lagrpo.tasks import Task, check_task, load_task
from lagrpo.tasks.base import Make, environment_of
from lagrpo.tasks.data import Table
from lagrpo.tasks.environments import load_environment


@dataclass(frozen=True, slots=True)
class TaskSetup:
    """A task as a run uses it: its prompts, what scores its completions, and what they talk to, if anything."""

    task: Task
    prompts: PromptSource
    reward_pool: RewardPool
    episodes: Episodes | None


@dataclass(frozen=True, slots=True)
class RunData:
    """What a run reads before it loads a model: its task, its offline completions, and the tasks of evaluation sets
    that have their own, by the name of the set."""

    settings: Settings
    task: Task
    records: Sequence[Table] | None
    of_sets: Mapping[str, Task]

    @property
    def replied(self) -> int:
        """The most tokens that an environment says in a completion; 0 without one."""
        return max_reply_tokens(self.settings, self.task, *self.of_sets.values())

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that the policy meets."""
        return self.settings.longest + self.replied

    def set_up(self, policy: Policy, undo: ExitStack) -> tuple[TaskSetup, dict[str, TaskSetup]]:
        """The run's task and those of evaluation sets. All prompts are tokenized once, so that a bad one is found
        before the run is made. Raises SettingsError for reward functions of another signature, and as
        `build_all_episodes`."""
        s = self.settings
        talking = build_all_episodes(s, self.task, self.of_sets, policy.chat, undo)
        fresh = s.schedule.prompts_per_batch - offline_prompts(s)
        main = set_up_task(s, self.task, policy, talking.get(OF_RUN), undo, fresh)
        main.prompts.tokenized("train", 0)  # a chat template that cannot be rendered
        with refusing("task"):
            main.prompts.check(s.schedule.stages * s.schedule.batches)
        others = {n: set_up_task(s, task, policy, talking.get(n), undo) for n, task in self.of_sets.items()}
        return main, others


def load_data(settings: Settings, task: Task | None) -> RunData:
    """`task` replaces settings.task. Raises SettingsError for data that is missing or malformed."""
    with refusing():
        task = check_task(task) if task is not None else load_task(settings.task, settings.run.seed)
    of_sets = {}
    for each in settings.eval.sets:
        if each.task is not None:
            with concerning_set(each.name):
                of_sets[each.name] = other = load_task(each.task, settings.run.seed)
                check_environment(environment_of(other), each.task.rewards)
    with refusing("environment"):
        check_environment(load_environment(settings.environment, task), settings.task.rewards)
    with refusing("offline.data"):
        names = settings.offline.data
        return RunData(settings, task, read_records(names) if names else None, of_sets)


@contextmanager
def concerning_set(name: str) -> Iterator[None]:
    """Inside, errors of settings and data name the evaluation set."""
    try:
        with refusing():
            yield
    except SettingsError as error:
        raise SettingsError(f"eval.sets, {name!r}: {error}") from error


def check_environment(make: Make | None, rewards: Sequence[Any]) -> None:
    if make is not None and rewards:
        raise ValueError("the environment gives the rewards of its completions: leave out task.rewards")


def set_up_task(
    settings: Settings, task: Task, policy: Policy, episodes: Episodes | None, undo: ExitStack, N: int = 1
) -> TaskSetup:
    """`task` with N prompts to a batch."""
    prompts = PromptSource(task, policy, settings.run.seed, N, settings.rollout.max_prompt_length, episodes)
    with refusing("task"):
        reward_pool = undo.enter_context(RewardPool(task.reward, **settings.verifier.of_a_batch))
    return TaskSetup(task, prompts, reward_pool, episodes)


# Offline completions


def offline_prompts(settings: Settings) -> int:
    """How many prompts of each batch come from a file of completions: the share of N, at least one."""
    data, share = settings.offline.data, settings.offline.fraction
    return max(1, round(share * settings.schedule.prompts_per_batch)) if data is not None else 0


def build_offline(settings: Settings, recipe: Recipe, policy: Policy, records: Sequence[Table]) -> OfflineData:
    """The completions of settings.offline.data. Raises SettingsError for those that cannot be used with the model, and
    for files without log-probs if the recipe reads log α."""
    sampling, data = settings.rollout, settings.offline.data or ()
    with refusing("offline.data"):
        found = OfflineData(
            records, policy, sampling.num_generations, settings.run.seed, system_prompt=settings.task.system_prompt,
            max_prompt_tokens=sampling.max_prompt_length, reads_logp=recipe.needs_logp_alpha,
        )  # fmt: skip
    if recipe.needs_logp_alpha and not found.has_logp:
        raise SettingsError(
            f"offline.data = {', '.join(data)} does not say how likely its completions were (rollout_logprobs), and "
            f"recipe {recipe.name!r} reads that; use one that does not, such as reinforce, asymre, red_drop, red_weight"
        )
    if found.longest > sampling.max_completion_length:
        has = f"offline.data has a completion of {found.longest} tokens"
        raise SettingsError(f"{has}; rollout.max_completion_length is {sampling.max_completion_length}")
    return found
