"""Stop texts: where completions and turns end, and what is sampled before."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from running import tiny_settings
from test_episodes import episode_requests, make_episodes, talking_policy
from test_sampling import requests_for
from tiny import tiny_policy, tiny_tokenizer
from vllm_servers import FakeServer, Ours, choice, engine_of

import lagrpo
from lagrpo.model.chat import Chat
from lagrpo.model.model import copy_policy
from lagrpo.rollout.local import LocalSampler
from lagrpo.rollout.stop import completes_stop, count_until_stop
from lagrpo.rollout.vllm.client import GENERATE
from lagrpo.runs import load_rollouts
from lagrpo.verify import verify_run

POLICY = tiny_policy()
CHAT = POLICY.chat
PAD = 0


def ids(text: str) -> list[int]:
    """The tokens of a text: one for each character."""
    return CHAT.encode(text, add_special_tokens=False)


@pytest.mark.parametrize(
    ("text", "stop", "count"),
    [
        ("say END now", ("END",), 7),
        ("say END now", ("now", "END"), 7),
        ("say EN D", ("END",), None),
        ("END", ("END",), 3),
        (" END", (" END",), 4),
        ("anything", (), None),
    ],
    ids=["one", "first of two", "none", "at the start", "with a space", "without texts"],
)
def test_first_stop_text_ends_with_its_last_token(text, stop, count):
    assert count_until_stop(CHAT, ids(text), stop) == count


def test_padding_inside_a_stop_text_is_not_in_the_text():
    tokens = [*ids("xE"), PAD, *ids("N"), PAD, PAD, *ids("D")]
    assert CHAT.decode(tokens) == "xEND"
    assert completes_stop(CHAT, tokens, ("END",))
    assert not completes_stop(CHAT, [*tokens, PAD], ("END",))


@pytest.mark.parametrize(
    ("stop", "count"),
    [("EN", 2), ("ND", 2), ("D", 2), ("xEN", 2), ("END.", 2), (". ", 3), ("N.", None)],
    ids=["begins", "middle", "one letter", "from before", "whole", "reaches over", "absent"],
)
def test_stop_text_inside_a_token_ends_with_that_token(stop, count):
    """The second token is "END.", behind "x" and before a space."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["END."])
    chat = Chat(tokenizer, len(tokenizer), CHAT.eos_ids)
    tokens = chat.encode("xEND. y", add_special_tokens=False)
    assert len(tokens) == 4
    assert count_until_stop(chat, tokens, (stop,)) == count


def sample(stop: tuple[str, ...]) -> list[Any]:
    sampler = LocalSampler(copy_policy(POLICY), 0, 24, 64, stop=stop)
    groups = {r.prompt.key: group for r, group in sampler.sample(requests_for(POLICY, 3), 6)}
    return [completion for key in sorted(groups) for completion in groups[key].completions]


def test_completion_with_a_stop_text_is_the_beginning_of_the_one_without():
    uncut = sample(())
    longest = max(uncut, key=lambda completion: completion.length)
    stop = (longest.text[5:7],)
    cut = sample(stop)
    assert sum(one.length < other.length for one, other in zip(cut, uncut, strict=True)) > 0
    for one, other in zip(cut, uncut, strict=True):
        assert torch.equal(one.token_ids, other.token_ids[: one.length])
        assert torch.equal(one.rollout_logp, other.rollout_logp[: one.length])
        stop_index = other.text.find(stop[0])
        if stop_index < 0:
            assert (one.length, one.finished) == (other.length, other.finished)
        else:
            assert one.text == other.text[: stop_index + len(stop[0])]
            assert one.finished


def test_turn_that_ends_with_a_stop_text_gets_its_end_token_before_the_reply():
    policy = talking_policy(torch.float32)
    limits = make_episodes(policy)
    stop = tuple("0123456789abcdefghijklm")
    sampler = LocalSampler(copy_policy(policy), 0, limits.sampled, 64, episodes=limits, stop=stop)
    completions = [
        c for _, group in sampler.sample(episode_requests(policy), 5) for c in group.completions
    ]
    end_id = limits.replies.end_id
    stopped_turns = 0
    for completion in completions:
        for turn in completion.turns[:-1:2]:
            assert not any(text in turn[:-1] for text in stop)
        tokens, sampled = completion.token_ids.tolist(), completion.sampled.tolist()
        for position in range(1, len(tokens)):
            if sampled[position - 1] and not sampled[position] and tokens[position - 1] != end_id:
                # The reply begins with the end of the turn, which the policy did not sample.
                assert tokens[position] == end_id
                assert CHAT.decode([tokens[position - 1]]) in stop
                stopped_turns += 1
    assert stopped_turns > 0


def test_server_gets_the_stop_texts_and_what_it_samples_beyond_is_cut():
    with FakeServer() as fake:
        engine = engine_of([Ours(fake)], POLICY)
        engine.params = replace(engine.params, stop=("bc",))
        engine.sync_weights(POLICY.weights, 0)
        tokens = tuple(ids("abcd"))
        fake.answers[GENERATE] = lambda _: (
            200,
            {"choices": [choice(fake.label, 0, tokens, (-1.0, -2.0, -3.0, -4.0), "length")]},
        )
        ((_, group),) = engine.sample(requests_for(POLICY, 1), 1)
        (completion,) = group.completions
        engine.close()
        (body,) = fake.bodies(GENERATE)
    assert body["sampling_params"]["stop"] == ["bc"]
    assert body["sampling_params"]["detokenize"] is True
    assert (completion.text, completion.finished) == ("abc", True)
    assert completion.rollout_logp.tolist() == [-1.0, -2.0, -3.0]
    assert len(completion.versions) == 3
    assert completion.sampled.tolist() == [True, True, True]
    assert completion.length == 3


def test_run_with_stop_texts_is_verified(model, tmp_path):
    settings = tiny_settings(
        model,
        tmp_path / "runs",
        rollout={
            "num_generations": 4,
            "max_completion_length": 12,
            "max_prompt_length": 64,
            "stop": ["a", "e", "0", "7", "Z", "R"],
        },
        schedule={"batches": 1, "prompts_per_batch": 4},
    )
    result = lagrpo.train(settings)
    rows = load_rollouts(result.run)
    stopped = [row for row in rows if row["completion"][-1:] in tuple("ae07ZR")]
    assert stopped
    assert all(row["finished"] for row in stopped)
    assert not any(set(row["completion"][:-1]) & set("ae07ZR") for row in rows)
    report = verify_run(result.run, trust_run_code=True)
    assert report.differences == []
