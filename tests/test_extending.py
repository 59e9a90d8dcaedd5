"""The examples of docs/extending.md do what the page says."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from page_code import current_directory_with, named_files
from running import tiny_settings
from scoring import reward_of
from test_episodes import TURNS
from tiny import save_tiny, tiny_tokenizer

import lagrpo
from lagrpo.core.probe import LENGTHS, random_inputs
from lagrpo.core.recipes import resolve
from lagrpo.rollout.base import Request
from lagrpo.rollout.prefetch import Prefetcher
from lagrpo.runs import load_rollouts
from lagrpo.tasks import StepResult, Task
from lagrpo.tasks.environments import describe
from lagrpo.types import Prompt

PAGE = "extending.md"


@pytest.fixture(autouse=True)
def modules_of_the_page(tmp_path, monkeypatch):
    """The files of the page lie in the current directory."""
    with current_directory_with(named_files(PAGE), tmp_path, monkeypatch):
        yield


@pytest.fixture
def load(monkeypatch, tmp_path):
    """Imports a module of the page."""
    monkeypatch.syspath_prepend(tmp_path)
    return importlib.import_module


@pytest.fixture
def train(model, tmp_path):
    """Trains a tiny model for three batches, with these sections of settings."""

    def run(model: Path = model, callbacks: Any = (), **sections: Any) -> lagrpo.Result:
        settings = tiny_settings(model, tmp_path / "runs", eval={"at_start": False}, **sections)
        return lagrpo.train(settings, callbacks=callbacks)

    return run


@pytest.fixture
def talking_model(tmp_path):
    """A tiny model with a chat template for several turns."""
    directory = save_tiny(tmp_path / "talking", max_position_embeddings=2048)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TURNS
    tokenizer.save_pretrained(directory)
    return directory


def test_every_example_of_the_page_has_a_test():
    tests = Path(__file__).read_text(encoding="utf-8")
    assert [name for name in named_files(PAGE) if f'"{name}' not in tests] == []


@pytest.mark.parametrize(
    ("completion", "tolerance", "reward"),
    [
        pytest.param("It is 3.5", 0.5, 1.0, id="within"),
        pytest.param("It is 3.4", 0.5, 0.0, id="beyond"),
        pytest.param("4, no, 2", 0.5, 0.0, id="the last number counts"),
        pytest.param("four", 0.5, 0.0, id="no number"),
    ],
)
def test_reward_compares_the_last_number(load, completion, tolerance, reward):
    close_enough = load("my_rewards").close_enough
    assert close_enough(completion, "4", tolerance=tolerance) == reward


def test_reward_with_an_option_scores_the_completions_of_a_run(train, tmp_path):
    rows = [{"prompt": f"{n}?", "answer": str(n)} for n in range(12)]
    (tmp_path / "questions.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    task = {
        "name": "custom",
        "data": "questions.jsonl",
        "rewards": [{"reward": "my_rewards:close_enough", "options": {"tolerance": 0.5}}],
    }
    rollouts = load_rollouts(train(task=task).run)
    assert {row["outcome"] for row in rollouts} == {"scored"}


def test_task_scores_the_share_of_right_letters(load):
    task = load("my_task").load(None, 0)
    assert isinstance(task, Task)
    prompt = task.prompt("test", 0)
    assert prompt.messages[0]["content"] == "Spell silver backwards."
    assert reward_of(task, "revlis", prompt.answer) == 1.0
    assert reward_of(task, "revxxx", prompt.answer) == 0.5


def test_task_trains(train):
    rollouts = load_rollouts(train(task={"name": "my_task:load"}).run)
    assert {row["outcome"] for row in rollouts} == {"scored"}


def test_environment_answers_guesses_until_the_number_is_found(load):
    module = load("my_game")
    game = module.WarmOrCold()
    game.reset(module.load(None, 0).prompt("train", 3), key=())  # the number is 5
    replies = [game.step(text) for text in ("9", "2", "7", "none", "5")]
    texts = [reply.messages[0]["content"] for reply in replies[:-1]]
    assert texts == ["Warmer.", "Warmer.", "Warmer.", "Colder."]
    assert replies[-1] == StepResult(reward=1.0, done=True, reason="found")


def test_environment_trains(train, talking_model):
    result = train(
        talking_model,
        task={"name": "my_game:load", "max_turns": 2},
        rollout={"max_prompt_length": 100},
    )
    rollouts = load_rollouts(result.run)
    assert {row["outcome"] for row in rollouts} == {"scored"}


def test_tool_is_described_and_looks_up_a_capital(load):
    capital = load("my_tools").capital
    function = describe(capital)["function"]
    assert function["description"] == "Look up the capital of a country."
    assert function["parameters"]["properties"]["country"]["type"] == "string"
    assert capital("Kenya") == "Nairobi"
    with pytest.raises(ValueError, match="no country 'Atlantis'"):
        capital("Atlantis")


def test_tool_is_offered_in_a_run(train, talking_model):
    result = train(
        talking_model,
        task={"name": "sample_task:load", "tools": ["my_tools:capital"]},
        rollout={"max_prompt_length": 700},
    )
    assert "capital" in load_rollouts(result.run)[0]["prompt_text"]


def test_mask_keeps_tokens_with_a_ratio_near_1():
    recipe = resolve("reinforce", {"mask": "my_masks:near", "mask.width": 0.1})
    inputs = random_inputs()
    assert inputs.rollout_logp is not None
    is_near_T = (inputs.logp - inputs.rollout_logp).abs() <= 0.1
    assert 0 < is_near_T.sum() < len(is_near_T)
    (gradient_T,) = torch.autograd.grad(
        recipe.loss(inputs, torch.ones(len(LENGTHS), dtype=torch.float64)), inputs.logp
    )
    assert not gradient_T[~is_near_T].any()


def test_filter_keeps_short_completions():
    recipe = resolve("grpo", {"filters": ["my_filters:short"], "longest": 2})
    kept_T = recipe.kept(random_inputs())
    lengths_T = torch.tensor(LENGTHS).repeat_interleave(torch.tensor(LENGTHS))
    assert torch.equal(kept_T == 1, lengths_T <= 2)


@pytest.mark.parametrize(
    "loss",
    [
        pytest.param(
            {"recipe": "reinforce", "overrides": {"mask": "my_masks:near"}, "beta": 0.0}, id="mask"
        ),
        pytest.param({"recipe": "grpo", "filters": ["my_filters:short"], "beta": 0.0}, id="filter"),
    ],
)
def test_pieces_of_a_loss_train(train, loss):
    assert train(loss=loss).batches == 3


def test_callback_writes_a_line_for_each_batch(train, load):
    result = train(callbacks=[load("my_callbacks").Repetition()])
    lines = (result.run / "repetition.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    assert [record["step"] for record in records] == [1, 2, 3]
    assert all(0 <= record["repetition"] < 1 for record in records)


def test_rollout_engine_gives_batches_of_the_announced_version(load):
    engine = load("my_engine").FixedAnswer([4, 9, 1], "ab")
    prompts = [Prompt(n, ({"role": "user", "content": "?"},), "3", (5, 6)) for n in range(2)]
    prefetcher = Prefetcher(engine, lambda batch: [Request(batch, 0, p) for p in prompts], G=3)
    for batch, version in [(1, 0), (2, 7)]:
        weights = {"w": torch.full((2,), float(version))}
        engine.sync_weights(weights, version)
        prefetcher.submit(range(batch, batch + 1), version)
        groups = list(prefetcher.get(batch))
        assert [group.prompt.key for group in groups] == [0, 1]
        completions = [completion for group in groups for completion in group.completions]
        assert {completion.text for completion in completions} == {"ab"}
        assert {int(v) for completion in completions for v in completion.versions} == {version}
        assert engine.current_weights()[0] == version
        assert torch.equal(engine.current_weights()[1]["w"], weights["w"])
