"""From settings to vLLM servers: those that run already are looked at, others are started; and the sampler over them.

What is wrong with a server shows here, before a model is loaded where that is possible: nobody there, a wrong API key,
a server without the endpoints that weight syncs need, another model.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from lagrpo.backends.hardware import pick_device, pick_dtype
from lagrpo.errors import refusing
from lagrpo.policy.embedded import resolve_model
from lagrpo.policy.model import Policy
from lagrpo.sampling.vllm.process import Launch, StartedServer, expanded, missing
from lagrpo.sampling.vllm.sampler import Generation, VllmSampler, refuse_mismatch
from lagrpo.sampling.vllm.server import GENERATE, HOW_TO_START, KEY, Deadlines, SamplerError, Server
from lagrpo.sampling.vllm.wire import WIRES, Directories
from lagrpo.settings.schema import Settings, VllmSettings

OURS = {"--model", "--host", "--port", "--api-key", "--dtype", "--logprobs-mode", "--generation-config"}
COARSENESS = [torch.float32, torch.float16, torch.bfloat16]


def deadlines(settings: VllmSettings) -> Deadlines:
    return Deadlines(
        start=settings.start_deadline,
        request=settings.request_deadline,
        sync=settings.sync_deadline,
        control=settings.control_deadline,
    )


def open_servers(settings: Settings) -> list[Server]:
    """The servers of the settings: those that run are reachable, accept our key and have the endpoints; those that are
    started here are on their way (`build_vllm` waits for them).

    Raises:
        SettingsError: a server that cannot be used, or cannot be started.
    """
    with refusing("vllm", SamplerError):
        check_weight_sync(settings.vllm)
        if settings.vllm.urls:
            return [attach_server(url, settings) for url in settings.vllm.urls]
        return start_servers(settings)


def check_weight_sync(settings: VllmSettings) -> None:
    """Raises ValueError for a wire that this machine does not have, and a directory that cannot be written to."""
    if settings.weight_sync != "directory" and not torch.cuda.is_available():
        raise ValueError(
            f"weight_sync = {settings.weight_sync!r} sends weights from the memory of a GPU, and PyTorch sees none "
            "here; use 'directory'"
        )
    if settings.directory is not None:
        path = Path(settings.directory).expanduser()
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"directory = {settings.directory!r} is no directory, and cannot be made: {error}"
            ) from error
        if not os.access(path, os.W_OK):
            raise ValueError(f"directory = {settings.directory!r} cannot be written to")


def attach_server(url: str, settings: Settings) -> Server:
    """A server that runs already. Raises SamplerError for one that cannot be used."""
    server = Server(url, os.environ.get(KEY), deadlines(settings.vllm), settings.sampling.max_num_seqs)
    server.call("GET", "/health")
    root = server.model()["root"]
    server.version()
    server.facts()
    paths = server.call("GET", "/openapi.json")["paths"]
    if GENERATE not in paths:
        raise ValueError(f"{url} has no {GENERATE}: {HOW_TO_START}")
    theirs, ours = (_config(path) for path in (root, resolve_model(settings.model.path)))
    differing = [name for name in theirs if name in ours and theirs[name] != ours[name]]
    if differing:
        raise ValueError(
            f"{url} serves another model than model.path: {root} has "
            + ", ".join(f"{name} {theirs[name]} (not {ours[name]})" for name in differing[:3])
        )
    return server


def start_servers(settings: Settings) -> list[Server]:
    """Servers of our own, on their way up. Raises ValueError where they cannot be started."""
    vllm, sampling = settings.vllm, settings.sampling
    if problem := missing(vllm.python):
        raise ValueError(f"python: {problem}")
    launch = Launch(
        python=str(Path(vllm.python).expanduser().absolute()),
        model=resolve_model(settings.model.path),
        dtype=pick_dtype(settings.model.dtype, pick_device(settings.model.device))[0],
        longest=sampling.max_prompt_tokens + sampling.max_tokens + 1,
        max_num_seqs=sampling.max_num_seqs,
        wire=vllm.weight_sync,
        options=expanded(vllm.options),
    )
    if taken := OURS & {word.partition("=")[0] for word in launch.options}:
        raise ValueError(f"options: {', '.join(sorted(taken))} is set by lagrpo itself")
    folder, say = Path(settings.run.directory), choose_say(settings)
    with refusing("run.directory"):
        folder.mkdir(parents=True, exist_ok=True)
    logs = [folder / f".vllm-{os.getpid()}-{secrets.token_hex(4)}.log" for _ in range(vllm.servers)]
    for log in logs:
        say(f"a vLLM server is being started, for at most {vllm.start_deadline:g} s (log: {log})")
    return [StartedServer(launch, deadlines(vllm), log, say) for log in logs]


def build_vllm(settings: Settings, policy: Policy, servers: Sequence[Server]) -> VllmSampler:
    """The sampler over the servers, once they are ready.

    Raises:
        SettingsError: a server did not get ready, or serves another model or shorter sequences.
    """
    sampling, vllm, tokenizer = settings.sampling, settings.vllm, policy.tokenizer
    longest = sampling.max_prompt_tokens + sampling.max_tokens + 1
    with refusing("vllm", SamplerError):
        for server in servers:
            server.wait(vllm.start_deadline)
            served = server.model()
            if served["max_model_len"] < longest:
                raise ValueError(
                    f"{server} takes sequences of at most {served['max_model_len']} tokens; sampling.max_prompt_tokens "
                    f"+ sampling.max_tokens + 1 is {longest}: lower them, or start it with a larger --max-model-len"
                )
            refuse_mismatch(server, lambda text: tokenizer(text, add_special_tokens=False)["input_ids"], served["root"])
        dtype = max((_dtype(server) for server in servers), key=COARSENESS.index)
        directories = Directories(vllm.directory)
    generation = Generation(
        seed=settings.run.seed,
        max_tokens=sampling.max_tokens,
        tau=sampling.temperature,
        eos_ids=sorted(policy.eos_ids),
        max_num_seqs=sampling.max_num_seqs,
        decode=lambda ids: policy.tokenizer.decode(ids, skip_special_tokens=True),
    )
    return VllmSampler(
        servers,
        generation,
        WIRES[vllm.weight_sync](),
        directories,
        in_flight=vllm.in_flight,
        failures=vllm.failures,
        dtype=dtype,
        say=choose_say(settings),
    )


def choose_say(settings: Settings) -> Callable[[str], None]:
    """Prints what happens to the servers, unless the run is to be silent."""
    silent = settings.run.display == "none"
    return (lambda text: None) if silent else (lambda text: print(f"lagrpo: {text}", flush=True))


def _dtype(server: Server) -> torch.dtype:
    """The dtype that a server computes in. Raises ValueError for one that we do not know."""
    name = server.facts()["model_config"]["dtype"].removeprefix("torch.")
    known = {str(dtype).removeprefix("torch."): dtype for dtype in COARSENESS}
    if name not in known:
        raise ValueError(f"{server} computes in {name}; lagrpo syncs {', '.join(known)}")
    return known[name]


def _config(path: str) -> dict[str, Any]:
    """The sizes in the config.json of a model directory; empty for one that cannot be read from here."""
    file = Path(path).expanduser() / "config.json"
    config = json.loads(file.read_text()) if file.is_file() else {}
    names = ("architectures", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
    return {name: config[name] for name in names if name in config}
