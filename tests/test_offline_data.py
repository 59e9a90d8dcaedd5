"""Pre-generated (offline) completions become groups, or a clear error."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tiny import CHAT, TURNS, tiny_policy

from lagrpo.data.offline import OfflineData, read_records
from lagrpo.runs.files import write_table
from lagrpo.runs.rollouts import rollout_rows, rollout_schema
from lagrpo.types import Completion, Group, Outcome, Prompt


def loaded(data, policy, **options):
    return OfflineData(read_records(data), policy, **options)


def written(tmp_path, rows, name="data.jsonl"):
    path = tmp_path / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


ROWS = [
    {"prompt": "1+1=", "completion": "2", "reward": 1.0},
    {"prompt": "2+2=", "completion": "5", "reward": 0.0},
    {"prompt": "1+1=", "completion": "3", "reward": 0.0, "finished": False},
    {"prompt": "1+1=", "completion": "two", "answer": "2"},
]
"""The last row has another answer: it is another group."""


def test_rows_of_one_prompt_and_answer_form_a_group(tmp_path):
    policy = tiny_policy()
    offline_data = loaded(written(tmp_path, ROWS), policy, G=2, seed=0)
    assert len(offline_data) == 3
    assert not offline_data.has_logp
    by_text = {tuple(c.text for c in g.completions): g for g in offline_data.batch(1, 3)}
    assert by_text.keys() == {("2", "3"), ("two",), ("5",)}
    first, cut = by_text["2", "3"].completions
    assert first.token_ids.tolist() == [
        *policy.chat.tokenizer("2")["input_ids"],
        policy.chat.tokenizer.eos_token_id,
    ]
    assert cut.token_ids.tolist() == policy.chat.tokenizer("3")["input_ids"]
    assert first.reward == 1.0
    assert by_text["two",].completions[0].outcome is None  # for the reward function, against gold
    assert by_text["two",].prompt.answer == "2"
    assert first.rollout_logp.isnan().all()
    assert first.versions.tolist() == [-1, -1]


@pytest.mark.parametrize(
    ("count", "G", "sizes"),
    [
        pytest.param(8, 8, [8], id="G rows"),
        pytest.param(3, 8, [3], id="fewer than G"),
        pytest.param(9, 8, [4, 5], id="one row more than G"),
        pytest.param(9, 4, [3, 3, 3], id="one row more than 2 G"),
        pytest.param(5, 2, [2, 3], id="odd number of rows for pairs"),
        pytest.param(1, 2, [1], id="one row"),
        pytest.param(2, 1, [1, 1], id="groups of one"),
    ],
)
def test_rows_of_a_prompt_are_shared_out_evenly_and_none_is_left_alone(tmp_path, count, G, sizes):
    rows = [{"prompt": "1+1=", "completion": str(n), "reward": 0.0} for n in range(count)]
    data = loaded(written(tmp_path, rows), tiny_policy(), G=G, seed=0)
    groups = data.batch(1, len(data))
    assert sorted(len(group.completions) for group in groups) == sizes
    assert ("and 1 prompt" in str(data)) == (len(sizes) > 1)
    assert sorted(c.text for group in groups for c in group.completions) == [
        row["completion"] for row in rows
    ]


@pytest.mark.parametrize(
    "rewards",
    [
        pytest.param([1.0] * 8 + [0.0] * 8, id="best first"),
        pytest.param([0.0] * 8 + [1.0] * 8, id="worst first"),
    ],
)
def test_rows_that_are_sorted_by_reward_form_groups_with_different_rewards(tmp_path, rewards):
    rows = [
        {"prompt": prompt, "completion": str(n), "reward": reward}
        for prompt in ("1+1=", "2+2=")
        for n, reward in enumerate(rewards)
    ]
    for seed in range(3):
        data = loaded(written(tmp_path, rows), tiny_policy(), G=8, seed=seed)
        groups = data.batch(1, 4)
        assert all(len(set(group.rewards)) == 2 for group in groups)
        again = loaded(written(tmp_path, rows), tiny_policy(), G=8, seed=seed).batch(1, 4)
        assert [g.rewards for g in groups] == [g.rewards for g in again]


def test_columns_beside_the_completion_are_the_row_that_rewards_get(tmp_path):
    row = {"prompt": "1+1=", "completion": "2", "level": 3, "reward_model": {"ground_truth": "2"}}
    (group,) = loaded(written(tmp_path, [row]), tiny_policy(), G=2, seed=0).batch(1, 1)
    assert group.prompt.row == {
        "prompt": "1+1=",
        "level": 3,
        "reward_model": {"ground_truth": "2"},
    }


def test_every_epoch_visits_every_group_once_in_its_own_order(tmp_path):
    rows = [{"prompt": f"{n}+1=", "completion": "2", "reward": 1.0} for n in range(9)]
    offline_data = loaded(written(tmp_path, rows), tiny_policy(), G=2, seed=3)
    orders = [[g.prompt.key for g in offline_data.batch(epoch, 9)] for epoch in (1, 2, 3)]
    assert all(sorted(order) == list(range(9)) for order in orders)
    assert orders[0] != orders[1] != orders[2] != orders[0]


def test_bad_rows_are_named(tmp_path):
    for row, message in [
        ({"completion": "2"}, "line 1: it has neither prompt nor prompt_token_ids"),
        ({"prompt": "1+1="}, "line 1: its completion is None, not a text, messages, or token_ids"),
        ({"prompt": "1+1=", "token_ids": [5, 1000]}, "line 1: token 1000 is outside the model's"),
        (
            {"prompt": "1+1=", "token_ids": [5, 1], "rollout_logprobs": [-1.0]},
            "has 1 entries for 2 tokens",
        ),
        (
            {"prompt": "1+1=", "token_ids": [5], "rollout_logprobs": [float("-inf")]},
            r"line 1: .*\[0\] is -inf",
        ),
        (
            {"prompt": ["1+1="], "completion": "2"},
            r"line 1: its prompt is \['1\+1='\]: a prompt is a text",
        ),
        ({"prompt": "1+1=", "completion": 2}, "line 1: its completion is 2, not a text"),
        (
            {"prompt": "1+1=", "completion": "2", "reward": "1"},
            "its reward is '1', not a finite number",
        ),
        (
            {"prompt": "1+1=", "completion": "2", "finished": "false"},
            "line 1: finished = 'false': write true or false",
        ),
        (
            {"prompt": "x" * 50, "completion": "2"},
            "its prompt has 67 tokens; .*max_prompt_length is 64",
        ),
        (
            {"prompt": "1+1=", "completion": "2" * 9},
            "its completion has 10 tokens; .*max_completion_length is 8",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            loaded(
                written(tmp_path, [row]),
                tiny_policy(),
                G=2,
                seed=0,
                max_prompt_tokens=64,
                max_completion_tokens=8,
            )


def test_log_prob_of_null_is_unknown_and_one_that_rounding_left_above_0_is_known(tmp_path):
    nan = float("nan")
    for rollout_logp, expected in (
        (None, []),
        ([None, -0.5], [-0.5]),
        ([nan, -0.5], [-0.5]),
        ([1e-6, 0], [1e-6, 0]),
    ):
        row = {
            "prompt": "1+1=",
            "token_ids": [5, 1],
            "rollout_logprobs": rollout_logp,
            "reward": 1.0,
        }
        offline_data = loaded(written(tmp_path, [row]), tiny_policy(), G=2, seed=0)
        assert offline_data.has_logp == (len(expected) == 2)
        read = offline_data.batch(1, 1)[0].completions[0].rollout_logp
        assert read[~read.isnan()].tolist() == pytest.approx(expected)


def test_bad_files_are_named(tmp_path):
    (tmp_path / "x.csv").write_text("a,b\n", encoding="utf-8")
    (tmp_path / "empty").mkdir()
    failed = completion(tiny_policy(), "", outcome=Outcome.failed("the server died"))
    for data, message in [
        (tmp_path / "nowhere.jsonl", "neither a file of completions nor a run"),
        (f"{tmp_path}/nothing-*.parquet", r"nothing-\*\.parquet is neither"),
        (tmp_path / "empty", "empty is neither a file"),
        (tmp_path / "x.csv", r"\.jsonl or \.parquet"),
        (written(tmp_path, []), "no completions"),
        (rollouts(tmp_path, [[failed]]), "0 completions of 0 groups in 1 file; left out: 1 failed"),
    ]:
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            loaded(data, tiny_policy(), G=2, seed=0)


def completion(policy, text="5", logp=(-0.5, -1.0), outcome=None, version=3):
    ids = [*policy.chat.tokenizer(text)["input_ids"], 1] if text else []
    return Completion(
        torch.tensor(ids, dtype=torch.long),
        torch.tensor(logp[: len(ids)]),
        torch.full((len(ids),), version),
        bool(text),
        text,
        outcome or Outcome.scored(1.0),
    )


def rollouts(root, batches, name="run"):
    """A run's directory with the rollouts of these batches: groups of completions of one prompt."""
    folder = root / name / "rollouts"
    folder.mkdir(parents=True)
    (root / name / "config.toml").write_text("", encoding="utf-8")
    prompt = tiny_policy().chat.tokenize(Prompt(4, ({"role": "user", "content": "7-2="},), "5"))
    for b, completions in enumerate(batches, start=1):
        rows = rollout_rows(
            [Group(prompt, tuple(completions))], [[{}] * len(completions)], step=b, policy_version=5
        )
        write_table(folder / f"step-{b:06d}.parquet", rows, rollout_schema())
    return root / name


