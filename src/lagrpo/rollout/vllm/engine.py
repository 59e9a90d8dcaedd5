"""The rollout engine that the loop sees: groups from vLLM servers, in training, in evaluations and over several turns.

One group is one request to whichever server is free. The seed of a completion is a function of its address, so the
server does not matter, up to the rounding of other batch shapes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lagrpo.errors import as_settings_error
from lagrpo.model.model import Policy
from lagrpo.rng import generator
from lagrpo.rollout.base import Item, Request, SamplingParams
from lagrpo.rollout.episodes import Episode, Episodes
from lagrpo.rollout.vllm.client import GroupQueue, Json, SamplerError, VllmClient
from lagrpo.rollout.vllm.server import StartedServer
from lagrpo.rollout.vllm.weights import TRANSFERS, WeightTransfer, WeightUpdate
from lagrpo.settings.schema import Settings
from lagrpo.types import Completion, Group, Outcome

NO_LOGPROB = -9000.0  # vLLM writes -9999 for a log-prob of -inf


def build_engine(
    settings: Settings,
    policy: Policy,
    servers: Sequence[VllmClient],
    episodes: Episodes | None = None,
) -> VllmEngine:
    """The engine over the servers, once they are ready. Raises SettingsError for a server that does not get ready."""
    with as_settings_error("vllm", SamplerError):
        for server in servers:
            if isinstance(server, StartedServer):
                server.wait_until_ready()
        names = [
            server.get_config()["model_config"]["dtype"].removeprefix("torch.")
            for server in servers
        ]
        dtype = max(
            (getattr(torch, name) for name in names), key=lambda dtype: torch.finfo(dtype).eps
        )  # the coarsest
    s, v, lm = settings.rollout, settings.vllm, policy.model.lm
    weights = (
        WeightTransfer(dtype, lm)
        if policy.weights.adapters
        else TRANSFERS[v.weight_transfer](dtype)
    )
    params = SamplingParams("sample", s.temperature, s.max_completion_length, episodes)
    syncs_in_flight = v.on_weight_sync == "continue"
    return VllmEngine(
        servers, weights, policy.chat, params, settings.run.seed, s.max_num_seqs, syncs_in_flight
    )


class VllmEngine:
    """Samples from vLLM servers.

    With `syncs_in_flight`, weights are synced while completions are in flight. These continue with the new weights;
    with adapters each continues with its own.
    """

    def __init__(
        self,
        servers: Sequence[VllmClient],
        weights: WeightTransfer,
        chat: Any,
        params: SamplingParams,
        seed: int = 0,
        max_num_seqs: int = 256,
        syncs_in_flight: bool = False,
    ) -> None:
        self.servers, self.weights, self.chat, self.params, self.seed = (
            list(servers),
            weights,
            chat,
            params,
            seed,
        )
        self.syncs_in_flight = syncs_in_flight
        self._groups = GroupQueue(self.servers, weights.load_current, max_num_seqs)
        self._synced: WeightUpdate | None = (
            None  # what training samples with; an evaluation may load others
        )

    @property
    def version(self) -> int:
        """The version that all servers report; -1 if one reports other weights."""
        versions = {
            self.weights.version_of(label) for label in self._groups.ask_all(VllmClient.get_label)
        }
        return versions.pop() if len(versions) == 1 else -1

    def sync_weights(self, weights: Mapping[str, Tensor], version: int) -> dict[str, float]:
        """Load π_version into all servers. Raises SamplerError if a server cannot load it."""
        update = self.weights.pack(weights, version)
        self._load(update)
        self._synced = update
        self.weights.drop_others(self.servers, update)
        return {}

    @contextmanager
    def temporary_weights(
        self, weights: Mapping[str, Tensor], version: int, back: bool
    ) -> Iterator[None]:
        """Inside, the servers have π_version, for an evaluation. Afterwards they have the weights of the last sync
        again if `back` says so."""
        update = self.weights.pack(weights, version)
        self._synced = self._synced if back else update
        if update is not self.weights.current:
            self._load(update)
        try:
            yield
        finally:
            if self._synced not in (None, self.weights.current):
                self._load(self._synced)
        self.weights.drop_others(self.servers, self.weights.current)

    def current_weights(self) -> tuple[int, Mapping[str, Tensor]]:
        """The version of the last sync and its weights, in the servers' dtype."""
        assert self._synced is not None, "no weights have been synced yet"
        return self._synced.version, self.weights.read(self._synced)

    def sample(
        self, requests: Sequence[Request], G: int, params: SamplingParams | None = None
    ) -> Iterator[tuple[Request, Group]]:
        """One group for each request, as they end. The servers start at once. An evaluation has its own `params`."""
        sample = partial(self._sample, G=G, params=params or self.params)
        return _as_they_end(
            {self._groups.submit(partial(sample, request), G): request for request in requests}
        )

    def generate_on_server(
        self, number: int, requests: Sequence[Request], G: int, max_tokens: int
    ) -> list[Group]:
        """Groups by one server, for the weight-sync check."""
        params = replace(
            self.params, max_tokens=min(max_tokens, self.params.max_tokens), episodes=None
        )
        ask = partial(self._groups.ask, self.servers[number])
        return [ask(partial(self._sample, request, G=G, params=params)) for request in requests]

    def scores(self, items: Sequence[Item]) -> list[list[list[float]]]:
        """log-probs at temperature 1 by every server: [server][item][token], nats."""
        return self._groups.ask_all(lambda server: [server.get_logprobs(*item) for item in items])

    def pop_metrics(self) -> dict[str, float]:
        return self._groups.pop_metrics()

    def close(self) -> None:
        self._groups.close()
        self.weights.close(self.servers)

    def _load(self, update: WeightUpdate) -> None:
        """Load a version into all servers."""
        with self._groups.held() if self.weights.pauses else nullcontext():
            self.weights.send(self._groups, update)
            self.weights.current = update

    def _sample(
        self, request: Request, server: VllmClient, G: int, params: SamplingParams
    ) -> Group:
        """The group of a request, by one server."""
        completions = self._ask(server, request, (), G, params, params.max_tokens)
        if params.episodes is not None:
            with ThreadPoolExecutor(G) as pool:
                converse = partial(self._converse, server, request, params, params.episodes)
                completions = list(pool.map(converse, range(G), completions))
        return Group(request.prompt, tuple(completions), request.epoch)

    def _converse(
        self,
        server: VllmClient,
        request: Request,
        params: SamplingParams,
        episodes: Episodes,
        g: int,
        first: Completion,
    ) -> Completion:
        """A completion of several turns, after its first turn. Each later turn is a request with everything so far as
        its prompt, which the server finds in its cache of prefixes. A turn that cannot be used fails the completion."""
        episode, turns = (
            Episode(episodes, request.prompt, (self.seed, params.purpose, *request.address, g)),
            [first],
        )
        while turns[-1].outcome is None:
            episode.end_turn(turns[-1].token_ids.tolist())
            reply = episode.take()
            if episode.outcome is not None:
                break
            nothing = torch.full((len(reply),), math.nan), torch.full((len(reply),), -1)
            not_sampled = torch.zeros(len(reply), dtype=torch.bool)
            turns.append(
                Completion(
                    torch.tensor(reply, dtype=torch.long), *nothing, False, "", sampled=not_sampled
                )
            )
            behind = torch.cat([turn.token_ids for turn in turns]).tolist()
            left = params.max_tokens - sum(turn.length for turn in turns)
            turns += self._ask(server, request, behind, 1, params, left, (g, len(turns)))
        names = ("token_ids", "logp_alpha", "versions", "sampled")
        ids, logp, versions, sampled = (
            torch.cat([getattr(turn, name) for turn in turns]) for name in names
        )
        text, outcome = self.chat.decode(ids.tolist()), turns[-1].outcome or episode.outcome
        return Completion(
            ids, logp, versions, episode.finished, text, outcome, sampled, tuple(episode.turns)
        )

    def _ask(
        self,
        server: VllmClient,
        request: Request,
        behind: Sequence[int],
        n: int,
        params: SamplingParams,
        max_tokens: int,
        turn: tuple[int, ...] = (),
    ) -> list[Completion]:
        """n completions of a request's prompt and the tokens `behind` it. `turn` keys the seeds of later turns."""
        seed = (
            int(generator(self.seed, params.purpose, *request.address, *turn).random_raw(1)[0]) >> 2
        )
        ids, stop = [*request.prompt.token_ids, *behind], sorted(self.chat.eos_ids)
        with self.weights.using() as label:
            answers = server.generate(ids, n, seed, max_tokens, params.tau, stop, label)
        return [self._read(answer, server) for answer in answers]

    def _read(self, answer: Json, server: VllmClient) -> Completion:
        """The completion in a server's answer; it has failed if it cannot be used."""
        token_ids, entries = (
            answer["token_ids"] or [],
            (answer["logprobs"] or {}).get("content") or [],
        )
        logp, versions = torch.full((len(token_ids),), math.nan), torch.full((len(token_ids),), -1)
        logp[: len(entries)] = torch.tensor([entry["logprob"] for entry in entries])
        for span in answer["weight_versions"] or []:
            versions[span["start"] : span["end"]] = version = self.weights.version_of(
                span["version"]
            )
            if version < 0:
                what = f"sampled with weights labeled {span['version']}: it was restarted, or another run uses it"
                raise SamplerError(f"{server} {what}. Resume with a server that only this run uses")
        fault, end = None, answer["finish_reason"]
        if not token_ids or end not in ("stop", "length"):
            fault = f"the server stopped it ({end!r}) after {len(token_ids)} tokens"
        elif bool((versions < 0).any()):
            fault = "the server did not report the weight version of every token"
        elif not bool((logp > NO_LOGPROB).all()):
            fault = "the server returned a log-prob that is not finite"
        ids, finished = (
            torch.tensor(token_ids, dtype=torch.long),
            not self.chat.eos_ids.isdisjoint(token_ids[-1:]),
        )
        outcome = Outcome.failed(fault) if fault else None
        return Completion(ids, logp, versions, finished, self.chat.decode(token_ids), outcome)


def _as_they_end(futures: Mapping[Future[Group], Request]) -> Iterator[tuple[Request, Group]]:
    try:
        for future in as_completed(futures):
            yield futures[future], future.result()
    finally:
        for future in futures:
            future.cancel()
