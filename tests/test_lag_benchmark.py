"""The benchmark of methods against staleness, experiments/lag: its model, tasks, trainer, queue and
report."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from experiments.lag import __main__ as queue
from experiments.lag.ages import Kind, SawtoothSyncs, Schedule
from experiments.lag.control import CONTROLS, RateControl
from experiments.lag.distillation import distillation_table, recomputed_sentence
from experiments.lag.exact import TOYS, run
from experiments.lag.methods import load_methods
from experiments.lag.model import Architecture, StackedLlama, initial_weights, unpack
from experiments.lag.plan import SAME_AT_LAG_0, Methods, Pass, full_plan, passes_where_some_die
from experiments.lag.rates import controls_by_loss_table, setting_sentences
from experiments.lag.records import Record, append_records, load_records
from experiments.lag.report import find_cells, leaders, rank_agreement
from experiments.lag.starts import imitate_teacher, mean_score
from experiments.lag.tasks import TASKS, Chain, Gamble, Task
from experiments.lag.train import Batch, History, Run, Step, by_length, train
from experiments.lag.verdicts import (
    all_tasks_sentences,
    all_tasks_table,
    better_on_both_sentence,
    compare_with_baseline,
    on_all_tasks,
)
from lagrpo.core.recipes import resolve

pytestmark = pytest.mark.experiments

PUBLISHED = load_methods("published")
EQUAL = load_methods("equal")
METHODS: Methods = {
    "published": PUBLISHED,
    "equal": EQUAL,
    "controlled": load_methods("controlled"),
    "distilled": load_methods("distilled"),
}


class FirstDigitIsEven(Chain):
    """A task whose rewards differ also with random weights."""

    def grade(self, prompts: Tensor, completions: Tensor, luck: Tensor) -> tuple[Tensor, Tensor]:
        reward = (completions[..., 0] % 2 == 0).float()
        return reward, reward


SMALL_TASK = FirstDigitIsEven(digits=3, prompts_per_batch=4)


def start_of(task: Task) -> tuple[Architecture, Tensor]:
    """Random weights, large enough that the policy has preferences."""
    architecture = Architecture(task.vocabulary)
    return architecture, 4 * initial_weights(architecture, seed=0)


# The model


def to_transformers(architecture: Architecture, flat: Tensor) -> LlamaForCausalLM:
    """The first of the stacked models as one of transformers."""
    a = architecture
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=a.vocabulary,
            hidden_size=a.width,
            intermediate_size=a.inner,
            num_hidden_layers=a.layers,
            num_attention_heads=a.heads,
            rms_norm_eps=a.norm_epsilon,
            tie_word_embeddings=True,
        )
    )
    weights = {name: value[0] for name, value in unpack(a, flat).items()}
    state = {
        "model.embed_tokens.weight": weights["embedding"],
        "lm_head.weight": weights["embedding"],
        "model.norm.weight": weights["norm"],
    }
    for layer in range(a.layers):
        ours = f"{layer}."
        theirs = f"model.layers.{layer}."
        q, k, v = weights[ours + "qkv"].T.chunk(3)
        gate, up = weights[ours + "gate_up"].T.chunk(2)
        state |= {
            theirs + "input_layernorm.weight": weights[ours + "attention_norm"],
            theirs + "self_attn.q_proj.weight": q,
            theirs + "self_attn.k_proj.weight": k,
            theirs + "self_attn.v_proj.weight": v,
            theirs + "self_attn.o_proj.weight": weights[ours + "attention_output"].T,
            theirs + "post_attention_layernorm.weight": weights[ours + "mlp_norm"],
            theirs + "mlp.gate_proj.weight": gate,
            theirs + "mlp.up_proj.weight": up,
            theirs + "mlp.down_proj.weight": weights[ours + "down"].T,
        }
    model.load_state_dict(state)
    return model.eval()


@pytest.mark.parametrize(
    "architecture",
    [
        pytest.param(Architecture(16), id="one layer"),
        pytest.param(Architecture(44, width=64, inner=96, layers=2, heads=4), id="two layers"),
    ],
)
def test_log_probs_of_sampler_and_tree_pass_are_those_of_transformers(architecture):
    generator = torch.Generator().manual_seed(0)
    # Prompts, completions of a prompt, tokens of a prompt and of a completion.
    B, G, P, L = 3, 4, 5, 6
    V = architecture.vocabulary
    flat = 2 * initial_weights(architecture, seed=1)
    prompts = torch.randint(0, V, (1, B, P), generator=generator)
    uniform = torch.rand(1, B, G, L, generator=generator)
    model = StackedLlama(architecture, P, L)
    samples = model.sample([unpack(architecture, flat)], prompts, uniform, end=3, padding=4)
    in_tree = model.log_probs(unpack(architecture, flat), prompts, samples.tokens)

    sequences = torch.cat([prompts[0, :, None].expand(-1, G, -1), samples.tokens[0]], dim=-1)
    with torch.no_grad():
        logits = to_transformers(architecture, flat)(sequences.view(B * G, P + L)).logits
    log_p = logits[:, P - 1 : -1].log_softmax(-1)
    expected = log_p.gather(-1, samples.tokens.view(B * G, L, 1)).view(1, B, G, L)
    is_token = samples.logp != 0
    assert bool(is_token.all(dim=-1).any())  # some completion goes on to the last token
    # float32 log-probs of at most some ten nats: a few of their rounding steps, 2^-20.
    torch.testing.assert_close(in_tree, expected, rtol=0, atol=2e-6)
    torch.testing.assert_close(samples.logp[is_token], expected[is_token], rtol=0, atol=2e-6)


def test_sampler_draws_in_proportion_to_probabilities():
    """4,096 first tokens: shares are within 5 standard errors of the probabilities."""
    architecture = Architecture(16)
    weights = unpack(architecture, 4 * initial_weights(architecture, seed=2))
    model = StackedLlama(architecture, 1, 2)
    prompts = torch.zeros(1, 1, 1, dtype=torch.long)
    uniform = torch.rand(1, 1, 4096, 2, generator=torch.Generator().manual_seed(0))
    samples = model.sample([weights], prompts, uniform, end=14, padding=15)
    shares = samples.tokens[0, 0, :, 0].bincount(minlength=16) / 4096
    every_token = torch.arange(16).view(1, 1, 16, 1).expand(-1, -1, -1, 2)
    p = model.log_probs(weights, prompts, every_token)[0, 0, :, 0].exp()
    assert float(p.sum()) == pytest.approx(1.0, abs=1e-5)
    assert bool(((shares - p).abs() <= 5 * (p * (1 - p) / 4096).sqrt()).all())


# Tasks


def tokens(text: str) -> Tensor:
    return torch.tensor(["0123456789.=_#".index(character) for character in text])


@pytest.mark.parametrize(
    ("task", "completion", "reward"),
    [
        pytest.param(Chain(), "31685.", 1.0, id="right"),
        pytest.param(Chain(), "31585.", 0.0, id="one wrong step and a wrong step after it"),
        pytest.param(Chain(), "3168._", 0.0, id="too short"),
        pytest.param(Chain(right_per_digit=2), "31685.", 1.0, id="many: right"),
        pytest.param(Chain(right_per_digit=2), "86130.", 1.0, id="many: each right plus 5"),
        pytest.param(Chain(right_per_digit=2), "31684.", 0.0, id="many: last one wrong"),
        pytest.param(Chain(is_graded=True), "31685.", 1.0, id="graded: right"),
        pytest.param(Chain(is_graded=True), "31574.", 0.75, id="graded: one wrong step"),
        pytest.param(Chain(is_graded=True), "31585.", 0.75**2, id="graded: two wrong steps"),
        pytest.param(Chain(is_graded=True), "3168._", 0.0, id="graded: too short"),
    ],
)
def test_chain_grades_running_sums(task, completion, reward):
    prompts = tokens("38527=")[None]
    completions = tokens(completion)[None, None]
    rewards, scores = task.grade(prompts, completions, torch.zeros(1, 1))
    assert rewards.item() == scores.item() == pytest.approx(reward)


def test_chain_with_luck_swaps_rewards_but_not_scores():
    prompts = tokens("38527=")[None]
    completions = tokens("31685.")[None, None].expand(1, 2, -1)
    # Below .1 a right answer has bad luck: its reward is 0, its score stays 1.
    rewards, scores = Chain(luck=0.1).grade(prompts, completions, torch.tensor([[0.05, 0.5]]))
    assert rewards.tolist() == [[0.0, 1.0]]
    assert scores.tolist() == [[1.0, 1.0]]


def walk(task: Gamble, prompt: Tensor, kinds: list[int]) -> Tensor:
    """The completion that takes a jump of these kinds where there is one, from the first node on,
    else the first."""
    node = 0
    nodes = []
    while node < task.goal:
        terrain = int(task._terrain_at(prompt[None], torch.tensor([[node]])))
        kind = kinds[len(nodes)] if len(nodes) < len(kinds) else 0
        jumps = [jump for jump in (1, 2, 3) if node + jump <= task.goal]
        fitting = [jump for jump in jumps if task._kind[terrain, node, jump] == kind]
        node += (fitting or jumps)[0]
        nodes.append(node)
    padding = [task.padding] * (task.completion_length - len(nodes) - 1)
    return torch.tensor([*nodes, task.end, *padding])


@pytest.mark.parametrize(
    ("kinds", "prize", "chance"),
    [
        pytest.param([0], 0.5, 1.0, id="plain jumps"),
        pytest.param([1], 0.6, 0.7, id="one reckless jump"),
        pytest.param([2], 0.375, 1.0, id="one bad jump"),
    ],
)
def test_gamble_grades_jumps_by_their_kind(kinds, prize, chance):
    task = Gamble(
        goal=6, sections=2, longest_walk=6
    )  # few nodes: the rest of the walk can be plain
    prompts = task.prompts(np.random.default_rng(1), 64)
    for prompt in prompts:
        completion = walk(task, prompt, kinds)
        if _kinds_of(task, prompt, completion) == kinds + [0] * (
            int((completion <= task.goal).sum()) - len(kinds)
        ):
            luck = torch.tensor([[chance - 0.01, min(chance + 0.01, 0.999)]])
            both = completion[None, None].expand(1, 2, -1)
            rewards, scores = task.grade(prompt[None], both, luck)
            assert rewards[0, 0].item() == pytest.approx(prize)
            assert rewards[0, 1].item() == pytest.approx(prize if chance == 1 else 0.0)
            assert scores[0].tolist() == pytest.approx([prize * chance] * 2)
            return
    pytest.fail("no prompt has such a walk")


def _kinds_of(task: Gamble, prompt: Tensor, completion: Tensor) -> list[int]:
    nodes = [0, *(int(token) for token in completion if token <= task.goal)]
    terrain = [int(task._terrain_at(prompt[None], torch.tensor([[node]]))) for node in nodes]
    return [
        int(task._kind[terrain[k], nodes[k], nodes[k + 1] - nodes[k]])
        for k in range(len(nodes) - 1)
    ]


def test_gamble_gives_nothing_for_walks_that_break_the_rules():
    task = Gamble(goal=6, sections=2, longest_walk=6)
    prompt = task.prompts(np.random.default_rng(0), 1)
    walks = {
        "jump of 4": [4, 6, task.end],
        "backwards": [3, 2, 5, 6, task.end],
        "short of the goal": [3, 5, task.end],
        "no end": [1, 2, 3, 4, 5, 6, 6],
        "not a node": [3, task.padding, 6, task.end],
    }
    for name, written in walks.items():
        row = written + [task.padding] * (task.completion_length - len(written))
        rewards, scores = task.grade(prompt, torch.tensor(row)[None, None], torch.zeros(1, 1))
        assert (rewards.item(), scores.item()) == (0.0, 0.0), name


@pytest.mark.parametrize("name", TASKS)
def test_teacher_writes_what_the_task_can_grade_and_errs(name):
    task = TASKS[name]()
    random = np.random.default_rng(0)
    prompts = task.prompts(random, 512)
    completions = task.teach(random, prompts)
    assert completions.shape == (512, task.completion_length)
    assert int(completions.min()) >= 0
    assert int(completions.max()) < task.vocabulary
    _, scores = task.grade(prompts, completions[:, None], torch.ones(512, 1))
    assert 0.02 < float(scores.mean()) < 0.9


def test_imitation_raises_the_score_of_a_start():
    task = Chain(digits=2, prompts_per_batch=4)
    architecture = Architecture(task.vocabulary)
    first = mean_score(task, architecture, initial_weights(architecture, 0), prompts=64)
    taught = imitate_teacher(task, architecture, updates=150)
    assert first < 0.05 < 0.1 < mean_score(task, architecture, taught, prompts=64)


# Ages


def test_ages_of_the_schedules():
    random = np.random.default_rng(0)
    assert Schedule("constant", 3).ages(10, 2, random).tolist() == [3, 3]
    mixed = Schedule("mixed", 2).ages(10, 300, random)
    assert sorted(set(mixed.tolist())) == [0, 1, 2]
    assert int(mixed.bincount().min()) > 60
    by_length = Schedule("by_length", 9).ages(10, 4, np.random.default_rng(1))
    same_ages = Schedule("mixed", 9).ages(10, 4, np.random.default_rng(1))
    assert by_length.tolist() == sorted(same_ages.tolist())
    assert Schedule("in_order", 3).ages_of_tokens(8).tolist() == [3, 3, 2, 2, 1, 1, 0, 0]


def test_groups_are_sorted_by_their_longest_completion():
    """A run of three groups of two completions: 4 and 1 tokens, 2 and 2, 2 and 1."""
    end, padding = 1, 0
    lengths = [[4, 1], [2, 2], [2, 1]]
    tokens = torch.tensor(
        [[[*[7] * (n - 1), end, *[padding] * (4 - n)] for n in group] for group in lengths]
    )[None]
    number = torch.arange(3)[None, :, None]
    batch = by_length(Batch(number, tokens, number, number, number), end)
    assert batch.prompts.flatten().tolist() == [2, 1, 0]


@pytest.mark.parametrize("layers", [1, 2])
def test_tokens_in_flight_have_the_log_probs_of_the_policy_at_their_position(layers):
    """The second policy samples from position 2 on, also what follows the first one's tokens."""
    architecture = Architecture(16, layers=layers)
    flats = [2 * initial_weights(architecture, seed) for seed in (1, 2)]
    first, second = (unpack(architecture, flat) for flat in flats)
    model = StackedLlama(architecture, 3, 5)
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(0, 16, (1, 2, 3), generator=generator)
    uniform = torch.rand(1, 2, 4, 5, generator=generator)
    policies = [first, first, second, second, second]
    samples = model.sample(policies, prompts, uniform, end=99, padding=99)
    expected = torch.cat(
        [
            model.log_probs(first, prompts, samples.tokens)[..., :2],
            model.log_probs(second, prompts, samples.tokens)[..., 2:],
        ],
        dim=-1,
    )
    torch.testing.assert_close(samples.logp, expected, rtol=0, atol=2e-6)


