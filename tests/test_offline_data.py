"""Pre-generated (offline) completions become groups, or a clear error."""

from __future__ import annotations

import json
import os

import pytest
import torch
from tiny import tiny_policy

from lagrpo.data.offline import OfflineData, read_records
from lagrpo.runs.files import write_table
from lagrpo.runs.rollouts import rollout_rows, rollout_schema
from lagrpo.types import Completion, Group, Outcome, Prompt

pytestmark = pytest.mark.usefixtures("shared_templates")


def loaded(data, policy, **options):
    return OfflineData(read_records(data), policy, **options)


def written(tmp_path, rows, name="data.jsonl"):
    path = tmp_path / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


ROWS = [
    {"prompt": "1+1=", "completion": "2", "reward": 1.0},
    {"prompt": "2+2=", "completion": "5", "reward": 0.0},
    {"prompt": "1+1=", "completion": "3", "reward": 0.0, "finished": False},
    {"prompt": "1+1=", "completion": "two", "answer": "2"},
]


def test_rows_of_one_prompt_form_groups_of_at_most_g(tmp_path):
    policy = tiny_policy()
    offline_data = loaded(written(tmp_path, ROWS), policy, G=2, seed=0)
    assert len(offline_data) == 3
    assert not offline_data.has_logp
    by_text = {tuple(c.text for c in g.completions): g for g in offline_data.batch(1, 3)}
    assert by_text.keys() == {("2", "3"), ("two",), ("5",)}
    first, cut = by_text["2", "3"].completions
    assert first.token_ids.tolist() == [*policy.chat.tokenizer("2")["input_ids"], policy.chat.tokenizer.eos_token_id]
    assert cut.token_ids.tolist() == policy.chat.tokenizer("3")["input_ids"]
    assert first.reward == 1.0
    assert by_text["two",].completions[0].outcome is None  # for the judge, against gold
    assert by_text["two",].prompt.answer == "2"
    assert first.logp_alpha.isnan().all()
    assert first.versions.tolist() == [-1, -1]


def test_every_group_is_visited_once_per_epoch(tmp_path):
    offline_data = loaded(written(tmp_path, ROWS), tiny_policy(), G=2, seed=3)
    keys = [g.prompt.key for b in range(1, 7) for g in offline_data.batch(b, 1)]
    assert sorted(keys[:3]) == sorted(keys[3:]) == [0, 1, 2]