def test_run_glob_list_and_file_give_the_groups_of_the_run(tmp_path):
    """A prompt that batch 2 repeats has another group."""
    policy = tiny_policy()
    written_ones = [completion(policy, "1"), completion(policy, "2", outcome=Outcome.unscored("?"))]
    run = rollouts(tmp_path, [written_ones, [completion(policy, "3")]])
    both = [("1", "2"), ("3",)]
    files = sorted((run / "rollouts").iterdir())
    for data, expected in (
        (run, both),
        (f"{tmp_path}/**/step-*.parquet", both),
        ([run, os.path.relpath(run), files[0]], both),
        (files[1], both[1:]),
    ):
        offline_data = loaded(data, policy, G=4, seed=0)
        groups = sorted(
            offline_data.batch(1, len(offline_data)), key=lambda group: group.completions[0].text
        )
        assert [tuple(c.text for c in g.completions) for g in groups] == expected
    groups = loaded(run, policy, G=4, seed=0).batch(1, 2)
    assert {group.prompt.answer for group in groups} == {"5"}
    for ours, theirs in zip(
        next(g for g in groups if len(g.completions) > 1).completions, written_ones, strict=True
    ):
        assert torch.equal(ours.token_ids, theirs.token_ids)
        assert torch.equal(ours.rollout_logp, theirs.rollout_logp)
        assert (ours.versions == -1).all()  # version 3 of another run is no version of this one
        assert (ours.outcome, ours.finished, ours.text) == (
            theirs.outcome,
            theirs.finished,
            theirs.text,
        )


