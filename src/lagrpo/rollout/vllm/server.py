"""One vLLM server over HTTP: token ids in, token ids out, a deadline on every answer.

Written for vLLM 0.32 and later, started with VLLM_SERVER_DEV_MODE=1 (to pause it and load weights) and
--enable-scale-out (for the endpoint /inference/v1/generate, which takes and returns token ids and reports which version
of the weights generated each token).
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import urllib3

from lagrpo.exchange import exchange, find_cause

Json = Mapping[str, Any]
Ids = Sequence[int]  # of tokens
GENERATE = "/inference/v1/generate"
KEY = "LAGRPO_VLLM_API_KEY"  # the environment variable with the API key of servers that run already
HOW_TO_START = "start it with `lagrpo serve MODEL`, or with VLLM_SERVER_DEV_MODE=1 and --enable-scale-out"
WHOLE_DISTRIBUTION = {
    **{"top_p": 1.0, "top_k": 0, "min_p": 0.0},
    **{"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
    **{"ignore_eos": True, "logprobs": 0, "detokenize": False},  # what ends a completion are its stop_token_ids
}


class SamplerError(RuntimeError):
    """The servers cannot go on generating; the message says which, why, and what to do."""


class UnreachableError(SamplerError):
    """No answer: nobody listens, the connection broke, the deadline passed, or the server failed inside. Worth another
    try once the server is up again."""


@contextmanager
def concerning(what: str) -> Iterator[None]:
    """Inside, an UnreachableError also says what was being done: which version, which prompt."""
    try:
        yield
    except UnreachableError as error:
        raise UnreachableError(f"{error} ({what})") from error


class RefusedError(SamplerError):
    """The server understood and said no: trying again would not help."""


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds to wait for a server."""

    start: float = 600.0  # until it is healthy
    request: float = 600.0  # for the completions of one group
    sync: float = 300.0  # until it has loaded weights
    control: float = 30.0  # for everything that should take no time

    def __str__(self) -> str:
        return (
            f"{self.start:g} s to start, {self.request:g} s for a group, {self.sync:g} s to load weights, "
            f"{self.control:g} s for anything else"
        )


