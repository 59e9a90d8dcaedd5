"""Which prompts a batch has: a function of the seed and the batch, nothing else.

The prompts of a split are visited epoch after epoch, each epoch in an order of its own; batch b takes the places
(b - 1)·N .. b·N - 1 of that endless sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from lagrpo.errors import SettingsError
from lagrpo.model.chat import Tools
from lagrpo.model.model import Policy
from lagrpo.rollout.base import Request
from lagrpo.tasks import Task, order_prompts
from lagrpo.types import Prompt

Opening = Callable[[Prompt, tuple[int | str, ...]], tuple[Mapping[str, Any], ...]]


class PromptSource:
    """The requests of training batches and of evaluations, tokenized. Where completions talk to an environment,
    `opening` gives the messages with which it begins; `tools` are for the chat template. Raises SettingsError where the
    task has none."""

    def __init__(
        self, task: Task, policy: Policy, seed: int, N: int, max_prompt_tokens: int, opening: Opening | None = None,
        tools: Tools | None = None,
    ) -> None:  # fmt: skip
        self.task, self.policy, self.seed, self.N, self.max_prompt_tokens = task, policy, seed, N, max_prompt_tokens
        self.first: list[tuple[int, Prompt]] = []
        """prompts of the first batch with their indices, once they were checked"""
        self._tools, self._opening, self._opened = (
            tools,
            opening,
            dict[tuple[str, int], tuple[Mapping[str, Any], ...]](),
        )
        self._size = task.size("train")
        if self._size < 1:
            raise SettingsError(f"task {task.name!r} has no training prompts")
        self._order = lru_cache(maxsize=2)(lambda epoch: order_prompts(seed, epoch, self._size))

    def batch(self, b: int) -> list[Request]:
        """The N requests of batch b = 1, 2, …"""
        return [Request(b, epoch, self.tokenized("train", index)) for epoch, index in self._of_batch(b)]

    def _of_batch(self, b: int) -> list[tuple[int, int]]:
        """Epoch and index of the prompts of batch b."""
        places = (divmod(place, self._size) for place in range((b - 1) * self.N, b * self.N))
        return [(epoch, self._order(epoch)[position]) for epoch, position in places]

    def check(self, batches: int) -> None:
        """Tokenize every prompt that batches 1 .. `batches` visit, so that none of them ends the run later on. Raises
        ValueError for one that cannot be asked, or is too long."""
        for place, index in enumerate(self._order(0)[: batches * self.N]):  # later epochs have no other prompts
            prompt = self.tokenized("train", index)
            if place < self.N:
                self.first.append((index, prompt))

    def check_prompts(self, count: int) -> list[Request]:
        """Up to `count` training prompts for weight-sync checks, with the keys of batch 0, which is not trained on."""
        return [Request(0, 0, self.tokenized("train", index)) for index in range(min(count, self._size))]

    def extra(self, b: int, taken: int, count: int) -> list[Request]:
        """`count` further prompts for batch b, which had `taken` of them before: an endless sequence that is a function
        of (seed, b), over the prompts that are not in the batch (or all, where every one is), in an order of its own.
        Its passes count as epochs -1, -2, …"""
        own = {index for _, index in self._of_batch(b)}
        order = order_prompts(self.seed, -1 - b, self._size)
        order = [index for index in order if index not in own] or order
        places = (divmod(place, len(order)) for place in range(taken, taken + count))
        return [Request(b, -1 - again, self.tokenized("train", order[position])) for again, position in places]

    def held_out(self, count: int) -> list[Request]:
        """Up to `count` test prompts, the first of a fixed random order. Raises SettingsError where there are none."""
        size = self.task.size("test")
        if size < 1:
            raise SettingsError(f"task {self.task.name!r} has no test prompts to evaluate on")
        order = order_prompts(self.seed, -1, size)
        return [Request(0, 0, self.tokenized("test", index)) for index in order[:count]]

    def _open(self, split: str, index: int) -> Prompt:
        """A prompt with the messages that the policy sees first; an environment is asked for them once."""
        prompt = self.task.prompt(split, index)
        if self._opening is None:
            return prompt
        if (split, index) not in self._opened:
            self._opened[split, index] = self._opening(prompt, (self.seed, "opening", split, index))
        return replace(prompt, messages=self._opened[split, index], asked=prompt.messages)

    def tokenized(self, split: str, index: int) -> Prompt:
        """A prompt with its token ids. Raises SettingsError where the task has none that can be asked, it exceeds
        max_prompt_tokens, the chat template refuses it (some know no system message) or the model lacks its tokens."""
        where = f"prompt {index} of the {split} split of {self.task.name!r}"
        try:
            prompt = self.policy.chat.tokenize(self._open(split, index), self._tools)
        except ValueError as error:
            raise SettingsError(f"{where}: {error}") from error
        if len(prompt.token_ids) > self.max_prompt_tokens:
            limit = f"rollout.max_prompt_length is {self.max_prompt_tokens}"
            raise SettingsError(f"{where} has {len(prompt.token_ids)} tokens; {limit}")
        return prompt
