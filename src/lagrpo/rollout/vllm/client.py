"""A client for each vLLM server, and the queue from which all servers take groups.

Written for vLLM 0.32, started with VLLM_SERVER_DEV_MODE=1 (to pause a server and load weights) and --enable-scale-out
(for /inference/v1/generate: token ids in, token ids out, and the label of the weights that sampled each token).
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from functools import partial
from queue import PriorityQueue
from typing import Any, TypeVar

import urllib3

from lagrpo.errors import one_line

Json = Mapping[str, Any]
T = TypeVar("T")
Free = PriorityQueue[
    tuple[int, "VllmClient"]
]  # a server for each group that fits, the servers in turn
GENERATE = "/inference/v1/generate"
KEY = "LAGRPO_VLLM_API_KEY"  # environment variable with the API key of servers that run already
HOW_TO_START = (
    "start it with `lagrpo vllm-serve MODEL`, or with VLLM_SERVER_DEV_MODE=1 and --enable-scale-out"
)
GENERATE_TIMEOUT, LOAD_TIMEOUT, CONTROL_TIMEOUT = 3600.0, 600.0, 60.0  # seconds
RESTARTS = 5  # of a server in a run
WHOLE_DISTRIBUTION = {
    **{"top_p": 1.0, "top_k": 0, "min_p": 0.0},
    **{"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
    **{"ignore_eos": True, "logprobs": 0, "detokenize": False},  # stop_token_ids end a completion
}
logger = logging.getLogger("lagrpo")


class SamplerError(RuntimeError):
    """The servers cannot continue to generate. The message says which server, why, and what to do."""


class NoAnswerError(SamplerError):
    """A server did not answer, or failed inside: it may have died."""


class VllmClient:
    """The server at `url`; `key` is its API key. Every method raises NoAnswerError if the server does not answer, and
    SamplerError if it rejects the request."""

    adapter: str | None = (
        None  # label of the LoRA adapter that it samples with; None for the model's own weights
    )
    reload_method = "reload_weights"  # what its workers call to load a directory of weights

    def __init__(self, url: str, key: str | None = None) -> None:
        self.url = url.rstrip("/")
        headers = {
            "Content-Type": "application/json",
            "Connection": "close",
        }  # servers close idle connections
        headers |= {"Authorization": f"Bearer {key}"} if key else {}
        self._http = urllib3.PoolManager(maxsize=1024, retries=False, headers=headers)

    def __str__(self) -> str:
        return self.url

    def call(
        self, method: str, path: str, body: Json | None = None, timeout: float = CONTROL_TIMEOUT
    ) -> Any:
        """The server's JSON answer; None for another answer."""
        content, limits = (
            None if body is None else json.dumps(body),
            urllib3.Timeout(connect=10.0, read=timeout),
        )
        try:
            answer = self._http.request(method, self.url + path, body=content, timeout=limits)
        except urllib3.exceptions.HTTPError as error:
            raise NoAnswerError(
                f"{self.url}{path} does not answer; is the server up? {error}"
            ) from error
        if answer.status == 200:
            return self._read(path, answer.data)
        text = answer.data.decode(errors="replace").strip()[:500]
        if answer.status == 401:
            raise SamplerError(f"{self.url} does not accept the API key; set {KEY} to the server's")
        if answer.status in (404, 405) and "error" not in text:
            raise SamplerError(f"{self.url} has no {path}: {HOW_TO_START}")
        if answer.status >= 500:
            raise NoAnswerError(f"{self.url}{path} failed with status {answer.status}: {text}")
        raise SamplerError(f"{self.url}{path} rejected the request ({answer.status}): {text}")

    def _read(self, path: str, data: bytes) -> Any:
        if data[:1] not in (b"{", b"["):
            return None
        try:
            return json.loads(data)
        except ValueError as error:
            text = one_line(data[:200].decode(errors="replace"))
            raise SamplerError(f"{self.url}{path} answers with broken JSON: {text}") from error

    def is_healthy(self) -> bool:
        with suppress(NoAnswerError):
            self.call("GET", "/health", timeout=5.0)
            return True
        return False

    def get_config(self) -> dict[str, Any]:
        """vLLM's configuration: model_config, parallel_config, lora_config …"""
        return self.call("GET", "/server_info?config_format=json")["vllm_config"]

    def get_label(self) -> str:
        """The label of the weights that it samples with; "" if the adapter is gone."""
        if self.adapter is not None:
            return self.adapter if self.adapter in self.list_adapters() else ""
        return self.call("GET", "/weight_info")["weight_version"]

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, nothing is sampled; completions in flight continue afterwards. After an error it stays paused."""
        self.call("POST", "/pause?mode=keep", {})
        yield
        self.call("POST", "/resume", {})

    def reload(self, directory: str, label: str) -> None:
        """Load the safetensors of a directory that the server can read, while paused, and name them."""
        body = {"method": self.reload_method, "kwargs": {"weights_path": directory}}
        self.call("POST", "/collective_rpc", body, LOAD_TIMEOUT)
        self.call("POST", "/update_weight_version", {"new_version": label})

    def list_adapters(self) -> list[str]:
        return [card["id"] for card in self.call("GET", "/v1/models")["data"][1:]]

    def load_adapter(self, label: str, directory: str) -> None:
        if label not in self.list_adapters():
            body = {"lora_name": label, "lora_path": directory}
            self.call("POST", "/v1/load_lora_adapter", body, LOAD_TIMEOUT)
        self.adapter = label

    def unload_adapter(self, label: str) -> None:
        self.call("POST", "/v1/unload_lora_adapter", {"lora_name": label})

    def generate(
        self,
        token_ids: Sequence[int],
        n: int,
        seed: int,
        max_tokens: int,
        temperature: float,
        stop_token_ids: Sequence[int],
        label: str,
    ) -> list[dict[str, Any]]:
        """n completions of a prompt from the whole distribution, number g with the seed `seed + g`, in vLLM's JSON.
        `label` names the weights: it salts the cache of prefixes, so that keys and values never mix versions, or names
        the adapter."""
        params = {"n": n, "seed": seed, "temperature": temperature, "max_tokens": max_tokens}
        params |= WHOLE_DISTRIBUTION | {"stop_token_ids": list(stop_token_ids)}
        body = {"token_ids": list(token_ids), "cache_salt": label, "sampling_params": params}
        answer = self.call(
            "POST", GENERATE, body | ({"model": label} if self.adapter else {}), GENERATE_TIMEOUT
        )
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        if self.adapter is not None:  # vLLM reports the label of the frozen weights
            spans = [
                {"version": answer["model"], "start": 0, "end": len(c["token_ids"] or [])}
                for c in choices
            ]
            choices = [
                choice | {"weight_versions": [span]}
                for choice, span in zip(choices, spans, strict=True)
            ]
        return choices

    def get_logprobs(self, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> list[float]:
        """log-probs of given tokens at temperature 1, nats."""
        params = {
            "max_tokens": 1,
            "prompt_logprobs": 0,
            "temperature": 1.0,
            "ignore_eos": True,
            "detokenize": False,
        }
        body = {"token_ids": [*prompt_ids, *token_ids], "sampling_params": params}
        body |= {"model": self.adapter} if self.adapter else {}
        answer = self.call("POST", GENERATE, body, GENERATE_TIMEOUT)["prompt_logprobs"]
        given = zip(token_ids, answer[len(prompt_ids) :], strict=True)
        return [float(entries[str(token)]["logprob"]) for token, entries in given]

    def restart(self) -> None:
        """Start a dead server again. Raises SamplerError if the run did not start it."""
        raise SamplerError(
            f"{self.url} was not started by this run: start it again, then resume the run"
        )

    def close(self) -> None:
        """Let the server drop what it generates; it runs on."""
        with suppress(SamplerError):
            self.call("POST", "/abort_requests", {})


class GroupQueue:
    """Groups from one queue to whichever server is free, at most `rows` completions at a time at each. A server that
    dies is started again, `load` gives it the current weights, and its groups are sampled again with the same seeds.
    Any other failure ends the run."""

    def __init__(
        self, servers: Sequence[VllmClient], load: Callable[[VllmClient], None], rows: int
    ) -> None:
        self.servers, self._load, self._rows = list(servers), load, rows
        self._pools: dict[int, tuple[ThreadPoolExecutor, Free]] = {}  # by the size of groups
        self._restarting = {server: threading.RLock() for server in self.servers}
        self.starts = dict.fromkeys(self.servers, 0)  # how often each server was started again
        self._counted = 0  # of them
        self._may_start, self._is_closed = threading.Event(), False
        self._may_start.set()

    def submit(self, sample: Callable[[VllmClient], T], G: int) -> Future[T]:
        """What `sample`, of a group of G, returns for some server."""
        if G not in self._pools:
            free: Free = PriorityQueue()
            for place in enumerate(self.servers * max(1, self._rows // G)):
                free.put(place)
            self._pools[G] = ThreadPoolExecutor(free.qsize()), free
        pool, free = self._pools[G]
        return pool.submit(self._sample, sample, free)

    def ask(self, server: VllmClient, action: Callable[[VllmClient], T]) -> T:
        """What `action` returns for a server, repeated if the server died and was started again."""
        with self._restarting[server]:  # no other thread loads older weights meanwhile
            return self._repeat(server, action)

    def ask_all(self, action: Callable[[VllmClient], T]) -> list[T]:
        return run_together([partial(self.ask, server, action) for server in self.servers])

    @contextmanager
    def held(self) -> Iterator[None]:
        """Inside, no group starts."""
        self._may_start.clear()
        try:
            yield
        finally:
            self._may_start.set()

    def pop_metrics(self) -> dict[str, float]:
        """How many servers were started again since the last call."""
        before, self._counted = self._counted, sum(self.starts.values())
        return {"recoveries": self._counted - before}

    def close(self) -> None:
        """End the threads, and the servers that the run started."""
        self._is_closed = True
        self._may_start.set()
        for pool, _ in self._pools.values():
            pool.shutdown(wait=False, cancel_futures=True)
        for server in self.servers:
            server.close()

    def _sample(self, sample: Callable[[VllmClient], T], free: Free) -> T:
        self._may_start.wait()
        place = free.get()
        try:
            return self._repeat(place[1], sample)
        finally:
            free.put(place)

    def _repeat(self, server: VllmClient, action: Callable[[VllmClient], T]) -> T:
        while not self._is_closed:
            start = self.starts[server]
            try:
                return action(server)
            except SamplerError as error:
                self._recover(server, start, error)
        raise SamplerError("the run has ended")

    def _recover(self, server: VllmClient, start: int, error: SamplerError) -> None:
        """Start a server again that died after start number `start`, unless another thread has done it. Until
        it has the current weights, it may sample with others."""
        with self._restarting[server]:
            if self.starts[server] != start:
                return
            is_dead = isinstance(error, NoAnswerError) and not server.is_healthy()
            if self._is_closed or not is_dead or self.starts[server] == RESTARTS:
                if log := getattr(server, "log", None):  # this run started it
                    error.add_note(f"The server's log: {log}")
                raise error
            logger.info("%s. Restarting the server", error)
            server.restart()
            self._load(server)
            self.starts[server] += 1


def run_together(actions: Sequence[Callable[[], T]], seconds: float | None = None) -> list[T]:
    """The results of actions that run in threads, as soon as all have ended. Raises the first exception at once, and
    SamplerError after `seconds`; actions that have not ended by then stay behind."""

    def run(action: Callable[[], T], future: Future[T]) -> None:
        try:
            future.set_result(action())
        except BaseException as error:  # noqa: BLE001  (the thread that waits for the future raises it)
            future.set_exception(error)

    futures: list[Future[T]] = [Future() for _ in actions]
    for given in zip(actions, futures, strict=True):
        threading.Thread(target=run, args=given, daemon=True).start()
    done, pending = wait(futures, seconds, FIRST_EXCEPTION)
    for future in done:
        future.result()
    if pending:
        raise SamplerError(
            f"{len(pending)} of {len(actions)} vLLM servers did not answer within {seconds:g} s"
        )
    return [future.result() for future in futures]
