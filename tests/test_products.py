"""The matrix products of the kernels, and the packed weights that they read."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tiny import computed_by, tiny_policy
from torch import Tensor, nn

from lagrpo.cpu import kernels, library, panels
from lagrpo.model.layout import PackedLayout
from lagrpo.model.model import Packed, PackedWeights, Weights, copy_policy
from lagrpo.rollout.local import LocalSampler
from lagrpo.types import Prompt, Request

pytestmark = pytest.mark.usefixtures("with_kernels")


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def linear(out: int, k: int, bias: bool = True, seed: int = 0) -> nn.Linear:
    layer = nn.Linear(k, out, bias=bias, dtype=torch.bfloat16).requires_grad_(False)
    layer.weight.copy_(random(out, k, seed=seed))
    return layer


@pytest.mark.parametrize(
    ("out", "k"),
    [
        pytest.param(1, 2, id="2 to 1"),
        pytest.param(101, 576, id="576 to 101"),
        pytest.param(200, 2500, id="2500 to 200"),
    ],
)
def test_product_equals_its_layers_and_is_independent_of_other_rows(out, k):
    """Two layers as one, refilled; any number of rows; outputs that fill no panel; every slice has
    the same bits."""
    layers = [linear(out, k), linear(5, k, bias=False, seed=1)]
    product = panels.Panels(layers)
    for layer in layers:
        layer.weight.mul_(1.25)
    product.fill(layers)
    assert all(map(torch.equal, product.weights(), (m.weight for m in layers)))
    x = random(700, k, seed=2)
    all_outputs = product(x)
    exact = torch.cat(
        [
            x.double() @ m.weight.double().mT + (0 if m.bias is None else m.bias.double())
            for m in layers
        ],
        1,
    )
    # Sums in float32, rounded to bfloat16 once.
    assert ((all_outputs.double() - exact).abs() / exact.abs().amax()).max().item() < 2**-8
    # Around the numbers of rows at which kernels change: one, a tile of 16, several tiles,
    # hundreds.
    for first, rows in [
        (0, 1),
        (699, 1),
        (3, 2),
        (7, 9),
        (100, 15),
        (90, 16),
        (11, 17),
        (1, 33),
        (64, 64),
        (9, 513),
    ]:
        assert torch.equal(product(x[first : first + rows]), all_outputs[first : first + rows])
    threads = torch.get_num_threads()
    # Two threads if there was one, else one.
    torch.set_num_threads(3 - min(threads, 2))
    assert torch.equal(product(x), all_outputs)
    torch.set_num_threads(threads)


# The files that are compiled to look at a level. All of them take many times as long as these.
PRODUCTS = tuple(path for path in library.SOURCES if path.stem.startswith("products"))
FILES = {
    "native": library.SOURCES,
    "emulated_tiles": library.SOURCES,
    "avx512": (*PRODUCTS, library.HERE / "attention.c"),
}


@contextmanager
def at_level(level: str) -> Iterator[None]:
    """Makes this process compute with the instructions of one level, and with two threads.

    With one thread, a store into the next panel is overwritten later and goes unnoticed.
    """
    threads = torch.get_num_threads()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(library.ISA, level)
            patch.setattr(library, "SOURCES", FILES.get(level, PRODUCTS))
            loaded = library.load_library()
            patch.setattr(library, "_library", lambda: loaded)
            panels.chosen_products.cache_clear()
            torch.set_num_threads(2)
            yield
    finally:
        torch.set_num_threads(threads)
        panels.chosen_products.cache_clear()


@functools.cache
def computed_at(level: str) -> tuple[str, Tensor]:
    """The way of computing products at a level, and a product."""
    with at_level(level):
        way = str(panels.chosen_products())
        x = random(200, 576, seed=200)
        layer = linear(77, 576, bias=False, seed=77)
        y = panels.Panels([layer])(x)
        exact = x.double() @ layer.weight.double().mT
        assert ((y.double() - exact).abs() / exact.abs().max()).max() < 2**-8
        for rows in (1, 16, 31, 32, 33, 130):
            assert torch.equal(panels.Panels([layer])(x[:rows]), y[:rows])
        return way, y


def lacks(level: str) -> bool:
    """True if this processor lacks the level. Then the level is rejected."""
    if not library.LEVELS[level].needs - library.cpu_flags():
        return False
    with pytest.raises(library.NoKernels, match="lacks"), at_level(level):
        pass
    return True


@pytest.mark.parametrize("level", sorted(library.LEVELS))
def test_at_every_level_of_instructions_products_are_right_and_independent_of_their_rows(level):
    """AMX by its instructions in plain C where there are none."""
    if lacks(level):
        return
    products, y = computed_at(level)
    native_products, native_y = computed_at("native")
    expected = {
        "emulated_tiles": "AMX emulated in C",
        "native": native_products,
        "avx512_bf16": "AVX512-BF16",
    }
    assert products == expected.get(level, "vectors")
    # Vectors add in one order, with or without an instruction for pairs.
    if ("AMX" in products) == ("AMX" in native_products):
        assert torch.equal(y, native_y)


def attention_at(level: str) -> list[Tensor]:
    """Attention and its gradients."""
    layout = PackedLayout.build([(7, (3, 9, 2)), (130, (70, 3))])
    q, k, v, g = (random(layout.rows, heads, 64, seed=heads) for heads in (9, 3, 3, 9))
    with at_level(level):
        out, lse = kernels.attention(layout, q, k, v, 0.125)
        return [out, lse, *kernels.attention_backward(layout, q, k, v, out, lse, g, 0.125)]


def test_attention_needs_no_instruction_for_pairs_to_have_the_bits_of_one():
    if not lacks("avx512"):
        assert all(map(torch.equal, attention_at("avx512"), attention_at("native")))


def test_steps_through_all_layers_by_tiles_sample_what_the_trainer_computes():
    with at_level("emulated_tiles"), torch.no_grad():
        policy = tiny_policy("qwen3", dtype=torch.bfloat16, backend="c")
        assert policy.model.computation.endswith("products by AMX emulated in C")
        sampler = LocalSampler(copy_policy(policy), 0, 9, 64)
        prompts = [
            Prompt(n, ({"role": "user", "content": "?"},), None, tuple(range(5, 8 + n)))
            for n in range(3)
        ]
        for request, group in sampler.sample([Request(1, 0, prompt) for prompt in prompts], 6):
            packed = Packed.build(
                [(request.prompt.token_ids, [c.token_ids for c in group.completions])]
            )
            assert torch.equal(
                policy.logp(packed), torch.cat([c.rollout_logp for c in group.completions])
            )
        layers = sampler.policy.model.layers
        assert layers is not None
        assert layers._stack is not None


def test_products_that_are_wrong_by_one_bit_are_not_used(monkeypatch, caplog):
    """Every way of this processor is compared with plain sums, and PyTorch computes if all are
    wrong."""
    linear = panels.linear

    def wrong(x, n, fields, out=None):
        y = linear(x, n, fields, out)
        if n > 40:
            y.view(torch.int16)[0, 3] ^= 1
        return y

    assert panels.products_are_right()
    monkeypatch.setattr(panels, "linear", wrong)
    assert not panels.products_are_right()
    assert panels.chosen_products.__wrapped__() is None
    assert "are wrong on this processor" in caplog.text
    monkeypatch.undo()
    assert panels.chosen_products.__wrapped__() == panels.chosen_products()


# Panels, and who has them


def test_an_odd_number_of_inputs_takes_pytorchs_products():
    policy = tiny_policy(dtype=torch.bfloat16, intermediate_size=47)
    assert not policy.model.exact
    assert isinstance(copy_policy(policy).weights, Weights)
    assert "products by" not in policy.model.computation


def panels_of(policy):
    """The panels that the policy computes with."""
    return policy.model.layers.panels.current()


def changed(policy) -> None:
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(1.1)


def test_one_packed_copy_serves_trainer_and_sampler_of_one_version():
    policy = tiny_policy(dtype=torch.bfloat16)
    alpha = copy_policy(policy)
    assert isinstance(alpha.weights, PackedWeights)
    first = panels_of(policy)
    # v = 1, i = 1: an update and a weight sync, without a forward pass between them.
    for version in (1, 2):
        changed(policy)
        alpha.load(policy.weights, version)
        assert panels_of(alpha) is panels_of(policy) is first


def test_lent_panels_keep_their_weights_while_the_trainer_learns():
    policy = tiny_policy(dtype=torch.bfloat16)
    packed = Packed.build([([5, 6, 7], [torch.tensor([4, 9, 11])])])
    alpha = copy_policy(policy)
    with torch.no_grad():
        before = policy.logp(packed)
        changed(policy)
        assert not torch.equal(policy.logp(packed), before)
        assert torch.equal(alpha.logp(packed), before)
        lent = panels_of(alpha)
        alpha.load(policy.weights, 1)
        assert torch.equal(alpha.logp(packed), policy.logp(packed))
        changed(policy)
        policy.logp(packed)
        # The panels that the sampler gave back are used again: there are never more than two.
        assert panels_of(policy) is lent


def test_a_weight_that_is_changed_in_place_is_packed_again():
    policy = tiny_policy(dtype=torch.bfloat16)
    packed = Packed.build([([5, 6, 7], [torch.tensor([4, 9, 11])])])
    layers: Any = policy.model.decoder.layers
    with torch.no_grad():
        before = policy.logp(packed)
        layers[1].mlp.down_proj.weight.mul_(-3)
        after = policy.logp(packed)
    assert not torch.equal(before, after)
    policy = computed_by(policy, "torch")
    with torch.no_grad():
        assert (policy.logp(packed) - after).abs().max().item() < 0.1
        assert (policy.logp(packed) - before).abs().max().item() > 0.1
