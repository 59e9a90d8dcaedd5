"""A client for each vLLM server, and the queue from which all servers take groups.

Written for vLLM 0.32, started with VLLM_SERVER_DEV_MODE=1 (to pause a server and load weights) and
--enable-scale-out (for /inference/v1/generate: token ids in, token ids out, and the label of the
weights that sampled each token).
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from queue import PriorityQueue
from typing import Any, TypeVar

import urllib3

from lagrpo.errors import one_line, parse_json
from lagrpo.interrupts import raise_if_asked
from lagrpo.types import JsonObject

Json = Mapping[str, Any]
T = TypeVar("T")
# Room for a group at a server. The number orders the queue, so that servers take turns.
Turn = tuple[int, "VllmClient"]

VLLM = "0.32"
"""The version of vLLM that this is written for."""
GENERATE = "/inference/v1/generate"
# Environment variable with the API key of servers that run already.
KEY = "LAGRPO_VLLM_API_KEY"
HOW_TO_START = (
    "start it with `lagrpo vllm-serve MODEL`, or with VLLM_SERVER_DEV_MODE=1 and --enable-scale-out"
)
# Seconds until a server must have answered.
GENERATE_TIMEOUT = 3600.0
LOAD_TIMEOUT = 600.0
CONTROL_TIMEOUT = 60.0
# A run restarts a server this many times.
RESTARTS = 5
# Sampling parameters that leave the distribution whole. End tokens are ignored because
# `stop_token_ids` end a completion.
WHOLE_DISTRIBUTION = {
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "ignore_eos": True,
    "logprobs": 0,
    "detokenize": False,
}
logger = logging.getLogger("lagrpo")


class SamplerError(RuntimeError):
    """The servers cannot continue to generate.

    The message says which server, why, and what to do.
    """


class NoAnswerError(SamplerError):
    """A server did not answer, or failed inside: it may have crashed."""


class VllmClient:
    """A client for the server at `url`; `key` is its API key.

    Every method raises NoAnswerError if the server does not answer, and SamplerError if the server
    rejects the request.

    - `adapter`: the label of the LoRA adapter that the server samples with; None for the model's
      own weights
    - `reload_method`: the method of vLLM's workers that loads a directory of weights
    """

    adapter: str | None = None
    reload_method = "reload_weights"

    def __init__(self, url: str, key: str | None = None) -> None:
        self.url = url.rstrip("/")
        # Servers close idle connections, so each request opens a new one.
        headers = {"Content-Type": "application/json", "Connection": "close"}
        if key:
            headers["Authorization"] = f"Bearer {key}"
        self._http = urllib3.PoolManager(maxsize=1024, retries=False, headers=headers)

    def __str__(self) -> str:
        return self.url

    def call(
        self, method: str, path: str, body: Json | None = None, timeout: float = CONTROL_TIMEOUT
    ) -> Any:
        """Returns the server's JSON answer; None if the answer is not JSON."""
        content = None if body is None else json.dumps(body)
        timeouts = urllib3.Timeout(connect=10.0, read=timeout)
        try:
            answer = self._http.request(method, self.url + path, body=content, timeout=timeouts)
        except urllib3.exceptions.HTTPError as error:
            raise NoAnswerError(
                f"{self.url}{path} does not answer; is the server up? {error}"
            ) from error
        if answer.status == 200:
            return self._read(path, answer.data)
        text = answer.data.decode(errors="replace").strip()[:500]
        if answer.status == 401:
            raise SamplerError(f"{self.url} does not accept the API key; set {KEY} to the server's")
        # vLLM's own errors have JSON with "error"; the web framework's answer has not.
        if answer.status in (404, 405) and "error" not in text:
            raise SamplerError(f"{self.url} has no {path}: {HOW_TO_START}")
        if answer.status >= 500:
            raise NoAnswerError(f"{self.url}{path} failed with status {answer.status}: {text}")
        raise SamplerError(f"{self.url}{path} rejected the request ({answer.status}): {text}")

    def _read(self, path: str, data: bytes) -> Any:
        """Returns the JSON in an answer; None if it is something else."""
        if data[:1] not in (b"{", b"["):
            return None
        try:
            return parse_json(data)
        except ValueError as error:
            text = one_line(data[:200].decode(errors="replace"))
            raise SamplerError(f"{self.url}{path} answers with broken JSON: {text}") from error

    def is_healthy(self) -> bool:
        with suppress(NoAnswerError):
            self.call("GET", "/health", timeout=5.0)
            return True
        return False

    def get_version(self) -> str:
        """Returns the version of vLLM, such as 0.32.0."""
        return self.call("GET", "/version")["version"]

    def get_config(self) -> JsonObject:
        """Returns vLLM's configuration: model_config, parallel_config, lora_config …"""
        return self.call("GET", "/server_info?config_format=json")["vllm_config"]

    def get_label(self) -> str:
        """Returns the label of the weights that it samples with; "" if the adapter is gone."""
        if self.adapter is None:
            return self.call("GET", "/weight_info")["weight_version"]
        return self.adapter if self.adapter in self.list_adapters() else ""

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Pauses sampling for the block, and stops completions in flight.

        The keys and values that they have are those of the weights before, so they do not go on.
        Their answers have the tokens so far. After an error in the block the server stays paused.
        """
        self.call("POST", "/pause?mode=abort", {})
        yield
        self.call("POST", "/resume", {})

    def sleep(self) -> None:
        """Moves the weights to the host and drops the cache of keys and values.

        Requests fail until `wake_up`. Nothing may be in flight.
        """
        self.call("POST", "/sleep?level=1", {}, LOAD_TIMEOUT)

    def wake_up(self) -> None:
        """Brings back the weights that the server had. Does nothing if it is awake."""
        self.call("POST", "/wake_up", {}, LOAD_TIMEOUT)

    def reload(self, directory: str, label: str) -> None:
        """Loads the safetensors of a directory that the server can read, and labels them.

        The server must be paused.
        """
        body = {"method": self.reload_method, "kwargs": {"weights_path": directory}}
        self.call("POST", "/collective_rpc", body, LOAD_TIMEOUT)
        self.call("POST", "/update_weight_version", {"new_version": label})

    def get_nccl_versions(self) -> list[str]:
        """Returns the NCCL version of each of its workers; none if they lack our extension."""
        if self.reload_method == VllmClient.reload_method:
            return []
        body = {"method": "get_nccl_version"}
        return self.call("POST", "/collective_rpc", body)["results"]

    def list_adapters(self) -> list[str]:
        """Returns the labels of the adapters that are loaded."""
        cards = self.call("GET", "/v1/models")["data"]
        # The first card is the model's own.
        return [card["id"] for card in cards[1:]]

    def load_adapter(self, label: str, directory: str) -> None:
        if label not in self.list_adapters():
            body = {"lora_name": label, "lora_path": directory}
            self.call("POST", "/v1/load_lora_adapter", body, LOAD_TIMEOUT)
        self.adapter = label

    def stop_requests(self) -> None:
        """Stops completions in flight. Their answers have the tokens so far."""
        self.call("POST", "/abort_requests", {})

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
        top_p: float = 1.0,
        stop: Sequence[str] = (),
    ) -> list[JsonObject]:
        """Returns n completions of a prompt, in vLLM's JSON.

        They are sampled from the whole distribution, unless an evaluation has a `top_p`.

        Completion number g has the seed `seed + g`. `label` names the weights: it salts the cache
        of prefixes, so that keys and values never mix versions, or names the adapter. The texts in
        `stop` end a completion.
        """
        params = {"n": n, "seed": seed, "temperature": temperature, "max_tokens": max_tokens}
        params |= WHOLE_DISTRIBUTION | {"top_p": top_p}
        params["stop_token_ids"] = list(stop_token_ids)
        if stop:
            # vLLM looks for the texts in what it decodes.
            params |= {"stop": list(stop), "detokenize": True, "skip_special_tokens": False}
        body = {"token_ids": list(token_ids), "cache_salt": label, "sampling_params": params}
        if self.adapter:
            body["model"] = label
        answer = self.call("POST", GENERATE, body, GENERATE_TIMEOUT)
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        if self.adapter is None:
            return choices
        # vLLM reports the label of the frozen weights: put the adapter's in its place.
        labeled_choices: list[JsonObject] = []
        for choice in choices:
            num_tokens = len(choice["token_ids"] or [])
            span = {"version": answer["model"], "start": 0, "end": num_tokens}
            labeled_choices.append(choice | {"weight_versions": [span]})
        return labeled_choices

    def get_logprobs(self, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> list[float]:
        """Returns the log-probs of given tokens at temperature 1, in nats."""
        params = {
            "max_tokens": 1,
            "prompt_logprobs": 0,
            "temperature": 1.0,
            "ignore_eos": True,
            "detokenize": False,
        }
        body: JsonObject = {
            "token_ids": [*prompt_ids, *token_ids],
            "sampling_params": params,
        }
        if self.adapter:
            body["model"] = self.adapter
        answer = self.call("POST", GENERATE, body, GENERATE_TIMEOUT)
        # One entry for each token: log-probs by token id.
        entries = answer["prompt_logprobs"][len(prompt_ids) :]
        return [
            float(entry[str(token)]["logprob"])
            for token, entry in zip(token_ids, entries, strict=True)
        ]

    def restart(self) -> None:
        """Starts a dead server again. Raises SamplerError if the run did not start it."""
        raise SamplerError(
            f"{self.url} was not started by this run: start it again, then resume the run"
        )

    def close(self) -> None:
        """Lets the server drop what it generates. The server runs on."""
        with suppress(SamplerError):
            self.stop_requests()


@dataclass(frozen=True, slots=True)
class _Pool:
    """Threads that sample groups of one size, and the turns of the servers that are free.

    The number of turns, and of threads, is the number of groups that fit into all servers.
    """

    threads: ThreadPoolExecutor
    free_turns: PriorityQueue[Turn]


class GroupQueue:
    """A queue of groups for the next free server, at most `rows` completions at a time at each.

    A crashed server is started again, `load` gives it the current weights, and its groups are
    sampled again with the same seeds. Any other failure ends the run.

    `starts` counts how often each server was started again.
    """

    def __init__(
        self, servers: Sequence[VllmClient], load: Callable[[VllmClient], None], rows: int
    ) -> None:
        self.servers = list(servers)
        self.starts = dict.fromkeys(self.servers, 0)
        self._load = load
        self._rows = rows
        self._pools: dict[int, _Pool] = {}  # by the size of groups
        self._restarting = {server: threading.RLock() for server in self.servers}
        self._num_reported = 0  # restarts that `pop_metrics` has returned
        self._is_closed = False
        self._may_start = threading.Event()
        self._may_start.set()

    def submit(self, sample: Callable[[VllmClient], T], G: int) -> Future[T]:
        """Submits a group of G to some server. The result is what `sample` returns for it."""
        if G not in self._pools:
            free_turns: PriorityQueue[Turn] = PriorityQueue()
            groups_per_server = max(1, self._rows // G)
            for turn in enumerate(self.servers * groups_per_server):
                free_turns.put(turn)
            threads = ThreadPoolExecutor(free_turns.qsize())
            self._pools[G] = _Pool(threads, free_turns)
        pool = self._pools[G]
        return pool.threads.submit(self._sample, sample, pool.free_turns)

    def ask(self, server: VllmClient, action: Callable[[VllmClient], T]) -> T:
        """Returns what `action` returns for a server.

        Repeats it if the server had to be restarted.
        """
        # The lock keeps other threads from loading older weights meanwhile.
        with self._restarting[server]:
            return self._repeat(server, action)

    def ask_all(self, action: Callable[[VllmClient], T]) -> list[T]:
        return run_together([partial(self.ask, server, action) for server in self.servers])

    def wait_until_released(self) -> None:
        """Waits while groups are held. Raises SamplerError if the run has ended."""
        self._may_start.wait()
        if self._is_closed:
            raise SamplerError("the run has ended")

    @contextmanager
    def held(self) -> Iterator[None]:
        """Lets no group start during the block."""
        self._may_start.clear()
        try:
            yield
        finally:
            self._may_start.set()

    def pop_metrics(self) -> dict[str, float]:
        """Returns how many servers were started again since the last call."""
        num_restarts = sum(self.starts.values())
        num_new = num_restarts - self._num_reported
        self._num_reported = num_restarts
        return {"recoveries": num_new}

    def close(self) -> None:
        """Ends the threads, and the servers that the run started."""
        self._is_closed = True
        self._may_start.set()
        for pool in self._pools.values():
            pool.threads.shutdown(wait=False, cancel_futures=True)
        for server in self.servers:
            server.close()

    def _sample(self, sample: Callable[[VllmClient], T], free_turns: PriorityQueue[Turn]) -> T:
        self._may_start.wait()
        turn = free_turns.get()
        _, server = turn
        try:
            return self._repeat(server, sample)
        finally:
            free_turns.put(turn)

    def _repeat(self, server: VllmClient, action: Callable[[VllmClient], T]) -> T:
        """Returns what `action` returns for a server, restarting it if necessary."""
        while not self._is_closed:
            start = self.starts[server]
            try:
                return action(server)
            except SamplerError as error:
                self._recover(server, start, error)
        raise SamplerError("the run has ended")

    def _recover(self, server: VllmClient, start: int, error: SamplerError) -> None:
        """Starts a server again that crashed after start number `start`.

        Does nothing if another thread has done it. Raises the error if the server is not dead, or
        has crashed too often. Until the server has the current weights, it may sample with others.
        """
        with self._restarting[server]:
            if self.starts[server] != start:
                return
            is_dead = isinstance(error, NoAnswerError) and not server.is_healthy()
            if self._is_closed or not is_dead or self.starts[server] == RESTARTS:
                # A server that this run started has a log.
                log = getattr(server, "log", None)
                if log:
                    error.add_note(f"The server's log: {log}")
                raise error
            # A batch system ends a job by a signal to each of its processes. The signal that ended
            # the server also stops the run.
            raise_if_asked()
            logger.info("%s. Restarting the server", error)
            server.restart()
            self._load(server)
            self.starts[server] += 1


def run_together(actions: Sequence[Callable[[], T]], seconds: float | None = None) -> list[T]:
    """Returns the results of actions that run in threads, as soon as all have ended.

    Raises the first exception at once, and SamplerError after `seconds`. Actions that have not
    ended by then stay behind: their threads are daemons.
    """

    def run(action: Callable[[], T], future: Future[T]) -> None:
        try:
            future.set_result(action())
        except BaseException as error:  # noqa: BLE001  (the thread that waits for the future raises it)
            future.set_exception(error)

    futures: list[Future[T]] = []
    for action in actions:
        future: Future[T] = Future()
        futures.append(future)
        threading.Thread(target=run, args=(action, future), daemon=True).start()
    done, pending = wait(futures, seconds, FIRST_EXCEPTION)
    for future in done:
        # Raises what the action raised.
        future.result()
    if pending:
        raise SamplerError(
            f"{len(pending)} of {len(actions)} vLLM servers did not answer within {seconds:g} s"
        )
    return [future.result() for future in futures]
