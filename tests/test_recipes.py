import subprocess
import sys
from dataclasses import fields
from io import StringIO

import pytest
import torch
from rich.console import Console
from torch import tensor
from torch.testing import assert_close

from lagrpo.core import pieces
from lagrpo.core.loss import Terms
from lagrpo.objective.compose import ALIASES
from lagrpo.objective.recipes import PRESETS, Composition, resolve
from lagrpo.terminal.recipes import show_recipe

REWARDS_G, UNIFORM_G = tensor([1.0, 0.0, 0.0, 0.0]), torch.zeros(4)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_row_resolves_and_says_what_and_whence(name):
    recipe = resolve(name)
    assert recipe.name == name
    assert recipe.formula
    assert recipe.source
    assert recipe.advantage(REWARDS_G, UNIFORM_G).shape == (4,)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("grpo", Composition(beta=0.04, reduction="sequence_mean")),
        ("grpo_masked", Composition(beta=0.1, reduction="sequence_mean", mask_zero_variance=True)),
        ("off_policy_grpo", Composition(beta=0.1, reduction="sequence_mean")),
        ("off_policy_grpo_exact", Composition(beta=0.1, reduction="sequence_mean", surrogate="clipped_exact")),
        ("dr_grpo", Composition(advantage="centered", reduction="constant_length", beta=0.0)),
        ("dapo", Composition(epsilon_high=0.28, mask_zero_variance=True, beta=0.0)),
        ("grpo_recomputed", Composition(beta=0.0, reduction="sequence_mean", denominator="pi_k")),
        (
            "grpo_tis",
            Composition(reduction="sequence_mean", denominator="pi_k", correction="truncated", correction_cap=2.0),
        ),
        ("rloo", Composition(advantage="leave_one_out", surrogate="reinforce", reduction="sequence_sum", beta=0.0)),
    ],
)
def test_the_published_settings(name, expected):
    assert resolve(name).composition == expected


def test_the_advantages_of_the_rows():
    assert_close(resolve("grpo", {"eps_std": 1 / 16}).advantage(REWARDS_G, UNIFORM_G), tensor([1.5, -0.5, -0.5, -0.5]))
    assert_close(resolve("dr_grpo").advantage(REWARDS_G, UNIFORM_G), tensor([0.75, -0.25, -0.25, -0.25]))
    assert_close(resolve("rloo").advantage(REWARDS_G, UNIFORM_G), tensor([1.0, -1 / 3, -1 / 3, -1 / 3]))


def test_what_a_row_needs():
    rows = {name: resolve(name) for name in PRESETS}
    centered_on_pi_k = {"off_policy_grpo_exact", "clipped_proportional", "geppo"}
    over_pi_k = {"grpo_recomputed", "grpo_tis", "grpo_tis_sequence", "grpo_mis_sequence", "grpo_icepop"}
    reading_pi_k = {name for name, row in rows.items() if "logp_k" in row.needs}
    assert reading_pi_k == centered_on_pi_k | over_pi_k | {"opmd_pairwise"}
    with_kl = {"grpo", "grpo_masked", "off_policy_grpo", "off_policy_grpo_exact", "grpo_two_sided"}
    assert {name for name, row in rows.items() if row.needs_pi_ref} == with_kl | {"opmd_kimi"}
    assert {name for name, row in rows.items() if row.needs_whole_groups} == {"opmd_pairwise"}
    any_data = {
        "reinforce",
        "stale_reinforce",
        "grpo_recomputed",
        "rloo",
        "asymre",
        "red_drop",
        "red_weight",
        "opmd_kimi",
        "opmd_pairwise",
    }
    assert {name for name, row in rows.items() if not row.needs_logp_alpha} == any_data


def test_what_a_change_needs():
    assert not resolve("off_policy_grpo", {"beta": 0.0}).needs_pi_ref
    assert resolve("reinforce", {"weight": "ratio"}).needs_logp_alpha
    assert resolve("reinforce", {"weight": "ratio", "denominator": "pi_k"}).needs == {"logp_k"}
    assert resolve("rloo", {"correction": "truncated"}).needs == {"logp_alpha", "logp_k"}
    assert resolve("rec_one_side_nois", {"correction": "truncated"}).needs == {"logp_alpha", "logp_k"}
    assert resolve("grpo_tis", {"correction": "none"}).needs == {"logp_k"}
    assert resolve("opmd", {"anchor": "pi_ref"}).needs == {"logp_ref"}
    assert resolve("stale_reinforce", {"beta": 0.1, "kl_importance": True}).needs == {"logp_ref", "logp_alpha"}


def test_a_narrow_mask_makes_nothing_silent():
    """Whether an advantage of 0 has no gradient is a matter of the surrogate, whatever a correction would drop."""
    narrow = {"correction": "masked", "correction_floor": 1.0, "correction_cap": 1.0}
    assert not resolve("asymre", narrow).silent
    assert resolve("reinforce", narrow).silent


