"""Reward `llm_judge`: a language model grades the answer, at any server with OpenAI's endpoint /chat/completions."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import urllib3

from lagrpo.errors import one_line
from lagrpo.rewards.reward import UnscorableError

TEMPLATE = """Here are a question, its reference answer, and an answer to grade.

Question:
{prompt}

Reference answer:
{answer}

Answer to grade:
{completion}

Grade the answer with a number from {low} to {high}: {low} if it is wrong, {high} if it is as good as the reference
answer. Say in a sentence why. Then end with one line, which says "Score: " and the number."""
_http, _threads = urllib3.PoolManager(maxsize=64), ThreadPoolExecutor(64)


@dataclass(frozen=True)
class LlmJudge:
    """Asks the model `model` of the server at `url` (with /v1) by the template `prompt`. The last match of the regular
    expression `score` in the reply is the score; the reward is the share of `scale` that it reaches. `timeout`: seconds
    of one try; `body`: further fields of the request."""

    url: str
    model: str
    prompt: str = TEMPLATE
    score: str = r"score\W*?(-?\d+(?:\.\d+)?)"
    scale: Sequence[float] = (0.0, 10.0)
    api_key_env: str | None = None
    retries: int = 3
    timeout: float = 30.0
    body: Mapping[str, Any] = field(default_factory=lambda: {"temperature": 0.0, "max_tokens": 512})
    repeats = False  # a server may give another value when it is called again

    def __post_init__(self) -> None:
        if not re.fullmatch(r"https?://[^\s@?#]+", self.url):
            raise ValueError(
                f"url = {self.url!r}: write http://host:port/v1; an API key goes into api_key_env"
            )
        if "{completion}" not in self.prompt or re.compile(self.score).groups != 1:
            raise ValueError(
                "prompt must contain {completion}, and score one group, around the number"
            )

    async def __call__(
        self, completion: str, answer: Any, prompt: Sequence[Mapping[str, Any]]
    ) -> float:
        low, high = self.scale
        question = "\n".join(f"{m['role']}: {m.get('content') or ''}" for m in prompt)
        places = {
            "completion": completion,
            "answer": answer,
            "low": f"{low:g}",
            "high": f"{high:g}",
        }
        places["prompt"] = question if len(prompt) > 1 else str(prompt[0].get("content") or "")
        asked = re.sub(r"\{(\w+)\}", lambda place: str(places.get(place[1], place[0])), self.prompt)
        said = await asyncio.get_running_loop().run_in_executor(_threads, self._ask, asked)
        found = re.findall(self.score, said, re.IGNORECASE)
        if not found or not low <= float(found[-1]) <= high:
            raise UnscorableError(
                f"the judge's reply has no score from {low:g} to {high:g}: {one_line(said, 120)!r}"
            )
        return (float(found[-1]) - low) / (high - low)

    def _ask(self, asked: str) -> str:
        if self.api_key_env and self.api_key_env not in os.environ:
            raise UnscorableError(
                f"the environment variable {self.api_key_env} (api_key_env) is not set"
            )
        headers = (
            {"Authorization": f"Bearer {os.environ[self.api_key_env]}"} if self.api_key_env else {}
        )
        request = {
            "model": self.model,
            "messages": [{"role": "user", "content": asked}],
            **self.body,
        }
        retry = urllib3.Retry(
            self.retries,
            status_forcelist=(408, 429, 500, 502, 503, 504),
            allowed_methods=None,
            backoff_factor=0.25,
            backoff_jitter=0.25,
        )
        url, said = f"{self.url.rstrip('/')}/chat/completions", ""
        try:
            reply = _http.request(
                "POST", url, json=request, headers=headers, retries=retry, timeout=self.timeout
            )
            said = f"{reply.status}: {reply.data.decode(errors='replace')}"
            return (
                str(reply.json()["choices"][0]["message"]["content"])
                if reply.status == 200
                else reply.json()[""]
            )
        except (urllib3.exceptions.HTTPError, ValueError, KeyError, IndexError, TypeError) as error:
            raise UnscorableError(
                f"{url}: {one_line(said or f'no answer: {error}', 240)}"
            ) from error
