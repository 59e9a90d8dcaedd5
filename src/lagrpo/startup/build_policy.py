"""From settings to the policy."""

from __future__ import annotations

import logging
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import torch

from lagrpo.cpu.library import NoKernels
from lagrpo.distributed.ranks import Ranks
from lagrpo.errors import SettingsError, as_settings_error
from lagrpo.model.backend import choose_backend, chosen_kernels, pick_device, pick_dtype
from lagrpo.model.chat import Chat
from lagrpo.model.embedded import resolve_model
from lagrpo.model.loading import (
    check_context,
    check_files,
    load_config,
    load_policy,
    open_policy,
    outline_policy,
    quiet,
)
from lagrpo.model.lora import Lora, find_base
from lagrpo.model.model import Policy, fingerprint
from lagrpo.model.stored import StoredWeights
from lagrpo.settings.sections import ModelSettings
from lagrpo.startup.checks import chat_template

logger = logging.getLogger("lagrpo")


def build_policy(
    model: ModelSettings,
    tau: float,
    longest: int,
    seed: int = 0,
    *,
    is_sharded: bool = False,
    teaches: Chat | None = None,
) -> Policy:
    """Returns the policy at temperature tau, for sequences of `longest` tokens.

    `seed` keys the start of adapters. With `is_sharded` the weights stay in their files until the
    trainer shards the policy, if the files allow it. With `teaches` it is the teacher of a policy
    with this chat, loss.reference. Raises SettingsError.
    """
    setting = "model.path" if teaches is None else "loss.reference"
    device = pick_device()
    dtype = getattr(torch, pick_dtype(model.dtype, device)[0])
    with as_settings_error("LAGRPO_KERNELS", NoKernels):
        backend = choose_backend(chosen_kernels(), device, dtype)
    template = chat_template(model)
    lora = lora_of(model, seed)
    with loading(model.path, setting):
        path = resolve_model(model.path)
        check_context(load_config(find_base(path)), longest)
        if is_sharded:
            policy = open_policy(
                path,
                dtype,
                backend,
                tau,
                chat_template=template,
                template_kwargs=model.chat_template_kwargs,
                teaches=teaches,
            )
            if policy is not None:
                return policy
        policy = load_policy(
            path,
            dtype,
            device,
            tau,
            chat_template=template,
            backend=backend,
            lora=lora,
            template_kwargs=model.chat_template_kwargs,
            teaches=teaches,
        )
    if is_sharded:
        logger.warning(
            "%s: every rank has loaded the whole model, because its files have other names "
            "than the model's weights; a copy by save_pretrained of transformers avoids that",
            setting,
        )
    return policy


def build_outline(model: ModelSettings, longest: int) -> Policy:
    """Returns the policy without its weights, for sequences of `longest` tokens.

    Raises SettingsError as `build_policy`, except for what only the numbers of the weights show.
    """
    dtype = getattr(torch, pick_dtype(model.dtype, pick_device())[0])
    template = chat_template(model)
    with loading(model.path):
        path = resolve_model(model.path)
        check_context(load_config(path), longest)
        return outline_policy(path, dtype, template, model.chat_template_kwargs)


def load_prompt_chat(model: ModelSettings) -> Chat:
    """Returns the chat of a model for prompts alone: it does not know what ends a completion.

    Loads no weights. Raises SettingsError.
    """
    with loading(model.path):
        path = resolve_model(model.path)
        tokenizer = check_files(path)
        vocabulary = load_config(path).get_text_config().vocab_size
    template = chat_template(model)
    if template is not None:
        tokenizer.chat_template = template
    return Chat(tokenizer, vocabulary, frozenset(), model.chat_template_kwargs)


def with_start(policy: Policy, started: str | None, ranks: Ranks) -> Policy:
    """Returns the policy with the time at which the run began, for its chat template.

    The time is `started`, or now, as rank 0 has it. Collective.
    """
    now = datetime.now(UTC).isoformat(timespec="seconds")
    start = datetime.fromisoformat(ranks.on_rank0(lambda: started or now))
    return replace(policy, chat=replace(policy.chat, started=start))


def lora_of(model: ModelSettings, seed: int = 0) -> Lora | None:
    """Returns the adapters that the settings ask for; None for full training."""
    if not model.lora_r:
        return None
    return Lora(model.lora_r, model.lora_alpha, model.lora_target_modules, seed)


@contextmanager
def loading(name: str, setting: str = "model.path") -> Generator[None]:
    """Turns errors of the body, which reads the model of a setting, into a SettingsError.

    transformers prints only errors meanwhile.
    """
    try:
        with quiet():
            yield
    except (OSError, ValueError) as error:
        if isinstance(error, SettingsError):
            raise
        origin = ""
        if not Path(name).expanduser().is_dir():
            origin = " (not a directory here, so from the hub)"
        reason = str(error).partition("\n")[0]
        raise SettingsError(
            f"{setting} = {name!r}{origin}: the model cannot be loaded: {reason}"
        ) from error


def check_same_model(ranks: Ranks, policy: Policy, setting: str = "model.path") -> None:
    """Raises SettingsError if another rank has another model. Collective."""
    weights = policy.all_weights
    if isinstance(weights, StoredWeights):
        digest = weights.digest_first_rows()
    else:
        digest = fingerprint(weights)
    digests = ranks.gather(digest)
    for rank, other in enumerate(digests):
        if other != digests[0]:
            raise SettingsError(f"{setting}: model weights differ between ranks 0 and {rank}")