def test_an_importance_weighted_kl_weighs_each_token_by_rho():
    tokens = (tensor([-1.0, -2.0]), tensor([-1.5, -1.0]), None, tensor([-1.2, -1.2]))
    terms = Terms(*tokens, tensor([0, 0]), tensor([0.0]))  # no advantage: only the KL is left
    loss, _ = resolve("grpo", {"kl_importance": True}).loss(terms, tensor([1.0]))
    rho_T, d_T = (tokens[0] - tokens[1]).exp(), tokens[0] - tokens[3]
    assert_close(loss, 0.04 * (rho_T * ((-d_T).exp() + d_T - 1)).sum())


def test_an_alias_of_a_piece_is_the_piece():
    aliases = {"advantage": "whitened_unbiased", "ratio": "length_normalised"}
    made = resolve("grpo", aliases).composition
    assert {name: getattr(made, name) for name in aliases} == {name: ALIASES[alias] for name, alias in aliases.items()}
    assert resolve("grpo", {"advantage": "centred"}).composition.advantage == ALIASES["centred"]
    assert (
        resolve("dr_grpo", {"advantage": "whitened"}).composition
        == resolve("grpo", {"reduction": "constant_length", "beta": 0.0}).composition
    )


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("grop", {}, r"unknown recipe 'grop'; the nearest is 'grpo' \(all: grpo, grpo_masked"),
        ("grpo", {"epsilon_hihg": 0.3}, "unknown setting 'epsilon_hihg'; the nearest is 'epsilon_high'"),
        ("grpo", {"surrogate": "cliped"}, "unknown surrogate 'cliped'; the nearest is 'clipped'"),
        ("grpo", {"advantage": "normalize"}, "the nearest is 'normalized'"),
        ("grpo", {"ratio": "sequences"}, "the nearest is 'sequence'"),
        ("grpo", {"reduction": "mean_token"}, "the nearest is 'token_mean'"),
        ("grpo", {"kl": "k4"}, "unknown kl 'k4'"),
        ("grpo", {"beta": -0.1}, r"beta must be at least 0, but is -0\.1"),
        ("grpo", {"epsilon_low": float("nan")}, "epsilon_low must be at least 0, but is nan"),
        (
            "grpo",
            {"surrogate": "unclipped", "epsilon_low": 0.1},
            "epsilon_low was set, but nothing reads it: .* 'unclipped'",
        ),
        ("dr_grpo", {"eps_std": 0.1}, "eps_std was set, but nothing reads it: .* advantage 'centered'"),
        ("rloo", {"ratio": "sequence"}, "ratio was set, but nothing reads it: .* weight 'one'"),
        ("rec_ring_is", {"mask": "rings"}, "unknown mask 'rings'; the nearest is 'ring'"),
        ("grpo", {"mask": "ring"}, "mask was set, but nothing reads it: surrogate 'clipped'"),
        ("rec_ring_is", {"outer_low": 0.1}, "outer range of the ring must lie outside"),
        ("rec_two_side_is", {"outer_low": 0.7}, "outer_low was set, but nothing reads it"),
        ("red_weight", {"weight_temperature": 0.0}, "weight_temperature must be greater than 0"),
        ("grpo", {"denominator": "pi_0"}, "unknown denominator 'pi_0'; the nearest is 'pi_k'"),
        ("rloo", {"denominator": "pi_k"}, "denominator was set, but nothing reads it: .* weight 'one'"),
        ("grpo", {"correction": "truncate"}, "unknown correction 'truncate'; the nearest is 'truncated'"),
        ("grpo_tis", {"correction_level": "tokens"}, "unknown correction_level 'tokens'; the nearest is 'token'"),
        ("grpo", {"correction_cap": 3.0}, "correction_cap was set, but nothing reads it: .* correction 'none'"),
        ("grpo_recomputed", {"correction_level": "sequence"}, "correction_level was set, but nothing reads it"),
        ("grpo_recomputed", {"correction_floor": 0.5}, "correction_floor was set, but nothing reads it"),
        ("grpo", {"correction": "truncated"}, "pi/alpha in the surrogate already holds: it would count twice"),
        ("unclipped", {"correction": "masked"}, "pi/alpha in the surrogate already holds"),
        ("off_policy_grpo_exact", {"correction": "truncated"}, "pi/alpha in the surrogate already holds"),
        ("cispo", {"correction": "truncated"}, "pi/alpha in the weight already holds.* set denominator = 'pi_k'"),
        ("rec_ring_is", {"correction": "masked"}, "pi/alpha in the weight already holds"),
        ("geppo", {"denominator": "pi_k"}, "over denominator 'pi_k' that center is 1, which is surrogate 'clipped'"),
        ("clipped_proportional", {"denominator": "pi_k", "correction": "truncated"}, "that center is 1"),
        ("opmd_pairwise", {"correction": "truncated"}, "it needs none: its argument holds whoever sampled the group"),
        ("grpo_tis", {"correction_cap": 0.9}, r"correction_cap be at least 1, .* but they are 0\.0 and 0\.9"),
        ("grpo_tis", {"correction_floor": float("nan")}, r"correction_floor must lie in \[0, 1\]"),
        ("grpo", {"masked_count": True}, "mask_zero_variance is off"),
        ("dapo", {"kl": "k2"}, "beta is 0: there is no KL term"),
        ("dapo", {"kl_importance": True}, "beta is 0: there is no KL term"),
        ("grpo", {"kl": "k1"}, "k1 = logp - logp_ref is no penalty"),
        ("grpo", {"kl": "k3_bias_corrected", "kl_importance": True}, "weighted by the ratio already"),
        ("grpo", {"kl_bound": 3.0}, "kl_bound was set, but nothing reads it"),
        ("grpo", {"dual_clip": 1.1}, r"dual_clip is .*: at least 1 \+ epsilon_high = 1\.2, but is 1\.1"),
        ("cispo", {"dual_clip": 6.0}, "dual_clip was set, but nothing reads it"),
        ("grpo", {"std_offset": 0.1}, "std_offset was set, but nothing reads it: .* advantage 'normalized'"),
    ],
)
def test_what_is_refused_and_why(name, overrides, message):
    with pytest.raises(ValueError, match=message):
        resolve(name, overrides)


