"""What a run warns of while it trains, each once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lagrpo.settings.schema import Settings
from lagrpo.terminal.text import count_of
from lagrpo.training.loop import Step

STILL = 1e-4  # a weight sync that changes a smaller share of the weights is warned of


class Warnings:
    """The warnings of a run. `dtype` is the weights', `prompts` the size of the split."""

    def __init__(self, settings: Settings, dtype: str, prompts: int) -> None:
        self.settings, self.dtype, self.prompts = settings, dtype, prompts
        self._given: set[str] = set()
        self._pushed = False  # an update had a gradient since the last weight sync

    def memory(self) -> dict[str, Any]:
        """What was given, for a checkpoint."""
        return {"given": sorted(self._given), "pushed": self._pushed}

    def restore(self, memory: Mapping[str, Any]) -> None:
        self._given, self._pushed = set(memory["given"]), memory["pushed"]

    def look(self, step: Step) -> list[str]:
        """The new warnings of this batch."""
        found = {name: text for name, text in self._find(step) if name not in self._given}
        self._given |= found.keys()
        pushed = any(update.get("grad_norm") for update in step.updates)
        self._pushed = pushed or (self._pushed and not step.reason)
        return list(found.values())

    def _find(self, step: Step) -> Iterator[tuple[str, str]]:
        share = step.state.sync.get("changed_fraction")
        if step.reason and self._pushed and share is not None and share < STILL:
            yield "standstill", self._standstill(step.alpha, share)
        keys = [group.prompt.key for group in step.batch.groups if group.source == "sampler"]
        if len(set(keys)) < len(keys):
            split = f"the {count_of(self.prompts, 'prompt')} of the split ended inside it (said once)"
            yield "repetition", f"batch {step.b} has a prompt more than once: {split}"
        low, high = self.settings.task.reward_range
        rewards = [c.reward for group in step.batch.groups for c in group.completions if c.reward is not None]
        if beyond := [reward for reward in rewards if not low <= reward <= high]:
            yield (
                "range",
                (
                    f"{count_of(len(beyond), 'reward')} of a batch outside of task.reward_range = [{low:g}, {high:g}], "
                    f"such as {beyond[0]:g}: such batches have no bounds, and the range decides what counts as right. "
                    "Set it to the smallest and the largest reward (said once)"
                ),
            )

    def _standstill(self, version: int, share: float) -> str:
        remedies = [
            "a larger optimizer.learning_rate",
            "more updates per weight sync (schedule.sync_every, schedule.num_iterations)",
        ]
        if self.dtype == "bfloat16":
            plain = not self.settings.optimizer.dither_master_weights
            remedies = ["optimizer.dither_master_weights = true"] * plain + remedies + ['model.dtype = "float32"']
        return (
            f"the weight sync of version {version} changes {share:.4%} of the sampler's weights, less than 1 in "
            f"10,000: updates are lost in rounding to {self.dtype}. What helps: {', '.join(remedies)}. "
            "See docs/precision.md (said once)"
        )
