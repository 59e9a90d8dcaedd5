"""Completions of several turns: tokens in, tokens out, exact in sampler and trainer, and what ends
an episode."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, cast

import pytest
import talkers
import torch
from feeding import flat
from tiny import TURNS, tiny_policy, tiny_tokenizer
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lagrpo.model.chat import Chat
from lagrpo.model.model import Packed, Policy, copy_policy
from lagrpo.model.replies import Replies, RewritingError
from lagrpo.rewards.pool import WorkerPool
from lagrpo.rollout import decoding
from lagrpo.rollout.decoding import DecodeState
from lagrpo.rollout.local import LocalSampler
from lagrpo.tasks import Make
from lagrpo.tasks.episodes import Episodes
from lagrpo.types import Completion, Group, Prompt, Request

EOS = 1
NEVER_IN_TEXT = {0, 2}
"""<pad> and <stop>: a turn's text leaves them out, so it does not say where they were sampled."""


def talking_policy(
    dtype: torch.dtype = torch.bfloat16, kind: str = "llama", **changes: Any
) -> Policy:
    """A tiny policy with a chat template for several turns, which ends about every tenth token."""
    policy = tiny_policy(kind, dtype, **changes)
    policy.chat.tokenizer.chat_template = TURNS
    # Random weights seldom end a turn: nearly every episode would be cut.
    with torch.no_grad():
        policy.model.head.weight[EOS] *= 3
    return policy


def make_episodes(
    policy: Policy,
    environment: Make = talkers.Counting,
    /,
    late: int = 0,
    turns: int = 8,
    sampled: int = 60,
    replied: int = 200,
) -> Episodes:
    """Episodes whose environments run in this process. A reply is ready after `late` looks at it:
    that decides with which rows the policy reads it."""
    pool = cast(WorkerPool, talkers.Here(environment, late))
    return Episodes(pool, Replies(policy.chat), turns=turns, sampled=sampled, replied=replied)


def episode_requests(policy: Policy, count: int = 4) -> list[Request]:
    """Prompts of different lengths."""
    requests = []
    for key in range(count):
        message = {"role": "user", "content": "x" * (3 * key + 1)}
        prompt = policy.chat.tokenize(Prompt(key, (message,), "3"))
        requests.append(Request(1, 0, prompt))
    return requests


def sample_groups(
    policy: Policy,
    episodes: Episodes,
    requests: Sequence[Request] | None = None,
    rows: int = 64,
    G: int = 5,
) -> dict[int, Group]:
    """The groups by the keys of their prompts. With fewer `rows` than completions, some wait."""
    sampler = LocalSampler(copy_policy(policy), 0, episodes.sampled, rows, episodes=episodes)
    groups = sampler.sample(requests or episode_requests(policy), G)
    return {request.prompt.key: group for request, group in groups}


def completions_of(groups: dict[int, Group]) -> list[Completion]:
    return [completion for key in sorted(groups) for completion in groups[key].completions]


def are_same(groups: dict[int, Group], others: dict[int, Group]) -> bool:
    """True if all completions have the same tokens, bits of log-probs, turns and ends."""
    pairs = zip(completions_of(groups), completions_of(others), strict=True)
    return all(
        torch.equal(a.token_ids, b.token_ids)
        and torch.equal(a.rollout_logp[a.sampled], b.rollout_logp[b.sampled])
        and (a.turns, a.outcome, a.finished) == (b.turns, b.outcome, b.finished)
        for a, b in pairs
    )


def test_each_turn_has_the_prefix_that_its_prompt_or_reply_ends_with():
    """The template opens a thought in every turn but the first, whose prompt begins the answer."""
    policy = talking_policy(torch.float32)
    policy.chat.tokenizer.chat_template = TURNS.replace(
        "{{ m['content'] }}",
        "{% if m['role'] == 'assistant' and not loop.last %}<think>{% endif %}{{ m['content'] }}",
    ).replace("assistant: ", "{% if add_generation_prompt %}assistant: <think>{% endif %}")
    messages = ({"role": "user", "content": "x"}, {"role": "assistant", "content": "It is "})
    prompt = policy.chat.tokenize(Prompt(0, messages, "3"))
    episodes = make_episodes(policy, talkers.Prefixed, sampled=200)
    groups = sample_groups(policy, episodes, [Request(1, 0, prompt)])
    completions = [c for c in groups[0].completions if len(c.turns) > 3]
    assert completions
    for completion in completions:
        assert completion.turns[1:4:2] == ("It is ", "<think>")
        assert completion.prefix == "<think>"


