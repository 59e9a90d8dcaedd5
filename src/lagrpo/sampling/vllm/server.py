"""One vLLM server over HTTP: token ids in, token ids out, a deadline on every answer.

Written for vLLM 0.32 and later, started with VLLM_SERVER_DEV_MODE=1 (pausing, weights) and --enable-scale-out (the
endpoint /inference/v1/generate, which takes and gives token ids and says which version of the weights sampled each
token).
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import urllib3

GENERATE = "/inference/v1/generate"
KEY = "LAGRPO_VLLM_API_KEY"  # the environment variable with the API key of servers that run already
NO_LOGPROB = -9000.0  # vLLM writes -9999 where a log-prob is -inf
HOW_TO_START = "start it with `lagrpo serve MODEL`, or with VLLM_SERVER_DEV_MODE=1 and --enable-scale-out"


class SamplerError(RuntimeError):
    """The servers cannot go on generating; the message says which, why, and what to do."""


class UnreachableError(SamplerError):
    """No answer: nobody listens, the connection broke, the deadline passed, or the server failed inside. Worth another
    try once the server is up again."""


class RefusedError(SamplerError):
    """The server understood and said no: trying again would not help."""


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds to wait: `start` until a server is healthy, `request` for the completions of a group, `sync` until a
    server has loaded weights, `control` for everything that should take no time."""

    start: float = 600.0
    request: float = 600.0
    sync: float = 300.0
    control: float = 30.0

    def __str__(self) -> str:
        return (
            f"{self.start:g} s to start, {self.request:g} s for a group, {self.sync:g} s to load weights, "
            f"{self.control:g} s for anything else"
        )


@dataclass(frozen=True, slots=True)
class Generated:
    """One completion as the server gave it: token ids, log-probs, (version label, first token, end) of each span,
    why it ended ("stop", "length", "abort" …)."""

    token_ids: list[int]
    logp: list[float]
    spans: list[tuple[str, int, int]]
    end: str


