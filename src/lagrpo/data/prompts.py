"""Which prompts a batch has: a function of the seed and the batch, nothing else.

The prompts of a split are visited epoch after epoch, each epoch in another order; batch b takes the places
(b - 1)·N .. b·N - 1 of that endless sequence.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

from lagrpo.data.fingerprint import digest_prompt
from lagrpo.errors import SettingsError
from lagrpo.model.model import Policy
from lagrpo.rollout.base import Request
from lagrpo.rollout.episodes import Episodes
from lagrpo.tasks import Task, name_prompt, order_prompts
from lagrpo.types import Prompt


class PromptSource:
    """The requests of training batches (N prompts each) and of evaluations, tokenized. With `episodes` an environment
    gives the messages with which each begins."""

    def __init__(
        self,
        task: Task,
        policy: Policy,
        seed: int,
        N: int,
        max_prompt_tokens: int,
        episodes: Episodes | None = None,
    ) -> None:
        self.task, self.chat, self.seed, self.N, self.max_prompt_tokens = (
            task,
            policy.chat,
            seed,
            N,
            max_prompt_tokens,
        )
        self.visited: list[dict[str, str]] = []
        """digests of the prompts that the run visits, in their order, once they were checked"""
        self._episodes, self._opened = (
            episodes,
            dict[tuple[str, int], Any](),
        )  # the messages of their environments
        self._size, self._warned = task.size("train"), False
        if self._size < 1:
            raise SettingsError(f"task {task.name!r} has no training prompts")
        self._order = lru_cache(maxsize=2)(lambda epoch: order_prompts(seed, epoch, self._size))
        self.batch = lru_cache(maxsize=32)(self._batch)  # sampling asks for a batch, then scoring

    def _batch(self, b: int) -> list[Request]:
        """The N requests of batch b = 1, 2, …"""
        return [
            Request(b, epoch, self.tokenized("train", index)) for epoch, index in self.places(b)
        ]

    def places(self, b: int) -> list[tuple[int, int]]:
        """Epoch and index of the prompts of batch b."""
        places = (divmod(place, self._size) for place in range((b - 1) * self.N, b * self.N))
        return [(epoch, self._order(epoch)[position]) for epoch, position in places]

    def check(self, batches: int) -> None:
        """Tokenize every prompt that batches 1 .. `batches` visit, so that none of them ends the run later on."""
        for index in self._order(0)[: batches * self.N]:  # later epochs have no other prompts
            self.visited.append(digest_prompt(self.tokenized("train", index)))

    def check_prompts(self, count: int) -> list[Request]:
        """Up to `count` training prompts for weight-sync checks, with the keys of batch 0, which is not trained on."""
        return [
            Request(0, 0, self.tokenized("train", index)) for index in range(min(count, self._size))
        ]

    def extra(self, b: int, taken: int, count: int) -> list[Request]:
        """`count` more prompts for batch b, which had `taken` of them: an endless sequence, a function of (seed, b),
        over the prompts that are not in the batch (or all). Its passes count as epochs -1, -2, …"""
        own = {index for _, index in self.places(b)}
        order = order_prompts(self.seed, -1 - b, self._size)
        order = [index for index in order if index not in own] or order
        places = (divmod(place, len(order)) for place in range(taken, taken + count))
        return [
            Request(b, -1 - again, self.tokenized("train", order[position]))
            for again, position in places
        ]

    def held_out(self, count: int) -> list[Request]:
        """Up to `count` test prompts (0: all), the first of a fixed random order. Raises SettingsError without any."""
        size = self.task.size("test")
        if size < 1:
            raise SettingsError(f"task {self.task.name!r} has no test prompts to evaluate on")
        order = order_prompts(self.seed, -1, size)
        return [Request(0, 0, self.tokenized("test", index)) for index in order[: count or None]]

    def tokenized(self, split: str, index: int) -> Prompt:
        """A prompt with its token ids. Raises SettingsError if it cannot be asked, or is too long."""
        where = name_prompt(self.task, split, index)
        place = (split, index)
        tools = None
        try:
            prompt = self.task.prompt(split, index)
            where = name_prompt(self.task, split, index, prompt)
            if (
                self._episodes is not None
            ):  # an environment gives the messages that the policy sees first, once
                if place not in self._opened:
                    self._opened[place] = self._episodes.open(
                        prompt, (self.seed, "opening", *place)
                    )
                prompt = replace(prompt, messages=self._opened[place], asked=prompt.messages)
                tools = self._episodes.tools
            prompt = self.chat.tokenize(prompt, tools)
        except ValueError as error:
            raise SettingsError(f"{where}: {error}") from error
        if (count := len(prompt.token_ids)) > self.max_prompt_tokens:
            limit = f"rollout.max_prompt_length is {self.max_prompt_tokens}; rollout.overlong_prompts = 'drop' drops it"
            raise SettingsError(f"{where} has {count} tokens; {limit}")
        self._warned = self._warned or self.chat.warn_if_rendered(prompt, where)
        return prompt
