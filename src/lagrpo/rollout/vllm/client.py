"""A client for each vLLM server, and the queue from which all servers take groups.

Written for vLLM 0.32, started with VLLM_SERVER_DEV_MODE=1 (to pause a server and load weights) and
--enable-scale-out (for /inference/v1/generate: token ids in, token ids out, and the label of the
weights that sampled each token).
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
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
# The settings vllm.load_timeout and vllm.generate_timeout replace these.
LOAD_TIMEOUT = 1200.0
GENERATE_TIMEOUT = 3600.0
# Seconds in which a server must answer every other request, and be connected.
CONTROL_TIMEOUT = 60.0
CONNECT_TIMEOUT = 10.0
HEALTH_TIMEOUT = 5.0
# A run restarts a server this many times.
RESTARTS = 5
# Seconds between two looks for servers that answer again.
POLL_SECONDS = 10.0
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


class _SetAsideError(Exception):
    """A server gets no groups any more until it answers again."""


class VllmClient:
    """A client for the server at `url`; `key` is its API key.

    Every method raises NoAnswerError if the server does not answer, and SamplerError if the server
    rejects the request. The server must have loaded weights within `load_timeout` seconds, and
    sampled a group within `generate_timeout`.

    - `adapter`: the label of the LoRA adapter that the server samples with; None for the model's
      own weights
    - `reload_method`: the method of vLLM's workers that loads a directory of weights
    - `can_restart`: True if this process started the server, and has a method `restart`
    """

    adapter: str | None = None
    reload_method = "reload_weights"
    can_restart = False

    def __init__(
        self,
        url: str,
        key: str | None = None,
        load_timeout: float = LOAD_TIMEOUT,
        generate_timeout: float = GENERATE_TIMEOUT,
    ) -> None:
        self.url = url.rstrip("/")
        self.load_timeout = load_timeout
        self.generate_timeout = generate_timeout
        # Servers close idle connections, so each request opens a new one.
        headers = {"Content-Type": "application/json", "Connection": "close"}
        if key:
            headers["Authorization"] = f"Bearer {key}"
        self._http = urllib3.PoolManager(maxsize=1024, retries=False, headers=headers)

    def __str__(self) -> str:
        return self.url

    def call(
        self,
        method: str,
        path: str,
        body: Json | None = None,
        timeout: float = CONTROL_TIMEOUT,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        """Returns the server's JSON answer; None if the answer is not JSON."""
        content = None if body is None else json.dumps(body)
        timeouts = urllib3.Timeout(connect=min(CONNECT_TIMEOUT, timeout), read=timeout)
        all_headers = {**self._http.headers, **(headers or {})}
        try:
            answer = self._http.request(
                method, self.url + path, body=content, timeout=timeouts, headers=all_headers
            )
        except urllib3.exceptions.ReadTimeoutError as error:
            raise NoAnswerError(
                f"{self.url}{path} did not answer within {timeout:g} s{self._advise(timeout)}"
            ) from error
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

    def _advise(self, timeout: float) -> str:
        """Returns which setting has a timeout, for the end of a message; nothing if none has."""
        settings = {
            self.load_timeout: "vllm.load_timeout",
            self.generate_timeout: "vllm.generate_timeout",
        }
        return f" ({settings[timeout]})" if timeout in settings else ""

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
            self.call("GET", "/health", timeout=HEALTH_TIMEOUT)
            return True
        return False

    def check_version(self) -> str:
        """Returns the version of vLLM, such as 0.32.0. Raises SamplerError for another one."""
        try:
            version = self.call("GET", "/version")["version"]
        except (TypeError, LookupError) as error:
            raise SamplerError(f"{self.url} is not a vLLM server: {HOW_TO_START}") from error
        if not f"{version}.".startswith(f"{VLLM}."):
            raise SamplerError(f"{self.url} has vLLM {version}: start one of version {VLLM}")
        return version

    def get_config(self) -> JsonObject:
        """Returns vLLM's configuration: model_config, parallel_config, lora_config …"""
        return self.call("GET", "/server_info?config_format=json")["vllm_config"]

    def list_replicas(self) -> list[int]:
        """Returns the data-parallel ranks that it serves: [0] without data parallelism."""
        parallel_config = self.get_config()["parallel_config"]
        size = "data_parallel_size"
        # With another load balancer, a server of several nodes serves the ranks of its node.
        if any(parallel_config.get(f"data_parallel_{kind}_lb") for kind in ("external", "hybrid")):
            size = "data_parallel_size_local"
        return list(range(parallel_config.get(size, 1)))

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
        self.call("POST", "/sleep?level=1", {}, self.load_timeout)

    def wake_up(self) -> None:
        """Brings back the weights that the server had. Does nothing if it is awake."""
        self.call("POST", "/wake_up", {}, self.load_timeout)

    def reload(self, directory: str, label: str) -> None:
        """Loads the safetensors of a directory that the server can read, and labels them.

        The server must be paused.
        """
        body = {"method": self.reload_method, "kwargs": {"weights_path": directory}}
        self.call("POST", "/collective_rpc", body, self.load_timeout)
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
            self.call("POST", "/v1/load_lora_adapter", body, self.load_timeout)
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
        answer = self.call("POST", GENERATE, body, self.generate_timeout)
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

    def get_logprobs(
        self, prompt_ids: Sequence[int], token_ids: Sequence[int], replica: int = 0
    ) -> list[float]:
        """Returns the log-probs of given tokens at temperature 1, in nats, by one replica."""
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
        answer = self.call(
            "POST", GENERATE, body, self.generate_timeout, {"X-data-parallel-rank": str(replica)}
        )
        # One entry for each token: log-probs by token id.
        entries = answer["prompt_logprobs"][len(prompt_ids) :]
        return [
            float(entry[str(token)]["logprob"])
            for token, entry in zip(token_ids, entries, strict=True)
        ]

    def restart(self) -> None:
        """Starts a dead server again, if `can_restart`."""
        raise NotImplementedError(f"{self.url} was not started by this process")

    def close(self) -> None:
        """Lets the server drop what it generates. The server runs on."""
        with suppress(SamplerError):
            self.stop_requests()