def test_sawtooth_syncs_after_its_lag_and_early_only_if_it_may():
    syncs = SawtoothSyncs(2, may_sync_early=torch.tensor([False, True]))
    far = torch.tensor([True, True])
    near = torch.tensor([False, False])
    ages = [syncs.next(was_far)[1].tolist() for was_far in (near, near, far, near, near)]
    assert ages == [[0, 0], [1, 1], [2, 0], [0, 1], [1, 2]]


def test_controls_scale_the_rate_by_their_worked_factors():
    """KL of .2, four times the target, twice, then none; half of the effective sample size."""
    control = RateControl(CONTROLS, lag=4)
    half = torch.full((6,), 0.5)
    first = control.factors(torch.full((6,), 0.2), half).tolist()
    assert dict(zip(CONTROLS, first, strict=True)) == pytest.approx(
        {
            "fixed": 1.0,
            "kl_root": 0.5,
            "kl_linear": 0.25,
            "kl_feedback": 0.5 * 4 ** (-1 / 16),
            "ess_root": 0.5**0.5,
            "sync_at_kl": 1.0,
        },
        rel=1e-6,
    )
    control.factors(torch.full((6,), 0.2), half)
    # Without any KL the scale rises by e^(2 / 16), the largest step.
    last = control.factors(torch.zeros(6), half)
    assert float(last[CONTROLS.index("kl_feedback")]) == pytest.approx(
        4 ** (-2 / 16) * np.exp(2 / 16), rel=1e-6
    )


