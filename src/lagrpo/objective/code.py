"""A recipe as one function to read, and to paste: `lagrpo recipes NAME --code`.

The tables below say in plain PyTorch what the pieces of core/pieces.py compute, one entry for each name. A test runs
the result for every recipe and every piece against the recipe itself. What the pieces do beyond the formulas is left
out: checks of shapes, and products of 0 with a ratio that overflows.
"""

from __future__ import annotations

import re
import textwrap
from math import inf, log1p

from lagrpo.objective.composition import Composition

LEVELS = {"token": "({0}).exp()", "sequence": "total({0}).exp()", "length_normalized": "(total({0}) / length).exp()"}
ADVANTAGES = {
    "normalized": "(r - r.mean()) / (r.var(correction=0) + {eps_std}).sqrt()",
    "normalized_unbiased": "(r - r.mean()) / (r.std() + {std_offset})",
    "centered": "r - r.mean()",
    "leave_one_out": "r - (r.sum() - r) / (len(r) - 1)",
    "red_drop": "torch.where(kept, r - r[kept].mean(), 0.0)",
    "log_mean_exp": "r - {strength} * ((r / {strength}).exp().mean()).log()",
}
RED_DROP = """\
below = r < r.mean()  # as many of these as are too many are dropped, chosen by `uniform`
too_many = max(int(below.sum()) - int((~below).sum()), 0)
kept = torch.ones_like(below)
kept[torch.where(below, uniform[own], 2.0).argsort()[:too_many]] = False
"""
RANGES = {
    "clipped": "low, high = max(1 - {epsilon_low}, 0), 1 + {epsilon_high}",
    "clipped_exact": "low, high = (center - {epsilon_low}).clamp(min=0), center + {epsilon_high}",
    "clipped_proportional": "low, high = center * (1 - {epsilon_low}), center * (1 + {epsilon_high})",
}
CLIPPED = """
value = torch.minimum(ratio * A, ratio.clamp(low, high) * A)
cut = ((ratio > high) & (A > 0)) | ((ratio < low) & (A < 0))
"""
DUAL_CLIP = """
value = torch.where(A < 0, torch.maximum(value, {dual_clip} * A), value)
cut = cut | ((ratio > {dual_clip}) & (A < 0))
"""
SURROGATES = {
    "unclipped": "value = ratio * A\ncut = torch.zeros_like(A, dtype=torch.bool)",
    "opmd_kimi": "a = advantage[completion] - {strength} * total(logp - {anchor})\n"
    "value = -a.square() / length\ncut = torch.zeros_like(A, dtype=torch.bool)",
    "opmd_pairwise": "log_ratio = logp.new_zeros(len(rewards)).index_add(0, completion, logp - {anchor})\n"
    "a = advantage - {strength} * log_ratio\n"
    "mean = torch.stack([a[group == g].mean() for g in group])  # of its group, for each completion\n"
    "value = -(a - mean).square()[completion] / length\ncut = torch.zeros_like(A, dtype=torch.bool)",
}
MASKS = {
    "one_side": "((A >= 0) & (ratio <= 1 + {epsilon_high})) | ((A <= 0) & (ratio >= 1 - {epsilon_low}))",
    "two_side": "(ratio >= 1 - {epsilon_low}) & (ratio <= 1 + {epsilon_high})",
    "ring": "(\n    ((ratio >= 1 - {epsilon_low}) & (ratio <= 1 + {epsilon_high}))\n"
    "    | ((A >= 0) & (ratio <= 1 - {outer_low}))\n    | ((A <= 0) & (ratio >= 1 + {outer_high}))\n)",
}
WEIGHTS = {
    "ratio": "ratio",
    "capped_ratio": "ratio.clamp(max=1 + {epsilon_high})",
    "tapered_ratio": "torch.where(A > 0, 1.0, ratio.clamp(max=1.0))",
    "exp_advantage": "(A / {weight_temperature}).exp()",
}
REGULARIZERS = {"asymre": "(-{strength} * logp)", "opmd": "{strength} * (logp - {anchor}).square()"}
POLICIES = {"alpha": "logp_alpha", "pi_k": "logp_k", "pi_ref": "logp_ref"}
CORRECTIONS = {
    "truncated": "w = w.clamp({correction_floor}, {correction_cap})",
    "masked": "w = torch.where((w >= {correction_floor}) & (w <= {correction_cap}), w, 0.0)",
}
KLS = {
    "k1": "d",
    "k2": "d.square() / 2",
    "k3": "torch.expm1(-d) + d",
    "k3_clamped": "(torch.expm1(-d) + d).clamp(max={kl_bound})",
    "k3_linear": "torch.expm1(-near) + near + {kl_bound} * (near - d)",
    "k3_bias_corrected": "ratio * (torch.expm1(-d) + d)",
}
REDUCTIONS = {
    "token_mean": "kept / {tokens}",
    "sequence_mean": "kept / (lengths * {completions})",
    "sequence_sum": "kept / {completions}",
    "constant_length": "kept / (max_length * {completions})",
}
MEANINGS = {
    "logp": "[T] log-probs of the sampled tokens under pi, with its gradient",
    "logp_alpha": "[T] the same under alpha, which sampled them",
    "logp_k": "[T] the same under pi_k, the policy at the start of the batch",
    "logp_ref": "[T] the same under the reference",
    "completion": "[T] the completion of each token, 0 .. C-1",
    "rewards": "[C]",
    "group": "[C] the group of each completion",
    "uniform": "[C] random numbers in [0, 1)",
    "max_length": "tokens that a completion may have",
}


