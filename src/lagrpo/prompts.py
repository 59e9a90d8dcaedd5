"""Which prompts a batch has: a function of the seed and the batch, nothing else.

The prompts of a split are visited epoch after epoch, each epoch in an order of its own; batch b takes the places
(b - 1)·N .. b·N - 1 of that endless sequence.
"""

from __future__ import annotations

from functools import lru_cache

from lagrpo.config import SettingsError
from lagrpo.policy.model import Policy
from lagrpo.sampling.base import Request
from lagrpo.tasks import Task, prompt_order
from lagrpo.types import Prompt


class PromptSource:
    """The requests of training batches and of evaluations, tokenised. Raises SettingsError for a task without training
    prompts."""

    def __init__(self, task: Task, policy: Policy, seed: int, N: int, max_prompt_tokens: int) -> None:
        self.task, self.policy, self.seed, self.N, self.max_prompt_tokens = task, policy, seed, N, max_prompt_tokens
        self._size = task.size("train")
        if self._size < 1:
            raise SettingsError(f"task {task.name!r} has no training prompts")
        self._order = lru_cache(maxsize=2)(lambda epoch: prompt_order(seed, epoch, self._size))

    def batch(self, b: int) -> list[Request]:
        """The N requests of batch b = 1, 2, …"""
        requests = []
        for place in range((b - 1) * self.N, b * self.N):
            epoch, position = divmod(place, self._size)
            requests.append(Request(b, epoch, self.tokenised("train", self._order(epoch)[position])))
        return requests

    def check(self, batches: int) -> None:
        """Tokenise every prompt that batches 1 .. `batches` visit, so that none of them ends the run later on. Raises
        ValueError for one that cannot be asked, or is too long."""
        places = min(batches * self.N, self._size)
        for epoch in {0, (batches * self.N - 1) // self._size} if places else ():
            for index in self._order(epoch)[:places]:
                self.tokenised("train", index)

    def probes(self, count: int) -> list[Request]:
        """Up to `count` training prompts for proofs, under the address of batch 0, which no training batch has."""
        return [Request(0, 0, self.tokenised("train", index)) for index in range(min(count, self._size))]

    def extra(self, b: int, attempt: int, count: int) -> list[Request]:
        """Further prompts for batch b, the same ones whenever it is asked; the attempt is part of their address."""
        order = prompt_order(self.seed, -1 - b, self._size)
        places = [(attempt - 1) * count + n for n in range(count)]
        return [Request(b, -attempt, self.tokenised("train", order[place % self._size])) for place in places]

    def held_out(self, count: int) -> list[Request]:
        """Up to `count` test prompts, the same ones whenever it is asked: the first of a fixed random order. Raises
        SettingsError where there are none."""
        size = self.task.size("test")
        if size < 1:
            raise SettingsError(f"task {self.task.name!r} has no test prompts to evaluate on")
        order = prompt_order(self.seed, -1, size)
        return [Request(0, 0, self.tokenised("test", index)) for index in order[:count]]

    def tokenised(self, split: str, index: int) -> Prompt:
        """A prompt with its token ids. Raises SettingsError when it is longer than max_prompt_tokens, the chat template
        refuses it (some know no system message), or the model lacks one of its tokens."""
        where = f"prompt {index} of the {split} split of {self.task.name!r}"
        asked = self.task.prompt(split, index)
        try:
            prompt = self.policy.tokenize(asked)
        except ValueError as error:
            raise SettingsError(f"{where}: {error}") from error
        if len(prompt.token_ids) > self.max_prompt_tokens:
            raise SettingsError(
                f"{where} has {len(prompt.token_ids)} tokens; sampling.max_prompt_tokens is {self.max_prompt_tokens}"
            )
        return prompt
