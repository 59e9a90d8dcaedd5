"""Tasks: prompts, completions and rewards as numbers of tokens, and a teacher who errs.

A policy starts as an imitation of the teacher (starts.py), so it has the right answers to offer,
though rarely. Two families, and variants that differ from their family's base in one property:

    task            right answers   reward       tokens    luck
    chain           one             exact        6         no
    chain-many      32              exact        6         no
    chain-wide      3125            exact        6         no
    chain-graded    one             graded       6         no
    chain-long      one             exact        24        no
    chain-luck      one             exact        6         yes
    chain-inept     one             graded       16        no
    gamble          many            graded       11-22     yes
    gamble-sure     many            graded       11-22     no
    gamble-exact    many            exact        11-22     no
    gamble-short    many            graded       4-7       yes
    gamble-firm     many            graded       11-22     yes
    gamble-apt      many            graded       11-22     yes
    journey         many            graded       21-42     yes

chain-large and gamble-large are the two bases for a larger model (starts.py has its sizes),
chain-other and gamble-other the two bases with another random table and another start.

Shapes: B prompts of P tokens, G completions of each of L tokens; leading dimensions (...) are runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor


class Task(Protocol):
    """A family of prompts and their rewards.

    A completion ends with the token `end`, after which there is padding.
    """

    prompt_length: int
    completion_length: int
    vocabulary: int
    end: int
    padding: int
    prompts_per_batch: int
    """prompts of an update, with 8 completions each"""
    updates: int
    """length of a run"""

    def prompts(self, random: np.random.Generator, count: int) -> Tensor:
        """Random prompts [count, P]."""
        ...

    def teach(self, random: np.random.Generator, prompts: Tensor) -> Tensor:
        """The teacher's completions [count, L] of prompts [count, P]."""
        ...

    def grade(self, prompts: Tensor, completions: Tensor, luck: Tensor) -> tuple[Tensor, Tensor]:
        """Rewards to learn from and scores to report, both [..., B, G].

        The score has no luck in it. prompts [..., B, P], completions [..., B, G, L], luck [..., B,
        G]: random numbers in [0, 1).
        """
        ...

    def mistakes(self, prompts: Tensor, completions: Tensor) -> Tensor:
        """The number of steps of each completion that lower its score, [..., B, G]."""
        ...


CHARACTERS = "0123456789.=_#"
EASY_MEDIUM_HARD = (0.4, 0.3, 0.3)
"""shares of the pairs (sum so far, next digit) on which the teacher is often, mostly or rarely
right
"""


