"""The examples of docs/extending.md do what the page says."""

from __future__ import annotations

import importlib
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from page_code import current_directory_with, named_files
from running import tiny_settings
from scoring import reward_of
from tiny import TURNS, save_tiny, tiny_tokenizer

import lagrpo
from lagrpo.errors import SettingsError
from lagrpo.runs import load_metrics, load_rollouts
from lagrpo.runs.reading import load_evaluation_records
from lagrpo.tasks import StepResult, Task
from lagrpo.tasks.environments import describe

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
        schedule={"batches": 1},
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
        schedule={"batches": 1},
        rollout={"max_prompt_length": 700},
    )
    assert "capital" in load_rollouts(result.run)[0]["prompt_text"]


def test_callback_writes_a_line_for_each_batch(train, load):
    lines = load_metrics(train(callbacks=[load("my_callbacks").Repetition()]).run)
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(0 <= line["mine/repetition"] < 1 for line in lines)


def test_rollout_engine_samples_the_batches_of_a_run(model, tmp_path):
    """With v = 2 batch 3 learns at version 2 from samples of version 1. Evaluations are of π."""
    settings = tiny_settings(
        model,
        tmp_path / "runs",
        rollout={"engine": "my_engine:load"},
        schedule={"sync_every": 2},
    )
    result = lagrpo.train(settings)
    rows = load_rollouts(result.run)
    assert len(rows) == 24
    assert [set(map(int, row["policy_versions"])) for row in rows[::8]] == [{0}, {1}, {1}]
    assert all(row["rollout_logprobs"] == [pytest.approx(-math.log(10))] for row in rows)
    assert all(row["completion"] in "0123456789" for row in rows)
    # Digits of a prompt differ, and so do their rewards: the policy learns.
    assert all(line["grad_norm"] > 0 for line in load_metrics(result.run))
    # The engine never answers with more than one token; the policy does.
    records = load_evaluation_records(result.run, "after")
    assert max(len(text) for row in records for text in row["completions"]) > 1


def test_run_with_a_rollout_engine_of_its_own_resumes(model, tmp_path):
    """The resumed run samples batch 3 as the run that never stopped does."""

    def begin(name: str, batches: int) -> Path:
        sections = {
            "run": {"name": name},
            "rollout": {"engine": "my_engine:load"},
            "schedule": {"sync_every": 2, "batches": batches},
        }
        return lagrpo.train(tiny_settings(model, tmp_path / "runs", **sections)).run

    never_stopped = begin("longer", batches=3)
    stopped = begin("shorter", batches=2)
    lagrpo.train(resume=stopped, settings={"schedule.batches": 3}, trust_run_code=True)
    columns = ["completion", "policy_versions", "old_logprobs"]
    assert load_rollouts(stopped, columns=columns) == load_rollouts(never_stopped, columns=columns)


FULLER_ENGINE = """
from contextlib import contextmanager
import my_engine
from lagrpo.rollout.base import VersionCheck

def load(settings, policy):
    plain = my_engine.load(settings, policy)
    return Fuller(plain.digit_ids, plain.seed)

class Fuller(my_engine.DigitGuesser):
    evaluates = True

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.calls = []

    @contextmanager
    def temporary_weights(self, weights, version, *, restore_afterwards):
        before, self.version = self.version, version
        yield
        self.version = before

    def weight_check(self, policy, requests):
        self.calls.append(f"compares {len(requests)} prompts")
        return VersionCheck(self)

    def before_learning(self):
        self.calls.append("frees memory")

    def keep_logs(self, run):
        self.log = run / "engine.log"

    def close(self):
        self.log.write_text("\\n".join(self.calls))
"""


def test_rollout_engine_may_replace_each_default(model, tmp_path):
    """Evaluations sample from it, it has its own weight check, and it keeps its log."""
    (tmp_path / "fuller_engine.py").write_text(FULLER_ENGINE, encoding="utf-8")
    settings = tiny_settings(
        model,
        tmp_path / "runs",
        rollout={"engine": "fuller_engine:load"},
        schedule={"batches": 2, "sync_every": 2},
    )
    run = lagrpo.train(settings).run
    calls = (run / "engine.log").read_text(encoding="utf-8").splitlines()
    assert calls == ["compares 6 prompts", "frees memory", "frees memory"]
    records = load_evaluation_records(run, "after")
    assert all(text in "0123456789" for row in records for text in row["completions"])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        pytest.param("my_engin:load", "no module 'my_engin'", id="module"),
        pytest.param("my_engine:laod", "did you mean 'load'?", id="function"),
        pytest.param("math:hypot", "'math:hypot' raised TypeError", id="raises"),
        pytest.param("my_task:load", "returned a RowTask without ", id="not an engine"),
    ],
)
def test_rollout_engine_that_cannot_be_used_is_named_in_one_line(model, tmp_path, name, message):
    settings = tiny_settings(model, tmp_path / "runs", rollout={"engine": name})
    with pytest.raises(SettingsError, match=rf"^rollout\.engine: .*{re.escape(message)}.*$"):
        lagrpo.train(settings)


def test_dry_run_loads_the_function_of_a_rollout_engine(model, tmp_path):
    settings = tiny_settings(model, tmp_path / "runs", rollout={"engine": "my_engine:laod"})
    with pytest.raises(SettingsError, match="did you mean 'load'"):
        lagrpo.train(settings, dry_run=True)


def test_model_is_not_evaluated_by_a_rollout_engine_of_training(model, tmp_path):
    settings = {"rollout.engine": "my_engine:load", "run.output_dir": str(tmp_path)}
    rows = [{"prompt": "1?", "answer": "1"}]
    with pytest.raises(SettingsError, match="'local' or 'vllm'"):
        lagrpo.evaluate(model, rows, ["exact"], settings=settings)
