"""Knobs by their paths: each reaches the function that it was set for, and no other."""

from itertools import permutations

import pytest
import torch
from losses import at_ratios, gradient_of, random_inputs, with_statistics
from torch import Tensor, tensor
from torch.testing import assert_close

from lagrpo.core.choices import CHOICES
from lagrpo.core.inputs import LossInputs
from lagrpo.core.losses import clipped
from lagrpo.core.pieces import piece
from lagrpo.core.recipes import resolve
from lagrpo.core.rows import RECIPES

# Paths


def test_every_knob_of_every_row_is_reached_by_its_full_path():
    """A number is changed to another, a function to itself; nothing but that knob changes."""
    for name, row in RECIPES.items():
        for path, value in row.knobs.items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                continue
            if path in ("overlong_buffer", "beta", "kl_importance"):
                continue
            changed = row.with_knob(path, value + 0.125).knobs
            assert changed[path] == value + 0.125
            others = {p: v for p, v in changed.items() if not f"{path}.".startswith(f"{p}.")}
            assert others == {p: v for p, v in row.knobs.items() if p in others}, (name, path)


@pytest.mark.parametrize(
    ("path", "full"),
    [
        ("epsilon_high", "surrogate.mask.epsilon_high"),
        ("mask.epsilon_high", "surrogate.mask.epsilon_high"),
        ("surrogate.mask.epsilon_high", "surrogate.mask.epsilon_high"),
        ("mask.ratio", "surrogate.mask.ratio"),
        ("weight.ratio", "surrogate.weight.ratio"),
        ("weight", "surrogate.weight"),
        ("reduction", "reduction"),
    ],
)
def test_short_path_stands_for_the_only_knob_that_ends_so(path, full):
    value = {"epsilon_high": 0.5, "ratio": "sequence", "weight": "sapo"}.get(
        path.rpartition(".")[2], "sequence_mean"
    )
    before = resolve("rec_one_side_is").settings
    after = resolve("rec_one_side_is", {path: value})
    assert after.settings[full] == value
    same = {p for p in before if not p.startswith(full)}
    assert {p: after.settings[p] for p in same} == {p: before[p] for p in same}


@pytest.mark.parametrize("path", ["ratio", "denominator"])
def test_short_path_of_two_knobs_is_rejected_with_both_full_paths(path):
    with pytest.raises(ValueError, match=rf"surrogate\.mask\.{path} or surrogate\.weight\.{path}"):
        resolve("rec_one_side_is", {path: "sequence" if path == "ratio" else "pi_k"})


def test_path_that_is_whole_is_not_ambiguous():
    """`kl` is the estimator, and `surrogate.ratio` not also `kl.ratio`."""
    recipe = resolve("grpo", {"kl": "k3_bias_corrected", "surrogate.ratio": "sequence"})
    assert recipe.settings["kl"] == "k3_bias_corrected"
    assert recipe.settings["kl.ratio"] == "token"


