"""The presets: one table, each row a composition of pieces of core (advantage x ratio x surrogate x KL x reduction)
with its formula and source. A new method is a new row, or the same row written in a settings file.

>>> resolve("grpo", {"epsilon_high": 0.28}).composition.epsilon_high
0.28

Importing this module loads neither torch nor core; `resolve` does. So `--help` and the list of recipes stay quick.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Composition:
    """The names of the pieces and the numbers they read."""

    advantage: str = "whitened"
    """whitened | centred | leave_one_out"""
    ratio: str = "token"
    """token | sequence | length_normalised: the level at which pi/alpha is taken"""
    surrogate: str = "clipped"
    """clipped (centre 1) | clipped_exact (centre pi_k/alpha) | unclipped | reinforce (no ratio)"""
    reduction: str = "sequence_mean"
    """token_mean | sequence_mean | sequence_sum | constant_length"""
    kl: str = "k3"
    """estimator of KL(pi || pi_ref) on the sampled tokens, read only when beta > 0: k1 | k2 | k3"""
    kl_importance: bool = False
    """weight the KL estimate by stop-gradient pi/alpha, which unbiases it on samples of alpha"""
    beta: float = 0.0
    """weight of the KL term"""
    epsilon_low: float = 0.2
    """lower clip range"""
    epsilon_high: float = 0.2
    """upper clip range"""
    eps_std: float = 1e-4
    """variance floor: sigma = sqrt(s0^2 + eps_std)"""
    mask_zero_variance: bool = False
    """leave groups whose rewards are all equal out of surrogate and KL (Eq. 8)"""
    masked_count: bool = False
    """count the completions of masked groups in the normaliser"""


@dataclass(frozen=True, slots=True)
class Preset:
    """A row of the table: a composition, where it is from and what it computes."""

    source: str
    formula: str
    composition: Composition


@dataclass(frozen=True, slots=True)
class Recipe:
    """A resolved row: the pieces as functions, their numbers bound. `composition` says what they were made from.

    advantage(rewards_G, uniform_G) -> advantage_G     reduction(lengths_C, kept_C, counted_C, max_length) -> weight_C
    ratio(logp_T, logp_alpha_T, completion_T, C)       value, cut, kl: Terms -> [T] (see core.loss)"""

    name: str
    source: str
    formula: str
    composition: Composition
    advantage: Callable[[Tensor, Tensor], Tensor]
    ratio: Callable[[Tensor, Tensor, Tensor, int], Tensor]
    value: Callable[..., Tensor]
    cut: Callable[..., Tensor]
    kl: Callable[..., Tensor]
    reduction: Callable[[Tensor, Tensor, Tensor, int], Tensor]
    needs_pi_k: bool

    @property
    def beta(self) -> float:
        return self.composition.beta

    @property
    def needs_pi_ref(self) -> bool:
        return self.composition.beta > 0

    @property
    def mask_zero_variance(self) -> bool:
        return self.composition.mask_zero_variance

    @property
    def masked_count(self) -> bool:
        return self.composition.masked_count

    def weights(self, lengths_C: Tensor, zero_variance_C: Tensor, max_length: int) -> Tensor:
        """The weight of each completion of the whole batch in the objective; 0 for those of masked groups."""
        kept_C = ~zero_variance_C if self.mask_zero_variance else zero_variance_C | True
        return self.reduction(lengths_C, kept_C, kept_C | self.masked_count, max_length)

    def loss(
        self,
        logp_T: Tensor,
        logp_alpha_T: Tensor,
        logp_k_T: Tensor | None,
        logp_ref_T: Tensor | None,
        advantage_C: Tensor,
        completion_T: Tensor,
        weight_C: Tensor,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of a micro-batch and its additive diagnostics: `core.loss.objective_sum` with these pieces."""
        from lagrpo.core.loss import objective_sum

        policies = (logp_T, logp_alpha_T, logp_k_T, logp_ref_T)
        pieces = {"ratio": self.ratio, "value": self.value, "cut": self.cut, "kl": self.kl, "beta": self.beta}
        return objective_sum(*policies, advantage_C, completion_T, weight_C, **pieces)


GRPO = Composition(beta=0.04)
OFF_POLICY = Composition(beta=0.1)
SHAO = "Shao et al., DeepSeekMath, arXiv 2402.03300"
MROUEH = "Mroueh et al., Revisiting GRPO, arXiv 2505.22257"

