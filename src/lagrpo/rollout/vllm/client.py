"""A client for a vLLM server.

Written for vLLM 0.32, started with VLLM_SERVER_DEV_MODE=1 (to pause a server and load weights) and
--enable-scale-out (for /inference/v1/generate: token ids in, token ids out, and the label of the
weights that sampled each token).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import urllib3

from lagrpo.errors import one_line, parse_json
from lagrpo.types import JsonObject

Json = Mapping[str, Any]

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


class SamplerError(RuntimeError):
    """The servers cannot continue to generate.

    The message says which server, why, and what to do.
    """


class NoAnswerError(SamplerError):
    """A server did not answer, or failed inside: it may have crashed."""


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

    def stop_requests(self, timeout: float = CONTROL_TIMEOUT) -> None:
        """Stops completions in flight. Their answers have the tokens so far."""
        self.call("POST", "/abort_requests", {}, timeout)

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
            # A silent server must not hold up the end of a run.
            self.stop_requests(HEALTH_TIMEOUT)