@pytest.mark.parametrize(
    "overrides",
    [
        {"epsilon_high": 0.3, "surrogate.epsilon_high": 0.4},
        {"surrogate.epsilon_high": 0.4, "epsilon_high": 0.3},
        {"epsilon": 0.3, "epsilon_low": 0.1},
        {"epsilon_low": 0.1, "epsilon": 0.3},
        {"epsilon": 0.3, "surrogate.epsilon_low": 0.1},
    ],
    ids=str,
)
def test_same_knob_by_two_paths_is_rejected(overrides):
    with pytest.raises(ValueError, match=r"the same knob, surrogate\.epsilon_"):
        resolve("grpo", overrides)


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("reinforce", {"mask": "one_side", "mask.ratio": "sequence", "mask.epsilon_high": 0.5}),
        ("dr_grpo", {"kl": "k3_bias_corrected", "beta": 0.1, "kl.ratio": "sequence"}),
        ("rloo", {"correction": "masked", "level": "sequence", "cap": 3.0}),
        ("grpo", {"filters": ["opsm"], "delta": 0.25, "filters.opsm.denominator": "pi_k"}),
        ("grpo", {"advantage": "log_mean_exp", "advantage.strength": 0.5, "beta": 0.0}),
        ("grpo", {"surrogate": "reinforce", "mask": "ring", "outer_high": 3.0}),
        ("dapo", {"epsilon": 0.1, "epsilon_high": 0.4, "surrogate.ratio": "sequence"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_order_of_overrides_does_not_matter(name, overrides):
    recipes = [resolve(name, dict(order)) for order in permutations(overrides.items())]
    assert all(recipe == recipes[0] for recipe in recipes)
    assert all(
        recipes[0].settings[path] == value
        for path, value in overrides.items()
        if path in recipes[0].settings
    )


# What used to overwrite each other


def test_mask_and_weight_of_cispo_keep_two_ranges():
    """The weight is cut at 1 + 4, the mask at 1 + .2."""
    recipe = resolve("cispo", {"mask": "one_side"})
    assert recipe.settings["surrogate.mask.epsilon_high"] == 0.2
    assert recipe.settings["surrogate.weight.epsilon_high"] == 4.0
    x = at_ratios([1.1, 1.3, 6.0, 1.3, 6.0], A=[1.0, 1.0, 1.0, -1.0, -1.0])
    gradient_T = gradient_of(recipe.value(x).sum(), x)
    assert_close(gradient_T, tensor([1.1, 0.0, 0.0, -1.3, -5.0]).double())


def test_kl_term_of_gspo_keeps_the_ratio_of_tokens():
    recipe = resolve("gspo", {"beta": 0.1, "kl": "k3_bias_corrected"})
    assert recipe.settings["surrogate.ratio"] == "length_normalized"
    assert recipe.settings["kl.ratio"] == "token"
    _, x = random_inputs()
    d = x.logp - x.ref_logp
    assert_close(recipe.penalty(x), (x.logp - x.rollout_logp).exp() * ((-d).exp() - 1 + d))


def test_mask_and_weight_have_different_ratios():
    """One completion of ratios 1.5 and .5: their product is in the range, the weight is of each
    token."""
    changes = {"mask.ratio": "sequence", "mask.epsilon_low": 0.3}
    recipe = resolve("rec_two_side_is", changes)
    x = at_ratios([1.5, 0.5], A=[2.0], completion=[0, 0])
    assert_close(gradient_of(recipe.value(x).sum(), x), tensor([3.0, 1.0]).double())
    other = resolve("rec_two_side_is", {"weight.ratio": "sequence"})
    assert gradient_of(other.value(x).sum(), x).tolist() == [0.0, 0.0]


def test_knobs_of_a_function_that_is_replaced_do_not_reach_the_new_one():
    """The row `gspo` has another ratio than `clipped_exact` by itself, and `cispo` another cap than
    `capped_ratio`."""
    assert resolve("gspo", {"surrogate": "clipped_exact"}).settings["surrogate.ratio"] == "token"
    again = resolve("cispo", {"weight": "capped_ratio"})
    assert again.settings["surrogate.weight.epsilon_high"] == 0.2


# epsilon, as in TRL


@pytest.mark.parametrize(
    ("name", "overrides", "ranges"),
    [
        pytest.param("grpo", {"epsilon": 0.1}, {"surrogate": (0.1, 0.1)}, id="both ends"),
        pytest.param(
            "grpo", {"epsilon": 0.1, "epsilon_high": 0.3}, {"surrogate": (0.1, 0.3)}, id="with high"
        ),
        pytest.param("grpo", {"epsilon_high": 0.3}, {"surrogate": (0.2, 0.3)}, id="high alone"),
        pytest.param("dapo", {"epsilon": 0.1}, {"surrogate": (0.1, 0.1)}, id="high of the row"),
        pytest.param(
            "grpo",
            {"epsilon": 0.1, "surrogate.epsilon_high": 0.3},
            {"surrogate": (0.1, 0.3)},
            id="high by its full path",
        ),
        pytest.param(
            "rec_one_side_nois", {"epsilon": 0.4}, {"surrogate.mask": (0.4, 0.4)}, id="of a mask"
        ),
        pytest.param(
            "cispo",
            {"mask": "one_side", "epsilon": 0.1},
            {"surrogate.mask": (0.1, 0.1), "surrogate.weight": (None, 4.0)},
            id="beside another upper end",
        ),
        pytest.param(
            "cispo",
            {"mask": "one_side", "epsilon": 0.1, "weight.epsilon_high": 3.0},
            {"surrogate.mask": (0.1, 0.1), "surrogate.weight": (None, 3.0)},
            id="with another upper end given",
        ),
    ],
)
def test_epsilon_sets_both_ends_of_a_range_unless_its_upper_end_is_given(name, overrides, ranges):
    settings = resolve(name, overrides).settings
    ends = {
        path: (settings.get(f"{path}.epsilon_low"), settings.get(f"{path}.epsilon_high"))
        for path in ranges
    }
    assert ends == ranges


def test_epsilon_of_a_recipe_without_a_range_is_rejected():
    with pytest.raises(ValueError, match="epsilon has no effect on recipe 'rloo'"):
        resolve("rloo", {"epsilon": 0.1})


# Filters


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("opsm", ["opsm"]),
        (["opsm"], ["opsm"]),
        (("seq_max_k3", "finished_only"), ["seq_max_k3", "finished_only"]),
        ([], []),
    ],
    ids=str,
)
def test_filters_are_a_list_of_names(names, expected):
    assert resolve("opsm", {"filters": names}).settings["filters"] == expected


