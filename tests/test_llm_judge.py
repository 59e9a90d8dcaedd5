"""The reward llm_judge against a small server of our own that answers, refuses, fails, babbles, dawdles and hangs."""

from __future__ import annotations

import json
import math
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import torch
from running import tiny_settings
from tiny import save_tiny

from lagrpo.errors import SettingsError
from lagrpo.replay import verify_run
from lagrpo.runs import load_rollouts
from lagrpo.settings.toml import load_settings
from lagrpo.tasks import load_task
from lagrpo.tasks.base import Unjudgeable
from lagrpo.tasks.llm_judge import LlmJudge
from lagrpo.tasks.rewards import Answer, Reward, Rewards
from lagrpo.training.checks import check_settings
from lagrpo.training.run import train
from lagrpo.types import Completion, Group, Outcome, Prompt
from lagrpo.verify import Verifier

KEY = "planted-key-of-the-judge"


class Judging(BaseHTTPRequestHandler):
    """Does what the graded answer says; the others get 8 of 10."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        server: Any = self.server
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        asked = request["messages"][-1]["content"]
        answer = asked.partition("[")[2].partition("]")[0]
        with server.lock:
            server.asked.append((self.path, dict(self.headers), request))
            server.tries[answer] = server.tries.get(answer, 0) + 1
            tries = server.tries[answer]
        if answer == "hang":
            server.end.wait(30)
        if answer == "slow":
            time.sleep(0.5)
        if answer == "dies":
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        status = {"refused": 400, "broken": 500, "denied": 401}.get(answer, 200)
        status = 503 if answer == "busy" and tries < 3 else status
        said = {"silent": "I will not say.", "many": "Score: 2. No: score: 9", "high": "Score: 11"}.get(
            answer, "Score: 8"
        )
        body = json.dumps({"choices": [{"message": {"content": said}}]})
        body = "<html>" if answer == "malformed" else body
        body = json.dumps({"error": f"no, {self.headers['Authorization']}"}) if status == 401 else body
        if answer == "trickles":
            self.trickle(body)
        else:
            self.send(status, body)

    def send(self, status: int, body: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def trickle(self, body: str) -> None:
        """A byte now and then: no single read takes long."""
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        for letter in body:
            if self.server.end.wait(0.2):  # type: ignore[attr-defined]
                return
            with suppress(BrokenPipeError, ConnectionResetError):
                self.wfile.write(letter.encode())
                self.wfile.flush()

    def log_message(self, *args: Any) -> None: ...


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    judging: Any = ThreadingHTTPServer(("127.0.0.1", 0), Judging)
    judging.asked, judging.tries, judging.lock, judging.end = [], {}, threading.Lock(), threading.Event()
    judging.daemon_threads = True
    judging.url = f"http://127.0.0.1:{judging.server_address[1]}/v1"
    thread = threading.Thread(target=judging.serve_forever, daemon=True)
    thread.start()
    yield judging
    judging.end.set()
    judging.shutdown()
    judging.server_close()
    thread.join(10)


def judge(server: Any, **changes: Any) -> LlmJudge:
    return LlmJudge(**{"url": server.url, "model": "m", "prompt": "{prompt}|[{completion}]|{gold}"} | changes)


def ask(server: Any, text: str, seconds: float = 10.0, **changes: Any) -> float:
    answer = Answer(text, {"a": 1}, ({"role": "user", "content": "What is {gold}?"},))
    return judge(server, **changes)(answer, seconds)


def test_the_judge_reads_prompt_completion_and_gold_and_nothing_that_they_say_is_a_place(server):
    assert ask(server, "{gold}", system="Be strict.", body={"seed": 3}, temperature=0.5) == 0.8
    path, headers, request = server.asked[-1]
    assert path == "/v1/chat/completions"
    assert "Authorization" not in headers
    assert [m["content"] for m in request["messages"]] == ["Be strict.", "What is {gold}?|[{gold}]|{'a': 1}"]
    assert (request["model"], request["seed"], request["temperature"], request["max_tokens"]) == ("m", 3, 0.5, 512)


def test_several_messages_are_shown_with_their_roles(server):
    turns = ({"role": "system", "content": "S"}, {"role": "user", "content": "U"})
    judge(server)(Answer("x", "g", turns), 10.0)
    assert server.asked[-1][2]["messages"][-1]["content"] == "system: S\nuser: U|[x]|g"


@pytest.mark.parametrize(
    ("changes", "value"),
    [
        ({"scale": (0, 20)}, 0.4),
        ({"scale": (6, 10)}, 0.5),
        ({"score": r"\d"}, 0.8),
        ({"score": r"sc(o)re: (?P<n>8)", "scale": (-1, 1)}, None),
    ],
)
def test_the_score_is_parsed_and_put_on_the_scale(server, changes, value):
    if value is None:
        with pytest.raises(Unjudgeable, match="has no score: 'Score: 8'"):
            ask(server, "fine", **changes)
    else:
        assert ask(server, "fine", **changes) == value


def test_the_last_score_counts(server):
    assert ask(server, "many") == 0.9


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("silent", "the judge's answer has no score: 'I will not say.'"),
        ("high", "the judge's score is 11, outside of its scale from 0 to 10"),
        ("malformed", "the judge's answer is malformed: '<html>'"),
        ("refused", r"/chat/completions refused \(400\)"),
    ],
)
def test_what_is_no_score_is_no_reward(server, text, reason):
    with pytest.raises(Unjudgeable, match=reason):
        ask(server, text)
    assert server.tries[text] == 1


def test_failures_are_tried_again_as_often_as_said(server):
    assert ask(server, "busy") == 0.8
    assert server.tries["busy"] == 3
    with pytest.raises(Unjudgeable, match=r"it answered with 500 \(within 10 s, 2 of 2 tries\)"):
        ask(server, "broken", retries=1)
    with pytest.raises(Unjudgeable, match=r"no answer: .*1 of 1 tries"):
        ask(server, "dies", retries=0)


@pytest.mark.parametrize("text", ["hang", "trickles"])
def test_no_judge_is_waited_for_longer_than_the_deadline(server, text):
    started = time.monotonic()
    with pytest.raises(Unjudgeable, match=r"no answer in time \(within 0\.5 s"):
        ask(server, text, seconds=0.5)
    assert time.monotonic() - started < 3


def test_a_server_that_is_not_there():
    with pytest.raises(Unjudgeable, match=r"http://127.0.0.1:9/v1: no answer: .*refused.*3 of 3 tries"):
        LlmJudge("http://127.0.0.1:9/v1", "m", retries=2)(Answer("a", "b"), 5.0)


def test_the_key_comes_from_the_environment_and_stands_nowhere_else(server, monkeypatch):
    monkeypatch.setenv("JUDGE_API_KEY", KEY)
    assert ask(server, "fine", api_key_env="JUDGE_API_KEY") == 0.8
    assert server.asked[-1][1]["Authorization"] == f"Bearer {KEY}"
    outcome = judged(server, "denied", api_key_env="JUDGE_API_KEY")[0]
    assert outcome.kind == "unscored"
    assert 'refused (401; its API key is looked for in $JUDGE_API_KEY): {"error": "no, Bearer ***"}' in outcome.reason
    monkeypatch.delenv("JUDGE_API_KEY")
    with pytest.raises(Unjudgeable, match=r"environment variable JUDGE_API_KEY .*is not set"):
        ask(server, "fine", api_key_env="JUDGE_API_KEY")


def judged(server: Any, *texts: str, deadline: float = 2.0, **changes: Any) -> list[Outcome]:
    none = torch.zeros(0)
    completions = tuple(Completion(none, none, none, finished=True, text=text) for text in texts)
    several = Rewards((Reward("judge", judge(server, **changes), takes="answer", deadline=deadline),))
    with Verifier(several, workers=1, max_without_reward=1.0) as verifier:
        (found,) = verifier.judge([Group(Prompt(0, ({"role": "user", "content": "?"},), "g"), completions)])
    return [c.outcome for c in found.completions if c.outcome is not None]


def test_a_group_is_judged_side_by_side_and_failures_are_unscored_with_their_reasons(server):
    started = time.monotonic()
    found = judged(server, *["slow"] * 12, "hang", "silent", "fine")
    assert time.monotonic() - started < 10  # one after the other the slow ones alone take 6, and the start of a worker
    assert [o.reward for o in found] == [0.8] * 12 + [None, None, 0.8]
    assert found[12].reason.endswith("no answer in time (within 2 s, 1 of 4 tries) (reward 'judge')")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "m"}, "options.url: Field required"),
        ({"url": "ftp://x", "model": "m"}, "is no URL; write http://host:port/v1"),
        ({"url": "http://me:planted@x/v1", "model": "m"}, "api_key_env names"),
        ({"url": "http://x/v1", "model": "m", "prompt": "{compltion}"}, "prompt has {compltion}; there are {prompt}"),
        ({"url": "http://x/v1", "model": "m", "prompt": "{gold}"}, "does not have {completion}"),
        ({"url": "http://x/v1", "model": "m", "score": "("}, "no regular expression"),
        ({"url": "http://x/v1", "model": "m", "scale": [1, 1]}, "scale goes from"),
        ({"url": "http://x/v1", "model": "m", "scale": [0, math.inf]}, "are finite numbers"),
        ({"url": "http://x/v1#token=planted", "model": "m"}, "a query or a fragment"),
        ({"url": "http://x/v1\n", "model": "m"}, "has white space in it"),
        ({"url": "http://x/v1", "model": "m", "api_key_env": "JUDGE"}, "has KEY, TOKEN or SECRET as a word"),
        ({"url": "http://x/v1", "model": "m", "retrys": 2}, "Did you mean 'retries'"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_loaded(options, message):
    entry = {"name": "judge", "reward": "llm_judge", "options": options}
    with pytest.raises(SettingsError, match=message) as refused:
        check_settings(load_settings({"task": {"rewards": [{"name": "a", "reward": "task"}, entry]}}))
    assert "planted" not in str(refused.value)


@pytest.mark.usefixtures("shared_templates")
def test_a_run_with_a_judge_replays_without_asking_it_again(server, tmp_path):
    options = {"url": server.url, "model": "m", "prompt": "|[{completion}]|"}
    entries = [
        {"name": "letters", "reward": "task"},
        {"name": "judge", "reward": "llm_judge", "weight": 0.5, "options": options, "deadline": 20},
    ]
    task = {"name": "sample_task:load_letters", "rewards": entries}
    given = tiny_settings(save_tiny(tmp_path / "model"), tmp_path, task=task, schedule={"batches": 1})
    result = train(given)
    rows = load_rollouts(result.run)
    assert {row["reward_judge"] for row in rows} == {0.8}
    assert all(row["reward"] == pytest.approx(row["reward_letters"] + 0.4) for row in rows)
    before = len(server.asked)
    report = verify_run(result.run, None)
    assert report.differences == []
    assert len(server.asked) == before
    assert any("a server gave them" in str(skipped) for skipped in report.skipped)


def test_the_judge_of_a_task_takes_its_default_prompt():
    entry = {"name": "judge", "reward": "llm_judge", "options": {"url": "http://x/v1", "model": "m"}}
    several = load_task(load_settings({"task": {"rewards": [entry]}}).task, 0).judge
    assert isinstance(several, Rewards)
    asked = several.of[0].function._request(Answer("it is 4", "4", ({"role": "user", "content": "2 + 2?"},)))
    text = asked["messages"][0]["content"]
    assert "2 + 2?" in text
    assert "it is 4" in text
    assert "from 0 to 10: 0 if it is wrong, 10 if" in text