def test_history_returns_each_group_at_its_age():
    history = History(size=3)
    for number in range(7):
        history.append(Batch(*(torch.full((2, 2, 1), number) for _ in range(5))))
    batch = history.take(torch.tensor([[0, 1], [2, 2]]))
    assert batch.tokens[..., 0].tolist() == [[6, 5], [4, 4]]


# The trainer


@pytest.mark.parametrize("method", PUBLISHED.values(), ids=PUBLISHED)
def test_twenty_updates_of_a_method_are_the_same_stacked_and_alone(method):
    architecture, start = start_of(SMALL_TASK)
    runs = [Run(1e-3, 0), Run(3e-3, 1), Run(3e-4, 1)]
    schedule = Schedule("constant", 3)
    stacked = train(SMALL_TASK, architecture, start, method, schedule, runs, updates=20)
    (alone,) = train(SMALL_TASK, architecture, start, method, schedule, runs[1:2], updates=20)
    assert bool(alone.weights.isfinite().all())
    assert not torch.equal(alone.weights, start[0])
    assert torch.equal(stacked[1].weights, alone.weights)
    assert (stacked[1].curve, stacked[1].diagnostics) == (alone.curve, alone.diagnostics)


@pytest.mark.parametrize("kind", get_args(Kind))
@pytest.mark.parametrize("name", ["chain", "gamble"])
def test_runs_of_the_main_tasks_are_the_same_stacked_and_alone(name, kind):
    task = TASKS[name]()
    architecture, start = start_of(task)
    runs = [Run(1e-3, seed) for seed in range(4)]
    m2po = EQUAL["m2po"]  # its statistics of a step must not mix the stacked runs
    schedule = Schedule(kind, 2)
    stacked = train(task, architecture, start, m2po, schedule, runs, updates=4)
    (alone,) = train(task, architecture, start, m2po, schedule, runs[3:], updates=4)
    assert torch.equal(stacked[3].weights, alone.weights)