class Server:
    """The server at `url`, called with the API key `key` where it wants one."""

    def __init__(self, url: str, key: str | None, deadlines: Deadlines, connections: int = 64) -> None:
        self.url, self.deadlines = url.rstrip("/"), deadlines
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self._pool = urllib3.PoolManager(maxsize=connections, block=False, retries=False, headers=headers)

    def __str__(self) -> str:
        return self.url

    def call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        deadline: float | None = None,
        again: bool = True,
    ) -> Any:
        """The JSON that the server answers. A connection that the server closed before it answered is opened once more
        (it closes idle ones, and those of requests that failed), unless the request must not come twice: `again`.

        Raises:
            UnreachableError: see there. RefusedError: 4xx, with what the server said.
        """
        seconds = self.deadlines.control if deadline is None else deadline
        timeout = urllib3.Timeout(connect=min(10.0, seconds), read=seconds)
        content = None if body is None else json.dumps(body).encode()
        try:
            answer = self._pool.request(method, self.url + path, body=content, timeout=timeout)
        except urllib3.exceptions.ProtocolError as error:
            if again:
                return self.call(method, path, body, deadline, again=False)
            raise UnreachableError(f"{self.url} broke off the connection: {_cause(error)}") from error
        except urllib3.exceptions.ReadTimeoutError as error:
            raise UnreachableError(f"{self.url}{path} did not answer within {seconds:g} s") from error
        except urllib3.exceptions.HTTPError as error:
            raise UnreachableError(f"{self.url} cannot be reached: {_cause(error)}; is a server up there?") from error
        if answer.status == 200:
            return answer.json() if answer.data else None
        self._refuse(path, answer.status, answer.data.decode(errors="replace"))

    def _refuse(self, path: str, status: int, text: str) -> None:
        said = _message(text)
        if status == 401:
            raise RefusedError(f"{self.url} does not accept the API key; set LAGRPO_VLLM_API_KEY to the server's")
        if status in (404, 405):
            raise RefusedError(f"{self.url} has no {path}: {HOW_TO_START}")
        if status >= 500:
            raise UnreachableError(f"{self.url}{path} failed inside ({status}): {said}")
        raise RefusedError(f"{self.url}{path} refused ({status}): {said}")

    def healthy(self) -> bool:
        """Whether the server says that it can work."""
        try:
            self.call("GET", "/health", deadline=min(5.0, self.deadlines.control))
        except UnreachableError:
            return False
        return True

    def wait(self, seconds: float) -> None:
        """Until the server is healthy. Raises UnreachableError after that many seconds."""
        end = time.monotonic() + seconds
        while not self.healthy():
            if time.monotonic() > end:
                raise UnreachableError(f"{self.url} was not healthy within {seconds:g} s; is the server running?")
            time.sleep(min(0.5, seconds / 10))

    def revive(self) -> None:
        """After a failure: wait until somebody has brought the server back. Raises UnreachableError."""
        self.wait(self.deadlines.start)

    def close(self) -> None:
        """Let go of the connections; the server runs on, as somebody else started it."""
        self._pool.clear()

    def keep_log(self, path: Path) -> None:
        """Where the log goes, of a server of our own."""

    def model(self) -> dict[str, Any]:
        """What it serves: `root` (the path or id it was started with), `max_model_len`. Raises RefusedError for a wrong
        API key."""
        return self.call("GET", "/v1/models")["data"][0]

    def facts(self) -> dict[str, Any]:
        """model_config and parallel_config of the server. Raises RefusedError where it is not in development mode."""
        return self.call("GET", "/server_info?config_format=json")["vllm_config"]

    def tokenize(self, text: str) -> list[int]:
        """Its own tokenizer's ids."""
        return self.call("POST", "/tokenize", {"prompt": text, "add_special_tokens": False})["tokens"]

    def version(self) -> str:
        """The label of the weights that it serves."""
        return self.call("GET", "/weight_info")["weight_version"]

    def pause(self) -> None:
        """Stop generating; what is under way is kept as it is until `resume`."""
        self.call("POST", "/pause?mode=keep", {})

    def resume(self) -> None:
        self.call("POST", "/resume", {})

    def abort(self) -> None:
        """End everything that is under way; its requests are answered with the end "abort"."""
        self.call("POST", "/abort_requests", {})

    def label(self, version: str) -> None:
        """Say which version the weights are from now on. Only while paused."""
        self.call("POST", "/update_weight_version", {"new_version": version})

    def reload(self, directory: str) -> None:
        """Load the safetensors of a directory that the server can read."""
        body = {"method": "reload_weights", "kwargs": {"weights_path": directory}}
        self.call("POST", "/collective_rpc", body, self.deadlines.sync)

    def generate(
        self,
        prompt_ids: Sequence[int],
        n: int,
        seed: int,
        max_tokens: int,
        tau: float,
        eos_ids: Sequence[int],
        salt: str,
    ) -> list[Generated]:
        """n completions of a prompt, the g-th from the seed `seed + g`. Nothing is cut off the distribution. `salt`
        keeps what is cached of a prompt from being used with other weights."""
        body = {
            "token_ids": list(prompt_ids),
            "cache_salt": salt,
            "sampling_params": {
                "n": n,
                "seed": seed,
                "temperature": tau,
                "top_p": 1.0,
                "top_k": 0,
                "min_p": 0.0,
                "repetition_penalty": 1.0,
                "presence_penalty": 0.0,
                "frequency_penalty": 0.0,
                "max_tokens": max_tokens,
                "ignore_eos": True,
                "stop_token_ids": list(eos_ids),
                "logprobs": 0,
                "detokenize": False,
            },
        }
        choices = self.call("POST", GENERATE, body, self.deadlines.request)["choices"]
        return [_generated(choice) for choice in sorted(choices, key=lambda choice: choice["index"])]

    def score(self, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> list[float]:
        """log-probs of given tokens at temperature 1, whatever the sampling temperature is, in nats."""
        sampling = {"max_tokens": 1, "prompt_logprobs": 0, "temperature": 1.0, "ignore_eos": True, "detokenize": False}
        body = {"token_ids": [*prompt_ids, *token_ids], "sampling_params": sampling}
        answer = self.call("POST", GENERATE, body, self.deadlines.request)["prompt_logprobs"]
        chosen = zip(token_ids, answer[len(prompt_ids) :], strict=True)
        return [float(place[str(token)]["logprob"]) for token, place in chosen]


def _generated(choice: Mapping[str, Any]) -> Generated:
    tokens, content = choice["token_ids"] or [], (choice["logprobs"] or {}).get("content") or []
    known = {n: entry["logprob"] for n, entry in enumerate(content) if entry["token_id"] == tokens[n]}
    logp = [known.get(n) for n in range(len(tokens))]
    spans = [(span["version"], span["start"], span["end"]) for span in choice["weight_versions"] or []]
    return Generated(
        tokens, [math.nan if p is None or p < NO_LOGPROB else p for p in logp], spans, choice["finish_reason"]
    )


def _message(text: str) -> str:
    """What an error of the server says, without its wrapping."""
    try:
        error = json.loads(text)["error"]
    except (ValueError, KeyError, TypeError):
        return text.strip()[:500] or "no reason given"
    return str(error.get("message", error) if isinstance(error, dict) else error)[:500]


def _cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error).rpartition(": ")[2] or type(error).__name__