def write_code(name: str, formula: str, made: Composition) -> str:
    """The function of a recipe, with its import: from tensors to the loss, and which tokens' gradient it cuts."""
    numbers = {n: _literal(getattr(made, n)) for n in made.__slots__} | {"anchor": POLICIES[made.anchor]}
    body = "\n\n".join(f"# {title}\n{lines}" for title, lines in _parts(made)).format(**numbers)
    used = [n for n in MEANINGS if n in ("logp", "completion", "rewards", "group") or _uses(body, n)]
    lines = "\n".join(f"{n:<11} {MEANINGS[n]}" for n in used)
    docstring = f'"""{formula}\n\n{lines}\n\nReturns the loss, and which tokens\' gradient is cut [T].\n"""'
    function = textwrap.indent(f"{docstring}\n{_counts(body)}\n\n{body}\nreturn loss, cut", "    ")
    blank = "\n".join(line.rstrip() for line in function.splitlines())
    return f"import torch\n\n\ndef {name}({', '.join(used)}):\n{blank}\n"


def _literal(value: object) -> str:
    return "float('inf')" if value == inf else str(value)


def _uses(code: str, name: str) -> bool:
    return re.search(rf"\b{name}\b", code) is not None


def _counts(body: str) -> str:
    """The lengths, and what sums over a completion, where the body asks for it."""
    lines = {
        "lengths": "torch.bincount(completion, minlength=len(rewards))",
        "total": "lambda x: x.new_zeros(len(rewards)).index_add(0, completion, x)[completion]  # of a completion",
        "length": "lengths[completion]",
    }
    return "\n".join(f"{name} = {line}" for name, line in lines.items() if name == "lengths" or _uses(body, name))


def _parts(made: Composition) -> list[tuple[str, str]]:
    """Titles and lines of the body, with the knobs still to be filled in."""
    parts = [("Advantage: from the rewards of each group", _advantage(made))]
    surrogate, kl = _surrogate(made), _kl(made)
    if _uses(surrogate + kl, "ratio"):
        level = LEVELS[made.ratio].format(f"logp - {POLICIES[made.denominator]}")
        parts.append((f"Ratio of each {made.ratio}", f"ratio = {level}"))
    parts.append(("Surrogate, to be maximized", surrogate))
    if made.correction != "none":
        weight = f"w = {LEVELS[made.correction_level].format('logp_k - logp_alpha')}.detach()"
        lines = f"{weight}\n{CORRECTIONS[made.correction]}\nvalue, cut = w * value, cut | (w == 0)"
        parts.append(("Correction for what the sampler computes otherwise", lines))
    if made.beta > 0:
        parts.append(("KL(pi || pi_ref)", kl))
    parts.append(("Reduction: weights that sum over the batch", _reduction(made)))
    return parts


def _advantage(made: Composition) -> str:
    shaped = "rewards + ((max_length - {overlong_buffer} - lengths) / {overlong_buffer}).clamp(-1, 0)"
    return (
        "advantage, flat = torch.zeros_like(rewards), torch.zeros_like(rewards, dtype=torch.bool)\n"
        + (f"shaped = {shaped}\n" if made.overlong_buffer else "")
        + "for own in (group == g for g in group.unique()):\n"
        + f"    r = {'shaped' if made.overlong_buffer else 'rewards'}[own]\n"
        + "    flat[own] = (rewards[own] == rewards[own][0]).all()\n"
        + "    if len(r) == 1:\n        advantage[own] = r  # nothing to compare with\n"
        + "    elif (r != r[0]).any():\n"
        + (textwrap.indent(RED_DROP, " " * 8) if made.advantage == "red_drop" else "")
        + f"        advantage[own] = {ADVANTAGES[made.advantage]}\n"
        + "A = advantage[completion]"
    )


def _surrogate(made: Composition) -> str:
    if made.surrogate == "reinforce":
        return _reinforce(made)
    if made.surrogate in SURROGATES:
        return SURROGATES[made.surrogate]
    center = LEVELS[made.ratio].format(f"logp_k - {POLICIES[made.denominator]}")
    lines = "" if made.surrogate == "clipped" else f"center = {center}\n"
    return lines + RANGES[made.surrogate] + CLIPPED.rstrip() + ("" if made.dual_clip == inf else DUAL_CLIP.rstrip())


def _reinforce(made: Composition) -> str:
    lines = [f"M = {MASKS[made.mask]}"] if made.mask != "none" else []
    lines += [f"W = {WEIGHTS[made.weight]}"] if made.weight != "one" else []
    factors = " * ".join([*(line[0] for line in lines), "A"])
    less = f" - {REGULARIZERS[made.regularizer]}" if made.regularizer != "none" else ""
    lines.append(f"value = {f'({factors}).detach()' if lines else 'A'} * logp{less}")
    lines.append("cut = torch.zeros_like(A, dtype=torch.bool)" if made.mask == "none" else "cut = ~M")
    return "\n".join(lines)


def _kl(made: Composition) -> str:
    if made.beta == 0:
        return ""
    near = f"near = d.clamp(min={-log1p(made.kl_bound)})  # where the slope is the bound\n"
    estimate = f"(logp - logp_alpha).exp().detach() * ({KLS[made.kl]})" if made.kl_importance else KLS[made.kl]
    return f"d = logp - logp_ref\n{near if made.kl == 'k3_linear' else ''}kl = {estimate}"


def _reduction(made: Composition) -> str:
    kept = "~flat" if made.mask_zero_variance else "torch.ones_like(flat)"
    tokens, completions = "(lengths * kept).sum()", "kept.sum()"
    if made.masked_count:
        tokens, completions = "lengths.sum()", "len(kept)"
    weight = REDUCTIONS[made.reduction].format(tokens=tokens, completions=completions)
    net = "(value - {beta} * kl)" if made.beta > 0 else "value"
    return f"kept = {kept}\nweight = {weight}\nloss = -(weight[completion] * {net}).sum()"
