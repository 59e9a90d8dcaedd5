"""From settings to vLLM servers, attached or started, and the sampler over them.

What is wrong with a server shows here, before a model is loaded if that is possible: nobody there, a wrong API key, a
server without the endpoints that a weight sync needs, another model.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from lagrpo.backends.hardware import pick_device, pick_dtype
from lagrpo.errors import refusing
from lagrpo.model.embedded import resolve_model
from lagrpo.model.model import Policy
from lagrpo.rollout.vllm.adapters import AdapterSync
from lagrpo.rollout.vllm.fleet import Fleet
from lagrpo.rollout.vllm.generation import Generation
from lagrpo.rollout.vllm.limits import SPANNED, rank_of_server
from lagrpo.rollout.vllm.process import EXTENDED, Launch, StartedServer, check_options, check_python
from lagrpo.rollout.vllm.sampler import VllmSampler
from lagrpo.rollout.vllm.server import GENERATE, HOW_TO_START, KEY, Deadlines, RefusedError, SamplerError, Server
from lagrpo.rollout.vllm.weights import Directories, WeightSync
from lagrpo.rollout.vllm.wire import DirectoryWire, IpcWire, NcclWire, Wire
from lagrpo.settings.options import split_options
from lagrpo.settings.schema import Settings
from lagrpo.settings.vllm import VllmSettings

logger = logging.getLogger("lagrpo")
WIRES: dict[str, Callable[[], Wire]] = {"directory": DirectoryWire, "nccl": NcclWire, "ipc": IpcWire}
OURS = {"--model", "--host", "--port", "--api-key", "--dtype", "--logprobs-mode", "--generation-config"}
AS_STARTED = "default"  # vLLM's label of the weights that a server was started with
COARSENESS = [torch.float32, torch.float16, torch.bfloat16]
SIZES = ("architectures", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
TEXTS = ("Hello, world 12 + 30 = 42", "def f(x):\n    return x", "Größe, 数学, ∑")  # that tell tokenizers apart


def deadlines(settings: VllmSettings) -> Deadlines:
    s = settings
    return Deadlines(s.start_deadline, s.request_deadline, s.sync_deadline, s.control_deadline)


def open_servers(settings: Settings, replied: int = 0) -> list[Server]:
    """The servers of the settings, for completions with `replied` tokens of an environment at the most. Servers that
    run already are reachable, accept our key and have the endpoints; servers that are started here are on their way
    (`build_vllm` waits for them). Raises SettingsError for a server that cannot be used, or cannot be started."""
    with refusing("vllm", SamplerError):
        check_wire(settings.vllm)
        if settings.vllm.urls:
            return [attach_server(url, settings) for url in settings.vllm.urls]
        return start_servers(settings, replied)


def check_wire(settings: VllmSettings) -> None:
    """Raises ValueError for a wire that this machine does not have, and a directory that cannot be written to."""
    if settings.weight_sync != "directory" and not torch.cuda.is_available():
        raise ValueError(
            f"weight_sync = {settings.weight_sync!r} sends weights from the memory of a GPU, and PyTorch sees none "
            "here; use 'directory'"
        )
    if settings.directory is not None:
        path, name = Path(settings.directory).expanduser(), f"directory = {settings.directory!r}"
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"{name} is no directory, and cannot be made: {error}") from error
        if not os.access(path, os.W_OK):
            raise ValueError(f"{name} cannot be written to")


def attach_server(url: str, settings: Settings) -> Server:
    """A server that runs already. Raises SamplerError or ValueError for one that cannot be used."""
    server = Server(url, os.environ.get(KEY), deadlines(settings.vllm), settings.sampling.max_num_seqs)
    server.call("GET", "/health")
    root = server.model()["root"]
    server.version()
    config = server.config()
    if GENERATE not in server.call("GET", "/openapi.json")["paths"]:
        raise ValueError(f"{url} has no {GENERATE}: {HOW_TO_START}")
    theirs, ours = (_read_config(path) for path in (root, resolve_model(settings.model.path)))
    if settings.model.lora.r:
        check_adapters(server, settings.model.lora.r)
    differing = [
        f"{n} {theirs[n]} (not {ours[n]})" for n in SIZES if n in theirs and n in ours and theirs[n] != ours[n]
    ]
    if differing:
        raise ValueError(f"{url} serves another model than model.path: {root} has {', '.join(differing[:3])}")
    if config["parallel_config"].get("worker_extension_cls") == EXTENDED:
        server.reloading = StartedServer.reloading  # `lagrpo serve` started it
    elif config["device_config"]["device"] == "cpu" and ours.get("tie_word_embeddings"):
        raise ValueError(
            f"{url} would go on with the head of its first weights: on a CPU vLLM does not renew the head of a model "
            "that shares it with the embedding, as model.path does. Start the server with `lagrpo serve`, which adds "
            "what is missing"
        )
    return server


def start_servers(settings: Settings, replied: int) -> list[Server]:
    """Servers of our own, on their way up. Raises ValueError if they cannot be started."""
    vllm, sampling, folder = settings.vllm, settings.sampling, Path(settings.run.directory)
    with refusing("vllm.python"):
        python = check_python(vllm.python)
    check_options(options := split_options(vllm.options), OURS)
    model = resolve_model(settings.model.path)
    dtype, _ = pick_dtype(settings.model.dtype, pick_device(settings.model.device))
    sizes = _longest(settings, replied), sampling.max_num_seqs
    launch = Launch(python, model, dtype, *sizes, vllm.weight_sync, options, lora=adapters_of(settings))
    with refusing("run.directory"):
        folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f".vllm-{os.getpid()}-{secrets.token_hex(4)}.log" for _ in range(vllm.servers)]
    for path in paths:
        logger.info("starting a vLLM server, for at most %g s (log: %s)", vllm.start_deadline, path)
    return [StartedServer(launch, deadlines(vllm), path) for path in paths]


def adapters_of(settings: Settings) -> tuple[int, int]:
    """The largest rank of adapters, and how many are in use at a time; 0 for none."""
    r = settings.model.lora.r
    return (rank_of_server(r), SPANNED if settings.vllm.in_flight == "span" else 1) if r else (0, 0)


def check_adapters(server: Server, r: int) -> None:
    """Raises ValueError for a server that takes no adapters of rank r."""
    how = f"start it with `lagrpo serve MODEL --lora-rank {rank_of_server(r)}`"
    if "/v1/load_lora_adapter" not in server.call("GET", "/openapi.json")["paths"]:
        raise ValueError(f"{server} takes no adapters, which model.lora trains: {how}")
    limit = (server.config().get("lora_config") or {}).get("max_lora_rank", 0)
    if limit < r:
        raise ValueError(f"{server} takes adapters of at most rank {limit}, and model.lora.r is {r}: {how}")
    if (label := server.version()) != AS_STARTED:
        raise ValueError(
            f"{server} serves weights that a run has synced to it (labeled {label}), and adapters are for those of "
            f"model.path: restart it, or {how}"
        )


def build_vllm(settings: Settings, policy: Policy, servers: Sequence[Server], replied: int = 0) -> VllmSampler:
    """The sampler over the servers, once they are ready. Raises SettingsError where one does not get ready, or serves
    another model or shorter sequences."""
    vllm, s, chat = settings.vllm, settings.sampling, policy.chat
    with refusing("vllm", SamplerError):
        for server in servers:
            server.wait(vllm.start_deadline)
            check_length(server, _longest(settings, replied))
            check_tokenizer(server, lambda text: chat.tokenizer(text, add_special_tokens=False)["input_ids"])
        dtype = max((read_dtype(server) for server in servers), key=COARSENESS.index)
    fleet = Fleet(servers, vllm.failures)
    if settings.model.lora.r:
        weights = AdapterSync(fleet, policy.model.lm, vllm.directory, dtype)
    else:
        weights = WeightSync(fleet, WIRES[vllm.weight_sync](), Directories(vllm.directory), dtype)
    generation = Generation(settings.run.seed, s.max_tokens, s.temperature, chat.eos_ids, s.max_num_seqs, chat.decode)
    return VllmSampler(fleet, generation, weights, vllm.in_flight)


def check_length(server: Server, longest: int) -> None:
    """Raises ValueError for a server that takes shorter sequences than the settings allow."""
    limit = server.model()["max_model_len"]
    if limit < longest:
        raise ValueError(
            f"{server} takes sequences of at most {limit} tokens; sampling.max_prompt_tokens + sampling.max_tokens + 1 "
            f"is {longest} (with an environment + environment.max_tokens): lower them, or start it with a larger "
            "--max-model-len"
        )


def check_tokenizer(server: Server, tokenize: Callable[[str], list[int]]) -> None:
    """Raises RefusedError for a server with another tokenizer, so another model. A server without a tokenizer has
    nothing to compare."""
    for text in TEXTS:
        try:
            theirs = server.tokenize(text)
        except RefusedError:
            return
        if theirs != tokenize(text):
            raise RefusedError(
                f"{server} tokenizes {text!r} otherwise than model.path does: it serves another model "
                f"({server.model()['root']})"
            )


def read_dtype(server: Server) -> torch.dtype:
    """The dtype that a server computes in. Raises ValueError for one that we do not know."""
    name = server.config()["model_config"]["dtype"].removeprefix("torch.")
    dtypes = {str(dtype).removeprefix("torch."): dtype for dtype in COARSENESS}
    if name not in dtypes:
        raise ValueError(f"{server} computes in {name}; lagrpo can send weights in {', '.join(dtypes)}")
    return dtypes[name]


def _longest(settings: Settings, replied: int) -> int:
    """Tokens of the longest sequence; vLLM wants room for one more."""
    s = settings.sampling
    longest = settings.longest if settings.evaluation.sampler == "vllm" else s.max_prompt_tokens + s.max_tokens
    return 1 + longest + replied


def _read_config(path: str) -> dict[str, Any]:
    """The config.json of a model directory; empty if it cannot be read from here."""
    file = Path(path).expanduser() / "config.json"
    return json.loads(file.read_text()) if file.is_file() else {}