def test_the_rollouts_of_a_run_are_read_back_but_for_its_versions(tmp_path):
    policy = tiny_policy()
    prompt = policy.chat.tokenize(Prompt(4, ({"role": "user", "content": "7-2="},), "5"))
    group = Group(
        prompt,
        (
            Completion(torch.tensor([8, 9, 1]), torch.tensor([-0.5, -0.25, -1.0]), torch.tensor([3, 3, 3]), True, "5",
                       Outcome.scored(1.0)),
            Completion(torch.tensor([8]), torch.tensor([-0.5]), torch.tensor([3]), False, "x", Outcome.unscored("?")),
        ),
    )  # fmt: skip
    path = tmp_path / "step-000001.parquet"
    rows = rollout_rows([group], [[{"advantage": 0.5}, {}]], step=1, policy_version=5)
    write_table(path, rows, rollout_schema())
    offline_data = loaded(path, policy, G=16, seed=0)
    assert offline_data.has_logp
    (again,) = offline_data.batch(1, 1)
    assert (again.prompt.token_ids, again.prompt.answer) == (prompt.token_ids, "5")
    for ours, theirs in zip(again.completions, group.completions, strict=True):
        assert torch.equal(ours.token_ids, theirs.token_ids)
        assert torch.equal(ours.logp_alpha, theirs.logp_alpha)
        assert (ours.versions == -1).all()  # version 3 of another run is no version of this one
        assert (ours.outcome, ours.finished, ours.text) == (theirs.outcome, theirs.finished, theirs.text)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"completion": "2"}, "line 1: it has neither prompt nor prompt_token_ids"),
        ({"prompt": "1+1="}, "line 1: it has neither completion nor token_ids"),
        ({"prompt": "1+1=", "token_ids": []}, "line 1: its completion has no tokens"),
        ({"prompt": "1+1=", "token_ids": [5, 1000]}, "line 1: token 1000 of token_ids is outside the model's"),
        ({"prompt": "1+1=", "completion": "2", "rollout_logprobs": [-1.0]}, "rollout_logprobs needs token_ids"),
        (
            {"prompt": "1+1=", "token_ids": [5, 1], "rollout_logprobs": [-1.0]},
            "rollout_logprobs has 1 entries for 2 tokens",
        ),
        ({"prompt": "1+1=", "completion": "2", "reward": float("nan")}, "its reward is nan"),
        (
            {"prompt": "1+1=", "token_ids": [5, 1], "rollout_logprobs": [-1.0, 5.0]},
            r"line 1: rollout_logprobs\[1\] is 5: .*at most 0",
        ),
        (
            {"prompt": "1+1=", "token_ids": [5], "rollout_logprobs": [float("inf")]},
            r"line 1: rollout_logprobs\[0\] is inf",
        ),
        (
            {"prompt": "1+1=", "token_ids": [5], "rollout_logprobs": [float("-inf")]},
            r"line 1: rollout_logprobs\[0\] is -inf",
        ),
        ({"prompt": "1+1=", "token_ids": [5], "rollout_logprobs": ["low"]}, r"line 1: rollout_logprobs\[0\] is 'low'"),
        (
            {"prompt": "1+1=", "token_ids": [5], "rollout_logprobs": -1.0},
            "line 1: rollout_logprobs is -1.0, not a list",
        ),
        ({"prompt": {"role": "user"}, "completion": "2"}, "line 1: its prompt is {'role': 'user'}: a prompt is a text"),
        ({"prompt": ["1+1="], "completion": "2"}, r"line 1: its prompt is \['1\+1='\]: a prompt is a text"),
        ({"prompt": [{"role": "user"}], "completion": "2"}, "line 1: its prompt is .*the last of which has a text"),
        ({"prompt": 2, "completion": "2"}, "line 1: its prompt is 2: a prompt is a text"),
        ({"prompt": "\ud800", "completion": "2"}, "half of a surrogate pair"),
        ({"prompt_token_ids": [5, 1000], "completion": "2"}, "token 1000 of prompt_token_ids is outside the model's"),
        ({"prompt_token_ids": [5.5], "completion": "2"}, r"prompt_token_ids is \[5\.5\], not a list of whole numbers"),
        ({"prompt_token_ids": "55", "completion": "2"}, "prompt_token_ids is '55', not a list of whole numbers"),
        ({"prompt": "1+1=", "token_ids": [5.5]}, r"line 1: token_ids is \[5\.5\], not a list of whole numbers"),
        ({"prompt": "1+1=", "token_ids": 5}, "line 1: token_ids is 5, not a list of whole numbers"),
        ({"prompt": "1+1=", "completion": 2}, "line 1: its completion is 2, not a text"),
        ({"prompt": "1+1=", "completion": "\ud800"}, "half of a surrogate pair"),
        ({"prompt": "1+1=", "completion": "2", "finished": "false"}, "finished is 'false', neither true nor false"),
        ({"prompt": "1+1=", "completion": "2", "outcome": "lost"}, "its outcome is 'lost', which is not one of scored"),
        ({"prompt": "1+1=", "completion": "2", "reward": "1"}, "its reward is '1', not a finite number"),
        ({"prompt": "1+1=", "completion": "2", "reward": 10**400}, "its reward is 10{50}.*, not a finite number"),
    ],
)
def test_bad_rows_are_named(tmp_path, row, message):
    with pytest.raises(ValueError, match=message):
        loaded(written(tmp_path, [row]), tiny_policy(), G=2, seed=0)


@pytest.mark.parametrize("logp_alpha", [None, [None, -0.5], [float("nan"), -0.5]])
def test_a_log_prob_of_null_is_unknown(tmp_path, logp_alpha):
    row = {"prompt": "1+1=", "token_ids": [5, 1], "rollout_logprobs": logp_alpha, "reward": 1.0}
    offline_data = loaded(written(tmp_path, [row]), tiny_policy(), G=2, seed=0)
    assert not offline_data.has_logp
    known = [] if logp_alpha is None else [-0.5]
    (group,) = offline_data.batch(1, 1)
    found = group.completions[0].logp_alpha
    assert found[~found.isnan()].tolist() == known


