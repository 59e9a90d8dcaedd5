"""From settings to what a run trains on: tasks with prompts and rewards, completions of files."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain
from typing import Any

from lagrpo.core.objective import Recipe
from lagrpo.core.rows import RECIPES
from lagrpo.data.offline import OfflineData, read_records
from lagrpo.data.prompts import PromptSource
from lagrpo.distributed.ranks import Ranks
from lagrpo.distributed.torchrun import local_size, read_count
from lagrpo.errors import as_settings_error
from lagrpo.model.chat import Chat
from lagrpo.model.model import Policy
from lagrpo.rewards import builtin
from lagrpo.rewards.pool import RewardPool, count_workers
from lagrpo.rewards.reward import RewardFunction, Rewards
from lagrpo.settings.schema import Settings
from lagrpo.settings.sections import TaskSettings
from lagrpo.startup.build_episodes import build_episodes
from lagrpo.startup.checks import read_reference_prompt
from lagrpo.tasks import Task, complete_task, drop_overlong, environment_of, load_task
from lagrpo.tasks.data import prompt_keys
from lagrpo.tasks.episodes import MAIN_TASK
from lagrpo.tasks.files import Row
from lagrpo.training.sampling import TaskSetup
from lagrpo.types import Prompt

logger = logging.getLogger("lagrpo")


def load_tasks(settings: Settings, task: Task | None = None) -> dict[str, Task]:
    """Returns the run's task, as MAIN_TASK, and other tasks of evaluation sets, by the set's name.

    A `task` replaces settings.task. Raises SettingsError.
    """
    task_settings = settings.task
    with as_settings_error():
        if task is None:
            main = load_task(task_settings, settings.run.seed)
        else:
            main = complete_task(task, task_settings.tools)
        check_answer(main, task_settings.answer_column)
    tasks = {MAIN_TASK: main}
    for eval_set in settings.eval.sets:
        if eval_set.task is not None:
            with as_settings_error(f"eval.sets, {eval_set.name!r}"):
                set_task = load_task(eval_set.task, settings.run.seed)
                check_answer(set_task, eval_set.task.answer_column)
                tasks[eval_set.name] = set_task
    return tasks


def check_answer(task: Task, answer_column: str | None) -> None:
    """Raises ValueError if a built-in reward compares texts, but the reference answer is a table.

    The first training prompt stands for all.
    """
    parts = Rewards.from_reward(task.reward).parts
    readers = [part.title for part in parts if getattr(part.function, "compares_texts", False)]
    if not readers or environment_of(task) is not None or not task.size("train"):
        return
    prompt = task.prompt("train", 0)
    is_table = isinstance(prompt.answer, dict)
    if not is_table:
        return
    column = answer_column or "answer"
    is_column = column in (prompt.row or {})
    fields = [f"{column}.{name}" if is_column else name for name in prompt.answer]
    raise ValueError(
        f"the reward {readers[0]!r} compares texts, but the reference answer is a table: set "
        f"task.answer_column to one of {', '.join(fields)}"
    )


def warn_of_trained_prompts(settings: Settings, tasks: Mapping[str, Task]) -> None:
    """Warns of prompts that the run both trains on and evaluates on.

    tasks: the tasks of `load_tasks`. Only rows of data count, because generated tasks have disjoint
    splits.
    """
    if not settings.eval.takes_place:
        return
    test_prompts = {name: list(prompt_keys(task, "test")) for name, task in tasks.items()}
    trained = set(chain.from_iterable(test_prompts.values()))
    if trained:
        trained.intersection_update(prompt_keys(tasks[MAIN_TASK], "train"))
    for name, prompts in test_prompts.items():
        num_trained = sum(prompt in trained for prompt in prompts)
        if num_trained:
            logger.warning(
                "%d of the %d evaluation prompts%s are among the training prompts, too",
                num_trained,
                len(prompts),
                "" if name == MAIN_TASK else f" of {name!r}",
            )


def set_up_tasks(
    settings: Settings, tasks: Mapping[str, Task], policy: Policy, undo: ExitStack
) -> dict[str, TaskSetup]:
    """Returns tasks with their prompts, tokenized once, reward workers and environments.

    `undo` ends the workers and environments. Raises SettingsError.
    """
    setups: dict[str, TaskSetup] = {}
    for name, prompts in build_prompts(settings, tasks, policy, undo).items():
        task = prompts.task
        deadline = task_settings_of(settings, name).reward_timeout
        workers = workers_of_rank(settings, name)
        with as_settings_error("task"):
            pool = RewardPool(task.reward, deadline=deadline, workers=workers)
            reward_pool = undo.enter_context(pool)
        setups[name] = TaskSetup(task, prompts, reward_pool, prompts.episodes)
    return setups


def build_prompts(
    settings: Settings, tasks: Mapping[str, Task], policy: Policy, undo: ExitStack
) -> dict[str, PromptSource]:
    """Returns the prompts of tasks, without the rows that `rollout.overlong_prompts` drops.

    `undo` ends the environments. Raises SettingsError.
    """
    sources: dict[str, PromptSource] = {}
    sampling = settings.rollout
    reference_prompt = read_reference_prompt(settings)
    sampled_prompts = settings.schedule.prompts_per_batch - settings.offline_prompts
    for name, task in tasks.items():
        episodes = build_episodes(
            settings,
            task_settings_of(settings, name),
            task,
            policy.chat,
            workers_of_rank(settings, name),
        )
        if episodes is not None:
            undo.enter_context(episodes.pool)
        with as_settings_error("task"):
            sources[name] = PromptSource(
                drop_overlong(task, sampling, policy.chat),
                policy,
                settings.run.seed,
                sampled_prompts,
                sampling.max_prompt_length,
                episodes,
                reference_prompt if name == MAIN_TASK else None,
            )
    return sources


def task_settings_of(settings: Settings, name: str) -> TaskSettings:
    """Returns the settings of a task of `load_tasks`: of an evaluation set, or of the run."""
    for eval_set in settings.eval.sets:
        if eval_set.name == name and eval_set.task is not None:
            return eval_set.task
    return settings.task


def workers_of_rank(settings: Settings, name: str) -> int:
    """Returns the number of reward workers of a task of `load_tasks` on this rank.

    With vLLM rank 0 scores all completions: the other ranks have one worker, which rests.
    """
    chosen = task_settings_of(settings, name).reward_workers
    if not settings.rollout.uses_vllm:
        return chosen or count_workers(local_size(), local_size())
    if read_count("RANK", default=0) > 0:
        return 1
    return chosen or count_workers(local_size())


def check_training_prompts(
    settings: Settings, prompts: PromptSource, policy: Policy, ranks: Ranks
) -> None:
    """Raises SettingsError if a prompt of the run does not fit.

    The first rank warns of a reward `format` that no completion can get.
    """
    with as_settings_error("task"):
        prompts.check(
            settings.schedule.batches, has_extra=settings.rollout.dynamic_sampling_rounds > 0
        )
        if ranks.is_first:
            first_prompt = prompts.check_prompts(1)[0].prompt
            warn_of_formats(prompts.task.reward, first_prompt, policy.chat)


def warn_of_formats(reward: RewardFunction | Rewards, prompt: Prompt, chat: Chat) -> None:
    """Warns of a built-in reward `format` that no completion can get.

    Tokens that end completions are not in their text, and what the chat template begins an answer
    with may not fit.
    """
    for part in Rewards.from_reward(reward).parts:
        function = getattr(part.function, "func", part.function)
        if function is not builtin.format:
            continue
        options = getattr(part.function, "keywords", {})
        name = part.name or "format"
        pattern = options.get("pattern")
        if pattern is None:
            _warn_of_example(part.function, name, options.get("tags"), prompt, chat)
        else:
            _warn_of_pattern(name, pattern, chat)


def _warn_of_pattern(name: str, pattern: str, chat: Chat) -> None:
    """Warns of a pattern with a token that completions never have in their text."""
    plain_pattern = pattern.replace("\\", "")
    for token, token_id in chat.special_tokens.items():
        if token_id in chat.silent_ids and token in plain_pattern:
            logger.warning(
                "the reward %r has %s in its pattern, which is not in the text of completions",
                name,
                token,
            )
            return


def _warn_of_example(
    function: Callable[..., Any], name: str, tags: Any, prompt: Prompt, chat: Chat
) -> None:
    """Warns if an example of the format, read as a completion of the prompt, gets no reward."""
    example = builtin.format_example(tags)
    text = prompt.prefix + chat.as_completion(example.removeprefix(prompt.prefix.strip()))
    if not function(completion=text):
        message = "no completion can get the reward %r: %r would be read as %r"
        logger.warning(message, name, example, text)


def read_offline_records(settings: Settings, recipe: Recipe) -> list[Row]:
    """Returns the rows of the files of completions. Raises SettingsError."""
    with as_settings_error("offline.data"):
        records = read_records(settings.offline.data) if settings.offline.data else []
        has_logp = any(row.get("rollout_logprobs") is not None for row in records)
        check_logp(recipe, known=has_logp or not records)
    return records


def build_offline(
    settings: Settings, recipe: Recipe, policy: Policy, records: Sequence[Row]
) -> OfflineData:
    """Returns the completions of these records.

    Raises SettingsError for completions that model or recipe cannot use.
    """
    sampling = settings.rollout
    with as_settings_error("offline.data"):
        offline = OfflineData(
            records,
            policy,
            sampling.num_generations,
            settings.run.seed,
            system_prompt=settings.task.system_prompt,
            max_prompt_tokens=sampling.max_prompt_length,
            max_completion_tokens=sampling.max_completion_length,
            reads_logp=recipe.needs_rollout_logp,
        )
        check_logp(recipe, known=offline.has_logp)
    if not offline.has_comparisons and not recipe.ignores_reward:
        logger.warning(
            "offline.data: no prompt has two completions, so their advantages over the group's "
            "mean are 0, whatever their rewards"
        )
    return offline


def check_logp(recipe: Recipe, *, known: bool) -> None:
    """Raises ValueError for offline completions without log-probs if the recipe reads log α."""
    if recipe.needs_rollout_logp and not known:
        others = ", ".join(name for name in RECIPES if not RECIPES[name].needs_rollout_logp)
        raise ValueError(
            f"it has no rollout_logprobs, which loss.recipe = {recipe.name!r} needs; "
            f"recipes that do not: {others}"
        )
