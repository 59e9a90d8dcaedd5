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

from lagrpo.errors import one_line, parse_json
from lagrpo.rewards.reward import UnscorableError
from lagrpo.rewards.texts import read_answer, text_after_thinking

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
ENDED = ("stop", "eos_token", "stop_sequence", None)
"""A reply has ended if its finish_reason is one of these; some servers give none."""

RETRIED_STATUSES = (408, 429, 500, 502, 503, 504)
_http = urllib3.PoolManager(maxsize=MAX_CONCURRENT_REQUESTS)
_threads = ThreadPoolExecutor(MAX_CONCURRENT_REQUESTS)


_NUMBER = r"-?(?:\d+(?:\.\d+)?|\.\d+)"
# What may stand between the word "score" and the number.
_GAP = r"(?:(?!\.\s)\W|\b(?:is|be|of|on|for|from|a|the|this|answer|scale|would|should)\b)*?"
_STATED = re.compile(rf"\b(?:score|grade|rating)\b{_GAP}({_NUMBER})", re.IGNORECASE)
_ALONE = re.compile(rf"[^\w.-]*({_NUMBER})[^\w%]*")
# Behind a number: the rest of it, or another number that may be meant as well.
_UNCLEAR = re.compile(
    r"[.,]?\d|[A-Za-z]| ?%|[*_\s)\]]*(?:[-–/,;|&+(]|\b(?:or|and|to)\b)[*_\s(]*\.?\d"
    r"|[*_\s)\]]*(?:\b[a-z]+ )?\b(?:out )?of\b[*_\s(]*\.?\d"
)
_REST_OF_LINE = re.compile(r"[^\w\n]*$")


@dataclass(frozen=True)
class LlmJudge:
    """A reward function that asks the model `model` for a grade.

    `read_score` finds the score in the reply. With the option `score`, a regular expression, the
    score is its last match. The judge's thinking does not count, and neither does the thinking of
    the completion that it grades. The reward is the share of `scale` that the score reaches: 0 for
    its low end, 1 for its high end. Raises ValueError for options that cannot work.
    """

    url: str  # of the server, with /v1
    model: str
    prompt: str = TEMPLATE  # with the fields of TEMPLATE
    score: str | None = None  # a regular expression with one group, around the number
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
        has_one_group = self.score is None or re.compile(self.score).groups == 1
        if "{completion}" not in self.prompt or not has_one_group:
            raise ValueError(
                "prompt must contain {completion}, and score one group, around the number"
            )

    async def __call__(
        self,
        completion: str,
        answer: object,
        prompt: Sequence[Mapping[str, object]],
        prefix: str = "",
    ) -> float:
        low, high = self.scale
        template_values = {
            "completion": text_after_thinking(completion, prefix),
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
        score = self._find_score(read_answer(reply))
        if score is None or not low <= score <= high:
            raise UnscorableError(
                f"the judge's reply has no score from {low:g} to {high:g}: {one_line(reply, 120)!r}"
            )
        return (score - low) / (high - low)

    def _find_score(self, reply: str) -> float | None:
        """Returns the score in the judge's reply; None without one."""
        if self.score is None:
            return read_score(reply, self.scale)
        scores = re.findall(self.score, reply, re.IGNORECASE)
        return float(scores[-1]) if scores else None

    def _ask(self, question: str) -> str:
        """Returns the text of the model's reply. Raises UnscorableError if it is cut or missing."""
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
            choice = parse_json(response.data)["choices"][0]
            reason = choice.get("finish_reason")
            if reason not in ENDED:
                raise UnscorableError(f"the judge's reply is cut (finish_reason {reason!r})")
            return str(choice["message"]["content"])
        except (urllib3.exceptions.HTTPError, ValueError, KeyError, IndexError, TypeError) as error:
            problem = response_text or f"no answer: {error}"
            raise UnscorableError(f"{url}: {one_line(problem, 240)}") from error


def read_score(reply: str, scale: Sequence[float]) -> float | None:
    """Returns the score that a judge's reply, in normal form, states.

    Returns None unless exactly one number can be meant. It is the number after "score", "grade" or
    "rating" at the end of the last line, as TEMPLATE asks for; else the number after every such
    word; else the number that is the whole reply. The ends of the scale do not count, as in
    "Score (0-10): 7" and "7 out of 10". A number next to another one is none: "6 or 7", "1,5",
    "3 of 5".

    >>> read_score("Score (0-10): **7**", (0, 10)), read_score("Score: 1,5", (0, 10))
    (7.0, None)
    """
    low, high = (re.escape(f"{end:g}") for end in scale)
    high += r"(?![\d,]|\.\d)"  # not the beginning of another number
    reply = re.sub(rf"(?<![\d.,-]){low} ?(?:[-–,]|to|and) ?{high}|\((?:out )?of {high}", "", reply)
    reply = re.sub(
        rf"(\d[*_ \])]*\(?(?:[a-z]+ )??)(?:/|(?:out )?of) ?[*_]*{high}", r"\1", reply
    ).strip()
    statements = list(_STATED.finditer(reply))
    if not statements:
        alone = _ALONE.fullmatch(reply)
        return float(alone[1]) if alone is not None else None
    last = statements[-1]
    if _REST_OF_LINE.match(reply, last.end()):
        statements = [last]
    if any(_UNCLEAR.match(reply, statement.end()) for statement in statements):
        return None
    scores = {float(statement[1]) for statement in statements}
    return scores.pop() if len(scores) == 1 else None


def _conversation_text(messages: Sequence[Mapping[str, object]]) -> str:
    """Returns the text of a single message, or of several messages with their roles."""
    if len(messages) > 1:
        return "\n".join(f"{turn['role']}: {turn.get('content') or ''}" for turn in messages)
    return str(messages[0].get("content") or "")