# In bfloat16 a log-prob may differ by some of its rounding steps, 2^-7 near 1, if the computation
# is not exact.
@pytest.mark.usefixtures("either_computation")
@pytest.mark.parametrize(("dtype", "rounding"), [(torch.bfloat16, 0.1), (torch.float32, 1e-4)])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_trainer_and_sampler_agree_on_tokens_of_all_turns(kind, dtype, rounding):
    policy = talking_policy(dtype, kind)
    groups = sample_groups(policy, make_episodes(policy))
    completions = completions_of(groups)
    # Some episode has a reply between two turns of the policy, which both read as context.
    assert max(len(completion.turns) for completion in completions) >= 3

    is_sampled_T = torch.cat([completion.sampled for completion in completions])
    sampler_logp_T = torch.cat([completion.rollout_logp for completion in completions])
    packed = Packed.build(
        [
            (groups[key].prompt.token_ids, [c.token_ids for c in groups[key].completions])
            for key in sorted(groups)
        ]
    )
    with torch.no_grad():
        trainer_logp_T = policy.logp(packed)
    difference_T = (trainer_logp_T - sampler_logp_T)[is_sampled_T]
    largest = float(difference_T.abs().max())
    assert largest == 0.0 if policy.model.exact else largest <= rounding


@pytest.mark.usefixtures("with_kernels")
def test_episode_is_independent_of_other_episodes_and_of_reply_times():
    """To the bit: late replies, few rows and another order change what is decoded together."""
    policy = talking_policy()
    assert policy.model.exact
    groups = sample_groups(policy, make_episodes(policy))
    with_late_replies = sample_groups(policy, make_episodes(policy, late=7))
    with_few_rows = sample_groups(policy, make_episodes(policy), rows=5)
    reversed_requests = episode_requests(policy)[::-1]
    in_another_order = sample_groups(policy, make_episodes(policy), reversed_requests, rows=11)
    assert are_same(groups, with_late_replies)
    assert are_same(groups, with_few_rows)
    assert are_same(groups, in_another_order)


def test_inexact_model_reads_replies_at_fixed_steps():
    """Its rounding depends on what is decoded together, so a late reply must not change that."""
    policy = talking_policy(torch.float32)
    groups = sample_groups(policy, make_episodes(policy))
    with_late_replies = sample_groups(policy, make_episodes(policy, late=9))
    assert are_same(groups, with_late_replies)


def test_completion_is_the_conversation_that_the_template_writes():
    """The texts of all turns, rendered and tokenized as one conversation, are the same tokens; and
    only the policy's own tokens count."""
    policy = talking_policy()
    requests = episode_requests(policy)
    groups = sample_groups(policy, make_episodes(policy))
    for request, group in zip(requests, groups.values(), strict=True):
        for completion in group.completions:
            token_ids = completion.token_ids.tolist()
            if NEVER_IN_TEXT & {*token_ids}:
                continue
            messages = [*request.prompt.messages]
            for turn, text in enumerate(completion.turns):
                role = "user" if turn % 2 else "assistant"
                messages.append({"role": role, "content": text})
            # A further message, since the template ends a turn only where another one follows.
            messages.append({"role": "user", "content": ""})
            rendered = policy.chat.render(messages)
            expected = policy.chat.encode(rendered, add_special_tokens=False)
            episode_ids = [*request.prompt.token_ids, *token_ids]
            assert episode_ids == expected[: len(episode_ids)]

            # A token per character, and <eos> after every turn of the policy that was not cut.
            policy_turns = completion.turns[::2]
            characters = sum(len(text) for text in policy_turns)
            ends = len(policy_turns) - (not completion.finished)
            assert completion.length == characters + ends
            assert bool(completion.rollout_logp[~completion.sampled].isnan().all())
            stretches = list(itertools.groupby(completion.sampled.tolist()))
            assert len(stretches) == len(completion.turns)


def test_reward_and_reason_are_the_environments():
    policy = talking_policy()
    completions = completions_of(sample_groups(policy, make_episodes(policy)))
    finished = [completion for completion in completions if completion.finished]
    assert len(finished) > 5
    for completion in finished:
        assert completion.outcome is not None
        assert completion.outcome.reason == "after 3 turns"
        assert completion.outcome.reward == (len(completion.turns[-1]) % 5) / 5
    cut = ("cut after 60 sampled", "cut: the turn ended", "after 3 turns; cut after 60")
    for completion in completions:
        assert completion.outcome is not None
        assert completion.finished or completion.outcome.reason.startswith(cut)


@pytest.mark.parametrize(
    ("environment", "limits", "reason", "reward"),
    [
        pytest.param(
            talkers.Endless,
            {"turns": 2},
            "cut after 2 turns (task.max_turns)",
            0.2,  # 0.1 for each turn so far
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
            None,  # it depends on the turn in which the limit was reached
            id="sampled tokens",
        ),
    ],
)
def test_limit_ends_an_episode_with_its_reason(environment, limits, reason, reward):
    policy = talking_policy()
    groups = sample_groups(policy, make_episodes(policy, environment, **limits))
    cut = [
        c for c in completions_of(groups) if c.outcome is not None and c.outcome.reason == reason
    ]
    assert cut
    for completion in cut:
        assert completion.outcome is not None
        assert completion.outcome.kind == "scored"
        assert not completion.finished
        # A reply that nobody answers would be context without a use.
        assert bool(completion.sampled[-1])
        assert reward is None or completion.outcome.reward == reward