def test_completions_that_failed_or_lack_log_probs_are_left_out_and_counted(tmp_path):
    policy, nan = tiny_policy(), float("nan")
    lost = completion(policy, "", outcome=Outcome.failed("the server died"))
    run = rollouts(
        tmp_path, [[completion(policy, "1"), lost, completion(policy, "2", logp=(-0.5, nan))]]
    )
    every = loaded(run, policy, G=4, seed=0)
    assert (every.has_logp, every.left_out) == (False, {"failed": 1})
    with_logp = loaded(run, policy, G=4, seed=0, reads_logp=True)
    assert (with_logp.has_logp, with_logp.left_out) == (True, {"failed": 1, "without log-probs": 1})
    assert (
        str(with_logp)
        == "1 completion of 1 group in 1 file; left out: 1 failed, 1 without log-probs"
    )
    none = loaded(written(tmp_path, ROWS), policy, G=2, seed=0, reads_logp=True)
    assert (none.has_logp, len(none)) == (False, 3)  # for the caller to reject


def test_completion_of_several_turns_is_the_conversation_that_the_template_writes(tmp_path):
    policy = tiny_policy()
    policy.chat.tokenizer.chat_template = TURNS
    turns = [("assistant", "5"), ("user", "higher"), ("tool", "!"), ("assistant", "7")]
    row = {
        "prompt": "guess",
        "completion": [{"role": role, "content": text} for role, text in turns],
        "reward": 1.0,
    }
    data = loaded(written(tmp_path, [row, row | {"finished": False}]), policy, G=2, seed=0)
    uncut, cut = data.batch(1, 1)[0].completions
    text = policy.chat.tokenizer.decode(uncut.token_ids)
    assert text == "5<eos>\nuser: higher\ntool: !\nassistant: 7<eos>"
    assert policy.chat.tokenizer.decode(uncut.token_ids[uncut.sampled]) == "5<eos>7<eos>"
    assert uncut.token_ids.tolist()[:-1] == cut.token_ids.tolist()
    assert (uncut.turns, cut.length) == (("5", "higher\n!", "7"), 3)