@dataclass(frozen=True, slots=True)
class _Pool:
    """Threads that sample groups of one size, and the turns that no group has.

    The number of turns, and of threads, is the number of groups that fit into all servers.
    """

    threads: ThreadPoolExecutor
    free_turns: list[Turn]


class GroupQueue:
    """A queue of groups for the next free server, at most `rows` completions at a time at each.

    A crashed server that the run started is started again. One that the run attached to is set
    aside: the others go on, and `take_back` looks whether it answers again. `load` gives such
    servers the current weights. Their groups are sampled again, with the same seeds. Any other
    failure ends the run, and so does the last server that is set aside.

    `starts` counts how often each server began to sample again.
    """

    def __init__(
        self, servers: Sequence[VllmClient], load: Callable[[VllmClient], None], rows: int
    ) -> None:
        self._all_servers = list(servers)
        self.starts = dict.fromkeys(self._all_servers, 0)
        self._load = load
        self._rows = rows
        self._pools: dict[int, _Pool] = {}  # by the size of groups
        self._restarting = {server: threading.RLock() for server in self._all_servers}
        self._set_aside: set[VllmClient] = set()
        self._end = "the run has ended"  # why nothing is sampled any more, once that is so
        self._num_reported = 0  # starts that `pop_metrics` has returned
        self._next_poll = 0.0  # in seconds of time.monotonic()
        self._is_closed = False
        self._may_start = threading.Event()
        self._may_start.set()
        # For free turns, and for `_set_aside`: turns of these servers stay free.
        self._turns_changed = threading.Condition()

    @property
    def servers(self) -> list[VllmClient]:
        """The servers that sample: those that are not set aside."""
        return [server for server in self._all_servers if server not in self._set_aside]

    def submit(self, sample: Callable[[VllmClient], T], G: int) -> Future[T]:
        """Submits a group of G to some server. The result is what `sample` returns for it."""
        if G not in self._pools:
            groups_per_server = max(1, self._rows // G)
            free_turns = list(enumerate(self._all_servers * groups_per_server))
            self._pools[G] = _Pool(ThreadPoolExecutor(len(free_turns)), free_turns)
        pool = self._pools[G]
        return pool.threads.submit(self._sample, sample, pool.free_turns)

    def ask_all(self, action: Callable[[VllmClient], T]) -> dict[VllmClient, T]:
        """Returns what `action` returns for each server, without servers that are set aside.

        Repeats it for a server that had to be restarted.
        """
        servers = self.servers
        results: dict[VllmClient, T] = {}

        def ask(server: VllmClient) -> None:
            # The lock keeps other threads from loading older weights meanwhile.
            with self._restarting[server], suppress(_SetAsideError):
                results[server] = self._repeat(server, action)

        run_together([partial(ask, server) for server in servers])
        if not results:
            raise SamplerError(self._end)
        return {server: results[server] for server in servers if server in results}

    def take_back(self) -> None:
        """Loads the current weights into servers that answer again. They then get groups.

        Call it from the thread that syncs weights. It looks every POLL_SECONDS.
        """
        servers = list(self._set_aside)
        if not servers or time.monotonic() < self._next_poll:
            return
        are_healthy = run_together([server.is_healthy for server in servers])
        for server, answers in zip(servers, are_healthy, strict=True):
            if not answers:
                continue
            try:
                self._load(server)
            except SamplerError as error:
                logger.warning("%s answers, but takes no weights: %s", server, error)
                continue
            logger.info("%s answers again: it has the current weights, and gets groups", server)
            with self._turns_changed:
                self.starts[server] += 1
                self._set_aside.remove(server)
                self._turns_changed.notify_all()
        self._next_poll = time.monotonic() + POLL_SECONDS

    def wait_until_released(self) -> None:
        """Waits while groups are held. Raises SamplerError if the run has ended."""
        self._may_start.wait()
        if self._is_closed:
            raise SamplerError(self._end)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Lets no group start during the block."""
        self._may_start.clear()
        try:
            yield
        finally:
            self._may_start.set()

    def pop_metrics(self) -> dict[str, float]:
        """Returns how often servers began to sample again since the last call."""
        num_starts = sum(self.starts.values())
        num_new = num_starts - self._num_reported
        self._num_reported = num_starts
        return {"recoveries": num_new}

    def close(self) -> None:
        """Ends the threads, and the servers that the run started."""
        self._is_closed = True
        self._may_start.set()
        with self._turns_changed:
            self._turns_changed.notify_all()
        for pool in self._pools.values():
            pool.threads.shutdown(wait=False, cancel_futures=True)
        for server in self.servers:
            server.close()

    def _sample(self, sample: Callable[[VllmClient], T], free_turns: list[Turn]) -> T:
        while True:
            self._may_start.wait()
            turn = self._take_turn(free_turns)
            _, server = turn
            try:
                return self._repeat(server, sample)
            except _SetAsideError:
                # Another server samples the group.
                continue
            finally:
                with self._turns_changed:
                    free_turns.append(turn)
                    self._turns_changed.notify_all()

    def _take_turn(self, free_turns: list[Turn]) -> Turn:
        """Waits for a free turn of a server that samples. Servers take turns.

        Raises SamplerError if the run has ended, or no server is left.
        """
        with self._turns_changed:
            while self.servers and not self._is_closed:
                usable_turns = [turn for turn in free_turns if turn[1] not in self._set_aside]
                if usable_turns:
                    turn = min(usable_turns, key=itemgetter(0))
                    free_turns.remove(turn)
                    return turn
                self._turns_changed.wait()
        raise SamplerError(self._end)

    def _repeat(self, server: VllmClient, action: Callable[[VllmClient], T]) -> T:
        """Returns what `action` returns for a server, restarting it if necessary.

        Raises _SetAsideError for a server that is set aside.
        """
        while not self._is_closed:
            if server in self._set_aside:
                raise _SetAsideError
            start = self.starts[server]
            try:
                return action(server)
            except SamplerError as error:
                self._recover(server, start, error)
        raise SamplerError(self._end)

    def _recover(self, server: VllmClient, start: int, error: SamplerError) -> None:
        """Starts a server again that crashed after start number `start`, or sets it aside.

        Does nothing if another thread has done it. Raises the error if the server is not dead, or
        has crashed too often. Until the server has the current weights, it may sample with others.
        """
        with self._restarting[server]:
            if self.starts[server] != start or server in self._set_aside:
                return
            is_dead = isinstance(error, NoAnswerError) and not server.is_healthy()
            has_given_up = server.can_restart and self.starts[server] == RESTARTS
            if self._is_closed or not is_dead or has_given_up:
                # A server that this run started has a log.
                log = getattr(server, "log", None)
                if log:
                    error.add_note(f"The server's log: {log}")
                raise error
            # A batch system ends a job by a signal to each of its processes. The signal that ended
            # the server also stops the run.
            raise_if_asked()
            if not server.can_restart:
                self._go_on_without(server, error)
                return
            logger.info("%s. Restarting the server", error)
            server.restart()
            self._load(server)
            self.starts[server] += 1

    def _go_on_without(self, server: VllmClient, error: SamplerError) -> None:
        """Sets a server aside. Raises SamplerError if no other is left."""
        with self._turns_changed:
            self._set_aside.add(server)
            num_left = len(self.servers)
            if not num_left:
                self._end = f"{error}. No server is left: start them again, then resume the run"
            self._turns_changed.notify_all()
        if not num_left:
            raise SamplerError(self._end) from error
        logger.warning(
            "%s. This run did not start the server, so it cannot restart it. It continues with %d "
            "of %d servers, and gives groups to this one when it answers again",
            error,
            num_left,
            len(self._all_servers),
        )


def run_together(actions: Sequence[Callable[[], T]], seconds: float | None = None) -> list[T]:
    """Returns the results of actions that run in threads, as soon as all have ended.

    Raises the first exception at once, and TimeoutError after `seconds`. Actions that have not
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
        raise TimeoutError
    return [future.result() for future in futures]
