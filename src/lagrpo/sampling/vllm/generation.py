"""One group by one server: what is asked, and what becomes of the answer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lagrpo.rng import generator
from lagrpo.sampling.base import Request
from lagrpo.sampling.vllm.fleet import Served
from lagrpo.sampling.vllm.server import SamplerError, Server, UnreachableError
from lagrpo.types import Completion, Group, Outcome

NO_LOGPROB = -9000.0  # vLLM writes -9999 where a log-prob is -inf


class AbortedError(SamplerError):
    """A server broke off a group because it was told to."""


@dataclass(frozen=True, slots=True)
class Generated:
    """One completion as the server returned it."""

    token_ids: list[int]
    logp: list[float]
    """Of each token, nats; NaN where the server gave none."""
    spans: list[tuple[str, int, int]]
    """(label of the weights, first token, end)."""
    end: str
    """Why it ended: "stop", "length", "abort" …"""

    @staticmethod
    def of(choice: Mapping[str, Any]) -> Generated:
        """From vLLM's JSON."""
        tokens, content = choice["token_ids"] or [], (choice["logprobs"] or {}).get("content") or []
        given = {n: entry["logprob"] for n, entry in enumerate(content) if entry["token_id"] == tokens[n]}
        logp = [math.nan if (p := given.get(n)) is None or p < NO_LOGPROB else p for n in range(len(tokens))]
        spans = [(span["version"], span["start"], span["end"]) for span in choice["weight_versions"] or []]
        return Generated(tokens, logp, spans, choice["finish_reason"])


@dataclass(frozen=True, slots=True)
class Generation:
    """How completions are generated."""

    seed: int
    """First part of the address of every random number."""
    max_tokens: int
    """Longest completion."""
    tau: float
    """Sampling temperature."""
    eos_ids: Sequence[int]
    """Token ids that end a completion."""
    max_num_seqs: int
    """Completions under way at each server."""
    decode: Callable[[Sequence[int]], str]
    """Token ids to text."""
    purpose: str = "sample"
    """Second part of the address of every random number."""

    def generate(self, server: Server, request: Request, G: int, served: Served, longest: int | None = None) -> Group:
        """The group of a request, its completions of at most `longest` tokens.

        Raises:
            AbortedError: the server was told to abort. UnreachableError: it does not answer, or serves weights of
            somebody else. RefusedError: it said no.
        """
        ids, max_tokens = request.prompt.token_ids, min(self.max_tokens, longest or self.max_tokens)
        seed = int(generator(self.seed, self.purpose, *request.address).random_raw(1)[0]) >> 2
        choices = server.generate(ids, G, seed, max_tokens, self.tau, sorted(self.eos_ids), served.label)
        answers = [Generated.of(choice) for choice in choices]
        if any(answer.end == "abort" for answer in answers):
            raise AbortedError(f"{server} broke off a group")
        if foreign := {label for answer in answers for label, _, _ in answer.spans if served.version_of(label) < 0}:
            raise UnreachableError(
                f"{server} generated with weights that are not of this run (labeled {', '.join(sorted(foreign))}): it "
                "was restarted, or another run syncs its weights to it"
            )
        return Group(request.prompt, tuple(self.read(answer, served) for answer in answers), request.epoch)

    def read(self, answer: Generated, served: Served) -> Completion:
        """The completion in a server's answer; it has failed if it cannot be used."""
        versions = torch.full((len(answer.token_ids),), -1)
        for label, start, end in answer.spans:
            versions[start:end] = served.version_of(label)
        fault = _find_fault(answer, versions)
        return Completion(
            token_ids=torch.tensor(answer.token_ids, dtype=torch.long),
            logp_alpha=torch.tensor(answer.logp, dtype=torch.float32),
            versions=versions,
            finished=bool(answer.token_ids) and answer.token_ids[-1] in self.eos_ids,
            text=self.decode(answer.token_ids),
            outcome=Outcome.failed(fault) if fault else None,
        )


def _find_fault(answer: Generated, versions: torch.Tensor) -> str | None:
    """Why a completion cannot be used; None if it can."""
    if not answer.token_ids or answer.end not in ("stop", "length"):
        return f"the server ended it with {answer.end!r} after {len(answer.token_ids)} tokens"
    if bool((versions < 0).any()):
        return "the server did not say which weights generated every token"
    bad = next((n for n, p in enumerate(answer.logp) if not math.isfinite(p)), None)
    return None if bad is None else f"the server gave no finite log-prob of token {bad}"
