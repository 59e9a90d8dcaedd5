"""A callback: prints, after each batch, the prompt that the policy finds hardest.

    python examples/callback.py    # a few minutes on two cores, from the root of the checkout

A run calls its callbacks after it has written its files. An exception of a callback ends the run
after its batch; the run can be resumed.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import lagrpo


class HardestPrompt(lagrpo.Callback):
    """Keeps the mean reward of each prompt over the run so far."""

    def __init__(self) -> None:
        self.rewards: defaultdict[str, list[float]] = defaultdict(list)

    def on_batch(self, metrics: Mapping[str, Any], rollouts: Sequence[Mapping[str, Any]]) -> None:
        for row in rollouts:
            if row["reward"] is not None:  # None: the completion could not be scored
                self.rewards[row["prompt_text"]].append(row["reward"])
        means = {prompt: fmean(rewards) for prompt, rewards in self.rewards.items()}
        hardest = min(means, key=lambda prompt: means[prompt])
        print(f"batch {metrics['step']}: mean reward {means[hardest]:.2f} for {hardest!r}")


if __name__ == "__main__":
    lagrpo.train("demo", callbacks=[HardestPrompt()])