FED = [[5, 8, 9], [], [30, 6], [7] * 40, [40]]
"""Replies to five rows: some wait, and one is longer than a piece."""


@pytest.mark.usefixtures("either_computation")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_tokens_decoded_together_equal_tokens_decoded_one_by_one(dtype, monkeypatch):
    monkeypatch.setattr(decoding, "PIECE", 16)
    policy = talking_policy(dtype)

    def start() -> DecodeState:
        """Rows of two groups; those of the first are one token further."""
        state = DecodeState(policy.model, 5, 20)
        state.admit([[5, 6, 7]], 3)
        state.feed(*flat([[9], [8], [7]]))
        state.admit([[9, 8, 7, 30, 31, 6]], 2)
        return state

    # The next token reads all keys and values that the replies have left.
    next_tokens = [[row + 3] for row in range(5)]

    together = start()
    last_indices = torch.tensor([len(tokens) for tokens in FED if tokens]).cumsum(0) - 1
    hidden = torch.cat([together.feed(*flat(FED))[last_indices], together.feed(*flat(next_tokens))])

    one_by_one = start()
    last_hidden = []
    for row, tokens in enumerate(FED):
        steps = [
            one_by_one.feed(*flat([[token] if other == row else [] for other in range(5)]))
            for token in tokens
        ]
        last_hidden += steps[-1:]
    expected = torch.cat([*last_hidden, one_by_one.feed(*flat(next_tokens))])

    assert together.lengths.tolist() == [5, 2, 4, 41, 2]
    assert one_by_one.lengths.tolist() == [5, 2, 4, 41, 2]
    if policy.model.exact:
        assert torch.equal(hidden, expected)
    else:
        atol = 0.05 if dtype == torch.bfloat16 else 1e-4
        torch.testing.assert_close(hidden, expected, rtol=0.05, atol=atol)


# Chat templates


def chat_with(template: str | None) -> Chat:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return Chat(tokenizer, 103, frozenset({EOS, 2}))


def test_reply_is_what_the_template_adds():
    replies = Replies(chat_with(TURNS))
    assert replies.end_id == EOS
    reply_ids = replies.tokens([{"role": "user", "content": "higher"}])
    assert replies.chat.tokenizer.decode(reply_ids) == "\nuser: higher\nassistant: "


def tokenizer_of_pieces(*, rstrip: bool, prepend_scheme: str | None) -> Any:
    """A tokenizer of characters, with the end token <eos>.

    As Phi-3's it strips white space after special tokens if `rstrip`. As Llama's it marks the
    beginning of a text ("first") or of every piece between special tokens ("always").
    """
    tokens = ["<unk>", "▁", "\n", *" abcdefghijklmnopqrstuvwxyz0123456789:"]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    if prepend_scheme is not None:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme, split=False)
    tokenizer.add_special_tokens([AddedToken("<eos>", rstrip=rstrip, normalized=False)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
    fast.chat_template = TURNS
    return fast


@pytest.mark.parametrize(
    ("rstrip", "prepend_scheme"),
    [
        pytest.param(False, None, id="plain"),
        pytest.param(True, None, id="white space stripped"),
        pytest.param(False, "first", id="beginning of the text marked"),
        pytest.param(False, "always", id="beginning of each piece marked"),
        pytest.param(True, "always", id="stripped and marked"),
    ],
)
def test_tokens_of_a_reply_are_those_of_the_whole_conversation(rstrip, prepend_scheme):
    tokenizer = tokenizer_of_pieces(rstrip=rstrip, prepend_scheme=prepend_scheme)
    end_id = tokenizer.eos_token_id
    chat = Chat(tokenizer, len(tokenizer), frozenset({end_id}))
    reply = {"role": "user", "content": "more"}
    conversation = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yes"},
        reply,
    ]
    whole = chat.encode(chat.render(conversation), add_special_tokens=False)
    behind_turn = whole[whole.index(end_id) + 1 :]
    assert list(Replies(chat).tokens([reply])) == behind_turn


def test_reply_is_tokenized_alone_if_the_end_token_joins_what_follows():
    """The tokenizer has a token for the end and the line break behind it."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TURNS
    reply = [{"role": "user", "content": "higher"}]
    expected = Replies(Chat(tokenizer, 103, frozenset({EOS}))).tokens(reply)
    tokenizer.add_tokens(["<eos>\n"])
    assert Replies(Chat(tokenizer, 104, frozenset({EOS}))).tokens(reply) == expected


STRIPPED = TURNS.replace("m['content'] }}", "m['content'].split('</think>')[-1] }}")
NUMBERED = TURNS.replace(
    "{{ m['role'] }}:", "{{ m['role'] }}{{ loop.index if m['role'] == 'user' }}:"
)


# With such a template the tokens of a conversation do not begin with those sampled so far.
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
        Replies(chat_with(template)).check([{"role": "user", "content": "5"}])
