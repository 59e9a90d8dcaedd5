"""The settings of vLLM servers: section vllm."""

from __future__ import annotations

from typing import Literal
from urllib.parse import urlsplit

from pydantic import model_validator

from lagrpo.settings.options import split_options
from lagrpo.settings.section import Section


class VllmSettings(Section):
    urls: tuple[str, ...] = ()
    """Running servers (http://host:port), with the API key in $LAGRPO_VLLM_API_KEY. Without any, the run starts one."""
    gpus: tuple[int, ...] = ()
    """GPUs of a started server; all by default."""
    server_args: tuple[str, ...] = ()
    """Further options of `vllm serve` for a started server; none that hold a secret."""
    weight_transfer: Literal["directory", "nccl"] = "directory"
    """How weights travel: through a directory that both sides see ($LAGRPO_TRANSFER_DIR, /dev/shm), or by NCCL."""
    on_weight_sync: Literal["finish", "continue", "restart"] = "finish"
    """What a weight sync does with unfinished completions (schedule lagged): finish them first, continue them with the
    new weights so that they span versions, or generate them again."""

    @model_validator(mode="after")
    def _check_options(self) -> VllmSettings:
        split_options(self.server_args)
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
        if self.urls and (self.gpus or self.server_args):
            raise ValueError(
                "gpus and server_args are for a server that the run starts, and urls names servers that run"
            )
        return self
