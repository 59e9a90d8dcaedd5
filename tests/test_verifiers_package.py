"""Tasks `verifiers:NAME` with the package verifiers itself, in the Python that $LAGRPO_VERIFIERS_PYTHON names. `make
test-verifiers` runs these: of 0.3.1 those of load_environment, of 0.4.0 those of tasksets."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from running import tiny_settings
from test_talking_runs import model

import lagrpo
from lagrpo.replay import verify_run
from lagrpo.runs import load_rollouts
from lagrpo.settings.schema import TaskSettings
from lagrpo.tasks import load_task
from lagrpo.types import Prompt
from lagrpo.verify import Environments

pytestmark = pytest.mark.verifiers

PYTHON = os.path.abspath(os.environ.get("LAGRPO_VERIFIERS_PYTHON", ".venv-verifiers/bin/python"))
ADDRESS = (3, "sample", 1, 0, 2, 0)
ASK = "import importlib.metadata as m; print(m.version('verifiers'))"
ADD = '<tool_call>{"name": "%s", "arguments": {"x": 2, "y": 1}}</tool_call>'

__all__ = ["model"]  # a fixture


@pytest.fixture(scope="module")
def version() -> tuple[int, ...]:
    found = subprocess.run([PYTHON, "-c", ASK], capture_output=True, text=True, timeout=60, check=True).stdout
    return tuple(map(int, found.strip().split(".")[:2]))


@pytest.fixture
def classic(version: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    if version >= (0, 4):
        pytest.skip("this verifiers has no load_environment any more")
    monkeypatch.chdir(Path(__file__).parent / "verifiers_environments")


@pytest.fixture
def tasksets(version: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    if version < (0, 4):
        pytest.skip("tasksets need a later verifiers")
    monkeypatch.chdir(Path(__file__).parent / "verifiers_environments")


def load(name: str, **options: Any) -> Any:
    return load_task(TaskSettings(name=f"verifiers:{name}", python=PYTHON, options=options), seed=3)


def play(task: Any, *texts: str, row: int = 2) -> list[tuple[str, Any]]:
    """What the environment says to each of these in turn."""
    with Environments(task.environment, workers=1, deadline=60.0) as environments:
        asked = task.prompt("train", row)
        opened = environments.open(asked, (3, "opening", "train", row))
        said: list[tuple[str, Any]] = [("turn", (opened, 0.0, None))]
        for text in texts:
            begun = Prompt(row, opened, asked.gold) if len(said) == 1 else None
            address = ADDRESS if begun is not None else None
            said.append(environments.result(environments.submit(said[-1][1][2], begun, address, text)))
    return [(kind, what[0][0]["content"] if kind == "turn" else what) for kind, what in said]


def test_a_single_turn_is_scored_by_the_rubric(classic):
    task = load("lagrpo_classic", system_prompt="Be brief.")
    assert (task.size("train"), task.size("test")) == (20, 4)
    first, last = play(task, "3")
    assert first == ("turn", "Be brief.")
    assert last == ("final", (1.5, "max_turns_reached; correct 1; short 1; broken 0; num_turns 1"))
    assert play(task, "It is 4.")[-1][1][0] == 0.0
    kind, why = play(task, "broken")[-1]
    assert (kind, why) == (
        "unscored",
        "the environment: its reward function broken raised RuntimeError: no score today",
    )


def test_turns_follow_the_environments_own_state_and_stop_conditions(classic):
    task = load("lagrpo_classic", kind="turns")
    one, other = play(task, "a", "b", "c"), play(task, "a", "b", "3")
    assert one[1:3] == other[1:3]  # the same row, the same address
    assert one[1][1].rpartition(",")[2] == one[2][1].rpartition(",")[2]  # the secret of setup_state
    assert one[3][1] == (0.5, "max_turns_reached; correct 0; short 1; broken 0; num_turns 3")
    assert other[3][1] == (1.5, "found; correct 1; short 1; broken 0; num_turns 3")
    assert play(task, "raise")[-1] == ("unscored", "the environment: it raised RuntimeError: broken")
    assert "it changes what was said before" in play(task, "rewrite")[-1][1]


def test_tools_are_the_environments(classic):
    task = load("lagrpo_classic", kind="tools")
    (schema,) = task.environment.schemas()
    assert schema["function"]["parameters"]["properties"]["x"]["description"] == "The first."
    said = play(task, ADD % "add", "3")
    assert said[1] == ("turn", "3")
    assert said[2][1][1].startswith("no_tools_called; correct 1; short 1; broken 0; num_turns 2; total_tool_calls 1")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"kind": "nope"}, "Failed to load environment 'lagrpo_classic': no kind 'nope'"),
        ({"kind": "judge"}, "it is a SingleTurnEnv whose JudgeRubric asks another model"),
        ({"kind": "together"}, "scores the completions of a group together"),
        ({"kind": "sandbox"}, r"it is a CliAgentEnv, which runs in sandboxes or talks to other services"),
    ],
)
def test_what_cannot_be_driven_is_refused_by_name(classic, monkeypatch, options, problem):
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    with pytest.raises(ValueError, match=problem):
        load("lagrpo_classic", **options)


def test_a_group_of_environments_plays_each_row_by_its_own(classic):
    task = load("lagrpo_classic", kind="group")
    assert play(task, "a", row=2)[-1][0] == "final"
    assert play(task, "a", row=22)[-1][0] == "turn"


def test_an_environment_of_pypi_is_trained_on_and_replayed(classic, model, tmp_path):
    task = {"name": "verifiers:stardata.envs.constraint_gym", "python": PYTHON, "options": {"forms": ["haiku"]}}
    sections = {"task": task, "sampling": {"max_tokens": 40, "max_prompt_tokens": 900}, "schedule": {"batches": 2}}
    sections["environment"] = {"max_tokens": 60}
    result = lagrpo.train(tiny_settings(model, tmp_path, **sections, verifier={"workers": 1, "deadline": 20}))
    rows = load_rollouts(result.run)
    assert {row["outcome"] for row in rows} == {"scored"}
    assert all("prosody_reward" in row["reason"] for row in rows)
    assert "haiku" in rows[0]["prompt_text"]
    assert max(row["reward"] for row in rows) > 0
    assert verify_run(result.run, everything=True).differences == []


def test_a_taskset_is_played_by_its_own_interception_and_scored_by_its_rewards(tasksets):
    task = load("lagrpo_taskset", rows=10)
    assert (task.size("train"), task.size("test")) == (8, 2)
    assert play(task, "3") == [("turn", "Be brief."), ("final", (1.5, "agent_completed; correct 1; short 0.5"))]
    kind, why = play(task, "broken")[-1]
    assert (kind, "no score today" in why) == ("unscored", True)


def test_a_tasksets_tools_are_called_by_their_servers(tasksets):
    task = load("lagrpo_taskset", tools=True)
    assert [schema["function"]["name"] for schema in task.environment.schemas()] == ["adder_add"]
    assert play(task, ADD % "adder_add", "3")[1:] == [
        ("turn", "3"),
        ("final", (1.5, "agent_completed; correct 1; short 0.5")),
    ]


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("lagrpo_classic", "written for verifiers before 0.3.2 .*: pip install 'verifiers>=0.1.11,<0.3.2'"),
        ("harbor", "runs in containers"),
    ],
)
def test_what_a_later_verifiers_cannot_play_here_is_refused(tasksets, name, problem):
    with pytest.raises(ValueError, match=problem):
        load(name)


def test_a_module_that_is_not_there_is_told(version):
    with pytest.raises(ValueError, match=r"there is no module 'nothing_there' where .*python and /"):
        load("nothing-there")
