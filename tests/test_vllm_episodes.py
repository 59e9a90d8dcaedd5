"""Episodes of several turns by a real vLLM server. `make test-vllm` runs these."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import talkers
import torch
from running import tiny_settings
from test_episodes import TURNS, ask
from tiny import tiny_model, tiny_tokenizer
from vllm_servers import SIZES, kill, perturb, policy_of, sampler_over, start

from lagrpo.model.model import Packed
from lagrpo.model.replies import Replies
from lagrpo.replay import verify_run
from lagrpo.rollout.episodes import Episodes, Limits
from lagrpo.rollout.parity import ParityCheck
from lagrpo.rollout.vllm.server import Server
from lagrpo.runs import load_metrics, load_rollouts
from lagrpo.tasks.calculator import ENVIRONMENT
from lagrpo.training.run import train
from lagrpo.types import Completion, Group
from lagrpo.verify import Environments

pytest_plugins = ["vllm_fixtures"]
pytestmark = pytest.mark.vllm
OPTIONS = ("--block-size", "32")  # tokens; of the cache of prefixes on CPUs: 128


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that ends about every tenth token, with a chat template for several turns."""
    directory = tmp_path_factory.mktemp("vllm") / "model"
    made = tiny_model(**SIZES)
    made.get_output_embeddings().weight.data[1] *= 3
    made.save_pretrained(directory)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TURNS
    tokenizer.save_pretrained(directory)
    return directory


@contextmanager
def talking(servers: Any, model: Path, root: Path, make: Any = talkers.Counting, sampled: int = 60) -> Iterator[Any]:
    """A sampler of episodes of at most so many tokens, and its policy."""
    policy = policy_of(model)
    sampler = sampler_over(servers, policy, root)
    sampler.generation = replace(sampler.generation, max_tokens=sampled, max_num_seqs=8)
    with Environments(make, workers=1, deadline=20.0) as environments:
        sampler.episodes = Episodes(environments, Replies(policy.chat), Limits(8, sampled, 120))
        yield sampler, policy
        sampler.episodes = None
    sampler.weights.close()


def spans(completion: Completion) -> list[tuple[bool, list[int]]]:
    """The tokens of each turn, and whether the policy sampled them."""
    pairs = zip(completion.sampled.tolist(), completion.token_ids.tolist(), strict=True)
    return [(own, [token for _, token in span]) for own, span in groupby(pairs, lambda pair: pair[0])]


def differences(policy: Any, group: Group) -> torch.Tensor:
    """Learner's log-probs less those that came with the completions, of the tokens that were sampled."""
    packed = Packed.build([(group.prompt.token_ids, [c.token_ids for c in group.completions])])
    with torch.no_grad():
        expected = policy.logp(packed)
    own = torch.cat([c.sampled for c in group.completions])
    return (expected - torch.cat([c.logp_alpha for c in group.completions]))[own].abs()


def versions(completion: Completion) -> list[int]:
    return completion.versions[completion.sampled].tolist()


def hits(server: Server) -> tuple[float, float]:
    """Tokens that were looked for in the cache of prefixes, and those that were found."""
    told = server.send("GET", "/metrics").decode()
    found = [
        re.search(rf"^vllm:prefix_cache_{name}_total\S* (\S+)$", told, re.MULTILINE) for name in ("queries", "hits")
    ]
    return tuple(float(one[1]) if one else 0.0 for one in found)  # type: ignore[return-value]


def test_learner_and_server_agree_on_all_turns_after_each_sync(attached, model, tmp_path):
    with talking([attached], model, tmp_path) as (sampler, policy):
        check, turns = ParityCheck(ask(policy, 4), torch.float32), []
        for version in range(3):
            sampler.sync_weights(policy.weights, version)
            assert check(policy, sampler)["parity_mean"] < 1e-4
            for _, group in sampler.sample(ask(policy, 3), 4):
                assert differences(policy, group).max() < 2e-3
                for c in group.completions:
                    assert set(versions(c)) == {version}
                    assert c.outcome is not None
                    assert c.outcome.kind == "scored"
                    own = [tokens for sampled, tokens in spans(c) if sampled]
                    said = [tokens for sampled, tokens in spans(c) if not sampled]
                    assert c.turns[::2] == tuple(policy.chat.decode(tokens) for tokens in own)
                    replies = [re.findall(r"^\nuser: (\d+/\d+)\nassistant: $", policy.chat.decode(t)) for t in said]
                    assert replies == [[turn] for turn in c.turns[1::2]]
                    assert all(tokens[-1] == 1 for tokens in own[:-1])  # what ends a turn was sampled
                    assert not torch.isfinite(c.logp_alpha[~c.sampled]).any()  # what the environment says was not
                    turns.append(len(own))
            perturb(policy)
    assert max(turns) == 3


