"""The prompts of each batch: a function of the seed and the number of the batch, nothing else.

The prompts of the training split are visited epoch after epoch, each epoch in another order. Batch
b gets the positions (b - 1)·N .. b·N - 1 of that endless sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from lagrpo.data.fingerprint import digest_prompt
from lagrpo.errors import SettingsError
from lagrpo.model.model import Policy
from lagrpo.model.reference_prompt import ReferencePrompt, find_best
from lagrpo.tasks import Task, name_prompt, order_prompts
from lagrpo.tasks.episodes import Episodes
from lagrpo.types import Group, JsonView, Prompt, Request


class PromptSource:
    """A task's prompts, tokenized, as requests of training batches and of evaluations.

    A training batch has N prompts. If the task has an environment, `episodes` opens it: the policy
    then sees the environment's first messages instead of the task's. With `reference_prompt`,
    training prompts also have the tokens that the reference sees. Raises SettingsError for a task
    without training prompts.
    """

    def __init__(
        self,
        task: Task,
        policy: Policy,
        seed: int,
        N: int,
        max_prompt_tokens: int,
        episodes: Episodes | None = None,
        reference_prompt: ReferencePrompt | None = None,
    ) -> None:
        self.task = task
        self.chat = policy.chat
        self.seed = seed
        self.N = N
        self.max_prompt_tokens = max_prompt_tokens
        self.episodes = episodes
        self.reference_prompt = reference_prompt
        # Digests of the prompts that the run visits, in their order; `check` fills the list.
        self.visited: list[dict[str, str]] = []
        self.longest_prompt = 0  # tokens of the longest one that batches visit; `check` counts
        # The environment's first messages for prompt (split, index).
        self._openings: dict[tuple[str, int], tuple[JsonView, ...]] = {}
        self._has_warned = False
        self._size = task.size("train")
        if self._size < 1:
            raise SettingsError(f"task {task.name!r} has no training prompts")
        self._epoch_order = lru_cache(maxsize=2)(self._make_epoch_order)
        # Sampling reads a batch, and later scoring reads it again. The cache holds the batches in
        # between: many may be prefetched.
        self.batch = lru_cache(maxsize=32)(self._make_batch)

    # Training

    def check(self, batches: int, *, has_extra: bool = False) -> None:
        """Tokenizes every prompt that batches 1 .. `batches` visit. Raises SettingsError.

        With `has_extra`, the batches may also get extra prompts, which can be any prompt of the
        split. Without this check, a prompt that is too long would end the run hours later.
        """
        # One epoch is enough: later epochs have the same prompts in another order.
        order = self._epoch_order(0)
        num_visited = batches * self.N
        if not has_extra or self.N == 0:  # extra prompts replace sampled prompts only
            order = order[:num_visited]
        for position, index in enumerate(order):
            prompt = self.tokenized("train", index)
            self.longest_prompt = max(self.longest_prompt, len(prompt.token_ids))
            if position < num_visited:
                self.visited.append(digest_prompt(prompt))

    def visits(self, b: int) -> list[tuple[int, int]]:
        """Returns the epoch, and the index in the split, of each prompt of batch b = 1, 2, …"""
        visits = []
        for position in range((b - 1) * self.N, b * self.N):
            epoch, position_in_epoch = divmod(position, self._size)
            index = self._epoch_order(epoch)[position_in_epoch]
            visits.append((epoch, index))
        return visits

    def extra(self, b: int, taken: int, count: int) -> list[Request]:
        """Returns `count` extra prompts for batch b, which has had `taken` extra prompts before.

        Extra prompts are an endless sequence, a function of the seed and b. It visits the prompts
        that are not in the batch, or all prompts if the batch has them all. Its passes count as
        epochs -1, -2, …, so a prompt that comes again gets other random numbers.
        """
        indices_in_batch = {index for _, index in self.visits(b)}
        # Negative numbers belong to no epoch: -1 - b is for batch b, -1 for evaluations.
        all_indices = order_prompts(self.seed, -1 - b, self._size)
        unused_indices = [index for index in all_indices if index not in indices_in_batch]
        order = unused_indices or all_indices
        requests = []
        for position in range(taken, taken + count):
            finished_passes, position_in_pass = divmod(position, len(order))
            prompt = self.tokenized("train", order[position_in_pass])
            requests.append(Request(batch=b, epoch=-1 - finished_passes, prompt=prompt))
        return requests

    def show_best(
        self, groups: Sequence[Group], smallest_reward: float, max_completion: int
    ) -> list[Group]:
        """Returns scored groups whose reference sees their best completion, if its prompt reads it.

        A completion has at most `max_completion` tokens. Raises SettingsError if a prompt cannot be
        rendered.
        """
        template = self.reference_prompt
        if template is None or not template.reads_best:
            return list(groups)
        tools = self.episodes.tools if self.episodes is not None else None
        limit = self.max_prompt_tokens + max_completion
        shown: list[Group] = []
        for group in groups:
            rewards = [completion.reward for completion in group.completions]
            texts = [completion.text for completion in group.completions]
            best = find_best(rewards, texts, smallest_reward)
            prompt = group.prompt
            try:
                seen_ids = template.tokenize_with_best(self.chat, prompt, best, limit, tools)
            except ValueError as error:
                label = name_prompt(self.task, "train", prompt.key, prompt)
                raise SettingsError(f"{label}: {error}") from error
            shown.append(replace(group, prompt=replace(prompt, reference_token_ids=seen_ids)))
        return shown

    def _make_batch(self, b: int) -> list[Request]:
        """Returns the N requests of batch b = 1, 2, …"""
        return [
            Request(batch=b, epoch=epoch, prompt=self.tokenized("train", index))
            for epoch, index in self.visits(b)
        ]

    def _make_epoch_order(self, epoch: int) -> list[int]:
        return order_prompts(self.seed, epoch, self._size)

    # Weight-sync checks and evaluations

    def check_prompts(self, count: int) -> list[Request]:
        """Returns up to `count` training prompts for weight-sync checks.

        Their RNG keys are the ones of batch 0, which is not trained on.
        """
        indices = range(min(count, self._size))
        return [
            Request(batch=0, epoch=0, prompt=self.tokenized("train", index)) for index in indices
        ]

    def held_out(self, count: int) -> list[Request]:
        """Returns the first `count` test prompts of a fixed random order, or all for 0.

        Raises SettingsError if the task has no test prompts.
        """
        size = self.task.size("test")
        if size < 1:
            raise SettingsError(f"task {self.task.name!r} has no test prompts to evaluate on")
        indices = order_prompts(self.seed, -1, size)[: count or None]
        return [
            Request(batch=0, epoch=0, prompt=self.tokenized("test", index)) for index in indices
        ]

    # One prompt

    def tokenized(self, split: str, index: int) -> Prompt:
        """Returns a prompt with its token ids.

        Raises SettingsError if the prompt cannot be rendered or is too long.
        """
        label = name_prompt(self.task, split, index)
        tools = None
        try:
            prompt = self.task.prompt(split, index)
            label = name_prompt(self.task, split, index, prompt)
            if self.episodes is not None:
                prompt = self._open(self.episodes, prompt, split, index)
                tools = self.episodes.tools
            prompt = self.chat.tokenize(prompt, tools)
            if self.reference_prompt is not None and split == "train":
                seen = self.chat.tokenize(self.reference_prompt.fill(prompt), tools)
                prompt = replace(prompt, reference_token_ids=seen.token_ids)
        except ValueError as error:
            raise SettingsError(f"{label}: {error}") from error

        num_tokens = len(prompt.token_ids)
        if num_tokens > self.max_prompt_tokens:
            if self.episodes is None:
                advice = "rollout.overlong_prompts = 'drop' drops it"
            else:
                advice = "raise it (overlong_prompts drops no prompts of an environment)"
            raise SettingsError(
                f"{label} has {num_tokens} tokens; rollout.max_prompt_length is "
                f"{self.max_prompt_tokens}; {advice}"
            )
        num_tokens = len(prompt.reference_token_ids)
        if num_tokens > self.max_prompt_tokens:
            raise SettingsError(
                f"{label} has {num_tokens} tokens with loss.reference_prompt; "
                f"rollout.max_prompt_length is {self.max_prompt_tokens}: raise it"
            )
        if not self._has_warned:  # one warning per task is enough
            self._has_warned = self.chat.warn_if_unusual(prompt, label)
        return prompt

    def _open(self, episodes: Episodes, prompt: Prompt, split: str, index: int) -> Prompt:
        """Returns the prompt with the messages with which its environment begins.

        The environment begins once per prompt. All completions of a prompt must begin with the
        same tokens, because they share the keys and values of the prompt.
        """
        prompt_place = (split, index)
        if prompt_place not in self._openings:
            random_key = (self.seed, "opening", split, index)
            self._openings[prompt_place] = episodes.open(prompt, random_key)
        messages = self._openings[prompt_place]
        return replace(prompt, messages=messages, task_messages=prompt.messages, tools=())
