"""The settings of vLLM servers: section vllm."""

from __future__ import annotations

from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from lagrpo.settings.options import split_options
from lagrpo.settings.section import Section


class VllmSettings(Section):
    urls: tuple[str, ...] = ()
    """Running servers (http://host:port), with the API key in $LAGRPO_VLLM_API_KEY. Without any, the run starts its
    own."""
    servers: int = Field(default=1, ge=1)
    """How many servers to start."""
    python: str = ".venv-vllm/bin/python"
    """Python of the environment with vLLM that starts servers; `make vllm-env` makes one."""
    options: tuple[str, ...] = ()
    """Further options of `vllm serve` for started servers; none that hold a secret."""
    weight_sync: Literal["directory", "nccl", "ipc"] = "directory"
    """How weights travel: through a directory that both sides see, by NCCL between GPUs, or by CUDA IPC on one GPU."""
    directory: str | None = None
    """Parent of that directory; /dev/shm by default. Servers on other hosts need a shared file system."""
    in_flight: Literal["finish", "span", "regenerate"] = "finish"
    """What a weight sync does with unfinished completions (schedule lagged): finish them first, continue them with the
    new weights so that they span versions, or generate them again."""
    tolerance: float | None = Field(default=None, gt=0)
    """Largest mean |learner's - server's log-prob| in nats per token at temperature 1; by default the dtype's."""
    failures: int = Field(default=3, ge=0)
    """How often the run restarts servers before it gives up."""
    start_deadline: float = Field(default=600.0, gt=0)
    """Seconds until a server must be ready."""
    request_deadline: float = Field(default=600.0, gt=0)
    """Seconds for the completions of one group."""
    sync_deadline: float = Field(default=300.0, gt=0)
    """Seconds for a server to load weights."""
    control_deadline: float = Field(default=30.0, gt=0)
    """Seconds for any other answer."""

    @model_validator(mode="after")
    def _check_options(self) -> VllmSettings:
        split_options(self.options)
        return self

    @model_validator(mode="after")
    def _check_urls(self) -> VllmSettings:
        for url in self.urls:
            parts = urlsplit(url)
            if "@" in parts.netloc:
                has = "has a user name or a password, which would be on the disk"
                raise ValueError(f"urls: {url!r} {has}; the API key goes into $LAGRPO_VLLM_API_KEY")
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ValueError(f"urls: {url!r} is no URL; write http://host:port")
            _ = parts.port  # raises ValueError for a number that is no port
            if parts.path.strip("/") or parts.query:
                raise ValueError(f"urls: {url!r} has a path; write http://host:port alone")
        if len(set(self.urls)) < len(self.urls):
            raise ValueError("urls: the same server is there twice")
        if self.urls and self.servers > 1:
            raise ValueError("servers is how many to start, but urls names servers that run already: set one of them")
        return self
