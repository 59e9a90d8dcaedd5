"""Every metric of metrics.jsonl with its meaning: for docs/metrics.md, the page of `lagrpo view` and studies."""

from __future__ import annotations

import re
from collections.abc import Iterable

from lagrpo.errors import suggest

METRICS: dict[str, dict[str, str]] = {
    "Progress": {
        "step": "number of the batch, from 1",
        "policy_version": "updates that π_k has had when the batch is used",
        "num_tokens": "completion tokens of the batch",
    },
    "Rewards": {
        "reward": "mean reward of the scored completions",
        "reward_std": "standard deviation of their rewards",
        "frac_reward_zero_std": "share of groups whose rewards are all equal, so that they give no signal",
        "rewards/NAME/mean": "mean of one of several rewards, unweighted, over the completions that it scored",
    },
    "Completions": {
        "completions/mean_length": "mean tokens of a completion",
        "completions/clipped_ratio": "share of completions that reached a limit before they ended",
        "completions/unscored": "completions whose reward could not be computed",
        "completions/failed": "completions that the infrastructure lost",
        "num_turns/mean": "mean turns of the policy in a completion; 1 without an environment",
    },
    "Updates": {
        "loss": "loss of the last update",
        "grad_norm": "norm of its gradient before clipping",
        "learning_rate": "learning rate of the last update",
        "entropy": "mean entropy of π_k at a token, nats",
        "kl": "estimate of KL(π_k‖π_ref), nats per token; 0 without a KL term",
        "clip_ratio/low_mean": "share of tokens that the clip cuts at its lower end, mean over the updates",
        "clip_ratio/high_mean": "share of tokens that the clip cuts at its upper end, mean over the updates",
    },
    "Staleness": {
        "staleness/mean": "mean staleness of a token: updates between the policy that sampled it and π_k",
        "staleness/max": "largest staleness of a token, updates",
        "weight_sync/performed": "1 if the rollout engine got new weights before this batch, else 0",
        "weight_sync/logp_difference": "largest |Δ log-prob| of trainer and engine, nats; local engine: at the start",
        "weight_sync/changed_fraction": "share of the weights that the last weight sync changed",
    },
    "Rollout policy α against π_k": {
        "rollout/ratio_mean": "mean of π_k/α at a token",
        "rollout/ess": "effective sample size of the tokens, as a share",
        "rollout/kl": "estimate of KL(α‖π_k), nats per token",
        "rollout/logp_difference_mean": "mean |log π_k − log α| of a token, nats",
        "rollout/logp_difference_max": "largest |log π_k − log α| of a token, nats",
        "rollout/seq_kl": "estimate of KL(α‖π_k) of a whole completion, nats",
        "rollout/seq_tv": "total variation between α and π_k, of whole completions",
        "rollout/seq_ess": "effective number of completions with the weights π_k/α",
        "improvement": "estimate of J(π_k) − J(α), the gain since the weight sync; null if the ESS is too small",
    },
    "Time": {
        "time/step": "wall time of the step, seconds",
        "time/generate": "seconds that the run waited for completions",
        "time/reward": "seconds that it waited for rewards",
        "time/score": "seconds of forward passes for metrics alone",
        "time/train": "seconds of updates",
        "time/sync": "seconds of the weight sync and its check",
        "tokens_per_s/generate": "completion tokens generated per second",
        "tokens_per_s/train": "completion tokens trained on per second",
    },
    "Evaluations": {
        "eval/SET/pass@1": "pass@1 of an evaluation set, if it was evaluated before this step",
        "eval/SET/reward": "mean reward of an evaluation set, if it was evaluated before this step",
    },
}
TEMPLATES = {
    "rewards/NAME/mean": r"rewards/\w+/mean",
    "eval/SET/pass@1": r"eval/\w+/pass@1",
    "eval/SET/reward": r"eval/\w+/reward",
}


def describe_metrics(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """The metrics under their headings, with the rewards and evaluation sets among `names` instead of templates."""
    names = list(dict.fromkeys(names))
    found: dict[str, dict[str, str]] = {}
    for heading, metrics in METRICS.items():
        for template, meaning in metrics.items():
            pattern = TEMPLATES.get(template)
            own = [name for name in names if re.fullmatch(pattern, name)] if pattern else [template]
            found.setdefault(heading, {}).update(dict.fromkeys(own, meaning))
    return found


def check_metric(name: str) -> str:
    """The name itself. Raises ValueError, with the nearest, for a name that is not a metric."""
    known = [known for metrics in describe_metrics([name]).values() for known in metrics]
    if name not in known:
        raise ValueError(f"there is no metric {name!r}.{suggest(name, known)} docs/metrics.md lists all")
    return name