def test_messages_as_json_or_in_parts_and_the_end_of_a_turn_are_read(tmp_path, caplog):
    policy = tiny_policy()
    policy.chat.tokenizer.chat_template = TURNS
    messages = [{"role": "assistant", "content": [{"type": "text", "text": "2"}]}]
    prompt = json.dumps([{"role": "user", "content": "1+1"}])
    rows = [
        {"prompt": prompt, "completion": completion, "reward": 1.0}
        for completion in ("2<eos>", messages, json.dumps(messages))
    ]
    (group,) = loaded(written(tmp_path, rows), policy, G=3, seed=0).batch(1, 1)
    assert policy.chat.tokenizer.decode(group.prompt.token_ids) == "user: 1+1\nassistant: "
    assert {(policy.chat.tokenizer.decode(c.token_ids), c.text) for c in group.completions} == {
        ("2<eos>", "2")
    }
    loaded(written(tmp_path, [rows[0] | {"prompt": "1+1<eos>"}]), policy, G=3, seed=0)
    assert "data.jsonl, line 1 has the special token <eos>" in caplog.text


@pytest.mark.parametrize(
    "completion_text",
    [
        pytest.param("4<stop>\n", id="end and new line"),
        pytest.param("4<stop>", id="end"),
        pytest.param("4<stop><eos>", id="two ends"),
        pytest.param("4<stop>\n<stop> \n", id="the same end twice"),
        pytest.param("4<stop>\n<pad><pad>", id="padded"),
        pytest.param("4", id="no end"),
        pytest.param([{"role": "assistant", "content": "4<stop>\n"}], id="in a message"),
    ],
)
def test_completion_is_trained_with_one_end(tmp_path, completion_text):
    policy = tiny_policy()
    policy.chat.tokenizer.chat_template = TURNS.replace("<eos>", "<stop>")
    row = {"prompt": "1+1", "completion": completion_text, "reward": 1.0}
    ((completion,),) = [
        group.completions
        for group in loaded(written(tmp_path, [row]), policy, G=1, seed=0).batch(1, 1)
    ]
    assert completion.token_ids.tolist() == [7, 2]  # "4", <stop>
    assert completion.text == "4"


def test_completion_that_goes_on_after_its_end_is_rejected(tmp_path):
    row = {"prompt": "1+1", "completion": "4<stop>\nuser: 5", "reward": 1.0}
    with pytest.raises(ValueError, match=r"line 1: its completion goes on after '<stop>'"):
        loaded(written(tmp_path, [row]), tiny_policy(), G=1, seed=0)