def test_knobs_of_two_filters_are_told_apart_by_their_names():
    overrides = {"filters": ["opsm", "seq_max_k3"]}
    with pytest.raises(ValueError, match=r"filters\.opsm\.delta or filters\.seq_max_k3\.delta"):
        resolve("grpo", overrides | {"delta": 0.1})
    recipe = resolve("grpo", overrides | {"opsm.delta": 0.1, "filters.seq_max_k3.delta": 0.3})
    assert [recipe.settings[f"filters.{name}.delta"] for name in overrides["filters"]] == [0.1, 0.3]


def test_knob_of_a_filter_acts():
    _, x = random_inputs()
    shares = []
    for share in (0.1, 0.5):
        recipe = resolve("grpo_top_entropy", {"share": share})
        shares.append(float(recipe.kept(with_statistics(recipe, x)).mean()))
    assert shares == pytest.approx([0.1, 0.5], abs=0.03)


# What is rejected


@pytest.mark.parametrize(
    ("name", "overrides", "problem"),
    [
        ("grop", {}, "unknown recipe 'grop'; did you mean 'grpo'"),
        (
            "grpo",
            {"epsilon_hihg": 0.3},
            "epsilon_hihg is no knob of .*; did you mean 'epsilon_high'",
        ),
        ("grpo", {"surrogate.epsilon_hihg": 0.3}, "surrogate.epsilon_hihg is no knob"),
        ("grpo", {"kl.epsilon_high": 0.3}, "kl.epsilon_high has no effect on recipe 'grpo'"),
        ("grpo", {"beta": -0.1}, "beta must be at least 0"),
        ("dr_grpo", {"eps_std": 0.1}, "eps_std has no effect on recipe"),
        ("grpo", {"mask": "ring"}, "mask has no effect on recipe"),
        ("dapo", {"kl": "k2"}, "kl has no effect on recipe 'dapo'"),
        ("dapo", {"kl_bound": 3.0}, "kl_bound has no effect on recipe 'dapo'"),
        ("grpo", {"correction": "truncated"}, "ratio already contains"),
        (
            "rec_one_side_is",
            {"correction": "truncated", "mask.denominator": "pi_k"},
            "ratio already contains",
        ),
        ("geppo", {"denominator": "pi_k"}, "clipped_exact clips around pi_k/alpha"),
        ("decoupled_ppo", {"denominator": "pi_k"}, "clipped_proportional clips around pi_k/alpha"),
        ("opmd_pairwise", {"correction": "truncated"}, "opmd_pairwise compares the completions"),
        ("m2po_released", {"correction": "truncated"}, "clipped_m2po_released already contains"),
        ("online_dpo", {"filters": ["finished_only"]}, "online_dpo compares the completions"),
        ("gspo", {"filters": ["top_entropy"]}, "top_entropy drops single tokens"),
        ("oapl", {"filters": ["m2po"]}, "m2po drops single tokens"),
        ("gspo", {"filters": ["clip_cov"]}, "clip_cov drops single tokens"),
        ("grpo", {"filters": ["clip_cov"], "share": 1.5}, "share must lie in"),
        ("grpo_tis", {"cap": 0.9}, r"correction\.cap must be at least 1"),
        ("grpo_tis", {"floor": 1.1}, r"correction\.floor must lie in \[0, 1\]"),
        ("rec_ring_is", {"outer_high": 0.1}, "outer range outside the inner one"),
        ("grpo", {"masked_count": True}, "mask_zero_variance is off"),
        ("dapo", {"kl_importance": True}, "beta is 0, so there is no KL term"),
        ("grpo", {"kl": "k1"}, "k1 is not a penalty.*recipe opd"),
        ("grpo", {"advantage": "zero"}, "nothing to learn"),
        ("opd", {"token_advantage": "none"}, "nothing to learn"),
        ("dapo", {"token_advantage": "reverse_kl"}, "mask_zero_variance = false"),
        ("opd", {"overlong_buffer": 2}, "overlong_buffer"),
        ("tba", {"token_advantage": "reverse_kl"}, "one value per completion"),
        ("oapl", {"token_advantage": "forward_kl"}, "one value per completion"),
        ("grpo", {"kl": "k3_bias_corrected", "kl_importance": True}, "a second time"),
        ("grpo", {"dual_clip": "3"}, "dual_clip = '3': write a number"),
        ("grpo", {"dual_clip": True}, "dual_clip = True: write a number"),
        ("grpo_masked", {"masked_count": 1}, "masked_count = 1: write true or false"),
        ("grpo", {"surrogate.ratio": 3}, r"ratio = 3: write one of \['token'"),
        (
            "grpo",
            {"surrogate.ratio": "tokn"},
            "unknown surrogate.ratio 'tokn'; did you mean 'token'",
        ),
        ("grpo", {"surrogate": "none"}, "unknown surrogate 'none'"),
        ("grpo", {"filters": ["opms"]}, "unknown filters 'opms'; did you mean 'opsm'"),
        ("grpo", {"dual_clip": 1.1}, "dual_clip must be at least 1 . epsilon_high"),
        ("dppo_tv", {"delta_high": -0.1}, "delta_high must be at least 0"),
        ("seq_tis", {"cap": -8.0}, "cap must be at least 0"),
        ("grpo_top_entropy", {"share": -0.1}, "share must be at least 0"),
        ("m2po", {"tau": -1.0}, "tau must be at least 0"),
        ("online_ipo", {"strength": 0.0}, "strength must be"),
        ("grpo_top_entropy", {"share": 1.5}, "share must"),
        ("grpo", {"epsilon_low": float("nan")}, "epsilon_low must be at least 0"),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 20 else "",
)
def test_contradictory_overrides_of_a_recipe_are_rejected(name, overrides, problem):
    with pytest.raises(ValueError, match=problem):
        resolve(name, overrides)


def test_knob_of_a_users_function_may_be_below_the_minimum_of_lagrpos_knob_of_that_name():
    def shifted(x: LossInputs, *, tau: float = -1.0) -> Tensor:
        return x.advantage * (x.logp + tau)

    assert resolve(shifted, {"tau": -2.0}).settings["surrogate.tau"] == -2.0


@pytest.mark.parametrize("knob", ["mask", "weight", "regularizer"])
def test_none_takes_a_piece_away(knob):
    recipe = resolve("prime_rl", {knob: "none"})
    assert recipe.settings[f"surrogate.{knob}"] is None
    assert not [path for path in recipe.settings if path.startswith(f"surrogate.{knob}.")]


def test_every_choice_can_be_set_by_its_name():
    """On a recipe that has the knob; a knob without a default, or one that fails, would show."""
    hosts = {
        "mask": ("reinforce", {}),
        "weight": ("reinforce", {}),
        "regularizer": ("reinforce", {}),
        "correction": ("reinforce", {}),
        "kl": ("grpo", {}),
        "anchor": ("opmd", {}),
        "level": ("grpo_tis", {}),
        "denominator": ("dr_grpo", {}),
        "advantage": ("grpo_opd", {}),
        "student": ("opd", {}),
    }
    _, x = random_inputs()
    for knob, functions in CHOICES.items():
        name, changes = hosts.get(knob, ("dr_grpo", {}))
        for function in functions:
            if function.__name__ == "k1":
                continue
            value = [function.__name__] if knob == "filters" else function.__name__
            recipe = resolve(name, changes | {knob: value})
            derivative = recipe.differentiate(with_statistics(recipe, x), torch.ones(7).double())
            assert bool(derivative.gradient_T.isfinite().all()), (knob, function.__name__)


def test_piece_without_such_a_knob_is_rejected():
    with pytest.raises(ValueError, match="clipped has no knob 'epsilon'; it has: ratio"):
        piece(clipped, epsilon=0.1)
