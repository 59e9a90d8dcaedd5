"""Runs recipes inside verl and TRL, and compares with lagrpo.core on the same batches.

    python conformance/inside.py [--check]

Gradients of every recipe: verl's `ppo_loss` calls `lagrpo.verl`, and `lagrpo.trl.GRPOTrainer`
computes the loss of micro-batches. Then 20 updates with samples that are 0 to 3 updates old: in
TRL's own `train`, and with verl's loss and advantages. Writes the table between the markers of
reports/conformance.md (--check: only compares). The exit status is 1 if something differs.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "src"), str(Path(__file__).parent)]
os.environ |= {"TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}

import stubs  # noqa: E402 - the path comes first

stubs.install()

import torch  # noqa: E402
from cases import GROUPS, MAX_LENGTH, Case, G  # noqa: E402
from datasets import Dataset  # noqa: E402
from page import PAGE, relative_difference, write_table  # noqa: E402
from pairing import ours  # noqa: E402
from tokenizers import Tokenizer, models  # noqa: E402
from torch import Tensor  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast  # noqa: E402
from trl import GRPOConfig  # noqa: E402
from trl.trainer.utils import shuffle_sequence_dict, split_tensor_dict  # noqa: E402
from verl.trainer.ppo.core_algos import get_adv_estimator_fn  # noqa: E402
from verl.utils.tensordict_utils import get_tensordict  # noqa: E402
from verl.workers.config import ActorConfig, PolicyLossConfig  # noqa: E402
from verl.workers.utils.losses import ppo_loss  # noqa: E402

import lagrpo.trl  # noqa: E402
import lagrpo.verl  # noqa: E402
from lagrpo.core.advantages import AdvantageInputs, zero_variance  # noqa: E402
from lagrpo.core.inputs import LossInputs, without_gradient  # noqa: E402
from lagrpo.core.objective import Recipe  # noqa: E402
from lagrpo.core.recipes import resolve  # noqa: E402
from lagrpo.core.rows import RECIPES  # noqa: E402

# lagrpo's weights of completions are float32, and verl adds 1e-8 to lengths.
SAME_IN_VERL = 1e-6
# The model of TRL's trainer is float32.
SAME_IN_TRL = 1e-4
AGGREGATION = {
    "token_mean": "token-mean",
    "sequence_mean": "seq-mean-token-mean",
    "sequence_sum": "seq-mean-token-sum",
    "constant_length": "seq-mean-token-sum-norm",
}
"""The loss_agg_mode of verl that is a reduction of ours."""

BEGIN = "<!-- inside: begin -->"
END = "<!-- inside: end -->"


# Gradients inside verl, with respect to log pi


def gradient_in_verl(name: str, case: Case) -> float:
    """The relative difference of the gradients; two micro-batches. ValueError: not supported."""
    overrides: dict[str, bool | float | str] = {}
    try:
        recipe = lagrpo.verl.find_supported(name)
    except ValueError:
        # The KL term is verl's own.
        overrides = {"beta": 0.0} if resolve(name).beta > 0 else {}
        recipe = lagrpo.verl.find_supported(name, overrides)
        lagrpo.verl.register(name, overrides)
    # verl counts all completions in its normalizers.
    counted = {"masked_count": True} if recipe.mask_zero_variance else {}
    logp = case.logp.clone().requires_grad_()
    [expected] = torch.autograd.grad(ours(case, logp, name, **overrides, **counted), logp)
    advantages, _ = get_adv_estimator_fn(f"lagrpo:{name}")(
        token_level_rewards=case.spread(case.rewards / case.lengths),
        response_mask=case.mask,
        index=case.group.numpy().astype(str),
        config={"rollout_correction": {"bypass_mode": recipe.needs_rollout_logp}},
    )
    old = case.alpha if recipe.needs_rollout_logp else case.pi_k
    config = actor_config(recipe, name)
    losses = []
    for rows in torch.arange(case.C).chunk(2):
        tokens = torch.isin(case.completion, rows)
        losses.append(
            loss_in_verl(
                config, logp[tokens], old[tokens], advantages[rows], case.lengths[rows], case.C,
                int(case.lengths.sum()),
            )
        )  # fmt: skip
    [gradient] = torch.autograd.grad(sum(losses[1:], losses[0]), logp)
    return relative_difference(gradient, expected)


def actor_config(recipe: Recipe, name: str) -> ActorConfig:
    return ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        use_dynamic_bsz=True,
        loss_agg_mode=AGGREGATION[recipe.reduction.name],
        loss_scale_factor=MAX_LENGTH,
        policy_loss=PolicyLossConfig(loss_mode=f"lagrpo:{name}"),
    )


def loss_in_verl(
    config: ActorConfig,
    logp: Tensor,
    old: Tensor,
    advantages: Tensor,
    lengths: Tensor,
    completions: int,
    tokens: int,
) -> Tensor:
    """verl's `ppo_loss` of a micro-batch. `logp` and `old` are flat, `advantages` [C, L].

    `completions` and `tokens` are the numbers of the whole step.
    """
    sizes = lengths.tolist()
    # A model's output has a row for the prompt's only token, which predicts the first token.
    outputs = [torch.cat([part, part.new_zeros(1)]) for part in logp.split(sizes)]
    batch = {
        "prompts": [torch.zeros(1, dtype=torch.long) for _ in sizes],
        "responses": [torch.zeros(size, dtype=torch.long) for size in sizes],
        "response_mask": [torch.ones(size) for size in sizes],
        "old_log_probs": list(old.split(sizes)),
        "advantages": [row[:size] for row, size in zip(advantages, sizes, strict=True)],
    }
    sizes_of_step = {
        "dp_size": 1,
        "batch_num_tokens": tokens,
        "global_batch_size": completions,
    }
    data = get_tensordict(
        {name: nested(parts) for name, parts in batch.items()}, non_tensor_dict=sizes_of_step
    )
    loss, _ = ppo_loss(config, {"log_probs": nested(outputs)}, data)
    return loss


def nested(parts: list[Tensor]) -> Tensor:
    return torch.nested.as_nested_tensor(parts, layout=torch.jagged)


# A tiny model, and its log-probs


LETTERS = 30
EOS = 1


def save_model(directory: Path) -> str:
    """A random Llama in float32 with a tokenizer of one letter per token."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=LETTERS, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=64, bos_token_id=None, eos_token_id=EOS,
        pad_token_id=0, initializer_range=0.3,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(directory)
    vocabulary = {
        text: number for number, text in enumerate(["<pad>", "<eos>", *map(str, range(28))])
    }
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>"
    ).save_pretrained(directory)
    return str(directory)