@dataclass
class Chain:
    """Running sums modulo 10: "38527=" is followed by "31685.".

    The first digit is copied; then each step adds the next digit to the sum written so far. The
    teacher errs by ±1 or ±2, on a hard pair (sum so far, next digit) more often than not. The
    reward is 1 for a completion without a wrong step, else 0. With n right answers per digit a step
    is also right if it is off by a multiple of 10 / n. With `is_graded` the reward is
    .75^(wrong steps), each step seen from the sum written before it. With `luck` a reward of 0 or 1
    is swapped that often.
    """

    digits: int = 5
    right_per_digit: Literal[1, 2, 5] = 1
    is_graded: bool = False
    luck: float = 0.0
    teacher_is_right: tuple[float, float, float] = (0.97, 0.75, 0.35)
    """on easy, medium and hard pairs"""
    instance: int = 7
    """seed of the table of pairs"""
    prompts_per_batch: int = 8
    updates: int = 1024
    vocabulary: int = 16
    end: int = CHARACTERS.index(".")
    padding: int = CHARACTERS.index("_")
    prompt_length: int = field(init=False)
    completion_length: int = field(init=False)
    _teacher: Tensor = field(init=False)
    """[10, 10, 10]: probability of each next digit, by sum so far and next digit of the prompt"""

    @property
    def _modulus(self) -> int:
        """Digits that are equal modulo this number are equally right."""
        return 10 // self.right_per_digit

    def __post_init__(self) -> None:
        self.prompt_length = self.digits + 1
        self.completion_length = self.digits + 1
        random = np.random.default_rng(self.instance)
        levels = np.repeat(np.arange(3), [round(100 * share) for share in EASY_MEDIUM_HARD])
        level_of_pair = random.permutation(levels).reshape(10, 10)
        likely_error = random.choice([-2, -1, 1, 2], size=(10, 10))
        # The likely error has three quarters of what is left beside the right digit. The rest is
        # spread over the other eight.
        teacher = np.zeros((10, 10, 10))
        for so_far in range(10):
            for digit in range(10):
                p_right = self.teacher_is_right[level_of_pair[so_far, digit]]
                right = (so_far + digit) % 10
                wrong = (right + likely_error[so_far, digit]) % 10
                row = teacher[so_far, digit]
                row[:] = 0.25 * (1 - p_right) / 8
                row[wrong] = 0.75 * (1 - p_right)
                row[right] = p_right
                if self.right_per_digit > 1:
                    turns = range(0, 10, self._modulus)
                    row[:] = sum(np.roll(row, turn) for turn in turns)
                    row /= row.sum()
        self._teacher = torch.from_numpy(teacher)

    def prompts(self, random: np.random.Generator, count: int) -> Tensor:
        digits = torch.from_numpy(random.integers(0, 10, (count, self.digits)))
        return F.pad(digits, (0, 1), value=CHARACTERS.index("="))

    def teach(self, random: np.random.Generator, prompts: Tensor) -> Tensor:
        uniform = torch.from_numpy(random.random((len(prompts), self.digits)))
        so_far = prompts[:, 0]
        if self.right_per_digit > 1:
            turn = self.right_per_digit - 1 - (self.right_per_digit * uniform[:, 0]).long()
            so_far = (so_far + self._modulus * turn) % 10
        written = [so_far]
        for step in range(1, self.digits):
            so_far = _draw(self._teacher[so_far, prompts[:, step]], uniform[:, step])
            written.append(so_far)
        return F.pad(torch.stack(written, dim=-1), (0, 1), value=self.end)

    def grade(self, prompts: Tensor, completions: Tensor, luck: Tensor) -> tuple[Tensor, Tensor]:
        written = completions[..., : self.digits]
        is_complete = (written < 10).all(dim=-1) & (completions[..., -1] == self.end)
        wrong = self.mistakes(prompts, completions)
        if self.is_graded:
            reward = is_complete * 0.75**wrong
            return reward, reward
        reward = (is_complete & (wrong == 0)).float()
        lucky_reward = torch.where(luck < self.luck, 1 - reward, reward)
        return lucky_reward, reward

    def mistakes(self, prompts: Tensor, completions: Tensor) -> Tensor:
        digits = prompts[..., None, : self.digits]
        written = completions[..., : self.digits]
        before = F.pad(written[..., :-1], (1, 0), value=0)  # the first digit is added to 0
        is_wrong = (before + digits - written) % self._modulus != 0
        return is_wrong.sum(dim=-1)


PLAIN = 0
RECKLESS = 1
BAD = 2
FAVORITE = 0.9
"""share of its favorite jump in the choice of a firm teacher, who has one at each place"""