def test_completion_ends_with_what_the_template_the_tokenizer_or_the_model_ends_with(tmp_path):
    policy = tiny_policy()
    tokenizer = policy.chat.tokenizer
    path = written(tmp_path, [{"prompt": "1+1", "completion": "4", "reward": 1.0}])

    def last_token(template, eos_token, eos_ids):
        tokenizer.chat_template = template
        tokenizer.eos_token = eos_token
        ending_policy = replace(policy, chat=replace(policy.chat, eos_ids=frozenset(eos_ids)))
        return loaded(path, ending_policy, G=1, seed=0).batch(1, 1)[0].completions[0].token_ids[-1]

    assert last_token(TURNS.replace("<eos>", "<stop>"), None, {1}) == 2
    assert last_token(CHAT, "<eos>", {1, 2}) == 1
    # It shows the last message alone, behind the token that begins a text.
    assert last_token("<stop>{{ messages[-1].content }}", "<eos>", {1}) == 1
    assert last_token(CHAT, None, {2}) == 2
    with pytest.raises(ValueError, match=r"line 1: .*eos_token"):
        last_token(CHAT, None, set())


def test_call_in_a_completion_that_the_template_drops_is_rejected(tmp_path):
    policy = tiny_policy()
    policy.chat.tokenizer.chat_template = TURNS.replace(
        "m in messages", "m in messages if m.role != 'tool'"
    )
    turns = [("assistant", "5"), ("tool", "higher"), ("assistant", "7")]
    messages = [{"role": role, "content": text} for role, text in turns]
    row = {"prompt": "guess", "completion": messages, "reward": 1.0}
    with pytest.raises(ValueError, match=r"line 1: the rendered prompt lacks 'higher'"):
        loaded(written(tmp_path, [row]), policy, G=1, seed=0)


def test_turns_that_cannot_be_a_completion_are_rejected(tmp_path):
    for roles in ([], ["assistant", "user"], ["assistant", "assistant"], ["user", "assistant"]):
        row = {
            "prompt": "a",
            "completion": [{"role": role, "content": "x"} for role in roles],
            "reward": 1.0,
        }
        with pytest.raises(ValueError, match=r"line 1: its completion is \[.* begin and end"):
            loaded(written(tmp_path, [row]), tiny_policy(), G=2, seed=0)


def test_texts_that_parquet_stores_as_binary_are_texts(tmp_path):
    rows = [
        {"prompt": b"1+1=", "completion": b"2", "answer": b"2", "reward": 1.0, "outcome": outcome}
        for outcome in (b"scored", b"failed")
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "binary.parquet")
    offline_data = loaded(tmp_path / "binary.parquet", tiny_policy(), G=2, seed=0)
    (group,) = offline_data.batch(1, 1)
    assert group.prompt.messages == ({"role": "user", "content": "1+1="},)
    assert group.prompt.answer == "2"
    assert [completion.text for completion in group.completions] == ["2"]
    assert offline_data.left_out == {"failed": 1}


# What a message has beside its text