@dataclass(frozen=True)
class Rollouts:
    """Completions with rewards: prompts of one token, in groups of G."""

    prompts: list[int]
    completions: list[list[int]]
    rewards: list[float | None]
    alpha: list[list[float]]
    """the log-probs of each completion's tokens under the policy that sampled"""

    def as_trl(self, *_: Any) -> dict[str, object]:
        """What a rollout_func returns."""
        return {
            "prompt_ids": [[prompt] for prompt in self.prompts],
            "completion_ids": self.completions,
            "logprobs": self.alpha,
        }

    @property
    def lengths(self) -> Tensor:
        return torch.tensor([len(completion) for completion in self.completions])


def logps_and_entropies(model: Any, rollouts: Rollouts) -> tuple[Tensor, Tensor]:
    """log pi and the entropy at each sampled token, [T] each."""
    rows = [[p, *c] for p, c in zip(rollouts.prompts, rollouts.completions, strict=True)]
    longest = max(map(len, rows))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    mask = torch.arange(longest - 1) < rollouts.lengths.unsqueeze(1)
    log_probs = model(ids).logits[:, :-1].log_softmax(-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    return log_probs.gather(2, ids[:, 1:, None]).squeeze(2)[mask], entropy[mask]


def our_derivative(
    recipe: Recipe, model: Any, rollouts: Rollouts, *, reference: Any = None, age: int = 0
) -> tuple[Tensor, float]:
    """log pi times the derivative, whose gradient is ours, and the loss: scored completions."""
    scored = [i for i, reward in enumerate(rollouts.rewards) if reward is not None]
    rollouts = Rollouts(*([part[i] for i in scored] for part in vars(rollouts).values()))
    logp, entropy = logps_and_entropies(model, rollouts)
    ref_logp = None
    if reference is not None:
        with torch.no_grad():
            ref_logp, _ = logps_and_entropies(reference, rollouts)
    rewards = torch.tensor(rollouts.rewards)
    group = torch.tensor(scored) // G
    lengths = rollouts.lengths
    scores = AdvantageInputs(rewards, group, lengths, uniform_numbers()[scored])
    x = LossInputs(
        logp=logp,
        rollout_logp=torch.tensor([number for row in rollouts.alpha for number in row]),
        old_logp=logp.detach(),
        ref_logp=ref_logp,
        completion=torch.arange(len(lengths)).repeat_interleave(lengths),
        advantages=recipe.advantages(scores, MAX_LENGTH),
        group=group,
        staleness=torch.full_like(logp, age, dtype=torch.long),
        entropy=entropy.detach(),
        finished=torch.tensor([completion[-1] == EOS for completion in rollouts.completions]),
    )
    x = replace(x, step=recipe.collect(without_gradient(x)))
    weight = recipe.weights(lengths, zero_variance(rewards, group), MAX_LENGTH)
    derivative = recipe.differentiate(x, weight)
    return (derivative.gradient_T * logp).sum(), float(derivative.loss)


def uniform_numbers() -> Tensor:
    """The random numbers of lagrpo.trl with seed 0, in the first batch [C]."""
    return torch.rand(G * GROUPS, generator=torch.Generator().manual_seed(0))


# Gradients inside TRL, with respect to the model's weights


class TrainersOfTrl:
    """Trainers with given rollouts: with four micro-batches a step, and with one."""

    def __init__(self, model: str, rollouts: Rollouts, scratch: str) -> None:
        self.rollouts = rollouts
        # With a KL term, so that TRL loads the reference policy.
        self.split = trl_trainer(model, "grpo", rollouts.as_trl, lambda: rollouts.rewards, scratch)
        self.whole = trl_trainer(
            model, "grpo", rollouts.as_trl, lambda: rollouts.rewards, scratch, parts=1
        )
        for trainer in (self.split, self.whole):
            trainer.model.train()
            trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps

    def difference(self, name: str) -> tuple[float, str]:
        """The relative difference of the gradients, and what the recipe needs of the batches."""
        recipe = resolve(name)
        needs = lagrpo.trl.unmet_needs(recipe, self.split.args)
        trainer = self.whole if needs else self.split
        assert not lagrpo.trl.unmet_needs(recipe, trainer.args)
        trainer.recipe = recipe
        rows = [{"prompt": str(prompt)} for prompt in self.rollouts.prompts]
        trainer.state.global_step = 0
        batch = shuffle_if_split(trainer, trainer._generate_and_score_completions(rows))
        trainer.state.global_step = 2
        parameters = list(trainer.model.parameters())
        trainer.model.zero_grad()
        for micro_batch in split_tensor_dict(batch, trainer.args.steps_per_generation):
            trainer.compute_loss(trainer.model, micro_batch).backward()
        gradient = torch.cat([p.grad.flatten() for p in parameters])
        linear, _ = our_derivative(
            recipe, trainer.model, self.rollouts, reference=trainer.ref_model, age=2
        )
        expected = torch.cat([g.flatten() for g in torch.autograd.grad(linear, parameters)])
        largest = float(expected.abs().max())
        return float((gradient - expected).abs().max()) / largest, needs[0] if needs else ""


def shuffle_if_split(trainer: Any, batch: dict[str, Any]) -> dict[str, Any]:
    return shuffle_sequence_dict(batch) if trainer.args.steps_per_generation > 1 else batch


def trl_trainer(
    model: str,
    recipe: str,
    rollout: Callable[..., dict[str, object]],
    rewards: Callable[[], list[float | None]],
    scratch: str,
    parts: int = 4,
    **config: Any,
) -> Any:
    """A trainer of `lagrpo.trl` with GROUPS prompts a step, in `parts` micro-batches."""

    def reward(**_: object) -> list[float | None]:
        return rewards()

    return lagrpo.trl.GRPOTrainer(
        LlamaForCausalLM.from_pretrained(model, dtype=torch.float32),
        reward,
        GRPOConfig(
            scratch,
            per_device_train_batch_size=G * GROUPS // parts,
            gradient_accumulation_steps=parts,
            num_generations=G,
            max_completion_length=MAX_LENGTH,
            seed=0,
            bf16=False,
            use_cpu=True,
            gradient_checkpointing=False,
            shuffle_dataset=False,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
            **config,
        ),
        train_dataset=Dataset.from_list([{"prompt": str(p)} for p in range(GROUPS)]),
        processing_class=PreTrainedTokenizerFast.from_pretrained(model),
        rollout_func=rollout,
        recipe=recipe,
    )


def given_rollouts(model: str) -> Rollouts:
    """The completions of a random case, with alpha near the model; one has no reward."""
    case = Case.draw(1)
    generator = torch.Generator().manual_seed(1)
    completions = []
    for length, is_finished in zip(case.lengths.tolist(), case.finished.tolist(), strict=True):
        ids = torch.randint(2, LETTERS, (length,), generator=generator).tolist()
        completions.append([*ids[:-1], EOS] if is_finished else ids)
    rewards: list[float | None] = case.rewards.tolist()
    rewards[G + 1] = None
    prompts = [2 + i // G for i in range(case.C)]
    rollouts = Rollouts(prompts, completions, rewards, alpha=[])
    with torch.no_grad():
        logp, _ = logps_and_entropies(LlamaForCausalLM.from_pretrained(model), rollouts)
    alpha = logp + (case.alpha - case.logp).float()
    return replace(rollouts, alpha=[row.tolist() for row in alpha.split(case.lengths.tolist())])


# Twenty updates


UPDATES = 20
SYNC_EVERY = 4
LENGTH = 6
LEARNING_RATE = 3e-3


class Sampler:
    """Samples with the weights of the last multiple of SYNC_EVERY updates, the same numbers in all.

    A completion's reward is the share of its tokens that repeat the prompt.
    """

    def __init__(self, model: str) -> None:
        self.alpha = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32)
        self.rewards: list[list[float]] = []

    def sample(self, model: Any, update: int) -> Rollouts:
        if update % SYNC_EVERY == 0:
            self.alpha.load_state_dict(model.state_dict())
        prompts = [2 + i // G for i in range(G * GROUPS)]
        generator = torch.Generator().manual_seed(update)
        ids = torch.tensor(prompts).unsqueeze(1)
        with torch.no_grad():
            for _ in range(LENGTH):
                probabilities = self.alpha(ids).logits[:, -1].softmax(-1)
                sampled = torch.multinomial(probabilities, 1, generator=generator)
                ids = torch.cat([ids, sampled], dim=1)
        completions = []
        for row in ids[:, 1:].tolist():
            end = row.index(EOS) + 1 if EOS in row else LENGTH
            completions.append(row[:end])
        rewards = [
            completion.count(prompt) / LENGTH
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
        rollouts = Rollouts(prompts, completions, list(rewards), alpha=[])
        with torch.no_grad():
            logp, _ = logps_and_entropies(self.alpha, rollouts)
        self.rewards.append(rewards)
        alpha = [row.tolist() for row in logp.split(rollouts.lengths.tolist())]
        return replace(rollouts, alpha=alpha)

    @property
    def curve(self) -> list[float]:
        """The mean reward before each update."""
        return [sum(rewards) / len(rewards) for rewards in self.rewards]


def curve_of(
    model: str, derivative: Callable[[Any, Rollouts], tuple[Tensor, float]]
) -> tuple[list[float], list[float]]:
    """Rewards and losses of 20 updates with AdamW; `derivative` gives what is differentiated."""
    policy = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    sampler = Sampler(model)
    losses = []
    for update in range(UPDATES):
        differentiable, loss = derivative(policy, sampler.sample(policy, update))
        optimizer.zero_grad()
        differentiable.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        losses.append(loss)
    return sampler.curve, losses


def verl_derivative(recipe: str) -> Callable[[Any, Rollouts], tuple[Tensor, float]]:
    """The loss by verl's `ppo_loss`, with its advantages."""
    config = actor_config(resolve(recipe), recipe)

    def loss(policy: Any, rollouts: Rollouts) -> tuple[Tensor, float]:
        lengths = rollouts.lengths
        mask = (torch.arange(int(lengths.max())) < lengths.unsqueeze(1)).float()
        scores = torch.zeros_like(mask)
        scores[:, 0] = torch.tensor(rollouts.rewards)
        advantages, _ = get_adv_estimator_fn(f"lagrpo:{recipe}")(
            token_level_rewards=scores,
            response_mask=mask,
            index=[str(prompt) for prompt in rollouts.prompts],
            config={"rollout_correction": {"bypass_mode": True}},
        )
        logp, _ = logps_and_entropies(policy, rollouts)
        old = torch.tensor([number for row in rollouts.alpha for number in row])
        value = loss_in_verl(
            config, logp, old, advantages, lengths, len(lengths), int(lengths.sum())
        )
        return value, value.item()

    return loss


def curve_in_trl(model: str, recipe: str, scratch: str) -> tuple[list[float], list[float]]:
    """Rewards and losses of 20 updates in TRL's `train`, each with four micro-batches."""
    sampler = Sampler(model)
    losses: list[float] = []

    def rollout(_prompts: list[str], trainer: Any) -> dict[str, object]:
        return sampler.sample(trainer.model, trainer.state.global_step).as_trl()

    trainer = trl_trainer(
        model, recipe, rollout, lambda: list(sampler.rewards[-1]), scratch,
        max_steps=UPDATES, learning_rate=LEARNING_RATE, lr_scheduler_type="constant",
        max_grad_norm=1.0,
    )  # fmt: skip
    compute_loss = trainer.compute_loss

    def keep(*arguments: Any, **options: Any) -> Tensor:
        loss = compute_loss(*arguments, **options)
        losses.append(loss.item())
        return loss

    trainer.compute_loss = keep
    trainer.train()
    return sampler.curve, [sum(losses[i : i + 4]) for i in range(0, len(losses), 4)]


# The page


def gradient_rows(model: str, scratch: str) -> tuple[list[str], list[str]]:
    """The lines of the table of gradients, and what is not as expected."""
    rows, problems = [], []
    trainers = TrainersOfTrl(model, given_rollouts(model), scratch)
    for name in RECIPES:
        try:
            number = max(gradient_in_verl(name, Case.draw(seed)) for seed in range(10))
            in_verl = f"{number:.0e}"
            if number > SAME_IN_VERL:
                problems.append(f"{name} in verl: the gradient differs by {number:.2g}")
            if resolve(name).beta:
                in_verl += ", with beta = 0"
        except ValueError:
            in_verl = f"no: {' and '.join(lagrpo.verl.missing_inputs(resolve(name)))}"
        if resolve(name).needs_teacher:
            in_trl = "no: a teacher"
        else:
            number, needs = trainers.difference(name)
            if not number <= SAME_IN_TRL:
                problems.append(f"{name} in TRL: the gradient differs by {number:.2g}")
            in_trl = f"{number:.0e}{'; ' + needs if needs else ''}"
        rows.append(f"| `{name}` | {in_verl} | {in_trl} |")
        print(rows[-1], flush=True)
    return rows, problems


def curve_rows(model: str, scratch: str) -> tuple[list[str], list[str]]:
    """The lines of the table of curves, and what is not as expected."""
    recipe = resolve("prime_rl")
    curves = {
        "lagrpo.core": curve_of(model, lambda policy, r: our_derivative(recipe, policy, r)),
        "verl": curve_of(model, verl_derivative("prime_rl")),
        "TRL": curve_in_trl(model, "prime_rl", scratch),
    }
    our_rewards, our_losses = (torch.tensor(values) for values in curves["lagrpo.core"])
    rows, problems = [], []
    shown = [*range(0, UPDATES, 4), UPDATES - 1]
    for name, (rewards, losses) in curves.items():
        reward_difference = float((torch.tensor(rewards) - our_rewards).abs().max())
        loss_difference = relative_difference(torch.tensor(losses), our_losses)
        numbers = " | ".join(f"{rewards[update]:.3f}" for update in shown)
        rows.append(f"| {name} | {numbers} | {reward_difference:.0e} | {loss_difference:.0e} |")
        print(rows[-1], flush=True)
        if not (reward_difference < 1e-6 and loss_difference < 1e-3):
            problems.append(f"the curve in {name} differs by {reward_difference:.2g}")
    return rows, problems


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare, and leave the page as it is")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        model = save_model(Path(directory) / "model")
        curves, different_curves = curve_rows(model, directory)
        gradients, different_gradients = gradient_rows(model, directory)
    problems = different_curves + different_gradients
    if not options.check and not problems:
        write_table(page(gradients, curves), BEGIN, END)
        print(f"written: {PAGE}")
    print("\n".join(["", *problems, f"{len(gradients)} recipes, {len(problems)} differences"]))
    sys.exit(bool(problems))


def page(gradients: list[str], curves: list[str]) -> str:
    """The text between the markers."""
    updates = " | ".join(str(update) for update in [*range(0, UPDATES, 4), UPDATES - 1])
    return "\n".join(
        [
            f"| mean reward before update | {updates} | rewards differ by | losses by |",
            "|---|---|---|---|---|---|---|---|---|",
            *curves,
            "",
            "| recipe | verl | TRL |",
            "|---|---|---|",
            *gradients,
        ]
    )


if __name__ == "__main__":
    main()