def test_policy_stays_if_it_is_its_own_teacher_and_comes_nearer_to_another():
    architecture, start = start_of(SMALL_TASK)
    other = 4 * initial_weights(architecture, seed=1)
    method = METHODS["distilled"]["opd_recomputed"]

    def learn(teacher: Tensor, rate: float, updates: int):
        return train(
            SMALL_TASK,
            architecture,
            start,
            method,
            Schedule("constant", 2),
            [Run(rate, 0)],
            updates,
            teacher=(architecture, teacher),
        )[0]

    assert torch.equal(learn(start, 1e-2, updates=3).weights, start[0])
    far = learn(other, 0.0, updates=1).diagnostics["kl_to_teacher"]
    near = learn(other, 1e-2, updates=33).diagnostics["kl_to_teacher"]
    assert 0 < near < far - 0.5


def test_sawtooth_with_lag_0_is_the_same_as_constant_lag_0_but_for_its_samples():
    """Both learn from fresh samples, so their ratios are 1."""
    architecture, start = start_of(SMALL_TASK)
    for kind in ("constant", "sawtooth"):
        (outcome,) = train(
            SMALL_TASK, architecture, start, EQUAL["grpo"], Schedule(kind, 0), [Run(1e-3, 0)], 8
        )
        assert outcome.diagnostics["ess"] == pytest.approx(1.0, abs=1e-4), kind