class Server:
    """The server at `url`, called with the API key `key` if it wants one."""

    running = True  # whether it can still get healthy

    reloading = "reload_weights"
    """What a server calls to load a directory of weights."""

    adapter: str | None = None
    """The adapter that requests name, as its label; None: the model's own weights."""

    def __init__(self, url: str, key: str | None, deadlines: Deadlines, connections: int = 64) -> None:
        self.url, self.deadlines = url.rstrip("/"), deadlines
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self._pool = urllib3.PoolManager(maxsize=connections, block=False, retries=False, headers=headers)

    def __str__(self) -> str:
        return self.url

    def call(
        self, method: str, path: str, body: Json | None = None, deadline: float | None = None, again: bool = True
    ) -> Any:
        """The JSON that the server answers, None for an empty answer: see `send`."""
        answer = self.send(method, path, body, deadline, again)
        return json.loads(answer) if answer else None

    def send(
        self, method: str, path: str, body: Json | None = None, deadline: float | None = None, again: bool = True
    ) -> bytes:
        """What the server answers within `deadline` seconds: `control` of the deadlines unless given, and at most twice
        that where it goes silent in the middle of its answer. If the server closed the connection before it
        answered (it closes idle ones, and after a failed request), the request is sent once more, unless `again` is
        False. Raises UnreachableError (see there), and RefusedError for 4xx, with what the server said."""
        seconds = self.deadlines.control if deadline is None else deadline
        content = None if body is None else json.dumps(body).encode()
        try:
            status, answer = exchange(self._pool, method, self.url + path, content, seconds)
        except urllib3.exceptions.ProtocolError as error:
            if again:
                return self.send(method, path, body, deadline, again=False)
            raise UnreachableError(f"{self.url} broke off the connection: {find_cause(error)}") from error
        except urllib3.exceptions.ReadTimeoutError as error:
            raise UnreachableError(f"{self.url}{path} did not answer within {seconds:g} s") from error
        except urllib3.exceptions.HTTPError as error:
            raise UnreachableError(
                f"{self.url} cannot be reached: {find_cause(error)}; is a server up there?"
            ) from error
        if status != 200:
            self._raise(path, status, answer.decode(errors="replace"))
        return answer

    def _raise(self, path: str, status: int, text: str) -> NoReturn:
        if status == 401:
            raise RefusedError(f"{self.url} does not accept the API key; set LAGRPO_VLLM_API_KEY to the server's")
        if status in (404, 405):
            raise RefusedError(f"{self.url} has no {path}: {HOW_TO_START}")
        if status >= 500:
            raise UnreachableError(f"{self.url}{path} failed inside ({status}): {_message(text)}")
        raise RefusedError(f"{self.url}{path} refused ({status}): {_message(text)}")

    def healthy(self) -> bool:
        """Whether the server says that it can work."""
        try:
            self.call("GET", "/health", deadline=min(5.0, self.deadlines.control))
        except UnreachableError:
            return False
        return True

    def wait(self, seconds: float) -> None:
        """Wait until the server is healthy. Raises UnreachableError if it ends, or is not healthy in time."""
        end = time.monotonic() + seconds
        while not self.healthy():
            if not self.running or time.monotonic() > end:
                raise UnreachableError(self._not_ready(seconds))
            time.sleep(min(0.2, seconds / 10))

    def _not_ready(self, seconds: float) -> str:
        return f"{self.url} was not healthy within {seconds:g} s; is the server running?"

    def revive(self) -> None:
        """After a failure: wait until somebody has brought the server back. Raises UnreachableError."""
        self.wait(self.deadlines.start)

    def close(self) -> None:
        """Close the connections. The server runs on, as somebody else started it."""
        self._pool.clear()

    def keep_log(self, path: Path) -> None:
        """Move the log to `path`; only a server that we started has one."""

    def model(self) -> dict[str, Any]:
        """What it serves: `root` (the path or id it was started with), `max_model_len`. Raises RefusedError for a wrong
        API key."""
        return self.call("GET", "/v1/models")["data"][0]

    def config(self) -> dict[str, Any]:
        """Its model_config and parallel_config. Raises RefusedError if it is not in development mode."""
        return self.call("GET", "/server_info?config_format=json")["vllm_config"]

    def tokenize(self, text: str) -> list[int]:
        return self.call("POST", "/tokenize", {"prompt": text, "add_special_tokens": False})["tokens"]

    def version(self) -> str:
        """The label of the weights that it serves; of an adapter, if it has that."""
        if self.adapter is not None:
            return self.adapter if self.adapter in self.adapters() else ""
        return self.call("GET", "/weight_info")["weight_version"]

    def adapters(self) -> list[str]:
        """The labels of its adapters."""
        return [card["id"] for card in self.call("GET", "/v1/models")["data"][1:]]

    def load_adapter(self, label: str, directory: str) -> None:
        """Load the adapter of a directory that the server can read; it may be there already."""
        if label not in self.adapters():
            body = {"lora_name": label, "lora_path": directory}
            self.send("POST", "/v1/load_lora_adapter", body, self.deadlines.sync, again=False)  # answers in words

    def unload_adapter(self, label: str) -> None:
        self.send("POST", "/v1/unload_lora_adapter", {"lora_name": label})

    def pause(self) -> None:
        """Stop generating; completions under way are kept until `resume`."""
        self.call("POST", "/pause?mode=keep", {})

    def resume(self) -> None:
        self.call("POST", "/resume", {})

    def abort(self) -> None:
        """End all completions under way; their requests are answered with the end "abort"."""
        self.call("POST", "/abort_requests", {})

    def label(self, version: str) -> None:
        """Set the label of the weights. Only while paused."""
        self.call("POST", "/update_weight_version", {"new_version": version})

    def reload(self, directory: str) -> None:
        """Load the safetensors of a directory that the server can read."""
        body = {"method": self.reloading, "kwargs": {"weights_path": directory}}
        self.call("POST", "/collective_rpc", body, self.deadlines.sync)

    def generate(
        self, prompt_ids: Ids, n: int, seed: int, max_tokens: int, tau: float, eos_ids: Ids, salt: str
    ) -> list[Json]:
        """n completions of a prompt from the whole distribution, the g-th with the seed `seed + g`, as vLLM returns
        them. `salt`, the label of the weights, keeps cached keys and values of a prompt from being used with others; an
        adapter is named by it."""
        own = {"n": n, "seed": seed, "temperature": tau, "max_tokens": max_tokens, "stop_token_ids": list(eos_ids)}
        body = {"token_ids": list(prompt_ids), "cache_salt": salt, "sampling_params": WHOLE_DISTRIBUTION | own}
        answer = self._ask(body, salt if self.adapter is not None else None)
        return sorted(answer["choices"], key=lambda choice: choice["index"])

    def score(self, prompt_ids: Ids, token_ids: Ids) -> list[float]:
        """log-probs of given tokens at temperature 1, whatever the sampling temperature is, in nats."""
        sampling = {"max_tokens": 1, "prompt_logprobs": 0, "temperature": 1.0, "ignore_eos": True, "detokenize": False}
        body = {"token_ids": [*prompt_ids, *token_ids], "sampling_params": sampling}
        answer = self._ask(body, self.adapter)["prompt_logprobs"]
        chosen = zip(token_ids, answer[len(prompt_ids) :], strict=True)
        return [float(place[str(token)]["logprob"]) for token, place in chosen]

    def _ask(self, body: Json, adapter: str | None) -> dict[str, Any]:
        """What a server generates, by an adapter or by the model's own weights. Raises UnreachableError where it has
        not the adapter any more: it was restarted."""
        if adapter is None:
            return self.call("POST", GENERATE, body, self.deadlines.request)
        try:
            answer = self.call("POST", GENERATE, {**body, "model": adapter}, self.deadlines.request)
        except RefusedError as error:
            if adapter not in self.adapters():
                raise UnreachableError(
                    f"{self.url} has not the adapter {adapter} any more: was it restarted?"
                ) from error
            raise
        for choice in answer["choices"]:  # the labels that vLLM reports are those of the model's own weights
            span = {"version": answer["model"], "start": 0, "end": len(choice["token_ids"] or [])}
            choice["weight_versions"] = [span]
        return answer


def _message(text: str) -> str:
    """What an error of the server says, without its wrapping."""
    try:
        error = json.loads(text)["error"]
    except (ValueError, KeyError, TypeError):
        return text.strip()[:500] or "no reason given"
    return str(error.get("message", error) if isinstance(error, dict) else error)[:500]
