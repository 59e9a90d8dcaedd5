"""Reward `llm_judge`: a language model grades the answer.

The server of the model may be any that has OpenAI's endpoint /chat/completions.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

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
answer. Say in a sentence why. Then end with one line, which says "Score: " and the number."""  # noqa: E501  lines of a prompt

MAX_CONCURRENT_REQUESTS = 64
RETRIED_STATUSES = (408, 429, 500, 502, 503, 504)
_http = urllib3.PoolManager(maxsize=MAX_CONCURRENT_REQUESTS)
_threads = ThreadPoolExecutor(MAX_CONCURRENT_REQUESTS)


@dataclass(frozen=True)
class LlmJudge:
    """A reward function that asks the model `model` for a grade.

    The last match of the regular expression `score` in the reply is the score. The reward is the
    share of `scale` that the score reaches: 0 for its low end, 1 for its high end. Raises
    ValueError for options that cannot work.
    """

    url: str  # of the server, with /v1
    model: str
    prompt: str = TEMPLATE  # with the fields of TEMPLATE
    score: str = r"score\W*?(-?\d+(?:\.\d+)?)"
    scale: Sequence[float] = (0.0, 10.0)
    api_key_env: str | None = None  # the environment variable that holds the API key
    retries: int = 3
    timeout: float = 30.0  # seconds of one try
    # Further fields of the request.
    body: Mapping[str, object] = field(
        default_factory=lambda: {"temperature": 0.0, "max_tokens": 512}
    )
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
        self, completion: str, answer: object, prompt: Sequence[Mapping[str, object]]
    ) -> float:
        low, high = self.scale
        template_values = {
            "completion": completion,
            "answer": answer,
            "low": f"{low:g}",
            "high": f"{high:g}",
            "prompt": _conversation_text(prompt),
        }
        # One pass, so that braces in the completion or the answer stay as they are.
        question = re.sub(
            r"\{(\w+)\}",
            lambda match: str(template_values.get(match[1], match[0])),
            self.prompt,
        )
        reply = await asyncio.get_running_loop().run_in_executor(_threads, self._ask, question)
        scores = re.findall(self.score, reply, re.IGNORECASE)
        if not scores or not low <= float(scores[-1]) <= high:
            raise UnscorableError(
                f"the judge's reply has no score from {low:g} to {high:g}: {one_line(reply, 120)!r}"
            )
        return (float(scores[-1]) - low) / (high - low)

    def _ask(self, question: str) -> str:
        """Returns the text of the model's reply. Raises UnscorableError without a reply."""
        headers = {}
        if self.api_key_env:
            if self.api_key_env not in os.environ:
                raise UnscorableError(
                    f"the environment variable {self.api_key_env} (api_key_env) is not set"
                )
            headers["Authorization"] = f"Bearer {os.environ[self.api_key_env]}"
        request = {
            "model": self.model,
            "messages": [{"role": "user", "content": question}],
            **self.body,
        }
        retry = urllib3.Retry(
            self.retries,
            status_forcelist=RETRIED_STATUSES,
            allowed_methods=None,  # any method: urllib3 does not repeat POST by default
            backoff_factor=0.25,
            backoff_jitter=0.25,
        )
        url = f"{self.url.rstrip('/')}/chat/completions"
        response_text = ""
        try:
            response = _http.request(
                "POST", url, json=request, headers=headers, retries=retry, timeout=self.timeout
            )
            response_text = f"{response.status}: {response.data.decode(errors='replace')}"
            if response.status != 200:
                raise ValueError("the server refused the request")
            return str(response.json()["choices"][0]["message"]["content"])
        except (urllib3.exceptions.HTTPError, ValueError, KeyError, IndexError, TypeError) as error:
            problem = response_text or f"no answer: {error}"
            raise UnscorableError(f"{url}: {one_line(problem, 240)}") from error


def _conversation_text(messages: Sequence[Mapping[str, object]]) -> str:
    """Returns the text of a single message, or of several messages with their roles."""
    if len(messages) > 1:
        return "\n".join(f"{turn['role']}: {turn.get('content') or ''}" for turn in messages)
    return str(messages[0].get("content") or "")