@dataclass
class Gamble:
    """A walk over the nodes 0 .. goal in jumps of 1 to 3; each token is the node that is reached.

    The prompt names one of two terrains for each of `sections` stretches. A fixed shuffle per
    (terrain, node) makes the three jumps out of a node plain, reckless and bad at even nodes,
    plain, plain and bad at odd ones. The reward is min(1, .5 · gain^reckless · .75^bad) with the
    probability survival^reckless, else 0; a walk that does not end at the goal gets 0. As survival
    · gain < 1, plain jumps alone are best, and their reward is .5. With `most_bad` the reward is
    exact: 1 with at most so many bad jumps, else 0.

    The teacher likes plain jumps best, and bad ones least. With `is_firm` it draws a favorite jump
    for each (terrain, node) once, by these likings, and nearly always makes that jump: its mean
    choices stay the same, but it repeats itself, so that a policy has little entropy to lose.
    """

    goal: int = 30
    sections: int = 5
    longest_walk: int = 21
    survival: float = 0.7
    gain: float = 1.2
    most_bad: int | None = None
    is_firm: bool = False
    teacher_likes: tuple[float, float, float] = (1.0, 0.6, 0.4)
    """weights of the teacher's choice among plain, reckless and bad jumps"""
    instance: int = 7
    """seed of the table of jumps"""
    prompts_per_batch: int = 4
    updates: int = 512
    vocabulary: int = field(init=False)
    end: int = field(init=False)
    padding: int = field(init=False)
    prompt_length: int = field(init=False)
    completion_length: int = field(init=False)
    _kind: Tensor = field(init=False)
    """[2, goal + 1, 4]: PLAIN, RECKLESS or BAD by terrain, node and jump"""
    _likes: Tensor = field(init=False)
    """[2, goal + 1, 4]: weights of the teacher's choice by terrain, node and jump"""

    def __post_init__(self) -> None:
        self.prompt_length = self.sections + 1
        self.completion_length = self.longest_walk + 1
        self._first_terrain = self.goal + 1  # tokens: nodes, terrains of each section, end, …
        self.end = self._first_terrain + 2 * self.sections
        self.padding = self.end + 1
        # This token ends every prompt; the first jump leaves from node 0.
        self._start = self.end + 2
        self.vocabulary = self.end + 3
        random = np.random.default_rng(self.instance)
        kind = torch.zeros(2, self.goal + 1, 4, dtype=torch.long)
        for terrain in range(2):
            for node in range(self.goal):
                second = RECKLESS if node % 2 == 0 else PLAIN
                kinds = random.permutation([PLAIN, second, BAD])
                kind[terrain, node, 1:] = torch.from_numpy(kinds)
        self._kind = kind
        self._likes = torch.tensor(self.teacher_likes, dtype=torch.float64)[kind]
        if self.is_firm:
            self._likes = _with_favorites(self._likes, random)

    def prompts(self, random: np.random.Generator, count: int) -> Tensor:
        terrain = torch.from_numpy(random.integers(0, 2, (count, self.sections)))
        tokens = self._first_terrain + 2 * torch.arange(self.sections) + terrain
        return F.pad(tokens, (0, 1), value=self._start)

    def _terrain_at(self, prompts: Tensor, node: Tensor) -> Tensor:
        """The terrain at nodes [..., n], for prompts [..., P]."""
        sections = prompts[..., :-1] - self._first_terrain - 2 * torch.arange(self.sections)
        width = self.goal // self.sections
        return sections.gather(-1, (node // width).clamp(max=self.sections - 1))

    def teach(self, random: np.random.Generator, prompts: Tensor) -> Tensor:
        uniform = torch.from_numpy(random.random((len(prompts), self.completion_length)))
        node = torch.zeros(len(prompts), dtype=torch.long)
        is_done = torch.zeros(len(prompts), dtype=torch.bool)
        written = []
        for step in range(self.completion_length):
            terrain = self._terrain_at(prompts, node[:, None])[:, 0]
            weight = self._likes[terrain, node]
            is_jump = (torch.arange(4) > 0) & (node[:, None] + torch.arange(4) <= self.goal)
            jump = _draw(weight * is_jump, uniform[:, step])
            arrived = node == self.goal
            token = torch.where(arrived, self.end, node + jump)
            written.append(torch.where(is_done, self.padding, token))
            node = torch.where(arrived, node, node + jump)
            is_done = is_done | arrived
        return torch.stack(written, dim=-1)

    def grade(self, prompts: Tensor, completions: Tensor, luck: Tensor) -> tuple[Tensor, Tensor]:
        is_valid, reckless, bad = self._walks(prompts, completions)
        if self.most_bad is not None:
            reward = (is_valid & (bad <= self.most_bad)).float()
            return reward, reward
        prize = is_valid * (0.5 * self.gain**reckless * 0.75**bad).clamp(max=1.0)
        chance = self.survival**reckless
        return prize * (luck < chance), prize * chance

    def mistakes(self, prompts: Tensor, completions: Tensor) -> Tensor:
        _, reckless, bad = self._walks(prompts, completions)
        is_reckless_worse = self.survival * self.gain < 1
        return bad + reckless * is_reckless_worse

    def _walks(self, prompts: Tensor, completions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """True for walks that end at the goal, and their numbers of reckless and of bad jumps.

        All are [..., B, G].
        """
        is_end = completions == self.end  # [..., B, G, L]
        is_move = is_end.cumsum(dim=-1) == 0  # the tokens before the end
        node = completions.clamp(max=self.goal)
        before = F.pad(node[..., :-1], (1, 0), value=0)
        jump = node - before
        is_legal = (completions <= self.goal) & (jump >= 1) & (jump <= 3)
        farthest = (node * is_move).amax(dim=-1)
        is_valid = (is_legal | ~is_move).all(dim=-1) & is_end.any(dim=-1) & (farthest == self.goal)
        of_completion = prompts[..., None, :].expand(*completions.shape[:-1], -1)
        terrain = self._terrain_at(of_completion, before)
        kind = self._kind[terrain, before, jump.clamp(0, 3)]
        reckless = ((kind == RECKLESS) & is_move).sum(dim=-1)
        bad = ((kind == BAD) & is_move).sum(dim=-1)
        return is_valid, reckless, bad


def _with_favorites(likes: Tensor, random: np.random.Generator) -> Tensor:
    """Weights [2, nodes, 4] of a teacher who drew a favorite jump at each place by `likes`."""
    shape = likes.shape
    jumps = likes[..., 1:].reshape(-1, 3)  # no jump of length 0
    favorite = _draw(jumps, torch.from_numpy(random.random(len(jumps))))
    weights = torch.full_like(jumps, (1 - FAVORITE) / 2)
    weights[torch.arange(len(jumps)), favorite] = FAVORITE
    return F.pad(weights, (1, 0)).view(shape)


def _draw(weight: Tensor, uniform: Tensor) -> Tensor:
    """Indices [N], drawn in proportion to weights [N, n] by inversion.

    uniform [N]: random numbers in [0, 1). If all weights are 0, the last index.
    """
    share = weight.cumsum(dim=-1)
    index = (share <= uniform[:, None] * share[:, -1:]).sum(dim=-1)
    return index.clamp(max=weight.shape[-1] - 1)


OTHER_INSTANCE = 11

TASKS: dict[str, Callable[[], Task]] = {
    "chain": Chain,
    "chain-many": lambda: Chain(right_per_digit=2),
    "chain-wide": lambda: Chain(right_per_digit=5, teacher_is_right=(0.95, 0.5, 0.0)),
    "chain-graded": lambda: Chain(is_graded=True),
    "chain-long": lambda: Chain(
        digits=23, teacher_is_right=(0.995, 0.97, 0.80), prompts_per_batch=4, updates=512
    ),
    "chain-inept": lambda: Chain(
        digits=15,
        is_graded=True,
        teacher_is_right=(0.8, 0.5, 0.2),
        prompts_per_batch=4,
        updates=512,
    ),
    "chain-luck": lambda: Chain(luck=0.1),
    "chain-large": Chain,
    "chain-other": lambda: Chain(instance=OTHER_INSTANCE),
    "gamble": Gamble,
    "gamble-sure": lambda: Gamble(survival=1.0, gain=1.0),
    "gamble-exact": lambda: Gamble(survival=1.0, gain=1.0, most_bad=1),
    "gamble-apt": lambda: Gamble(teacher_likes=(1.0, 0.1, 0.06)),
    "gamble-firm": lambda: Gamble(is_firm=True),
    "gamble-short": lambda: Gamble(goal=8, sections=2, longest_walk=6),
    "journey": lambda: Gamble(goal=60, sections=10, longest_walk=41),
    "gamble-large": Gamble,
    "gamble-other": lambda: Gamble(instance=OTHER_INSTANCE),
}
"""The tasks by name."""