CALLS = (  # as Qwen3's: thoughts and calls of the assistant
    "{% for m in messages %}{{ m.role }}: "
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{% set f = call.function or call %}"
    "<call>{{ f.name }} {{ f.arguments | tojson }}</call>{% endfor %}"
    "{% if m.role == 'assistant' %}<eos>{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
REPLY = {"role": "tool", "tool_call_id": "1", "name": "add", "content": "5"}
LAST = {"role": "assistant", "content": "It is 5."}


def completed(tmp_path, message, template=CALLS, name="data.jsonl", others=(REPLY, LAST)):
    policy = tiny_policy()
    policy.chat.tokenizer.chat_template = template
    row = {"prompt": "2+3?", "completion": [message, *others], "reward": 1.0}
    path = tmp_path / name
    if name.endswith(".parquet"):
        pq.write_table(pa.Table.from_pylist([row]), path)
    else:
        written(tmp_path, [row], name)
    (group,) = loaded(path, policy, G=1, seed=0).batch(1, 1)
    (completion,) = group.completions
    decode = policy.chat.tokenizer.decode
    return decode(completion.token_ids), decode(completion.token_ids[completion.sampled])


CALL = {"type": "function", "id": "1", "function": {"name": "add", "arguments": {"x": "2", "y": 3}}}
CALL_OF_TEXT = {"function": {"name": "add", "arguments": '{"x": "2", "y": 3}'}}
CALL_TEXT = '<call>add {"x": "2", "y": 3}</call>'


@pytest.mark.parametrize(
    ("message", "text"),
    [
        pytest.param({"content": "", "tool_calls": [CALL]}, CALL_TEXT, id="empty text"),
        pytest.param({"content": None, "tool_calls": [CALL]}, CALL_TEXT, id="null"),
        pytest.param({"tool_calls": [CALL]}, CALL_TEXT, id="no text"),
        pytest.param({"content": "Add.", "tool_calls": [CALL]}, f"Add.{CALL_TEXT}", id="text, too"),
        pytest.param({"tool_calls": [CALL, CALL]}, CALL_TEXT * 2, id="two calls"),
        pytest.param({"tool_calls": [CALL_OF_TEXT]}, CALL_TEXT, id="arguments as text"),
        pytest.param({"tool_calls": [CALL["function"]]}, CALL_TEXT, id="call without function"),
        pytest.param({"function_call": CALL["function"]}, CALL_TEXT, id="older API"),
        pytest.param(
            {"reasoning_content": "hm", "tool_calls": [CALL]},
            f"<think>hm</think>{CALL_TEXT}",
            id="thought and call",
        ),
        pytest.param(
            {"reasoning_content": "hm", "content": "5"}, "<think>hm</think>5", id="thought"
        ),
        pytest.param(
            {"content": [{"type": "text", "text": "5"}], "refusal": None}, "5", id="parts"
        ),
    ],
)
def test_calls_and_thoughts_of_a_completion_are_learned_as_the_template_writes_them(
    tmp_path, message, text
):
    written_text, sampled_text = completed(tmp_path, {"role": "assistant", **message})
    assert written_text == f"{text}<eos>\ntool: 5\nassistant: It is 5.<eos>"
    assert sampled_text == f"{text}<eos>It is 5.<eos>"


def test_call_of_a_completion_in_parquet_has_no_nulls_of_other_rows(tmp_path):
    calls = [{"function": {"name": n, "arguments": {n: 1}}} for n in ("f", "g")]
    message = {"role": "assistant", "content": None, "tool_calls": calls}
    text, _ = completed(tmp_path, message, name="data.parquet")
    assert text.startswith('<call>f {"f": 1}</call><call>g {"g": 1}</call><eos>')


@pytest.mark.parametrize(
    ("message", "others", "template", "lost"),
    [
        pytest.param({"tool_calls": [CALL]}, (REPLY, LAST), TURNS, "tool_calls 'add'", id="calls"),
        pytest.param(
            {"tool_calls": [CALL]},
            (REPLY, LAST),
            CALLS.replace("{{ f.arguments | tojson }}", ""),
            "tool_calls 'x'",
            id="arguments",
        ),
        pytest.param(
            {"reasoning_content": "hm", "content": "5"},
            (),
            TURNS,
            "reasoning_content",
            id="thought",
        ),
        pytest.param({"content": "5", "refusal": "no"}, (), CALLS, "refusal", id="refusal"),
        pytest.param({"content": "5", "weight": 0}, (), CALLS, "weight", id="unknown key"),
        pytest.param({"content": None}, (), CALLS, "begin and end", id="nothing"),
        pytest.param(
            {"content": [{"type": "image_url", "image_url": "x"}]}, (), CALLS, "part", id="image"
        ),
        pytest.param(
            {"content": "5"},
            ({"role": "user", "name": "Bob", "content": "5"}, LAST),
            CALLS,
            "'name'",
            id="name of a user",
        ),
    ],
)
def test_part_of_a_completion_that_the_template_does_not_show_is_rejected(
    tmp_path, message, others, template, lost
):
    with pytest.raises(ValueError, match=f"line 1: .*{lost}"):
        completed(tmp_path, {"role": "assistant", **message}, template, others=others)


# A thought that the prompt has begun

THINKS = TURNS + "<think>{{ '\\n' }}"
DOES_NOT_THINK = TURNS + "<think>{{ '\\n\\n' }}</think>{{ '\\n\\n' }}"


@pytest.mark.parametrize(
    ("template", "completion_text", "learned"),
    [
        pytest.param(THINKS, "<think>\nok\n</think>\n4", "ok\n</think>\n4", id="opened twice"),
        pytest.param(THINKS, "\n <think>ok</think>4", "ok</think>4", id="white space before"),
        pytest.param(THINKS, "<think>\n\nok</think>4", "\nok</think>4", id="one more new line"),
        pytest.param(THINKS, "<think>\n\n</think>4", "\n</think>4", id="empty thought"),
        pytest.param(THINKS, "ok\n</think>\n4", "ok\n</think>\n4", id="opened by the prompt"),
        pytest.param(DOES_NOT_THINK, "<think>\n\n</think>\n\n4", "4", id="empty twice"),
        pytest.param(DOES_NOT_THINK, "4", "4", id="no thought"),
        pytest.param(TURNS, "<think>ok</think>4", "<think>ok</think>4", id="opened by the data"),
        pytest.param(
            THINKS,
            [{"role": "assistant", "content": "<think>\nok</think>4"}],
            "ok</think>4",
            id="in a message",
        ),
    ],
)
def test_thought_is_opened_once(tmp_path, template, completion_text, learned):
    policy = tiny_policy()
    policy.chat.tokenizer.chat_template = template
    row = {"prompt": "1+3", "completion": completion_text, "reward": 1.0}
    (group,) = loaded(written(tmp_path, [row]), policy, G=1, seed=0).batch(1, 1)
    assert policy.chat.tokenizer.decode(group.completions[0].token_ids) == f"{learned}<eos>"


def test_thought_that_was_cut_need_not_close(tmp_path):
    policy = tiny_policy()
    policy.chat.tokenizer.chat_template = THINKS
    row = {"prompt": "1+3", "completion": "<think>\nhm", "reward": 0.0, "finished": False}
    (group,) = loaded(written(tmp_path, [row]), policy, G=1, seed=0).batch(1, 1)
    assert group.completions[0].text == "hm"


@pytest.mark.parametrize(
    ("template", "completion_text"),
    [
        pytest.param(THINKS, "4", id="no thought behind an open one"),
        pytest.param(DOES_NOT_THINK, "<think>\nok\n</think>\n4", id="thought behind an empty one"),
    ],
)
def test_thought_that_does_not_fit_the_prompt_is_rejected(tmp_path, template, completion_text):
    policy = tiny_policy()
    policy.chat.tokenizer.chat_template = template
    row = {"prompt": "1+3", "completion": completion_text, "reward": 1.0}
    with pytest.raises(ValueError, match=r"line 1: .*think"):
        loaded(written(tmp_path, [row]), policy, G=1, seed=0)


def test_tools_of_an_offline_row_are_in_its_prompt(tmp_path):
    policy = tiny_policy()
    policy.chat.tokenizer.chat_template = "{{ tools | tojson if tools }}" + TURNS
    row = {"prompt": "2+3?", "completion": "5", "reward": 1.0}
    rows = [row, row | {"prompt": "3+3?", "tools": [CALL]}]
    groups = loaded(written(tmp_path, rows), policy, G=1, seed=0).batch(1, 2)
    texts = {policy.chat.tokenizer.decode(group.prompt.token_ids) for group in groups}
    assert texts == {"user: 2+3?\nassistant: ", f"{json.dumps([CALL])}user: 3+3?\nassistant: "}
