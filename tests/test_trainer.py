"""The trainer's step: one gradient whatever the micro-batches, one batch or v mini-batches, masked
or not."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_sampling import request, requests_for
from tiny import tiny_policy

from lagrpo.core.inputs import LossInputs
from lagrpo.core.objective import Derivative, Recipe
from lagrpo.core.recipes import resolve
from lagrpo.distributed.ranks import Ranks
from lagrpo.model.model import Model, Policy, copy_policy
from lagrpo.rollout.local import LocalSampler
from lagrpo.settings.schema import Settings
from lagrpo.settings.sections import OptimizerSettings
from lagrpo.startup.build import build_trainer
from lagrpo.training.batch import assemble, micro_batches
from lagrpo.training.master_weights import MasterWeights
from lagrpo.training.optimizer import Optimization
from lagrpo.training.trainer import Trainer, deterministic
from lagrpo.types import Group, Outcome

either_computation = pytest.mark.usefixtures(
    "either_computation"
)  # float64 is PyTorch's in any case
MAX_TOKENS = 12


def judge_groups(
    groups: list[Group], rule=lambda g, j, c: float(len(c.token_ids) % 3 == 0)
) -> list[Group]:
    """Groups with rewards by a rule of (group, index, completion)."""
    return [
        Group(
            group.prompt,
            tuple(
                replace(c, outcome=Outcome.scored(rule(g, j, c)))
                for j, c in enumerate(group.completions)
            ),
        )
        for g, group in enumerate(groups)
    ]


def generate_groups(policy: Policy, count: int = 4, batch: int = 1, G: int = 6) -> list[Group]:
    sampler = LocalSampler(copy_policy(policy), 0, MAX_TOKENS, 64)
    groups = {r.prompt.key: g for r, g in sampler.sample(requests_for(policy, count, batch), G)}
    return [groups[key] for key in sorted(groups)]


def assembled(recipe, groups, b: int = 1):
    return assemble(groups, recipe, MAX_TOKENS, seed=0, b=b)


def gradient(policy: Policy, recipe, rows) -> torch.Tensor:
    """The gradient that a step would use, flat, without making the step."""
    policy.model.zero_grad()
    for micro in rows:
        logp = policy.logp(micro.packed)
        x = micro.with_logprobs(logp.detach()).loss_inputs(logp, policy.version)
        recipe.loss(x, micro.weight_C).backward()
    return torch.cat(
        [
            (torch.zeros_like(p) if p.grad is None else p.grad).flatten()
            for p in policy.model.parameters()
        ]
    )


def make_trainer(policy: Policy, recipe, **changes) -> Trainer:
    return Trainer(policy, recipe, Optimization(**({"lr": 1e-3, "updates": 10} | changes)))


@pytest.mark.parametrize(
    ("name", "tokens"), [("grpo", 1), ("dapo", 20), ("off_policy_grpo_exact", 55)]
)
def test_the_split_into_micro_batches_cannot_change_the_gradient(name, tokens):
    policy, recipe = tiny_policy(dtype=torch.float64), resolve(name, {"beta": 0.0})
    batch = assembled(recipe, judge_groups(generate_groups(policy)))
    expected = gradient(policy, recipe, [*micro_batches(batch, 10_000)])
    rows = micro_batches(batch, tokens)
    # Without several rows and a gradient there would be nothing to compare.
    assert len(rows) > 2
    assert expected.norm() > 1e-3
    torch.testing.assert_close(gradient(policy, recipe, rows), expected, rtol=1e-5, atol=1e-7)


def test_loss_that_compares_completions_takes_more_groups_than_a_row_has_completions():
    policy, recipe = tiny_policy(dtype=torch.float64), resolve("opmd_pairwise")
    batch = assembled(recipe, judge_groups(generate_groups(policy, count=9)))
    expected = gradient(policy, recipe, micro_batches(batch, 10_000, whole_groups=True))
    rows = micro_batches(batch, 1, whole_groups=True)
    assert len(rows) > max(len(micro.members) for micro in rows)
    assert expected.norm() > 1e-3
    torch.testing.assert_close(gradient(policy, recipe, rows), expected, rtol=1e-5, atol=1e-7)


def test_ranks_share_all_rows_evenly():
    policy, recipe = tiny_policy(), resolve("dr_grpo")
    batch = assembled(recipe, judge_groups(generate_groups(policy, count=6)))
    for tokens in (60, 4096):
        for size in (2, 3, 8):
            shares = [micro_batches(batch, tokens, ranks=Ranks(rank, size)) for rank in range(size)]
            assert sorted(c for rows in shares for m in rows for c in m.members) == [*range(36)]
            costs = [sum(m.packed.layout.rows for m in rows) for rows in shares]
            step = max(
                len(g.prompt.token_ids) + max(c.length for c in g.completions) for g in batch.groups
            )
            assert max(costs) - min(costs) <= 2 * step, (tokens, size, costs)
            assert max(m.packed.layout.rows for rows in shares for m in rows) <= tokens


@either_computation
def test_entropy_is_that_of_the_first_update_on_the_batch():
    policy, recipe = tiny_policy(), resolve("grpo", {"beta": 0.0})
    rows = micro_batches(assembled(recipe, judge_groups(generate_groups(policy))), 60)
    measuring = Trainer(policy, recipe, Optimization(lr=1e-3))
    expected = [torch.empty(len(m.completion_T)) for m in rows]
    with torch.no_grad():
        for micro, entropy_T in zip(rows, expected, strict=True):
            policy.logp(micro.packed, entropy_T)
    scored, sums = measuring.step(rows)
    assert sums["entropy"] == pytest.approx(torch.cat(expected).sum().item(), rel=1e-5)
    assert sums["tokens_entropy"] == sum(map(len, expected))
    assert "entropy" not in measuring.step(scored)[1]


def test_the_order_of_completions_and_groups_cannot_change_the_gradient():
    policy, recipe = tiny_policy(dtype=torch.float64), resolve("grpo", {"beta": 0.0})
    groups = judge_groups(generate_groups(policy))
    turned = [Group(g.prompt, g.completions[::-1]) for g in groups[::-1]]
    one, other = (
        gradient(policy, recipe, micro_batches(assembled(recipe, x), 999)) for x in (groups, turned)
    )
    torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("masked_count", [False, True])
def test_masked_groups_leave_gradient_and_normalizer_as_documented(masked_count):
    """Group 0 has equal rewards. Masked, it costs no forward pass; the others' gradient is that of
    a batch without it, times 1 (masked tokens do not count) or times tokens kept / all tokens (they
    count). Log-probs are float32."""
    policy = tiny_policy(dtype=torch.float64)
    overrides = {
        "beta": 0.0,
        "mask_zero_variance": True,
        "masked_count": masked_count,
        "reduction": "token_mean",
    }
    recipe = resolve("grpo", overrides)
    groups = judge_groups(generate_groups(policy), lambda g, j, c: 1.0 if g == 0 else float(j % 2))
    batch, without = assembled(recipe, groups), assembled(recipe, groups[1:])
    rows = micro_batches(batch, 999)
    assert sum(len(micro.packed.token_ids) for micro in rows) == int(without.lengths_C.sum())
    factor = float(without.lengths_C.sum() / batch.lengths_C.sum()) if masked_count else 1.0
    expected = factor * gradient(policy, recipe, micro_batches(without, 999))
    torch.testing.assert_close(
        gradient(policy, recipe, rows), expected, rtol=1e-5, atol=1e-7
    )  # log-probs and weights are float32


def test_a_batch_with_every_group_masked_makes_no_update():
    policy, recipe = tiny_policy(), resolve("grpo_masked", {"beta": 0.0})
    batch = assembled(recipe, judge_groups(generate_groups(policy), lambda g, j, c: 1.0))
    before = {name: w.clone() for name, w in policy.weights.items()}
    assert micro_batches(batch, 999) == []
    assert not batch.in_objective
    assert make_trainer(policy, recipe, weight_decay=0.1).step(
        [], in_objective=batch.in_objective
    ) == ([], {})
    assert policy.version == 0
    assert all(torch.equal(before[name], w) for name, w in policy.weights.items())


@pytest.mark.parametrize(
    ("name", "overrides", "silent"),
    [
        ("grpo", {"beta": 0.0}, True),
        ("grpo", {}, False),
        ("dr_grpo", {}, True),
        ("red_weight", {}, True),
        ("rec_one_side_is", {}, True),
        ("asymre", {}, False),
        ("opmd", {}, False),
        ("opmd_pairwise", {"anchor": "alpha"}, False),
    ],
)
def test_groups_without_a_signal_are_computed_only_where_they_have_a_gradient(
    name, overrides, silent
):
    """If an advantage of 0 is silent, leaving its completions out changes no gradient; elsewhere it
    would."""
    policy, recipe = tiny_policy(dtype=torch.float64), resolve(name, overrides)
    assert recipe.skips_zero_advantage == silent
    if recipe.needs_pi_ref:
        return
    groups = judge_groups(generate_groups(policy), lambda g, j, c: 1.0 if g < 2 else float(j % 2))
    for group in groups:  # as if an older policy had sampled them
        for c in group.completions:
            c.rollout_logp.sub_(0.3)
    batch = assembled(recipe, groups)
    everything = micro_batches(batch, 10_000, whole_groups=True)
    fewer = micro_batches(batch, 10_000, whole_groups=True, skip_zero_advantage=True)
    assert sum(len(m.members) for m in fewer) == 12 < sum(len(m.members) for m in everything)
    all_gradient, part = gradient(policy, recipe, everything), gradient(policy, recipe, fewer)
    assert torch.allclose(all_gradient, part, rtol=1e-5, atol=1e-7) == silent


@either_computation
def test_a_gradient_known_to_be_zero_is_still_an_update():
    """Unmasked groups without signal: nothing is computed, and AdamW moves on by its moments, as on
    a zero gradient."""
    moved = []
    for silent in (True, False):
        policy, recipe = tiny_policy(), resolve("dr_grpo")
        stepping = make_trainer(policy, recipe)
        stepping.step(micro_batches(assembled(recipe, judge_groups(generate_groups(policy))), 999))
        flat = assembled(recipe, judge_groups(generate_groups(policy), lambda g, j, c: 1.0), b=2)
        rows = micro_batches(flat, 999, skip_zero_advantage=silent)
        assert bool(rows) != silent
        stepping.step(rows, in_objective=flat.in_objective)
        assert policy.version == 2
        moved.append(torch.cat([w.flatten() for w in policy.weights.values()]))
    torch.testing.assert_close(moved[0], moved[1], rtol=0, atol=1e-7)


def test_only_scored_completions_enter_statistics_and_loss():
    policy, recipe = tiny_policy(), resolve("dr_grpo")
    groups = judge_groups(generate_groups(policy, count=2))
    mixed = list(groups[0].completions)
    mixed[1] = replace(mixed[1], outcome=Outcome.unscored("no verdict"))
    mixed[4] = replace(mixed[4], outcome=Outcome.failed("server died"))
    batch = assembled(recipe, [Group(groups[0].prompt, tuple(mixed)), groups[1]])
    assert [m for m in batch.member_C if m[0] == 0] == [(0, 0), (0, 2), (0, 3), (0, 5)]
    rewards = [float(len(mixed[j].token_ids) % 3 == 0) for j in (0, 2, 3, 5)]
    expected = torch.tensor(rewards) - sum(rewards) / 4
    torch.testing.assert_close(batch.advantage_C[:4], expected.float())


def test_v_batches_from_one_alpha_equal_v_mini_batches_of_one_larger_batch():
    """(v, i = 1) against one batch of v times the prompts, generated at once by the same α and
    stepped in v parts."""
    v = 3
    runs = []
    for together in (False, True):
        policy = tiny_policy(dtype=torch.float64)
        recipe = resolve("off_policy_grpo", {"beta": 0.0, "reduction": "token_mean"})
        stepping = make_trainer(policy, recipe)
        sampler = LocalSampler(copy_policy(policy), 0, MAX_TOKENS, 64)
        requests_by_batch = {
            b: [request(10 * b + n, "y" * (n + b), b, policy=policy) for n in range(2)]
            for b in range(1, v + 1)
        }
        parts: dict[int, list[Group]] = {}
        if together:
            everything = list(
                sampler.sample([r for b in requests_by_batch for r in requests_by_batch[b]], 5)
            )
            parts = {
                b: sorted((g for r, g in everything if r.batch == b), key=lambda g: g.prompt.key)
                for b in requests_by_batch
            }
        for b, requests in requests_by_batch.items():
            if not together:
                parts = {
                    b: sorted(
                        (g for _, g in sampler.sample(requests, 5)), key=lambda g: g.prompt.key
                    )
                }
            stepping.step(micro_batches(assembled(recipe, judge_groups(parts[b]), b), 999))
        assert policy.version == v
        runs.append(torch.cat([w.flatten() for w in policy.weights.values()]))
    assert (runs[0] - runs[1]).abs().max() <= 1e-6  # a thousandth of a step


@either_computation
def test_the_first_of_i_updates_starts_at_pi_k(monkeypatch):
    """With clipped_exact the center is π_k/α: at the first update π_k is π, and the second one is
    given it."""
    seen: list[LossInputs] = []
    differentiate = Recipe.differentiate

    def record(recipe: Recipe, x: LossInputs, weight_C: torch.Tensor) -> Derivative:
        seen.append(x)
        return differentiate(recipe, x, weight_C)

    monkeypatch.setattr(Recipe, "differentiate", record)
    policy, recipe = tiny_policy(), resolve("off_policy_grpo_exact", {"beta": 0.0})
    rows = micro_batches(assembled(recipe, judge_groups(generate_groups(policy))), 999)
    stepping = make_trainer(policy, recipe, lr=1e-2)
    pi_k = stepping.compute_logprobs(rows)
    scored, _ = stepping.step(rows)
    assert [micro.old_logp_T.tolist() for micro in scored if micro.old_logp_T is not None] == [
        logp_T.tolist() for logp_T in pi_k
    ]
    stepping.step(scored)
    assert not torch.equal(stepping.compute_logprobs(rows)[0], pi_k[0])
    first, second = seen
    assert [x.old_logp.tolist() for x in seen if x.old_logp is not None] == [pi_k[0].tolist()] * 2
    assert first.rollout_logp is not None
    assert float((first.logp - first.rollout_logp).abs().max()) < 1e-4
    assert float((second.logp - first.rollout_logp).abs().max()) > 1e-4


def test_a_sampler_with_other_arithmetic_is_corrected_for_and_not_clipped_for():
    """The sampler reports every log-prob .3 nats too low: pi_k/alpha = e^.3 = 1.35 at each token,
    beyond the clip range of .2. Over alpha the clip then cuts what has A > 0 before any update;
    over pi_k it cuts nothing."""
    policy = tiny_policy(dtype=torch.float64)
    groups = judge_groups(generate_groups(policy))
    for group in groups:
        for c in group.completions:
            c.rollout_logp.sub_(0.3)

    def of(name: str, most: float = math.inf, **changes) -> torch.Tensor:
        recipe = resolve(name, {"beta": 0.0} | changes)
        rows = micro_batches(assembled(recipe, groups), 60)
        for micro in rows:
            micro.advantage_C.clamp_(max=most)
        return gradient(policy, recipe, rows)

    plain = of("grpo_recomputed")
    torch.testing.assert_close(plain, of("stale_reinforce"), rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(of("grpo_tis"), math.exp(0.3) * plain, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(of("grpo_tis", cap=1.25), 1.25 * plain, rtol=1e-4, atol=1e-7)
    assert of("grpo_icepop", cap=1.3).norm() == 0 < plain.norm()
    torch.testing.assert_close(
        of("grpo"), math.exp(0.3) * of("grpo_recomputed", most=0.0), rtol=1e-4, atol=1e-7
    )


@either_computation
def test_reference_is_swapped_only_at_the_end_of_a_stage():
    policy = tiny_policy()
    recipe = resolve("grpo", {"beta": 0.5})
    stepping = Trainer(policy, recipe, Optimization(lr=1e-2), reference=copy_policy(policy))
    batch = assembled(recipe, judge_groups(generate_groups(policy)))
    for expected_zero in (True, False):
        _, sums = stepping.step(stepping.pack(batch, 999))
        assert (sums["kl_ref"] == pytest.approx(0, abs=1e-6)) == expected_zero
    stepping.end_stage(reset_optimizer=True)
    assert stepping.reference is not None
    assert stepping.reference.version == policy.version == 2
    assert stepping.step(stepping.pack(batch, 999))[1]["kl_ref"] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("filled", [True, False])
@pytest.mark.parametrize(("enabled", "warn_only"), [(False, False), (True, False), (True, True)])
def test_choice_of_deterministic_algorithms_is_the_caller_s_again_after_a_step(
    enabled, warn_only, filled
):
    model: Any = SimpleNamespace(
        device=torch.device("cuda"), config=tiny_policy().model.config, lm=None
    )
    fill: Any = torch.utils.deterministic
    before = fill.fill_uninitialized_memory
    torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
    fill.fill_uninitialized_memory = filled
    try:
        with deterministic(model):
            assert torch.are_deterministic_algorithms_enabled()
        assert torch.are_deterministic_algorithms_enabled() == enabled
        assert torch.is_deterministic_algorithms_warn_only_enabled() == warn_only
        assert fill.fill_uninitialized_memory == filled
    finally:
        torch.use_deterministic_algorithms(False)
        fill.fill_uninitialized_memory = before


def test_learning_rate_schedules():
    constant = Optimization(lr=1.0, warmup=3, updates=13)
    # A rate of 0 would waste the first update, so the warm-up begins at 1 / (warmup + 1).
    assert [constant.rate(u) for u in (0, 1, 2, 3, 12)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    linear = replace(constant, schedule="linear")
    assert [linear.rate(u) for u in (3, 8, 12)] == pytest.approx([1.0, 0.5, 0.1])
    cosine = replace(constant, schedule="cosine")
    assert [cosine.rate(u) for u in (3, 8, 12)] == pytest.approx(
        [1.0, 0.5, (1 + math.cos(0.9 * math.pi)) / 2]
    )


def test_last_update_of_a_line_has_a_rate_above_zero():
    linear = Optimization(lr=1.0, schedule="linear", updates=4)
    assert [linear.rate(u) for u in range(4)] == [1.0, 0.75, 0.5, 0.25]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weight_decay_leaves_norms_and_biases_alone(dtype):
    """On a gradient of 0 AdamW only decays: every matrix by 1 - lr · decay, and nothing else."""
    policy, recipe = (
        tiny_policy("qwen2", dtype=dtype),
        resolve("dr_grpo"),
    )  # queries, keys and values with a bias
    before = {name: w.float().clone() for name, w in policy.weights.items()}
    stepping = make_trainer(policy, recipe, lr=0.5, weight_decay=0.5)
    flat = assembled(recipe, judge_groups(generate_groups(policy), lambda g, j, c: 1.0))
    stepping.step(
        micro_batches(flat, 999, skip_zero_advantage=True), in_objective=flat.in_objective
    )
    kinds = {name.split(".")[-2] + "." + name.split(".")[-1] for name in before}
    assert {"q_proj.bias", "input_layernorm.weight", "norm.weight"} <= kinds
    for name, weight in policy.weights.items():
        expected = before[name] * (0.75 if weight.ndim > 1 else 1)
        torch.testing.assert_close(
            weight.float(), expected, rtol=0.01 if dtype == torch.bfloat16 else 1e-5, atol=1e-6
        )
        assert weight.ndim > 1 or torch.equal(weight.float(), before[name])


@either_computation
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradient_that_overflows_in_the_model_is_rejected_and_changes_nothing(dtype):
    """Its loss is finite, and so is the derivative by each log-prob."""
    policy, recipe = tiny_policy(dtype=dtype), resolve("grpo", {"beta": 0.0})
    rows = micro_batches(assembled(recipe, judge_groups(generate_groups(policy))), 40)
    row = rows[-1]
    c = int(row.advantage_C.abs().argmax())
    # Finite in the loss, but not after the products of the backward pass: float32 ends at 3.4e38.
    row.weight_C[c], weight = 1e37, float(row.weight_C[c])
    before, stepping = policy.model.head.weight.detach().clone(), make_trainer(policy, recipe)
    with pytest.raises(FloatingPointError, match=r"update 1 is not finite.*still version 0"):
        stepping.step(rows)
    assert torch.equal(policy.model.head.weight, before)
    row.weight_C[c] = weight
    norm = stepping.step(rows)[1]["grad_norm"]
    assert norm == pytest.approx(
        make_trainer(tiny_policy(dtype=dtype), recipe).step(rows)[1]["grad_norm"], rel=1e-6
    )


def run_out_of_memory(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, call: int) -> None:
    """Makes one call of a function fail: call 0, 1, … from now on."""
    function = getattr(owner, name)
    calls = itertools.count()

    def fail_once(*arguments: Any) -> Any:
        if next(calls) == call:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return function(*arguments)

    monkeypatch.setattr(owner, name, fail_once)


@pytest.mark.parametrize("has_idle_memory", [True, False], ids=["idle memory", "none"])
@pytest.mark.parametrize(
    ("owner", "name", "call"),
    [
        pytest.param(Model, "forward", 1, id="log-probs of the reference"),
        pytest.param(Model, "forward", 10, id="third row"),
        pytest.param(MasterWeights, "reduce_grads", 0, id="sum of gradients"),
        pytest.param(torch, "zeros_like", 5, id="moments"),
    ],
)
def test_batch_that_runs_out_of_memory_is_repeated_to_the_bit_if_the_sampler_frees_some(
    monkeypatch, owner, name, call, has_idle_memory
):
    recipe = resolve("grpo", {"beta": 0.1})
    states = []
    for fails in (False, True):
        policy = tiny_policy(dtype=torch.bfloat16)
        reference = copy_policy(policy)
        trainer = Trainer(policy, recipe, Optimization(lr=1e-3, updates=10), reference)
        batch = assembled(recipe, judge_groups(generate_groups(policy)))
        trainer.free_idle_memory = lambda: has_idle_memory
        if fails:
            run_out_of_memory(monkeypatch, owner, name, call)
            if not has_idle_memory:
                with pytest.raises(torch.OutOfMemoryError):
                    trainer.step(trainer.pack(batch, 55))
                return
        rows = trainer.pack(batch, 55)
        assert len(rows) == 8
        rows, metrics = trainer.step(rows)
        trainer.step(rows)
        states.append((metrics, copied(trainer.state())))
    (expected_metrics, expected), (metrics, state) = states
    assert metrics == expected_metrics
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[key], expected[key]) for key in expected)


def copied(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def test_activation_checkpointing_is_switched_on_without_a_warning():
    policy = tiny_policy()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Trainer(policy, resolve("reinforce"), Optimization(lr=1e-3), activation_checkpointing=True)
    layers: Any = policy.model.decoder.layers
    assert all(layer.gradient_checkpointing for layer in layers)


# From settings to the trainer


BASE = {"learning_rate": 1e-3, "lr_scheduler_type": "constant"}

# Another value of each setting of the optimizer.
CHANGED: dict[str, Any] = {
    "learning_rate": 2e-3,
    "lr_scheduler_type": "linear",
    "warmup_steps": 2,
    "betas": [0.8, 0.95],
    "weight_decay": 0.1,
    "max_grad_norm": 1e-3,
    "micro_batch_tokens": 20,
    "gradient_checkpointing": True,
    "offload_optimizer": True,
    "scale_lr_by_ess": 1.0,
    "scale_lr_by_kl": 1e-4,
    "log_gradient_cosine": True,
    "dither_master_weights": False,
}


@pytest.fixture(scope="module")
def stale_groups() -> list[Group]:
    """Groups in bfloat16 that a policy with the same tokens and other weights sampled."""
    groups = judge_groups(generate_groups(tiny_policy(dtype=torch.bfloat16), count=2))
    return [
        replace(
            group,
            completions=tuple(
                replace(completion, rollout_logp=completion.rollout_logp * (1 + 0.02 * index))
                for index, completion in enumerate(group.completions)
            ),
        )
        for group in groups
    ]


def train_as_set(groups: list[Group], **sections: Any) -> dict[str, Any]:
    """Two updates of a built trainer: all that they leave, and all that settings may change."""
    settings = Settings.model_validate(sections | {"schedule": {"batches": 2}})
    recipe = resolve("dr_grpo", {})
    trainer = build_trainer(settings, recipe, tiny_policy(dtype=torch.bfloat16), Ranks())
    batch = assembled(recipe, groups)
    rows = trainer.pack(batch, settings.optimizer.tokens_in_micro_batch(on_gpu=False))
    result: dict[str, Any] = {"micro-batches": len(rows)}
    for update in range(2):
        _, metrics = trainer.step(rows)
        result |= {f"{name} of update {update}": value for name, value in metrics.items()}
    for name, value in trainer.state().items():
        result[name] = value.numpy().tobytes()
    layers: Any = trainer.policy.model.decoder.layers
    result["checkpointing"] = [layer.gradient_checkpointing for layer in layers]
    # On a CPU the host's memory is the only one: nothing but the choice itself can be seen.
    result["offloads"] = trainer.optimization.offload_moments
    return result


@pytest.fixture(scope="module")
def as_set_by_default(stale_groups) -> dict[str, Any]:
    return train_as_set(stale_groups, optimizer=BASE)


def test_trainer_with_the_same_settings_is_the_same(stale_groups, as_set_by_default):
    assert train_as_set(stale_groups, optimizer=BASE) == as_set_by_default


@pytest.mark.parametrize("name", OptimizerSettings.model_fields)
def test_every_setting_of_the_optimizer_changes_the_trainer(name, stale_groups, as_set_by_default):
    changed = train_as_set(stale_groups, optimizer=BASE | {name: CHANGED[name]})
    assert changed != as_set_by_default


def test_seed_of_the_run_decides_the_dither_of_master_weights(stale_groups, as_set_by_default):
    other = train_as_set(stale_groups, optimizer=BASE, run={"seed": 1})
    masters = [name for name in other if name.startswith("master/")]
    assert all(other[name] != as_set_by_default[name] for name in masters)


def build(**sections: Any) -> Trainer:
    """The trainer of a tiny policy as settings have it."""
    settings = Settings.model_validate(sections)
    return build_trainer(settings, resolve("dr_grpo", {}), tiny_policy(), Ranks())


def test_learning_rate_of_the_settings_falls_over_all_updates():
    """Three batches with two updates each: a warm-up of one, then from 1 in steps of a fifth."""
    optimizer = {"learning_rate": 1.0, "lr_scheduler_type": "linear", "warmup_steps": 1}
    trainer = build(optimizer=optimizer, schedule={"batches": 3, "num_iterations": 2})
    rates = [trainer.optimization.rate(update) for update in range(6)]
    assert rates == pytest.approx([0.5, 1.0, 0.8, 0.6, 0.4, 0.2])


def test_betas_and_decay_of_the_settings_are_those_of_adamw():
    groups = build(
        optimizer={"betas": [0.8, 0.95], "weight_decay": 0.1}
    ).optimizer.adamw.param_groups
    assert [group["betas"] for group in groups] == [(0.8, 0.95)] * 2
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]


@pytest.mark.parametrize(
    ("max_norm", "expected"),
    [pytest.param(1.0, 1.0, id="clipped"), pytest.param(0.0, 5.0, id="0 does not clip")],
)
def test_gradient_is_clipped_to_the_norm_of_the_settings(max_norm, expected):
    """A gradient with the norm 5: AdamW's mean of gradients is a tenth of what it was given."""
    trainer = build(optimizer={"max_grad_norm": max_norm})
    parameter = trainer.masters.parameters[0]
    parameter.grad = torch.zeros_like(parameter)
    parameter.grad.view(-1)[:2] = torch.tensor([3.0, 4.0])
    assert trainer.update()["grad_norm"] == pytest.approx(5.0)
    mean_of_gradients = trainer.optimizer.adamw.state[parameter]["exp_avg"]
    assert mean_of_gradients.norm().item() * 10 == pytest.approx(expected, rel=1e-4)