def test_a_log_prob_that_rounding_left_above_0_is_taken(tmp_path):
    row = {"prompt": "1+1=", "token_ids": [5], "rollout_logprobs": [1e-6], "reward": 1.0}
    assert loaded(written(tmp_path, [row]), tiny_policy(), G=2, seed=0).has_logp


def test_bad_files_are_named(tmp_path):
    policy = tiny_policy()
    with pytest.raises(FileNotFoundError, match="no such file"):
        loaded(tmp_path / "nowhere.jsonl", policy, G=2, seed=0)
    (tmp_path / "x.csv").write_text("a,b\n")
    with pytest.raises(ValueError, match=r"\.jsonl or \.parquet"):
        loaded(tmp_path / "x.csv", policy, G=2, seed=0)
    (tmp_path / "broken.jsonl").write_text('{"prompt": "a", "completion": "b"}\n{broken\n')
    with pytest.raises(ValueError, match="line 2: this is not JSON"):
        loaded(tmp_path / "broken.jsonl", policy, G=2, seed=0)
    (tmp_path / "latin.jsonl").write_bytes('{"prompt": "é", "completion": "b"}'.encode("latin-1"))
    with pytest.raises(ValueError, match=r"latin\.jsonl cannot be read"):
        loaded(tmp_path / "latin.jsonl", policy, G=2, seed=0)
    with pytest.raises(ValueError, match="no completions"):
        loaded(written(tmp_path, []), policy, G=2, seed=0)


def test_only_a_newline_ends_a_line(tmp_path):
    """JSON may hold U+2028 and U+0085 as they are, and texts of models do; some editors put a mark before it all."""
    rows = (json.dumps({"prompt": "1+1=", "completion": f"2{c}"}, ensure_ascii=False) for c in "\u2028\x85\x0c")
    (tmp_path / "data.jsonl").write_text("\ufeff" + "\r\n".join(rows), encoding="utf-8", newline="")
    (group,) = loaded(tmp_path / "data.jsonl", tiny_policy(), G=4, seed=0).batch(1, 1)
    assert [c.text for c in group.completions] == ["2\u2028", "2\x85", "2\x0c"]


def completion(policy, text="5", logp=(-0.5, -1.0), outcome=None, version=3):
    ids = [*policy.chat.tokenizer(text)["input_ids"], 1] if text else []
    return Completion(torch.tensor(ids, dtype=torch.long), torch.tensor(logp[: len(ids)]),
                      torch.full((len(ids),), version), bool(text), text, outcome or Outcome.scored(1.0))  # fmt: skip


def rollouts(root, batches, name="run"):
    """A run's directory with the rollouts of these batches: groups of completions of one prompt."""
    folder = root / name / "rollouts"
    folder.mkdir(parents=True)
    (root / name / "config.toml").write_text("")
    policy = tiny_policy()
    prompt = policy.chat.tokenize(Prompt(4, ({"role": "user", "content": "7-2="},), "5"))
    for b, completions in enumerate(batches, start=1):
        rows = rollout_rows([Group(prompt, tuple(completions))], [[{}] * len(completions)], step=b, policy_version=5)
        write_table(folder / f"step-{b:06d}.parquet", rows, rollout_schema())
    return root / name


def test_a_run_a_glob_a_list_and_a_file(tmp_path):
    """Groups are those of the run: what batch 2 asked again is a group of its own."""
    policy = tiny_policy()
    run = rollouts(tmp_path, [[completion(policy, "1"), completion(policy, "2")], [completion(policy, "3")]])
    both = [("1", "2"), ("3",)]
    files = sorted((run / "rollouts").iterdir())
    for data, expected in (
        (run, both),
        (f"{run}/rollouts/*.parquet", both),
        (f"{tmp_path}/**/step-*.parquet", both),
        (files, both),
        ([run, files[0]], both),
        (f"{tmp_path}/*", both),
        ([run, os.path.relpath(run), files[0]], both),
        (files[1], both[1:]),
    ):
        offline_data = loaded(data, policy, G=4, seed=0)
        groups = offline_data.batch(1, len(offline_data))
        assert sorted(tuple(c.text for c in g.completions) for g in groups) == expected


