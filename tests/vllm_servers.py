"""vLLM servers for tests: a fake one over HTTP, and real ones with a tiny model
($LAGRPO_VLLM_PYTHON names their Python)."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import torch
from tiny import save_tiny

from lagrpo.model.loading import load_policy
from lagrpo.model.model import Policy
from lagrpo.rollout.base import SamplingParams
from lagrpo.rollout.vllm.client import GENERATE, VllmClient
from lagrpo.rollout.vllm.engine import VllmEngine
from lagrpo.rollout.vllm.server import Launch, StartedServer, find_python
from lagrpo.rollout.vllm.weights import WeightTransfer
from lagrpo.types import Completion, JsonObject

os.environ.setdefault(
    "VLLM_CPU_KVCACHE_SPACE", "1"
)  # GiB of each server; the tests run two at a time
SIZES: JsonObject = {
    "head_dim": 32,
    "hidden_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 1024,
}
Answer = tuple[int, object] | None


class FakeServer:
    """Does what vLLM's endpoints do, and generates two tokens. `answers` replaces the answer of a
    path: a function of the body, which returns status and JSON, or None to break the connection."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.answers: dict[str, Callable[[Any], Answer]] = {}
        self.answers["/version"] = lambda _: (200, {"version": "0.32.0"})
        self.config: JsonObject = {"parallel_config": {}, "device_config": {"device": "cuda"}}
        self.config["model_config"] = {"dtype": "torch.float32"}
        self.start()

    def start(self) -> None:
        self.label, self.adapters, self.is_dead = "default", dict[str, str](), False
        self.is_asleep = False

    def __enter__(self) -> FakeServer:
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def reply(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                body: Any = json.loads(self.rfile.read(length)) if length else None
                if (rank := self.headers.get("X-data-parallel-rank")) is not None:
                    body["replica"] = int(rank)
                if (answer := fake.answer(self.path, body)) is not None:
                    content = json.dumps(answer[1]).encode()
                    self.send_response(answer[0])
                    self.send_header("Content-Length", str(len(content)))
                    self.end_headers()
                    self.wfile.write(content)

            do_GET = do_POST = reply

            def log_message(self, format: str, *args: object) -> None: ...

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.http.shutdown()
        self.http.server_close()

    def answer(self, path: str, body: Any) -> Answer:
        self.calls.append((path, body))
        if path in self.answers and not self.is_dead:
            return self.answers[path](body)
        return None if self.is_dead else self.plain_answer(path, body)

    def plain_answer(self, path: str, body: Any) -> Answer:
        if self.is_asleep and path in (GENERATE, "/collective_rpc"):
            return 500, {"error": {"message": "its memory is unmapped"}}
        match path:
            case "/sleep?level=1":
                self.is_asleep = True
            case "/wake_up":
                self.is_asleep = False
            case "/weight_info":
                return 200, {"weight_version": self.label}
            case "/update_weight_version":
                self.label = body["new_version"]
            case "/v1/models":
                cards = [
                    {"id": "m", "root": "m", "max_model_len": 1000},
                    *({"id": name} for name in self.adapters),
                ]
                return 200, {"data": cards}
            case "/v1/load_lora_adapter":
                self.adapters[body["lora_name"]] = body["lora_path"]
            case "/v1/unload_lora_adapter":
                del self.adapters[body["lora_name"]]
            case "/server_info?config_format=json":
                return 200, {"vllm_config": self.config}
            case "/get_world_size":
                return 200, {"world_size": 2}
            case _ if path == GENERATE:
                if body.get("model", "m") not in {"m", *self.adapters}:
                    return 404, {"error": {"message": "the adapter does not exist"}}
                choices = [choice(self.label, n) for n in range(body["sampling_params"]["n"])]
                return 200, {"model": body.get("model"), "choices": choices}
        return 200, {}

    def die_at(self, path: str) -> None:
        """Die at the next call of a path."""

        def die(_: object) -> None:
            if self.answers.pop(path, None):  # once, if two call it
                self.is_dead = True

        self.answers[path] = die

    def bodies(self, path: str) -> list[Any]:
        return [body for called, body in self.calls if called == path]


def choice(
    label: str,
    index: int = 0,
    tokens: Sequence[int] = (7, 1),
    logprobs: Sequence[float] = (-0.5, -0.25),
    end: str = "stop",
) -> JsonObject:
    """A completion in vLLM's JSON."""
    content = [
        {"token_id": token, "logprob": p} for token, p in zip(tokens, logprobs, strict=False)
    ]
    spans = [{"version": label, "start": 0, "end": len(tokens)}]
    fields = {
        "index": index,
        "token_ids": list(tokens),
        "logprobs": {"content": content},
        "weight_versions": spans,
    }
    return fields | {"finish_reason": end}


class Ours(VllmClient):
    """A fake server as one that the run started."""

    log = "vllm-1.log"
    can_restart = True

    def __init__(self, fake: FakeServer) -> None:
        super().__init__(fake.url)
        self.fake = fake

    def restart(self) -> None:
        self.fake.start()


def engine_of(
    servers: Sequence[VllmClient],
    policy: Policy,
    max_tokens: int = 12,
    rows: int = 32,
) -> VllmEngine:
    """An engine of seed 0, in the policy's dtype."""
    weights = WeightTransfer(policy.dtype, policy.model.lm if policy.weights.adapters else None)
    params = SamplingParams("sample", policy.tau, max_tokens)
    return VllmEngine(servers, weights, policy.chat, params, 0, rows)


def tiny_directory(root: Path, **changes: Any) -> Path:
    """A model that vLLM's attention on CPUs takes."""
    return save_tiny(root / "model", **SIZES | changes)


def start(model: Path, log: Path, dtype: str = "float32", lora_rank: int = 0) -> StartedServer:
    """A real server of the model, ready."""
    options = ("--block-size", "32")  # tokens; the cache of prefixes on CPUs has blocks of 128
    server = StartedServer(
        Launch(find_python(), str(model), dtype, 768, 64, options=options, lora_rank=lora_rank), log
    )
    server.wait_until_ready()
    return server


def policy_of(
    model: Path, tau: float = 1.0, dtype: torch.dtype = torch.float32, lora: Any = None
) -> Policy:
    return load_policy(str(model), dtype, tau=tau, lora=lora)


def versions(completions: Sequence[Completion]) -> set[int]:
    """Which versions sampled their tokens."""
    return {version for c in completions for version in c.versions[c.sampled].tolist()}


def update(policy: Policy, scale: float = 0.02) -> None:
    """Changes the weights and counts the version up, as an update does."""
    generator = torch.Generator().manual_seed(policy.version)
    with torch.no_grad():
        for tensor in policy.weights.values():
            noise = torch.randn(tensor.shape, generator=generator)
            tensor.add_(noise, alpha=scale * float(tensor.std() or 0.1))
    policy.advance()


def kill(server: StartedServer) -> None:
    """kill -9 of the process that serves HTTP; what it started is left to the guard."""
    os.kill(psutil.Process(server.guard.pid).children()[0].pid, signal.SIGKILL)
