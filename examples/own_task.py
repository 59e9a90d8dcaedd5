"""A task of your own: the model learns to answer in capital letters.

    python examples/own_task.py    # a few minutes on two cores, from the root of the checkout

A task has prompts in two splits and a reward function. Here the reward is the share of capital
letters: .09 before training, .98 after 15 batches (seed 0). A reward function of the main script
runs in the training process, without a deadline; in a module of its own, it runs in worker
processes. The command line takes a function that returns a task: `--task.name my_module:load`.
"""

import lagrpo
from lagrpo.tasks import RowTask

THINGS = {
    "train": ["animal", "city", "color", "fruit", "metal", "planet", "river", "tree"],
    "test": ["bird", "country", "fish", "flower"],
}


def ask(thing: str) -> tuple[str, str]:
    """The question for a row, and its reference answer, which this reward does not read."""
    return f"Name one {thing}.", ""


def share_of_capitals(completion: str) -> float:
    """The reward: the share of letters that are capitals."""
    letters = [character for character in completion if character.isalpha()]
    capitals = [letter for letter in letters if letter.isupper()]
    return len(capitals) / max(len(letters), 1)


TASK = RowTask("capitals", THINGS, ask, share_of_capitals)

if __name__ == "__main__":
    settings = {"schedule.batches": 15, "run.output_dir": "runs/own_task", "eval.num_prompts": 4}
    result = lagrpo.train("demo", task=TASK, settings=settings)
    assert result.before is not None
    assert result.after is not None
    print(f"share of capitals: {result.before['reward']:.2f} -> {result.after['reward']:.2f}")
