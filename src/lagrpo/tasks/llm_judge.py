"""Reward `llm_judge`: a language model grades the answer, over HTTP.

Any server with OpenAI's endpoint /chat/completions will do: a vLLM server that `lagrpo serve` started, a provider. A
judge that cannot be reached, answers too late or gives no score leaves the completion unscored, with the reason; it
never means 0. The worker processes of the verifier ask it: for all completions of a group side by side.
"""

from __future__ import annotations

import functools
import json
import math
import os
import random
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import urllib3

from lagrpo.errors import one_line
from lagrpo.exchange import exchange, find_cause
from lagrpo.redaction import is_secret
from lagrpo.tasks.base import Unjudgeable
from lagrpo.tasks.rewards import Answer
from lagrpo.untrusted import parse_json

TEMPLATE = """\
Here are a question, its reference answer, and an answer to grade.

Question:
{prompt}

Reference answer:
{gold}

Answer to grade:
{completion}

Grade the answer with a number from {low} to {high}: {low} if it is wrong, {high} if it is as good as the reference
answer. Say in a sentence why. Then end with one line, which says "Score: " and the number."""
SCORE = r"score\W*(-?\d+(?:\.\d+)?)"
AGAIN = {408, 409, 425, 429, 500, 502, 503, 504, 529}
"""Answers after which the same request may succeed."""
LONGEST = 1 << 20  # bytes of an answer
LAST_TRY = 0.05  # seconds: with less left, nothing is asked again
_PLACES = re.compile(r"\{([a-z_]+)\}")
_KNOWN = ("prompt", "completion", "gold", "low", "high")


@dataclass(frozen=True)
class LlmJudge:
    """Asks the model `model` of the server at `url` (with /v1, as clients of OpenAI have it) by the template `prompt`,
    in which {prompt}, {completion}, {gold}, {low} and {high} stand for what is graded and for the ends of `scale`. The
    score is the last place in the answer that the regular expression `score` matches, in upper or lower case: its first
    group, or all of it without one. The reward is the share of the scale that it reaches. `api_key_env` names the
    environment variable with the API key; `body` has further fields of the request."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - pydantic's name for how options are checked
    takes = "answer"
    side_by_side = True

    url: str
    model: str
    prompt: str = TEMPLATE
    system: str | None = None
    score: str = SCORE
    scale: tuple[float, float] = (0.0, 10.0)
    api_key_env: str | None = None
    retries: int = 3
    max_tokens: int = 512
    temperature: float = 0.0
    body: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_url(self.url)
        places = set(_PLACES.findall(self.prompt))
        if unknown := sorted(places - set(_KNOWN)):
            raise ValueError(f"prompt has {{{unknown[0]}}}; there are {', '.join(f'{{{name}}}' for name in _KNOWN)}")
        if "completion" not in places:
            raise ValueError("prompt does not have {completion}: the judge would not see what it grades")
        if not all(map(math.isfinite, (*self.scale, self.temperature))):
            raise ValueError(f"scale = {self.scale} and temperature = {self.temperature} are finite numbers")
        if not self.scale[0] < self.scale[1]:
            raise ValueError(f"scale goes from the least to the greatest score, not {self.scale}")
        if self.retries < 0 or self.max_tokens < 1 or self.temperature < 0:
            raise ValueError("retries and temperature are at least 0, max_tokens is at least 1")
        if self.api_key_env is not None and not is_secret(self.api_key_env):
            raise ValueError(
                f"api_key_env = {self.api_key_env!r}: a variable whose name has KEY, TOKEN or SECRET as a word is kept "
                "out of logs and records; give the key to one of such a name"
            )
        try:
            re.compile(self.score)
        except re.error as error:
            raise ValueError(f"score = {self.score!r} is no regular expression: {error}") from error

    def __call__(self, answer: Answer, seconds: float) -> float:
        """The reward, within so many seconds. Raises Unjudgeable where there is none."""
        said = self._ask(json.dumps(self._request(answer)).encode(), seconds)
        matches = list(re.finditer(self.score, said, re.IGNORECASE))
        found = (matches[-1][1] if matches[-1].re.groups else matches[-1][0]) if matches else None
        try:
            score = float(found or "")
        except ValueError:
            raise Unjudgeable(f"the judge's answer has no score: {one_line(said, 120)!r}") from None
        low, high = self.scale
        if not low <= score <= high:
            raise Unjudgeable(f"the judge's score is {score:g}, outside of its scale from {low:g} to {high:g}")
        return (score - low) / (high - low)

    def _request(self, answer: Answer) -> dict[str, Any]:
        """All places are filled in one pass, so that none in a completion's text is."""
        low, high = self.scale
        texts = {"prompt": shown(answer), "completion": answer.text, "gold": str(answer.gold)}
        texts |= {"low": f"{low:g}", "high": f"{high:g}"}
        asked = {"role": "user", "content": _PLACES.sub(lambda place: texts[place[1]], self.prompt)}
        system = [{"role": "system", "content": self.system}] if self.system else []
        own = {"max_tokens": self.max_tokens, "temperature": self.temperature}
        return {"model": self.model, "messages": [*system, asked], **own, **self.body}

    def _ask(self, request: bytes, seconds: float) -> str:
        """What the judge says. Raises Unjudgeable with what went wrong the last time."""
        end, wrong, tried = time.monotonic() + seconds, "", 0
        while tried <= self.retries and (not tried or _rest(tried, end)):
            said, wrong = self._try(request, max(LAST_TRY, end - time.monotonic()))
            tried += 1
            if said is not None:
                return said
        raise Unjudgeable(f"{self.url}: {wrong} (within {seconds:g} s, {tried} of {1 + self.retries} tries)")

    def _try(self, request: bytes, seconds: float) -> tuple[str | None, str]:
        """What the judge says, or None and what went wrong, where another try may do better."""
        url = f"{self.url.rstrip('/')}/chat/completions"
        try:
            status, body = exchange(_pool(self._key()), "POST", url, request, seconds, LONGEST)
        except urllib3.exceptions.HTTPError as error:
            nobody = isinstance(error, urllib3.exceptions.NewConnectionError)  # a timeout, too, by its class
            late = isinstance(error, urllib3.exceptions.TimeoutError) and not nobody
            return None, "no answer in time" if late else f"no answer: {find_cause(error)}"
        if status in AGAIN:
            return None, f"it answered with {status}"
        if status != 200:
            key = f"; its API key is looked for in ${self.api_key_env}" if status in (401, 403) else ""
            raise Unjudgeable(f"{url} refused ({status}{key}): {one_line(body.decode(errors='replace'), 160)}")
        return read_answer(body), ""

    def _key(self) -> str | None:
        if self.api_key_env is None:
            return None
        if not (key := os.environ.get(self.api_key_env)):
            raise Unjudgeable(f"the environment variable {self.api_key_env} with the judge's API key is not set")
        return key


