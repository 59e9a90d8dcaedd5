"""Completions of several turns: tokens in, tokens out, exact in sampler and trainer, and what ends
an episode."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import talkers
import torch
from tiny import tiny_policy, tiny_tokenizer

from lagrpo.model.chat import Chat, Replies, RewritingError
from lagrpo.model.model import Packed, copy_policy
from lagrpo.rollout import decoding
from lagrpo.rollout.base import Request
from lagrpo.rollout.decoding import DecodeState
from lagrpo.rollout.episodes import Episodes
from lagrpo.rollout.local import LocalSampler
from lagrpo.types import Group, Prompt

TURNS = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}<eos>{% endif %}{{ '\\n' }}{% endfor %}assistant: "
)


def talking(dtype=torch.bfloat16, kind: str = "llama", **changes: Any) -> Any:
    """A tiny policy with a chat template for several turns, which ends about every tenth token."""
    policy = tiny_policy(kind, dtype, **changes)
    policy.chat.tokenizer.chat_template = TURNS
    with torch.no_grad():
        policy.model.head.weight[1] *= 3
    return policy


def episodes(policy: Any, make: Any = talkers.Counting, late: int = 0, **limits: int) -> Episodes:
    given: Any = {"turns": 8, "sampled": 60, "replied": 200} | limits
    pool: Any = talkers.Here(make, late)
    return Episodes(pool, Replies(policy.chat), **given)


def ask(policy: Any, count: int = 4) -> list[Request]:
    prompts = [
        Prompt(n, ({"role": "user", "content": "x" * (3 * n + 1)},), "3") for n in range(count)
    ]
    return [Request(1, 0, policy.chat.tokenize(prompt)) for prompt in prompts]


def sampled(
    policy: Any, of: Episodes, requests: Any = None, rows: int = 64, G: int = 5
) -> dict[int, Group]:
    sampler = LocalSampler(copy_policy(policy), 0, of.sampled, rows, episodes=of)
    return {r.prompt.key: group for r, group in sampler.sample(requests or ask(policy), G)}


def completions(groups: dict[int, Group]) -> list[Any]:
    return [c for key in sorted(groups) for c in groups[key].completions]


def same(one: dict[int, Group], other: dict[int, Group]) -> bool:
    pairs = zip(completions(one), completions(other), strict=True)
    return all(
        torch.equal(a.token_ids, b.token_ids)
        and torch.equal(a.logp_alpha[a.sampled], b.logp_alpha[b.sampled])
        and (a.turns, a.outcome, a.finished) == (b.turns, b.outcome, b.finished)
        for a, b in pairs
    )


@pytest.mark.usefixtures("either_computation")
@pytest.mark.parametrize(("dtype", "rounding"), [(torch.bfloat16, 0.1), (torch.float32, 1e-4)])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_trainer_and_sampler_agree_on_tokens_of_all_turns(kind, dtype, rounding):
    policy = talking(dtype, kind)
    groups = sampled(policy, episodes(policy))
    found = completions(groups)
    assert max(len(c.turns) for c in found) >= 3  # a reply between two turns of the policy
    own = torch.cat([c.sampled for c in found])
    packed = Packed.build(
        [
            (groups[n].prompt.token_ids, [c.token_ids for c in groups[n].completions])
            for n in range(4)
        ]
    )
    with torch.no_grad():
        logp = policy.logp(packed)[own]
    given = torch.cat([c.logp_alpha for c in found])[own]
    assert (
        torch.equal(logp, given) if policy.model.exact else (logp - given).abs().max() <= rounding
    )


@pytest.mark.usefixtures("with_kernels")
def test_episode_is_independent_of_other_episodes_and_of_reply_times():
    policy = talking()
    assert policy.model.exact
    wide = sampled(policy, episodes(policy))
    assert same(wide, sampled(policy, episodes(policy, late=7)))
    assert same(wide, sampled(policy, episodes(policy), rows=5))
    assert same(wide, sampled(policy, episodes(policy), ask(policy)[::-1], rows=11))


def test_inexact_models_take_replies_at_fixed_steps():
    policy = talking(torch.float32)
    assert same(sampled(policy, episodes(policy)), sampled(policy, episodes(policy, late=9)))


def test_completion_is_the_conversation_that_the_template_writes():
    """Tokenized again, as one conversation of the texts, it is the same tokens; and only the
    policy's own count."""
    policy = talking()
    for request, group in zip(ask(policy), sampled(policy, episodes(policy)).values(), strict=True):
        for c in (
            c for c in group.completions if not {0, 2} & {*c.token_ids.tolist()}
        ):  # what a text does not show
            said = [*request.prompt.messages]
            for n, text in enumerate(c.turns):
                said.append({"role": "user" if n % 2 else "assistant", "content": text})
            said.append({"role": "user", "content": ""})
            ids = policy.chat.encode(policy.chat.render(said), add_special_tokens=False)
            mine = [*request.prompt.token_ids, *c.token_ids.tolist()]
            assert mine == ids[: len(mine)]
            assert c.length == sum(len(text) for text in c.turns[::2]) + len(c.turns[::2]) - (
                not c.finished
            )
            assert bool(c.logp_alpha[~c.sampled].isnan().all())
            runs = [list(run) for _, run in itertools.groupby(c.sampled.tolist())]
            assert len(runs) == len(c.turns)


