"""What a run warns of while it goes on, each once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from lagrpo.settings.schema import Settings
from lagrpo.terminal.text import formatted
from lagrpo.training.explain import count_of
from lagrpo.training.loop import Step

STILL = 1e-4  # a weight sync that changes a smaller share of the weights is warned of

Metrics = Mapping[str, float | None]


class Warnings:
    """Looks at every batch. `dtype` is the weights', `prompts` the size of the split."""

    def __init__(self, settings: Settings, dtype: str, prompts: int) -> None:
        self.settings, self.dtype, self.prompts = settings, dtype, prompts
        self._given: set[str] = set()
        self._pushed = False  # an update had a gradient since the last weight sync
        self._before: Metrics = {}

    def look(self, step: Step, metrics: Metrics) -> list[str]:
        """What is to be said of this batch and was not said before."""
        found = {name: text for name, text in self._find(step) if name not in self._given}
        self._given |= found.keys()
        self._before = metrics
        pushed = any(update.get("grad_norm") for update in step.updates)
        self._pushed = pushed or (self._pushed and not step.reason)
        return list(found.values())

    def _find(self, step: Step) -> Iterator[tuple[str, str]]:
        share = step.sync.get("moved_synced")
        if step.reason and self._pushed and share is not None and share < STILL:
            yield "standstill", self._standstill(step.alpha, share)
        if self.settings.schedule.kind == "certified" and step.reason == "cap":
            yield "certificate", self._no_certificate()
        keys = [group.prompt.key for group in step.batch.groups if group.source == "sampler"]
        if len(set(keys)) < len(keys):
            yield "repetition", self._repetition(step.b)

    def _standstill(self, version: int, share: float) -> str:
        remedies = ["a larger optimizer.lr", "more updates per weight sync (schedule.v, schedule.i)"]
        if self.dtype == "bfloat16":
            plain = self.settings.optimizer.masters == "plain"
            remedies = ['optimizer.masters = "dithered"'] * plain + remedies + ['model.dtype = "float32"']
        return (
            f"the weight sync of version {version} changes {share:.4%} of the sampler's weights, less than 1 in "
            f"10,000: its steps are lost in the rounding to {self.dtype}, and the sampler generates as before. What "
            f"helps: {', '.join(remedies)}. See docs/precision.md; said once"
        )

    def _no_certificate(self) -> str:
        shown = (("lag_certified", "+.3f"), ("lag_ess", ".1f"))
        bound, ess = (formatted(self._before.get(key), form) for key, form in shown)
        return (
            f"schedule certified: {count_of(self.settings.schedule.v, 'batch', 'es')} are over and no batch certified "
            f"that pi_k is better than alpha (the last: J(pi_k) - J(alpha) >= {bound}, with an effective sample size "
            f"of {ess}). More completions in a batch (schedule.prompts, sampling.G) certify smaller gains; said once"
        )

    def _repetition(self, b: int) -> str:
        split = count_of(self.prompts, "prompt")
        return (
            f"batch {b} asks a prompt more than once: the {split} of the split came to their end inside it (said once)"
        )