PRESETS: dict[str, Preset] = {
    "grpo": Preset(
        f"{SHAO}, Eq. 3 and 4 (beta .04; epsilon is not stated)",
        "f_eps(pi/alpha, 1, A) - beta k3,  A = (r - mu)/sigma; mean over completions of token means",
        GRPO,
    ),
    "grpo_masked": Preset(
        f"{MROUEH}, Eq. 8 (beta .1 on GSM8K, .001 on DeepScaleR; epsilon and reduction are not stated)",
        "1[s0 > 0] (f_eps(pi/alpha, 1, A) - beta k3): groups of equal rewards leave surrogate, KL and normaliser",
        replace(OFF_POLICY, mask_zero_variance=True),
    ),
    "off_policy_grpo": Preset(
        f"{MROUEH}, Eq. 7 with pi_k/alpha taken as 1 (end of section 3.2); unmasked, as its run v = 10, i = 1",
        "f_eps(pi/alpha, 1, A_alpha) - beta k3,  alpha = pi_j drawn every v batches, A_alpha by alpha's own statistics",
        OFF_POLICY,
    ),
    "off_policy_grpo_exact": Preset(
        f"{MROUEH}, Eq. 6 and 7 as derived",
        "f_eps(pi/alpha, pi_k/alpha, A_alpha) - beta k3: the clip range is centred on pi_k",
        replace(OFF_POLICY, surrogate="clipped_exact"),
    ),
    "dr_grpo": Preset(
        "Liu et al., Understanding R1-Zero-like training, arXiv 2503.20783 (no KL)",
        "f_eps(pi/alpha, 1, r - mu); sum over tokens / (completions * longest completion allowed)",
        Composition(advantage="centred", reduction="constant_length"),
    ),
    "dapo": Preset(
        "Yu et al., DAPO, arXiv 2503.14476, Eq. 8 (no KL); its dynamic sampling in the form of a mask",
        "1[s0 > 0] clip(pi/alpha, 1 - .2, 1 + .28) objective, A = (r - mu)/sigma; mean over the tokens of the batch",
        Composition(reduction="token_mean", epsilon_high=0.28, mask_zero_variance=True),
    ),
    "rloo": Preset(
        "Ahmadian et al., Back to basics, arXiv 2402.14740, Eq. 7 (its KL is part of the reward: here none)",
        "A log pi(y),  A = r - mean of the others; mean over completions of the sum over tokens",
        Composition(advantage="leave_one_out", surrogate="reinforce", reduction="sequence_sum"),
    ),
}


def resolve(name: str, overrides: Mapping[str, Any] | None = None) -> Recipe:
    """The preset `name` with some of its pieces or numbers replaced.

    Raises ValueError for an unknown name (with the nearest one), a number out of its domain, and a contradictory
    composition, among them an override that nothing in the composition would read."""
    from lagrpo.core import divergences, pieces
    from lagrpo.core.loss import no_kl

    overrides = dict(overrides or {})
    preset = PRESETS[_known("recipe", name, PRESETS)]
    for key in overrides:
        _known("setting", key, [field.name for field in fields(Composition)])
    made = replace(preset.composition, **overrides)
    advantage = pieces.ADVANTAGES[_known("advantage", made.advantage, pieces.ADVANTAGES)]
    ratio = pieces.RATIOS[_known("ratio", made.ratio, pieces.RATIOS)]
    surrogate = pieces.SURROGATES[_known("surrogate", made.surrogate, pieces.SURROGATES)]
    estimate = pieces.KLS[_known("kl", made.kl, pieces.KLS)]
    reduction = pieces.REDUCTIONS[_known("reduction", made.reduction, pieces.REDUCTIONS)]
    _refuse_bad_numbers(made)
    _refuse_contradictions(made, overrides, _knobs(advantage) | _knobs(surrogate.value), surrogate.reads_ratio)

    def kl(terms: Any) -> Tensor:
        return estimate(terms.logp, terms.reference)

    def weighted_kl(terms: Any) -> Tensor:
        return divergences.importance_weighted(kl(terms), (terms.logp - terms.logp_alpha).exp())

    return Recipe(
        name,
        preset.source,
        preset.formula,
        made,
        advantage=_bound(advantage, made),
        ratio=ratio,
        value=_bound(surrogate.value, made),
        cut=_bound(surrogate.cut, made),
        kl=no_kl if made.beta == 0 else weighted_kl if made.kl_importance else kl,
        reduction=reduction,
        needs_pi_k=surrogate.needs_pi_k,
    )


def _known(kind: str, name: str, names: Iterable[str]) -> str:
    names = list(names)
    if name in names:
        return name
    nearest = difflib.get_close_matches(name, names, n=1, cutoff=0.0)[0]
    raise ValueError(f"unknown {kind} {name!r}; the nearest is {nearest!r} (all: {', '.join(names)})")


def _knobs(piece: Callable[..., Any]) -> set[str]:
    """The numbers a piece reads: its keyword-only arguments."""
    parameters = inspect.signature(piece).parameters.values()
    return {parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}


def _bound(piece: Callable[..., Any], made: Composition) -> Callable[..., Any]:
    return partial(piece, **{knob: getattr(made, knob) for knob in _knobs(piece)})


def _refuse_bad_numbers(made: Composition) -> None:
    for knob in ("beta", "epsilon_low", "epsilon_high", "eps_std"):
        if not getattr(made, knob) >= 0:
            raise ValueError(f"{knob} must be at least 0, but is {getattr(made, knob)}")


def _refuse_contradictions(made: Composition, overrides: Mapping[str, Any], read: set[str], reads_ratio: bool) -> None:
    for knob in ("epsilon_low", "epsilon_high", "eps_std"):
        if knob in overrides and knob not in read:
            raise ValueError(
                f"{knob} was set, but neither advantage {made.advantage!r} nor surrogate {made.surrogate!r} reads it"
            )
    if "ratio" in overrides and not reads_ratio:
        raise ValueError(f"ratio was set, but surrogate {made.surrogate!r} has no ratio")
    if made.masked_count and not made.mask_zero_variance:
        raise ValueError(
            "masked_count says how masked groups are counted, but mask_zero_variance is off: none is masked"
        )
    if made.beta == 0 and (made.kl_importance or "kl" in overrides):
        raise ValueError("kl and kl_importance shape the KL term, but beta is 0: there is no KL term")
    if made.beta > 0 and made.kl == "k1":
        raise ValueError(
            "k1 = logp - logp_ref is no penalty: its gradient is grad logp, which is 0 in expectation and pushes away "
            "from the samples when they are stale; use k2 (gradient of KL(pi || pi_ref)) or k3"
        )