def test_rewards_and_reasons_are_the_environments():
    found = completions(sampled(policy := talking(), episodes(policy)))
    ended = [c for c in found if c.finished]
    assert len(ended) > 5
    assert {c.outcome.reason for c in ended} == {"after 3 turns"}
    assert all(c.outcome.reward == (len(c.turns[-1]) % 5) / 5 for c in ended)
    reasons = ("cut after 60 sampled", "cut: the turn ended", "after 3 turns; cut after 60")
    assert all(c.outcome.reason.startswith(reasons) for c in found if not c.finished)


@pytest.mark.parametrize(
    ("make", "limits", "reason", "reward"),
    [
        pytest.param(
            talkers.Endless,
            {"turns": 2},
            "cut after 2 turns (task.max_turns)",
            0.2,
            id="turns",
        ),
        pytest.param(
            talkers.Saying,
            {"replied": 70},
            "cut: the environment replied with more than 70 tokens",
            0.0,
            id="reply tokens",
        ),
        pytest.param(
            talkers.Endless,
            {"sampled": 9},
            "cut after 9 sampled tokens (rollout.max_completion_length)",
            None,
            id="sampled tokens",
        ),
    ],
)
def test_limit_ends_an_episode_with_its_reason(make, limits, reason, reward):
    policy = talking()
    found = [
        c
        for c in completions(sampled(policy, episodes(policy, make, **limits)))
        if c.outcome.reason == reason
    ]
    assert found
    assert all(c.outcome.kind == "scored" and not c.finished and bool(c.sampled[-1]) for c in found)
    assert {c.outcome.reward for c in found} == {reward} or reward is None


@pytest.mark.usefixtures("either_computation")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_tokens_decoded_together_equal_tokens_decoded_one_by_one(dtype, monkeypatch):
    """Rows of two groups, some of which wait; what is longer than a piece goes in parts."""
    monkeypatch.setattr(decoding, "PIECE", 16)
    policy = talking(dtype)
    found = []
    fed = [[5, 8, 9], [], [30, 6], [7] * 40, [40]]
    for together in (True, False):
        state = DecodeState(policy.model, 5, 20)
        state.admit([[5, 6, 7]], 3)
        state.feed([[9], [8], [7]])
        state.admit([[9, 8, 7, 30, 31, 6]], 2)
        if together:
            last = torch.tensor([len(tokens) for tokens in fed if tokens]).cumsum(0) - 1
            hidden = state.feed(fed)[last]
        else:
            each = [
                [state.feed([[t] if row == r else [] for row in range(5)]) for t in fed[r]]
                for r in range(5)
            ]
            hidden = torch.cat([steps[-1] for steps in each if steps])
        hidden = torch.cat([hidden, state.feed([[row + 3] for row in range(5)])])
        found.append((hidden, state.lengths.tolist()))
    assert found[0][1] == found[1][1] == [5, 2, 4, 41, 2]
    if policy.model.exact:
        assert torch.equal(found[0][0], found[1][0])
    else:
        torch.testing.assert_close(
            found[0][0], found[1][0], rtol=0.05, atol=0.05 if dtype == torch.bfloat16 else 1e-4
        )


# ---- chat templates ----


def chat(template: str | None) -> Chat:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return Chat(tokenizer, 103, frozenset({1, 2}))


def test_reply_is_what_the_template_adds():
    replies = Replies(chat(TURNS))
    assert replies.end_id == 1
    said = replies.chat.tokenizer.decode(replies.tokens([{"role": "user", "content": "higher"}]))
    assert said == "\nuser: higher\nassistant: "


STRIPPED = TURNS.replace("m['content'] }}", "m['content'].split('</think>')[-1] }}")
NUMBERED = TURNS.replace(
    "{{ m['role'] }}:", "{{ m['role'] }}{{ loop.index if m['role'] == 'user' }}:"
)


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        pytest.param(None, "has no chat template", id="no template"),
        pytest.param(
            TURNS.replace("<eos>", ""),
            "the chat template ends an assistant turn with .*, not with '<eos>'",
            id="turns without an end",
        ),
        pytest.param(
            STRIPPED,
            "changes earlier turns when the conversation continues: "
            "'<think>.*Set model.chat_template",
            id="thinking removed",
        ),
        pytest.param(
            TURNS + "<think>",
            "changes earlier turns .* '<think>2' becomes",
            id="thinking opened",
        ),
        pytest.param(NUMBERED, "renders a reply differently", id="turns numbered"),
    ],
)
def test_template_that_rewrites_earlier_turns_is_rejected(template, problem):
    with pytest.raises(RewritingError, match=problem):
        Replies(chat(template)).check([{"role": "user", "content": "5"}])
