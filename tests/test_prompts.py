"""Which prompts a batch asks: none twice, and how often they are tokenized."""

from __future__ import annotations

from collections import Counter

import pytest
from running import tiny_settings
from test_episodes import TURNS
from tiny import save_tiny, tiny_policy

from lagrpo.data.prompts import PromptSource
from lagrpo.errors import SettingsError
from lagrpo.model.chat import Chat
from lagrpo.rollout.local import LocalSampler
from lagrpo.rollout.sync_check import CHECK_PROMPTS
from lagrpo.runs import load_rollouts
from lagrpo.tasks import RowTask
from lagrpo.training.run import train

pytestmark = pytest.mark.usefixtures("shared_templates")


def source(prompts: int, N: int) -> PromptSource:
    rows = [f"{n}?" for n in range(prompts)]
    task = RowTask("numbers", {"train": rows, "test": rows}, lambda row: (row, row), lambda completion: 0.0)
    return PromptSource(task, tiny_policy(), 5, N, 64)


def keys(requests) -> list[int]:
    return [request.prompt.key for request in requests]


def test_later_rounds_ask_prompts_that_the_batch_has_not_had():
    """However many are missing in each round: 3, then 2, then 2, then 1. They are a function of batch and number."""
    for batch in (1, 2, 7):
        prompts = source(prompts=30, N=4)
        asked, taken = keys(prompts.batch(batch)), 0
        for count in (3, 2, 2, 1):
            asked += keys(prompts.extra(batch, taken, count))
            taken += count
        assert len(set(asked)) == len(asked) == 12
        assert asked[4:] == keys(source(30, 4).extra(batch, 0, 8))


def test_when_all_prompts_were_asked_they_come_again_under_another_address():
    """Six prompts, four of them in the batch: two are left, then all but those four once more."""
    prompts = source(prompts=6, N=4)
    own, more = prompts.batch(1), prompts.extra(1, 0, 4)
    assert set(keys(more[:2])) == set(keys(more[2:])) == set(range(6)) - set(keys(own))
    assert len({request.address for request in [*own, *more]}) == 8
    whole = source(prompts=4, N=4)
    own, more = whole.batch(1), whole.extra(1, 0, 6)
    assert len({request.address for request in [*own, *more]}) == 10
    assert Counter(keys(more[:4])) == Counter(range(4))


@pytest.fixture
def run(tmp_path):
    model = save_tiny(tmp_path / "model")

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
    return [[r["prompt_id"] for r in rows if r["step"] == b and r["sample_index"] == 0] for b in (1, 2)]


def test_dynamic_sampling_asks_no_prompt_twice_and_does_not_depend_on_what_ends_first(run):
    narrow, wide = (
        run(
            "load_rarely_right",
            rollout={
                "num_generations": 2,
                "max_completion_length": 40,
                "dynamic_sampling_rounds": 5,
                "max_num_seqs": rows,
            },
        )
        for rows in (2, 32)
    )
    assert asked(narrow) == asked(wide)
    assert all(len(set(keys)) == len(keys) == 4 for keys in asked(narrow))
    assert min(row["epoch"] for row in load_rollouts(narrow)) == -1


def test_prompts_are_tokenized_once_at_the_start_and_once_in_their_batch(run, monkeypatch):
    """24 prompts, all of them visited. Before the first batch also those of the weight-sync check, and one for the
    template."""
    counts: Counter[str] = Counter()
    phase = {"now": "start"}
    tokenize, sample = Chat.tokenize, LocalSampler.sample

    def counted(policy, prompt, *tools):
        counts[phase["now"]] += 1
        return tokenize(policy, prompt, *tools)

    def sampling(sampler, requests, G):
        phase["now"] = f"batch {requests[0].batch + 1}"  # what comes after this draw
        return sample(sampler, requests, G)

    monkeypatch.setattr(Chat, "tokenize", counted)
    monkeypatch.setattr(LocalSampler, "sample", sampling)
    run("load_rarely_right", schedule={"prompts_per_batch": 4, "batches": 13})
    assert counts.pop("start") == 1 + 24 + CHECK_PROMPTS + 4
    assert counts == {f"batch {b}": 4 for b in range(2, 14)}


def test_every_prompt_that_a_run_asks_is_checked_before_it_starts(monkeypatch):
    """Three batches of four out of ten: the whole split; two batches: eight of it, those that they ask."""
    prompts = source(prompts=10, N=4)
    for batches, count in ((3, 10), (2, 8)):
        checked: list[int] = []
        monkeypatch.setattr(prompts, "tokenized", lambda split, index, checked=checked: checked.append(index))
        prompts.check(batches)
        assert len(checked) == len(set(checked)) == count
        assert set(checked) == {index for b in range(1, batches + 1) for _, index in prompts._of_batch(b)}


def test_a_prompt_that_cannot_be_asked_is_named():
    for question, message in [
        ([{"role": "system", "content": "x"}, {"role": "user", "content": "y"}], "the prompt has a system turn"),
        ([{"role": "user", "content": None}], "the last of which has a text"),
        ("\ud800", "surrogates not allowed"),
        ("x" * 50, "has 85 tokens; rollout.max_prompt_length is 64"),
    ]:
        task = RowTask("odd", {"train": [question]}, lambda row: (row, ""), lambda completion: 0.0, "Be brief.")
        with pytest.raises(SettingsError, match=f"prompt 0 of the train split of 'odd'.*{message}"):
            PromptSource(task, tiny_policy(), 5, 1, 64).tokenized("train", 0)


def test_a_prompt_that_ends_with_the_assistant_is_continued():
    policy = tiny_policy()
    policy.chat.tokenizer.chat_template = TURNS
    messages = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "It is "}]
    task = RowTask("continued", {"train": [messages]}, lambda row: (row, ""), lambda completion: 0.0)
    prompt = PromptSource(task, policy, 5, 1, 64).tokenized("train", 0)
    assert policy.chat.tokenizer.decode(prompt.token_ids) == "user: 1+1\nassistant: It is "


def test_rewards_outside_of_their_range_give_one_warning(run, capsys):
    run("load_letters", run={"display": "plain"}, rollout={"max_completion_length": 30})  # counts letters
    out = " ".join(capsys.readouterr().out.split())
    assert out.count("outside of task.reward_range = [0, 1], such as ") == 1
    run("load_rarely_right", run={"display": "plain"})
    assert "outside of task.reward_range" not in capsys.readouterr().out
