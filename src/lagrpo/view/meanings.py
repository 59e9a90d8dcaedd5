"""What each metric of metrics.jsonl is, in a line, under the headings of the page. docs/metrics.md has more."""

from __future__ import annotations

from collections.abc import Iterable

from lagrpo.errors import suggest

METRICS: dict[str, dict[str, str]] = {
    "Rewards": {
        "reward_mean": "mean reward of the scored completions",
        "reward_std": "standard deviation of the rewards of the scored completions",
        "zero_variance_share": "share of groups whose scored rewards are all equal: they give no signal",
        "completions": "completions of the batch",
        "unscored": "completions that could not be scored",
        "failed": "completions that the infrastructure lost",
        "tokens_mean": "mean tokens of a completion",
        "finished_share": "share of completions that ended by themselves, not at a limit",
        "turns_mean": "mean turns of the policy in a completion; 1 without an environment",
        "sigma_mean": "mean over groups of σ, the standard deviation of a group's rewards with eps_std under the root",
        **{f"sigma_bin_{n}": f"groups with σ in tenth {n + 1} of [0, 1/2]" for n in range(10)},
    },
    "Lag": {
        "lag_min": "least lag of a token: version of π_k minus the version that sampled it",
        "lag_mean": "mean lag of a token",
        "lag_max": "greatest lag of a token",
        "synced": "1 where the sampler got new weights before this batch was sampled",
        "kl_alpha": "KL(α‖π_k), nats per token",
        "ratio_mean": "mean of π/α over tokens",
        "ess": "effective sample size as a share of the tokens",
        "kl_sequence": "KL(α‖π_k) of whole completions, nats",
        "pinsker": "√(kl_sequence/2), a bound on TV(α, π_k)",
        "tv_sequence": "total variation between α and π_k, of whole completions",
        "tv_sequence_low": "lower end of the 95 % interval of tv_sequence",
        "tv_sequence_high": "upper end of the 95 % interval of tv_sequence",
        "chi2_sequence": "E_α (ρ − 1)² of whole completions",
        "lag_ess": "effective number of completions, with ρ = π_k/α",
        "lag_reliable": "1 where lag_improvement means something",
        "lag_improvement": "J(π_k) − J(α): what was gained since the weight sync",
        "lag_theorem1": "right side of Corollary 1 for the step from α to π_k",
        "lag_identity": "right side of the identity bound for the step from α to π_k",
    },
    "Objective": {
        "objective": "the weighted surrogate at the first update, without the KL term",
        "loss": "the loss of the last update",
        "grad_norm": "norm of the gradient before clipping",
        "lr": "learning rate",
        "kl_ref": "KL(π_k‖π_ref), nats per token",
        "entropy": "entropy of π_k over the tokens of the objective, nats",
        "clip_low_share": "share of tokens that the clip holds back below, at the first update",
        "clip_high_share": "share of tokens that the clip holds back above, at the first update",
        "clip_low_share_last": "share of tokens that the clip holds back below, at the last update",
        "clip_high_share_last": "share of tokens that the clip holds back above, at the last update",
        "moved": "share of the working weights that the last update changed",
        "moved_synced": "share of the weights that the last weight sync changed in the sampler",
        "step_ess": "effective number of completions after the updates, with ρ = π/α",
        "step_reliable": "1 where step_improvement means something",
        "step_improvement": "J(π) − J(π_k) after the updates, optimistic",
        "step_theorem1": "right side of Corollary 1 for the step from π_k to π",
        "step_identity": "right side of the identity bound for the step from π_k to π",
    },
    "Agreement of learner and sampler": {
        "mismatch_mean": "mean difference of a token's log-prob under π and as recorded, nats",
        "mismatch_max": "greatest difference of a token's log-prob under π and as recorded, nats",
        "parity_mean": "mean |Δ log-prob| of a token on the parity prompts, nats",
        "parity_max": "greatest |Δ log-prob| of a token on the parity prompts, nats",
        "parity_kl": "mean of ρ − 1 − ln ρ on the parity prompts, nats",
        "parity_telling": "tokens of the parity prompts that the last weight sync moved by more than the noise",
    },
    "Time": {
        "seconds_total": "wall time of the batch, seconds",
        "seconds_sampling": "seconds of sampling",
        "seconds_judging": "seconds of judging",
        "seconds_learning": "seconds of learning",
        "seconds_scoring": "seconds of passes without gradient for metrics of the lag",
        "seconds_sync": "seconds of the weight sync",
        "seconds_writing": "seconds of writing weights to the shared directory",
        "seconds_paused": "seconds for which the servers generated nothing",
        "seconds_generating": "seconds in which the servers had something to generate",
        "seconds_checkpoint": "seconds for which the run waited for a checkpoint",
        "tokens_sampled": "completion tokens sampled",
        "tokens_learned": "completion tokens learned from",
        "tokens_per_s_sampling": "completion tokens sampled per second",
        "tokens_per_s_learning": "completion tokens learned from per second",
        "sync_bytes": "bytes of the last weight sync",
        "recoveries": "how often a server was brought back",
        "regenerated": "groups that were generated again",
    },
    "Place": {
        "stage": "the stage s",
        "batch": "the batch, counted through all stages",
        "version": "version of π_k",
    },
}


def of_names(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """The same with what only some runs have: the metrics of several rewards and of evaluation sets."""
    rewards, sets = dict[str, str](), dict[str, str]()
    known = {name for room in METRICS.values() for name in room}
    for name in dict.fromkeys(names):
        if name in known:
            continue
        if name.startswith("eval_"):
            sets[name] = "of the policy at the start of the batch: an evaluation set's result, where it was evaluated"
        for end, what in OF_A_REWARD.items():
            if name.startswith("reward_") and name.endswith(end):
                rewards[name] = f"{what} the reward {name.removeprefix('reward_').removesuffix(end)}"
    whole = {**METRICS, "Rewards": {**METRICS["Rewards"], **rewards}}
    return whole | ({"Evaluation sets": sets} if sets else {})


def check_metric(name: str) -> str:
    """The name itself. Raises ValueError, with the nearest, where no run has a metric of this name."""
    known = [name for room in of_names([name]).values() for name in room]
    if name not in known:
        raise ValueError(f"there is no metric {name!r}.{suggest(name, known)} docs/metrics.md lists all")
    return name


OF_A_REWARD = {
    "_mean": "mean, unweighted, of",
    "_std": "standard deviation, unweighted, of",
    "_unscored": "completions that could not be scored by",
}