def test_the_server_finds_earlier_turns_in_its_cache(attached, model, tmp_path):
    with talking([attached], model, tmp_path, talkers.Endless) as (sampler, policy):
        sampler.sync_weights(policy.weights, 0)
        before = hits(attached)
        groups = [group for _, group in sampler.sample(ask(policy, 3), 4)]
        queries, found = (now - then for now, then in zip(hits(attached), before, strict=True))
    later = sum(len(spans(c)) // 2 for group in groups for c in group.completions)  # turns behind the first
    assert later > 5
    assert found > 0.3 * queries  # all but the newest turn, in whole blocks of 32 tokens


def test_turns_of_an_episode_span_weight_syncs(attached, model, tmp_path):
    with talking([attached], model, tmp_path, talkers.Endless) as (sampler, policy):
        sampler.in_flight, sampler.spans = "span", True
        sampler.sync_weights(policy.weights, 0)
        stream = sampler.sample(ask(policy, 4), 4)
        groups = [next(stream)]
        for version in (1, 2):
            perturb(policy)
            sampler.sync_weights(policy.weights, version)
        groups += stream
    seen = [versions(c) for _, group in groups for c in group.completions]
    assert all(labels == sorted(labels) and set(labels) <= {0, 1, 2} for labels in seen)
    assert any(len(set(labels)) > 1 for labels in seen)
    assert 2 in {label for labels in seen for label in labels}


@pytest.mark.long
def test_a_server_killed_in_the_middle_of_an_episode_is_brought_back(model, tmp_path):
    """A server of its own: the group under way is generated again, by the same weights."""
    server = start(model, tmp_path / "vllm.log")
    try:
        with talking([server], model, tmp_path, Slow) as (sampler, policy):
            perturb(policy)
            sampler.sync_weights(policy.weights, 1)
            sampler.scores([((5, 6, 7), [8, 9, 10])])
            threading.Timer(1.0, lambda: kill(server)).start()
            started = time.monotonic()
            ((_, group),) = sampler.sample(ask(policy, 1), 4)
            assert time.monotonic() - started > 2
            assert differences(policy, group).max() < 2e-3
            read = sampler.read()
        assert {version for c in group.completions for version in versions(c)} == {1}
        assert (read["recoveries"], read["regenerated"]) == (1, 1)
    finally:
        server.close()


class Slow(talkers.Endless):
    def reply(self, text: str) -> Any:
        time.sleep(0.3)
        return super().reply(text)


def run(model: Path, root: Path, server: Server, **sections: Any) -> Path:
    base: dict[str, Any] = {
        "vllm": {"urls": [server.url], "directory": str(root)},
        "sampling": {"sampler": "vllm", "max_tokens": 40, "max_prompt_tokens": 100},
        "environment": {"max_turns": 4, "max_tokens": 100},
        "evaluation": {"before_and_after": False},
        "schedule": {"batches": 3},
    }
    merged = {name: base.get(name, {}) | sections.get(name, {}) for name in base | sections}
    return train(tiny_settings(model, root, **merged)).run


@pytest.mark.parametrize(
    "in_flight", ["span", *(pytest.param(name, marks=pytest.mark.long) for name in ("finish", "regenerate"))]
)
def test_a_run_plays_games_and_is_replayed(attached, model, tmp_path, in_flight):
    directory = run(
        model, tmp_path, attached, task={"name": "guess_number", "largest": 9}, vllm={"in_flight": in_flight},
        schedule={"kind": "lagged", "v": 1, "batches": 4}, run={"save_every": 1},
    )  # fmt: skip
    rows, metrics = load_rollouts(directory), load_metrics(directory)
    assert {row["outcome"] for row in rows} == {"scored"}
    assert max(len(row["turns"]) for row in rows) > 1
    assert {line["lag_max"] for line in metrics} <= {0, 1}  # what is generated again may have no lag
    assert in_flight == "regenerate" or [line["lag_max"] for line in metrics][1:] == [1, 1, 1]
    assert all(line["parity_mean"] < 1e-3 for line in metrics)
    for row in rows:
        own = [version for version, sampled in zip(row["versions"], row["sampled"], strict=True) if sampled]
        assert own == sorted(own)
        assert in_flight == "span" or len(set(own)) == 1
    report = verify_run(directory, everything=True)
    assert report.differences == []
    assert "episodes" in {check.name for check in report.checks}


def test_tools_are_called_with_a_server(attached, model, tmp_path):
    with talking([attached], model, tmp_path, Calling) as (sampler, policy):
        sampler.sync_weights(policy.weights, 0)
        ((_, group),) = sampler.sample(ask(policy, 1), 4)
        assert differences(policy, group).max() < 2e-3
    said = [turn for c in group.completions for turn in c.turns[1::2]]
    assert set(said) == {"918"}


class Calling:
    """The calculator, for a policy that calls nothing by itself."""

    def start(self, prompt: Any, address: Any) -> Any:
        self.talking = ENVIRONMENT()
        return self.talking.start(prompt, address)

    def reply(self, text: str) -> Any:
        return self.talking.reply(
            '<tool_call>{"name": "calculate", "arguments": {"expression": "27 * 34"}}</tool_call>'
        )