def test_completions_that_failed_are_left_out_and_counted(tmp_path):
    policy = tiny_policy()
    lost = completion(policy, "", outcome=Outcome.failed("the server died"))
    torn = completion(policy, "8", logp=(-0.5, float("nan")), outcome=Outcome.failed("no finite log-prob"))
    judged = completion(policy, "9", outcome=Outcome.unscored("no verdict"))
    run = rollouts(tmp_path, [[completion(policy, "1"), lost, judged], [torn]])
    offline_data = loaded(run, policy, G=4, seed=0)
    (group,) = offline_data.batch(1, 1)
    assert [(c.text, c.outcome.kind) for c in group.completions if c.outcome] == [("1", "scored"), ("9", "unscored")]
    assert offline_data.left_out == {"failed": 2}
    assert str(offline_data) == "2 completions of 1 group in 2 files; left out: 2 failed"


def test_log_probs_that_lack_are_unknown_and_their_rows_left_out_where_they_are_read(tmp_path):
    policy = tiny_policy()
    nan = float("nan")
    run = rollouts(tmp_path, [[completion(policy, "1"), completion(policy, "2", logp=(-0.5, nan))]])
    every = loaded(run, policy, G=4, seed=0)
    assert not every.has_logp
    assert every.left_out == {}
    assert [bool(c.logp_alpha.isnan().any()) for c in every.batch(1, 1)[0].completions] == [False, True]
    known = loaded(run, policy, G=4, seed=0, reads_logp=True)
    assert known.has_logp
    assert known.left_out == {"without log-probs": 1}
    assert [c.text for c in known.batch(1, 1)[0].completions] == ["1"]
    none = loaded(written(tmp_path, ROWS), policy, G=2, seed=0, reads_logp=True)
    assert not none.has_logp  # for the caller to refuse
    assert len(none) == 3


def test_a_prompt_that_is_too_long_is_named(tmp_path):
    rows = [ROWS[0], ROWS[0] | {"prompt": "x" * 50}]
    message = r"data\.jsonl, line 2: its prompt has 67 tokens; rollout\.max_prompt_length is 64"
    with pytest.raises(ValueError, match=message):
        loaded(written(tmp_path, rows), tiny_policy(), G=2, seed=0, max_prompt_tokens=64)


def test_places_without_completions_are_named(tmp_path):
    policy = tiny_policy()
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"empty is a directory without rollouts"):
        loaded(tmp_path / "empty", policy, G=2, seed=0)
    with pytest.raises(FileNotFoundError, match=r"nothing-\*\.parquet matches no such file"):
        loaded(f"{tmp_path}/nothing-*.parquet", policy, G=2, seed=0)
    failed = completion(policy, "", outcome=Outcome.failed("the server died"))
    with pytest.raises(ValueError, match=r"no completions in it \(left out: 1 failed\)"):
        loaded(rollouts(tmp_path, [[failed]]), policy, G=2, seed=0)


def test_a_completion_of_several_turns_is_the_conversation_that_the_template_writes(tmp_path):
    from test_episodes import TURNS

    policy = tiny_policy()
    policy.chat.tokenizer.chat_template = TURNS
    turns = [("assistant", "5"), ("user", "higher"), ("tool", "!"), ("assistant", "7")]
    messages = [{"role": role, "content": text} for role, text in turns]
    row = {"prompt": "guess", "completion": messages, "reward": 1.0}
    data = loaded(written(tmp_path, [row, row | {"finished": False}]), policy, G=2, seed=0)
    whole, cut = data.batch(1, 1)[0].completions
    text = policy.chat.tokenizer.decode(whole.token_ids)
    assert text == "5<eos>\nuser: higher\ntool: !\nassistant: 7<eos>"
    assert policy.chat.tokenizer.decode(whole.token_ids[whole.sampled]) == "5<eos>7<eos>"
    assert whole.token_ids.tolist()[:-1] == cut.token_ids.tolist()
    assert (whole.turns, cut.length) == (("5", "higher\n!", "7"), 3)


@pytest.mark.parametrize(
    "roles", [[], ["user"], ["assistant", "user"], ["assistant", "assistant"], ["user", "assistant"]]
)
def test_turns_that_cannot_be_a_completion_are_refused(tmp_path, roles):
    row = {"prompt": "a", "completion": [{"role": role, "content": "x"} for role in roles], "reward": 1.0}
    with pytest.raises(ValueError, match=r"line 1: its completion is \[.* begins and ends with one of the assistant"):
        read_records(written(tmp_path, [row]))
