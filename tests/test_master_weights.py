"""MasterWeights: they start inside the rounding cells of their weights, and the weights follow them
on average."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tiny import tiny_policy
from torch import nn

from lagrpo.distributed.ranks import Ranks
from lagrpo.lifecycle.checkpoint import NewCheckpoint
from lagrpo.rng import signed16
from lagrpo.training import master_weights, split_masters
from lagrpo.training.master_weights import MasterWeights, Span, dither_, start_master
from lagrpo.training.optimizer import Optimization, Optimizer
from lagrpo.training.trainer import Trainer

ALL = torch.arange(-(2**15), 2**15).to(torch.int16)  # every pattern of 16 bits
RECIPE: Any = SimpleNamespace(needs_pi_ref=False)
DRAWS = np.arange(-(2**15), 2**15)
DRAWS[0] = 0  # what signed16 makes of the 65,536 values of 16 bits


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().view(torch.int16)


def module(*tensors: torch.Tensor) -> nn.Module:
    """A model with these tensors as its parameters, named 0, 1, …"""
    return nn.ParameterList(nn.Parameter(t.clone()) for t in tensors)


def rounded(masters: torch.Tensor) -> torch.Tensor:
    """The weights that MasterWeights makes of float32 numbers, as float64."""
    model = module(torch.zeros(len(masters), dtype=torch.bfloat16))
    held = MasterWeights(model, "plain", 0)
    held.load(lambda span: masters)
    held.write_back()
    return next(model.parameters()).detach().double()


# A dithered master rounds to its weight


@pytest.mark.parametrize(
    ("start", "stop"), [(0, 100), (1, 17), (15, 16), (16, 40), (33, 1000), (999, 1000)]
)
def test_draws_do_not_depend_on_where_they_begin(start, stop):
    all_draws = signed16(0, 1000, 5, "masters", "a.weight")
    assert np.array_equal(signed16(start, stop, 5, "masters", "a.weight"), all_draws[start:stop])


def test_master_filled_in_blocks_is_that_of_one_block(monkeypatch):
    weight = torch.randn(7, 100).bfloat16()
    span = Span("a.weight", weight.shape, 0, weight.numel())
    whole = start_master(span, weight, "dithered", seed=3)
    monkeypatch.setattr(master_weights, "DITHERED_AT_ONCE", 33)
    assert torch.equal(start_master(span, weight, "dithered", seed=3), whole)
    assert not torch.equal(whole, weight.float())
    half = Span("a.weight", weight.shape, 300, weight.numel())
    assert torch.equal(start_master(half, weight[3:], "dithered", seed=3), whole[3:])


@pytest.mark.parametrize(
    "draw", [-32767, -32766, -1, 0, 1, 12345, 32766, 32767], ids="draw {}".format
)
def test_every_bfloat16_number_survives_the_round_trip(draw):
    """All 65,536 patterns: normal, subnormal, the largest, both zeros, infinities and NaN; odd ones
    round away from the ends of their cells, even ones to them."""
    weights = ALL.view(torch.bfloat16)
    value = weights.float()
    moves = (weights != 0) & weights.isfinite()
    dither_(value, np.full(len(value), draw, np.int16))
    assert torch.equal(value.view(torch.int32) - weights.float().view(torch.int32), moves * draw)
    back = torch.empty_like(weights).copy_(value)
    same = bits(back) == ALL
    assert same[~weights.isnan()].all()
    assert back[weights.isnan()].isnan().all()


def test_dither_covers_the_whole_cell_and_is_keyed():
    draws = signed16(0, 1_000_003, 5, "masters", "a.weight")
    assert draws.dtype == np.int16
    assert (draws.min(), draws.max()) == (-32767, 32767)
    # Four standard errors of 10^6 draws that are uniform over 65,535 values.
    assert abs(draws.mean()) < 4 * 65535 / 12**0.5 / 1e3
    assert draws.astype(float).var() == pytest.approx(65535**2 / 12, rel=0.01)
    assert (
        # Sixteen parts of the range have a sixteenth of the draws each.
        np.abs(np.bincount(draws.astype(int) // 4096 + 8, minlength=16) / len(draws) - 1 / 16).max()
        < 2e-3
    )
    assert np.array_equal(draws[:7], signed16(0, 7, 5, "masters", "a.weight"))
    # Another seed, another weight: equal only by chance, one in 65,535.
    for other in ((6, "masters", "a.weight"), (5, "masters", "b.weight")):
        assert (draws[:1000] == signed16(0, 1000, *other)).mean() < 0.01


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@pytest.mark.parametrize("split_on", ["cpu", "cuda"], ids=["split", "whole"])
def test_dithering_does_not_change_the_initial_policy(monkeypatch, kind, split_on):
    """The weights to the bit, of every name and whatever the order of the parameters; masters alone
    differ."""
    monkeypatch.setattr(split_masters, "SPLIT_ON", (split_on,))
    policy = tiny_policy(kind, torch.bfloat16)
    before = {name: w.clone() for name, w in policy.weights.items()}
    optimization = Optimization(lr=1e-3, seed=4)
    masters = Trainer(policy, RECIPE, optimization).masters
    masters.write_back()
    for (name, weight), master in zip(policy.weights.items(), masters.read(), strict=True):
        assert torch.equal(bits(weight), bits(before[name])), name
        steps = master.view(torch.int32) - before[name].float().view(torch.int32)
        assert torch.equal(
            steps.flatten(), torch.from_numpy(signed16(0, weight.numel(), 4, "masters", name)).int()
        )


def test_plain_master_weights_equal_the_weights_and_float32_has_none():
    policy = tiny_policy(dtype=torch.bfloat16)
    for weight, master in zip(
        policy.weights.values(), MasterWeights(policy.model.lm, "plain", 0).read(), strict=True
    ):
        assert torch.equal(master, weight.float())
    policy = tiny_policy()
    masters = MasterWeights(policy.model.lm, "dithered", 0)
    assert [id(p) for p in masters.parameters] == [id(p) for p in policy.model.parameters()]


# A weight is half of its master


@pytest.fixture
def split_on_cpu(monkeypatch):
    monkeypatch.setattr(split_masters, "SPLIT_ON", ("cpu",))


@pytest.mark.parametrize("sign", [0, -(2**31)], ids=["positive", "negative"])
def test_masters_of_any_bits_are_the_same_after_a_split(split_on_cpu, monkeypatch, sign):
    """All upper 16 bits, with the lower bits at and beside the ends and the middle of a cell."""
    upper_bits = torch.arange(2**15, dtype=torch.int32) * 2**16 + sign
    lower_bits = torch.tensor([0, 1, 2**15 - 1, 2**15, 2**15 + 1, 2**16 - 1], dtype=torch.int32)
    masters = (upper_bits[:, None] + lower_bits).view(torch.float32)
    is_number = ~masters.isnan()
    monkeypatch.setattr(split_masters, "NUMBERS_AT_ONCE", 2**12)  # several blocks

    model = module(torch.zeros(masters.shape, dtype=torch.bfloat16))
    held = MasterWeights(model, "plain", 0)
    held.load(lambda span: masters.view(-1)[span.start : span.stop])
    weight = next(model.parameters()).detach()
    assert torch.equal(bits(weight)[is_number], bits(masters.bfloat16())[is_number])
    assert weight[~is_number].isnan().all()
    joined = held.read()[0]
    assert torch.equal(joined.view(torch.int32)[is_number], masters.view(torch.int32)[is_number])
    assert joined[~is_number].isnan().all()


def test_a_checkpoint_copies_split_masters_once(split_on_cpu):
    """They are joined for it already; moments and whole masters are the optimizer's memory."""
    model = tiny_policy(dtype=torch.bfloat16).model.lm
    model.model.norm.float()  # has whole masters
    optimizer = Optimizer(MasterWeights(model, "plain", 0), Optimization(lr=1e-3), Ranks())
    optimizer.make_room()
    state = optimizer.state()
    new = NewCheckpoint(1, state, optimizer.joined_names(), {}, [], {})
    same = {name for name, part in new.copy().trainer_state.items() if part is state[name]}
    assert same == {name for name in state if name.startswith("master/")} - {
        "master/model.norm.weight"
    }


