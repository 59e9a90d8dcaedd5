"""lagrpo's side of a comparison of samplers: the local engine, one batch per request.

    python benchmarks/ours_sampler.py REQUEST.json

The request: `model` (directory), `prompts` (work.write_prompts), `max_tokens`. No token ends a
completion, so each has `max_tokens` tokens.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import lagrpo  # noqa: F401 - before PyTorch, as on the command line: it says how threads wait

# isort: split
import torch
from wire import Wire
from work import SEED, read_prompts

from lagrpo.model.model import Packed, Policy, copy_policy
from lagrpo.rollout.local import LocalSampler
from lagrpo.settings.sections import ModelSettings
from lagrpo.startup.build_policy import build_policy
from lagrpo.types import JsonObject, Prompt, Request


def never_ending(policy: Policy) -> Policy:
    """The policy without the tokens that end a completion."""
    return replace(policy, chat=replace(policy.chat, eos_ids=frozenset()))


def sample(policy: Policy, max_tokens: int, prompts: list[Prompt], G: int) -> JsonObject:
    """Samples G completions of each prompt at once. Returns seconds and completion tokens."""
    sampler = LocalSampler(policy, SEED, max_tokens, len(prompts) * G)
    started = time.perf_counter()
    requests = [Request(1, 0, prompt) for prompt in prompts]
    groups = [group for _, group in sampler.sample(requests, G)]
    seconds = time.perf_counter() - started
    completions = [completion for group in groups for completion in group.completions]
    return {
        "seconds": seconds,
        "sampled": sum(len(completion.token_ids) for completion in completions),
    }


@torch.no_grad()
def score(policy: Policy, completions: list[JsonObject]) -> JsonObject:
    """Log-probs of given tokens under the policy: [{prompt, token_ids}] -> [[nats]]."""
    logp = []
    for completion in completions:
        token_ids = torch.tensor(completion["token_ids"])  # [T]
        packed = Packed.build([(completion["prompt"], [token_ids])])
        logp.append(policy.logp(packed).tolist())
    return {"logp": logp}


def main() -> None:
    wire = Wire()
    request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    # At temperature 1. The last number is only checked against the context of the model.
    policy = build_policy(ModelSettings(path=request["model"]), 1.0, 1)
    rows = read_prompts(Path(request["prompts"]))
    prompts = [
        policy.chat.tokenize(Prompt(row["key"], tuple(row["messages"]), row["answer"]))
        for row in rows
    ]
    # A copy, as a run's sampler has: `score` stays with the original.
    sampling_policy = copy_policy(never_ending(policy))
    wire.reply(
        threads=torch.get_num_threads(), prompt_ids=[list(prompt.token_ids) for prompt in prompts]
    )
    while True:
        message = wire.request()
        if message["do"] == "score":
            wire.reply(**score(policy, message["completions"]))
        else:
            first = message["first"]
            batch = prompts[first : first + message["prompts"]]
            wire.reply(**sample(sampling_policy, request["max_tokens"], batch, message["G"]))


if __name__ == "__main__":
    main()
