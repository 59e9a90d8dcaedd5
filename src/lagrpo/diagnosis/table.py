"""The table of detectors: what each reads, from when on it speaks, and what to do."""

from __future__ import annotations

from lagrpo.diagnosis import answers, completions, learning, prompts, rewards, timing, updates
from lagrpo.diagnosis.finding import Detector

DETECTORS = (
    Detector(
        "unscored",
        reads="outcome, reason",
        # A few per hundred are odd texts; more is a fault of the reward function.
        threshold=0.05,
        advice="Fix the reward function or the data by these reasons.",
        find=rewards.find_unscored,
    ),
    Detector(
        "cut",
        reads="finished, reward",
        # One in five: fewer are long thoughts that no limit ends.
        threshold=0.2,
        advice="Shorter answers help, too: ask for them in task.system_prompt.",
        find=completions.find_cut,
    ),
    Detector(
        "too_hard",
        reads="reward of the last batches",
        # With G = 16 and a chance of 2 % per completion, 72 % of the groups are all wrong.
        threshold=0.7,
        advice="Start with easier prompts, check that the reward accepts a right answer, or give "
        "partial credit.",
        find=rewards.find_too_hard,
    ),
    Detector(
        "too_easy",
        reads="reward of the first batches",
        # As for too_hard, with right and wrong exchanged.
        threshold=0.7,
        advice="Take harder prompts, and check that the reward rejects a wrong answer.",
        find=rewards.find_too_easy,
    ),
    Detector(
        "never_solved",
        reads="reward by prompt",
        # A third of the prompts takes a third of the time.
        threshold=0.33,
        advice="Leave these prompts out, or move them to a later stage.",
        find=rewards.find_never_solved,
    ),
    Detector(
        "always_solved",
        reads="reward by prompt",
        # Learned prompts join them, so more than half.
        threshold=0.6,
        advice="Leave these prompts out.",
        find=rewards.find_always_solved,
    ),
    Detector(
        "constant_reward",
        reads="reward_NAME",
        # Share of the range: rounding, and nothing more.
        threshold=1e-6,
        advice="Check the reward function with a text that should get it, and show the format in "
        "the prompt.",
        find=rewards.find_constant_reward,
    ),
    Detector(
        "dominant_reward",
        reads="reward_NAME by group",
        # With 2 % of the variance, a reward changes an advantage by a seventh (√.02).
        threshold=0.98,
        advice="Raise the weight of the other rewards in task.rewards.",
        find=rewards.find_dominant_reward,
    ),
    Detector(
        "rejected_answers",
        reads="completion, answer, reward",
        # Half: in fewer, the words before the answer may be what is wrong.
        threshold=0.5,
        advice="Check that the reward is not the wrong way round, and that it accepts the form in "
        "which the policy answers.",
        find=answers.find_rejected_answers,
    ),
    Detector(
        "unrelated_answers",
        reads="completion, answer",
        # Right answers for each foreign one: a policy that knows little has twice as many.
        threshold=1.2,
        advice="Check that each row of the data has the answer of its own prompt; else the policy "
        "only guesses, and needs easier prompts.",
        find=answers.find_unrelated_answers,
    ),
    Detector(
        "random_reward",
        reads="completion, reward by group",
        # A fifth: a judge may change its mind now and then.
        threshold=0.2,
        advice="Check that the reward depends on the completion alone, without chance and time.",
        find=answers.find_random_reward,
    ),
    Detector(
        "length_drift",
        reads="completions/mean_length, length",
        # Nine tenths of the limit: the next growth by a tenth is cut.
        threshold=0.9,
        advice="A reward for short completions helps, too (overlong_buffer of recipe dapo).",
        find=completions.find_length_drift,
    ),
    Detector(
        "repetition",
        reads="completion",
        # One in ten: a few loops are usual with small models.
        threshold=0.1,
        advice="Use an instruction-tuned model, lower rollout.temperature, or set rollout.stop.",
        find=completions.find_repetition,
    ),
    Detector(
        "equal_completions",
        reads="completion by group, rollout.temperature",
        # A third of the groups can teach nothing, however often they are sampled.
        threshold=0.33,
        advice="Sample with more variety.",
        find=completions.find_equal_completions,
    ),
    Detector(
        "clip",
        reads="clip_ratio/low_mean, clip_ratio/high_mean, advantage",
        # Of the tokens of a sign; GRPO at v = 10 learned well with .4 of the negative ones cut.
        threshold=0.5,
        advice="A recipe with a wider range, such as prime_rl, cuts less.",
        find=updates.find_clip,
    ),
    Detector(
        "filters",
        reads="filtered/tokens, filtered/completions",
        # Half of the work is for nothing.
        threshold=0.5,
        advice="Loosen the filter in loss.overrides, or remove it from loss.filters.",
        find=updates.find_filters,
    ),
    Detector(
        "still_weights",
        reads="weight_sync/changed_fraction",
        # In bf16 it is about the learning rate over the spacing of weights: 1 % at a rate of 1e-6.
        threshold=1e-3,
        advice="docs/precision.md explains why small updates of bf16 weights are lost.",
        find=updates.find_still_weights,
    ),
    Detector(
        "still_policy",
        reads="rollout/kl, staleness/mean",
        # KL grows with the square of the way: to .1 nats it takes 300 such cycles.
        threshold=1e-6,
        advice="Raise the learning rate while rollout/kl stays below .05.",
        find=updates.find_still_policy,
    ),
    Detector(
        "clipped_gradient",
        reads="grad_norm, optimizer.max_grad_norm",
        # Nearly every update.
        threshold=0.9,
        advice="Gradients that are clipped only now and then keep their proportions.",
        find=updates.find_clipped_gradient,
    ),
    Detector(
        "mismatch",
        reads="rollout/logp_difference_mean at staleness 0",
        # vLLM in bf16 has .04 to .06 nats; a tenth is another model, template or temperature.
        threshold=0.1,
        advice="docs/off-policy.md (Correct for another engine) has more recipes.",
        find=updates.find_mismatch,
    ),
    Detector(
        "kl",
        reads="rollout/kl of stale batches, reward",
        # The rule of docs/off-policy.md: stable runs stay below .05 nats per token.
        threshold=0.05,
        advice="More weight syncs help, too.",
        find=updates.find_kl,
    ),
    Detector(
        "staleness",
        reads="staleness/max, loss.recipe",
        # Share of the area that the best method gains with fresh samples (lagrpo recipes).
        threshold=0.5,
        advice="More weight syncs help, too.",
        find=updates.find_staleness,
    ),
    Detector(
        "falling_entropy",
        reads="entropy, reward",
        # Nats per token: about one choice of two in a hundred tokens is still open.
        threshold=0.01,
        advice="Go back to an earlier policy, or raise loss.epsilon_high.",
        find=learning.find_falling_entropy,
    ),
    Detector(
        "exploded_entropy",
        reads="entropy",
        # Three times what it began with; sampling noise is below a tenth.
        threshold=3,
        advice="Go back to an earlier policy; loss.beta = 0.01 holds it near the start.",
        find=learning.find_exploded_entropy,
    ),
    Detector(
        "fallen_reward",
        reads="reward",
        # Of the range of rewards; the standard errors decide as well.
        threshold=0.15,
        advice="Go back to an earlier policy (checkpoint.export_every keeps them).",
        find=learning.find_fallen_reward,
    ),
    Detector(
        "flat_reward",
        reads="reward, frac_reward_zero_std",
        # Of the range of rewards; the standard errors decide as well.
        threshold=0.05,
        advice="Check with lagrpo view RUN --text that better completions get larger rewards; if "
        "so, the learning rate is wrong.",
        find=learning.find_flat_reward,
    ),
    Detector(
        "flat_teacher",
        reads="kl, loss.reference, loss.reference_prompt",
        # Nats per token: two dtypes of one model differ by less.
        threshold=1e-4,
        advice="Check with lagrpo eval that the teacher solves the task, at rollout.temperature "
        "and with the chat template of the policy.",
        find=learning.find_flat_teacher,
    ),
    Detector(
        "flat_evaluation",
        reads="reward, reward of evaluations",
        # Of the range of rewards; a smaller difference may come from the prompts.
        threshold=0.15,
        advice="Compare the task, temperature and limit of evaluation and training.",
        find=learning.find_flat_evaluation,
    ),
    Detector(
        "past_best",
        reads="pass@1",
        # Ten points; the interval of the last evaluation decides as well.
        threshold=0.1,
        advice="Set eval.every, so that weights/best has the best policy.",
        find=learning.find_past_best,
    ),
    Detector(
        "known_test_prompts",
        reads="prompt_text, prompts of evaluations",
        # One in ten: a few equal questions are chance.
        threshold=0.1,
        advice="Remove them from the training data.",
        find=learning.find_known_test_prompts,
    ),
    Detector(
        "answer_in_prompt",
        reads="prompt_text, answer",
        # In most prompts; in fewer, an answer may be a word of the question.
        threshold=0.5,
        advice="Take it out of task.prompt_column, unless the task is to find it there.",
        find=prompts.find_answer_in_prompt,
    ),
    Detector(
        "equal_prompts",
        reads="prompt_text, answer",
        # Half of the prompts: data may repeat a part of the rows on purpose.
        threshold=0.5,
        advice="Check what writes the data, and task.prompt_column.",
        find=prompts.find_equal_prompts,
    ),
    Detector(
        "slow_rewards",
        reads="time/reward",
        # Two fifths of the time, more than learning usually has.
        threshold=0.4,
        advice="Make the reward function faster, or leave its workers more processor cores.",
        find=timing.find_slow_rewards,
    ),
    Detector(
        "slow_syncs",
        reads="time/sync",
        # As for slow_rewards.
        threshold=0.4,
        advice="docs/off-policy.md says which losses tolerate the staler samples.",
        find=timing.find_slow_syncs,
    ),
    Detector(
        "stragglers",
        reads="time/generate, length",
        # The engine holds few completions for three quarters of the time.
        threshold=4,
        advice="Batches that are sampled ahead fill the gap.",
        find=timing.find_stragglers,
    ),
)
"""All detectors. Findings are ordered by what they cost, and only with equal costs as here."""
