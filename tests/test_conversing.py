"""Episodes by a vLLM server, which a script stands in for: one request for each turn, with everything so far."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import talkers
import torch
from test_episodes import ask, episodes, talking

from lagrpo.rollout.vllm.conversing import converse
from lagrpo.rollout.vllm.fleet import Served
from lagrpo.rollout.vllm.generation import AbortedError, Generation
from lagrpo.types import Group


class Server:
    """Says "ab" and ends its turn, by the weights that are served at that moment."""

    def __init__(self, served: Served) -> None:
        self.served, self.asked, self.end = served, [], "stop"

    def generate(self, ids: Any, n: int, seed: int, max_tokens: int, tau: float, eos_ids: Any, salt: str) -> Any:
        self.asked.append(SimpleNamespace(ids=ids, n=n, seed=seed, max_tokens=max_tokens, salt=salt))
        tokens = [13, 14, 1][:max_tokens]
        logprobs = {"content": [{"logprob": -0.5 * n, "token_id": token} for n, token in enumerate(tokens)]}
        spans = [{"version": self.served.label, "start": 0, "end": len(tokens)}]
        end = self.end if len(self.asked) > 1 else "stop"
        made = {"token_ids": tokens, "logprobs": logprobs, "weight_versions": spans, "finish_reason": end}
        return [made | {"index": g} for g in range(n)]


class Syncing(talkers.Here):
    """New weights come with every reply."""

    served: Any = None

    def result(self, job: Any) -> Any:
        run, version = self.served.run, self.served.version
        self.served.set(SimpleNamespace(label=f"{run}:{version + 1}"))
        return super().result(job)


def group(G: int = 2, end: str = "stop", syncing: bool = False, **limits: int) -> tuple[Group, Any, Any]:
    policy = talking(torch.float32)
    of, served = episodes(policy, **limits), Served()
    served.set(SimpleNamespace(label=served.label_of(4)))  # type: ignore[arg-type]
    if syncing:
        of.environments.__class__, of.environments.served = Syncing, served  # type: ignore[attr-defined]
    server = Server(served)
    server.end = end
    chat = policy.chat
    generation = Generation(0, of.limits.sampled, 1.0, chat.eos_ids, 64, chat.decode)
    request = ask(policy, 1)[0]
    return converse(generation, of, server, request, G, served, lambda: nullcontext(served.label)), server, chat  # type: ignore[arg-type]


def test_each_turn_is_a_request_with_everything_so_far():
    made, server, chat = group()
    first, *others = server.asked
    assert (first.n, list(first.ids)) == (2, list(made.prompt.token_ids))
    assert [other.n for other in others] == [1] * 4  # two completions, each with two more turns
    assert len({asked.seed for asked in server.asked}) == 5
    for c in made.completions:
        assert c.outcome is not None
        assert (c.finished, c.outcome.reason, c.turns[::2]) == (True, "after 3 turns", ("ab", "ab", "ab"))
        ids = [*made.prompt.token_ids, *c.token_ids.tolist()]
        assert any(list(other.ids) == ids[:-3] for other in others)
        assert chat.decode(c.token_ids.tolist()) == c.text
        assert c.length == 9
        assert c.logp_alpha[c.sampled].tolist() == [0.0, -0.5, -1.0] * 3
        assert set(c.versions[c.sampled].tolist()) == {4}


def test_the_turns_of_an_episode_have_the_versions_that_sampled_them():
    made, _, _ = group(G=1, syncing=True)
    (c,) = made.completions
    assert c.versions[c.sampled].tolist() == [4, 4, 4, 5, 5, 5, 6, 6, 6]


def test_a_limit_holds_over_all_turns():
    made, server, _ = group(G=1, sampled=8)
    (c,) = made.completions
    assert [asked.max_tokens for asked in server.asked] == [8, 5, 2]
    assert c.outcome is not None
    assert (c.length, c.finished) == (8, False)
    assert c.outcome.reason == "after 3 turns; cut after 8 sampled tokens (sampling.max_tokens)"


def test_a_turn_that_cannot_be_used_fails_the_completion():
    made, _, _ = group(G=1, end="error")
    (c,) = made.completions
    assert c.outcome is not None
    assert (c.outcome.kind, c.outcome.reason) == ("failed", "the server ended it with 'error' after 3 tokens")
    with pytest.raises(AbortedError):
        group(G=1, end="abort")