def read_answer(body: bytes) -> str:
    """The text in the JSON of a completed chat. Raises Unjudgeable for what is none."""
    try:
        said = parse_json(body.decode())["choices"][0]["message"]["content"]
    except (ValueError, KeyError, IndexError, TypeError):
        raise Unjudgeable(
            f"the judge's answer is malformed: {one_line(body.decode(errors='replace'), 120)!r}"
        ) from None
    if not isinstance(said, str):
        raise Unjudgeable("the judge's answer has no text")
    return said


def shown(answer: Answer) -> str:
    """The prompt as a text: its one message, or lines of `role: content`."""
    turns: list[Mapping[str, Any]] = list(answer.prompt)
    if len(turns) == 1:
        return str(turns[0].get("content") or "")
    return "\n".join(f"{turn['role']}: {turn.get('content') or ''}" for turn in turns)


def check_url(url: str) -> None:
    """Raise ValueError for a URL that is none, or has a secret in it."""
    parts = urlsplit(url)
    if not url.isprintable() or " " in url:
        raise ValueError(f"url = {url!r} has white space in it")
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ValueError(
            f"url = {url!r} has a user, a password, a query or a fragment, which would be on the disk; an API key goes "
            "into the environment variable that api_key_env names"
        )
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"url = {url!r} is no URL; write http://host:port/v1")
    _ = parts.port  # raises ValueError for a number that is no port


def _rest(tried: int, end: float) -> bool:
    """Wait before another try, longer each time; False where no time would be left for it."""
    pause = 0.25 * 2**tried * random.uniform(0.5, 1.0)
    if time.monotonic() + pause + LAST_TRY > end:
        return False
    time.sleep(pause)
    return True


@functools.cache
def _pool(key: str | None) -> urllib3.PoolManager:
    """The connections of this process that use an API key."""
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    return urllib3.PoolManager(maxsize=64, block=False, retries=False, headers=headers)