@pytest.mark.parametrize("name", ["grpo", "gspo", "unclipped", "cispo", "topr", "rec_one_side_is", "rec_ring_nois"])
def test_every_ratio_can_be_over_pi_k_and_then_corrected(name):
    """With alpha's log-probs in the place of pi_k's it is the objective over alpha; a weight of 1 changes nothing."""
    logp_T, below_T, other_T = tensor([-1.0, -2.0, -0.5]), tensor([-1.3, -1.8, -0.4]), tensor([-9.0, -0.1, -3.0])

    def loss(alpha_T, pi_k_T, **changes):
        terms = Terms(logp_T, alpha_T, pi_k_T, None, tensor([0, 0, 1]), tensor([1.0, -0.5]))
        return resolve(name, {"beta": 0.0} | changes).loss(terms, tensor([0.3, 0.7]))[0]

    over_alpha, corrected = loss(below_T, None), {"denominator": "pi_k", "correction": "truncated"}
    assert torch.equal(loss(other_T, below_T, denominator="pi_k"), over_alpha)
    assert torch.equal(loss(below_T, below_T, **corrected), over_alpha)
    assert loss(other_T, below_T, **corrected) != over_alpha


def test_a_kl_term_with_a_ratio_of_its_own_goes_with_a_correction_of_the_surrogate():
    assert resolve("reinforce", {"correction": "truncated", "beta": 0.1, "kl": "k3_bias_corrected"}).needs_logp_alpha


def test_a_correction_leaves_the_kl_term_alone():
    """It weighs what is learned from the samples; the KL estimate has a weight of its own, kl_importance."""
    tokens = (tensor([-1.0, -2.0]), tensor([-1.5, -1.0]), tensor([-1.1, -2.1]), tensor([-1.2, -1.2]))
    terms = Terms(*tokens, tensor([0, 0]), tensor([0.0]))  # no advantage: only the KL is left
    losses = [resolve(name, {"beta": 0.04}).loss(terms, tensor([1.0]))[0] for name in ("grpo_tis", "grpo_recomputed")]
    assert float(losses[0]) == float(losses[1]) > 0


def test_the_knobs_name_every_piece():
    """The help of the knobs is the --help of the command line: each names what can be chosen."""
    described = {field.name: field.metadata["help"] for field in fields(Composition)}
    for key, table in pieces.TABLES.items():
        assert [name for name in table if name not in described[key]] == []


def test_brackets_of_a_formula_are_text_and_no_markup():
    printed = StringIO()
    show_recipe("grpo_masked", Console(file=printed, width=200))
    assert PRESETS["grpo_masked"].formula in printed.getvalue()


def test_listing_the_recipes_loads_no_torch():
    code = "import sys, lagrpo.objective.recipes as r; assert r.PRESETS; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_core_imports_torch_and_jaxtyping_and_nothing_else():
    code = (
        "import sys, lagrpo.core.pieces, lagrpo.core.estimators;"
        "ours = {m for m in sys.modules if m.startswith('lagrpo') and not m.startswith('lagrpo.core')};"
        "ours -= {'lagrpo', 'lagrpo.threads'};"  # of the standard library, and before torch
        "sys.exit(str(ours) if ours or 'transformers' in sys.modules else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