def stale_batch(task: Task, log_ratio: float) -> tuple[Batch, Tensor]:
    """A batch of 4 groups with rewards that differ, and log-probs of a policy that is this far from
    the sampler's."""
    generator = torch.Generator().manual_seed(0)
    B = task.prompts_per_batch
    L = task.completion_length
    completions = torch.randint(0, 10, (1, B, 8, L), generator=generator)
    completions[..., 2] = torch.where(torch.arange(8) % 2 == 0, task.end, completions[..., 2])
    is_after_end = (completions == task.end).cumsum(-1) - (completions == task.end).long() > 0
    completions[is_after_end] = task.padding
    logp = -torch.rand(1, B, 8, L, generator=generator) - 0.1
    logp[is_after_end] = 0.0
    noise = log_ratio * torch.randn(1, B, 8, L, generator=generator)
    rollout_logp = torch.where(is_after_end, 0.0, logp - noise)
    rewards = torch.rand(1, B, 8, generator=generator).round()
    uniform = torch.rand(1, B, 8, generator=generator)
    prompts = task.prompts(np.random.default_rng(0), B)[None]
    return Batch(prompts, completions, rollout_logp, rewards, uniform), logp


def gradient_of(method, log_ratio: float) -> Tensor:
    batch, logp = stale_batch(SMALL_TASK, log_ratio)
    return Step(
        SMALL_TASK, method.recipe, batch, torch.zeros_like(batch.tokens), logp, logp
    ).gradient


@pytest.mark.parametrize(
    "method",
    [pytest.param(m, id=m.name) for m in EQUAL.values() if m.name not in SAME_AT_LAG_0],
)
def test_gradient_at_lag_0_is_that_of_reinforce(method):
    expected = gradient_of(EQUAL["stale_reinforce"], 0.0)
    torch.testing.assert_close(gradient_of(method, 0.0), expected, rtol=1e-5, atol=1e-8)
    assert not torch.allclose(gradient_of(method, 0.5), expected, rtol=1e-3)


@pytest.mark.parametrize(
    "method", [pytest.param(m, id=m.name) for m in PUBLISHED.values() if m.same_as]
)
def test_method_said_to_be_the_same_as_another_has_its_gradient(method):
    expected = gradient_of(PUBLISHED[method.same_as], 0.5)
    torch.testing.assert_close(gradient_of(method, 0.5), expected, rtol=1e-5, atol=1e-8)


def test_learning_rate_by_ess_scales_the_step():
    """Four steps of Adam move a weight by about the learning rate each, here times the root of an
    ESS below 1."""
    architecture, start = start_of(SMALL_TASK)
    moved = {}
    for name in "seq_tis", "seq_tis_ess":
        (outcome,) = train(
            SMALL_TASK,
            architecture,
            start,
            PUBLISHED[name],
            Schedule("constant", 2),
            [Run(1e-3, 0)],
            4,
        )
        moved[name] = outcome.weights - start[0]
    assert 0 < float(moved["seq_tis_ess"].norm()) < float(moved["seq_tis"].norm())


# The queue


@pytest.fixture
def quick_start(monkeypatch):
    """Starting points without training."""
    monkeypatch.setattr(queue, "load_start", lambda name: start_of(TASKS[name]()))
    monkeypatch.setattr(queue, "start_score", lambda name: 0.01)


def small_plan() -> list[Pass]:
    schedule = Schedule("constant", 1)
    return [
        Pass("published", "chain", name, schedule, (1e-3,), (0, 1), updates=2)
        for name in ("grpo", "topr")
    ]


def without_time(records: dict) -> dict:
    return {key: replace(record, seconds=0.0) for key, record in records.items()}