@pytest.mark.parametrize("offload", [False, True], ids=["moments here", "moments on the host"])
def test_steps_of_split_masters_are_adamw_s_of_float32_masters(split_on_cpu, monkeypatch, offload):
    """Matrices and vectors, with several weights in a block and several blocks in a weight. Small
    steps from halfway between two weights come back there, up and down."""
    monkeypatch.setattr(split_masters, "NUMBERS_AT_ONCE", 2**10)
    generator = torch.Generator().manual_seed(0)
    shapes = [(70, 50), (33,), (3, 7), (2**11,), (17, 5)]
    weights = [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]
    model = module(*weights)
    policy: Any = SimpleNamespace(
        model=SimpleNamespace(lm=model),
        version=0,
        advance=lambda: None,
    )
    optimization = Optimization(
        lr=1e-3, weight_decay=0.1, max_grad_norm=None, offload_moments=offload
    )
    trainer = Trainer(policy, RECIPE, optimization)
    trainer.masters.load(lambda span: halfway_masters(weights[int(span.name)], span))

    expected = [
        nn.Parameter(halfway_masters(weight, Span("", weight.shape, 0, weight.numel())))
        for weight in weights
    ]
    groups = [
        {"params": [p for p in expected if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in expected if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, fused=True)
    for _ in range(3):
        for parameter, master in zip(expected, trainer.masters.parameters, strict=True):
            parameter.grad = torch.randn(parameter.shape, generator=generator)
            parameter.grad.view(-1)[::3] = 0  # at first these masters only decay, or stay
            master.grad = parameter.grad.clone()
        optimizer.step()
        trainer.update()
    for weight, parameter, master in zip(
        model.parameters(), expected, trainer.masters.read(), strict=True
    ):
        assert torch.equal(master, parameter)
        assert torch.equal(bits(weight), bits(parameter.bfloat16()))


def halfway_masters(weight: torch.Tensor, span: Span) -> torch.Tensor:
    """Numbers of a span in float32, all halfway between two weights: above or below, by turns."""
    masters = weight.float()
    masters.view(torch.int32).add_(2**15)
    return masters.view(-1)[span.start : span.stop].view(weight.shape if span.is_whole else -1)


@pytest.mark.usefixtures("split_on_cpu")
def test_masters_take_two_bytes_beside_a_weight():
    model = module(torch.zeros(2**12, 2**8, dtype=torch.bfloat16))
    held = MasterWeights(model, "dithered", 0)
    stand_ins = sum(p.untyped_storage().nbytes() for p in held.parameters)
    tensors = [t for b in held.blocks for t in vars(b).values() if isinstance(t, torch.Tensor)]
    assert stand_ins + sum(t.untyped_storage().nbytes() for t in tensors) < 2.01 * 2**20


# The expected step of a weight is its master's


def expected_step(pattern: int, step: float) -> float:
    """The mean step of a bfloat16 weight over all draws when its master makes `step`; both in
    spacings of float32 at the weight (above it), of which a spacing of bfloat16 has 65,536."""
    weight = torch.tensor([pattern], dtype=torch.int16).view(torch.bfloat16).float()
    spacing = float(np.spacing(weight.abs().numpy()[0]))
    masters = weight.repeat(len(DRAWS))
    # A draw moves a float32 by that many neighbors, as `dither_` does.
    masters.view(torch.int32).add_(torch.from_numpy(DRAWS))
    moved = (masters.double() + step * spacing).float()
    return float((rounded(moved) - weight.double()).mean()) / spacing


# Patterns of bfloat16: .0201 and .0200, well inside a binade, and 2^-6.
ODD = 0x3CA5
EVEN = 0x3CA4
POWER = 0x3C80
# A bfloat16 spacing, and half of one, in float32 spacings.
WHOLE = 2**16
HALF = 2**15


@pytest.mark.parametrize("step", [1, 7, 549, 16384, HALF - 1], ids="step {}".format)
@pytest.mark.parametrize("sign", [1, -1], ids=["up", "down"])
def test_expected_step_of_an_odd_weight_equals_the_step_of_its_master_weight(step, sign):
    for pattern in (ODD, ODD - 2**15):  # the weight and its negative
        assert expected_step(pattern, sign * step) == sign * step


@pytest.mark.parametrize("step", [1, 7, 549, 16384, HALF - 1], ids="step {}".format)
@pytest.mark.parametrize("sign", [1, -1], ids=["up", "down"])
def test_expected_step_of_an_even_weight_is_one_float32_spacing_smaller(step, sign):
    """Its cell has both ends, one number more than there are draws on either side."""
    for pattern in (EVEN, EVEN - 2**15):
        assert expected_step(pattern, sign * step) == sign * (step - 1)


@pytest.mark.parametrize(
    "step", [HALF, HALF + 1, WHOLE, 100_000, 5 * WHOLE + 12345, 9 * WHOLE - 1], ids="step {}".format
)
@pytest.mark.parametrize("sign", [1, -1], ids=["up", "down"])
def test_steps_over_several_cells_are_expected_within_one_float32_spacing(step, sign):
    for pattern in (ODD, EVEN):
        assert abs(expected_step(pattern, sign * step) - sign * step) <= 1


@pytest.mark.parametrize("step", [2, 8, 548, 8192, HALF // 2], ids="step {}".format)
def test_at_a_power_of_two_the_expected_step_holds_up_to_half_a_spacing(step):
    """Numbers below it lie twice as densely. Half of the draws are there, in half the width: as
    much leaves the cell on either side."""
    assert abs(expected_step(POWER, 2 * step) - 2 * step) <= 1
    assert abs(expected_step(POWER, -step) + step) <= 1


# A bandit with bfloat16 logits: its expected gradient is exact, its dithers are many

REWARDS = torch.tensor([1.0, 0.0, 0.3, 0.6])
# Of the binade [.5, 1), whose spacing is 2^-8.
LOGITS = torch.tensor([0.515625, 0.75, -0.625, 0.84375]).bfloat16()
COPIES = 2**14


class Bandit:
    """`COPIES` bandits that learn side by side, each with its draw: rows of one parameter, which
    AdamW steps number by number. π of an arm is its softmax; each step follows the exact gradient
    of the expected reward."""

    def __init__(self, dtype: torch.dtype, masters: Any, weight_decay: float) -> None:
        self.parameters: Any = nn.ParameterDict({"logits": LOGITS.to(dtype).repeat(COPIES, 1)})
        self.model = SimpleNamespace(lm=self.parameters)
        self.weights = SimpleNamespace(version=0)
        optimization = Optimization(
            1e-4, weight_decay=weight_decay, max_grad_norm=None, masters=masters, seed=7
        )
        self.trainer = Trainer(self, RECIPE, optimization)  # type: ignore[arg-type]

    @property
    def version(self) -> int:
        return self.weights.version

    def advance(self) -> None:
        self.weights.version += 1

    def learn(self, updates: int) -> None:
        for _ in range(updates):
            pi = self.parameters["logits"].float().softmax(1)
            # A sum over the copies, so that each has the gradient of a bandit alone.
            (-(pi * REWARDS).sum(1)).sum().backward()
            self.trainer.update()

    def pi(self) -> torch.Tensor:
        return self.parameters["logits"].detach().double().softmax(1)


@pytest.mark.parametrize("weight_decay", [0.0, 0.2], ids="weight decay {}".format)
@pytest.mark.parametrize("stages", [1, 2], ids=["one stage", "two stages"])
def test_bandit_in_bfloat16_learns_as_in_float32_only_with_dithered_masters(weight_decay, stages):
    """16 updates of 1e-4 are less than half a spacing (2e-3), weight decay included: plain, no
    weight moves. Dithered, E π_t is float32's within four standard errors of the 16,384 draws; one
    is at most a fiftieth of the way of π."""
    bandits = {
        name: Bandit(dtype, masters, weight_decay)
        for name, dtype, masters in (
            ("float32", torch.float32, "dithered"),
            ("dithered", torch.bfloat16, "dithered"),
            ("plain", torch.bfloat16, "plain"),
        )
    }
    start = bandits["float32"].pi()[0]
    for stage in range(stages):
        for bandit in bandits.values():
            bandit.learn(16 // stages)
            if stage < stages - 1:
                bandit.trainer.end_stage(reset_optimizer=True)
    exact = bandits["float32"].pi()[0]
    way = (exact - start).abs().max()
    assert way > 3e-4
    dithered = bandits["dithered"].pi()
    error = dithered.std(0) / COPIES**0.5
    assert (error < way / 50).all()
    assert ((dithered.mean(0) - exact).abs() < 4 * error).all()
    assert torch.equal(bandits["plain"].pi(), start.expand(COPIES, -1))
