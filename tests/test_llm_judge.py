"""The reward llm_judge against a small server that answers, fails, hesitates and hangs."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from running import tiny_settings
from scoring import make_completion, score

from lagrpo.lifecycle.run import train
from lagrpo.rewards.llm_judge import LlmJudge, read_score
from lagrpo.rewards.reward import Reward, Rewards
from lagrpo.runs import load_rollouts
from lagrpo.types import Group, JsonObject, Outcome, Prompt
from lagrpo.verify import verify_run

KEY = "planted-key-of-the-judge"
SAID = {
    "silent": "I will not say.",
    "many": "Score: 2. No: score: 9",
    "high": "Score: 11",
    "thinking": "<think>A score: 9, hm",
    "cut": "score: 9, hm",
}


class Judging(BaseHTTPRequestHandler):
    """Does what the graded answer says; others get 8 of 10."""

    def do_POST(self) -> None:
        server: Any = self.server
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answer = request["messages"][-1]["content"].partition("[")[2].partition("]")[0]
        server.asked.append((self.path, self.headers["Authorization"], request))
        time.sleep(5.0 if answer == "hang" else 0.0)
        busy = (
            answer == "busy"
            and sum("[busy]" in str(earlier_request) for earlier_request in server.asked) < 3
        )
        status = 503 if busy else {"refused": 400, "broken": 500}.get(answer, 200)
        choice = {
            "message": {"content": SAID.get(answer, "Score: 8")},
            "finish_reason": "length" if answer == "cut" else "stop",
        }
        body = json.dumps({"choices": [choice]})
        self.send_response(status)
        self.end_headers()
        self.wfile.write(b"<html>" if answer == "malformed" else body.encode())

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    judging: Any = ThreadingHTTPServer(("127.0.0.1", 0), Judging)
    judging.asked, judging.daemon_threads = [], True
    judging.url = f"http://127.0.0.1:{judging.server_address[1]}/v1"
    threading.Thread(target=judging.serve_forever, args=(0.01,), daemon=True).start()
    yield judging
    judging.shutdown()
    judging.server_close()


def scored(url: str, *texts: str, deadline: float = 10.0, **options: Any) -> list[Outcome]:
    """The outcomes of these answers to a question in two turns, with the reference answer
    {completion}."""
    turns = ({"role": "system", "content": "Add."}, {"role": "user", "content": "1 + {low}?"})
    group = Group(Prompt(0, turns, "{completion}"), tuple(map(make_completion, texts)))
    judge_options: Any = {
        "url": url,
        "model": "m",
        "prompt": "{prompt}|[{completion}]|{answer}|{high}",
    } | options
    return score(
        Rewards((Reward(LlmJudge(**judge_options), name="judge"),)), [group], deadline=deadline
    )


def test_the_judge_reads_prompt_completion_and_answer_and_texts_hold_no_places(server, monkeypatch):
    monkeypatch.setenv("JUDGE_API_KEY", KEY)
    server.asked.clear()
    (outcome,) = scored(server.url, "{answer}", api_key_env="JUDGE_API_KEY", body={"seed": 3})
    assert outcome.reward == 0.8
    path, key, request = server.asked[0]
    assert (path, key) == ("/v1/chat/completions", f"Bearer {KEY}")
    question = "system: Add.\nuser: 1 + {low}?|[{answer}]|{completion}|10"
    assert request == {"model": "m", "messages": [{"role": "user", "content": question}], "seed": 3}


def test_the_last_score_counts_as_a_share_of_the_scale(server):
    (outcome,) = scored(server.url, "many", scale=[1, 11])
    assert outcome.reward == pytest.approx(0.8)


def test_judge_without_a_score_leaves_the_completion_unscored(server):
    reasons = {
        "silent": "no score from 0 to 10: 'I will not say.'",
        "high": "no score from 0 to 10",
        "thinking": "no score from 0 to 10",
        "cut": "is cut (finish_reason 'length')",
        "malformed": "/chat/completions: 200: <html>",
        "refused": "/chat/completions: 400: ",
        "broken": "too many 500 error",
    }
    *bad, good = scored(server.url, *reasons, "fine", retries=1, deadline=30.0)
    assert good.reward == 0.8
    for outcome, reason in zip(bad, reasons.values(), strict=True):
        assert (outcome.kind, reason in outcome.reason) == ("unscored", True), outcome.reason
    hung, good = scored(server.url, "hang", "fine", deadline=1.0)
    assert (hung.kind, "no reward within 1 s" in hung.reason, good.reward) == (
        "unscored",
        True,
        0.8,
    )


def test_the_judge_does_not_see_the_thinking_of_the_completion(server):
    server.asked.clear()
    scored(server.url, "<think>9</think>[fine]", "[fine]", prompt="{completion}")
    questions = {request["messages"][0]["content"] for _, _, request in server.asked}
    assert questions == {"[fine]"}


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        pytest.param("Score (0-10): 7", 7, id="scale before"),
        pytest.param("Score on a scale from 0 to 10: 7", 7, id="scale in words"),
        pytest.param("Score: 7/10", 7, id="of the largest"),
        pytest.param("8 out of 10", 8, id="in words"),
        pytest.param("Score: 7 (of 10)", 7, id="largest in brackets"),
        pytest.param("**9**", 9, id="number alone"),
        pytest.param("[[8]]", 8, id="number in brackets"),
        pytest.param("7.", 7, id="full stop"),
        pytest.param("Score: 1.5", 1.5, id="decimal"),
        pytest.param("Score: 10/10", 10, id="largest"),
        pytest.param("-3", -3, id="negative"),
        pytest.param('{"score": 7, "errors": 2}', 7, id="JSON"),
        pytest.param("Score: 7, because of 2 errors", 7, id="reason after it"),
        pytest.param("score: 9\nI changed my mind: score: 3", 3, id="last line"),
        pytest.param("Score: 7\nA score of 10 needs a proof.", None, id="other score after it"),
        pytest.param("Score: 1,5", None, id="decimal comma"),
        pytest.param("Score: 6 or 7", None, id="two numbers"),
        pytest.param("between 6 and 7", None, id="range in words"),
        pytest.param("Score: 6-7", None, id="range"),
        pytest.param("Rating 3 of 5 stars", None, id="other scale"),
        pytest.param("Score: 4 stars out of 5", None, id="other scale with a word"),
        pytest.param("Score: 7/9", None, id="fraction"),
        pytest.param("Score: 70%", None, id="percent"),
        pytest.param("Score: seven", None, id="word"),
        pytest.param("I counted 7 errors.", None, id="other number"),
        pytest.param("", None, id="empty"),
    ],
)
def test_score_is_the_one_number_that_can_be_meant(reply, score):
    assert read_score(reply, (0, 10)) == score


def test_busy_judge_is_asked_again_and_an_absent_one_leaves_unscored(server):
    server.asked.clear()
    assert scored(server.url, "busy")[0].reward == 0.8
    (outcome,) = scored("http://127.0.0.1:9/v1", "fine", retries=1)
    assert "http://127.0.0.1:9/v1/chat/completions: no answer" in outcome.reason


def test_run_with_a_judge_replays_without_asking_it_again(server, model, tmp_path):
    options = {"url": server.url, "model": "m"}
    rewards = [
        {"name": "right", "reward": "task"},
        {"name": "judge", "reward": "llm_judge", "weight": 0.5, "options": options},
    ]
    sections: JsonObject = {"eval": {"at_start": False}, "schedule": {"batches": 1}}
    sections["task"] = {
        "name": "sample_task:load_letters",
        "rewards": rewards,
        "reward_timeout": 20,
    }
    run = train(tiny_settings(model, tmp_path, **sections)).run
    assert {row["reward_judge"] for row in load_rollouts(run)} == {0.8}
    before = len(server.asked)
    assert verify_run(run, trust_run_code=True).differences == []
    assert len(server.asked) == before