def test_stopped_queue_makes_only_what_is_missing(tmp_path, quick_start, monkeypatch):
    uninterrupted = tmp_path / "uninterrupted"
    stopped = tmp_path / "stopped"
    queue.make_missing(small_plan(), METHODS, uninterrupted)
    queue.make_missing(small_plan()[:1], METHODS, stopped)
    file = stopped / "published-chain.jsonl"
    first, second = file.read_text(encoding="utf-8").splitlines()
    # Killed while it wrote the second record: that run is missing, and the half line is no record.
    file.write_text(first + "\n" + second[: len(second) // 2], encoding="utf-8")

    trained_runs = []
    train_runs = queue.train

    def record_and_train(task, architecture, start, method, schedule, runs, *rest, **options):
        trained_runs.append(runs)
        return train_runs(task, architecture, start, method, schedule, runs, *rest, **options)

    monkeypatch.setattr(queue, "train", record_and_train)
    queue.make_missing(small_plan(), METHODS, stopped)
    assert trained_runs == [[Run(1e-3, 1)], [Run(1e-3, 0), Run(1e-3, 1)]]
    records = load_records(stopped, METHODS)
    assert without_time(records) == without_time(load_records(uninterrupted, METHODS))


def test_records_of_a_method_that_has_changed_are_not_counted(tmp_path):
    record = a_record("grpo", 1e-3, 0, [0.1] * 64)
    append_records(tmp_path, [record])
    append_records(tmp_path, [replace(record, seed=1, overrides={"beta": 0.5})])
    records = load_records(tmp_path, METHODS)
    assert [key.seed for key in records] == [0]
    lines = (tmp_path / "published-chain.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(lines[0])["lag"] == 16


def test_plan_has_every_method_once_per_cell_and_begins_with_the_main_tasks():
    plan = full_plan(METHODS)
    keys = [key for item in plan for key in item.keys]
    assert len(set(keys)) == len(keys)
    assert {key.lag for key in keys if key.schedule == "constant"} == {0, 1, 4, 16, 64, 256}
    assert {item.task for item in plan[:100]} == {"chain", "gamble"}
    assert {item.task for item in plan} == set(TASKS)
    assert not {m.name for m in PUBLISHED.values() if m.same_as} & {item.method for item in plan}


# Records and the report


def a_record(method: str, rate: float, seed: int, curve: list[float], lag: int = 16) -> Record:
    return Record(
        table="published",
        task="chain",
        method=method,
        recipe=PUBLISHED[method].recipe_name,
        overrides=PUBLISHED[method].overrides,
        max_grad_norm=1.0,
        scale_lr_by_ess=False,
        schedule="constant",
        lag=lag,
        learning_rate=rate,
        seed=seed,
        updates=64,
        start=0.1,
        curve=curve,
        diagnostics={"clipped_positive": 0.1, "clipped_negative": 0.2},
        seconds=1.0,
        commit="0",
        cpu="a CPU",
        torch="2",
    )


@pytest.mark.parametrize(
    ("curve", "dies"),
    [
        pytest.param([0.5] * 64, False, id="above the start"),
        pytest.param([0.05] * 64, True, id="below the start"),
        pytest.param([0.9] * 32 + [0.6] * 32, True, id="far below its peak"),
        pytest.param([0.9] * 32 + [0.8] * 32, False, id="a little below its peak"),
        pytest.param([0.9] + [0.6] * 63, False, id="below a single high point"),
    ],
)
def test_run_dies_if_it_ends_below_its_start_or_far_below_its_peak(curve, dies):
    assert a_record("grpo", 1e-3, 0, curve).dies(64) == dies


def test_run_dies_within_the_updates_that_are_compared():
    record = a_record("grpo", 1e-3, 0, [0.9] * 32 + [0.2] * 32)
    assert record.dies(64)
    assert not record.dies(32)


def test_final_score_is_the_mean_of_the_last_tenth_of_the_updates_that_are_compared():
    record = a_record("grpo", 1e-3, 0, [0.1] * 27 + [0.4, 0.5, 0.9] + [0.0] * 34)
    assert record.final_score(30) == pytest.approx(0.6)


def records_by_key(*records: Record) -> dict:
    return {record.key: record for record in records}


def test_area_kept_is_relative_to_the_best_method_at_lag_0():
    """Gains of .8 (lag 0), and .4 or .2 (lag 16): half of it at the better learning rate."""
    records = records_by_key(
        *(a_record("topr", 1e-3, seed, [0.9] * 64, lag=0) for seed in range(3)),
        *(a_record("grpo", 1e-3, seed, [0.5] * 64) for seed in range(3)),
        *(a_record("grpo", 3e-4, seed, [0.3] * 64) for seed in range(3)),
    )
    cell = find_cells(records, "published", "chain")["grpo", ("constant", 16)]
    assert cell.best_rate == 1e-3
    assert list(cell.best.values()) == pytest.approx([0.5] * 3)
    assert cell.living_rates == [3e-4, 1e-3]


def test_reference_is_a_method_of_the_list_at_a_rate_at_which_no_seed_dies():
    dying_curve = [1.0] * 60 + [0.2] * 4
    records = records_by_key(
        a_record("topr", 1e-3, 0, [0.9] * 64, lag=0),
        a_record("topr", 3e-3, 0, dying_curve, lag=0),
        a_record("prime_rl", 1e-3, 0, [0.95] * 64, lag=0),  # not in REFERENCE_METHODS
        a_record("grpo", 1e-3, 0, [0.5] * 64),
    )
    cells = find_cells(records, "published", "chain")
    assert cells["grpo", ("constant", 16)].reference == pytest.approx(0.8)
    # Above 100 %, because the reference does not change when more methods have run.
    assert cells["prime_rl", ("constant", 0)].best[0] == pytest.approx(0.85 / 0.8)


def test_leaders_are_methods_not_shown_to_be_below_the_first():
    scores = {"topr": (0.9, 0.8, 0.7), "vespo": (0.91, 0.74, 0.72), "grpo": (0.5, 0.4, 0.3)}
    records = records_by_key(
        *(a_record("topr", 1e-3, seed, [0.9] * 64, lag=0) for seed in range(3)),
        *(
            a_record(method, 1e-3, seed, [score] * 64)
            for method, by_seed in scores.items()
            for seed, score in enumerate(by_seed)
        ),
    )
    cells = find_cells(records, "published", "chain")
    assert leaders(cells, ("constant", 16)) == {"topr", "vespo"}


@pytest.mark.parametrize(
    ("end_of_prime_rl", "final", "counts"),
    [
        pytest.param(0.9, "inconclusive", "higher on none of them, lower on none", id="ends alike"),
        pytest.param(1.0, "supported", "higher on 1 of them, lower on none", id="ends higher"),
        pytest.param(0.8, "refuted", "higher on none of them, lower on 1", id="ends lower"),
    ],
)
def test_method_is_compared_with_grpo_by_area_and_by_the_end(end_of_prime_rl, final, counts):
    """The best at lag 0 gains .8; of 64 scores 54 differ by .2, and 10 by the parameter."""
    records = records_by_key(
        *(a_record("topr", 1e-3, seed, [0.9] * 64, lag=0) for seed in range(3)),
        *(a_record("grpo", 1e-3, seed, [0.3] * 54 + [0.9] * 10) for seed in range(3)),
        *(
            a_record("prime_rl", 1e-3, seed, [0.5] * 54 + [end_of_prime_rl] * 10)
            for seed in range(3)
        ),
    )
    comparisons = on_all_tasks(records, "prime_rl", 16)
    (on_chain,) = comparisons
    assert (on_chain.task, on_chain.area.outcome, on_chain.final.outcome) == (
        "chain",
        "supported",
        final,
    )
    sentences = all_tasks_sentences(comparisons, "`prime_rl`", 16)
    assert "on 1 of 1" in sentences
    assert counts in sentences
    points = round(100 * (54 * 0.2 + 10 * (end_of_prime_rl - 0.9)) / 64 / 0.8)
    assert f"better, +{points} ± 0" in all_tasks_table(comparisons)


def test_losses_ahead_of_grpo_are_counted_among_those_with_runs_at_the_lag():
    scores = [("topr", 0, 0.9), ("grpo", 16, 0.3), ("topr", 16, 0.8), ("prime_rl", 16, 0.8)]
    scores += [("grpo", 64, 0.3), ("topr", 64, 0.8)]
    cells = {}
    for task in ("chain", "gamble"):
        records = records_by_key(
            *(
                replace(a_record(method, 1e-3, seed, [score] * 64, lag), task=task)
                for method, lag, score in scores
                for seed in range(3)
            )
        )
        cells[task] = find_cells(records, "published", task)
    comparisons = compare_with_baseline(cells, ("topr", "prime_rl"), (16, 64))
    assert "2 / 1 of 2 / 1 losses" in better_on_both_sentence(comparisons, (16, 64))


def test_control_is_compared_with_the_best_fixed_rate_and_by_loss():
    """The best at lag 0 gains .8, so .2 more of score is 25 points; 1e-3 is f."""

    def with_control(rate: float, curve: list[float]) -> Record:
        return replace(a_record("grpo", rate, 0, curve), table="controlled", control="kl_feedback")

    dying_curve = [0.9] * 32 + [0.1] * 32
    records = records_by_key(
        a_record("topr", 1e-3, 0, [0.9] * 64, lag=0),
        a_record("grpo", 3e-4, 0, [0.5] * 64),
        a_record("grpo", 1e-3, 0, [0.3] * 64),
        a_record("grpo", 3e-3, 0, dying_curve),
        with_control(1e-3, [0.7] * 64),
        with_control(3e-3, [0.5] * 64),
    )
    sentences = setting_sentences(records)
    assert "+25.0 at f (end +22.2, 0 % collapse), +0.0 at 3 f (end +0.0, 0 %" in sentences
    assert "+0.0 at f / 3 (end +0.0, 0 % collapse), −25.0 at f (end −22.2, 0 %" in sentences
    assert "+0.0 at 3 f (end −44.4, 100 % collapse)" in sentences
    table = controls_by_loss_table(records, {"grpo": "`grpo`"})
    assert (
        "| `grpo` | 1 | 50, 56 at f / 3 | 50, 56 | 25, 33 / 50, 11 †1 | 75, 78 / 50, 56 |" in table
    )


def test_recomputed_distillation_is_compared_with_the_recorded_one_on_the_same_runs():
    records = {}
    for method, seed, score, kl in (
        ("opd_recomputed", 0, 0.9, 0.04),
        ("opd_recomputed", 1, 0.8, 0.02),
        ("opd_stale", 0, 0.5, 1.5),
    ):
        record = replace(
            a_record("grpo", 1e-3, seed, [score] * 64),
            table="distilled",
            method=method,
            diagnostics={"kl_to_teacher": kl},
        )
        records[record.key] = record
    rows = distillation_table(records).splitlines()[2:]
    assert rows == [
        "| `chain` | `opd_recomputed` | 1e-3 | – | 0.85, 0.030 | – | – |",
        "| `chain` | `opd_stale` | 1e-3 | – | 0.50, 1.500 | – | – |",
    ]
    assert "0.900 against 0.500 and a KL of 0.040 against 1.500" in recomputed_sentence(records)


def test_more_seeds_are_planned_where_some_but_not_all_die():
    alive = [0.5] * 64
    dead = [0.05] * 64
    records = records_by_key(
        a_record("grpo", 1e-3, 0, alive),
        a_record("grpo", 1e-3, 1, dead),
        a_record("topr", 1e-3, 0, alive),
        a_record("topr", 1e-3, 1, alive),
        a_record("m2po", 1e-3, 0, dead),
    )
    # Every seed of topr lives and every seed of m2po dies: more seeds would not tell more.
    (planned,) = passes_where_some_die(records)
    assert planned.method == "grpo"
    assert planned.learning_rates == (1e-3,)
    assert len(planned.seeds) == 5


def test_rank_agreement_by_hand():
    order = {"a": 1.0, "b": 2.0, "c": 3.0}
    assert rank_agreement(order, {"a": 10.0, "b": 20.0, "c": 90.0}) == pytest.approx(1.0)
    assert rank_agreement(order, {"a": 3.0, "b": 2.0, "c": 1.0}) == pytest.approx(-1.0)
    assert rank_agreement(order, {"a": 2.0, "b": 1.0, "c": 3.0}) == pytest.approx(0.5)
    assert rank_agreement({"a": 1.0}, order) is None


def test_quick_run_writes_a_report(tmp_path, quick_start, monkeypatch):
    monkeypatch.setattr(queue, "QUICK_RESULTS", tmp_path)
    plan = [replace(item, schedule=Schedule("constant", 0)) for item in small_plan()] + small_plan()
    monkeypatch.setattr(queue, "quick_plan", lambda methods, only: plan)
    report = tmp_path / "report.md"
    queue.main(["--quick", "--only", "grpo"])
    text = report.read_text(encoding="utf-8")
    assert "4 of 8 planned runs" in text
    assert "A method is a recipe of that name, except" not in text  # none of those has run
    queue.main(["--quick"])
    assert "8 of 8 planned runs" in report.read_text(encoding="utf-8")
    assert (tmp_path / "area.png").is_file()


def test_unknown_method_is_rejected(capsys):
    with pytest.raises(SystemExit):
        queue.main(["--only", "grop"])
    assert "methods.toml has no such method" in capsys.readouterr().err


# The exact tier

ARMS, TWO_TOKENS = TOYS


def test_reinforce_without_lag_follows_the_gradient_of_the_return():
    """One step of the toy against autograd through J itself."""
    logits = TWO_TOKENS.first_logits[None].requires_grad_()
    (gradient,) = torch.autograd.grad(TWO_TOKENS.mean_reward(logits), logits)
    expected = TWO_TOKENS.mean_reward(logits.detach() + gradient)
    returns = run(resolve("reinforce"), TWO_TOKENS, lags=[0], steps=1)
    torch.testing.assert_close(returns[1], expected)


@pytest.mark.parametrize(
    ("method", "toy", "expected"),
    [
        pytest.param("stale_reinforce", ARMS, [1.000, 1.000, 0.800], id="REINFORCE, arms"),
        pytest.param("grpo", ARMS, [1.000, 1.000, 0.900], id="GRPO, arms"),
        pytest.param("topr", ARMS, [1.000, 1.000, 1.000], id="TOPR, arms"),
        pytest.param("stale_reinforce", TWO_TOKENS, [1.000, 1.000, 0.900], id="REINFORCE, two"),
        pytest.param("grpo", TWO_TOKENS, [1.000, 1.000, 0.875], id="GRPO, two"),
        pytest.param("topr", TWO_TOKENS, [1.000, 1.000, 1.000], id="TOPR, two"),
    ],
)
def test_exact_returns_at_lags_0_16_and_256(method, toy, expected):
    """After 1,024 steps. With old samples REINFORCE ends on the second-best symbol (.8, and .9 for
    one of two)."""
    returns = run(EQUAL[method].recipe, toy, lags=[0, 16, 256], steps=1024)
    assert [round(value, 3) for value in returns[-1].tolist()] == expected
