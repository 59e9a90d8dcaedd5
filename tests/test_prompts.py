"""Which prompts a batch asks: none twice, and how often they are tokenized."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from running import tiny_settings
from tiny import TURNS, tiny_policy

from lagrpo.data.prompts import PromptSource
from lagrpo.errors import SettingsError
from lagrpo.lifecycle.run import train
from lagrpo.runs import load_rollouts
from lagrpo.settings.schema import Settings
from lagrpo.startup.build_tasks import (
    check_training_prompts,
    load_tasks,
    warn_of_trained_prompts,
)
from lagrpo.tasks import RowTask, order_prompts
from lagrpo.tasks.files import Row
from lagrpo.verify import verify_run


def source(prompts: int, N: int) -> PromptSource:
    rows = [f"{n}?" for n in range(prompts)]
    task = RowTask(
        "numbers", {"train": rows, "test": rows}, lambda row: (row, row), lambda completion: 0.0
    )
    return PromptSource(task, tiny_policy(), 5, N, 64)


def keys(requests) -> list[int]:
    return [request.prompt.key for request in requests]


def test_later_rounds_ask_prompts_that_the_batch_has_not_had():
    """However many are missing in each round: 3, then 2, then 2, then 1. They are a function of
    batch and number."""
    for batch in (1, 2, 7):
        prompts = source(prompts=30, N=4)
        asked_keys, number_taken = keys(prompts.batch(batch)), 0
        for count in (3, 2, 2, 1):
            asked_keys += keys(prompts.extra(batch, number_taken, count))
            number_taken += count
        assert len(set(asked_keys)) == len(asked_keys) == 12
        assert asked_keys[4:] == keys(source(30, 4).extra(batch, 0, 8))


def test_when_all_prompts_were_asked_they_come_again_under_another_address():
    """Six prompts, four of them in the batch: two are left, then all but those four once more."""
    prompts = source(prompts=6, N=4)
    batch_requests, extra_requests = prompts.batch(1), prompts.extra(1, 0, 4)
    assert (
        set(keys(extra_requests[:2]))
        == set(keys(extra_requests[2:]))
        == set(range(6)) - set(keys(batch_requests))
    )
    assert len({request.address for request in [*batch_requests, *extra_requests]}) == 8
    small_source = source(prompts=4, N=4)
    batch_requests, extra_requests = small_source.batch(1), small_source.extra(1, 0, 6)
    assert len({request.address for request in [*batch_requests, *extra_requests]}) == 10
    assert Counter(keys(extra_requests[:4])) == Counter(range(4))


@pytest.fixture
def run(model, tmp_path):
    def of(task: str, **sections):
        base = {
            "task": {"name": f"sample_task:{task}"},
            "schedule": {"prompts_per_batch": 4, "batches": 2},
            "eval": {"at_start": False},
        }
        return train(tiny_settings(model, tmp_path / "runs", **base | sections)).run

    return of


def asked(run) -> list[list[int]]:
    """The keys of the prompts of each batch, in the order of its groups."""
    rows = load_rollouts(run)
    return [
        [r["prompt_id"] for r in rows if r["step"] == b and r["sample_index"] == 0] for b in (1, 2)
    ]


def test_dynamic_sampling_asks_no_prompt_twice_and_does_not_depend_on_what_ends_first(run):
    rollout = {"num_generations": 2, "max_completion_length": 40, "dynamic_sampling_rounds": 5}
    narrow, wide = (
        run("load_rarely_right", rollout=rollout | {"max_num_seqs": rows}) for rows in (2, 32)
    )
    assert asked(narrow) == asked(wide)
    assert all(len(set(keys)) == len(keys) == 4 for keys in asked(narrow))
    assert min(row["epoch"] for row in load_rollouts(narrow)) == -1


@pytest.mark.parametrize("rounds", [0, 1], ids=["planned prompts only", "with extra prompts"])
def test_prompt_that_only_dynamic_sampling_can_ask_is_checked_before_the_run(rounds):
    """Of four prompts the run plans two. One of the other two is too long."""
    order = order_prompts(5, 0, 4)
    rows = ["?"] * 4
    rows[order[3]] = "x" * 64
    task = RowTask("numbers", {"train": rows}, lambda row: (row, row), lambda completion: 0.0)
    prompts = PromptSource(task, tiny_policy(), 5, 2, 64)
    settings = Settings.model_validate(
        {"schedule": {"batches": 1}, "rollout": {"dynamic_sampling_rounds": rounds}}
    )
    not_first: Any = SimpleNamespace(is_first=False)
    problem = pytest.raises(SettingsError, match=f"prompt {order[3]} .*max_prompt_length is 64")
    with problem if rounds else nullcontext():
        check_training_prompts(settings, prompts, tiny_policy(), not_first)
    assert len(prompts.visited) == 2


def one_prompt(
    question: Any, policy: Any = None, place: str = "", **task_options: Any
) -> PromptSource:
    row = Row({"q": question}, "a.jsonl", place)
    task = RowTask(
        "odd", {"train": [row]}, lambda row: (row["q"], ""), lambda completion: 0.0, **task_options
    )
    return PromptSource(task, policy or tiny_policy(), 5, 1, 64)


def test_prompt_that_cannot_be_asked_is_named():
    for question, message in [
        (
            [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}],
            "the prompt already has a system message",
        ),
        ([{"role": "user", "content": None}], "the last of which has a text"),
        ("\ud800", "surrogates not allowed"),
        ("x" * 50, r"\(a.jsonl, line 3\) has 85 tokens; rollout.max_prompt_length is 64; .*'drop'"),
    ]:
        source = one_prompt(question, place="a.jsonl, line 3", system_prompt="Be brief.")
        with pytest.raises(SettingsError, match=f"prompt 0 of the train split of 'odd'.*{message}"):
            source.tokenized("train", 0)


def test_overlong_prompt_of_an_environment_is_rejected_without_the_advice_to_drop_it():
    episodes: Any = SimpleNamespace(open=lambda prompt, key: prompt.messages, tools=None)
    task = RowTask("game", {"train": ["x" * 64]}, lambda row: (row, row), lambda completion: 0.0)
    prompts = PromptSource(task, tiny_policy(), 5, 1, 64, episodes)
    with pytest.raises(SettingsError, match="max_prompt_length") as problem:
        prompts.tokenized("train", 0)
    assert "'drop'" not in str(problem.value)


def test_overlong_prompts_are_dropped_if_the_settings_say_so(run):
    """The template makes 18 tokens of ?, 19 of x? …"""
    finished_run = run("load", rollout={"overlong_prompts": "drop", "max_prompt_length": 19})
    assert {len(row["prompt_token_ids"]) for row in load_rollouts(finished_run)} == {18, 19}
    assert verify_run(finished_run, trust_run_code=True).differences == []


def test_prompt_that_ends_with_the_assistant_is_continued():
    policy = tiny_policy()
    policy.chat.tokenizer.chat_template = TURNS
    messages = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "It is "}]
    prompt = one_prompt(messages, policy).tokenized("train", 0)
    assert policy.chat.tokenizer.decode(prompt.token_ids) == "user: 1+1\nassistant: It is "


def test_prompt_that_was_rendered_before_gives_one_warning(caplog):
    source = one_prompt("<stop>1+1", tiny_policy())
    for _ in range(2):
        source.tokenized("train", 0)
    for reading in (r"'user: <stop>1+1\nassistant:'.", "to ask '<stop>1+1'"):
        assert caplog.text.count(reading) == 1
    source = one_prompt("<stop>1+1", plain := tiny_policy())
    plain.chat.tokenizer.chat_template = "{{ messages[-1].content }}"
    source.tokenized("train", 0)
    assert caplog.text.count("special token") == 1


def test_rewards_outside_of_their_range_give_one_warning(run, capsys):
    run("load_letters", rollout={"max_completion_length": 30})  # counts letters
    out = " ".join(capsys.readouterr().out.split())
    assert out.count("outside [0, 1], so pass@1 is wrong") == 1
    run("load_rarely_right")
    assert "outside [0" not in capsys.readouterr().out


# Data that does not fit


def custom_settings(tmp_path, train, test, answer_column="a", rewards=("exact",), **sections):
    """Settings of a run on these rows, for training and testing."""
    (tmp_path / "data").mkdir(exist_ok=True)
    for name, rows in (("train", train), ("test", test)):
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / "data" / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    task = {"name": "custom", "data": str(tmp_path / "data"), "rewards": list(rewards)}
    task |= {"prompt_column": "q", "answer_column": answer_column}
    return Settings.model_validate({"task": task, **sections})


def questions_of(*questions):
    return [{"q": question, "a": "5"} for question in questions]


USER = [{"role": "user", "content": "2+3?"}]


@pytest.mark.parametrize(
    ("train", "test", "word"),
    [
        pytest.param(
            questions_of("1?", "2?", "3?"), questions_of("1?", "2?"), "2 of the 2", id="all"
        ),
        pytest.param(
            questions_of("1?", "2?", "3?"), questions_of("1?", "4?"), "1 of the 2", id="some"
        ),
        pytest.param(
            questions_of("1?", "2?"), questions_of("2? ", "4?"), "1 of the 2", id="white space"
        ),
        pytest.param(
            questions_of("2+3?", "2?"),
            questions_of(USER, "4?"),
            "1 of the 2",
            id="text and message",
        ),
        pytest.param(questions_of("1?", "2?"), questions_of("3?", "4?"), None, id="none"),
    ],
)
def test_evaluation_prompts_that_are_trained_on_are_counted(tmp_path, caplog, train, test, word):
    settings = custom_settings(tmp_path, train, test)
    warn_of_trained_prompts(settings, load_tasks(settings))
    assert ("are among the training prompts" in caplog.text) == (word is not None)
    assert word is None or word in caplog.text


def test_prompts_of_an_evaluation_set_that_are_trained_on_are_counted(tmp_path, caplog):
    rows = questions_of("1?", "2?", "3?")
    settings = custom_settings(tmp_path, rows, questions_of("4?"))
    set_task = settings.task.model_dump() | {
        "options": {"train_split": "test", "test_split": "train"}
    }
    sets = [{"name": "mine", "every": 1, "task": set_task}]
    settings = custom_settings(tmp_path, rows, questions_of("4?"), eval={"sets": sets})
    warn_of_trained_prompts(settings, load_tasks(settings))
    assert "3 of the 3 evaluation prompts of 'mine'" in caplog.text


@pytest.mark.parametrize(
    ("answer_column", "columns"),
    [
        pytest.param("reward_model", "reward_model.style, reward_model.truth", id="struct"),
        pytest.param(None, "q, reward_model", id="whole row"),
    ],
)
def test_table_as_answer_of_a_reward_that_compares_texts_is_rejected(
    tmp_path, answer_column, columns
):
    rows = [{"q": "1?", "reward_model": {"style": "rule", "truth": "5"}}]
    settings = custom_settings(tmp_path, rows, rows, answer_column)
    with pytest.raises(SettingsError, match=rf"task.answer_column .*{columns}"):
        load_tasks(settings)
    settings = custom_settings(tmp_path, rows, rows, answer_column, rewards=["format"])
    assert load_tasks(settings)


def test_tools_of_the_data_beside_an_environment_give_a_warning(tmp_path, caplog):
    rows = [{"q": "1?", "a": "5", "tools": [{"name": "add"}]}]
    settings = custom_settings(tmp_path, rows, rows)
    load_tasks(settings)
    assert "column 'tools'" not in caplog.text
    tools = {**settings.task.model_dump(), "tools": ["calculator"]}
    load_tasks(Settings.model_validate({"task": tools}))
    assert "column 'tools'" in caplog.text
